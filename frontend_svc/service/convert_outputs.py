"""Outputs of requests as messages of takt.v1's streams. Protobuf types of the public ports end here.

Most messages carry text and tokens alone, so the rest is looked at only where it is there.
"""

from collections.abc import Iterable
from typing import Any

from frontend_svc.request import PositionLogprobs, RequestOutput, TokenCandidate
from takt.v1 import inference_pb2, types_pb2


def generate_response(output: RequestOutput, request_id: str) -> inference_pb2.GenerateResponse:
    """What is new of an output of Generate."""
    response = inference_pb2.GenerateResponse(
        request_id=request_id, index=output.index, text=output.text, token_ids=output.token_ids
    )
    _add_rare(response, output)
    return response


def chat_response(output: RequestOutput, request_id: str) -> inference_pb2.ChatResponse:
    """What is new of an output of Chat."""
    response = inference_pb2.ChatResponse(
        request_id=request_id,
        index=output.index,
        text=output.text,
        token_ids=output.token_ids,
        reasoning=output.reasoning,
    )
    _add_rare(response, output)
    for call in output.tool_calls:
        response.tool_calls.add(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
    return response


def _add_rare(response: Any, output: RequestOutput) -> None:
    if output.logprobs:
        response.logprobs.extend(_positions(output.logprobs))
    if output.prompt_token_ids:
        response.prompt_token_ids.extend(output.prompt_token_ids)
    if output.prompt_logprobs:
        response.prompt_logprobs.extend(_positions(output.prompt_logprobs))
    if output.finish_reason is not None:
        _add_end(response, output)


def _add_end(response: Any, output: RequestOutput) -> None:
    """What only last messages have."""
    assert output.finish_reason is not None
    response.finish_reason = int(output.finish_reason)
    if isinstance(output.stop_reason, str):
        response.stop_reason.text = output.stop_reason
    elif output.stop_reason is not None:
        response.stop_reason.token_id = output.stop_reason
    usage, timings = output.usage, output.timings
    if usage is not None:
        response.usage.prompt_tokens = usage.prompt_tokens
        response.usage.cached_tokens = usage.cached_tokens
        response.usage.completion_tokens = usage.completion_tokens
    if timings is not None:
        response.timings.queue_seconds = timings.queue_seconds
        response.timings.prefill_seconds = timings.prefill_seconds
        response.timings.decode_seconds = timings.decode_seconds
        response.timings.time_to_first_token_seconds = timings.time_to_first_token_seconds
        response.timings.e2e_seconds = timings.e2e_seconds
        response.timings.num_preemptions = timings.num_preemptions


def _positions(positions: Iterable[PositionLogprobs]) -> list[types_pb2.TokenLogprobs]:
    return [
        types_pb2.TokenLogprobs(
            token=None if position.token is None else _candidate(position.token),
            candidates=[_candidate(candidate) for candidate in position.candidates],
        )
        for position in positions
    ]


def _candidate(candidate: TokenCandidate) -> types_pb2.TokenCandidate:
    return types_pb2.TokenCandidate(
        token_id=candidate.token_id,
        logprob=candidate.logprob,
        rank=candidate.rank,
        text=candidate.text,
        bytes=candidate.bytes,
    )
