"""An executor around the executor that remembers the latest steps, to tell of them when one fails.

Keeps references only, so that a step costs nothing more; what it tells holds no token ids.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from engine_svc.core.interfaces import Executor, KVCacheConfig, KVCacheSpec, ModelInfo, ModelRunnerOutput
from engine_svc.core.scheduler_output import GrammarBitmask, SchedulerOutput

MAX_ROWS_TOLD = 64


class StepRecorder:
    """Implements Executor by the one it is given."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._steps: deque[SchedulerOutput] = deque(maxlen=executor.max_concurrent_batches)

    def describe(self) -> list[str]:
        """One line for each step that may be in flight, oldest first."""
        return [describe_step(step) for step in self._steps]

    @property
    def max_concurrent_batches(self) -> int:
        """Steps that may be in flight at once."""
        return self._executor.max_concurrent_batches

    @property
    def model_info(self) -> ModelInfo:
        """What the executor knows of its model."""
        return self._executor.model_info

    def get_kv_cache_specs(self) -> tuple[KVCacheSpec, ...]:
        """KV needs, one entry a group."""
        return self._executor.get_kv_cache_specs()

    def get_available_kv_cache_memory(self) -> int:
        """Bytes that the KV cache may take."""
        return self._executor.get_available_kv_cache_memory()

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Makes the cache."""
        self._executor.initialize_kv_cache(config)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[None]:
        """Remembers and starts a step."""
        self._steps.append(scheduler_output)
        return self._executor.execute_model(scheduler_output)

    def sample_tokens(
        self, scheduler_output: SchedulerOutput, grammar: GrammarBitmask | None = None
    ) -> Future[ModelRunnerOutput]:
        """Samples the started step's tokens."""
        return self._executor.sample_tokens(scheduler_output, grammar)

    def register_failure_callback(self, callback: Callable[[str], None]) -> None:
        """Calls `callback` with a reason when the executor fails."""
        self._executor.register_failure_callback(callback)

    def start_profile(self, name: str) -> None:
        """Starts a profile."""
        self._executor.start_profile(name)

    def stop_profile(self) -> str:
        """Ends the profile."""
        return self._executor.stop_profile()

    def shutdown(self) -> None:
        """Releases everything."""
        self._executor.shutdown()


def describe_step(step: SchedulerOutput) -> str:
    """A step in one line: what was scheduled, for whom, without any token."""
    added = [
        f"{row.request_id or '-'} row={row.row} prompt={row.num_prompt_tokens} tokens={len(row.token_ids)} "
        f"computed={row.num_computed_tokens} blocks={[len(blocks) for blocks in row.block_ids]}"
        for row in step.rows_added[:MAX_ROWS_TOLD]
    ]
    scheduled = zip(
        step.rows.tolist(), step.num_computed_tokens.tolist(), step.num_scheduled_tokens.tolist(), strict=True
    )
    rows = [f"{row}@{computed}+{tokens}" for row, computed, tokens in list(scheduled)[:MAX_ROWS_TOLD]]
    return (
        f"step {step.step}: {step.total_num_scheduled_tokens} tokens in {len(step.rows)} rows, "
        f"{int(step.samples.sum())} sampled; rows (row@computed+scheduled): {' '.join(rows) or 'none'}; "
        f"removed: {step.rows_removed.tolist()}; added: {'; '.join(added) or 'none'}"
    )
