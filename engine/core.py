"""One engine step on one screen: schedule, execute, update, emit.

Synchronous and single-threaded. `async_engine.py` calls it and delivers the news.
"""

import time
from collections.abc import Callable

from engine.kv_connector import Connector
from engine.sched.scheduler import Scheduler
from engine.sched.stats import StepRates
from engine.step import StepNews
from engine.worker.model_runner import ModelRunner

MAX_MASK_WAIT_S = 0.02


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
        self._last_step_s = 0.0

    def step(self) -> tuple[StepNews, bool]:
        """Runs one step; returns its news, and whether the next step may find work at once.

        It may if this step computed something or a transfer ended: a request that was just loaded
        decodes from the next step on, and no other event would start that step.
        """
        # The others of a step go on without those whose masks take longer than half of a step.
        self.scheduler.wait_for_masks(min(MAX_MASK_WAIT_S, self._last_step_s / 2))
        started = time.monotonic()
        output = self.scheduler.schedule()
        worker = self._connector.worker
        worker.start_save(output.connector)  # reads evicted blocks before they are written to
        self._runner.prepare(output)
        worker.start_load(output.connector)
        computed = self._runner.execute(output)
        transfers = worker.get_finished()
        news = self.scheduler.update(computed, transfers)
        if self._after_step is not None:
            self._after_step()
        self._last_step_s = time.monotonic() - started
        self.rates.add(output.scheduled, self._last_step_s)
        return news, bool(output.scheduled) or transfers.is_news

    def next_deadline(self) -> float | None:
        """Monotonic time (seconds) by which an idle engine must step again, if any."""
        return self._connector.worker.next_deadline()

    def close(self) -> None:
        """Ends transfers and claims; afterwards the arena may be freed."""
        self._connector.worker.close()
        self._connector.scheduler.close()
