"""The asynchronous client of one engine over gRPC: it keeps a stream open, for ever, and reconnects with backoff.

The only file of the frontend that dials. One reader hands every frame to the stream's state and never waits for a
client; one writer sends what was queued in the same turn of the loop together. Whatever ends a stream, however it is
spelled, is the loss of the engine; so are ten seconds of silence, which transport pings cannot see.
"""

import asyncio
import enum
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from frontend_svc.routing.convert import (
    GetLoad,
    MalformedMessageError,
    Ping,
    ResetPrefixCache,
    StartProfile,
    StopProfile,
    UtilityMethod,
    decode,
    encode_hello,
)
from frontend_svc.routing.engine_stream import MAX_HANDLE, MAX_UNACKNOWLEDGED, EngineStream
from shared.engine_client import RequestSink
from shared.errors import InternalError, UnavailableError
from shared.rpc.options import engine_channel_options
from shared.types import AbortCause, EngineInfo, EngineLoad, EngineRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")

CONNECT_METHOD = "/takt.engine.v1.EngineService/Connect"
# How long a closing client may take to send its last aborts.
CLOSE_SECONDS = 1.0

# A call of gRPC's asynchronous stack in bytes; its own types are generic over messages.
Call = Any


class EngineState(enum.IntEnum):
    """State of the connection to an engine. Values are those of takt.v1.EngineState."""

    CONNECTING = 1
    READY = 2
    SUSPECT = 3
    DRAINING = 4
    REFUSED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionTimes:
    """Seconds. A silent engine is `suspect` first, then lost."""

    heartbeat: float = 1.0
    suspect: float = 3.0
    dead: float = 10.0
    min_backoff: float = 0.1
    max_backoff: float = 2.0


class _StreamLostError(Exception):
    """The stream cannot go on; the message says why. `refused`: the engine must not be used."""

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        super().__init__(reason)
        self.refused = refused


