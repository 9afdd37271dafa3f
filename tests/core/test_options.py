"""What requests report beside tokens, whatever the schedule: nothing twice, nothing missing, nothing late.

The fake executor's numbers are functions of the request, so every one of them is predicted.
"""

import random
from dataclasses import replace

import numpy as np
import pytest

from engine_svc.core.interfaces import MASKED_TOKEN
from engine_svc.core.stop_check import ends_in_repetition
from engine_svc.executor.fake import FakeExecutor, FakeExecutorOptions
from engine_svc.executor.fake_results import fake_logprobs, fake_state
from shared.errors import InvalidRequestError
from shared.types import EngineRequest, FinishReason, PoolingParams, RepetitionDetection, SamplingParams
from tests.support.core_driver import CoreDriver
from tests.support.drive import Clock, CoreLimits, Driver, expected_output, make_core, make_request

VOCAB_SIZE = 64
MAX_MODEL_LEN = 96


def fake_driver(depth=1, **limits) -> Driver:
    options = FakeExecutorOptions(
        vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, max_concurrent_batches=depth, eos_every=50, synchronous=True
    )
    settings = {"max_model_len": MAX_MODEL_LEN, "max_logprobs": -1, **limits}
    driver = Driver(make_core(FakeExecutor(options), CoreLimits(**settings)), Clock(tick=0.0))
    driver.options = options
    return driver


def check_logprobs(entries, first_position, tokens, count, chosen=()):
    assert len(entries) == len(tokens)
    for position, (entry, token) in enumerate(zip(entries, tokens, strict=True), first_position):
        ids, values, rank = fake_logprobs(position, token, count, VOCAB_SIZE, chosen)
        assert (entry.token_ids, entry.logprobs, entry.rank) == (ids, values, rank)


def check_request(request: EngineRequest, collected, options) -> None:
    prompt, sampling = list(request.prompt_token_ids), request.sampling
    if request.pooling is not None:
        check_vector(request, collected)
        return
    tokens, reason, _ = expected_output(options, request, MAX_MODEL_LEN)
    if collected.finished is not None:
        assert (collected.token_ids, collected.reason) == (tokens, reason)
    else:
        assert tokens[: len(collected.token_ids)] == collected.token_ids
    chosen = sampling.logprob_token_ids
    if chosen or sampling.logprobs is not None:
        count = len(chosen) if chosen else sampling.logprobs
        start = len(prompt) + len(request.resume_token_ids)
        check_logprobs(collected.logprobs, start, collected.token_ids, count, chosen)
    else:
        assert not collected.logprobs
    if sampling.prompt_logprobs is None:
        assert not collected.prompt_logprobs
    else:
        known = prompt[1:] if collected.token_ids else prompt[1 : 1 + len(collected.prompt_logprobs)]
        check_logprobs(collected.prompt_logprobs, 1, known, sampling.prompt_logprobs)


def check_vector(request: EngineRequest, collected) -> None:
    assert not collected.token_ids
    if collected.finished is None:
        return
    states = np.array([fake_state(position, token) for position, token in enumerate(request.prompt_token_ids)])
    vector = states[-1] if request.pooling.pooling == "last" else states.mean(axis=0)
    length = np.linalg.norm(vector)
    if request.pooling.normalize and length:
        vector = vector / length
    assert collected.reason is FinishReason.STOP
    assert collected.finished.embedding == tuple(vector.astype(np.float32).tolist())


