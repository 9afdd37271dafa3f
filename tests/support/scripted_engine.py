"""An engine double on a real gRPC port: it says what a test tells it to, and keeps what it is told."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc

from shared.rpc.options import engine_server_options
from takt.engine.v1 import engine_pb2 as pb
from takt.v1 import inference_pb2  # noqa: F401 - registers the public messages for reflection in the same process

WAIT_SECONDS = 20.0


def ready_message(**fields: Any) -> pb.Ready:
    """A Ready that a frontend of the tiny tokenizer takes."""
    values: dict[str, Any] = {
        "epoch": "epoch-1",
        "protocol_version": 1,
        "model": "scripted",
        "max_model_len": 256,
        "vocab_size": 300,
        "eos_token_ids": [2],
        "block_size": 16,
        "num_blocks": 64,
        "dtype": "float32",
        "limits": pb.Limits(
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            max_stop_token_ids=128,
            max_message_bytes=64 * 2**20,
            max_logprobs=20,
        ),
    }
    return pb.Ready(**(values | fields))


class ScriptedStream:
    """One Connect call, as the test holds it."""

    def __init__(self, context: Any) -> None:
        self.hello: pb.Hello | None = None
        self.num_heartbeats = 0
        self.ended = asyncio.Event()
        self._context = context
        self._adds: asyncio.Queue[pb.AddRequest] = asyncio.Queue()
        self._aborts: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        self._calls: asyncio.Queue[pb.UtilityCall] = asyncio.Queue()
        self._close: asyncio.Future[tuple[grpc.StatusCode, str] | None] = asyncio.get_running_loop().create_future()
        self._step = 0
        self._lock = asyncio.Lock()

    # What the frontend says.
    async def add(self) -> pb.AddRequest:
        """The next request."""
        return await asyncio.wait_for(self._adds.get(), WAIT_SECONDS)

    async def abort(self) -> tuple[int, int]:
        """The next abort: handle and cause."""
        return await asyncio.wait_for(self._aborts.get(), WAIT_SECONDS)

    async def call(self) -> pb.UtilityCall:
        """The next utility call."""
        return await asyncio.wait_for(self._calls.get(), WAIT_SECONDS)

    @property
    def num_unread_adds(self) -> int:
        return self._adds.qsize()

    @property
    def num_unread_aborts(self) -> int:
        return self._aborts.qsize()

    def receive(self, message: pb.ConnectRequest) -> None:
        match message.WhichOneof("message"):
            case "hello":
                self.hello = message.hello
            case "add_requests":
                for data in message.add_requests.requests:
                    self._adds.put_nowait(pb.AddRequest.FromString(data))
            case "abort_requests":
                for item in zip(message.abort_requests.handles, message.abort_requests.causes, strict=True):
                    self._aborts.put_nowait(item)
            case "utility_call":
                self._calls.put_nowait(message.utility_call)
            case "heartbeat":
                self.num_heartbeats += 1

    # What the engine says.
    async def send(self, **fields: Any) -> None:
        """Sends a ConnectResponse with one field."""
        await self.send_bytes(pb.ConnectResponse(**fields).SerializeToString())

    async def send_bytes(self, data: bytes) -> None:
        async with self._lock:
            with contextlib.suppress(grpc.aio.BaseError, asyncio.InvalidStateError):
                await self._context.write(data)

    async def outputs(self, tokens: dict[int, list[int]] | None = None, **fields: Any) -> None:
        """A step: tokens by handle, and side tables as fields."""
        self._step += 1
        tokens = tokens or {}
        message = pb.StepOutputs(step=self._step, handles=list(tokens), **fields)
        if any(len(ids) != 1 for ids in tokens.values()):
            message.num_tokens.extend(len(ids) for ids in tokens.values())
        message.token_ids.extend(token for ids in tokens.values() for token in ids)
        await self.send(step_outputs=message)

    async def first(self, handle: int, *, cached: int = 0, queue_us: int = 0) -> None:
        """The request was computed for the first time."""
        first = pb.FirstScheduled(handle=handle, num_cached_tokens=cached, queue_us=queue_us)
        await self.outputs(first_scheduled=[first])

    async def finish(self, handle: int, tokens: list[int] | None = None, reason: int = 2, **fields: Any) -> None:
        """The end of a request, with its last tokens; LENGTH unless told otherwise. Tables go beside it."""
        tables = {name: fields.pop(name) for name in ("logprobs", "prompt_logprobs") if name in fields}
        finished = pb.Finished(handle=handle, reason=reason, **fields)
        await self.outputs({handle: tokens} if tokens else None, finished=[finished], **tables)

    def end(self, code: grpc.StatusCode | None = None, details: str = "") -> None:
        """Ends the stream, with OK unless a code is given."""
        if not self._close.done():
            self._close.set_result(None if code is None else (code, details))

    async def serve(self) -> None:
        reader = asyncio.create_task(self._read())
        try:
            await asyncio.wait({reader, self._close}, return_when=asyncio.FIRST_COMPLETED)
            if self._close.done():
                status = self._close.result()
                if status is not None:
                    await self._context.abort(*status)
        finally:
            self.ended.set()
            reader.cancel()

    async def _read(self) -> None:
        while True:
            try:
                data = await self._context.read()
            except (grpc.aio.BaseError, asyncio.InvalidStateError):
                return
            if data is grpc.aio.EOF:
                return
            self.receive(pb.ConnectRequest.FromString(data))


class ScriptedEngine:
    """The engine; each connection is a stream of its own."""

    def __init__(self, *, heartbeat_seconds: float | None = 0.05, **ready: Any) -> None:
        self.ready = ready
        self.heartbeat_seconds = heartbeat_seconds
        # What is sent instead of Ready.
        self.first_frame: bytes | None = None
        self.load = pb.EngineLoad()
        self.port = 0
        self._streams: asyncio.Queue[ScriptedStream] = asyncio.Queue()
        self._open: list[ScriptedStream] = []
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> "ScriptedEngine":
        """Serves, on the port that it had before if it had one."""
        server = grpc.aio.server(options=engine_server_options())
        handler = grpc.stream_stream_rpc_method_handler(self._connect)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("takt.engine.v1.EngineService", {"Connect": handler}),)
        )
        self.port = server.add_insecure_port(f"127.0.0.1:{self.port}")
        await server.start()
        self._server = server
        return self

    async def stop(self) -> None:
        """Vanishes: connections are closed without a word."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def stream(self) -> ScriptedStream:
        """The next stream, introduced."""
        return await asyncio.wait_for(self._streams.get(), WAIT_SECONDS)

    async def _connect(self, _requests: Any, context: Any) -> None:
        stream = ScriptedStream(context)
        stream.receive(pb.ConnectRequest.FromString(await context.read()))
        frame = self.first_frame or pb.ConnectResponse(ready=ready_message(**self.ready)).SerializeToString()
        await stream.send_bytes(frame)
        self._streams.put_nowait(stream)
        beating = asyncio.create_task(self._beat(stream))
        try:
            await stream.serve()
        finally:
            beating.cancel()

    async def _beat(self, stream: ScriptedStream) -> None:
        sequence = 0
        while True:
            await asyncio.sleep(self.heartbeat_seconds or 0.05)
            if self.heartbeat_seconds is not None:
                sequence += 1
                await stream.send(heartbeat=pb.EngineHeartbeat(sequence=sequence, load=self.load))


@contextlib.asynccontextmanager
async def scripted_engine(**options: Any) -> AsyncIterator[ScriptedEngine]:
    """A running scripted engine."""
    engine = await ScriptedEngine(**options).start()
    try:
        yield engine
    finally:
        await engine.stop()
