"""The core alone: milliseconds a step of schedule, update and encoding, with an executor that answers at once.

python bench/core_steps.py --sequences 1 64 256 2048
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from engine_svc.core.engine_core import EngineCore
from engine_svc.core.interfaces import Abort, KVCacheConfig, ModelRunnerOutput
from engine_svc.core.scheduler import SchedulerConfig
from engine_svc.core.scheduler_output import SchedulerOutput
from engine_svc.service.convert import encode_outputs
from shared.types import EngineRequest, SamplingParams

VOCAB_SIZE = 49_152
BLOCK_SIZE = 16


class InstantExecutor:
    """Samples token 1234 for every row, in no time."""

    max_concurrent_batches = 1

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[None]:
        """Does nothing."""
        return _done(None)

    def sample_tokens(self, scheduler_output: SchedulerOutput, grammar=None) -> Future[ModelRunnerOutput]:
        """Answers at once."""
        count = int(scheduler_output.samples.sum())
        return _done(ModelRunnerOutput(scheduler_output.step, np.full(count, 1234, np.int32)))


def _done(result):
    future = Future()
    future.set_result(result)
    return future


class Surroundings:
    """A step context without aborts."""

    now: Callable[[], float] = staticmethod(time.monotonic)

    def take_aborts(self) -> Sequence[Abort]:
        """None."""
        return ()

    def wait(self, future):
        """The result is there already."""
        return future.result()


def make_core(num_sequences: int, prompt: int, output: int) -> EngineCore:
    """A core that holds all sequences at once."""
    length = prompt + output + BLOCK_SIZE
    budget = max(8192, num_sequences)
    scheduler = SchedulerConfig(max_num_seqs=num_sequences, max_num_batched_tokens=budget, max_model_len=length)
    kv = KVCacheConfig(
        block_size=BLOCK_SIZE,
        num_blocks=num_sequences * (length // BLOCK_SIZE + 1) + 1,
        max_num_seqs=num_sequences,
        max_model_len=length,
        max_num_batched_tokens=budget,
    )
    return EngineCore(scheduler, kv, InstantExecutor(), vocab_size=VOCAB_SIZE)


def measure(num_sequences: int, prompt: int, output: int) -> dict[str, float]:
    """Runs all sequences to their end and returns figures in milliseconds and microseconds."""
    core = make_core(num_sequences, prompt, output)
    random = np.random.default_rng(0)
    for handle in range(num_sequences):
        tokens = random.integers(0, VOCAB_SIZE, prompt)
        sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        core.add_request(
            0, EngineRequest(handle=handle, request_id="", prompt_token_ids=tokens, sampling=sampling), 0.0
        )
    surroundings, steps = Surroundings(), []
    while core.has_work():
        start = time.perf_counter()
        outputs = core.step(surroundings)
        for of_client in outputs.by_client.values():
            encode_outputs(of_client)
        steps.append((time.perf_counter() - start) * 1e3)
    return {
        "sequences": num_sequences,
        "steps": len(steps),
        "step_p50_ms": round(statistics.median(steps), 3),
        "step_mean_ms": round(statistics.fmean(steps), 3),
        "us_per_token": round(sum(steps) * 1e3 / (num_sequences * output), 3),
    }


def main() -> None:
    """Prints one JSON line for each number of sequences: the median of the runs, by mean step time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 64, 256, 2048])
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens")
    parser.add_argument("--output", type=int, default=128, help="output tokens")
    parser.add_argument("--runs", type=int, default=3, help="runs after one that warms up")
    arguments = parser.parse_args()
    for count in arguments.sequences:
        runs = [measure(count, arguments.prompt, arguments.output) for _ in range(arguments.runs + 1)][1:]
        runs.sort(key=lambda run: run["step_mean_ms"])
        print(json.dumps(runs[len(runs) // 2]), flush=True)


if __name__ == "__main__":
    main()
