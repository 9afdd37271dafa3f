"""How requests end, against an engine that says what the test tells it to: stops, aborts, deadlines, errors."""

import asyncio

import grpc
import pytest

from shared.types import AbortCause
from takt.engine.v1 import engine_pb2 as pb
from takt.v1 import inference_pb2, types_pb2
from tests.support.frontend_in_process import collect, error_info, frontend_in_process, next_message
from tests.support.scripted_engine import scripted_engine
from tests.support.tiny_tokenizer import ids_of, write_tiny_tokenizer

STOP, LENGTH, ABORT, ERROR = range(1, 5)


@pytest.fixture
async def pair(tokenizer_folder):
    """A scripted engine's stream and a frontend on it."""
    async with (
        scripted_engine() as engine,
        frontend_in_process(tokenizer_folder, engine.address) as frontend,
    ):
        await frontend.wait_ready()
        yield await engine.stream(), frontend


async def test_every_default_is_resolved(pair):
    stream, frontend = pair
    call = frontend.generate("hello")
    first = await stream.add()
    other = frontend.generate("hello")
    second = await stream.add()
    sampling = first.sampling
    assert first.handle < second.handle
    assert len(first.prompt_token_ids) == 5
    assert sampling.max_tokens == 251
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert sampling.seed != second.sampling.seed
    assert list(first.eos_token_ids) == [2]
    assert not sampling.stop_token_ids
    assert not first.HasField("deadline_remaining_ms")
    assert first.request_id
    call.cancel()
    other.cancel()


async def test_what_the_client_asks_reaches_the_engine(pair):
    stream, frontend = pair
    call = frontend.generate(
        [5, 6],
        timeout=30,
        request_id="mine",
        temperature=0.001,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        seed=-7,
        max_tokens=9,
        min_tokens=3,
        stop_token_ids=[8, 9, 8],
        ignore_eos=True,
        priority=-4,
        cache_salt="salt",
        data_parallel_rank=0,
    )
    request = await stream.add()
    sampling = request.sampling
    assert request.request_id == "mine"
    assert list(request.prompt_token_ids) == [5, 6]
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.01, 0.5, 0, 0.1)
    assert sampling.seed == 2**64 - 7
    assert (sampling.max_tokens, sampling.min_tokens) == (9, 3)
    assert list(sampling.stop_token_ids) == [8, 9]
    assert sampling.ignore_eos
    assert (request.priority, request.cache_salt, request.data_parallel_rank) == (-4, "salt", 0)
    # gRPC rounds a deadline up on its way.
    assert 20_000 < request.deadline_remaining_ms <= 31_000
    call.cancel()


async def test_greedy_needs_no_other_choice(pair):
    stream, frontend = pair
    call = frontend.generate("a", temperature=0.0, top_p=0.5, top_k=7, min_p=0.2)
    sampling = (await stream.add()).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 1.0, 0, 0.0)
    call.cancel()


async def test_secondary_end_tokens_are_stop_tokens_and_reported(tmp_path):
    folder = write_tiny_tokenizer(tmp_path / "two", eos_token_ids=(2, 1))
    async with scripted_engine() as engine, frontend_in_process(folder, engine.address) as frontend:
        await frontend.wait_ready()
        stream = await engine.stream()
        call = frontend.generate("a", stop_token_ids=[9])
        request = await stream.add()
        assert list(request.sampling.stop_token_ids) == [9, 1]
        await stream.finish(request.handle, [1], STOP, stop_token_id=1)
        answer = await collect(call)
        assert answer.last.stop_reason.token_id == 1
        assert answer.last.finish_reason == types_pb2.FINISH_REASON_STOP
        ignoring = frontend.generate("a", stop_token_ids=[9], ignore_eos=True)
        assert list((await stream.add()).sampling.stop_token_ids) == [9]
        ignoring.cancel()


