"""The mirror against a dictionary of rows under random deltas, and what it gathers for a step."""

import random

import numpy as np
import pytest

from engine_svc.core.interfaces import INVALID_TOKEN, KVCacheConfig
from engine_svc.core.scheduler_output import BlockTableCells, RowAdded, SchedulerOutput
from engine_svc.executor.row_mirror import RowMirror
from shared.types import SamplingParams

CONFIG = KVCacheConfig(block_size=4, num_blocks=64, max_num_seqs=6, max_model_len=40, max_num_batched_tokens=64)


def ids(values) -> np.ndarray:
    return np.array(list(values), np.int32)


def row_added(row: int, tokens: list[int], *, prompt: int | None = None, computed=0, groups=1, **sampling) -> RowAdded:
    stops = sampling.pop("stops", ())
    blocks = -(-len(tokens) // 4)
    return RowAdded(
        row=row,
        request_id="r",
        token_ids=ids(tokens),
        num_prompt_tokens=len(tokens) if prompt is None else prompt,
        num_computed_tokens=computed,
        sampling=SamplingParams(max_tokens=10, **sampling),
        all_stop_token_ids=stops,
        block_ids=tuple(ids(range(10 * group + 1, 10 * group + 1 + blocks)) for group in range(groups)),
    )


def output_of(rows=(), starts=(), counts=(), *, added=(), removed=(), cells=()) -> SchedulerOutput:
    columns = list(zip(*cells, strict=True)) if cells else [(), (), (), ()]
    return SchedulerOutput(
        step=1,
        rows_removed=ids(removed),
        rows_added=tuple(added),
        block_table_cells=BlockTableCells(
            groups=ids(columns[0]), rows=ids(columns[1]), columns=ids(columns[2]), block_ids=ids(columns[3])
        ),
        rows=ids(rows),
        num_computed_tokens=ids(starts),
        num_scheduled_tokens=ids(counts),
        samples=np.ones(len(rows), np.bool_),
    )


def test_gather_lays_sequences_one_after_the_other():
    mirror = RowMirror(CONFIG, num_groups=2)
    mirror.apply(output_of(added=[row_added(3, [5, 6, 7, 8, 9, 10], groups=2), row_added(1, [20, 21, 22], groups=2)]))
    inputs = mirror.gather(output_of([3, 1], [2, 0], [4, 3]))
    assert inputs.token_ids.tolist() == [7, 8, 9, 10, 20, 21, 22]
    assert inputs.positions.tolist() == [2, 3, 4, 5, 0, 1, 2]
    assert inputs.sequences.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert inputs.query_start.tolist() == [0, 4, 7]
    assert inputs.seq_lens.tolist() == [6, 3]
    assert inputs.slot_mapping.tolist() == [[6, 7, 8, 9, 4, 5, 6], [46, 47, 48, 49, 44, 45, 46]]
    assert inputs.slot_mapping.dtype == np.int64


def test_removed_before_added_before_cells():
    mirror = RowMirror(CONFIG)
    mirror.apply(output_of(added=[row_added(2, list(range(12)))]))
    mirror.apply(output_of(removed=[2], added=[row_added(2, [1, 2])], cells=[(0, 2, 1, 33)]))
    assert mirror.block_tables[0, 2].tolist() == [1, 33] + [0] * 8
    assert mirror.num_tokens[2] == 2
    mirror.apply(output_of(removed=[2]))
    assert not mirror.block_tables.any()
    assert not mirror.occupied.any()


def test_sampled_tokens_continue_the_row():
    mirror = RowMirror(CONFIG)
    mirror.apply(output_of(added=[row_added(0, [1, 2, 3]), row_added(1, [4, 5, 6], prompt=2)]))
    output = output_of([0, 1], [0, 0], [3, 3])
    mirror.advance(output)
    assert mirror.num_computed_tokens[:2].tolist() == [3, 3]
    assert mirror.num_output_tokens(ids([1, 0])).tolist() == [1, 0]
    mirror.append_sampled(ids([0, 1]), ids([77, INVALID_TOKEN]))
    assert mirror.gather(output_of([0, 1], [3, 3], [1, 1])).token_ids.tolist() == [77, 0]
    assert mirror.num_output_tokens(ids([1, 0])).tolist() == [2, 1]


def test_sampling_columns_and_masks():
    mirror = RowMirror(CONFIG)
    mirror.apply(
        output_of(
            added=[
                row_added(0, [1, 2], temperature=0.0, seed=2**64 - 1),
                row_added(4, [1, 2, 3], prompt=2, min_tokens=2, stops=(9, 8, 7), top_k=-1, top_p=0.5, min_p=0.1),
                row_added(5, [1, 2, 3], prompt=1, min_tokens=2, stops=(6,), temperature=0.5, top_k=3),
            ]
        )
    )
    batch = mirror.sampling_batch(ids([5, 0, 4]))
    assert batch.is_greedy.tolist() == [False, True, False]
    assert batch.temperature.tolist() == [0.5, 0.0, 1.0]
    assert batch.top_k.tolist() == [3, 0, 0]
    assert batch.top_p.tolist() == [1.0, 1.0, 0.5]
    assert batch.min_p.tolist() == [0.0, 0.0, 0.1]
    assert batch.seed.tolist() == [0, 2**64 - 1, 0]
    assert batch.output_index.tolist() == [2, 0, 1]
    # Row 5 has reached its min_tokens, row 4 has not.
    assert batch.masked_rows.tolist() == [2, 2, 2]
    assert batch.masked_token_ids.tolist() == [9, 8, 7]
    mirror.apply(output_of(removed=[4], added=[row_added(4, [1], min_tokens=1, stops=(3,))]))
    assert mirror.sampling_batch(ids([4])).masked_token_ids.tolist() == [3]


@pytest.mark.parametrize("groups", [1, 2])
def test_random_deltas_against_a_dictionary(groups):
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    mirror, model = RowMirror(CONFIG, groups), {}
    for _ in range(200):
        removed = [row for row in model if rng.random() < 0.2]
        for row in removed:
            del model[row]
        added = []
        for row in range(CONFIG.max_num_seqs):
            if row not in model and rng.random() < 0.5:
                tokens = [rng.randrange(100) for _ in range(rng.randrange(1, 20))]
                added.append(row_added(row, tokens, groups=groups))
                tables = [block_ids.tolist() for block_ids in added[-1].block_ids]
                model[row] = (list(tokens), tables)
        cells = []
        for row, (_, tables) in model.items():
            if rng.random() < 0.3 and len(tables[0]) < 10:
                for group, table in enumerate(tables):
                    cells.append((group, row, len(table), rng.randrange(1, 64)))
                    table.append(cells[-1][3])
        mirror.apply(output_of(removed=removed, added=added, cells=cells))
        sampling = [row for row, (tokens, _) in model.items() if len(tokens) < 40 and rng.random() < 0.5]
        new = [rng.randrange(100) for _ in sampling]
        mirror.append_sampled(ids(sampling), ids(new))
        for row, token in zip(sampling, new, strict=True):
            model[row][0].append(token)
        assert np.flatnonzero(mirror.occupied).tolist() == sorted(model)
        for row, (tokens, tables) in model.items():
            assert mirror.token_ids[row, : mirror.num_tokens[row]].tolist() == tokens
            for group, table in enumerate(tables):
                assert mirror.block_tables[group, row].tolist() == table + [0] * (10 - len(table))
