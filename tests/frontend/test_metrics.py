"""What is counted, and that it is counted once."""

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from takt.engine.v1 import engine_pb2 as pb
from takt.v1 import inference_pb2
from tests.support.frontend_in_process import collect, frontend_in_process, next_message
from tests.support.scripted_engine import scripted_engine

LABELS = {"model_name": "tiny", "engine": "3"}
ENDED = ("stop", "length", "abort", "error", "repetition")


@pytest.fixture
async def pair(tokenizer_folder):
    async with (
        scripted_engine(data_parallel_rank=3) as engine,
        frontend_in_process(tokenizer_folder, engine.address) as frontend,
    ):
        await frontend.wait_ready()
        yield await engine.stream(), frontend


def ends(frontend):
    name = "vllm:request_success_total"
    return {reason: frontend.metric(name, **LABELS, finished_reason=reason) for reason in ENDED}


async def test_a_request_is_counted_from_the_first_token_to_the_end(pair):
    stream, frontend = pair
    call = frontend.generate("hello", max_tokens=7)
    handle = (await stream.add()).handle
    await stream.first(handle, cached=4, queue_us=2_000_000)
    await stream.outputs({handle: [70]})
    await next_message(call)
    await stream.outputs({handle: [71]})
    await next_message(call)
    await stream.finish(
        handle,
        [72],
        queue_us=2_000_000,
        prefill_us=3_000_000,
        decode_us=4_000_000,
        num_preemptions=2,
        num_cached_tokens=4,
    )
    await collect(call)
    metric = frontend.metric
    assert ends(frontend) == dict.fromkeys(ENDED, 0) | {"length": 1}
    assert metric("vllm:prompt_tokens_total", **LABELS) == 5
    assert metric("vllm:prompt_tokens_cached_total", **LABELS) == 4
    assert metric("vllm:prompt_tokens_by_source_total", **LABELS, source="local_cache_hit") == 4
    assert metric("vllm:prompt_tokens_by_source_total", **LABELS, source="local_compute") == 1
    assert metric("vllm:generation_tokens_total", **LABELS) == 3
    assert metric("vllm:time_to_first_token_seconds_count", **LABELS) == 1
    assert metric("vllm:inter_token_latency_seconds_count", **LABELS) == 2
    sums = {
        "request_prompt_tokens": 5,
        "request_generation_tokens": 3,
        "request_max_num_generation_tokens": 3,
        "request_params_max_tokens": 7,
        "request_params_n": 1,
        "request_prefill_kv_computed_tokens": 1,
        "request_num_preemptions": 2,
        "request_queue_time_seconds": 2,
        "request_prefill_time_seconds": 3,
        "request_decode_time_seconds": 4,
        "request_inference_time_seconds": 7,
        "request_time_per_output_token_seconds": 2,
    }
    for name, value in sums.items():
        assert metric(f"vllm:{name}_count", **LABELS) == 1, name
        assert metric(f"vllm:{name}_sum", **LABELS) == value, name
    assert metric("vllm:e2e_request_latency_seconds_count", **LABELS) == 1
    assert metric("takt_frontend_requests_total", method="Generate", code="OK") == 1
    assert metric("takt_frontend_requests_in_flight") == 0


