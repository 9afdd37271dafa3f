"""Runs the model in this process, in a thread of its own.

Steps are queued and run in order; the caller gets futures at once, so that neither signals nor heartbeats ever wait
for native code. With several batches in flight the runner itself feeds sampled tokens to the next step.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from engine_svc.core.interfaces import KVCacheConfig, KVCacheSpec, ModelInfo, ModelRunnerOutput
from engine_svc.core.scheduler_output import GrammarBitmask, SchedulerOutput
from engine_svc.executor.dummy_steps import dummy_step
from engine_svc.executor.memory import cpu_kv_cache_memory, free_memory
from engine_svc.executor.model_runner import ModelRunner
from engine_svc.executor.profiles import trace_path
from engine_svc.executor.serial_worker import SerialWorker
from engine_svc.model.interface import Model
from shared.errors import PreconditionError, StartupError
from shared.types import SamplingParams

logger = logging.getLogger(__name__)

# How long shutdown waits for a step that is under way.
_SHUTDOWN_SECONDS = 10.0
# Block size of the cache of the profiling pass, which is thrown away.
_PROFILING_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorOptions:
    """How to execute. The numbers of sequences and tokens bound the batch that the profiling pass on a GPU runs."""

    max_concurrent_batches: int = 1
    # Folder for profiles; None refuses them.
    profile_dir: str | None = None
    # Share of a GPU's memory that weights, activations and KV cache may take together.
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    # Whether log-probabilities are the model's own or those that tokens are sampled from.
    logprobs_mode: str = "raw_logprobs"


class UniprocExecutor:
    """Implements Executor with a model in this process."""

    def __init__(self, model: Model, options: ExecutorOptions) -> None:
        self._model = model
        self._options = options
        self._worker = SerialWorker("executor")
        # Owned by the worker thread from here on.
        self._runner: ModelRunner | None = None
        self._profile: tuple[Any, Path] | None = None

    @property
    def max_concurrent_batches(self) -> int:
        """Steps that may be in flight at once."""
        return self._options.max_concurrent_batches

    @property
    def model_info(self) -> ModelInfo:
        """What the model says of itself."""
        return self._model.info

    # --- memory ---------------------------------------------------------------------------------------------------

    def get_kv_cache_specs(self) -> tuple[KVCacheSpec, ...]:
        """KV needs, one entry a group."""
        return self._model.kv_cache_specs()

    def get_available_kv_cache_memory(self) -> int:
        """On a CPU the smaller of 4 GiB and a quarter of what is free; on a GPU what a profiling pass leaves."""
        if self._model.device.type == "cpu":
            return cpu_kv_cache_memory(free_memory())
        return self._worker.submit(self._profile_memory, fatal=False).result()

    def _profile_memory(self) -> int:
        """Runs the largest batch, sampling included, and subtracts its peak from the share of the device."""
        options, device = self._options, self._model.device
        tokens_each = max(1, options.max_num_batched_tokens // options.max_num_seqs)
        blocks_each = -(-tokens_each // _PROFILING_BLOCK_SIZE)
        config = KVCacheConfig(
            block_size=_PROFILING_BLOCK_SIZE,
            num_blocks=1 + options.max_num_seqs * blocks_each,
            max_num_seqs=options.max_num_seqs,
            max_model_len=min(self._model.info.max_model_len, tokens_each + 1),
            max_num_batched_tokens=options.max_num_batched_tokens,
        )
        cache = self._model.allocate_kv_cache(config.num_blocks, config.block_size)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        runner = ModelRunner(self._model, config, cache)
        step = dummy_step(config, options.max_num_seqs, tokens_each, SamplingParams(max_tokens=1, top_p=0.9))
        runner.execute_model(step)
        runner.sample_tokens(step)
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        outside_torch = total - free - torch.cuda.memory_reserved(device)
        peak = torch.cuda.max_memory_allocated(device) - config.num_blocks * self._bytes_per_block(config)
        del runner, cache
        torch.cuda.empty_cache()
        available = int(total * options.gpu_memory_utilization) - outside_torch - peak
        logger.info("Profiling pass: peak %d bytes, %d used outside, of %d bytes.", peak, outside_torch, total)
        return max(0, available)

    def _bytes_per_block(self, config: KVCacheConfig) -> int:
        return config.block_size * sum(spec.bytes_per_token for spec in self._model.kv_cache_specs())

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocates the cache and warms up in the thread that will run the steps.

        Raises StartupError when memory does not suffice, or when the model needs several groups.
        """
        self._worker.submit(lambda: self._initialize(config), fatal=False).result()

    def _initialize(self, config: KVCacheConfig) -> None:
        if len(self._model.kv_cache_specs()) != 1:
            raise StartupError("the model has several groups of KV cache layers, one is supported")
        needed = config.num_blocks * self._bytes_per_block(config)
        free = self._free_bytes()
        if needed > free:
            raise StartupError(f"KV cache of {needed} bytes does not fit into {free} bytes of free memory")
        try:
            cache = self._model.allocate_kv_cache(config.num_blocks, config.block_size)
            self._warm_up(config, cache)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise StartupError(f"KV cache of {needed} bytes does not fit into memory: {_first_line(error)}") from error
        self._runner = ModelRunner(self._model, config, cache, logprobs_mode=self._options.logprobs_mode)

    def _free_bytes(self) -> int:
        if self._model.device.type == "cpu":
            return free_memory()
        return int(torch.cuda.mem_get_info(self._model.device)[0])

    def _warm_up(self, config: KVCacheConfig, cache: Any) -> None:
        """A prompt and a batch of decodes, so that the first request pays for no lazy initialisation."""
        started = time.perf_counter()
        prompt = 64 if self._model.device.type == "cpu" else config.max_num_batched_tokens
        for num_seqs, tokens_each in ((1, prompt), (8, 1), (1, 1)):
            step = dummy_step(config, num_seqs, tokens_each, SamplingParams(max_tokens=1, top_p=0.9))
            runner = ModelRunner(self._model, config, cache)
            runner.execute_model(step)
            runner.sample_tokens(step)
        logger.info("Warmed up in %.2f s.", time.perf_counter() - started)

    # --- steps ----------------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[None]:
        """Queues the forward of a step."""
        return self._worker.submit(lambda: self._require_runner().execute_model(scheduler_output))

    def sample_tokens(
        self, scheduler_output: SchedulerOutput, grammar: GrammarBitmask | None = None
    ) -> Future[ModelRunnerOutput]:
        """Queues the sampling of a step."""
        return self._worker.submit(lambda: self._require_runner().sample_tokens(scheduler_output, grammar))

    def _require_runner(self) -> ModelRunner:
        assert self._runner is not None, "initialize_kv_cache comes first"
        return self._runner

    # --- failure, profile, end ------------------------------------------------------------------------------------

    def register_failure_callback(self, callback: Callable[[str], None]) -> None:
        """Calls `callback` with a reason when a step fails; at once if one has failed."""
        self._worker.register_failure_callback(callback)

    def start_profile(self, name: str) -> None:
        """Starts torch's profiler between two steps.

        Raises PreconditionError when a profile runs or has no folder, and InvalidRequestError for a bad name.
        """
        self._worker.submit(lambda: self._start_profile(name), fatal=False).result()

    def stop_profile(self) -> str:
        """Writes a Chrome trace and returns its path. Raises PreconditionError when no profile runs."""
        return self._worker.submit(self._stop_profile, fatal=False).result()

    def _start_profile(self, name: str) -> None:
        if self._profile is not None:
            raise PreconditionError("a profile is running")
        path = trace_path(self._options.profile_dir, name)
        activities = [ProfilerActivity.CPU]
        if self._model.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(activities=activities)
        profiler.start()
        self._profile = (profiler, path)

    def _stop_profile(self) -> str:
        if self._profile is None:
            raise PreconditionError("no profile is running")
        (profiler, path), self._profile = self._profile, None
        profiler.stop()
        profiler.export_chrome_trace(str(path))
        return str(path)

    def shutdown(self) -> None:
        """Ends the thread, waiting a while for the step under way. Idempotent."""
        self._worker.close()
        if self._worker.join(_SHUTDOWN_SECONDS):
            self._runner = None
        else:
            logger.warning("A step is still running after %.0f s; its thread is left behind.", _SHUTDOWN_SECONDS)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
