"""An engine that fails: everybody hears of it once, and the process ends."""

import asyncio
import socket
import subprocess
import sys
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine_svc.executor.fake import FakeExecutor, FakeExecutorOptions
from takt.engine.v1 import engine_pb2 as pb
from tests.support.engine_in_process import engine_in_process, fake_tokens
from tests.support.engine_process import ROOT, EngineSubprocess, engine_process
from tests.support.raw_frontend import StreamEnded, raw_frontend

EPOCHS = 2


async def expect_dead(frontend, text):
    ended = await frontend.end()
    assert ended.code == grpc.StatusCode.UNAVAILABLE
    assert frontend.received[-1].WhichOneof("message") == "dead", "Dead is the last message"
    assert sum(m.WhichOneof("message") == "dead" for m in frontend.received) == 1
    assert text in frontend.received[-1].dead.reason


async def test_a_failed_step_is_told_to_every_frontend_and_ends_the_process():
    with engine_process("--fake-fail-at-step", "20", "--fake-step-ms", "2") as engine:
        async with raw_frontend(engine.address) as one, raw_frontend(engine.address) as two:
            handle = await one.add([111, 222, 333], max_tokens=100, request_id="victim")
            await expect_dead(one, "step 20 fails")
            await expect_dead(two, "step 20 fails")
            assert one.tokens[handle] == fake_tokens([111, 222, 333], 100)[: len(one.tokens[handle])]
            assert handle not in one.finished
        started = time.monotonic()
        assert await asyncio.to_thread(engine.wait, 20) == 1
        assert time.monotonic() - started < 8
    assert "The engine failed" in engine.log
    assert "In flight: step 20: 1 tokens in 1 rows" in engine.log
    assert "Load: EngineLoad(num_running=1" in engine.log
    assert "222" not in engine.log.replace(engine.address, ""), "no token of a prompt is logged"


async def test_a_step_that_hangs_ends_in_dead():
    with engine_process("--fake-hang-at-step", "3", "--execute-timeout", "1") as engine:
        async with raw_frontend(engine.address) as frontend:
            await frontend.add([3, 4], max_tokens=100)
            await expect_dead(frontend, "a step did not end within 1.0 s")
        assert await asyncio.to_thread(engine.wait, 20) == 1


async def test_time_behind_other_steps_is_no_part_of_a_step():
    """Five steps in flight, each half of the limit: no one of them is over it."""
    async with engine_in_process(max_concurrent_batches=5, step_seconds=0.2, execute_timeout=0.4) as engine:
        async with raw_frontend(engine.address) as frontend:
            handles = [await frontend.add([number], max_tokens=4) for number in range(40, 48)]
            await frontend.finish(*handles)
        assert not engine.error


