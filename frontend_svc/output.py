"""Builds the messages of one output: text, log-probabilities, the one end, usage, timings, and what metrics count.

Knows neither engines nor calls. Invariants: after an output with a finish reason nothing more is built; tokens and
their log-probabilities are as many, wherever a stop string cuts.
"""

from dataclasses import dataclass

from frontend_svc.collector import Taken
from frontend_svc.defaults import ResolvedRequest
from frontend_svc.logprobs import LogprobReader
from frontend_svc.metrics import EngineMetrics
from frontend_svc.request import PositionLogprobs, RequestOutput, RequestTimings, SamplingRequest, Usage
from frontend_svc.text.detokenizer import SpecialTokens
from frontend_svc.text.output_text import OutputText
from frontend_svc.text.tokenizer import Tokenizer
from shared.errors import InternalError
from shared.types import FinishedRequest, FinishReason, FirstScheduled


@dataclass(slots=True)
class RequestClock:
    """What the outputs of one request share. `arrival` is when the request came, in monotonic seconds."""

    arrival: float
    # The prompt is counted once, by the output that begins first.
    is_prompt_counted: bool = False


class OutputBuilder:
    """One output of a request. Times are monotonic seconds."""

    def __init__(self, tokenizer: Tokenizer, resolved: ResolvedRequest, clock: RequestClock) -> None:
        sampling = resolved.request.sampling
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        # Set when the text ended at a stop string that the engine does not know of.
        self.stop_string: str | None = None
        self._resolved = resolved
        self._clock = clock
        self._arrival = clock.arrival
        self._text = OutputText(
            tokenizer,
            stop=sampling.stop,
            include_stop_str=sampling.include_stop_str_in_output,
            min_tokens=resolved.sampling.min_tokens,
            prompt_token_ids=resolved.prompt_token_ids,
            special=_special_tokens(sampling),
        )
        self._detokenizes = sampling.detokenize
        # Tokens that end the output and leave no text; an engine may tell the end in a later message.
        self._hidden_token_ids = (
            frozenset[int]() if sampling.include_stop_str_in_output else resolved.stopping_token_ids
        )
        self._logprobs: LogprobReader | None = None
        if resolved.sampling.logprobs is not None:
            self._logprobs = LogprobReader(tokenizer, by_id=bool(resolved.sampling.logprob_token_ids))
        self._prompt_logprobs: LogprobReader | None = None
        if resolved.sampling.prompt_logprobs is not None:
            self._prompt_logprobs = LogprobReader(tokenizer)
        self._metrics: EngineMetrics | None = None
        self._first_token_at: float | None = None
        self._last_token_at = clock.arrival
        self._last_usage: Usage | None = None
        self._last_timings: RequestTimings | None = None
        self._shows_prompt = resolved.request.return_prompt_token_ids and resolved.index == 0

    @property
    def is_finished(self) -> bool:
        """Whether the last output has been built."""
        return self.finish_reason is not None

    def count_for(self, metrics: EngineMetrics) -> None:
        """The engine that computes the request, whose metrics count it."""
        self._metrics = metrics

    def add(
        self, taken: Taken, finished: FinishedRequest | None, first: FirstScheduled | None, now: float
    ) -> RequestOutput:
        """The output for new tokens and, perhaps, the engine's end. Tokens behind a stop string are dropped.

        Raises InternalError when the engine told other log-probabilities than those of the tokens.
        """
        token_ids = taken.token_ids
        output = RequestOutput(index=self._resolved.index)
        if self._detokenizes:
            hidden = token_ids and token_ids[-1] in self._hidden_token_ids
            delta = self._text.append(token_ids[:-1] if hidden else token_ids)
            output.text = delta.text
            if delta.stop_string is not None:
                self.stop_string = delta.stop_string
                token_ids = token_ids[: delta.num_tokens]
        output.token_ids = token_ids
        if self._logprobs is not None:
            output.logprobs = self._read_logprobs(self._logprobs, taken)[: len(token_ids)]
        if token_ids:
            self._count(len(token_ids), first, now)
        if self._prompt_logprobs is not None:
            output.prompt_logprobs = self._read_prompt_logprobs(self._prompt_logprobs, taken)
            self._prompt_logprobs = None
        if self._shows_prompt:
            output.prompt_token_ids = self._resolved.prompt_token_ids
            self._shows_prompt = False
        if self.stop_string is not None:
            self._end(output, FinishReason.STOP, finished, first, now)
            output.stop_reason = self.stop_string
        elif finished is not None:
            output.text += self._rest(stop_token=finished.reason is FinishReason.STOP)
            self._end(output, finished.reason, finished, first, now)
            output.stop_reason = finished.stop_token_id
        return output

    def _read_logprobs(self, reader: LogprobReader, taken: Taken) -> list[PositionLogprobs]:
        positions = reader.read(taken.logprobs)
        if len(positions) != len(taken.token_ids):
            message = f"the engine told log-probabilities of {len(positions)} tokens for {len(taken.token_ids)}"
            raise InternalError(message)
        return positions

    def _read_prompt_logprobs(self, reader: LogprobReader, taken: Taken) -> list[PositionLogprobs]:
        """Those of the whole prompt, whose first token nothing predicts; none when it was not computed to its end."""
        positions = reader.read(taken.prompt_logprobs)
        if len(positions) != len(self._resolved.prompt_token_ids) - 1:
            if taken.token_ids:
                raise InternalError(f"the engine told log-probabilities of {len(positions)} tokens of the prompt")
            return []
        return [PositionLogprobs(None), *positions]

    def _rest(self, *, stop_token: bool) -> str:
        return self._text.finish(stop_token=stop_token) if self._detokenizes else ""

    def end(self, reason: FinishReason, first: FirstScheduled | None, now: float) -> RequestOutput:
        """The last output of a request that an engine does not end: what was held back, and the totals."""
        output = RequestOutput(index=self._resolved.index)
        self.close(output, reason, first, now)
        return output

    def close(self, output: RequestOutput, reason: FinishReason, first: FirstScheduled | None, now: float) -> None:
        """Makes an output the last one, although no engine ends it."""
        output.text += self._rest(stop_token=False)
        self._end(output, reason, None, first, now)

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
            if self._metrics is not None and not self._clock.is_prompt_counted:
                self._clock.is_prompt_counted = True
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


def _special_tokens(sampling: SamplingRequest) -> SpecialTokens:
    if sampling.skip_special_tokens:
        return SpecialTokens.SKIPPED
    return SpecialTokens.SHOWN if sampling.spaces_between_special_tokens else SpecialTokens.JOINED
