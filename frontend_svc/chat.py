"""What a conversation's own options mean: how it is rendered, what its answer must look like, how it is read.

Tools are normalised to what templates expect. A required or named choice becomes a constraint on the answer, so that
the answer can be read for certain. Knows no tokens and no engines.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from frontend_svc.request import GenerationRequest, RequestOutput
from frontend_svc.text.chat_template import RenderOptions
from frontend_svc.text.reasoning import ReasonedText, ReasoningParser, marks_reasoning
from frontend_svc.text.tool_calls import ArgumentsParser, CallListParser, ToolCallParser, make_tool_call_parser
from frontend_svc.validation import Caps, require
from frontend_svc.validation_sampling import parse_json, validate_structured_output
from shared.errors import InvalidRequestError
from shared.types import StructuredOutputKind, StructuredOutputSpec

_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class ToolMode(Enum):
    """What may become of the answer."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPlan:
    """A conversation's options, checked. `constraint` is the one that the choice of tools asks for."""

    render: RenderOptions
    tool_mode: ToolMode = ToolMode.NONE
    tool_name: str = ""
    constraint: StructuredOutputSpec | None = None


@dataclass(frozen=True, slots=True)
class ChatParsers:
    """The operator's choice of how answers are read."""

    tool_calls: str
    reasons: bool

    @classmethod
    def choose(cls, tool_calls: str, reasoning: str, template: str) -> "ChatParsers":
        """Resolves the automatic choice by the model's chat template."""
        return cls(tool_calls, marks_reasoning(template) if reasoning == "auto" else reasoning == "think")


def plan_chat(request: GenerationRequest, caps: Caps) -> ChatPlan:
    """Checks and resolves what only a conversation has. Raises InvalidRequestError."""
    tools = _tools(request, caps)
    mode, name = _tool_choice(request, tools)
    constraint = _constraint(mode, name, tools)
    if constraint is not None:
        rule = f"unset with tool_choice {request.tool_choice}"
        require(request.sampling.structured_output is None, "structured_output", rule, "a constraint")
        validate_structured_output(constraint, caps, field="tools")
    opens = request.add_generation_prompt
    continues = request.continue_final_message
    if continues:
        require(not opens, "add_generation_prompt", "false with continue_final_message", opens)
        assert request.messages is not None
        require(request.messages[-1].text.strip() != "", "continue_final_message", "false for an empty message", "true")
    return ChatPlan(
        render=RenderOptions(
            tools=() if mode is ToolMode.NONE else tuple(tools.values()),
            variables=_template_kwargs(request, caps),
            add_generation_prompt=not continues if opens is None else opens,
            continue_final_message=continues,
        ),
        tool_mode=mode,
        tool_name=name,
        constraint=constraint,
    )


def _tools(request: GenerationRequest, caps: Caps) -> dict[str, dict[str, Any]]:
    """The tools by name, each {"type": "function", "function": {...}}."""
    count = len(request.tools)
    require(count <= caps.max_tools, "tools", f"at most {caps.max_tools} functions", f"{count} functions")
    size = sum(len(tool.encode()) for tool in request.tools)
    require(size <= caps.max_prompt_bytes, "tools", f"at most {caps.max_prompt_bytes} bytes", f"{size} bytes")
    tools: dict[str, dict[str, Any]] = {}
    for index, text in enumerate(request.tools):
        field = f"tools[{index}]"
        tool = parse_json(field, text, caps.max_structured_output_nesting)
        function = tool.get("function", tool) if isinstance(tool, dict) else tool
        require(isinstance(function, dict), field, "a JSON object", f"a {type(function).__name__}")
        name = function.get("name")
        is_name = isinstance(name, str) and _FUNCTION_NAME.fullmatch(name) is not None
        require(is_name, f"{field}.name", "1 to 64 letters, digits, '_', '.' or '-'", name)
        require(name not in tools, f"{field}.name", "unique", name)
        parameters = function.get("parameters", {})
        require(isinstance(parameters, dict), f"{field}.parameters", "a JSON object", f"a {type(parameters).__name__}")
        tools[name] = {"type": "function", "function": function}
    return tools


