"""A frontend driven by hand: one Connect stream, messages as protobuf, nothing hidden."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from takt.engine.v1 import engine_pb2 as pb

METHOD = "/takt.engine.v1.EngineService/Connect"
TIMEOUT = 30.0


class StreamEnded(Exception):
    """The stream ended with a status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details


class RawFrontend:
    """One stream. Received messages are kept in `received`; tokens and ends are gathered by handle."""

    def __init__(self, address: str, options: list[tuple[str, Any]] | None = None) -> None:
        self.channel = grpc.aio.insecure_channel(
            address, options=[("grpc.max_receive_message_length", 64 << 20), *(options or [])]
        )
        self.call = self.channel.stream_stream(METHOD)()
        self.received: list[pb.ConnectResponse] = []
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, list[pb.Finished]] = {}
        self.first_scheduled: dict[int, pb.FirstScheduled] = {}
        self.results: dict[int, pb.UtilityResult] = {}
        self.ready: pb.Ready | None = None
        self._next_handle = 1
        self._write_lock = asyncio.Lock()

    # --- send -----------------------------------------------------------------------------------------------------

    async def send_bytes(self, data: bytes) -> None:
        # A call takes one write at a time.
        async with self._write_lock:
            await self.call.write(data)

    async def send(self, **message: Any) -> None:
        """Sends one ConnectRequest, for example send(heartbeat=pb.Heartbeat())."""
        await self.send_bytes(pb.ConnectRequest(**message).SerializeToString())

    async def hello(self, frontend_id: str = "test", **fields: Any) -> pb.Ready:
        """Introduces itself and waits for Ready."""
        values = {"role": pb.ROLE_FRONTEND, "frontend_id": frontend_id, "protocol_version": 1, **fields}
        await self.send(hello=pb.Hello(**values))
        message = await self.receive()
        assert message.WhichOneof("message") == "ready", message
        self.ready = message.ready
        return message.ready

    async def add(self, prompt: list[int], *, handle: int | None = None, **options: Any) -> int:
        """Adds a greedy request and returns its handle; see add_request for the options."""
        if handle is None:
            handle = self._next_handle
        self._next_handle = max(self._next_handle, handle) + 1
        await self.add_raw(add_request(handle, prompt, **options).SerializeToString())
        return handle

    async def add_raw(self, *requests: bytes) -> None:
        await self.send(add_requests=pb.AddRequests(requests=requests))

    async def abort(self, *handles: int, cause: int = pb.ABORT_CAUSE_CLIENT) -> None:
        await self.send(abort_requests=pb.AbortRequests(handles=handles, causes=[cause] * len(handles)))

    async def utility(self, call_id: int, timeout_ms: int = 10_000, **method: Any) -> pb.UtilityResult:
        """Calls and waits for the result."""
        await self.send(utility_call=pb.UtilityCall(call_id=call_id, timeout_ms=timeout_ms, **method))
        await self.receive_until(lambda: call_id in self.results)
        return self.results[call_id]

    # --- receive --------------------------------------------------------------------------------------------------

    async def receive(self, seconds: float = TIMEOUT) -> pb.ConnectResponse:
        """The next message, gathered. Raises StreamEnded."""
        try:
            data = await asyncio.wait_for(self.call.read(), seconds)
        except grpc.aio.AioRpcError as error:
            raise StreamEnded(error.code(), error.details()) from None
        if data is grpc.aio.EOF:
            raise StreamEnded(await self.call.code(), await self.call.details())
        message = pb.ConnectResponse.FromString(data)
        self.received.append(message)
        self._gather(message)
        return message

    def _gather(self, message: pb.ConnectResponse) -> None:
        if message.WhichOneof("message") == "utility_result":
            self.results[message.utility_result.call_id] = message.utility_result
        if message.WhichOneof("message") != "step_outputs":
            return
        outputs, start = message.step_outputs, 0
        for index, handle in enumerate(outputs.handles):
            assert handle not in self.finished, f"tokens after the end of {handle}"
            end = start + (outputs.num_tokens[index] if outputs.num_tokens else 1)
            self.tokens.setdefault(handle, []).extend(outputs.token_ids[start:end])
            start = end
        assert start == len(outputs.token_ids)
        for first in outputs.first_scheduled:
            assert first.handle not in self.first_scheduled, f"{first.handle} was scheduled first twice"
            self.first_scheduled[first.handle] = first
        for finished in outputs.finished:
            self.finished.setdefault(finished.handle, []).append(finished)

    async def receive_until(self, condition: Callable[[], bool], seconds: float = TIMEOUT) -> None:
        """Receives until the condition holds. Raises TimeoutError or StreamEnded."""
        async with asyncio.timeout(seconds):
            while not condition():
                await self.receive(seconds)

    async def finish(self, *handles: int, seconds: float = TIMEOUT) -> list[pb.Finished]:
        """Receives until all have ended and returns their ends."""
        await self.receive_until(lambda: all(handle in self.finished for handle in handles), seconds)
        return [self.finished[handle][0] for handle in handles]

    async def end(self, seconds: float = TIMEOUT) -> StreamEnded:
        """Receives until the stream ends and returns how."""
        async with asyncio.timeout(seconds):
            while True:
                try:
                    await self.receive(seconds)
                except StreamEnded as ended:
                    return ended

    async def ping(self) -> int:
        """Steps so far, as the core says itself; also: everything sent before was handled."""
        call_id = len(self.results) + 1_000
        return (await self.utility(call_id, ping=pb.PingMethod())).ping.step_counter

    async def load(self) -> pb.EngineLoad:
        call_id = len(self.results) + 1_000
        return (await self.utility(call_id, get_load=pb.GetLoadMethod())).load

    async def beat(self, interval_seconds: float) -> None:
        """Sends signs of life until it is cancelled or the stream ends."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self.send(heartbeat=pb.Heartbeat())
                await asyncio.sleep(interval_seconds)

    async def close(self) -> None:
        self.call.cancel()
        await self.channel.close()


def add_request(handle: int, prompt: list[int], **options: Any) -> pb.AddRequest:
    """A greedy request; options named like fields of SamplingParams go there, others into the request."""
    sampling = {
        name: options.pop(name) for name in list(options) if name in pb.SamplingParams.DESCRIPTOR.fields_by_name
    }
    sampling = {"temperature": 0.0, "max_tokens": 8, **sampling}
    return pb.AddRequest(
        handle=handle,
        request_id=options.pop("request_id", f"r{handle}"),
        prompt_token_ids=prompt,
        sampling=pb.SamplingParams(**sampling),
        **options,
    )


@contextlib.asynccontextmanager
async def raw_frontend(
    address: str,
    *,
    hello: bool = True,
    options: list[tuple[str, Any]] | None = None,
    frontend_id: str = "test",
    heartbeat_seconds: float | None = None,
) -> AsyncIterator[RawFrontend]:
    """A stream that has exchanged Hello and Ready, unless told otherwise.

    It sends heartbeats only with `heartbeat_seconds`; an engine cuts off who says nothing for 10 seconds.
    """
    frontend = RawFrontend(address, options)
    beating = None
    try:
        if hello:
            await frontend.hello(frontend_id)
        if heartbeat_seconds is not None:
            beating = asyncio.create_task(frontend.beat(heartbeat_seconds))
        yield frontend
    finally:
        if beating is not None:
            beating.cancel()
        await frontend.close()
