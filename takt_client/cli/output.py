"""What the takt command prints: text for people with rich, or one JSON object a line with --json."""

import dataclasses
import json
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

# Answers go to standard output, everything about them to standard error.
answers = Console(highlight=False, soft_wrap=True)
notes = Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Prints a value, dataclasses included, as one line of JSON; keys without a value are left out. Bytes are lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, dict):
        value = {key: item for key, item in value.items() if item is not None and item != ()}
    sys.stdout.write(json.dumps(value, ensure_ascii=False, default=list) + "\n")
    sys.stdout.flush()


def print_answer(text: str, end: str = "") -> None:
    """Prints a model's words as they are: no markup is read into them."""
    answers.print(Text(text), end=end)


def note(text: str, style: str = "dim", end: str = "\n") -> None:
    """Tells the user something beside the answer."""
    notes.print(Text(text, style=style), end=end)


class CommandError(Exception):
    """Ends the command with one line on standard error and exit code 1."""
