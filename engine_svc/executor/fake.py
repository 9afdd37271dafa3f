"""An executor without a model: its tokens are a function of the prompt, the seed and the output index.

So a test can predict every token, whatever the scheduler does with the request, by `fake_token`, and what is reported
beside tokens by fake_results. Of the options that change logits it knows min_tokens alone. It keeps the same row
mirror as the real runner and a KV cache of fingerprints, and fails the step when the scheduler asks for something a
model could not compute. Step time, failures, hangs and bad logits are settable.
"""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from engine_svc.core.interfaces import (
    INVALID_TOKEN,
    KVCacheConfig,
    KVCacheSpec,
    ModelInfo,
    ModelRunnerOutput,
)
from engine_svc.core.scheduler_output import IntArray, SchedulerOutput
from engine_svc.executor.fake_results import prompt_results, sampled_results
from engine_svc.executor.profiles import trace_path
from engine_svc.executor.prompt_shares import PromptResults
from engine_svc.executor.row_mirror import RowMirror
from engine_svc.executor.serial_worker import SerialWorker
from engine_svc.executor.shadow_kv import ShadowKVCache, UInt64Array, mix64
from shared.errors import PreconditionError, StartupError
from shared.types import NumericsFingerprint

# Tokens below this are never sampled, so that a tokenizer's special tokens are left alone.
FIRST_FAKE_TOKEN = 32
_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)


