"""The small files of a model folder: configs, end tokens, digests. No torch.

A model folder holds config.json and weights, and beside them generation_config.json, tokenizer.json,
tokenizer_config.json and chat_template.jinja where the model has them.
"""

import hashlib
import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.errors import StartupError

logger = logging.getLogger(__name__)

DIGEST_FILE = ".takt-digests.json"
_BLOB_NAME = re.compile(r"[0-9a-f]{64}")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises StartupError in one line when it is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StartupError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise StartupError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise StartupError(f"{path} holds no JSON object")
    return value


def eos_token_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """End tokens, the primary one first: generation_config.json, else config.json; empty when neither names one.

    Ids outside the vocabulary, the defaults of some libraries, are left out: no model can sample them.
    """
    vocab_size = config.get("vocab_size")
    generation = folder / "generation_config.json"
    sources = [read_json(generation), config] if generation.is_file() else [config]
    for source in sources:
        value = source.get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(type(i) is int for i in ids):
                raise StartupError(f"eos_token_id of {folder} must be a token id or a list of them, got {value!r:.80}")
            known = [i for i in ids if i >= 0 and (not vocab_size or i < vocab_size)]
            if len(known) < len(ids):
                logger.warning("Of the end tokens %r, only %r are in the vocabulary of %r.", ids, known, vocab_size)
            return tuple(dict.fromkeys(known))
    return ()


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 of tokenizer.json in hex; empty when there is none."""
    path = folder / "tokenizer.json"
    return file_digest(path) if path.is_file() else ""


def file_digest(path: Path) -> str:
    """SHA-256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights_digest(files: Sequence[Path]) -> str:
    """SHA-256 over the contents of the weight files, by name.

    Hashes of unchanged files are remembered beside them, so that a start does not read weights twice.
    """
    total = hashlib.sha256()
    for path in sorted(files):
        total.update(f"{path.name} {_remembered_digest(path)}\n".encode())
    return total.hexdigest()


def _remembered_digest(path: Path) -> str:
    # The Hub's cache names large files by their SHA-256.
    target = path.resolve()
    if target.parent.name == "blobs" and _BLOB_NAME.fullmatch(target.name):
        return target.name
    memory = path.with_name(DIGEST_FILE)
    stat = path.stat()
    stamp = f"{stat.st_size}-{stat.st_mtime_ns}"
    try:
        known = json.loads(memory.read_text())
        if known[path.name]["stamp"] == stamp:
            return str(known[path.name]["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        known = {}
    digest = file_digest(path)
    entries = known if isinstance(known, dict) else {}
    entries[path.name] = {"stamp": stamp, "sha256": digest}
    try:
        temporary = memory.with_name(f"{DIGEST_FILE}.{digest[:8]}.tmp")
        temporary.write_text(json.dumps(entries))
        temporary.replace(memory)
    except OSError:
        # A read-only folder: the next start hashes again.
        pass
    return digest


def publish(temporary: Path, folder: Path) -> None:
    """Gives a finished folder its name in one step, so that nobody ever sees half of it.

    A folder that another process published meanwhile stays. Raises StartupError when the name cannot be taken.
    """
    temporary.chmod(0o755)
    for path in temporary.iterdir():
        path.chmod(0o644)
    try:
        temporary.rename(folder)
    except OSError as error:
        if not folder.is_dir():
            raise StartupError(f"{folder} cannot be written: {error}") from None
