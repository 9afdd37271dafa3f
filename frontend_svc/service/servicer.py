"""InferenceService: what applications call. Thin: each call is converted, and the journey does the rest.

Errors are raised as TaktError; how they become a status is the handlers' own.
"""

import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from frontend_svc.service.calls import Context, GrpcCall, counted, counted_stream
from frontend_svc.service.convert import (
    chat_messages,
    chat_request,
    embed_response,
    embedding_request,
    generation_request,
    models_response,
    tokenize_response,
)
from frontend_svc.service.convert_outputs import chat_response, generate_response
from frontend_svc.services import Services
from frontend_svc.validation import (
    MAX_DETOKENIZED_IDS,
    validate_count,
    validate_messages,
    validate_model,
    validate_text,
    validate_token_ids,
)
from shared.errors import InvalidRequestError
from takt.v1 import inference_pb2


class InferenceServicer:
    """takt.v1.InferenceService."""

    def __init__(self, services: Services) -> None:
        self.metrics = services.metrics
        self._services = services

    @counted_stream
    async def Generate(self, request: Any, context: Context) -> AsyncIterator[Any]:  # noqa: N802 - gRPC's name
        """Continues a prompt."""
        generation = generation_request(request, _new_request_id())
        async with aclosing(self._services.journey.generate(generation, GrpcCall(context))) as outputs:
            async for output in outputs:
                yield generate_response(output, generation.request_id)

    @counted_stream
    async def Chat(self, request: Any, context: Context) -> AsyncIterator[Any]:  # noqa: N802 - gRPC's name
        """Answers a conversation."""
        generation = chat_request(request, _new_request_id())
        async with aclosing(self._services.journey.generate(generation, GrpcCall(context))) as outputs:
            async for output in outputs:
                yield chat_response(output, generation.request_id)

    @counted
    async def Tokenize(self, request: Any, _context: Context) -> Any:  # noqa: N802 - gRPC's name
        """Turns text, or a conversation, into token ids."""
        services = self._services
        validate_model(request.model, services.model_names)
        add_special_tokens = request.add_special_tokens if request.HasField("add_special_tokens") else True
        match request.WhichOneof("input"):
            case "text":
                if len(request.text.encode()) > services.max_prompt_bytes:
                    validate_text("text", request.text, services.max_prompt_bytes)
                token_ids = await services.prompts.tokenize_text(request.text, add_special_tokens=add_special_tokens)
            case "conversation":
                messages = chat_messages(request.conversation.messages)
                validate_messages(messages, services.max_prompt_bytes)
                token_ids = (await services.prompts.tokenize_chat(messages)).token_ids
            case _:
                raise InvalidRequestError("input must be set to text or conversation, got none", field="input")
        tokens = await services.prompts.spell(token_ids) if request.return_tokens else []
        return tokenize_response(token_ids, tokens, services.max_model_len)

    @counted
    async def Detokenize(self, request: Any, _context: Context) -> Any:  # noqa: N802 - gRPC's name
        """Turns token ids into text."""
        services = self._services
        validate_model(request.model, services.model_names)
        validate_count("token_ids", request.token_ids, MAX_DETOKENIZED_IDS)
        token_ids = list(request.token_ids)
        validate_token_ids("token_ids", token_ids, services.tokenizer.vocab_size)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        text = await services.prompts.detokenize(token_ids, skip_special_tokens=skip)
        return inference_pb2.DetokenizeResponse(text=text)

    @counted
    async def ListModels(self, _request: Any, _context: Context) -> Any:  # noqa: N802 - gRPC's name
        """Lists the names of the served model."""
        services = self._services
        return models_response(
            services.model_names, services.model_root, services.max_model_len, len(services.engines.ready)
        )

    @counted
    async def Abort(self, request: Any, _context: Context) -> Any:  # noqa: N802 - gRPC's name
        """Ends a request that is in flight here."""
        return inference_pb2.AbortResponse(found=self._services.requests.abort(request.request_id))

    @counted
    async def Embed(self, request: Any, context: Context) -> Any:  # noqa: N802 - gRPC's name
        """Turns texts into vectors."""
        embedding = embedding_request(request, _new_request_id())
        return embed_response(await self._services.embeddings.embed(embedding, GrpcCall(context)))


def _new_request_id() -> str:
    return f"req-{secrets.token_hex(8)}"
