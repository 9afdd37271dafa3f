"""The executor around a small deterministic model: order, futures, failures, profiles, memory, bad logits."""

import json
import threading
from pathlib import Path

import pytest
import torch

from engine_svc.core.interfaces import KVCacheConfig, KVCacheSpec, ModelInfo
from engine_svc.executor.memory import GIB, cpu_kv_cache_memory, free_memory
from engine_svc.executor.uniproc import ExecutorOptions, UniprocExecutor
from engine_svc.model.interface import ForwardBatch
from shared.errors import InvalidRequestError, PreconditionError, StartupError
from shared.types import FinishReason, NumericsFingerprint
from tests.support.drive import CoreLimits, Driver, make_core, make_request

VOCAB_SIZE = 97
BAD_TOKEN = 13
LIMITS = CoreLimits(num_blocks=22, max_model_len=80, max_num_batched_tokens=16, long_prefill_token_threshold=7)


class SumModel:
    """Its next token is a function of all tokens and positions before it, read back from the paged cache."""

    def __init__(self, fail_at_call: int | None = None) -> None:
        self.calls = 0
        self.threads: set[int] = set()
        self.fail_at_call = fail_at_call
        self.gate = threading.Event()
        self.gate.set()

    @property
    def info(self) -> ModelInfo:
        return ModelInfo(
            vocab_size=VOCAB_SIZE,
            max_model_len=512,
            eos_token_ids=(2,),
            tokenizer_digest="",
            dtype="float32",
            numerics=NumericsFingerprint(),
        )

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def kv_cache_specs(self) -> tuple[KVCacheSpec, ...]:
        return (KVCacheSpec(num_layers=1, bytes_per_token=8),)

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> torch.Tensor:
        return torch.full((num_blocks, block_size), -(2**40), dtype=torch.int64)

    def forward(self, batch: ForwardBatch, kv_cache: torch.Tensor) -> torch.Tensor:
        self.gate.wait(30)
        self.calls += 1
        self.threads.add(threading.get_ident())
        if self.calls == self.fail_at_call:
            raise RuntimeError("the device is on fire")
        kv_cache.view(-1)[batch.slot_mapping] = batch.token_ids * (batch.positions + 1)
        logits = torch.zeros(len(batch.logits_indices), VOCAB_SIZE)
        for row, index in enumerate(batch.logits_indices.tolist()):
            sequence = int(torch.searchsorted(batch.query_start, index, right=True)) - 1
            end = int(batch.seq_lens[sequence])
            assert index == int(batch.query_start[sequence + 1]) - 1
            assert batch.block_tables.shape[1] * kv_cache.shape[1] >= end
            seen = kv_cache[batch.block_tables[sequence].long()].flatten()[:end]
            logits[row, next_token(int(seen.sum()))] = 9.0
            if int(batch.token_ids[index]) == BAD_TOKEN:
                logits[row, 0] = float("nan")
        return logits


def next_token(total: int) -> int:
    return 20 + total * 7919 % 73


def greedy_output(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(sum(token * (position + 1) for position, token in enumerate(tokens))))
    return tokens[len(prompt) :]


def start(model: SumModel, limits: CoreLimits = LIMITS, **options) -> tuple[UniprocExecutor, Driver]:
    executor = UniprocExecutor(model, ExecutorOptions(**options))
    return executor, Driver(make_core(executor, limits))


def prompts(count: int) -> list[list[int]]:
    return [[20 + (i * 31 + j * j) % 70 for j in range(1 + 3 * i)] for i in range(count)]


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_tokens_under_chunks_preemption_and_batches_in_flight(batches):
    model = SumModel()
    executor, driver = start(model, max_concurrent_batches=batches)
    got = [driver.add(make_request(i, prompt, temperature=0.0)) for i, prompt in enumerate(prompts(12))]
    driver.run()
    for prompt, collected in zip(prompts(12), got, strict=True):
        assert collected.token_ids == greedy_output(prompt, 16)
    assert driver.num_preempted > 0
    assert model.threads.isdisjoint({threading.get_ident()})
    assert len(model.threads) == 1
    executor.shutdown()
    executor.shutdown()


def test_steps_are_queued_while_the_model_computes():
    model = SumModel()
    executor, driver = start(model, max_concurrent_batches=3)
    model.gate.clear()
    collected = driver.add(make_request(1, [21, 22], temperature=0.0))
    # Two calls only fill the pipeline; the third would wait for the first result.
    assert not driver.step().by_client[1].handles
    assert not driver.step().by_client
    driver.clock.on_wait = model.gate.set
    driver.run()
    assert collected.token_ids == greedy_output([21, 22], 16)
    executor.shutdown()


def test_aborts_in_flight_free_the_row_for_another():
    model = SumModel()
    executor, driver = start(model, CoreLimits(max_num_seqs=2, num_blocks=40), max_concurrent_batches=3)
    for i in range(8):
        driver.add(make_request(i, prompts(8)[i], temperature=0.0))
        if i % 2:
            driver.abort_at(3 + i, i)
    driver.run()
    for i in range(8):
        collected, expected = driver.by_key[1, i], greedy_output(prompts(8)[i], 16)
        if collected.finished is None:
            assert i % 2
        assert collected.token_ids == expected[: len(collected.token_ids)]
        assert collected.finished is None or len(collected.token_ids) == 16
    executor.shutdown()


