"""A frontend inside the test's event loop, with a channel to each of its ports and the tiny tokenizer."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import generate_latest

from frontend_svc.config import FrontendConfig
from frontend_svc.lifecycle import Frontend
from frontend_svc.routing.engine_client import ConnectionTimes
from frontend_svc.text.tokenizer import Tokenizer
from takt.v1 import admin_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2

FAST = ConnectionTimes(heartbeat=0.05, suspect=0.5, dead=1.5, min_backoff=0.02, max_backoff=0.1)
WAIT_SECONDS = 20.0
SERVICE = "takt.v1.InferenceService"


@dataclass
class Answer:
    """A finished call."""

    messages: list[Any] = field(default_factory=list)
    error: grpc.aio.AioRpcError | None = None

    @property
    def text(self) -> str:
        return "".join(message.text for message in self.messages)

    @property
    def token_ids(self) -> list[int]:
        return [token for message in self.messages for token in message.token_ids]

    @property
    def last(self) -> Any:
        """The one message with a finish reason, which must be the last one."""
        (last,) = [message for message in self.messages if message.HasField("finish_reason")]
        assert last is self.messages[-1]
        return last

    @property
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK if self.error is None else self.error.code()

    @property
    def info(self) -> error_details_pb2.ErrorInfo:
        assert self.error is not None
        return error_info(self.error)


def error_info(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo:
    """The google.rpc.ErrorInfo of a failure."""
    info = error_details_pb2.ErrorInfo()
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for detail in status_pb2.Status.FromString(value).details:
                if detail.Unpack(info):
                    return info
    return info


async def collect(call: Any) -> Answer:
    """Reads a stream to its end."""
    answer = Answer()
    try:
        while (message := await call.read()) is not grpc.aio.EOF:
            answer.messages.append(message)
    except grpc.aio.AioRpcError as error:
        answer.error = error
    return answer


async def next_message(call: Any) -> Any:
    """The next message of a stream."""
    message = await asyncio.wait_for(call.read(), WAIT_SECONDS)
    assert message is not grpc.aio.EOF
    return message


@dataclass
class FrontendInProcess:
    """A running frontend and clients of it."""

    frontend: Frontend
    channel: grpc.aio.Channel
    stub: inference_pb2_grpc.InferenceServiceStub
    admin: admin_pb2_grpc.AdminServiceStub

    def generate(self, prompt: str | list[int] = "hello", timeout: float | None = None, **fields: Any) -> Any:
        """Starts a Generate; fields of SamplingParams go there."""
        request = generate_request(prompt, **fields)
        return self.stub.Generate(request, timeout=timeout)

    async def answer(self, prompt: str | list[int] = "hello", **fields: Any) -> Answer:
        """A Generate from start to end."""
        return await asyncio.wait_for(collect(self.generate(prompt, **fields)), WAIT_SECONDS)

    async def answer_ids(self, text: str) -> list[int]:
        """Token ids of a text."""
        return list((await self.stub.Tokenize(inference_pb2.TokenizeRequest(text=text))).token_ids)

    async def wait_ready(self, count: int = 1) -> None:
        """Waits until so many engines take requests."""
        await self.until(lambda: len(self.frontend.engines.ready) == count)

    async def until(self, condition: Any) -> None:
        """Waits for a condition of the frontend."""
        async with asyncio.timeout(WAIT_SECONDS):
            while not condition():  # noqa: ASYNC110 - the conditions are the frontend's own state, without events
                await asyncio.sleep(0.005)

    async def idle(self) -> None:
        """Waits until no request is in flight here or in an engine."""
        await self.until(lambda: not len(self.frontend.requests))
        await self.until(lambda: not any(client.num_in_flight for client in self.frontend.engines.clients))

    async def health(self, service: str = SERVICE) -> str:
        request = health_pb2.HealthCheckRequest(service=service)
        response = await health_pb2_grpc.HealthStub(self.channel).Check(request)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)

    def metric(self, name: str, **labels: str) -> float:
        """A sample of the frontend's metrics; 0 when there is none."""
        return self.frontend.metrics.registry.get_sample_value(name, labels) or 0.0

    def exposition(self) -> str:
        return generate_latest(self.frontend.metrics.registry).decode()


def generate_request(prompt: str | list[int] = "hello", **fields: Any) -> inference_pb2.GenerateRequest:
    """A GenerateRequest; fields that it lacks go to its sampling."""
    own = {field.name for field in inference_pb2.GenerateRequest.DESCRIPTOR.fields}
    sampling = types_pb2.SamplingParams(**{name: value for name, value in fields.items() if name not in own})
    request = inference_pb2.GenerateRequest(
        sampling=sampling, **{name: value for name, value in fields.items() if name in own}
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    return request


@contextlib.asynccontextmanager
async def frontend_in_process(
    tokenizer: Path,
    *engines: str,
    times: ConnectionTimes = FAST,
    channel_options: list[tuple[str, Any]] | None = None,
    **options: Any,
) -> AsyncIterator[FrontendInProcess]:
    """A running frontend of the tokenizer's folder. `options` are fields of FrontendConfig."""
    values = {
        "port": 0,
        "admin_port": 0,
        "metrics_port": -1,
        "http_port": -1,
        "drain_timeout": 5.0,
        "served_model_name": ("tiny",),
    }
    config = FrontendConfig(model=str(tokenizer), engine=engines, **(values | options))
    frontend = Frontend(config, Tokenizer.load(tokenizer, config.chat_template), times)
    await frontend.start()
    channel = grpc.aio.insecure_channel(frontend.address, options=channel_options)
    admin_channel = grpc.aio.insecure_channel(frontend.admin_address)
    try:
        yield FrontendInProcess(
            frontend,
            channel,
            inference_pb2_grpc.InferenceServiceStub(channel),
            admin_pb2_grpc.AdminServiceStub(admin_channel),
        )
    finally:
        await channel.close()
        await admin_channel.close()
        await frontend.stop()
