"""Requests that wait for a row, in the order in which they are admitted.

Both queues remove any request in constant or amortised constant time, so that an abort costs nothing in a long queue.
A preempted request comes back ahead of those that arrived after it.
"""

import heapq
from collections import OrderedDict
from typing import Protocol

from engine_svc.core.request import Request


class RequestQueue(Protocol):
    """What the scheduler needs of a queue."""

    def add(self, request: Request) -> None:
        """Adds a new request."""

    def put_back(self, request: Request) -> None:
        """Adds a preempted request."""

    def peek(self) -> Request:
        """The next request; the queue is not empty."""

    def remove(self, request: Request) -> None:
        """Removes a request that is in the queue."""

    def __len__(self) -> int:
        """Number of requests."""


class FCFSQueue:
    """First come, first served; preempted requests go to the head."""

    def __init__(self) -> None:
        self._requests: OrderedDict[tuple[int, int], Request] = OrderedDict()

    def add(self, request: Request) -> None:
        """Appends at the tail."""
        self._requests[request.key] = request

    def put_back(self, request: Request) -> None:
        """Puts at the head."""
        self._requests[request.key] = request
        self._requests.move_to_end(request.key, last=False)

    def peek(self) -> Request:
        """The head."""
        return next(iter(self._requests.values()))

    def remove(self, request: Request) -> None:
        """Removes the request wherever it stands."""
        del self._requests[request.key]

    def __len__(self) -> int:
        return len(self._requests)


class PriorityQueue:
    """Lowest priority number first, then first come. Removed entries stay in the heap until they surface."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, tuple[int, int]]] = []
        self._requests: dict[tuple[int, int], Request] = {}

    def add(self, request: Request) -> None:
        """Adds by priority and arrival."""
        self._requests[request.key] = request
        heapq.heappush(self._heap, (request.priority, request.sequence, request.key))

    def put_back(self, request: Request) -> None:
        """Adds by priority and arrival; an earlier arrival is ahead by itself."""
        self.add(request)

    def peek(self) -> Request:
        """The most urgent request."""
        while True:
            _, sequence, key = self._heap[0]
            request = self._requests.get(key)
            if request is not None and request.sequence == sequence:
                return request
            heapq.heappop(self._heap)

    def remove(self, request: Request) -> None:
        """Removes the request; its heap entry is dropped later."""
        del self._requests[request.key]
        if len(self._heap) > 2 * len(self._requests) + 64:
            self._heap = [(r.priority, r.sequence, r.key) for r in self._requests.values()]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._requests)


def make_request_queue(policy: str) -> RequestQueue:
    """The queue of a scheduling policy, 'fcfs' or 'priority'."""
    return PriorityQueue() if policy == "priority" else FCFSQueue()
