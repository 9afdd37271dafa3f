"""Small random checkpoints of every family, written by transformers, with a tokenizer over the same vocabulary.

They answer nonsense, yet each uses every switch of its family: windows shorter than a prompt, shared key-value
heads, soft caps, scaled ropes. Written once a session and folder.
"""

import json
from pathlib import Path
from typing import Any

VOCAB_SIZE = 384
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Large enough that tokens differ clearly in their logits.
    "initializer_range": 0.2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [1.5 + 0.3 * i for i in range(8)],
}
# family: (config class, options over the common ones)
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rope_parameters": _LLAMA3_ROPE}),
    "llama-plain": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", {"sliding_window": 12, "head_dim": 24}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 2}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "gemma2": ("Gemma2Config", {"sliding_window": 12, "head_dim": 32, "query_pre_attn_scalar": 20}),
    "gemma3": (
        "Gemma3TextConfig",
        {"sliding_window": 12, "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window_pattern": 3},
    ),
    "phi3": ("Phi3Config", {"sliding_window": 20}),
    "phi3-longrope": (
        "Phi3Config",
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 48},
    ),
    "granite": (
        "GraniteConfig",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("Olmo2Config", {}),
    "gpt2": ("GPT2Config", {"n_positions": 512}),
    "gpt_neox": ("GPTNeoXConfig", {"rotary_pct": 0.5}),
    # Models that are refused: a recurrent state, attention that cannot be replaced, attention sinks.
    "mamba": ("MambaConfig", {}),
    "bloom": ("BloomConfig", {}),
    "gpt_oss": ("GptOssConfig", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
FAMILIES = tuple(_FAMILIES)
FALLBACK = ("gpt2", "gpt_neox")
REFUSED = ("mamba", "bloom", "gpt_oss")
NATIVE = tuple(family for family in FAMILIES if family not in FALLBACK + REFUSED)


def tiny_checkpoint(family: str, directory: Path, seed: int = 0) -> Path:
    """Writes a random checkpoint of a family under `directory`, once, and returns its folder."""
    folder = directory / f"{family}-{seed}"
    if (folder / "tokenizer.json").is_file():
        return folder
    import torch  # noqa: PLC0415 - heavy
    import transformers  # noqa: PLC0415 - heavy

    class_name, options = _FAMILIES[family]
    config = getattr(transformers, class_name)(**(_COMMON | options))
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        # Norms and biases start as ones and zeros, which would hide whether they are used.
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            del name
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of single bytes, of special tokens 0 to 2, and of fillers up to the vocabulary's size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415 - heavy

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<s>", "</s>"]
    names = [*special, *alphabet]
    names += [f"<unused{i}>" for i in range(VOCAB_SIZE - len(names))]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"})
    )
    tokenizer.save(str(folder / "tokenizer.json"))
