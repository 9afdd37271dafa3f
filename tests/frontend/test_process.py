"""The frontend as its operator meets it: start-up lines, exit codes, signals."""

import asyncio
import signal
import subprocess
import sys
import time
import urllib.request

import grpc
import pytest

from takt.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests.support.engine_in_process import engine_in_process
from tests.support.frontend_in_process import collect, generate_request
from tests.support.frontend_process import FrontendSubprocess, frontend_process


def failed_start(*arguments):
    """Exit code and standard error of a start that fails."""
    started = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-m", "frontend_svc", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert time.monotonic() - started < 20
    return result.returncode, result.stderr


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("/nowhere/at/all", "--engine", "127.0.0.1:1"), "frontend: tokenizer '/nowhere/at/all' is no folder"),
        (("no-such-model", "--engine", "127.0.0.1:1"), "frontend: tokenizer 'no-such-model' is no folder"),
        (("x",), "frontend: --engine must be given at least once"),
        (("--engine", "127.0.0.1:1"), "frontend: MODEL or --tokenizer must be given"),
        (("x", "--engine", "nonsense"), "frontend: --engine must be HOST:PORT, got 'nonsense'"),
        (("x", "--engine", "a:1", "--engine", "a:1"), "frontend: --engine must name each engine once, got a:1 again"),
        (("x", "--engine", "a:1", "--port", "70000"), "frontend: --port must be at most 65535, got 70000"),
    ],
)
def test_a_start_that_cannot_succeed_is_one_line(arguments, line):
    code, stderr = failed_start(*arguments)
    assert code == 1
    assert stderr.startswith(line)
    assert stderr.count("\n") == 1


def test_an_occupied_port_is_one_line(tokenizer_folder):
    with frontend_process(str(tokenizer_folder), "--engine", "127.0.0.1:1") as frontend:
        port = frontend.address.rpartition(":")[2]
        arguments = ("--engine", "127.0.0.1:1", "--metrics-port", "-1", "--admin-port", "0")
        code, stderr = failed_start(str(tokenizer_folder), *arguments, "--port", port)
        assert code == 1
        assert f"frontend: port {port} on 127.0.0.1 is in use\n" in stderr


async def test_a_whole_process_serves_and_shuts_down(tokenizer_folder):
    async with engine_in_process(vocab_size=300, max_model_len=256, step_seconds=0.01) as engine:
        arguments = (str(tokenizer_folder), "--engine", engine.address, "--served-model-name", "a")
        with frontend_process(*arguments, "--served-model-name", "b") as frontend:
            async with grpc.aio.insecure_channel(frontend.address) as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                models = await stub.ListModels(inference_pb2.ListModelsRequest(), wait_for_ready=True)
                assert [model.name for model in models.models] == ["a", "b"]
                call = await begun(stub, generate_request("hello", max_tokens=60, ignore_eos=True, model="b"))
                await asyncio.to_thread(scrape, frontend.addresses["metrics"])
                # The request in flight ends properly, then the process does.
                frontend.process.send_signal(signal.SIGTERM)
                answer = await collect(call)
                assert answer.last.finish_reason == types_pb2.FINISH_REASON_LENGTH
                assert answer.last.usage.completion_tokens == 60
            assert await asyncio.to_thread(frontend.wait, 20) == 0
            assert "Traceback" not in frontend.log


async def begun(stub, request):
    """A call that has begun to answer; tried until the engine is ready."""
    for _ in range(400):
        call = stub.Generate(request)
        try:
            await call.read()
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE:
                raise
            await asyncio.sleep(0.05)
        else:
            return call
    raise AssertionError("the frontend never became ready")


def scrape(address):
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        text = response.read().decode()
    assert "vllm:time_to_first_token_seconds_bucket" in text
    assert "takt_frontend_engine_up" in text


async def test_the_second_signal_ends_it_at_once(tokenizer_folder):
    async with engine_in_process(vocab_size=300, max_model_len=2048, step_seconds=0.05) as engine:
        with frontend_process(str(tokenizer_folder), "--engine", engine.address) as frontend:
            async with grpc.aio.insecure_channel(frontend.address) as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                call = await begun(stub, generate_request("hello", ignore_eos=True))
                frontend.process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(frontend.wait_logged, "draining")
                assert frontend.process.poll() is None
                frontend.process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(frontend.wait, 20) == -signal.SIGTERM
                assert (await collect(call)).code == grpc.StatusCode.UNAVAILABLE


def test_it_starts_within_three_seconds(tokenizer_folder):
    frontend = FrontendSubprocess(str(tokenizer_folder), "--engine", "127.0.0.1:1")
    try:
        frontend.wait_ready()
        seconds = time.monotonic() - frontend.started
        frontend.process.send_signal(signal.SIGINT)
        assert frontend.wait(20) == 0
        # Twice the promise, for a machine that others use too.
        assert seconds < 6, f"{seconds:.1f} s"
    finally:
        frontend.close()
