"""Native decoder and fallback against transformers in float32, on small random checkpoints."""

import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from engine_svc.model.load import LoadOptions, load_model  # noqa: E402 - after importorskip
from tests.support.kernel_variants import poison  # noqa: E402
from tests.support.paged_forward import PagedRunner  # noqa: E402
from tests.support.tiny_models import FALLBACK, NATIVE, VOCAB_SIZE, tiny_checkpoint  # noqa: E402

pytestmark = pytest.mark.model

TOLERANCE = 2e-3
LENGTHS = (37, 5, 1, 44, 18)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


def _load(folder: Path, **options: object):
    # The longrope checkpoint has 48 tokens of pretraining: up to there both use the short factors.
    limit = 48 if "longrope" in folder.name else None
    defaults = {"dtype": "float32", "max_model_len": limit, "ops": "reference"}
    return load_model(LoadOptions(model=str(folder), device="cpu", **(defaults | options)))


def _oracle(folder: Path, token_ids: list[int]):
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - heavy

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]


def _prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


def _runner(model, seed: int, block_size: int = 4) -> PagedRunner:
    blocks = list(range(1, 100))
    random.Random(seed).shuffle(blocks)
    return PagedRunner(model, block_size, blocks)


CASES = [
    *((family, ops) for family in NATIVE for ops in ("reference", "native")),
    *((family, "reference") for family in FALLBACK),
]


@pytest.mark.parametrize(("family", "ops"), CASES)
def test_logits_equal_transformers(family: str, ops: str, directory: Path) -> None:
    """Whole prompts, chunks of every size, and decoding, several sequences in a batch, through shuffled blocks."""
    folder = tiny_checkpoint(family, directory)
    model = _load(folder, ops=ops)
    assert type(model).__name__ == ("FallbackModel" if family in FALLBACK else "NativeDecoder")
    prompts = _prompts(seed=1)
    expected = [_oracle(folder, prompt) for prompt in prompts]
    spread = float(expected[0].std())
    assert spread > 0.1

    whole = _runner(model, seed=2)
    logits = whole.forward([(whole.sequence(p), len(p)) for p in prompts], all_logits=True)
    torch.testing.assert_close(logits, torch.cat(expected), rtol=0, atol=TOLERANCE * spread)

    rng = random.Random(3)
    mixed = _runner(model, seed=4)
    # NaN in blocks that were freed must not leak into their next owner.
    poison(mixed.kv_cache, torch.float32)
    sequences = [mixed.sequence(p) for p in prompts]
    seen = [[] for _ in prompts]
    while any(s.num_computed < len(s.token_ids) for s in sequences):
        work = []
        for sequence in sequences:
            left = len(sequence.token_ids) - sequence.num_computed
            if left and rng.random() < 0.8:
                # A third of the steps of a sequence is a single token, as in decoding.
                work.append((sequence, 1 if rng.random() < 0.33 else rng.randint(1, min(left, 9))))
        if work:
            rows = mixed.forward(work, all_logits=True).split([count for _, count in work])
            for (sequence, _), part in zip(work, rows, strict=True):
                seen[sequences.index(sequence)].append(part)
    for parts, reference in zip(seen, expected, strict=True):
        torch.testing.assert_close(torch.cat(parts), reference, rtol=0, atol=TOLERANCE * spread)


class _HiddenStates:
    """A model whose forward pass stops before the logits."""

    def __init__(self, model):
        self.device, self.allocate_kv_cache, self.forward = model.device, model.allocate_kv_cache, model.hidden_states


@pytest.mark.parametrize(("family", "ops"), CASES)
def test_hidden_states_equal_transformers_and_give_the_logits(family: str, ops: str, directory: Path) -> None:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - heavy

    folder = tiny_checkpoint(family, directory)
    model = _load(folder, ops=ops)
    prompts = _prompts(seed=8)
    whole = _runner(_HiddenStates(model), seed=9)
    hidden = whole.forward([(whole.sequence(p), len(p)) for p in prompts], all_logits=True)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        states = [reference.base_model(input_ids=torch.tensor([p]), use_cache=False)[0][0] for p in prompts]
    expected = torch.cat(states)
    torch.testing.assert_close(hidden, expected, rtol=0, atol=TOLERANCE * float(expected.std()))
    runner = _runner(model, seed=9)
    logits = runner.forward([(runner.sequence(p), len(p)) for p in prompts], all_logits=True)
    assert torch.equal(torch.cat([model.compute_logits(part) for part in hidden.split(30)]), logits)
    assert torch.equal(model.compute_logits(hidden[:0]), logits[:0])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_bfloat16_is_near_float32(family: str, directory: Path) -> None:
    folder = tiny_checkpoint(family, directory)
    prompt = _prompts(seed=5)[0]
    runner = _runner(_load(folder, dtype="bfloat16"), seed=6)
    logits = runner.forward([(runner.sequence(prompt), len(prompt))], all_logits=True)
    expected = _oracle(folder, prompt)
    assert logits.dtype is torch.float32
    assert float((logits - expected).abs().mean()) < 0.1 * float(expected.std())


def test_longrope_uses_the_long_factors_past_the_pretraining_length(directory: Path) -> None:
    folder = tiny_checkpoint("phi3-longrope", directory)
    prompt = [3 + (i * 7) % 300 for i in range(60)]
    runner = _runner(_load(folder, max_model_len=200), seed=7)
    logits = runner.forward([(runner.sequence(prompt), len(prompt))], all_logits=True)
    expected = _oracle(folder, prompt)
    torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE * float(expected.std()))


def test_logits_only_where_wanted(directory: Path) -> None:
    folder = tiny_checkpoint("llama", directory)
    model = _load(folder)
    prompts = _prompts(seed=8)
    last, every = _runner(model, seed=9), _runner(model, seed=9)
    few = last.forward([(last.sequence(p), len(p)) for p in prompts])
    rows = every.forward([(every.sequence(p), len(p)) for p in prompts], all_logits=True)
    ends = torch.tensor(LENGTHS).cumsum(0) - 1
    assert few.shape == (len(prompts), VOCAB_SIZE)
    torch.testing.assert_close(few, rows[ends], rtol=0, atol=1e-5)
