"""Options and what they report across the wire: there and back as they were, merged and split without loss."""

import dataclasses
import random
from dataclasses import replace

import numpy as np
import pytest

from engine_svc.core.validation import RequestLimits
from engine_svc.executor.fake_results import fake_logprobs, fake_state
from engine_svc.service.convert import encode_outputs, encode_ready
from engine_svc.service.convert_request import decode_request
from engine_svc.service.outbox import Outbox, OutboxLimits, estimate_bytes, split
from frontend_svc.routing.convert import MalformedMessageError, decode, encode_request
from frontend_svc.routing.engine_stream import EngineStream
from shared.types import (
    EngineInfo,
    EngineLoad,
    EngineRequest,
    FinishedRequest,
    FinishReason,
    NumericsFingerprint,
    PoolingParams,
    RepetitionDetection,
    SamplingParams,
    StepOutputs,
    StructuredOutputKind,
    StructuredOutputSpec,
    TokenLogprobs,
)
from takt.engine.v1 import engine_pb2 as pb
from tests.support.engine_in_process import engine_in_process
from tests.support.raw_frontend import add_request, raw_frontend

LIMITS = RequestLimits(vocab_size=1000, max_model_len=64, max_stop_token_ids=128, max_logprobs=-1)
EVERYTHING = SamplingParams(
    temperature=0.25,
    top_p=0.5,
    top_k=3,
    min_p=0.125,
    seed=2**64 - 1,
    max_tokens=7,
    min_tokens=2,
    stop_token_ids=(5, 6),
    ignore_eos=True,
    presence_penalty=-1.5,
    frequency_penalty=0.3,
    repetition_penalty=1.7,
    logit_bias=((7, -100.0), (8, 0.1)),
    bad_words=((1,), (2, 3, 4)),
    allowed_token_ids=(0, 9),
    logprobs=2,
    prompt_logprobs=0,
    logprob_token_ids=(11, 12),
    repetition_detection=RepetitionDetection(max_pattern_size=5, min_pattern_size=0, min_count=4),
    structured_output=StructuredOutputSpec(StructuredOutputKind.REGEX, "a+"),
    skip_reading_prefix_cache=True,
)


def request_of(sampling: SamplingParams, **fields) -> EngineRequest:
    return EngineRequest(handle=3, request_id="r", prompt_token_ids=[5, 6], sampling=sampling, **fields)


def there(request: EngineRequest) -> EngineRequest:
    """As the engine reads it."""
    decoded = decode_request(encode_request(request, 3), LIMITS, 0)
    assert isinstance(decoded, EngineRequest), decoded
    return decoded


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(SamplingParams)])
def test_every_field_of_sampling_arrives_alone(field):
    value = getattr(EVERYTHING, field)
    sampling = replace(SamplingParams(max_tokens=7, temperature=0.0), **{field: value})
    assert there(request_of(sampling)).sampling == sampling


def test_all_fields_of_sampling_arrive_together():
    assert there(request_of(EVERYTHING)).sampling == EVERYTHING
    plain = SamplingParams(max_tokens=7, temperature=0.0)
    assert there(request_of(plain)).sampling == plain


@pytest.mark.parametrize("logprobs", [None, 0, -1])
def test_absent_and_zero_logprobs_are_different(logprobs):
    sampling = SamplingParams(max_tokens=7, logprobs=logprobs, prompt_logprobs=logprobs)
    assert there(request_of(sampling)).sampling == sampling


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_pooling_arrives(pooling):
    params = PoolingParams(pooling=pooling, normalize=pooling == "last")
    assert there(request_of(EVERYTHING, pooling=params)).pooling == params


def some_logprobs(rng: random.Random, handle: int, count: int, width: int) -> TokenLogprobs:
    generator = np.random.default_rng(rng.getrandbits(32))
    values = generator.normal(-5, 2, (count, width)).astype(np.float32)
    values[0, -1] = -np.inf
    ids = generator.integers(0, 1000, (count, width)).astype(np.int32)
    return TokenLogprobs(handle, ids, values, generator.integers(1, 999, count).astype(np.int32))


def equal(first: TokenLogprobs, second: TokenLogprobs) -> bool:
    return first.handle == second.handle and all(
        (getattr(first, name) == getattr(second, name)).all() for name in ("token_ids", "logprobs", "ranks")
    )


