"""Utility calls: answered once, in time, and never a danger to the engine."""

import json

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.errors import OverloadedError
from takt.engine.v1 import engine_pb2 as pb
from tests.support.engine_in_process import engine_in_process, fake_tokens
from tests.support.raw_frontend import raw_frontend

INVALID_ARGUMENT, DEADLINE_EXCEEDED, ALREADY_EXISTS, RESOURCE_EXHAUSTED = 3, 4, 6, 8
FAILED_PRECONDITION, UNIMPLEMENTED, INTERNAL = 9, 12, 13


def reset(running=False):
    return {"reset_prefix_cache": pb.ResetPrefixCacheMethod(reset_running_requests=running)}


async def test_reset_prefix_cache():
    async with engine_in_process(step_seconds=0.005) as engine, raw_frontend(engine.address) as frontend:
        prompt = list(range(40, 80))
        first = await frontend.add(prompt, max_tokens=60)
        await frontend.receive_until(lambda: first in frontend.tokens)
        assert not (await frontend.utility(1, **reset())).reset_prefix_cache.success
        assert (await frontend.utility(2, **reset(running=True))).reset_prefix_cache.success
        (finished,) = await frontend.finish(first)
        assert finished.num_preemptions == 1
        assert frontend.tokens[first] == fake_tokens(prompt, 60)
        assert (await frontend.utility(3, **reset())).reset_prefix_cache.success
        second = await frontend.add(prompt, max_tokens=2)
        (finished,) = await frontend.finish(second)
        assert finished.num_cached_tokens == 0


async def test_load_and_ping():
    async with engine_in_process(max_num_seqs=1) as engine, raw_frontend(engine.address) as frontend:
        assert await frontend.ping() == 0
        engine.executor.hold()
        running = await frontend.add([3, 4], max_tokens=5)
        waiting = await frontend.add([5, 6, 7], max_tokens=5)
        await engine.wait_for_step(1)
        engine.executor.release()
        await frontend.finish(running, waiting)
        load = await frontend.load()
        assert (load.num_running, load.num_waiting, load.kv_cache_usage) == (0, 0, 0)
        assert load.step_counter == await frontend.ping() > 5


async def test_profile(tmp_path):
    async with engine_in_process(profile_dir=str(tmp_path)) as engine, raw_frontend(engine.address) as frontend:
        result = await frontend.utility(1, stop_profile=pb.StopProfileMethod())
        assert result.error.code == FAILED_PRECONDITION
        assert (await frontend.utility(2, start_profile=pb.StartProfileMethod(name="mine"))).HasField("profile")
        await frontend.finish(await frontend.add([5, 6], max_tokens=4))
        result = await frontend.utility(3, stop_profile=pb.StopProfileMethod())
        assert len(json.loads((tmp_path / "mine.json").read_text())["traceEvents"]) >= 4
        assert result.profile.trace_path == str(tmp_path / "mine.json")


REFUSED = [
    ({}, UNIMPLEMENTED, "method"),
    ({"start_profile": pb.StartProfileMethod(name="../evil")}, INVALID_ARGUMENT, "start_profile.name"),
    ({"start_profile": pb.StartProfileMethod(name="x" * 65)}, INVALID_ARGUMENT, "start_profile.name"),
    ({"ping": pb.PingMethod(), "timeout_ms": 0}, INVALID_ARGUMENT, "timeout_ms"),
    # No folder for profiles.
    ({"start_profile": pb.StartProfileMethod()}, FAILED_PRECONDITION, ""),
]


@pytest.mark.parametrize(("call", "code", "field"), REFUSED)
async def test_a_refused_call(call, code, field):
    async with engine_in_process() as engine, raw_frontend(engine.address) as frontend:
        result = await frontend.utility(1, **call)
        assert (result.error.code, result.error.field) == (code, field)
        assert result.error.message
        assert await frontend.ping() == 0


async def test_a_method_of_a_later_version():
    async with engine_in_process() as engine, raw_frontend(engine.address) as frontend:
        # UtilityCall{call_id: 5, timeout_ms: 100, field 17: {}}
        await frontend.send_bytes(b"\x22\x07\x08\x05\x10\x64\x8a\x01\x00")
        await frontend.receive_until(lambda: 5 in frontend.results)
        assert frontend.results[5].error.code == UNIMPLEMENTED


