"""Turns hidden states into what rows give beside sampled tokens: log-probabilities of their prompt, and vectors.

Logits of prompt tokens are computed in blocks, so that memory does not grow with the prompt. Knows no requests.
"""

import numpy as np
import torch

from engine_svc.core.interfaces import RowLogprobs
from engine_svc.executor.logprobs import BLOCK_ELEMENTS, top_logprobs
from engine_svc.executor.prompt_shares import PromptResults, PromptShare, note_reported, pooled_vector
from engine_svc.executor.row_mirror import RowMirror
from engine_svc.model.interface import Model


def read_prompts(shares: list[PromptShare], hidden: torch.Tensor, model: Model, mirror: RowMirror) -> PromptResults:
    """Turns `hidden`, the states of the shares one after another, into results."""
    results, start = PromptResults(), 0
    for share in shares:
        states = hidden[start : start + share.stop - share.start]
        start += len(states)
        if share.row in mirror.options.pooling:
            _pool(share, states, mirror, results)
        else:
            results.prompt_logprobs.append(_prompt_logprobs(share, states, model, mirror))
    return results


def _prompt_logprobs(share: PromptShare, states: torch.Tensor, model: Model, mirror: RowMirror) -> RowLogprobs:
    """The logits of a position are those of the token at the next one."""
    asked = mirror.options.prompt_logprobs[share.row]
    tokens = mirror.token_ids[share.row, share.start + 1 : share.stop + 1]
    at_once = max(1, BLOCK_ELEMENTS // model.info.vocab_size)
    parts = [
        top_logprobs(
            model.compute_logits(states[begin : begin + at_once]), tokens[begin : begin + at_once], asked.count
        )
        for begin in range(0, len(states), at_once)
    ]
    ids, values, ranks = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    note_reported(share, mirror)
    return RowLogprobs(share.row, ids, values, ranks)


def _pool(share: PromptShare, states: torch.Tensor, mirror: RowMirror, results: PromptResults) -> None:
    pooling = mirror.options.pooling[share.row]
    total = states.double().sum(dim=0).cpu().numpy()
    pooling.total = total if pooling.total is None else pooling.total + total
    if share.stop == mirror.num_prompt_tokens[share.row]:
        results.embeddings.append((share.row, pooled_vector(pooling, int(mirror.num_prompt_tokens[share.row]))))
