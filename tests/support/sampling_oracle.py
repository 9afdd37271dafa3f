"""Philox and the kept set once more, written differently: Python integers, NumPy sorts, no torch."""

import math
import struct
from collections.abc import Sequence

import numpy as np


def philox_words(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10 as its authors state it, one counter at a time."""
    x, (k0, k1) = list(counter), key
    for number in range(10):
        high0, low0 = divmod(0xD2511F53 * x[0], 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * x[2], 1 << 32)
        round_key = (k0 + number * 0x9E3779B9) % (1 << 32), (k1 + number * 0xBB67AE85) % (1 << 32)
        x = [high1 ^ x[1] ^ round_key[0], low1, high0 ^ x[3] ^ round_key[1], low0]
    return x


def gumbel(seed: int, output_index: int, token_id: int) -> float:
    """Noise of a token."""
    word = philox_words((output_index, token_id, 0, 0), struct.unpack("<2I", struct.pack("<Q", seed)))[0]
    return -math.log(-math.log((word + 0.5) / 2**32))


def kept_probabilities(
    logits: np.ndarray, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Exact distribution [vocab_size] of one row of logits; 0 for tokens that are not kept."""
    scaled = np.asarray(logits, np.float64) / temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    kept = probs >= min_p * probs.max() * (1 - 1e-12)
    if 0 < top_k < len(probs):
        kept &= probs >= np.sort(probs)[-top_k]
    probs = np.where(kept, probs, 0.0)
    probs /= probs.sum()
    if top_p < 1:
        # Most likely first, equal ones by lower id.
        total = 0.0
        chosen = np.zeros(len(probs), np.bool_)
        for token in sorted(range(len(probs)), key=lambda token: (-probs[token], token)):
            if total >= top_p or probs[token] == 0:
                break
            chosen[token] = True
            total += probs[token]
        probs = np.where(chosen, probs, 0.0)
        probs /= probs.sum()
    return probs


def sample_token(logits: np.ndarray, *, seed: int, output_index: int, temperature: float = 1.0, **kept) -> int:
    """The token of one row, by the definition."""
    if temperature < 1e-5:
        return int(np.argmax(logits))
    probs = kept_probabilities(logits, temperature=temperature, **kept)
    scores = {
        token: math.log(probs[token]) + gumbel(seed, output_index, token) for token in np.flatnonzero(probs).tolist()
    }
    return max(scores, key=lambda token: (scores[token], -token))
