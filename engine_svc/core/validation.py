"""The core's own check of a request: whatever would break a step is refused here, whoever sent it.

The frontend validates fully and the service room checks the message; this is the last line, so it is short and cheap.
"""

import math
from dataclasses import dataclass

import numpy as np

from shared.errors import InvalidRequestError
from shared.types import EngineRequest, SamplingParams

_POOLINGS = ("last", "mean")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What a request may ask."""

    vocab_size: int
    max_model_len: int
    max_stop_token_ids: int
    # Most likely tokens reported with a token; -1 is no limit.
    max_logprobs: int = 20
    # Candidates reported for all tokens of a prompt together.
    max_prompt_logprob_entries: int = 2_000_000
    max_logprob_token_ids: int = 128
    max_logit_biases: int = 1024
    # Each word of a client may come as two sequences.
    max_bad_words: int = 256
    max_bad_word_tokens: int = 1024


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


def _check_deadline(request: EngineRequest) -> None:
    if request.deadline_seconds is not None:
        _require(math.isfinite(request.deadline_seconds), "deadline", "a finite time", request.deadline_seconds)


def _check_penalties(sampling: SamplingParams, limits: RequestLimits) -> None:
    _require(-2 <= sampling.presence_penalty <= 2, "presence_penalty", "in [-2, 2]", sampling.presence_penalty)
    _require(-2 <= sampling.frequency_penalty <= 2, "frequency_penalty", "in [-2, 2]", sampling.frequency_penalty)
    repetition = sampling.repetition_penalty
    _require(0 < repetition < math.inf, "repetition_penalty", "finite and above 0", repetition)
    _check_count("logit_bias", len(sampling.logit_bias), limits.max_logit_biases)
    for _, bias in sampling.logit_bias:
        _require(-100 <= bias <= 100, "logit_bias", "in [-100, 100]", bias)
    _check_ids("logit_bias", [token_id for token_id, _ in sampling.logit_bias], limits.vocab_size)
    detection = sampling.repetition_detection
    if detection is not None:
        _require(detection.max_pattern_size >= 1, "max_pattern_size", "at least 1", detection.max_pattern_size)
        rule = f"in [0, max_pattern_size {detection.max_pattern_size}]"
        smallest = detection.min_pattern_size
        _require(0 <= smallest <= detection.max_pattern_size, "min_pattern_size", rule, smallest)
        _require(detection.min_count >= 2, "min_count", "at least 2", detection.min_count)


def _check_count(field: str, count: int, limit: int) -> None:
    _require(count <= limit, field, f"at most {limit} entries long", count)


def _check_tokens(sampling: SamplingParams, limits: RequestLimits) -> None:
    words = sampling.bad_words
    _check_count("bad_words", len(words), limits.max_bad_words)
    _require(all(words), "bad_words", "sequences of at least 1 token", "an empty one")
    tokens = sum(map(len, words))
    _require(tokens <= limits.max_bad_word_tokens, "bad_words", f"at most {limits.max_bad_word_tokens} tokens", tokens)
    _check_ids("bad_words", [token_id for word in words for token_id in word], limits.vocab_size)
    _check_count("allowed_token_ids", len(sampling.allowed_token_ids), limits.vocab_size)
    _check_ids("allowed_token_ids", sampling.allowed_token_ids, limits.vocab_size)


def _check_logprobs(request: EngineRequest, limits: RequestLimits) -> None:
    sampling, most = request.sampling, limits.max_logprobs
    most = limits.vocab_size if most < 0 else most
    for field, count in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if count is not None and not (field == "logprobs" and sampling.logprob_token_ids):
            # The whole vocabulary counts as what it is.
            asked = limits.vocab_size if count == -1 else count
            _require(0 <= asked <= most, field, f"in [0, {most}]", count)
    if sampling.prompt_logprobs is not None:
        width = 1 + (limits.vocab_size if sampling.prompt_logprobs == -1 else sampling.prompt_logprobs)
        entries, limit = width * len(request.prompt_token_ids), limits.max_prompt_logprob_entries
        _require(entries <= limit, "prompt_logprobs", f"at most {limit} entries for the whole prompt", entries)
    chosen = sampling.logprob_token_ids
    _check_count("logprob_token_ids", len(chosen), limits.max_logprob_token_ids)
    _check_ids("logprob_token_ids", chosen, limits.vocab_size)
    if chosen and sampling.logprobs is not None:
        rule = f"the number of logprob_token_ids {len(chosen)}"
        _require(sampling.logprobs == len(chosen), "logprobs", rule, sampling.logprobs)


def _check_pooling(request: EngineRequest, limits: RequestLimits) -> None:
    assert request.pooling is not None
    pooling, prompt = request.pooling.pooling, len(request.prompt_token_ids)
    _require(pooling in _POOLINGS, "pooling", f"one of {', '.join(_POOLINGS)}", repr(pooling[:32]))
    _require(prompt >= 1, "prompt_token_ids", "at least 1 token long", prompt)
    limit = f"shorter than max_model_len {limits.max_model_len}"
    _require(prompt < limits.max_model_len, "prompt_token_ids", limit, f"{prompt} tokens")
    resumed = len(request.resume_token_ids)
    _require(not resumed, "resume_token_ids", "empty for a pooling request", f"{resumed} tokens")


def validate_request(request: EngineRequest, limits: RequestLimits) -> None:
    """Raises InvalidRequestError naming the first field outside its limits."""
    if request.pooling is None:
        _check_lengths(request, limits)
        _check_numbers(request)
        _check_penalties(request.sampling, limits)
        _check_tokens(request.sampling, limits)
        _check_logprobs(request, limits)
    else:
        _check_pooling(request, limits)
    _check_deadline(request)
    _check_ids("prompt_token_ids", request.prompt_token_ids, limits.vocab_size)
    _check_ids("resume_token_ids", request.resume_token_ids, limits.vocab_size)
    stops = request.sampling.stop_token_ids
    _require(
        len(stops) <= limits.max_stop_token_ids, "stop_token_ids", f"at most {limits.max_stop_token_ids}", len(stops)
    )
    _check_ids("stop_token_ids", stops, limits.vocab_size)
    _check_ids("eos_token_ids", request.eos_token_ids, limits.vocab_size)
