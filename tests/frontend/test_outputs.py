"""What messages carry: log-probabilities in step with tokens, all so far or only the end, text with special tokens."""

import asyncio
import random

import grpc
import pytest

from takt.engine.v1 import engine_pb2 as pb
from takt.v1 import types_pb2
from tests.support.frontend_in_process import collect, frontend_in_process, next_message
from tests.support.scripted_engine import scripted_engine

STOP, LENGTH = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH


@pytest.fixture
async def pair(tokenizer_folder):
    async with scripted_engine() as engine, frontend_in_process(tokenizer_folder, engine.address) as frontend:
        await frontend.wait_ready()
        yield await engine.stream(), frontend


def logprob_of(token_id):
    """A number that belongs to a token alone, exact in float32."""
    return -token_id / 64


def table(*entries, width=3):
    """Of (handle, token ids): each token itself, then the ones above it in number."""
    rows = [(handle, token) for handle, tokens in entries for token in tokens]
    cells = [token + column for _, token in rows for column in range(width)]
    return pb.LogprobsTable(
        handles=[handle for handle, _ in entries],
        num_tokens=[len(tokens) for _, tokens in entries],
        widths=[width] * len(entries),
        token_ids=cells,
        logprobs=[logprob_of(token) for token in cells],
        ranks=[token % 7 + 1 for _, token in rows],
    )


def check_aligned(messages, width=3):
    for message in messages:
        assert len(message.logprobs) == len(message.token_ids)
        for token_id, position in zip(message.token_ids, message.logprobs, strict=True):
            assert position.token.token_id == token_id
            assert position.token.logprob == logprob_of(token_id)
            assert position.token.rank == token_id % 7 + 1
            assert [candidate.token_id for candidate in position.candidates] == [
                token_id + column for column in range(1, width)
            ]


# --- log-probabilities ------------------------------------------------------------------------------------------------


async def test_logprobs_stay_with_their_tokens(pair):
    stream, frontend = pair
    call = frontend.generate("hello", logprobs=2)
    handle = (await stream.add()).handle
    await stream.outputs({handle: [100]}, logprobs=table((handle, [100])))
    first = await next_message(call)
    await stream.outputs({handle: [101, 102, 103]}, logprobs=table((handle, [101, 102, 103])))
    await stream.finish(handle, [104], logprobs=table((handle, [104])))
    answer = await collect(call)
    check_aligned([first, *answer.messages])
    assert answer.token_ids == [101, 102, 103, 104]
    assert [candidate.rank for candidate in first.logprobs[0].candidates] == [1, 2]


async def test_messages_that_are_merged_keep_logprobs_in_step(tokenizer_folder):
    narrow = [("grpc.http2.lookahead_bytes", 16_384), ("grpc.http2.bdp_probe", 0)]
    async with (
        scripted_engine(max_model_len=100_000) as engine,
        frontend_in_process(
            tokenizer_folder, engine.address, channel_options=narrow, slow_client_tokens=100_000
        ) as frontend,
    ):
        await frontend.wait_ready()
        stream = await engine.stream()
        call = frontend.generate("hello", logprobs=2)
        handle = (await stream.add()).handle
        rng = random.Random(11)
        tokens = [rng.randrange(3, 250) for _ in range(1_000)]
        for token in tokens:
            await stream.outputs({handle: [token]}, logprobs=table((handle, [token])))
        await stream.finish(handle)
        answer = await asyncio.wait_for(collect(call), 20)
        check_aligned(answer.messages)
        assert answer.token_ids == tokens
        assert len(answer.messages) < len(tokens)


async def test_what_a_stop_string_cuts_off_takes_its_logprobs_along(pair):
    stream, frontend = pair
    ids = await frontend.answer_ids("abXYcd")
    call = frontend.generate("hello", logprobs=2, stop=["XY"])
    handle = (await stream.add()).handle
    await stream.outputs({handle: ids}, logprobs=table((handle, ids)))
    answer = await collect(call)
    check_aligned(answer.messages)
    assert answer.token_ids == ids[:4]
    assert answer.text == "ab"
    assert answer.last.stop_reason.text == "XY"


