"""Logits to token ids: a pure function of each row's logits, parameters, seed and output index.

Order, as in vLLM: logits are changed as logits_processors tells (grammar, allowed tokens, bad words, end tokens below
min_tokens, biases, penalties); greedy rows take the most likely token; for the others temperature, then min_p (relative
to the most likely token), then top_k (keeping ties with the k-th), then top_p over what is left, renormalised (in
descending order, equal ones by lower id, up to and including the token that reaches p).
min_p comes before top_p because vLLM renormalises after it, which top_p sees; against top_k its order does not matter.
The token is the argmax, over the kept set, of log-probability plus Gumbel noise of its own id: the lowest id on ties.

Noise is drawn only for tokens that can still win, which changes the cost and never the token. Knows no requests.
"""

import math

import numpy as np
import numpy.typing as npt
import torch

from engine_svc.core.interfaces import INVALID_TOKEN, MASKED_TOKEN
from engine_svc.core.scheduler_output import IntArray
from engine_svc.executor.logits_processors import process_logits
from engine_svc.executor.philox import MAX_GUMBEL, token_gumbel
from engine_svc.executor.sampling_batch import SamplingBatch

# Elements of a block of rows that is worked on at once; bounds the memory of the float64 copies.
_BLOCK_ELEMENTS = 1 << 22
# Tokens that get noise at once on a CPU: the working set stays in its cache.
_NOISE_AT_ONCE = 1 << 13
# From so many tokens a row on, rows are worked on one by one.
_MANY_TOKENS = 2048
# Tokens at most this much less likely than the best one, in log-probability, get noise first.
_LIKELY = -8.0
# Tokens that top_p looks at first; each further look takes more, by this factor.
_SHORT_LIST = 128
_LONGER = 16


