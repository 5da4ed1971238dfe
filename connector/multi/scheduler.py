"""The scheduler side of several connectors: asks all, and gives each a part of a load."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from engine.kv_cache.arena_plan import ArenaPlan
from engine.kv_cache.coverage import Coverage
from engine.kv_cache.listener import CacheListeners
from engine.kv_cache.spec import MambaSpec
from engine.kv_connector import FinishDecision, Match, SchedulerConnector
from engine.request import Request
from engine.step import BlockLoad, BlockSave, ConnectorMeta, ConnectorOutput, ScheduledRequest
from serving.metrics import Table


class MultiStats:
    """Numbers by child; `queries` = `hits` + `misses` once all requests have ended.

    `queries`: prompts that a child was asked about. `hits`: those to whose load it gave a part.
    `hit_tokens`: the tokens that it filled in, each of one child only. `pending_loads`: loads under
    way.
    """

    def __init__(self, children: Iterable[str]) -> None:
        nothing = dict.fromkeys(children, 0)
        self.queries = Counter(nothing)
        self.hits = Counter(nothing)
        self.misses = Counter(nothing)
        self.hit_tokens = Counter(nothing)
        self.pending_loads = Counter(nothing)


COUNTERS: Final[Table] = {
    "vllm:kv_connector_queries": ("queries", "Prompts that a connector was asked.", "connector"),
    "vllm:kv_connector_hits": ("hits", "Prompts that it loaded a part of.", "connector"),
    "vllm:kv_connector_misses": ("misses", "Prompts that it loaded nothing of.", "connector"),
    "vllm:kv_connector_hit_tokens": ("hit_tokens", "Prompt tokens that it loaded.", "connector"),
}
GAUGES: Final[Table] = {
    "vllm:kv_connector_pending_loads": ("pending_loads", "Loads under way.", "connector"),
}


class MultiScheduler(SchedulerConnector):
    """One connector to the engine. Messages and save ids carry the child's name.

    A load may be put together: the child whose tokens are worth most (their number times its
    weight) fills in all it has, the next one what is missing after that, and the first that has
    the states brings them.

        tokens      0 ......... local ............... 96 ............ 130 = num_tokens
        tier (2.0)              |==== attention =====|
        peer (1.0)                                   |== attention ==| and the state after 130
    """

    def __init__(
        self, plan: ArenaPlan, children: Mapping[str, SchedulerConnector], stats: MultiStats
    ) -> None:
        self._plan = plan
        self._children = children
        self._stats = stats
        self._matches: dict[str, dict[str, Match]] = {}  # by request, of its last answer
        listeners = [c.cache_listener for c in children.values() if c.cache_listener is not None]
        self.cache_listener = CacheListeners(listeners) if listeners else None

    def match(self, request: Request, num_local_tokens: int) -> Match | None:
        """The tokens that the children can load together, without those that are pending."""
        asked = {
            name: child.match(request, num_local_tokens) for name, child in self._children.items()
        }
        matches = {name: match for name, match in asked.items() if match is not None}
        if request.request_id not in self._matches:
            self._stats.queries.update(self._children.keys())
        self._matches[request.request_id] = matches
        if not matches:
            return None
        known = [match for match in matches.values() if not match.is_pending]
        coverage = Coverage.joined([match.coverage for match in known])
        # Waiting pays only while the children that know have nothing to add.
        adds = coverage.attention(request.num_tokens) > num_local_tokens
        if not adds and len(known) < len(matches):
            return Match(is_pending=True)
        return Match(
            coverage,
            max((match.weight for match in known), default=1.0),
            lost=next((match.lost for match in known if match.lost), None),
            num_cached_tokens=next(
                (n for match in known if (n := match.num_cached_tokens) is not None), None
            ),
        )

    def start_load(self, request: Request, load: BlockLoad | None) -> int:
        """Gives each child its part; one that has none hears that its match is not needed."""
        matches = self._matches.pop(request.request_id, {})
        parts = {} if load is None else self._parts(load, matches)
        self._stats.hits.update(parts.keys())
        self._stats.hit_tokens.update({name: self._tokens(part) for name, part in parts.items()})
        self._stats.misses.update(self._children.keys() - parts.keys())
        total = 0
        for name in matches:
            ends = self._children[name].start_load(request, parts.get(name))
            self._stats.pending_loads[name] += ends
            total += ends
        return total

    def build_meta(self, scheduled: Sequence[ScheduledRequest]) -> ConnectorMeta:
        metas = {name: child.build_meta(scheduled) for name, child in self._children.items()}
        return ConnectorMeta(
            {name: meta.message for name, meta in metas.items()},
            # Save ids of two children may be equal, so the child's name goes before them.
            tuple(
                BlockSave(f"{name}/{save.save_id}", save.blocks)
                for name, meta in metas.items()
                for save in meta.saves
            ),
        )

    def update(self, output: ConnectorOutput) -> None:
        """Each child hears what its own worker side reported."""
        outputs: dict[str, ConnectorOutput] = output.message or {}
        for name, own in outputs.items():
            self._stats.pending_loads[name] -= len(own.loaded) + len(own.failed)
            self._children[name].update(own)

    def forget_evicted(self) -> None:
        for child in self._children.values():
            child.forget_evicted()

    def request_finished(self, request: Request) -> FinishDecision:
        """Every child hears of the end; each may hold."""
        if self._matches.pop(request.request_id, None) is not None:
            self._stats.misses.update(self._children.keys())  # it started, or ended, without a load
        decisions = [child.request_finished(request) for child in self._children.values()]
        params = [one.kv_transfer_params for one in decisions]
        stats = [one.kv_transfer for one in decisions]
        return FinishDecision(
            sum(one.num_holds for one in decisions),
            next((one for one in params if one is not None), None),
            next((one for one in stats if one is not None), None),
        )

    def end_hold(self, request_id: str | None) -> str | None:
        """Every child hears the name; the least needed is that of the first child that has one."""
        if request_id is None:
            ended = (child.end_hold(None) for child in self._children.values())
            return next((one for one in ended if one is not None), None)
        for child in self._children.values():
            child.end_hold(request_id)
        return None

    def close(self) -> None:
        for child in self._children.values():
            child.close()

    def _parts(self, load: BlockLoad, matches: Mapping[str, Match]) -> dict[str, BlockLoad]:
        # Each group is walked from left to right; the child whose tokens are worth most goes first.
        # Where the states are missing too, what they stand for counts: tokens from 0 on.
        start = min(first for first, _ in load.ranges)
        worth = {
            name: (match.coverage.attention(load.num_tokens) - start) * match.weight
            for name, match in matches.items()
            if not match.is_pending
        }
        known = sorted(worth, key=worth.__getitem__, reverse=True)
        nothing = [(load.num_tokens, load.num_tokens)] * len(load.ranges)
        ranges = {name: list(nothing) for name in known}
        for group, (start, end) in enumerate(load.ranges):
            # One child brings the whole state, and only if it has it at this length.
            if isinstance(self._plan.groups[group].spec, MambaSpec):
                having = [n for n in known if matches[n].coverage.states(end) == end]
                if start < end and having:
                    ranges[having[0]][group] = (start, end)
                continue
            for name in known:
                covered = matches[name].coverage.attention(end)
                # Two children never write into one block: between them, whole blocks only.
                stop = end if covered >= end else covered - covered % self._plan.joint_block_size
                if start < stop:
                    ranges[name][group] = (start, stop)
                    start = stop
        return {
            name: replace(load, ranges=tuple(own))
            for name, own in ranges.items()
            if any(start < end for start, end in own)
        }

    def _tokens(self, part: BlockLoad) -> int:
        """Tokens whose attention `part` brings."""
        kinds = zip(part.ranges, self._plan.groups, strict=True)
        attention = (ends for ends, group in kinds if not isinstance(group.spec, MambaSpec))
        return max((end - start for start, end in attention), default=0)
