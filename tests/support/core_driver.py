"""Drives an EngineCore step by step, with a clock and aborts that the test sets and futures that the test resolves."""

from collections import defaultdict
from concurrent.futures import Future

import numpy as np

from engine_svc.core.engine_core import EngineCore
from engine_svc.core.interfaces import Abort, KVCacheConfig, ModelRunnerOutput
from engine_svc.core.scheduler import SchedulerConfig
from engine_svc.core.scheduler_output import SchedulerOutput
from shared.types import AbortCause, EngineRequest, FinishedRequest, SamplingParams

VOCAB_SIZE = 1000
EOS = 2


def numbered_token(position: int) -> int:
    """The token that RecordingExecutor samples at a position of the sequence: 100, 101, ..."""
    return 100 + position


class RecordingExecutor:
    """Keeps every step it is given; samples `tokens[(row's request id, position)]`, else numbered_token(position)."""

    def __init__(self) -> None:
        self.steps: list[SchedulerOutput] = []
        self.tokens: dict[tuple[str, int], int] = {}
        self._names: dict[int, str] = {}

    def execute_model(self, scheduler_output: SchedulerOutput) -> "Future[None]":
        self.steps.append(scheduler_output)
        return Future()

    def sample_tokens(self, scheduler_output: SchedulerOutput, grammar=None) -> "Future[ModelRunnerOutput]":
        for added in scheduler_output.rows_added:
            self._names[added.row] = added.request_id
        ends = scheduler_output.num_computed_tokens + scheduler_output.num_scheduled_tokens
        sampled = [
            self.tokens.get((self._names[row], int(end)), numbered_token(int(end)))
            for row, end, samples in zip(scheduler_output.rows.tolist(), ends, scheduler_output.samples, strict=True)
            if samples
        ]
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(ModelRunnerOutput(scheduler_output.step, np.array(sampled, np.int32)))
        return future


class CoreDriver:
    """A core with a RecordingExecutor. Invariants are checked after every step."""

    def __init__(self, *, num_blocks: int = 64, block_size: int = 4, max_model_len: int = 64, **scheduler) -> None:
        settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": max_model_len, **scheduler}
        config = SchedulerConfig(**settings)
        kv_config = KVCacheConfig(
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        self.executor = RecordingExecutor()
        self.core = EngineCore(config, kv_config, self.executor, vocab_size=VOCAB_SIZE)
        self.time = 0.0
        self.aborts: list[Abort] = []
        self.tokens: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.finished: dict[tuple[int, int], list[FinishedRequest]] = defaultdict(list)
        self.first_scheduled: dict[tuple[int, int], list] = defaultdict(list)
        self.stats: list = []

    # The step context.
    def now(self) -> float:
        self.time += 1.0
        return self.time

    def take_aborts(self) -> list[Abort]:
        aborts, self.aborts = self.aborts, []
        return aborts

    def wait(self, future):
        return future.result(timeout=0)

    # What a test does.
    def add(self, handle: int, prompt: int | list[int] = 4, *, client: int = 0, max_tokens: int = 4, **fields) -> None:
        """Adds a request of so many distinct prompt tokens, named by its handle."""
        tokens = [(handle * 31 + i) % 90 + 3 for i in range(prompt)] if isinstance(prompt, int) else prompt
        request_fields = {
            name: fields.pop(name)
            for name in ("priority", "cache_salt", "deadline_seconds", "resume_token_ids")
            if name in fields
        }
        request = EngineRequest(
            handle=handle,
            request_id=str(handle),
            prompt_token_ids=tokens,
            sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, **fields),
            eos_token_ids=(EOS,),
            **request_fields,
        )
        self.core.add_request(client, request, self.time)

    def abort(self, handle: int, client: int = 0, cause: AbortCause = AbortCause.CLIENT) -> None:
        self.core.abort_requests([Abort(client, handle, cause)])

    def step(self):
        outputs = self.core.step(self)
        self.core.check_invariants()
        self.stats.append(outputs.stats)
        for client, columns in outputs.by_client.items():
            counts = columns.num_tokens or [1] * len(columns.handles)
            start = 0
            for handle, count in zip(columns.handles, counts, strict=True):
                self.tokens[client, handle] += columns.token_ids[start : start + count]
                start += count
            for finished in columns.finished:
                self.finished[client, finished.handle].append(finished)
            for event in columns.first_scheduled:
                self.first_scheduled[client, event.handle].append(event)
        return outputs

    def run(self, limit: int = 1000) -> None:
        """Steps until nothing is left, and checks that nothing leaked."""
        for _ in range(limit):
            if not self.core.has_work():
                break
            self.step()
        assert not self.core.has_work(), "still busy"
        assert self.core.load().kv_cache_usage == 0.0

    def end(self, handle: int, client: int = 0) -> FinishedRequest:
        """The one end of a request."""
        (finished,) = self.finished[client, handle]
        return finished
