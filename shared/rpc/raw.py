"""Handlers that take bytes and parse them themselves.

gRPC's own deserialiser ends a call, or a whole stream, with UNKNOWN on one bad message, and tells clients the text of
any exception. Here bad bytes are INVALID_ARGUMENT naming the message, a TaktError is its status, and anything else is
INTERNAL with an id that leads to the traceback in the log. A response that is too large for its client is
RESOURCE_EXHAUSTED. UNKNOWN is never sent; cancellation passes through.
"""

import asyncio
import inspect
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from shared.errors import InternalError, InvalidRequestError, OverloadedError, TaktError
from shared.rpc.options import PUBLIC_MAX_SEND_BYTES
from shared.rpc.status import RESPONSE_TOO_LARGE, abort_with

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
UnaryBehaviour = Callable[[Message, Context], Awaitable[Message]]
StreamBehaviour = Callable[[Message, Context], AsyncIterator[Message]]
# Yields messages, or writes them to its context and returns nothing.
BidiBehaviour = Callable[[AsyncIterator[bytes], Context], Any]


def raw_handlers(service: ServiceDescriptor, servicer: object) -> grpc.GenericRpcHandler:
    """Registers each method of a servicer by its name in the service.

    unary-unary methods are coroutines `(request, context) -> response`; unary-stream methods are async generators of
    responses; both get parsed messages. Bidirectional methods take an iterator of bytes and give bytes, as an async
    generator or as a coroutine that writes to its context, and parse each message themselves. Methods may raise
    TaktError. Those that the servicer lacks answer UNIMPLEMENTED.
    """
    methods = {
        method.name: _handler(method, getattr(servicer, method.name))
        for method in service.methods
        if hasattr(servicer, method.name)
    }
    return grpc.method_handlers_generic_handler(service.full_name, methods)


def parse(message_class: type[Message], data: bytes) -> Any:
    """Parses a message. Raises InvalidRequestError naming it when the bytes are none, bad UTF-8 included."""
    message = message_class()
    try:
        message.ParseFromString(data)
    except DecodeError:
        name = message_class.DESCRIPTOR.full_name
        raise InvalidRequestError(
            f"the request is no valid {name}: {len(data)} bytes that cannot be parsed", reason="MALFORMED_MESSAGE"
        ) from None
    return message


def _encode(response: Message) -> bytes:
    """The bytes of a response; over its limit gRPC itself would log a traceback."""
    data = response.SerializeToString()
    if len(data) > PUBLIC_MAX_SEND_BYTES:
        message = f"the response must be at most {PUBLIC_MAX_SEND_BYTES} bytes, got {len(data)}; ask for less"
        raise OverloadedError(message, reason=RESPONSE_TOO_LARGE)
    return data


def _handler(method: MethodDescriptor, behaviour: Any) -> "grpc.RpcMethodHandler[bytes, bytes]":
    if method.client_streaming and method.server_streaming:
        return grpc.stream_stream_rpc_method_handler(_bidi(method, behaviour))
    if method.client_streaming:
        raise TypeError(f"{method.full_name}: client streaming is not supported")
    request_class = GetMessageClass(method.input_type)
    if method.server_streaming:
        return grpc.unary_stream_rpc_method_handler(_unary_stream(method, request_class, behaviour))
    return grpc.unary_unary_rpc_method_handler(_unary_unary(method, request_class, behaviour))


def _unary_unary(method: MethodDescriptor, request_class: type[Message], behaviour: UnaryBehaviour) -> Any:
    async def call(data: bytes, context: Context) -> bytes:
        try:
            response = await behaviour(parse(request_class, data), context)
            return _encode(response)
        except BaseException as error:  # noqa: BLE001 - every error becomes a status or passes on
            await _fail(method, context, error)

    return call


def _unary_stream(method: MethodDescriptor, request_class: type[Message], behaviour: StreamBehaviour) -> Any:
    async def call(data: bytes, context: Context) -> AsyncIterator[bytes]:
        try:
            # A client that leaves must close the inner generator now, not when it is collected.
            async with aclosing(behaviour(parse(request_class, data), context)) as responses:  # type: ignore[type-var]
                async for response in responses:
                    yield _encode(response)
        except BaseException as error:  # noqa: BLE001 - every error becomes a status or passes on
            await _fail(method, context, error)

    return call


def _bidi(method: MethodDescriptor, behaviour: BidiBehaviour) -> Any:
    async def generate(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        try:
            async with aclosing(behaviour(requests, context)) as responses:
                async for response in responses:
                    yield response
        except BaseException as error:  # noqa: BLE001 - every error becomes a status or passes on
            await _fail(method, context, error)

    async def write(requests: AsyncIterator[bytes], context: Context) -> None:
        try:
            await behaviour(requests, context)
        except BaseException as error:  # noqa: BLE001 - every error becomes a status or passes on
            await _fail(method, context, error)

    return generate if inspect.isasyncgenfunction(behaviour) else write


async def _fail(method: MethodDescriptor, context: Context, error: BaseException) -> NoReturn:
    """Ends the call as the error asks; re-raises what belongs to gRPC or to the interpreter."""
    if isinstance(error, TaktError):
        await abort_with(context, error)
    if _passes_through(error):
        raise error
    error_id = uuid.uuid4().hex[:12]
    logger.error("%s failed, error id %s", method.full_name, error_id, exc_info=error)
    await abort_with(
        context, InternalError(f"the service failed; its log tells more under {error_id}", metadata={"id": error_id})
    )


def _passes_through(error: BaseException) -> bool:
    """Aborts and cancellations of the call itself. A stray CancelledError of some other task would hang the client."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    if isinstance(error, grpc.aio.BaseError):
        return True
    if isinstance(error, asyncio.InvalidStateError):
        return "RPC already finished" in str(error)
    return not isinstance(error, Exception)
