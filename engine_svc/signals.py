"""SIGTERM and SIGINT: the first asks for a shutdown, the next has its default action.

The signal reaches the io thread's loop through a file descriptor, so that it is heard while the main thread waits.
Before the engine serves there is nothing to drain, and the first signal ends the process.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class ShutdownSignals:
    """Takes the process's signals; made and installed by the main thread."""

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        self._watched = False

    def install(self) -> None:
        """From here on the first signal ends the process with code 0, until `watch`."""
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        # The main thread runs this once its wait is interrupted; the io thread has been woken already.
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        if not self._watched:
            raise SystemExit(0)

    def watch(self, loop: asyncio.AbstractEventLoop, on_first: Callable[[], None]) -> None:
        """From here on the first signal calls `on_first` on the loop."""

        def arrived() -> None:
            loop.remove_reader(self._read_end)
            on_first()

        self._watched = True
        loop.call_soon_threadsafe(loop.add_reader, self._read_end, arrived)
