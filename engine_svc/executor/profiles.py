"""Where profiles are written: one rule for every executor."""

import re
from pathlib import Path

from shared.errors import InvalidRequestError, PreconditionError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


def trace_path(folder: str | None, name: str) -> Path:
    """A free path for the trace of a profile; makes the folder.

    Raises PreconditionError when no folder is set, and InvalidRequestError for a name that is no plain file name.
    """
    if folder is None:
        raise PreconditionError("profiles are off: the engine was started without a profile folder")
    if not _NAME.fullmatch(name):
        rule = "up to 64 letters, digits, dots, dashes and underscores, the first no dot and no dash"
        raise InvalidRequestError(f"name must be {rule}, got {name[:80]!r}", field="name")
    Path(folder).mkdir(parents=True, exist_ok=True)
    path, number = Path(folder) / f"{name}.json", 1
    while path.exists():
        number += 1
        path = Path(folder) / f"{name}-{number}.json"
    return path
