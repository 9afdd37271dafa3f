"""Aborts at every moment, and streams that go away in every way."""

import asyncio
import subprocess
import sys

from engine_svc.core.interfaces import Abort
from engine_svc.messages import AddRequests
from shared.types import AbortCause
from takt.engine.v1 import engine_pb2 as pb
from tests.support.drive import make_request
from tests.support.engine_in_process import engine_in_process, fake_tokens
from tests.support.engine_process import ROOT
from tests.support.raw_frontend import add_request, raw_frontend


async def test_aborting_unknown_finished_and_twice_is_no_error():
    async with engine_in_process(step_seconds=0.002) as engine, raw_frontend(engine.address) as frontend:
        await frontend.abort(77, 78, 77)
        done = await frontend.add([5, 6])
        await frontend.finish(done)
        running = await frontend.add([7, 8], max_tokens=2000)
        await frontend.receive_until(lambda: running in frontend.tokens)
        await frontend.abort(done, running, running)
        await frontend.abort(running)
        await frontend.ping()
        await engine.wait_idle()
        assert list(frontend.finished) == [done]
        assert len(frontend.finished[done]) == 1


async def test_abort_in_the_same_batch_as_the_add():
    async with engine_in_process() as engine, raw_frontend(engine.address) as frontend:
        engine.executor.hold()
        holding = await frontend.add([3])
        await engine.wait_for_step(1)
        # Both wait in the queue of the core, which is inside a step.
        aborted = await frontend.add([4, 5], max_tokens=2000)
        await frontend.abort(aborted)
        await asyncio.sleep(0)
        engine.executor.release()
        await frontend.finish(holding)
        await frontend.ping()
        await engine.wait_idle()
        assert aborted not in frontend.tokens
        assert aborted not in frontend.finished


async def test_eager_abort_before_its_add_is_left_to_the_ordered_one():
    """The eager copy may be drained while the add still waits in the queue."""
    async with engine_in_process() as engine, raw_frontend(engine.address) as frontend:
        await frontend.ping()
        client = 1
        engine.executor.hold()
        holding = await frontend.add([3], max_tokens=3)
        await engine.wait_for_step(1)
        engine.core._inbox.put(AddRequests(client, (make_request(50, [4, 5], max_tokens=500),), 0.0))
        engine.core.abort([Abort(client, 50, AbortCause.CLIENT)])
        engine.executor.release()
        await frontend.finish(holding)
        await frontend.ping()
        await engine.wait_idle()
        assert 50 not in frontend.tokens


async def test_abort_between_execute_and_update_emits_nothing_more():
    async with engine_in_process() as engine, raw_frontend(engine.address) as frontend:
        engine.executor.hold()
        handle = await frontend.add([5, 6, 7], max_tokens=500)
        await engine.wait_for_step(1)
        await frontend.abort(handle)
        # Answered by the stream itself: the abort was read before.
        await frontend.utility(1)
        engine.executor.release()
        await frontend.ping()
        await engine.wait_idle()
        assert handle not in frontend.tokens
        assert handle not in frontend.finished


async def test_abort_in_the_step_that_ends_the_request():
    async with engine_in_process(step_seconds=0.001) as engine, raw_frontend(engine.address) as frontend:
        handles = [await frontend.add([number, 5], max_tokens=3) for number in range(40, 80)]
        for handle in handles:
            await frontend.abort(handle)
        await frontend.ping()
        await engine.wait_idle()
        assert all(len(ends) == 1 for ends in frontend.finished.values())
        for handle, tokens in frontend.tokens.items():
            assert tokens == fake_tokens([handle + 39, 5], 3)[: len(tokens)]


async def test_late_abort_of_an_old_request_leaves_the_new_one():
    async with engine_in_process(step_seconds=0.002) as engine, raw_frontend(engine.address) as frontend:
        old = await frontend.add([5, 6], request_id="same", max_tokens=3)
        await frontend.finish(old)
        new = await frontend.add([7, 8], request_id="same", max_tokens=40)
        await frontend.abort(old)
        await frontend.finish(new)
        assert frontend.tokens[new] == fake_tokens([7, 8], 40)


async def test_a_stream_that_ends_takes_its_own_requests_only():
    async with engine_in_process(step_seconds=0.002) as engine, raw_frontend(engine.address) as other:
        kept = await other.add([3, 4], max_tokens=300)
        for leave in ("half_close", "cancel", "close"):
            async with raw_frontend(engine.address) as frontend:
                handles = [await frontend.add([number], max_tokens=2000) for number in range(40, 44)]
                await frontend.receive_until(lambda: all(h in frontend.tokens for h in handles))  # noqa: B023
                if leave == "half_close":
                    await frontend.call.done_writing()
                    assert (await frontend.end()).code.name == "OK"
                elif leave == "cancel":
                    frontend.call.cancel()
                else:
                    await frontend.channel.close()
                await engine.wait_until(lambda: engine.num_open_requests == engine.server.hub.num_streams == 1)
        await other.finish(kept)
        assert other.tokens[kept] == fake_tokens([3, 4], 300)
        await engine.wait_idle()


KILLED_FRONTEND = """
import asyncio, sys
from tests.support.raw_frontend import raw_frontend
async def main():
    async with raw_frontend(sys.argv[1], frontend_id="killed") as frontend:
        for number in range(40, 60):
            await frontend.add([number, 7], max_tokens=100000)
        await frontend.receive_until(lambda: len(frontend.tokens) == 20)
        print("running", flush=True)
        await frontend.end(600)
asyncio.run(main())
"""


async def test_a_killed_frontend_leaves_nothing_behind():
    async with engine_in_process(step_seconds=0.005) as engine, raw_frontend(engine.address) as other:
        kept = await other.add([3, 4], max_tokens=400)
        killed = await asyncio.create_subprocess_exec(
            sys.executable, "-c", KILLED_FRONTEND, engine.address, cwd=ROOT, stdout=subprocess.PIPE
        )
        assert await asyncio.wait_for(killed.stdout.readline(), 30) == b"running\n"
        killed.kill()
        await engine.wait_until(lambda: engine.num_open_requests == engine.server.hub.num_streams == 1)
        await killed.wait()
        killed._transport.close()
        await other.finish(kept)
        assert other.tokens[kept] == fake_tokens([3, 4], 400)
        await engine.wait_idle()


async def test_aborts_are_counted_by_cause():
    async with engine_in_process(step_seconds=0.002) as engine, raw_frontend(engine.address) as frontend:
        causes = [pb.ABORT_CAUSE_CLIENT, pb.ABORT_CAUSE_STOP_STRING, pb.ABORT_CAUSE_STOP_STRING, 99]
        handles = [await frontend.add([number], max_tokens=2000) for number in range(40, 44)]
        requests = pb.AbortRequests(handles=handles)
        requests.causes.extend(causes)
        await frontend.send(abort_requests=requests)
        await frontend.ping()
        await engine.wait_idle()
        await frontend.ping()
        assert {
            cause: engine.metrics.registry.get_sample_value(
                "takt_engine_aborts_total", {"model_name": "fake", "engine": "0", "cause": cause}
            )
            for cause in ("client", "stop_string", "unspecified", "deadline")
        } == {"client": 1, "stop_string": 2, "unspecified": 1, "deadline": 0}


def test_request_bytes_are_what_the_helper_says():
    """The helper serialises the handle first, as peek_handle expects of every client."""
    assert add_request(300, [1]).SerializeToString().startswith(b"\x08\xac\x02")
