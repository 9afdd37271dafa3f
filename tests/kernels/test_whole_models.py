"""Whole decoders on the native ops: the same bits in every batch and chunk."""

import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from engine_svc.model import op_sets  # noqa: E402 - after importorskip
from engine_svc.model.load import LoadOptions, load_model  # noqa: E402
from tests.support.kernel_variants import VARIANTS, poison, poisoned_ops  # noqa: E402
from tests.support.paged_forward import PagedRunner  # noqa: E402
from tests.support.tiny_models import VOCAB_SIZE, tiny_checkpoint  # noqa: E402

pytestmark = pytest.mark.model

FAMILIES = ("llama-tied", "gemma2", "gemma3", "granite", "olmo2", "phi3", "mistral")
LENGTHS = (140, 5, 1, 44)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture
def load_with(monkeypatch, directory):
    def load_with(variant: str, family: str, dtype: str):
        ops = poisoned_ops(variant)
        monkeypatch.setattr(op_sets, "native_ops", lambda *_: ops)
        folder = tiny_checkpoint(family, directory)
        return load_model(LoadOptions(model=str(folder), device="cpu", dtype=dtype))

    return load_with


def runner(model, seed: int) -> PagedRunner:
    blocks = list(range(1, 100))
    random.Random(seed).shuffle(blocks)
    made = PagedRunner(model, 16, blocks)
    poison(made.kv_cache, getattr(torch, model.info.dtype))
    return made


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("variant", [VARIANTS[0], VARIANTS[-1]])
def test_bits_do_not_depend_on_the_batch(load_with, variant, family, dtype) -> None:
    model = load_with(variant, family, dtype)
    together = runner(model, seed=1)
    whole = together.forward([(together.sequence(p), len(p)) for p in prompts()], all_logits=True).split(LENGTHS)
    assert all(not part.isnan().any() for part in whole)
    for prompt, expected in zip(prompts(), whole, strict=True):
        alone = runner(model, seed=2)
        sequence = alone.sequence(prompt)
        while sequence.num_computed < len(prompt):
            start = sequence.num_computed
            count = min(len(prompt) - start, 1 if start % 3 else 37)
            assert torch.equal(alone.forward([(sequence, count)], all_logits=True), expected[start : start + count])
