"""The options of sampling and the constraints on the output, under OpenAI's and vLLM's names.

Ranges are not checked here: the journey does that for every edge.
"""

from typing import Any

from frontend_svc.http.fields import (
    Fields,
    Kind,
    array,
    as_json,
    boolean,
    integer,
    integers,
    json_object,
    json_text,
    number,
    refuse,
    string,
    strings,
    type_name,
)
from frontend_svc.request import SamplingRequest
from shared.errors import InvalidRequestError
from shared.types import RepetitionDetection, StructuredOutputKind, StructuredOutputSpec

# Fields of SamplingRequest that have the same name and meaning here.
_SAMPLING: dict[str, Kind[Any]] = {
    "temperature": number,
    "top_p": number,
    "top_k": integer,
    "min_p": number,
    "seed": integer,
    "max_tokens": integer,
    "min_tokens": integer,
    "n": integer,
    "stop": strings,
    "stop_token_ids": integers,
    "ignore_eos": boolean,
    "include_stop_str_in_output": boolean,
    "presence_penalty": number,
    "frequency_penalty": number,
    "repetition_penalty": number,
    "bad_words": strings,
    "allowed_token_ids": integers,
    "prompt_logprobs": integer,
    "logprob_token_ids": integers,
    "skip_special_tokens": boolean,
    "spaces_between_special_tokens": boolean,
    "stream_interval": integer,
    "truncate_prompt_tokens": integer,
    "skip_reading_prefix_cache": boolean,
}
_DETECTION: dict[str, Kind[Any]] = {
    "max_pattern_size": integer,
    "min_pattern_size": integer,
    "min_count": integer,
}
_RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")


def take_sampling(fields: Fields, **values: Any) -> SamplingRequest:
    """What a body asks of the sampling. `values` are fields that the edge sets itself. Raises InvalidRequestError."""
    chosen = fields.take_all(_SAMPLING)
    bias = fields.take("logit_bias", json_object)
    if bias is not None:
        chosen["logit_bias"] = tuple(_bias(key, value) for key, value in bias.items())
    detection = fields.take_object("repetition_detection")
    if detection is not None:
        chosen["repetition_detection"] = _repetition_detection(detection)
    return SamplingRequest(**(chosen | values))


def _bias(key: str, value: Any) -> tuple[int, float]:
    name = f"logit_bias[{key[:20]}]"
    if not key.removeprefix("-").isdecimal() or not key.isascii() or len(key) > 20:
        raise refuse(name, "named by a token id", "another name")
    return int(key), number(name, value)


def _repetition_detection(fields: Fields) -> RepetitionDetection:
    values = fields.take_all(_DETECTION)
    return RepetitionDetection(
        max_pattern_size=values.get("max_pattern_size", 0),
        min_pattern_size=values.get("min_pattern_size", 0),
        min_count=values.get("min_count", 0),
    )


# --- structured output ------------------------------------------------------------------------------------------------

Constraint = tuple[str, StructuredOutputSpec]


def _schema(name: str, value: Any) -> StructuredOutputSpec:
    return StructuredOutputSpec(StructuredOutputKind.JSON_SCHEMA, json_text(name, value))


def _regex(name: str, value: Any) -> StructuredOutputSpec:
    return StructuredOutputSpec(StructuredOutputKind.REGEX, string(name, value))


def _choice(name: str, value: Any) -> StructuredOutputSpec:
    choices = [string(f"{name}[{index}]", choice) for index, choice in enumerate(array(name, value))]
    return StructuredOutputSpec(StructuredOutputKind.CHOICE, as_json(choices))


def _grammar(name: str, value: Any) -> StructuredOutputSpec:
    return StructuredOutputSpec(StructuredOutputKind.GRAMMAR, string(name, value))


def _any_object(name: str, value: Any) -> StructuredOutputSpec:
    if not boolean(name, value):
        raise refuse(name, "true, or left out", "false")
    return StructuredOutputSpec(StructuredOutputKind.JSON_OBJECT, "")


def _structural_tag(name: str, value: Any) -> StructuredOutputSpec:
    return StructuredOutputSpec(StructuredOutputKind.STRUCTURAL_TAG, json_text(name, value))


_STRUCTURED_OUTPUTS: dict[str, Kind[StructuredOutputSpec]] = {
    "json": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _any_object,
    "structural_tag": _structural_tag,
}
_GUIDED: dict[str, Kind[StructuredOutputSpec]] = {
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
}
_GRAMMAR_OPTIONS = {
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
    "whitespace_pattern": (),
    "backend": (),
}


def take_constraint(fields: Fields) -> Constraint | None:
    """The constraint on the output and the name of the field that asks for it. Raises InvalidRequestError."""
    found: list[Constraint] = []
    response_format = fields.take_object("response_format")
    if response_format is not None:
        found += _response_format(response_format)
    outputs = fields.take_object("structured_outputs")
    if outputs is not None:
        chosen = outputs.take_all(_STRUCTURED_OUTPUTS)
        found += [(outputs.name(name), spec) for name, spec in chosen.items()]
        outputs.refuse_unsupported(_GRAMMAR_OPTIONS)
        if not chosen:
            raise refuse("structured_outputs", f"one of {', '.join(_STRUCTURED_OUTPUTS)}", "none")
    found += fields.take_all(_GUIDED).items()
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise InvalidRequestError(f"{found[1][0]} must be the only constraint, got {names}", field=found[1][0])
    return found[0] if found else None


def _response_format(fields: Fields) -> list[Constraint]:
    kind = fields.require("type", string)
    if kind == "json_object":
        return [("response_format", StructuredOutputSpec(StructuredOutputKind.JSON_OBJECT, ""))]
    if kind == "json_schema":
        wrapper = Fields(fields.require("json_schema", json_object), fields.name("json_schema"))
        schema = wrapper.require("schema", json_object)
        return [(wrapper.name("schema"), StructuredOutputSpec(StructuredOutputKind.JSON_SCHEMA, as_json(schema)))]
    if kind == "structural_tag":
        tag = {name: fields.take(name, _anything) for name in ("format", "structures", "triggers")}
        tag = {"type": kind} | {name: value for name, value in tag.items() if value is not None}
        return [("response_format", StructuredOutputSpec(StructuredOutputKind.STRUCTURAL_TAG, as_json(tag)))]
    if kind != "text":
        raise refuse("response_format.type", f"one of {', '.join(_RESPONSE_FORMATS)}", repr(kind[:40]))
    return []


def _anything(name: str, value: Any) -> Any:
    if not isinstance(value, dict | list):
        raise refuse(name, "an object or a list", type_name(value))
    return value


def names_of(constraint: Constraint | None) -> dict[str, str]:
    """How the journey's name of a constraint is called in the body."""
    if constraint is None:
        return {}
    name, spec = constraint
    return {f"structured_output.{spec.kind.name.lower()}": name, "structured_output": name}