def random_request(rng: random.Random, handle: int) -> EngineRequest:
    prompt = [5] * rng.choice([0, 4, 8, 13]) + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 30))]
    max_tokens = rng.randint(1, 40)
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rng.randint(0, max_tokens),
        seed=rng.getrandbits(64),
        ignore_eos=rng.random() < 0.3,
        logprobs=rng.choice([None, None, 0, 3, -1]),
        prompt_logprobs=rng.choice([None, None, 0, 2, -1]),
        skip_reading_prefix_cache=rng.random() < 0.2,
        presence_penalty=rng.choice([0.0, 1.0]),
    )
    if rng.random() < 0.2:
        sampling = replace(sampling, logprobs=None, logprob_token_ids=(4, 9))
    pooling = None
    if rng.random() < 0.25:
        pooling = PoolingParams(pooling=rng.choice(["last", "mean"]), normalize=rng.random() < 0.5)
    resumed = [] if pooling or rng.random() < 0.8 else [rng.randrange(VOCAB_SIZE) for _ in range(max_tokens - 1)]
    return EngineRequest(
        handle=handle,
        request_id=f"request-{handle}",
        prompt_token_ids=prompt,
        resume_token_ids=resumed,
        eos_token_ids=(2,),
        sampling=sampling,
        pooling=pooling,
    )


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_every_schedule_reports_the_same(depth, seed):
    rng = random.Random(f"options-{depth}-{seed}")
    driver = fake_driver(
        depth,
        max_num_seqs=rng.choice([2, 5, 8]),
        max_num_batched_tokens=rng.choice([8, 16, 64]),
        num_blocks=rng.choice([25, 30, 60]),
        long_prefill_token_threshold=rng.choice([0, 5]),
    )
    requests: dict[int, EngineRequest] = {}
    aborted: set[int] = set()
    while len(requests) < 40 or driver.core.has_work():
        if len(requests) < 40 and rng.random() < 0.4:
            handle = len(requests)
            requests[handle] = random_request(rng, handle)
            driver.add(requests[handle])
        if requests and rng.random() < 0.06:
            handle = rng.randrange(len(requests))
            aborted.add(handle)
            if rng.random() < 0.5:
                driver.abort_at(driver.steps + 1, handle)
            else:
                driver.abort_now(handle)
        if rng.random() < 0.03:
            assert driver.core.reset_prefix_cache(reset_running_requests=True)
        driver.step()
    driver.run()
    for handle, request in requests.items():
        collected = driver.by_key[1, handle]
        assert collected.finished is not None or handle in aborted
        check_request(request, collected, driver.options)


@pytest.mark.parametrize("depth", [1, 3])
def test_prompt_logprobs_go_on_after_a_preemption_in_the_middle_of_the_prompt(depth):
    driver = fake_driver(depth, max_num_batched_tokens=8)
    request = make_request(1, list(range(3, 43)), max_tokens=5, prompt_logprobs=1)
    collected = driver.add(request)
    for _ in range(3):
        driver.step()
    reported = len(collected.prompt_logprobs)
    assert 0 < reported < 39
    driver.core.reset_prefix_cache(reset_running_requests=True)
    driver.run()
    assert driver.num_preempted == 1
    check_request(request, collected, driver.options)


def test_a_preempted_prompt_skips_what_is_cached_and_was_reported():
    driver = fake_driver(max_num_batched_tokens=8)
    request = make_request(1, list(range(3, 43)), max_tokens=5, prompt_logprobs=1)
    collected = driver.add(request)
    for _ in range(3):
        driver.step()
    reported = len(collected.prompt_logprobs)
    driver.core.scheduler.preempt_all()
    driver.run()
    check_request(request, collected, driver.options)
    assert driver.core._executor.num_tokens_computed < 40 + 5 + reported


def test_prompt_logprobs_read_no_cached_prefix():
    driver = fake_driver()
    first = driver.add(make_request(1, list(range(3, 43)), max_tokens=2))
    driver.run()
    request = make_request(2, list(range(3, 43)), max_tokens=2, prompt_logprobs=0)
    second = driver.add(request)
    third = driver.add(make_request(3, list(range(3, 43)), max_tokens=2, skip_reading_prefix_cache=True))
    fourth = driver.add(make_request(4, list(range(3, 43)), max_tokens=2))
    driver.run()
    assert first.first_scheduled.num_cached_tokens == 0
    assert second.first_scheduled.num_cached_tokens == third.first_scheduled.num_cached_tokens == 0
    assert fourth.first_scheduled.num_cached_tokens == 36
    check_request(request, second, driver.options)


def test_a_prompt_of_one_token_has_no_prompt_logprobs():
    driver = fake_driver()
    collected = driver.add(make_request(1, [7], max_tokens=2, prompt_logprobs=3))
    driver.run()
    assert collected.reason is FinishReason.LENGTH
    assert not collected.prompt_logprobs


