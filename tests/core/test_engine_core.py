"""How requests end: stops, lengths, aborts at every moment, deadlines, bad input."""

import pytest

from engine_svc.core.interfaces import INVALID_TOKEN, Abort
from shared.types import AbortCause, EngineRequest, FinishReason, SamplingParams
from tests.support.core_driver import EOS, VOCAB_SIZE, CoreDriver, numbered_token


def test_end_token_stops_without_a_stop_reason():
    driver = CoreDriver()
    driver.executor.tokens["1", 6] = EOS
    driver.add(1, 4, max_tokens=9)
    driver.run()
    assert driver.tokens[0, 1] == [numbered_token(4), numbered_token(5), EOS]
    assert (driver.end(1).reason, driver.end(1).stop_token_id) == (FinishReason.STOP, None)


def test_end_token_at_max_tokens_is_a_stop():
    driver = CoreDriver()
    driver.executor.tokens["1", 6] = EOS
    driver.add(1, 4, max_tokens=3)
    driver.run()
    assert driver.end(1).reason is FinishReason.STOP


def test_stop_token_id_is_the_reason_and_stays_in_the_output():
    driver = CoreDriver()
    driver.add(1, 4, max_tokens=9, stop_token_ids=(500, numbered_token(5)))
    driver.add(2, 4, max_tokens=3)
    driver.run()
    assert driver.tokens[0, 1] == [numbered_token(4), numbered_token(5)]
    assert (driver.end(1).reason, driver.end(1).stop_token_id) == (FinishReason.STOP, numbered_token(5))
    assert driver.end(2).reason is FinishReason.LENGTH


def test_end_token_wins_over_a_stop_token_id_of_the_same_number():
    driver = CoreDriver()
    driver.executor.tokens["1", 4] = EOS
    driver.add(1, 4, stop_token_ids=(EOS,))
    driver.run()
    assert driver.end(1).stop_token_id is None


def test_ignore_eos_goes_on_but_stop_ids_hold():
    driver = CoreDriver()
    driver.executor.tokens.update({("1", 4): EOS, ("1", 5): EOS})
    driver.add(1, 4, max_tokens=6, ignore_eos=True, stop_token_ids=(numbered_token(6),))
    driver.run()
    assert driver.tokens[0, 1] == [EOS, EOS, numbered_token(6)]


def test_max_model_len_ends_with_length():
    driver = CoreDriver(max_model_len=16)
    driver.add(1, 12, max_tokens=50)
    driver.add(2, 15, max_tokens=50)
    driver.add(3, 12, max_tokens=50, min_tokens=50)
    driver.run()
    assert [len(driver.tokens[0, handle]) for handle in (1, 2, 3)] == [4, 1, 4]
    assert all(driver.end(handle).reason is FinishReason.LENGTH for handle in (1, 2, 3))


def test_all_stop_tokens_are_given_to_the_sampler_even_with_ignore_eos():
    driver = CoreDriver()
    driver.add(1, 4, min_tokens=2, ignore_eos=True, stop_token_ids=(7,))
    driver.step()
    assert driver.executor.steps[0].rows_added[0].all_stop_token_ids == (7, EOS)


def test_resumed_output_counts_as_output():
    driver = CoreDriver()
    driver.add(1, 4, max_tokens=5, resume_token_ids=[100, 101, 102])
    driver.run()
    added = driver.executor.steps[0].rows_added[0]
    assert (added.num_prompt_tokens, len(added.token_ids)) == (4, 7)
    assert driver.tokens[0, 1] == [numbered_token(7), numbered_token(8)]
    assert driver.end(1).reason is FinishReason.LENGTH


@pytest.mark.parametrize("moment", ["before the add", "waiting", "running", "finished", "twice", "unknown"])
def test_abort_at_every_moment_is_silent_and_leaks_nothing(moment):
    driver = CoreDriver(max_num_seqs=1)
    driver.add(9, 4, max_tokens=6)
    if moment == "before the add":
        driver.abort(1)
    driver.add(1, 4, max_tokens=6)
    if moment in ("running", "finished"):
        driver.abort(9)
    if moment == "running":
        driver.step()
    if moment == "finished":
        driver.run()
    if moment == "unknown":
        driver.abort(77)
        driver.abort(1, client=5)
    if moment != "before the add":
        driver.abort(1)
    if moment == "twice":
        driver.abort(1)
    driver.run()
    ended = driver.finished[0, 1]
    assert len(ended) == (1 if moment in ("before the add", "finished") else 0)


def test_abort_between_execute_and_update_gives_no_output():
    driver = CoreDriver()
    driver.add(1, 4, max_tokens=6)
    driver.add(2, 4, max_tokens=6)
    driver.step()
    driver.aborts = [Abort(0, 1, AbortCause.STOP_STRING)]
    driver.step()
    assert len(driver.tokens[0, 1]) == 1
    assert len(driver.tokens[0, 2]) == 2
    driver.step()
    assert len(driver.executor.steps[-1].rows_removed) == 1
    driver.run()
    assert not driver.finished[0, 1]
    assert driver.stats[1].aborts_by_cause == {AbortCause.STOP_STRING: 1}


