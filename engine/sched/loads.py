"""Requests whose blocks a connector uses: loads under way, and holds of finished requests."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.kv_cache.plan import ArenaPlan
from engine.kv_cache.spec import MambaSpec
from engine.request import Request
from engine.step import LoadFailure


@dataclass(slots=True)
class Load:
    """The parts of one request's load: how many are under way, and what failed so far."""

    request: Request
    num_open: int
    failures: list[LoadFailure] = field(default_factory=list)

    def num_good_tokens(self, plan: ArenaPlan) -> int:
        """Tokens at the start whose attention is good in all groups, whatever the states are."""
        good = self.request.num_loading_tokens
        for failure in self.failures:
            if failure.group is None:
                return 0
            if not isinstance(plan.groups[failure.group].spec, MambaSpec):
                good = min(good, failure.num_good_tokens)
        return good


class Loads:
    """Requests that load, also those that have ended while their blocks are being filled."""

    def __init__(self) -> None:
        self._loads: dict[str, Load] = {}

    def __len__(self) -> int:
        return len(self._loads)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._loads

    def requests(self) -> Iterator[Request]:
        """Every request that loads."""
        return (load.request for load in self._loads.values())

    def add(self, request: Request, num_parts: int) -> None:
        """`num_parts` ends will be reported."""
        self._loads[request.request_id] = Load(request, num_parts)

    def end_part(self, request_id: str, failure: LoadFailure | None) -> Load | None:
        """Counts the end of one part; the whole load when it was the last one."""
        load = self._loads[request_id]
        load.num_open -= 1
        if failure is not None:
            load.failures.append(failure)
        return None if load.num_open else self._loads.pop(request_id)


@dataclass(slots=True)
class _Held:
    request: Request
    num_holds: int


class Holds:
    """Finished requests whose blocks stay until every hold has ended."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def requests(self) -> Iterator[Request]:
        """Every request that is held."""
        return (held.request for held in self._held.values())

    def add(self, request: Request, num_holds: int) -> None:
        """`num_holds` ends will follow."""
        self._held[request.request_id] = _Held(request, num_holds)

    def end(self, request_id: str) -> Request | None:
        """Counts the end of one hold; the request when it was the last one."""
        held = self._held[request_id]
        held.num_holds -= 1
        return None if held.num_holds else self._held.pop(request_id).request
