"""Reads the JSON body of a request field by field, each by its kind. Knows no field by name.

A field that is null is one that is not there. Every fault is an InvalidRequestError that names the field, what it must
be, and what it is; values are never repeated when they may be a prompt.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from shared.errors import InvalidRequestError

T = TypeVar("T")
Kind = Callable[[str, Any], T]

_INT32 = 2**31
_INT64 = 2**63
# What JSON calls them.
_TYPE_NAMES = {
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


def parse_body(body: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises InvalidRequestError."""
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        detail = ""
        if isinstance(error, json.JSONDecodeError):
            detail = f": {error.msg} at line {error.lineno}, column {error.colno}"
        raise InvalidRequestError(f"body must be JSON, got something else{detail}", reason="INVALID_JSON") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"body must be a JSON object, got {type_name(value)}", reason="INVALID_JSON")
    if b"\\ud" in body or b"\\uD" in body:
        _refuse_lone_surrogates(value)
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(name)


def _refuse_lone_surrogates(value: Any) -> None:
    """Halves of escaped characters are no text: nothing can be made of them in UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        message = "body must hold Unicode text, got half of a surrogate pair"
        raise InvalidRequestError(message, reason="INVALID_JSON") from None


def type_name(value: object) -> str:
    """What JSON calls the type of a value."""
    return _TYPE_NAMES.get(type(value), "something else")


def refuse(name: str, rule: str, got: object) -> InvalidRequestError:
    """The error: NAME must be RULE, got GOT."""
    return InvalidRequestError(f"{name} must be {rule}, got {got}", field=name)


# --- kinds ------------------------------------------------------------------------------------------------------------


def number(name: str, value: Any) -> float:
    """A number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refuse(name, "a number", type_name(value))
    try:
        return float(value)
    except OverflowError:
        raise refuse(name, "a finite number", "a larger one") from None


def integer(name: str, value: Any) -> int:
    """An integer of 64 bits. Whole numbers with a point are integers: JSON has no other."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        got = value if isinstance(value, float) else type_name(value)
        raise refuse(name, "an integer", got)
    if not -_INT64 <= value < _INT64:
        raise refuse(name, "an integer of 64 bits", "a larger one")
    return value


def small_integer(name: str, value: Any) -> int:
    """An integer of 32 bits."""
    found = integer(name, value)
    if not -_INT32 <= found < _INT32:
        raise refuse(name, "an integer of 32 bits", found)
    return found


def boolean(name: str, value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise refuse(name, "true or false", type_name(value))
    return value


def string(name: str, value: Any) -> str:
    """A text."""
    if not isinstance(value, str):
        raise refuse(name, "a string", type_name(value))
    return value


def strings(name: str, value: Any) -> tuple[str, ...]:
    """A list of texts; one text alone is a list of one."""
    if isinstance(value, str):
        return (value,)
    return tuple(string(f"{name}[{index}]", item) for index, item in enumerate(array(name, value)))


def integers(name: str, value: Any) -> tuple[int, ...]:
    """A list of integers."""
    items = array(name, value)
    if all(type(item) is int for item in items):
        # Prompts come this way; their ids are checked against the vocabulary as a whole.
        return tuple(items)
    return tuple(integer(f"{name}[{index}]", item) for index, item in enumerate(items))


def array(name: str, value: Any) -> list[Any]:
    """A list of anything."""
    if not isinstance(value, list):
        raise refuse(name, "a list", type_name(value))
    return value


def json_object(name: str, value: Any) -> dict[str, Any]:
    """An object."""
    if not isinstance(value, dict):
        raise refuse(name, "an object", type_name(value))
    return value


def json_text(name: str, value: Any) -> str:
    """An object as JSON text; text is taken as it is."""
    return value if isinstance(value, str) else as_json(json_object(name, value))


def as_json(value: Any) -> str:
    """A value as JSON text."""
    return json.dumps(value, ensure_ascii=False)


# --- objects ----------------------------------------------------------------------------------------------------------


class Fields:
    """A JSON object whose fields are taken one by one; what is never taken is unknown."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        """`path` is the object's own name, empty for the body."""
        self.given = frozenset(values)
        self._left = {name: value for name, value in values.items() if value is not None}
        self._path = path

    def name(self, field: str) -> str:
        """A field's full name."""
        return f"{self._path}.{field}" if self._path else field

    def take(self, field: str, kind: Kind[T]) -> T | None:
        """A field's value, None when it is not there. Raises InvalidRequestError."""
        value = self._left.pop(field, None)
        return None if value is None else kind(self.name(field), value)

    def take_or(self, field: str, kind: Kind[T], default: T) -> T:
        """A field's value, or the default when it is not there. Raises InvalidRequestError."""
        value = self.take(field, kind)
        return default if value is None else value

    def require(self, field: str, kind: Kind[T]) -> T:
        """A field that must be there. Raises InvalidRequestError."""
        value = self.take(field, kind)
        if value is None:
            raise InvalidRequestError(f"{self.name(field)} must be set, got none", field=self.name(field))
        return value

    def take_object(self, field: str) -> "Fields | None":
        """An object within this one. Raises InvalidRequestError."""
        value = self.take(field, json_object)
        return None if value is None else Fields(value, self.name(field))

    def take_all(self, kinds: Mapping[str, Kind[Any]]) -> dict[str, Any]:
        """The values of those fields of a table that are there. Raises InvalidRequestError."""
        return {field: self.take(field, kind) for field, kind in kinds.items() if field in self._left}

    def drop(self, fields: Iterable[str]) -> None:
        """Leaves out fields that mean nothing here."""
        for field in fields:
            self._left.pop(field, None)

    def refuse_unsupported(self, neutral: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuses fields that are known and not built, unless their value is one that asks for nothing."""
        for field, values in neutral.items():
            value = self._left.pop(field, None)
            if value is not None and value not in values:
                name = self.name(field)
                raise InvalidRequestError(
                    f"{name} must be left out, got {type_name(value)}: it is not supported",
                    field=name,
                    reason="UNSUPPORTED_FIELD",
                )

    @property
    def unknown(self) -> list[str]:
        """Names of the fields that nobody took."""
        return [self.name(field) for field in self._left]
