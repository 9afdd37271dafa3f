"""A KV cache of fingerprints, which checks what the scheduler sends.

Each slot holds a 64-bit fingerprint of the sequence up to the token whose keys and values a model would have written
there. A query reads the slots of its whole sequence, so a wrong prefix hit, a stale block, or a block that was handed
out while in use shows up as the fingerprint of another sequence. Raises AssertionError at the first disagreement.
"""

import numpy as np
import numpy.typing as npt

from engine_svc.core.block_pool import NULL_BLOCK
from engine_svc.core.interfaces import KVCacheConfig
from engine_svc.core.scheduler_output import IntArray, SchedulerOutput
from engine_svc.executor.row_mirror import RowMirror, StepInputs

UInt64Array = npt.NDArray[np.uint64]


def mix64(values: UInt64Array) -> UInt64Array:
    """The finaliser of splitmix64: every bit of a value changes half of the result's bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class ShadowKVCache:
    """Fingerprints by group and slot, and by row and position what they have to be."""

    def __init__(self, config: KVCacheConfig, num_groups: int) -> None:
        self._block_size = config.block_size
        self._num_blocks = config.num_blocks
        # 0 stands for never written.
        self._written: UInt64Array = np.zeros((num_groups, config.num_blocks * config.block_size), np.uint64)
        self._expected: UInt64Array = np.zeros((config.max_num_seqs, config.max_model_len), np.uint64)
        self._weights = mix64(np.arange(1, config.max_model_len + 1, dtype=np.uint64)) | np.uint64(1)

    def check_delta(self, output: SchedulerOutput, mirror: RowMirror) -> None:
        """Checks rows that come and go, before the mirror takes them in."""
        removed = output.rows_removed.tolist()
        assert len(set(removed)) == len(removed), f"rows removed twice: {removed}"
        assert mirror.occupied[output.rows_removed].all(), f"a removed row is empty: {removed}"
        added = [row.row for row in output.rows_added]
        assert len(set(added)) == len(added), f"rows added twice: {added}"
        taken = mirror.occupied.copy()
        taken[output.rows_removed] = False
        assert not taken[np.array(added, np.int64)].any(), f"a row was added to an occupied row: {added}"
        for row in output.rows_added:
            assert 0 <= row.num_computed_tokens < len(row.token_ids), "an added row has nothing to compute"
            assert row.num_prompt_tokens <= len(row.token_ids), "an added row has less than its prompt"

    def add_rows(self, output: SchedulerOutput) -> None:
        """Computes what the slots of new rows have to hold."""
        for added in output.rows_added:
            fingerprints = np.cumsum(self._terms(added.token_ids, np.arange(len(added.token_ids))))
            self._expected[added.row, : len(fingerprints)] = fingerprints

    def append(self, rows: IntArray, positions: IntArray, token_ids: IntArray) -> None:
        """Continues the rows with sampled tokens."""
        self._expected[rows, positions] = self._expected[rows, positions - 1] + self._terms(token_ids, positions)

    def _terms(self, token_ids: IntArray, positions: npt.NDArray[np.integer]) -> UInt64Array:
        terms: UInt64Array = mix64(token_ids.astype(np.uint64) + np.uint64(1)) * self._weights[positions]
        return terms

    def run(self, output: SchedulerOutput, mirror: RowMirror, inputs: StepInputs) -> None:
        """Writes the step's tokens, then reads every sequence of the batch, as a layer of a model does."""
        self._check_batch(output, mirror)
        rows = output.rows[inputs.sequences]
        for group in range(len(self._written)):
            self._check_blocks(output, mirror.block_tables[group])
            slots = inputs.slot_mapping[group]
            self._check_slots(slots, inputs)
            self._written[group, slots] = self._expected[rows, inputs.positions]
        for group in range(len(self._written)):
            self._check_reads(output, mirror.block_tables[group], self._written[group])

    def _check_batch(self, output: SchedulerOutput, mirror: RowMirror) -> None:
        rows, ends = output.rows, output.num_computed_tokens + output.num_scheduled_tokens
        assert len(np.unique(rows)) == len(rows), f"a row is scheduled twice: {rows.tolist()}"
        assert mirror.occupied[rows].all(), f"an empty row is scheduled: {rows.tolist()}"
        assert (output.num_scheduled_tokens > 0).all(), "a scheduled row computes nothing"
        computed = mirror.num_computed_tokens[rows]
        assert (computed == output.num_computed_tokens).all(), (
            f"rows {rows.tolist()} start at {output.num_computed_tokens.tolist()}, computed is {computed.tolist()}"
        )
        assert (ends <= mirror.num_tokens[rows]).all(), "a token is computed before it is known"
        pooled = np.isin(rows, list(mirror.options.pooling))
        expected = (ends == mirror.num_tokens[rows]) & ~pooled
        assert (output.samples == expected).all(), "a row samples before its last token"

    def _check_blocks(self, output: SchedulerOutput, table: IntArray) -> None:
        ends = output.num_computed_tokens + output.num_scheduled_tokens
        needed = -(-ends // self._block_size)
        used = np.arange(table.shape[1]) < needed[:, np.newaxis]
        blocks = table[output.rows]
        assert (blocks[used] != NULL_BLOCK).all(), "a token has no block, or the null block"
        assert (blocks[used] < self._num_blocks).all(), "a block id is out of range"

    def _check_slots(self, slots: npt.NDArray[np.int64], inputs: StepInputs) -> None:
        assert len(np.unique(slots)) == len(slots), "two tokens are written to one slot"
        pairs = np.unique(np.stack([slots // self._block_size, inputs.sequences]), axis=1)
        assert len(np.unique(pairs[0])) == pairs.shape[1], "two rows write to one block"

    def _check_reads(self, output: SchedulerOutput, table: IntArray, written: UInt64Array) -> None:
        ends = output.num_computed_tokens + output.num_scheduled_tokens
        longest = int(ends.max(initial=0))
        positions = np.arange(longest)
        read = positions < ends[:, np.newaxis]
        slots = table[output.rows][:, positions // self._block_size].astype(np.int64) * self._block_size
        found = written[slots + positions % self._block_size]
        wrong = (found != self._expected[output.rows, :longest]) & read
        if wrong.any():
            sequence, position = (int(index) for index in np.argwhere(wrong)[0])
            row, what = int(output.rows[sequence]), "nothing" if not found[sequence, position] else "another sequence"
            raise AssertionError(f"step {output.step}: row {row} reads {what} at position {position}")
