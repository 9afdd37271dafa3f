"""Runs the core: the only thread that touches it, joined to the rest of the process by queues.

Knows neither gRPC nor torch. It blocks while there is nothing to do, takes everything that arrived before each step,
and hands a step's outputs over in one call. Invariant: whatever a client sends, the loop only ends by a shutdown or by
EngineDeadError, and the latter means that the core's state can no longer be trusted.
"""

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar, assert_never

from engine_svc.core.engine_core import EngineCore
from engine_svc.core.interfaces import Abort, CompiledGrammar, Executor
from engine_svc.core.outputs import EngineCoreOutputs
from engine_svc.messages import (
    AbortRequests,
    AddRequests,
    ClientGone,
    CoreMessage,
    EngineFailed,
    GetLoad,
    GrammarReady,
    Ping,
    ResetPrefixCache,
    StartProfile,
    StopProfile,
    UtilityCall,
    UtilityMethod,
    UtilityOutcome,
    WakeUp,
)
from shared.errors import InternalError, TaktError
from shared.types import AbortCause, EngineLoad

logger = logging.getLogger(__name__)

T = TypeVar("T")

# How long the core must have been idle before it spends time on checking itself.
IDLE_CHECK_DELAY_SECONDS = 0.05
# How long to wait for something new after a step in which nothing could run.
BLOCKED_WAIT_SECONDS = 0.001
# How long a step may go on after the deadline of a shutdown.
SHUTDOWN_GRACE_SECONDS = 10.0

# How long to wait for the error of a step once the executor has failed.
FAILED_STEP_WAIT_SECONDS = 0.5


class EngineDeadError(Exception):
    """The engine failed and must exit; the message is one sentence for frontends and operators."""


class CoreListener(Protocol):
    """Who gets what the core produces. Called on the core thread; must return at once."""

    def on_step(self, outputs: EngineCoreOutputs, seconds: float) -> None:
        """A step of `seconds` ended."""

    def on_utility_result(self, client: int, call_id: int, outcome: UtilityOutcome) -> None:
        """A utility call ended."""


