"""Engines that are lost, come back, drain, hang, or must not be used at all."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest

from shared.types import AbortCause
from takt.engine.v1 import engine_pb2 as pb
from takt.v1 import admin_pb2, types_pb2
from tests.support.frontend_in_process import collect, frontend_in_process, next_message
from tests.support.scripted_engine import scripted_engine
from tests.support.tiny_tokenizer import digest

CRASH = (grpc.StatusCode.INTERNAL, "boom")


@asynccontextmanager
async def fleet(tokenizer_folder, count, **options):
    """So many scripted engines and a frontend on them; their first streams by address."""
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(scripted_engine(epoch=f"epoch-{index}", data_parallel_rank=index))
            for index in range(count)
        ]
        addresses = [engine.address for engine in engines]
        frontend = await stack.enter_async_context(frontend_in_process(tokenizer_folder, *addresses, **options))
        await frontend.wait_ready(count)
        yield engines, [await engine.stream() for engine in engines], frontend


async def next_add(streams):
    """The stream that gets the next request, and the request."""
    tasks = [asyncio.create_task(stream.add()) for stream in streams]
    done, pending = await asyncio.wait(tasks, timeout=20, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    (task,) = done
    return streams[tasks.index(task)], task.result()


async def test_output_that_began_ends_unavailable_with_what_was_emitted(tokenizer_folder):
    async with fleet(tokenizer_folder, 2) as (_, streams, frontend):
        call = frontend.generate("a")
        stream, request = await next_add(streams)
        await stream.outputs({request.handle: [70, 71, 72]})
        await next_message(call)
        stream.end(*CRASH)
        answer = await collect(call)
        assert answer.code == grpc.StatusCode.UNAVAILABLE
        assert answer.info.reason == "ENGINE_LOST"
        assert answer.info.metadata["tokens_emitted"] == "3"
        assert answer.last.finish_reason == types_pb2.FINISH_REASON_ERROR
        await frontend.idle()


async def test_a_request_without_output_goes_to_another_engine_unseen(tokenizer_folder):
    async with fleet(tokenizer_folder, 2) as (_, streams, frontend):
        call = frontend.generate([5, 6], seed=3, request_id="mine")
        first, request = await next_add(streams)
        await first.first(request.handle)
        first.end(*CRASH)
        second, again = await next_add(streams)
        assert second is not first
        assert again.request_id == "mine"
        assert again.sampling == request.sampling
        assert list(again.prompt_token_ids) == [5, 6]
        await second.finish(again.handle, [70])
        answer = await collect(call)
        assert answer.error is None
        assert answer.token_ids == [70]
        assert frontend.metric("takt_frontend_zero_token_retries_total") == 1


async def test_a_drawn_seed_survives_the_move(tokenizer_folder):
    async with fleet(tokenizer_folder, 2) as (_, streams, frontend):
        call = frontend.generate("a")
        first, request = await next_add(streams)
        first.end(*CRASH)
        second, again = await next_add(streams)
        assert again.sampling.seed == request.sampling.seed
        await second.finish(again.handle, [70])
        await collect(call)


async def test_a_request_walks_through_two_engines_at_most(tokenizer_folder):
    async with fleet(tokenizer_folder, 3) as (_, streams, frontend):
        call = frontend.generate("a")
        for _ in range(2):
            stream, request = await next_add(streams)
            await stream.first(request.handle)
            stream.end(*CRASH)
        answer = await collect(call)
        assert answer.code == grpc.StatusCode.UNAVAILABLE
        assert answer.info.reason == "ENGINE_LOST"
        assert answer.info.metadata["tokens_emitted"] == "0"
        assert not answer.messages
        assert len(frontend.frontend.engines.ready) >= 1


async def test_no_other_engine_means_unavailable_at_once(tokenizer_folder):
    async with fleet(tokenizer_folder, 1) as (engines, (stream,), frontend):
        call = frontend.generate("a")
        await stream.add()
        await engines[0].stop()
        answer = await collect(call)
        assert answer.code == grpc.StatusCode.UNAVAILABLE
        assert answer.info.reason == "ENGINE_LOST"


async def test_retries_can_be_switched_off(tokenizer_folder):
    async with fleet(tokenizer_folder, 2, max_retries=0) as (_, streams, frontend):
        call = frontend.generate("a")
        stream, _ = await next_add(streams)
        stream.end(*CRASH)
        assert (await collect(call)).code == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("how", ["ok", "error", "dead", "garbage", "wrong columns"])
async def test_every_way_to_end_a_stream_is_a_loss_with_one_end_each(tokenizer_folder, how):
    async with fleet(tokenizer_folder, 1) as (engines, (stream,), frontend):
        calls = [frontend.generate("a") for _ in range(8)]
        requests = [await stream.add() for _ in calls]
        await stream.outputs({request.handle: [70] for request in requests})
        for call in calls:
            await next_message(call)
        match how:
            case "ok":
                stream.end()
            case "error":
                stream.end(*CRASH)
            case "dead":
                await stream.send(dead=pb.Dead(reason="the executor failed"))
            case "garbage":
                await stream.send_bytes(b"\xff\xff")
            case "wrong columns":
                await stream.send(step_outputs=pb.StepOutputs(handles=[1, 2], token_ids=[3]))
        for answer in await asyncio.gather(*map(collect, calls)):
            assert answer.code == grpc.StatusCode.UNAVAILABLE
            assert answer.info.metadata["tokens_emitted"] == "1"
            assert answer.last.finish_reason == types_pb2.FINISH_REASON_ERROR
        # It reconnects, to a stream that starts from nothing.
        again = await engines[0].stream()
        await frontend.wait_ready()
        call = frontend.generate("a")
        request = await again.add()
        await again.finish(request.handle, [71])
        assert (await collect(call)).token_ids == [71]
        assert frontend.metric("takt_frontend_engine_losses_total", address=engines[0].address) == 1


async def test_nothing_of_an_older_stream_is_delivered(tokenizer_folder):
    async with fleet(tokenizer_folder, 1) as (engines, (old,), frontend):
        lost = frontend.generate("a")
        request = await old.add()
        await old.outputs({request.handle: [70]})
        await next_message(lost)
        old.end(*CRASH)
        await collect(lost)
        engines[0].ready["epoch"] = "epoch-new"
        new = await engines[0].stream()
        await frontend.wait_ready()
        call = frontend.generate("a")
        again = await new.add()
        assert again.handle > request.handle
        # Tokens under the old number mean nobody.
        await new.outputs({request.handle: [99]})
        await new.finish(again.handle, [71])
        assert (await collect(call)).token_ids == [71]
        assert new.num_unread_aborts == 0


async def test_a_silent_engine_is_suspect_and_then_lost(tokenizer_folder):
    async with fleet(tokenizer_folder, 2) as (engines, streams, frontend):
        silent, client = engines[0], frontend.frontend.engines.clients[0]
        silent.heartbeat_seconds = None
        await frontend.until(lambda: client.state.name == "SUSPECT")
        # It gets nothing new.
        for _ in range(3):
            call = frontend.generate("a")
            request = await streams[1].add()
            await streams[1].finish(request.handle, [70])
            await collect(call)
        assert streams[0].num_unread_adds == 0
        await frontend.until(lambda: client.num_losses == 1)
        assert "silent" in client.last_error
        silent.heartbeat_seconds = 0.05
        await silent.stream()
        await frontend.wait_ready(2)


async def test_a_suspect_that_speaks_again_is_ready_again(tokenizer_folder):
    async with fleet(tokenizer_folder, 1) as (engines, _, frontend):
        client = frontend.frontend.engines.clients[0]
        engines[0].heartbeat_seconds = None
        await frontend.until(lambda: client.state.name == "SUSPECT")
        engines[0].heartbeat_seconds = 0.05
        await frontend.wait_ready()
        assert client.num_losses == 0


async def test_heartbeats_go_to_the_engine_too(tokenizer_folder):
    async with fleet(tokenizer_folder, 1) as (_, (stream,), frontend):
        await frontend.until(lambda: stream.num_heartbeats >= 3)
        assert stream.hello.role == pb.ROLE_FRONTEND
        assert stream.hello.protocol_version == 1
        assert stream.hello.frontend_id


# --- draining ---------------------------------------------------------------------------------------------------------


async def test_a_draining_engine_finishes_and_gets_nothing_new(tokenizer_folder):
    async with fleet(tokenizer_folder, 2) as (_, streams, frontend):
        call = frontend.generate("a")
        stream, request = await next_add(streams)
        other = streams[1 - streams.index(stream)]
        await stream.outputs({request.handle: [70]})
        await next_message(call)
        await stream.send(draining=pb.Draining(remaining_ms=1000))
        await frontend.wait_ready(1)
        for _ in range(3):
            moved = frontend.generate("a")
            await other.finish((await other.add()).handle, [71])
            await collect(moved)
        await stream.finish(request.handle, [72])
        answer = await collect(call)
        assert answer.error is None
        assert answer.token_ids == [72]


async def test_what_a_draining_engine_refuses_or_aborts_goes_elsewhere_without_count(tokenizer_folder):
    async with fleet(tokenizer_folder, 3, max_retries=0) as (_, streams, frontend):
        call = frontend.generate("a")
        refusing, request = await next_add(streams)
        await refusing.finish(
            request.handle, reason=pb.FINISH_REASON_ERROR, error=pb.EngineError(code=14, reason="DRAINING", message="x")
        )
        aborting, request = await next_add(streams)
        await aborting.finish(request.handle, reason=pb.FINISH_REASON_ABORT, abort_cause=pb.ABORT_CAUSE_SHUTDOWN)
        last, request = await next_add(streams)
        assert len({refusing, aborting, last}) == 3
        await last.finish(request.handle, [70])
        assert (await collect(call)).token_ids == [70]


async def test_a_shutdown_after_output_ends_with_an_abort(tokenizer_folder):
    async with fleet(tokenizer_folder, 2) as (_, streams, frontend):
        call = frontend.generate("a")
        stream, request = await next_add(streams)
        await stream.outputs({request.handle: [70]})
        await next_message(call)
        await stream.finish(request.handle, reason=pb.FINISH_REASON_ABORT, abort_cause=pb.ABORT_CAUSE_SHUTDOWN)
        answer = await collect(call)
        assert answer.error is None
        assert answer.last.finish_reason == types_pb2.FINISH_REASON_ABORT


async def test_everything_drains_means_unavailable(tokenizer_folder):
    async with fleet(tokenizer_folder, 1) as (_, (stream,), frontend):
        call = frontend.generate("a")
        request = await stream.add()
        await stream.send(draining=pb.Draining())
        await stream.finish(request.handle, reason=pb.FINISH_REASON_ABORT, abort_cause=pb.ABORT_CAUSE_SHUTDOWN)
        answer = await collect(call)
        assert answer.code == grpc.StatusCode.UNAVAILABLE
        assert not answer.messages
        assert await frontend.health() == "NOT_SERVING"
        assert (await frontend.answer("a")).code == grpc.StatusCode.UNAVAILABLE


# --- engines that must not be used ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tokenizer_digest": "0" * 64}, "its tokenizer 000000000000 is not the one served here"),
        ({"vocab_size": 258}, "its vocabulary of 258 lacks tokens of the tokenizer's 259"),
        ({"protocol_version": 2}, "protocol version must be 1, the engine speaks 2"),
    ],
)
async def test_an_engine_of_another_kind_is_refused_with_the_reason(tokenizer_folder, fields, reason):
    async with scripted_engine(**fields) as engine, frontend_in_process(tokenizer_folder, engine.address) as frontend:
        await engine.stream()
        await frontend.until(lambda: frontend.frontend.engines.clients[0].state.name == "REFUSED")
        (load,) = (await frontend.admin.GetLoad(admin_pb2.GetLoadRequest())).engines
        assert load.state == admin_pb2.ENGINE_STATE_REFUSED
        assert reason in load.last_error
        answer = await frontend.answer("a")
        assert answer.code == grpc.StatusCode.UNAVAILABLE
        assert "refused" in answer.error.details()
        # One that is replaced by the right one is taken.
        engine.ready = {"tokenizer_digest": digest(tokenizer_folder)}
        await frontend.wait_ready()


async def test_an_engine_that_does_not_introduce_itself_is_not_used(tokenizer_folder):
    async with scripted_engine() as engine, frontend_in_process(tokenizer_folder, engine.address) as frontend:
        engine.first_frame = pb.ConnectResponse(heartbeat=pb.EngineHeartbeat()).SerializeToString()
        stream = await engine.stream()
        stream.end(*CRASH)
        await frontend.until(lambda: frontend.frontend.engines.clients[0].last_error != "")
        engine.first_frame = None
        await frontend.wait_ready()


async def test_admission_is_by_the_smallest_context(tokenizer_folder):
    async with AsyncExitStack() as stack:
        small = await stack.enter_async_context(scripted_engine(max_model_len=32, epoch="small"))
        large = await stack.enter_async_context(scripted_engine(max_model_len=128, epoch="large"))
        frontend = await stack.enter_async_context(frontend_in_process(tokenizer_folder, small.address, large.address))
        await frontend.wait_ready(2)
        answer = await frontend.answer([5] * 32)
        assert "max_model_len 32" in answer.error.details()
        await small.stop()
        await frontend.wait_ready(1)
        call = frontend.generate([5] * 32)
        request = await (await large.stream()).add()
        assert request.sampling.max_tokens == 96
        call.cancel()


# --- many engines -----------------------------------------------------------------------------------------------------


async def test_requests_are_spread_by_what_is_in_flight(tokenizer_folder):
    async with fleet(tokenizer_folder, 3) as (_, streams, frontend):
        calls = [frontend.generate("a") for _ in range(9)]
        await frontend.until(lambda: sum(stream.num_unread_adds for stream in streams) == 9)
        assert [stream.num_unread_adds for stream in streams] == [3, 3, 3]
        for call in calls:
            call.cancel()
        await frontend.idle()
        for stream in streams:
            assert {(await stream.abort())[1] for _ in range(3)} == {AbortCause.CLIENT}


async def test_what_an_engine_says_of_others_requests_counts(tokenizer_folder):
    async with fleet(tokenizer_folder, 2) as (engines, streams, frontend):
        engines[0].load = pb.EngineLoad(num_running=5)
        await frontend.until(lambda: frontend.frontend.engines.clients[0].load.num_running == 5)
        calls = [frontend.generate("a") for _ in range(4)]
        await frontend.until(lambda: streams[1].num_unread_adds == 4)
        for call in calls:
            call.cancel()


async def test_a_client_may_name_the_rank(tokenizer_folder):
    async with fleet(tokenizer_folder, 3) as (engines, streams, frontend):
        calls = [frontend.generate("a", data_parallel_rank=2) for _ in range(4)]
        await frontend.until(lambda: streams[2].num_unread_adds == 4)
        assert (await streams[2].add()).data_parallel_rank == 2
        for call in calls:
            call.cancel()
        await engines[2].stop()
        await frontend.wait_ready(2)
        gone = await frontend.answer("a", data_parallel_rank=2)
        assert gone.code == grpc.StatusCode.UNAVAILABLE
