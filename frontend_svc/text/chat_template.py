"""The model's chat template: renders a conversation in a sandbox, as transformers does.

Templates come with models or from the operator, never from a client; still they run without access to anything but
the messages, and within limits of time and size.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt, the assistant's turn opened. Raises InvalidRequestError when the template fails on `messages`."""
        variables: dict[str, Any] = {
            **self._special_tokens,
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
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
