"""Random requests, aborts and pools against the fake executor, which checks every position, slot and prefix.

Whatever the schedule, each request's tokens are the ones that it gets alone.
"""

import random

import pytest

from engine_svc.executor.fake import FakeExecutor, FakeExecutorOptions
from shared.types import EngineRequest, FinishReason, SamplingParams
from tests.support.drive import Clock, CoreLimits, Driver, expected_output, make_core

MAX_MODEL_LEN = 96
VOCAB_SIZE = 64


def random_request(rng: random.Random, handle: int, policy: str) -> EngineRequest:
    # Few different beginnings, so that prefixes are shared.
    prompt = [rng.choice([5, 6])] * rng.choice([0, 4, 8, 13]) + [
        rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 30))
    ]
    max_tokens = rng.randint(1, 40)
    return EngineRequest(
        handle=handle,
        request_id=f"request-{handle}",
        prompt_token_ids=prompt,
        eos_token_ids=(2,),
        priority=rng.randint(-2, 2) if policy == "priority" else 0,
        cache_salt=rng.choice(["", "", "salt"]),
        sampling=SamplingParams(
            max_tokens=max_tokens,
            min_tokens=rng.randint(0, max_tokens),
            seed=rng.getrandbits(64),
            ignore_eos=rng.random() < 0.3,
            stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.randint(0, 2))),
        ),
    )


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_every_schedule_gives_the_same_tokens(policy, depth, seed):
    rng = random.Random(f"{policy}-{depth}-{seed}")
    options = FakeExecutorOptions(
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_concurrent_batches=depth,
        eos_every=50,
        synchronous=True,
    )
    limits = CoreLimits(
        max_num_seqs=rng.choice([2, 5, 8]),
        max_num_batched_tokens=rng.choice([8, 16, 64]),
        max_model_len=MAX_MODEL_LEN,
        block_size=4,
        num_blocks=rng.choice([25, 30, 60]),
        long_prefill_token_threshold=rng.choice([0, 5]),
        policy=policy,
    )
    driver = Driver(make_core(FakeExecutor(options), limits), Clock(tick=0.0))
    requests: dict[int, EngineRequest] = {}
    aborted: set[int] = set()
    while len(requests) < 40 or driver.core.has_work():
        if len(requests) < 40 and rng.random() < 0.4:
            handle = len(requests)
            requests[handle] = random_request(rng, handle, policy)
            driver.add(requests[handle])
        if requests and rng.random() < 0.08:
            handle = rng.randrange(len(requests))
            aborted.add(handle)
            if rng.random() < 0.5:
                driver.abort_at(driver.steps + 1, handle)
            else:
                driver.abort_now(handle)
        if rng.random() < 0.02:
            assert driver.core.reset_prefix_cache(reset_running_requests=True)
        driver.step()
    driver.run()
    for handle, request in requests.items():
        tokens, reason, stop_token_id = expected_output(options, request, MAX_MODEL_LEN)
        collected = driver.by_key[1, handle]
        if handle in aborted and collected.finished is None:
            assert tokens[: len(collected.token_ids)] == collected.token_ids
            continue
        assert collected.token_ids == tokens
        assert collected.reason is reason
        assert collected.finished.stop_token_id == stop_token_id
    finished = [c.reason for c in driver.by_key.values() if c.finished]
    assert {FinishReason.LENGTH, FinishReason.STOP} >= set(finished)
