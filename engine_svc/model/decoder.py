"""The native decoder: one skeleton for the mainstream family, its differences read from a DecoderConfig.

It says in which order the ops run; how they compute is the op set's affair. It does not know files, requests or
sampling. Invariant: the order of float32 operations follows transformers, so that greedy answers are equal.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from engine_svc.core.interfaces import KVCacheSpec, ModelInfo
from engine_svc.model.arch import DecoderConfig
from engine_svc.model.interface import ForwardBatch
from engine_svc.model.ops import AttentionSpec, DecoderParts, KVCacheShape, LayerParts, NormWeight, Ops
from engine_svc.model.rope import rotary_table
from engine_svc.model.weights import Weights


class NativeDecoder:
    """Implements engine_svc.model.interface.Model."""

    def __init__(
        self, config: DecoderConfig, weights: Weights, ops: Ops, info: ModelInfo, *, device: torch.device
    ) -> None:
        """Takes its tensors out of `weights`. Raises StartupError when one does not fit the configuration."""
        self._config = config
        self._ops = ops
        self._info = info
        self._device = device
        self._dtype: torch.dtype = getattr(torch, info.dtype)
        self._ropes = [
            rotary_table(rope, config.max_position_embeddings, info.max_model_len).to(device) for rope in config.ropes
        ]
        builder = _Builder(config, weights, ops)
        self._embedding = weights.take("embed_tokens.weight", (config.vocab_size, config.hidden_size))
        self._layers = [builder.layer(i) for i in range(config.num_layers)]
        self._norm = builder.norm("norm")
        self._output = self._output_layer(weights)
        self._program = ops.compile(self._parts())
        if self._program is not None and config.tie_word_embeddings:
            # The op set reads rows of the output layer's weights instead.
            self._embedding = self._embedding[:0]
        weights.finish(ignore=("lm_head.weight",) if config.tie_word_embeddings else ())

    def _output_layer(self, weights: Weights) -> Any:
        if self._config.tie_word_embeddings:
            return self._ops.pack_linear([self._embedding])
        return self._ops.pack_linear([weights.take("lm_head.weight", tuple(self._embedding.shape))])

    def _parts(self) -> DecoderParts:
        config = self._config
        return DecoderParts(
            dtype=self._dtype,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            activation=config.activation,
            embedding_multiplier=config.embedding_multiplier,
            residual_multiplier=config.residual_multiplier,
            logit_soft_cap=config.logit_soft_cap,
            logits_divisor=config.logits_divisor,
            embedding=None if config.tie_word_embeddings else self._embedding,
            layers=self._layers,
            norm=self._norm,
            lm_head=self._output,
            ropes=self._ropes,
            max_model_len=self._info.max_model_len,
        )

    @property
    def info(self) -> ModelInfo:
        """See Model."""
        return self._info

    @property
    def device(self) -> torch.device:
        """See Model."""
        return self._device

    def kv_cache_specs(self) -> tuple[KVCacheSpec, ...]:
        """One full-attention group: sliding windows are masks over it."""
        config = self._config
        bytes_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * self._dtype.itemsize
        return (KVCacheSpec(num_layers=config.num_layers, bytes_per_token=bytes_per_token),)

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> Any:
        """See Model."""
        config = self._config
        shape = KVCacheShape(
            num_layers=config.num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
        return self._ops.allocate_kv_cache(shape, self._dtype, self._device)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv_cache: Any) -> torch.Tensor:
        """See Model."""
        if self._program is not None:
            return self._program.forward(batch, kv_cache)
        return self.compute_logits(self.hidden_states(batch, kv_cache))

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Model."""
        config = self._config
        return self._ops.logits(hidden, self._output, config.logit_soft_cap, config.logits_divisor)

    @torch.inference_mode()
    def hidden_states(self, batch: ForwardBatch, kv_cache: Any) -> torch.Tensor:
        """See Model."""
        if self._program is not None:
            return self._program.hidden_states(batch, kv_cache)
        ops, config = self._ops, self._config
        step = ops.begin_step(batch, self._ropes, kv_cache)
        residual = functional.embedding(batch.token_ids, self._embedding)
        if config.embedding_multiplier != 1.0:
            residual = residual * torch.tensor(config.embedding_multiplier, dtype=self._dtype, device=self._device)
        # What the last part of a layer adds to the residual stream, until the next norm adds it.
        delta: torch.Tensor | None = None
        for layer in self._layers:
            normed, residual = self._add_norm(delta, residual, layer.pre_attention)
            query = ops.rotary_and_cache(ops.linear(normed, layer.qkv), layer.attention, step)
            delta = ops.linear(ops.paged_attention(query, layer.attention, step), layer.output)
            delta = self._leave(delta, layer.post_attention)
            normed, residual = self._add_norm(delta, residual, layer.pre_mlp)
            hidden = ops.activation_and_mul(ops.linear(normed, layer.gate_up), config.activation)
            delta = self._leave(ops.linear(hidden, layer.down), layer.post_mlp)
        wanted = batch.logits_indices
        normed, _ = self._add_norm(None if delta is None else delta[wanted], residual[wanted], self._norm)
        return normed

    def _add_norm(
        self, delta: torch.Tensor | None, residual: torch.Tensor, norm: NormWeight | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds what is pending to the residual stream; returns (norm of the sum, the sum)."""
        if norm is None:
            residual = residual if delta is None else residual + delta
            return residual, residual
        if delta is None:
            return self._ops.rms_norm(residual, norm), residual
        return self._ops.add_rms_norm(delta, residual, norm)

    def _leave(self, delta: torch.Tensor, norm: NormWeight | None) -> torch.Tensor:
        """The end of attention or MLP, before the residual is added."""
        if norm is not None:
            delta = self._ops.rms_norm(delta, norm)
        if self._config.residual_multiplier != 1.0:
            delta = delta * self._config.residual_multiplier
        return delta


class _Builder:
    """Takes the tensors of layers under their Hugging Face names."""

    def __init__(self, config: DecoderConfig, weights: Weights, ops: Ops) -> None:
        self._config = config
        self._weights = weights
        self._ops = ops

    def norm(self, name: str, size: int | None = None) -> NormWeight:
        """A norm in float32, its offset added."""
        weight = self._weights.take(name + ".weight", (size or self._config.hidden_size,), dtype=torch.float32)
        return NormWeight(weight=weight + 1.0 if self._config.norm_offset else weight, eps=self._config.rms_norm_eps)

    def _optional_norm(self, layer: str, name: str | None) -> NormWeight | None:
        return None if name is None else self.norm(f"{layer}.{name}")

    def linear(self, names: Sequence[str], out_sizes: Sequence[int], in_size: int, *, bias: bool = False) -> Any:
        """One product of several named weights."""
        take = self._weights.take
        weights = [take(f"{name}.weight", (size, in_size)) for name, size in zip(names, out_sizes, strict=True)]
        biases = [take(f"{name}.bias", (size,)) for name, size in zip(names, out_sizes, strict=True) if bias]
        return self._ops.pack_linear(weights, biases)

    def layer(self, index: int) -> LayerParts:
        """Layer `index`."""
        config, name = self._config, f"layers.{index}"
        hidden, inner = config.hidden_size, config.intermediate_size
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attn, mlp = f"{name}.self_attn", f"{name}.mlp"
        if config.fused_projections:
            qkv = self.linear([f"{attn}.qkv_proj"], [query + 2 * kv], hidden)
            gate_up = self.linear([f"{mlp}.gate_up_proj"], [2 * inner], hidden)
        else:
            qkv_names = [f"{attn}.{part}_proj" for part in "qkv"]
            qkv = self.linear(qkv_names, [query, kv, kv], hidden, bias=config.qkv_bias)
            gate_up = self.linear([f"{mlp}.gate_proj", f"{mlp}.up_proj"], [inner, inner], hidden, bias=config.mlp_bias)
        return LayerParts(
            pre_attention=self._optional_norm(name, config.norms.pre_attention),
            qkv=qkv,
            attention=self._attention(index, attn),
            output=self.linear([f"{attn}.o_proj"], [hidden], query, bias=config.output_bias),
            post_attention=self._optional_norm(name, config.norms.post_attention),
            pre_mlp=self._optional_norm(name, config.norms.pre_mlp),
            gate_up=gate_up,
            down=self.linear([f"{mlp}.down_proj"], [hidden], inner, bias=config.mlp_bias),
            post_mlp=self._optional_norm(name, config.norms.post_mlp),
        )

    def _attention(self, index: int, name: str) -> AttentionSpec:
        config = self._config
        q_norm = k_norm = None
        if config.qk_norm:
            per_head = config.qk_norm == "head"
            q_norm = self.norm(f"{name}.q_norm", config.head_dim * (1 if per_head else config.num_heads))
            k_norm = self.norm(f"{name}.k_norm", config.head_dim * (1 if per_head else config.num_kv_heads))
        return AttentionSpec(
            layer=index,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            rope=config.layer_ropes[index],
            sliding_window=config.layer_windows[index],
            soft_cap=config.attention_soft_cap,
            q_norm=q_norm,
            k_norm=k_norm,
            qk_norm_per_head=config.qk_norm != "all",
        )
