"""Reads a Hugging Face config.json into the switches of the native decoder.

It knows families and their defaults; it knows no tensors and imports no torch. A config that asks for something the
decoder has no switch for raises UnsupportedModelError, so that nothing is ever computed with a feature left out.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shared.errors import StartupError

Json = Mapping[str, Any]


class UnsupportedModelError(Exception):
    """The native decoder cannot run this model; the message is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of a layer: base, rotated share of a head, and scaling parameters by their own names."""

    theta: float
    rope_type: str = "default"
    rotary_dim: int
    parameters: tuple[tuple[str, Any], ...] = ()

    def get(self, name: str, default: Any = None) -> Any:
        """A scaling parameter."""
        return dict(self.parameters).get(name, default)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorms:
    """Names of a layer's norms within its module; None where a family has none at that place."""

    pre_attention: str | None = "input_layernorm"
    post_attention: str | None = None
    pre_mlp: str | None = "post_attention_layernorm"
    post_mlp: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Everything that the native decoder needs to know of a model.

    `layer_windows` holds the sliding window of each layer, None for full attention; `layer_ropes` the index into
    `ropes`. `qk_norm` is "", "head" (over each head) or "all" (over all heads together). With `norm_offset` norms
    multiply by 1 + weight.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    activation: str
    tie_word_embeddings: bool
    ropes: tuple[RopeConfig, ...]
    layer_ropes: tuple[int, ...]
    layer_windows: tuple[int | None, ...]
    attention_scale: float
    norms: LayerNorms = LayerNorms()
    norm_offset: bool = False
    qk_norm: str = ""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    fused_projections: bool = False
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0


_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
_ROPE_TYPES = ("default", "linear", "llama3", "longrope")
_GEMMA_NORMS = LayerNorms(
    pre_attention="input_layernorm",
    post_attention="post_attention_layernorm",
    pre_mlp="pre_feedforward_layernorm",
    post_mlp="post_feedforward_layernorm",
)
_OLMO2_NORMS = LayerNorms(
    pre_attention=None,
    post_attention="post_attention_layernorm",
    pre_mlp=None,
    post_mlp="post_feedforward_layernorm",
)


def _activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(f"activation {name!r} is not supported, only {', '.join(sorted(_ACTIVATIONS))}")
    return _ACTIVATIONS[name]


def _head_dim(config: Json) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _rope(config: Json, parameters: Json | None, theta: float) -> RopeConfig:
    """One rotary embedding from a `rope_parameters` or `rope_scaling` entry, old names and new."""
    values = dict(parameters or {})
    rope_type = values.pop("rope_type", None) or values.pop("type", None) or "default"
    values.pop("type", None)
    if rope_type == "su":
        rope_type = "longrope"
    if rope_type not in _ROPE_TYPES:
        raise UnsupportedModelError(f"rope type {rope_type!r} is not supported, only {', '.join(_ROPE_TYPES)}")
    theta = float(values.pop("rope_theta", None) or config.get("rope_theta") or theta)
    partial = values.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    # Phi-3 keeps the length of its pretraining beside the rope parameters, and that one counts.
    original = config.get("original_max_position_embeddings") or values.get("original_max_position_embeddings")
    values["original_max_position_embeddings"] = original or config["max_position_embeddings"]
    frozen = tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in values.items()))
    return RopeConfig(theta=theta, rope_type=rope_type, rotary_dim=int(_head_dim(config) * partial), parameters=frozen)


def _single_rope(config: Json, theta: float = 10_000.0) -> RopeConfig:
    return _rope(config, config.get("rope_parameters") or config.get("rope_scaling"), theta)


def _base(config: Json, **switches: Any) -> DecoderConfig:
    """The Llama skeleton with a family's switches over it."""
    num_layers = int(config["num_hidden_layers"])
    num_heads = int(config["num_attention_heads"])
    if "ropes" not in switches:
        switches["ropes"] = (_single_rope(config),)
    fields: dict[str, Any] = {
        "model_type": config["model_type"],
        "vocab_size": int(config["vocab_size"]),
        "hidden_size": int(config["hidden_size"]),
        "intermediate_size": int(config["intermediate_size"]),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": int(config.get("num_key_value_heads") or num_heads),
        "head_dim": _head_dim(config),
        "max_position_embeddings": int(config["max_position_embeddings"]),
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "activation": _activation(config.get("hidden_act") or "silu"),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "layer_ropes": (0,) * num_layers,
        "layer_windows": (None,) * num_layers,
        "attention_scale": _head_dim(config) ** -0.5,
    }
    return DecoderConfig(**(fields | switches))


def _windows(config: Json, layer_types: list[str], window: int | None) -> tuple[int | None, ...]:
    """Sliding window of each layer; `layer_types` of the config come before the family's own pattern."""
    names = config.get("layer_types") or layer_types
    unknown = sorted(set(names) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModelError(f"layer type {unknown[0]!r} is not supported")
    if len(names) != int(config["num_hidden_layers"]):
        raise UnsupportedModelError(f"layer_types names {len(names)} layers of {config['num_hidden_layers']}")
    return tuple(window if name == "sliding_attention" else None for name in names)


def _pattern(num_layers: int, period: int) -> list[str]:
    """Every `period`-th layer attends to all, the others through a window."""
    return ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(num_layers)]


def _llama(config: Json) -> DecoderConfig:
    bias = bool(config.get("attention_bias", False))
    return _base(config, qkv_bias=bias, output_bias=bias, mlp_bias=bool(config.get("mlp_bias", False)))


def _mistral(config: Json) -> DecoderConfig:
    window = config.get("sliding_window")
    return _base(config, layer_windows=(window,) * int(config["num_hidden_layers"]))


