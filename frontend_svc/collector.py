"""One request's unread outputs in one slot: what a slow client has not taken is merged, never queued.

The reader of the engine's stream puts, the request's own task takes, on one event loop. Invariant: tokens come out
complete and in order, before the end or the error; more than `max_unread` of them end the request instead.
"""

import asyncio
from collections.abc import Callable

from shared.engine_client import EngineLoss
from shared.errors import OverloadedError, TaktError, UnavailableError
from shared.types import FinishedRequest, FirstScheduled


class EngineLostError(UnavailableError):
    """The engine is gone and the request with it."""

    default_reason = "ENGINE_LOST"

    def __init__(self, loss: EngineLoss) -> None:
        super().__init__(f"engine {loss.address} was lost: {loss.reason}")
        self.loss = loss


class OutputCollector:
    """Implements RequestSink. `first` is set once the engine has computed the request."""

    __slots__ = ("_error", "_finished", "_loop", "_max_unread", "_on_overflow", "_token_ids", "_waiter", "first")

    def __init__(self, max_unread: int, on_overflow: Callable[[], None]) -> None:
        """`on_overflow` is called when the client has left more than `max_unread` tokens unread."""
        self.first: FirstScheduled | None = None
        self._loop = asyncio.get_running_loop()
        self._max_unread = max_unread
        self._on_overflow = on_overflow
        self._token_ids: list[int] = []
        self._finished: FinishedRequest | None = None
        self._error: TaktError | None = None
        self._waiter: asyncio.Future[None] | None = None

    # --- from the engine ----------------------------------------------------------------------------------------------

    def on_first_scheduled(self, first: FirstScheduled) -> None:
        """Notes the first schedule; it alone wakes nobody."""
        if self.first is None:
            self.first = first

    def on_token(self, token_id: int) -> None:
        """One more token."""
        self._token_ids.append(token_id)
        if self._waiter is not None:
            self._wake()
        elif len(self._token_ids) > self._max_unread:
            self._overflow()

    def on_tokens(self, token_ids: list[int]) -> None:
        """More tokens."""
        self._token_ids += token_ids
        if self._waiter is not None:
            self._wake()
        elif len(self._token_ids) > self._max_unread:
            self._overflow()

    def on_finished(self, finished: FinishedRequest) -> None:
        """The end; the first one counts."""
        if not self.has_ended:
            self._finished = finished
            self._wake()

    def on_lost(self, loss: EngineLoss) -> None:
        """The engine is gone."""
        self.fail(EngineLostError(loss))

    def fail(self, error: TaktError) -> None:
        """Ends the request with an error, behind the tokens that are there; the first end counts."""
        if not self.has_ended:
            self._error = error
            self._wake()

    def _overflow(self) -> None:
        if not self.has_ended:
            self._on_overflow()

    @property
    def has_ended(self) -> bool:
        """Whether nothing more is put."""
        return self._error is not None or self._finished is not None

    def begin_anew(self) -> None:
        """Another engine computes the request from its start; nothing of the last one was taken."""
        assert not self._token_ids
        self._error = self._finished = self.first = None

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # --- to the client ------------------------------------------------------------------------------------------------

    async def take(self) -> tuple[list[int], FinishedRequest | None]:
        """All tokens since the last call, and the end if it is there. Raises the error once no token is left."""
        while not self._token_ids and self._finished is None:
            if self._error is not None:
                raise self._error
            self._waiter = self._loop.create_future()
            await self._waiter
        token_ids, self._token_ids = self._token_ids, []
        return token_ids, self._finished


def slow_consumer_error(reason: str) -> OverloadedError:
    """What a client that does not read its messages is told."""
    return OverloadedError(f"the client reads too slowly: {reason}", reason="SLOW_CONSUMER")
