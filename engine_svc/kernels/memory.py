"""What the kernels hold for us: packed weights and KV caches; and our values in their structures.

Memory belongs to the object that asked for it and goes with it.
"""

import weakref
from collections.abc import Sequence

import torch

from engine_svc.kernels import library as c
from engine_svc.kernels.library import Library
from engine_svc.model.interface import ForwardBatch
from engine_svc.model.ops import AttentionSpec, KVCacheShape, NormWeight
from shared.errors import StartupError

LANES = 16


class PackedLinear:
    """Weights [n, k] as the kernels hold them, for as long as this object lives."""

    def __init__(self, library: Library, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> None:
        """Copies the weights; raises StartupError when there is no memory for them."""
        self.dtype = weights[0].dtype
        self.out_features = sum(weight.shape[0] for weight in weights)
        self.in_features = int(weights[0].shape[1])
        self._bias = _padded_bias(biases, self.out_features)
        self.struct = c.Linear(n=self.out_features, k=self.in_features)
        self.struct.bias = None if self._bias is None else self._bias.data_ptr()
        wide = int(self.dtype is torch.bfloat16)
        size = library.functions.takt_linear_bytes(self.struct, wide)
        if library.functions.takt_linear_create(self.struct, wide) != 0:
            raise StartupError(f"no memory for {size} bytes of weights")
        weakref.finalize(self, library.functions.takt_linear_free, self.struct.data, size)
        first = 0
        for weight in weights:
            source = weight.contiguous()
            library.call("takt_linear_pack", self.struct, wide, source.data_ptr(), first, len(source))
            first += len(source)


def _padded_bias(biases: Sequence[torch.Tensor], out_features: int) -> torch.Tensor | None:
    if not biases:
        return None
    padded = torch.zeros(-(-out_features // LANES) * LANES, dtype=torch.float32)
    padded[:out_features] = torch.cat([bias.float() for bias in biases])
    return padded


class NativeKVCache:
    """Keys and values of all layers in one piece of memory, whose pages are taken when they are first written."""

    def __init__(self, library: Library, shape: KVCacheShape, dtype: torch.dtype) -> None:
        """Raises StartupError when the system gives no address space."""
        self.shape = c.CacheShape(
            layers=shape.num_layers,
            blocks=shape.num_blocks,
            block_size=shape.block_size,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
        )
        size = library.functions.takt_cache_elements(self.shape) * dtype.itemsize
        self.num_bytes = size
        self.address = library.functions.takt_map(size)
        if self.address is None:
            raise StartupError(f"no memory for {size} bytes of KV cache")
        weakref.finalize(self, library.functions.takt_unmap, self.address, size)


def batch_struct(batch: ForwardBatch) -> tuple[c.Batch, tuple[torch.Tensor, ...]]:
    """The batch in C, and the tensors that must live as long."""
    tensors = tuple(
        tensor.contiguous()
        for tensor in (
            batch.token_ids,
            batch.positions,
            batch.slot_mapping,
            batch.query_start,
            batch.seq_lens,
            batch.block_tables,
            batch.logits_indices,
        )
    )
    struct = c.Batch(
        len(batch.token_ids),
        len(batch.seq_lens),
        batch.block_tables.shape[1],
        len(batch.logits_indices),
        *(tensor.data_ptr() for tensor in tensors),
    )
    return struct, tensors


def attention_struct(spec: AttentionSpec) -> c.Attention:
    """What attention does, in C."""
    return c.Attention(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        window=spec.sliding_window or 0,
        scale=spec.scale,
        soft_cap=spec.soft_cap or 0.0,
    )


def norm_struct(norm: NormWeight | None) -> c.Norm:
    """A norm in C; no norm has a null weight."""
    return c.Norm(None, 0.0) if norm is None else c.Norm(norm.weight.data_ptr(), norm.eps)
