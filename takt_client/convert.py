"""Requests from keywords, and plain values from responses. No I/O; both clients share it."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from takt.v1 import admin_pb2, inference_pb2, types_pb2
from takt_client.errors import TaktClientError
from takt_client.types import (
    Chunk,
    Embeddings,
    EngineLoad,
    Load,
    Messages,
    Model,
    Output,
    Timings,
    TokenCandidate,
    TokenLogprobs,
    Tokens,
    ToolCall,
    Usage,
)

_SAMPLING_FIELDS = types_pb2.SamplingParams.DESCRIPTOR.fields_by_name
_STATE_PREFIX = "ENGINE_STATE_"
_REASON_PREFIX = "FINISH_REASON_"


def generate_request(prompt: str | Sequence[int], options: Mapping[str, Any]) -> inference_pb2.GenerateRequest:
    """Raises TypeError for an option that does not exist, TaktClientError for a value that its field cannot hold."""
    request = inference_pb2.GenerateRequest()
    _fill(request, options)
    if isinstance(prompt, str):
        with fitting("text"):
            request.text = prompt
    else:
        with fitting("token_ids"):
            request.token_ids.ids.extend(prompt)
        request.token_ids.SetInParent()
    return request


def chat_request(messages: Messages, options: Mapping[str, Any]) -> inference_pb2.ChatRequest:
    """Raises as generate_request does."""
    request = inference_pb2.ChatRequest(messages=chat_messages(messages))
    _fill(request, options)
    return request


def chat_messages(messages: Messages) -> list[inference_pb2.ChatMessage]:
    """A plain string is one message of the user."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    with fitting("messages"):
        return [_chat_message(message) for message in messages]


def _chat_message(message: Mapping[str, Any]) -> inference_pb2.ChatMessage:
    """Raises TypeError for a key that messages do not have."""
    values = dict(message)
    content = values.pop("content", None) or ""
    if not isinstance(content, str):
        values["parts"] = [inference_pb2.ContentPart(text=text) for text in content]
        content = ""
    calls = [call if isinstance(call, Mapping) else dataclasses.asdict(call) for call in values.pop("tool_calls", ())]
    unknown = set(values) - set(inference_pb2.ChatMessage.DESCRIPTOR.fields_by_name)
    if unknown:
        raise TypeError(f"unknown key {unknown.pop()!r} of a message")
    return inference_pb2.ChatMessage(
        content=content, tool_calls=[types_pb2.ToolCall(**call) for call in calls], **values
    )


def tokenize_request(
    text: Messages, *, model: str, add_special_tokens: bool, return_tokens: bool
) -> inference_pb2.TokenizeRequest:
    """Text, or a conversation as a list of messages."""
    request = inference_pb2.TokenizeRequest(add_special_tokens=add_special_tokens, return_tokens=return_tokens)
    with fitting("model"):
        request.model = model
    if isinstance(text, str):
        with fitting("text"):
            request.text = text
    else:
        request.conversation.messages.extend(chat_messages(text))
        request.conversation.SetInParent()
    return request


def detokenize_request(
    token_ids: Sequence[int], *, model: str, skip_special_tokens: bool
) -> inference_pb2.DetokenizeRequest:
    """Raises TaktClientError as generate_request does."""
    request = inference_pb2.DetokenizeRequest(skip_special_tokens=skip_special_tokens)
    with fitting("model"):
        request.model = model
    with fitting("token_ids"):
        request.token_ids.extend(token_ids)
    return request


@contextmanager
def fitting(field: str) -> Iterator[None]:
    """Tells of a value that its field cannot hold as a server tells of one outside its limits."""
    try:
        yield
    except ValueError as error:
        refusal = TaktClientError("INVALID_ARGUMENT", f"{field} cannot be sent: {error}")
        refusal.field = field
        raise refusal from None


def _fill(request: Any, options: Mapping[str, Any]) -> None:
    fields = request.DESCRIPTOR.fields_by_name
    for name, value in options.items():
        if name == "timeout":
            continue
        if name in _SAMPLING_FIELDS:
            target = request.sampling
        elif name in fields and name not in ("text", "token_ids", "messages", "sampling"):
            target = request
        else:
            raise TypeError(f"unknown option {name!r}")
        with fitting(name):
            _set(target, name, value)


def _set(message: Any, name: str, value: Any) -> None:
    if name == "stop" and isinstance(value, str):
        value = [value]
    elif name == "logit_bias":
        value = [types_pb2.LogitBias(token_id=token, bias=bias) for token, bias in value.items()]
    elif name == "repetition_detection":
        value = types_pb2.RepetitionDetection(**value)
    elif name == "structured_output":
        value = _structured_output(value)
    elif name == "output_kind" and isinstance(value, str):
        value = types_pb2.OutputKind.Value(f"OUTPUT_KIND_{value.upper()}")
    elif name == "tools":
        value = [_json_text(tool) for tool in value]
    elif name == "chat_template_kwargs":
        value = _json_text(value)
    target = getattr(message, name)
    if hasattr(target, "extend"):
        target.extend(value)
    elif hasattr(target, "CopyFrom"):
        target.CopyFrom(value)
    else:
        setattr(message, name, value)


