"""Binding, health, reflection and stopping."""

import asyncio
import logging
import socket
import subprocess
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from shared.errors import StartupError
from shared.rpc.options import engine_server_options, public_server_options
from takt.v1 import inference_pb2, inference_pb2_grpc
from tests.support.echo import INFERENCE, EchoServicer, echo_server, failure_of

Status = health_pb2.HealthCheckResponse.ServingStatus
NAME = INFERENCE.full_name


@pytest.mark.parametrize("options", [public_server_options(), engine_server_options()], ids=["public", "engine"])
async def test_a_second_server_on_the_port_is_refused(options):
    async with echo_server(EchoServicer(), options) as first:
        with pytest.raises(StartupError, match=f"port {first.port} on 127.0.0.1 is in use"):
            await echo_server(EchoServicer(), options, first.port).__aenter__()


async def test_a_port_that_another_program_holds_is_refused():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        with pytest.raises(StartupError, match="is in use"):
            await echo_server(EchoServicer(), port=held.getsockname()[1]).__aenter__()


async def check(stub, service):
    return Status.Name((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)


async def test_health_check_and_watch():
    async with echo_server(EchoServicer()) as server, grpc.aio.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert await check(stub, "") == "SERVING"
        assert await check(stub, NAME) == "NOT_SERVING"
        error = await failure_of(stub.Check(health_pb2.HealthCheckRequest(service="who")))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=NAME))
        assert Status.Name((await watch.read()).status) == "NOT_SERVING"
        server.set_serving(NAME, serving=True)
        assert Status.Name((await watch.read()).status) == "SERVING"
        server.set_serving(NAME, serving=True)
        server.enter_graceful_shutdown()
        server.set_serving(NAME, serving=True)
        assert Status.Name((await watch.read()).status) == "NOT_SERVING"
        assert await check(stub, NAME) == "NOT_SERVING"
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="later"))
        assert Status.Name((await unknown.read()).status) == "SERVICE_UNKNOWN"
        # A watcher does not hold up the end of the server.
        await asyncio.wait_for(server.stop(60), 20)
        assert await watch.read() is grpc.aio.EOF


async def test_running_calls_go_on_until_the_grace_is_over():
    async with echo_server(EchoServicer()) as server, grpc.aio.insecure_channel(server.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(inference_pb2.GenerateRequest(text="forever"))
        await call.read()
        stopping = asyncio.ensure_future(server.stop(0.5))
        error = await failure_of(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        await asyncio.wait_for(stopping, 20)


async def test_reflection_lists_the_services():
    async with echo_server(EchoServicer()) as server, grpc.aio.insecure_channel(server.address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        response = await call.read()
        names = {service.name for service in response.list_services_response.service}
        assert {NAME, "grpc.health.v1.Health"} <= names
        await call.done_writing()


async def test_bad_bytes_to_reflection_are_an_invalid_argument(caplog):
    async with echo_server(EchoServicer()) as server, grpc.aio.insecure_channel(server.address) as channel:
        call = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")()
        await call.write(b"\xff" * 10)
        error = await failure_of(call)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "grpc.reflection.v1alpha.ServerReflectionRequest" in error.details()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_the_health_command_tells_by_its_exit_code():
    async with echo_server(EchoServicer()) as server:

        async def run(*arguments):
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "shared.rpc.healthcheck",
                *arguments,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            output, _ = await process.communicate()
            return process.returncode, output.decode().strip()

        assert await run(server.address) == (0, "SERVING")
        assert await run(server.address, NAME) == (1, "NOT_SERVING")
        assert await run(server.address, "who") == (1, "NOT_FOUND")
        assert (await run())[0] == 2
        await server.stop(0)
        assert await run(server.address) == (1, "UNAVAILABLE")
