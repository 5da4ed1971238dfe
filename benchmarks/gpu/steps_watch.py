"""Counts of a node's steps in this process: how many were replays, and how many ran ahead."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from engine.core import EngineCore
from engine.ops.backend import Replay
from engine.ops.cuda_graphs import CudaGraphs
from engine.sched.scheduler import Scheduler


@dataclass(slots=True)
class StepsWatch:
    """`last`: the recording that was replayed last, and the hidden states that it writes."""

    steps: int = 0
    ahead: int = 0
    replays: int = 0
    recordings: int = 0
    failures: list[str] = field(default_factory=list)
    last: tuple[Replay, Tensor] | None = None

    def start(self, recorder: type[Any] = CudaGraphs) -> None:
        """From now on, in this process, for good."""
        record, ahead, step = recorder.record, Scheduler.schedule_ahead, EngineCore.step

        def recorded(own: Any, run: Callable[[], Tensor]) -> tuple[Replay | None, Tensor]:
            recording, hidden = record(own, run)
            if recording is None:
                self.failures.append(own.why_not)
                return recording, hidden
            self.recordings += 1
            return _Counted(recording, hidden, self), hidden

        def scheduled(own: Any) -> Any:
            plan = ahead(own)
            self.ahead += plan is not None
            return plan

        def stepped(own: Any) -> Any:
            self.steps += 1
            return step(own)

        recorder.record = recorded
        Scheduler.schedule_ahead = scheduled  # type: ignore[assignment, method-assign]
        EngineCore.step = stepped  # type: ignore[assignment, method-assign]

    def reset(self) -> None:
        """Counts from here on; recordings stay counted."""
        self.steps = self.ahead = self.replays = 0


@dataclass(slots=True, frozen=True)
class _Counted:
    """A recording that tells the watch of its replays."""

    recording: Replay
    hidden: Tensor
    watch: StepsWatch

    def replay(self) -> None:
        """See `backend.Replay`."""
        self.watch.replays += 1
        self.watch.last = self.recording, self.hidden
        self.recording.replay()
