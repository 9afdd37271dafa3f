"""A gRPC call as a request knows it, and the count of every call by method and status.

The only place where the journey's Call meets gRPC.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import wraps
from typing import Any, Protocol, TypeVar

import grpc

from frontend_svc.metrics import FrontendMetrics
from frontend_svc.request import Caller
from frontend_svc.traceparent import valid_traceparent
from shared.errors import TaktError
from shared.rpc.status import abort_with

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
S = TypeVar("S", bound="HasMetrics")

_CODE_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}
# How long a status may take to be on its way before its call's task is ended.
END_SECONDS = 1.0
_endings: set[asyncio.Task[None]] = set()


class GrpcCall:
    """Implements Call for one call of gRPC. Made in the call's own task."""

    def __init__(self, context: Context) -> None:
        # Not the loop's clock: uvloop's stands still within a turn and counts milliseconds.
        arrival = time.monotonic()
        remaining = context.time_remaining()
        self.caller = Caller(
            arrival=arrival,
            deadline=None if remaining is None else arrival + remaining,
            traceparent=_traceparent(context),
        )
        self._context = context
        self._task = asyncio.current_task()

    async def admitted(self) -> None:
        """Sends the initial metadata, which stops clients and proxies from retrying by themselves."""
        await self._context.send_initial_metadata(())

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls back once the call is over."""
        done: Any = lambda _: callback()  # noqa: E731 - gRPC's stubs want a protocol with a named argument
        self._context.add_done_callback(done)

    def end(self, error: TaktError) -> None:
        """Sends a status behind what the client has not read, and ends the task that is blocked in a write."""
        ending = asyncio.get_running_loop().create_task(self._end(error))
        _endings.add(ending)
        ending.add_done_callback(_endings.discard)

    async def _end(self, error: TaktError) -> None:
        # The status waits behind the blocked message until the client reads or leaves.
        status = asyncio.ensure_future(_send_status(self._context, error))
        await asyncio.sleep(0)
        if self._task is not None:
            self._task.cancel()
        await status


async def _send_status(context: Context, error: TaktError) -> None:
    try:
        await abort_with(context, error)
    except (grpc.aio.BaseError, asyncio.InvalidStateError):
        # This is how an abort ends, and how it finds that the client is gone.
        logger.debug("ended a call whose client does not read")


def _traceparent(context: Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent" and valid_traceparent(value):
            return valid_traceparent(value)
    return ""


class HasMetrics(Protocol):
    """A servicer whose calls are counted."""

    metrics: FrontendMetrics


def _status_name(error: BaseException | None) -> str:
    if error is None:
        return "OK"
    if isinstance(error, TaktError):
        return _CODE_NAMES[error.code]
    if isinstance(error, asyncio.CancelledError | GeneratorExit | grpc.aio.BaseError):
        return "CANCELLED"
    return "INTERNAL"


def counted(method: Callable[[S, Any, Context], Awaitable[Any]]) -> Callable[[S, Any, Context], Awaitable[Any]]:
    """Counts the calls of a unary method by status."""

    @wraps(method)
    async def call(self: S, request: Any, context: Context) -> Any:
        failure: BaseException | None = None
        try:
            return await method(self, request, context)
        except BaseException as error:
            failure = error
            raise
        finally:
            self.metrics.call_ended(method.__name__, _status_name(failure))

    return call


def counted_stream(
    method: Callable[[S, Any, Context], AsyncIterator[Any]],
) -> Callable[[S, Any, Context], AsyncIterator[Any]]:
    """Counts the calls of a streaming method by status."""

    @wraps(method)
    async def call(self: S, request: Any, context: Context) -> AsyncIterator[Any]:
        failure: BaseException | None = None
        responses: Any = method(self, request, context)
        try:
            async for response in responses:
                yield response
        except BaseException as error:
            failure = error
            raise
        finally:
            await responses.aclose()
            self.metrics.call_ended(method.__name__, _status_name(failure))

    return call
