"""One engine step on one screen: schedule, launch, collect, update, emit.

Single-threaded. `async_engine.py` calls it and delivers the news. On a device the next step of
decodes is launched before the results of this one are read, so that the device never waits for the
host; where the runner computes at once, there is nothing to run ahead of.

    host     | schedule 1 | launch 1 | launch 2 | read 1, update | launch 3 | read 2, update |
    device                | step 1 ..................| step 2 .................| step 3 ....
"""

import time
from collections.abc import Callable

from engine.kv_connector import Connector
from engine.sched.scheduler import Scheduler
from engine.sched.stats import StepRates
from engine.step import SchedulerOutput, StepNews
from engine.worker.model_runner import ModelRunner, StepResults

MAX_MASK_WAIT_S = 0.02

Flight = tuple[SchedulerOutput, StepResults]
"""A step that was launched and whose results were not read yet."""


class EngineCore:
    """Scheduler, runner and connector of one node, stepped by the engine thread.

    `after_step`: called at the end of each step, with the cache as the step left it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        connector: Connector,
        *,
        after_step: Callable[[], None] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.rates = StepRates()
        self._runner = runner
        self._connector = connector
        self._after_step = after_step
        self._ahead: Flight | None = None
        self._last_step_s = 0.0
        self._last_end = 0.0

    def step(self) -> tuple[StepNews, bool]:
        """Runs one step; returns its news, and whether the next step may find work at once.

        It may if this step computed something or a transfer ended: a request that was just loaded
        decodes from the next step on, and no other event would start that step.
        """
        started = time.monotonic()
        flight, self._ahead = self._ahead or self._launch(self._schedule()), None
        if flight[1].lets_run_ahead and (next_plan := self.scheduler.schedule_ahead()) is not None:
            self._ahead = self._launch(next_plan)
        return self._collect(flight, started)

    def settle(self) -> StepNews:
        """Ends the step that runs ahead, if one does; returns its news.

        Before anything but the next step changes requests or cache.
        """
        if self._ahead is None:
            return StepNews()
        flight, self._ahead = self._ahead, None
        return self._collect(flight, time.monotonic())[0]

    def next_deadline(self) -> float | None:
        """Monotonic time (seconds) by which an idle engine must step again, if any."""
        return self._connector.worker.next_deadline()

    def close(self) -> None:
        """Ends transfers and claims; afterwards the arena may be freed."""
        try:
            if self._ahead is not None:
                self._ahead[1].read()  # then the device is done with the arena
        finally:
            self._connector.worker.close()
            self._connector.scheduler.close()

    def _schedule(self) -> SchedulerOutput:
        # The others of a step go on without those whose masks take longer than half of a step.
        self.scheduler.wait_for_masks(min(MAX_MASK_WAIT_S, self._last_step_s / 2))
        return self.scheduler.schedule()

    def _launch(self, output: SchedulerOutput) -> Flight:
        worker = self._connector.worker
        worker.start_save(output.connector)  # reads evicted blocks before they are written to
        self._runner.prepare(output)
        worker.start_load(output.connector)
        return output, self._runner.launch(output)

    def _collect(self, flight: Flight, started: float) -> tuple[StepNews, bool]:
        output, results = flight
        computed = results.read()
        transfers = self._connector.worker.get_finished()
        news = self.scheduler.update(computed, transfers)
        if self._after_step is not None:
            self._after_step()
        # What ran ahead began when the step before it ended.
        ended = time.monotonic()
        self._last_step_s, self._last_end = ended - max(started, self._last_end), ended
        self.rates.add(output.scheduled, self._last_step_s)
        return news, bool(output.scheduled) or transfers.is_news
