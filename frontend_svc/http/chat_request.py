"""The body of /v1/chat/completions as a GenerationRequest, and how its answer is to look."""

from dataclasses import dataclass
from typing import Any

from frontend_svc.http.fields import (
    Fields,
    array,
    as_json,
    boolean,
    integer,
    json_object,
    refuse,
    string,
    type_name,
)
from frontend_svc.http.request_fields import (
    Ids,
    Streaming,
    finish,
    make_ids,
    require_no_prompt_logprobs,
    take_scheduling,
    take_streaming,
)
from frontend_svc.http.sampling_fields import names_of, take_constraint, take_sampling
from frontend_svc.request import GenerationRequest, OutputKind
from frontend_svc.text.chat_template import ChatMessage, ToolCall
from shared.errors import InvalidRequestError

ID_PREFIX = "chatcmpl-"
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"], []),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "documents": ([],),
    "chat_template": (),
    "echo": (False,),
    "add_special_tokens": (False,),
    "best_of": (1,),
}
# The instructions of an application, under a name that templates do not know.
_ROLES = {"developer": "system"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How the answer looks. `top_logprobs` None: without log-probabilities. `names`: ours to those of the body."""

    ids: Ids
    streaming: Streaming | None
    top_logprobs: int | None = None
    returns_token_ids: bool = False
    shows_reasoning: bool = True
    parallel_tool_calls: bool = True
    names_a_tool: bool = False
    names: dict[str, str]


def parse_chat(values: dict[str, Any], request_id: str) -> tuple[GenerationRequest, ChatOptions]:
    """Reads a body. Raises InvalidRequestError."""
    fields = Fields(values)
    ids = make_ids(ID_PREFIX, fields, request_id)
    streaming = take_streaming(fields)
    top_logprobs = _take_logprobs(fields)
    constraint = take_constraint(fields)
    conversation = take_conversation(fields)
    max_tokens = fields.take("max_completion_tokens", integer)
    sampling = take_sampling(
        fields,
        logprobs=top_logprobs,
        structured_output=None if constraint is None else constraint[1],
        output_kind=OutputKind.FINAL_ONLY if streaming is None else OutputKind.DELTA,
        **({} if max_tokens is None else {"max_tokens": max_tokens}),
    )
    require_no_prompt_logprobs(sampling.prompt_logprobs, streaming)
    choice = values.get("tool_choice")
    options = ChatOptions(
        ids=ids,
        streaming=streaming,
        top_logprobs=top_logprobs,
        returns_token_ids=fields.take_or("return_token_ids", boolean, default=False),
        shows_reasoning=fields.take_or("include_reasoning", boolean, default=True),
        parallel_tool_calls=fields.take_or("parallel_tool_calls", boolean, default=True),
        names_a_tool=isinstance(choice, dict),
        names=names_of(constraint)
        | ({} if max_tokens is None else {"max_tokens": "max_completion_tokens"})
        | {"logprobs": "top_logprobs"},
    )
    generation = GenerationRequest(
        request_id=ids.request,
        model=fields.take_or("model", string, default=""),
        sampling=sampling,
        return_prompt_token_ids=options.returns_token_ids or bool(streaming and streaming.continuous_usage),
        **conversation,
        **take_scheduling(fields),
    )
    finish(fields, _UNSUPPORTED)
    return generation, options


def _take_logprobs(fields: Fields) -> int | None:
    wanted = fields.take_or("logprobs", boolean, default=False)
    count = fields.take("top_logprobs", integer)
    if not wanted:
        if count:
            raise refuse("top_logprobs", "left out unless logprobs is true", count)
        return None
    return 0 if count is None else count


def take_conversation(fields: Fields) -> dict[str, Any]:
    """Fields of a GenerationRequest that only a conversation has. Raises InvalidRequestError."""
    messages = fields.require("messages", array)
    kwargs = fields.take("chat_template_kwargs", json_object) or {}
    effort = fields.take("reasoning_effort", string)
    if effort is not None:
        kwargs = {"reasoning_effort": effort} | kwargs
    tools = [_tool(f"tools[{index}]", tool) for index, tool in enumerate(fields.take("tools", array) or ())]
    return {
        "messages": tuple(_message(f"messages[{index}]", message) for index, message in enumerate(messages)),
        "tools": tuple(tools),
        "tool_choice": fields.take("tool_choice", _tool_choice),
        "chat_template_kwargs": as_json(kwargs) if kwargs else None,
        "add_generation_prompt": fields.take("add_generation_prompt", boolean),
        "continue_final_message": fields.take_or("continue_final_message", boolean, default=False),
    }


def _tool(name: str, value: Any) -> str:
    fields = Fields(json_object(name, value), name)
    kind = fields.require("type", string)
    if kind != "function":
        raise refuse(f"{name}.type", "function", repr(kind[:40]))
    fields.require("function", json_object)
    return as_json(value)


def _tool_choice(name: str, value: Any) -> str:
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            raise refuse(name, "none, auto, required or an object that names a function", repr(value[:40]))
        return value
    fields = Fields(json_object(name, value), name)
    kind = fields.require("type", string)
    if kind != "function":
        raise refuse(f"{name}.type", "function", repr(kind[:40]))
    return Fields(fields.require("function", json_object), f"{name}.function").require("name", string)


# --- messages ---------------------------------------------------------------------------------------------------------


def _message(name: str, value: Any) -> ChatMessage:
    fields = Fields(json_object(name, value), name)
    role = fields.require("role", string)
    content = fields.take("content", _content) or ()
    calls = fields.take("tool_calls", array) or ()
    reasoning = fields.take("reasoning_content", string)
    return ChatMessage(
        role=_ROLES.get(role, role),
        content=content if isinstance(content, str) else "",
        parts=() if isinstance(content, str) else content,
        name=fields.take_or("name", string, default=""),
        tool_calls=tuple(_tool_call(f"{name}.tool_calls[{index}]", index, call) for index, call in enumerate(calls)),
        tool_call_id=fields.take_or("tool_call_id", string, default=""),
        reasoning=fields.take_or("reasoning", string, default="") if reasoning is None else reasoning,
    )


def _content(name: str, value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refuse(name, "a string or a list of parts", type_name(value))
    return tuple(_part(f"{name}[{index}]", part) for index, part in enumerate(value))


def _part(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    fields = Fields(json_object(name, value), name)
    kind = fields.require("type", string)
    if kind not in ("text", "refusal"):
        raise InvalidRequestError(
            f"{name}.type must be text, got {kind[:40]!r}: only text is supported",
            field=f"{name}.type",
            reason="UNSUPPORTED_FIELD",
        )
    return fields.require(kind, string)


def _tool_call(name: str, index: int, value: Any) -> ToolCall:
    fields = Fields(json_object(name, value), name)
    function = Fields(fields.require("function", json_object), f"{name}.function")
    return ToolCall(
        index=index,
        id=fields.take_or("id", string, default=""),
        name=function.require("name", string),
        arguments=function.take_or("arguments", string, default=""),
    )
