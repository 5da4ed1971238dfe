"""Waiting requests, by priority (lower first), then by arrival."""

import heapq

from engine.request import Request


class RequestQueue:
    """A heap in the order of vLLM's priority policy; equal priorities: first come, first served."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, request: Request) -> None:
        """Adds a request; a preempted one keeps its arrival number, and so its place."""
        heapq.heappush(self._heap, (request.priority, request.arrival, request))

    def peek(self) -> Request:
        """The next request, which stays."""
        return self._heap[0][2]

    def pop(self) -> Request:
        """Takes the next request."""
        return heapq.heappop(self._heap)[2]

    def remove(self, request: Request) -> None:
        """Removes one request from anywhere in the queue; linear in its length."""
        self._heap = [entry for entry in self._heap if entry[2] is not request]
        heapq.heapify(self._heap)
