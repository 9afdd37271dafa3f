"""Outputs of a conversation as OpenAI's chat completions, whole or streamed. Knows no connection."""

import time
from collections.abc import Iterable, Sequence

from frontend_svc.http.answers import (
    Json,
    UsageCount,
    by_index,
    finish_reason,
    finite,
    prompt_logprobs,
    stop_reason,
)
from frontend_svc.http.chat_request import ChatOptions
from frontend_svc.request import PositionLogprobs, RequestOutput, TokenCandidate
from frontend_svc.text.chat_template import ToolCall


class ChatAnswer:
    """One answer."""

    def __init__(self, options: ChatOptions, model: str) -> None:
        self._options = options
        kind = "chat.completion" if options.streaming is None else "chat.completion.chunk"
        self._head: Json = {"id": options.ids.answer, "object": kind, "created": int(time.time()), "model": model}
        self._usage = UsageCount(options.streaming)
        self._begun: set[int] = set()

    # --- whole --------------------------------------------------------------------------------------------------------

    def whole(self, outputs: Iterable[RequestOutput]) -> Json:
        """The answer of outputs that each are told once."""
        ordered = by_index(outputs)
        for output in ordered:
            self._usage.add(output)
        answer = {
            **self._head,
            "choices": [self._choice(output) for output in ordered],
            "usage": self._usage.total(),
            "system_fingerprint": None,
        }
        first = ordered[0]
        if first.prompt_logprobs:
            answer["prompt_logprobs"] = prompt_logprobs(first.prompt_logprobs)
        if self._options.returns_token_ids:
            answer["prompt_token_ids"] = list(first.prompt_token_ids)
        return answer

    def _choice(self, output: RequestOutput) -> Json:
        message: Json = {"role": "assistant", "content": output.text, "refusal": None}
        if output.reasoning and self._options.shows_reasoning:
            message["reasoning_content"] = message["reasoning"] = output.reasoning
        calls = self._calls(output)
        if calls:
            message["content"] = output.text or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        choice = {
            "index": output.index,
            "message": message,
            "logprobs": self._logprobs(output.logprobs),
            "finish_reason": self._finish_reason(output),
            "stop_reason": stop_reason(output),
        }
        if self._options.returns_token_ids:
            choice["token_ids"] = list(output.token_ids)
        return choice

    # --- streamed -----------------------------------------------------------------------------------------------------

    def events(self, output: RequestOutput) -> list[Json]:
        """Events of what is new; none when there is nothing to show."""
        self._usage.add(output)
        events = []
        if output.index not in self._begun:
            self._begun.add(output.index)
            first = {"index": output.index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            event = self._event(first)
            if self._options.returns_token_ids and output.prompt_token_ids:
                event["prompt_token_ids"] = list(output.prompt_token_ids)
            events.append(event)
        delta = self._delta(output)
        shows_tokens = self._options.returns_token_ids and output.token_ids
        if not delta and output.finish_reason is None and not output.logprobs and not shows_tokens:
            return events
        choice: Json = {"index": output.index, "delta": delta, "finish_reason": self._finish_reason(output)}
        if output.logprobs:
            choice["logprobs"] = self._logprobs(output.logprobs)
        if shows_tokens:
            choice["token_ids"] = list(output.token_ids)
        if output.finish_reason is not None:
            choice["stop_reason"] = stop_reason(output)
        return [*events, self._event(choice)]

    def _event(self, choice: Json) -> Json:
        return {**self._head, "choices": [choice], **self._usage.event_fields(choice["index"])}

    def _delta(self, output: RequestOutput) -> Json:
        delta: Json = {}
        if output.text:
            delta["content"] = output.text
        if output.reasoning and self._options.shows_reasoning:
            delta["reasoning_content"] = delta["reasoning"] = output.reasoning
        calls = self._calls(output)
        if calls:
            delta["tool_calls"] = [_call_delta(call) for call in calls]
        return delta

    def last_events(self) -> list[Json]:
        """What follows the outputs."""
        streaming = self._options.streaming
        if streaming is None or not streaming.include_usage:
            return []
        return [{**self._head, "choices": [], "usage": self._usage.total()}]

    # --- both ---------------------------------------------------------------------------------------------------------

    def _calls(self, output: RequestOutput) -> Sequence[ToolCall]:
        if self._options.parallel_tool_calls:
            return output.tool_calls
        return [call for call in output.tool_calls if call.index == 0]

    def _finish_reason(self, output: RequestOutput) -> str | None:
        # Arguments of a function that the client named are an ordinary end.
        return finish_reason(output, tool_calls=output.has_tool_calls and not self._options.names_a_tool)

    def _logprobs(self, positions: Sequence[PositionLogprobs]) -> Json | None:
        width = self._options.top_logprobs
        if width is None:
            return None
        content = []
        for position in positions:
            assert position.token is not None
            top = position.candidates if width < 0 else position.candidates[:width]
            content.append({**_token(position.token), "top_logprobs": [_token(candidate) for candidate in top]})
        return {"content": content, "refusal": None}


def _call_delta(call: ToolCall) -> Json:
    function: Json = {"arguments": call.arguments}
    if not call.name and not call.id:
        return {"index": call.index, "function": function}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _token(token: TokenCandidate) -> Json:
    return {"token": token.text, "logprob": finite(token.logprob), "bytes": list(token.bytes)}
