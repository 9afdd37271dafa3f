"""The client for programs with an event loop.

    async with AsyncClient("127.0.0.1:50051") as client:
        async for chunk in client.chat("What is the capital of France?", max_tokens=50):
            print(chunk.text, end="")

It belongs to the event loop that made it. Cancelling the task that reads a stream aborts its request.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self, Unpack

import grpc

from takt.v1 import inference_pb2, inference_pb2_grpc
from takt_client import convert
from takt_client.client import CHANNEL_OPTIONS, DEFAULT_ADDRESS, bearer
from takt_client.errors import error_from_rpc
from takt_client.types import ChatOptions, Chunk, Embeddings, GenerateOptions, Messages, Model, Output, Tokens


class AsyncChunkStream(AsyncIterator[Chunk]):
    """The chunks of a running request. Closing it, or dropping it, aborts the request."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._closed = False

    async def __anext__(self) -> Chunk:
        try:
            response = await self._call.read()
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            raise self._end(error) from None
        if response is grpc.aio.EOF:
            raise StopAsyncIteration
        return convert.chunk(response)

    def _end(self, error: BaseException) -> BaseException:
        # gRPC does so itself, unless the cancellation meets the sending of the request.
        self._call.cancel()
        task = asyncio.current_task()
        if self._closed and not (task and task.cancelling()):
            return StopAsyncIteration()
        return error_from_rpc(error) if isinstance(error, grpc.aio.AioRpcError) else error

    async def result(self) -> Output:
        """Reads to the end and returns the first output as a whole. Not for cumulative messages."""
        return convert.output([chunk async for chunk in self])

    async def results(self) -> list[Output]:
        """Reads to the end and returns every output as a whole, by index. Not for cumulative messages."""
        return convert.outputs([chunk async for chunk in self])

    async def aclose(self) -> None:
        """Aborts the request unless it has ended; what was not read is lost."""
        self._closed = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class AsyncClient:
    """Speaks to the InferenceService at an address; connects at the first call."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        api_key: str = "",
    ) -> None:
        """`api_key` goes with every call; without `credentials` it is not encrypted on its way."""
        self._metadata = bearer(api_key)
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    def generate(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> AsyncChunkStream:
        """Continues a text or token ids. The request starts now; errors are raised while reading."""
        request = convert.generate_request(prompt, options)
        return AsyncChunkStream(self._stub.Generate(request, timeout=options.get("timeout"), metadata=self._metadata))

    def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> AsyncChunkStream:
        """Answers a conversation. The request starts now; errors are raised while reading."""
        request = convert.chat_request(messages, options)
        return AsyncChunkStream(self._stub.Chat(request, timeout=options.get("timeout"), metadata=self._metadata))

    async def tokenize(
        self, text: Messages, *, model: str = "", add_special_tokens: bool = True, return_tokens: bool = False
    ) -> Tokens:
        """Token ids of a text, or of a conversation given as a list of messages."""
        request = convert.tokenize_request(
            text, model=model, add_special_tokens=add_special_tokens, return_tokens=return_tokens
        )
        return convert.tokens(await _call(self._stub.Tokenize, request, self._metadata))

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        request = convert.detokenize_request(token_ids, model=model, skip_special_tokens=skip_special_tokens)
        return str((await _call(self._stub.Detokenize, request, self._metadata)).text)

    async def embed(
        self, texts: str | Sequence[str], *, model: str = "", pooling: str = "", normalize: bool = False
    ) -> Embeddings:
        """A vector a text; `pooling` is last or mean."""
        request = convert.embed_request(texts, model=model, pooling=pooling, normalize=normalize)
        return convert.embeddings(await _call(self._stub.Embed, request, self._metadata))

    async def list_models(self) -> list[Model]:
        """The models that requests can name."""
        return convert.models(await _call(self._stub.ListModels, inference_pb2.ListModelsRequest(), self._metadata))

    async def abort(self, request_id: str) -> bool:
        """Aborts a request of the frontend that answers; False when it has none of this id."""
        return bool(
            (await _call(self._stub.Abort, inference_pb2.AbortRequest(request_id=request_id), self._metadata)).found
        )

    async def close(self) -> None:
        """Ends the connection and all calls on it."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def _call(method: Any, request: Any, metadata: Any) -> Any:
    try:
        return await method(request, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from None
