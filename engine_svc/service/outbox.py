"""What one frontend has not taken yet: bounded, merged, complete.

While the frontend keeps up, a step's outputs pass through as they are. When it does not, they are merged by request, so
that what is held grows with the tokens and not with the steps, and no token is ever dropped. It knows neither gRPC nor
protobuf and belongs to the io thread's event loop. Invariant: a request's tokens leave in order, before its end and
after the log-probabilities of its prompt; log-probabilities leave in the same message as their tokens.
"""

import asyncio
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from shared.types import EngineLoad, FinishedRequest, FirstScheduled, StepOutputs, TokenLogprobs

# Largest encodings of a token id or count, of a column entry, and of entries of the side tables without their texts.
TOKEN_BYTES = 5
COLUMN_BYTES = 10
FIRST_SCHEDULED_BYTES = 24
FINISHED_BYTES = 64
EMBEDDING_VALUE_BYTES = 4
# Of tables of log-probabilities: a column's entries, a token's rank, and a candidate.
LOGPROBS_COLUMN_BYTES = 20
RANK_BYTES = 5
CANDIDATE_BYTES = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxLimits:
    """When a frontend is too slow: more bytes held than `max_bytes`, or nothing taken for `max_stall_seconds`.

    `max_message_bytes` is where a message of outputs is split.
    """

    max_bytes: int = 64 * 1024 * 1024
    max_stall_seconds: float = 30.0
    max_message_bytes: int = 1024 * 1024


class _MergedOutputs:
    """Outputs of several steps by request, in the order in which the requests first appeared."""

    def __init__(self) -> None:
        self._step = 0
        self._load: EngineLoad | None = None
        self._tokens: dict[int, array[int]] = {}
        self._logprobs: dict[int, list[TokenLogprobs]] = {}
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._first_scheduled: list[FirstScheduled] = []
        self._finished: list[FinishedRequest] = []

    def add(self, outputs: StepOutputs) -> int:
        """Adds what came after everything added so far; returns by how many bytes that made it larger, estimated."""
        known = len(self._tokens)
        self._step = outputs.step
        self._load = outputs.load or self._load
        start = 0
        for index, handle in enumerate(outputs.handles):
            end = start + (1 if outputs.num_tokens is None else outputs.num_tokens[index])
            self._tokens.setdefault(handle, array("I")).extend(outputs.token_ids[start:end])
            start = end
        for logprobs in outputs.logprobs:
            self._logprobs.setdefault(logprobs.handle, []).append(logprobs)
        self._prompt_logprobs += outputs.prompt_logprobs
        self._first_scheduled += outputs.first_scheduled
        self._finished += outputs.finished
        # A column that is there already costs nothing more.
        return estimate_bytes(outputs) - COLUMN_BYTES * (len(outputs.handles) - len(self._tokens) + known)

    def flatten(self) -> StepOutputs:
        """Everything as one step's outputs."""
        return StepOutputs(
            step=self._step,
            handles=list(self._tokens),
            num_tokens=[len(tokens) for tokens in self._tokens.values()],
            token_ids=[token for tokens in self._tokens.values() for token in tokens],
            first_scheduled=self._first_scheduled,
            finished=self._finished,
            load=self._load,
            logprobs=[_joined(parts) for parts in self._logprobs.values()],
            prompt_logprobs=self._prompt_logprobs,
        )


def _joined(parts: list[TokenLogprobs]) -> TokenLogprobs:
    """Those of one request's consecutive tokens as one."""
    if len(parts) == 1:
        return parts[0]
    return TokenLogprobs(
        parts[0].handle,
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.ranks for part in parts]),
    )


def _share(logprobs: TokenLogprobs, begin: int, end: int) -> TokenLogprobs:
    """Those of the tokens [begin, end)."""
    return TokenLogprobs(
        logprobs.handle, logprobs.token_ids[begin:end], logprobs.logprobs[begin:end], logprobs.ranks[begin:end]
    )


