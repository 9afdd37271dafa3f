"""Handlers of bytes: bad bytes, failures, cancellation, and streams of bytes."""

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
import pytest

from shared.errors import UnavailableError
from shared.rpc.options import engine_server_options
from shared.rpc.raw import raw_handlers
from shared.rpc.status import error_from_rpc
from takt.engine.v1 import engine_pb2
from takt.v1 import inference_pb2, inference_pb2_grpc
from tests.support.echo import EchoServicer, echo_server, failure_of, running_server

GENERATE = "/takt.v1.InferenceService/Generate"
TOKENIZE = "/takt.v1.InferenceService/Tokenize"
CONNECT = "/takt.engine.v1.EngineService/Connect"
ENGINE = engine_pb2.DESCRIPTOR.services_by_name["EngineService"]
# A length that runs past the end, an invalid wire type, and invalid UTF-8 in GenerateRequest.text.
BAD_BYTES = [b"\x0a\xff\x01abc", b"\x07", b"\x1a\x02\xc3\x28"]


@pytest.mark.parametrize("data", BAD_BYTES)
async def test_bad_bytes_are_an_invalid_argument_naming_the_message(data):
    async with echo_server(EchoServicer()) as server, grpc.aio.insecure_channel(server.address) as channel:
        for call, name in (
            (channel.unary_stream(GENERATE)(data), "takt.v1.GenerateRequest"),
            (channel.unary_unary(TOKENIZE)(data.replace(b"\x1a", b"\x12")), "takt.v1.TokenizeRequest"),
            (channel.unary_unary("/grpc.health.v1.Health/Check")(b"\x0a\xff"), "grpc.health.v1.HealthCheckRequest"),
        ):
            error = await failure_of(call)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert name in error.details()
            assert error_from_rpc(error).reason == "MALFORMED_MESSAGE"


@pytest.mark.parametrize("failure", [ValueError("the secret"), KeyError("the secret"), asyncio.CancelledError()])
async def test_unexpected_failures_are_internal_with_an_id_found_in_the_log(failure, caplog):
    async with (
        echo_server(EchoServicer({"fail": failure})) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for start, request in (
            (stub.Tokenize, inference_pb2.TokenizeRequest(text="fail")),
            (stub.Generate, inference_pb2.GenerateRequest(text="fail")),
        ):
            caplog.clear()
            error = await failure_of(start(request))
            assert error.code() is grpc.StatusCode.INTERNAL
            assert "secret" not in error.details()
            record = next(r for r in caplog.records if r.name == "shared.rpc.raw")
            assert error_from_rpc(error).metadata["id"] in record.getMessage()
            assert record.exc_info[1] is failure


async def test_a_response_that_is_too_large_is_an_error_of_its_call_alone(caplog):
    async with echo_server(EchoServicer()) as server, grpc.aio.insecure_channel(server.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for call in (
            stub.Tokenize(inference_pb2.TokenizeRequest(text="large")),
            stub.Generate(inference_pb2.GenerateRequest(text="large")),
        ):
            error = await failure_of(call)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "at most 16777216 bytes, got 167772" in error.details()
            assert error_from_rpc(error).reason == "RESPONSE_TOO_LARGE"
        assert (await stub.Tokenize(inference_pb2.TokenizeRequest(text="a"))).tokens == ["a"]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("text", ["forever", "flood"])
async def test_a_client_that_leaves_closes_the_handler_at_once(text, caplog):
    servicer = EchoServicer()
    async with echo_server(servicer) as server:
        async with grpc.aio.insecure_channel(server.address) as channel:
            call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest(text=text))
            assert (await call.read()).text == text
            call.cancel()
            await asyncio.wait_for(servicer.ended.wait(), 10)
        assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


async def test_a_deadline_closes_the_handler():
    servicer = EchoServicer()
    async with echo_server(servicer) as server, grpc.aio.insecure_channel(server.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        error = await failure_of(stub.Generate(inference_pb2.GenerateRequest(text="forever"), timeout=0.3))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.wait_for(servicer.ended.wait(), 10)


async def test_methods_that_are_missing_are_unimplemented():
    async with echo_server(EchoServicer()) as server, grpc.aio.insecure_channel(server.address) as channel:
        error = await failure_of(channel.unary_unary("/takt.v1.InferenceService/Detokenize")(b""))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED


class GeneratorBidi:
    async def Connect(self, requests, context) -> AsyncIterator[bytes]:
        async for data in requests:
            if data == b"fail":
                raise UnavailableError("draining", reason="DRAINING")
            yield data.upper()


class WritingBidi:
    async def Connect(self, requests, context) -> None:
        async for data in requests:
            if data == b"fail":
                raise UnavailableError("draining", reason="DRAINING")
            await context.write(data.upper())


@pytest.mark.parametrize("servicer", [GeneratorBidi(), WritingBidi()])
async def test_bidirectional_methods_speak_bytes(servicer):
    handler = raw_handlers(ENGINE, servicer)
    async with (
        running_server(handler, ENGINE.full_name, engine_server_options()) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        call = channel.stream_stream(CONNECT)()
        for data in (b"one", b"\xff\x00two"):
            await call.write(data)
            assert await call.read() == data.upper()
        await call.write(b"fail")
        error = await failure_of(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert error_from_rpc(error).reason == "DRAINING"
