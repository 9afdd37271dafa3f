"""Finds the native op set of this machine: builds and loads the library once a process.

Whatever stands in the way is a reason in words, never a failure: the reference ops run everything.
"""

import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch

from engine_svc.kernels.build import (
    INSTRUCTION_SETS,
    BuildError,
    InstructionSet,
    built_library,
    is_built,
    usable_instruction_sets,
)
from engine_svc.kernels.library import Library
from engine_svc.kernels.native_ops import NativeOps
from engine_svc.model.arch import DecoderConfig

logger = logging.getLogger(__name__)

Report = Callable[[str, float], None]


def native_ops(cache: Path, report: Report | None = None) -> NativeOps:
    """The op set for the best instruction set of this machine. Raises BuildError."""
    return NativeOps(load_kernels(cache, usable_instruction_sets()[0], report))


def load_kernels(cache: Path, version: InstructionSet, report: Report | None = None) -> Library:
    """The library for an instruction set, built when it is not in the cache. Raises BuildError."""
    if not is_built(cache, version):
        logger.info("Compiling the kernels for %s: once, in about 20 seconds.", version.name)
        if report is not None:
            report("Compiling kernels", 0.0)
        started = time.monotonic()
        built_library(cache, version)
        logger.info("Compiled the kernels in %.1f s.", time.monotonic() - started)
    return _library(built_library(cache, version), version.name)


@functools.cache
def _library(path: Path, name: str) -> Library:
    return Library(path, name, torch.get_num_threads())


def unfit_reason(config: DecoderConfig, dtype: torch.dtype) -> str:
    """Why the native ops cannot run a model; empty when they can."""
    if dtype not in (torch.float32, torch.bfloat16):
        return f"they know float32 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    sizes = (config.hidden_size, config.intermediate_size, config.head_dim)
    if any(size % 2 for size in sizes):
        return f"they need even sizes, the model has {sizes}"
    return ""


def widens_well(ops: NativeOps) -> bool:
    """Whether bfloat16 is no slower than float32: half the traffic, where widening is one instruction."""
    return ops.instruction_set != INSTRUCTION_SETS[-1].name


__all__ = ["BuildError", "load_kernels", "native_ops", "unfit_reason", "widens_well"]
