"""A decoder as one structure that the kernels run in one call.

Everything that the structure points to is kept here: layers, norms, rotary tables. Invariant: nothing in it changes
after it is made.
"""

import ctypes
import weakref
from typing import Any

import torch

from engine_svc.kernels import library as c
from engine_svc.kernels.library import Library
from engine_svc.kernels.memory import NativeKVCache, attention_struct, batch_struct, norm_struct
from engine_svc.model.interface import ForwardBatch
from engine_svc.model.ops import DecoderParts, LayerParts
from engine_svc.model.reference_ops import rotary_factors

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


class DecoderProgram:
    """Implements engine_svc.model.ops.ForwardProgram."""

    def __init__(self, library: Library, parts: DecoderParts) -> None:
        self._library = library
        self._parts = parts
        self._tables = _rotary_tables(parts)
        ropes = (c.Rope * len(self._tables))(
            *(c.Rope(cos.data_ptr(), sin.data_ptr(), cos.shape[1]) for cos, sin in self._tables)
        )
        layers = (c.Layer * len(parts.layers))(*(_layer(layer) for layer in parts.layers))
        self._kept: tuple[Any, ...] = (ropes, layers)
        embedding = parts.embedding
        self._struct = c.Decoder(
            is_bfloat16=int(parts.dtype is torch.bfloat16),
            hidden=parts.hidden_size,
            intermediate=parts.intermediate_size,
            num_layers=len(parts.layers),
            num_ropes=len(ropes),
            activation=ACTIVATIONS[parts.activation],
            embedding_multiplier=_rounded(parts.embedding_multiplier, parts.dtype),
            residual_multiplier=parts.residual_multiplier,
            embedding=ctypes.pointer(parts.lm_head.struct),
            embedding_rows=None if embedding is None else embedding.data_ptr(),
            lm_head=ctypes.pointer(parts.lm_head.struct),
            norm=norm_struct(parts.norm),
            layers=layers,
            ropes=ropes,
        )
        self._workspace = library.functions.takt_workspace_create()
        weakref.finalize(self, library.functions.takt_workspace_free, self._workspace)

    def forward(self, batch: ForwardBatch, kv_cache: NativeKVCache) -> torch.Tensor:
        """See ForwardProgram."""
        logits = torch.empty((len(batch.logits_indices), self._parts.lm_head.out_features), dtype=torch.float32)
        self._run(batch, kv_cache, logits)
        if self._parts.logits_divisor != 1.0:
            logits /= self._parts.logits_divisor
        if self._parts.logit_soft_cap is not None:
            logits = torch.tanh(logits / self._parts.logit_soft_cap) * self._parts.logit_soft_cap
        return logits

    def hidden_states(self, batch: ForwardBatch, kv_cache: NativeKVCache) -> torch.Tensor:
        """See ForwardProgram."""
        return self._run(batch, kv_cache, None)

    def _run(self, batch: ForwardBatch, kv_cache: NativeKVCache, logits: torch.Tensor | None) -> torch.Tensor:
        struct, tensors = batch_struct(batch)
        hidden = torch.empty((len(batch.logits_indices), self._parts.hidden_size), dtype=self._parts.dtype)
        self._library.call(
            "takt_forward",
            self._struct,
            struct,
            kv_cache.shape,
            kv_cache.address,
            hidden.data_ptr(),
            None if logits is None else logits.data_ptr(),
            self._workspace,
        )
        del tensors
        return hidden


def _layer(layer: LayerParts) -> c.Layer:
    attention = layer.attention
    return c.Layer(
        qkv=ctypes.pointer(layer.qkv.struct),
        output=ctypes.pointer(layer.output.struct),
        gate_up=ctypes.pointer(layer.gate_up.struct),
        down=ctypes.pointer(layer.down.struct),
        pre_attention=norm_struct(layer.pre_attention),
        post_attention=norm_struct(layer.post_attention),
        pre_mlp=norm_struct(layer.pre_mlp),
        post_mlp=norm_struct(layer.post_mlp),
        query=norm_struct(attention.q_norm),
        key=norm_struct(attention.k_norm),
        attention=attention_struct(attention),
        rope=attention.rope,
        norms_per_head=int(attention.qk_norm_per_head),
    )


def _rotary_tables(parts: DecoderParts) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(cos, sin) of each rope at every position, [max_model_len, rotary_dim / 2] float32 of the model's precision."""
    tables = []
    for cos, sin in rotary_factors(torch.arange(parts.max_model_len), parts.ropes):
        half = cos.shape[-1] // 2
        tables.append(tuple(factor[:, 0, :half].to(parts.dtype).float().contiguous() for factor in (cos, sin)))
    return [(cos, sin) for cos, sin in tables]


def _rounded(factor: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(factor, dtype=dtype))
