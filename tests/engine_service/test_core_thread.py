"""The loop around the core: it never spins, never waits for the wrong thing, and survives whatever arrives."""

import asyncio
import random
import threading
import time
from concurrent.futures import Future

import pytest

from engine_svc.config import EngineConfig
from engine_svc.core_thread import CoreThread, EngineDeadError
from engine_svc.executor.fake import FakeExecutor, FakeExecutorOptions
from engine_svc.messages import AddRequests
from engine_svc.startup import assemble_engine
from takt.engine.v1 import engine_pb2 as pb
from tests.support.drive import expected_output, make_request
from tests.support.engine_in_process import engine_in_process, fake_tokens
from tests.support.raw_frontend import raw_frontend


class Executor:
    """As much of one as CoreThread itself needs."""

    callback = None

    def register_failure_callback(self, callback):
        self.callback = callback


def core_thread(execute_timeout=30.0):
    executor = Executor()
    return CoreThread(None, executor, None, execute_timeout=execute_timeout), executor


def test_wait_returns_results_and_raises_errors():
    thread, _ = core_thread()
    done, failed, later = Future(), Future(), Future()
    done.set_result(5)
    failed.set_exception(ZeroDivisionError("x"))
    assert thread.wait(done) == 5
    with pytest.raises(ZeroDivisionError):
        thread.wait(failed)
    timer = threading.Timer(0.05, later.set_result, (6,))
    timer.start()
    assert thread.wait(later) == 6
    timer.join()


def test_wait_ends_at_its_limit():
    thread, _ = core_thread(execute_timeout=0.2)
    started = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"a step did not end within 0\.2 s"):
        thread.wait(Future())
    assert 0.2 <= time.monotonic() - started < 5


def test_wait_ends_when_the_executor_fails():
    thread, executor = core_thread()
    timer = threading.Timer(0.05, lambda: executor.callback("the worker was killed"))
    timer.start()
    with pytest.raises(EngineDeadError, match="the worker was killed"):
        thread.wait(Future())
    timer.join()


def test_the_steps_own_error_is_preferred():
    thread, executor = core_thread()
    future = Future()

    def fail():
        executor.callback("failed")
        future.set_exception(ZeroDivisionError("the cause"))

    timer = threading.Timer(0.05, fail)
    timer.start()
    with pytest.raises(ZeroDivisionError, match="the cause"):
        thread.wait(future)
    timer.join()


async def test_an_idle_engine_uses_no_time():
    async with engine_in_process() as engine, raw_frontend(engine.address) as frontend:
        await frontend.finish(await frontend.add([3, 4]))
        await engine.wait_idle()
        calls = []
        has_work = engine.engine.core.has_work
        engine.engine.core.has_work = lambda: (calls.append(1), has_work())[1]
        await asyncio.sleep(0.5)
        assert len(calls) <= 2
        assert engine.core.busy_seconds() == 0


async def test_a_step_in_which_nothing_runs_does_not_spin(monkeypatch):
    async with engine_in_process() as engine, raw_frontend(engine.address) as frontend:
        await frontend.ping()
        core, rounds = engine.engine.core, []
        schedule = core.scheduler.schedule
        monkeypatch.setattr(core.scheduler, "schedule", rounds.append)
        handle = await frontend.add([3, 4])
        await asyncio.sleep(0.3)
        assert 1 < len(rounds) < 400
        monkeypatch.setattr(core.scheduler, "schedule", schedule)
        await frontend.finish(handle)


async def test_queue_time_counts_from_arrival_at_the_engine():
    async with engine_in_process() as engine, raw_frontend(engine.address) as frontend:
        engine.executor.hold()
        first = await frontend.add([3, 4], max_tokens=1)
        await engine.wait_for_step(1)
        second = await frontend.add([5, 6], max_tokens=1)
        await frontend.utility(1)
        await asyncio.sleep(0.2)
        engine.executor.release()
        ends = await frontend.finish(first, second)
        assert ends[1].queue_us >= 200_000