async def test_tokens_have_their_text_and_bytes(pair):
    stream, frontend = pair
    ids = await frontend.answer_ids("é")
    call = frontend.generate("hello", logprobs=0)
    handle = (await stream.add()).handle
    tokens = [*ids, 2, 280]
    await stream.outputs({handle: tokens}, logprobs=table((handle, tokens), width=1))
    await stream.finish(handle)
    answer = await collect(call)
    found = [(p.token.text, p.token.bytes) for message in answer.messages for p in message.logprobs]
    # Half a character is no character; a special token shows its name; an id without a token shows nothing.
    assert found == [("\ufffd", b"\xc3"), ("\ufffd", b"\xa9"), ("</s>", b"</s>"), ("", b"")]
    assert b"".join(data for _, data in found[:2]).decode() == "é"


async def test_ids_that_are_asked_for_have_no_rank(pair):
    stream, frontend = pair
    call = frontend.generate("hello", logprob_token_ids=[101, 102])
    handle = (await stream.add()).handle
    await stream.finish(handle, [100], logprobs=table((handle, [100])))
    (position,) = (await collect(call)).last.logprobs
    assert [(c.token_id, c.rank) for c in position.candidates] == [(101, 0), (102, 0)]
    assert position.token.rank == 100 % 7 + 1


async def test_prompt_logprobs_come_once_and_begin_with_nothing(pair):
    stream, frontend = pair
    call = frontend.generate([10, 11, 12, 13], prompt_logprobs=1, logprobs=2)
    handle = (await stream.add()).handle
    # In two shares, as chunks of the prompt are computed.
    await stream.outputs(prompt_logprobs=table((handle, [11, 12]), width=2))
    await stream.outputs(
        {handle: [100]}, prompt_logprobs=table((handle, [13]), width=2), logprobs=table((handle, [100]))
    )
    first = await next_message(call)
    assert [p.token.token_id for p in first.prompt_logprobs[1:]] == [11, 12, 13]
    assert not first.prompt_logprobs[0].HasField("token")
    assert not first.prompt_logprobs[0].candidates
    await stream.finish(handle, [101], logprobs=table((handle, [101])))
    answer = await collect(call)
    assert not any(message.prompt_logprobs for message in answer.messages)
    check_aligned(answer.messages)


async def test_an_engine_that_is_lost_leaves_none_of_its_logprobs(tokenizer_folder):
    async with (
        scripted_engine() as one,
        scripted_engine(epoch="epoch-2") as two,
        frontend_in_process(tokenizer_folder, one.address, two.address) as frontend,
    ):
        await frontend.wait_ready(2)
        streams = [await one.stream(), await two.stream()]
        call = frontend.generate([10, 11, 12], prompt_logprobs=1, logprobs=2)
        await frontend.until(lambda: any(stream.num_unread_adds for stream in streams))
        used, other = sorted(streams, key=lambda stream: -stream.num_unread_adds)
        handle = (await used.add()).handle
        await used.outputs(prompt_logprobs=table((handle, [11]), width=2))
        used.end()
        handle = (await other.add()).handle
        await other.outputs(prompt_logprobs=table((handle, [11, 12]), width=2))
        await other.finish(handle, [100], logprobs=table((handle, [100])))
        answer = await collect(call)
        assert answer.error is None
        assert len(answer.last.prompt_logprobs) == 3
        check_aligned(answer.messages)


async def test_an_engine_that_tells_too_few_fails_the_request_alone(pair):
    stream, frontend = pair
    call = frontend.generate("hello", logprobs=2)
    handle = (await stream.add()).handle
    await stream.outputs({handle: [100, 101]}, logprobs=table((handle, [100])))
    answer = await collect(call)
    assert answer.code == grpc.StatusCode.INTERNAL
    assert "log-probabilities of 1 tokens for 2" in answer.error.details()
    assert (await stream.abort())[0] == handle
    await frontend.idle()


# --- how much a message repeats ---------------------------------------------------------------------------------------


async def run(stream, frontend, tokens, **fields):
    """The answer of an output whose messages are told one by one."""
    call = frontend.generate("hello", logprobs=2, return_prompt_token_ids=True, **fields)
    handle = (await stream.add()).handle
    for count, token in enumerate(tokens, 1):
        await stream.outputs({handle: [token]}, logprobs=table((handle, [token])))
        await frontend.until(lambda count=count: _runs(frontend)[0].num_output_tokens == count)
    await stream.finish(handle)
    return await asyncio.wait_for(collect(call), 20)


