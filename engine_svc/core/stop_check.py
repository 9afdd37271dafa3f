"""Finds the requests that end with the token just appended, for all rows at once.

The order of the checks is part of the contract: the primary end token (no stop reason), then stop token ids (the id is
the reason), then length. So an end token that is also the last allowed token ends with stop. min_tokens needs no check
here: stop tokens are masked in sampling until it is reached.
"""

from collections.abc import Iterator

import numpy as np

from engine_svc.core.request import RequestStatus
from engine_svc.core.rows import RowTable
from engine_svc.core.scheduler_output import IntArray


def find_stops(table: RowTable, rows: IntArray, token_ids: IntArray) -> Iterator[tuple[int, RequestStatus, int | None]]:
    """Yields (row, final status, stop token id) of each row that ends."""
    at_eos = token_ids == table.eos_token_ids[rows]
    at_stop = (token_ids[:, np.newaxis] == table.stop_token_ids[rows]).any(axis=1)
    at_length = table.num_tokens[rows] >= table.max_total_tokens[rows]
    for index in np.flatnonzero(at_eos | at_stop | at_length).tolist():
        row = int(rows[index])
        if at_eos[index]:
            yield row, RequestStatus.FINISHED_STOPPED, None
        elif at_stop[index]:
            yield row, RequestStatus.FINISHED_STOPPED, int(token_ids[index])
        else:
            yield row, RequestStatus.FINISHED_LENGTH_CAPPED, None