def test_abort_in_the_step_that_ends_the_request():
    driver = CoreDriver()
    driver.add(1, 4, max_tokens=1)
    driver.aborts = [Abort(0, 1, AbortCause.CLIENT)]
    driver.step()
    assert not driver.tokens[0, 1]
    assert not driver.finished[0, 1]
    driver.run()


def test_late_abort_does_not_hit_a_new_request_of_another_handle():
    driver = CoreDriver()
    driver.add(1, 4, max_tokens=1)
    driver.run()
    driver.add(2, 4, max_tokens=2)
    driver.abort(1)
    driver.run()
    assert driver.end(2).reason is FinishReason.LENGTH


@pytest.mark.parametrize("depth", [2, 3])
def test_batches_in_flight_change_no_output(depth):
    driver = CoreDriver(max_concurrent_batches=depth, num_blocks=17, max_num_seqs=4)
    for handle in (1, 2, 3):
        driver.add(handle, 16, max_tokens=20)
    driver.executor.tokens["2", 25] = EOS
    driver.run()
    for handle in (1, 3):
        assert driver.tokens[0, handle] == [numbered_token(16 + i) for i in range(20)]
    assert driver.tokens[0, 2] == [*(numbered_token(16 + i) for i in range(9)), EOS]
    assert driver.end(2).reason is FinishReason.STOP
    assert sum(s.num_preempted for s in driver.stats) >= 1


def test_filling_the_pipeline_comes_before_collecting():
    driver = CoreDriver(max_concurrent_batches=3)
    driver.add(1, 4, max_tokens=9)
    for _ in range(2):
        assert not driver.step().by_client.get(0, None) or not driver.tokens[0, 1]
    driver.step()
    assert len(driver.executor.steps) == 3
    assert len(driver.tokens[0, 1]) == 1
    driver.run()


def test_abort_with_batches_in_flight_and_the_row_reused():
    driver = CoreDriver(max_concurrent_batches=3, max_num_seqs=1)
    driver.add(1, 4, max_tokens=30)
    for _ in range(4):
        driver.step()
    driver.abort(1)
    driver.add(2, 5, max_tokens=3)
    driver.run()
    assert driver.tokens[0, 2] == [numbered_token(5 + i) for i in range(3)]
    assert not driver.finished[0, 1]


def test_clients_get_their_own_outputs_and_equal_handles_do_not_meet():
    driver = CoreDriver()
    driver.add(1, 4, client=10, max_tokens=2)
    driver.add(1, 6, client=11, max_tokens=3)
    driver.run()
    assert driver.tokens[10, 1] == [numbered_token(4), numbered_token(5)]
    assert driver.tokens[11, 1] == [numbered_token(6 + i) for i in range(3)]


def test_a_lost_client_takes_its_requests_with_it_and_nobody_elses():
    driver = CoreDriver(max_num_seqs=2)
    for client in (10, 11):
        for handle in (1, 2):
            driver.add(handle, 4, client=client, max_tokens=3)
    driver.step()
    driver.core.abort_client(10)
    driver.run()
    assert not driver.finished[10, 1]
    assert not driver.finished[10, 2]
    assert driver.end(1, client=11).reason is FinishReason.LENGTH
    assert driver.end(2, client=11).reason is FinishReason.LENGTH


def test_duplicate_handle_is_refused_and_the_first_goes_on():
    driver = CoreDriver()
    driver.add(1, 4, max_tokens=3)
    driver.add(1, 8, max_tokens=3)
    driver.run()
    first, second = driver.finished[0, 1]
    assert first.error.code == 6
    assert second.reason is FinishReason.LENGTH
    assert driver.tokens[0, 1] == [numbered_token(4 + i) for i in range(3)]


def test_deadline_ends_waiting_and_running_requests_with_an_output():
    driver = CoreDriver(max_num_seqs=1)
    driver.add(1, 4, max_tokens=40, deadline_seconds=6.5)
    driver.add(2, 4, max_tokens=40, deadline_seconds=2.5)
    driver.add(3, 4, max_tokens=2, deadline_seconds=500.0)
    driver.run()
    for handle in (1, 2):
        assert (driver.end(handle).reason, driver.end(handle).abort_cause) == (FinishReason.ABORT, AbortCause.DEADLINE)
    assert not driver.tokens[0, 2]
    assert driver.tokens[0, 1]
    assert driver.end(3).reason is FinishReason.LENGTH


def test_deadline_that_passed_before_the_first_step_computes_nothing():
    driver = CoreDriver()
    driver.add(1, 4, deadline_seconds=-1.0)
    driver.run()
    assert driver.end(1).abort_cause is AbortCause.DEADLINE
    assert not driver.executor.steps


