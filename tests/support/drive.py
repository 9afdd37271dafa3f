"""Runs an EngineCore to the end of given requests, and says what a FakeExecutor must have made of each.

`Driver` collects tokens and finishes by (client, handle), aborts at chosen steps, and checks the core's invariants
after every step. `expected_output` is the oracle, one token at a time, independent of rows, blocks and batches.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from engine_svc.core.engine_core import EngineCore
from engine_svc.core.interfaces import Abort, Executor, KVCacheConfig
from engine_svc.core.outputs import EngineCoreOutputs
from engine_svc.core.scheduler import SchedulerConfig
from engine_svc.executor.fake import FakeExecutorOptions, fake_token, first_fake_token, prompt_digest
from shared.types import (
    AbortCause,
    EngineRequest,
    FinishedRequest,
    FinishReason,
    FirstScheduled,
    PoolingParams,
    SamplingParams,
    StepOutputs,
    TokenLogprobs,
)

Key = tuple[int, int]


@dataclass
class Clock:
    """A StepContext whose time passes by hand, or by `tick` with every look at it."""

    time: float = 0.0
    tick: float = 0.001
    wait_seconds: float = 60.0
    aborts: list[Abort] = field(default_factory=list)
    # Called once per wait, before it: tests act here while a step is in flight.
    on_wait: Callable[[], None] | None = None

    def now(self) -> float:
        self.time += self.tick
        return self.time

    def take_aborts(self) -> list[Abort]:
        taken, self.aborts = self.aborts, []
        return taken

    def wait(self, future: Future):
        if self.on_wait is not None:
            self.on_wait()
        return future.result(timeout=self.wait_seconds)


@dataclass
class LogprobsEntry:
    """Log-probabilities of one token, the token itself first."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int


def logprobs_entries(columns: TokenLogprobs) -> list[LogprobsEntry]:
    """One for each token; all columns must be as long."""
    assert columns.token_ids.shape == columns.logprobs.shape, "columns of different shape"
    cells = zip(columns.token_ids.tolist(), columns.logprobs.tolist(), columns.ranks.tolist(), strict=True)
    return [LogprobsEntry(*entry) for entry in cells]


@dataclass
class Collected:
    """What one request got so far."""

    token_ids: list[int] = field(default_factory=list)
    first_scheduled: FirstScheduled | None = None
    finished: FinishedRequest | None = None
    # One entry for each token that had any.
    logprobs: list[LogprobsEntry] = field(default_factory=list)
    prompt_logprobs: list[LogprobsEntry] = field(default_factory=list)

    @property
    def reason(self) -> FinishReason | None:
        return self.finished.reason if self.finished else None


class Driver:
    """Steps a core. `num_preempted` and `prefix_hits` add up the stats of all steps."""

    def __init__(self, core: EngineCore, clock: Clock | None = None, *, check: bool = True) -> None:
        self.core = core
        self.clock = clock or Clock()
        self.check = check
        self.by_key: dict[Key, Collected] = {}
        self.steps = 0
        self.num_preempted = 0
        self.prefix_hits = 0
        self.outputs: list[EngineCoreOutputs] = []
        # Aborts that arrive between the execution and the update of a step, by number of the call of `step`.
        self.aborts_at: dict[int, list[Abort]] = {}

    def add(self, request: EngineRequest, client: int = 1) -> Collected:
        collected = self.by_key[client, request.handle] = Collected()
        self.core.add_request(client, request, self.clock.time)
        return collected

    def abort_at(self, step: int, handle: int, client: int = 1, cause: AbortCause = AbortCause.CLIENT) -> None:
        """Aborts during the step-th call of `step`, counted from 1."""
        self.aborts_at.setdefault(step, []).append(Abort(client, handle, cause))

    def abort_now(self, handle: int, client: int = 1, cause: AbortCause = AbortCause.CLIENT) -> None:
        self.core.abort_requests([Abort(client, handle, cause)])

    def step(self) -> EngineCoreOutputs:
        self.steps += 1
        self.clock.aborts += self.aborts_at.pop(self.steps, [])
        outputs = self.core.step(self.clock)
        if self.clock.aborts:
            # The step collected nothing, so the aborts came while the core was idle or filling its pipeline.
            self.core.abort_requests(self.clock.take_aborts())
        self.outputs.append(outputs)
        self.num_preempted += outputs.stats.num_preempted
        self.prefix_hits += outputs.stats.prefix_cache_hits
        for client, step_outputs in outputs.by_client.items():
            self._collect(client, step_outputs)
        if self.check:
            self.core.check_invariants()
        return outputs

    def _collect(self, client: int, outputs: StepOutputs) -> None:
        counts = outputs.num_tokens or [1] * len(outputs.handles)
        assert len(counts) == len(outputs.handles), "columns of different length"
        assert sum(counts) == len(outputs.token_ids), "columns of different length"
        self._collect_logprobs(client, outputs)
        start = 0
        for handle, count in zip(outputs.handles, counts, strict=True):
            collected = self.by_key[client, handle]
            assert collected.finished is None, f"tokens after the end of {client, handle}"
            collected.token_ids += outputs.token_ids[start : start + count]
            start += count
        for event in outputs.first_scheduled:
            collected = self.by_key[client, event.handle]
            assert collected.first_scheduled is None, f"{client, event.handle} was first scheduled twice"
            collected.first_scheduled = event
        for finished in outputs.finished:
            collected = self.by_key[client, finished.handle]
            assert collected.finished is None, f"{client, finished.handle} ended twice"
            collected.finished = finished

    def _collect_logprobs(self, client: int, outputs: StepOutputs) -> None:
        counts = dict(zip(outputs.handles, outputs.num_tokens or [1] * len(outputs.handles), strict=True))
        for columns in outputs.prompt_logprobs:
            collected = self.by_key[client, columns.handle]
            assert not collected.token_ids, "log-probabilities of a prompt after its output"
            collected.prompt_logprobs += logprobs_entries(columns)
        for columns in outputs.logprobs:
            assert len(columns) == counts.get(columns.handle), "log-probabilities without their tokens"
            self.by_key[client, columns.handle].logprobs += logprobs_entries(columns)

    def run(self, max_steps: int = 100_000) -> dict[Key, Collected]:
        """Steps until nothing is left; then every block must be free again."""
        for _ in range(max_steps):
            if not self.core.has_work():
                break
            self.step()
        else:
            raise AssertionError(f"still at work after {max_steps} steps")
        assert self.core.load().kv_cache_usage == 0.0, "blocks are left in use"
        return self.by_key


