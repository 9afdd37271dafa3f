"""One stream to one engine process: handles, open requests, open calls, and what waits to be sent.

Knows no gRPC: its client carries the frames. Everything here dies with the stream, and a new stream starts from
nothing, so that nothing of an older engine process is ever delivered. Invariant: a sink hears its request's end, by
`on_finished` or `on_lost`, exactly once unless the frontend aborted it; a call's future never outlives the stream.
"""

import asyncio
from collections.abc import Iterator

from frontend_svc.routing.convert import (
    Dead,
    Draining,
    Heartbeat,
    UtilityAnswer,
    UtilityMethod,
    UtilityValue,
    decode,
    encode_aborts,
    encode_acknowledgement,
    encode_adds,
    encode_call,
    encode_heartbeat,
    encode_request,
)
from shared.engine_client import MAX_MESSAGE_ITEMS, EngineLoss, RequestSink
from shared.errors import DeadlineExceededError, OverloadedError, UnavailableError, error_from_code
from shared.types import AbortCause, EngineInfo, EngineLoad, EngineRequest, StepOutputs, WireError

# Adds that wait together are sent in messages of about this size.
MAX_BATCH_BYTES = 1024 * 1024
# Room that the envelope takes from the engine's limit on messages.
ENVELOPE_BYTES = 64
# Messages of outputs that may be under way. Few, so that nothing waits in buffers while this side is behind; enough
# that an engine never waits for an acknowledgement of a side that is not.
MAX_UNACKNOWLEDGED = 4
# The last number that fits the wire.
MAX_HANDLE = 2**32 - 1


