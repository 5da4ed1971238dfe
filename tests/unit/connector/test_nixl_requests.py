"""The requests that a read over NIXL is made of, with an agent that only counts them."""

from collections.abc import Sequence
from threading import RLock
from typing import Any, Literal

import pytest

from connector.transports import nixl
from connector.transports.base import SpanPair
from connector.transports.nixl import NixlTransfer, _Reader
from connector.transports.nixl_agent import NixlAddress, NixlRegion

MIB = 1 << 20
SPANS = [SpanPair(at * MIB, at * MIB, MIB) for at in range(100)]


class CountingAgent:
    """Ends a request when it is next asked, and knows the bytes of each."""

    def __init__(self, memory: Literal["DRAM", "VRAM"]) -> None:
        self.regions = [NixlRegion(0, 1 << 30, memory, 0)]
        self.sizes: list[int] = []
        self.read: list[SpanPair] = []

    def prepare(self, name: str, spans: Sequence[SpanPair], **regions: object) -> int:
        self.sizes.append(sum(span.length for span in spans))
        self.read += spans
        return 1

    def post(self, request: int) -> bool:
        return False

    def is_done(self, request: int) -> bool:
        return True

    def release(self, request: int) -> None: ...


def read_all(agent: Any) -> None:
    peer = NixlAddress("peer", b"", tuple(agent.regions))
    transfer = NixlTransfer(_Reader(agent, RLock()), peer, SPANS, 0)
    transfer.start()
    transfer.wait(5.0)
    assert agent.read == SPANS


def test_requests_between_devices_grow_while_they_are_quick() -> None:
    agent = CountingAgent("VRAM")
    read_all(agent)
    assert agent.sizes == [8 * MIB, 16 * MIB, 32 * MIB, 44 * MIB]


def test_they_stay_small_where_bytes_cross_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "_FAST_S", 0.0)
    agent = CountingAgent("VRAM")
    read_all(agent)
    assert max(agent.sizes) == 8 * MIB


def test_host_memory_is_read_span_by_span() -> None:
    agent = CountingAgent("DRAM")
    read_all(agent)
    assert agent.sizes == [MIB] * 100
