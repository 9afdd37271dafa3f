"""Refuses options of the sampling that are outside their ranges, naming the field, the limit and the value.

Checks are tables: a field, its range in words, and the test. Ids are checked against the engines' vocabulary. What
depends on a resolved default (max_tokens, temperature) is checked again when it is resolved.
"""

import json
import math
from collections.abc import Callable
from typing import Any

from frontend_svc.request import SamplingRequest
from frontend_svc.routing.engine_table import ServedLimits
from frontend_svc.validation import Caps, require, require_bytes, validate_token_ids
from shared.errors import InvalidRequestError
from shared.types import RepetitionDetection, StructuredOutputKind, StructuredOutputSpec

MAX_LOGPROB_TOKEN_IDS = 128
MAX_PATTERN_SIZE = 1_024
MAX_PATTERN_COUNT = 1_024
# A structural tag wraps a schema.
STRUCTURAL_TAG_NESTING = 16
OUTPUT_KINDS = range(4)

# field, what it must be, test. Comparisons are written so that NaN fails them.
_RANGES: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("temperature", "a finite number in [0, 2]", lambda x: 0 <= x <= 2),
    ("top_p", "a finite number in (0, 1]", lambda x: 0 < x <= 1),
    ("top_k", "-1, 0 or more, below 2^31", lambda x: -1 <= x < 2**31),
    ("min_p", "a finite number in [0, 1]", lambda x: 0 <= x <= 1),
    ("max_tokens", "at least 1", lambda x: x >= 1),
    ("min_tokens", "at least 0", lambda x: x >= 0),
    ("presence_penalty", "a finite number in [-2, 2]", lambda x: -2 <= x <= 2),
    ("frequency_penalty", "a finite number in [-2, 2]", lambda x: -2 <= x <= 2),
    ("repetition_penalty", "a finite number above 0", lambda x: x > 0),
    ("logprobs", "at least -1", lambda x: x >= -1),
    ("prompt_logprobs", "at least -1", lambda x: x >= -1),
    ("stream_interval", "at least 1", lambda x: x >= 1),
    ("truncate_prompt_tokens", "at least 1", lambda x: x >= 1),
)


def validate_sampling(sampling: SamplingRequest, caps: Caps) -> None:
    """Checks what needs no engine. Raises InvalidRequestError."""
    for name, rule, is_valid in _RANGES:
        value = getattr(sampling, name)
        if value is not None:
            require(math.isfinite(value) and is_valid(value), name, rule, value)
    if sampling.n is not None:
        require(1 <= sampling.n <= caps.max_n, "n", f"in [1, {caps.max_n}]", sampling.n)
    if sampling.max_tokens is not None and sampling.min_tokens is not None:
        validate_min_tokens(sampling.min_tokens, sampling.max_tokens)
    require(sampling.output_kind in OUTPUT_KINDS, "output_kind", "a known value", sampling.output_kind)
    _validate_stop(sampling, caps)
    _validate_lists(sampling, caps)
    if sampling.repetition_detection is not None:
        _validate_repetition_detection(sampling.repetition_detection)
    if sampling.structured_output is not None:
        validate_structured_output(sampling.structured_output, caps)


def validate_min_tokens(min_tokens: int, max_tokens: int) -> None:
    """Checks min_tokens against the max_tokens that hold."""
    require(min_tokens <= max_tokens, "min_tokens", f"at most max_tokens {max_tokens}", min_tokens)


def _validate_stop(sampling: SamplingRequest, caps: Caps) -> None:
    limit, count = caps.max_stop_strings, len(sampling.stop)
    require(count <= limit, "stop", f"at most {limit} strings", f"{count} strings")
    limit = caps.max_stop_string_bytes
    for index, stop in enumerate(sampling.stop):
        size = len(stop.encode())
        require(1 <= size <= limit, f"stop[{index}]", f"1 to {limit} bytes long", f"{size} bytes")
    require(sampling.detokenize or not sampling.stop, "stop", "empty when detokenize is false", f"{count} strings")


def _validate_lists(sampling: SamplingRequest, caps: Caps) -> None:
    for name, limit, unit in (
        ("stop_token_ids", caps.max_stop_token_ids, "ids"),
        ("logit_bias", caps.max_logit_bias, "tokens"),
        ("bad_words", caps.max_bad_words, "words"),
        ("logprob_token_ids", MAX_LOGPROB_TOKEN_IDS, "ids"),
    ):
        count = len(getattr(sampling, name))
        require(count <= limit, name, f"at most {limit} {unit}", f"{count} {unit}")
    for _, bias in sampling.logit_bias:
        require(not math.isnan(bias), "logit_bias", "numbers", bias)
    for index, word in enumerate(sampling.bad_words):
        require_bytes(f"bad_words[{index}]", word, caps.max_stop_string_bytes, minimum=1)
        require(word.strip() != "", f"bad_words[{index}]", "more than spaces", f"{len(word)} spaces")
    count = len(sampling.logprob_token_ids)
    if count and sampling.logprobs is not None:
        rule = f"unset, or the number of logprob_token_ids {count}"
        require(sampling.logprobs == count, "logprobs", rule, sampling.logprobs)