def test_prompt_logprobs_come_with_the_first_token_when_that_is_the_last():
    driver = fake_driver()
    collected = driver.add(make_request(1, [7, 8, 9], max_tokens=1, prompt_logprobs=3, logprobs=1))
    outputs = driver.step()
    (columns,) = outputs.by_client.values()
    assert (columns.handles, [len(one) for one in columns.prompt_logprobs]) == ([1], [2])
    assert collected.reason is FinishReason.LENGTH
    driver.run()


# --- repetition -------------------------------------------------------------------------------------------------------


def repeats(output, largest, smallest, count):
    """By the definition."""
    for size in range(max(1, smallest), largest + 1):
        tail = output[len(output) - size * count :] if size * count <= len(output) else None
        if tail is not None and tail == tail[:size] * count:
            return True
    return False


def test_repetition_against_the_definition():
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    found = 0
    for _ in range(4000):
        pattern = rng.choices(range(3), k=rng.randint(1, 4))
        output = rng.choices(range(3), k=rng.randint(0, 6)) + pattern * rng.randint(1, 5)
        largest = rng.randint(1, 6)
        smallest, count = rng.randint(0, largest), rng.randint(2, 5)
        detection = RepetitionDetection(max_pattern_size=largest, min_pattern_size=smallest, min_count=count)
        expected = repeats(output, largest, smallest, count)
        assert ends_in_repetition(np.array(output, np.int32), detection) == expected
        found += expected
    assert 200 < found < 3800


DETECTION = RepetitionDetection(max_pattern_size=3, min_pattern_size=2, min_count=3)


@pytest.mark.parametrize(
    ("fields", "reason", "length"),
    [
        ({"repetition_detection": DETECTION}, FinishReason.REPETITION, 7),
        ({}, FinishReason.LENGTH, 20),
        ({"repetition_detection": DETECTION, "min_tokens": 12}, FinishReason.REPETITION, 12),
        ({"repetition_detection": DETECTION, "max_tokens": 7}, FinishReason.LENGTH, 7),
        ({"repetition_detection": DETECTION, "stop_token_ids": (8,)}, FinishReason.STOP, 3),
        (
            {"repetition_detection": RepetitionDetection(max_pattern_size=1, min_pattern_size=1, min_count=2)},
            FinishReason.LENGTH,
            20,
        ),
    ],
)
def test_a_repeating_output_ends(fields, reason, length):
    driver = CoreDriver()
    # One token, then a pattern of two for ever.
    driver.executor.tokens = {("1", 4 + index): 9 if index == 0 else 7 + (index + 1) % 2 for index in range(20)}
    driver.add(1, **{"max_tokens": 20, **fields})
    driver.add(2, max_tokens=20)
    driver.run()
    assert driver.end(1).reason is reason
    assert len(driver.tokens[0, 1]) == length
    assert driver.end(2).reason is FinishReason.LENGTH


# --- ends -------------------------------------------------------------------------------------------------------------


def test_a_request_that_may_sample_nothing_fails_alone():
    driver = CoreDriver()
    driver.executor.tokens = {("1", 5): MASKED_TOKEN}
    driver.add(1)
    driver.add(2)
    driver.run()
    assert driver.end(1).reason is FinishReason.ERROR
    assert (driver.end(1).error.reason, driver.end(1).error.code) == ("NO_TOKEN_ALLOWED", InvalidRequestError.code)
    assert len(driver.tokens[0, 1]) == 1
    assert driver.end(2).reason is FinishReason.LENGTH


def test_min_tokens_beyond_the_context_ends_with_length():
    driver = CoreDriver(max_model_len=10)
    driver.add(1, 4, max_tokens=100, min_tokens=50)
    driver.run()
    assert driver.end(1).reason is FinishReason.LENGTH
    assert len(driver.tokens[0, 1]) == 6


