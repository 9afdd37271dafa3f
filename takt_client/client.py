"""The client for programs without an event loop.

    with Client("127.0.0.1:50051") as client:
        for chunk in client.chat("What is the capital of France?", max_tokens=50):
            print(chunk.text, end="")

Calls are safe from several threads. Every failure is a TaktClientError.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Self, TypeVar, Unpack

import grpc

from takt.v1 import inference_pb2, inference_pb2_grpc
from takt_client import convert
from takt_client.errors import error_from_rpc
from takt_client.types import ChatOptions, Chunk, Embeddings, GenerateOptions, Messages, Model, Output, Tokens

T = TypeVar("T")

DEFAULT_ADDRESS = "127.0.0.1:50051"
CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
    ("grpc.max_send_message_length", 8 * 1024 * 1024),
    # A dead peer is noticed within a minute while a call runs.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.http2.ping_timeout_ms", 15_000),
]


def bearer(api_key: str) -> tuple[tuple[str, str | bytes], ...]:
    """The metadata of calls with a key; none without one."""
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


class ChunkStream(Iterator[Chunk]):
    """The chunks of a running request. Closing it, or dropping it, aborts the request."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._closed = False

    def __next__(self) -> Chunk:
        try:
            return convert.chunk(next(self._call))
        except grpc.RpcError as error:
            if self._closed:
                raise StopIteration from None
            raise error_from_rpc(error) from None

    def result(self) -> Output:
        """Reads to the end and returns the first output as a whole. Not for cumulative messages."""
        return convert.output(self)

    def results(self) -> list[Output]:
        """Reads to the end and returns every output as a whole, by index. Not for cumulative messages."""
        return convert.outputs(self)

    def close(self) -> None:
        """Aborts the request unless it has ended; what was not read is lost."""
        self._closed = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class Client:
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
            self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    def generate(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> ChunkStream:
        """Continues a text or token ids. The request starts now; errors are raised while reading."""
        request = convert.generate_request(prompt, options)
        return ChunkStream(self._stub.Generate(request, timeout=options.get("timeout"), metadata=self._metadata))

    def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> ChunkStream:
        """Answers a conversation. The request starts now; errors are raised while reading."""
        request = convert.chat_request(messages, options)
        return ChunkStream(self._stub.Chat(request, timeout=options.get("timeout"), metadata=self._metadata))

    def tokenize(
        self, text: Messages, *, model: str = "", add_special_tokens: bool = True, return_tokens: bool = False
    ) -> Tokens:
        """Token ids of a text, or of a conversation given as a list of messages."""
        request = convert.tokenize_request(
            text, model=model, add_special_tokens=add_special_tokens, return_tokens=return_tokens
        )
        return convert.tokens(_call(self._stub.Tokenize, request, self._metadata))

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        request = convert.detokenize_request(token_ids, model=model, skip_special_tokens=skip_special_tokens)
        return str(_call(self._stub.Detokenize, request, self._metadata).text)

    def embed(
        self, texts: str | Sequence[str], *, model: str = "", pooling: str = "", normalize: bool = False
    ) -> Embeddings:
        """A vector a text; `pooling` is last or mean."""
        request = convert.embed_request(texts, model=model, pooling=pooling, normalize=normalize)
        return convert.embeddings(_call(self._stub.Embed, request, self._metadata))

    def list_models(self) -> list[Model]:
        """The models that requests can name."""
        return convert.models(_call(self._stub.ListModels, inference_pb2.ListModelsRequest(), self._metadata))

    def abort(self, request_id: str) -> bool:
        """Aborts a request of the frontend that answers; False when it has none of this id."""
        return bool(_call(self._stub.Abort, inference_pb2.AbortRequest(request_id=request_id), self._metadata).found)

    def close(self) -> None:
        """Ends the connection and all calls on it."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _call(method: Any, request: Any, metadata: Any) -> Any:
    try:
        return method(request, metadata=metadata)
    except grpc.RpcError as error:
        raise error_from_rpc(error) from None