async def test_a_call_that_raises_fails_alone(monkeypatch, caplog):
    async with engine_in_process() as engine, raw_frontend(engine.address) as frontend:

        def broken(**_):
            raise ZeroDivisionError("secret")

        monkeypatch.setattr(engine.engine.core, "reset_prefix_cache", broken)
        result = await frontend.utility(1, **reset())
        assert result.error.code == INTERNAL
        assert "secret" not in result.error.message
        assert "ZeroDivisionError: secret" in caplog.text

        def typed(**_):
            raise OverloadedError("too much", field="x")

        monkeypatch.setattr(engine.engine.core, "reset_prefix_cache", typed)
        result = await frontend.utility(2, **reset())
        assert (result.error.code, result.error.message) == (RESOURCE_EXHAUSTED, "too much")
        await frontend.finish(await frontend.add([5, 6]))


async def test_a_result_that_cannot_be_sent_fails_its_stream_only(monkeypatch):
    async with engine_in_process() as engine, raw_frontend(engine.address) as other:
        monkeypatch.setattr(engine.engine.core, "reset_prefix_cache", lambda **_: object())
        async with raw_frontend(engine.address) as frontend:
            await frontend.send(utility_call=pb.UtilityCall(call_id=1, timeout_ms=10_000, **reset()))
            await frontend.receive_until(lambda: 1 in frontend.results)
            assert frontend.results[1].error.code == INTERNAL
        await other.finish(await other.add([5, 6]))


async def test_a_late_call_fails_at_its_deadline_and_its_result_is_dropped():
    async with engine_in_process() as engine, raw_frontend(engine.address) as frontend:
        engine.executor.hold()
        handle = await frontend.add([5, 6], max_tokens=3)
        await engine.wait_for_step(1)
        result = await frontend.utility(1, timeout_ms=50, ping=pb.PingMethod())
        assert result.error.code == DEADLINE_EXCEEDED
        engine.executor.release()
        await frontend.finish(handle)
        await frontend.ping()
        assert sum(m.utility_result.call_id == 1 for m in frontend.received) == 1


async def test_calls_during_a_long_step_wait_while_health_and_heartbeats_go_on():
    async with engine_in_process() as engine, raw_frontend(engine.address) as frontend:
        engine.executor.hold()
        handle = await frontend.add([5, 6], max_tokens=3)
        await engine.wait_for_step(1)
        await frontend.send(utility_call=pb.UtilityCall(call_id=7, timeout_ms=20_000, ping=pb.PingMethod()))
        await frontend.send(utility_call=pb.UtilityCall(call_id=7, timeout_ms=20_000, ping=pb.PingMethod()))
        await frontend.receive_until(lambda: 7 in frontend.results)
        assert frontend.results[7].error.code == ALREADY_EXISTS
        frontend.received.clear()
        await frontend.receive_until(lambda: len(frontend.received) >= 3)
        assert {m.WhichOneof("message") for m in frontend.received} == {"heartbeat"}
        assert frontend.received[-1].heartbeat.load.in_step_ms > 0
        sequence = [m.heartbeat.sequence for m in frontend.received]
        assert sequence == sorted(set(sequence))
        response = await health_pb2_grpc.HealthStub(frontend.channel).Check(health_pb2.HealthCheckRequest())
        assert response.status == health_pb2.HealthCheckResponse.SERVING
        engine.executor.release()
        await frontend.finish(handle)
        await frontend.receive_until(lambda: frontend.results[7].HasField("ping"))


async def test_open_calls_are_bounded_and_die_with_their_stream():
    async with engine_in_process() as engine:
        engine.executor.hold()
        async with raw_frontend(engine.address) as frontend:
            await frontend.add([5, 6], max_tokens=3)
            await engine.wait_for_step(1)
            for call_id in range(1, 65):
                await frontend.send(utility_call=pb.UtilityCall(call_id=call_id, timeout_ms=60_000, ping={}))
            assert (await frontend.utility(65, ping={})).error.code == RESOURCE_EXHAUSTED
        await engine.wait_until(lambda: not engine.server.hub.num_streams)
        engine.executor.release()
        async with raw_frontend(engine.address) as frontend:
            await frontend.ping()
        await engine.wait_idle()
