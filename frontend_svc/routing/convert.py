"""Messages of takt.engine.v1 and the frontend's own values, both ways. Protobuf types of the engine stream end here.

Bytes in, bytes out. What a newer engine says in words that this version does not know is dropped, not an error.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from shared.errors import InternalError
from shared.types import (
    PROTOCOL_VERSION,
    AbortCause,
    EngineInfo,
    EngineLoad,
    EngineRequest,
    FinishedRequest,
    FinishReason,
    FirstScheduled,
    NumericsFingerprint,
    RepetitionDetection,
    SamplingParams,
    StepOutputs,
    StructuredOutputSpec,
    TokenLogprobs,
    WireError,
)
from takt.engine.v1 import engine_pb2 as pb


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget cached prefixes; answers a bool."""

    reset_running_requests: bool


@dataclass(frozen=True, slots=True)
class GetLoad:
    """Answers an EngineLoad."""


@dataclass(frozen=True, slots=True)
class Ping:
    """Answers the number of steps."""


@dataclass(frozen=True, slots=True)
class StartProfile:
    """Starts a profile; answers an empty string."""

    name: str


@dataclass(frozen=True, slots=True)
class StopProfile:
    """Ends the profile; answers the path of its trace."""


UtilityMethod = ResetPrefixCache | GetLoad | Ping | StartProfile | StopProfile
UtilityValue = bool | int | str | EngineLoad


