"""Refuses what a request must not ask, naming the field, the limit and the value.

Checks are tables: a field, its range in words, and the test. What depends on the engines (context, vocabulary) is
checked against their smallest limits. Knows no protobuf; never repeats a prompt.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from frontend_svc.request import GenerationRequest, SamplingRequest
from frontend_svc.routing.engine_table import ServedLimits
from frontend_svc.text.chat_template import ChatMessage
from shared.errors import InvalidRequestError, NotFoundError, UnimplementedError

MAX_REQUEST_ID_BYTES = 256
MAX_CACHE_SALT_BYTES = 1_024
MAX_ROLE_BYTES = 64
MAX_MESSAGES = 4_096
# No tokenizer makes fewer tokens of ordinary text; longer text is refused before it is tokenized.
MAX_BYTES_PER_TOKEN = 16
# Values are shown up to this length.
MAX_SHOWN = 80
OUTPUT_KINDS = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """The operator's limits on a request."""

    max_prompt_bytes: int
    max_stop_strings: int
    max_stop_string_bytes: int
    max_stop_token_ids: int


def _require(ok: bool, field: str, rule: str, value: object) -> None:
    if not ok:
        shown = str(value)
        shown = shown if len(shown) <= MAX_SHOWN else shown[:MAX_SHOWN] + "..."
        raise InvalidRequestError(f"{field} must be {rule}, got {shown}", field=field)


# field, what it must be, test. Comparisons are written so that NaN fails them.
_RANGES: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("temperature", "a finite number in [0, 2]", lambda x: 0 <= x <= 2),
    ("top_p", "a finite number in (0, 1]", lambda x: 0 < x <= 1),
    ("top_k", "-1, 0 or more, below 2^31", lambda x: -1 <= x < 2**31),
    ("min_p", "a finite number in [0, 1]", lambda x: 0 <= x <= 1),
    ("max_tokens", "at least 1", lambda x: x >= 1),
    ("min_tokens", "at least 0", lambda x: x >= 0),
)


def validate_request(request: GenerationRequest, caps: Caps, model_names: Collection[str]) -> None:
    """Checks what needs no engine. Raises InvalidRequestError, NotFoundError or UnimplementedError."""
    validate_model(request.model, model_names)
    validate_request_id(request.request_id)
    salt = len(request.cache_salt.encode())
    _require(salt <= MAX_CACHE_SALT_BYTES, "cache_salt", f"at most {MAX_CACHE_SALT_BYTES} bytes", f"{salt} bytes")
    _validate_sampling(request.sampling, caps)
    if request.text is not None:
        validate_text("text", request.text, caps.max_prompt_bytes)
    elif request.messages is not None:
        validate_messages(request.messages, caps.max_prompt_bytes)
    elif request.token_ids is not None:
        _require(len(request.token_ids) >= 1, "token_ids", "at least 1 token long", "0 tokens")
    else:
        raise InvalidRequestError("prompt must be set to text or token_ids, got none", field="prompt")
    for name in (*request.unbuilt, *request.sampling.unbuilt):
        raise UnimplementedError(f"{name} is not built yet: only its default is taken", field=name)


def validate_model(model: str, model_names: Collection[str]) -> None:
    """An empty name means the model that is served. Raises NotFoundError."""
    if model and model not in model_names:
        raise NotFoundError(
            f"model must be one of {', '.join(model_names)}, got {model[:MAX_SHOWN]!r}",
            field="model",
            reason="MODEL_NOT_FOUND",
        )


def validate_request_id(request_id: str) -> None:
    """Request ids go to logs."""
    size = len(request_id.encode())
    _require(size <= MAX_REQUEST_ID_BYTES, "request_id", f"at most {MAX_REQUEST_ID_BYTES} bytes", f"{size} bytes")
    _require(request_id.isprintable(), "request_id", "printable", ascii(request_id))


