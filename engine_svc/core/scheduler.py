"""Decides which requests compute how many tokens in a step, and takes the results in.

One rule: there is no prefill phase and no decode phase. Every request has a number of tokens and a number of computed
tokens, and a step gives it tokens to catch up, within a token budget. Running requests come first, then waiting ones
while rows, budget and blocks last; when blocks run out, the last of the running requests is preempted and computed
again later. Chunked prefill, prefix reuse and resuming all follow from the rule.

Knows no clock, no threads and no tensors. It owns the waiting queue; rows and blocks have owners of their own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine_svc.core.interfaces import MASKED_TOKEN, KVCacheConfig, ModelRunnerOutput
from engine_svc.core.kv_cache_manager import KVCacheManager
from engine_svc.core.outputs import OutputCollector
from engine_svc.core.request import NO_ROW, NOT_LOOKED_UP, Finish, Request, RequestStatus
from engine_svc.core.request_queue import make_request_queue
from engine_svc.core.rows import RowTable
from engine_svc.core.scheduler_output import IntArray, RowAdded, SchedulerOutput
from engine_svc.core.stop_check import find_stops
from engine_svc.core.structured_output import advance_grammars, token_refused
from shared.errors import InternalError, InvalidRequestError
from shared.types import WireError


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step. A threshold of 0 puts no limit on the prompt tokens of one request in a step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    long_prefill_token_threshold: int = 0
    policy: str = "fcfs"
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    max_concurrent_batches: int = 1
    max_stop_token_ids: int = 128
    # Most likely tokens reported with a token; -1 is no limit.
    max_logprobs: int = 20


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """A step in flight: what the workers were told, and whose the sampled rows were at that time."""

    output: SchedulerOutput
    sampled_rows: IntArray
    generations: npt.NDArray[np.int64]
    # The same, by row, of the rows that give more than sampled tokens.
    prompt_generations: dict[int, int] = field(default_factory=dict)


class Scheduler:
    """Owns the waiting queue, and through it the order in which requests get rows and blocks."""

    def __init__(self, config: SchedulerConfig, kv_config: KVCacheConfig, outputs: OutputCollector) -> None:
        self._config = config
        self._outputs = outputs
        self.rows = RowTable(config.max_num_seqs, config.max_model_len)
        self.kv = KVCacheManager(kv_config, self.rows, enable_prefix_caching=config.enable_prefix_caching)
        self._waiting = make_request_queue(config.policy)
        self.num_waiting_tokens = 0
        self.step = 0
        self._rows_removed: list[int] = []

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self._waiting)

    def add_request(self, request: Request) -> None:
        """Queues a new request."""
        self._waiting.add(request)
        self.num_waiting_tokens += request.num_tokens

    # --- schedule -------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> ScheduledBatch | None:
        """Gives tokens to requests and returns the step, or None when nothing can run."""
        rows, num_new, preempted = self._schedule_running()
        added: list[RowAdded] = []
        if not preempted and len(self._waiting):
            budget = self._config.max_num_batched_tokens - int(num_new.sum())
            added, num_new_added = self._schedule_waiting(budget, now)
            rows = np.concatenate([rows, np.array([row.row for row in added], np.int32)])
            num_new = np.concatenate([num_new, np.array(num_new_added, np.int32)])
        if not len(rows):
            return None
        starts = self.rows.num_computed_tokens[rows] - num_new
        return self._make_batch(rows, starts, num_new, tuple(added))

    def _schedule_running(self) -> tuple[IntArray, IntArray, bool]:
        """Rows that go on and their new tokens; preempts from the tail until the rest fits into the free blocks."""
        preempted = False
        while True:
            rows = self.rows.running
            num_new = self._share_budget(rows)
            scheduled = num_new > 0
            rows, num_new = rows[scheduled], num_new[scheduled]
            targets = self.rows.num_computed_tokens[rows] + num_new
            missing = self.kv.missing_blocks(rows, targets)
            if int(missing.sum()) <= self.kv.pool.num_free:
                break
            self._preempt(self._pick_victim())
            preempted = True
        growing = missing > 0
        self.kv.grow(rows[growing], missing[growing])
        self.rows.num_computed_tokens[rows] = targets
        self.kv.register_full_blocks(rows)
        return rows, num_new, preempted

    def _share_budget(self, rows: IntArray) -> IntArray:
        """New tokens for each running row. Rows that need one token come first, so that no prompt starves them."""
        table = self.rows
        known = table.num_tokens[rows] + table.num_placeholders[rows]
        if table.grammars:
            # What a constrained row may sample depends on its last token, so it waits until that is known.
            known = np.where(np.isin(rows, list(table.grammars)), table.num_tokens[rows], known)
        # The last token of a full output is sampled from the one before it and never computed.
        num_new: IntArray = np.minimum(known, table.max_total_tokens[rows] - 1) - table.num_computed_tokens[rows]
        threshold = self._config.long_prefill_token_threshold
        if threshold and len(rows) + len(self._waiting) > 1:
            num_new = np.minimum(num_new, threshold)
        budget = self._config.max_num_batched_tokens
        if int(num_new.sum()) <= budget:
            return num_new
        order = np.argsort(num_new > 1, kind="stable")
        ordered = num_new[order]
        before = np.cumsum(ordered) - ordered
        shared: IntArray = np.empty_like(num_new)
        shared[order] = np.clip(budget - before, 0, ordered)
        return shared

    def _pick_victim(self) -> Request:
        """The running request that loses its blocks: the last come, under the priority policy the least urgent."""
        running = [self.rows.request(row) for row in self.rows.running.tolist()]
        if self._config.policy == "priority":
            return max(running, key=lambda request: (request.priority, request.sequence))
        return running[-1]

    def _preempt(self, request: Request) -> None:
        """Takes row and blocks away. Output tokens stay; tokens in flight are dropped and sampled again, equal."""
        self._release_row(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self._outputs.stats.num_preempted += 1
        self._waiting.put_back(request)
        self.num_waiting_tokens += request.num_tokens

    def _schedule_waiting(self, budget: int, now: float) -> tuple[list[RowAdded], list[int]]:
        added: list[RowAdded] = []
        shares: list[int] = []
        while budget > 0 and len(self._waiting) and self.rows.num_free:
            request = self._waiting.peek()
            computed_blocks = self.kv.find_computed_blocks(request)
            num_computed = len(computed_blocks) * self.kv.block_size
            num_new = self._admission_share(request.num_tokens - num_computed, budget)
            if num_new == 0 or not self.kv.can_admit(request, computed_blocks):
                break
            added.append(self._admit(request, computed_blocks, num_computed, num_new, now))
            shares.append(num_new)
            budget -= num_new
        return added, shares

    def _admission_share(self, num_missing: int, budget: int) -> int:
        """Tokens that a new request computes at first; 0 when it must wait for a larger budget."""
        threshold = self._config.long_prefill_token_threshold
        if not self._config.enable_chunked_prefill:
            return num_missing if num_missing <= budget else 0
        if threshold and self.rows.num_running + len(self._waiting) > 1:
            num_missing = min(num_missing, threshold)
        return min(num_missing, budget)

    def _admit(
        self, request: Request, computed_blocks: list[int], num_computed: int, num_new: int, now: float
    ) -> RowAdded:
        self._waiting.remove(request)
        self.num_waiting_tokens -= request.num_tokens
        row = self.rows.occupy(request, num_computed)
        block_ids = self.kv.admit(row, computed_blocks, num_computed + num_new)
        request.status = RequestStatus.RUNNING
        if request.num_cached_tokens == NOT_LOOKED_UP:
            self._record_first_schedule(request, num_computed, now)
        added = RowAdded(
            row=row,
            request_id=request.request_id,
            token_ids=self.rows.token_ids[row, : request.num_tokens].copy(),
            num_prompt_tokens=len(request.prompt_token_ids),
            num_computed_tokens=num_computed,
            sampling=request.sampling,
            all_stop_token_ids=request.all_stop_token_ids,
            block_ids=(block_ids,),
            prompt_logprobs_start=request.num_prompt_logprobs,
            pooling=request.pooling,
        )
        self.rows.num_computed_tokens[row] = num_computed + num_new
        # Nobody is preempted after this point of a step, so the next request may reuse these blocks at once.
        self.kv.register_full_blocks(np.array([row], np.int32))
        return added

    def _record_first_schedule(self, request: Request, num_computed: int, now: float) -> None:
        request.num_cached_tokens = min(num_computed, len(request.prompt_token_ids))
        request.first_scheduled_at = now
        stats = self._outputs.stats
        stats.prefix_cache_queries += request.num_tokens
        stats.prefix_cache_hits += num_computed
        self._outputs.add_first_scheduled(request)

    def _make_batch(
        self, rows: IntArray, starts: IntArray, num_new: IntArray, added: tuple[RowAdded, ...]
    ) -> ScheduledBatch:
        table = self.rows
        samples = table.num_computed_tokens[rows] == table.num_tokens[rows] + table.num_placeholders[rows]
        if table.pooling:
            samples &= ~np.isin(rows, list(table.pooling))
        sampled_rows = rows[samples]
        table.num_placeholders[sampled_rows] += 1
        self.step += 1
        stats = self._outputs.stats
        stats.num_scheduled_tokens += int(num_new.sum())
        stats.num_prompt_tokens += int(np.clip(table.num_prompt_tokens[rows] - starts, 0, num_new).sum())
        output = SchedulerOutput(
            step=self.step,
            rows_removed=np.array(self._rows_removed, np.int32),
            rows_added=added,
            block_table_cells=self.kv.take_changed_cells(),
            rows=rows,
            num_computed_tokens=starts,
            num_scheduled_tokens=num_new,
            samples=samples,
        )
        self._rows_removed = []
        return ScheduledBatch(output, sampled_rows, table.generations[sampled_rows], self._prompt_generations(rows))

    def _prompt_generations(self, rows: IntArray) -> dict[int, int]:
        table = self.rows
        if not table.pooling and not table.prompt_logprobs:
            return {}
        readers = table.pooling | table.prompt_logprobs
        return {row: int(table.generations[row]) for row in rows.tolist() if row in readers}

    # --- update ---------------------------------------------------------------------------------------------------

    def update_from_output(
        self, batch: ScheduledBatch, output: ModelRunnerOutput, now: float, finish: Callable[[Request, Finish], None]
    ) -> None:
        """Appends sampled tokens to the rows that still belong to the requests they were sampled for.

        `finish` is called for every request that ended.
        """
        table = self.rows
        if batch.prompt_generations:
            self._take_prompt_results(batch, output, now, finish)
        valid = table.generations[batch.sampled_rows] == batch.generations
        for logprobs in output.logprobs:
            if valid[logprobs.index]:
                self._outputs.add_logprobs(table.request(int(batch.sampled_rows[logprobs.index])), logprobs)
        rows, token_ids = batch.sampled_rows[valid], output.sampled_token_ids[valid]
        good = token_ids >= 0
        if not good.all():
            for row, token_id in zip(rows[~good].tolist(), token_ids[~good].tolist(), strict=True):
                finish(table.request(row), _nothing_allowed() if token_id == MASKED_TOKEN else _not_finite())
            rows, token_ids = rows[good], token_ids[good]
        if table.grammars:
            good = advance_grammars(table, rows, token_ids)
            for row in rows[~good].tolist():
                finish(table.request(row), token_refused())
            rows, token_ids = rows[good], token_ids[good]
        first = table.num_tokens[rows] == table.num_prompt_tokens[rows]
        table.append_tokens(rows, token_ids, now)
        for row in rows[first].tolist():
            table.request(row).first_token_at = now
        self._outputs.stats.num_generation_tokens += len(rows)
        self._outputs.add_tokens(table.clients[rows], table.handles[rows], token_ids)
        for row, status, stop_token_id in find_stops(table, rows, token_ids):
            finish(table.request(row), Finish(status, stop_token_id))

    def _take_prompt_results(
        self, batch: ScheduledBatch, output: ModelRunnerOutput, now: float, finish: Callable[[Request, Finish], None]
    ) -> None:
        """Hands out what prompts gave, for the rows that still belong to the same requests."""
        table, generations = self.rows, batch.prompt_generations
        for logprobs in output.prompt_logprobs:
            if table.generations[logprobs.index] == generations[logprobs.index]:
                request = table.request(logprobs.index)
                request.num_prompt_logprobs += len(logprobs.ranks)
                self._outputs.add_prompt_logprobs(request, logprobs)
                if not request.awaits_prompt_logprobs:
                    table.prompt_logprobs.discard(logprobs.index)
        for row, vector in output.embeddings:
            if table.generations[row] == generations[row]:
                request = table.request(row)
                request.first_token_at = now
                if np.isfinite(vector).all():
                    finish(request, Finish(RequestStatus.FINISHED_STOPPED, embedding=tuple(vector.tolist())))
                else:
                    finish(request, _not_finite())

    # --- leave ----------------------------------------------------------------------------------------------------

    def remove(self, request: Request) -> None:
        """Takes a request out of the queue or out of its row, at any moment; the caller sets its status."""
        if request.row != NO_ROW:
            self._release_row(request)
        else:
            self._waiting.remove(request)
            self.num_waiting_tokens -= request.num_tokens

    def _release_row(self, request: Request) -> None:
        self.kv.free(request.row)
        self._rows_removed.append(self.rows.release(request))

    def preempt_all(self) -> None:
        """Takes row and blocks of every running request away, the last come first."""
        for row in self.rows.running.tolist()[::-1]:
            self._preempt(self.rows.request(row))

    def check_invariants(self) -> None:
        """Raises AssertionError unless rows, blocks and queue agree."""
        self.rows.check_invariants()
        self.kv.check_invariants()
        assert self.num_waiting_tokens >= 0, "negative number of waiting tokens"
        assert len(self._waiting) or self.num_waiting_tokens == 0, "waiting tokens without waiting requests"


def _not_finite() -> Finish:
    error = InternalError("the model computed logits that are not finite numbers", reason="LOGITS_NOT_FINITE")
    wire = WireError(error.code, error.reason, error.message)
    return Finish(RequestStatus.FINISHED_ERROR, error=wire)


def _nothing_allowed() -> Finish:
    error = InvalidRequestError(
        "the request's options must leave a token to be sampled, got none", reason="NO_TOKEN_ALLOWED"
    )
    return Finish(RequestStatus.FINISHED_ERROR, error=WireError(error.code, error.reason, error.message))
