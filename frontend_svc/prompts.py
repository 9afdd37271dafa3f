"""Turns prompts into token ids. Long ones are worked on in a thread, so that nobody else's tokens wait for them.

Knows neither engines nor calls.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from frontend_svc.request import GenerationRequest
from frontend_svc.text.chat_template import ChatMessage, RenderOptions
from frontend_svc.text.reasoning import leaves_reasoning_open
from frontend_svc.text.tokenizer import Tokenizer
from shared.errors import OverloadedError, PreconditionError

T = TypeVar("T")

# Shorter ones take less than the way to a thread and back is worth.
THREAD_BYTES = 8 * 1024
NUM_THREADS = 2


@dataclass(frozen=True, slots=True)
class Prompt:
    """What an engine continues. `opens_reasoning`: it ends inside the model's reasoning."""

    token_ids: Sequence[int]
    opens_reasoning: bool = False


class Prompts:
    """The tokenizer as the services use it."""

    def __init__(self, tokenizer: Tokenizer, timeout: float) -> None:
        """`timeout` limits the seconds that a caller waits for one text; work under way is not interrupted."""
        self._tokenizer = tokenizer
        self._timeout = timeout
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenize")

    def close(self) -> None:
        """Waits for nothing."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def tokenize(self, request: GenerationRequest, render: RenderOptions | None) -> Prompt:
        """The prompt of a request, its last tokens alone when it asks so. Raises TaktError."""
        if request.token_ids is not None:
            prompt = Prompt(request.token_ids)
        elif request.messages is not None:
            prompt = await self.tokenize_chat(request.messages, render)
        else:
            assert request.text is not None
            prompt = Prompt(await self.tokenize_text(request.text, add_special_tokens=True))
        limit = request.sampling.truncate_prompt_tokens
        return prompt if limit is None else replace(prompt, token_ids=prompt.token_ids[-limit:])

    async def tokenize_text(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """A text's token ids."""
        return await self._run(len(text), lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def tokenize_chat(self, messages: Sequence[ChatMessage], render: RenderOptions | None = None) -> Prompt:
        """A conversation, rendered by the model's chat template."""
        if not self._tokenizer.has_chat_template:
            raise PreconditionError("the served model has no chat template; give one with --chat-template")
        options = render or RenderOptions()
        size = sum(len(message.text) for message in messages)
        return await self._run(size, lambda: self._render(messages, options))

    def _render(self, messages: Sequence[ChatMessage], options: RenderOptions) -> Prompt:
        rendered = self._tokenizer.render_chat(messages, options)
        continued = messages[-1].text if options.continue_final_message else None
        # The template writes the special tokens itself.
        token_ids = self._tokenizer.encode(rendered, add_special_tokens=False)
        return Prompt(token_ids, leaves_reasoning_open(rendered, continued))

    async def spell(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary spells it."""
        return await self._run(4 * len(token_ids), lambda: [self._tokenizer.token_text(index) for index in token_ids])

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids."""
        size = 4 * len(token_ids)
        return await self._run(size, lambda: self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        if size <= THREAD_BYTES:
            return work()
        try:
            async with asyncio.timeout(self._timeout):
                return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except TimeoutError:
            raise OverloadedError(
                f"a text of {size} characters was not tokenized within {self._timeout:g} s", reason="TOKENIZE_TIMEOUT"
            ) from None