def _tool_choice(request: GenerationRequest, tools: Mapping[str, Any]) -> tuple[ToolMode, str]:
    choice = request.tool_choice or ("auto" if tools else "none")
    if choice == "none":
        return ToolMode.NONE, ""
    require(bool(tools), "tool_choice", "none without tools", choice)
    if choice in ("auto", "required"):
        return ToolMode(choice), ""
    require(choice in tools, "tool_choice", "none, auto, required or the name of a tool", choice)
    return ToolMode.NAMED, choice


def _constraint(mode: ToolMode, name: str, tools: Mapping[str, Any]) -> StructuredOutputSpec | None:
    """A JSON schema of the calls that must be made."""
    if mode is ToolMode.NAMED:
        schema = _parameters(tools[name])
    elif mode is ToolMode.REQUIRED:
        calls = [_call_schema(tool_name, _parameters(tool)) for tool_name, tool in tools.items()]
        items = calls[0] if len(calls) == 1 else {"anyOf": calls}
        schema = {"type": "array", "minItems": 1, "items": items, **_definitions(calls)}
    else:
        return None
    return StructuredOutputSpec(StructuredOutputKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))


def _definitions(calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Moves the definitions of all parameters to the root, where their references look for them."""
    merged: dict[str, Any] = {}
    for call in calls:
        for key in ("$defs", "definitions"):
            for name, definition in call["properties"]["parameters"].pop(key, {}).items():
                known = merged.setdefault(key, {}).setdefault(name, definition)
                require(known == definition, "tools", f"free of different definitions of {key}/{name}", "two")
    return merged


def _parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    return dict(tool["function"].get("parameters") or {"type": "object", "properties": {}})


def _call_schema(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"type": "string", "enum": [name]}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _template_kwargs(request: GenerationRequest, caps: Caps) -> dict[str, Any]:
    field, text = "chat_template_kwargs", request.chat_template_kwargs
    if not text:
        return {}
    size = len(text.encode())
    require(size <= caps.max_prompt_bytes, field, f"at most {caps.max_prompt_bytes} bytes", f"{size} bytes")
    values = parse_json(field, text, caps.max_structured_output_nesting)
    if not isinstance(values, dict):
        raise InvalidRequestError(f"{field} must be a JSON object, got a {type(values).__name__}", field=field)
    return values


# --- answers ----------------------------------------------------------------------------------------------------------


class AnswerReader:
    """Parts one answer's text into reasoning, text and calls of functions."""

    def __init__(self, reasoning: ReasoningParser | None, tool_calls: ToolCallParser | None) -> None:
        self._reasoning = reasoning
        self._tool_calls = tool_calls
        self._has_tool_calls = False

    def read(self, output: RequestOutput) -> None:
        """Moves what is no text out of the output's text; at the output's end, gives out what was held back."""
        is_last = output.finish_reason is not None
        pieces = [ReasonedText("", output.text)]
        if self._reasoning is not None:
            pieces = [self._reasoning.append(output.text)]
            if is_last:
                pieces.append(self._reasoning.finish())
        output.reasoning = "".join(piece.reasoning for piece in pieces)
        output.text = "".join(piece.text for piece in pieces)
        if self._tool_calls is None:
            return
        deltas = [self._tool_calls.append(output.text)]
        if is_last:
            deltas.append(self._tool_calls.finish())
        output.text = "".join(delta.text for delta in deltas)
        output.tool_calls = [call for delta in deltas for call in delta.tool_calls]
        self._has_tool_calls = self._has_tool_calls or bool(output.tool_calls)
        output.has_tool_calls = is_last and self._has_tool_calls


def make_reader(
    plan: ChatPlan | None, parsers: ChatParsers, *, is_constrained: bool, is_open: bool
) -> AnswerReader | None:
    """The reader of one answer; None when all of it is text. A constraint leaves no room for reasoning."""
    if plan is None:
        return None
    reasoning = ReasoningParser(is_open=is_open) if parsers.reasons and not is_constrained else None
    tool_calls: ToolCallParser | None = None
    if plan.tool_mode is ToolMode.AUTO and not is_constrained:
        tool_calls = make_tool_call_parser(parsers.tool_calls)
    elif plan.tool_mode is ToolMode.REQUIRED:
        tool_calls = CallListParser()
    elif plan.tool_mode is ToolMode.NAMED:
        tool_calls = ArgumentsParser(plan.tool_name)
    return None if reasoning is None and tool_calls is None else AnswerReader(reasoning, tool_calls)
