"""Frontends that do not read, or say nothing: bounded, merged, complete, and in nobody's way."""

import asyncio
import time

import grpc

from engine_svc.core.outputs import EngineCoreOutputs, SchedulerStats
from engine_svc.service.hub import HubOptions
from engine_svc.service.outbox import OutboxLimits
from shared.types import StepOutputs
from takt.engine.v1 import engine_pb2 as pb
from tests.support.engine_in_process import engine_in_process, fake_tokens
from tests.support.raw_frontend import raw_frontend

# A client that takes little before its reader asks for it.
SMALL_WINDOW = [("grpc.http2.lookahead_bytes", 16384), ("grpc.http2.bdp_probe", 0)]


async def test_a_slow_frontend_gets_merged_outputs_and_every_token():
    limits = {"max_model_len": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 4096, "num_blocks": 64 * 256 + 1}
    async with (
        engine_in_process(available_kv_cache_memory=1 << 26, verify=False, **limits) as engine,
        raw_frontend(engine.address, options=SMALL_WINDOW) as slow,
        raw_frontend(engine.address) as fast,
    ):
        handles = [await slow.add([number], max_tokens=3000) for number in range(40, 100)]
        # The engine ends all of it without being read.
        await fast.receive_until(lambda: fast.received[-1].heartbeat.load.num_running > 0)
        fast_handle = await fast.add([3, 4], max_tokens=200)
        await fast.finish(fast_handle)
        assert fast.tokens[fast_handle] == fake_tokens([3, 4], 200)
        await engine.wait_idle(60)
        (stream,) = (s for s in engine.server.hub._streams.values() if s.outbox.num_tokens)
        assert stream.outbox.num_merged > 500
        # Bounded by the tokens, not by the steps.
        assert stream.outbox.num_bytes < 5 * 60 * 3000 + 60_000
        await slow.finish(*handles)
        for number, handle in enumerate(handles, 40):
            assert slow.tokens[handle] == fake_tokens([number], 3000)
        assert all(len(ends) == 1 for ends in slow.finished.values())
        steps = [m for m in slow.received if m.WhichOneof("message") == "step_outputs"]
        assert len(steps) < 2500
        assert max(m.ByteSize() for m in steps) <= 1 << 20


async def test_a_frontend_over_its_bound_is_cut_off_and_no_other():
    hub = HubOptions(heartbeat_interval=0.05, outbox=OutboxLimits(max_bytes=20_000))
    async with (
        engine_in_process(hub=hub, verify=False, max_model_len=4096, num_blocks=9000) as engine,
        raw_frontend(engine.address, options=SMALL_WINDOW) as slow,
        raw_frontend(engine.address) as fast,
    ):
        for number in range(40, 70):
            await slow.add([number], max_tokens=4000)
        kept = await fast.add([3, 4], max_tokens=1500)
        await fast.finish(kept)
        async with asyncio.timeout(20):
            while engine.server.hub.num_streams > 1:
                await fast.receive()
        await engine.wait_idle()
        assert fast.tokens[kept] == fake_tokens([3, 4], 1500)
        ended = await slow.end()
        assert ended.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "the limit is 20000" in ended.details
        labels = {"model_name": "fake", "engine": "0"}
        assert engine.metrics.registry.get_sample_value("takt_engine_streams_cut_total", labels) == 1


async def test_a_frontend_that_takes_nothing_for_too_long_is_cut_off():
    hub = HubOptions(heartbeat_interval=0.05, outbox=OutboxLimits(max_stall_seconds=0.5))
    async with (
        engine_in_process(hub=hub, verify=False, max_model_len=4096, num_blocks=9000) as engine,
        raw_frontend(engine.address, options=SMALL_WINDOW) as slow,
    ):
        for number in range(40, 70):
            await slow.add([number], max_tokens=4000)
        await engine.wait_until(lambda: not engine.server.hub.num_streams)
        await engine.wait_idle()
        assert "nothing was read" in (await slow.end()).details


async def test_a_silent_frontend_is_cut_off_and_any_message_is_a_sign_of_life():
    hub = HubOptions(heartbeat_interval=0.05, max_silence_seconds=0.6)
    async with engine_in_process(hub=hub, step_seconds=0.01) as engine, raw_frontend(engine.address) as silent:
        handle = await silent.add([5, 6], max_tokens=2000)
        async with raw_frontend(engine.address) as alive:
            kinds = [
                {"heartbeat": pb.Heartbeat(sequence=1)},
                {"abort_requests": pb.AbortRequests()},
                {"add_requests": pb.AddRequests()},
                {"utility_call": pb.UtilityCall(call_id=1, timeout_ms=1000, ping={})},
            ]
            started = time.monotonic()
            for number in range(16):
                await alive.send(**kinds[number % len(kinds)])
                await asyncio.sleep(0.1)
            assert time.monotonic() - started > 1.2
            assert engine.server.hub.num_streams == 1
            ended = await silent.end()
            assert ended.code == grpc.StatusCode.UNAVAILABLE
            assert "nothing was received" in ended.details
            assert len(silent.tokens[handle]) > 5
            await alive.send(heartbeat=pb.Heartbeat())
            await engine.wait_idle()
            await alive.send(heartbeat=pb.Heartbeat())
            await alive.finish(await alive.add([7, 8]))


async def test_time_in_which_the_loop_stood_still_counts_for_no_frontend():
    hub = HubOptions(heartbeat_interval=0.05, max_silence_seconds=0.5)
    async with engine_in_process(hub=hub) as engine, raw_frontend(engine.address) as frontend:
        await frontend.ping()
        time.sleep(1.0)  # noqa: ASYNC251 - the loop of server and frontend stands still
        await asyncio.sleep(0.2)
        await frontend.ping()
        assert engine.server.hub.num_streams == 1


async def test_outputs_that_cannot_be_written_end_their_stream_loudly(caplog):
    async with (
        engine_in_process() as engine,
        raw_frontend(engine.address) as broken,
        raw_frontend(engine.address) as other,
    ):
        bad = StepOutputs(step=1, handles=[-1], token_ids=[5])
        engine.server.hub.on_step(EngineCoreOutputs(1, {1: bad}, SchedulerStats()), 0.0)
        ended = await broken.end()
        assert ended.code == grpc.StatusCode.INTERNAL
        assert "ValueError" in caplog.text
        await other.finish(await other.add([5, 6]))
        assert engine.server.hub.num_streams == 1


async def test_pings_on_a_silent_connection_are_no_flood():
    """gRPC's defaults end such a connection after three seconds."""
    options = [
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.keepalive_timeout_ms", 1000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
    async with (
        engine_in_process(hub=HubOptions(heartbeat_interval=5.0)) as engine,
        raw_frontend(engine.address, options=options) as frontend,
    ):
        await frontend.ping()
        await asyncio.sleep(4.5)
        await frontend.ping()
