"""The operations that a decoder is built of, each coarse enough to be one native call.

An op set owns the form of its linear weights and of its KV cache: both are made and used by it alone. It knows
tensors and one step's layout, and no model family. Activations are [num_tokens, features] in the model's dtype.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine_svc.model.interface import ForwardBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class NormWeight:
    """An RMS norm: float32 weight [features] with any offset added already, and its epsilon."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What attention in one layer does. `rope` is the index of its rotary embedding.

    With `qk_norm_per_head` the norms run over each head, else over all heads together.
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: int = 0
    sliding_window: int | None = None
    soft_cap: float | None = None
    q_norm: NormWeight | None = None
    k_norm: NormWeight | None = None
    qk_norm_per_head: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheShape:
    """Size of a KV cache of equal layers."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Inverse frequencies [rotary_dim / 2] float32 and the factor on cosine and sine."""

    inv_freq: torch.Tensor
    attention_factor: float

    def to(self, device: torch.device) -> "RotaryTable":
        """The same on a device."""
        return RotaryTable(self.inv_freq.to(device), self.attention_factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """One layer: packed products of the op set, norms, and what its attention does."""

    pre_attention: NormWeight | None
    qkv: Any
    attention: AttentionSpec
    output: Any
    post_attention: NormWeight | None
    pre_mlp: NormWeight | None
    gate_up: Any
    down: Any
    post_mlp: NormWeight | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderParts:
    """A whole decoder. `embedding` is [vocab_size, hidden_size], None when it is the weight of `lm_head`."""

    dtype: torch.dtype
    hidden_size: int
    intermediate_size: int
    activation: str
    embedding_multiplier: float
    residual_multiplier: float
    logit_soft_cap: float | None
    logits_divisor: float
    embedding: torch.Tensor | None
    layers: Sequence[LayerParts]
    norm: NormWeight
    lm_head: Any
    ropes: Sequence[RotaryTable]
    max_model_len: int


class ForwardProgram(Protocol):
    """A decoder that an op set runs by itself."""

    def forward(self, batch: ForwardBatch, kv_cache: Any) -> torch.Tensor:
        """See Model."""

    def hidden_states(self, batch: ForwardBatch, kv_cache: Any) -> torch.Tensor:
        """See Model."""


class Ops(Protocol):
    """An op set."""

    @property
    def name(self) -> str:
        """Name for the log and the numerics fingerprint."""

    @property
    def instruction_set(self) -> str:
        """The version of itself that runs here; empty when it is the device's affair."""

    @property
    def batch_invariant(self) -> bool:
        """Whether a row's results are bit for bit the same in every batch."""

    def pack_linear(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] = ()) -> Any:
        """One product of several weights [out, in], outputs concatenated; biases are all given or none."""

    def linear(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        """Computes x @ weight.T + bias: [num_tokens, in] -> [num_tokens, out]."""

    def rms_norm(self, x: torch.Tensor, norm: NormWeight) -> torch.Tensor:
        """Normalises each row in float32 and rounds once."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: NormWeight
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the norm of residual + x, and that sum."""

    def activation_and_mul(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """activation(gate) * up of [num_tokens, 2 * n]; activation is "silu" or "gelu_tanh"."""

    def allocate_kv_cache(self, shape: KVCacheShape, dtype: torch.dtype, device: torch.device) -> Any:
        """An empty KV cache, zeroed."""

    def begin_step(self, batch: ForwardBatch, ropes: Sequence[RotaryTable], kv_cache: Any) -> Any:
        """What every layer of this step shares: rotary factors, gather indices, masks."""

    def rotary_and_cache(self, qkv: torch.Tensor, spec: AttentionSpec, step: Any) -> torch.Tensor:
        """Norms and rotates queries and keys, writes keys and values to their slots, and returns the queries.

        `qkv` is [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; the result [num_tokens, num_heads, head_dim].
        """

    def paged_attention(self, query: torch.Tensor, spec: AttentionSpec, step: Any) -> torch.Tensor:
        """Causal attention over the block tables: [num_tokens, num_heads * head_dim]."""

    def logits(self, hidden: torch.Tensor, packed: Any, soft_cap: float | None, divisor: float) -> torch.Tensor:
        """Output layer, division and soft cap: float32 [num_rows, vocab_size]."""

    def compile(self, parts: DecoderParts) -> ForwardProgram | None:
        """A forward pass in one call, where the op set has that; None: it is run op by op."""
