"""Generates the Python code of the protos; with --check, fails when the checked-in code is out of date.

Run it from the repository root: python protos/generate.py [--check]
"""

import argparse
import filecmp
import importlib.metadata
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
# The generated code refuses an older runtime than its generator, so one version writes it.
TOOLS_VERSION = "1.85.1"
# Only these files declare services.
SERVICES = ("takt/v1/inference.proto", "takt/v1/admin.proto", "takt/engine/v1/engine.proto")


def generate(out: Path) -> None:
    """Writes the generated tree under `out`; raises SystemExit when the compiler fails."""
    sources = sorted(str(p.relative_to(ROOT)) for p in ROOT.rglob("*.proto"))
    # The plugin lies beside the interpreter, which need not be on the PATH.
    plugin = Path(sys.executable).with_name("protoc-gen-mypy_grpc")
    runs = (
        [f"--python_out={out}", f"--pyi_out={out}", *sources],
        [f"--plugin={plugin}", f"--grpc_python_out={out}", f"--mypy_grpc_out={out}", *SERVICES],
    )
    for arguments in runs:
        if protoc.main(["protoc", f"-I{ROOT}", *arguments]) != 0:
            raise SystemExit("protoc failed")


def drifted(fresh: Path) -> list[str]:
    """Names generated files that differ from, or miss in, the checked-in tree, and stale ones in it."""
    wanted = {p.relative_to(fresh) for p in fresh.rglob("*.py*")}
    present = {p.relative_to(ROOT) for p in (ROOT / "takt").rglob("*_pb2*.py*") if "__pycache__" not in p.parts}
    changed = {p for p in wanted & present if not filecmp.cmp(fresh / p, ROOT / p, shallow=False)}
    return sorted(str(p) for p in changed | (wanted ^ present))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when the code is out of date")
    check = parser.parse_args().check
    installed = importlib.metadata.version("grpcio-tools")
    if installed != TOOLS_VERSION:
        raise SystemExit(f"grpcio-tools is {installed}, the checked-in code is made with {TOOLS_VERSION}")
    if not check:
        generate(ROOT)
        return
    with tempfile.TemporaryDirectory() as directory:
        generate(Path(directory))
        stale = drifted(Path(directory))
    if stale:
        print("out of date, run `make protos`:", *stale, sep="\n  ", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
