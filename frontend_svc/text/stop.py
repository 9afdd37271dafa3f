"""Stop strings in a growing text.

The match that completes earliest wins, and among those that complete at the same character the first in the request's
list. Text that may be the beginning of a match is held back, so that what was given out never has to be taken back.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The stop string, and the text to give out up to it."""

    stop_string: str
    text: str


class StopMatcher:
    """Searches one output's text. With `include_stop_str` nothing is held back, since a match is given out too."""

    def __init__(self, stop: Sequence[str], *, include_stop_str: bool) -> None:
        """`stop` holds at least one string, none of them empty."""
        self._stop = tuple(stop)
        self._include_stop_str = include_stop_str
        self._longest = max(map(len, stop))
        # The end of the text seen so far: all that a match could begin in.
        self._tail = ""
        # Characters at the end of the tail that were not given out.
        self._num_held = 0

    def append(self, text: str, *, may_stop: bool) -> str | StopMatch:
        """Text to give out, or the match that ends the output. Without `may_stop` nothing completes in `text`."""
        if not text:
            return ""
        start = len(self._tail)
        buffer = self._tail + text
        given = start - self._num_held
        match = self._find(buffer, start) if may_stop else None
        if match is not None:
            end, stop_string = match
            cut = end if self._include_stop_str else end - len(stop_string)
            return StopMatch(stop_string, buffer[given:cut])
        self._num_held = 0 if self._include_stop_str else self._num_to_hold(buffer)
        output = buffer[given : len(buffer) - self._num_held]
        self._tail = buffer[max(0, len(buffer) - self._longest + 1) :]
        return output

    def finish(self) -> str:
        """What was held back."""
        return self._tail[len(self._tail) - self._num_held :]

    def _find(self, buffer: str, start: int) -> tuple[int, str] | None:
        """(end, stop string) of the match that ends first behind `start`."""
        best: tuple[int, str] | None = None
        for stop_string in self._stop:
            index = buffer.find(stop_string, max(0, start - len(stop_string) + 1))
            if index >= 0 and (best is None or index + len(stop_string) < best[0]):
                best = (index + len(stop_string), stop_string)
        return best

    def _num_to_hold(self, buffer: str) -> int:
        """Length of the longest end of the buffer that begins a stop string and is not all of it."""
        longest = 0
        for stop_string in self._stop:
            first = stop_string[0]
            index = buffer.find(first, max(0, len(buffer) - len(stop_string) + 1))
            while 0 <= index < len(buffer) - longest:
                if stop_string.startswith(buffer[index:]):
                    longest = len(buffer) - index
                    break
                index = buffer.find(first, index + 1)
        return longest
