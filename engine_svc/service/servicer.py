"""EngineService: one Connect call for each frontend, in bytes both ways.

Reads into the stream's state and writes from its outbox, each in a task of its own, so that a frontend that does not
read cannot keep the engine from hearing it. Knows gRPC; what messages mean is the stream's. Invariant: however a call
ends, its stream is closed in the hub.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc

from engine_svc.service.convert import Hello, decode
from engine_svc.service.hub import Hub
from engine_svc.service.stream import FrontendStream
from shared.errors import PreconditionError, UnimplementedError
from shared.rpc.status import is_stream_gone
from shared.types import PROTOCOL_VERSION

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_SECONDS = 10.0

Context = grpc.aio.ServicerContext[bytes, bytes]


class EngineServicer:
    """takt.engine.v1.EngineService."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def Connect(self, requests: AsyncIterator[bytes], context: Context) -> None:  # noqa: N802, ARG002 - gRPC's
        """Serves a frontend until either side ends the stream. Raises TaktError for the status to end it with."""
        hello = await _receive_hello(context)
        stream = self._hub.open_stream(hello.frontend_id)
        stream.outbox.window = hello.max_unacknowledged
        reader = asyncio.create_task(_read(stream, context))
        writer = asyncio.create_task(_write(stream, context))
        try:
            either: set[asyncio.Future[Any]] = {reader, writer, stream.ended}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if stream.ended.done():
                raise stream.ended.result()
            if reader.done():
                reader.result()
                return
            if writer.result():
                raise self._hub.closing_error
        finally:
            self._hub.close_stream(stream)
            for task in (reader, writer):
                task.cancel()
                task.add_done_callback(_retrieve)


async def _receive_hello(context: Context) -> Hello:
    try:
        data: Any = await asyncio.wait_for(context.read(), HELLO_TIMEOUT_SECONDS)
    except TimeoutError:
        raise PreconditionError(f"hello must come within {HELLO_TIMEOUT_SECONDS:g} s", field="hello") from None
    if data is grpc.aio.EOF:
        raise PreconditionError("hello must be the first message, got the end of the stream", field="hello")
    message = decode(data)
    if not isinstance(message, Hello):
        raise PreconditionError(f"hello must be the first message, got {type(message).__name__}", field="hello")
    if message.is_peer:
        raise UnimplementedError("role ROLE_PEER is not built yet", field="hello.role")
    if message.protocol_version != PROTOCOL_VERSION:
        raise PreconditionError(
            f"hello.protocol_version must be {PROTOCOL_VERSION}, got {message.protocol_version}",
            field="hello.protocol_version",
        )
    return message


async def _read(stream: FrontendStream, context: Context) -> None:
    """Returns when the frontend has nothing more to say. Raises TaktError for what it must not say."""
    while True:
        try:
            data: Any = await context.read()
        except Exception as error:
            if is_stream_gone(error):
                return
            raise
        if data is grpc.aio.EOF:
            return
        stream.receive(data)


async def _write(stream: FrontendStream, context: Context) -> bool:
    """Returns True after the last message of a closed outbox, False when the stream is gone."""
    while frames := await stream.outbox.take():
        for frame in frames:
            try:
                await context.write(frame)
            except Exception as error:
                if is_stream_gone(error):
                    return False
                raise
            stream.outbox.progressed(frame)
    return True


def _retrieve(task: "asyncio.Task[Any]") -> None:
    """Takes a late error of a task that nobody waits for any more."""
    if not task.cancelled() and task.exception() is not None:
        logger.debug("after the end of a stream", exc_info=task.exception())
