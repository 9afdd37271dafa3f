"""Zeroed memory for KV caches, taken from the system page by page.

On a CPU the pages of a cache are touched when its blocks are first written, so that a start does not wait for
gigabytes of zeros, and a small load keeps a small footprint.
"""

import math

import numpy as np
import torch


def zeroed(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of zeros of this size."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    # NumPy asks for memory that the system zeroes on first touch; torch writes zeros itself.
    memory = np.zeros(math.prod(size) * dtype.itemsize, np.uint8)
    return torch.from_numpy(memory).view(dtype).view(size)
