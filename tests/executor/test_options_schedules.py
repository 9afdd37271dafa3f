"""Random requests with options through real executors and random schedules, each against a loop over its own tokens.

The model is a table: its logits are a function of a token and its position, exact in every batch, so that every token
and every log-probability is predicted by NumPy alone.
"""

import random
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from engine_svc.core.interfaces import KVCacheSpec, ModelInfo  # noqa: E402 - after importorskip
from engine_svc.executor.uniproc import ExecutorOptions, UniprocExecutor  # noqa: E402
from shared.types import (  # noqa: E402
    EngineRequest,
    FinishReason,
    NumericsFingerprint,
    PoolingParams,
    RepetitionDetection,
    SamplingParams,
)
from tests.core.test_options import repeats  # noqa: E402
from tests.support.drive import Clock, CoreLimits, Driver, make_core  # noqa: E402
from tests.support.options_oracle import log_softmax, processed, ranked  # noqa: E402
from tests.support.sampling_oracle import sample_token  # noqa: E402

VOCAB_SIZE = 24
MAX_MODEL_LEN = 64
PERIOD = 7
EOS = 2


class TableModel:
    """Implements Model without attention. A hidden state is the index of a row of the table, and its square."""

    device = torch.device("cpu")

    def __init__(self, seed: int) -> None:
        values = np.random.default_rng(seed).normal(0, 2, (VOCAB_SIZE * PERIOD, VOCAB_SIZE)).astype(np.float32)
        self.table = torch.from_numpy(values)
        self.info = ModelInfo(
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=(EOS,),
            tokenizer_digest="",
            dtype="float32",
            numerics=NumericsFingerprint(),
        )

    def kv_cache_specs(self):
        return (KVCacheSpec(num_layers=1, bytes_per_token=4),)

    def allocate_kv_cache(self, num_blocks, block_size):
        return None

    def hidden_states(self, batch, kv_cache):
        index = (batch.token_ids * PERIOD + batch.positions % PERIOD)[batch.logits_indices].float()
        return torch.stack([index, index**2], dim=1)

    def compute_logits(self, hidden):
        return self.table[hidden[:, 0].long()].clone()

    def forward(self, batch, kv_cache):
        return self.compute_logits(self.hidden_states(batch, kv_cache))

    def logits_after(self, token_ids) -> np.ndarray:
        position = len(token_ids) - 1
        return self.table[token_ids[-1] * PERIOD + position % PERIOD].numpy()

    def vector(self, pooling: PoolingParams, token_ids) -> np.ndarray:
        index = np.array([token * PERIOD + at % PERIOD for at, token in enumerate(token_ids)], np.float64)
        states = np.stack([index, index**2], axis=1)
        vector = states[-1] if pooling.pooling == "last" else states.mean(axis=0)
        length = np.linalg.norm(vector)
        return vector / length if pooling.normalize and length else vector


def random_sampling(rng: random.Random, max_tokens: int) -> SamplingParams:
    few = rng.random() < 0.3
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, rng.randint(0, max_tokens)]),
        temperature=rng.choice([0.0, 0.7, 1.3]),
        top_k=rng.choice([0, 0, 5]),
        top_p=rng.choice([1.0, 1.0, 0.8]),
        seed=rng.getrandbits(64),
        stop_token_ids=rng.choice([(), (9,), (9, 10)]),
        ignore_eos=rng.random() < 0.3,
        presence_penalty=rng.choice([0.0, 0.0, 1.5, -0.5]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.6]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        logit_bias=rng.choice([(), ((4, 3.0), (5, -100.0))]),
        bad_words=rng.choice([(), ((3,), (4, 6), (1, 2, 3))]),
        allowed_token_ids=rng.choice([(9,), (2, 9, 10), tuple(range(2, 14))]) if few else (),
        logprobs=rng.choice([None, None, 0, 4]),
        prompt_logprobs=rng.choice([None, None, None, 0, 3]),
        repetition_detection=rng.choice(
            [None, RepetitionDetection(max_pattern_size=3, min_pattern_size=1, min_count=3)]
        ),
    )


def random_request(rng: random.Random, handle: int) -> EngineRequest:
    prompt = [5] * rng.choice([0, 4, 8]) + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 25))]
    max_tokens = rng.randint(1, 30)
    pooling = None
    if rng.random() < 0.15:
        pooling = PoolingParams(pooling=rng.choice(["last", "mean"]), normalize=rng.random() < 0.5)
    return EngineRequest(
        handle=handle,
        request_id=str(handle),
        prompt_token_ids=prompt,
        eos_token_ids=(EOS,),
        sampling=random_sampling(rng, max_tokens),
        pooling=pooling,
    )


