"""What a step hands out: columns for each client, and the step's statistics.

OutputCollector is the only owner of outputs that are not handed out yet: tokens of a step, first schedules, and ends
of requests, which can also come between steps.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine_svc.core.interfaces import RowLogprobs
from engine_svc.core.request import FINISH_REASONS, Finish, Request
from engine_svc.core.scheduler_output import IntArray
from shared.types import AbortCause, EngineLoad, FinishedRequest, FirstScheduled, StepOutputs, TokenLogprobs


@dataclass(slots=True, kw_only=True)
class SchedulerStats:
    """Counts of one step; `num_prompt_tokens` and `num_generation_tokens` were computed in it.

    `prefix_cache_queries` and `prefix_cache_hits` count tokens of requests admitted for the first time.
    """

    step: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_scheduled_tokens: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_preempted: int = 0
    num_finished: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    aborts_by_cause: dict[AbortCause, int] = field(default_factory=dict)


@dataclass(slots=True)
class EngineCoreOutputs:
    """Outputs of a step by client, and its statistics."""

    step: int
    by_client: dict[int, StepOutputs]
    stats: SchedulerStats


def _seconds(start: float | None, end: float | None) -> float:
    return 0.0 if start is None or end is None else max(0.0, end - start)


def _of_request(handle: int, logprobs: RowLogprobs) -> TokenLogprobs:
    return TokenLogprobs(handle, logprobs.token_ids, logprobs.logprobs, logprobs.ranks)


class OutputCollector:
    """Gathers outputs until the core hands them out."""

    def __init__(self) -> None:
        self._by_client: dict[int, StepOutputs] = {}
        self.stats = SchedulerStats()

    def __len__(self) -> int:
        return len(self._by_client)

    def _client(self, client: int) -> StepOutputs:
        outputs = self._by_client.get(client)
        if outputs is None:
            outputs = self._by_client[client] = StepOutputs(step=0)
        return outputs

    def add_tokens(self, clients: IntArray, handles: npt.NDArray[np.int64], token_ids: IntArray) -> None:
        """Adds one token for each request. All arrays have one length."""
        if not len(clients):
            return
        present = np.unique(clients)
        for client in present.tolist():
            mask = slice(None) if len(present) == 1 else clients == client
            outputs = self._client(client)
            outputs.handles = handles[mask].tolist()
            outputs.token_ids = token_ids[mask].tolist()

    def add_logprobs(self, request: Request, logprobs: RowLogprobs) -> None:
        """Adds those of the tokens that `add_tokens` adds for the request."""
        client, handle = request.key
        self._client(client).logprobs.append(_of_request(handle, logprobs))

    def add_prompt_logprobs(self, request: Request, logprobs: RowLogprobs) -> None:
        """Adds those of the next tokens of a prompt."""
        client, handle = request.key
        self._client(client).prompt_logprobs.append(_of_request(handle, logprobs))

    def add_first_scheduled(self, request: Request) -> None:
        """Adds the event of a first schedule."""
        client, handle = request.key
        queue_seconds = _seconds(request.queued_at, request.first_scheduled_at)
        event = FirstScheduled(handle, request.num_cached_tokens, queue_seconds)
        self._client(client).first_scheduled.append(event)

    def add_finished(self, request: Request, finish: Finish) -> None:
        """Adds the end of a request, with its timings."""
        client, handle = request.key
        self._client(client).finished.append(
            FinishedRequest(
                handle=handle,
                reason=FINISH_REASONS[finish.status],
                stop_token_id=finish.stop_token_id,
                abort_cause=finish.abort_cause,
                error=finish.error,
                queue_seconds=_seconds(request.queued_at, request.first_scheduled_at),
                prefill_seconds=_seconds(request.first_scheduled_at, request.first_token_at),
                decode_seconds=_seconds(request.first_token_at, request.last_token_at),
                num_preemptions=request.num_preemptions,
                num_cached_tokens=max(0, request.num_cached_tokens),
                embedding=finish.embedding,
            )
        )

    def add_refused(self, client: int, finished: FinishedRequest) -> None:
        """Adds the end of a request that never became one."""
        self._client(client).finished.append(finished)

    def drop_client(self, client: int) -> None:
        """Forgets what a client will not read any more."""
        self._by_client.pop(client, None)

    def take(self, step: int, load: EngineLoad) -> EngineCoreOutputs:
        """Returns and clears everything gathered; every client's outputs carry the load."""
        by_client, stats = self._by_client, self.stats
        self._by_client, self.stats = {}, SchedulerStats()
        for outputs in by_client.values():
            outputs.step, outputs.load = step, load
        stats.step = step
        stats.num_running, stats.num_waiting = load.num_running, load.num_waiting
        stats.kv_cache_usage = load.kv_cache_usage
        return EngineCoreOutputs(step, by_client, stats)
