"""What the row mirror hands to the sampler: the parameters of the rows that sample now. No torch."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine_svc.core.scheduler_output import IntArray
from engine_svc.executor.row_options import LogitsOptions


@dataclass(frozen=True, slots=True)
class GrammarMask:
    """Tokens that some rows of the logits may sample.

    `rows` [n] ascend. Bit t % 32 of `words` [n, ceil(vocab_size / 32)] at word t // 32 is set for each allowed token t.
    """

    rows: npt.NDArray[np.int64]
    words: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """Parameters of the rows that sample, in the order of the logits. Arrays are [num_rows], unless told."""

    is_greedy: npt.NDArray[np.bool_]
    temperature: npt.NDArray[np.float64]
    # 0 keeps all tokens.
    top_k: IntArray
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]
    seed: npt.NDArray[np.uint64]
    # Index in its output of the token that is sampled now.
    output_index: IntArray
    # [num_masked]: tokens that may not be sampled, as pairs of a row of the logits and a token id.
    masked_rows: npt.NDArray[np.int64]
    masked_token_ids: npt.NDArray[np.int64]
    # What else changes the logits; None when nothing does.
    options: LogitsOptions | None = None
    grammar: GrammarMask | None = None