class Outbox:
    """The messages for one frontend. One writer takes, everyone else puts."""

    def __init__(
        self, limits: OutboxLimits, encode: Callable[[StepOutputs], bytes], clock: Callable[[], float]
    ) -> None:
        self._limits = limits
        self._encode = encode
        self._clock = clock
        self._single: StepOutputs | None = None
        self._merged: _MergedOutputs | None = None
        self._frames: list[bytes] = []
        self._heartbeat: bytes | None = None
        self._last: bytes | None = None
        self._closed = False
        self._filled = asyncio.Event()
        self._writing = False
        self._progress_at = clock()
        self._waiting_bytes = 0
        self._taken_bytes = 0
        self.num_tokens = 0
        self.num_merged = 0

    @property
    def num_bytes(self) -> int:
        """Estimated bytes that wait, and bytes that were taken and not written yet."""
        return self._waiting_bytes + self._taken_bytes

    def put_outputs(self, outputs: StepOutputs) -> None:
        """Adds a step's outputs."""
        if self._closed:
            return
        self.num_tokens += len(outputs.token_ids)
        if self._single is None and self._merged is None:
            self._single = outputs
            self._waiting_bytes += estimate_bytes(outputs)
        else:
            self._waiting_bytes += self._merge().add(outputs)
            self.num_merged += 1
        self._fill()

    def _merge(self) -> _MergedOutputs:
        if self._merged is None:
            self._merged = _MergedOutputs()
            if self._single is not None:
                self._merged.add(self._single)
                self._single = None
        return self._merged

    def put_frame(self, frame: bytes) -> None:
        """Adds a message of its own, in the order of such messages."""
        if self._closed:
            return
        self._waiting_bytes += len(frame)
        self._frames.append(frame)
        self._fill()

    def put_heartbeat(self, frame: bytes) -> None:
        """Adds a sign of life in the place of one that was not taken."""
        if not self._closed:
            self._heartbeat = frame
            self._fill()

    def close(self, last: bytes | None = None) -> None:
        """Takes nothing more; the writer ends after what is held and the `last` message."""
        if not self._closed:
            self._closed = True
            self._last = last
            self._fill()

    def drop(self) -> None:
        """Forgets everything: nobody will take it."""
        self._closed = True
        self._single = self._merged = self._heartbeat = self._last = None
        self._frames = []
        self._waiting_bytes = self.num_tokens = 0
        self._filled.set()

    def _fill(self) -> None:
        if not self._writing and not self._filled.is_set():
            self._progress_at = self._clock()
        self._filled.set()

    async def take(self) -> list[bytes]:
        """Waits for messages and returns them encoded; an empty list when there will be none."""
        self._writing = False
        await self._filled.wait()
        self._filled.clear()
        self._writing = True
        outputs = self._merged.flatten() if self._merged is not None else self._single
        frames = [] if outputs is None else [self._encode(p) for p in split(outputs, self._limits.max_message_bytes)]
        frames += self._frames
        frames += [frame for frame in (self._heartbeat, self._last) if frame is not None]
        self._single = self._merged = self._heartbeat = self._last = None
        self._frames = []
        self._waiting_bytes = self.num_tokens = 0
        self._taken_bytes = sum(map(len, frames))
        if self._closed:
            self._filled.set()
        return frames

    def progressed(self, frame: bytes) -> None:
        """A taken message was written."""
        self._taken_bytes -= len(frame)
        self._progress_at = self._clock()

    def overdue(self) -> str:
        """Why the frontend is too slow; empty when it is not."""
        if self.num_bytes > self._limits.max_bytes:
            return f"{self.num_bytes} bytes of outputs were not read, the limit is {self._limits.max_bytes}"
        stalled = self._clock() - self._progress_at
        if (self._writing or self._filled.is_set()) and stalled > self._limits.max_stall_seconds:
            return f"nothing was read for {stalled:.0f} s, the limit is {self._limits.max_stall_seconds:.0f} s"
        return ""


def estimate_bytes(outputs: StepOutputs) -> int:
    """An upper estimate of the encoded size."""
    size = TOKEN_BYTES * len(outputs.token_ids) + COLUMN_BYTES * len(outputs.handles)
    size += FIRST_SCHEDULED_BYTES * len(outputs.first_scheduled)
    if outputs.logprobs or outputs.prompt_logprobs:
        size += sum(map(_logprobs_bytes, outputs.logprobs)) + sum(map(_logprobs_bytes, outputs.prompt_logprobs))
    return size + sum(_finished_bytes(finished) for finished in outputs.finished)


