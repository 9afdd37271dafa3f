"""The core's own check of a request: whatever would break a step is refused here, whoever sent it.

The frontend validates fully and the service room checks the message; this is the last line, so it is short and cheap.
"""

import math
from dataclasses import dataclass

import numpy as np

from shared.errors import InvalidRequestError
from shared.types import EngineRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What a request may ask."""

    vocab_size: int
    max_model_len: int
    max_stop_token_ids: int


def _require(ok: bool, field: str, rule: str, value: object) -> None:
    if not ok:
        raise InvalidRequestError(f"{field} must be {rule}, got {value}", field=field)


def _check_ids(field: str, ids: object, vocab_size: int) -> None:
    array = np.asarray(ids, np.int64)
    outside = array[(array < 0) | (array >= vocab_size)]
    if outside.size:
        raise InvalidRequestError(f"{field} must be in [0, {vocab_size}), got {int(outside[0])}", field=field)


def _check_lengths(request: EngineRequest, limits: RequestLimits) -> None:
    prompt, resumed = len(request.prompt_token_ids), len(request.resume_token_ids)
    _require(prompt >= 1, "prompt_token_ids", "at least 1 token long", prompt)
    limit = f"shorter than max_model_len {limits.max_model_len}"
    _require(prompt < limits.max_model_len, "prompt_token_ids", limit, f"{prompt} tokens")
    _require(prompt + resumed < limits.max_model_len, "resume_token_ids", limit, f"{prompt + resumed} tokens")
    sampling = request.sampling
    _require(sampling.max_tokens >= 1, "max_tokens", "at least 1", sampling.max_tokens)
    _require(
        resumed < sampling.max_tokens, "resume_token_ids", f"shorter than max_tokens {sampling.max_tokens}", resumed
    )
    _require(
        0 <= sampling.min_tokens <= sampling.max_tokens,
        "min_tokens",
        f"in [0, max_tokens {sampling.max_tokens}]",
        sampling.min_tokens,
    )


def _check_numbers(request: EngineRequest) -> None:
    sampling = request.sampling
    _require(0 <= sampling.temperature <= 2, "temperature", "in [0, 2]", sampling.temperature)
    _require(0 < sampling.top_p <= 1, "top_p", "in (0, 1]", sampling.top_p)
    _require(0 <= sampling.min_p <= 1, "min_p", "in [0, 1]", sampling.min_p)
    _require(-1 <= sampling.top_k < 2**31, "top_k", "in [-1, 2^31)", sampling.top_k)
    _require(0 <= sampling.seed < 2**64, "seed", "in [0, 2^64)", sampling.seed)
    if request.deadline_seconds is not None:
        _require(math.isfinite(request.deadline_seconds), "deadline", "a finite time", request.deadline_seconds)


def validate_request(request: EngineRequest, limits: RequestLimits) -> None:
    """Raises InvalidRequestError naming the first field outside its limits."""
    _check_lengths(request, limits)
    _check_numbers(request)
    _check_ids("prompt_token_ids", request.prompt_token_ids, limits.vocab_size)
    _check_ids("resume_token_ids", request.resume_token_ids, limits.vocab_size)
    stops = request.sampling.stop_token_ids
    _require(
        len(stops) <= limits.max_stop_token_ids, "stop_token_ids", f"at most {limits.max_stop_token_ids}", len(stops)
    )
    _check_ids("stop_token_ids", stops, limits.vocab_size)
    _check_ids("eos_token_ids", request.eos_token_ids, limits.vocab_size)