def _qwen_windows(config: Json) -> tuple[int | None, ...]:
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    first = int(config.get("max_window_layers", 28))
    types = ["sliding_attention" if i >= first else "full_attention" for i in range(config["num_hidden_layers"])]
    return _windows(config, types, window)


def _qwen2(config: Json) -> DecoderConfig:
    return _base(config, qkv_bias=True, layer_windows=_qwen_windows(config))


def _qwen3(config: Json) -> DecoderConfig:
    bias = bool(config.get("attention_bias", False))
    full = {"head_dim": 128, **config}
    return _base(full, qkv_bias=bias, output_bias=bias, qk_norm="head", layer_windows=_qwen_windows(config))


def _gemma_switches(config: Json) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {
        "activation": _activation(config.get("hidden_activation") or "gelu_pytorch_tanh"),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", True)),
        "attention_scale": float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
        "norms": _GEMMA_NORMS,
        "norm_offset": True,
        "qkv_bias": bias,
        "output_bias": bias,
        "embedding_multiplier": math.sqrt(config["hidden_size"]),
    }


def _gemma2(config: Json) -> DecoderConfig:
    full = {"head_dim": 256, "sliding_window": 4096, "max_position_embeddings": 8192, **config}
    switches = _gemma_switches(full)
    switches["layer_windows"] = _windows(full, _pattern(full["num_hidden_layers"], 2), full["sliding_window"])
    switches["attention_soft_cap"] = full.get("attn_logit_softcapping", 50.0)
    switches["logit_soft_cap"] = full.get("final_logit_softcapping", 30.0)
    return _base(full, **switches)


def _gemma3(config: Json) -> DecoderConfig:
    full = {"head_dim": 256, "sliding_window": 4096, "max_position_embeddings": 131_072, **config}
    if full.get("use_bidirectional_attention"):
        raise UnsupportedModelError("bidirectional attention is not supported")
    period = int(full.get("sliding_window_pattern") or full.get("_sliding_window_pattern") or 6)
    windows = _windows(full, _pattern(full["num_hidden_layers"], period), full["sliding_window"])
    nested = full.get("rope_parameters") or {}
    full_rope = nested.get("full_attention") or full.get("rope_scaling")
    local = {**full, "rope_theta": full.get("rope_local_base_freq", 10_000.0)}
    ropes = (_rope(full, full_rope, 1_000_000.0), _rope(local, nested.get("sliding_attention"), 10_000.0))
    switches = _gemma_switches(full)
    switches |= {"layer_windows": windows, "layer_ropes": tuple(int(w is not None) for w in windows), "ropes": ropes}
    return _base(full, qk_norm="head", logit_soft_cap=full.get("final_logit_softcapping"), **switches)


def _phi3(config: Json) -> DecoderConfig:
    full = {"rms_norm_eps": 1e-5, **config}
    windows = (config.get("sliding_window"),) * int(config["num_hidden_layers"])
    return _base(full, fused_projections=True, layer_windows=windows)


def _granite(config: Json) -> DecoderConfig:
    bias = bool(config.get("attention_bias", False))
    return _base(
        config,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        attention_scale=float(config.get("attention_multiplier", 1.0)),
        embedding_multiplier=float(config.get("embedding_multiplier", 1.0)),
        residual_multiplier=float(config.get("residual_multiplier", 1.0)),
        logits_divisor=float(config.get("logits_scaling", 1.0)),
    )


def _olmo2(config: Json) -> DecoderConfig:
    bias = bool(config.get("attention_bias", False))
    full = {"rms_norm_eps": 1e-5, **config}
    return _base(full, qkv_bias=bias, output_bias=bias, qk_norm="all", norms=_OLMO2_NORMS)


NATIVE_FAMILIES: Mapping[str, Callable[[Json], DecoderConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "granite": _granite,
    "olmo2": _olmo2,
}


# Largest sizes that are no mistake; what a config asks for is made of them before any weight is looked at.
_LARGEST = {
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "vocab_size": 1 << 28,
    "max_position_embeddings": 1 << 32,
}


def _check_numbers(config: Json) -> None:
    """Raises StartupError for a size or frequency that no model can have; one that is missing is found later."""
    for name, largest in _LARGEST.items():
        value = config.get(name)
        if value is not None and not (type(value) is int and 1 <= value <= largest):
            raise StartupError(f"config.json: {name} must be a whole number in [1, {largest}], got {value!r:.80}")
    ropes = [config.get(name) for name in ("rope_parameters", "rope_scaling")]
    for values in (config, *(rope for rope in ropes if isinstance(rope, dict))):
        theta = values.get("rope_theta")
        if theta is not None and not (isinstance(theta, int | float) and 0 < theta < math.inf):
            raise StartupError(f"config.json: rope_theta must be a finite number above 0, got {theta!r:.80}")


def decoder_config(config: Json) -> DecoderConfig:
    """The decoder's configuration for a config.json.

    Raises UnsupportedModelError when the family or one of its options is unknown or a size is missing, StartupError for
    a number that no model has.
    """
    model_type = config.get("model_type")
    family = NATIVE_FAMILIES.get(str(model_type))
    if family is None:
        raise UnsupportedModelError(f"model type {model_type!r} has no native decoder")
    if config.get("quantization_config"):
        raise UnsupportedModelError("quantised checkpoints are not supported, except GGUF files")
    _check_numbers(config)
    try:
        result = family(config)
    except KeyError as error:
        raise UnsupportedModelError(f"config.json has no {error.args[0]!r}") from None
    if result.num_heads % result.num_kv_heads:
        raise UnsupportedModelError(f"{result.num_heads} heads cannot share {result.num_kv_heads} key-value heads")
    return result
