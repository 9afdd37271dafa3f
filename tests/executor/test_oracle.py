"""Greedy output in float32 equals transformers' token for token, whatever the scheduler does with the requests.

The facts are in tests/data: what transformers answers, and from which step on rounding may decide (a gap between the
two best logits under 0.002); see tests/support/greedy_cases.py.
"""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from engine_svc.model.load import LoadOptions, load_model  # noqa: E402 - after importorskip
from engine_svc.model.resolve import resolve_model  # noqa: E402
from tests.support.drive import CoreLimits  # noqa: E402
from tests.support.greedy_cases import comparable, load_cases, shortened  # noqa: E402
from tests.support.oracle_runs import Run, check_greedy, greedy_requests, run_requests  # noqa: E402

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

DATA = Path(__file__).parents[1] / "data"
EOS = (2,)
CASES = load_cases(DATA / "smollm2_greedy_bf16_weights.jsonl")
OWN = load_cases(DATA / "smollm2_own_prompts.jsonl")
SHORT = [case for case in CASES + OWN if len(case["prompt_token_ids"]) < 200]
# For variations whose effect does not depend on the prompt or comes early in the output.
SHORTENED = shortened([case for case in CASES if len(case["prompt_token_ids"]) < 500], 32)
FEW = shortened(SHORT[::2], 32)
GEMMA = load_cases(DATA / "gemma3_270m_greedy.jsonl")
WIDE = CoreLimits(max_num_seqs=32, max_num_batched_tokens=2048, max_model_len=2600, block_size=16, num_blocks=700)


@pytest.fixture(scope="module")
def smollm2():
    return load_model(LoadOptions(model="smollm2", dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def gemma():
    return load_model(LoadOptions(model="gemma3-270m", dtype="float32", device="cpu"))


def test_at_least_20_cases_are_decided_to_the_end():
    assert sum(comparable(case) == case["output_token_ids"] for case in CASES) >= 20


def test_all_together(smollm2):
    cases = CASES + OWN
    driver, whole = check_greedy(smollm2, cases, Run(limits=WIDE), EOS)
    print(f"equal to the end: {whole} of {len(cases)}")
    assert max(output.stats.num_running for output in driver.outputs) > 16


def test_alone(smollm2):
    limits = CoreLimits(
        max_num_seqs=1, max_num_batched_tokens=2600, max_model_len=2600, block_size=16, num_blocks=200,
        enable_prefix_caching=False,
    )  # fmt: skip
    driver, _ = check_greedy(smollm2, shortened(CASES, 32), Run(limits=limits), EOS)
    assert max(output.stats.num_running for output in driver.outputs) == 1


def test_chunks_of_16_tokens(smollm2):
    limits = CoreLimits(
        max_num_seqs=16, max_num_batched_tokens=16, max_model_len=600, block_size=16, num_blocks=300,
        enable_prefix_caching=False,
    )  # fmt: skip
    driver, _ = check_greedy(smollm2, SHORTENED, Run(limits=limits), EOS)
    assert max(output.stats.num_scheduled_tokens for output in driver.outputs) == 16


def test_a_long_prompt_in_chunks_beside_decodes(smollm2):
    limits = CoreLimits(
        max_num_seqs=16, max_num_batched_tokens=64, long_prefill_token_threshold=16, max_model_len=2600,
        block_size=16, num_blocks=700,
    )  # fmt: skip
    longest = max(shortened(CASES, 8), key=lambda case: len(case["prompt_token_ids"]))
    check_greedy(smollm2, [longest, *FEW[:4]], Run(limits=limits), EOS)


@pytest.mark.parametrize("batches", [1, 3])
def test_preemption(smollm2, batches):
    limits = CoreLimits(
        max_num_seqs=16, max_num_batched_tokens=256, max_model_len=200, block_size=8, num_blocks=27,
        enable_prefix_caching=batches == 1,
    )  # fmt: skip
    driver, _ = check_greedy(smollm2, FEW, Run(limits=limits, batches=batches), EOS)
    assert driver.num_preempted > 0


def test_prefix_hits(smollm2):
    limits = CoreLimits(max_num_seqs=16, max_num_batched_tokens=512, max_model_len=640, block_size=4, num_blocks=1000)
    cases = shortened([case for case in CASES if 20 < len(case["prompt_token_ids"]) < 500][:10], 16)
    driver, _ = check_greedy(smollm2, cases, Run(limits=limits, rounds=2), EOS)
    for index, case in enumerate(cases):
        cached = driver.by_key[2, index].first_scheduled.num_cached_tokens
        assert cached == (len(case["prompt_token_ids"]) - 1) // 4 * 4


@pytest.mark.parametrize("batches", [1, 3])
def test_after_aborts_of_neighbours(smollm2, batches):
    limits = CoreLimits(max_num_seqs=8, max_num_batched_tokens=128, max_model_len=200, block_size=8, num_blocks=80)
    cases = [case for case in FEW if len(case["output_token_ids"]) > 30]
    aborted = {index: 2 + 2 * index for index in range(0, len(cases), 2)}
    check_greedy(smollm2, cases, Run(limits=limits, batches=batches, aborted=aborted), EOS)


def test_three_batches_in_flight(smollm2):
    driver, _ = check_greedy(smollm2, SHORTENED, Run(limits=WIDE, batches=3), EOS)
    assert any(not output.by_client for output in driver.outputs), "the pipeline was never filled"


def test_weights_read_from_gguf():
    """The GGUF file itself, dequantised to float32: other weights than the folder's, so other facts."""
    model = load_model(
        LoadOptions(model=str(resolve_model("smollm2") / "model.gguf"), dtype="float32", device="cpu")
    )  # fmt: skip
    cases = shortened(load_cases(DATA / "smollm2_greedy_float32.jsonl"), 32)
    check_greedy(model, cases, Run(limits=WIDE), EOS)


@pytest.mark.parametrize(
    "run",
    [
        Run(limits=CoreLimits(max_num_seqs=8, max_num_batched_tokens=1024, max_model_len=1024, num_blocks=600)),
        Run(limits=CoreLimits(max_num_seqs=1, max_num_batched_tokens=1024, max_model_len=1024, num_blocks=600)),
    ],
    ids=["together", "alone"],
)
def test_gemma3_270m(gemma, run):
    check_greedy(gemma, GEMMA, run, (1,))


GEMMA_SHORT = [case for case in GEMMA if len(case["prompt_token_ids"]) < 150]
SMALL_CHUNKS = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "max_model_len": 200, "block_size": 8}


def test_gemma3_270m_in_chunks_with_preemption_and_aborts(gemma):
    run = Run(limits=CoreLimits(**SMALL_CHUNKS, num_blocks=27), batches=3, aborted={2: 9})
    driver, _ = check_greedy(gemma, GEMMA_SHORT, run, (1,))
    assert driver.num_preempted > 0


def test_gemma3_270m_with_prefix_hits(gemma):
    run = Run(limits=CoreLimits(**SMALL_CHUNKS, num_blocks=120), rounds=2)
    driver, _ = check_greedy(gemma, shortened(GEMMA_SHORT, 12), run, (1,))
    assert driver.prefix_hits > 0


def test_gemma3_270m_chunks_past_its_window(gemma):
    longest = max(GEMMA, key=lambda case: len(case["prompt_token_ids"]))
    assert len(longest["prompt_token_ids"]) > 512
    limits = CoreLimits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=1024, block_size=16, num_blocks=70)
    check_greedy(gemma, [longest, GEMMA[0]], Run(limits=limits, batches=3), (1,))