def test_bad_logits_end_one_request():
    executor, driver = start(SumModel(), max_concurrent_batches=3)
    bad, good = (driver.add(make_request(i, prompt, temperature=0.0)) for i, prompt in enumerate(([BAD_TOKEN], [21])))
    driver.run()
    assert bad.reason is FinishReason.ERROR
    assert good.token_ids == greedy_output([21], 16)
    executor.shutdown()


def test_failure_reaches_every_future_and_callback_with_its_own_error():
    executor, driver = start(SumModel(fail_at_call=6), max_concurrent_batches=3)
    reasons, called = [], threading.Event()
    executor.register_failure_callback(lambda reason: (reasons.append(reason), called.set()))
    driver.add(make_request(1, [21, 22], temperature=0.0))
    with pytest.raises(RuntimeError, match="on fire"):
        driver.run()
    assert called.wait(30)
    late: list[str] = []
    executor.register_failure_callback(late.append)
    assert reasons == late == ["RuntimeError: the device is on fire"]
    with pytest.raises(RuntimeError, match="on fire"):
        executor.start_profile("p")
    executor.shutdown()


def test_profile_is_a_chrome_trace(tmp_path):
    executor, driver = start(SumModel(), profile_dir=str(tmp_path / "profiles"))
    with pytest.raises(PreconditionError, match="no profile"):
        executor.stop_profile()
    for name in ("../escape", "", ".hidden", "a/b", "x" * 65):
        with pytest.raises(InvalidRequestError, match="name must be"):
            executor.start_profile(name)
    executor.start_profile("decode")
    with pytest.raises(PreconditionError, match="running"):
        executor.start_profile("decode")
    driver.add(make_request(1, [21, 22], temperature=0.0))
    driver.run()
    first = Path(executor.stop_profile())
    executor.start_profile("decode")
    second = Path(executor.stop_profile())
    assert [path.name for path in (first, second)] == ["decode.json", "decode-2.json"]
    names = {event.get("name") for event in json.loads(first.read_text())["traceEvents"]}
    assert "aten::searchsorted" in names
    executor.shutdown()


def test_profiles_without_a_folder_are_refused():
    executor, _ = start(SumModel())
    with pytest.raises(PreconditionError, match="without a profile folder"):
        executor.start_profile("p")
    executor.shutdown()


def test_a_cache_larger_than_memory_is_one_line():
    executor = UniprocExecutor(SumModel(), ExecutorOptions())
    config = KVCacheConfig(
        block_size=16, num_blocks=2**50, max_num_seqs=1, max_model_len=64, max_num_batched_tokens=64
    )  # fmt: skip
    with pytest.raises(StartupError, match=r"^KV cache of \d+ bytes does not fit into \d+ bytes of free memory$"):
        executor.initialize_kv_cache(config)
    executor.shutdown()


# --- memory -----------------------------------------------------------------------------------------------------------


def group(folder: Path, names: tuple[str, str, str], limit: str, usage: int, droppable: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {droppable}\n")


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def test_free_memory_is_the_tightest_group_of_version_2(tmp_path):
    listing = tmp_path / "cgroup"
    listing.write_text("0::/pod/container\n")
    group(tmp_path / "fs" / "pod" / "container", V2, "max", 500, 0)
    group(tmp_path / "fs" / "pod", V2, "4000", 3000, 200)
    assert free_memory(listing, tmp_path / "fs") == 1200
    group(tmp_path / "fs" / "pod" / "container", V2, "1000", 990, 5)
    assert free_memory(listing, tmp_path / "fs") == 15
    group(tmp_path / "fs" / "pod" / "container", V2, "1000", 2000, 5)
    assert free_memory(listing, tmp_path / "fs") == 0


def test_free_memory_of_version_1_and_of_a_namespace(tmp_path):
    listing = tmp_path / "cgroup"
    # The path is the host's and not seen from here; the group itself is at the root.
    listing.write_text("12:cpu,cpuacct:/docker/abc\n5:memory:/docker/abc\n0::/\n")
    group(tmp_path / "fs" / "memory", V1, "10000", 4000, 1000)
    assert free_memory(listing, tmp_path / "fs") == 7000


def test_free_memory_without_groups_is_the_machines(tmp_path):
    (tmp_path / "cgroup").write_text("0::/\n")
    assert free_memory(tmp_path / "cgroup", tmp_path) > 1 << 20
    assert free_memory(tmp_path / "none", tmp_path) > 1 << 20


def test_kv_cache_takes_a_quarter_and_at_most_4_gib():
    assert cpu_kv_cache_memory(100 * GIB) == 4 * GIB
    assert cpu_kv_cache_memory(8 * GIB) == 2 * GIB
    executor = UniprocExecutor(SumModel(), ExecutorOptions())
    assert 0 < executor.get_available_kv_cache_memory() <= 4 * GIB
    executor.shutdown()
