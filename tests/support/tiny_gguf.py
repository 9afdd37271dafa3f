"""Writes a small random Llama checkpoint of tiny_models as a GGUF file, in the layout that llama.cpp uses."""

import json
from pathlib import Path

import numpy as np


def write_llama_gguf(checkpoint: Path, path: Path) -> Path:
    """Float32 tensors, a byte-level vocabulary with one merge, and a chat template."""
    import gguf  # noqa: PLC0415 - beside torch only
    from safetensors.numpy import load_file  # noqa: PLC0415 - as above

    config = json.loads((checkpoint / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    vocabulary = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    tokens[-1] = "ab"
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i < 3 else 1 for i in range(len(tokens))])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    names = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output"}
    names |= {f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"}
    names |= {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    top["lm_head.weight"] = "output.weight"
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if name in top:
            writer.add_tensor(top[name], tensor)
            continue
        layer, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
        if part.endswith(("q_proj", "k_proj")):
            # Features that turn together stand side by side, not half a head apart.
            halves = tensor.reshape(heads if part.endswith("q_proj") else kv_heads, 2, -1, tensor.shape[1])
            rows = np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(tensor.shape)
        else:
            rows = tensor
        writer.add_tensor(f"blk.{layer}.{names[part]}.weight", np.ascontiguousarray(rows))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
