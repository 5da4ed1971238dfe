"""A load in flight: the parts of it that have not ended, and what failed so far."""

from dataclasses import dataclass, field

from engine.kv_cache.arena_plan import ArenaPlan
from engine.request import Request
from engine.step import LoadFailure


@dataclass(slots=True)
class Load:
    """One request's load: the number of parts in flight, and the failures so far.

    `filled_from`: see `ConnectorOutput`; empty where every block is filled from its start.
    """

    request: Request
    num_open: int
    failures: list[LoadFailure] = field(default_factory=list)
    filled_from: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.num_open, "a load without an end would never let its request start"

    def end_part(self, failure: LoadFailure | None) -> None:
        """Counts the end of one part."""
        self.num_open -= 1
        if failure is not None:
            self.failures.append(failure)

    def num_good_tokens(self, plan: ArenaPlan) -> int:
        """Leading tokens whose K/V is good in all attention groups; states do not count."""
        good = self.request.num_loading_tokens
        for failure in self.failures:
            if failure.group is None:
                return 0
            if failure.group not in plan.state_groups:
                good = min(good, failure.num_good_tokens)
        return good
