"""Messages of takt.engine.v1 and the engine's own values, both ways; new requests are in convert_request.

Protobuf types end here. Whatever a client may send comes out as a value or as a TaktError that names what is wrong
with it.
"""

import re
from collections.abc import Sized
from dataclasses import dataclass
from typing import Any

from engine_svc.messages import (
    GetLoad,
    Ping,
    ResetPrefixCache,
    StartProfile,
    StopProfile,
    UtilityMethod,
    UtilityOutcome,
)
from shared.engine_client import MAX_MESSAGE_ITEMS
from shared.errors import InvalidRequestError, TaktError, UnimplementedError
from shared.rpc.raw import parse
from shared.types import (
    AbortCause,
    EngineInfo,
    EngineLoad,
    FinishedRequest,
    FinishReason,
    FirstScheduled,
    StepOutputs,
    TokenLogprobs,
    WireError,
)
from takt.engine.v1 import engine_pb2 as pb

MAX_FRONTEND_ID_LENGTH = 256
# The domain's enumerations have the values of the wire's; this fails at import if one side gets another member.
_REASONS = {reason: pb.FinishReason.Name(reason) for reason in FinishReason}
_CAUSES = {cause: pb.AbortCause.Name(cause) for cause in AbortCause}
_PROFILE_NAME = re.compile(r"[A-Za-z0-9_-]{0,64}")


@dataclass(frozen=True, slots=True)
class Hello:
    """A caller introduces itself."""

    is_peer: bool
    frontend_id: str
    protocol_version: int
    max_unacknowledged: int


@dataclass(frozen=True, slots=True)
class Adds:
    """New requests, each still in bytes."""

    requests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Aborts:
    """Handles to end, each with a cause."""

    aborts: tuple[tuple[int, AbortCause], ...]


