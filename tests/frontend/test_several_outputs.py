"""Requests of several outputs: one stream in which they interleave, one end each, one abort for all of them."""

import asyncio

import grpc
import pytest

from shared.types import AbortCause
from takt.engine.v1 import engine_pb2 as pb
from takt.v1 import inference_pb2, types_pb2
from tests.support.frontend_in_process import collect, frontend_in_process, next_message
from tests.support.scripted_engine import scripted_engine

ABORT, ERROR, LENGTH = (
    types_pb2.FINISH_REASON_ABORT,
    types_pb2.FINISH_REASON_ERROR,
    types_pb2.FINISH_REASON_LENGTH,
)


@pytest.fixture
async def pair(tokenizer_folder):
    async with scripted_engine() as engine, frontend_in_process(tokenizer_folder, engine.address) as frontend:
        await frontend.wait_ready()
        yield await engine.stream(), frontend


async def start(stream, frontend, n=4, **fields):
    call = frontend.generate("hello", n=n, **fields)
    return call, [await stream.add() for _ in range(n)]


def tokens_by_index(answer):
    found = {}
    for message in answer.messages:
        found.setdefault(message.index, []).extend(message.token_ids)
    return found


def ends(answer):
    """Finish reasons by index; each index must have one, in its last message."""
    found = {}
    for message in answer.messages:
        assert message.index not in found, "a message behind the end"
        if message.HasField("finish_reason"):
            found[message.index] = message.finish_reason
    return found


async def test_children_differ_in_their_seed_alone(pair):
    stream, frontend = pair
    call, requests = await start(stream, frontend, seed=-3, cache_salt="s", prompt_logprobs=1)
    assert [request.sampling.seed for request in requests] == [2**64 - 3, 2**64 - 2, 2**64 - 1, 0]
    assert {tuple(request.prompt_token_ids) for request in requests} == {tuple(requests[0].prompt_token_ids)}
    assert len({request.handle for request in requests}) == len({request.request_id for request in requests}) == 4
    # The prompt's log-probabilities are computed once, so that the others may read the prefix cache.
    assert [request.sampling.HasField("prompt_logprobs") for request in requests] == [True, False, False, False]
    assert [request.sampling.skip_reading_prefix_cache for request in requests] == [True, False, False, False]
    call.cancel()


async def test_outputs_interleave_and_each_ends_once(pair):
    stream, frontend = pair
    call, requests = await start(stream, frontend, return_prompt_token_ids=True)
    handles = [request.handle for request in requests]
    await stream.outputs({handles[0]: [10], handles[1]: [20], handles[2]: [30], handles[3]: [40]})
    first = [await next_message(call) for _ in range(4)]
    assert sorted(message.index for message in first) == [0, 1, 2, 3]
    assert [bool(message.prompt_token_ids) for message in sorted(first, key=lambda m: m.index)] == [True] + [False] * 3
    await stream.finish(handles[2], [31])
    assert (await next_message(call)).index == 2
    await stream.outputs({handles[3]: [41], handles[1]: [21]})
    for handle, last in zip((handles[1], handles[0], handles[3]), (22, 11, 42), strict=True):
        await stream.finish(handle, [last])
    answer = await collect(call)
    assert answer.error is None
    answer.messages[:0] = first
    assert tokens_by_index(answer) == {0: [10, 11], 1: [20, 21, 22], 2: [30], 3: [40, 41, 42]}
    assert ends(answer) == {0: LENGTH, 1: LENGTH, 3: LENGTH}
    usages = {message.index: message.usage for message in answer.messages if message.HasField("usage")}
    assert {index: usage.completion_tokens for index, usage in usages.items()} == {0: 2, 1: 3, 3: 3}
    assert {usage.prompt_tokens for usage in usages.values()} == {5}
    labels = {"model_name": "tiny", "engine": "0"}
    assert frontend.metric("vllm:prompt_tokens_total", **labels) == 5
    assert frontend.metric("vllm:generation_tokens_total", **labels) == 10
    assert frontend.metric("vllm:request_params_n_sum", **labels) == 4
    assert frontend.metric("vllm:request_params_n_count", **labels) == 1
    assert frontend.metric("vllm:request_max_num_generation_tokens_sum", **labels) == 3
    assert frontend.metric("vllm:time_to_first_token_seconds_count", **labels) == 1
    assert frontend.metric("vllm:request_success_total", finished_reason="length", **labels) == 4


async def test_one_abort_ends_all_that_still_run(pair):
    stream, frontend = pair
    call, requests = await start(stream, frontend, request_id="mine")
    handles = [request.handle for request in requests]
    await stream.finish(handles[1], [20])
    assert (await next_message(call)).index == 1
    assert (await frontend.stub.Abort(inference_pb2.AbortRequest(request_id="mine"))).found
    aborted = {await stream.abort() for _ in range(3)}
    assert aborted == {(handle, AbortCause.CLIENT) for handle in (handles[0], handles[2], handles[3])}
    answer = await collect(call)
    assert answer.error is None
    assert ends(answer) == {0: ABORT, 2: ABORT, 3: ABORT}
    await frontend.idle()


async def test_cancelling_ends_all_in_the_engine(pair):
    stream, frontend = pair
    call, requests = await start(stream, frontend)
    await stream.outputs({requests[0].handle: [10]})
    await next_message(call)
    call.cancel()
    assert {(await stream.abort())[0] for _ in range(4)} == {request.handle for request in requests}
    await frontend.idle()


