"""Small random checkpoints of every family against transformers' `generate`, under everything at once."""

import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from engine_svc.model.load import LoadOptions, load_model  # noqa: E402 - after importorskip
from tests.support.drive import CoreLimits  # noqa: E402
from tests.support.greedy_cases import comparable, greedy_case  # noqa: E402
from tests.support.oracle_runs import Run, check_greedy  # noqa: E402
from tests.support.tiny_models import FALLBACK, NATIVE, VOCAB_SIZE, tiny_checkpoint  # noqa: E402

pytestmark = pytest.mark.model

EOS = (2,)
NUM_TOKENS = 24
LENGTHS = (1, 5, 16, 17, 40, 3, 30)
# Longer prompts share two blocks of 4 tokens and a part of the third.
COMMON_PREFIX = 10
RUNS = {
    "together": Run(limits=CoreLimits(max_num_seqs=8, max_num_batched_tokens=256, max_model_len=96, num_blocks=200)),
    "everything": Run(
        limits=CoreLimits(max_num_seqs=6, max_num_batched_tokens=16, max_model_len=72, num_blocks=24),
        batches=3,
        rounds=2,
        aborted={2: 9},
    ),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


def _cases(folder: Path, lengths: tuple[int, ...]) -> list[dict]:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - heavy

    rng = random.Random(7)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    common = [rng.randrange(3, VOCAB_SIZE) for _ in range(COMMON_PREFIX)]
    prompts = []
    for length in lengths:
        prefix = common if length > COMMON_PREFIX else []
        prompts.append(prefix + [rng.randrange(3, VOCAB_SIZE) for _ in range(length - len(prefix))])
    return [greedy_case(model, prompt, NUM_TOKENS, EOS) for prompt in prompts]


@pytest.mark.parametrize("family", [*NATIVE, *FALLBACK])
def test_greedy_output_equals_transformers(family: str, directory: Path) -> None:
    folder = tiny_checkpoint(family, directory)
    # Within its original 48 positions this one uses the same factors however long the sequence is.
    longrope = "longrope" in family
    lengths = tuple(length for length in LENGTHS if not longrope or length + NUM_TOKENS < 48)
    cases = _cases(folder, lengths)
    assert sum(len(comparable(case)) for case in cases) > 0.5 * NUM_TOKENS * len(cases)
    model = load_model(
        LoadOptions(model=str(folder), dtype="float32", device="cpu", max_model_len=48 if longrope else None)
    )
    for name, run in RUNS.items():
        driver, _ = check_greedy(model, cases, run, EOS)
        if name == "everything" and not longrope:
            assert driver.num_preempted > 0
            assert driver.prefix_hits > 0
