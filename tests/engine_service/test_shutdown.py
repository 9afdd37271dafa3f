"""Draining, and the signals that ask for it."""

import asyncio
import contextlib
import signal
import time

import grpc
import pytest

from takt.engine.v1 import engine_pb2 as pb
from tests.support.engine_in_process import engine_in_process, fake_tokens
from tests.support.engine_process import EngineSubprocess, engine_process
from tests.support.raw_frontend import raw_frontend

UNAVAILABLE = 14


async def wait_stopped(engine):
    await asyncio.to_thread(engine.thread.join, 20)
    assert not engine.thread.is_alive()


async def test_drain_finishes_what_runs_and_waits_and_refuses_what_is_new():
    async with (
        engine_in_process(max_num_seqs=1, step_seconds=0.005) as engine,
        raw_frontend(engine.address) as frontend,
    ):
        running = await frontend.add([3, 4], max_tokens=30)
        waiting = await frontend.add([5, 6], max_tokens=20)
        await frontend.receive_until(lambda: running in frontend.tokens)
        engine.drain(60)
        await frontend.receive_until(lambda: frontend.received[-1].WhichOneof("message") == "draining")
        assert 0 < frontend.received[-1].draining.remaining_ms <= 60_000
        late = await frontend.add([7, 8])
        aborted = await frontend.add([7, 8])
        await frontend.abort(aborted)
        result = await frontend.utility(1, ping=pb.PingMethod())
        assert (result.error.code, result.error.reason) == (UNAVAILABLE, "DRAINING")
        (refused,) = await frontend.finish(late)
        assert refused.reason == pb.FINISH_REASON_ERROR
        assert (refused.error.code, refused.error.reason) == (UNAVAILABLE, "DRAINING")
        async with raw_frontend(engine.address) as newcomer:
            assert newcomer.ready.draining
            (refused,) = await newcomer.finish(await newcomer.add([5]))
            assert refused.error.reason == "DRAINING"
        await frontend.finish(running, waiting)
        await wait_stopped(engine)
        assert not engine.error
        assert frontend.tokens == {running: fake_tokens([3, 4], 30), waiting: fake_tokens([5, 6], 20)}


async def test_at_the_deadline_of_a_drain_every_client_hears_of_its_aborts():
    async with (
        engine_in_process(max_num_seqs=2, step_seconds=0.005) as engine,
        raw_frontend(engine.address) as one,
        raw_frontend(engine.address) as two,
    ):
        for frontend in (one, two):
            for number in (3, 4):
                await frontend.add([number, 5], max_tokens=2000)
        await one.receive_until(lambda: one.tokens)
        engine.drain(0.2)
        for frontend in (one, two):
            for end in await frontend.finish(1, 2):
                assert end.reason == pb.FINISH_REASON_ABORT
                assert end.abort_cause == pb.ABORT_CAUSE_SHUTDOWN
        await wait_stopped(engine)
        assert not engine.error
        engine.engine.core.check_invariants()
        assert engine.num_used_blocks == 0


@pytest.mark.parametrize("seconds", [0, 30])
async def test_an_idle_engine_wakes_for_its_shutdown(seconds):
    async with engine_in_process() as engine, raw_frontend(engine.address) as frontend:
        await frontend.ping()
        await asyncio.sleep(0.1)
        started = time.monotonic()
        engine.drain(seconds)
        await wait_stopped(engine)
        assert time.monotonic() - started < 5


async def test_a_step_that_hangs_cannot_hold_up_a_shutdown(monkeypatch):
    monkeypatch.setattr("engine_svc.core_thread.SHUTDOWN_GRACE_SECONDS", 0.3)
    async with engine_in_process(hang_at_step=2, execute_timeout=600) as engine, raw_frontend(engine.address) as f:
        await f.add([3, 4], max_tokens=20)
        await engine.wait_for_step(2)
        engine.drain(0.1)
        await wait_stopped(engine)
        assert "did not end" in str(engine.error[0])
        assert (await f.end()).code == grpc.StatusCode.UNAVAILABLE


# --- the process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_idle_engine(number):
    with engine_process() as engine:
        engine.signal(number)
        assert engine.wait(20) == 0


async def test_sigterm_drains_then_ends_with_code_0():
    with engine_process("--fake-step-ms", "5") as engine:
        async with raw_frontend(engine.address) as frontend:
            handle = await frontend.add([3, 4], max_tokens=100)
            await frontend.receive_until(lambda: handle in frontend.tokens)
            engine.terminate()
            await frontend.finish(handle)
            assert frontend.tokens[handle] == fake_tokens([3, 4], 100)
            ended = await frontend.end()
            assert ended.code == grpc.StatusCode.UNAVAILABLE
            assert "shut down" in ended.details
        assert await asyncio.to_thread(engine.wait, 20) == 0
        assert "Shutting down: 1 running and 0 waiting requests get 120 s." in engine.log


async def test_the_deadline_of_a_drain_aborts_with_outputs_then_ends_with_code_0():
    with engine_process("--fake-step-ms", "20", "--drain-timeout", "0.5") as engine:
        async with raw_frontend(engine.address) as frontend:
            handle = await frontend.add([3, 4], max_tokens=1500)
            await frontend.receive_until(lambda: handle in frontend.tokens)
            engine.terminate()
            (finished,) = await frontend.finish(handle)
            assert finished.abort_cause == pb.ABORT_CAUSE_SHUTDOWN
            assert (await frontend.end()).code == grpc.StatusCode.UNAVAILABLE
        assert await asyncio.to_thread(engine.wait, 20) == 0


async def test_the_second_signal_has_its_default_action():
    with engine_process("--fake-step-ms", "50") as engine:
        async with raw_frontend(engine.address) as frontend:
            handle = await frontend.add([3, 4], max_tokens=1500)
            await frontend.receive_until(lambda: handle in frontend.tokens)
            engine.terminate()
            await frontend.receive_until(lambda: frontend.received[-1].WhichOneof("message") == "draining")
            # The main thread restores the default action when its wait is interrupted by the first.
            async with asyncio.timeout(20):
                while engine.process.poll() is None:
                    engine.terminate()
                    await asyncio.sleep(0.1)
            assert engine.process.returncode == -signal.SIGTERM
            assert (await frontend.end()).code == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("delay", [0.0, 0.3, 0.6, 0.9, 1.2])
def test_a_signal_while_the_engine_starts(delay):
    with contextlib.closing(EngineSubprocess()) as engine:
        with contextlib.suppress(TimeoutError, RuntimeError):
            engine.wait_ready(timeout=delay or 0.001)
        engine.terminate()
        assert engine.wait(20) in (0, -signal.SIGTERM)
        assert "Traceback" not in engine.log


async def test_a_frontend_that_does_not_read_cannot_hold_up_the_end():
    options = [("grpc.http2.lookahead_bytes", 16384), ("grpc.http2.bdp_probe", 0)]
    with engine_process("--max-model-len", "2000", "--drain-timeout", "0.5") as engine:
        async with raw_frontend(engine.address, options=options) as frontend:
            for number in range(40, 100):
                await frontend.add([number], max_tokens=1900)
            await frontend.receive_until(lambda: len(frontend.tokens) == 60)
            started = time.monotonic()
            engine.terminate()
            assert await asyncio.to_thread(engine.wait, 20) == 0
            assert time.monotonic() - started < 12
            assert (await frontend.end()).code == grpc.StatusCode.UNAVAILABLE