async def test_every_kind_of_end_is_counted_once(pair):
    stream, frontend = pair
    stopped = frontend.generate("a")
    await stream.finish((await stream.add()).handle, [2], pb.FINISH_REASON_STOP)
    await collect(stopped)

    matched = frontend.generate("a", stop=["G"])
    handle = (await stream.add()).handle
    await stream.outputs({handle: [3 + index for index in range(100)]})
    await collect(matched)

    failed = frontend.generate("a")
    error = pb.EngineError(code=13, reason="X", message="x")
    await stream.finish((await stream.add()).handle, reason=pb.FINISH_REASON_ERROR, error=error)
    await collect(failed)

    cancelled = frontend.generate("a")
    handle = (await stream.add()).handle
    await stream.outputs({handle: [70]})
    await next_message(cancelled)
    cancelled.cancel()
    await frontend.until(lambda: ends(frontend)["abort"] == 1)

    late = frontend.generate("a", timeout=20)
    handle = (await stream.add()).handle
    await stream.finish(handle, reason=pb.FINISH_REASON_ABORT, abort_cause=pb.ABORT_CAUSE_DEADLINE)
    assert (await collect(late)).code == grpc.StatusCode.DEADLINE_EXCEEDED

    await frontend.idle()
    assert ends(frontend) == {"stop": 2, "length": 0, "abort": 2, "error": 1, "repetition": 0}
    causes = ("client", "deadline", "stop_string", "shutdown", "slow_consumer")
    counts = {cause: frontend.metric("takt_frontend_aborts_total", cause=cause) for cause in causes}
    assert counts == {"client": 1, "deadline": 1, "stop_string": 1, "shutdown": 0, "slow_consumer": 0}
    codes = {"OK": 2, "INTERNAL": 1, "CANCELLED": 1, "DEADLINE_EXCEEDED": 1}
    for code, count in codes.items():
        assert frontend.metric("takt_frontend_requests_total", method="Generate", code=code) == count, code


async def test_a_request_that_moves_is_counted_where_it_ends(tokenizer_folder):
    async with (
        scripted_engine(data_parallel_rank=0, epoch="a") as one,
        scripted_engine(data_parallel_rank=1, epoch="b") as two,
        frontend_in_process(tokenizer_folder, one.address, two.address) as frontend,
    ):
        await frontend.wait_ready(2)
        streams = [await one.stream(), await two.stream()]
        call = frontend.generate("hello", data_parallel_rank=None)
        await frontend.until(lambda: any(stream.num_unread_adds for stream in streams))
        first = next(index for index, stream in enumerate(streams) if stream.num_unread_adds)
        streams[first].end(grpc.StatusCode.INTERNAL, "boom")
        other = streams[1 - first]
        await other.finish((await other.add()).handle, [70])
        await collect(call)
        labels = [{"model_name": "tiny", "engine": str(rank)} for rank in (0, 1)]
        counts = [frontend.metric("vllm:time_to_first_token_seconds_count", **each) for each in labels]
        assert counts[1 - first] == 1
        assert sum(counts) == 1
        assert frontend.metric("takt_frontend_engine_losses_total", address=[one, two][first].address) == 1
        assert frontend.metric("takt_frontend_engine_up", address=[one, two][1 - first].address) == 1


async def test_refused_calls_are_counted_by_code_and_touch_nothing_else(pair):
    _, frontend = pair
    await frontend.answer("a", max_tokens=0)
    await frontend.answer("a", model="other")
    with pytest.raises(grpc.aio.AioRpcError):
        await frontend.stub.Embed(inference_pb2.EmbedRequest())
    count = frontend.metric
    assert count("takt_frontend_requests_total", method="Generate", code="INVALID_ARGUMENT") == 1
    assert count("takt_frontend_requests_total", method="Generate", code="NOT_FOUND") == 1
    assert count("takt_frontend_requests_total", method="Embed", code="INVALID_ARGUMENT") == 1
    assert sum(ends(frontend).values()) == 0


async def test_clocks_of_two_machines_are_never_compared(pair):
    stream, frontend = pair
    call = frontend.generate("a")
    handle = (await stream.add()).handle
    # An engine that claims a longer wait than the request has lived here.
    await stream.first(handle, queue_us=3_600_000_000)
    await stream.outputs({handle: [70, 71]})
    await next_message(call)
    await frontend.stub.Abort(inference_pb2.AbortRequest(request_id=(await _id_of(frontend))))
    await collect(call)
    for family in text_string_to_metric_families(frontend.exposition()):
        for sample in family.samples:
            assert sample.value >= 0, sample


async def _id_of(frontend):
    (request_id,) = frontend.frontend.requests._requests
    return request_id
