"""Steps that belong to no request, for warming up and for measuring memory."""

import numpy as np

from engine_svc.core.interfaces import KVCacheConfig
from engine_svc.core.scheduler_output import BlockTableCells, IntArray, RowAdded, SchedulerOutput
from shared.types import SamplingParams


def _ids(*values: int) -> IntArray:
    return np.array(values, np.int32)


def dummy_step(config: KVCacheConfig, num_seqs: int, tokens_each: int, sampling: SamplingParams) -> SchedulerOutput:
    """A first step of `num_seqs` new rows that compute `tokens_each` tokens each and sample.

    Both numbers are lowered to what the configuration has blocks and room for.
    """
    tokens_each = max(1, min(tokens_each, config.max_model_len - 1, (config.num_blocks - 1) * config.block_size))
    blocks_each = -(-tokens_each // config.block_size)
    num_seqs = max(1, min(num_seqs, config.max_num_seqs, (config.num_blocks - 1) // blocks_each))
    rows = np.arange(num_seqs, dtype=np.int32)
    added = [
        RowAdded(
            row=row,
            request_id="",
            token_ids=np.zeros(tokens_each, np.int32),
            num_prompt_tokens=tokens_each,
            num_computed_tokens=0,
            sampling=sampling,
            all_stop_token_ids=(),
            block_ids=(np.arange(1 + row * blocks_each, 1 + (row + 1) * blocks_each, dtype=np.int32),),
        )
        for row in range(num_seqs)
    ]
    return SchedulerOutput(
        step=0,
        rows_removed=_ids(),
        rows_added=tuple(added),
        block_table_cells=BlockTableCells(groups=_ids(), rows=_ids(), columns=_ids(), block_ids=_ids()),
        rows=rows,
        num_computed_tokens=np.zeros(num_seqs, np.int32),
        num_scheduled_tokens=np.full(num_seqs, tokens_each, np.int32),
        samples=np.ones(num_seqs, np.bool_),
    )