def test_adds_before_a_shutdown_are_seen_by_it():
    class Listener:
        def __init__(self):
            self.outputs = []

        def on_step(self, outputs, seconds):
            self.outputs.append(outputs)

    for _ in range(20):
        executor, listener = FakeExecutor(FakeExecutorOptions(synchronous=True)), Listener()
        engine = assemble_engine(EngineConfig(model="fake", executor="fake"), executor)
        core = CoreThread(engine.core, engine.executor, listener, execute_timeout=10)
        thread = threading.Thread(target=core.run)
        thread.start()
        core.submit(AddRequests(1, (make_request(5, [1, 2], max_tokens=3),), 0.0))
        core.shut_down(time.monotonic() + 60)
        thread.join(20)
        ends = [f for o in listener.outputs for c in o.by_client.values() for f in c.finished]
        assert [end.handle for end in ends] == [5]


@pytest.mark.parametrize("max_concurrent_batches", [1, 3])
async def test_random_requests_end_once_with_the_right_tokens(max_concurrent_batches):
    """200 requests from two frontends, with aborts, deadlines, refusals and preemptions."""
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    options = FakeExecutorOptions(max_model_len=128, eos_every=60)
    async with (
        engine_in_process(
            max_model_len=128,
            eos_every=60,
            num_blocks=40,
            max_num_seqs=16,
            max_num_batched_tokens=64,
            max_concurrent_batches=max_concurrent_batches,
            step_seconds=0.0005,
        ) as engine,
        raw_frontend(engine.address, frontend_id="one") as one,
        raw_frontend(engine.address, frontend_id="two") as two,
    ):
        requests = {}
        for number in range(200):
            frontend = rng.choice((one, two))
            prompt = [rng.randrange(1000) for _ in range(rng.choice([1, 3, 17, 40, 90]))]
            tokens = {"max_tokens": rng.randint(1, 60), "seed": rng.randrange(2**64)}
            tokens["min_tokens"] = rng.randint(0, tokens["max_tokens"]) if rng.random() < 0.3 else 0
            tokens["stop_token_ids"] = rng.sample(range(32, 1000), 20) if rng.random() < 0.3 else []
            fate = rng.choices(("run", "abort", "deadline", "bad"), (70, 15, 10, 5))[0]
            wire = {**tokens, "eos_token_ids": [2], "priority": rng.randint(-2, 2)}
            if fate == "deadline":
                wire["deadline_remaining_ms"] = rng.choice([0, 1, 20])
            if fate == "bad":
                prompt = [*prompt, 1000]
            handle = await frontend.add(prompt, **wire)
            requests[frontend, handle] = (prompt, tokens, fate)
            if fate == "abort" and rng.random() < 0.5:
                await frontend.abort(handle)
            elif fate == "abort":
                asyncio.get_running_loop().call_later(
                    rng.random() / 20, lambda f=frontend, h=handle: asyncio.ensure_future(f.abort(h))
                )
            if number % 20 == 0:
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)
        for frontend in (one, two):
            await frontend.finish(
                *(h for (f, h), (_, _, fate) in requests.items() if f is frontend and fate != "abort")
            )
            await frontend.ping()
        await engine.wait_idle()
        preempted = 0
        for (frontend, handle), (prompt, tokens, fate) in requests.items():
            ends = frontend.finished.get(handle, [])
            assert len(ends) == 1 or (fate == "abort" and not ends)
            got = frontend.tokens.get(handle, [])
            if fate == "bad":
                assert not got
                continue
            expected, reason, stop = expected_output(options, make_request(handle, prompt, **tokens), 128)
            preempted += sum(end.num_preemptions for end in ends)
            if ends and ends[0].reason not in (pb.FINISH_REASON_ABORT,):
                assert (got, ends[0].reason) == (expected, reason)
                assert (ends[0].stop_token_id if ends[0].HasField("stop_token_id") else None) == stop
            else:
                assert got == expected[: len(got)]
        assert preempted, "the pool is small enough"
        assert engine.num_open_requests == 0
        assert fake_tokens([1], 1)
