"""Requests whose blocks a connector uses: loads in flight, and holds on finished requests."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.kv_cache.plan import ArenaPlan
from engine.kv_cache.spec import MambaSpec
from engine.request import Request
from engine.step import LoadFailure


@dataclass(slots=True)
class Load:
    """One request's load: the number of parts in flight, and the failures so far."""

    request: Request
    num_open: int
    failures: list[LoadFailure] = field(default_factory=list)

    def num_good_tokens(self, plan: ArenaPlan) -> int:
        """Leading tokens whose K/V is good in all attention groups; states do not count."""
        good = self.request.num_loading_tokens
        for failure in self.failures:
            if failure.group is None:
                return 0
            if not isinstance(plan.groups[failure.group].spec, MambaSpec):
                good = min(good, failure.num_good_tokens)
        return good


class Loads:
    """Requests that load, including those that ended while their blocks are being filled."""

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
        """Starts a load of which the connector will report `num_parts` ends."""
        assert num_parts, "a load without an end would never let its request start"
        self._loads[request.request_id] = Load(request, num_parts)

    def end_part(self, request_id: str, failure: LoadFailure | None) -> Load | None:
        """Counts the end of one part; returns the load if that was the last part."""
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
    """Finished requests whose blocks stay until every hold on them has ended."""

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
        """Keeps `request`'s blocks until `num_holds` calls of `end`."""
        self._held[request.request_id] = _Held(request, num_holds)

    def end(self, request_id: str) -> Request | None:
        """Counts the end of one hold; returns the request if that was the last hold."""
        held = self._held[request_id]
        held.num_holds -= 1
        return None if held.num_holds else self._held.pop(request_id).request
