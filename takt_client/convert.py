"""Requests from keywords, and plain values from responses. No I/O; both clients share it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from takt.v1 import admin_pb2, inference_pb2, types_pb2
from takt_client.errors import TaktClientError
from takt_client.types import Chunk, EngineLoad, Load, Messages, Model, Output, Timings, Tokens, Usage

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
        return [inference_pb2.ChatMessage(role=m["role"], content=m["content"]) for m in messages]


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
    if name == "logit_bias":
        value = [types_pb2.LogitBias(token_id=token, bias=bias) for token, bias in value.items()]
    if name == "repetition_detection":
        value = types_pb2.RepetitionDetection(**value)
    if name == "structured_output":
        value = types_pb2.StructuredOutput(**value)
    target = getattr(message, name)
    if hasattr(target, "extend"):
        target.extend(value)
    elif hasattr(target, "CopyFrom"):
        target.CopyFrom(value)
    else:
        setattr(message, name, value)


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
    )


def _stop_reason(reason: types_pb2.StopReason) -> int | str | None:
    match = reason.WhichOneof("match")
    return None if match is None else getattr(reason, match)


def _usage(usage: types_pb2.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)


def _timings(timings: types_pb2.RequestTimings) -> Timings:
    return Timings(**{name: getattr(timings, name) for name in Timings.__dataclass_fields__})


def output(chunks: Iterable[Chunk]) -> Output:
    """Puts the chunks of a request's first output together."""
    mine = [c for c in chunks if c.index == 0]
    last = mine[-1] if mine else Chunk("", 0, "", ())
    return Output(
        request_id=last.request_id,
        text="".join(c.text for c in mine),
        token_ids=tuple(token for c in mine for token in c.token_ids),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        usage=last.usage,
        timings=last.timings,
    )


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
