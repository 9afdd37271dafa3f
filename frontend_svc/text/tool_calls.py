"""Reads calls of functions out of a model's text while it streams.

A call is a JSON object with a name and arguments. Each format tells where such objects are: Hermes' between tags in
free text, Llama's as the whole answer, and two that a constraint enforces, a list of calls and the arguments of one
function. A call is told as soon as its name is complete, its arguments piece by piece as the model writes them.
Invariant: text that turns out to be no call comes out as text, unchanged.
"""

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from frontend_svc.text.chat_template import ToolCall
from frontend_svc.text.reasoning import partial_mark

TOOL_CALL_PARSERS = ("hermes", "llama3_json", "none")

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
ARGUMENT_KEYS = ("arguments", "parameters")
_SPACE = " \t\r\n"


@dataclass(slots=True)
class CallDelta:
    """What a piece of text added: free text, and calls."""

    text: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


class ToolCallParser(Protocol):
    """Reads one output."""

    def append(self, text: str) -> CallDelta:
        """Reads more text."""

    def finish(self) -> CallDelta:
        """What was held back, at the end of the output."""


def make_tool_call_parser(name: str) -> ToolCallParser | None:
    """The parser of a name in TOOL_CALL_PARSERS for answers that may call functions; None for none."""
    makers: dict[str, Callable[[], ToolCallParser]] = {"hermes": HermesParser, "llama3_json": LlamaJsonParser}
    maker = makers.get(name)
    return None if maker is None else maker()


def new_call_id() -> str:
    """A name for a call."""
    return f"call_{secrets.token_hex(12)}"


def merge_tool_calls(calls: Sequence[ToolCall]) -> list[ToolCall]:
    """The calls that pieces make, one an index."""
    merged: dict[int, ToolCall] = {}
    for call in calls:
        known = merged.get(call.index)
        merged[call.index] = (
            call
            if known is None
            else ToolCall(call.index, known.id or call.id, known.name or call.name, known.arguments + call.arguments)
        )
    return list(merged.values())


class JsonScanner:
    """Follows one JSON value character by character."""

    __slots__ = ("_escaped", "_in_string", "_started", "depth", "is_complete")

    def __init__(self) -> None:
        self.depth = 0
        self.is_complete = False
        self._in_string = self._escaped = self._started = False

    def take(self, character: str) -> bool:
        """Whether the character belongs to the value; one behind it does not."""
        if self.is_complete:
            return False
        if self._in_string:
            self._take_in_string(character)
        elif character == '"':
            self._in_string = self._started = True
        elif character in "{[":
            self.depth += 1
            self._started = True
        elif character in "}]":
            if self.depth == 0:
                self.is_complete = True
                return False
            self.depth -= 1
            self.is_complete = self.depth == 0
        elif self.depth == 0 and (character == "," or (self._started and character in _SPACE)):
            # Behind a number or a word.
            self.is_complete = True
            return False
        elif character not in _SPACE:
            self._started = True
        return True

    def _take_in_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            self.is_complete = self.depth == 0


class CallReader:
    """Reads one object {"name": ..., "arguments": ...} and gives its pieces as they become known."""

    def __init__(self, index: int) -> None:
        self.is_complete = False
        # Set once a piece was given: from then on it is a call.
        self.has_begun = False
        # The object is no call.
        self.failed = False
        self.source = ""
        self._index = index
        self._key: str | None = None
        self._buffer = ""
        self._state = "open"
        self._scanner = JsonScanner()
        self._name: str | None = None
        self._arguments = ""
        self._has_arguments = False

    def append(self, text: str) -> tuple[list[ToolCall], str]:
        """Pieces of the call, and the text behind the object."""
        pieces: list[ToolCall] = []
        for position, character in enumerate(text):
            self.source += character
            self._step(character)
            if self.failed:
                return pieces, text[position + 1 :]
            if self.is_complete:
                self._give(pieces)
                return pieces, text[position + 1 :]
        self._give(pieces)
        return pieces, ""

    def _step(self, character: str) -> None:
        if self._state == "value":
            if self._scanner.take(character):
                self._value(character)
                return
            self._end_value()
        if character in _SPACE:
            return
        expected = {"open": "{", "key": '"', "colon": ":", "comma": ","}
        if self._state == "in key":
            self._buffer += character
            if character == '"' and not self._buffer.endswith('\\"'):
                self._key, self._state = self._buffer[:-1], "colon"
        elif character == "}" and self._state in ("key", "comma"):
            self.is_complete = self._name is not None
            self.failed = not self.is_complete
        elif character != expected[self._state]:
            self.failed = True
        elif character == '"':
            self._buffer, self._state = "", "in key"
        elif character == ":":
            self._buffer, self._state, self._scanner = "", "value", JsonScanner()
        else:
            self._state = "key"

    def _value(self, character: str) -> None:
        if self._key in ARGUMENT_KEYS:
            # Leading spaces are none of the arguments.
            if self._has_arguments or character not in _SPACE:
                self._has_arguments = True
                self._arguments += character
        else:
            self._buffer += character
        if self._scanner.is_complete:
            self._end_value()

    def _end_value(self) -> None:
        if self._key == "name":
            try:
                name = json.loads(self._buffer)
            except ValueError:
                name = None
            self._name = name if isinstance(name, str) and name else None
            self.failed = self._name is None
        self._state = "comma"

    def _give(self, pieces: list[ToolCall]) -> None:
        if self._name is None or self.failed:
            return
        if not self.has_begun:
            self.has_begun = True
            pieces.append(ToolCall(self._index, new_call_id(), self._name, ""))
        if self.is_complete and not self._has_arguments:
            self._arguments = "{}"
        if self._arguments:
            pieces.append(ToolCall(self._index, "", "", self._arguments))
            self._arguments = ""


