"""Our errors as HTTP answers in OpenAI's shape; the only place that knows the mapping.

Texts and names are those of the error itself, its field under the name that HTTP clients know.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.errors import OverloadedError, TaktError, UnavailableError

RETRY_AFTER_SECONDS = 1
MAX_MESSAGE_CHARACTERS = 1_024


@dataclass(frozen=True, slots=True)
class _Answer:
    """What stands for a google.rpc.Code: its name, the HTTP status, and OpenAI's type of error."""

    name: str
    status: int
    type: str


_ANSWERS = {
    1: _Answer("CANCELLED", 499, "invalid_request_error"),
    3: _Answer("INVALID_ARGUMENT", 400, "invalid_request_error"),
    4: _Answer("DEADLINE_EXCEEDED", 504, "server_error"),
    5: _Answer("NOT_FOUND", 404, "invalid_request_error"),
    6: _Answer("ALREADY_EXISTS", 409, "invalid_request_error"),
    8: _Answer("RESOURCE_EXHAUSTED", 429, "rate_limit_error"),
    9: _Answer("FAILED_PRECONDITION", 400, "invalid_request_error"),
    10: _Answer("ABORTED", 503, "server_error"),
    12: _Answer("UNIMPLEMENTED", 501, "invalid_request_error"),
    13: _Answer("INTERNAL", 500, "server_error"),
    14: _Answer("UNAVAILABLE", 503, "server_error"),
    16: _Answer("UNAUTHENTICATED", 401, "authentication_error"),
}
# Reasons of an InvalidRequestError that are faults of the HTTP request itself, and have a status of their own.
BODY_TOO_LARGE, UNSUPPORTED_MEDIA_TYPE = "BODY_TOO_LARGE", "UNSUPPORTED_MEDIA_TYPE"
METHOD_NOT_ALLOWED, UNKNOWN_PATH = "METHOD_NOT_ALLOWED", "UNKNOWN_PATH"
_STATUS_BY_REASON = {BODY_TOO_LARGE: 413, UNSUPPORTED_MEDIA_TYPE: 415, METHOD_NOT_ALLOWED: 405, UNKNOWN_PATH: 404}


def status_name(error: TaktError | None) -> str:
    """The name of an error's code, as metrics count it."""
    return "OK" if error is None else _ANSWERS[error.code].name


def status_of(error: TaktError) -> int:
    """The HTTP status of an error."""
    return _STATUS_BY_REASON.get(error.reason, _ANSWERS[error.code].status)


def headers_of(error: TaktError) -> dict[str, str]:
    """Headers that go with an error."""
    if isinstance(error, OverloadedError | UnavailableError):
        return {"retry-after": str(RETRY_AFTER_SECONDS)}
    if status_of(error) == 401:
        return {"www-authenticate": "Bearer"}
    # What is left of a body that was refused is not read.
    return {"connection": "close"} if status_of(error) == 413 else {}


def error_body(error: TaktError) -> dict[str, Any]:
    """The JSON value of an error."""
    message = error.message
    if len(message) > MAX_MESSAGE_CHARACTERS:
        message = message[: MAX_MESSAGE_CHARACTERS - 3] + "..."
    return {
        "error": {
            "message": message,
            "type": _ANSWERS[error.code].type,
            "param": error.field or None,
            "code": error.reason.lower(),
        }
    }


def rename_field(error: TaktError, names: Mapping[str, str]) -> None:
    """Gives an error's field the name that the client used: `names` maps ours to it."""
    if not error.field:
        return
    for ours, theirs in names.items():
        if re.match(re.escape(ours) + r"(?![A-Za-z0-9_])", error.field):
            renamed = theirs + error.field[len(ours) :]
            if error.message.startswith(error.field):
                error.message = renamed + error.message[len(error.field) :]
            error.field = renamed
            return


def dump(value: Any) -> bytes:
    """A value as JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
