"""What one step asks of the workers: an immutable delta.

The scheduler and the workers share nothing else. Each worker keeps a mirror of the rows (token ids, number of
computed tokens, block table, sampling) and applies, in this order: rows removed, rows added, block table cells,
then runs the scheduled tokens. Every field is an array, a string, a number or a tuple of them, so that the delta
serialises without pickle.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.types import PoolingParams, SamplingParams

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAdded:
    """A request takes a row: a new one, or one that resumes after preemption."""

    row: int
    request_id: str
    # Prompt, then the output known so far. Shape [num_tokens].
    token_ids: IntArray
    num_prompt_tokens: int
    # Tokens whose KV is in the blocks already (prefix hits).
    num_computed_tokens: int
    sampling: SamplingParams
    # Every token that ends the output: masked while fewer than min_tokens were generated.
    all_stop_token_ids: tuple[int, ...]
    # Blocks held now, one array of block ids for each KV cache group.
    block_ids: tuple[IntArray, ...]
    # Position of the first prompt token whose logits are still to be reported, where prompt_logprobs are asked for.
    prompt_logprobs_start: int = 0
    # The row gives a vector and samples nothing.
    pooling: PoolingParams | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTableCells:
    """Changed cells of the block tables: block_ids[i] is written at [groups[i], rows[i], columns[i]]."""

    groups: IntArray
    rows: IntArray
    columns: IntArray
    block_ids: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarBitmask:
    """Tokens that a step's constrained rows may sample; it follows the step while that is being computed.

    `rows` [n] are among the rows that sample. Bit t % 32 of `words` [n, ceil(vocab_size / 32)] at word t // 32 is set
    for each token t that may be sampled. End tokens below min_tokens are dealt with in the bits.
    """

    rows: IntArray
    words: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """One step. Arrays named `rows`, `num_computed_tokens`, `num_scheduled_tokens`, `samples` have one length."""

    # Steps since the engine started.
    step: int
    rows_removed: IntArray
    rows_added: tuple[RowAdded, ...]
    block_table_cells: BlockTableCells
    # Rows that compute this step, in the order of the batch.
    rows: IntArray
    # Position at which each row starts.
    num_computed_tokens: IntArray
    # Tokens each row computes, at least 1.
    num_scheduled_tokens: IntArray
    # Rows that reach the end of their tokens and so sample the next one.
    samples: npt.NDArray[np.bool_]

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens of the step; 0 when it only carries removals."""
        return int(self.num_scheduled_tokens.sum())
