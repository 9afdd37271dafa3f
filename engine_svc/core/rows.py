"""Numbers of running requests in arrays by row, so that a step is vector operations over rows.

A running request has one row from admission until it ends or is preempted. This table is the only owner of the
numbers of a running request. For every occupied row:
0 <= num_computed_tokens <= num_tokens + num_placeholders <= max_total_tokens.
`num_placeholders` counts tokens that are being sampled by steps in flight. `generations[row]` grows whenever the row
is released, which is how a step's result recognises that its row belongs to somebody else by now.
"""

import numpy as np
import numpy.typing as npt

from engine_svc.core.interfaces import GrammarMatcher
from engine_svc.core.request import NO_ROW, Request
from engine_svc.core.scheduler_output import IntArray
from shared.types import RepetitionDetection


class RowTable:
    """Arrays of shape [max_num_seqs], and token ids of shape [max_num_seqs, max_model_len]."""

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.requests: list[Request | None] = [None] * max_num_seqs
        # Pages are touched only where tokens are written.
        self.token_ids: IntArray = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.num_tokens = self._integers()
        self.num_prompt_tokens = self._integers()
        self.num_computed_tokens = self._integers()
        self.num_placeholders = self._integers()
        self.max_total_tokens = self._integers()
        self.clients = self._integers()
        self.handles: npt.NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self.generations: npt.NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self.last_token_at: npt.NDArray[np.float64] = np.zeros(max_num_seqs, np.float64)
        self.eos_token_ids = self._integers()
        # Padded with -1; widened when a request brings more.
        self.stop_token_ids: IntArray = np.full((max_num_seqs, 1), -1, np.int32)
        # Options that few rows have, for those rows alone: who watches for repetition, who gives a vector, and who
        # reports log-probabilities of its prompt.
        self.repetition: dict[int, RepetitionDetection] = {}
        self.pooling: set[int] = set()
        self.prompt_logprobs: set[int] = set()
        # Where the outputs of constrained rows stand in their grammars.
        self.grammars: dict[int, GrammarMatcher] = {}
        # Admission order, which is also the order of the batch.
        self._running: list[int] = []
        self._running_array: IntArray | None = None
        self._free = list(range(max_num_seqs - 1, -1, -1))

    def _integers(self) -> IntArray:
        return np.zeros(self.max_num_seqs, np.int32)

    @property
    def num_running(self) -> int:
        """Occupied rows."""
        return len(self._running)

    @property
    def num_free(self) -> int:
        """Rows that a request can take."""
        return len(self._free)

    @property
    def running(self) -> IntArray:
        """Occupied rows in admission order."""
        if self._running_array is None:
            self._running_array = np.array(self._running, np.int32)
        return self._running_array

    def request(self, row: int) -> Request:
        """The request of an occupied row."""
        request = self.requests[row]
        assert request is not None
        return request

    def occupy(self, request: Request, num_computed_tokens: int) -> int:
        """Gives the request a row and copies its numbers there."""
        row = self._free.pop()
        tokens = request.token_ids
        self.requests[row] = request
        request.row = row
        self.token_ids[row, : len(tokens)] = tokens
        self.num_tokens[row] = len(tokens)
        self.num_prompt_tokens[row] = len(request.prompt_token_ids)
        self.num_computed_tokens[row] = num_computed_tokens
        self.num_placeholders[row] = 0
        self.max_total_tokens[row] = request.max_total_tokens
        self.clients[row], self.handles[row] = request.key
        self.last_token_at[row] = request.last_token_at or 0.0
        self.eos_token_ids[row] = request.eos_token_id
        self._set_stops(row, request.stop_token_ids)
        self._set_options(row, request)
        self._running.append(row)
        self._running_array = None
        return row

    def _set_stops(self, row: int, stops: tuple[int, ...]) -> None:
        width = self.stop_token_ids.shape[1]
        if len(stops) > width:
            self.stop_token_ids = np.pad(self.stop_token_ids, ((0, 0), (0, len(stops) - width)), constant_values=-1)
        self.stop_token_ids[row] = -1
        self.stop_token_ids[row, : len(stops)] = stops

    def _set_options(self, row: int, request: Request) -> None:
        sampling = request.sampling
        if request.pooling is not None:
            self.pooling.add(row)
            return
        if request.grammar is not None:
            self.grammars[row] = request.grammar
        if sampling.repetition_detection is not None:
            self.repetition[row] = sampling.repetition_detection
        if request.awaits_prompt_logprobs:
            self.prompt_logprobs.add(row)

    def release(self, request: Request) -> int:
        """Takes the row back and copies what changed to the request; returns the row."""
        row = request.row
        request.output_token_ids = self.token_ids[row, self.num_prompt_tokens[row] : self.num_tokens[row]].copy()
        request.last_token_at = float(self.last_token_at[row]) or None
        request.row = NO_ROW
        self.requests[row] = None
        self.repetition.pop(row, None)
        self.pooling.discard(row)
        self.grammars.pop(row, None)
        self.prompt_logprobs.discard(row)
        self.generations[row] += 1
        self._running.remove(row)
        self._running_array = None
        self._free.append(row)
        return row

    def append_tokens(self, rows: IntArray, token_ids: IntArray, now: float) -> None:
        """Turns one placeholder of each row into a token."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1
        self.num_placeholders[rows] -= 1
        self.last_token_at[rows] = now

    def check_invariants(self) -> None:
        """Raises AssertionError unless rows, requests and numbers agree."""
        occupied = {row for row, request in enumerate(self.requests) if request is not None}
        assert occupied == set(self._running), "running rows do not match the requests"
        assert sorted([*self._running, *self._free]) == list(range(self.max_num_seqs)), "rows lost or doubled"
        rows = self.running
        total = self.num_tokens[rows] + self.num_placeholders[rows]
        assert (self.num_placeholders[rows] >= 0).all(), "negative placeholders"
        assert (self.num_computed_tokens[rows] <= total).all(), "computed past the known tokens"
        assert (total <= self.max_total_tokens[rows]).all(), "more tokens than asked for"
        for row in self._running:
            assert self.request(row).row == row, "a request is not in its row"