class EngineStream:
    """A stream after its Ready. All methods belong to the event loop."""

    def __init__(self, address: str, info: EngineInfo, last_handle: int = 0) -> None:
        """Handles go on after `last_handle`, so that a late abort of an older stream's request hits nothing."""
        self.info = info
        self.last_handle = last_handle
        self.load = EngineLoad()
        # Requests of ours there when the load was last told.
        self.num_in_flight_at_load = 0
        self.draining = info.draining
        # Set while something waits to be sent.
        self.wake = asyncio.Event()
        self._address = address
        self._max_message_bytes = max(0, (info.max_message_bytes or MAX_BATCH_BYTES) - ENVELOPE_BYTES)
        self._sinks: dict[int, RequestSink] = {}
        self._unsent_adds: dict[int, bytes] = {}
        self._unsent_aborts: list[tuple[int, AbortCause]] = []
        self._unsent_frames: list[bytes] = []
        self._last_call = 0
        self._calls: dict[int, asyncio.Future[UtilityValue]] = {}
        self._heartbeats = 0
        self._unacknowledged = 0
        self._dead = False
        self._loss: EngineLoss | None = None

    @property
    def is_used_up(self) -> bool:
        """Whether a new stream is needed for more requests."""
        return self.last_handle == MAX_HANDLE and not self._sinks

    @property
    def num_in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._sinks)

    # --- to the engine ------------------------------------------------------------------------------------------------

    def add_request(self, request: EngineRequest, sink: RequestSink) -> int:
        """Queues a request. Raises UnavailableError or OverloadedError."""
        if self._loss is not None or self.draining:
            raise UnavailableError(f"engine {self._address} takes nothing new", reason="DRAINING")
        handle = self.last_handle + 1
        data = encode_request(request, handle)
        if len(data) > self._max_message_bytes:
            raise OverloadedError(
                f"the request must be at most {self._max_message_bytes} bytes for the engine, got {len(data)}",
                reason="MESSAGE_TOO_LARGE",
            )
        self.last_handle = handle
        if handle == MAX_HANDLE:
            self.draining = True
        self._sinks[handle] = sink
        self._unsent_adds[handle] = data
        self.wake.set()
        return handle

    def abort_request(self, handle: int, cause: AbortCause) -> None:
        """Queues an abort; a request that was not sent yet is simply not sent."""
        if self._sinks.pop(handle, None) is None:
            return
        if self._unsent_adds.pop(handle, None) is None:
            self._unsent_aborts.append((handle, cause))
            self.wake.set()

    async def call(self, method: UtilityMethod, timeout: float) -> UtilityValue:  # noqa: ASYNC109 - sent along
        """Makes a utility call. Raises a TaktError."""
        if self._loss is not None:
            raise _lost_error(self._loss)
        self._last_call += 1
        call_id = self._last_call
        future: asyncio.Future[UtilityValue] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        self._unsent_frames.append(encode_call(call_id, timeout, method))
        self.wake.set()
        try:
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError:
            raise DeadlineExceededError(
                f"engine {self._address} did not answer {type(method).__name__} within {timeout:g} s"
            ) from None
        finally:
            del self._calls[call_id]

    def beat(self) -> None:
        """Queues a sign of life."""
        self._heartbeats += 1
        self._unsent_frames.append(encode_heartbeat(self._heartbeats))
        self.wake.set()

    def _acknowledge(self) -> None:
        self._unacknowledged += 1
        if 2 * self._unacknowledged >= MAX_UNACKNOWLEDGED:
            self._unsent_frames.append(encode_acknowledgement(self._unacknowledged))
            self._unacknowledged = 0
            self.wake.set()

    def take_frames(self) -> Iterator[bytes]:
        """Returns and clears what waits to be sent: adds before aborts."""
        self.wake.clear()
        adds, self._unsent_adds = self._unsent_adds, {}
        aborts, self._unsent_aborts = self._unsent_aborts, []
        frames, self._unsent_frames = self._unsent_frames, []
        batch: list[bytes] = []
        room = MAX_BATCH_BYTES
        for data in adds.values():
            if batch and (len(data) > room or len(batch) == MAX_MESSAGE_ITEMS):
                yield encode_adds(batch)
                batch, room = [], MAX_BATCH_BYTES
            batch.append(data)
            room -= len(data)
        if batch:
            yield encode_adds(batch)
        for start in range(0, len(aborts), MAX_MESSAGE_ITEMS):
            yield encode_aborts(aborts[start : start + MAX_MESSAGE_ITEMS])
        yield from frames

    # --- from the engine ----------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> Dead | None:
        """Handles one message; Dead is the caller's to handle. Raises MalformedMessageError."""
        message = decode(data)
        if isinstance(message, StepOutputs):
            self._acknowledge()
            self._scatter(message)
        elif isinstance(message, Heartbeat):
            self._note_load(message.load)
        elif isinstance(message, UtilityAnswer):
            self._answer(message)
        elif isinstance(message, Draining):
            self.draining = True
        elif isinstance(message, Dead):
            self._dead = True
            return message
        return None

    def _scatter(self, outputs: StepOutputs) -> None:
        """Gives every sink its share, in one pass. What an aborted request still got is dropped."""
        sinks = self._sinks
        for first in outputs.first_scheduled:
            sink = sinks.get(first.handle)
            if sink is not None:
                sink.on_first_scheduled(first)
        if outputs.logprobs or outputs.prompt_logprobs:
            self._scatter_logprobs(outputs)
        self._scatter_tokens(outputs)
        for finished in outputs.finished:
            sink = sinks.pop(finished.handle, None)
            if sink is not None:
                sink.on_finished(finished)
        self._note_load(outputs.load)

    def _scatter_tokens(self, outputs: StepOutputs) -> None:
        sinks = self._sinks
        if outputs.num_tokens is None:
            for handle, token_id in zip(outputs.handles, outputs.token_ids, strict=True):
                sink = sinks.get(handle)
                if sink is not None:
                    sink.on_token(token_id)
        else:
            start = 0
            for handle, count in zip(outputs.handles, outputs.num_tokens, strict=True):
                sink = sinks.get(handle)
                if sink is not None and count:
                    sink.on_tokens(outputs.token_ids[start : start + count])
                start += count

    def _scatter_logprobs(self, outputs: StepOutputs) -> None:
        for logprobs in outputs.prompt_logprobs:
            sink = self._sinks.get(logprobs.handle)
            if sink is not None:
                sink.on_prompt_logprobs(logprobs)
        for logprobs in outputs.logprobs:
            sink = self._sinks.get(logprobs.handle)
            if sink is not None:
                sink.on_logprobs(logprobs)

    def _note_load(self, load: EngineLoad | None) -> None:
        if load is not None:
            self.load = load
            self.num_in_flight_at_load = len(self._sinks)

    def _answer(self, answer: UtilityAnswer) -> None:
        future = self._calls.get(answer.call_id)
        if future is None or future.done():
            return
        outcome = answer.outcome
        if isinstance(outcome, WireError):
            future.set_exception(
                error_from_code(outcome.code, outcome.message, reason=outcome.reason, field=outcome.field)
            )
        else:
            future.set_result(outcome)

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Ends everything that is open. The engine crashed unless it was draining in good health."""
        drained = self.draining and not self._dead
        loss = self._loss = EngineLoss(self._address, reason, crashed=not drained, drained=drained)
        unharmed = EngineLoss(self._address, reason, crashed=False, drained=drained)
        sinks, self._sinks = self._sinks, {}
        for handle, sink in sinks.items():
            sink.on_lost(unharmed if handle in self._unsent_adds else loss)
        self._unsent_adds.clear()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(_lost_error(loss))


def _lost_error(loss: EngineLoss) -> UnavailableError:
    return UnavailableError(f"engine {loss.address} was lost: {loss.reason}", reason="ENGINE_LOST")
