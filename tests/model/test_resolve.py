"""Names of models to local paths, digests and end tokens; without torch and without a network."""

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine_svc.model.checkpoint import (
    DIGEST_FILE,
    eos_token_ids,
    publish,
    read_json,
    tokenizer_digest,
    weights_digest,
)
from engine_svc.model.resolve import model_cache, resolve_model
from shared.errors import StartupError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TAKT_CACHE", str(tmp_path / "cache"))
    return model_cache()


def test_a_folder_and_a_gguf_file_are_themselves(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.touch()
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model(str(file)) == file


def test_an_embedded_model_is_taken_only_whole(cache: Path) -> None:
    with pytest.raises(StartupError, match="takt model pull smollm2"):
        resolve_model("smollm2")
    folder = cache / "smollm2"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    with pytest.raises(StartupError, match="takt model pull smollm2"):
        resolve_model("smollm2")
    (folder / "model.safetensors").touch()
    assert resolve_model("smollm2") == folder


@pytest.mark.parametrize("name", ["nonsense", "/no/such/folder", "./missing/model.gguf"])
def test_an_unknown_name_is_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StartupError, match="is no folder") as caught:
        resolve_model(name)
    assert "\n" not in str(caught.value)


def test_the_empty_name_is_not_the_working_directory() -> None:
    with pytest.raises(StartupError, match="got nothing"):
        resolve_model("")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.touch()
    with pytest.raises(StartupError, match=r"no \.gguf file"):
        resolve_model(str(file))


def test_a_hub_name_without_network_is_one_line_within_seconds(tmp_path: Path) -> None:
    code = "from engine_svc.model.resolve import resolve_model\nfrom shared.errors import StartupError\n"
    code += "try:\n    resolve_model('owner/some-model')\nexcept StartupError as error:\n    print(error)"
    # Nothing listens on the discard port of this host.
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    start = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60, check=True
    )
    assert time.monotonic() - start < 30
    lines = result.stdout.splitlines()
    assert len(lines) == 1, result
    assert "owner/some-model" in lines[0]
    assert "cannot be reached" in lines[0]


def test_end_tokens_come_from_generation_config_then_config(tmp_path: Path) -> None:
    assert eos_token_ids(tmp_path, {"eos_token_id": 7}) == (7,)
    assert eos_token_ids(tmp_path, {}) == ()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9, 5]}))
    assert eos_token_ids(tmp_path, {"eos_token_id": 7}) == (5, 9)
    (tmp_path / "generation_config.json").write_text("{}")
    assert eos_token_ids(tmp_path, {"eos_token_id": 7}) == (7,)


def test_end_tokens_outside_the_vocabulary_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert eos_token_ids(tmp_path, {"eos_token_id": [7, 50256, -1], "vocab_size": 100}) == (7,)
    assert "only [7] are in the vocabulary of 100" in caplog.text
    assert eos_token_ids(tmp_path, {"eos_token_id": 50256, "vocab_size": 100}) == ()
    with pytest.raises(StartupError, match=r"eos_token_id of .* must be a token id or a list of them, got 'x'"):
        eos_token_ids(tmp_path, {"eos_token_id": "x"})


def test_tokenizer_digest_is_that_of_the_file(tmp_path: Path) -> None:
    assert tokenizer_digest(tmp_path) == ""
    (tmp_path / "tokenizer.json").write_bytes(b"abc")
    assert tokenizer_digest(tmp_path) == hashlib.sha256(b"abc").hexdigest()


def test_weights_digest_follows_the_contents(tmp_path: Path) -> None:
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    a.write_bytes(b"one")
    b.write_bytes(b"two")
    first = weights_digest([a, b])
    assert (tmp_path / DIGEST_FILE).is_file()
    assert weights_digest([b, a]) == first
    a.write_bytes(b"three")
    assert weights_digest([a, b]) != first
    # A side file that is no JSON is only lost time.
    second = weights_digest([a, b])
    (tmp_path / DIGEST_FILE).write_text("{")
    assert weights_digest([a, b]) == second


def test_weights_digest_is_remembered_and_needs_no_writable_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = tmp_path / "a.safetensors"
    a.write_bytes(b"one")
    first = weights_digest([a])
    with monkeypatch.context() as patch:
        patch.setattr("engine_svc.model.checkpoint.file_digest", lambda _: pytest.fail("read again"))
        assert weights_digest([a]) == first
    (tmp_path / DIGEST_FILE).unlink()

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "write_text", refuse)
    assert weights_digest([a]) == first
    assert not (tmp_path / DIGEST_FILE).exists()


@pytest.mark.parametrize("text", ["{", "[1]", "\x00"])
def test_a_broken_config_is_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(StartupError, match=r"config\.json") as caught:
        read_json(path)
    assert "\n" not in str(caught.value)


def test_publishing_keeps_what_another_process_published_first(tmp_path: Path) -> None:
    mine, theirs = tmp_path / ".tmp", tmp_path / "model"
    mine.mkdir()
    theirs.mkdir()
    (mine / "config.json").write_text("mine")
    (theirs / "config.json").write_text("theirs")
    publish(mine, theirs)
    assert (theirs / "config.json").read_text() == "theirs"
