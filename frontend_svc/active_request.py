"""The requests in flight on this frontend: found by id, ended from outside, released exactly once.

A request is released by its own task or by the end of its call, whichever comes first: a task that is blocked in a
write learns of a vanished client only when it is collected. Releasing is synchronous and aborts the request in its
engine, all of its outputs together. Invariant: a released request is in no engine, and its id is free.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from frontend_svc.collector import News, OutputCollector, slow_consumer_error
from frontend_svc.engine_run import EngineRun
from frontend_svc.metrics import FrontendMetrics
from frontend_svc.pacing import WakePacer
from frontend_svc.request import Caller
from shared.errors import DeadlineExceededError, DuplicateRequestError, TaktError, UnavailableError
from shared.types import AbortCause, FinishedRequest, FinishReason

# A call that ends this close to its deadline was ended by it.
DEADLINE_TOLERANCE_SECONDS = 0.02


class Call(Protocol):
    """The client's call, as far as a request knows it."""

    @property
    def caller(self) -> Caller:
        """What is known of the caller."""

    async def admitted(self) -> None:
        """The request is in an engine: nobody else must retry it."""

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls back once the call is over, however."""

    def end(self, error: TaktError) -> None:
        """Ends the call although its client does not read."""


class ActiveRequest:
    """A request in flight: a run for each of its outputs. All methods belong to the event loop."""

    def __init__(
        self, request_id: str, call: Call, limits: "SlowClientLimits", metrics: FrontendMetrics, pacer: WakePacer
    ) -> None:
        self.request_id = request_id
        self.call = call
        # Wakes the request's task when any of its outputs has news.
        self.news = News(pacer)
        self.runs: list[EngineRun] = []
        self.is_released = False
        self._limits = limits
        self._metrics = metrics
        # Since when a message has been waiting for the client.
        self._offered_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        deadline = call.caller.deadline
        if deadline is not None:
            self._timer = asyncio.get_running_loop().call_later(deadline - time.monotonic(), self._expire)

    def add_run(self) -> EngineRun:
        """One more output."""
        run = EngineRun(OutputCollector(self._limits.max_tokens, self._check_overflow, self.news), self._metrics)
        self.runs.append(run)
        return run

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all outputs so far."""
        return sum(run.num_output_tokens for run in self.runs)

    def _abort_in_engine(self, cause: AbortCause) -> None:
        for run in self.runs:
            run.abort_in_engine(cause)

    def _fail(self, cause: AbortCause, error: TaktError) -> None:
        for run in self.runs:
            run.abort_in_engine(cause)
            run.collector.fail(error)

    # --- ends from outside --------------------------------------------------------------------------------------------

    def abort(self, cause: AbortCause) -> None:
        """Ends the request as the client or the operator asked: with a last message of each output."""
        self._abort_in_engine(cause)
        for run in self.runs:
            run.collector.on_finished(FinishedRequest(handle=0, reason=FinishReason.ABORT, abort_cause=cause))

    def shut_down(self) -> None:
        """Ends the request because the frontend goes: with last messages if there was a first one."""
        if self.num_output_tokens:
            self.abort(AbortCause.SHUTDOWN)
        else:
            self._fail(AbortCause.SHUTDOWN, UnavailableError("the frontend shuts down", reason="DRAINING"))

    def _expire(self) -> None:
        self._fail(AbortCause.DEADLINE, DeadlineExceededError("the request's deadline passed"))

    # --- a client that does not read ----------------------------------------------------------------------------------

    def offered(self) -> None:
        """A message is offered to the client."""
        self._offered_at = time.monotonic()

    def taken(self) -> None:
        """The client has taken it."""
        self._offered_at = None

    def _check_overflow(self) -> None:
        if self._offered_at is not None:
            self._end_slow(f"more than {self._limits.max_tokens} tokens wait")

    def check_progress(self, now: float) -> None:
        """Ends the call when its client has not taken a message for too long."""
        if self._offered_at is not None and now - self._offered_at > self._limits.timeout:
            self._offered_at = None
            self.call.end(self._end_slow(f"it has taken nothing for {self._limits.timeout:g} s"))

    def _end_slow(self, reason: str) -> TaktError:
        error = slow_consumer_error(reason)
        self._fail(AbortCause.SLOW_CONSUMER, error)
        return error

    # --- the end ------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Forgets the request, and ends it in its engine when it is still there. Idempotent."""
        if self.is_released:
            return
        self.is_released = True
        if self._timer is not None:
            self._timer.cancel()
        self._abort_in_engine(self._cause_of_call_end())

    def _cause_of_call_end(self) -> AbortCause:
        deadline = self.call.caller.deadline
        if deadline is not None and time.monotonic() >= deadline - DEADLINE_TOLERANCE_SECONDS:
            return AbortCause.DEADLINE
        return AbortCause.CLIENT


class SlowClientLimits:
    """When a client is too slow: more unread tokens than `max_tokens`, or a message not taken for `timeout` seconds."""

    __slots__ = ("max_tokens", "timeout")

    def __init__(self, max_tokens: int, timeout: float) -> None:
        self.max_tokens = max_tokens
        self.timeout = timeout


class ActiveRequests:
    """All requests in flight."""

    def __init__(self, limits: SlowClientLimits, metrics: FrontendMetrics) -> None:
        self.is_draining = False
        self._limits = limits
        self._metrics = metrics
        self._pacer = WakePacer()
        self._requests: dict[str, ActiveRequest] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._requests)

    @contextmanager
    def open(self, request_id: str, call: Call, num_runs: int = 1) -> Iterator[ActiveRequest]:
        """Holds a request of so many outputs until the block ends or the call does.

        Raises UnavailableError while draining, DuplicateRequestError when the id is in flight.
        """
        if self.is_draining:
            raise UnavailableError("the frontend is draining", reason="DRAINING")
        if request_id in self._requests:
            raise DuplicateRequestError(
                f"request_id must be unique among the requests in flight, got {request_id!r} again", field="request_id"
            )
        active = ActiveRequest(request_id, call, self._limits, self._metrics, self._pacer)
        for _ in range(num_runs):
            active.add_run()
        self._requests[request_id] = active
        self._changed()
        call.on_done(lambda: self._release(active))
        try:
            yield active
        finally:
            self._release(active)

    def _release(self, active: ActiveRequest) -> None:
        if not active.is_released:
            active.release()
            del self._requests[active.request_id]
            self._changed()

    def _changed(self) -> None:
        self._metrics.set_in_flight(len(self._requests))
        if self._requests:
            self._idle.clear()
        else:
            self._idle.set()

    def abort(self, request_id: str) -> bool:
        """Ends a request for its client; False when it is not in flight."""
        active = self._requests.get(request_id)
        if active is not None:
            active.abort(AbortCause.CLIENT)
        return active is not None

    def shut_down(self) -> None:
        """Ends all of them."""
        for active in list(self._requests.values()):
            active.shut_down()

    def check_progress(self) -> None:
        """Ends those whose client does not read."""
        now = time.monotonic()
        for active in list(self._requests.values()):
            active.check_progress(now)

    async def wait_idle(self) -> None:
        """Returns when none is left."""
        await self._idle.wait()
