"""Several connectors behind the seam of one: the first child that matches loads, any may hold.

Composition of the same interfaces; knows no child by name.
"""

from collections.abc import Sequence
from typing import TypeVar

from engine.kv_connector import FinishDecision, SchedulerConnector, WorkerConnector
from engine.request import Request
from engine.step import BlockPull, ConnectorMeta, ConnectorOutput

Value = TypeVar("Value")


class MultiScheduler(SchedulerConnector):
    """Asks its children in order."""

    def __init__(self, children: Sequence[SchedulerConnector]) -> None:
        self._children = children
        self._chosen: dict[str, SchedulerConnector] = {}

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """The first child's answer that is not 0."""
        for child in self._children:
            matched = child.get_num_new_matched_tokens(request, num_computed_tokens)
            if matched:
                self._chosen[request.request_id] = child
                return matched
        return 0

    def update_state_after_alloc(self, request: Request, pull: BlockPull | None) -> None:
        """A pull goes to the child that matched; that none is needed is news for all."""
        chosen = self._chosen.pop(request.request_id, None)
        for child in self._children:
            if pull is None or child is chosen:
                child.update_state_after_alloc(request, pull)

    def build_connector_meta(self) -> ConnectorMeta:
        """The children's messages, joined."""
        metas = [child.build_connector_meta() for child in self._children]
        return ConnectorMeta(tuple(pull for meta in metas for pull in meta.pulls))

    def request_finished(self, request: Request) -> FinishDecision:
        """Holds if any child holds; every child hears of the end."""
        self._chosen.pop(request.request_id, None)
        decisions = [child.request_finished(request) for child in self._children]
        return FinishDecision(
            hold=any(decision.hold for decision in decisions),
            kv_transfer_params=_first([d.kv_transfer_params for d in decisions]),
            kv_transfer=_first([d.kv_transfer for d in decisions]),
        )

    def give_up(self, request_id: str) -> None:
        """Tells every child."""
        for child in self._children:
            child.give_up(request_id)

    def make_room(self) -> str | None:
        """What the first child that has something to spare lets go."""
        spared = (child.make_room() for child in self._children)
        return next((request_id for request_id in spared if request_id is not None), None)

    def close(self) -> None:
        """Closes every child."""
        for child in self._children:
            child.close()


class MultiWorker(WorkerConnector):
    """Passes each message to every child and joins their reports."""

    def __init__(self, children: Sequence[WorkerConnector]) -> None:
        self._children = children

    def start_load_kv(self, meta: ConnectorMeta) -> None:
        """Every child starts what is its own."""
        for child in self._children:
            child.start_load_kv(meta)

    def get_finished(self) -> ConnectorOutput:
        """The children's reports, joined."""
        outputs = [child.get_finished() for child in self._children]
        return ConnectorOutput(
            loaded=tuple(item for output in outputs for item in output.loaded),
            failed={key: cause for output in outputs for key, cause in output.failed.items()},
            released=tuple(item for output in outputs for item in output.released),
        )

    def next_deadline(self) -> float | None:
        """The earliest of the children's deadlines."""
        deadlines = [child.next_deadline() for child in self._children]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def close(self) -> None:
        """Closes every child."""
        for child in self._children:
            child.close()


def _first(values: Sequence[Value | None]) -> Value | None:
    return next((value for value in values if value is not None), None)
