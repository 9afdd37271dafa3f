"""Writes the answer of a request: one JSON value, or a stream of server-sent events. Knows no content.

Invariant: one answer a request, whole. An error before the first event has its own status; behind it, it is an event.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from starlette.types import Send

from frontend_svc.http.errors import dump, error_body, headers_of, status_of
from shared.errors import TaktError

_JSON = b"application/json"
_EVENTS = b"text/event-stream; charset=utf-8"
_DONE = b"data: [DONE]\n\n"


class Reply:
    """One answer."""

    def __init__(self, send: Send, request_id: str) -> None:
        """`request_id` goes back to the client in a header."""
        self._send = send
        self._request_id = request_id
        self._has_begun = False

    async def json(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Answers with a value."""
        await self.content(dump(value), _JSON, status, headers)

    async def content(
        self, body: bytes, content_type: bytes, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Answers with bytes."""
        extra = [(name.encode(), value.encode("latin-1")) for name, value in (headers or {}).items()]
        await self._begin(status, [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *extra])
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def events(self, values: Iterable[Any]) -> None:
        """More of a stream. Returns when the connection takes it."""
        body = b"".join([b"data: %b\n\n" % dump(value) for value in values])
        if not body:
            return
        await self._begin_stream()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end_events(self) -> None:
        """The end of a stream."""
        await self._begin_stream()
        await self._send({"type": "http.response.body", "body": _DONE, "more_body": False})

    async def error(self, error: TaktError) -> None:
        """Answers with an error, or ends a stream with it."""
        if self._has_begun:
            await self.events([error_body(error)])
            await self.end_events()
        else:
            await self.json(error_body(error), status_of(error), headers_of(error))

    async def _begin_stream(self) -> None:
        if not self._has_begun:
            # Proxies must not hold events back.
            headers = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
            await self._begin(200, [(b"content-type", _EVENTS), *headers])

    async def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._has_begun = True
        own = (b"x-request-id", self._request_id.encode("latin-1"))
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, own]})
