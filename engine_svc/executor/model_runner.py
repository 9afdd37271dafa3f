"""Turns a SchedulerOutput into tensors, runs the model, and samples.

It owns the KV cache tensors and the row mirror, and feeds sampled tokens back into the mirror itself. Knows neither
threads nor requests: rows are all it sees. Invariant: steps come in order, and each is executed, then sampled.
"""

from typing import Any

import numpy as np
import torch

from engine_svc.core.interfaces import KVCacheConfig, ModelRunnerOutput
from engine_svc.core.scheduler_output import IntArray, SchedulerOutput
from engine_svc.executor.row_mirror import RowMirror, StepInputs
from engine_svc.executor.sampler import sample
from engine_svc.model.interface import ForwardBatch, Model


class ModelRunner:
    """Runs steps on one model and one KV cache."""

    def __init__(self, model: Model, config: KVCacheConfig, kv_cache: Any) -> None:
        """`kv_cache` is what the model allocated for the blocks of `config`."""
        self._model = model
        self._kv_cache = kv_cache
        self._mirror = RowMirror(config)
        # Step and logits of the rows that sample, between the two halves of a step.
        self._pending: tuple[int, torch.Tensor] | None = None

    @torch.inference_mode()
    def execute_model(self, output: SchedulerOutput) -> None:
        """Takes the delta in and computes the scheduled tokens."""
        self._mirror.apply(output)
        if not len(output.rows):
            return
        inputs = self._mirror.gather(output)
        logits = self._model.forward(self._forward_batch(output, inputs), self._kv_cache)
        self._mirror.advance(output)
        self._pending = (output.step, logits)

    @torch.inference_mode()
    def sample_tokens(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Samples a token for each row with `samples` set, and appends it to the row."""
        rows: IntArray = output.rows[output.samples]
        if not len(rows):
            self._pending = None
            return ModelRunnerOutput(output.step, np.zeros(0, np.int32))
        assert self._pending is not None, "a step is sampled before it is executed"
        step, logits = self._pending
        assert step == output.step, f"step {output.step} is sampled after the execution of step {step}"
        self._pending = None
        token_ids = sample(logits, self._mirror.sampling_batch(rows))
        self._mirror.append_sampled(rows, token_ids)
        return ModelRunnerOutput(output.step, token_ids)

    def _forward_batch(self, output: SchedulerOutput, inputs: StepInputs) -> ForwardBatch:
        longest = int(inputs.seq_lens.max())
        num_blocks = -(-longest // self._mirror.block_size)
        last = inputs.query_start[1:] - 1
        return ForwardBatch(
            token_ids=self._to_device(inputs.token_ids.astype(np.int64)),
            positions=self._to_device(inputs.positions),
            slot_mapping=self._to_device(inputs.slot_mapping[0]),
            query_start=self._to_device(inputs.query_start),
            seq_lens=self._to_device(inputs.seq_lens),
            block_tables=self._to_device(self._mirror.block_tables[0][output.rows, :num_blocks]),
            logits_indices=self._to_device(last[output.samples].astype(np.int64)),
            max_query_len=int(output.num_scheduled_tokens.max()),
            max_seq_len=longest,
        )

    def _to_device(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self._model.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._model.device, non_blocking=True)
