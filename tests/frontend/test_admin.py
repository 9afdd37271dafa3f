"""The admin port: utility calls through every engine, each failing alone, at once, and never for ever."""

import asyncio

import grpc
import pytest

from takt.engine.v1 import engine_pb2 as pb
from takt.v1 import admin_pb2
from tests.support.engine_in_process import engine_in_process
from tests.support.frontend_in_process import collect, frontend_in_process
from tests.support.scripted_engine import scripted_engine


async def test_calls_go_through_a_real_core(tokenizer_folder):
    async with (
        engine_in_process(vocab_size=300, max_model_len=256) as one,
        engine_in_process(vocab_size=300, max_model_len=256) as two,
        frontend_in_process(tokenizer_folder, one.address, two.address) as frontend,
    ):
        await frontend.wait_ready(2)
        ping = await frontend.admin.Ping(admin_pb2.PingRequest())
        assert [result.address for result in ping.results] == [one.address, two.address]
        assert all(result.round_trip_seconds > 0 and not result.error for result in ping.results)
        reset = await frontend.admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest())
        assert [(result.success, result.error) for result in reset.results] == [(True, ""), (True, "")]
        profile = await frontend.admin.StartProfile(admin_pb2.StartProfileRequest(name="x"))
        assert all(result.error for result in profile.results)
        bad_name = await frontend.admin.StartProfile(admin_pb2.StartProfileRequest(name="../x"))
        assert all("start_profile.name" in result.error for result in bad_name.results)
        load = await frontend.admin.GetLoad(admin_pb2.GetLoadRequest())
        assert [engine.address for engine in load.engines] == [one.address, two.address]
        assert all(engine.state == admin_pb2.ENGINE_STATE_READY and engine.epoch for engine in load.engines)
        assert [engine.max_model_len for engine in load.engines] == [256, 256]


async def test_a_reset_while_blocks_are_in_use_tells_so(tokenizer_folder):
    async with (
        engine_in_process(vocab_size=300, max_model_len=2048, step_seconds=0.002) as engine,
        frontend_in_process(tokenizer_folder, engine.address) as frontend,
    ):
        await frontend.wait_ready()
        call = frontend.generate("a" * 64, ignore_eos=True)
        await call.read()
        refused = await frontend.admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest())
        assert [result.success for result in refused.results] == [False]
        forced = await frontend.admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest(reset_running_requests=True))
        assert [result.success for result in forced.results] == [True]
        await call.read()
        call.cancel()
        await frontend.idle()


@pytest.fixture
async def pair(tokenizer_folder):
    async with (
        scripted_engine() as engine,
        frontend_in_process(tokenizer_folder, engine.address) as frontend,
    ):
        await frontend.wait_ready()
        yield await engine.stream(), frontend


async def test_an_engine_that_dies_fails_its_calls_at_once(pair):
    stream, frontend = pair
    call = frontend.admin.Ping(admin_pb2.PingRequest(timeout_ms=60_000))
    await stream.call()
    stream.end(grpc.StatusCode.INTERNAL, "boom")
    (result,) = (await asyncio.wait_for(call, 10)).results
    assert "was lost" in result.error


async def test_a_late_answer_is_a_timeout_and_hurts_nobody(pair):
    stream, frontend = pair
    late = asyncio.ensure_future(frontend.admin.Ping(admin_pb2.PingRequest(timeout_ms=50)))
    first = await stream.call()
    assert first.timeout_ms == 50
    (result,) = (await late).results
    assert "did not answer Ping within 0.05 s" in result.error
    await stream.send(utility_result=pb.UtilityResult(call_id=first.call_id, ping=pb.PingResult(step_counter=1)))
    again = asyncio.ensure_future(frontend.admin.Ping(admin_pb2.PingRequest()))
    second = await stream.call()
    assert second.call_id != first.call_id
    await stream.send(utility_result=pb.UtilityResult(call_id=second.call_id, ping=pb.PingResult(step_counter=2)))
    assert not (await again).results[0].error


async def test_a_cancelled_caller_leaves_nothing(pair):
    stream, frontend = pair
    call = frontend.admin.Ping(admin_pb2.PingRequest())
    asked = await stream.call()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    client = frontend.frontend.engines.clients[0]
    await frontend.until(lambda: not client._stream._calls)
    await stream.send(utility_result=pb.UtilityResult(call_id=asked.call_id, ping=pb.PingResult()))
    generate = frontend.generate("a")
    await stream.finish((await stream.add()).handle, [5])
    assert (await collect(generate)).error is None


async def test_errors_and_strange_answers_are_the_entrys(pair):
    stream, frontend = pair
    answers = [
        ({"error": pb.EngineError(code=9, reason="X", message="no profiler")}, "no profiler"),
        ({"ping": pb.PingResult()}, "another's result"),
        ({}, "unknown kind"),
    ]
    for fields, text in answers:
        call = asyncio.ensure_future(frontend.admin.StopProfile(admin_pb2.StopProfileRequest()))
        asked = await stream.call()
        assert asked.WhichOneof("method") == "stop_profile"
        assert asked.timeout_ms == 60_000
        await stream.send(utility_result=pb.UtilityResult(call_id=asked.call_id, **fields))
        (result,) = (await call).results
        assert text in result.error
    call = asyncio.ensure_future(frontend.admin.StopProfile(admin_pb2.StopProfileRequest()))
    asked = await stream.call()
    profile = pb.ProfileResult(trace_path="/traces/x.json")
    await stream.send(utility_result=pb.UtilityResult(call_id=asked.call_id, profile=profile))
    assert (await call).results[0].trace_path == "/traces/x.json"


async def test_no_engine_means_no_entries(tokenizer_folder):
    async with frontend_in_process(tokenizer_folder, "127.0.0.1:1") as frontend:
        assert not (await frontend.admin.Ping(admin_pb2.PingRequest())).results
        (load,) = (await frontend.admin.GetLoad(admin_pb2.GetLoadRequest())).engines
        assert load.state == admin_pb2.ENGINE_STATE_CONNECTING
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await frontend.admin.Ping(admin_pb2.PingRequest(timeout_ms=2**32 - 1))
        assert failure.value.code() == grpc.StatusCode.INVALID_ARGUMENT
