"""The smallest connector with a memory: keeps every block and state in a dictionary, by digest.

It proves that the seam of `engine/kv_connector.py` carries a tier, alone and beside a hand-over.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from engine.arena import ArenaMemory
from engine.kv_cache.arena_plan import ArenaPlan
from engine.kv_cache.coverage import Coverage
from engine.kv_cache.listener import Cached, CachedStates
from engine.kv_cache.spec import MambaSpec
from engine.kv_connector import (
    Connector,
    LocalAdmission,
    Match,
    SchedulerConnector,
    WorkerConnector,
)
from engine.request import Request
from engine.step import (
    BlockLoad,
    BlockSave,
    ConnectorMeta,
    ConnectorOutput,
    LoadFailure,
    ScheduledRequest,
)
from engine.types import TokenId
from serving.config import KVTransferConfig
from serving.node.connector import BuilderOf, NodeConnector, NodeParts

Key = tuple[int, bytes]  # KV cache group, digest of the prefix at the block's end
Item = tuple[int, bytes, int, int]  # group, digest, physical block, its first token


class Message(msgspec.Struct, array_like=True):
    """Saves and loads that the scheduler side orders from the worker side."""

    saves: list[tuple[str, list[Item]]]
    loads: list[tuple[str, list[Item]]]


@dataclass(slots=True)
class DictionaryScheduler(SchedulerConnector):
    """Knows the keys; the bytes are the worker side's. `undecided`: prompts that begin so wait."""

    plan: ArenaPlan
    weight: float = 1.0
    undecided: set[TokenId] = field(default_factory=set)
    known: set[Key] = field(default_factory=set)
    state_ends: dict[bytes, int] = field(default_factory=dict)
    new: dict[Key, int] = field(default_factory=dict)
    loads: list[tuple[str, list[Item]]] = field(default_factory=list)
    num_saves: int = 0

    @property
    def cache_listener(self) -> "DictionaryScheduler":  # type: ignore[override]
        return self

    def stored(
        self,
        cached: Cached,
        parent: bytes,
        token_ids: tuple[TokenId, ...],
        *,
        cache_salt: str | None,
    ) -> None:
        self.new |= {key: block for key, block in self._keys(cached) if key not in self.known}
        if isinstance(cached, CachedStates):
            self.state_ends[cached.digest] = cached.end

    def removed(self, cached: Cached) -> None:
        for key, block in self._keys(cached):
            if self.new.get(key) == block:
                del self.new[key]

    def match(self, request: Request, num_local_tokens: int) -> Match | None:
        if request.token_ids[0] in self.undecided:
            return Match(is_pending=True)
        num_tokens, step = 0, self.plan.joint_block_size
        while num_tokens + step <= request.num_tokens and all(
            item[:2] in self.known
            for group in range(len(self.plan.groups))
            for item in self._items(request, group, (num_tokens, num_tokens + step), None)
        ):
            num_tokens += step
        ends = [
            end
            for digest, end in self.state_ends.items()
            if end <= request.num_tokens and request.prefix.digest_at(end) == digest
        ]
        return Match(Coverage.of(num_tokens, tuple(ends)), self.weight)

    def start_load(self, request: Request, load: BlockLoad | None) -> int:
        if load is None:
            return 0
        items: list[Item] = []
        for group, tokens in enumerate(load.ranges):
            if not isinstance(self.plan.groups[group].spec, MambaSpec):
                items += self._items(request, group, tokens, load.tables[group])
            elif tokens[0] < tokens[1]:
                digest = request.prefix.digest_at(load.num_tokens)
                items.append((group, digest, load.tables[group][0], 0))
        self.loads.append((load.request_id, items))
        return 1

    def build_meta(self, scheduled: Sequence[ScheduledRequest]) -> ConnectorMeta:
        saves = []
        for (group, digest), block in self.new.items():
            self.num_saves += 1
            saves.append((str(self.num_saves), [(group, digest, block, 0)]))
        message = msgspec.msgpack.encode(Message(saves, self.loads))  # as to another process
        self.new, self.loads = {}, []
        pins = (BlockSave(name, {i[0]: (i[2],) for i in items}) for name, items in saves)
        return ConnectorMeta(message, tuple(pins))

    def update(self, output: ConnectorOutput) -> None:
        stored, lost = output.message
        self.known = (self.known | set(stored)) - set(lost)

    def _keys(self, cached: Cached) -> Iterator[tuple[Key, int]]:
        if isinstance(cached, CachedStates):
            pairs = zip(cached.groups, cached.states, strict=True)
            yield from (((group, cached.digest), state) for group, state in pairs)
            return
        # Only whole blocks are kept, each under the digest at its end; a block that was stored
        # while partly filled starts inside.
        size, step = self.plan.block_size_of(cached.group), self.plan.hash_block_size
        for end, block in enumerate(cached.blocks, cached.start // size + 1):
            if end * size <= cached.end:
                digest = cached.digests[(end * size - cached.start) // step - 1]
                yield (cached.group, digest), block

    def _items(
        self,
        request: Request,
        group: int,
        tokens: tuple[int, int],
        table: Sequence[int] | None,
    ) -> Iterator[Item]:
        """The blocks of one attention group that hold `tokens`."""
        if isinstance(self.plan.groups[group].spec, MambaSpec):
            return
        size, digests = self.plan.block_size_of(group), request.prefix.boundaries()
        for number in range(tokens[0] // size, -(-tokens[1] // size)):
            digest = digests[(number + 1) * size // self.plan.hash_block_size]
            yield group, digest, table[number] if table else 0, number * size


@dataclass(slots=True)
class DictionaryWorker(WorkerConnector):
    """Owner of the bytes."""

    plan: ArenaPlan
    arena: ArenaMemory
    store: dict[Key, bytes] = field(default_factory=dict)
    report: ConnectorOutput = field(default_factory=lambda: ConnectorOutput(message=((), ())))

    def start_save(self, message: Any) -> None:
        stored, saved = [], []
        for save_id, items in msgspec.msgpack.decode(message, type=Message).saves:
            for group, digest, block, _ in items:
                self.store[group, digest] = bytes(self.arena.read(*self._place(group, block)))
                stored.append((group, digest))
            saved.append(save_id)
        self.report = ConnectorOutput(saved=tuple(saved), message=(stored, ()))

    def start_load(self, message: Any) -> None:
        loaded: list[str] = []
        failed: list[LoadFailure] = []
        lost: list[Key] = []
        for request_id, items in msgspec.msgpack.decode(message, type=Message).loads:
            gone = [item for item in items if item[:2] not in self.store]
            lost += [item[:2] for item in gone]
            for group, digest, block, _ in (item for item in items if item not in gone):
                with self.arena.writable(*self._place(group, block)) as target:
                    target[:] = self.store[group, digest]
            if gone:
                group, _, _, first = gone[0]
                failed.append(LoadFailure(request_id, "vanished", group, first))
            else:
                loaded.append(request_id)
        stored = self.report.message[0]
        self.report = ConnectorOutput(
            tuple(loaded), tuple(failed), saved=self.report.saved, message=(stored, lost)
        )

    def get_finished(self) -> ConnectorOutput:
        return self.report

    def _place(self, group: int, block: int) -> tuple[int, int]:
        return self.plan.block_offset(group, block), self.plan.block_bytes(group)


@dataclass
class DictionaryConnector(NodeConnector):
    """Loads and keeps through a dictionary of this process."""

    connector: Connector
    scheduler: DictionaryScheduler
    worker: DictionaryWorker

    @classmethod
    def builder(
        cls, config: KVTransferConfig, builder_of: BuilderOf | None = None
    ) -> Callable[[NodeParts], Self]:
        """It has no options."""
        return cls.over

    @classmethod
    def over(cls, node: NodeParts) -> Self:
        scheduler, worker = DictionaryScheduler(node.plan), DictionaryWorker(node.plan, node.arena)
        return cls(Connector(LocalAdmission(), scheduler, worker), scheduler, worker)
