"""Weights by name, checked as they are taken.

A WeightSource hands out tensors on the host; Weights checks names and shapes, converts to the model's dtype and
device, and in the end that nothing was left over: a tensor nobody asked for means a feature nobody computes.
Tensors of safetensors files are views of the mapped file and are copied only when dtype or device differ.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from shared.errors import StartupError

INDEX_FILE = "model.safetensors.index.json"
# Derived values that old checkpoints carry along.
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"


class WeightSource(Protocol):
    """Tensors of one checkpoint."""

    def names(self) -> Iterable[str]:
        """Every tensor."""

    def load(self, name: str) -> torch.Tensor:
        """A tensor on the host. Raises StartupError when it cannot be read."""


def safetensors_files(folder: Path) -> list[Path]:
    """The weight files of a folder, in name order; an index decides where there is one.

    Raises StartupError when there is none, or one that the index names is missing.
    """
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            files = sorted({folder / str(name) for name in json.loads(index.read_text())["weight_map"].values()})
        except (ValueError, KeyError, AttributeError, TypeError):
            raise StartupError(f"{index} is no valid index of weight files") from None
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise StartupError(f"{folder} has no .safetensors files")
    for file in files:
        if not file.is_file():
            raise StartupError(f"weight file {file} is missing")
    return files


class SafetensorsSource:
    """Tensors of the safetensors files of a folder; files stay mapped while their tensors live."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Reads the headers. Raises StartupError for a file that is not whole."""
        self._files: dict[str, tuple[Path, Any]] = {}
        for path in files:
            try:
                handle: Any = safe_open(path, framework="pt", device="cpu")
                names = list(handle.keys())
            except (SafetensorError, OSError) as error:
                raise StartupError(f"weight file {path} is corrupt or cut short: {_one_line(error)}") from None
            for name in names:
                if name in self._files:
                    raise StartupError(f"tensor {name} is in both {self._files[name][0]} and {path}")
                self._files[name] = (path, handle)

    def names(self) -> Iterable[str]:
        """See WeightSource."""
        return self._files.keys()

    def load(self, name: str) -> torch.Tensor:
        """See WeightSource."""
        path, handle = self._files[name]
        try:
            tensor: torch.Tensor = handle.get_tensor(name)
        except (SafetensorError, RuntimeError, OSError) as error:
            raise StartupError(f"tensor {name} of {path} cannot be read: {_one_line(error)}") from None
        return tensor


class Weights:
    """Takes tensors out of a source under the names of a decoder."""

    def __init__(
        self,
        source: WeightSource,
        *,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        """`progress` is told the share of tensors taken, in [0, 1]."""
        self._source = source
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._left = set(source.names())
        self._num_tensors = max(1, len(self._left))
        # Some checkpoints of the bare decoder lack the prefix of the causal model around it.
        self._prefix = "" if "embed_tokens.weight" in self._left else "model."

    def __contains__(self, name: str) -> bool:
        return self._full_name(name) in self._left

    def _full_name(self, name: str) -> str:
        return name if name.startswith("lm_head.") else self._prefix + name

    def take(self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor of this name without the prefix "model.".

        Raises StartupError when it is missing, of another shape, not of floating point, or taken before.
        """
        full_name = self._full_name(name)
        if full_name not in self._left:
            raise StartupError(f"the checkpoint has no tensor {full_name}")
        self._left.remove(full_name)
        tensor = self._source.load(full_name)
        if tuple(tensor.shape) != shape:
            raise StartupError(f"tensor {full_name} has shape {list(tensor.shape)}, the config asks for {list(shape)}")
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise StartupError(f"tensor {full_name} is of type {tensor.dtype}, which is not supported")
        if self._progress is not None:
            self._progress(1 - len(self._left) / self._num_tensors)
        return tensor.to(device=self._device, dtype=dtype or self._dtype)

    def finish(self, *, ignore: Iterable[str] = ()) -> None:
        """Raises StartupError when tensors were left over that are no known duplicates."""
        left = [n for n in self._left if not n.endswith(_IGNORED_SUFFIX) and n not in set(ignore)]
        if left:
            raise StartupError(f"{len(left)} tensors of the checkpoint have no place in the model, first {min(left)}")


class MemorySource:
    """Tensors that are in memory already."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keeps a reference, no copy."""
        self._tensors = tensors

    def names(self) -> Iterable[str]:
        """See WeightSource."""
        return self._tensors.keys()

    def load(self, name: str) -> torch.Tensor:
        """See WeightSource."""
        return self._tensors[name]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