def _structured_output(value: Mapping[str, Any]) -> types_pb2.StructuredOutput:
    """Raises ValueError unless it is exactly one constraint."""
    if len(value) != 1:
        raise ValueError(f"structured_output must be exactly one constraint, got {len(value)}")
    ((name, constraint),) = value.items()
    if name == "choice":
        return types_pb2.StructuredOutput(choice=types_pb2.ChoiceConstraint(choices=constraint))
    if name in ("json_schema", "structural_tag"):
        constraint = _json_text(constraint)
    return types_pb2.StructuredOutput(**{name: constraint})


def _json_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def embed_request(
    texts: str | Sequence[str], *, model: str, pooling: str, normalize: bool
) -> inference_pb2.EmbedRequest:
    """One text or several."""
    texts = [texts] if isinstance(texts, str) else texts
    with fitting("texts"):
        return inference_pb2.EmbedRequest(model=model, texts=texts, pooling=pooling, normalize=normalize)


def embeddings(response: inference_pb2.EmbedResponse) -> Embeddings:
    """Vectors of texts."""
    return Embeddings(tuple(tuple(entry.values) for entry in response.embeddings), _usage(response.usage))


def chunk(response: inference_pb2.GenerateResponse | inference_pb2.ChatResponse) -> Chunk:
    """One message of a stream."""
    last = response.HasField("finish_reason")
    return Chunk(
        request_id=response.request_id,
        index=response.index,
        text=response.text,
        token_ids=tuple(response.token_ids),
        finish_reason=types_pb2.FinishReason.Name(response.finish_reason)[len(_REASON_PREFIX) :].lower()
        if last
        else None,
        stop_reason=_stop_reason(response.stop_reason),
        usage=_usage(response.usage) if response.HasField("usage") else None,
        timings=_timings(response.timings) if response.HasField("timings") else None,
        prompt_token_ids=tuple(response.prompt_token_ids),
        logprobs=_positions(response.logprobs),
        prompt_logprobs=_positions(response.prompt_logprobs),
        reasoning=getattr(response, "reasoning", ""),
        tool_calls=tuple(
            ToolCall(call.index, call.id, call.name, call.arguments) for call in getattr(response, "tool_calls", ())
        ),
    )


def _positions(positions: Iterable[types_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(
            _candidate(position.token) if position.HasField("token") else None,
            tuple(_candidate(candidate) for candidate in position.candidates),
        )
        for position in positions
    )


def _candidate(candidate: types_pb2.TokenCandidate) -> TokenCandidate:
    return TokenCandidate(candidate.token_id, candidate.logprob, candidate.rank, candidate.text, candidate.bytes)


def _stop_reason(reason: types_pb2.StopReason) -> int | str | None:
    match = reason.WhichOneof("match")
    return None if match is None else getattr(reason, match)


def _usage(usage: types_pb2.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)


def _timings(timings: types_pb2.RequestTimings) -> Timings:
    return Timings(**{name: getattr(timings, name) for name in Timings.__dataclass_fields__})


def output(chunks: Iterable[Chunk]) -> Output:
    """Puts the chunks of a request's first output together."""
    whole = outputs(chunks)
    return whole[0] if whole else Output("", "", (), None, None, None, None)


def outputs(chunks: Iterable[Chunk]) -> list[Output]:
    """Puts the chunks of each output of a request together, in the order of their index."""
    by_index: dict[int, list[Chunk]] = {}
    for item in chunks:
        by_index.setdefault(item.index, []).append(item)
    return [_output(mine) for _, mine in sorted(by_index.items())]


def _output(mine: Sequence[Chunk]) -> Output:
    last = mine[-1]
    return Output(
        request_id=last.request_id,
        text="".join(c.text for c in mine),
        token_ids=tuple(token for c in mine for token in c.token_ids),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        usage=last.usage,
        timings=last.timings,
        index=last.index,
        prompt_token_ids=mine[0].prompt_token_ids,
        logprobs=tuple(position for c in mine for position in c.logprobs),
        prompt_logprobs=mine[0].prompt_logprobs,
        reasoning="".join(c.reasoning for c in mine),
        tool_calls=_whole_calls(call for c in mine for call in c.tool_calls),
    )


def _whole_calls(pieces: Iterable[ToolCall]) -> tuple[ToolCall, ...]:
    calls: dict[int, ToolCall] = {}
    for piece in pieces:
        known = calls.get(piece.index)
        calls[piece.index] = (
            piece if known is None else dataclasses.replace(known, arguments=known.arguments + piece.arguments)
        )
    return tuple(calls.values())


def tokens(response: inference_pb2.TokenizeResponse) -> Tokens:
    """A tokenized text."""
    return Tokens(tuple(response.token_ids), tuple(response.tokens), response.max_model_len)


def models(response: inference_pb2.ListModelsResponse) -> list[Model]:
    """The served models."""
    return [Model(m.name, m.root, m.max_model_len, m.num_ready_engines) for m in response.models]


def load(response: admin_pb2.GetLoadResponse) -> Load:
    """The load of a frontend and its engines."""
    engines = tuple(_engine_load(engine) for engine in response.engines)
    return Load(engines=engines, num_requests=response.num_requests, draining=response.draining)


def _engine_load(engine: admin_pb2.EngineLoad) -> EngineLoad:
    values = {name: getattr(engine, name) for name in EngineLoad.__dataclass_fields__}
    values["state"] = admin_pb2.EngineState.Name(engine.state)[len(_STATE_PREFIX) :].lower()
    return EngineLoad(**values)