BAD = {
    "presence_penalty": (2.1, float("nan")),
    "frequency_penalty": (-2.1, float("inf")),
    "repetition_penalty": (0.0, -1.0, float("nan"), float("inf")),
    "logit_bias": (((VOCAB_SIZE, 1.0),), ((3, 101.0),), ((3, float("nan")),), ((3, 1.0),) * 1025),
    "bad_words": (((),), ((3, VOCAB_SIZE),), ((3,),) * 257, ((3,) * 1025,)),
    "allowed_token_ids": ((VOCAB_SIZE,), (3,) * (VOCAB_SIZE + 1)),
    "logprobs": (-2, 21, -1),
    "prompt_logprobs": (-2, 21, -1),
    "logprob_token_ids": ((VOCAB_SIZE,), (3,) * 129),
    "repetition_detection": (
        RepetitionDetection(max_pattern_size=0, min_pattern_size=0, min_count=2),
        RepetitionDetection(max_pattern_size=2, min_pattern_size=3, min_count=2),
        RepetitionDetection(max_pattern_size=2, min_pattern_size=1, min_count=1),
    ),
}
GOOD = {
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-300, 1e300),
    "logit_bias": (((0, -100.0), (VOCAB_SIZE - 1, 100.0)),),
    "bad_words": (((3,),) * 256, ((3,) * 1024,)),
    "allowed_token_ids": (tuple(range(VOCAB_SIZE)),),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "logprob_token_ids": ((3,) * 128,),
    "repetition_detection": (RepetitionDetection(max_pattern_size=2**32 - 1, min_pattern_size=0, min_count=2**32 - 1),),
}


@pytest.mark.parametrize("name", BAD)
def test_values_outside_their_limits_are_refused_by_name(name):
    driver = fake_driver(max_logprobs=20)
    bad = [driver.add(make_request(handle, [5, 6], **{name: value})) for handle, value in enumerate(BAD[name])]
    good = [driver.add(make_request(handle, [5, 6], **{name: value})) for handle, value in enumerate(GOOD[name], 100)]
    driver.run()
    fields = {name, "max_pattern_size", "min_pattern_size", "min_count"} if "detection" in name else {name}
    assert all(one.reason is FinishReason.ERROR and one.finished.error.field in fields for one in bad)
    assert all(one.finished.error.code == InvalidRequestError.code for one in bad)
    assert all(one.reason is not FinishReason.ERROR for one in good), [one.finished.error for one in good]


def test_log_probabilities_of_long_prompts_are_bounded_together():
    driver = fake_driver()
    request = make_request(1, [5] * 90, prompt_logprobs=-1)
    driver.core._limits = replace(driver.core._limits, max_prompt_logprob_entries=90 * 65 - 1)
    refused = driver.add(request)
    driver.run()
    assert refused.finished.error.field == "prompt_logprobs"


def test_chosen_tokens_and_their_number_must_agree():
    driver = fake_driver()
    refused = driver.add(make_request(1, [5], logprobs=1, logprob_token_ids=(3, 4)))
    taken = driver.add(make_request(2, [5], logprobs=2, logprob_token_ids=(3, 4)))
    driver.run()
    assert refused.finished.error.field == "logprobs"
    assert taken.reason is not FinishReason.ERROR


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"pooling": PoolingParams(pooling="first", normalize=True)}, "pooling"),
        ({"resume_token_ids": [4]}, "resume_token_ids"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [5] * MAX_MODEL_LEN}, "prompt_token_ids"),
        ({"prompt_token_ids": [VOCAB_SIZE]}, "prompt_token_ids"),
    ],
)
def test_pooling_requests_are_checked(changes, field):
    driver = fake_driver()
    request = replace(make_request(1, [5], pooling=("last", True)), **changes)
    refused = driver.add(request)
    driver.run()
    assert refused.finished.error.field == field


def test_a_pooling_request_may_fill_the_context_but_one():
    driver = fake_driver()
    request = make_request(1, list(range(3, 3 + 61)) + [5] * 34, pooling=("mean", False))
    assert len(request.prompt_token_ids) == MAX_MODEL_LEN - 1
    collected = driver.add(request)
    driver.run()
    check_request(request, collected, driver.options)
