"""Finds the requests that end with the token just appended, for all rows at once.

The order of the checks is part of the contract: the primary end token (no stop reason), then stop token ids (the id is
the reason), then a grammar that allows nothing more to a request that has no end tokens, then length, then repetition.
So an end token that is also the last allowed token ends with stop. For stop tokens min_tokens needs no check here: they
are masked in sampling until it is reached.
"""

from collections.abc import Iterator

import numpy as np

from engine_svc.core.request import RequestStatus
from engine_svc.core.rows import RowTable
from engine_svc.core.scheduler_output import IntArray
from engine_svc.core.structured_output import is_complete
from shared.types import RepetitionDetection


def find_stops(table: RowTable, rows: IntArray, token_ids: IntArray) -> Iterator[tuple[int, RequestStatus, int | None]]:
    """Yields (row, final status, stop token id) of each row that ends."""
    at_eos = token_ids == table.eos_token_ids[rows]
    at_stop = (token_ids[:, np.newaxis] == table.stop_token_ids[rows]).any(axis=1)
    at_length = table.num_tokens[rows] >= table.max_total_tokens[rows]
    ended = at_eos | at_stop | at_length
    if table.grammars:
        at_eos |= np.array([is_complete(table, row) for row in rows.tolist()], np.bool_)
        ended |= at_eos
    for index in np.flatnonzero(ended).tolist():
        row = int(rows[index])
        if at_eos[index]:
            yield row, RequestStatus.FINISHED_STOPPED, None
        elif at_stop[index]:
            yield row, RequestStatus.FINISHED_STOPPED, int(token_ids[index])
        else:
            yield row, RequestStatus.FINISHED_LENGTH_CAPPED, None
    if table.repetition:
        for row in rows[~ended].tolist():
            detection = table.repetition.get(row)
            if detection is not None and _repeats(table, row, detection):
                yield row, RequestStatus.FINISHED_REPETITION, None


def _repeats(table: RowTable, row: int, detection: RepetitionDetection) -> bool:
    output = table.token_ids[row, table.num_prompt_tokens[row] : table.num_tokens[row]]
    return len(output) >= table.request(row).sampling.min_tokens and ends_in_repetition(output, detection)


def ends_in_repetition(output: IntArray, detection: RepetitionDetection) -> bool:
    """Whether the last tokens are `min_count` equal patterns of an allowed size."""
    count, length = detection.min_count, len(output)
    sizes = np.arange(max(1, detection.min_pattern_size), min(detection.max_pattern_size, length // count) + 1)
    if not len(sizes):
        return False
    # Few sizes are left after the last token has been compared with the one a pattern before it.
    for size in sizes[output[-1 - sizes] == output[-1]].tolist():
        patterns = output[length - size * count :].reshape(count, size)
        if (patterns == patterns[0]).all():
            return True
    return False
