"""Runs cases of greedy or seeded output through an EngineCore on a real model, under settings that must not matter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from engine_svc.executor.philox import token_gumbel
from engine_svc.executor.sampler import kept_tokens
from engine_svc.executor.uniproc import ExecutorOptions, UniprocExecutor
from engine_svc.model.interface import ForwardBatch, Model
from shared.types import EngineRequest
from tests.support.drive import CoreLimits, Driver, make_core, make_request
from tests.support.greedy_cases import CLOSE_GAP, comparable


@dataclass(kw_only=True)
class Run:
    """Settings of a run. `aborted` maps requests that are dropped to the step in which they are."""

    limits: CoreLimits
    batches: int = 1
    rounds: int = 1
    aborted: Mapping[int, int] = field(default_factory=dict)


def run_requests(model: Model, requests: Sequence[EngineRequest], run: Run) -> tuple[list[list[int]], Driver]:
    """Outputs in order of the requests; with several rounds the same requests come again when all have ended."""
    executor = UniprocExecutor(model, ExecutorOptions(max_concurrent_batches=run.batches))
    try:
        driver = Driver(make_core(executor, run.limits))
        got = []
        for client in range(1, run.rounds + 1):
            got = [driver.add(request, client) for request in requests]
            for index, step in run.aborted.items():
                driver.abort_at(driver.steps + step, requests[index].handle, client)
            driver.run()
        return [collected.token_ids for collected in got], driver
    finally:
        executor.shutdown()


def greedy_requests(cases: Sequence[Mapping[str, Any]], eos: tuple[int, ...]) -> list[EngineRequest]:
    """Requests that ask for as much as the cases hold. An end token in a case is its last token."""
    return [
        make_request(
            index,
            case["prompt_token_ids"],
            temperature=0.0,
            max_tokens=len(case["output_token_ids"]),
            eos_token_ids=eos,
        )
        for index, case in enumerate(cases)
    ]


def check_greedy(
    model: Model, cases: Sequence[Mapping[str, Any]], run: Run, eos: tuple[int, ...]
) -> tuple[Driver, int]:
    """Asserts the cases' outputs up to their first close step; returns the driver, and how many outputs were whole."""
    outputs, driver = run_requests(model, greedy_requests(cases, eos), run)
    for index, (case, output) in enumerate(zip(cases, outputs, strict=True)):
        expected = comparable(case)
        if index in run.aborted:
            assert len(output) < len(case["output_token_ids"]), f"case {index} was not aborted"
            expected = expected[: len(output)]
        assert output[: len(expected)] == expected, f"case {index}: {case.get('text', '')[:60]!r}"
    return driver, sum(output == case["output_token_ids"] for case, output in zip(cases, outputs, strict=True))


class LogitsRecorder:
    """A model whose logits are kept, row by row in the order in which they were computed."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.logits: list[torch.Tensor] = []

    @property
    def info(self):
        return self._model.info

    @property
    def device(self):
        return self._model.device

    def kv_cache_specs(self):
        return self._model.kv_cache_specs()

    def allocate_kv_cache(self, num_blocks: int, block_size: int):
        return self._model.allocate_kv_cache(num_blocks, block_size)

    def forward(self, batch: ForwardBatch, kv_cache: Any) -> torch.Tensor:
        logits = self._model.forward(batch, kv_cache)
        self.logits += logits.clone().unbind(0)
        return logits


def score_gap(logits: torch.Tensor, request: EngineRequest, output_index: int) -> float:
    """By how much the sampled token beats the next one in log-probability plus noise."""
    sampling = request.sampling
    scaled = (logits.double() / sampling.temperature)[None]
    scaled -= scaled.max()
    kept = kept_tokens(
        scaled, np.array([sampling.top_k], np.int32), np.array([sampling.top_p]), np.array([sampling.min_p])
    )[0]
    tokens = kept.nonzero()[:, 0]
    seed = torch.from_numpy(np.array([sampling.seed], np.uint64).view(np.int64))
    scores = scaled[0, tokens] + token_gumbel(seed, torch.tensor([output_index]), tokens)
    best = scores.topk(min(2, len(scores))).values
    return float(best[0] - best[1]) if len(best) == 2 else float("inf")


def seeded_cases(model: Model, requests: Sequence[EngineRequest], limits: CoreLimits) -> list[dict[str, Any]]:
    """Runs the requests one after the other and makes cases of their outputs, with the first close step of each."""
    recorder = LogitsRecorder(model)
    executor = UniprocExecutor(recorder, ExecutorOptions())
    cases = []
    try:
        driver = Driver(make_core(executor, limits))
        for request in requests:
            recorder.logits.clear()
            collected = driver.add(request)
            driver.run()
            assert len(recorder.logits) == len(collected.token_ids)
            gaps = [score_gap(logits, request, index) for index, logits in enumerate(recorder.logits)]
            close = [index for index, gap in enumerate(gaps) if gap < CLOSE_GAP]
            cases.append(
                {
                    "output_token_ids": collected.token_ids,
                    "first_close_step": close[0] if close else None,
                }
            )
    finally:
        executor.shutdown()
    return cases
