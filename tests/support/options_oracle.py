"""What a request's options make of its logits, once more: NumPy, one row and one token at a time."""

import math
from collections.abc import Sequence

import numpy as np

from shared.types import SamplingParams


def processed(
    logits: np.ndarray, sampling: SamplingParams, prompt: Sequence[int], output: Sequence[int], stops: Sequence[int]
) -> np.ndarray:
    """Float32 logits of one row after its options."""
    result = np.array(logits, np.float32)
    forbidden = set(stops) if len(output) < sampling.min_tokens else set()
    for word in sampling.bad_words:
        prefix = list(word[:-1])
        if len(prefix) <= len(output) and list(output[len(output) - len(prefix) :]) == prefix:
            forbidden.add(word[-1])
    for token in range(len(result)):
        if token in forbidden or (sampling.allowed_token_ids and token not in sampling.allowed_token_ids):
            result[token] = -math.inf
    for token, bias in sampling.logit_bias:
        result[token] += np.float32(bias)
    for token in set(prompt) | set(output):
        penalty = np.float32(sampling.repetition_penalty)
        result[token] = result[token] / penalty if result[token] > 0 else result[token] * penalty
    for token in set(output):
        result[token] -= np.float32(sampling.frequency_penalty) * np.float32(list(output).count(token))
        result[token] -= np.float32(sampling.presence_penalty)
    return result


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """In float64."""
    wide = np.asarray(logits, np.float64)
    wide = wide - wide.max()
    return wide - math.log(np.exp(wide).sum())


def ranked(logits: np.ndarray, token: int, count: int) -> tuple[list[int], int]:
    """The token and the `count` most likely ones, the lower id first among equals; and the token's rank."""
    order = np.lexsort((np.arange(len(logits)), -logits.astype(np.float64))).tolist()
    rank = 1 + int((logits > logits[token]).sum())
    return [token, *order[: len(logits) if count < 0 else count]], rank