def test_log_probabilities_and_vectors_come_back_as_they_were():
    rng = random.Random(1)
    outputs = StepOutputs(
        step=4,
        handles=[1, 2, 9],
        num_tokens=[2, 1, 1],
        token_ids=[5, 6, 7, 8],
        finished=[FinishedRequest(handle=5, reason=FinishReason.STOP, embedding=(0.5, -0.25))],
        logprobs=[some_logprobs(rng, 1, 2, 3), some_logprobs(rng, 9, 1, 1)],
        prompt_logprobs=[some_logprobs(rng, 2, 40, 6)],
    )
    data = encode_outputs(outputs)
    assert len(data) <= estimate_bytes(outputs) + 64
    decoded = decode(data)
    assert decoded.finished[0].embedding == (0.5, -0.25)
    for name in ("logprobs", "prompt_logprobs"):
        pairs = zip(getattr(decoded, name), getattr(outputs, name), strict=True)
        assert all(equal(first, second) for first, second in pairs)


@pytest.mark.parametrize("column", ["num_tokens", "widths", "token_ids", "logprobs", "ranks"])
def test_tables_of_uneven_columns_are_malformed(column):
    response = pb.ConnectResponse()
    table = response.step_outputs.logprobs
    table.MergeFrom(
        pb.LogprobsTable(handles=[1], num_tokens=[1], widths=[2], token_ids=[1, 2], logprobs=[0, 0], ranks=[1])
    )
    assert len(decode(response.SerializeToString()).logprobs) == 1
    getattr(table, column).append(1)
    with pytest.raises(MalformedMessageError):
        decode(response.SerializeToString())


def test_the_limit_of_log_probabilities_is_told():
    info = EngineInfo(
        epoch="e", model="m", max_model_len=1, vocab_size=1, eos_token_ids=(), tokenizer_digest="", block_size=1,
        num_blocks=1, dtype="", max_num_seqs=1, max_num_batched_tokens=1, max_stop_token_ids=1, max_message_bytes=1,
        max_logprobs=-1, numerics=NumericsFingerprint(),
    )  # fmt: skip
    assert decode(encode_ready(info)).max_logprobs == -1