@dataclass(frozen=True, kw_only=True)
class CoreLimits:
    """The usual sizes of a test, small."""

    max_num_seqs: int = 8
    max_num_batched_tokens: int = 64
    max_model_len: int = 128
    block_size: int = 4
    num_blocks: int = 257
    long_prefill_token_threshold: int = 0
    policy: str = "fcfs"
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    max_logprobs: int = 20


def make_core(executor: Executor, limits: CoreLimits) -> EngineCore:
    """Initialises the executor's KV cache and builds a core on it."""
    kv_config = KVCacheConfig(
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        max_num_batched_tokens=limits.max_num_batched_tokens,
    )
    executor.initialize_kv_cache(kv_config)
    config = SchedulerConfig(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        long_prefill_token_threshold=limits.long_prefill_token_threshold,
        policy=limits.policy,
        enable_chunked_prefill=limits.enable_chunked_prefill,
        enable_prefix_caching=limits.enable_prefix_caching,
        max_concurrent_batches=executor.max_concurrent_batches,
        max_logprobs=limits.max_logprobs,
    )
    return EngineCore(config, kv_config, executor, vocab_size=executor.model_info.vocab_size)


def make_request(
    handle: int,
    prompt: Sequence[int],
    *,
    eos_token_ids: tuple[int, ...] = (2,),
    resume: Sequence[int] = (),
    pooling: tuple[str, bool] | None = None,
    **sampling,
) -> EngineRequest:
    """A request with sampling given by keywords; 16 tokens unless told. `pooling` is (pooling, normalize)."""
    return EngineRequest(
        handle=handle,
        request_id=f"request-{handle}",
        prompt_token_ids=list(prompt),
        resume_token_ids=list(resume),
        eos_token_ids=eos_token_ids,
        sampling=SamplingParams(**{"max_tokens": 16, **sampling}),
        pooling=None if pooling is None else PoolingParams(pooling=pooling[0], normalize=pooling[1]),
    )


def expected_output(
    options: FakeExecutorOptions, request: EngineRequest, max_model_len: int
) -> tuple[list[int], FinishReason, int | None]:
    """Tokens, finish reason and stop token id of a request that runs undisturbed on the fake executor.

    The tokens leave out what `resume_token_ids` brought.
    """
    prompt, sampling = list(request.prompt_token_ids), request.sampling
    primary = None if sampling.ignore_eos or not request.eos_token_ids else request.eos_token_ids[0]
    secondary = () if sampling.ignore_eos else request.eos_token_ids[1:]
    stops = {*sampling.stop_token_ids, *secondary}
    masked = {*sampling.stop_token_ids, *request.eos_token_ids}
    limit = min(sampling.max_tokens, max_model_len - len(prompt))
    eos_index = prompt_digest(prompt, sampling.seed) % options.eos_every if options.eos_every else None
    first = first_fake_token(options.vocab_size)
    tokens: list[int] = []
    for index in range(len(request.resume_token_ids), limit):
        token = fake_token(prompt, sampling.seed, index, options.vocab_size)
        if index == eos_index and index >= sampling.min_tokens:
            token = options.eos_token_ids[0]
        while index < sampling.min_tokens and token in masked:
            token = token + 1 if token + 1 < options.vocab_size else first
        tokens.append(token)
        if token == primary:
            return tokens, FinishReason.STOP, None
        if token in stops:
            return tokens, FinishReason.STOP, token
    return tokens, FinishReason.LENGTH, None
