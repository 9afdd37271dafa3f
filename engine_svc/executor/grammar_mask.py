"""Applies grammar bitmasks to logits: the tokens that a grammar does not allow get -inf.

Works on all constrained rows at once; the other rows are not touched. Knows no grammars.
"""

import math

import numpy as np
import torch

from engine_svc.executor.sampling_batch import GrammarMask

_BITS = 32


def apply_grammar_mask(logits: torch.Tensor, mask: GrammarMask) -> None:
    """Changes float32 `logits` [num_rows, vocab_size] in place, in the rows of the mask."""
    forbidden = _forbidden(mask, logits.device)[:, : logits.shape[1]]
    if len(mask.rows) == len(logits):
        # The rows are in the order of the logits, so these are all of them.
        logits.masked_fill_(forbidden, -math.inf)
    else:
        rows = torch.from_numpy(mask.rows).to(logits.device)
        logits[rows] = logits[rows].masked_fill_(forbidden, -math.inf)


def _forbidden(mask: GrammarMask, device: torch.device) -> torch.Tensor:
    """Which tokens are not allowed, bool [num_rows, num_words * 32]."""
    words = np.ascontiguousarray(~mask.words, "<i4")
    if device.type == "cpu":
        # Several times faster than the shifts below.
        return torch.from_numpy(np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").view(np.bool_))
    shifts = torch.arange(_BITS, dtype=torch.int32, device=device)
    return ((torch.from_numpy(words).to(device)[:, :, None] >> shifts) & 1).bool().flatten(1)
