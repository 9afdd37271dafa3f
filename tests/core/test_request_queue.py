"""The waiting queues against a sorted list."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_svc.core.request import Request, build_request
from engine_svc.core.request_queue import make_request_queue
from shared.types import EngineRequest, SamplingParams


def make(sequence: int, priority: int = 0) -> Request:
    wire = EngineRequest(
        handle=sequence, request_id="r", prompt_token_ids=[1], sampling=SamplingParams(max_tokens=1), priority=priority
    )
    return build_request(0, wire, sequence=sequence, max_model_len=8, now=0.0)


def drain(queue) -> list[int]:
    order = []
    while len(queue):
        request = queue.peek()
        queue.remove(request)
        order.append(request.sequence)
    return order


def test_fcfs_puts_preempted_requests_at_the_head_in_order():
    queue = make_request_queue("fcfs")
    queue.add(make(5))
    for sequence in (3, 2, 1):  # The tail of the running batch is preempted first.
        queue.put_back(make(sequence))
    assert drain(queue) == [1, 2, 3, 5]


def test_priority_is_lower_first_then_arrival():
    queue = make_request_queue("priority")
    for sequence, priority in ((1, 5), (2, -1), (3, 5), (4, 0)):
        queue.add(make(sequence, priority))
    queue.put_back(make(0, 5))
    assert drain(queue) == [2, 4, 0, 1, 3]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@given(data=st.data())
def test_random_histories(policy, data):
    queue = make_request_queue(policy)
    held: list[Request] = []
    for sequence in range(data.draw(st.integers(0, 120))):
        if held and data.draw(st.booleans()):
            request = held.pop(data.draw(st.integers(0, len(held) - 1)))
            queue.remove(request)
            if data.draw(st.integers(0, 3)) == 0 and policy == "priority":
                queue.put_back(request)
                held.append(request)
        request = make(sequence, data.draw(st.integers(-2, 2)) if policy == "priority" else 0)
        queue.add(request)
        held.append(request)
    assert drain(queue) == [r.sequence for r in sorted(held, key=lambda r: (r.priority, r.sequence))]


def test_same_key_with_a_new_request_is_not_mistaken_for_the_old_one():
    queue = make_request_queue("priority")
    old = make(1, priority=0)
    queue.add(old)
    queue.remove(old)
    new = dataclasses.replace(make(1, priority=9), sequence=2)
    queue.add(new)
    assert queue.peek() is new


def test_release_and_resume_keep_the_output():
    request = make(1)
    request.output_token_ids = np.array([7, 8], np.int32)
    assert request.token_ids.tolist() == [1, 7, 8]
    assert request.num_tokens == 3
