"""Loads a model: resolves the name, picks dtype, op set and decoder, and reads the weights.

Each choice is made once, here, and logged. Models of the native families never import transformers. Anything that
keeps a model from starting is one StartupError of one line.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine_svc.core.interfaces import ModelInfo
from engine_svc.model.arch import UnsupportedModelError, decoder_config
from engine_svc.model.checkpoint import eos_token_ids, read_json, tokenizer_digest, weights_digest
from engine_svc.model.decoder import NativeDecoder
from engine_svc.model.fallback import load_fallback
from engine_svc.model.hardware import choose_device, choose_dtype, instruction_set
from engine_svc.model.interface import Model
from engine_svc.model.op_sets import OpsWanted, choose_ops
from engine_svc.model.ops import Ops
from engine_svc.model.reference_ops import ReferenceOps
from engine_svc.model.resolve import resolve_model
from engine_svc.model.weights import SafetensorsSource, Weights, WeightSource, safetensors_files
from shared.errors import StartupError
from shared.types import NumericsFingerprint

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What to load and how.

    `model` is a folder, a GGUF file, an embedded model or a Hub name. `progress` is told what is being done and the
    share done, in [0, 1].
    """

    model: str
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    load_format: str = "auto"
    max_model_len: int | None = None
    ops: str = "auto"
    progress: Callable[[str, float], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint on disk. `folder` holds its small files, `dtype` names the type its weights are stored in."""

    folder: Path
    config: dict[str, Any]
    files: list[Path]
    dtype: str
    source: Callable[[], WeightSource]


def load_model(options: LoadOptions) -> Model:
    """Loads a model onto its device.

    Raises StartupError when it does not exist, is broken, or can be run neither natively nor through transformers.
    """
    device = choose_device(options.device)
    checkpoint = _open_checkpoint(options)
    try:
        config = decoder_config(checkpoint.config)
    except UnsupportedModelError as error:
        logger.info("No native decoder (%s): trying transformers.", error)
        dtype = choose_dtype(options.dtype, checkpoint.dtype, device)

        def make_info() -> ModelInfo:
            return _model_info(options, checkpoint, ReferenceOps(), dtype, device)

        return load_fallback(checkpoint.folder, make_info, device, native_reason=str(error))
    wanted = OpsWanted(name=options.ops, dtype=options.dtype, report=options.progress)
    ops, dtype = choose_ops(wanted, config, checkpoint.dtype, device)
    info = _model_info(options, checkpoint, ops, dtype, device)
    weights = Weights(checkpoint.source(), dtype=dtype, device=device, progress=_weight_progress(options))
    try:
        model = NativeDecoder(config, weights, ops, info, device=device)
    except UnsupportedModelError as error:
        raise StartupError(f"model {options.model} cannot be run: {error}") from None
    logger.info(
        "Loaded %s: native %s decoder, %s ops, %s on %s.", options.model, config.model_type, ops.name, dtype, device
    )
    return model


def _weight_progress(options: LoadOptions) -> Callable[[float], None] | None:
    report = options.progress
    if report is None:
        return None
    return lambda share: report("Loading weights", share)


def _open_checkpoint(options: LoadOptions) -> Checkpoint:
    if options.load_format not in ("auto", "safetensors", "gguf"):
        raise StartupError(f"--load-format must be one of auto, safetensors, gguf, got {options.load_format!r}")
    path = resolve_model(options.model, options.revision)
    if path.is_dir() and (options.load_format == "gguf" or not (path / "config.json").is_file()):
        path = _single_gguf(path)
    if path.is_file():
        return _open_gguf(path, options)
    config = read_json(path / "config.json")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    files = safetensors_files(path)
    return Checkpoint(folder=path, config=config, files=files, dtype=dtype, source=lambda: SafetensorsSource(files))


def _single_gguf(folder: Path) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise StartupError(f"model folder {folder} has no config.json, and {len(files)} .gguf files where 1 is needed")
    return files[0]


def _open_gguf(path: Path, options: LoadOptions) -> Checkpoint:
    from engine_svc.model.gguf_reader import GgufFile, GgufSource  # noqa: PLC0415 - not needed by most

    gguf = GgufFile(path)
    folder = gguf.small_files_folder(options.progress)
    return Checkpoint(
        folder=folder, config=gguf.config(), files=[path], dtype="bfloat16", source=lambda: GgufSource(gguf)
    )


def _model_info(
    options: LoadOptions, checkpoint: Checkpoint, ops: Ops, dtype: torch.dtype, device: torch.device
) -> ModelInfo:
    config = checkpoint.config
    own_limit = int(config.get("max_position_embeddings") or config.get("n_positions") or 0)
    if own_limit <= 0:
        raise StartupError(f"the config of {options.model} names no max_position_embeddings")
    wanted = options.max_model_len
    if wanted is not None and not 0 < wanted <= own_limit:
        raise StartupError(f"--max-model-len must be between 1 and the model's own {own_limit}, got {wanted}")
    dtype_name = str(dtype).removeprefix("torch.")
    return ModelInfo(
        vocab_size=int(config.get("vocab_size") or 0),
        max_model_len=wanted or own_limit,
        eos_token_ids=eos_token_ids(checkpoint.folder, config),
        tokenizer_digest=tokenizer_digest(checkpoint.folder),
        dtype=dtype_name,
        numerics=NumericsFingerprint(
            weights_digest=weights_digest(checkpoint.files),
            dtype=dtype_name,
            op_set=ops.name,
            instruction_set=ops.instruction_set or instruction_set(device),
            batch_invariant=ops.batch_invariant,
        ),
    )