async def test_the_primary_end_token_has_no_stop_reason_and_no_text(pair, tokenizer_folder):
    stream, frontend = pair
    call = frontend.generate("a")
    handle = (await stream.add()).handle
    await stream.outputs({handle: ids_of(tokenizer_folder, "yes")})
    await stream.finish(handle, [2], STOP)
    answer = await collect(call)
    assert answer.text == "yes"
    assert answer.token_ids[-1] == 2
    assert answer.last.usage.completion_tokens == 4
    assert not answer.last.stop_reason.WhichOneof("match")


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abc")])
async def test_a_stop_token_leaves_its_text_when_asked(pair, tokenizer_folder, include, text):
    stream, frontend = pair
    tokens = ids_of(tokenizer_folder, "abc")
    call = frontend.generate("a", stop_token_ids=[tokens[2]], include_stop_str_in_output=include)
    handle = (await stream.add()).handle
    await stream.finish(handle, tokens, STOP, stop_token_id=tokens[2])
    answer = await collect(call)
    assert answer.text == text
    assert answer.last.stop_reason.token_id == tokens[2]


async def test_an_end_that_comes_behind_its_stop_token_is_the_same(pair, tokenizer_folder):
    stream, frontend = pair
    tokens = ids_of(tokenizer_folder, "abc")
    call = frontend.generate("a", stop_token_ids=[tokens[2]])
    handle = (await stream.add()).handle
    await stream.outputs({handle: tokens})
    await next_message(call)
    await stream.finish(handle, reason=STOP, stop_token_id=tokens[2])
    answer = await collect(call)
    assert answer.last.stop_reason.token_id == tokens[2]
    assert answer.last.usage.completion_tokens == 3
    assert answer.text == ""


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one STOP")])
async def test_a_stop_string_ends_the_request_in_the_engine(pair, tokenizer_folder, include, text):
    stream, frontend = pair
    call = frontend.generate("a", stop=["never", "STOP"], include_stop_str_in_output=include)
    handle = (await stream.add()).handle
    for token in ids_of(tokenizer_folder, "one ST"):
        await stream.outputs({handle: [token]})
    await stream.outputs({handle: ids_of(tokenizer_folder, "OP and more")})
    answer = await collect(call)
    assert answer.error is None
    assert answer.text == text
    assert answer.last.finish_reason == types_pb2.FINISH_REASON_STOP
    assert answer.last.stop_reason.text == "STOP"
    # Tokens behind the match do not belong to the output.
    assert answer.token_ids == ids_of(tokenizer_folder, "one STOP")
    assert answer.last.usage.completion_tokens == 8
    assert await stream.abort() == (handle, AbortCause.STOP_STRING)
    # What the engine still computed meanwhile is ignored.
    await stream.outputs({handle: [9]})
    await frontend.idle()


async def test_a_character_is_never_cut(pair, tokenizer_folder):
    stream, frontend = pair
    text = "größe 漢字 🙂!"
    call = frontend.generate("a")
    handle = (await stream.add()).handle
    tokens = ids_of(tokenizer_folder, text)
    for token in tokens[:-1]:
        await stream.outputs({handle: [token]})
    await stream.finish(handle, tokens[-1:], LENGTH)
    answer = await collect(call)
    assert answer.text == text
    assert all("\ufffd" not in message.text for message in answer.messages)


async def test_the_prompt_comes_back_when_asked_for(pair):
    stream, frontend = pair
    call = frontend.generate([7, 8, 9], return_prompt_token_ids=True)
    handle = (await stream.add()).handle
    await stream.outputs({handle: [5]})
    await stream.finish(handle, [6])
    answer = await collect(call)
    assert [list(message.prompt_token_ids) for message in answer.messages] in ([[7, 8, 9], []], [[7, 8, 9]])


async def test_timings_and_cached_tokens_are_the_engines(pair):
    stream, frontend = pair
    call = frontend.generate("hello")
    handle = (await stream.add()).handle
    await stream.first(handle, cached=4, queue_us=250_000)
    await stream.outputs({handle: [5]})
    await stream.finish(
        handle, [6], queue_us=250_000, prefill_us=500_000, decode_us=125_000, num_preemptions=2, num_cached_tokens=4
    )
    last = (await collect(call)).last
    assert last.usage == types_pb2.Usage(prompt_tokens=5, cached_tokens=4, completion_tokens=2)
    timings = last.timings
    assert (timings.queue_seconds, timings.prefill_seconds, timings.decode_seconds) == (0.25, 0.5, 0.125)
    assert timings.num_preemptions == 2