def sample(logits: torch.Tensor, batch: SamplingBatch) -> IntArray:
    """Samples one token for each row of float32 `logits` [num_rows, vocab_size], which may be overwritten.

    A row whose largest logit is not a finite number gives INVALID_TOKEN, or MASKED_TOKEN when nothing else is wrong
    with it than that its options mask every token.
    """
    if not len(logits):
        return np.zeros(0, np.int32)
    process_logits(logits, batch)
    # Both max and argmax give the first of equal values, and NaN where there is one.
    largest, token_ids = logits.max(dim=1)
    token_ids = torch.where(largest.isfinite(), token_ids, INVALID_TOKEN)
    if batch.options is not None or batch.grammar is not None:
        token_ids = torch.where(largest == -math.inf, MASKED_TOKEN, token_ids)
    sampled = np.flatnonzero(~batch.is_greedy)
    rows_at_once = max(1, _BLOCK_ELEMENTS // logits.shape[1])
    for start in range(0, len(sampled), rows_at_once):
        _sample_rows(logits, batch, sampled[start : start + rows_at_once], token_ids)
    result: IntArray = token_ids.to(torch.int32).cpu().numpy()
    return result


def _sample_rows(
    logits: torch.Tensor, batch: SamplingBatch, rows: npt.NDArray[np.int64], token_ids: torch.Tensor
) -> None:
    """Replaces the most likely token of `rows` by a sampled one, where the row is valid."""
    device = logits.device
    index = torch.from_numpy(rows).to(device)
    best = token_ids[index]
    scaled, kept = _scaled_and_kept(logits, batch, rows, best)
    seeds = torch.from_numpy(batch.seed[rows].view(np.int64)).to(device)
    output_index = torch.from_numpy(batch.output_index[rows].astype(np.int64)).to(device)
    scores = torch.full_like(scaled, -math.inf)
    # The likely tokens first: who cannot reach the best score among them with any noise needs none.
    likely = kept & (scaled >= _LIKELY)
    _score(scores, scaled, likely, seeds, output_index)
    kept &= ~likely & (scaled >= scores.max(dim=1, keepdim=True).values - MAX_GUMBEL)
    _score(scores, scaled, kept, seeds, output_index)
    token_ids[index] = torch.where(best < 0, best, scores.argmax(dim=1))


def _scaled_and_kept(
    logits: torch.Tensor, batch: SamplingBatch, rows: npt.NDArray[np.int64], best: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 logits over temperature, less the row's largest, and which tokens may be sampled."""
    scaled = logits[torch.from_numpy(rows).to(logits.device)].double()
    scaled /= torch.from_numpy(batch.temperature[rows]).to(logits.device)[:, None]
    scaled -= scaled.gather(1, best.clamp(min=0)[:, None])
    return scaled, kept_tokens(scaled, batch.top_k[rows], batch.top_p[rows], batch.min_p[rows])


def final_logits(logits: torch.Tensor, batch: SamplingBatch, rows: npt.NDArray[np.int64]) -> torch.Tensor:
    """Float32 logits [len(rows), vocab_size] of what the rows were sampled from, tokens that were not kept at -inf.

    `logits` are those that `sample` left behind; those of greedy rows are returned as they are.
    """
    result = logits[torch.from_numpy(rows).to(logits.device)]
    sampled = np.flatnonzero(~batch.is_greedy[rows])
    rows_at_once = max(1, _BLOCK_ELEMENTS // logits.shape[1])
    for start in range(0, len(sampled), rows_at_once):
        part = sampled[start : start + rows_at_once]
        index = torch.from_numpy(part).to(logits.device)
        scaled, kept = _scaled_and_kept(logits, batch, rows[part], result[index].argmax(dim=1))
        result[index] = scaled.masked_fill(~kept, -math.inf).float()
    return result


def _score(
    scores: torch.Tensor, scaled: torch.Tensor, chosen: torch.Tensor, seeds: torch.Tensor, output_index: torch.Tensor
) -> None:
    """Sets the scores of the chosen tokens, all [num_rows, vocab_size]; seeds and indices are [num_rows].

    On a CPU many tokens are worked on row by row, in parts: nothing but the token id then differs within a part.
    """
    flat = chosen.flatten().nonzero()[:, 0]
    if scores.device.type != "cpu" or len(flat) < _MANY_TOKENS * len(scores):
        rows, tokens = flat // scaled.shape[1], flat % scaled.shape[1]
        scores.view(-1)[flat] = scaled.view(-1)[flat] + token_gumbel(seeds[rows], output_index[rows], tokens)
        return
    for row in range(len(scores)):
        for tokens in torch.split(chosen[row].nonzero()[:, 0], _NOISE_AT_ONCE):
            noise = token_gumbel(seeds[row : row + 1], output_index[row : row + 1], tokens)
            scores[row, tokens] = scaled[row, tokens] + noise


def kept_tokens(
    scaled: torch.Tensor,
    top_k: IntArray,
    top_p: npt.NDArray[np.float64],
    min_p: npt.NDArray[np.float64],
) -> torch.Tensor:
    """Which tokens of each row may be sampled, bool [num_rows, vocab_size].

    `scaled` are float64 logits over temperature, less the row's largest.
    """
    kept = scaled > -math.inf
    vocab_size = scaled.shape[1]
    by_min_p = np.flatnonzero(min_p > 0)
    if len(by_min_p):
        index = torch.from_numpy(by_min_p).to(scaled.device)
        floors = torch.from_numpy(np.log(min_p[by_min_p])).to(scaled.device)
        kept[index] &= scaled[index] >= floors[:, None]
    by_top_k = np.flatnonzero((top_k > 0) & (top_k < vocab_size))
    if len(by_top_k):
        index = torch.from_numpy(by_top_k).to(scaled.device)
        kept[index] &= scaled[index] >= _kth_largest(scaled[index], top_k[by_top_k])
    by_top_p = np.flatnonzero(top_p < 1)
    if len(by_top_p):
        index = torch.from_numpy(by_top_p).to(scaled.device)
        kept[index] = _nucleus(scaled[index], kept[index], torch.from_numpy(top_p[by_top_p]).to(scaled.device))
    return kept


def _kth_largest(scaled: torch.Tensor, top_k: IntArray) -> torch.Tensor:
    """The k-th largest value of each row, [num_rows, 1]."""
    ordered = scaled.topk(int(top_k.max()), dim=1).values
    return ordered.gather(1, torch.from_numpy(top_k.astype(np.int64) - 1).to(scaled.device)[:, None])


def _nucleus(scaled: torch.Tensor, kept: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The kept tokens that top_p leaves."""
    values = scaled.masked_fill(~kept, -math.inf)
    weights = values.exp()
    target = top_p * weights.sum(dim=1)
    count, cut = _nucleus_size(values, target, min(_SHORT_LIST, values.shape[1]))
    # Equal values at the cut: the lower ids fill up the count.
    above, equal = values > cut, values == cut
    room = count - above.sum(dim=1, keepdim=True)
    crowded = (equal.sum(dim=1, keepdim=True) > room).nonzero()[:, 0]
    if len(crowded):
        equal[crowded] &= equal[crowded].cumsum(dim=1) <= room[crowded]
    return above | (equal & kept)


def _nucleus_size(values: torch.Tensor, target: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """How many tokens reach the target weight, and the value of the last of them, both [num_rows, 1].

    Looks at the `width` largest, and at more for the rows that need it; the sums are the same either way.
    """
    ordered = values.topk(width, dim=1).values
    sums = ordered.exp().cumsum(dim=1)
    # A token is in when the weight before it has not reached the target; the first always is.
    count = 1 + (sums[:, :-1] < target[:, None]).sum(dim=1, keepdim=True)
    cut = ordered.gather(1, count - 1)
    if width < values.shape[1]:
        short = (sums[:, -1] < target).nonzero()[:, 0]
        if len(short):
            count[short], cut[short] = _nucleus_size(
                values[short], target[short], min(width * _LONGER, values.shape[1])
            )
    return count, cut
