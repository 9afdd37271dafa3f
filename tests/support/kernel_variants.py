"""The native op set of each instruction set that this machine runs, its results poisoned before they are written."""

import ctypes
import functools

import pytest
import torch

from engine_svc.kernels.build import BuildError, usable_instruction_sets
from engine_svc.kernels.choose import load_kernels
from engine_svc.kernels.memory import NativeKVCache
from engine_svc.kernels.native_ops import NativeOps
from engine_svc.model.resolve import kernel_cache

VARIANTS = tuple(version.name for version in usable_instruction_sets())


class PoisonedOps(NativeOps):
    """An element that no kernel writes is NaN."""

    def empty(self, shape, dtype):
        return torch.full(shape, float("nan"), dtype=dtype)


@functools.cache
def poisoned_ops(variant: str) -> PoisonedOps:
    """Skips the test where there is no compiler."""
    version = next(known for known in usable_instruction_sets() if known.name == variant)
    try:
        return PoisonedOps(load_kernels(kernel_cache(), version))
    except BuildError as error:
        pytest.skip(str(error))


def poison(cache, dtype) -> None:
    """Fills a KV cache of either op set with NaN."""
    if isinstance(cache, NativeKVCache):
        memory = (ctypes.c_char * cache.num_bytes).from_address(cache.address)
        torch.frombuffer(memory, dtype=dtype).fill_(float("nan"))
        return
    tensors = (cache.keys, cache.values) if hasattr(cache, "keys") else [t for pair in cache for t in pair]
    for tensor in tensors:
        tensor.fill_(float("nan"))
