"""A frontend that answers by a script, for tests of the client: it records requests and gives what it is told."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from shared.errors import InvalidRequestError, NotFoundError, OverloadedError
from shared.rpc.options import public_server_options
from shared.rpc.raw import raw_handlers
from shared.rpc.server import RpcServer, start_server
from takt.v1 import admin_pb2, inference_pb2, types_pb2

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
WORDS = ["The capital ", "of France ", "is Paris."]


def last_fields() -> dict[str, Any]:
    return {
        "finish_reason": types_pb2.FINISH_REASON_STOP,
        "stop_reason": types_pb2.StopReason(text="END"),
        "usage": types_pb2.Usage(prompt_tokens=9, cached_tokens=4, completion_tokens=3),
        "timings": types_pb2.RequestTimings(queue_seconds=0.5, e2e_seconds=2.0, num_preemptions=1),
    }


def rich_answer(kind: Any) -> list[Any]:
    """Two outputs with log-probabilities and, in a chat, reasoning and a call."""
    token = types_pb2.TokenCandidate(token_id=5, logprob=-0.5, rank=1, text="\ufffd", bytes=b"\xc3")
    position = types_pb2.TokenLogprobs(token=token, candidates=[token])
    chat: list[dict[str, Any]] = [{}, {}]
    if kind is inference_pb2.ChatResponse:
        chat = [
            {"reasoning": "hm", "tool_calls": [types_pb2.ToolCall(id="c", name="f", arguments='{"a"')]},
            {"reasoning": "m", "tool_calls": [types_pb2.ToolCall(arguments=": 1}")]},
        ]
    prompt = {"prompt_token_ids": [1, 2], "prompt_logprobs": [types_pb2.TokenLogprobs(), position]}
    return [
        kind(request_id="r-1", index=1, text="b", token_ids=[6]),
        kind(request_id="r-1", text="a", token_ids=[5], logprobs=[position], **prompt, **chat[0]),
        kind(request_id="r-1", index=1, text="B", token_ids=[7], **last_fields()),
        kind(request_id="r-1", text="A", token_ids=[5], logprobs=[position], **chat[1], **last_fields()),
    ]


class ScriptedFrontend:
    """Prompts choose what happens.

    "forever", "overloaded", "invalid", "broken" after a word, "rich" with all that messages hold, else three words.
    """

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.started = asyncio.Event()
        self.ended = asyncio.Event()

    async def _answer(self, kind: Any, request: Any, prompt: str) -> AsyncIterator[Any]:
        self.requests.append(request)
        self.started.set()
        try:
            if prompt == "overloaded":
                raise OverloadedError("the queue is full", reason="QUEUE_FULL", metadata={"limit": "5"})
            if prompt == "invalid":
                raise InvalidRequestError("top_p must be in (0, 1], got 7", field="sampling.top_p")
            if prompt == "rich":
                for response in rich_answer(kind):
                    yield response
                return
            for index, word in enumerate(WORDS):
                last = last_fields() if index == len(WORDS) - 1 and prompt != "forever" else {}
                yield kind(request_id="r-1", text=word, token_ids=[10 + index], **last)
                if prompt == "broken":
                    raise OverloadedError("the client reads too slowly", reason="SLOW_CONSUMER")
            if prompt == "forever":
                await asyncio.Event().wait()
        finally:
            self.ended.set()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for response in self._answer(inference_pb2.GenerateResponse, request, request.text):
            yield response

    async def Chat(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for response in self._answer(inference_pb2.ChatResponse, request, request.messages[-1].content):
            yield response

    async def Tokenize(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        if request.model == "who":
            raise NotFoundError("unknown model 'who'", field="model")
        tokens = ["a", "b"] if request.return_tokens else []
        return inference_pb2.TokenizeResponse(token_ids=[1, 2], tokens=tokens, max_model_len=64)

    async def Detokenize(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        return inference_pb2.DetokenizeResponse(text="ab")

    async def Embed(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        vectors = [inference_pb2.Embedding(values=[len(text), 0.5]) for text in request.texts]
        return inference_pb2.EmbedResponse(embeddings=vectors, usage=types_pb2.Usage(prompt_tokens=7))

    async def ListModels(self, request: Any, context: Any) -> Any:
        model = inference_pb2.Model(name="m", root="models/m", max_model_len=64, num_ready_engines=2)
        return inference_pb2.ListModelsResponse(models=[model])

    async def Abort(self, request: Any, context: Any) -> Any:
        return inference_pb2.AbortResponse(found=request.request_id == "r-1")


class ScriptedAdmin:
    """Two engines, one of which has an error."""

    async def GetLoad(self, request: Any, context: Any) -> Any:
        engines = [
            admin_pb2.EngineLoad(address="e:1", state=admin_pb2.ENGINE_STATE_READY, num_running=3, kv_cache_usage=0.25),
            admin_pb2.EngineLoad(address="e:2", state=admin_pb2.ENGINE_STATE_CONNECTING, last_error="refused"),
        ]
        return admin_pb2.GetLoadResponse(engines=engines, num_requests=3)

    async def Ping(self, request: Any, context: Any) -> Any:
        return admin_pb2.PingResponse(results=[admin_pb2.EnginePingResult(address="e:1", round_trip_seconds=0.5)])

    async def ResetPrefixCache(self, request: Any, context: Any) -> Any:
        result = admin_pb2.EngineResetResult(address="e:1", success=request.reset_running_requests)
        return admin_pb2.ResetPrefixCacheResponse(results=[result])

    async def StartProfile(self, request: Any, context: Any) -> Any:
        result = admin_pb2.EngineProfileResult(address="e:1", error=f"no folder for {request.name}")
        return admin_pb2.StartProfileResponse(results=[result])

    async def StopProfile(self, request: Any, context: Any) -> Any:
        result = admin_pb2.EngineProfileResult(address="e:1", trace_path="trace.json")
        return admin_pb2.StopProfileResponse(results=[result])

    async def Drain(self, request: Any, context: Any) -> Any:
        return admin_pb2.DrainResponse(num_requests=7)


@asynccontextmanager
async def scripted(frontend: ScriptedFrontend) -> AsyncIterator[RpcServer]:
    """Both services on one port."""
    server = await start_server(
        "127.0.0.1",
        0,
        handlers=[raw_handlers(INFERENCE, frontend), raw_handlers(ADMIN, ScriptedAdmin())],
        services=[INFERENCE.full_name, ADMIN.full_name],
        options=public_server_options(),
    )
    try:
        yield server
    finally:
        await server.stop(0)
