"""The greeting, and what ends a stream: always that stream only, and never with UNKNOWN."""

import grpc
import pytest

from takt.engine.v1 import engine_pb2 as pb
from tests.support.engine_in_process import engine_in_process, fake_tokens
from tests.support.raw_frontend import raw_frontend

HELLO = pb.Hello(role=pb.ROLE_FRONTEND, frontend_id="a", protocol_version=1)


def hello(**changes):
    message = pb.Hello()
    message.CopyFrom(HELLO)
    for name, value in changes.items():
        setattr(message, name, value)
    return pb.ConnectRequest(hello=message).SerializeToString()


FIRST_MESSAGES = [
    (hello(protocol_version=7), grpc.StatusCode.FAILED_PRECONDITION, "must be 1, got 7"),
    (hello(role=pb.ROLE_PEER), grpc.StatusCode.UNIMPLEMENTED, "ROLE_PEER"),
    (hello(role=pb.ROLE_UNSPECIFIED), grpc.StatusCode.INVALID_ARGUMENT, "hello.role"),
    (hello(frontend_id="x" * 300), grpc.StatusCode.INVALID_ARGUMENT, "256 characters, got 300"),
    (
        pb.ConnectRequest(heartbeat=pb.Heartbeat()).SerializeToString(),
        grpc.StatusCode.FAILED_PRECONDITION,
        "hello must be the first message, got Heartbeat",
    ),
    (b"\xff\xff\xff", grpc.StatusCode.INVALID_ARGUMENT, "takt.engine.v1.ConnectRequest"),
    (b"", grpc.StatusCode.INVALID_ARGUMENT, "message"),
]


@pytest.mark.parametrize(("data", "code", "text"), FIRST_MESSAGES)
async def test_first_message_that_is_no_greeting(data, code, text):
    async with engine_in_process() as engine:
        async with raw_frontend(engine.address, hello=False) as frontend:
            await frontend.send_bytes(data)
            ended = await frontend.end()
        assert ended.code == code
        assert text in ended.details
        async with raw_frontend(engine.address):
            assert engine.server.hub.num_streams == 1


async def test_half_close_before_the_greeting():
    async with engine_in_process() as engine, raw_frontend(engine.address, hello=False) as frontend:
        await frontend.call.done_writing()
        assert (await frontend.end()).code == grpc.StatusCode.FAILED_PRECONDITION


LATER_MESSAGES = [
    (hello(), grpc.StatusCode.INVALID_ARGUMENT, "hello must be the first message of a stream only"),
    (b"\x0a\xff", grpc.StatusCode.INVALID_ARGUMENT, "ConnectRequest"),
    (b"", grpc.StatusCode.INVALID_ARGUMENT, "message"),
    # A message of a later version: field 15.
    (b"\x7a\x00", grpc.StatusCode.INVALID_ARGUMENT, "message"),
    (
        pb.ConnectRequest(start_dp_wave=pb.StartDpWave(wave=1)).SerializeToString(),
        grpc.StatusCode.UNIMPLEMENTED,
        "start_dp_wave",
    ),
    (
        pb.ConnectRequest(abort_requests=pb.AbortRequests(handles=[1, 2], causes=[1])).SerializeToString(),
        grpc.StatusCode.INVALID_ARGUMENT,
        "causes must be as many as handles 2, got 1",
    ),
    # Bytes of an add that do not even tell its handle.
    (
        pb.ConnectRequest(add_requests=pb.AddRequests(requests=[b"\xff\xff"])).SerializeToString(),
        grpc.StatusCode.INVALID_ARGUMENT,
        "takt.engine.v1.AddRequest",
    ),
    # Over the limit of a message: gRPC's own status.
    (b"\x0a" * ((64 << 20) + 1), grpc.StatusCode.RESOURCE_EXHAUSTED, ""),
]


@pytest.mark.parametrize(("data", "code", "text"), LATER_MESSAGES)
async def test_a_bad_message_ends_its_own_stream_only(data, code, text):
    async with engine_in_process(step_seconds=0.01) as engine, raw_frontend(engine.address) as other:
        handle = await other.add([3, 4, 5], max_tokens=50)
        async with raw_frontend(engine.address) as frontend:
            await frontend.add([7, 8, 9], max_tokens=1000)
            await frontend.send_bytes(data)
            ended = await frontend.end()
        assert ended.code == code
        assert text in ended.details
        (finished,) = await other.finish(handle)
        assert finished.reason == pb.FINISH_REASON_LENGTH
        assert other.tokens[handle] == fake_tokens([3, 4, 5], 50)
        await engine.wait_idle()
        assert engine.server.hub.num_streams == 1


async def test_an_engine_that_loads_refuses_streams():
    async with engine_in_process() as engine:
        engine.server.hub._context = None
        async with raw_frontend(engine.address, hello=False) as frontend:
            await frontend.send_bytes(hello())
            ended = await frontend.end()
        assert ended.code == grpc.StatusCode.UNAVAILABLE
        assert "loading" in ended.details
