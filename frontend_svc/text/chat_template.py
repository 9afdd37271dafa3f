"""The model's chat template: renders a conversation in a sandbox, as transformers does.

Templates come with models or from the operator, never from a client; still they run without access to anything but
the messages, and within limits of time and size.
"""

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from shared.errors import InvalidRequestError, StartupError

MAX_RENDERED_CHARACTERS = 16 << 20
MAX_RENDER_SECONDS = 30.0
# Templates that take a message's content as a list of parts loop over it.
_LOOPS_OVER_PARTS = re.compile(r"for\s+\w+\s+in\s+\w+(\.content|\[['\"]content['\"]\])")
# Variables that requests must not set by another name.
_OWN_VARIABLES = frozenset(("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"))


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function, or more of one: `arguments` is JSON text, or the next piece of it."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation. `parts` are texts in place of `content`."""

    role: str
    content: str = ""
    parts: tuple[str, ...] = ()
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""

    @property
    def text(self) -> str:
        """All that is said, parts joined by line breaks."""
        return "\n".join(self.parts) if self.parts else self.content


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderOptions:
    """How a conversation is rendered. `tools` are function objects; `variables` are more of the template's own."""

    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class _GenerationTag(jinja2.ext.Extension):
    """Renders {% generation %} blocks as what they hold; the tag marks what training learns from."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        """Replaces the block by its body."""
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class TemplateRefusedError(jinja2.TemplateError):
    """The template itself refuses the messages."""


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefusedError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja's own filter it escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


class _Namespace(jinja2.utils.Namespace):
    """Takes no names with a leading underscore: they reach into Python's own objects."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # No named first parameter, so that a template may call one of its own names so.
        jinja2.utils.Namespace.__init__(*args, **kwargs)
        for name in dict(*args[1:], **kwargs):
            _check_name(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace takes no name with a leading underscore, got {name!r}")


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    return environment


class ChatTemplate:
    """A compiled template and the special tokens it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises StartupError when the template is no template."""
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise StartupError(f"the chat template cannot be read: {error.message}{line}") from error
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._takes_parts = _LOOPS_OVER_PARTS.search(source) is not None
        self._reserved = _OWN_VARIABLES.union(special_tokens, self._template.environment.globals)

    def render(self, messages: Sequence[ChatMessage], options: RenderOptions = RenderOptions()) -> str:
        """The prompt. Raises InvalidRequestError when the template fails on what it is given."""
        for name in options.variables:
            if name in self._reserved or not name.isidentifier() or name.startswith("_"):
                message = f"chat_template_kwargs must not set {name[:80]!r}, which is not the request's to set"
                raise InvalidRequestError(message, field="chat_template_kwargs")
        rendered = self._render(
            {
                "documents": None,
                **options.variables,
                **self._special_tokens,
                "messages": [self._as_variable(message) for message in messages],
                "tools": list(options.tools) or None,
                "add_generation_prompt": options.add_generation_prompt,
            }
        )
        return _cut_behind(rendered, messages[-1].text) if options.continue_final_message else rendered

    def _as_variable(self, message: ChatMessage) -> dict[str, Any]:
        """A message as templates know it; what is not set is not there."""
        variable: dict[str, Any] = {"role": message.role, "content": message.text}
        if self._takes_parts and message.parts:
            variable["content"] = [{"type": "text", "text": part} for part in message.parts]
        if message.name:
            variable["name"] = message.name
        if message.tool_call_id:
            variable["tool_call_id"] = message.tool_call_id
        if message.reasoning:
            # Both names are in use.
            variable["reasoning_content"] = variable["reasoning"] = message.reasoning
        if message.tool_calls:
            variable["tool_calls"] = [_call_as_variable(call) for call in message.tool_calls]
        return variable

    def _render(self, variables: dict[str, Any]) -> str:
        try:
            return self._join(variables)
        except TemplateRefusedError as error:
            raise InvalidRequestError(
                f"messages are refused by the chat template: {error}", field="messages"
            ) from error
        except InvalidRequestError:
            raise
        except Exception as error:
            # Python's own errors may quote the prompt; jinja's name what the template wanted.
            detail = f": {error}" if isinstance(error, jinja2.TemplateError) else ""
            message = f"messages make the chat template fail: {type(error).__name__}{detail}"
            raise InvalidRequestError(message, field="messages") from error

    def _join(self, variables: dict[str, Any]) -> str:
        end = time.monotonic() + MAX_RENDER_SECONDS
        pieces: list[str] = []
        size = 0
        for piece in self._template.generate(variables):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_RENDERED_CHARACTERS:
                message = f"messages must render to at most {MAX_RENDERED_CHARACTERS} characters, got more"
                raise InvalidRequestError(message, field="messages")
            if time.monotonic() > end:
                message = f"messages must render within {MAX_RENDER_SECONDS:g} s"
                raise InvalidRequestError(message, field="messages")
        return "".join(pieces)


def _call_as_variable(call: ToolCall) -> dict[str, Any]:
    """Templates write arguments as JSON themselves, so they get the value."""
    try:
        arguments: Any = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _cut_behind(rendered: str, text: str) -> str:
    """The prompt up to the end of its final message, so that the model goes on with it."""
    start = rendered.rfind(text.strip())
    if start < 0:
        message = "continue_final_message must be false for this chat template: it changes the final message"
        raise InvalidRequestError(message, field="continue_final_message")
    # Space behind the text stays where the template kept it.
    kept = text.lstrip() if rendered.startswith(text.lstrip(), start) else text.strip()
    return rendered[: start + len(kept)]