def _validate_repetition_detection(detection: RepetitionDetection) -> None:
    name = "repetition_detection"
    largest, smallest = detection.max_pattern_size, detection.min_pattern_size
    require(1 <= largest <= MAX_PATTERN_SIZE, f"{name}.max_pattern_size", f"in [1, {MAX_PATTERN_SIZE}]", largest)
    require(0 <= smallest <= largest, f"{name}.min_pattern_size", f"in [0, max_pattern_size {largest}]", smallest)
    rule = f"in [2, {MAX_PATTERN_COUNT}]"
    require(2 <= detection.min_count <= MAX_PATTERN_COUNT, f"{name}.min_count", rule, detection.min_count)


# --- structured output ------------------------------------------------------------------------------------------------


def validate_structured_output(spec: StructuredOutputSpec, caps: Caps, field: str = "structured_output") -> None:
    """Cheap checks of a constraint; the engine compiles it and refuses the rest. Raises InvalidRequestError."""
    kind, text = spec.kind, spec.spec
    field = f"{field}.{kind.name.lower()}"
    if kind is StructuredOutputKind.JSON_OBJECT:
        return
    require(bool(text.strip()), field, "not empty", "nothing")
    require_bytes(field, text, caps.max_structured_output_bytes)
    require("\0" not in text, field, "free of NUL characters", "one")
    if kind in (StructuredOutputKind.JSON_SCHEMA, StructuredOutputKind.STRUCTURAL_TAG):
        extra = STRUCTURAL_TAG_NESTING if kind is StructuredOutputKind.STRUCTURAL_TAG else 0
        value = parse_json(field, text, caps.max_structured_output_nesting + extra)
        require(isinstance(value, dict), field, "a JSON object", f"a {type(value).__name__}")
    if kind is StructuredOutputKind.CHOICE:
        choices = parse_json(field, text, caps.max_structured_output_nesting)
        is_list = isinstance(choices, list) and all(isinstance(choice, str) for choice in choices)
        require(is_list, field, "a list of strings", f"a {type(choices).__name__}")
        require(len(choices) >= 1, field, "at least 1 string", "0 strings")
        for index, choice in enumerate(choices):
            require(choice != "", f"{field}[{index}]", "not empty", "an empty string")


def parse_json(field: str, text: str, max_nesting: int) -> Any:
    """The value of a JSON text. Raises InvalidRequestError for none, or one that is nested deeper than the limit."""
    depth = _nesting(text)
    require(depth <= max_nesting, field, f"nested at most {max_nesting} deep", f"{depth}")
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "not JSON's numbers"
        raise InvalidRequestError(f"{field} must be JSON, got text that is none: {reason}", field=field) from None


def _refuse_constant(name: str) -> float:
    raise ValueError(name)


def _nesting(text: str) -> int:
    """Depth of brackets outside strings: cheap, and safe before the text is parsed."""
    depth = deepest = 0
    in_string = escaped = False
    for character in text:
        if in_string:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == '"':
                in_string = False
        elif character == '"':
            in_string = True
        elif character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth -= 1
    return deepest


# --- against the engines ----------------------------------------------------------------------------------------------


def validate_sampling_against_engines(sampling: SamplingRequest, limits: ServedLimits) -> None:
    """Checks ids against the vocabulary, and widths against what the engines report. Raises InvalidRequestError."""
    validate_token_ids("stop_token_ids", sampling.stop_token_ids, limits.vocab_size)
    validate_token_ids("logit_bias", [token_id for token_id, _ in sampling.logit_bias], limits.vocab_size)
    validate_token_ids("allowed_token_ids", sampling.allowed_token_ids, limits.vocab_size)
    validate_token_ids("logprob_token_ids", sampling.logprob_token_ids, limits.vocab_size)
    if limits.max_logprobs < 0:
        return
    rule = f"in [0, max_logprobs {limits.max_logprobs}]"
    if sampling.logprobs is not None and not sampling.logprob_token_ids:
        require(0 <= sampling.logprobs <= limits.max_logprobs, "logprobs", rule, sampling.logprobs)
    if sampling.prompt_logprobs is not None:
        require(0 <= sampling.prompt_logprobs <= limits.max_logprobs, "prompt_logprobs", rule, sampling.prompt_logprobs)


def validate_prompt_logprobs(sampling: SamplingRequest, num_tokens: int, vocab_size: int, caps: Caps) -> None:
    """Bounds what the log-probabilities of a whole prompt take."""
    if sampling.prompt_logprobs is None:
        return
    width = 1 + (vocab_size if sampling.prompt_logprobs < 0 else sampling.prompt_logprobs)
    rule = f"so that a prompt of {num_tokens} tokens has at most {caps.max_prompt_logprobs} log-probabilities"
    require(width * num_tokens <= caps.max_prompt_logprobs, "prompt_logprobs", rule, sampling.prompt_logprobs)
