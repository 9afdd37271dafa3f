"""Resolves what a client left open, so that an engine gets a request that is complete.

The model's generation config gives defaults, an unset max_tokens is the room left in the context, a seed is drawn,
secondary end tokens become stop tokens, bad words become tokens. Pure but for the draw.
"""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from frontend_svc.generation_config import GenerationDefaults
from frontend_svc.request import GenerationRequest, SamplingRequest
from frontend_svc.routing.engine_table import ServedLimits
from frontend_svc.text.tokenizer import Tokenizer
from frontend_svc.validation import require
from frontend_svc.validation_sampling import validate_min_tokens
from shared.errors import InvalidRequestError
from shared.types import (
    GREEDY_TEMPERATURE,
    EngineRequest,
    PoolingParams,
    RepetitionDetection,
    SamplingParams,
    StructuredOutputSpec,
)

T = TypeVar("T")

# Lower ones divide the logits into overflow; below GREEDY_TEMPERATURE the most likely token is taken instead.
MIN_TEMPERATURE = 0.01
MAX_LOGIT_BIAS = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRequest:
    """One output of a request that nothing is left open in, and the tokens that end it."""

    request: GenerationRequest
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    n: int = 1
    index: int = 0
    # Set where a vector is asked for; the sampling counts for nothing then.
    pooling: PoolingParams | None = None

    @property
    def stopping_token_ids(self) -> frozenset[int]:
        """Tokens that end the output when they are sampled."""
        primary = () if self.sampling.ignore_eos else self.eos_token_ids[:1]
        return frozenset((*primary, *self.sampling.stop_token_ids))

    def child(self, index: int) -> "ResolvedRequest":
        """Output `index` of the request: its own seed; the prompt's log-probabilities come with the first alone."""
        if index == 0:
            return self
        sampling = replace(
            self.sampling,
            seed=(self.sampling.seed + index) % 2**64,
            prompt_logprobs=None,
            skip_reading_prefix_cache=bool(self.request.sampling.skip_reading_prefix_cache),
        )
        return replace(self, sampling=sampling, index=index)

    def for_engine(self, *, age_seconds: float, deadline_seconds: float | None, traceparent: str) -> EngineRequest:
        """The request as an engine gets it now."""
        request_id = self.request.request_id
        return EngineRequest(
            handle=0,
            request_id=request_id if self.n == 1 else f"{request_id}-{self.index}",
            prompt_token_ids=self.prompt_token_ids,
            sampling=self.sampling,
            eos_token_ids=self.eos_token_ids,
            priority=self.request.priority,
            cache_salt=self.request.cache_salt,
            traceparent=traceparent,
            deadline_seconds=deadline_seconds,
            age_seconds=age_seconds,
            data_parallel_rank=self.request.data_parallel_rank,
            pooling=self.pooling,
        )