def expected_end(model: TableModel, request: EngineRequest):
    """Tokens and finish reason by a loop over one request."""
    sampling, prompt, output = request.sampling, list(request.prompt_token_ids), list(request.resume_token_ids)
    detection, resumed = sampling.repetition_detection, len(request.resume_token_ids)
    kept = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
    while True:
        logits = model.logits_after([*prompt, *output])
        changed = processed(logits, sampling, prompt, output, [*sampling.stop_token_ids, EOS])
        if np.isneginf(changed).all():
            return output[resumed:], FinishReason.ERROR
        output.append(sample_token(changed, seed=sampling.seed, output_index=len(output), **kept))
        if output[-1] in sampling.stop_token_ids or (output[-1] == EOS and not sampling.ignore_eos):
            return output[resumed:], FinishReason.STOP
        if len(output) >= sampling.max_tokens or len(prompt) + len(output) >= MAX_MODEL_LEN:
            return output[resumed:], FinishReason.LENGTH
        watched = detection is not None and len(output) >= sampling.min_tokens
        if watched and repeats(output, detection.max_pattern_size, detection.min_pattern_size, detection.min_count):
            return output[resumed:], FinishReason.REPETITION


def check_entries(model, entries, tokens, known, count) -> None:
    """`tokens` follow the `known` ones."""
    assert len(entries) == len(tokens)
    for index, (entry, token) in enumerate(zip(entries, tokens, strict=True)):
        logits = model.logits_after([*known, *tokens[:index]])
        assert (entry.token_ids, entry.rank) == ranked(logits, token, count)
        np.testing.assert_allclose(entry.logprobs, log_softmax(logits)[entry.token_ids], atol=1e-5)


def check(model: TableModel, request: EngineRequest, collected, *, aborted: bool) -> FinishReason | None:
    if request.pooling is not None:
        assert collected.finished or aborted
        if collected.finished:
            expected = model.vector(request.pooling, request.prompt_token_ids)
            np.testing.assert_allclose(collected.finished.embedding, expected, rtol=1e-5)
        return None
    tokens, reason = expected_end(model, request)
    if collected.finished is None:
        assert aborted
        tokens = tokens[: len(collected.token_ids)]
    assert collected.token_ids == tokens
    assert collected.finished is None or collected.reason is reason
    sampling, prompt = request.sampling, list(request.prompt_token_ids)
    if sampling.logprobs is not None:
        check_entries(model, collected.logprobs, tokens, [*prompt, *request.resume_token_ids], sampling.logprobs)
    if sampling.prompt_logprobs is not None:
        reported = len(prompt) - 1 if collected.finished else len(collected.prompt_logprobs)
        check_entries(model, collected.prompt_logprobs, prompt[1 : 1 + reported], prompt[:1], sampling.prompt_logprobs)
    return reason


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_every_schedule_gives_what_a_loop_gives(batches, seed):
    rng = random.Random(f"{batches}-{seed}")
    model = TableModel(seed)
    executor = UniprocExecutor(model, ExecutorOptions(max_concurrent_batches=batches))
    limits = CoreLimits(
        max_num_seqs=rng.choice([4, 8]),
        max_num_batched_tokens=rng.choice([8, 16, 64]),
        max_model_len=MAX_MODEL_LEN,
        block_size=4,
        num_blocks=rng.choice([18, 30]),
    )
    try:
        driver = Driver(make_core(executor, limits), Clock(tick=0.0))
        requests, aborted = {}, set()
        while len(requests) < 40 or driver.core.has_work():
            if len(requests) < 40 and rng.random() < 0.5:
                handle = len(requests)
                requests[handle] = random_request(rng, handle)
                driver.add(requests[handle])
            if requests and rng.random() < 0.05:
                handle = rng.randrange(len(requests))
                aborted.add(handle)
                driver.abort_at(driver.steps + 1, handle)
            if rng.random() < 0.03:
                driver.core.reset_prefix_cache(reset_running_requests=True)
            driver.step()
        driver.run()
        ends = [
            check(model, request, driver.by_key[1, handle], aborted=handle in aborted)
            for handle, request in requests.items()
        ]
        assert driver.num_preempted > 0
        assert {FinishReason.STOP, FinishReason.LENGTH} <= set(ends)
    finally:
        executor.shutdown()


def test_outputs_continue_from_every_token():
    """As on another engine: the same options see the resumed tokens as output."""
    rng = random.Random(5)
    model = TableModel(9)
    executor = UniprocExecutor(model, ExecutorOptions())
    try:
        limits = CoreLimits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=MAX_MODEL_LEN, num_blocks=200)
        driver = Driver(make_core(executor, limits), Clock(tick=0.0))
        continued = []
        for number in range(8):
            request = replace(random_request(rng, number), pooling=None)
            tokens, reason = expected_end(model, request)
            for cut in range(len(tokens)):
                part = replace(request, handle=len(continued), resume_token_ids=tokens[:cut])
                continued.append((part, tokens[cut:], reason, driver.add(part)))
        driver.run()
        assert len(continued) > 30
        for part, tokens, reason, collected in continued:
            assert (collected.token_ids, collected.reason) == (tokens, reason)
            check(model, part, collected, aborted=False)
    finally:
        executor.shutdown()
