"""What the HTTP edge does for each path: reads the body, runs the journey, writes the answer.

Errors are raised as TaktError, fields under the names of the body; how they become an answer is the app's own.
"""

import base64
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

from frontend_svc.chat import plan_chat
from frontend_svc.http.call import HttpCall
from frontend_svc.http.chat_answer import ChatAnswer
from frontend_svc.http.chat_request import parse_chat, take_conversation
from frontend_svc.http.completion_answer import CompletionAnswer
from frontend_svc.http.completion_request import CompletionOptions, parse_completion
from frontend_svc.http.embedding_request import NAMES, parse_embedding
from frontend_svc.http.errors import rename_field
from frontend_svc.http.fields import Fields, boolean, integers, string
from frontend_svc.http.merge import merged
from frontend_svc.http.reply import Reply
from frontend_svc.http.request_fields import finish
from frontend_svc.request import GenerationRequest
from frontend_svc.services import Services
from frontend_svc.validation import validate_messages, validate_model, validate_text, validate_token_ids
from shared.errors import TaktError


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request on its way. `body` is its JSON object, `request_id` what its header says."""

    body: dict[str, Any]
    call: HttpCall
    reply: Reply
    request_id: str


class Handlers:
    """The work of each path. All methods belong to the event loop."""

    def __init__(self, services: Services, max_prompts: int) -> None:
        self._services = services
        self._max_prompts = max_prompts

    async def chat(self, exchange: Exchange) -> None:
        """Answers a conversation."""
        generation, options = parse_chat(exchange.body, exchange.request_id)
        answer = ChatAnswer(options, self._model(generation.model))
        reply = exchange.reply
        with _renamed(options.names):
            async with aclosing(self._services.journey.generate(generation, exchange.call)) as outputs:
                if options.streaming is None:
                    whole = answer.whole([output async for output in outputs])
                else:
                    async for output in outputs:
                        await reply.events(answer.events(output))
        if options.streaming is None:
            await reply.json(whole)
        else:
            await reply.events(answer.last_events())
            await reply.end_events()

    async def completion(self, exchange: Exchange) -> None:
        """Continues prompts."""
        generations, options = parse_completion(exchange.body, exchange.request_id, self._max_prompts)
        journey, reply = self._services.journey, exchange.reply
        with _renamed(options.names):
            prompts = await self._prompt_texts(generations, options)
            answer = CompletionAnswer(options, self._model(generations[0].model), prompts, self._token_text)
            answers = [journey.generate(generation, exchange.call) for generation in generations]
            async with aclosing(merged(answers)) as outputs:
                if options.streaming is None:
                    whole = answer.whole([output async for output in outputs])
                else:
                    async for prompt, output in outputs:
                        await reply.events(answer.events(prompt, output))
        if options.streaming is None:
            await reply.json(whole)
        else:
            await reply.events(answer.last_events())
            await reply.end_events()

    async def _prompt_texts(self, generations: Sequence[GenerationRequest], options: CompletionOptions) -> list[str]:
        """What is repeated in front of the outputs."""
        if not options.echo:
            return []
        services, texts = self._services, []
        for generation in generations:
            if generation.text is not None:
                texts.append(generation.text)
            else:
                assert generation.token_ids is not None
                validate_token_ids("token_ids", generation.token_ids, services.tokenizer.vocab_size)
                texts.append(await services.prompts.detokenize(generation.token_ids, skip_special_tokens=True))
        return texts

    async def embed(self, exchange: Exchange) -> None:
        """Turns texts into vectors."""
        services = self._services
        request, encoding = parse_embedding(exchange.body, exchange.request_id, services.caps.max_embedding_inputs)
        with _renamed(NAMES):
            output = await services.embeddings.embed(request, exchange.call)
        tokens = output.usage.prompt_tokens
        await exchange.reply.json(
            {
                "object": "list",
                "data": [
                    {"object": "embedding", "index": index, "embedding": _encode(vector, encoding)}
                    for index, vector in enumerate(output.embeddings)
                ],
                "model": self._model(request.model),
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }
        )

    async def tokenize(self, exchange: Exchange) -> None:
        """Turns text, or a conversation, into token ids."""
        services, fields = self._services, Fields(exchange.body)
        validate_model(fields.take_or("model", string, default=""), services.model_names)
        shows_tokens = fields.take_or("return_token_strs", boolean, default=False)
        token_ids: Sequence[int]
        if "messages" in fields.given:
            token_ids = await self._tokenize_chat(fields)
        else:
            adds = fields.take_or("add_special_tokens", boolean, default=True)
            text = fields.require("prompt", string)
            validate_text("prompt", text, services.max_prompt_bytes)
            token_ids = await services.prompts.tokenize_text(text, add_special_tokens=adds)
        finish(fields, {"add_special_tokens": (False,), "chat_template": ()})
        await exchange.reply.json(
            {
                "count": len(token_ids),
                "max_model_len": services.max_model_len,
                "tokens": list(token_ids),
                "token_strs": [self._token_text(token_id) for token_id in token_ids] if shows_tokens else None,
            }
        )

    async def _tokenize_chat(self, fields: Fields) -> Sequence[int]:
        services = self._services
        generation = GenerationRequest(request_id="", **take_conversation(fields))
        assert generation.messages is not None
        validate_messages(generation.messages, services.max_prompt_bytes)
        plan = plan_chat(generation, services.caps)
        return (await services.prompts.tokenize_chat(generation.messages, plan.render)).token_ids

    async def detokenize(self, exchange: Exchange) -> None:
        """Turns token ids into text, special tokens included."""
        services, fields = self._services, Fields(exchange.body)
        validate_model(fields.take_or("model", string, default=""), services.model_names)
        token_ids = fields.require("tokens", integers)
        validate_token_ids("tokens", token_ids, services.tokenizer.vocab_size)
        finish(fields, {})
        text = await services.prompts.detokenize(token_ids, skip_special_tokens=False)
        await exchange.reply.json({"prompt": text})

    def _model(self, name: str) -> str:
        return name or self._services.model_names[0]

    def _token_text(self, token_id: int) -> str:
        return self._services.tokenizer.token_piece(token_id)[0]


@contextmanager
def _renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors leave with the names of the body's fields."""
    try:
        yield
    except TaktError as error:
        rename_field(error, names)
        raise


def _encode(vector: Sequence[float], encoding: str) -> list[float] | str:
    """Numbers, or little-endian float32 in base64."""
    if encoding == "float":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
