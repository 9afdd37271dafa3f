"""Requests over the stream: outputs, refusals, several frontends."""

import pytest

from engine_svc.service.convert_request import peek_handle
from takt.engine.v1 import engine_pb2 as pb
from tests.support.engine_in_process import engine_in_process, fake_tokens
from tests.support.raw_frontend import add_request, raw_frontend

INVALID_ARGUMENT, ALREADY_EXISTS, UNIMPLEMENTED = 3, 6, 12


async def test_ready_describes_the_engine():
    async with engine_in_process(num_blocks=100) as engine, raw_frontend(engine.address) as frontend:
        ready = frontend.ready
        assert ready.protocol_version == 1
        assert len(ready.epoch) == 32
        assert (ready.vocab_size, ready.block_size, ready.num_blocks) == (1000, 16, 100)
        assert ready.max_model_len == 99 * 16
        assert list(ready.eos_token_ids) == [2]
        assert ready.numerics.op_set == "fake"
        assert ready.world_sizes.tensor_parallel == 1
        assert ready.limits.max_message_bytes == 64 << 20
        assert not ready.draining


async def test_tokens_first_schedule_end_and_load():
    async with engine_in_process() as engine, raw_frontend(engine.address) as frontend:
        prompt = list(range(40, 80))
        first = await frontend.add(prompt, max_tokens=10)
        (finished,) = await frontend.finish(first)
        assert frontend.tokens[first] == fake_tokens(prompt, 10)
        assert finished.reason == pb.FINISH_REASON_LENGTH
        assert not finished.HasField("stop_token_id")
        assert frontend.first_scheduled[first].num_cached_tokens == 0
        second = await frontend.add(prompt, max_tokens=10)
        (finished,) = await frontend.finish(second)
        assert frontend.tokens[second] == fake_tokens(prompt, 10)
        assert frontend.first_scheduled[second].num_cached_tokens == finished.num_cached_tokens == 32
        steps = [m.step_outputs for m in frontend.received if m.WhichOneof("message") == "step_outputs"]
        assert [s.step for s in steps] == sorted(s.step for s in steps)
        assert max(s.load.num_running for s in steps) == 1


async def test_end_tokens_stop_tokens_and_resumed_output():
    prompt = [9, 8, 7]
    tokens = fake_tokens(prompt, 20)
    async with engine_in_process() as engine, raw_frontend(engine.address) as frontend:
        stopped = await frontend.add(prompt, max_tokens=20, stop_token_ids=[tokens[4]])
        ended = await frontend.add(prompt, max_tokens=20, eos_token_ids=[tokens[6]])
        resumed = await frontend.add(prompt, max_tokens=12, resume_token_ids=tokens[:5])
        finished = await frontend.finish(stopped, ended, resumed)
        assert [f.reason for f in finished] == [
            pb.FINISH_REASON_STOP,
            pb.FINISH_REASON_STOP,
            pb.FINISH_REASON_LENGTH,
        ]
        assert finished[0].stop_token_id == tokens[4]
        assert not finished[1].HasField("stop_token_id")
        assert frontend.tokens[stopped] == tokens[:5]
        assert frontend.tokens[ended] == tokens[:7]
        assert frontend.tokens[resumed] == tokens[5:12]


async def test_two_frontends_with_equal_ids_and_handles_get_their_own_outputs():
    async with (
        engine_in_process(step_seconds=0.002) as engine,
        raw_frontend(engine.address) as one,
        raw_frontend(engine.address) as two,
    ):
        for prompt in ([3, 4], [5, 6], [7, 8]):
            await one.add(prompt, request_id="same", max_tokens=30)
        for prompt in ([13, 14], [15, 16], [17, 18]):
            await two.add(prompt, request_id="same", max_tokens=30)
        await one.finish(1, 2, 3)
        await two.finish(1, 2, 3)
        assert one.tokens == {1: fake_tokens([3, 4], 30), 2: fake_tokens([5, 6], 30), 3: fake_tokens([7, 8], 30)}
        assert two.tokens == {1: fake_tokens([13, 14], 30), 2: fake_tokens([15, 16], 30), 3: fake_tokens([17, 18], 30)}
        assert all(len(ends) == 1 for frontend in (one, two) for ends in frontend.finished.values())
        await engine.wait_idle()