class Sink:
    """Notes the calls in order."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda value: self.calls.append((name, value))


def test_a_sink_hears_log_probabilities_before_their_tokens():
    rng = random.Random(2)
    stream = EngineStream("a", decode(encode_ready(_info())))
    sinks = [Sink(), Sink()]
    for sink in sinks:
        stream.add_request(request_of(EVERYTHING), sink)
    outputs = StepOutputs(
        step=1,
        handles=[1, 2],
        token_ids=[5, 6],
        logprobs=[some_logprobs(rng, 2, 1, 3), some_logprobs(rng, 77, 1, 3)],
        prompt_logprobs=[some_logprobs(rng, 2, 3, 1)],
        finished=[FinishedRequest(handle=2, reason=FinishReason.LENGTH)],
    )
    stream.receive(encode_outputs(outputs))
    assert [name for name, _ in sinks[0].calls] == ["on_token"]
    assert [name for name, _ in sinks[1].calls] == ["on_prompt_logprobs", "on_logprobs", "on_token", "on_finished"]
    assert equal(sinks[1].calls[1][1], outputs.logprobs[0])


def _info() -> EngineInfo:
    return EngineInfo(
        epoch="e", model="m", max_model_len=64, vocab_size=1000, eos_token_ids=(), tokenizer_digest="", block_size=4,
        num_blocks=9, dtype="", max_num_seqs=1, max_num_batched_tokens=1, max_stop_token_ids=1,
        max_message_bytes=1 << 20, numerics=NumericsFingerprint(),
    )  # fmt: skip


# --- the outbox -------------------------------------------------------------------------------------------------------


class Gathered:
    """What messages brought, checked on the way."""

    def __init__(self) -> None:
        self.tokens, self.logprobs, self.prompts = {}, {}, {}
        self.ended = set()

    def add(self, message: StepOutputs) -> None:
        counts = dict(zip(message.handles, message.num_tokens or [1] * len(message.handles), strict=True))
        for one in message.prompt_logprobs:
            assert one.handle not in self.tokens
            self.prompts.setdefault(one.handle, []).extend(one.ranks.tolist())
        for one in message.logprobs:
            assert len(one) == counts[one.handle], "log-probabilities and tokens are in different messages"
            cells = zip(one.token_ids.tolist(), one.logprobs.tolist(), one.ranks.tolist(), strict=True)
            self.logprobs.setdefault(one.handle, []).extend(cells)
        start = 0
        for handle, count in counts.items():
            assert handle not in self.ended
            self.tokens.setdefault(handle, []).extend(message.token_ids[start : start + count])
            start += count
        self.ended |= {one.handle for one in message.finished}


@pytest.mark.parametrize("seed", range(12))
async def test_random_puts_and_takes_lose_no_log_probability(seed):
    rng = random.Random(seed)
    sent, expected = Gathered(), Gathered()
    bound = rng.choice([300, 3000, 1 << 20])

    def encode(outputs):
        sent.add(outputs)
        return encode_outputs(outputs)

    outbox = Outbox(OutboxLimits(max_message_bytes=bound), encode, lambda: 0.0)
    widths = {handle: rng.choice([0, 1, 5, 21]) for handle in range(10)}
    prompts = {handle: rng.choice([0, 3]) for handle in range(10)}
    open_handles, started = set(range(10)), set()
    for number in range(100):
        outputs = StepOutputs(step=number, num_tokens=[], load=EngineLoad(step_counter=number))
        for handle in [one for one in sorted(open_handles) if rng.random() < 0.6]:
            if prompts[handle]:
                outputs.prompt_logprobs.append(some_logprobs(rng, handle, rng.choice([1, 40]), 2))
                prompts[handle] -= 1
                continue
            started.add(handle)
            count = rng.randint(1, 3)
            outputs.handles.append(handle)
            outputs.num_tokens.append(count)
            outputs.token_ids += [rng.randrange(1000) for _ in range(count)]
            if widths[handle]:
                outputs.logprobs.append(some_logprobs(rng, handle, count, widths[handle]))
        if started & open_handles and rng.random() < 0.05:
            handle = (started & open_handles).pop()
            open_handles.remove(handle)
            outputs.finished.append(FinishedRequest(handle=handle, reason=FinishReason.STOP, embedding=(1.0,) * 20))
        expected.add(outputs)
        outbox.put_outputs(outputs)
        if rng.random() < 0.3:
            for frame in await outbox.take():
                outbox.progressed(frame)
    outbox.close()
    await outbox.take()
    assert vars(sent) == vars(expected)


def test_prompts_and_wide_tokens_are_split():
    rng = random.Random(3)
    outputs = StepOutputs(
        step=1,
        handles=[4],
        num_tokens=[30],
        token_ids=list(range(30)),
        logprobs=[some_logprobs(rng, 4, 30, 100)],
        prompt_logprobs=[some_logprobs(rng, 5, 500, 21)],
    )
    parts = list(split(outputs, 5000))
    assert all(estimate_bytes(part) <= 5000 for part in parts)
    assert all(len(encode_outputs(part)) <= estimate_bytes(part) + 64 for part in parts)
    gathered, whole = Gathered(), Gathered()
    whole.add(outputs)
    for part in parts:
        gathered.add(part)
    assert vars(gathered) == vars(whole)


# --- a whole engine ---------------------------------------------------------------------------------------------------


def table_entries(messages, name, handle):
    """Entries (ids, values, rank) of one request from all tables, in order."""
    entries = []
    for message in messages:
        table = getattr(message.step_outputs, name)
        start = cell = 0
        for owner, count, width in zip(table.handles, table.num_tokens, table.widths, strict=True):
            for _ in range(count):
                ids, values = list(table.token_ids[cell : cell + width]), list(table.logprobs[cell : cell + width])
                if owner == handle:
                    entries.append((ids, values, table.ranks[start]))
                start, cell = start + 1, cell + width
        assert (start, cell) == (len(table.ranks), len(table.token_ids))
    return entries


async def test_an_engine_reports_log_probabilities_and_vectors():
    async with engine_in_process(max_model_len=64) as engine, raw_frontend(engine.address) as frontend:
        assert frontend.ready.limits.max_logprobs == 20
        plain = await frontend.add([5, 6, 7], max_tokens=4)
        asking = await frontend.add([5, 6, 7], max_tokens=4, logprobs=2, prompt_logprobs=1)
        chosen = await frontend.add([5, 6, 7], max_tokens=4, logprob_token_ids=[9])
        pooled = add_request(chosen + 1, [5, 6, 7])
        pooled.pooling.CopyFrom(pb.PoolingParams(pooling="mean"))
        await frontend.add_raw(pooled.SerializeToString())
        ends = await frontend.finish(plain, asking, chosen, chosen + 1)
        vocab_size = frontend.ready.vocab_size
        tokens = frontend.tokens[plain]
        assert frontend.tokens[asking] == frontend.tokens[chosen] == tokens
        seen = [message for message in frontend.received if message.WhichOneof("message") == "step_outputs"]
        assert table_entries(seen, "logprobs", asking) == [
            fake_logprobs(3 + index, token, 2, vocab_size) for index, token in enumerate(tokens)
        ]
        assert table_entries(seen, "logprobs", chosen) == [
            fake_logprobs(3 + index, token, 1, vocab_size, (9,)) for index, token in enumerate(tokens)
        ]
        assert table_entries(seen, "prompt_logprobs", asking) == [
            fake_logprobs(position, token, 1, vocab_size) for position, token in [(1, 6), (2, 7)]
        ]
        assert not table_entries(seen, "logprobs", plain)
        assert ends[-1].reason == pb.FINISH_REASON_STOP
        expected = np.mean([fake_state(position, token) for position, token in enumerate([5, 6, 7])], axis=0)
        np.testing.assert_allclose(ends[-1].embedding, expected, rtol=1e-6)
        await engine.wait_idle()
