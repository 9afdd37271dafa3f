"""From what a client asked for to a grammar as the library takes it.

Reads texts of clients with Python code, so it runs in the process of trials, where time and memory are bounded.
Whatever is wrong with a text is an InvalidRequestError that names its field.
"""

import json
from typing import Any

from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import any_to_lark

from engine_svc.grammar.json_schema import MAX_NESTING, check_schema, parse_json
from shared.errors import InvalidRequestError, UnimplementedError
from shared.types import StructuredOutputKind, StructuredOutputSpec

# Blanks between the parts of a JSON text, at most: without a limit a model may write them to its end.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,20}"
_MAX_CHOICES = 10_000
_MAX_TAGS = 128


def field_of(spec: StructuredOutputSpec) -> str:
    """The field that an error names."""
    return f"structured_output.{spec.kind.name.lower()}"


def grammar_source(spec: StructuredOutputSpec) -> str:
    """The library's grammar of a spec. Raises InvalidRequestError, or UnimplementedError for unknown tags."""
    field = field_of(spec)
    match spec.kind:
        case StructuredOutputKind.JSON_OBJECT:
            return _json({"type": "object"})
        case StructuredOutputKind.JSON_SCHEMA:
            schema = parse_json(spec.spec, field)
            check_schema(schema, field)
            return _json(schema)
        case StructuredOutputKind.REGEX:
            _check_brackets(spec.spec, field)
            return LLMatcher.grammar_from_regex(spec.spec)
        case StructuredOutputKind.CHOICE:
            return _choice(parse_json(spec.spec, field), field)
        case StructuredOutputKind.GRAMMAR:
            _check_brackets(spec.spec, field)
            return _grammar(spec.spec, field)
        case StructuredOutputKind.STRUCTURAL_TAG:
            return _structural_tag(parse_json(spec.spec, field), field)


def _json(schema: Any) -> str:
    whole = schema if isinstance(schema, dict) else {"allOf": [schema]}
    return LLMatcher.grammar_from_json_schema(whole, overrides={"whitespace_pattern": _WHITESPACE})


def _check_brackets(text: str, field: str) -> None:
    """Refuses texts that would be parsed too deeply; brackets in literals count too, and do no harm below the limit."""
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(0, depth - 1)
    if deepest > MAX_NESTING:
        raise InvalidRequestError(f"{field} must be nested at most {MAX_NESTING} deep, got {deepest}", field=field)


def _choice(choices: Any, field: str) -> str:
    good = isinstance(choices, list) and choices and all(isinstance(one, str) and one for one in choices)
    if not good:
        raise InvalidRequestError(
            f"{field} must be a list of strings, neither empty nor with an empty one, got another", field=field
        )
    if len(choices) > _MAX_CHOICES:
        raise InvalidRequestError(f"{field} must be at most {_MAX_CHOICES} strings, got {len(choices)}", field=field)
    return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, dict.fromkeys(choices))))


def _grammar(text: str, field: str) -> str:
    """Lark as it is; GBNF, which is told by its ::=, rewritten by the library."""
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(text))
    except Exception as error:  # noqa: BLE001 - the rewriting raises what its code happens to
        reason = str(error).partition("\n")[0][:160]
        raise InvalidRequestError(f"{field} must be a Lark or GBNF grammar, got {reason}", field=field) from None


def _structural_tag(value: Any, field: str) -> str:
    """Tags in free text: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}."""
    if isinstance(value, dict) and "format" in value:
        raise UnimplementedError(f"{field} with a format is not built, structures with triggers are", field=field)
    unknown = set(value) - {"type", "structures", "triggers"} if isinstance(value, dict) else {"another value"}
    if unknown:
        raise InvalidRequestError(f"{field} must be structures and triggers, got {sorted(unknown)[0]!r}", field=field)
    structures, triggers = value.get("structures"), value.get("triggers")
    if not _are_tags(structures) or not _are_texts(triggers):
        rule = f"1 to {_MAX_TAGS} structures with begin, schema and end, and triggers that are strings"
        raise InvalidRequestError(f"{field} must have {rule}, got others", field=field)
    tags = []
    for index, structure in enumerate(structures):
        check_schema(structure["schema"], f"{field}.structures[{index}].schema")
        trigger = next((one for one in triggers if structure["begin"].startswith(one)), None)
        if trigger is None:
            message = f"{field}.structures[{index}].begin must begin with a trigger, got another text"
            raise InvalidRequestError(message, field=field)
        schema = structure["schema"] if isinstance(structure["schema"], dict) else {"allOf": [structure["schema"]]}
        tags.append(
            StructTag(
                trigger=trigger,
                begin=structure["begin"],
                grammar=schema | {"x-guidance": {"whitespace_pattern": _WHITESPACE}},
                end=structure["end"],
            )
        )
    return StructTag.to_grammar(tags, assume_special=False)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, str) and one for one in value)


def _are_tags(value: Any) -> bool:
    return (
        isinstance(value, list)
        and 1 <= len(value) <= _MAX_TAGS
        and all(
            isinstance(one, dict)
            and set(one) == {"begin", "schema", "end"}
            and isinstance(one["begin"], str)
            and isinstance(one["end"], str)
            for one in value
        )
    )
