"""What a client of an engine core does, whatever carries the messages; the frontend's side of takt.engine.v1.

A client serves one engine. Outputs are pushed to the sink of each request, in order, and never after its end; a
request whose engine is lost ends in `on_lost`. Knows no gRPC and no protobuf.
"""

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol

from shared.types import AbortCause, EngineLoad, EngineRequest, FinishedRequest, FirstScheduled, TokenLogprobs

# Requests or aborts in one message; an engine ends a stream that sends more, since it takes a message in one go.
MAX_MESSAGE_ITEMS = 16_384


@dataclass(frozen=True, slots=True)
class EngineLoss:
    """Why an engine is gone for a request.

    `crashed`: it may have been computing the request when it failed. `drained`: it went in good order.
    """

    address: str
    reason: str
    crashed: bool
    drained: bool


class RequestSink(Protocol):
    """Takes what an engine says of one request. Called by the reader of the stream: must return at once."""

    def on_first_scheduled(self, first: FirstScheduled) -> None:
        """The request was computed for the first time."""

    def on_token(self, token_id: int) -> None:
        """One more output token."""

    def on_tokens(self, token_ids: list[int]) -> None:
        """More output tokens."""

    def on_logprobs(self, logprobs: TokenLogprobs) -> None:
        """Of the tokens of the call of on_token or on_tokens that follows next."""

    def on_prompt_logprobs(self, logprobs: TokenLogprobs) -> None:
        """Of more prompt tokens; the first call begins with the prompt's second token."""

    def on_finished(self, finished: FinishedRequest) -> None:
        """The request ended; nothing follows."""

    def on_lost(self, loss: EngineLoss) -> None:
        """The engine is gone and the request with it; nothing follows."""


class EngineCoreClient(Protocol):
    """A client of one engine core."""

    def add_request(self, request: EngineRequest, sink: RequestSink) -> int:
        """Sends a request and returns its handle; the client sets the handle, that of `request` is ignored.

        Raises UnavailableError when the engine takes nothing new, OverloadedError when the request is too large to
        send.
        """

    def abort_request(self, handle: int, cause: AbortCause) -> None:
        """Ends a request; its sink hears nothing more. Unknown and finished handles are no error."""

    # Utility calls run between two steps. Each fails with a TaktError at once when the engine is lost, or with
    # DeadlineExceededError after `timeout` seconds.

    def reset_prefix_cache(self, *, reset_running_requests: bool, timeout: float) -> Awaitable[bool]:
        """Forgets cached prefixes; False when blocks were in use."""

    def get_load(self, *, timeout: float) -> Awaitable[EngineLoad]:
        """What the engine is doing."""

    def ping(self, *, timeout: float) -> Awaitable[int]:
        """Goes through the core's loop and back; the number of steps so far."""

    def start_profile(self, name: str, *, timeout: float) -> Awaitable[str]:
        """Starts a profile; the answer is empty."""

    def stop_profile(self, *, timeout: float) -> Awaitable[str]:
        """Ends the profile; the path of its trace on the engine's machine."""