class CoreThread:
    """The core's loop. `run` belongs to one thread; everything else may be called from any."""

    def __init__(self, core: EngineCore, executor: Executor, listener: CoreListener, *, execute_timeout: float) -> None:
        """`execute_timeout` limits the seconds that one step may take in the executor."""
        self._core = core
        self._executor = executor
        self._listener = listener
        self._execute_timeout = execute_timeout
        self._inbox: SimpleQueue[CoreMessage] = SimpleQueue()
        # Aborts also go here, to reach a step that is under way.
        self._eager_aborts: deque[Abort] = deque()
        self._shutdown_deadline: float | None = None
        self._failure: str | None = None
        # Set when the future that the core waits for is done, or when the limits of the wait changed.
        self._woken = threading.Event()
        # Requests ended since the last step without an output that would make the next one come.
        self._unreported = False
        self._load = EngineLoad()
        self._step_started: float | None = None
        self._busy_since: float | None = None
        executor.register_failure_callback(self.fail)

    # --- from any thread ------------------------------------------------------------------------------------------

    def submit(self, message: AddRequests | ClientGone | UtilityCall) -> None:
        """Queues a message."""
        self._inbox.put(message)

    def abort(self, aborts: Sequence[Abort]) -> None:
        """Ends requests: at once if their step is under way, else behind the adds that came before."""
        self._eager_aborts.extend(aborts)
        self._inbox.put(AbortRequests(tuple(aborts)))

    def grammar_ready(self, grammar: CompiledGrammar) -> None:
        """Queues what the grammar backend answers."""
        self._inbox.put(GrammarReady(grammar))

    def fail(self, reason: str) -> None:
        """Makes `run` raise EngineDeadError, also while it waits for a step."""
        self._failure = reason
        self._inbox.put(EngineFailed(reason))
        self._woken.set()

    def shut_down(self, deadline: float) -> None:
        """Makes `run` return when nothing is left to do; at `deadline` (monotonic) the rest is aborted."""
        self._shutdown_deadline = deadline
        self._inbox.put(WakeUp())
        self._woken.set()

    def load(self) -> EngineLoad:
        """What the core was doing after its last step, and for how long the present step has been running."""
        started = self._step_started
        if started is None:
            return self._load
        return dataclasses.replace(self._load, in_step_seconds=time.monotonic() - started)

    def busy_seconds(self) -> float:
        """Seconds since the loop last went round; 0 while it waits for something to do."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    # --- the loop -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs until a shutdown. Raises EngineDeadError when the engine failed."""
        try:
            while self._take_messages():
                self._step()
        except EngineDeadError:
            raise
        except Exception as error:
            raise EngineDeadError(f"a step failed: {type(error).__name__}: {error}") from error
        finally:
            self._busy_since = None

    def _take_messages(self) -> bool:
        """Handles what arrived, waiting for it when there is nothing else to do. False: the shutdown is complete."""
        # Read before the queue is emptied, so that every add that came before the shutdown is seen.
        deadline = self._shutdown_deadline
        if deadline is None and not self._has_work():
            self._handle(self._wait_for_message())
        self._busy_since = time.monotonic()
        try:
            while True:
                self._handle(self._inbox.get_nowait())
        except Empty:
            pass
        if deadline is None:
            return True
        if self._core.has_work() and time.monotonic() >= deadline:
            self._core.abort_all(AbortCause.SHUTDOWN)
        return self._core.has_work()

    def _wait_for_message(self) -> CoreMessage:
        self._load = self._core.load()
        self._busy_since = None
        try:
            return self._inbox.get(timeout=IDLE_CHECK_DELAY_SECONDS)
        except Empty:
            self._core.check_invariants()
            # No request is left, and each abort is in the inbox too.
            self._eager_aborts.clear()
            return self._inbox.get()

    def _has_work(self) -> bool:
        return self._unreported or self._core.has_work()

    def _step(self) -> None:
        if not self._has_work():
            return
        self._unreported = False
        started = self._step_started = time.monotonic()
        try:
            outputs = self._core.step(self)
        finally:
            self._step_started = None
        self._load = self._core.load()
        self._listener.on_step(outputs, time.monotonic() - started)
        if not outputs.by_client and not outputs.stats.num_scheduled_tokens and self._core.has_work():
            self._wait_while_blocked()

    def _wait_while_blocked(self) -> None:
        """Nothing could run, so only something new can change that; the short limit is for deadlines."""
        try:
            self._handle(self._inbox.get(timeout=BLOCKED_WAIT_SECONDS))
        except Empty:
            return

    def _handle(self, message: CoreMessage) -> None:
        match message:
            case AddRequests(client, requests, received):
                for request in requests:
                    self._core.add_request(client, request, received)
            case AbortRequests(aborts):
                self._core.abort_requests(aborts)
                self._unreported = True
            case ClientGone(client):
                self._core.abort_client(client)
                self._unreported = True
            case GrammarReady(grammar):
                self._core.take_ready_grammars((grammar,))
                self._unreported = True
            case UtilityCall():
                self._run_utility(message)
            case EngineFailed(reason):
                raise EngineDeadError(reason)
            case WakeUp():
                pass
            case _:
                assert_never(message)

    # --- utility calls --------------------------------------------------------------------------------------------

    def _run_utility(self, call: UtilityCall) -> None:
        if self.now() >= call.deadline:
            return
        outcome: UtilityOutcome
        try:
            outcome = self._utility_outcome(call.method)
        except TaktError as error:
            outcome = error
        except Exception:
            logger.exception("utility call %s failed", type(call.method).__name__)
            outcome = InternalError(f"{type(call.method).__name__} failed; the engine's log tells more")
        self._listener.on_utility_result(call.client, call.call_id, outcome)

    def _utility_outcome(self, method: UtilityMethod) -> UtilityOutcome:
        match method:
            case ResetPrefixCache(reset_running_requests):
                return self._core.reset_prefix_cache(reset_running_requests=reset_running_requests)
            case GetLoad():
                return self._core.load()
            case Ping():
                return self._core.load().step_counter
            case StartProfile(name):
                self._executor.start_profile(name)
                return ""
            case StopProfile():
                return self._executor.stop_profile()
            case _:
                assert_never(method)

    # --- the surroundings of a step (StepContext) -----------------------------------------------------------------

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def take_aborts(self) -> Sequence[Abort]:
        """Returns and clears the aborts that arrived since the last call."""
        aborts = []
        while self._eager_aborts:
            aborts.append(self._eager_aborts.popleft())
        return aborts

    def wait(self, future: Future[T]) -> T:
        """Waits for a step's result. Raises EngineDeadError past the limit or when the executor failed.

        Steps end in order and the one before has been collected, so this one has started by now at the latest: time
        that it spent behind others never counts.
        """
        if future.done():
            return future.result()
        started = time.monotonic()
        self._woken.clear()
        future.add_done_callback(lambda _: self._woken.set())
        while not future.done():
            if self._failure is not None:
                return self._result_of_failed(future, self._failure)
            remaining = self._wait_limit(started) - time.monotonic()
            if remaining <= 0:
                waited = time.monotonic() - started
                raise EngineDeadError(f"a step did not end within {waited:.1f} s")
            self._woken.wait(remaining)
            self._woken.clear()
        return future.result()

    def _result_of_failed(self, future: Future[T], reason: str) -> T:
        """The step's own error says more than the reason, where it comes in time."""
        try:
            return future.result(FAILED_STEP_WAIT_SECONDS)
        except TimeoutError:
            raise EngineDeadError(reason) from None

    def _wait_limit(self, started: float) -> float:
        limit = started + self._execute_timeout
        if self._shutdown_deadline is not None:
            limit = min(limit, self._shutdown_deadline + SHUTDOWN_GRACE_SECONDS)
        return limit