REFUSED = [
    ({"prompt_token_ids": []}, "prompt_token_ids", "at least 1", INVALID_ARGUMENT),
    ({"prompt_token_ids": [5] * 64}, "prompt_token_ids", "64 tokens", INVALID_ARGUMENT),
    ({"prompt_token_ids": [5, 1000]}, "prompt_token_ids", "got 1000", INVALID_ARGUMENT),
    ({"prompt_token_ids": [5, 2**32 - 1]}, "prompt_token_ids", "got 4294967295", INVALID_ARGUMENT),
    ({"resume_token_ids": [2**31]}, "resume_token_ids", "got 2147483648", INVALID_ARGUMENT),
    ({"resume_token_ids": [4] * 62}, "resume_token_ids", "64", INVALID_ARGUMENT),
    ({"resume_token_ids": [4] * 8}, "resume_token_ids", "max_tokens 8", INVALID_ARGUMENT),
    ({"max_tokens": 0}, "max_tokens", "got 0", INVALID_ARGUMENT),
    ({"max_tokens": -1}, "max_tokens", "got -1", INVALID_ARGUMENT),
    ({"max_tokens": None}, "max_tokens", "must be set", INVALID_ARGUMENT),
    ({"min_tokens": 9}, "min_tokens", "got 9", INVALID_ARGUMENT),
    ({"min_tokens": -1}, "min_tokens", "got -1", INVALID_ARGUMENT),
    ({"temperature": float("nan")}, "seed", "must be set", INVALID_ARGUMENT),
    ({"temperature": float("nan"), "seed": 1}, "temperature", "got nan", INVALID_ARGUMENT),
    ({"temperature": float("inf"), "seed": 1}, "temperature", "got inf", INVALID_ARGUMENT),
    ({"temperature": -0.5}, "temperature", "got -0.5", INVALID_ARGUMENT),
    ({"temperature": 1.0}, "seed", "must be set", INVALID_ARGUMENT),
    ({"top_p": 0.0}, "top_p", "got 0", INVALID_ARGUMENT),
    ({"top_p": float("nan")}, "top_p", "got nan", INVALID_ARGUMENT),
    ({"top_k": -2}, "top_k", "got -2", INVALID_ARGUMENT),
    ({"min_p": 1.5}, "min_p", "got 1.5", INVALID_ARGUMENT),
    ({"stop_token_ids": [1000]}, "stop_token_ids", "got 1000", INVALID_ARGUMENT),
    ({"stop_token_ids": list(range(129))}, "stop_token_ids", "got 129", INVALID_ARGUMENT),
    ({"eos_token_ids": [2**32 - 1]}, "eos_token_ids", "got 4294967295", INVALID_ARGUMENT),
    ({"eos_token_ids": list(range(129))}, "eos_token_ids", "got 129", INVALID_ARGUMENT),
    ({"request_id": "x" * 5000}, "request_id", "got 5000", INVALID_ARGUMENT),
    ({"data_parallel_rank": 3}, "data_parallel_rank", "got 3", INVALID_ARGUMENT),
    ({"task": None}, "task", "got none", INVALID_ARGUMENT),
    ({"pooling": pb.PoolingParams()}, "pooling", "got ''", INVALID_ARGUMENT),
    ({"wave": 2}, "wave", "not built", UNIMPLEMENTED),
    ({"presence_penalty": 2.5}, "presence_penalty", "got 2.5", INVALID_ARGUMENT),
    ({"frequency_penalty": float("nan")}, "frequency_penalty", "got nan", INVALID_ARGUMENT),
    ({"repetition_penalty": 0.0}, "repetition_penalty", "got 0.0", INVALID_ARGUMENT),
    ({"logit_bias_token_ids": [1]}, "logit_bias_values", "got 0", INVALID_ARGUMENT),
    ({"bad_words": [pb.TokenSequence()]}, "bad_words", "got an empty one", INVALID_ARGUMENT),
    ({"allowed_token_ids": [1000]}, "allowed_token_ids", "got 1000", INVALID_ARGUMENT),
    ({"logprobs": 21}, "logprobs", "got 21", INVALID_ARGUMENT),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "got -1", INVALID_ARGUMENT),
    ({"logprob_token_ids": [2**32 - 1]}, "logprob_token_ids", "got 4294967295", INVALID_ARGUMENT),
    ({"repetition_detection": pb.RepetitionDetection()}, "max_pattern_size", "got 0", INVALID_ARGUMENT),
    ({"structured_output": pb.StructuredOutput()}, "structured_output", "got 0", INVALID_ARGUMENT),
]


def bad_request(handle, changes):
    request = add_request(handle, changes.get("prompt_token_ids", [5, 6]))
    for name, value in changes.items():
        if name == "prompt_token_ids":
            continue
        if name == "task":
            request.ClearField("sampling")
        elif name == "pooling":
            request.pooling.CopyFrom(value)
        else:
            owner = request.sampling if name in pb.SamplingParams.DESCRIPTOR.fields_by_name else request
            owner.ClearField(name)
            if value is not None:
                owner.MergeFrom(type(owner)(**{name: value}))
    return request.SerializeToString()


