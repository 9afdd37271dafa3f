"""Matrix products of the kernels beside oneDNN with prepacked weights, at the shapes of the embedded model.

    python bench/kernel_products.py

Prints rows; bytes a second count the weights once, operations two for each weight and row.
"""

import statistics
import time
from collections.abc import Callable

import torch
from rows import Row, compared, row, show

from engine_svc.kernels.choose import native_ops
from engine_svc.model.resolve import kernel_cache

# Outputs and inputs: query, key and value; output; gate and up; down.
SHAPES = {"qkv": (960, 576), "output": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}
ROWS = (1, 4, 8, 32, 128)
# Copies of each weight, so that they come from memory and not from a cache, as in a model.
COPIES = 30
RUNS = 7


def median_seconds(work: Callable[[], None]) -> float:
    """Of one pass over all copies."""
    work()
    times = []
    for _ in range(RUNS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def product_rows() -> list[Row]:
    """Milliseconds of all four products of all layers, for each number of rows; below it our rate."""
    ops = native_ops(kernel_cache())
    weights = {
        name: [torch.randn(shape, dtype=torch.bfloat16) for _ in range(COPIES)] for name, shape in SHAPES.items()
    }
    packed = {name: [ops.pack_linear([weight]) for weight in copies] for name, copies in weights.items()}
    found = []
    for count in ROWS:
        inputs = {name: torch.randn(count, shape[1], dtype=torch.bfloat16) for name, shape in SHAPES.items()}
        prepacked = {
            name: [torch.ops.mkldnn._reorder_linear_weight(weight, count) for weight in copies]
            for name, copies in weights.items()
        }

        def ours(inputs=inputs) -> None:
            for index in range(COPIES):
                for name in SHAPES:
                    ops.linear(inputs[name], packed[name][index])

        def theirs(inputs=inputs, prepacked=prepacked) -> None:
            for index in range(COPIES):
                for name in SHAPES:
                    torch.ops.mkldnn._linear_pointwise(inputs[name], prepacked[name][index], None, "none", [], "")

        values = COPIES * sum(n * k for n, k in SHAPES.values())
        seconds, peer = median_seconds(ours), median_seconds(theirs)
        measured = row(f"products of 30 layers, {count} rows, bf16", round(seconds * 1e3, 3), "ms")
        found.append(compared(measured, "oneDNN prepacked", round(peer * 1e3, 3), lower_is_better=True))
        found.append(row(f"the same, {count} rows: weights read", round(2 * values / seconds / 1e9, 1), "GB/s"))
        found.append(
            row(f"the same, {count} rows: operations", round(2 * values * count / seconds / 1e9, 1), "GFLOP/s")
        )
    return found


if __name__ == "__main__":
    show(product_rows())