def first_fake_token(vocab_size: int) -> int:
    """Fake tokens lie in [first_fake_token(vocab_size), vocab_size)."""
    return min(FIRST_FAKE_TOKEN, vocab_size // 2)


def prompt_digest(prompt_token_ids: Sequence[int] | IntArray, seed: int) -> int:
    """64 bits of prompt and seed."""
    data = np.asarray(prompt_token_ids, np.int32).astype("<i4").tobytes() + seed.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def fake_token(prompt_token_ids: Sequence[int] | IntArray, seed: int, index: int, vocab_size: int) -> int:
    """The token at an output index, in [first_fake_token(vocab_size), vocab_size). End tokens are not considered."""
    digest = np.array([prompt_digest(prompt_token_ids, seed)], np.uint64)
    return int(_mixed_tokens(digest, np.array([index], np.int32), vocab_size)[0])


def _mixed_tokens(digests: UInt64Array, indices: IntArray, vocab_size: int) -> IntArray:
    first = first_fake_token(vocab_size)
    mixed = mix64(digests + (indices.astype(np.uint64) + np.uint64(1)) * _GOLDEN_RATIO)
    return (mixed % np.uint64(vocab_size - first)).astype(np.int32) + np.int32(first)


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeExecutorOptions:
    """What the fake pretends to be, and how it misbehaves."""

    vocab_size: int = 1000
    max_model_len: int = 2048
    eos_token_ids: tuple[int, ...] = (2,)
    tokenizer_digest: str = ""
    kv_cache_specs: tuple[KVCacheSpec, ...] = (KVCacheSpec(num_layers=1, bytes_per_token=64),)
    available_kv_cache_memory: int = 1 << 24
    max_concurrent_batches: int = 1
    # Least time that a step takes.
    step_seconds: float = 0.0
    # With k, the output ends with the primary end token at index prompt_digest % k, if not before.
    eos_every: int | None = None
    # The step with this number fails, or hangs until shutdown.
    fail_at_step: int | None = None
    hang_at_step: int | None = None
    # A row whose last token is this one has logits that are not finite.
    invalid_token_trigger: int | None = None
    # Runs steps at once in the caller's thread, with futures that are done.
    synchronous: bool = False
    # Checks every step; costs time in proportion to the tokens that the batch attends to.
    verify: bool = True
    # Folder for profiles; None refuses them.
    profile_dir: str | None = None


@dataclass(slots=True)
class _Profile:
    path: Path
    started: float
    events: list[dict[str, object]] = field(default_factory=list)


class FakeExecutor:
    """Implements Executor; see `hold` and `wait_for_step` for tests that act while a step runs."""

    def __init__(self, options: FakeExecutorOptions) -> None:
        self._options = options
        self._worker = SerialWorker("fake-executor", synchronous=options.synchronous)
        self._closed = threading.Event()
        self._gate = threading.Event()
        self._gate.set()
        self._step_changed = threading.Condition()
        self._step = 0
        self._profile: _Profile | None = None
        self._mirror: RowMirror | None = None
        self._shadow: ShadowKVCache | None = None
        self._digests: UInt64Array = np.zeros(0, np.uint64)
        self._prompt_results = PromptResults()
        self.num_tokens_computed = 0

    # --- what it is -----------------------------------------------------------------------------------------------

    @property
    def max_concurrent_batches(self) -> int:
        """Steps that may be in flight at once."""
        return self._options.max_concurrent_batches

    @property
    def model_info(self) -> ModelInfo:
        """The pretended model."""
        options = self._options
        return ModelInfo(
            vocab_size=options.vocab_size,
            max_model_len=options.max_model_len,
            eos_token_ids=options.eos_token_ids,
            tokenizer_digest=options.tokenizer_digest,
            dtype="float32",
            numerics=NumericsFingerprint(dtype="float32", op_set="fake", batch_invariant=True),
        )

    def get_kv_cache_specs(self) -> tuple[KVCacheSpec, ...]:
        """As the options say."""
        return self._options.kv_cache_specs

    def get_available_kv_cache_memory(self) -> int:
        """As the options say."""
        return self._options.available_kv_cache_memory

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Makes mirror and fingerprints. Raises StartupError when the pretended memory does not suffice."""
        specs = self._options.kv_cache_specs
        needed = config.num_blocks * config.block_size * sum(spec.bytes_per_token for spec in specs)
        if needed > self._options.available_kv_cache_memory:
            available = self._options.available_kv_cache_memory
            raise StartupError(f"KV cache of {needed} bytes does not fit into {available} bytes")
        self._mirror = RowMirror(config, len(specs))
        self._digests = np.zeros(config.max_num_seqs, np.uint64)
        if self._options.verify:
            self._shadow = ShadowKVCache(config, len(specs))

    # --- steps ----------------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[None]:
        """Starts a step."""
        if self._options.synchronous and scheduler_output.step == self._options.hang_at_step:
            return Future()
        return self._worker.submit(lambda: self._execute(scheduler_output))

    def sample_tokens(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Samples the started step's tokens."""
        if self._options.synchronous and scheduler_output.step == self._options.hang_at_step:
            return Future()
        return self._worker.submit(lambda: self._sample(scheduler_output))

    def _execute(self, output: SchedulerOutput) -> None:
        started = time.perf_counter()
        with self._step_changed:
            self._step = output.step
            self._step_changed.notify_all()
        self._wait_for_turn(output.step)
        mirror = self._require_mirror()
        if self._shadow is not None:
            self._shadow.check_delta(output, mirror)
            self._shadow.add_rows(output)
        mirror.apply(output)
        for added in output.rows_added:
            prompt = added.token_ids[: added.num_prompt_tokens]
            self._digests[added.row] = prompt_digest(prompt, added.sampling.seed)
        if self._shadow is not None:
            self._shadow.run(output, mirror, mirror.gather(output))
        if mirror.options.reads_prompts:
            self._prompt_results = prompt_results(output, mirror.gather(output), mirror, self._options.vocab_size)
        mirror.advance(output)
        self.num_tokens_computed += output.total_num_scheduled_tokens
        if self._profile is not None:
            self._record(output, started, time.perf_counter())

    def _wait_for_turn(self, step: int) -> None:
        """Gate, step time, and the misbehaviour that the options ask for."""
        while not self._gate.is_set() and not self._closed.is_set():
            self._gate.wait()
        if step == self._options.hang_at_step:
            self._closed.wait()
        elif self._options.step_seconds:
            self._closed.wait(self._options.step_seconds)
        if self._closed.is_set():
            raise RuntimeError("the executor is shut down")
        if step == self._options.fail_at_step:
            raise RuntimeError(f"step {step} fails, as the options ask for")

    def _sample(self, output: SchedulerOutput) -> ModelRunnerOutput:
        mirror = self._require_mirror()
        rows = output.rows[output.samples]
        token_ids = self._choose(mirror, rows)
        if self._shadow is not None:
            self._shadow.append(rows, mirror.num_tokens[rows], np.where(token_ids == INVALID_TOKEN, 0, token_ids))
        wanted = mirror.options.logprobs_wanted(rows)
        logprobs = sampled_results(mirror, rows, token_ids, wanted, self._options.vocab_size) if wanted else ()
        mirror.append_sampled(rows, token_ids)
        results, self._prompt_results = self._prompt_results, PromptResults()
        return ModelRunnerOutput(
            output.step, token_ids, logprobs, tuple(results.prompt_logprobs), tuple(results.embeddings)
        )

    def _choose(self, mirror: RowMirror, rows: IntArray) -> IntArray:
        options, digests, indices = self._options, self._digests[rows], mirror.num_output_tokens(rows)
        token_ids = _mixed_tokens(digests, indices, options.vocab_size)
        if options.eos_every:
            ends = (digests % np.uint64(options.eos_every) == indices) & (indices >= mirror.min_tokens[rows])
            token_ids[ends] = options.eos_token_ids[0]
        for index in np.flatnonzero(indices < mirror.min_tokens[rows]).tolist():
            token_ids[index] = self._unmasked(int(token_ids[index]), mirror.stop_token_ids[rows[index]].tolist())
        if options.invalid_token_trigger is not None:
            last = mirror.token_ids[rows, mirror.num_tokens[rows] - 1]
            token_ids[last == options.invalid_token_trigger] = INVALID_TOKEN
        return token_ids

    def _unmasked(self, token_id: int, stops: Sequence[int]) -> int:
        """The token itself, or the next one that does not stop."""
        first = first_fake_token(self._options.vocab_size)
        while token_id in stops:
            token_id = token_id + 1 if token_id + 1 < self._options.vocab_size else first
        return token_id

    def _require_mirror(self) -> RowMirror:
        assert self._mirror is not None, "initialize_kv_cache comes first"
        return self._mirror

    # --- for tests ------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Keeps steps from computing until `release`; one that computes already goes on. Not when synchronous."""
        self._gate.clear()

    def release(self) -> None:
        """Lets held steps go on."""
        self._gate.set()

    def wait_for_step(self, step: int, timeout_seconds: float = 30.0) -> None:
        """Waits until the worker has taken up a step; it may still be held. Raises TimeoutError."""
        with self._step_changed:
            if not self._step_changed.wait_for(lambda: self._step >= step, timeout_seconds):
                raise TimeoutError(f"step {step} did not start in {timeout_seconds} s, the last was {self._step}")

    # --- failure, profile, end ------------------------------------------------------------------------------------

    def register_failure_callback(self, callback: Callable[[str], None]) -> None:
        """Calls `callback` with a reason when a step fails; at once if one has failed."""
        self._worker.register_failure_callback(callback)

    def start_profile(self, name: str) -> None:
        """Starts to record the steps. Raises PreconditionError when a profile runs or has no folder."""
        self._worker.submit(lambda: self._start_profile(name), fatal=False).result()

    def stop_profile(self) -> str:
        """Writes the recorded steps as a Chrome trace. Raises PreconditionError when no profile runs."""
        return self._worker.submit(self._stop_profile, fatal=False).result()

    def _start_profile(self, name: str) -> None:
        if self._profile is not None:
            raise PreconditionError("a profile is running")
        self._profile = _Profile(trace_path(self._options.profile_dir, name), time.perf_counter())

    def _stop_profile(self) -> str:
        if self._profile is None:
            raise PreconditionError("no profile is running")
        profile, self._profile = self._profile, None
        profile.path.write_text(json.dumps({"traceEvents": profile.events}))
        return str(profile.path)

    def _record(self, output: SchedulerOutput, started: float, ended: float) -> None:
        assert self._profile is not None
        event: dict[str, object] = {"name": f"step {output.step}", "ph": "X", "pid": 0, "tid": 0}
        event["ts"] = (started - self._profile.started) * 1e6
        event["dur"] = (ended - started) * 1e6
        event["args"] = {"num_scheduled_tokens": output.total_num_scheduled_tokens}
        self._profile.events.append(event)

    def shutdown(self) -> None:
        """Ends a hang and the thread. Idempotent."""
        self._closed.set()
        self._worker.close()
        self._gate.set()
        self._worker.join(10.0)
