"""What the core needs of others: the executor that runs the model, grammars, and the surroundings of a step.

Implementations live in engine_svc.executor, engine_svc.grammar and engine_svc.service; the core imports none of them.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from engine_svc.core.scheduler_output import GrammarBitmask, IntArray, SchedulerOutput
from shared.errors import TaktError
from shared.types import AbortCause, NumericsFingerprint, StructuredOutputSpec

T = TypeVar("T")

# Sampled in place of a token by a row whose logits hold no finite number.
INVALID_TOKEN = -1
# The same by a row whose own options allow no token.
MASKED_TOKEN = -2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the executor knows of its model. `max_model_len` is the model's own limit, before memory."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    tokenizer_digest: str
    dtype: str
    numerics: NumericsFingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """KV needs of a group of layers that share a block table.

    `bytes_per_token` counts keys and values of all layers of the group. `non_causal` layers forbid chunked prefill
    and prefix caching.
    """

    num_layers: int
    bytes_per_token: int
    sliding_window: int | None = None
    non_causal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheConfig:
    """The KV cache that the executor makes. Block 0 is the null block and never written by a request."""

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class RowLogprobs:
    """Log-probabilities of consecutive tokens of one row, in the columns of shared.types.TokenLogprobs.

    `index` is an index into the step's sampled tokens, or for those of a prompt the row.
    """

    index: int
    token_ids: IntArray
    logprobs: npt.NDArray[np.float32]
    ranks: IntArray


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """Sampled tokens of one step: one for each row with `samples` set, in the order of `rows`.

    INVALID_TOKEN stands where the logits of a row were not finite, MASKED_TOKEN where its options allow no token.
    `logprobs` are those of sampled tokens, for the rows that asked; `prompt_logprobs` go on where those of the row's
    last step ended; `embeddings` are (row, vector [hidden_size]) of the pooling rows whose prompt is computed.
    """

    step: int
    sampled_token_ids: IntArray
    logprobs: tuple[RowLogprobs, ...] = ()
    prompt_logprobs: tuple[RowLogprobs, ...] = ()
    embeddings: tuple[tuple[int, npt.NDArray[np.float32]], ...] = ()


class Executor(Protocol):
    """Runs a model. Steps run in the order of `execute_model`; futures resolve in that order."""

    @property
    def max_concurrent_batches(self) -> int:
        """Steps that may be in flight at once."""

    @property
    def model_info(self) -> ModelInfo:
        """What the executor knows of its model."""

    def get_kv_cache_specs(self) -> tuple[KVCacheSpec, ...]:
        """KV needs, one entry a group."""

    def get_available_kv_cache_memory(self) -> int:
        """Bytes that the KV cache may take on this device."""

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Makes the cache and the row mirrors, and warms up. Called once, before the first step.

        Raises StartupError when memory does not suffice.
        """

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[None]:
        """Starts a step and returns at once. The future fails when the step does."""

    def sample_tokens(
        self, scheduler_output: SchedulerOutput, grammar: GrammarBitmask | None = None
    ) -> Future[ModelRunnerOutput]:
        """Samples the started step's tokens, for the rows of `grammar` among those that it allows.

        Fails with the step's own error when the step failed.
        """

    def register_failure_callback(self, callback: Callable[[str], None]) -> None:
        """Calls `callback` with a reason, from any thread, when the executor fails; at once if it has failed."""

    def start_profile(self, name: str) -> None:
        """Starts a profile between two steps. Raises PreconditionError when one runs."""

    def stop_profile(self) -> str:
        """Ends the profile and returns the path of its trace. Raises PreconditionError when none runs."""

    def shutdown(self) -> None:
        """Releases threads, processes and memory; idempotent."""


class GrammarMatcher(Protocol):
    """A place in a grammar: which tokens may come next. Belongs to one request; the core alone calls it."""

    def fill_bitmask(self, words: IntArray) -> bool:
        """Sets the bits of the tokens that may come next in zeroed `words` [ceil(vocab_size / 32)].

        End tokens are left out; returns whether the output may end here. Raises InvalidRequestError when that takes
        more than the grammar's limits allow.
        """

    def accept_token(self, token_id: int) -> bool:
        """Goes on behind a token, or returns False where it may not come."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing but an end may come next."""


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """The answer to GrammarBackend.compile: a matcher at its beginning, or why there is none."""

    ticket: int
    matcher: GrammarMatcher | None
    error: TaktError | None = None


class GrammarBackend(Protocol):
    """Compiles grammars beside the core, within limits of size and time."""

    def compile(self, ticket: int, spec: StructuredOutputSpec) -> None:
        """Starts to compile and returns at once. The answer is a CompiledGrammar with this ticket, once."""

    def cancel(self, ticket: int) -> None:
        """Wants no answer any more; one that is under way may still come."""

    def register_listener(self, listener: Callable[[CompiledGrammar], None]) -> None:
        """Calls `listener` with each answer, from any thread. Answers from before are given at once."""

    def shutdown(self) -> None:
        """Ends threads and processes; idempotent."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Ends a request, named by (client, handle)."""

    client: int
    handle: int
    cause: AbortCause


class StepContext(Protocol):
    """The surroundings of a step: whatever is not determined by the core's own state."""

    def now(self) -> float:
        """Monotonic seconds."""

    def take_aborts(self) -> Sequence[Abort]:
        """Returns and clears the aborts that arrived since the last call, without blocking."""

    def wait(self, future: Future[T]) -> T:
        """Waits for a result of the executor. Raises the executor's error, or one of its own past a limit."""