def test_bfloat16_for_the_record(smollm2, record_property):
    """Prints how much bfloat16 differs; it must still be the same model."""
    half = load_model(LoadOptions(model="smollm2", dtype="bfloat16", device="cpu"))
    outputs, _ = run_requests(half, greedy_requests(FEW, EOS), Run(limits=WIDE))
    pairs = [(case["output_token_ids"], output) for case, output in zip(FEW, outputs, strict=True)]
    equal = sum(expected == output for expected, output in pairs)
    tokens = sum(a == b for expected, output in pairs for a, b in zip(expected, output, strict=False))
    total = sum(len(expected) for expected, _ in pairs)
    difference = max(_largest_difference(smollm2, half, case) for case in FEW[::3])
    record_property("bfloat16_equal_outputs", f"{equal}/{len(pairs)}")
    record_property("bfloat16_largest_logit_difference", difference)
    print(f"bfloat16: {equal} of {len(pairs)} outputs equal, {tokens} of {total} tokens in their place,")
    print(f"largest logit difference over the prompts and outputs of {len(FEW[::3])} cases: {difference:.3f}")
    assert equal > 0
    assert difference < 4


def _largest_difference(first, second, case) -> float:
    from tests.support.paged_forward import PagedRunner  # noqa: PLC0415 - next to its only use

    logits = []
    for model in (first, second):
        runner = PagedRunner(model, 16, list(range(1, 40)))
        sequence = runner.sequence(case["prompt_token_ids"] + case["output_token_ids"])
        logits.append(runner.forward([(sequence, len(sequence.token_ids))], all_logits=True))
    return float((logits[0] - logits[1]).abs().max())
