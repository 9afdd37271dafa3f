"""Reads GGUF files: metadata into a config.json, tensors dequantised under Hugging Face names.

It knows the architectures llama and gemma3 and refuses others. Rows of query and key weights, which llama GGUF files
hold in another order, are put back; norms of Gemma, which they hold with 1 added, have it taken off again.
"""

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from engine_svc.model.checkpoint import file_digest, publish
from engine_svc.model.resolve import model_cache
from engine_svc.model.tokenizer_files import write_small_files
from shared.errors import StartupError

logger = logging.getLogger(__name__)

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
}
_LLAMA_PARTS = _LAYER_PARTS | {"ffn_norm": "post_attention_layernorm"}
_GEMMA3_PARTS = _LAYER_PARTS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_PARTS = {"llama": _LLAMA_PARTS, "gemma3": _GEMMA3_PARTS}
# Names that chat models end a turn with, beside the end token that the file names.
_END_OF_TURN = ("<|im_end|>", "<end_of_turn>", "<|eot_id|>")


class GgufFile:
    """An open GGUF file of a supported architecture."""

    def __init__(self, path: Path) -> None:
        """Reads the metadata. Raises StartupError when the file is broken or its architecture is not supported."""
        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
            self._check_length()
        except (ValueError, OSError, IndexError, KeyError, OverflowError) as error:
            reason = " ".join(str(error).split())[:160]
            raise StartupError(f"{path} is no whole GGUF file: {reason}") from None
        self.architecture = str(self._field("general.architecture"))
        if self.architecture not in _PARTS:
            known = ", ".join(sorted(_PARTS))
            raise StartupError(f"{path} has architecture {self.architecture!r}; supported in GGUF: {known}")

    def _check_length(self) -> None:
        size = self.path.stat().st_size
        for tensor in self._reader.tensors:
            if tensor.data_offset + tensor.n_bytes > size:
                raise ValueError(f"tensor {tensor.name} ends past the end of the file")

    def _field(self, name: str, default: Any = None) -> Any:
        field = self._reader.get_field(name)
        return default if field is None else field.contents()

    def _size(self, name: str, default: Any = None) -> Any:
        value = self._field(f"{self.architecture}.{name}", default)
        if value is None:
            raise StartupError(f"{self.path} names no {self.architecture}.{name}")
        return value

    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        names = {tensor.name: tensor for tensor in self._reader.tensors}
        if "token_embd.weight" not in names:
            raise StartupError(f"{self.path} has no tensor token_embd.weight")
        num_heads, hidden_size = int(self._size("attention.head_count")), int(self._size("embedding_length"))
        config: dict[str, Any] = {
            "vocab_size": int(names["token_embd.weight"].shape[1]),
            "hidden_size": hidden_size,
            "intermediate_size": int(self._size("feed_forward_length")),
            "num_hidden_layers": int(self._size("block_count")),
            "num_attention_heads": num_heads,
            "num_key_value_heads": int(self._size("attention.head_count_kv", num_heads)),
            "max_position_embeddings": int(self._size("context_length")),
            "rms_norm_eps": _shortest(self._size("attention.layer_norm_rms_epsilon")),
            "rope_theta": _shortest(self._size("rope.freq_base", 10_000.0)),
            "tie_word_embeddings": "output.weight" not in names,
            "bos_token_id": self._field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._field("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self._field("tokenizer.ggml.padding_token_id"),
        }
        if self.architecture == "gemma3":
            return config | self._gemma3_config()
        return config | self._llama_config(hidden_size // num_heads)

    def _llama_config(self, head_dim: int) -> dict[str, Any]:
        if self._field("llama.rope.scaling.type", "none") != "none" or "rope_freqs.weight" in self._hf_names(all_=True):
            raise StartupError(f"{self.path} scales its rotary embedding, which is not supported in GGUF files")
        if self._field("llama.expert_count", 0):
            raise StartupError(f"{self.path} is a mixture of experts, which is not supported in GGUF files")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "head_dim": int(self._field("llama.rope.dimension_count", head_dim)),
        }

    def _gemma3_config(self) -> dict[str, Any]:
        return {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "head_dim": int(self._size("attention.key_length")),
            # The scale that llama.cpp uses for every size but the largest: by the size of a head.
            "query_pre_attn_scalar": int(self._size("attention.key_length")),
            "sliding_window": int(self._size("attention.sliding_window")),
            "sliding_window_pattern": 6,
            "rope_local_base_freq": 10_000.0,
        }

    def generation_config(self) -> dict[str, Any]:
        """The contents of generation_config.json: the end token first, then the ends of a turn."""
        eos = self._field("tokenizer.ggml.eos_token_id")
        tokens = self._field("tokenizer.ggml.tokens", [])
        turns = [i for i, token in enumerate(tokens) if token in _END_OF_TURN]
        if self._field("tokenizer.chat_template") is None:
            turns = []
        ids = list(dict.fromkeys([*([] if eos is None else [int(eos)]), *turns]))
        known = {"bos_token_id": self._field("tokenizer.ggml.bos_token_id"), "eos_token_id": ids or None}
        return {name: value for name, value in known.items() if value is not None}

    def chat_template(self) -> str | None:
        """The chat template, where the file has one."""
        template = self._field("tokenizer.chat_template")
        return None if template is None else str(template)

    def _hf_names(self, *, all_: bool = False) -> dict[str, Any]:
        """Tensors by Hugging Face name; with all_, those without one by their own."""
        found = {}
        for tensor in self._reader.tensors:
            name = self._hf_name(tensor.name)
            if name is None and not all_:
                raise StartupError(f"{self.path} has a tensor {tensor.name} that {self.architecture} models lack")
            found[name or tensor.name] = tensor
        return found

    def _hf_name(self, name: str) -> str | None:
        if name in _TOP_LEVEL:
            return _TOP_LEVEL[name]
        parts = name.split(".")
        part = _PARTS[self.architecture].get(parts[2]) if len(parts) == 4 and parts[0] == "blk" else None
        return part and f"model.layers.{parts[1]}.{part}.{parts[3]}"

    def tensors(self) -> dict[str, Any]:
        """Tensors of the file by Hugging Face name. Raises StartupError for one that has none."""
        return self._hf_names()

    def dequantise(self, name: str, tensor: Any) -> torch.Tensor:
        """A tensor in float32, in the order and form of a Hugging Face checkpoint."""
        try:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise StartupError(f"tensor {tensor.name} of {self.path} cannot be dequantised: {error}") from None
        values = np.ascontiguousarray(values, dtype=np.float32)
        if self.architecture == "gemma3" and values.ndim == 1:
            values = values - 1
        if self.architecture == "llama" and ".self_attn.q_proj." in name:
            values = _halves_paired(values, int(self._size("attention.head_count")))
        if self.architecture == "llama" and ".self_attn.k_proj." in name:
            values = _halves_paired(values, int(self._size("attention.head_count_kv")))
        # A copy where nothing was computed: the file's own memory is read-only.
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    def small_files_folder(self, progress: Callable[[str, float], None] | None = None) -> Path:
        """The folder with the tokenizer and configs of this file: its own where it has them, else one in the cache."""
        if (self.path.parent / "tokenizer.json").is_file():
            return self.path.parent
        folder = model_cache() / f"gguf-{file_digest(self.path)[:16]}"
        if (folder / "tokenizer.json").is_file():
            return folder
        if progress is not None:
            progress("Converting the tokenizer", 0.0)
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            write_small_files(self, temporary)
            publish(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return folder


class GgufSource:
    """Implements engine_svc.model.weights.WeightSource over a GGUF file."""

    def __init__(self, file: GgufFile) -> None:
        """Reads no tensor yet."""
        self._file = file
        self._tensors = file.tensors()

    def names(self) -> Iterable[str]:
        """See WeightSource."""
        return self._tensors.keys()

    def load(self, name: str) -> torch.Tensor:
        """See WeightSource."""
        return self._file.dequantise(name, self._tensors[name])


def _halves_paired(values: "np.ndarray[Any, Any]", num_heads: int) -> "np.ndarray[Any, Any]":
    """Undoes the order that pairs neighbouring features of a head: [even, odd, ...] back to halves."""
    features = values.shape[0] // num_heads // 2
    pairs = values.reshape(num_heads, features, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))


def _shortest(value: Any) -> float:
    """The float of a float32 that was written as 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