async def test_open_calls_fail_and_later_ones_find_no_engine():
    async with engine_in_process(fail_at_step=3) as engine, raw_frontend(engine.address) as frontend:
        engine.executor.hold()
        await frontend.add([3, 4], max_tokens=100)
        await engine.wait_for_step(1)
        await frontend.send(utility_call=pb.UtilityCall(call_id=5, timeout_ms=60_000, start_profile={"name": "x"}))
        await frontend.send(utility_call=pb.UtilityCall(call_id=6, timeout_ms=60_000))
        await frontend.receive_until(lambda: 6 in frontend.results)
        engine.core.fail("pulled the plug")
        await expect_dead(frontend, "pulled the plug")
        assert frontend.results[5].error.code == grpc.StatusCode.UNAVAILABLE.value[0]
        async with raw_frontend(engine.address, hello=False) as late:
            with pytest.raises(StreamEnded, match="UNAVAILABLE: the engine failed: pulled the plug"):
                await late.hello()
        stub = health_pb2_grpc.HealthStub(late.channel)
        async with grpc.aio.insecure_channel(engine.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service="takt.engine.v1.EngineService")
            assert (await stub.Check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_an_executor_that_failed_before_anyone_asked():
    executor = FakeExecutor(FakeExecutorOptions())
    executor._worker.submit(lambda: 1 / 0)
    async with engine_in_process(executor=executor) as engine:
        await asyncio.to_thread(engine.thread.join, 10)
        assert "ZeroDivisionError" in str(engine.error[0])


async def test_a_core_that_finds_itself_inconsistent_is_dead(monkeypatch):
    async with engine_in_process() as engine, raw_frontend(engine.address) as frontend:

        def leak():
            raise AssertionError("a block is leaked")

        monkeypatch.setattr(engine.engine.core, "check_invariants", leak)
        await frontend.finish(await frontend.add([3, 4]))
        await expect_dead(frontend, "a block is leaked")
        assert engine.error


async def test_invariants_are_checked_when_the_engine_goes_idle(monkeypatch):
    async with engine_in_process() as engine, raw_frontend(engine.address) as frontend:
        checked = asyncio.Event()
        loop = asyncio.get_running_loop()
        check = engine.engine.core.check_invariants

        def checking():
            check()
            loop.call_soon_threadsafe(checked.set)

        monkeypatch.setattr(engine.engine.core, "check_invariants", checking)
        await frontend.finish(await frontend.add([3, 4]))
        await asyncio.wait_for(checked.wait(), 10)


GIL_HOLDER = """
import ctypes, sys
import engine_svc.service.server as server
from engine_svc.executor.fake import FakeExecutor
server.WATCHDOG_MARGIN_SECONDS = 1.0
execute = FakeExecutor._execute
def hold(self, output):
    if output.step == 3:
        ctypes.PyDLL(None).sleep(600)
    return execute(self, output)
FakeExecutor._execute = hold
from engine_svc.__main__ import main
main(["fake", "--executor", "fake", "--port", sys.argv[1], "--metrics-port", "-1", "--execute-timeout", "1"])
"""


async def test_a_hang_that_holds_the_interpreter_is_ended_by_the_watchdog():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(  # noqa: ASYNC220 - short, and its pipes are read in threads
        [sys.executable, "-c", GIL_HOLDER, str(port)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert (await asyncio.to_thread(process.stdout.readline)).startswith("ready")
        async with raw_frontend(f"127.0.0.1:{port}") as frontend:
            await frontend.add([3, 4], max_tokens=100)
            assert (await frontend.end()).code == grpc.StatusCode.UNAVAILABLE
        _, log = await asyncio.to_thread(process.communicate, None, 20)
        assert process.returncode == 1
        assert "Timeout" in log
    finally:
        process.kill()
        process.communicate()


async def test_an_engine_that_comes_back_is_another_one():
    epochs = set()
    port = 0
    for _ in range(EPOCHS):
        with engine_process(port=port) as engine:
            port = engine.port
            async with raw_frontend(engine.address) as frontend:
                epochs.add(frontend.ready.epoch)
            engine.kill()
            engine.wait()
    assert len(epochs) == EPOCHS


# --- failures of the start --------------------------------------------------------------------------------------------


def failed_start(*arguments, **options):
    engine = EngineSubprocess(*arguments, **options)
    try:
        started = time.monotonic()
        assert engine.wait(30) == 1
        assert time.monotonic() - started < 15
        lines = [line for line in engine.log.splitlines() if line.startswith("engine: ")]
        assert len(lines) == 1, engine.log
        assert "Traceback" not in engine.log
        return lines[0]
    finally:
        engine.close()


def test_two_engines_on_one_port():
    with engine_process() as engine:
        assert f"port {engine.port} on 127.0.0.1 is in use" in failed_start(port=engine.port)
        assert f"port {engine.port} on 127.0.0.1 is in use" in failed_start("--metrics-port", str(engine.port))


BAD_STARTS = [
    (
        ("--num-blocks", "10", "--max-model-len", "200"),
        "--num-blocks holds 144 tokens of KV cache, one sequence of 200",
    ),
    (("--kv-cache-memory", "20KiB", "--max-model-len", "2000"), "one sequence of 2000 needs 129024 bytes (126 blocks)"),
    (("--kv-cache-memory", "1000"), "holds 0 tokens of KV cache, one sequence of 32 needs 3072 bytes (3 blocks)"),
    (("--kv-cache-memory", "much"), "--kv-cache-memory must be a number of bytes like 4GiB, got 'much'"),
    (("--no-enable-chunked-prefill", "--max-num-batched-tokens", "100"), "--max-num-batched-tokens must be at least"),
    (("--max-num-seqs", "0"), "--max-num-seqs must be at least 1, got 0"),
]


@pytest.mark.parametrize(("arguments", "text"), BAD_STARTS)
def test_a_start_that_cannot_be(arguments, text):
    assert text in failed_start(*arguments)


def test_a_missing_model():
    line = failed_start(model="/no/such/folder", executor="uniproc")
    assert "/no/such/folder" in line
