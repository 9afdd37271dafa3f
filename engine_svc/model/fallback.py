"""Models without a native decoder, run by transformers over a paged KV cache of ours.

Their attention layers call a function registered with transformers, which stores keys and values in the step's
slots and attends through the block tables. Before a model is accepted, a short prompt is run both that way, in
chunks, and with the model's own attention: a model that answers differently is refused.
"""

import contextvars
import dataclasses
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from engine_svc.core.interfaces import KVCacheSpec, ModelInfo
from engine_svc.model.interface import ForwardBatch
from engine_svc.model.kv_memory import zeroed
from engine_svc.model.ops import AttentionSpec
from engine_svc.model.reference_attention import AttentionPlan, attend, make_plan
from engine_svc.model.weights import safetensors_files
from shared.errors import StartupError

logger = logging.getLogger(__name__)

ATTENTION_NAME = "takt_paged"
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_CHECK_TOKENS = 24
_CHECK_BLOCK_SIZE = 4


class _Step(Protocol):
    """What the layers of a running forward pass hand their attention to."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: "_Options"
    ) -> torch.Tensor:
        """[num_tokens, heads, head_dim] each; returns the output in the query's layout."""


@dataclass(frozen=True, slots=True)
class _Options:
    scale: float
    sliding_window: int | None
    soft_cap: float | None


@dataclass(frozen=True, slots=True)
class _LayerShape:
    num_kv_heads: int
    key_dim: int
    value_dim: int
    sliding_window: int | None


_current_step: contextvars.ContextVar[_Step] = contextvars.ContextVar("takt_current_step")


@contextmanager
def _running(step: _Step) -> Iterator[None]:
    token = _current_step.set(step)
    try:
        yield
    finally:
        _current_step.reset(token)


@contextmanager
def _answering(base: torch.nn.Module, hidden: torch.Tensor) -> Iterator[None]:
    """Makes a base model return `hidden` as its last hidden state, whatever it is given."""
    from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions  # noqa: PLC0415 - heavy

    def answer(*_: Any, **__: Any) -> Any:
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden)

    base.forward = answer
    try:
        yield
    finally:
        del base.forward


def _paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - the signature is transformers'
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: tensors are [1, heads, num_tokens, head_dim]."""
    scale = kwargs.get("scaling")
    options = _Options(
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        sliding_window=kwargs.get("sliding_window"),
        soft_cap=kwargs.get("softcap"),
    )
    layer = module.layer_idx
    assert isinstance(layer, int)
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return _current_step.get().attend(layer, query, key, value, options).unsqueeze(0), None


@dataclass(slots=True)
class _ShapeProbe:
    """Learns the sizes of each layer's keys and values; its own answers are only of the right shape."""

    layers: dict[int, _LayerShape] = dataclasses.field(default_factory=dict)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: _Options
    ) -> torch.Tensor:
        """See _Step."""
        self.layers[layer] = _LayerShape(key.shape[1], key.shape[2], value.shape[2], options.sliding_window)
        return query.new_zeros((*query.shape[:2], value.shape[2]))


@dataclass(frozen=True, slots=True)
class _PagedStep:
    """One step over a paged cache: keys and values of each layer, [num_blocks, block_size, num_kv_heads, dim]."""

    slot_mapping: torch.Tensor
    plan: AttentionPlan
    cache: list[tuple[torch.Tensor, torch.Tensor]]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: _Options
    ) -> torch.Tensor:
        """See _Step."""
        keys, values = self.cache[layer]
        keys.flatten(0, 1).index_copy_(0, self.slot_mapping, key)
        values.flatten(0, 1).index_copy_(0, self.slot_mapping, value)
        spec = AttentionSpec(
            layer=layer,
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=query.shape[2],
            scale=options.scale,
            sliding_window=options.sliding_window,
            soft_cap=options.soft_cap,
        )
        return attend(query, keys, values, spec, self.plan)


