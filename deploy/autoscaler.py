"""How many prefill and decode nodes a cluster should have, by what its nodes tell.

A policy, of numbers only: it starts, stops and asks nobody, and is told the time.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Generic, Literal, TypeVar

from deploy.config import DecodeScaling, PrefillScaling, Scaling
from serving.rpc.messages import NodeInfo

ScalingT = TypeVar("ScalingT", bound=Scaling)


@dataclass(slots=True, frozen=True)
class Pool(Generic[ScalingT]):
    """One role at one moment: the members it should have, and `nodes`, those that serve.

    Without `scaling` the number stays. A member that starts, hangs or is gone tells nothing; one
    that drains is in no pool any more.
    """

    num_replicas: int
    scaling: ScalingT | None
    nodes: Sequence[NodeInfo]

    @property
    def num_silent(self) -> int:
        """Members that should be there and tell nothing."""
        return max(0, self.num_replicas - len(self.nodes))


@dataclass(slots=True, frozen=True)
class Decision:
    """The members that a role should have from now on, and why in one sentence."""

    num_replicas: int
    reason: str


class Autoscaler:
    """Decides for both roles; each look adds to what it remembers of the time before."""

    def __init__(self) -> None:
        self._prefill = _History()
        self._decode = _History()

    def decide(
        self, time_s: float, prefill: Pool[PrefillScaling], decode: Pool[DecodeScaling]
    ) -> dict[Literal["prefill", "decode"], Decision]:
        """Ask every second or so. `time_s`: of any clock that never goes back."""
        of_d = self._decode.decide(time_s, decode, _decode_need(decode))
        of_p = self._prefill.decide(time_s, prefill, _prefill_need(prefill, of_d.num_replicas))
        return {"prefill": of_p, "decode": of_d}


@dataclass(slots=True, frozen=True)
class _Need:
    """Members that a load needs: `at_least` if silent ones are idle, `at_most` if they are full.

    So a silent member is no reason to grow, and none to shrink. `num_free`: those that may leave.
    """

    at_least: int
    at_most: int
    load: str
    num_free: int


class _History:
    """The needs of one role since its number of members changed."""

    def __init__(self) -> None:
        self._num_replicas = 0
        self._starts_until = 0.0
        self._looks: deque[tuple[float, _Need]] = deque()

    def decide(self, time_s: float, pool: Pool[ScalingT], need: _Need | None) -> Decision:
        """Grows to the least that was needed all the time; shrinks by one, if one is free."""
        current, scaling = pool.num_replicas, pool.scaling
        if scaling is None or need is None:
            return Decision(current, "it is not scaled")
        if (bounded := scaling.bounded(current)) != current:
            return Decision(bounded, f"{current} is out of bounds")
        # A member that never serves must not keep the others from growing for ever.
        if current > self._num_replicas:
            self._starts_until = time_s + scaling.downscale_delay_s
        if current != self._num_replicas:
            self._num_replicas = current
            self._looks.clear()
        # A backlog that builds up while new members start is theirs: no need for even more.
        if not self._looks and pool.num_silent and time_s < self._starts_until:
            return Decision(current, f"{pool.num_silent} of {current} do not serve yet")
        self._looks.append((time_s, need))
        self._forget(time_s - max(scaling.upscale_delay_s, scaling.downscale_delay_s))
        last = self._last(seconds := scaling.upscale_delay_s)
        if (num := scaling.bounded(min((one.at_least for one in last), default=0))) > current:
            return Decision(num, f"{num} were needed for {seconds:g} s: {need.load}")
        last = self._last(seconds := scaling.downscale_delay_s)
        if (num := scaling.bounded(max((one.at_most for one in last), default=current))) >= current:
            return Decision(current, f"no reason to change: {need.load}")
        if pool.nodes and not need.num_free:
            return Decision(current, f"{num} would be enough, but none is free: {need.load}")
        return Decision(current - 1, f"{num} were enough for {seconds:g} s: {need.load}")

    def _forget(self, before_s: float) -> None:
        while len(self._looks) > 1 and self._looks[1][0] <= before_s:
            self._looks.popleft()

    def _last(self, seconds: float) -> list[_Need]:
        """Needs of all looks of the last `seconds`; none before there are looks for so long."""
        start = self._looks[-1][0] - seconds
        # The last one before the start counts: it stands for the time until the next one.
        num_before = sum(1 for time_s, _ in self._looks if time_s <= start)
        return [need for _, need in self._looks][num_before - 1 :] if num_before else []


def _prefill_need(pool: Pool[PrefillScaling], num_decode: int) -> _Need | None:
    if (scaling := pool.scaling) is None:
        return None
    # One that computes or holds a prompt keeps its place: its peers wait for it.
    num_free = sum(not (_num_ongoing(node) or node.num_held) for node in pool.nodes)
    if scaling.per_decode is not None:
        num = _ceil(scaling.per_decode * num_decode)
        load = f"{scaling.per_decode:g} for each of {num_decode} decode nodes"
        return _Need(num, num, load, num_free)
    num_tokens = sum(node.num_waiting_tokens for node in pool.nodes)
    num = _ceil(num_tokens / scaling.target_waiting_tokens)
    # Nodes that just keep up have short queues, and one fewer would not keep up. So shrinking
    # takes a time without a moment at which all of them have work.
    num_working = sum(1 for node in pool.nodes if _num_ongoing(node))
    at_most = max(num, num_working) + pool.num_silent
    return _Need(num, at_most, f"{num_tokens} prompt tokens wait", num_free)


def _decode_need(pool: Pool[DecodeScaling]) -> _Need | None:
    if (scaling := pool.scaling) is None:
        return None
    num_requests = sum(map(_num_ongoing, pool.nodes))
    # What requests hold; prefixes that are only kept for reuse are not part of it.
    usage = sum(node.kv_cache_usage for node in pool.nodes)
    num = max(
        _ceil(num_requests / scaling.target_ongoing_requests),
        _ceil(usage / scaling.max_kv_cache_usage),
    )
    mean = usage / max(1, len(pool.nodes))
    load = f"{num_requests} requests, {mean:.0%} of the KV caches in use"
    # Its requests end while it drains, or go on elsewhere; answers that it holds must stay.
    num_free = sum(not node.num_held for node in pool.nodes)
    return _Need(num, num + pool.num_silent, load, num_free)


def _num_ongoing(node: NodeInfo) -> int:
    return node.num_requests_running + node.num_requests_waiting


def _ceil(number: float) -> int:
    """Forgives what floats add: 0.28 for each of 25 makes 7, not 8."""
    return ceil(round(number, 6))
