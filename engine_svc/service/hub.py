"""All frontends of an engine: routes what the core produces, and decides which streams end.

Lives in the io thread's event loop; only `on_step` and `on_utility_result` are called on the core thread, and they do
no more than append and wake. Invariant: the core never waits for a frontend, and one frontend's trouble ends its own
stream only.
"""

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass, field, replace

from engine_svc.core.outputs import EngineCoreOutputs
from engine_svc.core.validation import RequestLimits
from engine_svc.core_thread import CoreThread
from engine_svc.messages import UtilityOutcome
from engine_svc.metrics import EngineMetrics
from engine_svc.service.convert import encode_dead, encode_draining, encode_heartbeat, encode_ready
from engine_svc.service.outbox import OutboxLimits
from engine_svc.service.stream import FrontendStream, StreamContext
from shared.errors import OverloadedError, TaktError, UnavailableError
from shared.types import EngineInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubOptions:
    """`heartbeat_interval` is how often a sign of life goes to each frontend; one silent for longer than
    `max_silence_seconds` is cut off.
    """

    heartbeat_interval: float = 1.0
    max_silence_seconds: float = 10.0
    outbox: OutboxLimits = field(default_factory=OutboxLimits)


@dataclass(frozen=True, slots=True)
class _UtilityResult:
    client: int
    call_id: int
    outcome: UtilityOutcome