@dataclass(frozen=True, slots=True)
class Utility:
    """A utility call. `method` is None when the caller sets none that this engine knows."""

    call_id: int
    timeout_seconds: float
    method: UtilityMethod | TaktError


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life."""


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """So many messages of outputs were taken."""

    count: int


Incoming = Hello | Adds | Aborts | Utility | Heartbeat | Acknowledgement


def decode(data: bytes) -> Incoming:
    """Reads one message of a frontend. Raises InvalidRequestError or UnimplementedError."""
    request: pb.ConnectRequest = parse(pb.ConnectRequest, data)
    match request.WhichOneof("message"):
        case "hello":
            return _hello(request.hello)
        case "add_requests":
            _check_count("add_requests.requests", request.add_requests.requests)
            return Adds(tuple(request.add_requests.requests))
        case "abort_requests":
            return _aborts(request.abort_requests)
        case "utility_call":
            return _utility(request.utility_call)
        case "heartbeat":
            return Heartbeat()
        case "acknowledge_outputs":
            return Acknowledgement(request.acknowledge_outputs.count)
        case "start_dp_wave":
            raise UnimplementedError("start_dp_wave is not built yet", field="start_dp_wave")
        case _:
            raise InvalidRequestError("message must be one that this engine knows, got none", field="message")


def _hello(hello: pb.Hello) -> Hello:
    if hello.role not in (pb.ROLE_FRONTEND, pb.ROLE_PEER):
        raise InvalidRequestError(f"hello.role must be ROLE_FRONTEND, got {hello.role}", field="hello.role")
    if len(hello.frontend_id) > MAX_FRONTEND_ID_LENGTH:
        raise InvalidRequestError(
            f"hello.frontend_id must be at most {MAX_FRONTEND_ID_LENGTH} characters, got {len(hello.frontend_id)}",
            field="hello.frontend_id",
        )
    return Hello(
        hello.role == pb.ROLE_PEER, hello.frontend_id, hello.protocol_version, hello.max_unacknowledged_outputs
    )


def _check_count(field: str, items: Sized) -> None:
    if len(items) > MAX_MESSAGE_ITEMS:
        raise InvalidRequestError(f"{field} must be at most {MAX_MESSAGE_ITEMS}, got {len(items)}", field=field)


def _aborts(message: pb.AbortRequests) -> Aborts:
    _check_count("abort_requests.handles", message.handles)
    if len(message.causes) != len(message.handles):
        raise InvalidRequestError(
            f"abort_requests.causes must be as many as handles {len(message.handles)}, got {len(message.causes)}",
            field="abort_requests.causes",
        )
    known = {cause.value for cause in AbortCause}
    causes = (AbortCause(cause) if cause in known else AbortCause.UNSPECIFIED for cause in message.causes)
    return Aborts(tuple(zip(message.handles, causes, strict=True)))


def _utility(call: pb.UtilityCall) -> Utility:
    return Utility(call.call_id, call.timeout_ms / 1000, _utility_method(call))


def _utility_method(call: pb.UtilityCall) -> UtilityMethod | TaktError:
    if call.timeout_ms < 1:
        return InvalidRequestError("timeout_ms must be at least 1, got 0", field="timeout_ms")
    match call.WhichOneof("method"):
        case "reset_prefix_cache":
            return ResetPrefixCache(call.reset_prefix_cache.reset_running_requests)
        case "get_load":
            return GetLoad()
        case "ping":
            return Ping()
        case "start_profile":
            name = call.start_profile.name
            if not _PROFILE_NAME.fullmatch(name):
                return InvalidRequestError(
                    f"start_profile.name must be at most 64 of A-Z a-z 0-9 - _, got {name[:80]!r}",
                    field="start_profile.name",
                )
            return StartProfile(name or "profile")
        case "stop_profile":
            return StopProfile()
        case _:
            return UnimplementedError("method must be one that this engine has, got none or another", field="method")


# --- to the frontend --------------------------------------------------------------------------------------------------


def _microseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e6))


def encode_ready(info: EngineInfo) -> bytes:
    """The first message of a stream."""
    numerics = info.numerics
    ready = pb.Ready(
        epoch=info.epoch,
        protocol_version=info.protocol_version,
        model=info.model,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        tokenizer_digest=info.tokenizer_digest,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        dtype=info.dtype,
        world_sizes=pb.WorldSizes(
            tensor_parallel=info.tensor_parallel_size,
            pipeline_parallel=info.pipeline_parallel_size,
            data_parallel=info.data_parallel_size,
        ),
        data_parallel_rank=info.data_parallel_rank,
        limits=pb.Limits(
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            max_stop_token_ids=info.max_stop_token_ids,
            max_message_bytes=info.max_message_bytes,
            max_logprobs=info.max_logprobs,
        ),
        numerics=pb.NumericsFingerprint(
            weights_digest=numerics.weights_digest,
            dtype=numerics.dtype,
            op_set=numerics.op_set,
            instruction_set=numerics.instruction_set,
            batch_invariant=numerics.batch_invariant,
        ),
        draining=info.draining,
    )
    return pb.ConnectResponse(ready=ready).SerializeToString()


def encode_outputs(outputs: StepOutputs) -> bytes:
    """A step's outputs by column."""
    response = pb.ConnectResponse()
    message = response.step_outputs
    message.step = outputs.step
    message.handles.extend(outputs.handles)
    if outputs.num_tokens is not None:
        message.num_tokens.extend(outputs.num_tokens)
    message.token_ids.extend(outputs.token_ids)
    if outputs.first_scheduled:
        message.first_scheduled.extend(map(_first_scheduled, outputs.first_scheduled))
    if outputs.finished:
        message.finished.extend(map(_finished, outputs.finished))
    if outputs.logprobs:
        _fill_table(message.logprobs, outputs.logprobs)
    if outputs.prompt_logprobs:
        _fill_table(message.prompt_logprobs, outputs.prompt_logprobs)
    if outputs.load is not None:
        message.load.CopyFrom(_load(outputs.load))
    return response.SerializeToString()