class Defaults:
    """What the served model makes of requests."""

    def __init__(self, tokenizer: Tokenizer, generation: GenerationDefaults, max_bad_words: int) -> None:
        self._tokenizer = tokenizer
        self._generation = generation
        self._max_bad_words = max_bad_words

    def resolve(
        self,
        request: GenerationRequest,
        prompt_token_ids: Sequence[int],
        limits: ServedLimits,
        constraint: StructuredOutputSpec | None = None,
    ) -> ResolvedRequest:
        """Resolves every default of output 0. `constraint` holds in place of an unset one of the request.

        Raises InvalidRequestError.
        """
        sampling, defaults = request.sampling, self._generation
        # An id that the engines do not have, the default of some libraries, can never end anything.
        found = self._tokenizer.eos_token_ids or limits.eos_token_ids
        eos_token_ids = tuple(token_id for token_id in found if token_id < limits.vocab_size)
        wanted = defaults.max_tokens if sampling.max_tokens is None else sampling.max_tokens
        room = limits.max_model_len - len(prompt_token_ids)
        max_tokens = room if wanted is None else min(wanted, room)
        if sampling.max_tokens is None and sampling.min_tokens is not None:
            validate_min_tokens(sampling.min_tokens, max_tokens)
        temperature = _temperature(_given(sampling.temperature, defaults.temperature))
        is_greedy = temperature == 0
        n = _given(sampling.n, 1)
        require(n == 1 or not is_greedy, "n", "1 with temperature 0, which gives equal outputs", n)
        return ResolvedRequest(
            request=request,
            prompt_token_ids=prompt_token_ids,
            sampling=SamplingParams(
                temperature=temperature,
                top_p=1.0 if is_greedy else _given(sampling.top_p, defaults.top_p),
                top_k=0 if is_greedy else max(0, _given(sampling.top_k, defaults.top_k)),
                min_p=0.0 if is_greedy else _given(sampling.min_p, defaults.min_p),
                seed=_seed(sampling.seed),
                max_tokens=max_tokens,
                # Beyond the room it can only mean: never stop.
                min_tokens=min(sampling.min_tokens or 0, max_tokens),
                stop_token_ids=_stop_token_ids(sampling, eos_token_ids, limits.max_stop_token_ids),
                ignore_eos=sampling.ignore_eos,
                presence_penalty=_given(sampling.presence_penalty, 0.0),
                frequency_penalty=_given(sampling.frequency_penalty, 0.0),
                repetition_penalty=_given(sampling.repetition_penalty, defaults.repetition_penalty),
                logit_bias=_logit_bias(sampling.logit_bias),
                bad_words=self._bad_words(sampling.bad_words, limits.vocab_size),
                allowed_token_ids=tuple(dict.fromkeys(sampling.allowed_token_ids)),
                logprobs=_logprobs(sampling),
                prompt_logprobs=sampling.prompt_logprobs,
                logprob_token_ids=sampling.logprob_token_ids,
                repetition_detection=_repetition_detection(sampling.repetition_detection),
                structured_output=sampling.structured_output or constraint,
                # What the prefix cache serves is not computed, and has no log-probabilities.
                skip_reading_prefix_cache=bool(sampling.skip_reading_prefix_cache)
                or sampling.prompt_logprobs is not None,
            ),
            eos_token_ids=eos_token_ids,
            n=n,
        )

    def _bad_words(self, words: Sequence[str], vocab_size: int) -> tuple[tuple[int, ...], ...]:
        """Each word as it is spelled at the beginning of a text and, where that is another token, behind a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = tuple(self._tokenizer.encode(word.lstrip(), add_special_tokens=False))
            spaced = tuple(self._tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
            found[bare] = None
            if len(spaced) == len(bare) and spaced[:1] != bare[:1]:
                found[spaced] = None
        found.pop((), None)
        limit = self._max_bad_words
        require(len(found) <= limit, "bad_words", f"at most {limit} sequences of tokens", f"{len(found)} sequences")
        for token_ids in found:
            require(max(token_ids) < vocab_size, "bad_words", f"words of tokens below {vocab_size}", max(token_ids))
        return tuple(found)


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


def _temperature(temperature: float) -> float:
    return 0.0 if temperature < GREEDY_TEMPERATURE else max(temperature, MIN_TEMPERATURE)


def _seed(seed: int | None) -> int:
    return secrets.randbits(64) if seed is None or seed == -1 else seed % 2**64


def _logit_bias(pairs: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Clamped; of a token that is named twice the last one counts."""
    return tuple((token_id, _clamp(bias)) for token_id, bias in dict(pairs).items())


def _clamp(bias: float) -> float:
    return math.copysign(min(abs(bias), MAX_LOGIT_BIAS), bias)


def _logprobs(sampling: SamplingRequest) -> int | None:
    """Ids that are asked for ask for log-probabilities."""
    return len(sampling.logprob_token_ids) or None if sampling.logprobs is None else sampling.logprobs


def _repetition_detection(detection: RepetitionDetection | None) -> RepetitionDetection | None:
    if detection is None or detection.min_pattern_size >= 1:
        return detection
    return replace(detection, min_pattern_size=1)


def _stop_token_ids(sampling: SamplingRequest, eos_token_ids: tuple[int, ...], limit: int) -> tuple[int, ...]:
    secondary = () if sampling.ignore_eos else eos_token_ids[1:]
    ids = tuple(dict.fromkeys((*sampling.stop_token_ids, *secondary)))
    if len(ids) > limit:
        raise InvalidRequestError(
            f"stop_token_ids must be at most {limit} ids together with {len(secondary)} end tokens of the model, "
            f"got {len(sampling.stop_token_ids)} ids",
            field="stop_token_ids",
        )
    return ids
