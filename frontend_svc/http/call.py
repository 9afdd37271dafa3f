"""An HTTP request as a journey knows it. The only place where the journey's Call meets a connection.

The client is gone as soon as its connection is; nobody waits for a write to find out. Invariant: when `run` returns,
the work is over and every callback was called.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from starlette.types import Receive, Scope

from frontend_svc.request import Caller
from frontend_svc.traceparent import valid_traceparent
from shared.errors import InvalidRequestError, TaktError

logger = logging.getLogger(__name__)

TIMEOUT_HEADER = "x-request-timeout"


class HttpCall:
    """Implements Call for one request whose body has been read. All methods belong to the event loop."""

    def __init__(self, scope: Scope, receive: Receive, headers: Mapping[str, str]) -> None:
        """Raises InvalidRequestError for a timeout that is none."""
        arrival = time.monotonic()
        timeout = _timeout(headers.get(TIMEOUT_HEADER))
        self.caller = Caller(
            arrival=arrival,
            deadline=None if timeout is None else arrival + timeout,
            traceparent=valid_traceparent(headers.get("traceparent")),
        )
        self._transport: asyncio.Transport | None = scope.get("state", {}).get("transport")
        self._receive = receive
        self._callbacks: list[Callable[[], None]] = []
        self._is_over = False
        self._work: asyncio.Task[None] | None = None

    async def admitted(self) -> None:
        """Nothing is told: the status is that of the first output."""

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls back once the call is over."""
        if self._is_over:
            callback()
        else:
            self._callbacks.append(callback)

    def end(self, error: TaktError) -> None:
        """Cuts the connection of a client that does not read: no status could reach it."""
        logger.info("cut a connection: %s", error.message)
        if self._transport is not None:
            # The end of the connection ends the work.
            self._transport.abort()
        elif self._work is not None:
            self._work.cancel()

    async def run(self, work: Coroutine[Any, Any, None]) -> bool:
        """Does the work of the call, and ends it as soon as the client leaves; whether it was done to its end."""
        self._work = task = asyncio.ensure_future(work)
        watcher = asyncio.ensure_future(self._left())
        try:
            await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_done = task.done() and not task.cancelled()
            watcher.cancel()
            self._over()
            task.cancel()
            await asyncio.wait({task, watcher})
        if is_done:
            task.result()
        return is_done

    async def _left(self) -> None:
        """Returns when the client has left."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _over(self) -> None:
        self._is_over = True
        for callback in self._callbacks:
            callback()
        self._callbacks.clear()


def _timeout(value: str | None) -> float | None:
    """Seconds that the client gives its request."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidRequestError(f"X-Request-Timeout must be a number of seconds above 0, got {value[:40]!r}")
    return seconds
