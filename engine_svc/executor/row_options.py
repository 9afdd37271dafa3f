"""Options that few rows have, kept for those rows alone: processing of logits, log-probabilities, pooling. No torch.

Part of the row mirror and changed only by it. A row without options is in none of the tables here, so that a step
whose rows have none pays one comparison. What depends on a row's tokens is brought up to date when it samples.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from engine_svc.core.scheduler_output import IntArray, RowAdded
from engine_svc.executor.penalties import BadWords, FloatArray, IndexArray, TokenCounts
from shared.types import PoolingParams, SamplingParams

T = TypeVar("T")

# Repetition penalties are cut to this and its reciprocal: beyond, logits would leave float32.
_LARGEST_PENALTY = 1e30


class TokenColumns(Protocol):
    """The row mirror's columns that options depend on."""

    token_ids: IntArray
    num_tokens: IntArray
    num_prompt_tokens: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsOptions:
    """What changes the logits of the rows that sample, as flat lists of cells (row of the logits, token id)."""

    # [num_rows]: rows of the logits in which only the allowed cells stay.
    allowed_rows: IndexArray
    allowed_cells: tuple[IndexArray, IndexArray]
    # Cells that may not be sampled.
    masked_cells: tuple[IndexArray, IndexArray]
    # Added to their cells.
    bias_cells: tuple[IndexArray, IndexArray]
    bias_values: FloatArray
    # Distinct tokens of rows with penalties; the columns are how often each was generated, and the row's penalties.
    penalty_cells: tuple[IndexArray, IndexArray]
    counts: FloatArray
    repetition: FloatArray
    frequency: FloatArray
    presence: FloatArray


@dataclass(frozen=True, slots=True)
class LogprobsWanted:
    """What one sampling row reports: `index` is its row of the logits.

    `token_ids` are reported when given, else the `count` most likely tokens, -1 for the whole vocabulary.
    """

    index: int
    count: int
    token_ids: IndexArray | None


@dataclass(slots=True)
class PromptLogprobs:
    """Reports `count` most likely tokens with each prompt token; the logits of position `next` come next."""

    count: int
    next: int


@dataclass(slots=True)
class Pooling:
    """A row that gives a vector. `total` adds up what was computed so far, for the mean."""

    params: PoolingParams
    total: npt.NDArray[np.float64] | None = None


@dataclass(frozen=True, slots=True)
class _Penalties:
    repetition: float
    frequency: float
    presence: float
    counts: TokenCounts


@dataclass(frozen=True, slots=True)
class _Bias:
    token_ids: IndexArray
    values: FloatArray


def _has_penalties(sampling: SamplingParams) -> bool:
    return bool(
        sampling.repetition_penalty != 1.0 or sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0
    )