def _logprobs_bytes(logprobs: TokenLogprobs) -> int:
    return LOGPROBS_COLUMN_BYTES + len(logprobs) * _bytes_per_token(logprobs)


def _bytes_per_token(logprobs: TokenLogprobs) -> int:
    width: int = logprobs.token_ids.shape[1]
    return RANK_BYTES + CANDIDATE_BYTES * width


def _finished_bytes(finished: FinishedRequest) -> int:
    size = FINISHED_BYTES + EMBEDDING_VALUE_BYTES * len(finished.embedding)
    error = finished.error
    return size if error is None else size + 4 * (len(error.reason) + len(error.message) + len(error.field))


def split(outputs: StepOutputs, max_bytes: int) -> Iterator[StepOutputs]:
    """The same outputs in messages that each stay below `max_bytes`, as far as single entries allow."""
    if estimate_bytes(outputs) <= max_bytes:
        yield outputs
        return
    part, size = _Part(outputs), 0
    for entry in _entries(outputs, max_bytes // 2):
        entry_size = _entry_bytes(entry)
        if size and (size + entry_size > max_bytes or part.is_continued_by(entry)):
            yield part.outputs
            part, size = _Part(outputs), 0
        part.add(entry)
        size += entry_size
    yield part.outputs


@dataclass(frozen=True, slots=True)
class _Column:
    handle: int
    token_ids: list[int]
    logprobs: TokenLogprobs | None


# Log-probabilities that are an entry of their own are those of a prompt.
_Entry = FirstScheduled | TokenLogprobs | _Column | FinishedRequest


class _Part:
    """One message under construction."""

    def __init__(self, whole: StepOutputs) -> None:
        self._num_tokens: list[int] = []
        self.outputs = StepOutputs(step=whole.step, num_tokens=self._num_tokens, load=whole.load)

    def is_continued_by(self, entry: _Entry) -> bool:
        """Whether it holds an earlier column of the entry's request: one with log-probabilities is alone there."""
        handles = self.outputs.handles
        return isinstance(entry, _Column) and entry.logprobs is not None and handles[-1:] == [entry.handle]

    def add(self, entry: _Entry) -> None:
        if isinstance(entry, FirstScheduled):
            self.outputs.first_scheduled.append(entry)
        elif isinstance(entry, FinishedRequest):
            self.outputs.finished.append(entry)
        elif isinstance(entry, TokenLogprobs):
            self.outputs.prompt_logprobs.append(entry)
        else:
            self.outputs.handles.append(entry.handle)
            self._num_tokens.append(len(entry.token_ids))
            self.outputs.token_ids += entry.token_ids
            if entry.logprobs is not None:
                self.outputs.logprobs.append(entry.logprobs)


def _entry_bytes(entry: _Entry) -> int:
    if isinstance(entry, FirstScheduled):
        return FIRST_SCHEDULED_BYTES
    if isinstance(entry, FinishedRequest):
        return _finished_bytes(entry)
    if isinstance(entry, TokenLogprobs):
        return _logprobs_bytes(entry)
    size = COLUMN_BYTES + TOKEN_BYTES * len(entry.token_ids)
    return size if entry.logprobs is None else size + _logprobs_bytes(entry.logprobs)


def _entries(outputs: StepOutputs, max_column_bytes: int) -> Iterator[_Entry]:
    """First schedules, then prompts, then tokens, then ends: the order in which a request's must be sent."""
    yield from outputs.first_scheduled
    for prompt in outputs.prompt_logprobs:
        most = max(1, max_column_bytes // _bytes_per_token(prompt))
        for begin in range(0, len(prompt), most):
            yield _share(prompt, begin, begin + most)
    by_handle = {logprobs.handle: logprobs for logprobs in outputs.logprobs}
    start = 0
    for index, handle in enumerate(outputs.handles):
        end = start + (1 if outputs.num_tokens is None else outputs.num_tokens[index])
        logprobs = by_handle.get(handle)
        most = max(1, max_column_bytes // (TOKEN_BYTES + (0 if logprobs is None else _bytes_per_token(logprobs))))
        for begin in range(start, end, most):
            stop = min(end, begin + most)
            share = None if logprobs is None else _share(logprobs, begin - start, stop - start)
            yield _Column(handle, outputs.token_ids[begin:stop], share)
        start = end
    yield from outputs.finished
