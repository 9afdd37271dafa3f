"""What the fake executor reports beside tokens: log-probabilities and vectors, as exact functions of the request.

They look like a model's (negative, descending, the token itself first) and mean nothing. A test can predict every
number, whatever the scheduler does with the request, by the functions here.
"""

import numpy as np
import numpy.typing as npt

from engine_svc.core.interfaces import RowLogprobs
from engine_svc.core.scheduler_output import IntArray, SchedulerOutput
from engine_svc.executor.prompt_shares import PromptResults, note_reported, plan_prompt_shares, pooled_vector
from engine_svc.executor.row_mirror import RowMirror, StepInputs
from engine_svc.executor.row_options import LogprobsWanted

# Length of the fake's vectors.
HIDDEN_SIZE = 8
_STEP = 0.125


def fake_logprobs(
    position: int, token_id: int, count: int, vocab_size: int, chosen: tuple[int, ...] = ()
) -> tuple[list[int], list[float], int]:
    """Candidates, their log-probabilities and the rank of the token at a position of its sequence.

    The candidates are the ids after the token, or the chosen ones; the rank is always 1.
    """
    count = vocab_size if count < 0 else min(count, vocab_size)
    others = list(chosen) or [(token_id + offset) % vocab_size for offset in range(count)]
    first = -_STEP * (1 + position % 16)
    return [token_id, *others], [first - _STEP * index for index in range(1 + len(others))], 1


def fake_state(position: int, token_id: int) -> npt.NDArray[np.float64]:
    """The hidden state of a token, [HIDDEN_SIZE]."""
    return np.array([(index * (token_id + 1) + position) % 17 - 8 for index in range(HIDDEN_SIZE)], np.float64)


def _columns(index: int, entries: list[tuple[list[int], list[float], int]]) -> RowLogprobs:
    return RowLogprobs(
        index,
        np.array([ids for ids, _, _ in entries], np.int32),
        np.array([values for _, values, _ in entries], np.float32),
        np.array([rank for _, _, rank in entries], np.int32),
    )


def sampled_results(
    mirror: RowMirror, rows: IntArray, token_ids: IntArray, wanted: list[LogprobsWanted], vocab_size: int
) -> tuple[RowLogprobs, ...]:
    """Log-probabilities of the tokens that the rows are about to append."""
    results = []
    for one in wanted:
        token, position = int(token_ids[one.index]), int(mirror.num_tokens[rows[one.index]])
        chosen = () if one.token_ids is None else tuple(one.token_ids.tolist())
        if token >= 0:
            results.append(_columns(one.index, [fake_logprobs(position, token, one.count, vocab_size, chosen)]))
    return tuple(results)


def prompt_results(output: SchedulerOutput, inputs: StepInputs, mirror: RowMirror, vocab_size: int) -> PromptResults:
    """What the step's prompt tokens give."""
    results = PromptResults()
    for share in plan_prompt_shares(output, inputs, mirror):
        tokens = mirror.token_ids[share.row]
        pooling = mirror.options.pooling.get(share.row)
        if pooling is None:
            asked = mirror.options.prompt_logprobs[share.row]
            positions = range(share.start + 1, share.stop + 1)
            entries = [fake_logprobs(at, int(tokens[at]), asked.count, vocab_size) for at in positions]
            results.prompt_logprobs.append(_columns(share.row, entries))
            note_reported(share, mirror)
            continue
        states = np.array([fake_state(at, int(tokens[at])) for at in range(share.start, share.stop)])
        pooling.total = states.sum(axis=0) + (0 if pooling.total is None else pooling.total)
        if share.stop == mirror.num_prompt_tokens[share.row]:
            results.embeddings.append((share.row, pooled_vector(pooling, share.stop)))
    return results
