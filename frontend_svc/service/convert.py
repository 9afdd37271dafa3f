"""Requests of takt.v1 as the frontend's own values, and answers of all but the streams. Protobuf types end here.

Streams have a module beside this one.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from frontend_svc.request import EmbeddingOutput, EmbeddingRequest, GenerationRequest, SamplingRequest
from frontend_svc.routing.engine_client import AsyncEngineClient
from frontend_svc.text.chat_template import ChatMessage, ToolCall
from shared.errors import InvalidRequestError
from shared.types import EngineLoad, RepetitionDetection, StructuredOutputKind, StructuredOutputSpec
from takt.v1 import admin_pb2, inference_pb2, types_pb2

# Fields whose values are taken as they are; None where they are unset.
_OPTIONAL = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "n", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "logprobs", "prompt_logprobs", "stream_interval"),
    *("truncate_prompt_tokens", "skip_reading_prefix_cache"),
)
_LISTS = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logprob_token_ids")
_TRUE_BY_DEFAULT = ("skip_special_tokens", "spaces_between_special_tokens", "detokenize")
_KINDS = {kind.name.lower(): kind for kind in StructuredOutputKind}


# --- requests ---------------------------------------------------------------------------------------------------------


def generation_request(message: inference_pb2.GenerateRequest, request_id: str) -> GenerationRequest:
    """A call of Generate. Raises InvalidRequestError for a constraint that is none."""
    prompt = message.WhichOneof("prompt")
    return GenerationRequest(
        **_common(message, request_id),
        text=message.text if prompt == "text" else None,
        token_ids=tuple(message.token_ids.ids) if prompt == "token_ids" else None,
    )


def chat_request(message: inference_pb2.ChatRequest, request_id: str) -> GenerationRequest:
    """A call of Chat. Raises InvalidRequestError for a constraint that is none."""
    return GenerationRequest(
        **_common(message, request_id),
        messages=chat_messages(message.messages),
        tools=tuple(message.tools),
        tool_choice=_optional(message, "tool_choice"),
        chat_template_kwargs=_optional(message, "chat_template_kwargs"),
        add_generation_prompt=_optional(message, "add_generation_prompt"),
        continue_final_message=message.continue_final_message,
    )


def embedding_request(message: inference_pb2.EmbedRequest, request_id: str) -> EmbeddingRequest:
    """A call of Embed."""
    return EmbeddingRequest(
        request_id=request_id,
        model=message.model,
        inputs=tuple(message.texts),
        pooling=message.pooling,
        normalize=message.normalize,
    )


def chat_messages(messages: Iterable[inference_pb2.ChatMessage]) -> tuple[ChatMessage, ...]:
    """The messages of a conversation. Raises InvalidRequestError for a part of an unknown kind."""
    return tuple(_chat_message(index, message) for index, message in enumerate(messages))


def _chat_message(index: int, message: inference_pb2.ChatMessage) -> ChatMessage:
    for number, part in enumerate(message.parts):
        if part.WhichOneof("part") != "text":
            field = f"messages[{index}].parts[{number}]"
            raise InvalidRequestError(f"{field} must be text, got another kind or none", field=field)
    return ChatMessage(
        role=message.role,
        content=message.content,
        parts=tuple(part.text for part in message.parts),
        name=message.name,
        tool_calls=tuple(ToolCall(call.index, call.id, call.name, call.arguments) for call in message.tool_calls),
        tool_call_id=message.tool_call_id,
        reasoning=message.reasoning,
    )


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
        "lora_name": _optional(message, "lora_name"),
    }


def _sampling(message: types_pb2.SamplingParams) -> SamplingRequest:
    values = {field.name: value for field, value in message.ListFields()}
    chosen: dict[str, Any] = {name: values[name] for name in _OPTIONAL if name in values}
    chosen |= {name: tuple(values[name]) for name in _LISTS if name in values}
    chosen |= {name: values[name] for name in _TRUE_BY_DEFAULT if name in values}
    if message.HasField("repetition_detection"):
        detection = message.repetition_detection
        chosen["repetition_detection"] = RepetitionDetection(
            max_pattern_size=detection.max_pattern_size,
            min_pattern_size=detection.min_pattern_size,
            min_count=detection.min_count,
        )
    if message.HasField("structured_output"):
        chosen["structured_output"] = _structured_output(message.structured_output)
    return SamplingRequest(
        **chosen,
        ignore_eos=message.ignore_eos,
        include_stop_str_in_output=message.include_stop_str_in_output,
        logit_bias=tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
        output_kind=int(message.output_kind),
    )


def _structured_output(message: types_pb2.StructuredOutput) -> StructuredOutputSpec:
    name = message.WhichOneof("constraint")
    if name is None or (name == "json_object" and not message.json_object):
        got = "none" if name is None else "json_object false"
        raise InvalidRequestError(
            f"structured_output must be exactly one of {', '.join(_KINDS)}, got {got}", field="structured_output"
        )
    if name == "json_object":
        spec = ""
    elif name == "choice":
        spec = json.dumps(list(message.choice.choices), ensure_ascii=False)
    else:
        spec = getattr(message, name)
    return StructuredOutputSpec(_KINDS[name], spec)


def _optional(message: Any, name: str) -> Any:
    return getattr(message, name) if message.HasField(name) else None


# --- the other calls --------------------------------------------------------------------------------------------------


def embed_response(output: EmbeddingOutput) -> inference_pb2.EmbedResponse:
    """Vectors of texts."""
    usage = output.usage
    return inference_pb2.EmbedResponse(
        embeddings=[inference_pb2.Embedding(values=values) for values in output.embeddings],
        usage=types_pb2.Usage(prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens),
    )


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
