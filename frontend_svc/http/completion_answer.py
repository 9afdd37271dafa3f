"""Outputs of prompts as OpenAI's text completions, whole or streamed. Knows no connection."""

import time
from collections.abc import Callable, Iterable, Sequence

from frontend_svc.http.answers import (
    Json,
    UsageCount,
    finish_reason,
    finite,
    prompt_logprobs,
    stop_reason,
)
from frontend_svc.http.completion_request import CompletionOptions
from frontend_svc.request import PositionLogprobs, RequestOutput
from shared.types import FinishReason


class CompletionAnswer:
    """One answer. Choice i of prompt p has the index p * n + i."""

    def __init__(
        self, options: CompletionOptions, model: str, prompts: Sequence[str], token_text: Callable[[int], str]
    ) -> None:
        """`prompts` are the texts that are repeated in front of the outputs, empty where none is."""
        self._options = options
        self._head: Json = {
            "id": options.ids.answer,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._prompts = prompts
        self._token_text = token_text
        self._usage = UsageCount(options.streaming, counts_completion=not options.prompt_only)
        self._texts: dict[int, _Text] = {}

    def whole(self, outputs: Iterable[tuple[int, RequestOutput]]) -> Json:
        """The answer of outputs that each are told once, each with the number of its prompt."""
        ordered = sorted(outputs, key=lambda item: (item[0], item[1].index))
        choices = []
        first: RequestOutput | None = None
        for prompt, output in ordered:
            self._usage.add(output, prompt)
            if output.index == 0:
                first = output
            assert first is not None
            choices.append(self._choice(prompt, output, first))
        return {**self._head, "choices": choices, "usage": self._usage.total(), "system_fingerprint": None}

    def _choice(self, prompt: int, output: RequestOutput, first: RequestOutput) -> Json:
        """`first` is the prompt's first output, which alone has what is told of the prompt."""
        choice = self._base(prompt, output, first)
        if self._options.returns_prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(first.prompt_logprobs)
        if self._options.returns_token_ids:
            choice["prompt_token_ids"] = list(first.prompt_token_ids)
            choice["token_ids"] = [] if self._options.prompt_only else list(output.token_ids)
        return choice

    def events(self, prompt: int, output: RequestOutput) -> list[Json]:
        """The event of what is new of an output of a prompt."""
        self._usage.add(output, prompt)
        choice = self._base(prompt, output, output)
        if self._options.returns_token_ids:
            if output.prompt_token_ids:
                choice["prompt_token_ids"] = list(output.prompt_token_ids)
            choice["token_ids"] = [] if self._options.prompt_only else list(output.token_ids)
        return [{**self._head, "choices": [choice], **self._usage.event_fields(output.index, prompt)}]

    def last_events(self) -> list[Json]:
        """What follows the outputs."""
        streaming = self._options.streaming
        if streaming is None or not streaming.include_usage:
            return []
        return [{**self._head, "choices": [], "usage": self._usage.total()}]

    def _base(self, prompt: int, output: RequestOutput, first: RequestOutput) -> Json:
        options = self._options
        index = prompt * options.n + output.index
        text = self._texts.get(index)
        is_first = text is None
        if text is None:
            text = self._texts[index] = _Text(options.logprobs)
        shown = "" if options.prompt_only else output.text
        positions = () if options.prompt_only else output.logprobs
        if options.echo and is_first:
            shown = self._prompts[prompt] + shown
            positions = (*first.prompt_logprobs, *positions)
            if first.prompt_token_ids:
                text.first_token = self._token_text(first.prompt_token_ids[0])
        reason = finish_reason(output)
        if options.prompt_only and output.finish_reason in (FinishReason.STOP, FinishReason.REPETITION):
            reason = "length"
        return {
            "index": index,
            "text": shown,
            "logprobs": None if options.logprobs is None else text.logprobs(positions),
            "finish_reason": reason,
            "stop_reason": None if options.prompt_only else stop_reason(output),
        }


class _Text:
    """How far the tokens of a choice have come."""

    def __init__(self, width: int | None) -> None:
        self.first_token = ""
        self._width = width or 0
        self._offset = 0

    def logprobs(self, positions: Sequence[PositionLogprobs]) -> Json:
        """Columns of the next positions. A prompt's first token has a text, and no log-probability."""
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for position in positions:
            token = position.token
            tokens.append(self.first_token if token is None else token.text)
            values.append(None if token is None else finite(token.logprob))
            tops.append(None if token is None else self._top(position))
            offsets.append(self._offset)
            self._offset += len(tokens[-1])
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, position: PositionLogprobs) -> dict[str, float]:
        """The most likely tokens, and the one that stands there."""
        found = position.candidates if self._width < 0 else position.candidates[: self._width]
        top = {candidate.text: finite(candidate.logprob) for candidate in found}
        if position.token is not None:
            top.setdefault(position.token.text, finite(position.token.logprob))
        return top
