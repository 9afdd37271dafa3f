"""Finds the files of a tokenizer by the name of its model: a folder, a GGUF file, an embedded model or a Hub name.

Embedded models are fetched and converted by `takt model pull`, which also writes the tokenizer beside the weights. Of a
Hub repository only the tokenizer's files are fetched, never the weights.
"""

import hashlib
import re
from pathlib import Path

from shared.config import environment
from shared.errors import StartupError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_FILES = [
    "tokenizer*",
    "*config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.jinja",
    "vocab*",
    "merges.txt",
]


def model_cache() -> Path:
    """Where embedded models lie: $TAKT_CACHE/models, or ~/.cache/takt/models."""
    root = environment("TAKT_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "takt") / "models"


def find_tokenizer(name: str, revision: str | None = None) -> Path:
    """A folder with a tokenizer. Raises StartupError in one line."""
    if not name:
        raise StartupError("tokenizer must be the name of a model or a folder, got nothing")
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        return _beside_gguf(path)
    if re.fullmatch(r"[\w.-]+", name):
        folder = model_cache() / name
        if (folder / "tokenizer.json").is_file():
            return folder
        raise StartupError(
            f"tokenizer {name!r} is no folder, and no model of that name was fetched by: takt model pull {name}"
        )
    if _HUB_NAME.fullmatch(name):
        return _from_hub(name, revision)
    raise StartupError(f"tokenizer {name!r} is no folder, no GGUF file and no Hub name (owner/name)")


def _beside_gguf(path: Path) -> Path:
    """The folder into which an engine, or a pull, has written the tokenizer of a GGUF file."""
    if path.suffix != ".gguf":
        raise StartupError(f"tokenizer {path} is no .gguf file; give a folder, or a GGUF file")
    if (path.parent / "tokenizer.json").is_file():
        return path.parent
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = model_cache() / f"gguf-{digest[:16]}"
    if (folder / "tokenizer.json").is_file():
        return folder
    raise StartupError(f"the tokenizer of {path} is not converted yet; start its engine first, or give --tokenizer")


def _from_hub(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - slow to import, and seldom needed
    from huggingface_hub.errors import (  # noqa: PLC0415 - as above
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_FILES, etag_timeout=10))
    except RepositoryNotFoundError:
        reason = "the Hub has no such model, or it needs a token"
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        try:
            return Path(snapshot_download(name, revision=revision, local_files_only=True))
        except (LocalEntryNotFoundError, OSError):
            reason = f"it is not in the local cache and the Hub cannot be reached ({type(error).__name__})"
    raise StartupError(f"tokenizer {name!r} is no local folder, and as a Hub name: {reason}")
