"""Messages to peers: those to one wait for each other, and for nobody else's."""

import asyncio
from functools import partial

import pytest

from connector.pd.decode import peer_calls
from connector.pd.decode.peer_calls import PER_PEER, PeerCalls
from engine.errors import OverloadedError


class Gate:
    """Calls that hang until the gate is opened."""

    def __init__(self) -> None:
        self.is_open = asyncio.Event()
        self.num_entered = 0

    async def pass_through(self) -> None:
        self.num_entered += 1
        await self.is_open.wait()


async def noted(order: list[str], name: str) -> None:
    order.append(name)


async def test_a_peer_that_hangs_delays_no_other_and_has_few_calls_at_once() -> None:
    calls, gate, order = PeerCalls(), Gate(), list[str]()
    for _ in range(3 * PER_PEER):
        calls.start("hangs", gate.pass_through)
    for name in "abc":
        await calls.start("healthy", partial(noted, order, name))
    assert order == ["a", "b", "c"]
    assert gate.num_entered == PER_PEER
    gate.is_open.set()
    await calls.close()
    assert gate.num_entered == 3 * PER_PEER
    assert not calls._lanes


async def test_one_call_or_one_stranger_too_many_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_calls, "MAX_CALLS", 3)
    monkeypatch.setattr(peer_calls, "MAX_STRANGERS", 1)
    calls, gate = PeerCalls(), Gate()
    calls.start("a", gate.pass_through, is_stranger=True)
    calls.start("a", gate.pass_through, is_stranger=True)
    with pytest.raises(OverloadedError, match="1 peers wait already"):
        calls.start("b", gate.pass_through, is_stranger=True)
    calls.start("known", gate.pass_through)
    with pytest.raises(OverloadedError, match="3 calls to peers"):
        calls.start("known", gate.pass_through)
    gate.is_open.set()
    await calls.close()
    order = list[str]()
    await calls.start("b", partial(noted, order, "b"), is_stranger=True)
    assert order == ["b"]
