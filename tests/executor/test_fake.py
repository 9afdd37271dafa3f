"""The fake executor under the real core: predicted tokens whatever happens, and every wrong step refused."""

import dataclasses
import random
import threading
from concurrent.futures import Future

import numpy as np
import pytest

from engine_svc.core.interfaces import INVALID_TOKEN, Executor, KVCacheConfig
from engine_svc.core.scheduler_output import BlockTableCells, RowAdded, SchedulerOutput
from engine_svc.executor.fake import FakeExecutor, FakeExecutorOptions, fake_token, first_fake_token
from shared.errors import PreconditionError, StartupError
from shared.types import FinishReason, SamplingParams
from tests.support.drive import CoreLimits, Driver, expected_output, make_core, make_request

LIMITS = CoreLimits()


def driver_for(limits: CoreLimits = LIMITS, **options) -> tuple[FakeExecutor, Driver]:
    executor = FakeExecutor(FakeExecutorOptions(**{"synchronous": True, **options}))
    return executor, Driver(make_core(executor, limits))


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_tokens_are_a_function_of_prompt_seed_and_index():
    tokens = [fake_token([5, 6], 7, index, 1000) for index in range(200)]
    assert all(first_fake_token(1000) <= token < 1000 for token in tokens)
    assert len(set(tokens)) > 150
    assert tokens != [fake_token([5, 6], 8, index, 1000) for index in range(200)]
    assert tokens != [fake_token([5, 7], 7, index, 1000) for index in range(200)]
    assert fake_token(np.array([5, 6], np.int64), 7, 3, 1000) == tokens[3]


def test_tokens_never_change():
    assert [fake_token([1, 2, 3], 0, index, 1000) for index in range(5)] == [925, 126, 244, 415, 923]
    assert fake_token([1], 2**64 - 1, 0, 49152) == fake_token([1], 2**64 - 1, 0, 49152)


@pytest.mark.parametrize("batches", [1, 2, 3])
@pytest.mark.parametrize("synchronous", [True, False])
def test_core_returns_the_predicted_tokens(batches, synchronous):
    executor, driver = driver_for(max_concurrent_batches=batches, synchronous=synchronous, eos_every=40)
    requests = [make_request(i, range(i, i + 3 + 5 * i), max_tokens=20, seed=i) for i in range(12)]
    got = [driver.add(request) for request in requests]
    driver.run()
    for request, collected in zip(requests, got, strict=True):
        expected = expected_output(FakeExecutorOptions(eos_every=40), request, LIMITS.max_model_len)
        assert (collected.token_ids, collected.reason, collected.finished.stop_token_id) == expected
    assert {collected.reason for collected in got} == {FinishReason.STOP, FinishReason.LENGTH}
    executor.shutdown()


@pytest.mark.parametrize("batches", [1, 3])
def test_random_loads_with_few_blocks_hits_aborts_and_resumed_tokens(batches):
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    limits = CoreLimits(num_blocks=40, max_num_batched_tokens=24, long_prefill_token_threshold=9)
    options = FakeExecutorOptions(synchronous=True, max_concurrent_batches=batches, eos_every=60, vocab_size=300)
    executor = FakeExecutor(options)
    driver = Driver(make_core(executor, limits))
    common = [rng.randrange(300) for _ in range(40)]
    requests, aborted = [], set()
    for handle in range(60):
        prompt = common[: rng.randrange(40)] + [rng.randrange(300) for _ in range(rng.randrange(1, 30))]
        request = make_request(
            handle, prompt, max_tokens=rng.randrange(1, 50), seed=rng.randrange(2**64), stop_token_ids=(77,),
            eos_token_ids=(2, 99),
        )  # fmt: skip
        if rng.random() < 0.3:
            whole = expected_output(options, request, limits.max_model_len)[0]
            request = dataclasses.replace(request, resume_token_ids=whole[: rng.randrange(len(whole))])
        requests.append(request)
        driver.add(request)
        if rng.random() < 0.2:
            aborted.add(handle)
            driver.abort_at(driver.steps + rng.randrange(1, 60), handle)
        for _ in range(rng.randrange(4)):
            driver.step()
    driver.run()
    for request in requests:
        collected = driver.by_key[1, request.handle]
        tokens, reason, stop = expected_output(options, request, limits.max_model_len)
        if request.handle in aborted and collected.finished is None:
            assert collected.token_ids == tokens[: len(collected.token_ids)]
            continue
        assert (collected.token_ids, collected.reason, collected.finished.stop_token_id) == (tokens, reason, stop)
    assert driver.num_preempted > 0
    assert driver.prefix_hits > 0
    executor.shutdown()


def test_min_tokens_masks_end_and_stop_tokens():
    executor, driver = driver_for(eos_every=3, vocab_size=10)
    requests = [
        make_request(i, [i], max_tokens=12, min_tokens=9, stop_token_ids=(6, 7), seed=i, eos_token_ids=(2, 8))
        for i in range(8)
    ]
    got = [driver.add(request) for request in requests]
    driver.run()
    for request, collected in zip(requests, got, strict=True):
        tokens, reason, stop = expected_output(
            FakeExecutorOptions(eos_every=3, vocab_size=10), request, LIMITS.max_model_len
        )
        assert not {2, 6, 7, 8} & set(collected.token_ids[:9])
        assert (collected.token_ids, collected.reason, collected.finished.stop_token_id) == (tokens, reason, stop)
    executor.shutdown()


