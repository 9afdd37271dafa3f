"""Health, reflection, metrics and the summary line."""

import asyncio
import logging
import re
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from engine_svc.core.outputs import SchedulerStats
from engine_svc.metrics import EngineMetrics
from engine_svc.service.server import EngineServer, ServerOptions
from takt.engine.v1 import engine_pb2 as pb
from tests.support.engine_in_process import engine_in_process
from tests.support.engine_process import engine_process
from tests.support.raw_frontend import raw_frontend

SERVICE = "takt.engine.v1.EngineService"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def check(channel, service):
    request = health_pb2.HealthCheckRequest(service=service)
    return (await health_pb2_grpc.HealthStub(channel).Check(request)).status


async def test_an_engine_that_loads_is_alive_and_not_ready():
    server = EngineServer(ServerOptions())
    await server.start()
    try:
        async with grpc.aio.insecure_channel(server.rpc.address) as channel:
            assert await check(channel, "") == SERVING
            assert await check(channel, SERVICE) == NOT_SERVING
    finally:
        await server.close(0)


async def test_readiness_is_watched_through_a_drain():
    async with engine_in_process(step_seconds=0.01) as engine, raw_frontend(engine.address) as frontend:
        watch = health_pb2_grpc.HealthStub(frontend.channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == SERVING
        handle = await frontend.add([3, 4], max_tokens=30)
        await frontend.receive_until(lambda: handle in frontend.tokens)
        engine.drain(60)
        assert (await watch.read()).status == NOT_SERVING
        assert await check(frontend.channel, "") == SERVING
        await frontend.finish(handle)


async def test_a_core_that_stands_still_is_not_alive(monkeypatch):
    monkeypatch.setattr("engine_svc.service.server.WATCHDOG_MARGIN_SECONDS", -29.0)
    async with engine_in_process() as engine, raw_frontend(engine.address) as frontend:
        engine.executor.hold()
        await frontend.add([3, 4])
        ended = await frontend.end()
        assert ended.code == grpc.StatusCode.UNAVAILABLE
        assert "the core did not go on" in ended.details
        assert await check(frontend.channel, "") == NOT_SERVING


async def test_reflection():
    async with engine_in_process() as engine, grpc.aio.insecure_channel(engine.address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        response = await call.read()
        assert SERVICE in [s.name for s in response.list_services_response.service]
        call.cancel()


async def test_metrics_over_http():
    with engine_process("--metrics-port", "0", "--engine-index", "3", "--num-blocks", "200") as engine:
        async with raw_frontend(engine.address) as frontend:
            prompt = list(range(40, 80))
            for _ in range(2):
                await frontend.finish(await frontend.add(prompt, max_tokens=5))
            aborted = await frontend.add(prompt, max_tokens=2000)
            await frontend.receive_until(lambda: aborted in frontend.tokens)
            await frontend.abort(aborted)
            await frontend.ping()
            await frontend.receive_until(lambda: frontend.received[-1].WhichOneof("message") == "heartbeat")
            text = await asyncio.to_thread(
                lambda: urllib.request.urlopen(f"http://{engine.metrics_address}/metrics").read().decode()
            )

    def value(name, **labels):
        wanted = {"model_name": "fake", "engine": "3", **labels}
        for line in text.splitlines():
            match = re.fullmatch(r"([a-z_:]+)\{(.*)\} (\S+)", line)
            if match and match[1] == name and dict(re.findall(r'(\w+)="([^"]*)"', match[2])) == wanted:
                return float(match[3])
        raise AssertionError(f"{name} {wanted} is not in\n{text}")

    assert value("vllm:num_requests_running") == 0
    assert value("vllm:num_requests_waiting") == 0
    assert value("vllm:num_requests_waiting_by_reason", reason="capacity") == 0
    assert value("vllm:kv_cache_usage_perc") == 0
    assert value("vllm:num_preemptions_total") == 0
    assert value("vllm:prefix_cache_queries_total") == 120
    assert value("vllm:prefix_cache_hits_total") == 64
    assert value("vllm:iteration_tokens_total_count") >= 10
    assert value("vllm:iteration_tokens_total_bucket", le="8.0") < value("vllm:iteration_tokens_total_count")
    assert value("takt_engine_aborts_total", cause="client") == 1
    assert value("takt_engine_streams") == 1
    assert value("takt_engine_step_seconds_count") >= 10
    assert 'vllm:cache_config_info{block_size="16"' in text
    assert 'num_gpu_blocks="200"' in text


def stats(**values):
    return SchedulerStats(**values)


def test_summary_line(caplog):
    metrics = EngineMetrics("m", 7)
    caplog.set_level(logging.DEBUG)
    metrics.observe_step(
        stats(
            num_running=3,
            num_waiting=2,
            kv_cache_usage=0.25,
            num_scheduled_tokens=10,
            num_prompt_tokens=9,
            num_generation_tokens=1,
            num_preempted=1,
            prefix_cache_queries=8,
            prefix_cache_hits=2,
        ),
        0.01,
    )
    metrics.log_summary()
    record = caplog.records[-1]
    assert record.levelno == logging.INFO
    assert re.fullmatch(
        r"Engine 007: Avg prompt throughput: \d+\.\d tokens/s, Avg generation throughput: \d+\.\d tokens/s, "
        r"Running: 3 reqs, Waiting: 2 reqs, Preemptions: 1, GPU KV cache usage: 25\.0%, "
        r"Prefix cache hit rate: 25\.0%",
        record.getMessage(),
    )
    metrics.observe_step(stats(), 0.01)
    metrics.log_summary()
    assert caplog.records[-1].levelno == logging.INFO, "the first quiet line still tells that it became quiet"
    metrics.log_summary()
    assert caplog.records[-1].levelno == logging.DEBUG
    assert "Avg prompt throughput: 0.0 tokens/s" in caplog.records[-1].getMessage()
    assert "Preemptions" not in caplog.records[-1].getMessage()


async def test_waiting_and_running_are_seen_while_they_last():
    async with engine_in_process(max_num_seqs=1, step_seconds=0.01) as engine, raw_frontend(engine.address) as f:
        first = await f.add([3, 4], max_tokens=30)
        await f.add([5, 6], max_tokens=5)
        await f.receive_until(lambda: len(f.tokens.get(first, [])) > 5)
        value = engine.metrics.registry.get_sample_value
        labels = {"model_name": "fake", "engine": "0"}
        assert value("vllm:num_requests_running", labels) == 1
        assert value("vllm:num_requests_waiting", labels) == 1
        assert value("vllm:kv_cache_usage_perc", labels) > 0
        load = await f.load()
        assert (load.num_running, load.num_waiting, load.num_waiting_tokens) == (1, 1, 2)
        await f.abort(1, 2)
        await f.ping()
        await engine.wait_idle()
        await f.ping()
        assert value("vllm:num_requests_running", labels) == 0
        assert value("vllm:kv_cache_usage_perc", labels) == 0


async def test_refused_requests_are_counted():
    async with engine_in_process() as engine, raw_frontend(engine.address) as frontend:
        await frontend.add([], handle=1)
        await frontend.finish(1)
        await frontend.receive_until(lambda: frontend.received[-1].WhichOneof("message") == "heartbeat")
        labels = {"model_name": "fake", "engine": "0"}
        assert engine.metrics.registry.get_sample_value("takt_engine_invalid_messages_total", labels) == 1
        assert frontend.finished[1][0].reason == pb.FINISH_REASON_ERROR
