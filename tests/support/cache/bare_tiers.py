"""Real tiers under an arena without a model: every token's bytes say which prefix it ends."""

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import torch

from connector.offload.connector import OffloadConnector
from connector.offload.tiers.tier_file import Files
from engine.arena import ArenaMemory
from engine.kv_cache.arena_plan import ArenaPlan
from engine.kv_cache.listener import CachedBlocks, CachedStates
from engine.kv_cache.prefix import PrefixHasher
from engine.model_configs.identity import ModelIdentity
from engine.request import Request
from engine.step import BlockLoad, ConnectorOutput
from engine.types import GenerateRequest, SamplingParams
from serving.metrics import NodeMetrics
from serving.node.connector import NodeParts
from tests.support.cache.offload import check_slots, tier_config

Tokens = tuple[int, ...]
DEADLINE_S = 20.0
MAX_MODEL_LEN = 1 << 16


class BareTiers:
    """Both sides of the OffloadConnector, stepped by the test itself; use as a context manager.

    The test says which blocks of the arena hold what. `ended`: what the worker side reported.
    """

    def __init__(
        self, plan: ArenaPlan, open_files: Callable[[Path], Files] = Files, **extra: Any
    ) -> None:
        self.plan = plan
        self.arena = ArenaMemory(plan.arena_bytes)
        self.metrics = NodeMetrics("tiny", "bare")
        self.resources = AsyncExitStack()
        node = NodeParts(
            plan,
            self.arena,
            self.metrics,
            wake=lambda: None,
            resources=self.resources,
            engine_id="bare",
            host="127.0.0.1",
            cluster_token=None,
            tls=None,
            identity=lambda: ModelIdentity({}),
            vocab_size=512,
            max_model_len=MAX_MODEL_LEN,
            prefix_hash_seed="",
        )
        self.tiers = OffloadConnector.builder(tier_config(**extra), open_files=open_files)(node)
        self.scheduler, self.worker = self.tiers.scheduler, self.tiers.worker
        self.chunks = self.worker._items.chunks
        self.stats = self.scheduler._stats
        self.hasher = PrefixHasher(plan.hash_block_size)
        self.ended = ConnectorOutput()
        self._num_requests = 0

    def request(self, tokens: Tokens) -> Request:
        """A new request for this prompt."""
        self._num_requests += 1
        origin = GenerateRequest(
            request_id=str(self._num_requests), prompt_token_ids=tokens, sampling=SamplingParams()
        )
        return Request.from_generate(
            origin, self.hasher, max_model_len=MAX_MODEL_LEN, eos_token_ids=frozenset()
        )

    def cached(self, tokens: Tokens, group: int, blocks: Iterable[int]) -> CachedBlocks:
        """All these tokens, whole hash blocks of them, in `blocks` of one group."""
        digests = self.request(tokens).prefix.boundaries()[1:]
        return CachedBlocks(group, 0, len(tokens), tuple(digests), tuple(blocks))

    def states(self, tokens: Tokens, states: Iterable[int]) -> CachedStates:
        """The states after these tokens."""
        digest = self.request(tokens).prefix.digest_at(len(tokens))
        return CachedStates(self.plan.state_groups, len(tokens), digest, tuple(states))

    def store(self, tokens: Tokens, group: int, blocks: Iterable[int]) -> CachedBlocks:
        """Writes the tokens' bytes into the arena, which can find them from now on."""
        cached = self.cached(tokens, group, blocks)
        for position in range(len(tokens)):
            self._row(group, cached.blocks, position)[:] = self._content(tokens, group, position)
        root = self.request(tokens).prefix.boundaries()[0]
        self.scheduler.stored(cached, root, tokens, cache_salt=None)
        return cached

    def store_states(self, tokens: Tokens, states: Iterable[int]) -> CachedStates:
        """Writes states after these tokens into the arena, which can find them from now on."""
        cached, prefix = self.states(tokens, states), self.request(tokens).prefix
        for group, state in zip(cached.groups, cached.states, strict=True):
            self._state(group, state)[:] = self._state_content(tokens, group)
        boundary = prefix.boundaries()[len(tokens) // self.plan.hash_block_size]
        self.scheduler.stored(cached, boundary, (), cache_salt=None)
        return cached

    def holds(self, tokens: Tokens, group: int, blocks: Iterable[int]) -> bool:
        """True if these blocks have the bytes of all tokens."""
        table = tuple(blocks)
        return all(
            bool((self._row(group, table, at) == self._content(tokens, group, at)).all())
            for at in range(len(tokens))
        )

    def holds_states(self, tokens: Tokens, states: Iterable[int]) -> bool:
        """True if these are the states after the tokens."""
        return all(
            bool((self._state(group, state) == self._state_content(tokens, group)).all())
            for group, state in zip(self.plan.state_groups, states, strict=True)
        )

    def load(self, tokens: Tokens, tables: tuple[tuple[int, ...], ...], start: int = 0) -> Request:
        """Starts a load of all these tokens from `start` on, and the states after them."""
        request = self.request((*tokens, 0))
        ranges = tuple((start, len(tokens)) for _ in self.plan.groups)
        load = BlockLoad(request.request_id, tables, len(tokens), ranges)
        assert self.scheduler.start_load(request, load) == 1
        return request

    def step(self) -> ConnectorOutput:
        """One step of an engine that computes nothing."""
        message = self.scheduler.build_meta(()).message
        self.worker.start_save(message)
        self.worker.start_load(message)
        return self.poll()

    def poll(self) -> ConnectorOutput:
        """Takes the reports of the worker side since the last call, and adds them to `ended`."""
        output = self.worker.get_finished()
        self.scheduler.update(output)
        self.ended = ConnectorOutput(
            (*self.ended.loaded, *output.loaded), (*self.ended.failed, *output.failed)
        )
        return output

    def until(self, condition: Callable[[], bool]) -> None:
        """Steps until threads have made `condition` true."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline
            self.step()
            time.sleep(0.002)

    def settle(self) -> None:
        """Steps until nothing is under way, and recounts index and slots."""
        scheduler = self.scheduler
        self.until(
            lambda: scheduler.writes.is_idle and not (scheduler._loads or scheduler._victims)
        )
        check_slots(scheduler.index, scheduler.slots)

    def write_early(self, tokens: Tokens) -> None:
        """All that the index has of these tokens goes to disk, and stays where it is."""
        prefix = self.request(tokens).prefix
        entries = self.scheduler._attention(prefix, 0, len(tokens))
        states = self.scheduler.index.state(prefix, len(tokens))
        self.scheduler.writes.add_early([*entries, *([states] if states else [])])
        self.settle()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.close()
        asyncio.run(self.resources.aclose())
        self.arena.close()

    def _row(self, group: int, blocks: tuple[int, ...], position: int) -> torch.Tensor:
        """The bytes of one token: shape (layers x K|V x heads, bytes)."""
        size = self.plan.block_size_of(group)
        num_rows, token = self.chunks.rows(group)
        start = self.plan.block_offset(group, blocks[position // size])
        block = self.arena.tensor[start : start + self.plan.block_bytes(group)]
        return block.view(num_rows, size, token)[:, position % size]

    def _content(self, tokens: Tokens, group: int, position: int) -> torch.Tensor:
        num_rows, token = self.chunks.rows(group)
        return _bytes((tokens[: position + 1], group), num_rows * token).view(num_rows, token)

    def _state(self, group: int, state: int) -> torch.Tensor:
        start = self.plan.block_offset(group, state)
        return self.arena.tensor[start : start + self.plan.block_bytes(group)]

    def _state_content(self, tokens: Tokens, group: int) -> torch.Tensor:
        return _bytes((tokens, group), self.plan.block_bytes(group))


def _bytes(what: object, nbytes: int) -> torch.Tensor:
    digest = sha256(repr(what).encode()).digest()
    return torch.frombuffer(bytearray(digest * (nbytes // 32 + 1)), dtype=torch.uint8)[:nbytes]
