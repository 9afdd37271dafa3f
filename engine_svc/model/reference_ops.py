"""The op set in plain PyTorch, for any device: the oracle of the native ones.

Not batch-invariant: products and attention may round differently with the shape of a batch. Invariant: a sequence's
result never depends on what stale blocks, padding or other sequences hold, not even on NaN in them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from engine_svc.model.interface import ForwardBatch
from engine_svc.model.kv_memory import zeroed
from engine_svc.model.ops import AttentionSpec, DecoderParts, KVCacheShape, NormWeight, Ops, RotaryTable
from engine_svc.model.reference_attention import AttentionPlan, attend, make_plan


@dataclass(frozen=True, slots=True)
class PagedKVCache:
    """Keys and values: each [num_layers, num_blocks, block_size, num_kv_heads, head_dim]."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.keys.shape[2]


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """One step's shared state. `rotary` holds (cos, sin), [num_tokens, 1, rotary_dim] float32, of each rope."""

    slot_mapping: torch.Tensor
    rotary: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    plan: AttentionPlan
    cache: PagedKVCache


class ReferenceOps:
    """Implements engine_svc.model.ops.Ops."""

    name = "reference"
    instruction_set = ""
    batch_invariant = False

    def pack_linear(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] = ()) -> Any:
        """A (weight, bias) pair; a single weight is used where it lies, without a copy."""
        weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        if not biases:
            return weight, None
        return weight, biases[0] if len(biases) == 1 else torch.cat(list(biases))

    def linear(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        """See Ops."""
        return functional.linear(x, packed[0], packed[1])

    def rms_norm(self, x: torch.Tensor, norm: NormWeight) -> torch.Tensor:
        """See Ops."""
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
        return (wide * scale * norm.weight).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: NormWeight
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Ops."""
        total = residual + x
        return self.rms_norm(total, norm), total

    def activation_and_mul(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """See Ops."""
        gate, up = gate_up.chunk(2, dim=-1)
        if activation == "silu":
            return functional.silu(gate) * up
        return functional.gelu(gate, approximate="tanh") * up

    def allocate_kv_cache(self, shape: KVCacheShape, dtype: torch.dtype, device: torch.device) -> PagedKVCache:
        """See Ops."""
        size = (shape.num_layers, shape.num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        return PagedKVCache(*(zeroed(size, dtype, device) for _ in range(2)))

    def begin_step(self, batch: ForwardBatch, ropes: Sequence[RotaryTable], kv_cache: PagedKVCache) -> ReferenceStep:
        """See Ops."""
        rotary = rotary_factors(batch.positions, ropes)
        return ReferenceStep(batch.slot_mapping, rotary, make_plan(batch, kv_cache.block_size), kv_cache)

    def rotary_and_cache(self, qkv: torch.Tensor, spec: AttentionSpec, step: ReferenceStep) -> torch.Tensor:
        """See Ops."""
        query, key, value = rotated_qkv(self, qkv, spec, step.rotary[spec.rope])
        store_kv(step, spec.layer, key, value)
        return query

    def paged_attention(self, query: torch.Tensor, spec: AttentionSpec, step: ReferenceStep) -> torch.Tensor:
        """See Ops."""
        cache = step.cache
        return attend(query, cache.keys[spec.layer], cache.values[spec.layer], spec, step.plan).flatten(1)

    def logits(self, hidden: torch.Tensor, packed: Any, soft_cap: float | None, divisor: float) -> torch.Tensor:
        """See Ops."""
        logits = self.linear(hidden, packed).float()
        if divisor != 1.0:
            logits = logits / divisor
        if soft_cap is not None:
            logits = torch.tanh(logits / soft_cap) * soft_cap
        return logits

    def compile(self, parts: DecoderParts) -> None:
        """See Ops: the decoder calls op by op."""


def rotary_factors(
    positions: torch.Tensor, ropes: Sequence[RotaryTable]
) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """(cos, sin) of each rope at [num_tokens] positions, each [num_tokens, 1, rotary_dim] float32."""
    rotary = []
    for rope in ropes:
        angles = positions.to(torch.float32).unsqueeze(-1) * rope.inv_freq
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
        rotary.append((angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor))
    return tuple(rotary)


def rotated_qkv(
    ops: Ops, qkv: torch.Tensor, spec: AttentionSpec, factors: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys, normed and rotated, and values, each [num_tokens, heads, head_dim]."""
    widths = [spec.num_heads * spec.head_dim, *([spec.num_kv_heads * spec.head_dim] * 2)]
    query, key, value = torch.split(qkv, widths, dim=-1)
    cos, sin = (factor.to(qkv.dtype) for factor in factors)
    query = _rotate(_normed_heads(ops, query, spec.q_norm, spec), cos, sin)
    return query, _rotate(_normed_heads(ops, key, spec.k_norm, spec), cos, sin), _heads(value, spec)


def _normed_heads(ops: Ops, x: torch.Tensor, norm: NormWeight | None, spec: AttentionSpec) -> torch.Tensor:
    """Splits [num_tokens, heads * head_dim] into heads, normed before or after as the family does."""
    if norm is None:
        return _heads(x, spec)
    if spec.qk_norm_per_head:
        return ops.rms_norm(_heads(x, spec), norm)
    return _heads(ops.rms_norm(x, norm), spec)


def _heads(x: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    return x.reshape(x.shape[0], -1, spec.head_dim)


def store_kv(step: ReferenceStep, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Writes [num_tokens, num_kv_heads, head_dim] keys and values of a layer to the step's slots."""
    for cache, new in ((step.cache.keys, key), (step.cache.values, value)):
        cache[layer].flatten(0, 1).index_copy_(0, step.slot_mapping, new)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first rotary_dim features of each head, halves paired; the rest passes."""
    rotary_dim = cos.shape[-1]
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
