"""A new request from its bytes: what the message must hold, and what is not built yet.

Each request is parsed alone and fails alone. Values outside their limits are refused by the core's own check, called
here too so that the answer does not wait for a step.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine_svc.core.validation import RequestLimits, validate_request
from shared.errors import InvalidRequestError, TaktError, UnimplementedError
from shared.rpc.raw import parse
from shared.types import (
    GREEDY_TEMPERATURE,
    EngineRequest,
    PoolingParams,
    RepetitionDetection,
    SamplingParams,
    StructuredOutputKind,
    StructuredOutputSpec,
    TokenArray,
)
from takt.engine.v1 import engine_pb2 as pb

MAX_TEXT_LENGTH = 4096
_TEXT_FIELDS = ("request_id", "cache_salt", "tenant", "traceparent")

_STRUCTURED_OUTPUT_KINDS = frozenset(map(int, StructuredOutputKind))

# Greedy, and the fewest tokens: what a request that samples nothing counts as.
_NO_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1)


@dataclass(frozen=True, slots=True)
class RefusedRequest:
    """A request that cannot be taken. `handle` is None when the bytes do not even tell that."""

    handle: int | None
    error: TaktError


def decode_request(data: bytes, limits: RequestLimits, data_parallel_rank: int) -> EngineRequest | RefusedRequest:
    """Reads one request; never raises for anything that the bytes hold."""
    try:
        message: pb.AddRequest = parse(pb.AddRequest, data)
    except TaktError as error:
        return RefusedRequest(peek_handle(data), error)
    try:
        _check_form(message, limits, data_parallel_rank)
        request = _request(message)
        validate_request(request, limits)
    except TaktError as error:
        return RefusedRequest(message.handle, error)
    return _clamped(request, limits)


def peek_handle(data: bytes) -> int | None:
    """The handle of a request that cannot be parsed: its first field, where protobuf writes it."""
    if not data or data[0] != pb.AddRequest.HANDLE_FIELD_NUMBER << 3:
        return None
    handle = 0
    for index, byte in enumerate(data[1:6]):
        handle |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return handle if handle < 2**32 else None
    return None


def _clamped(request: EngineRequest, limits: RequestLimits) -> EngineRequest:
    """Numbers of any size cut to where they make no difference, so that they fit the arrays of the workers."""
    sampling = request.sampling
    if sampling.max_tokens <= limits.max_model_len and sampling.top_k <= limits.vocab_size:
        return request
    return replace(
        request,
        sampling=replace(
            sampling,
            max_tokens=min(sampling.max_tokens, limits.max_model_len),
            min_tokens=min(sampling.min_tokens, limits.max_model_len),
            top_k=min(sampling.top_k, limits.vocab_size),
        ),
    )


def _check_form(message: pb.AddRequest, limits: RequestLimits, data_parallel_rank: int) -> None:
    # Before anything of its size is made.
    count = len(message.prompt_token_ids)
    if count >= limits.max_model_len:
        raise InvalidRequestError(
            f"prompt_token_ids must be shorter than max_model_len {limits.max_model_len}, got {count} tokens",
            field="prompt_token_ids",
        )
    for name in _TEXT_FIELDS:
        length = len(getattr(message, name))
        if length > MAX_TEXT_LENGTH:
            raise InvalidRequestError(f"{name} must be at most {MAX_TEXT_LENGTH} characters, got {length}", field=name)
    if len(message.eos_token_ids) > limits.max_stop_token_ids:
        raise InvalidRequestError(
            f"eos_token_ids must be at most {limits.max_stop_token_ids}, got {len(message.eos_token_ids)}",
            field="eos_token_ids",
        )
    if message.wave:
        raise UnimplementedError("wave is not built yet", field="wave")
    if message.HasField("data_parallel_rank") and message.data_parallel_rank != data_parallel_rank:
        raise InvalidRequestError(
            f"data_parallel_rank must be this engine's {data_parallel_rank}, got {message.data_parallel_rank}",
            field="data_parallel_rank",
        )
    task = message.WhichOneof("task")
    if task == "pooling":
        return
    if task != "sampling":
        raise InvalidRequestError("task must be sampling or pooling, got none", field="task")
    _check_sampling_form(message.sampling)
    if not message.sampling.HasField("max_tokens"):
        raise InvalidRequestError("max_tokens must be set, got none", field="max_tokens")


def _check_sampling_form(sampling: pb.SamplingParams) -> None:
    if sampling.HasField("structured_output"):
        kind = sampling.structured_output.kind
        if kind not in _STRUCTURED_OUTPUT_KINDS:
            raise InvalidRequestError(
                f"structured_output.kind must be one of {sorted(_STRUCTURED_OUTPUT_KINDS)}, got {kind}",
                field="structured_output",
            )
    ids, values = len(sampling.logit_bias_token_ids), len(sampling.logit_bias_values)
    if ids != values:
        raise InvalidRequestError(
            f"logit_bias_values must be as many as logit_bias_token_ids {ids}, got {values}", field="logit_bias_values"
        )


def _token_array(ids: Any, field: str) -> TokenArray:
    wide = np.fromiter(ids, np.int64, len(ids))
    if wide.size and int(wide.max()) >= 2**31:
        raise InvalidRequestError(f"{field} must be below the vocabulary's size, got {int(wide.max())}", field=field)
    return wide.astype(np.int32)


def _request(message: pb.AddRequest) -> EngineRequest:
    pooled = message.WhichOneof("task") == "pooling"
    return EngineRequest(
        handle=message.handle,
        request_id=message.request_id,
        prompt_token_ids=_token_array(message.prompt_token_ids, "prompt_token_ids"),
        sampling=_NO_SAMPLING if pooled else _sampling(message.sampling),
        resume_token_ids=_token_array(message.resume_token_ids, "resume_token_ids"),
        eos_token_ids=tuple(message.eos_token_ids),
        priority=message.priority,
        cache_salt=message.cache_salt,
        tenant=message.tenant,
        traceparent=message.traceparent,
        deadline_seconds=message.deadline_remaining_ms / 1000 if message.HasField("deadline_remaining_ms") else None,
        age_seconds=message.age_ms / 1000,
        data_parallel_rank=message.data_parallel_rank if message.HasField("data_parallel_rank") else None,
        pooling=PoolingParams(pooling=message.pooling.pooling, normalize=message.pooling.normalize) if pooled else None,
    )


def _sampling(sampling: pb.SamplingParams) -> SamplingParams:
    temperature = sampling.temperature if sampling.HasField("temperature") else 1.0
    if not sampling.HasField("seed") and not temperature < GREEDY_TEMPERATURE:
        raise InvalidRequestError(
            f"seed must be set unless temperature is below {GREEDY_TEMPERATURE}, got none", field="seed"
        )
    return SamplingParams(
        temperature=temperature,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        top_k=0 if sampling.top_k == -1 else sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
        logit_bias=tuple(zip(sampling.logit_bias_token_ids, sampling.logit_bias_values, strict=True)),
        bad_words=tuple(tuple(word.token_ids) for word in sampling.bad_words),
        allowed_token_ids=tuple(sampling.allowed_token_ids),
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
        logprob_token_ids=tuple(sampling.logprob_token_ids),
        repetition_detection=_repetition_detection(sampling),
        structured_output=_structured_output(sampling),
        skip_reading_prefix_cache=sampling.skip_reading_prefix_cache,
    )


def _structured_output(sampling: pb.SamplingParams) -> StructuredOutputSpec | None:
    if not sampling.HasField("structured_output"):
        return None
    message = sampling.structured_output
    return StructuredOutputSpec(StructuredOutputKind(message.kind), message.spec)


def _repetition_detection(sampling: pb.SamplingParams) -> RepetitionDetection | None:
    if not sampling.HasField("repetition_detection"):
        return None
    message = sampling.repetition_detection
    return RepetitionDetection(
        max_pattern_size=message.max_pattern_size,
        min_pattern_size=message.min_pattern_size,
        min_count=message.min_count,
    )
