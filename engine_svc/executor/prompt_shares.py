"""Which tokens of a step are read for more than sampling: those of prompts with log-probabilities or with a vector.

No torch: real and fake executors share it. State that spans the steps of a chunked prompt is in the row mirror's
options.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine_svc.core.interfaces import RowLogprobs
from engine_svc.core.scheduler_output import SchedulerOutput
from engine_svc.executor.row_mirror import RowMirror, StepInputs
from engine_svc.executor.row_options import Pooling


@dataclass(frozen=True, slots=True)
class PromptShare:
    """What a step computes for one row: positions [start, stop), the first of them at `offset` of the step's tokens."""

    row: int
    start: int
    stop: int
    offset: int

    @property
    def indices(self) -> npt.NDArray[np.int64]:
        """Where its tokens are among those of the step."""
        return np.arange(self.offset, self.offset + self.stop - self.start)


@dataclass(slots=True)
class PromptResults:
    """Results of a step, as in ModelRunnerOutput."""

    prompt_logprobs: list[RowLogprobs] = field(default_factory=list)
    embeddings: list[tuple[int, npt.NDArray[np.float32]]] = field(default_factory=list)


def plan_prompt_shares(output: SchedulerOutput, inputs: StepInputs, mirror: RowMirror) -> list[PromptShare]:
    """The rows whose hidden states are needed, in the order of the batch; none twice."""
    options, shares = mirror.options, []
    for sequence, row in enumerate(output.rows.tolist()):
        start = int(output.num_computed_tokens[sequence])
        end, offset = start + int(output.num_scheduled_tokens[sequence]), int(inputs.query_start[sequence])
        last = int(mirror.num_prompt_tokens[row]) - 1
        if row in options.prompt_logprobs:
            first, stop = max(start, options.prompt_logprobs[row].next), min(end, last)
        elif row in options.pooling:
            first = start if options.pooling[row].params.pooling == "mean" else max(start, last)
            stop = end
        else:
            continue
        if first < stop:
            shares.append(PromptShare(row, first, stop, offset + first - start))
    return shares


def note_reported(share: PromptShare, mirror: RowMirror) -> None:
    """Log-probabilities of a share were reported; after the last of a prompt, its row is like any other."""
    options = mirror.options
    options.prompt_logprobs[share.row].next = share.stop
    if share.stop == mirror.num_prompt_tokens[share.row] - 1:
        del options.prompt_logprobs[share.row]


def pooled_vector(pooling: Pooling, num_tokens: int) -> npt.NDArray[np.float32]:
    """The vector of a row whose whole prompt was added up."""
    assert pooling.total is not None
    vector = pooling.total / num_tokens if pooling.params.pooling == "mean" else pooling.total
    length = float(np.linalg.norm(vector))
    if pooling.params.normalize and length > 0:
        vector = vector / length
    return vector.astype(np.float32)
