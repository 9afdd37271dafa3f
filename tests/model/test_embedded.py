"""The embedded models: what the GGUF files hold, greedy answers, and the time of a start."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from engine_svc.model.gguf_reader import GgufFile, GgufSource  # noqa: E402 - after importorskip
from engine_svc.model.load import LoadOptions, load_model  # noqa: E402
from tests.support.embedded_models import embedded_model  # noqa: E402
from tests.support.paged_forward import PagedRunner  # noqa: E402

pytestmark = [pytest.mark.model, pytest.mark.timeout(1800)]

# Greedy answers of transformers in float32, each step with a gap of at least 0.002 between the two best logits.
CASES = [
    json.loads(line) for line in (Path(__file__).parents[1] / "data/smollm2_greedy.jsonl").read_text().splitlines()
]


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return embedded_model("smollm2")


@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_gguf_is_read_as_transformers_reads_it(name: str) -> None:
    """Every tensor bit for bit, and every field of the config that a computation depends on."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - heavy
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint  # noqa: PLC0415 - heavy

    folder = embedded_model(name)
    config = AutoConfig.from_pretrained(folder, gguf_file="model.gguf")
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    path = str(folder / "model.gguf")
    expected = load_gguf_checkpoint(path, return_tensors=True, model_to_load=skeleton)["tensors"]
    source = GgufSource(GgufFile(folder / "model.gguf"))
    assert set(source.names()) == set(expected)
    for tensor_name, tensor in expected.items():
        assert torch.equal(source.load(tensor_name), tensor), tensor_name
    ours = AutoConfig.from_pretrained(folder).to_dict()
    epsilon = ours.pop("rms_norm_eps")
    assert torch.tensor(epsilon) == torch.tensor(config.rms_norm_eps)
    notes = {"_model_name_or_path", "architectures", "dtype", "unk_token_id", "sliding_window_pattern", "rms_norm_eps"}
    assert {k: v for k, v in ours.items() if k not in notes} == {
        k: v for k, v in config.to_dict().items() if k not in notes
    }


@pytest.mark.parametrize("weights", ["gguf", "bfloat16"])
def test_greedy_answers_equal_transformers(weights: str, smollm2: Path) -> None:
    """The GGUF file itself in float32, and the folder whose weights were rounded to bfloat16."""
    path = smollm2 / "model.gguf" if weights == "gguf" else smollm2
    model = load_model(LoadOptions(model=str(path), dtype="float32", device="cpu"))
    runner = PagedRunner(model, 16, list(range(60, 0, -1)))
    cases = [case for case in CASES if case["weights"] == weights]
    assert len(cases) >= 7
    for case in cases:
        limit = min(32, len(case["output_token_ids"]))
        assert runner.greedy(case["prompt_token_ids"], limit, eos=2) == case["output_token_ids"][:limit]


def test_folder_and_gguf_share_one_tokenizer(smollm2: Path) -> None:
    folder = load_model(LoadOptions(model="smollm2", device="cpu"))
    gguf = load_model(LoadOptions(model=str(smollm2 / "model.gguf"), device="cpu"))
    assert folder.info.tokenizer_digest == gguf.info.tokenizer_digest != ""
    assert folder.info.eos_token_ids == gguf.info.eos_token_ids == (2,)
    assert folder.info.numerics.weights_digest != gguf.info.numerics.weights_digest


def test_the_converted_tokenizer_gives_the_known_ids(smollm2: Path) -> None:
    from tokenizers import Tokenizer  # noqa: PLC0415 - beside the model only

    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    for text, ids in (
        ("The", [504]),
        ("Q: What is 17 + 25?\nA:", [65, 42, 1812, 314, 216, 33, 39, 1232, 216, 34, 37, 47, 198, 49, 42]),
    ):
        assert tokenizer.encode(text).ids == ids
    assert "<|im_start|>" in (smollm2 / "chat_template.jinja").read_text()


def test_pull_is_idempotent_and_fast(smollm2: Path) -> None:
    before = (smollm2 / "model.safetensors").stat()
    start = time.monotonic()
    assert embedded_model("smollm2") == smollm2
    assert time.monotonic() - start < 5
    assert (smollm2 / "model.safetensors").stat().st_mtime_ns == before.st_mtime_ns


def test_start_takes_seconds(smollm2: Path) -> None:
    """Imports and loading, from a cold interpreter; the bound leaves room for a busy machine."""
    code = "from engine_svc.model.load import LoadOptions, load_model\n"
    code += f"load_model(LoadOptions(model={str(smollm2)!r}, dtype='float32', device='cpu'))"
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert time.monotonic() - start < 10