class Hub:
    """The streams, and the state in which new ones find the engine."""

    def __init__(self, options: HubOptions) -> None:
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._streams: dict[int, FrontendStream] = {}
        self._last_client = 0
        self._info: EngineInfo | None = None
        self._context: StreamContext | None = None
        self._metrics: EngineMetrics | None = None
        # Why streams end once their outbox is empty, and why no new ones are taken.
        self._closing: TaktError | None = None
        self._heartbeats = 0
        self._arrived: deque[tuple[EngineCoreOutputs, float] | _UtilityResult] = deque()
        self._wake_pending = False

    # --- on the core thread ---------------------------------------------------------------------------------------

    def on_step(self, outputs: EngineCoreOutputs, seconds: float) -> None:
        """A step ended."""
        self._arrive((outputs, seconds))

    def on_utility_result(self, client: int, call_id: int, outcome: UtilityOutcome) -> None:
        """A utility call ended."""
        self._arrive(_UtilityResult(client, call_id, outcome))

    def _arrive(self, item: tuple[EngineCoreOutputs, float] | _UtilityResult) -> None:
        self._arrived.append(item)
        if not self._wake_pending:
            self._wake_pending = True
            self._loop.call_soon_threadsafe(self._route_arrived)

    # --- routing --------------------------------------------------------------------------------------------------

    def _route_arrived(self) -> None:
        # Cleared first: what arrives from here on either is seen below or wakes again.
        self._wake_pending = False
        while self._arrived:
            item = self._arrived.popleft()
            if isinstance(item, _UtilityResult):
                stream = self._streams.get(item.client)
                if stream is not None:
                    stream.answer_call(item.call_id, item.outcome)
            else:
                self._route_step(*item)

    def _route_step(self, outputs: EngineCoreOutputs, seconds: float) -> None:
        for client, step_outputs in outputs.by_client.items():
            stream = self._streams.get(client)
            if stream is not None:
                stream.deliver(step_outputs)
        if self._metrics is not None:
            try:
                self._metrics.observe_step(outputs.stats, seconds)
            except Exception:
                logger.exception("a step could not be counted")

    # --- the life of the engine -----------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether new requests are taken."""
        return self._context is not None and not self._context.draining and self._closing is None

    def set_ready(self, info: EngineInfo, core: CoreThread, metrics: EngineMetrics) -> None:
        """The engine is loaded; streams are taken from now on."""
        self._info, self._metrics = info, metrics
        limits = RequestLimits(
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            max_stop_token_ids=info.max_stop_token_ids,
            max_logprobs=info.max_logprobs,
        )
        self._context = StreamContext(
            core=core,
            limits=limits,
            data_parallel_rank=info.data_parallel_rank,
            outbox_limits=self._options.outbox,
        )

    def drain(self, seconds: float) -> None:
        """Nothing new is taken; the core aborts what is left after `seconds`."""
        if self._context is None or self._context.draining or self._closing is not None:
            return
        self._context.draining = True
        frame = encode_draining(seconds)
        for stream in self._streams.values():
            stream.outbox.put_frame(frame)

    def die(self, reason: str) -> None:
        """Tells every frontend that the engine failed, as the last message of its stream."""
        if self._closing is None:
            self._route_arrived()
            self._close_streams(UnavailableError(f"the engine failed: {reason}", reason="ENGINE_DEAD"), reason)

    def finish(self) -> None:
        """Ends every stream once its frontend has taken what is left."""
        if self._closing is None:
            self._route_arrived()
            self._close_streams(UnavailableError("the engine was shut down", reason="DRAINING"), None)

    def _close_streams(self, error: TaktError, dead_reason: str | None) -> None:
        self._closing = error
        for stream in self._streams.values():
            stream.fail_open_calls(error)
            stream.outbox.close(None if dead_reason is None else encode_dead(dead_reason))

    # --- streams --------------------------------------------------------------------------------------------------

    @property
    def num_streams(self) -> int:
        """Streams that are open."""
        return len(self._streams)

    @property
    def closing_error(self) -> TaktError:
        """Why a stream ends whose outbox was closed."""
        return self._closing or UnavailableError("the stream was closed")

    def open_stream(self, frontend_id: str) -> FrontendStream:
        """Admits a frontend, with Ready as its first message. Raises UnavailableError while there is no engine."""
        if self._closing is not None:
            raise self._closing
        if self._context is None or self._info is None:
            raise UnavailableError("the engine is loading its model", reason="LOADING")
        self._last_client += 1
        stream = FrontendStream(self._last_client, frontend_id, self._context)
        self._streams[stream.client] = stream
        stream.outbox.put_frame(encode_ready(replace(self._info, draining=self._context.draining)))
        logger.info("%s connected", stream)
        return stream

    def close_stream(self, stream: FrontendStream) -> None:
        """Forgets a frontend and ends its requests; idempotent."""
        if self._streams.pop(stream.client, None) is not None:
            stream.close()
            logger.info("%s is gone", stream)

    # --- signs of life --------------------------------------------------------------------------------------------

    def beat(self, lag_seconds: float) -> None:
        """Sends heartbeats, and ends streams whose frontends are silent or too slow.

        `lag_seconds` is how late this call comes: time in which nothing could be read counts for no frontend.
        """
        if self._context is None or self._closing is not None:
            return
        self._heartbeats += 1
        frame = encode_heartbeat(self._heartbeats, self._context.core.load())
        now = time.monotonic()
        for stream in list(self._streams.values()):
            stream.last_received = min(now, stream.last_received + lag_seconds)
            stream.outbox.put_heartbeat(frame)
            self._check_stream(stream, now)
        if self._metrics is not None:
            self._metrics.observe_streams(
                num_streams=len(self._streams),
                num_waiting_tokens=sum(stream.outbox.num_tokens for stream in self._streams.values()),
                num_refused=self._context.num_invalid_requests,
            )

    def _check_stream(self, stream: FrontendStream, now: float) -> None:
        silent = now - stream.last_received
        if silent > self._options.max_silence_seconds:
            message = f"nothing was received for {silent:.1f} s, the limit is {self._options.max_silence_seconds:g} s"
            self._cut(stream, UnavailableError(message, reason="FRONTEND_SILENT"))
            return
        overdue = stream.outbox.overdue()
        if overdue:
            self._cut(stream, OverloadedError(overdue, reason="SLOW_CONSUMER"))

    def _cut(self, stream: FrontendStream, error: TaktError) -> None:
        logger.warning("%s is cut off: %s", stream, error.message)
        if self._metrics is not None:
            self._metrics.count_cut_stream()
        stream.end(error)
        # Its requests end now, even if the call itself cannot: a frontend that reads nothing blocks that too.
        self.close_stream(stream)
