"""The client of a peer's control service, against a real server."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from connector.pd.wire.control_client import ControlClient
from connector.pd.wire.messages import BlockRange, DigestsQuestion, Handshake, HeldBlocks
from engine.errors import DeadlineExceededError, KVTransferParamsError, UnavailableError
from serving.rpc.client import NodeClient
from tests.support.api.node_double import ScriptedNode, running_nodes

S = 5.0


@asynccontextmanager
async def connected(node: ScriptedNode, timeout_s: float = S) -> AsyncIterator[ControlClient]:
    async with running_nodes(node):
        client = ControlClient(
            f"127.0.0.1:{node.port}",
            token=node.token,
            caller_engine_id="d-incarnation",
            timeout_s=timeout_s,
        )
        async with client:
            yield client


RANGES = [
    BlockRange(kept="attention", layers=(1, 2), block_size=16, start=0, end=2),
    BlockRange(kept="mamba", layers=(0,), block_size=1),
    BlockRange(kept="", layers=(), block_size=0, start=1, end=1),
]


async def test_all_five_verbs() -> None:
    node = ScriptedNode("p", token="secret")
    async with connected(node) as client:
        handshake = await client.handshake()
        claim = await client.claim(node.engine_id, "r")
        lost = await client.renew(node.engine_id, ["a", "lost-b"], [3, 2**63])
        question = DigestsQuestion(
            engine_id=node.engine_id, request_id="r", generation=9, ranges=tuple(RANGES)
        )
        digests = await client.digests(question)
        with client.asking_digests(question) as asked:  # as a pull thread does
            assert await asyncio.to_thread(asked.result) == digests
        alive = await client.release(node.engine_id, "r", reason="done", generation=9)
    assert handshake == node.handshake()
    assert isinstance(handshake, Handshake)
    groups = ((0, 2**63), (), (4096,))
    assert claim == HeldBlocks(num_tokens=33, block_ids=groups, generation=2**64 - 1)
    assert lost == ("lost-b",)
    assert digests == ((2**64 - 10,) * 2, (), (2**64 - 10,))
    assert node.ranges == 2 * RANGES
    assert alive
    assert node.released == [(node.engine_id, "r", "done")]
    assert node.generations == [3, 2**63, 9]


async def test_a_caller_that_leaves_is_not_worked_for_any_more() -> None:
    node = ScriptedNode("p", is_slow=True)
    async with connected(node) as client:
        question = DigestsQuestion(engine_id="p", request_id="r", generation=9, ranges=())
        with pytest.raises(DeadlineExceededError):
            await client.digests(question, 0.2)
        assert await asyncio.to_thread(node.left.wait, S)


async def test_refusal_keeps_its_class_and_code() -> None:
    async with connected(ScriptedNode("p")) as client:
        with pytest.raises(KVTransferParamsError) as caught:
            await client.claim("another", "r")
    assert caught.value.code == "foreign"


async def test_asynchronous_release_is_the_same_call() -> None:
    node = ScriptedNode("p")
    async with running_nodes(node):
        client = NodeClient(f"127.0.0.1:{node.port}", token=None)
        assert await client.release("e", "r", reason="abort", timeout_s=S)
        await client.close()
    assert node.released == [("e", "r", "abort")]


async def test_absent_peer_is_unavailable() -> None:
    async with ControlClient(
        "127.0.0.1:1", token=None, caller_engine_id="d", timeout_s=S
    ) as client:
        with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
            await client.handshake()


async def test_a_peer_that_holds_a_lock_is_late_and_streams_go_on() -> None:
    class Locked(ScriptedNode):
        lock = threading.Event()

        def handshake(self, wanted: Sequence[str] = ()) -> Handshake:
            self.lock.wait(S)
            return ScriptedNode.handshake(self)

    node = Locked("p")
    async with connected(node, timeout_s=1.0) as client:
        with pytest.raises(DeadlineExceededError):
            await client.handshake()
        assert await client.renew(node.engine_id, ["lost"], [1])
        node.lock.set()