def test_invalid_token_ends_one_request_only():
    executor, driver = driver_for(invalid_token_trigger=7, max_concurrent_batches=3)
    bad, good = driver.add(make_request(1, [5, 7])), driver.add(make_request(2, [5, 6]))
    driver.run()
    assert bad.reason is FinishReason.ERROR
    assert bad.finished.error.reason == "LOGITS_NOT_FINITE"
    assert good.reason is FinishReason.LENGTH
    assert len(good.token_ids) == 16
    executor.shutdown()


def test_abort_while_a_step_is_held():
    executor, driver = driver_for(synchronous=False)
    aborted, kept = driver.add(make_request(1, [1, 2])), driver.add(make_request(2, [1, 3]))
    executor.hold()
    waits = []

    def abort_in_flight():
        if not waits:
            executor.wait_for_step(1)
            driver.clock.aborts += driver.aborts_at.pop(0)
            executor.release()
        waits.append(1)

    driver.abort_at(0, 1)
    driver.clock.on_wait = abort_in_flight
    driver.run()
    assert (aborted.token_ids, aborted.finished) == ([], None)
    assert len(kept.token_ids) == 16
    executor.shutdown()


@pytest.mark.parametrize("synchronous", [True, False])
def test_failed_step_fails_all_later_ones_and_calls_back_once(synchronous):
    executor, driver = driver_for(fail_at_step=3, synchronous=synchronous)
    reasons, called = [], threading.Event()
    executor.register_failure_callback(lambda reason: (reasons.append(reason), called.set()))
    driver.add(make_request(1, [1, 2, 3]))
    with pytest.raises(RuntimeError, match="step 3 fails"):
        driver.run()
    assert called.wait(30)
    late: list[str] = []
    executor.register_failure_callback(late.append)
    assert reasons == late == ["RuntimeError: step 3 fails, as the options ask for"]
    with pytest.raises(RuntimeError, match="step 3 fails"):
        executor.execute_model(empty_step(9)).result(30)
    executor.shutdown()
    executor.shutdown()


@pytest.mark.parametrize("synchronous", [True, False])
def test_hanging_step_times_out_and_ends_at_shutdown(synchronous):
    executor, driver = driver_for(hang_at_step=2, synchronous=synchronous)
    driver.clock.wait_seconds = 0.05
    driver.add(make_request(1, [1, 2, 3]))
    with pytest.raises(TimeoutError):
        driver.run()
    executor.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        executor.execute_model(empty_step(9)).result(30)


def test_step_time_passes_outside_the_callers_thread():
    executor, _ = driver_for(step_seconds=0.05, synchronous=False)
    future = executor.execute_model(empty_step(1))
    assert isinstance(future, Future)
    future.result(30)
    executor.shutdown()


def test_too_little_memory_is_a_startup_error():
    with pytest.raises(StartupError, match="does not fit into 100 bytes"):
        driver_for(available_kv_cache_memory=100)


def test_profile_is_a_chrome_trace_of_the_steps(tmp_path):
    executor, driver = driver_for(profile_dir=str(tmp_path / "profiles"))
    with pytest.raises(PreconditionError, match="no profile"):
        executor.stop_profile()
    executor.start_profile("one")
    with pytest.raises(PreconditionError, match="running"):
        executor.start_profile("two")
    driver.add(make_request(1, [1, 2, 3], max_tokens=3))
    driver.run()
    path = executor.stop_profile()
    assert path == str(tmp_path / "profiles" / "one.json")
    assert '"step 3"' in (tmp_path / "profiles" / "one.json").read_text()
    executor.shutdown()


# --- what the fake refuses --------------------------------------------------------------------------------------------


def no_cells() -> BlockTableCells:
    return BlockTableCells(groups=ids(), rows=ids(), columns=ids(), block_ids=ids())


def empty_step(step: int) -> SchedulerOutput:
    return SchedulerOutput(
        step=step,
        rows_removed=ids(),
        rows_added=(),
        block_table_cells=no_cells(),
        rows=ids(),
        num_computed_tokens=ids(),
        num_scheduled_tokens=ids(),
        samples=np.zeros(0, np.bool_),
    )


def added(row: int, tokens: list[int], blocks: list[int], computed: int = 0) -> RowAdded:
    return RowAdded(
        row=row,
        request_id="r",
        token_ids=ids(*tokens),
        num_prompt_tokens=len(tokens),
        num_computed_tokens=computed,
        sampling=SamplingParams(max_tokens=8),
        all_stop_token_ids=(),
        block_ids=(ids(*blocks),),
    )


