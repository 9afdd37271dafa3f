"""Tells a model's reasoning from its answer, in text that streams.

Models that reason open with <think>, or the chat template opens it for them, and close with </think>. What lies between
is reasoning, what follows is the answer; an output that does not open so is an answer altogether. Text that may be the
beginning of a mark is held back until it is decided.
"""

from dataclasses import dataclass

REASONING_PARSERS = ("auto", "think", "none")

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ReasonedText:
    """What a piece of text added to each."""

    reasoning: str
    text: str


class ReasoningParser:
    """Splits one output's text. Invariant: what it gives, joined with the marks, is what it got."""

    def __init__(self, *, is_open: bool) -> None:
        """`is_open`: the prompt ends inside the reasoning."""
        self._is_reasoning = is_open
        self._is_answering = False
        self._held = ""

    def append(self, text: str) -> ReasonedText:
        """Splits more text."""
        if self._is_answering:
            return ReasonedText("", text)
        buffer, self._held = self._held + text, ""
        if not self._is_reasoning:
            begin = buffer.lstrip()
            if len(begin) < len(OPEN) and OPEN.startswith(begin):
                self._held = buffer
                return ReasonedText("", "")
            if not begin.startswith(OPEN):
                self._is_answering = True
                return ReasonedText("", buffer)
            self._is_reasoning = True
            buffer = begin[len(OPEN) :]
        reasoning, mark, answer = buffer.partition(CLOSE)
        if mark:
            self._is_answering = True
            return ReasonedText(reasoning, answer)
        held = partial_mark(buffer, CLOSE)
        self._held = buffer[len(buffer) - held :]
        return ReasonedText(buffer[: len(buffer) - held], "")

    def finish(self) -> ReasonedText:
        """What was held back, at the end of the output."""
        held, self._held = self._held, ""
        return ReasonedText(held, "") if self._is_reasoning else ReasonedText("", held)


def partial_mark(text: str, mark: str) -> int:
    """Length of the longest end of a text that begins a mark and is not all of it."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def marks_reasoning(template: str) -> bool:
    """Whether a chat template is one of a model that reasons in marks."""
    return CLOSE in template


def leaves_reasoning_open(rendered: str, continued: str | None) -> bool:
    """Whether a rendered prompt ends inside the reasoning; `continued` is the final message when it is continued."""
    if continued is not None:
        return continued.rfind(OPEN) > continued.rfind(CLOSE)
    return rendered.rstrip().endswith(OPEN)
