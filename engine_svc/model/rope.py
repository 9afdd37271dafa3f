"""Rotary frequencies from a rope configuration: default, linear, llama3 and longrope.

Invariant: the float32 arithmetic follows transformers step for step, so that angles are bit for bit the same.
"""

import math

import torch

from engine_svc.model.arch import RopeConfig, UnsupportedModelError
from engine_svc.model.ops import RotaryTable


def rotary_table(rope: RopeConfig, max_position_embeddings: int, max_model_len: int) -> RotaryTable:
    """The frequencies of a rope.

    longrope has two sets, and keys that are cached cannot change theirs: the long set is used for every request when
    `max_model_len` is over the length of the pretraining, the short set otherwise.
    """
    try:
        if rope.rope_type == "llama3":
            return RotaryTable(_llama3(rope), 1.0)
        if rope.rope_type == "longrope":
            return _longrope(rope, max_position_embeddings, max_model_len)
        inv_freq = _base_frequencies(rope)
        if rope.rope_type == "linear":
            inv_freq /= rope.get("factor")
        return RotaryTable(inv_freq, 1.0)
    except TypeError:
        raise UnsupportedModelError(f"rope type {rope.rope_type!r} lacks a parameter, has {rope.parameters}") from None


def _base_frequencies(rope: RopeConfig) -> torch.Tensor:
    return 1.0 / (rope.theta ** (torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim))


def _llama3(rope: RopeConfig) -> torch.Tensor:
    """Divides low frequencies by a factor, keeps high ones, and blends between the two."""
    inv_freq = _base_frequencies(rope)
    factor, low, high = rope.get("factor"), rope.get("low_freq_factor"), rope.get("high_freq_factor")
    original = rope.get("original_max_position_embeddings")
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > original / low, inv_freq / factor, inv_freq)
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * scaled / factor + smooth * scaled
    between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(between, blended, scaled)


def _longrope(rope: RopeConfig, max_position_embeddings: int, max_model_len: int) -> RotaryTable:
    original = rope.get("original_max_position_embeddings")
    factors = torch.tensor(rope.get("long_factor" if max_model_len > original else "short_factor"))
    if factors.shape != (rope.rotary_dim // 2,):
        raise UnsupportedModelError(f"longrope needs {rope.rotary_dim // 2} factors, got {tuple(factors.shape)}")
    factor = rope.get("factor") or max_position_embeddings / original
    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    return RotaryTable(1.0 / (factors.float() * rope.theta**exponents), attention_factor)
