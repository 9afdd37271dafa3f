"""Domain types that both services speak, free of protobuf, gRPC and torch.

The frontend builds an EngineRequest and reads StepOutputs; the engine does the opposite. Each service's convert
module turns them into messages of takt.engine.v1 and back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

PROTOCOL_VERSION = 1
# Below this temperature the most likely token is taken.
GREEDY_TEMPERATURE = 1e-5

TokenArray = npt.NDArray[np.int32]


class FinishReason(IntEnum):
    """Why an output ended. Values are those of takt.v1.FinishReason and takt.engine.v1.FinishReason."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4
    REPETITION = 5


class AbortCause(IntEnum):
    """Why a request was aborted. Values are those of takt.engine.v1.AbortCause."""

    UNSPECIFIED = 0
    CLIENT = 1
    DEADLINE = 2
    STOP_STRING = 3
    SHUTDOWN = 4
    SLOW_CONSUMER = 5


class StructuredOutputKind(IntEnum):
    """What the text of a StructuredOutputSpec is. Values are those of takt.engine.v1.StructuredOutputKind."""

    JSON_SCHEMA = 1
    JSON_OBJECT = 2
    REGEX = 3
    CHOICE = 4
    GRAMMAR = 5
    STRUCTURAL_TAG = 6


@dataclass(frozen=True, slots=True)
class StructuredOutputSpec:
    """A constraint on an output; `spec` of a CHOICE is a JSON list of strings, of a JSON_OBJECT empty."""

    kind: StructuredOutputKind
    spec: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionDetection:
    """Ends an output whose last tokens are `min_count` equal patterns of a length in the given range."""

    max_pattern_size: int
    min_pattern_size: int
    min_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How the vectors of a prompt's tokens become one; `pooling` is "last" or "mean"."""

    pooling: str
    normalize: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What the engine knows of a request's sampling, every default resolved.

    `top_k` 0 keeps all tokens. `seed` is in [0, 2**64). `stop_token_ids` holds the secondary end tokens too.
    `logit_bias` pairs token ids with numbers in [-100, 100]. `bad_words` are token sequences. Empty
    `allowed_token_ids` allow all. `logprobs` and `prompt_logprobs` None report none, -1 the whole vocabulary.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    repetition_detection: RepetitionDetection | None = None
    structured_output: StructuredOutputSpec | None = None
    skip_reading_prefix_cache: bool = False

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < GREEDY_TEMPERATURE


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One request as it crosses the wire: immutable and complete.

    `handle` is the frontend's number for it, unique within a stream. `resume_token_ids` are output that was
    generated elsewhere already. `deadline_seconds` and `age_seconds` are durations at the time of sending. With
    `pooling` the request asks for a vector and `sampling` counts for nothing.
    """

    handle: int
    request_id: str
    prompt_token_ids: Sequence[int] | TokenArray
    sampling: SamplingParams
    resume_token_ids: Sequence[int] | TokenArray = ()
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    traceparent: str = ""
    deadline_seconds: float | None = None
    age_seconds: float = 0.0
    data_parallel_rank: int | None = None
    pooling: PoolingParams | None = None


@dataclass(frozen=True, slots=True)
class WireError:
    """An error of one request or call as it crosses the wire; `code` is google.rpc.Code."""

    code: int
    reason: str
    message: str
    field: str = ""


@dataclass(frozen=True, slots=True)
class FirstScheduled:
    """A request was computed for the first time. `queue_seconds` counts from its arrival at the engine."""

    handle: int
    num_cached_tokens: int
    queue_seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprobs:
    """Log-probabilities of consecutive tokens of one request, prompt or output.

    `token_ids` and `logprobs` have the shape [num_tokens, width], float32. Column 0 is the token itself; the others are
    the most likely tokens in descending order, lowest id first among equals, or the ids that were asked for. `ranks`
    [num_tokens] are of the token itself: 1 plus the number of tokens that are more likely.
    """

    handle: int
    token_ids: TokenArray
    logprobs: npt.NDArray[np.float32]
    ranks: TokenArray

    def __len__(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """The end of a request, sent exactly once unless the frontend itself aborted it.

    `stop_token_id` is set when the end was one of the stop token ids; None with reason STOP means the primary end
    token. `error` is set with reason ERROR, `abort_cause` with reason ABORT. Durations are in seconds.
    """

    handle: int
    reason: FinishReason
    stop_token_id: int | None = None
    abort_cause: AbortCause = AbortCause.UNSPECIFIED
    error: WireError | None = None
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    # The vector of a pooling request.
    embedding: tuple[float, ...] = ()


@dataclass(slots=True)
class StepOutputs:
    """What a step produced for one frontend, by column.

    `handles[i]` got the next `num_tokens[i]` of `token_ids`; `num_tokens` None means one each. Requests in
    `finished` may or may not be in the columns. `logprobs` belong to the tokens of the same outputs: a request has as
    many as tokens there, or none. Those of a prompt come in order, from its second token on, and before its first
    output token.
    """

    step: int
    handles: list[int] = field(default_factory=list)
    num_tokens: list[int] | None = None
    token_ids: list[int] = field(default_factory=list)
    first_scheduled: list[FirstScheduled] = field(default_factory=list)
    finished: list[FinishedRequest] = field(default_factory=list)
    load: "EngineLoad | None" = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What an engine is doing. `kv_cache_usage` is in [0, 1]; `in_step_seconds` is 0 between steps."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    step_counter: int = 0
    in_step_seconds: float = 0.0
    num_waiting_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsFingerprint:
    """What an engine's numbers depend on; engines with equal ones continue each other's requests exactly."""

    weights_digest: str = ""
    dtype: str = ""
    op_set: str = ""
    instruction_set: str = ""
    batch_invariant: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine says of itself once, in Ready. `epoch` is unique to its process."""

    epoch: str
    protocol_version: int = PROTOCOL_VERSION
    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer_digest: str
    block_size: int
    num_blocks: int
    dtype: str
    data_parallel_rank: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    max_num_seqs: int
    max_num_batched_tokens: int
    max_stop_token_ids: int
    max_message_bytes: int
    max_logprobs: int = 20
    numerics: NumericsFingerprint
    draining: bool = False
