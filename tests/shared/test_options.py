"""The options by their effects: gRPC ignores keys that it does not know, so spellings prove nothing."""

import asyncio
import os
import signal
import sys
import time

import grpc
import pytest

from shared.rpc import options
from takt.v1 import inference_pb2, inference_pb2_grpc
from tests.support.echo import EchoServicer, echo_server, failure_of


def scaled(original, **changes):
    """Options with some values changed, so that effects of minutes show within seconds; each key must be there."""
    changed = dict(original)
    for key, value in changes.items():
        name = next(name for name in changed if name.split("grpc.", 1)[1].replace(".", "_") == key)
        changed[name] = value
    return list(changed.items())


FAST_CHANNEL = scaled(
    options.engine_channel_options(), keepalive_time_ms=1_000, keepalive_timeout_ms=1_000, http2_ping_timeout_ms=1_000
)


async def test_a_stopped_engine_is_noticed_within_seconds():
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.shared.pinged_server", stdout=asyncio.subprocess.PIPE
    )
    try:
        port = int(await process.stdout.readline())
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=FAST_CHANNEL) as channel:
            call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(
                inference_pb2.GenerateRequest(text="forever")
            )
            await call.read()
            os.kill(process.pid, signal.SIGSTOP)
            start = time.monotonic()
            error = await asyncio.wait_for(failure_of(call), 30)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        # Without a bound on the ping's answer this takes a minute.
        assert time.monotonic() - start < 10
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize(
    "server_options",
    [
        options.engine_server_options(),
        # The public port counts pings that come too often; here one a second is allowed and one a second sent.
        scaled(options.public_server_options(), http2_min_ping_interval_without_data_ms=500),
    ],
    ids=["engine", "public"],
)
async def test_a_client_that_pings_is_not_cut_off(server_options):
    async with (
        echo_server(EchoServicer(), server_options) as server,
        grpc.aio.insecure_channel(server.address, options=FAST_CHANNEL) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(inference_pb2.GenerateRequest(text="forever"))
        await call.read()
        # With gRPC's own defaults the third ping ends the connection, at three seconds.
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(call.read())), 5)
        assert not call.done()
        call.cancel()


async def test_the_public_port_ends_a_flood_of_pings():
    async with (
        echo_server(EchoServicer(), options.public_server_options()) as server,
        grpc.aio.insecure_channel(server.address, options=FAST_CHANNEL) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        error = await asyncio.wait_for(failure_of(stub.Generate(inference_pb2.GenerateRequest(text="forever"))), 30)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "Too many pings" in error.details()


async def test_a_server_frees_the_calls_of_a_vanished_client():
    server_options = scaled(options.public_server_options(), keepalive_time_ms=1_000, http2_ping_timeout_ms=1_000)
    servicer = EchoServicer()
    async with echo_server(servicer, server_options) as server:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, server.address)
        await asyncio.wait_for(servicer.started.wait(), 30)
        os.kill(process.pid, signal.SIGSTOP)
        try:
            await asyncio.wait_for(servicer.ended.wait(), 15)
        finally:
            process.kill()
            await process.wait()


CLIENT = """
import sys, grpc
from takt.v1 import inference_pb2, inference_pb2_grpc
stub = inference_pb2_grpc.InferenceServiceStub(grpc.insecure_channel(sys.argv[1]))
for _ in stub.Generate(inference_pb2.GenerateRequest(text="forever")):
    pass
"""


@pytest.mark.parametrize(
    ("server_options", "limit"),
    [
        (options.public_server_options(), options.PUBLIC_MAX_RECEIVE_BYTES),
        (options.engine_server_options(), options.ENGINE_MAX_MESSAGE_BYTES),
    ],
    ids=["public", "engine"],
)
async def test_messages_up_to_the_limit_are_received(server_options, limit):
    unlimited = [("grpc.max_send_message_length", -1)]
    async with (
        echo_server(EchoServicer(), server_options) as server,
        grpc.aio.insecure_channel(server.address, options=unlimited) as channel,
    ):
        call = channel.unary_unary("/takt.v1.InferenceService/Abort")
        # The echo servicer has no Abort: being told so means that the message came through.
        assert (await failure_of(call(bytes(limit)))).code() is grpc.StatusCode.UNIMPLEMENTED
        tokenize = channel.unary_unary("/takt.v1.InferenceService/Tokenize")
        assert (await failure_of(tokenize(bytes(limit)))).code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await failure_of(tokenize(bytes(limit + 1)))).code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_channel_finds_an_engine_that_comes_back_quickly():
    async with echo_server(EchoServicer(), options.engine_server_options()) as server:
        port = server.port
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options.engine_channel_options()) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Tokenize
        for _ in range(3):
            assert (await failure_of(call(inference_pb2.TokenizeRequest()))).code() is grpc.StatusCode.UNAVAILABLE
        async with echo_server(EchoServicer(), options.engine_server_options(), port):
            start = time.monotonic()
            await call(inference_pb2.TokenizeRequest(text="x"), wait_for_ready=True, timeout=30)
            assert time.monotonic() - start < 3