def _runs(frontend):
    return [run for active in frontend.frontend.requests._requests.values() for run in active.runs]


async def test_cumulative_messages_hold_all_so_far(pair):
    stream, frontend = pair
    ids = await frontend.answer_ids("abcd")
    answer = await run(stream, frontend, ids, output_kind=types_pb2.OUTPUT_KIND_CUMULATIVE)
    check_aligned(answer.messages)
    for message in answer.messages:
        assert list(message.token_ids) == ids[: len(message.token_ids)]
        assert message.text == "abcd"[: len(message.token_ids)]
    assert answer.last.text == "abcd"
    assert len(answer.messages) >= 4
    assert [bool(message.prompt_token_ids) for message in answer.messages] == [True] + [False] * (
        len(answer.messages) - 1
    )


async def test_one_message_holds_everything(pair):
    stream, frontend = pair
    ids = await frontend.answer_ids("abcd")
    answer = await run(stream, frontend, ids, output_kind=types_pb2.OUTPUT_KIND_FINAL_ONLY)
    (message,) = answer.messages
    check_aligned([message])
    assert (message.text, list(message.token_ids)) == ("abcd", ids)
    assert list(message.prompt_token_ids) == await frontend.answer_ids("hello")
    assert message.usage.completion_tokens == 4


@pytest.mark.parametrize("fields", [{"stream_interval": 3}, {}], ids=["request", "server"])
async def test_messages_come_every_so_many_tokens(tokenizer_folder, fields):
    async with (
        scripted_engine() as engine,
        frontend_in_process(tokenizer_folder, engine.address, stream_interval=1 if fields else 3) as frontend,
    ):
        await frontend.wait_ready()
        stream = await engine.stream()
        ids = await frontend.answer_ids("abcdefgh")
        answer = await run(stream, frontend, ids, **fields)
        check_aligned(answer.messages)
        assert answer.text == "abcdefgh"
        # The first at once, then every three, then the rest with the end.
        assert [len(message.token_ids) for message in answer.messages] == [1, 3, 3, 1]


async def test_an_abort_tells_what_was_held_back(pair):
    stream, frontend = pair
    call = frontend.generate("hello", request_id="r", output_kind=types_pb2.OUTPUT_KIND_FINAL_ONLY)
    handle = (await stream.add()).handle
    ids = await frontend.answer_ids("abc")
    await stream.outputs({handle: ids})
    await frontend.until(lambda: any(run.num_output_tokens == 3 for run in _runs(frontend)))
    frontend.frontend.requests.abort("r")
    answer = await collect(call)
    (message,) = answer.messages
    assert (message.text, message.finish_reason) == ("abc", types_pb2.FINISH_REASON_ABORT)


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "ab"),
        ({"skip_special_tokens": False}, "a<s><s>b"),
        ({"skip_special_tokens": False, "spaces_between_special_tokens": False}, "a<s><s>b"),
        ({"detokenize": False}, ""),
    ],
    ids=["skipped", "shown", "joined", "none"],
)
async def test_special_tokens_in_the_text(pair, fields, text):
    stream, frontend = pair
    a, b = await frontend.answer_ids("ab")
    call = frontend.generate("hello", **fields)
    handle = (await stream.add()).handle
    await stream.outputs({handle: [a, 1, 1, b]})
    await stream.finish(handle, [2], reason=1)
    answer = await collect(call)
    assert answer.text == text
    assert answer.token_ids == [a, 1, 1, b, 2]
    assert answer.last.finish_reason == STOP


async def test_a_split_character_and_a_stop_string_across_messages(pair):
    stream, frontend = pair
    ids = await frontend.answer_ids("x😀STOPy")
    call = frontend.generate("hello", stop=["OP"], include_stop_str_in_output=True, output_kind=2)
    handle = (await stream.add()).handle
    for token in ids:
        await stream.outputs({handle: [token]})
    answer = await collect(call)
    assert answer.messages[-1].text == "x😀STOP"
    assert not any("\ufffd" in message.text for message in answer.messages)