class FallbackModel:
    """Implements engine_svc.model.interface.Model over a causal model of transformers."""

    def __init__(self, model: Any, info: ModelInfo, device: torch.device) -> None:
        """Takes a loaded model. Raises StartupError when its attention cannot be paged."""
        self._model = model
        self._info = info
        self._device = device
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._layers = self._probe_layers()

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
        values = sum(layer.num_kv_heads * (layer.key_dim + layer.value_dim) for layer in self._layers)
        itemsize: int = self._model.dtype.itemsize
        return (KVCacheSpec(num_layers=len(self._layers), bytes_per_token=values * itemsize),)

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> Any:
        """See Model."""

        def zeros(layer: _LayerShape, dim: int) -> torch.Tensor:
            size = (num_blocks, block_size, layer.num_kv_heads, dim)
            return zeroed(size, self._model.dtype, self._device)

        return [(zeros(layer, layer.key_dim), zeros(layer, layer.value_dim)) for layer in self._layers]

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv_cache: Any) -> torch.Tensor:
        """See Model."""
        block_size = kv_cache[0][0].shape[1]
        with _running(_PagedStep(batch.slot_mapping, make_plan(batch, block_size), kv_cache)):
            return self._run(batch.token_ids, batch.positions.to(torch.int64), batch.logits_indices)

    @torch.inference_mode()
    def hidden_states(self, batch: ForwardBatch, kv_cache: Any) -> torch.Tensor:
        """See Model."""
        block_size = kv_cache[0][0].shape[1]
        with _running(_PagedStep(batch.slot_mapping, make_plan(batch, block_size), kv_cache)):
            output = self._model.base_model(
                input_ids=batch.token_ids.unsqueeze(0),
                position_ids=batch.positions.to(torch.int64).unsqueeze(0),
                use_cache=False,
            )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden[batch.logits_indices]

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Model. Runs the causal model with a base that answers `hidden`, for what it does beside the product."""
        index = torch.arange(len(hidden), device=self._device)
        with _answering(self._model.base_model, hidden.unsqueeze(0)):
            return self._run(torch.zeros_like(index), index, index)

    def _run(self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        keep = {"logits_to_keep": wanted} if self._keeps_logits else {}
        output = self._model(
            input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, **keep
        )
        logits: torch.Tensor = output.logits[0]
        return (logits if self._keeps_logits else logits[wanted]).float()

    @torch.inference_mode()
    def _probe_layers(self) -> list[_LayerShape]:
        probe = _ShapeProbe()
        index = torch.arange(2, device=self._device)
        self._model.set_attn_implementation(ATTENTION_NAME)
        with _running(probe):
            self._run(index, index, index)
        layers = [probe.layers.get(i) for i in range(len(probe.layers))]
        if not layers or None in layers:
            raise StartupError("its layers do not all call the attention function of transformers")
        return [layer for layer in layers if layer is not None]

    @torch.inference_mode()
    def check(self) -> None:
        """Compares paged with own attention on a short prompt. Raises StartupError when they differ."""
        config = self._model.config
        types = getattr(config, "layer_types", None) or []
        if "sliding_attention" in types and not any(layer.sliding_window for layer in self._layers):
            raise StartupError("its sliding window is not handed to the attention function")
        count = min(_CHECK_TOKENS, self._info.max_model_len)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self._info.vocab_size, (count,), generator=generator).to(self._device)
        self._model.set_attn_implementation("eager")
        # Without positions: that ours mean the same is checked too.
        expected = self._model(input_ids=tokens.unsqueeze(0), use_cache=False).logits[0].float()
        self._model.set_attn_implementation(ATTENTION_NAME)
        num_blocks = -(-count // _CHECK_BLOCK_SIZE)
        cache = self.allocate_kv_cache(num_blocks, _CHECK_BLOCK_SIZE)
        cut = count // 2 + 1
        parts = [(0, cut), (cut, count)] if cut < count else [(0, count)]
        paged = torch.cat([self.forward(_chunk(tokens, *part, num_blocks), cache) for part in parts])
        difference = float((paged - expected).abs().max())
        share = 0.01 if self._model.dtype is torch.float32 else 0.25
        if not difference <= share * float(expected.std()):
            raise StartupError(f"its own attention and paged attention differ by {difference:.3g} in the logits")


def _chunk(tokens: torch.Tensor, start: int, stop: int, num_blocks: int) -> ForwardBatch:
    """Tokens [start, stop) of one sequence whose blocks lie in reverse order."""
    device = tokens.device
    positions = torch.arange(start, stop, device=device)
    blocks = torch.arange(num_blocks - 1, -1, -1, device=device)
    return ForwardBatch(
        token_ids=tokens[start:stop],
        positions=positions.to(torch.int32),
        slot_mapping=blocks[positions // _CHECK_BLOCK_SIZE] * _CHECK_BLOCK_SIZE + positions % _CHECK_BLOCK_SIZE,
        query_start=torch.tensor([0, stop - start], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([stop], dtype=torch.int32, device=device),
        block_tables=blocks.to(torch.int32).unsqueeze(0),
        logits_indices=torch.arange(stop - start, device=device),
        max_query_len=stop - start,
        max_seq_len=stop,
    )


def load_fallback(
    folder: Path, make_info: Callable[[], ModelInfo], device: torch.device, *, native_reason: str
) -> FallbackModel:
    """Loads a model through transformers. `make_info` is called once its class is known to fit.

    Raises StartupError saying why neither the native decoder nor transformers can run it.
    """
    try:
        import transformers  # noqa: PLC0415 - heavy, and not needed by native models
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: PLC0415 - as above
    except ImportError:
        raise StartupError(
            f"model {folder} cannot be run: {native_reason}, and transformers is not installed"
        ) from None
    log: Any = transformers.utils.logging
    log.set_verbosity_error()
    log.disable_progress_bar()
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _paged_attention_forward)
    try:
        model_class, config = _model_class(folder)
        info = make_info()
        model = _load_weights(model_class, config, folder, info.dtype).to(device)
        numerics = dataclasses.replace(info.numerics, op_set=f"transformers-{transformers.__version__}")
        fallback = _checked(model, dataclasses.replace(info, numerics=numerics), device)
    except StartupError as error:
        raise StartupError(f"model {folder} cannot be run: {native_reason}; through transformers: {error}") from None
    logger.info("Loaded %s: %s of transformers, %s on %s.", folder, model_class.__name__, info.dtype, device)
    return fallback


def _checked(model: Any, info: ModelInfo, device: torch.device) -> FallbackModel:
    try:
        fallback = FallbackModel(model, info, device)
        fallback.check()
    except StartupError:
        raise
    except Exception as error:  # noqa: BLE001 - a model may do anything with an attention it does not expect
        raise StartupError(f"it cannot be run with paged attention ({_short(error)})") from None
    return fallback


def _model_class(folder: Path) -> tuple[Any, Any]:
    """The class and config of a decoder-only model with replaceable attention and no recurrent state."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig  # noqa: PLC0415 - heavy

    model_class: Any
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except (ValueError, KeyError, OSError, AttributeError, TypeError) as error:
        raise StartupError(f"it is no causal language model that transformers knows ({_short(error)})") from None
    if getattr(config, "is_encoder_decoder", False):
        raise StartupError(f"{model_class.__name__} is an encoder-decoder model")
    if getattr(model_class, "_is_stateful", False):
        raise StartupError(f"{model_class.__name__} keeps a recurrent state")
    other = sorted(set(getattr(config, "layer_types", None) or []) - _LAYER_TYPES)
    if other:
        raise StartupError(f"{model_class.__name__} has layers of type {other[0]}")
    if not getattr(model_class, "_supports_attention_backend", False):
        raise StartupError(f"{model_class.__name__} does not let its attention be replaced")
    if "position_ids" not in inspect.signature(model_class.forward).parameters:
        raise StartupError(f"{model_class.__name__} takes no positions")
    return model_class, config


def _load_weights(model_class: Any, config: Any, folder: Path, dtype: str) -> Any:
    safetensors_files(folder)
    try:
        model, report = model_class.from_pretrained(
            folder,
            config=config,
            dtype=getattr(torch, dtype),
            attn_implementation="eager",
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # noqa: BLE001 - transformers raises whatever its readers raise
        raise StartupError(f"its weights cannot be loaded ({_short(error)})") from None
    if report["missing_keys"]:
        raise StartupError(f"the checkpoint has no tensor {min(report['missing_keys'])}")
    return model.eval()


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"