def validate_text(field: str, text: str, max_bytes: int) -> None:
    """A text that is to be tokenized."""
    _require(text != "", field, "at least 1 byte long", "0 bytes")
    size = len(text.encode())
    _require(size <= max_bytes, field, f"at most {max_bytes} bytes", f"{size} bytes")


def validate_messages(messages: Sequence[ChatMessage], max_bytes: int) -> None:
    """A conversation."""
    _require(
        1 <= len(messages) <= MAX_MESSAGES, "messages", f"1 to {MAX_MESSAGES} messages", f"{len(messages)} messages"
    )
    total = 0
    for index, message in enumerate(messages):
        role = len(message.role.encode())
        _require(
            1 <= role <= MAX_ROLE_BYTES, f"messages[{index}].role", f"1 to {MAX_ROLE_BYTES} bytes", f"{role} bytes"
        )
        total += len(message.content.encode())
    _require(total <= max_bytes, "messages", f"at most {max_bytes} bytes", f"{total} bytes")


def _validate_sampling(sampling: SamplingRequest, caps: Caps) -> None:
    for name, rule, is_valid in _RANGES:
        value = getattr(sampling, name)
        if value is not None:
            _require(math.isfinite(value) and is_valid(value), name, rule, value)
    if sampling.max_tokens is not None and sampling.min_tokens is not None:
        _validate_min_tokens(sampling.min_tokens, sampling.max_tokens)
    _require(sampling.output_kind in OUTPUT_KINDS, "output_kind", "a known value", sampling.output_kind)
    limit = caps.max_stop_strings
    _require(len(sampling.stop) <= limit, "stop", f"at most {limit} strings", f"{len(sampling.stop)} strings")
    limit = caps.max_stop_string_bytes
    for index, stop in enumerate(sampling.stop):
        size = len(stop.encode())
        _require(1 <= size <= limit, f"stop[{index}]", f"1 to {limit} bytes long", f"{size} bytes")
    limit, count = caps.max_stop_token_ids, len(sampling.stop_token_ids)
    _require(count <= limit, "stop_token_ids", f"at most {limit} ids", f"{count} ids")


def _validate_min_tokens(min_tokens: int, max_tokens: int) -> None:
    _require(min_tokens <= max_tokens, "min_tokens", f"at most max_tokens {max_tokens}", min_tokens)


def validate_against_engines(request: GenerationRequest, limits: ServedLimits) -> None:
    """Checks what the engines limit and what can be told before tokenizing. Raises InvalidRequestError."""
    validate_token_ids("stop_token_ids", request.sampling.stop_token_ids, limits.vocab_size)
    if request.token_ids is not None:
        validate_prompt(request.token_ids, limits.max_model_len)
        validate_token_ids("token_ids", request.token_ids, limits.vocab_size)
    elif request.text is not None:
        most = MAX_BYTES_PER_TOKEN * limits.max_model_len
        _require_room("text", request.text, most, limits.max_model_len)
    for message in request.messages or ():
        most = MAX_BYTES_PER_TOKEN * limits.max_model_len
        _require_room("messages", message.content, most, limits.max_model_len)


def _require_room(field: str, text: str, most: int, max_model_len: int) -> None:
    size = len(text.encode())
    rule = f"at most {most} bytes for max_model_len {max_model_len}"
    _require(size <= most, field, rule, f"{size} bytes")


def validate_prompt(token_ids: Sequence[int], max_model_len: int) -> None:
    """A prompt in tokens: something to continue, and room for one token more."""
    count = len(token_ids)
    _require(count >= 1, "prompt", "at least 1 token long", "0 tokens")
    _require(count < max_model_len, "prompt", f"shorter than max_model_len {max_model_len}", f"{count} tokens")


def validate_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Ids of tokens that exist."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        _require(False, field, f"in [0, {vocab_size})", wrong)


def validate_room(sampling: SamplingRequest, max_tokens: int) -> None:
    """Checks min_tokens again once an unset max_tokens is resolved."""
    if sampling.max_tokens is None and sampling.min_tokens is not None:
        _validate_min_tokens(sampling.min_tokens, max_tokens)