# --- aborts -----------------------------------------------------------------------------------------------------------


async def test_cancelling_the_call_aborts_in_the_engine(pair):
    stream, frontend = pair
    call = frontend.generate("a")
    handle = (await stream.add()).handle
    await stream.outputs({handle: [5]})
    await next_message(call)
    call.cancel()
    assert await stream.abort() == (handle, AbortCause.CLIENT)
    await frontend.idle()
    assert frontend.metric("takt_frontend_aborts_total", cause="client") == 1


async def test_cancelling_before_the_first_token_aborts_too(pair):
    stream, frontend = pair
    call = frontend.generate("a")
    handle = (await stream.add()).handle
    call.cancel()
    assert await stream.abort() == (handle, AbortCause.CLIENT)
    await frontend.idle()


async def test_a_client_that_vanishes_is_a_cancelled_call(pair):
    stream, frontend = pair
    call = frontend.generate("a")
    handle = (await stream.add()).handle
    await stream.outputs({handle: [5]})
    await next_message(call)
    await frontend.channel.close()
    assert await stream.abort() == (handle, AbortCause.CLIENT)
    await frontend.until(lambda: not len(frontend.frontend.requests))


async def test_a_deadline_aborts_in_the_engine_by_its_own_cause(pair):
    stream, frontend = pair
    call = frontend.generate("a", timeout=0.3)
    request = await stream.add()
    assert 0 < request.deadline_remaining_ms <= 400
    answer = await collect(call)
    assert answer.code == grpc.StatusCode.DEADLINE_EXCEEDED
    assert await stream.abort() == (request.handle, AbortCause.DEADLINE)
    await frontend.idle()


async def test_a_deadline_that_the_engine_saw_is_the_same(pair):
    stream, frontend = pair
    call = frontend.generate("a", timeout=20)
    handle = (await stream.add()).handle
    await stream.finish(handle, reason=ABORT, abort_cause=pb.ABORT_CAUSE_DEADLINE)
    answer = await collect(call)
    assert answer.code == grpc.StatusCode.DEADLINE_EXCEEDED
    assert not answer.messages
    assert stream.num_unread_aborts == 0


async def test_abort_by_id_ends_with_a_last_message(pair):
    stream, frontend = pair
    call = frontend.generate("a", request_id="mine")
    handle = (await stream.add()).handle
    await stream.outputs({handle: [70, 71]})
    await next_message(call)
    assert (await frontend.stub.Abort(inference_pb2.AbortRequest(request_id="mine"))).found
    answer = await collect(call)
    assert answer.error is None
    assert answer.last.finish_reason == types_pb2.FINISH_REASON_ABORT
    assert answer.last.usage.completion_tokens == 2
    assert await stream.abort() == (handle, AbortCause.CLIENT)
    for unknown in ("mine", "never", ""):
        assert not (await frontend.stub.Abort(inference_pb2.AbortRequest(request_id=unknown))).found
    await frontend.idle()


async def test_a_duplicate_id_is_refused_and_the_first_goes_on(pair):
    stream, frontend = pair
    call = frontend.generate("a", request_id="mine")
    handle = (await stream.add()).handle
    second = await collect(frontend.generate("a", request_id="mine"))
    assert second.code == grpc.StatusCode.ALREADY_EXISTS
    assert second.info.reason == "DUPLICATE_REQUEST"
    await stream.finish(handle, [5])
    assert (await collect(call)).error is None
    # The id is free again at once, and the end of the first does not touch the next.
    again = frontend.generate("a", request_id="mine")
    handle = (await stream.add()).handle
    await stream.finish(handle, [5])
    assert (await collect(again)).last.usage.completion_tokens == 1
    assert stream.num_unread_aborts == 0


async def test_an_abort_that_meets_the_end_gives_one_end(pair):
    stream, frontend = pair
    for _ in range(20):
        call = frontend.generate("a", request_id="mine")
        handle = (await stream.add()).handle
        await asyncio.gather(
            stream.finish(handle, [5]), frontend.stub.Abort(inference_pb2.AbortRequest(request_id="mine"))
        )
        answer = await collect(call)
        assert answer.error is None
        assert answer.last.finish_reason in (types_pb2.FINISH_REASON_LENGTH, types_pb2.FINISH_REASON_ABORT)
        await frontend.idle()