def step_of(step: int, *parts: tuple[int, int, int, bool], rows_added=(), removed=(), cells=None) -> SchedulerOutput:
    """Parts are (row, start, count, samples)."""
    columns = list(zip(*parts, strict=True)) if parts else [(), (), (), ()]
    return dataclasses.replace(
        empty_step(step),
        rows_removed=ids(*removed),
        rows_added=tuple(rows_added),
        block_table_cells=cells or no_cells(),
        rows=ids(*columns[0]),
        num_computed_tokens=ids(*columns[1]),
        num_scheduled_tokens=ids(*columns[2]),
        samples=np.array(columns[3], np.bool_),
    )


def ready_fake() -> FakeExecutor:
    executor: Executor = FakeExecutor(FakeExecutorOptions(synchronous=True))
    executor.initialize_kv_cache(
        KVCacheConfig(block_size=4, num_blocks=16, max_num_seqs=4, max_model_len=32, max_num_batched_tokens=32)
    )
    return executor


def run(executor: FakeExecutor, output: SchedulerOutput) -> list[int]:
    executor.execute_model(output).result(0)
    return executor.sample_tokens(output).result(0).sampled_token_ids.tolist()


FIRST = [added(0, [1, 2, 3, 4, 5], [3, 4])]


def test_a_right_sequence_of_steps_is_accepted():
    executor = ready_fake()
    assert run(executor, step_of(1, (0, 0, 5, True), rows_added=FIRST)) == [fake_token([1, 2, 3, 4, 5], 0, 0, 1000)]
    cells = BlockTableCells(groups=ids(0), rows=ids(0), columns=ids(2), block_ids=ids(7))
    for start in (5, 6, 7):
        run(executor, step_of(2, (0, start, 1, True)))
    run(executor, step_of(5, (0, 8, 1, True), cells=cells))
    hit = added(1, [1, 2, 3, 4, 9], [3, 8], computed=4)
    run(executor, step_of(6, (0, 9, 1, True), (1, 4, 1, True), rows_added=[hit]))
    run(executor, step_of(7, (1, 5, 1, True), removed=[0]))


@pytest.mark.parametrize(
    ("message", "second"),
    [
        ("start at", step_of(2, (0, 6, 1, True))),
        ("before it is known", step_of(2, (0, 5, 2, True))),
        ("samples before", step_of(2, (0, 5, 1, False))),
        ("scheduled twice", step_of(2, (0, 5, 1, True), (0, 5, 1, True))),
        ("computes nothing", step_of(2, (0, 5, 0, True))),
        ("empty row is scheduled", step_of(2, (2, 0, 1, True))),
        ("empty row is scheduled", step_of(2, (0, 5, 1, True), removed=[0])),
        ("removed row is empty", step_of(2, removed=[1])),
        ("removed twice", step_of(2, removed=[0, 0])),
        ("occupied row", step_of(2, rows_added=[added(0, [1], [5])])),
        ("added twice", step_of(2, rows_added=[added(1, [1], [5]), added(1, [1], [5])])),
        ("nothing to compute", step_of(2, rows_added=[added(1, [1, 2, 3, 4], [3], computed=4)])),
        ("has no block", step_of(2, (1, 0, 5, True), rows_added=[added(1, [1, 2, 3, 4, 5], [5])])),
        ("out of range", step_of(2, (1, 0, 1, True), rows_added=[added(1, [1], [16])])),
        ("one slot", step_of(2, (0, 5, 1, True), (1, 0, 2, True), rows_added=[added(1, [8, 9], [4])])),
        ("one block", step_of(2, (0, 5, 1, True), (1, 0, 1, True), rows_added=[added(1, [8], [4])])),
        # A block of a running request is handed out again: its owner reads another's keys.
        ("row 0 reads another", step_of(2, (0, 5, 1, True), (1, 0, 1, True), rows_added=[added(1, [8], [3])])),
        # A prefix hit on other tokens, and one on a block that was never written.
        ("row 1 reads another", step_of(2, (1, 4, 1, True), rows_added=[added(1, [1, 2, 9, 4, 5], [3, 5], 4)])),
        ("row 1 reads nothing", step_of(2, (1, 4, 1, True), rows_added=[added(1, [1, 2, 3, 4, 5], [9, 5], 4)])),
    ],
)
def test_wrong_steps_are_refused(message, second):
    executor = ready_fake()
    run(executor, step_of(1, (0, 0, 5, True), rows_added=FIRST))
    with pytest.raises(AssertionError, match=message):
        run(executor, second)


def test_invalid_token_is_sampled_on_the_trigger():
    executor = FakeExecutor(FakeExecutorOptions(synchronous=True, invalid_token_trigger=5))
    executor.initialize_kv_cache(
        KVCacheConfig(block_size=4, num_blocks=16, max_num_seqs=4, max_model_len=32, max_num_batched_tokens=32)
    )
    assert run(executor, step_of(1, (0, 0, 5, True), rows_added=FIRST)) == [INVALID_TOKEN]
    # The row goes on until the scheduler hears of it.
    assert len(run(executor, step_of(2, (0, 5, 1, True)))) == 1
