"""Builds a request's outputs: text from tokens, the one end, usage, timings and what metrics count.

Knows neither engines nor calls. Invariant: after an output with a finish reason nothing more is built.
"""

from frontend_svc.defaults import ResolvedRequest
from frontend_svc.metrics import EngineMetrics
from frontend_svc.request import RequestOutput, RequestTimings, Usage
from frontend_svc.text.output_text import OutputText
from frontend_svc.text.tokenizer import Tokenizer
from shared.types import FinishedRequest, FinishReason, FirstScheduled


class OutputBuilder:
    """One request's output. Times are monotonic seconds; `arrival` is when the request came."""

    def __init__(self, tokenizer: Tokenizer, resolved: ResolvedRequest, arrival: float) -> None:
        sampling = resolved.request.sampling
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        # Set when the text ended at a stop string that the engine does not know of.
        self.stop_string: str | None = None
        self._resolved = resolved
        self._arrival = arrival
        self._text = OutputText(
            tokenizer,
            stop=sampling.stop,
            include_stop_str=sampling.include_stop_str_in_output,
            min_tokens=resolved.sampling.min_tokens,
            prompt_token_ids=resolved.prompt_token_ids,
        )
        # Tokens that end the output and leave no text; an engine may tell the end in a later message.
        self._hidden_token_ids = (
            frozenset[int]() if sampling.include_stop_str_in_output else resolved.stopping_token_ids
        )
        self._metrics: EngineMetrics | None = None
        self._first_token_at: float | None = None
        self._last_token_at = arrival
        self._last_usage: Usage | None = None
        self._last_timings: RequestTimings | None = None
        self._shows_prompt = resolved.request.return_prompt_token_ids

    @property
    def is_finished(self) -> bool:
        """Whether the last output has been built."""
        return self.finish_reason is not None

    def count_for(self, metrics: EngineMetrics) -> None:
        """The engine that computes the request, whose metrics count it."""
        self._metrics = metrics

    def add(
        self, token_ids: list[int], finished: FinishedRequest | None, first: FirstScheduled | None, now: float
    ) -> RequestOutput:
        """The output for new tokens and, perhaps, the engine's end. Tokens behind a stop string are dropped."""
        hidden = token_ids and token_ids[-1] in self._hidden_token_ids
        delta = self._text.append(token_ids[:-1] if hidden else token_ids)
        output = RequestOutput(text=delta.text)
        if delta.stop_string is not None:
            self.stop_string = delta.stop_string
            token_ids = token_ids[: delta.num_tokens]
        output.token_ids = token_ids
        if token_ids:
            self._count(len(token_ids), first, now)
        if self._shows_prompt:
            output.prompt_token_ids = self._resolved.prompt_token_ids
            self._shows_prompt = False
        if self.stop_string is not None:
            self._end(output, FinishReason.STOP, finished, first, now)
            output.stop_reason = self.stop_string
        elif finished is not None:
            output.text += self._text.finish(stop_token=finished.reason is FinishReason.STOP)
            self._end(output, finished.reason, finished, first, now)
            output.stop_reason = finished.stop_token_id
        return output

    def end(self, reason: FinishReason, first: FirstScheduled | None, now: float) -> RequestOutput:
        """The last output of a request that an engine does not end: what was held back, and the totals."""
        output = RequestOutput(text=self._text.finish(stop_token=False))
        self._end(output, reason, None, first, now)
        return output

    def account_end(self, otherwise: FinishReason, first: FirstScheduled | None, now: float) -> None:
        """Counts the end: that of the last output, or `otherwise` when the request ended without one."""
        if self._metrics is not None:
            usage = self._last_usage or self._usage(None, first)
            timings = self._last_timings or self._timings(None, first, now)
            max_tokens = self._resolved.sampling.max_tokens
            self._metrics.ended(self.finish_reason or otherwise, usage, timings, max_tokens)

    def _count(self, count: int, first: FirstScheduled | None, now: float) -> None:
        gap = None if self._first_token_at is None else now - self._last_token_at
        self.num_tokens += count
        self._last_token_at = now
        if self._metrics is not None:
            self._metrics.tokens(count, gap)
        if self._first_token_at is None:
            self._first_token_at = now
            if self._metrics is not None:
                cached = first.num_cached_tokens if first is not None else 0
                self._metrics.first_token(now - self._arrival, len(self._resolved.prompt_token_ids), cached)

    def _end(
        self,
        output: RequestOutput,
        reason: FinishReason,
        finished: FinishedRequest | None,
        first: FirstScheduled | None,
        now: float,
    ) -> None:
        self.finish_reason = output.finish_reason = reason
        self._last_usage = output.usage = self._usage(finished, first)
        self._last_timings = output.timings = self._timings(finished, first, now)

    def _usage(self, finished: FinishedRequest | None, first: FirstScheduled | None) -> Usage:
        cached = first.num_cached_tokens if first is not None else 0
        if finished is not None and finished.num_cached_tokens:
            cached = finished.num_cached_tokens
        return Usage(len(self._resolved.prompt_token_ids), cached, self.num_tokens)

    def _timings(self, finished: FinishedRequest | None, first: FirstScheduled | None, now: float) -> RequestTimings:
        ttft = 0.0 if self._first_token_at is None else self._first_token_at - self._arrival
        queue = first.queue_seconds if first is not None else 0.0
        if finished is not None and self.stop_string is None and finished.prefill_seconds:
            queue, prefill, decode = finished.queue_seconds, finished.prefill_seconds, finished.decode_seconds
        else:
            # The engine did not tell: what was seen from here, the way included.
            prefill = max(0.0, ttft - queue)
            decode = 0.0 if self._first_token_at is None else self._last_token_at - self._first_token_at
        return RequestTimings(
            queue_seconds=queue,
            prefill_seconds=prefill,
            decode_seconds=decode,
            time_to_first_token_seconds=ttft,
            e2e_seconds=now - self._arrival,
            num_preemptions=finished.num_preemptions if finished is not None else 0,
        )