class RowOptions:
    """Tables by row."""

    def __init__(self) -> None:
        self._penalties: dict[int, _Penalties] = {}
        self._bad_words: dict[int, BadWords] = {}
        self._bias: dict[int, _Bias] = {}
        self._allowed: dict[int, IndexArray] = {}
        self._logprobs: dict[int, tuple[int, IndexArray | None]] = {}
        self.prompt_logprobs: dict[int, PromptLogprobs] = {}
        self.pooling: dict[int, Pooling] = {}
        self._changing_logits: tuple[dict[int, Any], ...] = (
            self._penalties,
            self._bad_words,
            self._bias,
            self._allowed,
        )
        self._tables: tuple[dict[int, Any], ...] = (
            *self._changing_logits,
            self._logprobs,
            self.prompt_logprobs,
            self.pooling,
        )

    @property
    def reads_prompts(self) -> bool:
        """Whether any row needs more of the forward pass than the logits of its last token."""
        return bool(self.prompt_logprobs or self.pooling)

    def remove(self, rows: IntArray) -> None:
        """Forgets rows that are given back."""
        for table in self._tables:
            if table:
                for row in rows.tolist():
                    table.pop(row, None)

    def add(self, added: RowAdded) -> None:
        """Takes in the options of a new row, if it has any."""
        row, sampling = added.row, added.sampling
        if added.pooling is not None:
            self.pooling[row] = Pooling(added.pooling)
            return
        if _has_penalties(sampling):
            self._penalties[row] = _penalties(added)
        if sampling.bad_words:
            self._bad_words[row] = BadWords(sampling.bad_words)
        if sampling.logit_bias:
            biases = dict(sampling.logit_bias)
            self._bias[row] = _Bias(_ids(biases), np.fromiter(biases.values(), np.float32, len(biases)))
        if sampling.allowed_token_ids:
            self._allowed[row] = _ids(sampling.allowed_token_ids)
        if sampling.logprob_token_ids:
            self._logprobs[row] = (len(sampling.logprob_token_ids), _ids(sampling.logprob_token_ids))
        elif sampling.logprobs is not None:
            self._logprobs[row] = (sampling.logprobs, None)
        if sampling.prompt_logprobs is not None and added.prompt_logprobs_start < added.num_prompt_tokens - 1:
            self.prompt_logprobs[row] = PromptLogprobs(sampling.prompt_logprobs, added.prompt_logprobs_start)

    # --- for a step -----------------------------------------------------------------------------------------------

    def logprobs_wanted(self, rows: IntArray) -> list[LogprobsWanted]:
        """What each of the sampling rows reports, for those that do."""
        if not self._logprobs:
            return []
        return [LogprobsWanted(index, *wanted) for index, _, wanted in _among(rows, self._logprobs)]

    def logits_options(self, rows: IntArray, columns: TokenColumns) -> LogitsOptions | None:
        """What changes the logits of the sampling rows; None when nothing does."""
        if not any(self._changing_logits):
            return None
        allowed = [(index, ids) for index, _, ids in _among(rows, self._allowed)]
        masked = [
            (index, words.completing_tokens(_tail(columns, row, words.longest_prefix)))
            for index, row, words in _among(rows, self._bad_words)
        ]
        bias = [(index, bias) for index, _, bias in _among(rows, self._bias)]
        penalties = [(index, row, penalties) for index, row, penalties in _among(rows, self._penalties)]
        for _, row, penalty in penalties:
            _catch_up(penalty.counts, columns, row)
        lengths = np.array([len(penalty.counts.token_ids) for _, _, penalty in penalties], np.int64)
        return LogitsOptions(
            allowed_rows=np.array([index for index, _ in allowed], np.int64),
            allowed_cells=_cells(allowed),
            masked_cells=_cells(masked),
            bias_cells=_cells([(index, one.token_ids) for index, one in bias]),
            bias_values=_joined([one.values for _, one in bias], np.float32),
            penalty_cells=_cells([(index, one.counts.token_ids) for index, _, one in penalties]),
            counts=_joined([one.counts.counts for _, _, one in penalties], np.float32),
            repetition=_repeated([one.repetition for _, _, one in penalties], lengths),
            frequency=_repeated([one.frequency for _, _, one in penalties], lengths),
            presence=_repeated([one.presence for _, _, one in penalties], lengths),
        )


def _ids(token_ids: Iterable[int]) -> IndexArray:
    return np.array(list(token_ids), np.int64)


def _penalties(added: RowAdded) -> _Penalties:
    sampling, prompt = added.sampling, added.token_ids[: added.num_prompt_tokens]
    # Only the repetition penalty looks at the prompt.
    counts = TokenCounts(prompt if sampling.repetition_penalty != 1.0 else prompt[:0], added.token_ids[len(prompt) :])
    repetition = min(max(sampling.repetition_penalty, 1 / _LARGEST_PENALTY), _LARGEST_PENALTY)
    return _Penalties(repetition, sampling.frequency_penalty, sampling.presence_penalty, counts)


def _among(rows: IntArray, table: Mapping[int, T]) -> Iterator[tuple[int, int, T]]:
    """(Index in `rows`, row, value) of the rows that are in the table, in the order of `rows`."""
    if table:
        for index, row in enumerate(rows.tolist()):
            value = table.get(row)
            if value is not None:
                yield index, row, value


def _tail(columns: TokenColumns, row: int, length: int) -> IntArray:
    """At most the last `length` tokens of a row's output."""
    end = int(columns.num_tokens[row])
    return columns.token_ids[row, max(int(columns.num_prompt_tokens[row]), end - length) : end]


def _catch_up(counts: TokenCounts, columns: TokenColumns, row: int) -> None:
    start = int(columns.num_prompt_tokens[row]) + counts.num_output_tokens
    counts.extend(columns.token_ids[row, start : columns.num_tokens[row]].tolist())


def _cells(parts: Sequence[tuple[int, IndexArray]]) -> tuple[IndexArray, IndexArray]:
    rows = _repeated([index for index, _ in parts], np.array([len(ids) for _, ids in parts], np.int64), np.int64)
    return rows, _joined([ids for _, ids in parts], np.int64)


def _joined(parts: list[Any], dtype: Any) -> Any:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def _repeated(values: list[Any], lengths: IndexArray, dtype: Any = np.float32) -> Any:
    return np.repeat(np.array(values, dtype), lengths)
