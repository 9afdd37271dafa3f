"""What of JSON Schema a grammar can hold an output to; everything else is refused by name and place.

The library silently accepts keywords that it does not know. A client would take the answer for valid, so a keyword is
either in the tables here, or the request fails. The meaning of keywords is draft 2020-12's. Knows the schema's form,
not whether anything satisfies it: that is the library's to say.
"""

import json
from collections.abc import Iterator
from typing import Any

from shared.errors import InvalidRequestError

MAX_NESTING = 64

# Say nothing about what is valid.
_ANNOTATIONS = frozenset(
    {"$schema", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
)
# Hold a schema, a list of schemas, or schemas by name.
_ONE = frozenset({"items", "additionalProperties"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
_OTHERS = frozenset({"$ref", "type", "enum", "const", "pattern", "format", "required"})
SUPPORTED_KEYWORDS = _ANNOTATIONS | _ONE | _LISTS | _NAMED | _NUMBERS | _COUNTS | _OTHERS
FORMATS = frozenset({"date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})

_FIELD = "structured_output.json_schema"


def parse_json(text: str, field: str) -> Any:
    """The value of a JSON text. Raises InvalidRequestError for anything else, or when it is nested too deeply."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except RecursionError:
        raise InvalidRequestError(f"{field} must be nested at most {MAX_NESTING} deep, got more", field=field) from None
    except ValueError as error:
        raise InvalidRequestError(f"{field} must be JSON, got {_first_line(error)}", field=field) from None
    depth = nesting(value)
    if depth > MAX_NESTING:
        message = f"{field} must be nested at most {MAX_NESTING} deep, got {depth}"
        raise InvalidRequestError(message, field=field)
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name}, which JSON does not know")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("an object with a name twice")
    return value


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:160]


def nesting(value: Any) -> int:
    """Lists and objects around the innermost value."""
    depth, level = 0, [value]
    while level := [child for parent in level for child in _children(parent)]:
        depth += 1
    return depth


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values()) or [None]
    return (list(value) or [None]) if isinstance(value, list) else []


def check_schema(schema: Any, field: str = _FIELD) -> None:
    """Raises InvalidRequestError for the first keyword that would not be held to, naming it and its path."""
    if not isinstance(schema, dict | bool):
        raise InvalidRequestError(f"{field} must be an object or a boolean, got {_kind(schema)}", field=field)
    pending = [("#", schema)]
    while pending:
        path, value = pending.pop()
        if not isinstance(value, dict):
            continue
        for keyword, argument in value.items():
            where = f"{path}/{keyword}"
            if keyword not in SUPPORTED_KEYWORDS and not (keyword == "$id" and path == "#"):
                message = f"{field} must use supported keywords only, got {keyword!r} at {where}"
                raise InvalidRequestError(message, field=field, reason="UNSUPPORTED_KEYWORD")
            problem = _problem(keyword, argument)
            if problem:
                raise InvalidRequestError(f"{field}: {where} must be {problem}", field=field)
            pending += _subschemas(keyword, argument, where)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _problem(keyword: str, argument: Any) -> str:
    """What an argument must be and is not, with what it is; empty when it is right."""
    rule = _form_rule(keyword, argument)
    if rule:
        return f"{rule}, got {_kind(argument)}"
    if keyword == "format" and argument not in FORMATS:
        return f"one of {', '.join(sorted(FORMATS))}, got {argument[:32]!r}"
    if keyword == "$ref" and not argument.startswith("#"):
        return f"a place in the same schema, beginning with #, got {argument[:64]!r}"
    return ""


def _form_rule(keyword: str, argument: Any) -> str:  # noqa: PLR0911 - one return a form
    if keyword in _ONE:
        return "" if _is_schema(argument) else "a schema"
    if keyword in _LISTS:
        good = isinstance(argument, list) and bool(argument) and all(map(_is_schema, argument))
        return "" if good else "a list of schemas, not empty"
    if keyword in _NAMED:
        good = isinstance(argument, dict) and all(map(_is_schema, argument.values()))
        return "" if good else "schemas by name"
    if keyword in _NUMBERS:
        good = isinstance(argument, int | float) and not isinstance(argument, bool)
        return "" if good and (keyword != "multipleOf" or argument > 0) else "a number, above 0 for multipleOf"
    if keyword in _COUNTS:
        good = isinstance(argument, int) and not isinstance(argument, bool) and argument >= 0
        return "" if good else "a whole number of at least 0"
    if keyword in ("$ref", "pattern", "format"):
        return "" if isinstance(argument, str) else "a string"
    if keyword == "required":
        good = isinstance(argument, list) and all(isinstance(name, str) for name in argument)
        return "" if good else "a list of strings"
    if keyword == "enum":
        return "" if isinstance(argument, list) and argument else "a list that is not empty"
    return ""


def _subschemas(keyword: str, argument: Any, where: str) -> Iterator[tuple[str, Any]]:
    if keyword in _ONE:
        yield where, argument
    elif keyword in _LISTS:
        yield from ((f"{where}/{index}", schema) for index, schema in enumerate(argument))
    elif keyword in _NAMED:
        yield from ((f"{where}/{name}", schema) for name, schema in argument.items())