async def test_a_child_that_fails_ends_the_stream_once_the_others_are_done(pair):
    stream, frontend = pair
    call, requests = await start(stream, frontend)
    handles = [request.handle for request in requests]
    await stream.outputs({handle: [10 + index] for index, handle in enumerate(handles)})
    fault = pb.EngineError(code=13, reason="FAULT", message="a row went wrong")
    later = pb.EngineError(code=8, reason="LATER", message="something else")
    await stream.finish(handles[2], reason=4, error=fault)
    await stream.finish(handles[0], [50], reason=4, error=later)
    await stream.finish(handles[1], [51])
    await stream.outputs({handles[3]: [52]})
    await stream.finish(handles[3], [53])
    answer = await collect(call)
    assert ends(answer) == {0: ERROR, 1: LENGTH, 2: ERROR, 3: LENGTH}
    assert tokens_by_index(answer) == {0: [10, 50], 1: [11, 51], 2: [12], 3: [13, 52, 53]}
    assert answer.code == grpc.StatusCode.INTERNAL
    assert answer.info.reason == "FAULT"


async def test_a_child_that_fails_before_its_first_token_has_its_end_too(pair):
    stream, frontend = pair
    call, requests = await start(stream, frontend, n=2)
    refused = pb.EngineError(code=3, reason="INVALID_REQUEST", message="no", field="structured_output")
    await stream.finish(requests[0].handle, reason=4, error=refused)
    await stream.finish(requests[1].handle, [9])
    answer = await collect(call)
    assert ends(answer) == {1: LENGTH, 0: ERROR}
    assert answer.code == grpc.StatusCode.INVALID_ARGUMENT


async def test_children_that_all_fail_at_once_are_a_status_alone(pair):
    stream, frontend = pair
    call, requests = await start(stream, frontend, n=3)
    refused = pb.EngineError(code=3, reason="INVALID_REQUEST", message="no such keyword", field="structured_output")
    for request in requests:
        await stream.finish(request.handle, reason=4, error=refused)
    answer = await collect(call)
    assert not answer.messages
    assert answer.code == grpc.StatusCode.INVALID_ARGUMENT
    assert "no such keyword" in answer.error.details()


async def test_a_stop_string_ends_its_own_output_alone(pair):
    stream, frontend = pair
    ids = await frontend.answer_ids("aXYb")
    call, requests = await start(stream, frontend, n=2, stop=["XY"])
    await stream.outputs({requests[0].handle: ids, requests[1].handle: ids[:2]})
    assert await stream.abort() == (requests[0].handle, AbortCause.STOP_STRING)
    await stream.finish(requests[1].handle, [ids[3]])
    answer = await collect(call)
    assert answer.error is None
    texts = {index: "".join(m.text for m in answer.messages if m.index == index) for index in (0, 1)}
    assert texts == {0: "a", 1: "aXb"}
    assert ends(answer) == {0: types_pb2.FINISH_REASON_STOP, 1: LENGTH}


async def test_a_deadline_and_a_duplicate_id_concern_the_whole_request(pair):
    stream, frontend = pair
    call = frontend.generate("a", n=3, request_id="same", timeout=0.5)
    handles = {(await stream.add()).handle for _ in range(3)}
    again = await frontend.answer("a", n=2, request_id="same")
    assert again.code == grpc.StatusCode.ALREADY_EXISTS
    assert {await stream.abort() for _ in range(3)} == {(handle, AbortCause.DEADLINE) for handle in handles}
    assert (await collect(call)).code == grpc.StatusCode.DEADLINE_EXCEEDED


async def test_children_go_to_one_engine_and_on_from_it_when_it_is_lost(tokenizer_folder):
    async with (
        scripted_engine() as one,
        scripted_engine(epoch="epoch-2") as two,
        frontend_in_process(tokenizer_folder, one.address, two.address) as frontend,
    ):
        await frontend.wait_ready(2)
        streams = [await one.stream(), await two.stream()]
        call = frontend.generate("hello", n=3)
        await frontend.until(lambda: sum(stream.num_unread_adds for stream in streams) == 3)
        used, other = sorted(streams, key=lambda stream: -stream.num_unread_adds)
        assert (used.num_unread_adds, other.num_unread_adds) == (3, 0)
        begun = (await used.add()).handle
        await used.outputs({begun: [10]})
        assert (await next_message(call)).index == 0
        used.end()
        rest = [await other.add() for _ in range(2)]
        for request in rest:
            await other.finish(request.handle, [30])
        answer = await collect(call)
        # The one that had begun is lost; the others were computed elsewhere, unseen.
        assert ends(answer) == {0: ERROR, 1: LENGTH, 2: LENGTH}
        assert answer.code == grpc.StatusCode.UNAVAILABLE
        assert int(answer.info.metadata["tokens_emitted"]) >= 1


async def test_a_slow_client_of_several_outputs_gets_every_token(tokenizer_folder):
    narrow = [("grpc.http2.lookahead_bytes", 16_384), ("grpc.http2.bdp_probe", 0)]
    async with (
        scripted_engine(max_model_len=100_000) as engine,
        frontend_in_process(
            tokenizer_folder, engine.address, channel_options=narrow, slow_client_tokens=100_000
        ) as frontend,
    ):
        await frontend.wait_ready()
        stream = await engine.stream()
        call, requests = await start(stream, frontend, n=2)
        expected = {0: [], 1: []}
        for step in range(1_500):
            tokens = {request.handle: [10 + (step + index) % 200] for index, request in enumerate(requests)}
            await stream.outputs(tokens)
            for index, request in enumerate(requests):
                expected[index] += tokens[request.handle]
        for index, request in enumerate(requests):
            await stream.finish(request.handle, [7])
            expected[index].append(7)
        answer = await asyncio.wait_for(collect(call), 20)
        assert tokens_by_index(answer) == expected
        assert ends(answer) == {0: LENGTH, 1: LENGTH}
