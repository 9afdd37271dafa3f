"""What rows give beside sampled tokens: log-probabilities of their prompt, and vectors.

Plans which hidden states of a step are needed, and turns them into results. Logits of prompt tokens are computed in
blocks, so that memory does not grow with the prompt. State that spans the steps of a chunked prompt is in the row
mirror's options. Knows no requests.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from engine_svc.core.interfaces import RowLogprobs
from engine_svc.core.scheduler_output import SchedulerOutput
from engine_svc.executor.logprobs import BLOCK_ELEMENTS, top_logprobs
from engine_svc.executor.row_mirror import RowMirror, StepInputs
from engine_svc.executor.row_options import Pooling
from engine_svc.model.interface import Model


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


def read_prompts(shares: list[PromptShare], hidden: torch.Tensor, model: Model, mirror: RowMirror) -> PromptResults:
    """Turns `hidden`, the states of the shares one after another, into results."""
    results, start = PromptResults(), 0
    for share in shares:
        states = hidden[start : start + share.stop - share.start]
        start += len(states)
        if share.row in mirror.options.pooling:
            _pool(share, states, mirror, results)
        else:
            results.prompt_logprobs.append(_prompt_logprobs(share, states, model, mirror))
    return results


def _prompt_logprobs(share: PromptShare, states: torch.Tensor, model: Model, mirror: RowMirror) -> RowLogprobs:
    """The logits of a position are those of the token at the next one."""
    asked = mirror.options.prompt_logprobs[share.row]
    tokens = mirror.token_ids[share.row, share.start + 1 : share.stop + 1]
    at_once = max(1, BLOCK_ELEMENTS // model.info.vocab_size)
    parts = [
        top_logprobs(
            model.compute_logits(states[begin : begin + at_once]), tokens[begin : begin + at_once], asked.count
        )
        for begin in range(0, len(states), at_once)
    ]
    ids, values, ranks = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    asked.next = share.stop
    if share.stop == mirror.num_prompt_tokens[share.row] - 1:
        del mirror.options.prompt_logprobs[share.row]
    return RowLogprobs(share.row, ids, values, ranks)


def _pool(share: PromptShare, states: torch.Tensor, mirror: RowMirror, results: PromptResults) -> None:
    pooling = mirror.options.pooling[share.row]
    total = states.double().sum(dim=0).cpu().numpy()
    pooling.total = total if pooling.total is None else pooling.total + total
    if share.stop == mirror.num_prompt_tokens[share.row]:
        results.embeddings.append((share.row, _vector(pooling, int(mirror.num_prompt_tokens[share.row]))))


def _vector(pooling: Pooling, num_tokens: int) -> npt.NDArray[np.float32]:
    assert pooling.total is not None
    vector = pooling.total / num_tokens if pooling.params.pooling == "mean" else pooling.total
    length = float(np.linalg.norm(vector))
    if pooling.params.normalize and length > 0:
        vector = vector / length
    return vector.astype(np.float32)
