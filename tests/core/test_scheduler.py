"""What a step is made of: budget, order, chunks, blocks, preemption, prefixes."""

import numpy as np
import pytest

from shared.types import FinishReason
from tests.support.core_driver import CoreDriver, numbered_token


def expected(prompt: int, count: int) -> list[int]:
    return [numbered_token(prompt + i) for i in range(count)]


def test_one_request_from_prompt_to_length():
    driver = CoreDriver()
    driver.add(1, 6, max_tokens=3)
    driver.run()
    assert driver.tokens[0, 1] == expected(6, 3)
    assert driver.end(1).reason is FinishReason.LENGTH
    assert [s.num_scheduled_tokens.tolist() for s in driver.executor.steps] == [[6], [1], [1]]
    assert [s.num_computed_tokens.tolist() for s in driver.executor.steps] == [[0], [6], [7]]


def test_long_prompt_is_computed_in_chunks_without_output_until_its_end():
    driver = CoreDriver(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=64)
    driver.add(1, 20, max_tokens=2)
    driver.step()
    driver.step()
    assert not driver.tokens[0, 1]
    driver.run()
    assert [s.num_scheduled_tokens.tolist() for s in driver.executor.steps] == [[8], [8], [4], [1]]
    assert [s.samples.tolist() for s in driver.executor.steps] == [[False], [False], [True], [True]]
    assert driver.tokens[0, 1] == expected(20, 2)


def test_decode_is_never_starved_by_prompts():
    driver = CoreDriver(max_num_seqs=4, max_num_batched_tokens=8)
    driver.add(1, 4, max_tokens=20)
    driver.step()
    driver.add(2, 40, max_tokens=1)
    driver.add(3, 40, max_tokens=1)
    for count in range(2, 12):
        driver.step()
        assert len(driver.tokens[0, 1]) == count
        assert driver.executor.steps[-1].total_num_scheduled_tokens == 8
    driver.run()


def test_single_tokens_come_before_an_earlier_prompt_in_the_budget():
    driver = CoreDriver(max_num_seqs=4, max_num_batched_tokens=6, long_prefill_token_threshold=4)
    driver.add(1, 40, max_tokens=2)
    driver.add(2, 2, max_tokens=10)
    driver.step()
    assert driver.executor.steps[-1].num_scheduled_tokens.tolist() == [4, 2]
    for count in range(2, 6):
        driver.step()
        assert len(driver.tokens[0, 2]) == count
    driver.run()


def test_long_prefill_threshold_is_ignored_when_alone():
    driver = CoreDriver(long_prefill_token_threshold=4)
    driver.add(1, 20, max_tokens=1)
    driver.step()
    assert driver.executor.steps[-1].num_scheduled_tokens.tolist() == [20]
    driver.add(2, 20, max_tokens=1)
    driver.add(3, 20, max_tokens=1)
    driver.step()
    assert driver.executor.steps[-1].num_scheduled_tokens.tolist() == [4, 4]
    driver.run()


def test_max_num_seqs_keeps_arrival_order():
    driver = CoreDriver(max_num_seqs=2)
    for handle in range(1, 6):
        driver.add(handle, 4, max_tokens=2)
    driver.run()
    order = [added.request_id for step in driver.executor.steps for added in step.rows_added]
    assert order == ["1", "2", "3", "4", "5"]


def test_without_chunks_a_prompt_waits_for_the_whole_budget():
    driver = CoreDriver(max_num_batched_tokens=64, enable_chunked_prefill=False)
    driver.add(1, 40, max_tokens=2)
    driver.add(2, 40, max_tokens=2)
    driver.step()
    assert driver.executor.steps[-1].num_scheduled_tokens.tolist() == [40]
    driver.step()
    assert driver.executor.steps[-1].num_scheduled_tokens.tolist() == [1, 40]
    driver.run()


