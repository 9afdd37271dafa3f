"""Resolves what a client left open, so that an engine gets a request that is complete.

An unset max_tokens is the room left in the context, a seed is drawn, secondary end tokens become stop tokens. Pure but
for the draw.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from frontend_svc.request import GenerationRequest, SamplingRequest
from frontend_svc.routing.engine_table import ServedLimits
from frontend_svc.validation import validate_room
from shared.errors import InvalidRequestError
from shared.types import GREEDY_TEMPERATURE, EngineRequest, SamplingParams

# Lower ones divide the logits into overflow; below GREEDY_TEMPERATURE the most likely token is taken instead.
MIN_TEMPERATURE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRequest:
    """A request that nothing is left open in, and the tokens that end it."""

    request: GenerationRequest
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]

    @property
    def stopping_token_ids(self) -> frozenset[int]:
        """Tokens that end the output when they are sampled."""
        primary = () if self.sampling.ignore_eos else self.eos_token_ids[:1]
        return frozenset((*primary, *self.sampling.stop_token_ids))

    def for_engine(self, *, age_seconds: float, deadline_seconds: float | None, traceparent: str) -> EngineRequest:
        """The request as an engine gets it now."""
        return EngineRequest(
            handle=0,
            request_id=self.request.request_id,
            prompt_token_ids=self.prompt_token_ids,
            sampling=self.sampling,
            eos_token_ids=self.eos_token_ids,
            priority=self.request.priority,
            cache_salt=self.request.cache_salt,
            traceparent=traceparent,
            deadline_seconds=deadline_seconds,
            age_seconds=age_seconds,
            data_parallel_rank=self.request.data_parallel_rank,
        )


def resolve(
    request: GenerationRequest, prompt_token_ids: Sequence[int], limits: ServedLimits, eos_token_ids: tuple[int, ...]
) -> ResolvedRequest:
    """Resolves every default. `eos_token_ids` has the primary end token first. Raises InvalidRequestError."""
    sampling = request.sampling
    eos_token_ids = eos_token_ids or limits.eos_token_ids
    room = limits.max_model_len - len(prompt_token_ids)
    max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    validate_room(sampling, max_tokens)
    temperature = _temperature(sampling.temperature)
    is_greedy = temperature == 0
    return ResolvedRequest(
        request=request,
        prompt_token_ids=prompt_token_ids,
        sampling=SamplingParams(
            temperature=temperature,
            top_p=1.0 if is_greedy or sampling.top_p is None else sampling.top_p,
            top_k=0 if is_greedy else max(0, sampling.top_k or 0),
            min_p=0.0 if is_greedy else sampling.min_p or 0.0,
            seed=_seed(sampling.seed),
            max_tokens=max_tokens,
            # Beyond the room it can only mean: never stop.
            min_tokens=min(sampling.min_tokens or 0, max_tokens),
            stop_token_ids=_stop_token_ids(sampling, eos_token_ids, limits.max_stop_token_ids),
            ignore_eos=sampling.ignore_eos,
        ),
        eos_token_ids=eos_token_ids,
    )


def _temperature(temperature: float | None) -> float:
    if temperature is None:
        return 1.0
    return 0.0 if temperature < GREEDY_TEMPERATURE else max(temperature, MIN_TEMPERATURE)


def _seed(seed: int | None) -> int:
    return secrets.randbits(64) if seed is None or seed == -1 else seed % 2**64


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
