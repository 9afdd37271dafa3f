"""Builds the kernels' library for this machine's instruction set, once, and finds it again.

The library lies in a cache under a name made of the sources, the compiler and its flags, so that whatever changes
builds anew. Knows neither torch nor models. Invariant: a file under its final name is whole.
"""

import hashlib
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "csrc"
COMPILERS = ("g++", "c++", "clang++")
BUILD_TIMEOUT_SECONDS = 300
_COMMON_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-ffp-contract=off")


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """A version of the kernels: what the processor must have, as /proc/cpuinfo names it, and the compiler's flags."""

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]


_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")
_AVX512_FLAGS = (*_AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
# Best first.
INSTRUCTION_SETS = (
    InstructionSet("avx512_bf16", _AVX512 | {"avx512_bf16"}, (*_AVX512_FLAGS, "-mavx512bf16")),
    InstructionSet("avx512", _AVX512, _AVX512_FLAGS),
    InstructionSet("avx2", _AVX2, _AVX2_FLAGS),
    InstructionSet("portable", frozenset(), ()),
)


class BuildError(Exception):
    """The library cannot be built; the message is one line."""


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """What the processor has; empty where that cannot be told."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(flags.partition(":")[2].split())


def usable_instruction_sets(flags: frozenset[str] | None = None) -> list[InstructionSet]:
    """Those that this machine can run, best first."""
    present = cpu_flags() if flags is None else flags
    return [version for version in INSTRUCTION_SETS if version.needs <= present]


def built_library(cache: Path, version: InstructionSet) -> Path:
    """The library in the cache folder, built when it is not there. Raises BuildError."""
    compiler = _compiler()
    command = [compiler, *_COMMON_FLAGS, *version.flags]
    path = cache / f"kernels-{version.name}-{_digest(compiler, command)}.so"
    if not path.is_file():
        _build(command, path)
    return path


def is_built(cache: Path, version: InstructionSet) -> bool:
    """Whether the library is in the cache. Raises BuildError without a compiler."""
    compiler = _compiler()
    command = [compiler, *_COMMON_FLAGS, *version.flags]
    return (cache / f"kernels-{version.name}-{_digest(compiler, command)}.so").is_file()


def _compiler() -> str:
    for name in COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise BuildError(f"no C++ compiler was found, looked for {', '.join(COMPILERS)}")


def _digest(compiler: str, command: list[str]) -> str:
    digest = hashlib.sha256(" ".join(command).encode())
    digest.update(f"{platform.machine()} {Path(compiler).stat().st_mtime_ns}".encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _build(command: list[str], path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / "kernels.so"
            arguments = [*command, str(SOURCES / "kernels.cpp"), "-o", str(made)]
            done = subprocess.run(  # noqa: S603 - the machine's own compiler
                arguments, capture_output=True, text=True, timeout=BUILD_TIMEOUT_SECONDS, check=False
            )
            if done.returncode != 0:
                raise BuildError(f"{command[0]} failed: {_first_error(done.stderr)}")
            # Whoever else builds the same meanwhile writes the same.
            made.replace(path)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"the kernels cannot be built in {path.parent}: {error}") from None


def _first_error(output: str) -> str:
    lines = output.splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")
