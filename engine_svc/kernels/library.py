"""The C interface of the kernels in ctypes: structures and functions of csrc/kernels.cpp, and one loaded library.

Calls through ctypes let go of the interpreter's lock. Knows no tensors: callers pass addresses and keep what they point
to alive. Invariant: the fields here are those of csrc, in their order.
"""

import ctypes
from ctypes import POINTER, Structure, c_float, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any, ClassVar

from engine_svc.kernels.build import BuildError

ABI_VERSION = 1


class Linear(Structure):
    """Packed weights [n, k]."""

    _fields_: ClassVar[Any] = [("n", c_int), ("k", c_int), ("data", c_void_p), ("bias", c_void_p)]


class Norm(Structure):
    """Weight [n] float32, null where there is no norm, and epsilon."""

    _fields_: ClassVar[Any] = [("weight", c_void_p), ("eps", c_float)]


class CacheShape(Structure):
    """Size of a KV cache."""

    _fields_: ClassVar[Any] = [
        ("layers", c_int),
        ("blocks", c_int),
        ("block_size", c_int),
        ("kv_heads", c_int),
        ("head_dim", c_int),
    ]


class Batch(Structure):
    """Sizes and addresses of a ForwardBatch."""

    _fields_: ClassVar[Any] = [
        ("num_tokens", c_int),
        ("num_seqs", c_int),
        ("max_blocks", c_int),
        ("num_logits", c_int),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("query_start", c_void_p),
        ("seq_lens", c_void_p),
        ("block_tables", c_void_p),
        ("logits_indices", c_void_p),
    ]


class Attention(Structure):
    """What attention does in a layer; window and soft cap 0 are none."""

    _fields_: ClassVar[Any] = [
        ("num_heads", c_int),
        ("num_kv_heads", c_int),
        ("head_dim", c_int),
        ("window", c_int),
        ("scale", c_float),
        ("soft_cap", c_float),
    ]


class Rope(Structure):
    """Cosines and sines [positions, half] float32."""

    _fields_: ClassVar[Any] = [("cosine", c_void_p), ("sine", c_void_p), ("half", c_int)]


class Layer(Structure):
    """One layer of a decoder."""

    _fields_: ClassVar[Any] = [
        ("qkv", POINTER(Linear)),
        ("output", POINTER(Linear)),
        ("gate_up", POINTER(Linear)),
        ("down", POINTER(Linear)),
        ("pre_attention", Norm),
        ("post_attention", Norm),
        ("pre_mlp", Norm),
        ("post_mlp", Norm),
        ("query", Norm),
        ("key", Norm),
        ("attention", Attention),
        ("rope", c_int),
        ("norms_per_head", c_int),
    ]


class Decoder(Structure):
    """A whole decoder."""

    _fields_: ClassVar[Any] = [
        ("is_bfloat16", c_int),
        ("hidden", c_int),
        ("intermediate", c_int),
        ("num_layers", c_int),
        ("num_ropes", c_int),
        ("activation", c_int),
        ("embedding_multiplier", c_float),
        ("residual_multiplier", c_float),
        ("embedding", POINTER(Linear)),
        ("embedding_rows", c_void_p),
        ("lm_head", POINTER(Linear)),
        ("norm", Norm),
        ("layers", POINTER(Layer)),
        ("ropes", POINTER(Rope)),
    ]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "takt_abi_version": (c_int, []),
    "takt_start_threads": (None, [c_int]),
    "takt_linear_create": (c_int, [POINTER(Linear), c_int]),
    "takt_linear_free": (None, [c_void_p, c_size_t]),
    "takt_linear_bytes": (c_size_t, [POINTER(Linear), c_int]),
    "takt_linear_pack": (c_int, [POINTER(Linear), c_int, c_void_p, c_int, c_int]),
    "takt_linear": (c_int, [POINTER(Linear), c_int, c_void_p, c_int, c_void_p]),
    "takt_logits": (c_int, [POINTER(Linear), c_int, c_void_p, c_int, c_void_p]),
    "takt_row_max": (c_int, [c_void_p, c_int, c_int, c_void_p, c_void_p]),
    "takt_map": (c_void_p, [c_size_t]),
    "takt_unmap": (None, [c_void_p, c_size_t]),
    "takt_cache_elements": (c_size_t, [POINTER(CacheShape)]),
    "takt_store_tokens": (
        c_int,
        [POINTER(CacheShape), c_void_p, c_int, c_int, POINTER(Batch), c_void_p, c_void_p],
    ),
    "takt_paged_attention": (
        c_int,
        [POINTER(CacheShape), c_void_p, c_int, c_int, POINTER(Batch), POINTER(Attention), c_void_p, c_void_p],
    ),
    "takt_rms_norm": (c_int, [c_int, c_void_p, POINTER(Norm), c_int, c_int, c_void_p]),
    "takt_activation_and_mul": (c_int, [c_int, c_void_p, c_int, c_int, c_int, c_void_p]),
    "takt_workspace_create": (c_void_p, []),
    "takt_workspace_free": (None, [c_void_p]),
    "takt_forward": (
        c_int,
        [
            POINTER(Decoder),
            POINTER(Batch),
            POINTER(CacheShape),
            c_void_p,
            c_void_p,
            c_void_p,
            c_void_p,
        ],
    ),
}


class Library:
    """A loaded library. `call` runs a function of it that says whether memory sufficed."""

    def __init__(self, path: Path, name: str, num_threads: int) -> None:
        """Loads the file and starts its threads. Raises BuildError when it is not what this version knows."""
        try:
            self.functions: Any = ctypes.CDLL(str(path))
            for function, (result, arguments) in _SIGNATURES.items():
                entry = getattr(self.functions, function)
                entry.restype, entry.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise BuildError(f"{path} cannot be loaded: {error}") from None
        if self.functions.takt_abi_version() != ABI_VERSION:
            raise BuildError(f"{path} is of another version")
        self.name = name
        self.functions.takt_start_threads(num_threads)

    def call(self, function: str, *arguments: Any) -> None:
        """Raises MemoryError when the kernels get no memory."""
        if getattr(self.functions, function)(*arguments) != 0:
            raise MemoryError(f"{function} got no memory")
