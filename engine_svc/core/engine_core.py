"""The mediator: schedule -> execute -> update.

Knows the requests by (client, handle) and who holds them; everything else it asks of the scheduler, which decides, and
of the executor, which computes. It runs in one thread and has no clock: time, aborts and waiting enter as arguments.
Invariant: every request that was added ends exactly once, in an output or by an abort of its own client.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

from engine_svc.core.interfaces import (
    Abort,
    CompiledGrammar,
    Executor,
    GrammarBackend,
    KVCacheConfig,
    ModelRunnerOutput,
    StepContext,
)
from engine_svc.core.outputs import EngineCoreOutputs, OutputCollector
from engine_svc.core.request import Finish, Request, RequestStatus, build_request
from engine_svc.core.scheduler import ScheduledBatch, Scheduler, SchedulerConfig
from engine_svc.core.structured_output import StructuredOutputManager
from engine_svc.core.validation import RequestLimits, validate_request
from shared.errors import DuplicateRequestError, TaktError
from shared.types import AbortCause, EngineLoad, EngineRequest, FinishedRequest, FinishReason, WireError

# Aborts of these causes come from the engine's side, so the frontend has to hear of them.
_ENGINE_CAUSES = frozenset({AbortCause.DEADLINE, AbortCause.SHUTDOWN})


class EngineCore:
    """One replica's core."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv_config: KVCacheConfig,
        executor: Executor,
        *,
        vocab_size: int,
        grammars: GrammarBackend | None = None,
    ) -> None:
        """The executor's KV cache is initialised already. Without `grammars` constrained requests are refused.

        Raises ValueError for limits that contradict each other.
        """
        _check_config(config, kv_config)
        self._config = config
        self._executor = executor
        self._limits = RequestLimits(
            vocab_size=vocab_size,
            max_model_len=config.max_model_len,
            max_stop_token_ids=config.max_stop_token_ids,
            max_logprobs=config.max_logprobs,
        )
        self._outputs = OutputCollector()
        self._structured = StructuredOutputManager(grammars, vocab_size)
        self.scheduler = Scheduler(config, kv_config, self._outputs)
        self._requests: dict[tuple[int, int], Request] = {}
        self._deadlines: list[tuple[float, int, tuple[int, int]]] = []
        self._in_flight: deque[tuple[ScheduledBatch, Future[ModelRunnerOutput]]] = deque()
        self._sequence = 0

    # --- requests -------------------------------------------------------------------------------------------------

    def add_request(self, client: int, request: EngineRequest, now: float) -> None:
        """Queues a request. One that is refused ends with an error in the next outputs; nothing is raised."""
        try:
            if (client, request.handle) in self._requests:
                message = f"handle {request.handle} is in flight"
                raise DuplicateRequestError(message, field="handle")
            validate_request(request, self._limits)
            self._structured.check_request(request)
        except TaktError as error:
            wire = WireError(error.code, error.reason, error.message, error.field)
            refused = FinishedRequest(handle=request.handle, reason=FinishReason.ERROR, error=wire)
            self._outputs.add_refused(client, refused)
            return
        self._sequence += 1
        added = build_request(
            client, request, sequence=self._sequence, max_model_len=self._config.max_model_len, now=now
        )
        self._requests[added.key] = added
        if added.deadline is not None:
            heapq.heappush(self._deadlines, (added.deadline, added.sequence, added.key))
        if added.is_constrained:
            self._structured.start(added)
        else:
            self.scheduler.add_request(added)

    def take_ready_grammars(self, grammars: Sequence[CompiledGrammar]) -> None:
        """Admits requests whose grammar is compiled; where that failed, or refuses what was resumed, they end."""
        self._structured.take_ready(grammars, self.scheduler.add_request, self._finish)

    def abort_requests(self, aborts: Sequence[Abort]) -> None:
        """Ends requests wherever they stand; unknown and finished ones are no error."""
        for abort in aborts:
            request = self._requests.get((abort.client, abort.handle))
            if request is not None:
                self._finish(request, Finish(RequestStatus.FINISHED_ABORTED, abort_cause=abort.cause))

    def abort_client(self, client: int) -> None:
        """Ends everything of a client that is gone, and forgets its outputs."""
        handles = [handle for owner, handle in self._requests if owner == client]
        self.abort_requests([Abort(client, handle, AbortCause.CLIENT) for handle in handles])
        self._outputs.drop_client(client)

    def abort_all(self, cause: AbortCause) -> None:
        """Ends every request with an output."""
        self.abort_requests([Abort(client, handle, cause) for client, handle in self._requests])

    def _finish(self, request: Request, finish: Finish) -> None:
        """The one way out: gives back row or place in the queue, and tells the client unless it asked for the end."""
        if request.status is RequestStatus.WAITING_FOR_GRAMMAR:
            self._structured.remove(request)
        else:
            self.scheduler.remove(request)
        del self._requests[request.key]
        request.status = finish.status
        self._outputs.stats.num_finished += 1
        if finish.status is RequestStatus.FINISHED_ABORTED:
            causes = self._outputs.stats.aborts_by_cause
            causes[finish.abort_cause] = causes.get(finish.abort_cause, 0) + 1
            if finish.abort_cause not in _ENGINE_CAUSES:
                return
        self._outputs.add_finished(request, finish)

    def _expire(self, now: float) -> None:
        """Ends requests whose deadline passed, scheduled or not."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, sequence, key = heapq.heappop(self._deadlines)
            request = self._requests.get(key)
            if request is not None and request.sequence == sequence:
                self._finish(request, Finish(RequestStatus.FINISHED_ABORTED, abort_cause=AbortCause.DEADLINE))
        if not self._requests:
            self._deadlines.clear()

    # --- steps ----------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._requests or self._in_flight or len(self._outputs))

    def step(self, context: StepContext) -> EngineCoreOutputs:
        """Runs one step and returns what is to be handed out; with several batches in flight, often nothing."""
        if self._config.max_concurrent_batches > 1:
            self._step_with_batch_queue(context)
        else:
            self._step(context)
        return self._outputs.take(self.scheduler.step, self.load())

    def _step(self, context: StepContext) -> None:
        """Schedule, execute, sample, drain aborts, update."""
        if self._start_batch(context):
            self._finish_batch(context)

    def _step_with_batch_queue(self, context: StepContext) -> None:
        """The same with several batches in flight: filling the pipeline comes before collecting from it."""
        if len(self._in_flight) < self._config.max_concurrent_batches:
            started = self._start_batch(context)
            if started and len(self._in_flight) < self._config.max_concurrent_batches:
                return
        if self._in_flight:
            self._finish_batch(context)

    def _start_batch(self, context: StepContext) -> bool:
        now = context.now()
        self._expire(now)
        batch = self.scheduler.schedule(now)
        if batch is None:
            return False
        self._executor.execute_model(batch.output)
        grammar = self._structured.bitmask_for(batch.output, self.scheduler.rows, self._finish)
        self._in_flight.append((batch, self._executor.sample_tokens(batch.output, grammar)))
        return True

    def _finish_batch(self, context: StepContext) -> None:
        batch, future = self._in_flight.popleft()
        output = context.wait(future)
        self.abort_requests(context.take_aborts())
        self.scheduler.update_from_output(batch, output, context.now(), self._finish)

    # --- utilities ------------------------------------------------------------------------------------------------

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
        """Forgets cached prefixes; False when blocks are in use and running requests may not be preempted."""
        if reset_running_requests:
            self.scheduler.preempt_all()
        return self.scheduler.kv.pool.reset()

    @property
    def num_waiting_for_grammar(self) -> int:
        """Requests that can run only after their grammar was compiled."""
        return self._structured.num_waiting

    def load(self) -> EngineLoad:
        """What the core is doing."""
        return EngineLoad(
            num_running=self.scheduler.rows.num_running,
            num_waiting=self.scheduler.num_waiting + self._structured.num_waiting,
            kv_cache_usage=self.scheduler.kv.pool.usage,
            step_counter=self.scheduler.step,
            num_waiting_tokens=self.scheduler.num_waiting_tokens + self._structured.num_waiting_tokens,
        )

    def check_invariants(self) -> None:
        """Raises AssertionError unless requests, rows and blocks agree and nothing is leaked."""
        self.scheduler.check_invariants()
        self._structured.check_invariants()
        held = self.scheduler.rows.num_running + self.scheduler.num_waiting + self._structured.num_waiting
        assert held == len(self._requests), "a request is in no queue and no row, or in two"
        assert all(not request.status.is_finished for request in self._requests.values()), "a finished request is kept"


def _check_config(config: SchedulerConfig, kv_config: KVCacheConfig) -> None:
    usable = (kv_config.num_blocks - 1) * kv_config.block_size
    if usable < config.max_model_len:
        raise ValueError(f"KV cache holds {usable} tokens, max_model_len is {config.max_model_len}")
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens must be at least max_num_seqs {config.max_num_seqs}, "
            f"got {config.max_num_batched_tokens}"
        )
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < config.max_model_len:
        raise ValueError(
            f"without chunked prefill max_num_batched_tokens must be at least max_model_len {config.max_model_len}, "
            f"got {config.max_num_batched_tokens}"
        )
