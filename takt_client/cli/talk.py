"""Generate and chat in the terminal: streams an answer and tells its time to first token and tokens a second."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from takt_client.cli.output import answers, note, print_answer, print_json
from takt_client.client import Client
from takt_client.errors import TaktClientError
from takt_client.types import Chunk, GenerateOptions, TokenLogprobs, Usage


@dataclass(frozen=True, slots=True)
class Summary:
    """How an answer went, by this process's clock. `tokens_per_second` counts the tokens after the first message."""

    text: str
    finish_reason: str | None
    usage: Usage | None
    time_to_first_token_seconds: float | None
    tokens_per_second: float | None
    seconds: float

    def line(self) -> str:
        """For people."""
        parts = []
        if self.usage is not None:
            parts.append(f"{self.usage.prompt_tokens} prompt tokens, {self.usage.completion_tokens} output tokens")
        if self.time_to_first_token_seconds is not None:
            parts.append(f"time to first token {self.time_to_first_token_seconds * 1000:.0f} ms")
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:.1f} tokens/s")
        parts.append(f"finished by {self.finish_reason}")
        return ", ".join(parts)


def stream_answer(stream: Iterable[Chunk], show: Callable[[Chunk], None]) -> Summary:
    """Shows each chunk of a request that was started just now as it comes, and sums up."""
    began = time.perf_counter()
    first: float | None = None
    first_count = count = 0
    last = began
    text: list[str] = []
    end: Chunk | None = None
    for chunk in stream:
        if chunk.token_ids:
            last = time.perf_counter()
            count += len(chunk.token_ids)
            if first is None:
                first, first_count = last, count
        if chunk.index == 0:
            text.append(chunk.text)
        show(chunk)
        end = chunk if chunk.finish_reason is not None else end
    rate = (count - first_count) / (last - first) if first is not None and last > first else None
    return Summary(
        text="".join(text),
        finish_reason=end.finish_reason if end else None,
        usage=end.usage if end else None,
        time_to_first_token_seconds=None if first is None else first - began,
        tokens_per_second=rate,
        seconds=time.perf_counter() - began,
    )


def show_answer(stream: Iterable[Chunk], *, as_json: bool) -> Summary:
    """Prints an answer while it comes, then its summary: a line for people, or JSON lines."""
    if as_json:
        summary = stream_answer(stream, print_json)
        print_json({"summary": dataclasses.asdict(summary)})
        return summary
    others: dict[int, str] = {}

    def show(chunk: Chunk) -> None:
        if chunk.index:
            others[chunk.index] = others.get(chunk.index, "") + chunk.text
            return
        if chunk.reasoning:
            note(chunk.reasoning, end="")
        print_answer(chunk.text)
        for position in chunk.logprobs:
            note(_logprob_line(position))

    summary = stream_answer(stream, show)
    print_answer("\n")
    for index, text in sorted(others.items()):
        note(f"output {index}:")
        print_answer(text + "\n")
    note(summary.line())
    return summary


def _logprob_line(position: TokenLogprobs) -> str:
    """A token, its log-probability and the likely ones."""
    entries = [position.token, *position.candidates] if position.token is not None else position.candidates
    return "  ".join(f"{entry.text!r} {entry.logprob:.3f}" for entry in entries)


def converse(client: Client, system: str, options: GenerateOptions, *, as_json: bool) -> None:
    """A conversation: reads lines until the end of input, /quit or an interrupt at the prompt.

    An interrupt during an answer aborts the answer only, and so does its failure in a terminal; /clear begins anew.
    """
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    if not as_json:
        note("Ctrl-C aborts an answer, /clear begins anew, /quit ends.")
    for line in _lines(as_json=as_json):
        if line == "/clear":
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": line})
        try:
            with client.chat(messages, **options) as stream:
                summary = show_answer(stream, as_json=as_json)
        except KeyboardInterrupt:
            note("\naborted")
            messages.pop()
            continue
        except TaktClientError as error:
            # People go on where they were; a program must see that its conversation has a hole.
            if as_json or not answers.is_terminal:
                raise
            note(f"takt: {error}", style="bold red")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": summary.text})


def _lines(*, as_json: bool) -> Iterator[str]:
    prompt = "" if as_json or not answers.is_terminal else "[bold cyan]>[/] "
    while True:
        try:
            line = answers.input(prompt).strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line == "/quit":
            return
        if line:
            yield line
