"""Daemon threads with bounded queues: a disk that hangs keeps no node from ending."""

import queue
import threading
from collections.abc import Callable

Job = Callable[[], None]


class IoThreads:
    """`count` threads that run jobs in order. A job reports its own failures and never raises."""

    def __init__(self, name: str, count: int, max_waiting: int) -> None:
        self._jobs: queue.Queue[Job | None] = queue.Queue(max_waiting + count)
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> bool:
        """False, and nothing done, while too many jobs wait."""
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return False
        return True

    def close(self, timeout_s: float) -> bool:
        """Ends the threads after the jobs that wait; False if they have not ended in time."""
        for _ in self._threads:
            try:
                self._jobs.put(None, timeout=timeout_s)
            except queue.Full:
                return False
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