class HermesParser:
    """<tool_call>{...}</tool_call>, any number of times, in free text."""

    def __init__(self) -> None:
        self._held = ""
        self._reader: CallReader | None = None
        self._closing = ""
        self._count = 0

    def append(self, text: str) -> CallDelta:
        """Reads more text."""
        delta = CallDelta()
        while text:
            text = self._free(text, delta) if self._reader is None else self._call(self._reader, text, delta)
        return delta

    def _free(self, text: str, delta: CallDelta) -> str:
        """Reads free text up to a tag; returns what is behind it."""
        buffer, self._held = self._held + text, ""
        before, mark, behind = buffer.partition(OPEN)
        if mark:
            delta.text += before
            self._reader, self._closing = CallReader(self._count), ""
            return behind
        held = partial_mark(buffer, OPEN)
        delta.text += buffer[: len(buffer) - held]
        self._held = buffer[len(buffer) - held :]
        return ""

    def _call(self, reader: CallReader, text: str, delta: CallDelta) -> str:
        """Reads inside a tag; returns what is behind it."""
        if not reader.is_complete:
            pieces, text = reader.append(text)
            delta.tool_calls += pieces
            if reader.failed:
                self._give_up(reader, delta)
                return text
        buffer = self._closing + text
        _, mark, behind = buffer.partition(CLOSE)
        if not mark:
            self._closing = buffer
            return ""
        self._reader = None
        self._count += 1
        return behind

    def _give_up(self, reader: CallReader, delta: CallDelta) -> None:
        """What is no call is text; of one that has been told a part, the rest is dropped."""
        if reader.has_begun:
            self._count += 1
        else:
            delta.text += OPEN + reader.source
        self._reader = None

    def finish(self) -> CallDelta:
        """A call that is cut off stays cut off; a tag that is cut off is text."""
        delta = CallDelta(self._held)
        if self._reader is not None and not self._reader.has_begun:
            delta.text += OPEN + self._reader.source
        self._held, self._reader = "", None
        return delta


class _CallsParser:
    """Calls in a row with separators between them; anything else before the first one makes the answer a text."""

    def __init__(self, *, opening: str, separators: str) -> None:
        self._opening = opening
        self._separators = separators + _SPACE
        self._reader: CallReader | None = None
        self._count = 0
        self._held = ""
        self._is_text = False

    def append(self, text: str) -> CallDelta:
        """Reads more text."""
        delta = CallDelta()
        while text and not self._is_text:
            if self._reader is None:
                text = self._between(text, delta)
                continue
            pieces, text = self._reader.append(text)
            delta.tool_calls += pieces
            if self._reader.failed:
                if not self._reader.has_begun:
                    delta.text += self._held + self._reader.source
                self._is_text, self._held, self._reader = True, "", None
            elif self._reader.is_complete:
                self._reader, self._held = None, ""
                self._count += 1
        delta.text += text
        return delta

    def _between(self, text: str, delta: CallDelta) -> str:
        """Skips up to the next object; returns the text from it on."""
        buffer, self._held = self._held + text, ""
        rest = buffer.lstrip(_SPACE)
        if self._count == 0 and self._opening and rest.startswith(self._opening):
            rest = rest[len(self._opening) :]
        elif self._count == 0 and self._opening and self._opening.startswith(rest):
            self._held = buffer
            return ""
        rest = rest.lstrip(self._separators)
        if not rest:
            self._held = buffer
            return ""
        if rest[0] == "{":
            self._held = buffer[: len(buffer) - len(rest)]
            self._reader = CallReader(self._count)
            return rest
        self._is_text = True
        delta.text += buffer
        return ""

    def finish(self) -> CallDelta:
        """What was held back is text, unless it is what stands behind calls."""
        delta = CallDelta()
        if self._reader is not None:
            if not self._reader.has_begun:
                delta.text = self._held + self._reader.source
        elif self._count == 0:
            delta.text = self._held
        self._reader, self._held = None, ""
        return delta


class LlamaJsonParser(_CallsParser):
    """{"name": ..., "parameters": {...}} as the whole answer, several with semicolons between them."""

    def __init__(self) -> None:
        super().__init__(opening=PYTHON_TAG, separators=";")


class CallListParser(_CallsParser):
    """A JSON list of calls, as the constraint of tool_choice required has it."""

    def __init__(self) -> None:
        super().__init__(opening="[", separators=",]")


class ArgumentsParser:
    """The arguments of one function, as the constraint of a named tool_choice has them."""

    def __init__(self, name: str) -> None:
        self._name = name

    def append(self, text: str) -> CallDelta:
        """All text is arguments."""
        if not text:
            return CallDelta()
        pieces = [] if not self._name else [ToolCall(0, new_call_id(), self._name, "")]
        self._name = ""
        return CallDelta(tool_calls=[*pieces, ToolCall(0, "", "", text)])

    def finish(self) -> CallDelta:
        """Nothing is held back."""
        return CallDelta()
