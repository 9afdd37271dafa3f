"""Wakes the tasks of requests in batches, at a pace that leaves time to read what the engines send.

A batch's cost is measured: from waking its tasks until the loop has run them. The next batch starts no sooner than as
long again after it, times `_REST`. So while the loop keeps up, which is when outputs come slower than they are
written, every output is passed on at once; when it does not, the outputs of several steps meet in their collectors and
leave in one message. Knows futures and time alone, and belongs to one event loop.
"""

import asyncio
import time

# Rest after a batch, as a multiple of what it cost, and its limit in seconds.
_REST = 1.0
_MAX_REST_SECONDS = 0.02
# Turns of the loop in which the tasks of a batch run up to their writes.
_TURNS = 2


class WakePacer:
    """Wakes waiters. All methods belong to the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiters: list[asyncio.Future[None]] = []
        self._measuring = False
        self._rested_at = 0.0

    def wake(self, waiter: "asyncio.Future[None]") -> None:
        """Wakes a waiter with the next batch, which is at once when the loop keeps up."""
        self._waiters.append(waiter)
        if len(self._waiters) == 1 and not self._measuring:
            self._schedule()

    def _schedule(self) -> None:
        delay = self._rested_at - time.monotonic()
        if delay > 0:
            self._loop.call_later(delay, self._flush)
        else:
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        waiters, self._waiters = self._waiters, []
        self._measuring = True
        started = time.monotonic()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._loop.call_soon(self._measure, started, _TURNS)

    def _measure(self, started: float, turns: int) -> None:
        if turns:
            self._loop.call_soon(self._measure, started, turns - 1)
            return
        now = time.monotonic()
        self._rested_at = now + min(_MAX_REST_SECONDS, _REST * (now - started))
        self._measuring = False
        if self._waiters:
            self._schedule()
