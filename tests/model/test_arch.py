"""Reading config.json: the defaults of each family, old and new key names, and what is refused."""

import math
import sys
from typing import Any

import pytest

from engine_svc.model.arch import DecoderConfig, UnsupportedModelError, decoder_config
from shared.errors import StartupError

SIZES = {
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
# Configs as older checkpoints on the Hub have them.
OLD_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
    "llama-3.1": {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "llama-linear": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}},
    "mistral": {"model_type": "mistral", "sliding_window": 128, "rope_theta": 1e6},
    "qwen2": {"model_type": "qwen2", "rope_theta": 1e6, "use_sliding_window": False, "sliding_window": 131072},
    "qwen2-window": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 6},
    "qwen3": {"model_type": "qwen3", "head_dim": 128, "rope_theta": 1e6, "tie_word_embeddings": True},
    "gemma2": {"model_type": "gemma2", "head_dim": 256, "query_pre_attn_scalar": 144, "sliding_window": 256},
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 256,
        "sliding_window": 256,
        "rope_theta": 1e6,
        "rope_local_base_freq": 5000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 4,
    },
    "phi3": {"model_type": "phi3", "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75},
    "granite": {"model_type": "granite", "attention_multiplier": 0.1, "logits_scaling": 8, "residual_multiplier": 0.2},
    "olmo2": {"model_type": "olmo2"},
}


@pytest.mark.model
@pytest.mark.parametrize("name", OLD_CONFIGS)
def test_old_and_new_configs_mean_the_same(name: str) -> None:
    """transformers fills every default and renames keys; what is read from its output must not change."""
    from transformers import AutoConfig  # noqa: PLC0415 - heavy

    old = SIZES | OLD_CONFIGS[name]
    new = AutoConfig.for_model(**old).to_dict()
    assert _comparable(decoder_config(old)) == _comparable(decoder_config(new))


def _comparable(config: DecoderConfig) -> dict[str, Any]:
    values = {name: getattr(config, name) for name in DecoderConfig.__slots__}
    relevant = {"factor", "low_freq_factor", "high_freq_factor", "short_factor", "long_factor"}
    values["ropes"] = [
        (r.theta, r.rope_type, r.rotary_dim, [p for p in r.parameters if p[0] in relevant]) for r in config.ropes
    ]
    return values


def test_families_differ_where_they_should() -> None:
    gemma3 = decoder_config(SIZES | OLD_CONFIGS["gemma3"])
    assert gemma3.layer_windows == (256, 256, 256, None) * 3
    assert gemma3.layer_ropes == (1, 1, 1, 0) * 3
    assert [rope.theta for rope in gemma3.ropes] == [1e6, 5000.0]
    assert gemma3.norm_offset
    assert gemma3.embedding_multiplier == 512**0.5
    gemma2 = decoder_config(SIZES | OLD_CONFIGS["gemma2"])
    assert (gemma2.attention_soft_cap, gemma2.logit_soft_cap) == (50.0, 30.0)
    assert gemma2.layer_windows == (256, None) * 6
    assert gemma2.attention_scale == 144**-0.5
    assert decoder_config(SIZES | OLD_CONFIGS["qwen2-window"]).layer_windows == (None,) * 6 + (64,) * 6
    assert decoder_config(SIZES | OLD_CONFIGS["phi3"]).ropes[0].rotary_dim == 48
    assert decoder_config(SIZES | OLD_CONFIGS["mistral"]).layer_windows == (128,) * 12


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "mamba"}, "'mamba' has no native decoder"),
        ({"hidden_act": "relu"}, "activation 'relu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"num_key_value_heads": 3}, "8 heads cannot share 3"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised checkpoints"),
        ({"model_type": "qwen2", "layer_types": ["linear_attention"] * 12}, "layer type 'linear_attention'"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "names 1 layers of 12"),
    ],
)
def test_what_has_no_switch_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        decoder_config(SIZES | {"model_type": "llama"} | change)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers must be a whole number in \[1, 4096\], got 1000000000"),
        ({"num_hidden_layers": -1}, "got -1"),
        ({"num_attention_heads": 0}, "num_attention_heads must be"),
        ({"hidden_size": "x"}, "hidden_size must be a whole number in .*, got 'x'"),
        ({"vocab_size": 10**12}, "vocab_size must be"),
        ({"vocab_size": 1.5}, "got 1.5"),
        ({"max_position_embeddings": True}, "got True"),
        ({"rope_theta": math.nan}, "rope_theta must be a finite number above 0, got nan"),
        ({"rope_theta": "x"}, "rope_theta must be"),
        ({"rope_parameters": {"rope_theta": -5}}, "rope_theta must be .*, got -5"),
    ],
)
def test_a_number_that_no_model_has_is_refused_by_name(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(StartupError, match=reason):
        decoder_config(SIZES | {"model_type": "llama"} | change)


def test_a_missing_size_is_named() -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "intermediate_size"}
    with pytest.raises(UnsupportedModelError, match="no 'intermediate_size'"):
        decoder_config(sizes | {"model_type": "llama"})


def test_reading_a_config_needs_no_torch() -> None:
    import subprocess  # noqa: PLC0415 - this test only

    code = "import sys; sys.modules['torch'] = None; import engine_svc.model.arch, engine_svc.model.resolve"
    code += ", engine_svc.model.checkpoint, engine_svc.model.convert"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
