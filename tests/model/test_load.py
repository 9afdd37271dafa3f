"""Loading: what is accepted, what is refused and in which words, dtypes, shards, mapped memory."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402 - after importorskip

from engine_svc.model import hardware  # noqa: E402
from engine_svc.model.load import LoadOptions, load_model  # noqa: E402
from shared.errors import StartupError  # noqa: E402
from tests.support.paged_forward import PagedRunner  # noqa: E402
from tests.support.tiny_models import VOCAB_SIZE, tiny_checkpoint  # noqa: E402

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture
def llama(directory: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(tiny_checkpoint("llama", directory), tmp_path / "llama"))


def _load(folder: Path, **options: object):
    return load_model(LoadOptions(model=str(folder), device="cpu", **({"ops": "reference"} | options)))


def _logits(model) -> "torch.Tensor":
    runner = PagedRunner(model, 4, list(range(1, 20)))
    return runner.forward([(runner.sequence(range(3, 33)), 30)], all_logits=True)


def _edit_tensors(folder: Path, edit) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def _refusal(folder: Path, **options: object) -> str:
    with pytest.raises(StartupError) as caught:
        _load(folder, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_model_info(llama: Path) -> None:
    info = _load(llama).info
    assert (info.vocab_size, info.max_model_len, info.eos_token_ids, info.dtype) == (VOCAB_SIZE, 512, (2,), "float32")
    assert re.fullmatch("[0-9a-f]{64}", info.tokenizer_digest)
    assert re.fullmatch("[0-9a-f]{64}", info.numerics.weights_digest)
    assert info.numerics.op_set == "reference"
    assert not info.numerics.batch_invariant
    assert _load(llama, max_model_len=100).info.max_model_len == 100
    assert "between 1 and the model's own 512, got 513" in _refusal(llama, max_model_len=513)


def test_kv_cache_spec_counts_every_byte_of_the_cache(llama: Path) -> None:
    model = _load(llama, dtype="bfloat16")
    [spec] = model.kv_cache_specs()
    cache = model.allocate_kv_cache(3, 8)
    assert spec.bytes_per_token * 3 * 8 == cache.keys.nbytes + cache.values.nbytes


def test_shards_are_one_model(llama: Path) -> None:
    expected = _logits(_load(llama))
    tensors = load_file(llama / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for shard, part in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        save_file({name: tensors[name].clone() for name in part}, llama / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, shard)
    (llama / "model.safetensors").unlink()
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(_logits(_load(llama)), expected)
    (llama / "b.safetensors").unlink()
    assert "b.safetensors is missing" in _refusal(llama)


def test_a_bare_decoder_without_the_prefix_loads(directory: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint("llama-tied", directory), tmp_path / "bare"))
    expected = _logits(_load(folder))

    def strip(tensors: dict) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    _edit_tensors(folder, strip)
    assert torch.equal(_logits(_load(folder)), expected)


def test_broken_weights_are_refused_by_name(llama: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"

    def broken(edit) -> str:
        folder = Path(shutil.copytree(llama, tmp_path / "broken"))
        _edit_tensors(folder, edit)
        message = _refusal(folder)
        shutil.rmtree(folder)
        return message

    assert f"no tensor {name}" in broken(lambda t: t.pop(name))
    assert f"tensor {name} has shape [96, 63], the config asks for [96, 64]" in broken(
        lambda t: t.update({name: t[name][:, :63].clone()})
    )
    assert f"tensor {name} is of type torch.int8" in broken(lambda t: t.update({name: t[name].to(torch.int8)}))
    extra = "model.layers.0.self_attn.q_proj.bias"
    assert f"1 tensors of the checkpoint have no place in the model, first {extra}" in broken(
        lambda t: t.update({extra: torch.zeros(64)})
    )


def test_broken_files_are_refused(llama: Path) -> None:
    path = llama / "model.safetensors"
    whole = path.read_bytes()
    for contents in (whole[:-100], whole[:20], b"", b"\xff" * 1000):
        path.write_bytes(contents)
        assert "model.safetensors is corrupt or cut short" in _refusal(llama)
    path.unlink()
    assert "no .safetensors files" in _refusal(llama)
    (llama / "config.json").write_text("{")
    assert "config.json cannot be read" in _refusal(llama)
    (llama / "config.json").unlink()
    assert "no config.json, and 0 .gguf files" in _refusal(llama)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("mamba", "no native decoder; through transformers: MambaForCausalLM keeps a recurrent state"),
        ("bloom", "BloomForCausalLM does not let its attention be replaced"),
        ("gpt_oss", "its own attention and paged attention differ by"),
    ],
)
def test_models_that_neither_path_runs_say_why(family: str, reason: str, directory: Path) -> None:
    assert reason in _refusal(tiny_checkpoint(family, directory))


def test_an_unknown_model_type_says_why(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"model_type": "madeup", "architectures": ["MadeUp"]}))
    assert "'madeup' has no native decoder; through transformers: it is no causal language model" in _refusal(llama)


@pytest.mark.parametrize(
    ("option", "value"), [("dtype", "int3"), ("ops", "fast"), ("load_format", "pickle"), ("dtype", "float64")]
)
def test_unknown_options_are_named(option: str, value: str, llama: Path) -> None:
    message = _refusal(llama, **{option: value})
    assert f"--{option.replace('_', '-')} must be one of auto" in message
    assert repr(value) in message


def test_auto_dtype_does_not_emulate_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    look = hardware.cpu_has_bfloat16

    def auto(flags: str) -> torch.dtype:
        cpuinfo = tmp_path / "cpuinfo"
        cpuinfo.write_text(f"processor : 0\nflags\t\t: fpu {flags}\nprocessor : 1\n")
        found = look(cpuinfo)
        monkeypatch.setattr(hardware, "cpu_has_bfloat16", lambda: found)
        return hardware.choose_dtype("auto", "bfloat16", torch.device("cpu"))

    assert auto("avx2 avx512_bf16") is torch.bfloat16
    assert auto("amx_bf16 amx_tile") is torch.bfloat16
    assert not caplog.records
    assert auto("avx2 avx512f") is torch.float32
    assert len(caplog.records) == 1
    assert hardware.choose_dtype("bfloat16", "float32", torch.device("cpu")) is torch.bfloat16
    assert not look(tmp_path / "absent")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_single_weights_are_used_where_the_file_is_mapped(llama: Path) -> None:
    model = _load(llama)
    _logits(model)
    mapped = [
        tuple(int(bound, 16) for bound in line.split()[0].split("-"))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(str(llama / "model.safetensors"))
    ]
    weights = [model._embedding, model._layers[0].output[0], model._layers[-1].down[0]]
    assert all(any(start <= w.data_ptr() < stop for start, stop in mapped) for w in weights)


def test_a_native_model_loads_without_transformers(llama: Path) -> None:
    import subprocess  # noqa: PLC0415 - this test only

    code = "import sys; sys.modules['transformers'] = None\n"
    code += "from engine_svc.model.load import LoadOptions, load_model\n"
    code += f"print(load_model(LoadOptions(model={str(llama)!r}, device='cpu')).info.dtype)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.strip() == "float32"


def test_progress_reaches_the_end(llama: Path) -> None:
    seen: list[tuple[str, float]] = []
    _load(llama, progress=lambda what, share: seen.append((what, share)))
    shares = [share for _, share in seen]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert {what for what, _ in seen} == {"Loading weights"}
