"""The worker side of several connectors: each gets its own message, and reports under its name."""

from collections.abc import Mapping
from typing import Any

from engine.kv_connector import WorkerConnector
from engine.step import ConnectorOutput


class MultiWorker(WorkerConnector):
    """One worker side to the engine."""

    def __init__(self, children: Mapping[str, WorkerConnector]) -> None:
        self._children = children

    def start_save(self, message: Any) -> None:
        for name, child in self._children.items():
            child.start_save(message[name])

    def start_load(self, message: Any) -> None:
        for name, child in self._children.items():
            child.start_load(message[name])

    def get_finished(self) -> ConnectorOutput:
        """The children's reports, joined; `message` has them apart, for the scheduler side."""
        outputs = {name: child.get_finished() for name, child in self._children.items()}
        every = outputs.values()
        filled_from: dict[str, tuple[int, ...]] = {}
        # Where several have filled in parts of a request, only what comes after all starts is sure.
        for output in every:
            for request_id, starts in output.filled_from.items():
                known = filled_from.get(request_id, starts)
                filled_from[request_id] = tuple(map(max, known, starts))
        return ConnectorOutput(
            tuple(item for output in every for item in output.loaded),
            tuple(item for output in every for item in output.failed),
            tuple(item for output in every for item in output.released),
            tuple(f"{name}/{item}" for name, output in outputs.items() for item in output.saved),
            outputs,
            filled_from,
        )

    def next_deadline(self) -> float | None:
        deadlines = [child.next_deadline() for child in self._children.values()]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def close(self) -> None:
        for child in self._children.values():
            child.close()
