"""Messages of takt.v1 and the frontend's own values, both ways. Protobuf types of the public ports end here.

A field that is not built yet is named when it is set to anything but what it does by default.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from frontend_svc.request import (
    GenerationRequest,
    RequestOutput,
    SamplingRequest,
)
from frontend_svc.routing.engine_client import AsyncEngineClient
from frontend_svc.text.chat_template import ChatMessage
from shared.types import EngineLoad
from takt.v1 import admin_pb2, inference_pb2, types_pb2

# Fields that are not built yet and the value that they may have; the others must be unset.
_UNBUILT_NEUTRAL: dict[str, Any] = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "detokenize": True,
    "stream_interval": 1,
    "skip_reading_prefix_cache": False,
}
_UNBUILT_OPTIONAL = (
    "logprobs",
    "prompt_logprobs",
    "repetition_detection",
    "structured_output",
    "truncate_prompt_tokens",
)
_UNBUILT_REPEATED = ("logit_bias", "bad_words", "allowed_token_ids", "logprob_token_ids")
_CHAT_UNBUILT_NEUTRAL: dict[str, Any] = {"add_generation_prompt": True, "continue_final_message": False}


# --- requests ---------------------------------------------------------------------------------------------------------


def generation_request(message: inference_pb2.GenerateRequest, request_id: str) -> GenerationRequest:
    """A call of Generate."""
    prompt = message.WhichOneof("prompt")
    return GenerationRequest(
        **_common(message, request_id),
        text=message.text if prompt == "text" else None,
        token_ids=tuple(message.token_ids.ids) if prompt == "token_ids" else None,
        unbuilt=_unbuilt(message, {}, ("lora_name",), ()),
    )


def chat_request(message: inference_pb2.ChatRequest, request_id: str) -> GenerationRequest:
    """A call of Chat."""
    return GenerationRequest(
        **_common(message, request_id),
        messages=chat_messages(message.messages),
        unbuilt=_unbuilt(message, _CHAT_UNBUILT_NEUTRAL, ("lora_name", "tool_choice"), ("tools",)),
    )


def chat_messages(messages: Iterable[inference_pb2.ChatMessage]) -> tuple[ChatMessage, ...]:
    """The messages of a conversation."""
    return tuple(ChatMessage(message.role, message.content) for message in messages)


def _common(message: Any, request_id: str) -> dict[str, Any]:
    """What Generate and Chat have in common."""
    return {
        "request_id": message.request_id or request_id,
        "model": message.model,
        "sampling": _sampling(message.sampling),
        "priority": message.priority,
        "cache_salt": message.cache_salt,
        "data_parallel_rank": _optional(message, "data_parallel_rank"),
        "return_prompt_token_ids": message.return_prompt_token_ids,
    }


def _sampling(message: types_pb2.SamplingParams) -> SamplingRequest:
    output_kind = message.output_kind
    unbuilt = _unbuilt(message, _UNBUILT_NEUTRAL, _UNBUILT_OPTIONAL, _UNBUILT_REPEATED)
    if output_kind in (types_pb2.OUTPUT_KIND_CUMULATIVE, types_pb2.OUTPUT_KIND_FINAL_ONLY):
        unbuilt = (*unbuilt, "output_kind")
    return SamplingRequest(
        temperature=_optional(message, "temperature"),
        top_p=_optional(message, "top_p"),
        top_k=_optional(message, "top_k"),
        min_p=_optional(message, "min_p"),
        seed=_optional(message, "seed"),
        max_tokens=_optional(message, "max_tokens"),
        min_tokens=_optional(message, "min_tokens"),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        include_stop_str_in_output=message.include_stop_str_in_output,
        output_kind=int(output_kind),
        unbuilt=unbuilt,
    )


def _optional(message: Any, name: str) -> Any:
    return getattr(message, name) if message.HasField(name) else None


def _unbuilt(
    message: Any, neutral: dict[str, Any], optional: Sequence[str], repeated: Sequence[str]
) -> tuple[str, ...]:
    """The names of fields that ask for what is not built yet."""
    names = [name for name, value in neutral.items() if message.HasField(name) and getattr(message, name) != value]
    names += [name for name in optional if message.HasField(name)]
    names += [name for name in repeated if len(getattr(message, name))]
    return tuple(names)


# --- outputs ----------------------------------------------------------------------------------------------------------


def generate_response(output: RequestOutput, request_id: str) -> inference_pb2.GenerateResponse:
    """What is new of an output of Generate."""
    response = inference_pb2.GenerateResponse(request_id=request_id, text=output.text, token_ids=output.token_ids)
    if output.finish_reason is not None or output.prompt_token_ids:
        _add_rare(response, output)
    return response


def chat_response(output: RequestOutput, request_id: str) -> inference_pb2.ChatResponse:
    """What is new of an output of Chat."""
    response = inference_pb2.ChatResponse(request_id=request_id, text=output.text, token_ids=output.token_ids)
    if output.finish_reason is not None or output.prompt_token_ids:
        _add_rare(response, output)
    return response


def _add_rare(response: Any, output: RequestOutput) -> None:
    """What only first and last messages have."""
    response.prompt_token_ids.extend(output.prompt_token_ids)
    if output.finish_reason is None:
        return
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


# --- the other calls --------------------------------------------------------------------------------------------------


def tokenize_response(
    token_ids: Sequence[int], tokens: Sequence[str], max_model_len: int
) -> inference_pb2.TokenizeResponse:
    """Token ids of a text."""
    return inference_pb2.TokenizeResponse(token_ids=token_ids, tokens=tokens, max_model_len=max_model_len)


def models_response(
    names: Iterable[str], root: str, max_model_len: int, num_ready_engines: int
) -> inference_pb2.ListModelsResponse:
    """The served models."""
    return inference_pb2.ListModelsResponse(
        models=[
            inference_pb2.Model(name=name, root=root, max_model_len=max_model_len, num_ready_engines=num_ready_engines)
            for name in names
        ]
    )


def load_response(
    clients: Iterable[AsyncEngineClient], num_requests: int, *, draining: bool
) -> admin_pb2.GetLoadResponse:
    """What the engines are doing, as far as it is known here."""
    return admin_pb2.GetLoadResponse(
        engines=[_engine_load(client, client.load) for client in clients],
        num_requests=num_requests,
        draining=draining,
    )


def _engine_load(client: AsyncEngineClient, load: EngineLoad) -> admin_pb2.EngineLoad:
    state: Any = int(client.state)
    info = client.info if client.is_connected else None
    return admin_pb2.EngineLoad(
        address=client.address,
        state=state,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        kv_cache_usage=load.kv_cache_usage,
        step_counter=load.step_counter,
        num_in_flight=client.num_in_flight,
        last_seen_seconds=client.silent_seconds or 0.0,
        epoch=client.epoch,
        max_model_len=info.max_model_len if info is not None else 0,
        data_parallel_rank=info.data_parallel_rank if info is not None else 0,
        last_error=client.last_error,
    )
