"""Changes logits as the options of their rows ask for, before anything is sampled from them.

The order is vLLM's: what a grammar does not allow is masked; only allowed tokens stay; tokens that would complete a bad
word, and end tokens below min_tokens, are masked; logit biases are added; then come the repetition penalty (over prompt
and output), the frequency penalty and the presence penalty (both over the output). All arithmetic is in float32, and
all cells of a kind are changed at once, whatever rows they are in. Rows without options are not touched.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine_svc.executor.grammar_mask import apply_grammar_mask
from engine_svc.executor.row_options import LogitsOptions
from engine_svc.executor.sampling_batch import SamplingBatch

Cells = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


def process_logits(logits: torch.Tensor, batch: SamplingBatch) -> None:
    """Changes float32 `logits` [num_rows, vocab_size] in place."""
    options = batch.options
    if batch.grammar is not None:
        apply_grammar_mask(logits, batch.grammar)
    if options is not None and len(options.allowed_rows):
        _allow(logits, options)
    _mask(logits, (batch.masked_rows, batch.masked_token_ids))
    if options is None:
        return
    _mask(logits, options.masked_cells)
    if len(options.bias_values):
        cells = _index(logits, options.bias_cells)
        logits[cells] += _tensor(logits, options.bias_values)
    if len(options.counts):
        _penalise(logits, options)


def _tensor(logits: torch.Tensor, array: npt.NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(array).to(logits.device)


def _index(logits: torch.Tensor, cells: Cells) -> tuple[torch.Tensor, torch.Tensor]:
    return _tensor(logits, cells[0]), _tensor(logits, cells[1])


def _mask(logits: torch.Tensor, cells: Cells) -> None:
    if len(cells[0]):
        logits[_index(logits, cells)] = -math.inf


def _allow(logits: torch.Tensor, options: LogitsOptions) -> None:
    cells = _index(logits, options.allowed_cells)
    allowed = logits[cells]
    logits.index_fill_(0, _tensor(logits, options.allowed_rows), -math.inf)
    logits[cells] = allowed


def _penalise(logits: torch.Tensor, options: LogitsOptions) -> None:
    cells = _index(logits, options.penalty_cells)
    values, counts = logits[cells], _tensor(logits, options.counts)
    repetition = _tensor(logits, options.repetition)
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= _tensor(logits, options.frequency) * counts
    values -= _tensor(logits, options.presence) * (counts > 0)
    logits[cells] = values
