"""A small servicer over the public protos for tests of the gRPC helpers: its behaviour follows the request's text."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from shared.rpc.options import PUBLIC_MAX_SEND_BYTES, Options, public_server_options
from shared.rpc.raw import raw_handlers
from shared.rpc.server import RpcServer, start_server
from takt.v1 import inference_pb2

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]


def _echo(text: str) -> str:
    return "x" * (PUBLIC_MAX_SEND_BYTES + 1) if text == "large" else text


class EchoServicer:
    """Tokenize and Generate echo, the text "large" with too much; `failures` maps a text to what is raised for it."""

    def __init__(self, failures: dict[str, BaseException] | None = None) -> None:
        self.failures = failures or {}
        self.started = asyncio.Event()
        self.ended = asyncio.Event()

    async def Tokenize(self, request: Any, context: Any) -> Any:
        if request.text in self.failures:
            raise self.failures[request.text]
        return inference_pb2.TokenizeResponse(tokens=[_echo(request.text)])

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.started.set()
        try:
            yield inference_pb2.GenerateResponse(text=_echo(request.text))
            if request.text in self.failures:
                raise self.failures[request.text]
            if request.text == "forever":
                await asyncio.Event().wait()
            while request.text == "flood":
                yield inference_pb2.GenerateResponse(text="x" * 65_536)
        finally:
            self.ended.set()


@asynccontextmanager
async def running_server(
    handler: grpc.GenericRpcHandler, service: str, options: Options | None = None, port: int = 0
) -> AsyncIterator[RpcServer]:
    server = await start_server(
        "127.0.0.1",
        port,
        handlers=[handler],
        services=[service],
        options=public_server_options() if options is None else options,
    )
    try:
        yield server
    finally:
        await server.stop(0)


def echo_server(servicer: EchoServicer, options: Options | None = None, port: int = 0) -> Any:
    """A running server of the servicer, as a context."""
    return running_server(raw_handlers(INFERENCE, servicer), INFERENCE.full_name, options, port)


async def failure_of(call: Any) -> grpc.aio.AioRpcError:
    """The error that a call, unary or streaming, ends in."""
    try:
        if hasattr(call, "read"):
            while await call.read() is not grpc.aio.EOF:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call succeeded")