def _fill_table(table: pb.LogprobsTable, entries: list[TokenLogprobs]) -> None:
    for entry in entries:
        table.handles.append(entry.handle)
        table.num_tokens.append(len(entry))
        table.widths.append(entry.token_ids.shape[1])
        table.token_ids.extend(entry.token_ids.ravel().tolist())
        table.logprobs.extend(entry.logprobs.ravel().tolist())
        table.ranks.extend(entry.ranks.tolist())


def _first_scheduled(first: FirstScheduled) -> pb.FirstScheduled:
    return pb.FirstScheduled(
        handle=first.handle,
        num_cached_tokens=first.num_cached_tokens,
        queue_us=_microseconds(first.queue_seconds),
    )


def _finished(finished: FinishedRequest) -> pb.Finished:
    return pb.Finished(
        handle=finished.handle,
        reason=_REASONS[finished.reason],
        stop_token_id=finished.stop_token_id,
        abort_cause=_CAUSES[finished.abort_cause],
        error=None if finished.error is None else _error(finished.error),
        queue_us=_microseconds(finished.queue_seconds),
        prefill_us=_microseconds(finished.prefill_seconds),
        decode_us=_microseconds(finished.decode_seconds),
        num_preemptions=finished.num_preemptions,
        num_cached_tokens=finished.num_cached_tokens,
        embedding=finished.embedding,
    )


def _error(error: WireError) -> pb.EngineError:
    return pb.EngineError(code=error.code, reason=error.reason, message=error.message, field=error.field)


def wire_error(error: TaktError) -> WireError:
    """An error of one request or call as the frontend gets it."""
    return WireError(error.code, error.reason, error.message, error.field)


def _load(load: EngineLoad) -> pb.EngineLoad:
    return pb.EngineLoad(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        kv_cache_usage=load.kv_cache_usage,
        step_counter=load.step_counter,
        in_step_ms=round(load.in_step_seconds * 1000),
        num_waiting_tokens=load.num_waiting_tokens,
    )


def encode_heartbeat(sequence: int, load: EngineLoad) -> bytes:
    """A sign of life, with the load."""
    heartbeat = pb.EngineHeartbeat(sequence=sequence, load=_load(load))
    return pb.ConnectResponse(heartbeat=heartbeat).SerializeToString()


def encode_draining(remaining_seconds: float) -> bytes:
    """The engine takes nothing new and aborts what is left after `remaining_seconds`."""
    draining = pb.Draining(remaining_ms=max(0, round(remaining_seconds * 1000)))
    return pb.ConnectResponse(draining=draining).SerializeToString()


def encode_dead(reason: str) -> bytes:
    """The engine failed."""
    return pb.ConnectResponse(dead=pb.Dead(reason=reason)).SerializeToString()


def encode_utility_result(call_id: int, method: UtilityMethod | None, outcome: UtilityOutcome) -> bytes:
    """The answer to a utility call; `method` is None only when `outcome` is an error."""
    result = pb.UtilityResult(call_id=call_id)
    if isinstance(outcome, TaktError):
        result.error.CopyFrom(_error(wire_error(outcome)))
    else:
        _set_result(result, method, outcome)
    return pb.ConnectResponse(utility_result=result).SerializeToString()


def _set_result(result: pb.UtilityResult, method: UtilityMethod | None, outcome: Any) -> None:
    match method:
        case ResetPrefixCache():
            result.reset_prefix_cache.CopyFrom(pb.ResetPrefixCacheResult(success=outcome))
        case GetLoad():
            result.load.CopyFrom(_load(outcome))
        case Ping():
            result.ping.CopyFrom(pb.PingResult(step_counter=outcome))
        case StartProfile() | StopProfile():
            result.profile.CopyFrom(pb.ProfileResult(trace_path=outcome))
        case None:
            raise AssertionError("only an error can answer a call without a method")
