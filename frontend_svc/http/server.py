"""The HTTP server in the frontend's own event loop, without signal handlers of its own.

Headers are bounded, and a connection whose peer takes nothing is dropped by the operating system. Belongs to one event
loop; what it serves is its owner's.
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shared.errors import StartupError
from shared.rpc.server import bind_failure, join_address

MAX_HEADER_BYTES = 64 * 1024
# How long a connection may wait for its next request.
KEEP_ALIVE_SECONDS = 30
STARTUP_POLL_SECONDS = 0.005


class _Server(uvicorn.Server):
    """Leaves the process's signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _protocol(send_timeout: float) -> type[HttpToolsProtocol]:
    """The protocol of a connection; nothing that is sent waits longer than the timeout for its peer."""

    class Protocol(HttpToolsProtocol):
        """One connection. The application finds the transport in its scope's state."""

        _header_bytes: int | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.app_state = {**self.app_state, "transport": transport}
            sock = transport.get_extra_info("socket")
            if sock is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(send_timeout * 1_000))

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._header_bytes = 0

        def on_headers_complete(self) -> None:
            self._header_bytes = None
            super().on_headers_complete()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._header_bytes is not None:
                self._header_bytes += len(data)
                if self._header_bytes > MAX_HEADER_BYTES:
                    self.transport.abort()

    return Protocol


@dataclass(frozen=True, slots=True)
class HttpServer:
    """A running server."""

    host: str
    port: int
    server: uvicorn.Server
    task: asyncio.Task[None]

    @property
    def address(self) -> str:
        """Where clients find it."""
        return join_address(self.host, self.port)

    async def stop(self) -> None:
        """Takes no new connections, lets running requests go on for a moment, then ends them."""
        self.server.should_exit = True
        await self.task


async def start_http(host: str, port: int, app: ASGIApp, *, send_timeout: float, grace: int) -> HttpServer:
    """Serves an application; port 0 takes a free one. `grace`: seconds that requests get once the server stops.

    Raises StartupError when the address cannot be had.
    """
    listener = _listen(host, port)
    options: dict[str, Any] = {
        "http": _protocol(send_timeout),
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "log_level": "warning",
        "access_log": False,
        "proxy_headers": False,
        "server_header": False,
        "timeout_keep_alive": KEEP_ALIVE_SECONDS,
        "timeout_graceful_shutdown": grace,
    }
    server = _Server(uvicorn.Config(app, **options))
    task = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]), name="http")
    while not server.started and not task.done():  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(STARTUP_POLL_SECONDS)
    if task.done():
        listener.close()
        task.result()
        raise StartupError(f"the HTTP server on {join_address(host, port)} ended at once")
    return HttpServer(host, listener.getsockname()[1], server, task)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except OSError:
        raise StartupError(bind_failure(host, port)) from None
    return listener
