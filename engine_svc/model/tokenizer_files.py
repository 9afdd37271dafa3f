"""Writes what stands beside the weights of a converted model: configs, tokenizer and chat template.

The tokenizer of a GGUF file is rebuilt by transformers once, here; afterwards only tokenizer.json is read.
"""

import json
from pathlib import Path
from typing import Any, Protocol

from shared.errors import StartupError

# Traces of how the tokenizer was read, which say nothing about it.
_TRACES = ("is_local", "local_files_only", "name_or_path")


class SmallFilesSource(Protocol):
    """What is asked of an open GGUF file."""

    path: Path

    def config(self) -> dict[str, Any]:
        """The contents of config.json."""

    def generation_config(self) -> dict[str, Any]:
        """The contents of generation_config.json."""

    def chat_template(self) -> str | None:
        """The chat template, where there is one."""


def write_small_files(file: SmallFilesSource, folder: Path, *, dtype: str = "bfloat16") -> None:
    """Writes all but the weights into `folder`. `dtype` is noted in config.json.

    Raises StartupError when the tokenizer cannot be rebuilt.
    """
    config = file.config()
    _write_json(folder / "config.json", config | {"dtype": dtype})
    _write_json(folder / "generation_config.json", file.generation_config())
    _write_tokenizer(file.path, folder)
    _drop_invented_tokens(folder / "tokenizer.json", config["vocab_size"])
    template = file.chat_template()
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _drop_invented_tokens(path: Path, vocab_size: int) -> None:
    """Takes out the tokens that transformers adds of its own accord behind the model's: no model knows them."""
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    added = tokenizer.get("added_tokens", [])
    known = [token for token in added if token["id"] < vocab_size]
    if len(known) < len(added):
        tokenizer["added_tokens"] = known
        _write_json(path, tokenizer)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_tokenizer(gguf_path: Path, folder: Path) -> None:
    try:
        import transformers  # noqa: PLC0415 - heavy, and needed only here
    except ImportError:
        raise StartupError("converting a tokenizer needs the package transformers, which is not installed") from None
    log: Any = transformers.utils.logging
    log.set_verbosity_error()
    log.disable_progress_bar()
    loader: Any = transformers.AutoTokenizer
    try:
        tokenizer = loader.from_pretrained(str(gguf_path.parent), gguf_file=gguf_path.name, local_files_only=True)
        tokenizer.save_pretrained(str(folder))
    except Exception as error:  # noqa: BLE001 - transformers raises whatever its readers raise
        reason = " ".join(str(error).split())[:160]
        raise StartupError(f"the tokenizer of {gguf_path} cannot be converted: {reason}") from None
    if not (folder / "tokenizer.json").is_file():
        raise StartupError(f"the tokenizer of {gguf_path} has no form as tokenizer.json")
    config_path = folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    _write_json(config_path, {name: value for name, value in config.items() if name not in _TRACES})
