"""Applies grammar bitmasks to logits: the tokens that a grammar does not allow get -inf.

Bits are spread to tokens by a table of the 256 bytes, on the device, for all constrained rows at once; the other rows
are not touched. Knows no grammars.
"""

import math
from functools import lru_cache

import numpy as np
import torch

from engine_svc.executor.sampling_batch import GrammarMask


def apply_grammar_mask(logits: torch.Tensor, mask: GrammarMask) -> None:
    """Changes float32 `logits` [num_rows, vocab_size] in place, in the rows of the mask."""
    device = logits.device
    rows = torch.from_numpy(mask.rows).to(device)
    data = torch.from_numpy(np.ascontiguousarray(mask.words, "<i4").view(np.uint8)).to(device)
    forbidden = _forbidden_bits(device)[data.to(torch.int32)].flatten(1)[:, : logits.shape[1]]
    if len(rows) == len(logits):
        # The rows are in the order of the logits, so these are all of them.
        logits.masked_fill_(forbidden, -math.inf)
    else:
        logits[rows] = logits[rows].masked_fill_(forbidden, -math.inf)


@lru_cache(maxsize=8)
def _forbidden_bits(device: torch.device) -> torch.Tensor:
    """Which of the eight tokens of each byte are not allowed, bool [256, 8]."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, np.newaxis], axis=1, bitorder="little")
    return torch.from_numpy(bits == 0).to(device)
