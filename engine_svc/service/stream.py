"""One frontend's stream: what its messages mean, and which of its requests and calls are open.

Belongs to the io thread's event loop; knows no gRPC and meets the core only through its queue. Invariant: a request
that is refused here never reaches the core, and an open call is answered once, by the core or by its deadline.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field

from engine_svc.core.interfaces import Abort
from engine_svc.core.validation import RequestLimits
from engine_svc.core_thread import CoreThread
from engine_svc.messages import AddRequests, ClientGone, UtilityCall, UtilityMethod, UtilityOutcome
from engine_svc.service.convert import (
    Aborts,
    Acknowledgement,
    Adds,
    Heartbeat,
    Hello,
    Utility,
    decode,
    encode_outputs,
    encode_utility_result,
    wire_error,
)
from engine_svc.service.convert_request import RefusedRequest, decode_request
from engine_svc.service.outbox import Outbox, OutboxLimits
from shared.errors import (
    DeadlineExceededError,
    DuplicateRequestError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    TaktError,
    UnavailableError,
)
from shared.types import EngineRequest, FinishedRequest, FinishReason, StepOutputs

logger = logging.getLogger(__name__)

MAX_OPEN_CALLS = 64


@dataclass(slots=True, kw_only=True)
class StreamContext:
    """What the streams of an engine share. `draining` is set once."""

    core: CoreThread
    limits: RequestLimits
    data_parallel_rank: int
    outbox_limits: OutboxLimits = field(default_factory=OutboxLimits)
    draining: bool = False
    num_invalid_requests: int = 0


def draining_error() -> UnavailableError:
    """The answer to whatever is new while the engine drains."""
    return UnavailableError("the engine is draining", reason="DRAINING")


class FrontendStream:
    """A connected frontend. `client` is the number under which the core knows it."""

    def __init__(self, client: int, frontend_id: str, context: StreamContext) -> None:
        self.client = client
        self.frontend_id = frontend_id
        self.outbox = Outbox(context.outbox_limits, encode_outputs, time.monotonic)
        self.last_received = time.monotonic()
        self._loop = asyncio.get_running_loop()
        # Resolved with the reason when the engine ends the stream.
        self.ended: asyncio.Future[TaktError] = self._loop.create_future()
        self._context = context
        self._last_handle = -1
        self._open_requests: set[int] = set()
        self._open_calls: dict[int, tuple[UtilityMethod, asyncio.TimerHandle]] = {}

    def __str__(self) -> str:
        return f"frontend {self.frontend_id!r} (client {self.client})"

    # --- from the frontend ----------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Handles one message. Raises TaktError when the stream cannot go on."""
        self.last_received = time.monotonic()
        message = decode(data)
        match message:
            case Adds(requests):
                self._add(requests)
            case Aborts():
                self._abort(message)
            case Utility():
                self._call(message)
            case Acknowledgement(count):
                self.outbox.acknowledge(count)
            case Heartbeat():
                pass
            case Hello():
                raise InvalidRequestError("hello must be the first message of a stream only", field="hello")

    def _add(self, items: tuple[bytes, ...]) -> None:
        accepted: list[EngineRequest] = []
        refused: list[FinishedRequest] = []
        for data in items:
            request = decode_request(data, self._context.limits, self._context.data_parallel_rank)
            if not isinstance(request, RefusedRequest):
                error = self._admission_error(request.handle)
                if error is None:
                    accepted.append(request)
                    continue
                request = RefusedRequest(request.handle, error)
            if request.handle is None:
                raise request.error
            self._last_handle = max(self._last_handle, request.handle)
            refused.append(_refusal(request.handle, request.error))
        if accepted:
            self._context.core.submit(AddRequests(self.client, tuple(accepted), self.last_received))
        if refused:
            if not self._context.draining:
                self._context.num_invalid_requests += len(refused)
            self.outbox.put_outputs(StepOutputs(step=self._context.core.load().step_counter, finished=refused))

    def _admission_error(self, handle: int) -> TaktError | None:
        if handle in self._open_requests:
            return DuplicateRequestError(f"handle {handle} is in flight", field="handle")
        if handle <= self._last_handle:
            return InvalidRequestError(
                f"handle must increase within a stream, got {handle} after {self._last_handle}", field="handle"
            )
        self._last_handle = handle
        if self._context.draining:
            return draining_error()
        self._open_requests.add(handle)
        return None

    def _abort(self, message: Aborts) -> None:
        # Others have ended or never were; the core need not hear of them.
        aborts = [
            Abort(self.client, handle, cause) for handle, cause in message.aborts if handle in self._open_requests
        ]
        if aborts:
            self._open_requests.difference_update(abort.handle for abort in aborts)
            self._context.core.abort(aborts)

    # --- utility calls --------------------------------------------------------------------------------------------

    def _call(self, call: Utility) -> None:
        method = call.method
        if not isinstance(method, TaktError):
            error = self._call_error(call.call_id)
            if error is None:
                timer = self._loop.call_later(call.timeout_seconds, self._expire_call, call.call_id)
                self._open_calls[call.call_id] = (method, timer)
                deadline = self.last_received + call.timeout_seconds
                self._context.core.submit(UtilityCall(self.client, call.call_id, method, deadline))
                return
            method = error
        self.outbox.put_frame(encode_utility_result(call.call_id, None, method))

    def _call_error(self, call_id: int) -> TaktError | None:
        if self._context.draining:
            return draining_error()
        if call_id in self._open_calls:
            return DuplicateRequestError(f"call_id {call_id} is open", field="call_id")
        if len(self._open_calls) >= MAX_OPEN_CALLS:
            return OverloadedError(f"a stream may have {MAX_OPEN_CALLS} open calls, got one more", field="call_id")
        return None

    def _expire_call(self, call_id: int) -> None:
        self.answer_call(call_id, DeadlineExceededError(f"call {call_id} did not end within its time"))

    def answer_call(self, call_id: int, outcome: UtilityOutcome) -> None:
        """Answers a call that is still open; a late answer is dropped."""
        method, timer = self._open_calls.pop(call_id, (None, None))
        if timer is not None:
            timer.cancel()
            self.outbox.put_frame(_encode_outcome(call_id, method, outcome))

    # --- from the engine ------------------------------------------------------------------------------------------

    def deliver(self, outputs: StepOutputs) -> None:
        """Hands a step's outputs on."""
        for finished in outputs.finished:
            self._open_requests.discard(finished.handle)
        self.outbox.put_outputs(outputs)

    def end(self, error: TaktError) -> None:
        """Ends the stream at once; what was not taken is lost."""
        if not self.ended.done():
            self.ended.set_result(error)

    def fail_open_calls(self, error: TaktError) -> None:
        """Answers every open call with an error."""
        for call_id in list(self._open_calls):
            self.answer_call(call_id, error)

    def close(self) -> None:
        """The stream is over: the core forgets the client, and nothing is kept."""
        for _, timer in self._open_calls.values():
            timer.cancel()
        self._open_calls.clear()
        self._open_requests.clear()
        self.outbox.drop()
        self._context.core.submit(ClientGone(self.client))


def _encode_outcome(call_id: int, method: UtilityMethod | None, outcome: UtilityOutcome) -> bytes:
    try:
        return encode_utility_result(call_id, method, outcome)
    except (TypeError, ValueError):
        logger.exception("the result of %s cannot be encoded", type(method).__name__)
        error = InternalError("the result cannot be encoded; the engine's log tells more")
        return encode_utility_result(call_id, None, error)


def _refusal(handle: int, error: TaktError) -> FinishedRequest:
    return FinishedRequest(handle=handle, reason=FinishReason.ERROR, error=wire_error(error))
