"""One output's unread tokens in one slot: what a slow client has not taken is merged, never queued.

The reader of the engine's stream puts, the request's own task takes, on one event loop. Invariant: tokens come out
complete and in order, with as many log-probabilities if any, before the end or the error; more than `max_unread` of
them end the request instead.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from frontend_svc.pacing import WakePacer
from shared.engine_client import EngineLoss
from shared.errors import OverloadedError, TaktError, UnavailableError
from shared.types import FinishedRequest, FirstScheduled, TokenLogprobs


class EngineLostError(UnavailableError):
    """The engine is gone and the request with it."""

    default_reason = "ENGINE_LOST"

    def __init__(self, loss: EngineLoss) -> None:
        super().__init__(f"engine {loss.address} was lost: {loss.reason}")
        self.loss = loss


class News:
    """Wakes the one task that waits for anything new of a request's outputs, at once or at the pace of a pacer."""

    __slots__ = ("_loop", "_pacer", "_waiter")

    def __init__(self, pacer: WakePacer | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._pacer = pacer
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_awaited(self) -> bool:
        """Whether the task waits and was not woken."""
        return self._waiter is not None

    def announce(self) -> None:
        """Wakes the task if it waits."""
        waiter, self._waiter = self._waiter, None
        if waiter is None or waiter.done():
            return
        if self._pacer is None:
            waiter.set_result(None)
        else:
            self._pacer.wake(waiter)

    async def wait(self) -> None:
        """Returns at the next announcement."""
        self._waiter = self._loop.create_future()
        await self._waiter


@dataclass(slots=True)
class Taken:
    """What came since the last time. `logprobs` are of the tokens, `prompt_logprobs` of the prompt, each in order."""

    token_ids: list[int]
    finished: FinishedRequest | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


class OutputCollector:
    """Implements RequestSink. `first` is set once the engine has computed the request."""

    __slots__ = (
        "_error",
        "_finished",
        "_logprobs",
        "_max_unread",
        "_news",
        "_on_overflow",
        "_prompt_logprobs",
        "_token_ids",
        "first",
    )

    def __init__(self, max_unread: int, on_overflow: Callable[[], None], news: News | None = None) -> None:
        """`on_overflow` is called when the client has left more than `max_unread` tokens unread.

        Outputs of one request share their `news`.
        """
        self.first: FirstScheduled | None = None
        self._news = news or News()
        self._max_unread = max_unread
        self._on_overflow = on_overflow
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._finished: FinishedRequest | None = None
        self._error: TaktError | None = None

    # --- from the engine ----------------------------------------------------------------------------------------------

    def on_first_scheduled(self, first: FirstScheduled) -> None:
        """Notes the first schedule; it alone wakes nobody."""
        if self.first is None:
            self.first = first

    def on_token(self, token_id: int) -> None:
        """One more token."""
        self._token_ids.append(token_id)
        self._put()

    def on_tokens(self, token_ids: list[int]) -> None:
        """More tokens."""
        self._token_ids += token_ids
        self._put()

    def on_logprobs(self, logprobs: TokenLogprobs) -> None:
        """Of the tokens that are put next, in the same turn of the loop."""
        self._logprobs.append(logprobs)

    def on_prompt_logprobs(self, logprobs: TokenLogprobs) -> None:
        """Of more prompt tokens; they are taken with the first output token."""
        self._prompt_logprobs.append(logprobs)

    def on_finished(self, finished: FinishedRequest) -> None:
        """The end; the first one counts."""
        if not self.has_ended:
            self._finished = finished
            self._news.announce()

    def on_lost(self, loss: EngineLoss) -> None:
        """The engine is gone."""
        self.fail(EngineLostError(loss))

    def fail(self, error: TaktError) -> None:
        """Ends the request with an error, behind the tokens that are there; the first end counts."""
        if not self.has_ended:
            self._error = error
            self._news.announce()

    def _put(self) -> None:
        if self._news.is_awaited:
            self._news.announce()
        elif len(self._token_ids) > self._max_unread and not self.has_ended:
            self._on_overflow()

    @property
    def has_ended(self) -> bool:
        """Whether nothing more is put."""
        return self._error is not None or self._finished is not None

    def begin_anew(self) -> None:
        """Another engine computes the request from its start; nothing of the last one was taken."""
        assert not self._token_ids
        self._logprobs, self._prompt_logprobs = [], []
        self._error = self._finished = self.first = None

    # --- to the client ------------------------------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Whether there is something to take."""
        return bool(self._token_ids) or self._finished is not None or self._error is not None

    def take_now(self) -> Taken:
        """All that is new, and the end if it is there. Raises the error once no token is left."""
        if self._error is not None and not self._token_ids:
            raise self._error
        taken = Taken(self._token_ids, self._finished)
        self._token_ids = []
        if self._logprobs:
            taken.logprobs, self._logprobs = self._logprobs, []
        if self._prompt_logprobs:
            taken.prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, []
        return taken

    async def take(self) -> Taken:
        """Waits for news and takes them, for one output alone."""
        while not self.has_news:
            await self._news.wait()
        return self.take_now()


def slow_consumer_error(reason: str) -> OverloadedError:
    """What a client that does not read its messages is told."""
    return OverloadedError(f"the client reads too slowly: {reason}", reason="SLOW_CONSUMER")
