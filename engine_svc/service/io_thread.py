"""The thread that talks to the outside: one event loop, the only one of the process that may use gRPC.

Others hand it coroutines and functions. If it ends before it is asked to, `on_failure` is called: an engine that
nobody can hear must not live on.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class IoThread:
    """An event loop in a thread."""

    def __init__(self, on_failure: Callable[[str], None]) -> None:
        self._on_failure = on_failure
        self.loop = asyncio.new_event_loop()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="io", daemon=True)

    def start(self) -> None:
        """Starts the loop."""
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            if not self._stopping:
                self._on_failure("the io thread ended")

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Runs a coroutine on the loop and waits for its result. Raises its error, or TimeoutError."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Calls a function on the loop, without waiting for it."""
        self.loop.call_soon_threadsafe(function, *arguments)

    def stop(self, timeout: float) -> None:
        """Ends the loop; returns after `timeout` seconds even if it cannot end."""
        self._stopping = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout)
        if not self._thread.is_alive():
            self.loop.close()