def test_shutdown_ends_everything_with_an_output():
    driver = CoreDriver(max_num_seqs=1, max_concurrent_batches=2)
    driver.add(1, 4, max_tokens=40)
    driver.add(2, 4, client=3, max_tokens=40)
    driver.step()
    driver.core.abort_all(AbortCause.SHUTDOWN)
    driver.run()
    assert driver.end(1).abort_cause is AbortCause.SHUTDOWN
    assert driver.end(2, client=3).abort_cause is AbortCause.SHUTDOWN


def test_logits_that_are_no_numbers_fail_their_request_alone():
    driver = CoreDriver()
    driver.executor.tokens["1", 5] = INVALID_TOKEN
    driver.add(1, 4, max_tokens=5)
    driver.add(2, 4, max_tokens=5)
    driver.run()
    assert driver.tokens[0, 1] == [numbered_token(4)]
    assert (driver.end(1).reason, driver.end(1).error.code) == (FinishReason.ERROR, 13)
    assert driver.end(2).reason is FinishReason.LENGTH


def test_reset_prefix_cache_refuses_while_running_unless_told_to_preempt():
    driver = CoreDriver(block_size=4)
    driver.add(1, list(range(3, 15)), max_tokens=8)
    driver.step()
    driver.step()
    assert not driver.core.reset_prefix_cache(reset_running_requests=False)
    assert driver.core.reset_prefix_cache(reset_running_requests=True)
    driver.core.check_invariants()
    driver.run()
    assert driver.tokens[0, 1] == [numbered_token(12 + i) for i in range(8)]
    assert driver.end(1).num_preemptions == 1
    resumed = driver.executor.steps[2].rows_added[0]
    assert resumed.num_computed_tokens == 0
    assert driver.core.reset_prefix_cache(reset_running_requests=False)
    driver.add(2, list(range(3, 15)), max_tokens=1)
    driver.run()
    assert driver.end(2).num_cached_tokens == 0


def test_timings_are_of_the_first_schedule_and_count_preemption_in():
    driver = CoreDriver()
    driver.add(1, 4, max_tokens=3)
    driver.run()
    end = driver.end(1)
    # The clock ticks once for each schedule and once for each update.
    assert (end.queue_seconds, end.prefill_seconds, end.decode_seconds) == (1.0, 1.0, 4.0)


BAD = {
    "prompt_token_ids must be at least 1 token long, got 0": {"prompt_token_ids": []},
    "shorter than max_model_len 64, got 64 tokens": {"prompt_token_ids": [1] * 64},
    f"prompt_token_ids must be in [0, {VOCAB_SIZE}), got {VOCAB_SIZE}": {"prompt_token_ids": [1, VOCAB_SIZE]},
    "prompt_token_ids must be in [0, 1000), got -1": {"prompt_token_ids": [-1]},
    "resume_token_ids must be in": {"resume_token_ids": [5000]},
    "resume_token_ids must be shorter than max_tokens 4, got 4": {"resume_token_ids": [1, 2, 3, 4]},
    "max_tokens must be at least 1, got 0": {"max_tokens": 0},
    "min_tokens must be in [0, max_tokens 4], got 5": {"min_tokens": 5},
    "temperature must be in [0, 2], got nan": {"temperature": float("nan")},
    "temperature must be in [0, 2], got inf": {"temperature": float("inf")},
    "top_p must be in (0, 1], got 0": {"top_p": 0.0},
    "min_p must be in [0, 1], got -0.5": {"min_p": -0.5},
    "top_k must be in [-1, 2^31), got -2": {"top_k": -2},
    "seed must be in [0, 2^64), got -1": {"seed": -1},
    "stop_token_ids must be at most 128, got 129": {"stop_token_ids": (1,) * 129},
    "stop_token_ids must be in [0, 1000), got 1000": {"stop_token_ids": (1000,)},
    "eos_token_ids must be in [0, 1000), got 7000": {"eos_token_ids": (7000,)},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_requests_end_with_an_error_and_harm_nobody(message):
    fields = dict(BAD[message])
    sampling = {"max_tokens": 4, **{k: v for k, v in fields.items() if k in SamplingParams.__dataclass_fields__}}
    rest = {k: v for k, v in fields.items() if k not in sampling}
    driver = CoreDriver()
    driver.add(1, 4, max_tokens=3)
    request = EngineRequest(
        **{
            "handle": 2,
            "request_id": "bad",
            "prompt_token_ids": [1],
            "sampling": SamplingParams(**sampling),
            **rest,
        }
    )
    driver.core.add_request(0, request, 0.0)
    driver.run()
    end = driver.end(2)
    assert end.reason is FinishReason.ERROR
    assert end.error.code == 3
    assert message in end.error.message
    assert driver.end(1).reason is FinishReason.LENGTH
