"""Parts that the answers of chat and text completions share: ends, usage, log-probabilities of prompts.

Values are what becomes JSON; JSON has no infinities, so that log-probabilities end at a number that means impossible.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from frontend_svc.http.request_fields import Streaming
from frontend_svc.request import PositionLogprobs, RequestOutput
from shared.types import FinishReason

MIN_LOGPROB = -9999.0
REPETITION = "repetition_detected"

Json = dict[str, Any]


def finish_reason(output: RequestOutput, *, tool_calls: bool = False) -> str | None:
    """Why an output ended. One that failed has no reason: the error itself follows."""
    reason = output.finish_reason
    if reason is None or reason is FinishReason.ERROR:
        return None
    return "tool_calls" if tool_calls and reason is FinishReason.STOP else reason.name.lower()


def stop_reason(output: RequestOutput) -> int | str | None:
    """What ended an output."""
    return REPETITION if output.finish_reason is FinishReason.REPETITION else output.stop_reason


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, MIN_LOGPROB)


def prompt_logprobs(positions: Sequence[PositionLogprobs]) -> list[Json | None]:
    """Those of a prompt as vLLM writes them: a position each, by token id; the first token has none."""
    return [None if position.token is None else _by_id(position) for position in positions]


def _by_id(position: PositionLogprobs) -> Json:
    tokens = ((position.token,) if position.token is not None else ()) + position.candidates
    found: Json = {}
    for token in tokens:
        entry = {"logprob": finite(token.logprob), "rank": token.rank or None, "decoded_token": token.text}
        found.setdefault(str(token.token_id), entry)
    return found


class UsageCount:
    """Token counts of a whole answer, of one or more prompts."""

    def __init__(self, streaming: Streaming | None, *, counts_completion: bool = True) -> None:
        self._is_continuous = streaming is not None and streaming.continuous_usage
        self._counts_completion = counts_completion
        self._prompts: dict[int, tuple[int, int]] = {}
        self._completion_tokens = 0
        # While it streams, by prompt and output.
        self._so_far: dict[tuple[int, int], int] = {}
        self._prompt_sizes: dict[int, int] = {}

    def add(self, output: RequestOutput, prompt: int = 0) -> None:
        """Counts what an output tells."""
        usage = output.usage
        if usage is not None:
            if output.index == 0 or prompt not in self._prompts:
                self._prompts[prompt] = (usage.prompt_tokens, usage.cached_tokens)
            if self._counts_completion:
                self._completion_tokens += usage.completion_tokens
        if self._is_continuous:
            key = (prompt, output.index)
            self._so_far[key] = self._so_far.get(key, 0) + len(output.token_ids)
            if output.prompt_token_ids:
                self._prompt_sizes[prompt] = len(output.prompt_token_ids)

    def total(self) -> Json:
        """Of all prompts and outputs."""
        sizes = self._prompts.values()
        return _usage(sum(size for size, _ in sizes), self._completion_tokens, sum(cached for _, cached in sizes))

    def event_fields(self, index: int, prompt: int = 0) -> Json:
        """What an event says of the usage so far: nothing unless it was asked for."""
        if not self._is_continuous or prompt not in self._prompt_sizes:
            return {}
        completion = self._so_far.get((prompt, index), 0) if self._counts_completion else 0
        return {"usage": _usage(self._prompt_sizes[prompt], completion)}


def _usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None) -> Json:
    usage: Json = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return usage


def by_index(outputs: Iterable[RequestOutput]) -> list[RequestOutput]:
    """Whole outputs in their order."""
    return sorted(outputs, key=lambda output: output.index)
