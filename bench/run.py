"""Runs the benchmarks and prints one table; results go to bench/out/latest.json too.

    python bench/run.py [--peers] [--only end-to-end control-plane kernels]

(a) the whole stack over gRPC with the embedded model, (b) the control plane alone, with a core whose executor answers
at once and a stack with the fake executor, (c) matrix products. With --peers the servers of the peers' folder run the
same loads, one server at a time. Every figure is the median of the runs, each on
servers started anew; leave the machine alone meanwhile.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from core_steps import measure as measure_core
from kernel_products import product_rows
from peers import peers, serving
from rows import Row, compared, row, save, show
from stack import Figures, Load, measure, medians, own_load, running_stack

BENCH = Path(__file__).resolve().parent
PARTS = ("end-to-end", "control-plane", "kernels")
LOADS = (Load(1, 128, 128, 4), Load(8, 128, 128, 32), Load(32, 128, 128, 64), Load(8, 1024, 64, 16))
FAKE_LOAD = Load(64, 128, 128, 512)
# vLLM's control plane in one process, with an executor that answers at once, at 256 sequences.
VLLM_CORE_MS = 3.4


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    model: str
    dtype: str
    runs: int
    peers: Path | None


def models_folder(model: str) -> Path:
    """Where a pulled model lies."""
    return Path(model) if Path(model).is_dir() else Path.home() / ".cache" / "takt" / "models" / model


def load_rows(load: Load, ours: Figures) -> list[tuple[Row, str, bool]]:
    """Rows of one load: our row, the figure it stands for, and whether less is better."""
    whole = load.prompt > load.output
    name, key = ("prompt+output tokens/s", "total_tok_s") if whole else ("output tokens/s", "out_tok_s")
    rows = [(row(f"{name}, {load.name}", ours[key], "tok/s"), key, False)]
    rows.append((row(f"TTFT p50, {load.name}", ours["ttft_p50_ms"], "ms"), "ttft_p50_ms", True))
    rows.append((row(f"gap p50, {load.name}", ours["gap_p50_ms"], "ms"), "gap_p50_ms", True))
    rows.append((row(f"gap p99, {load.name}", ours["gap_p99_ms"], "ms"), "gap_p99_ms", True))
    return rows


def one_pass(command: list[str]) -> dict[Load, Figures]:
    """Every load once, on a server that has just started, after a little that warms it up."""
    for _ in range(2):
        measure(command, Load(8, 64, 16, 8))
    return {load: measure(command, load) for load in LOADS}


def over_runs(passes: list[dict[Load, Figures]]) -> dict[Load, Figures]:
    """Medians over passes."""
    return {load: medians([figures[load] for figures in passes]) for load in LOADS}


def end_to_end(options: Options) -> list[Row]:
    """(a), with the peers beside it."""
    passes = []
    for _ in range(options.runs):
        with running_stack(options.model, ("--dtype", options.dtype), ("--http-port", "-1")) as stack:
            passes.append(one_pass(own_load(stack.target)))
            memory = stack.peak_memory_mib()
            starts = stack.engine.ready_seconds or 0.0, stack.frontend.ready_seconds or 0.0
    ours = over_runs(passes)
    theirs = {} if options.peers is None else peer_figures(options.peers, models_folder(options.model), options.runs)
    rows: list[Row] = []
    for load, figures in ours.items():
        for measured, key, lower in load_rows(load, figures):
            others = [compared(measured, name, f[load][key], lower_is_better=lower) for name, f in theirs.items()]
            rows += others or [measured]
    rows.append(row("peak memory of the engine", memory[0], "MiB"))
    rows.append(row("peak memory of the frontend", memory[1], "MiB"))
    rows.append(row("start of the engine", round(starts[0], 2), "s"))
    rows.append(row("start of the frontend", round(starts[1], 2), "s"))
    return rows


def peer_figures(folder: Path, model: Path, runs: int) -> dict[str, dict[Load, Figures]]:
    """Every peer's figures; one that is not there or does not start is left out."""
    found: dict[str, dict[Load, Figures]] = {}
    for peer in peers(folder, model):
        if not peer.is_installed:
            print(f"{peer.name} is not installed in {peer.home}: left out", file=sys.stderr)
            continue
        try:
            passes = []
            for _ in range(runs):
                with serving(peer):
                    passes.append(one_pass(list(peer.load)))
            found[peer.name] = over_runs(passes)
        except RuntimeError as error:
            print(f"{error}: left out", file=sys.stderr)
    return found


def control_plane(options: Options) -> list[Row]:
    """(b)."""
    rows = []
    for sequences in (64, 256, 2048):
        runs = sorted(measure_core(sequences, 128, 128)["step_p50_ms"] for _ in range(options.runs + 1))
        measured = row(f"core + encode, {sequences} sequences", runs[len(runs) // 2], "ms/step")
        with_peer = compared(measured, "vLLM in process (figure of another run)", VLLM_CORE_MS, lower_is_better=True)
        rows.append(with_peer if sequences == 256 else measured)
    with running_stack(
        str(models_folder(options.model)), ("--executor", "fake", "--max-num-batched-tokens", "8192")
    ) as stack:
        for name, flags in (("token ids", ("--no-text",)), ("text", ())):
            figures = medians([measure(own_load(stack.target, *flags), FAKE_LOAD) for _ in range(options.runs + 1)][1:])
            label = f"whole stack, fake executor, c=64, {name}"
            rows.append(row(label, figures["out_tok_s"], "tok/s"))
            rows.append(row(f"{label}: tokens a message", figures["tokens_per_message"], ""))
            rows.append(row(f"{label}: gap p50", figures["gap_p50_ms"], "ms"))
            rows.append(row(f"{label}: gap p99", figures["gap_p99_ms"], "ms"))
    return rows


def kernels(_options: Options) -> list[Row]:
    """(c)."""
    return product_rows()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="embedded model or folder")
    parser.add_argument("--dtype", default="auto", help="the engine's --dtype")
    parser.add_argument("--runs", type=int, default=3, help="runs of each load")
    parser.add_argument("--peers", action="store_true", help="run the peers too")
    parser.add_argument("--peers-dir", type=Path, default=BENCH.parent.parent / "shared" / "peers")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run")
    arguments = parser.parse_args()
    options = Options(
        arguments.model, arguments.dtype, arguments.runs, arguments.peers_dir if arguments.peers else None
    )
    parts: dict[str, Callable[[Options], list[Row]]] = dict(
        zip(PARTS, (end_to_end, control_plane, kernels), strict=True)
    )
    rows = [entry for name in arguments.only for entry in parts[name](options)]
    show(rows)
    save(rows, BENCH / "out" / "latest.json")


if __name__ == "__main__":
    main()
