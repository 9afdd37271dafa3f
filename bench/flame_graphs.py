"""Flame graphs of where an engine's steps and a frontend's requests spend their time, while a load runs.

    python bench/flame_graphs.py [--executor fake] [-c 8]

Writes bench/out/engine.svg and bench/out/frontend.svg: open them in a browser. Threads that wait are left out.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from run import models_folder
from stack import Load, json_line, own_load, running_stack

OUT = Path(__file__).resolve().parent / "out"


def record(pid: int, path: Path, seconds: int) -> "subprocess.Popen[bytes]":
    """Starts py-spy on a process; it ends by itself."""
    spy = Path(sys.executable).with_name("py-spy")
    options = ["--duration", str(seconds), "--rate", "200", "--native", "--format", "flamegraph"]
    return subprocess.Popen(
        [str(spy), "record", *options, "--output", str(path), "--pid", str(pid)], stdout=subprocess.DEVNULL
    )


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="embedded model or folder")
    parser.add_argument("--executor", default="uniproc", choices=("uniproc", "fake"))
    parser.add_argument("-c", type=int, default=8, help="clients")
    parser.add_argument("--seconds", type=int, default=8, help="how long to record")
    arguments = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    load = Load(arguments.c, 128, 128, arguments.c * (100 if arguments.executor == "fake" else 8))
    flags = ("--executor", arguments.executor)
    with running_stack(str(models_folder(arguments.model)), flags, ("--http-port", "-1")) as stack:
        json_line([*own_load(stack.target), *Load(arguments.c, 128, 16, arguments.c).arguments()])
        children = {"engine": stack.engine, "frontend": stack.frontend}
        paths = {name: OUT / f"{name}.svg" for name in children}
        spies = [record(child.pid, paths[name], arguments.seconds) for name, child in children.items()]
        print(json_line([*own_load(stack.target), *load.arguments()]))
        for spy in spies:
            spy.wait()
    print(*paths.values(), sep="\n")


if __name__ == "__main__":
    main()