class AsyncEngineClient:
    """Implements EngineCoreClient. All methods belong to the event loop."""

    def __init__(
        self,
        address: str,
        frontend_id: str,
        *,
        check: Callable[[EngineInfo], str],
        on_change: Callable[[], None],
        times: ConnectionTimes | None = None,
    ) -> None:
        """`check` tells why an engine is refused, or nothing; `on_change` is called when `state` may have changed."""
        self.address = address
        self.last_error = ""
        self.num_losses = 0
        # What the engine last said of itself; kept when it is lost.
        self.info: EngineInfo | None = None
        self._frontend_id = frontend_id
        self._check = check
        self._on_change = on_change
        self._times = times or ConnectionTimes()
        self._stream: EngineStream | None = None
        self._refused = False
        self._suspect = False
        self._last_seen: float | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._last_handle = 0

    # --- what it knows ------------------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """State of the connection."""
        if self._refused:
            return EngineState.REFUSED
        if self._stream is None:
            return EngineState.CONNECTING
        if self._stream.draining:
            return EngineState.DRAINING
        return EngineState.SUSPECT if self._suspect else EngineState.READY

    @property
    def is_connected(self) -> bool:
        """Whether there is a stream."""
        return self._stream is not None

    @property
    def epoch(self) -> str:
        """Identity of the engine's process; empty while not connected."""
        return "" if self._stream is None else self._stream.info.epoch

    @property
    def load(self) -> EngineLoad:
        """What the engine last said that it is doing."""
        return EngineLoad() if self._stream is None else self._stream.load

    @property
    def num_in_flight(self) -> int:
        """Our requests there."""
        return 0 if self._stream is None else self._stream.num_in_flight

    @property
    def num_in_flight_at_load(self) -> int:
        """Our requests there when `load` was told."""
        return 0 if self._stream is None else self._stream.num_in_flight_at_load

    @property
    def silent_seconds(self) -> float | None:
        """Seconds since its last sign of life; None when there never was one."""
        return None if self._last_seen is None else asyncio.get_running_loop().time() - self._last_seen

    # --- what it does -------------------------------------------------------------------------------------------------

    def add_request(self, request: EngineRequest, sink: RequestSink) -> int:
        """Sends a request; see EngineCoreClient."""
        return self._required_stream().add_request(request, sink)

    def abort_request(self, handle: int, cause: AbortCause) -> None:
        """Ends a request; see EngineCoreClient. The handle must be of the present stream."""
        if self._stream is not None:
            self._stream.abort_request(handle, cause)

    async def reset_prefix_cache(self, *, reset_running_requests: bool, timeout: float) -> bool:  # noqa: ASYNC109
        """Forgets cached prefixes; see EngineCoreClient."""
        return await self._call(ResetPrefixCache(reset_running_requests), timeout, bool)

    async def get_load(self, *, timeout: float) -> EngineLoad:  # noqa: ASYNC109 - travels to the engine
        """What the engine is doing; see EngineCoreClient."""
        return await self._call(GetLoad(), timeout, EngineLoad)

    async def ping(self, *, timeout: float) -> int:  # noqa: ASYNC109 - travels to the engine
        """Goes through the core's loop; see EngineCoreClient."""
        return await self._call(Ping(), timeout, int)

    async def start_profile(self, name: str, *, timeout: float) -> str:  # noqa: ASYNC109 - travels to the engine
        """Starts a profile; see EngineCoreClient."""
        return await self._call(StartProfile(name), timeout, str)

    async def stop_profile(self, *, timeout: float) -> str:  # noqa: ASYNC109 - travels to the engine
        """Ends the profile; see EngineCoreClient."""
        return await self._call(StopProfile(), timeout, str)

    async def _call(self, method: UtilityMethod, timeout: float, kind: type[T]) -> T:  # noqa: ASYNC109
        value = await self._required_stream().call(method, timeout)
        if not isinstance(value, kind):
            raise InternalError(f"engine {self.address} answered {type(method).__name__} with another's result")
        return value

    def _required_stream(self) -> EngineStream:
        if self._stream is None:
            raise UnavailableError(f"engine {self.address} is not connected", reason="ENGINE_LOST")
        return self._stream

    # --- the connection -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to connect."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"engine client {self.address}")

    async def close(self) -> None:
        """Sends what waits, ends the stream and everything open on it."""
        self._closing = True
        if self._stream is not None:
            self._stream.wake.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=CLOSE_SECONDS)
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        backoff = self._times.min_backoff
        async with grpc.aio.insecure_channel(self.address, options=engine_channel_options()) as channel:
            open_call: Callable[[], Call] = channel.stream_stream(CONNECT_METHOD)
            while not self._closing:
                call = open_call()
                try:
                    await self._connect(call)
                    backoff = self._times.min_backoff
                    await self._serve(call)
                except _StreamLostError as error:
                    self._lose(str(error), refused=error.refused)
                finally:
                    call.cancel()
                    if self._stream is not None:
                        self._lose("the frontend closes")
                if not self._closing:
                    await asyncio.sleep(backoff * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
                    backoff = min(backoff * 2, self._times.max_backoff)

    async def _connect(self, call: Call) -> None:
        """Hello and Ready. Raises _StreamLostError."""
        try:
            async with asyncio.timeout(self._times.dead):
                await _write(call, encode_hello(self._frontend_id, MAX_UNACKNOWLEDGED))
                data = await _read(call)
        except TimeoutError:
            raise _StreamLostError(f"it did not introduce itself within {self._times.dead:g} s") from None
        try:
            info = decode(data)
        except MalformedMessageError as error:
            raise _StreamLostError(f"it sent {error}") from None
        if not isinstance(info, EngineInfo):
            raise _StreamLostError(f"it must introduce itself first, sent {type(info).__name__}")
        refusal = self._check(info)
        if refusal:
            raise _StreamLostError(refusal, refused=True)
        if self.info is None or self.info.epoch != info.epoch:
            logger.info("engine %s is ready: %s, max_model_len %d", self.address, info.model, info.max_model_len)
        self._last_seen = asyncio.get_running_loop().time()
        self.info, self.last_error, self._suspect, self._refused = info, "", False, False
        self._stream = EngineStream(self.address, info, self._last_handle)
        self._on_change()

    async def _serve(self, call: Call) -> None:
        """Runs a stream to its end. Raises _StreamLostError, or returns when this client closes."""
        stream = self._required_stream()
        tasks = [
            asyncio.create_task(self._read_frames(call, stream)),
            asyncio.create_task(self._write_frames(call, stream)),
            asyncio.create_task(self._watch(stream)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read_frames(self, call: Call, stream: EngineStream) -> None:
        loop = asyncio.get_running_loop()
        while True:
            data = await _read(call)
            self._last_seen = loop.time()
            was_draining = stream.draining
            try:
                dead = stream.receive(data)
            except MalformedMessageError as error:
                raise _StreamLostError(f"it sent {error}") from None
            if dead is not None:
                raise _StreamLostError(f"it failed: {dead.reason}")
            if self._suspect or stream.draining != was_draining:
                self._suspect = False
                self._on_change()

    async def _write_frames(self, call: Call, stream: EngineStream) -> None:
        while True:
            await stream.wake.wait()
            for frame in stream.take_frames():
                await _write(call, frame)
            if self._closing:
                await call.done_writing()
                return

    async def _watch(self, stream: EngineStream) -> None:
        """Sends heartbeats, and looks at how long the engine has been silent."""
        loop, times = asyncio.get_running_loop(), self._times
        last_tick = loop.time()
        while True:
            await asyncio.sleep(times.heartbeat)
            now = loop.time()
            if now - last_tick > times.suspect:
                # We slept ourselves; what came meanwhile is still to be read.
                self._last_seen = now
            last_tick = now
            stream.beat()
            if stream.is_used_up:
                raise _StreamLostError("the stream has used up its handles")
            silent = now - (self._last_seen or now)
            if silent > times.dead:
                raise _StreamLostError(f"it was silent for {silent:.0f} s")
            if silent > times.suspect and not self._suspect:
                logger.warning("engine %s has been silent for %.1f s", self.address, silent)
                self._suspect = True
                self._on_change()

    def _lose(self, reason: str, *, refused: bool = False) -> None:
        stream, self._stream = self._stream, None
        self._refused = refused
        if reason != self.last_error and not self._closing:
            logger.warning("engine %s: %s", self.address, reason)
        self.last_error = reason
        if stream is not None:
            self.num_losses += 1
            # Begins anew long before the numbers end; late aborts are long over by then.
            self._last_handle = stream.last_handle if stream.last_handle < MAX_HANDLE // 2 else 0
            stream.close(reason)
        self._on_change()


async def _read(call: Call) -> bytes:
    """The next frame. Raises _StreamLostError at the end of the stream, whatever its status."""
    try:
        data = await call.read()
    except (grpc.aio.BaseError, grpc.RpcError, asyncio.InvalidStateError) as error:
        raise _StreamLostError(_reason(error)) from None
    if data is grpc.aio.EOF:
        raise _StreamLostError("it ended the stream")
    return bytes(data)


async def _write(call: Call, frame: bytes) -> None:
    try:
        await call.write(frame)
    except (grpc.aio.BaseError, grpc.RpcError, asyncio.InvalidStateError) as error:
        reason = f"{(await call.code()).name}: {await call.details()}" if call.done() else _reason(error)
        raise _StreamLostError(reason) from None


def _reason(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {error}"