def test_preemption_takes_the_last_come_and_changes_no_token():
    driver = CoreDriver(num_blocks=17, block_size=4, max_model_len=64, max_num_seqs=4)
    for handle in (1, 2, 3):
        driver.add(handle, 16, max_tokens=20)
    preempted_steps = []
    while driver.core.has_work():
        driver.step()
        if driver.stats[-1].num_preempted:
            preempted_steps.append(driver.executor.steps[-1])
    assert preempted_steps
    # Nothing that waits is admitted in a step that preempts.
    assert all(not step.rows_added for step in preempted_steps)
    for handle in (1, 2, 3):
        assert driver.tokens[0, handle] == expected(16, 20)
        assert driver.end(handle).reason is FinishReason.LENGTH
    assert driver.end(1).num_preemptions == 0
    assert driver.end(3).num_preemptions >= 1
    assert driver.core.load().kv_cache_usage == 0.0


def test_preempted_request_resumes_before_later_ones_from_its_prefix():
    driver = CoreDriver(num_blocks=17, block_size=4, max_model_len=64, max_num_seqs=4)
    driver.add(1, 24, max_tokens=30)
    driver.add(2, 24, max_tokens=30)
    driver.add(3, 24, max_tokens=4)
    driver.run()
    admissions = [(a.request_id, a) for step in driver.executor.steps for a in step.rows_added]
    assert [name for name, _ in admissions] == ["1", "2", "2", "3"]
    resumed = admissions[2][1]
    assert resumed.num_prompt_tokens == 24
    assert len(resumed.token_ids) > 24
    assert resumed.num_computed_tokens % 4 == 0
    assert driver.tokens[0, 2] == expected(24, 30)


def test_priority_preempts_the_least_urgent_and_gives_its_budget_back():
    driver = CoreDriver(num_blocks=17, block_size=4, max_model_len=64, max_num_seqs=4, policy="priority")
    driver.add(1, 20, max_tokens=30, priority=9)
    driver.add(2, 20, max_tokens=30, priority=0)
    driver.add(3, 20, max_tokens=30, priority=5)
    driver.run()
    assert driver.end(2).num_preemptions == 0
    assert driver.end(1).num_preemptions >= 1
    for handle in (1, 2, 3):
        assert driver.tokens[0, handle] == expected(20, 30)


def test_priority_admits_the_most_urgent_first():
    driver = CoreDriver(max_num_seqs=1, policy="priority")
    for handle, priority in ((1, 3), (2, 1), (3, 2)):
        driver.add(handle, 4, max_tokens=1, priority=priority)
    driver.run()
    assert [a.request_id for s in driver.executor.steps for a in s.rows_added] == ["2", "3", "1"]


def test_admission_waits_until_the_whole_prompt_fits():
    driver = CoreDriver(num_blocks=17, block_size=4, max_model_len=64, max_num_seqs=4)
    driver.add(1, 40, max_tokens=4)
    driver.add(2, 40, max_tokens=4)
    driver.step()
    assert driver.core.load().num_running == 1
    driver.run()
    assert sum(s.num_preempted for s in driver.stats) == 0


@pytest.mark.parametrize(("prompt", "hit"), [(7, 4), (8, 4), (9, 8), (16, 12)])
def test_prefix_hit_leaves_a_token_to_compute(prompt, hit):
    driver = CoreDriver(block_size=4)
    tokens = list(range(3, 3 + prompt))
    driver.add(1, tokens, max_tokens=1)
    driver.run()
    driver.add(2, tokens, max_tokens=1)
    driver.run()
    (event,) = driver.first_scheduled[0, 2]
    assert event.num_cached_tokens == hit
    assert driver.end(2).num_cached_tokens == hit
    assert driver.executor.steps[-1].num_scheduled_tokens.tolist() == [prompt - hit]
    assert driver.tokens[0, 2] == expected(prompt, 1)


