"""The worker's copy of the scheduler's rows: token ids, lengths, block tables and sampling, one column each.

It changes only by the deltas of SchedulerOutput and by the tokens that the runner samples itself, so that a row can be
scheduled again before its last token was seen by anybody else. Knows no tensors. Cells past a row's blocks are 0, as
is everything in the block table of a row that nobody holds.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine_svc.core.interfaces import KVCacheConfig
from engine_svc.core.scheduler_output import BlockTableCells, GrammarBitmask, IntArray, RowAdded, SchedulerOutput
from engine_svc.executor.row_options import RowOptions
from engine_svc.executor.sampling_batch import GrammarMask, SamplingBatch

NO_TOKEN = -1
_NO_PAIRS: npt.NDArray[np.int64] = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a step computes, sequence after sequence in the order of the batch."""

    # [num_tokens]: id, position in its sequence, and index of its sequence in the batch.
    token_ids: IntArray
    positions: IntArray
    sequences: IntArray
    # [num_groups, num_tokens] int64: block_id * block_size + offset.
    slot_mapping: npt.NDArray[np.int64]
    # [num_seqs + 1] and [num_seqs]: where new tokens start, and tokens including the new ones.
    query_start: IntArray
    seq_lens: IntArray


class RowMirror:
    """Columns [max_num_seqs], token ids [max_num_seqs, max_model_len], block tables [groups, max_num_seqs, blocks]."""

    def __init__(self, config: KVCacheConfig, num_groups: int = 1) -> None:
        rows = config.max_num_seqs
        self.block_size = config.block_size
        max_blocks = -(-config.max_model_len // config.block_size)
        # Pages are touched only where tokens are written.
        self.token_ids: IntArray = np.zeros((rows, config.max_model_len), np.int32)
        self.block_tables: IntArray = np.zeros((num_groups, rows, max_blocks), np.int32)
        self.occupied = np.zeros(rows, np.bool_)
        self.num_tokens: IntArray = np.zeros(rows, np.int32)
        self.num_prompt_tokens: IntArray = np.zeros(rows, np.int32)
        self.num_computed_tokens: IntArray = np.zeros(rows, np.int32)
        self.temperature = np.zeros(rows, np.float64)
        self.top_k: IntArray = np.zeros(rows, np.int32)
        self.top_p = np.ones(rows, np.float64)
        self.min_p = np.zeros(rows, np.float64)
        self.seed = np.zeros(rows, np.uint64)
        self.min_tokens: IntArray = np.zeros(rows, np.int32)
        self.is_greedy = np.zeros(rows, np.bool_)
        # Padded with NO_TOKEN; widened when a request brings more.
        self.stop_token_ids: IntArray = np.full((rows, 1), NO_TOKEN, np.int32)
        self.options = RowOptions()

    def apply(self, output: SchedulerOutput) -> None:
        """Takes in what changed, in the agreed order: rows removed, rows added, block table cells."""
        if len(output.rows_removed):
            self.occupied[output.rows_removed] = False
            self.block_tables[:, output.rows_removed] = 0
            self.options.remove(output.rows_removed)
        for added in output.rows_added:
            self._add(added)
        if len(output.block_table_cells.rows):
            self._write_cells(output.block_table_cells)

    def _add(self, added: RowAdded) -> None:
        row, sampling = added.row, added.sampling
        self.occupied[row] = True
        self.token_ids[row, : len(added.token_ids)] = added.token_ids
        self.num_tokens[row] = len(added.token_ids)
        self.num_prompt_tokens[row] = added.num_prompt_tokens
        self.num_computed_tokens[row] = added.num_computed_tokens
        for group, block_ids in enumerate(added.block_ids):
            self.block_tables[group, row, : len(block_ids)] = block_ids
        self.temperature[row] = sampling.temperature
        self.top_k[row] = max(0, sampling.top_k)
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.seed[row] = sampling.seed
        self.min_tokens[row] = sampling.min_tokens
        self.is_greedy[row] = sampling.is_greedy
        self._set_stops(row, added.all_stop_token_ids)
        self.options.add(added)

    def _set_stops(self, row: int, stops: tuple[int, ...]) -> None:
        width = self.stop_token_ids.shape[1]
        if len(stops) > width:
            missing = len(stops) - width
            self.stop_token_ids = np.pad(self.stop_token_ids, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        self.stop_token_ids[row] = NO_TOKEN
        self.stop_token_ids[row, : len(stops)] = stops

    def _write_cells(self, cells: BlockTableCells) -> None:
        self.block_tables[cells.groups, cells.rows, cells.columns] = cells.block_ids

    def gather(self, output: SchedulerOutput) -> StepInputs:
        """The tokens that a step computes, with their positions and slots."""
        starts, counts = output.num_computed_tokens, output.num_scheduled_tokens
        query_start: IntArray = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        sequences: IntArray = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        positions: IntArray = np.arange(len(sequences), dtype=np.int32) + np.repeat(starts - query_start[:-1], counts)
        rows = output.rows[sequences]
        columns, offsets = np.divmod(positions, self.block_size)
        blocks = self.block_tables[:, rows, columns].astype(np.int64)
        return StepInputs(
            token_ids=self.token_ids[rows, positions],
            positions=positions,
            sequences=sequences,
            slot_mapping=blocks * self.block_size + offsets,
            query_start=query_start,
            seq_lens=starts + counts,
        )

    def advance(self, output: SchedulerOutput) -> None:
        """Counts the step's tokens as computed."""
        self.num_computed_tokens[output.rows] = output.num_computed_tokens + output.num_scheduled_tokens

    def num_output_tokens(self, rows: IntArray) -> IntArray:
        """Output index of the token that each row samples next."""
        counts: IntArray = self.num_tokens[rows] - self.num_prompt_tokens[rows]
        return counts

    def append_sampled(self, rows: IntArray, token_ids: IntArray) -> None:
        """Appends the token that each row sampled. What stands in place of a token becomes id 0: its row is computed at
        most until the scheduler hears of it, and what it gives is thrown away.
        """
        self.token_ids[rows, self.num_tokens[rows]] = np.maximum(token_ids, 0)
        self.num_tokens[rows] += 1

    def sampling_batch(self, rows: IntArray, grammar: GrammarBitmask | None = None) -> SamplingBatch:
        """Parameters of the rows that sample now; those of `grammar` are among them."""
        output_index = self.num_output_tokens(rows)
        masked_rows, masked_token_ids = _NO_PAIRS, _NO_PAIRS
        is_below = output_index < self.min_tokens[rows]
        mask = None if grammar is None else grammar_mask(rows, grammar)
        if mask is not None:
            # The bitmask has seen to their end tokens, and allows them where the grammar allows nothing else.
            is_below[mask.rows] = False
        below = np.flatnonzero(is_below)
        if len(below):
            stops = self.stop_token_ids[rows[below]].astype(np.int64)
            index, column = np.nonzero(stops != NO_TOKEN)
            masked_rows, masked_token_ids = below[index], stops[index, column]
        return SamplingBatch(
            is_greedy=self.is_greedy[rows],
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            seed=self.seed[rows],
            output_index=output_index,
            masked_rows=masked_rows,
            masked_token_ids=masked_token_ids,
            options=self.options.logits_options(rows, self),
            grammar=mask,
        )


def grammar_mask(rows: IntArray, grammar: GrammarBitmask) -> GrammarMask:
    """A step's bitmask by row of the logits, whose order is that of `rows`."""
    index = np.flatnonzero(np.isin(rows, grammar.rows))
    order = np.argsort(grammar.rows)
    return GrammarMask(index, grammar.words[order[np.searchsorted(grammar.rows, rows[index], sorter=order)]])
