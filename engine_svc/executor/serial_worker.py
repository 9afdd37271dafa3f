"""One daemon thread that runs jobs in the order they were given and answers with futures.

Knows nothing of models. The first fatal job that raises makes the worker fail: its error is the error of every later
job, and the failure callbacks are called once each. Daemon, so that a job that hangs in native code cannot keep the
process alive.
"""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class SerialWorker:
    """Runs jobs one after the other. With `synchronous`, a job runs at once in the thread that submits it."""

    def __init__(self, name: str, *, synchronous: bool = False) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any], bool] | None] = SimpleQueue()
        self._lock = threading.Lock()
        # Set once, under the lock: what every later job is answered with.
        self._error: BaseException | None = None
        self._reason: str | None = None
        self._callbacks: list[Callable[[str], None]] = []
        self._thread: threading.Thread | None = None
        if not synchronous:
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def submit(self, job: Callable[[], T], *, fatal: bool = True) -> Future[T]:
        """Queues a job. With `fatal` its exception fails the worker, otherwise only its own future."""
        future: Future[T] = Future()
        with self._lock:
            error = self._error
            if error is None and self._thread is not None:
                self._jobs.put((future, job, fatal))
        if error is not None:
            future.set_exception(error)
        elif self._thread is None:
            self._answer(future, job, fatal)
        return future

    def register_failure_callback(self, callback: Callable[[str], None]) -> None:
        """Calls `callback` with the reason when the worker fails; at once if it has failed."""
        with self._lock:
            if self._reason is None:
                self._callbacks.append(callback)
                return
            reason = self._reason
        callback(reason)

    def close(self) -> None:
        """Fails what is queued, and ends the thread when its current job is done; waits for nothing. Idempotent."""
        with self._lock:
            if self._error is None:
                self._error = RuntimeError("the executor is shut down")
            error = self._error
        with contextlib.suppress(Empty):
            while (item := self._jobs.get_nowait()) is not None:
                if item[0].set_running_or_notify_cancel():
                    item[0].set_exception(error)
        self._jobs.put(None)

    def join(self, timeout_seconds: float) -> bool:
        """Waits for the thread of a closed worker; whether it ended."""
        if self._thread is None or self._thread is threading.current_thread():
            return True
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            self._answer(*item)
            # An idle worker holds on to no result.
            del item

    def _answer(self, future: Future[Any], job: Callable[[], Any], fatal: bool) -> None:
        if not future.set_running_or_notify_cancel():
            return
        if self._error is not None:
            future.set_exception(self._error)
            return
        try:
            result = job()
        except BaseException as error:  # noqa: BLE001 - whatever a job raises belongs to whoever waits for it
            callbacks = self._fail(error) if fatal else []
            future.set_exception(error)
            for callback in callbacks:
                callback(f"{type(error).__name__}: {error}")
        else:
            future.set_result(result)

    def _fail(self, error: BaseException) -> list[Callable[[str], None]]:
        """Records the first failure; returns whom to tell."""
        with self._lock:
            if self._error is not None:
                return []
            self._error, self._reason = error, f"{type(error).__name__}: {error}"
            callbacks, self._callbacks = self._callbacks, []
        return callbacks