@dataclass(frozen=True, slots=True)
class UtilityAnswer:
    """The answer to a utility call."""

    call_id: int
    outcome: UtilityValue | WireError


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life, with the load."""

    load: EngineLoad | None


@dataclass(frozen=True, slots=True)
class Draining:
    """The engine takes nothing new."""

    remaining_seconds: float


@dataclass(frozen=True, slots=True)
class Dead:
    """The engine failed."""

    reason: str


Incoming = EngineInfo | StepOutputs | UtilityAnswer | Heartbeat | Draining | Dead


class MalformedMessageError(Exception):
    """Bytes that are no message of the protocol."""


# --- to the engine ----------------------------------------------------------------------------------------------------


def encode_hello(frontend_id: str, max_unacknowledged_outputs: int) -> bytes:
    """The first message of a stream."""
    hello = pb.Hello(
        role=pb.ROLE_FRONTEND,
        frontend_id=frontend_id,
        protocol_version=PROTOCOL_VERSION,
        max_unacknowledged_outputs=max_unacknowledged_outputs,
    )
    return pb.ConnectRequest(hello=hello).SerializeToString()


def encode_request(request: EngineRequest, handle: int) -> bytes:
    """One item of AddRequests."""
    pooling = request.pooling
    message = pb.AddRequest(
        handle=handle,
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        resume_token_ids=request.resume_token_ids,
        sampling=None if pooling is not None else _sampling(request.sampling),
        pooling=None if pooling is None else pb.PoolingParams(pooling=pooling.pooling, normalize=pooling.normalize),
        eos_token_ids=request.eos_token_ids,
        priority=request.priority,
        cache_salt=request.cache_salt,
        tenant=request.tenant,
        traceparent=request.traceparent,
        age_ms=max(0, round(request.age_seconds * 1000)),
        data_parallel_rank=request.data_parallel_rank,
    )
    if request.deadline_seconds is not None:
        message.deadline_remaining_ms = max(0, round(request.deadline_seconds * 1000))
    return message.SerializeToString()


def _sampling(params: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        presence_penalty=params.presence_penalty or None,
        frequency_penalty=params.frequency_penalty or None,
        repetition_penalty=None if params.repetition_penalty == 1 else params.repetition_penalty,
        logit_bias_token_ids=[token_id for token_id, _ in params.logit_bias],
        logit_bias_values=[bias for _, bias in params.logit_bias],
        bad_words=[pb.TokenSequence(token_ids=word) for word in params.bad_words],
        allowed_token_ids=params.allowed_token_ids,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        logprob_token_ids=params.logprob_token_ids,
        repetition_detection=_repetition_detection(params.repetition_detection),
        structured_output=_structured_output(params.structured_output),
        skip_reading_prefix_cache=params.skip_reading_prefix_cache or None,
    )


def _repetition_detection(detection: RepetitionDetection | None) -> pb.RepetitionDetection | None:
    if detection is None:
        return None
    return pb.RepetitionDetection(
        max_pattern_size=detection.max_pattern_size,
        min_pattern_size=detection.min_pattern_size,
        min_count=detection.min_count,
    )


def _structured_output(output: StructuredOutputSpec | None) -> pb.StructuredOutput | None:
    if output is None:
        return None
    kind: Any = int(output.kind)
    return pb.StructuredOutput(kind=kind, spec=output.spec)


def encode_adds(items: list[bytes]) -> bytes:
    """Requests that encode_request made, in one message."""
    return pb.ConnectRequest(add_requests=pb.AddRequests(requests=items)).SerializeToString()


def encode_aborts(aborts: list[tuple[int, AbortCause]]) -> bytes:
    """Handles to end, each with its cause."""
    causes: Any = [int(cause) for _, cause in aborts]
    message = pb.AbortRequests(handles=[handle for handle, _ in aborts], causes=causes)
    return pb.ConnectRequest(abort_requests=message).SerializeToString()


def encode_call(call_id: int, timeout_seconds: float, method: UtilityMethod) -> bytes:
    """A utility call."""
    call = pb.UtilityCall(call_id=call_id, timeout_ms=max(1, round(timeout_seconds * 1000)))
    match method:
        case ResetPrefixCache(reset_running_requests):
            call.reset_prefix_cache.SetInParent()
            call.reset_prefix_cache.reset_running_requests = reset_running_requests
        case GetLoad():
            call.get_load.SetInParent()
        case Ping():
            call.ping.SetInParent()
        case StartProfile(name):
            call.start_profile.SetInParent()
            call.start_profile.name = name
        case StopProfile():
            call.stop_profile.SetInParent()
    return pb.ConnectRequest(utility_call=call).SerializeToString()


def encode_acknowledgement(count: int) -> bytes:
    """So many messages of outputs were taken."""
    return pb.ConnectRequest(acknowledge_outputs=pb.AcknowledgeOutputs(count=count)).SerializeToString()


def encode_heartbeat(sequence: int) -> bytes:
    """A sign of life."""
    return pb.ConnectRequest(heartbeat=pb.Heartbeat(sequence=sequence)).SerializeToString()


# --- from the engine --------------------------------------------------------------------------------------------------


def decode(data: bytes) -> Incoming | None:
    """Reads one message; None for one that this version does not know. Raises MalformedMessageError."""
    message = pb.ConnectResponse()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise MalformedMessageError(f"{len(data)} bytes that are no ConnectResponse") from None
    match message.WhichOneof("message"):
        case "step_outputs":
            return _step_outputs(message.step_outputs)
        case "heartbeat":
            return Heartbeat(_load(message.heartbeat.load) if message.heartbeat.HasField("load") else None)
        case "utility_result":
            return _utility_answer(message.utility_result)
        case "ready":
            return _engine_info(message.ready)
        case "draining":
            return Draining(message.draining.remaining_ms / 1000)
        case "dead":
            return Dead(message.dead.reason)
        case _:
            return None


def _step_outputs(message: pb.StepOutputs) -> StepOutputs:
    handles, num_tokens, token_ids = list(message.handles), list(message.num_tokens), list(message.token_ids)
    expected = sum(num_tokens) if num_tokens else len(handles)
    if len(token_ids) != expected or (num_tokens and len(num_tokens) != len(handles)):
        raise MalformedMessageError(
            f"columns of {len(handles)} handles, {len(num_tokens)} counts and {len(token_ids)} tokens"
        )
    return StepOutputs(
        step=message.step,
        handles=handles,
        num_tokens=num_tokens or None,
        token_ids=token_ids,
        first_scheduled=[
            FirstScheduled(first.handle, first.num_cached_tokens, first.queue_us / 1e6)
            for first in message.first_scheduled
        ],
        finished=[_finished(finished) for finished in message.finished],
        load=_load(message.load) if message.HasField("load") else None,
        logprobs=_logprobs(message.logprobs) if message.HasField("logprobs") else [],
        prompt_logprobs=_logprobs(message.prompt_logprobs) if message.HasField("prompt_logprobs") else [],
    )


def _logprobs(table: pb.LogprobsTable) -> list[TokenLogprobs]:
    token_ids, logprobs = np.array(table.token_ids, np.int32), np.array(table.logprobs, np.float32)
    ranks = np.array(table.ranks, np.int32)
    num_cells = sum(count * width for count, width in zip(table.num_tokens, table.widths, strict=False))
    one_each = len(table.handles) == len(table.num_tokens) == len(table.widths)
    if not one_each or len(ranks) != sum(table.num_tokens) or {len(token_ids), len(logprobs)} != {num_cells}:
        raise MalformedMessageError(f"log-probabilities of {len(ranks)} tokens in {len(token_ids)} cells")
    entries, start, cell = [], 0, 0
    for handle, count, width in zip(table.handles, table.num_tokens, table.widths, strict=True):
        cells = slice(cell, cell + count * width)
        shape = (count, width)
        entries.append(
            TokenLogprobs(
                handle,
                token_ids[cells].reshape(shape),
                logprobs[cells].reshape(shape),
                ranks[start : start + count],
            )
        )
        start, cell = start + count, cells.stop
    return entries


_REASONS = {reason.value: reason for reason in FinishReason}
_CAUSES = {cause.value: cause for cause in AbortCause}


def _finished(message: pb.Finished) -> FinishedRequest:
    return FinishedRequest(
        handle=message.handle,
        # A reason that is unknown here is still an end.
        reason=_REASONS.get(message.reason, FinishReason.ABORT),
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        abort_cause=_CAUSES.get(message.abort_cause, AbortCause.UNSPECIFIED),
        error=_error(message.error) if message.HasField("error") else None,
        queue_seconds=message.queue_us / 1e6,
        prefill_seconds=message.prefill_us / 1e6,
        decode_seconds=message.decode_us / 1e6,
        num_preemptions=message.num_preemptions,
        num_cached_tokens=message.num_cached_tokens,
        embedding=tuple(message.embedding),
    )


def _error(message: pb.EngineError) -> WireError:
    return WireError(message.code, message.reason, message.message, message.field)


def _load(message: pb.EngineLoad) -> EngineLoad:
    return EngineLoad(
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        kv_cache_usage=message.kv_cache_usage,
        step_counter=message.step_counter,
        in_step_seconds=message.in_step_ms / 1000,
        num_waiting_tokens=message.num_waiting_tokens,
    )


def _utility_answer(message: pb.UtilityResult) -> UtilityAnswer:
    match message.WhichOneof("result"):
        case "error":
            return UtilityAnswer(message.call_id, _error(message.error))
        case "reset_prefix_cache":
            return UtilityAnswer(message.call_id, message.reset_prefix_cache.success)
        case "load":
            return UtilityAnswer(message.call_id, _load(message.load))
        case "ping":
            return UtilityAnswer(message.call_id, message.ping.step_counter)
        case "profile":
            return UtilityAnswer(message.call_id, message.profile.trace_path)
        case _:
            error = WireError(InternalError.code, "UNKNOWN_RESULT", "the engine's answer is of an unknown kind")
            return UtilityAnswer(message.call_id, error)


def _engine_info(ready: pb.Ready) -> EngineInfo:
    return EngineInfo(
        epoch=ready.epoch,
        protocol_version=ready.protocol_version,
        model=ready.model,
        max_model_len=ready.max_model_len,
        vocab_size=ready.vocab_size,
        eos_token_ids=tuple(ready.eos_token_ids),
        tokenizer_digest=ready.tokenizer_digest,
        block_size=ready.block_size,
        num_blocks=ready.num_blocks,
        dtype=ready.dtype,
        data_parallel_rank=ready.data_parallel_rank,
        tensor_parallel_size=ready.world_sizes.tensor_parallel or 1,
        pipeline_parallel_size=ready.world_sizes.pipeline_parallel or 1,
        data_parallel_size=ready.world_sizes.data_parallel or 1,
        max_num_seqs=ready.limits.max_num_seqs,
        max_num_batched_tokens=ready.limits.max_num_batched_tokens,
        max_stop_token_ids=ready.limits.max_stop_token_ids,
        max_message_bytes=ready.limits.max_message_bytes,
        max_logprobs=ready.limits.max_logprobs,
        numerics=NumericsFingerprint(
            weights_digest=ready.numerics.weights_digest,
            dtype=ready.numerics.dtype,
            op_set=ready.numerics.op_set,
            instruction_set=ready.numerics.instruction_set,
            batch_invariant=ready.numerics.batch_invariant,
        ),
        draining=ready.draining,
    )
