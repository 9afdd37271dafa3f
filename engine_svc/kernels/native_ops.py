"""The native CPU op set: torch tensors in and out, the kernels in between.

Batch-invariant: every row's sums run in one fixed order, and keys are reduced in parts at fixed positions, whatever
else is in the batch. It serves float32 and bfloat16; what it cannot serve is left to the reference ops before a model
is loaded.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine_svc.kernels import library as c
from engine_svc.kernels.library import Library
from engine_svc.kernels.memory import NativeKVCache, PackedLinear, attention_struct, batch_struct, norm_struct
from engine_svc.kernels.program import ACTIVATIONS, DecoderProgram
from engine_svc.model.interface import ForwardBatch
from engine_svc.model.ops import AttentionSpec, DecoderParts, KVCacheShape, NormWeight, RotaryTable
from engine_svc.model.reference_ops import rotary_factors, rotated_qkv


@dataclass(frozen=True, slots=True)
class NativeStep:
    """One step's shared state. `rotary` is as in the reference ops; `tensors` are what `batch` points to."""

    batch: c.Batch
    tensors: tuple[torch.Tensor, ...]
    rotary: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    cache: NativeKVCache


class NativeOps:
    """Implements engine_svc.model.ops.Ops for one dtype on a CPU."""

    name = "native-cpu"
    batch_invariant = True

    def __init__(self, library: Library) -> None:
        self._library = library

    @property
    def instruction_set(self) -> str:
        """The version of the kernels that runs."""
        return self._library.name

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory for a result, all of which a kernel writes."""
        return torch.empty(shape, dtype=dtype)

    def pack_linear(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] = ()) -> PackedLinear:
        """See Ops."""
        return PackedLinear(self._library, weights, biases)

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """See Ops."""
        x = x.contiguous()
        y = self.empty((len(x), packed.out_features), x.dtype)
        self._library.call("takt_linear", packed.struct, _wide(x), x.data_ptr(), len(x), y.data_ptr())
        return y

    def rms_norm(self, x: torch.Tensor, norm: NormWeight) -> torch.Tensor:
        """See Ops."""
        x = x.contiguous()
        y = self.empty(tuple(x.shape), x.dtype)
        rows, width = x.numel() // x.shape[-1], x.shape[-1]
        self._library.call("takt_rms_norm", _wide(x), x.data_ptr(), norm_struct(norm), rows, width, y.data_ptr())
        return y

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: NormWeight
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Ops."""
        total = residual + x
        return self.rms_norm(total, norm), total

    def activation_and_mul(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """See Ops."""
        gate_up = gate_up.contiguous()
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        y = self.empty((rows, width), gate_up.dtype)
        arguments = (_wide(y), gate_up.data_ptr(), ACTIVATIONS[activation], rows, width, y.data_ptr())
        self._library.call("takt_activation_and_mul", *arguments)
        return y

    def allocate_kv_cache(self, shape: KVCacheShape, dtype: torch.dtype, device: torch.device) -> NativeKVCache:
        """See Ops."""
        del device
        return NativeKVCache(self._library, shape, dtype)

    def begin_step(self, batch: ForwardBatch, ropes: Sequence[RotaryTable], kv_cache: NativeKVCache) -> NativeStep:
        """See Ops."""
        struct, tensors = batch_struct(batch)
        return NativeStep(struct, tensors, rotary_factors(batch.positions, ropes), kv_cache)

    def rotary_and_cache(self, qkv: torch.Tensor, spec: AttentionSpec, step: NativeStep) -> torch.Tensor:
        """See Ops."""
        query, key, value = rotated_qkv(self, qkv, spec, step.rotary[spec.rope])
        key, value = key.contiguous(), value.contiguous()
        cache = step.cache
        arguments = (cache.shape, cache.address, _wide(qkv), spec.layer, step.batch, key.data_ptr(), value.data_ptr())
        self._library.call("takt_store_tokens", *arguments)
        return query

    def paged_attention(self, query: torch.Tensor, spec: AttentionSpec, step: NativeStep) -> torch.Tensor:
        """See Ops."""
        query = query.contiguous()
        output = self.empty(tuple(query.shape), query.dtype)
        cache = step.cache
        arguments = (cache.shape, cache.address, _wide(query), spec.layer, step.batch, attention_struct(spec))
        self._library.call("takt_paged_attention", *arguments, query.data_ptr(), output.data_ptr())
        return output.flatten(1)

    def logits(
        self, hidden: torch.Tensor, packed: PackedLinear, soft_cap: float | None, divisor: float
    ) -> torch.Tensor:
        """See Ops."""
        hidden = hidden.contiguous()
        logits = self.empty((len(hidden), packed.out_features), torch.float32)
        arguments = (packed.struct, _wide(hidden), hidden.data_ptr(), len(hidden), logits.data_ptr())
        self._library.call("takt_logits", *arguments)
        if divisor != 1.0:
            logits /= divisor
        if soft_cap is not None:
            logits = torch.tanh(logits / soft_cap) * soft_cap
        return logits

    def compile(self, parts: DecoderParts) -> DecoderProgram:
        """See Ops: the forward pass in one call."""
        return DecoderProgram(self._library, parts)


def _wide(tensor: torch.Tensor) -> int:
    return int(tensor.dtype is torch.bfloat16)