async def test_a_storm_of_cancels_leaves_nothing(pair):
    stream, frontend = pair
    calls = [frontend.generate("a", request_id=str(index)) for index in range(60)]
    requests = [await stream.add() for _ in calls]
    await stream.outputs({request.handle: [5] for request in requests[::2]})
    for call in calls:
        call.cancel()
    aborted = {(await stream.abort())[0] for _ in calls}
    assert aborted == {request.handle for request in requests}
    await frontend.idle()
    survivor = frontend.generate("a")
    handle = (await stream.add()).handle
    await stream.finish(handle, [5])
    assert (await collect(survivor)).error is None


# --- errors of the engine ---------------------------------------------------------------------------------------------


async def test_an_error_before_any_output_is_a_status_alone(pair):
    stream, frontend = pair
    call = frontend.generate("a")
    handle = (await stream.add()).handle
    error = pb.EngineError(code=3, reason="BAD_THING", message="field x must be 1, got 2", field="x")
    await stream.finish(handle, reason=ERROR, error=error)
    answer = await collect(call)
    assert answer.code == grpc.StatusCode.INVALID_ARGUMENT
    assert answer.error.details() == "field x must be 1, got 2"
    assert answer.info.reason == "BAD_THING"
    assert not answer.messages


async def test_an_error_after_output_is_a_last_message_and_a_status(pair):
    stream, frontend = pair
    call = frontend.generate("a")
    handle = (await stream.add()).handle
    await stream.outputs({handle: [70]})
    await next_message(call)
    await stream.finish(handle, reason=ERROR, error=pb.EngineError(code=13, reason="NAN", message="bad logits"))
    answer = await collect(call)
    assert answer.last.finish_reason == types_pb2.FINISH_REASON_ERROR
    assert answer.last.usage.completion_tokens == 1
    assert answer.code == grpc.StatusCode.INTERNAL
    assert answer.info.reason == "NAN"
    await frontend.idle()


async def test_an_unknown_error_code_is_internal(pair):
    stream, frontend = pair
    call = frontend.generate("a")
    handle = (await stream.add()).handle
    await stream.finish(handle, reason=ERROR, error=pb.EngineError(code=2, reason="X", message="who knows"))
    assert (await collect(call)).code == grpc.StatusCode.INTERNAL


async def test_initial_metadata_comes_at_admission(pair):
    stream, frontend = pair
    call = frontend.generate("a")
    await asyncio.wait_for(call.initial_metadata(), 20)
    handle = (await stream.add()).handle
    await stream.finish(handle, [5])
    assert (await collect(call)).error is None


async def test_chat_renders_the_template(pair, tokenizer_folder):
    stream, frontend = pair
    call = frontend.stub.Chat(
        inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
    )
    request = await stream.add()
    assert list(request.prompt_token_ids) == ids_of(tokenizer_folder, "<s>user: hi</s><s>assistant: ")
    await stream.finish(request.handle, [5])
    assert (await collect(call)).last.usage.prompt_tokens == len(request.prompt_token_ids)
    conversation = inference_pb2.Conversation(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
    tokenized = await frontend.stub.Tokenize(
        inference_pb2.TokenizeRequest(conversation=conversation, return_tokens=True)
    )
    assert list(tokenized.token_ids) == list(request.prompt_token_ids)
    assert tokenized.tokens[0] == "<s>"
    assert tokenized.max_model_len == 256


async def test_no_template_is_a_precondition(tmp_path):
    folder = write_tiny_tokenizer(tmp_path / "plain", chat_template=None)
    async with scripted_engine() as engine, frontend_in_process(folder, engine.address) as frontend:
        await frontend.wait_ready()
        chat = inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
        answer = await collect(frontend.stub.Chat(chat))
        assert answer.code == grpc.StatusCode.FAILED_PRECONDITION
        assert "--chat-template" in answer.error.details()
        assert error_info(answer.error).reason == "FAILED_PRECONDITION"
