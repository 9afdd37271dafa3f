"""One request's state inside the core.

Knows what was asked, the tokens so far while the request holds no row, and its stamps. While it runs, its numbers live
in RowTable, which is their only owner; `output_token_ids` is brought up to date when the row is released.
"""

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from engine_svc.core.interfaces import GrammarMatcher
from engine_svc.core.scheduler_output import IntArray
from shared.types import AbortCause, EngineRequest, FinishReason, PoolingParams, SamplingParams, WireError

NO_ROW = -1
NOT_LOOKED_UP = -1


class RequestStatus(IntEnum):
    """Where a request stands; everything above PREEMPTED is final."""

    WAITING = 0
    WAITING_FOR_GRAMMAR = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH_CAPPED = 5
    FINISHED_ABORTED = 6
    FINISHED_IGNORED = 7
    FINISHED_ERROR = 8
    FINISHED_REPETITION = 9

    @property
    def is_finished(self) -> bool:
        """Whether nothing follows."""
        return self > RequestStatus.PREEMPTED


FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_IGNORED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    RequestStatus.FINISHED_REPETITION: FinishReason.REPETITION,
}


@dataclass(frozen=True, slots=True)
class Finish:
    """How a request ends."""

    status: RequestStatus
    stop_token_id: int | None = None
    abort_cause: AbortCause = AbortCause.UNSPECIFIED
    error: WireError | None = None
    embedding: tuple[float, ...] = ()


@dataclass(slots=True, eq=False)
class Request:
    """A request; `key` is (client, handle). Times are monotonic seconds of the engine."""

    key: tuple[int, int]
    request_id: str
    # Order of arrival at the core, for first come, first served.
    sequence: int
    prompt_token_ids: IntArray
    output_token_ids: IntArray
    sampling: SamplingParams
    # The end token that leaves no stop reason, -1 when none ends the output.
    eos_token_id: int
    # Tokens that end the output with a stop reason.
    stop_token_ids: tuple[int, ...]
    # Every token masked until min_tokens are generated.
    all_stop_token_ids: tuple[int, ...]
    # Prompt and output together, at most.
    max_total_tokens: int
    priority: int
    cache_salt: str
    queued_at: float
    deadline: float | None
    pooling: PoolingParams | None = None
    # Where the output stands in its grammar; set while it is constrained and its grammar is compiled.
    grammar: GrammarMatcher | None = None
    # Prompt tokens whose log-probabilities were handed out, from the second token on.
    num_prompt_logprobs: int = 0
    status: RequestStatus = RequestStatus.WAITING
    row: int = NO_ROW
    # Chained hashes of the full blocks known so far, owned by KVCacheManager.
    block_hashes: list[bytes] = field(default_factory=list)
    num_preemptions: int = 0
    # Prompt tokens that the prefix cache served at the first schedule.
    num_cached_tokens: int = NOT_LOOKED_UP
    first_scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and known output, exact while the request holds no row."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Every token that ends the output."""
        return self.stop_token_ids if self.eos_token_id < 0 else (self.eos_token_id, *self.stop_token_ids)

    @property
    def is_constrained(self) -> bool:
        """Whether its output must follow a grammar."""
        return self.sampling.structured_output is not None and self.pooling is None

    @property
    def awaits_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are still to be handed out."""
        wanted = self.sampling.prompt_logprobs is not None and self.pooling is None
        return wanted and self.num_prompt_logprobs < len(self.prompt_token_ids) - 1

    @property
    def num_skippable_tokens(self) -> int:
        """Leading tokens that need not be computed where the prefix cache holds them."""
        sampling = self.sampling
        if sampling.skip_reading_prefix_cache or (self.pooling is not None and self.pooling.pooling == "mean"):
            return 0
        if self.awaits_prompt_logprobs:
            return self.num_prompt_logprobs
        return self.num_tokens - 1

    @property
    def token_ids(self) -> IntArray:
        """Prompt, then known output; exact while the request holds no row."""
        if not len(self.output_token_ids):
            return self.prompt_token_ids
        return np.concatenate([self.prompt_token_ids, self.output_token_ids])


def build_request(client: int, wire: EngineRequest, *, sequence: int, max_model_len: int, now: float) -> Request:
    """Makes the runtime state of a request that `validate_request` accepted."""
    prompt = np.asarray(wire.prompt_token_ids, np.int32)
    sampling = wire.sampling
    # A row that gives a vector never samples, but has room for it like every other.
    max_tokens = 1 if wire.pooling is not None else sampling.max_tokens
    primary, *secondary = wire.eos_token_ids or (-1,)
    stops = dict.fromkeys(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        stops.update(dict.fromkeys(secondary))
    return Request(
        key=(client, wire.handle),
        request_id=wire.request_id,
        sequence=sequence,
        prompt_token_ids=prompt,
        output_token_ids=np.asarray(wire.resume_token_ids, np.int32),
        sampling=sampling,
        eos_token_id=-1 if sampling.ignore_eos else primary,
        stop_token_ids=tuple(stops),
        all_stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *wire.eos_token_ids))),
        max_total_tokens=min(max_model_len, len(prompt) + max_tokens),
        priority=wire.priority,
        cache_salt=wire.cache_salt,
        queued_at=now,
        deadline=None if wire.deadline_seconds is None else now + wire.deadline_seconds,
        pooling=wire.pooling,
    )