async def test_a_bad_request_is_refused_by_name_and_touches_no_other():
    async with engine_in_process(max_model_len=64, step_seconds=0.002) as engine, raw_frontend(engine.address) as f:
        running = await f.add([3, 4, 5], max_tokens=60)
        bad = [bad_request(handle, changes) for handle, (changes, *_) in enumerate(REFUSED, 2)]
        good = add_request(len(REFUSED) + 2, [6, 7], max_tokens=5).SerializeToString()
        await f.add_raw(*bad, good)
        ends = await f.finish(*range(2, len(REFUSED) + 2))
        for end, (changes, field, text, code) in zip(ends, REFUSED, strict=True):
            assert end.reason == pb.FINISH_REASON_ERROR, changes
            assert (end.error.field, end.error.code) == (field, code), (changes, end.error)
            assert text in end.error.message, (changes, end.error)
            assert end.handle not in f.tokens
        await f.finish(running, len(REFUSED) + 2)
        assert f.tokens[running] == fake_tokens([3, 4, 5], 60)
        assert f.tokens[len(REFUSED) + 2] == fake_tokens([6, 7], 5)
        assert all(len(ends) == 1 for ends in f.finished.values())
        await engine.wait_idle()


async def test_numbers_beyond_every_array_are_harmless():
    async with engine_in_process(max_model_len=64) as engine, raw_frontend(engine.address) as frontend:
        huge = await frontend.add(
            [5], max_tokens=2**63 - 1, min_tokens=2**63 - 1, top_k=2**31 - 1, priority=-(2**31), eos_token_ids=[2]
        )
        (finished,) = await frontend.finish(huge)
        assert finished.reason == pb.FINISH_REASON_LENGTH
        assert frontend.tokens[huge] == fake_tokens([5], 63)


async def test_neutral_values_are_accepted():
    async with engine_in_process() as engine, raw_frontend(engine.address) as frontend:
        neutral = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
        handle = await frontend.add([5], skip_reading_prefix_cache=False, data_parallel_rank=0, **neutral)
        (finished,) = await frontend.finish(handle)
        assert finished.reason == pb.FINISH_REASON_LENGTH


async def test_bytes_that_are_no_request_fail_alone():
    async with engine_in_process() as engine, raw_frontend(engine.address) as frontend:
        good = add_request(3, [5, 6]).SerializeToString()
        bad_utf8 = b"\x08\x02" + b"\x12\x02\xff\xfe"
        await frontend.add_raw(b"\x08\x01\xff\xff\xff", bad_utf8, good)
        ends = await frontend.finish(1, 2, 3)
        assert [end.error.code for end in ends] == [INVALID_ARGUMENT, INVALID_ARGUMENT, 0]
        assert all("takt.engine.v1.AddRequest" in end.error.message for end in ends[:2])
        assert frontend.tokens == {3: fake_tokens([5, 6], 8)}


@pytest.mark.parametrize(
    ("data", "handle"),
    [
        (b"\x08\x05", 5),
        (b"\x08\xff\xff\xff\xff\x0f", 2**32 - 1),
        (b"\x08\xff\xff\xff\xff\x7f", None),
        (b"\x08\xff", None),
        (b"\x12\x00", None),
        (b"", None),
    ],
)
def test_handle_of_bytes_that_are_no_request(data, handle):
    assert peek_handle(data) == handle


async def test_handles_increase_and_are_never_reused():
    async with engine_in_process() as engine, raw_frontend(engine.address) as frontend:
        engine.executor.hold()
        await frontend.add([5, 6], handle=10, max_tokens=4)
        await frontend.add([7, 8], handle=10)
        await frontend.add([7, 8], handle=9)
        ends = await frontend.finish(9, 10)
        assert [end.error.code for end in ends] == [INVALID_ARGUMENT, ALREADY_EXISTS]
        assert "got 9 after 10" in ends[0].error.message
        # The first of that handle goes on: its end is the one that a step sends.
        frontend.finished.clear()
        engine.executor.release()
        (end,) = await frontend.finish(10)
        assert end.reason == pb.FINISH_REASON_LENGTH
        assert frontend.tokens[10] == fake_tokens([5, 6], 4)
        await frontend.add([7, 8], handle=10)
        await frontend.receive_until(lambda: len(frontend.finished[10]) == 2)
        assert frontend.finished[10][1].error.code == INVALID_ARGUMENT


async def test_deadlines_are_durations_and_times_never_negative():
    async with engine_in_process() as engine, raw_frontend(engine.address) as frontend:
        engine.executor.hold()
        running = await frontend.add([3], max_tokens=4, age_ms=2**63, deadline_remaining_ms=2**63)
        expired = await frontend.add([4], deadline_remaining_ms=0)
        engine.executor.release()
        ends = await frontend.finish(running, expired)
        assert ends[0].reason == pb.FINISH_REASON_LENGTH
        assert ends[1].reason == pb.FINISH_REASON_ABORT
        assert ends[1].abort_cause == pb.ABORT_CAUSE_DEADLINE
        for end in ends:
            assert max(end.queue_us, end.prefill_us, end.decode_us) < 60e6
        assert expired not in frontend.tokens
