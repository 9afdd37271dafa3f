"""Turns a SchedulerOutput into tensors, runs the model, and samples.

It owns the KV cache tensors and the row mirror, and feeds sampled tokens back into the mirror itself. Knows neither
threads nor requests: rows are all it sees. Invariant: steps come in order, and each is executed, then sampled.
"""

from typing import Any

import numpy as np
import torch

from engine_svc.core.interfaces import KVCacheConfig, ModelRunnerOutput, RowLogprobs
from engine_svc.core.scheduler_output import IntArray, SchedulerOutput
from engine_svc.executor.logprobs import sampled_logprobs
from engine_svc.executor.prompt_outputs import read_prompts
from engine_svc.executor.prompt_shares import PromptResults, PromptShare, plan_prompt_shares
from engine_svc.executor.row_mirror import RowMirror, StepInputs
from engine_svc.executor.row_options import LogprobsWanted
from engine_svc.executor.sampler import final_logits, sample
from engine_svc.executor.sampling_batch import SamplingBatch
from engine_svc.model.interface import ForwardBatch, Model


class ModelRunner:
    """Runs steps on one model and one KV cache."""

    def __init__(
        self, model: Model, config: KVCacheConfig, kv_cache: Any, *, logprobs_mode: str = "raw_logprobs"
    ) -> None:
        """`kv_cache` is what the model allocated for the blocks of `config`.

        Log-probabilities of sampled tokens are those of the model, or with "processed_logprobs" those of the
        distribution that the token was sampled from.
        """
        self._model = model
        self._kv_cache = kv_cache
        self._mirror = RowMirror(config)
        # Step and logits of the rows that sample, between the two halves of a step.
        self._pending: tuple[int, torch.Tensor] | None = None
        self._prompt_results: PromptResults | None = None
        self._processed = logprobs_mode == "processed_logprobs"

    @torch.inference_mode()
    def execute_model(self, output: SchedulerOutput) -> None:
        """Takes the delta in and computes the scheduled tokens."""
        self._mirror.apply(output)
        if not len(output.rows):
            return
        inputs = self._mirror.gather(output)
        shares = plan_prompt_shares(output, inputs, self._mirror) if self._mirror.options.reads_prompts else []
        batch = self._forward_batch(output, inputs, shares)
        logits = self._forward_with_prompts(batch, shares) if shares else self._model.forward(batch, self._kv_cache)
        self._mirror.advance(output)
        self._pending = (output.step, logits)

    @torch.inference_mode()
    def sample_tokens(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Samples a token for each row with `samples` set, and appends it to the row."""
        rows: IntArray = output.rows[output.samples]
        if not len(rows):
            self._pending = None
            return self._output(output.step, np.zeros(0, np.int32), ())
        assert self._pending is not None, "a step is sampled before it is executed"
        step, logits = self._pending
        assert step == output.step, f"step {output.step} is sampled after the execution of step {step}"
        self._pending = None
        batch = self._mirror.sampling_batch(rows)
        wanted = self._mirror.options.logprobs_wanted(rows)
        token_ids, logprobs = (
            self._sample_with_logprobs(logits, batch, wanted) if wanted else (sample(logits, batch), ())
        )
        self._mirror.append_sampled(rows, token_ids)
        return self._output(output.step, token_ids, logprobs)

    def _sample_with_logprobs(
        self, logits: torch.Tensor, batch: SamplingBatch, wanted: list[LogprobsWanted]
    ) -> tuple[IntArray, tuple[RowLogprobs, ...]]:
        indices = np.array([one.index for one in wanted], np.int64)
        # A copy: sampling changes the logits.
        raw = None if self._processed else logits[torch.from_numpy(indices).to(logits.device)]
        token_ids = sample(logits, batch)
        reported = final_logits(logits, batch, indices) if raw is None else raw
        return token_ids, sampled_logprobs(reported, token_ids, wanted)

    def _output(self, step: int, token_ids: IntArray, logprobs: tuple[RowLogprobs, ...]) -> ModelRunnerOutput:
        results, self._prompt_results = self._prompt_results, None
        if results is None:
            return ModelRunnerOutput(step, token_ids, logprobs)
        return ModelRunnerOutput(step, token_ids, logprobs, tuple(results.prompt_logprobs), tuple(results.embeddings))

    def _forward_with_prompts(self, batch: ForwardBatch, shares: list[PromptShare]) -> torch.Tensor:
        """Logits of the rows that sample; what the prompts give is kept for the second half of the step."""
        hidden = self._model.hidden_states(batch, self._kv_cache)
        num_samples = len(hidden) - sum(share.stop - share.start for share in shares)
        self._prompt_results = read_prompts(shares, hidden[num_samples:], self._model, self._mirror)
        return self._model.compute_logits(hidden[:num_samples])

    def _forward_batch(self, output: SchedulerOutput, inputs: StepInputs, shares: list[PromptShare]) -> ForwardBatch:
        """Wants the last tokens of the rows that sample, then the tokens of the shares."""
        longest = int(inputs.seq_lens.max())
        num_blocks = -(-longest // self._mirror.block_size)
        wanted = (inputs.query_start[1:] - 1)[output.samples].astype(np.int64)
        if shares:
            wanted = np.concatenate([wanted, *(share.indices for share in shares)])
        return ForwardBatch(
            token_ids=self._to_device(inputs.token_ids.astype(np.int64)),
            positions=self._to_device(inputs.positions),
            slot_mapping=self._to_device(inputs.slot_mapping[0]),
            query_start=self._to_device(inputs.query_start),
            seq_lens=self._to_device(inputs.seq_lens),
            block_tables=self._to_device(self._mirror.block_tables[0][output.rows, :num_blocks]),
            logits_indices=self._to_device(wanted),
            max_query_len=int(output.num_scheduled_tokens.max()),
            max_seq_len=longest,
        )

    def _to_device(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self._model.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._model.device, non_blocking=True)