def test_prefix_is_shared_within_a_step_and_by_running_requests():
    driver = CoreDriver(block_size=4)
    tokens = list(range(3, 15))
    driver.add(1, tokens, max_tokens=8)
    driver.add(2, [*tokens, 99], max_tokens=8)
    driver.step()
    assert driver.executor.steps[-1].num_scheduled_tokens.tolist() == [12, 1]
    first, second = driver.executor.steps[-1].rows_added
    assert first.block_ids[0].tolist() == second.block_ids[0].tolist()[:3]
    driver.run()


def test_output_blocks_are_found_by_a_follow_up():
    driver = CoreDriver(block_size=4)
    driver.add(1, 6, max_tokens=7)
    driver.run()
    prompt = [(31 + i) % 90 + 3 for i in range(6)]
    driver.add(2, prompt + driver.tokens[0, 1] + [5], max_tokens=1)
    driver.run()
    assert driver.end(2).num_cached_tokens == 12


def test_salt_separates_prefixes():
    driver = CoreDriver(block_size=4)
    tokens = list(range(3, 15))
    for handle, salt in ((1, ""), (2, "a"), (3, "b"), (4, "a")):
        driver.add(handle, tokens, max_tokens=1, cache_salt=salt)
        driver.run()
    assert [driver.end(handle).num_cached_tokens for handle in (1, 2, 3, 4)] == [0, 0, 0, 8]


def test_prefix_statistics_leave_preempted_requests_out():
    driver = CoreDriver(num_blocks=17, block_size=4, max_model_len=64, max_num_seqs=4)
    driver.add(1, 24, max_tokens=30)
    driver.add(2, 24, max_tokens=30)
    driver.run()
    assert sum(s.num_preempted for s in driver.stats) >= 1
    assert sum(s.prefix_cache_queries for s in driver.stats) == 48
    assert sum(s.prefix_cache_hits for s in driver.stats) == 0


def test_prefix_caching_can_be_off():
    driver = CoreDriver(block_size=4, enable_prefix_caching=False)
    for handle in (1, 2):
        driver.add(handle, list(range(3, 15)), max_tokens=1)
        driver.run()
    assert driver.end(2).num_cached_tokens == 0


def test_block_table_cells_tell_workers_exactly_what_changed():
    driver = CoreDriver(block_size=4, max_num_seqs=4)
    for handle in (1, 2):
        driver.add(handle, 6, max_tokens=14)
    tables = np.zeros((4, 16), np.int32)
    while driver.core.has_work():
        driver.step()
        step = driver.executor.steps[-1]
        for added in step.rows_added:
            tables[added.row, : len(added.block_ids[0])] = added.block_ids[0]
        cells = step.block_table_cells
        assert not cells.groups.any()
        tables[cells.rows, cells.columns] = cells.block_ids
        for row, start, count in zip(step.rows, step.num_computed_tokens, step.num_scheduled_tokens, strict=True):
            used = tables[row, : -(-(start + count) // 4)]
            assert (used > 0).all()
            assert len(set(used.tolist())) == len(used)
    assert sum(len(step.block_table_cells.rows) for step in driver.executor.steps) == 2 * 3


def test_rows_removed_reach_the_workers_with_the_next_step():
    driver = CoreDriver()
    driver.add(1, 4, max_tokens=1)
    driver.run()
    row = driver.executor.steps[0].rows_added[0].row
    driver.add(2, 4, max_tokens=1)
    driver.run()
    assert driver.executor.steps[-1].rows_removed.tolist() == [row]


def test_contradicting_limits_are_refused():
    with pytest.raises(ValueError, match="KV cache holds 60 tokens, max_model_len is 64"):
        CoreDriver(num_blocks=16, block_size=4, max_model_len=64)
    with pytest.raises(ValueError, match="max_num_seqs 8"):
        CoreDriver(max_num_batched_tokens=4)
    with pytest.raises(ValueError, match="without chunked prefill"):
        CoreDriver(max_num_batched_tokens=32, enable_chunked_prefill=False)
