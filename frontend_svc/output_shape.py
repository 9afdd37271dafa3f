"""When an output is told, and how much of it: every so many tokens; what is new, all so far, or only the end.

Invariant: the last output of an index is always told, and nothing is told twice unless the client asked for it.
"""

from dataclasses import replace

from frontend_svc.request import OutputKind, PositionLogprobs, RequestOutput
from frontend_svc.text.chat_template import ToolCall
from frontend_svc.text.tool_calls import merge_tool_calls


class OutputShaper:
    """Shapes the deltas of one output."""

    def __init__(self, kind: int, interval: int) -> None:
        """`interval`: least tokens a message, behind the first one."""
        self._kind = kind
        self._interval = interval
        self._num_untold = 0
        self._has_told = False
        self._clear()

    def _clear(self) -> None:
        self._whole = RequestOutput()
        self._token_ids: list[int] = []
        self._logprobs: list[PositionLogprobs] = []
        self._tool_calls: list[ToolCall] = []

    def shape(self, delta: RequestOutput) -> RequestOutput | None:
        """What to tell now, if anything."""
        self._add(delta)
        self._num_untold += len(delta.token_ids)
        if delta.finish_reason is None:
            if self._kind == OutputKind.FINAL_ONLY:
                return None
            if self._has_told and self._num_untold < self._interval:
                return None
        self._has_told, self._num_untold = True, 0
        told = self._whole
        if self._kind in (OutputKind.CUMULATIVE, OutputKind.FINAL_ONLY):
            # The prompt is told once.
            self._whole = replace(told, prompt_token_ids=(), prompt_logprobs=())
            told.token_ids, told.logprobs = list(self._token_ids), list(self._logprobs)
            told.tool_calls = merge_tool_calls(self._tool_calls)
        else:
            told.token_ids, told.logprobs, told.tool_calls = self._token_ids, self._logprobs, self._tool_calls
            self._clear()
        return told

    def _add(self, delta: RequestOutput) -> None:
        """Appends a delta to what is there."""
        whole = self._whole
        whole.index = delta.index
        whole.text += delta.text
        whole.reasoning += delta.reasoning
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        self._tool_calls += delta.tool_calls
        whole.prompt_token_ids = whole.prompt_token_ids or delta.prompt_token_ids
        whole.prompt_logprobs = whole.prompt_logprobs or delta.prompt_logprobs
        whole.finish_reason, whole.stop_reason = delta.finish_reason, delta.stop_reason
        whole.usage, whole.timings = delta.usage, delta.timings
        whole.has_tool_calls = delta.has_tool_calls


def make_shaper(kind: int, interval: int) -> OutputShaper | None:
    """None where every delta is told as it is."""
    if kind in (0, OutputKind.DELTA) and interval == 1:
        return None
    return OutputShaper(kind, interval)
