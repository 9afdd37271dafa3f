"""Log-probabilities of given tokens and of the most likely ones, from logits. Knows no requests and no sampling.

Works on blocks of rows, so that nothing beside the logits grows with their number. Invariant: equal logits give equal
ranks and candidates whatever rows are beside them, and equal values are in order of their ids.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine_svc.core.interfaces import RowLogprobs
from engine_svc.core.scheduler_output import IntArray
from engine_svc.executor.row_options import LogprobsWanted

# Elements of a block of rows that is worked on at once.
BLOCK_ELEMENTS = 1 << 22


def sampled_logprobs(
    logits: torch.Tensor, token_ids: IntArray, wanted: Sequence[LogprobsWanted]
) -> tuple[RowLogprobs, ...]:
    """Of the sampled tokens: row i of `logits` belongs to wanted[i]; `token_ids` are those of all sampling rows.

    Rows without a valid token are left out.
    """
    valid = [i for i, one in enumerate(wanted) if token_ids[one.index] >= 0]
    results: list[RowLogprobs] = []
    for count in sorted({wanted[i].count for i in valid if wanted[i].token_ids is None}):
        members = [i for i in valid if wanted[i].token_ids is None and wanted[i].count == count]
        tokens = token_ids[[wanted[i].index for i in members]]
        results += _by_row([wanted[i].index for i in members], top_logprobs(logits[members], tokens, count))
    for i in valid:
        asked = wanted[i].token_ids
        if asked is not None:
            index = wanted[i].index
            results += _by_row([index], chosen_logprobs(logits[i : i + 1], token_ids[index : index + 1], asked))
    return tuple(results)


def _by_row(indices: Sequence[int], columns: tuple[IntArray, npt.NDArray[np.float32], IntArray]) -> list[RowLogprobs]:
    ids, values, ranks = columns
    return [RowLogprobs(index, ids[i : i + 1], values[i : i + 1], ranks[i : i + 1]) for i, index in enumerate(indices)]


def top_logprobs(
    logits: torch.Tensor, token_ids: IntArray, count: int
) -> tuple[IntArray, npt.NDArray[np.float32], IntArray]:
    """Token ids and log-probabilities [num_rows, 1 + count] and ranks [num_rows] of one token for each row.

    Column 0 is the token itself, then come the `count` most likely ones, -1 for all of the vocabulary.
    """
    vocab_size = logits.shape[1]
    count = vocab_size if count < 0 else min(count, vocab_size)
    rows_at_once = max(1, BLOCK_ELEMENTS // vocab_size)
    ids: IntArray = np.zeros((len(logits), 1 + count), np.int32)
    values = np.zeros((len(logits), 1 + count), np.float32)
    ranks: IntArray = np.zeros(len(logits), np.int32)
    for start in range(0, len(logits), rows_at_once):
        part = slice(start, start + rows_at_once)
        block = logits[part]
        tokens = _tokens(block, token_ids[part])
        candidates = torch.cat([tokens, _most_likely(block, count)], dim=1)
        ids[part], values[part], ranks[part] = _report(block, tokens, candidates)
    return ids, values, ranks


def chosen_logprobs(
    logits: torch.Tensor, token_ids: IntArray, chosen: npt.NDArray[np.int64]
) -> tuple[IntArray, npt.NDArray[np.float32], IntArray]:
    """The same with the `chosen` tokens in the place of the most likely ones."""
    tokens = _tokens(logits, token_ids)
    asked = torch.from_numpy(chosen).to(logits.device).expand(len(logits), -1)
    return _report(logits, tokens, torch.cat([tokens, asked], dim=1))


def _tokens(logits: torch.Tensor, token_ids: IntArray) -> torch.Tensor:
    return torch.from_numpy(token_ids.astype(np.int64)).to(logits.device)[:, None]


def _report(
    logits: torch.Tensor, tokens: torch.Tensor, candidates: torch.Tensor
) -> tuple[Any, npt.NDArray[np.float32], Any]:
    normaliser = torch.logsumexp(logits, dim=1, keepdim=True)
    values = logits.gather(1, candidates) - normaliser
    ranks = 1 + (logits > logits.gather(1, tokens)).sum(dim=1)
    return candidates.to(torch.int32).cpu().numpy(), values.cpu().numpy(), ranks.to(torch.int32).cpu().numpy()


def _most_likely(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the `count` largest of each row, [num_rows, count], the lower id first among equals."""
    if count == 0:
        return torch.zeros((len(logits), 0), dtype=torch.int64, device=logits.device)
    if count == logits.shape[1]:
        return logits.sort(dim=1, descending=True, stable=True).indices
    top = logits.topk(count + 1, dim=1)
    # topk orders equal values as it likes; where there are any, the whole row is sorted.
    ids = top.indices[:, :count]
    equal = (top.values[:, 1:] == top.values[:, :-1]).any(dim=1).nonzero()[:, 0]
    if len(equal):
        ids[equal] = logits[equal].sort(dim=1, descending=True, stable=True).indices[:, :count]
    return ids
