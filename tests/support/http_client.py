"""A small HTTP/1.1 client on a socket, so that tests can leave, dawdle and misbehave as they please."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

WAIT_SECONDS = 20.0


@dataclass
class HttpAnswer:
    """A whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The values of a stream; the mark of its end is checked and left out."""
        assert self.headers["content-type"].startswith("text/event-stream"), self.body
        lines = self.body.decode().split("\n\n")
        assert lines.pop() == ""
        assert lines.pop() == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    @property
    def error(self) -> dict[str, Any]:
        """The error, which must have OpenAI's shape."""
        assert set(self.json) == {"error"}
        assert set(self.json["error"]) == {"message", "type", "param", "code"}
        return self.json["error"]


class HttpConnection:
    """One connection to a server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(
        self, path: str, body: Any = None, *, method: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        """Sends a request: JSON of a value, or bytes as they are."""
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        fields = {"host": "test", "content-length": str(len(data)), "content-type": "application/json"}
        fields |= headers or {}
        lines = [f"{method or ('GET' if body is None else 'POST')} {path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        self.writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the next answer."""
        lines = (await self._until(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split()[1]), headers

    async def answer(self) -> HttpAnswer:
        """The next answer to its end."""
        status, headers = await self.head()
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while chunk := await self.chunk():
                body += chunk
        else:
            body = await asyncio.wait_for(self.reader.readexactly(int(headers["content-length"])), WAIT_SECONDS)
        return HttpAnswer(status, headers, body)

    async def chunk(self) -> bytes:
        """The next chunk of a stream; empty at its end."""
        size = int(await self._until(b"\r\n"), 16)
        data = await asyncio.wait_for(self.reader.readexactly(size + 2), WAIT_SECONDS)
        return data[:-2]

    async def _until(self, mark: bytes) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(mark), WAIT_SECONDS)

    async def gone(self) -> bytes:
        """What comes until the server closes."""
        with contextlib.suppress(ConnectionError):
            return await asyncio.wait_for(self.reader.read(), WAIT_SECONDS)
        return b""


@contextlib.asynccontextmanager
async def connection(address: str, limit: int = 2**20) -> AsyncIterator[HttpConnection]:
    """An open connection. `limit`: bytes that are read ahead."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=limit)
    try:
        yield HttpConnection(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def request(
    address: str,
    path: str,
    body: Any = None,
    *,
    method: str | None = None,
    headers: dict[str, str] | None = None,
) -> HttpAnswer:
    """A request on a connection of its own, and its answer."""
    async with connection(address) as opened:
        await opened.send(path, body, method=method, headers=headers)
        return await opened.answer()
