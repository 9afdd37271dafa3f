"""Seeded sampling in float32: the same tokens alone, in a batch of 16, preempted, chunked, with batches in flight."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from engine_svc.model.load import LoadOptions, load_model  # noqa: E402 - after importorskip
from tests.support.drive import CoreLimits, make_request  # noqa: E402
from tests.support.greedy_cases import comparable, load_cases  # noqa: E402
from tests.support.oracle_runs import Run, run_requests, seeded_cases  # noqa: E402

pytestmark = pytest.mark.model

CASES = load_cases(Path(__file__).parents[1] / "data" / "smollm2_greedy_bf16_weights.jsonl")
PROMPTS = [case["prompt_token_ids"] for case in CASES if len(case["prompt_token_ids"]) < 60][:16]
KINDS = [
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 40},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 100, "top_p": 0.95, "min_p": 0.01},
]
REQUESTS = [
    make_request(index, prompt, seed=(index + 1) * 0x9E3779B97F4A7C15 % 2**64, max_tokens=24, **KINDS[index % 5])
    for index, prompt in enumerate(PROMPTS)
]
SIZES = {"max_num_seqs": 16, "max_num_batched_tokens": 1024, "max_model_len": 96, "block_size": 8, "num_blocks": 300}
RUNS = {
    "batch of 16": Run(limits=CoreLimits(**SIZES)),
    "chunks": Run(limits=CoreLimits(**SIZES | {"max_num_batched_tokens": 16})),
    "preemption": Run(limits=CoreLimits(**SIZES | {"num_blocks": 40})),
    "three batches in flight": Run(limits=CoreLimits(**SIZES), batches=3),
    "prefix hits": Run(limits=CoreLimits(**SIZES), rounds=2),
}


@pytest.fixture(scope="module")
def smollm2():
    return load_model(LoadOptions(model="smollm2", dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def alone(smollm2):
    return seeded_cases(smollm2, REQUESTS, CoreLimits(**SIZES | {"max_num_seqs": 1, "enable_prefix_caching": False}))


def test_outputs_are_sampled(alone):
    assert len(PROMPTS) == 16
    decided = sum(len(comparable(case)) for case in alone)
    total = sum(len(case["output_token_ids"]) for case in alone)
    print(f"{decided} of {total} tokens are not decided by rounding")
    assert decided > 0.8 * total


@pytest.mark.parametrize("name", RUNS)
def test_same_tokens_as_alone(smollm2, alone, name):
    outputs, driver = run_requests(smollm2, REQUESTS, RUNS[name])
    for index, (case, output) in enumerate(zip(alone, outputs, strict=True)):
        expected = comparable(case)
        assert output[: len(expected)] == expected, f"request {index}"
    assert (driver.num_preempted > 0) == (name == "preemption")
    if name == "prefix hits":
        assert driver.prefix_hits > 0


def test_continued_elsewhere_from_any_token(smollm2, alone):
    """Tokens that came from another engine count as output: the rest is the rest."""
    resumed, rests = [], []
    for index, (request, case) in enumerate(zip(REQUESTS, alone, strict=True)):
        expected = comparable(case)
        cut = min(1 + index, len(expected) - 1)
        resumed.append(
            make_request(
                index,
                request.prompt_token_ids,
                resume=expected[:cut],
                seed=request.sampling.seed,
                max_tokens=24,
                **KINDS[index % 5],
            )
        )
        rests.append(expected[cut:])
    outputs, _ = run_requests(smollm2, resumed, RUNS["batch of 16"])
    for output, rest in zip(outputs, rests, strict=True):
        assert output[: len(rest)] == rest
