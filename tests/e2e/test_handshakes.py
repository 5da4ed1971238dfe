"""Handshakes by the dozen, by nobody, by liars and very slowly: others are served meanwhile."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from connector.pd.faults import FaultPoint
from connector.pd.params import ParamsSigner
from connector.pd.peers import PeerRegistry
from connector.transports.choose import open_transport
from engine.arena import ArenaMemory
from engine.errors import TandemError
from engine.node.server import NodeServer
from engine.rpc.control_client import ControlClient
from engine.rpc.control_service import ControlService
from engine.rpc.messages import Claim, Digests, Handshake
from engine.rpc.server import start_server
from engine.types import KVTransferParams
from tests.accounts import Account, at_rest, claims_of, forget_peers
from tests.cluster import BASE, Cluster, Generation, generate, transfer_config, until
from tests.faults import HeldPull
from tests.pairs import GREEDY, count_near_ties, hand_over, prefill, prompt_of, request_of
from tests.turns import both_ways, let_go, next_prompt, pair_of_nodes, take_turn

FAMILY = "qwen3_5"
PROMPT = prompt_of(60, salt=4)
CROWD = 64
PATIENCE_S = 1.0
UNASKED = Claim(num_tokens=0, groups=())
GARBAGE = (b"\x00" * 4096, b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04\x95.", b"PRI * HTTP/2.0\r\n\r\nSM")


# --- by the dozen --------------------------------------------------------------------------------


async def test_64_decode_nodes_shake_hands_at_once(
    cluster: Cluster, checkpoints: dict[str, Path]
) -> None:
    """Each with an incarnation and a mapping of its own."""
    p = await cluster.start("prefill", checkpoints[FAMILY])
    d = await cluster.start("decode", checkpoints[FAMILY])
    alone = await generate(p, request_of(PROMPT))
    await hand_over(p, d, PROMPT)
    account = await Account.open(p, d)
    mine = claims_of(d)._peers._identity
    with ExitStack() as stack:
        registries = [registry_of(stack, mine, number) for number in range(CROWD)]
        pool = stack.enter_context(ThreadPoolExecutor(CROWD))
        asked = [
            pool.submit(registry.acquire, "127.0.0.1", p.rpc.port, p.engine_id)
            for registry in registries
        ]
        peers = await asyncio.gather(*map(asyncio.wrap_future, asked))
        assert {peer.engine_id for peer in peers} == {p.engine_id}
        assert len({id(peer) for peer in peers}) == CROWD
        assert_equal(await hand_over(p, d, PROMPT), alone)
        for registry, peer in zip(registries, peers, strict=True):
            registry.release(peer)
    await account.close()


def registry_of(stack: ExitStack, mine: Handshake, number: int) -> PeerRegistry:
    """What a decode node knows its peers by, without the node."""
    name = f"crowd-{number}"
    memory = ArenaMemory(4096)
    transport = open_transport("shm", name)
    transport.register(memory)
    identity = msgspec.structs.replace(mine, engine_id=name, transport_address=transport.address)
    registry = PeerRegistry(identity, transport, cluster_token=None, control_timeout_s=30.0)
    for close in (memory.close, transport.close, registry.close):
        stack.callback(close)
    return registry


async def test_64_requests_at_once_shake_hands_once(
    cluster: Cluster, checkpoints: dict[str, Path]
) -> None:
    faults = HeldPull(FaultPoint.BEFORE_HANDSHAKE)
    config = transfer_config(control_s=30.0)
    p = await cluster.start("prefill", checkpoints[FAMILY])
    d = await cluster.start("decode", checkpoints[FAMILY], faults=faults, kv_transfer_config=config)
    alone = await generate(p, request_of(PROMPT))
    held = [await prefill(p, PROMPT) for _ in range(CROWD)]
    waiting = [asyncio.create_task(generate(d, request_of(PROMPT, GREEDY, one))) for one in held]
    assert await asyncio.to_thread(faults.reached.wait, 20)
    await until(lambda: len(claims_of(d)) == CROWD)
    faults.go.set()
    pulled = await asyncio.gather(*waiting)
    count_near_ties([alone] * CROWD, pulled)
    assert all(one.last.kv_transfer is not None for one in pulled)
    assert faults.passed == 1
    for node in (p, d):
        await at_rest(node)


# --- by nobody and very slowly -------------------------------------------------------------------


async def test_garbage_and_open_connections_on_the_control_port_hinder_nobody(
    cluster: Cluster, checkpoints: dict[str, Path]
) -> None:
    p = await cluster.start("prefill", checkpoints[FAMILY])
    d = await cluster.start("decode", checkpoints[FAMILY])
    alone = await generate(p, request_of(PROMPT))
    await hand_over(p, d, PROMPT)
    account = await Account.open(p, d)
    with ExitStack() as stack:
        for number in range(CROWD):
            opened = stack.enter_context(socket.create_connection(("127.0.0.1", p.rpc.port)))
            if number % 2:
                opened.sendall(GARBAGE[number // 2 % len(GARBAGE)])
        forget_peers(d)
        assert_equal(await hand_over(p, d, PROMPT), alone)
    await account.close()


@pytest.mark.parametrize("drop", [b"", b"\x00"], ids=["silent", "a byte at a time"])
async def test_a_handshake_that_takes_for_ever_is_bounded_and_delays_no_other(
    cluster: Cluster, checkpoints: dict[str, Path], drop: bytes
) -> None:
    model, config = checkpoints[FAMILY], transfer_config(control_s=PATIENCE_S)
    p = await cluster.start("prefill", model)
    d = await cluster.start("decode", model, kv_transfer_config=config)
    alone = await generate(p, request_of(PROMPT))
    await hand_over(p, d, PROMPT)
    account = await Account.open(p, d)
    async with dripping(drop) as port:
        params = [await prefill(p, PROMPT) for _ in range(8)]
        lost = [elsewhere(one, port, remote_engine_id="another-node") for one in params]
        waiting = [
            asyncio.create_task(generate(d, request_of(PROMPT, GREEDY, one))) for one in lost
        ]
        await until(lambda: len(claims_of(d)) == len(params))
        other = await hand_over(p, d, PROMPT)
        done = await asyncio.gather(*waiting)
    count_near_ties([alone] * (len(done) + 1), [other, *done])
    assert other.last.kv_transfer is not None
    assert all(one.last.kv_transfer is None for one in done)
    await give_up(p, params)
    await account.close()


@asynccontextmanager
async def dripping(drop: bytes) -> AsyncIterator[int]:
    """A port that takes connections and answers with `drop` again and again, or not at all."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not ended.is_set():
            writer.write(drop)
            await asyncio.sleep(0.05)
        writer.close()

    ended = asyncio.Event()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        ended.set()
        server.close()


def elsewhere(params: KVTransferParams, port: int, **changes: object) -> KVTransferParams:
    """As if P were at another port, signed like a node of this cluster."""
    return ParamsSigner(None).sign(msgspec.structs.replace(params, remote_port=port, **changes))


async def give_up(p: NodeServer, params: list[KVTransferParams]) -> None:
    """Ends leases that nobody knows of but P."""
    scheduler = p.engine.core.scheduler
    for one in params:
        await p.engine.run_in_engine(partial(scheduler.abort, str(one.remote_request_id)))


# --- by liars ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Liar:
    """Answers as a prefill node would, with something in it that is not true."""

    says: Handshake
    claims: Claim = UNASKED
    num_released: int = 0

    def handshake(self, caller_engine_id: str) -> Handshake:
        return self.says

    def claim(self, engine_id: str, request_id: str, caller_engine_id: str) -> Claim:
        return self.claims

    def renew(
        self, engine_id: str, caller_engine_id: str, request_ids: Any, *, generations: Any
    ) -> tuple[str, ...]:
        return ()

    def release(self, engine_id: str, request_id: str, reason: str, *, generation: int) -> bool:
        self.num_released += 1
        return True

    def digests(self, engine_id: str, request_id: str, generation: int, *, ranges: Any) -> Digests:
        return tuple((0,) for _ in ranges)


def geometry(change: Callable[[dict[str, str]], object]) -> Callable[[Handshake], Handshake]:
    """The true handshake with one thing changed in its geometry."""

    def lie(true: Handshake) -> Handshake:
        said = dict(true.geometry)
        change(said)
        return msgspec.structs.replace(true, geometry=said)

    return lie


GROUP = "kv_cache_group.0"
HANDSHAKES: dict[str, Callable[[Handshake], Handshake]] = {
    "no geometry": geometry(dict.clear),
    "no group": geometry(lambda said: said.pop(GROUP)),
    "no JSON": geometry(lambda said: said.update({GROUP: "\x00{"})),
    "a huge block": geometry(
        lambda said: said.update({GROUP: '["attention",[0],9223372036854775807]'})
    ),
    "a million layers": geometry(
        lambda said: said.update({GROUP: f'["attention",[{"0," * 999_999}0],16]'})
    ),
    "a thousand keys": geometry(lambda said: said.update({str(n): "x" for n in range(1000)})),
    "no address": lambda true: msgspec.structs.replace(true, transport_address=b""),
    "any address": lambda true: msgspec.structs.replace(true, transport_address=b"\xff" * 9999),
    "another transport": lambda true: msgspec.structs.replace(true, transport="carrier pigeon"),
    "another name": lambda true: msgspec.structs.replace(true, engine_id="somebody"),
    "no name": lambda true: msgspec.structs.replace(true, engine_id=""),
    "no records": lambda true: msgspec.structs.replace(true, lease_records=0),
    "records of another world": lambda true: msgspec.structs.replace(true, lease_records=2**60),
    "no lease": lambda true: msgspec.structs.replace(true, lease_s=0.0),
    "an endless lease": lambda true: msgspec.structs.replace(true, lease_s=float("inf")),
    "no number": lambda true: msgspec.structs.replace(true, lease_s=float("nan")),
}
Groups = tuple[tuple[int, ...], ...]
BLOCKS: dict[str, Callable[[Groups], Groups]] = {
    "no groups": lambda true: (),
    "empty groups": lambda true: ((), ()),
    "too many groups": lambda true: true * 500,
    "outside": lambda true: tuple(tuple(2**44 + at for at in group) for group in true),
    "beside": lambda true: tuple(tuple(at + 1 for at in group) for group in true),
    "too few blocks": lambda true: tuple(group[:1] for group in true),
    "a hundred thousand blocks": lambda true: tuple(group * 20_000 for group in true),
}
GENERATION = 2**62


async def test_a_peer_that_lies_costs_a_recompute_or_a_typed_error(
    cluster: Cluster, checkpoints: dict[str, Path]
) -> None:
    """It stands beside an honest node; what it says of its memory points into that node's.

    It is asked for digests, as that node cuts its blocks differently.
    """
    model = checkpoints[FAMILY]
    p = await cluster.start("prefill", model, block_size=2 * BASE.block_size)
    nodes = [
        await cluster.start(
            "decode", model, kv_transfer_config=transfer_config(policy=policy, lease_s=2.0)
        )
        for policy in ("recompute", "fail")
    ]
    alone = await generate(p, request_of(PROMPT))
    for d in nodes:
        await hand_over(p, d, PROMPT)
    true = await truth_of(p)
    account = await Account.open(p, *nodes)
    for name, lie in HANDSHAKES.items():
        print("handshake", name)
        for d in nodes:
            await ask_behind(Liar(lie(true)), p, d, alone)
            assert_equal(await hand_over(p, d, PROMPT), alone)
    signed = await prefill(p, PROMPT)
    await give_up(p, [signed])
    for name, changes in signed_lies(signed).items():
        print("signed", name)
        for d in nodes:
            await ask_behind(Liar(true), p, d, alone, **changes)
            assert_equal(await hand_over(p, d, PROMPT), alone)
    await account.close()


def signed_lies(true: KVTransferParams) -> dict[str, dict[str, object]]:
    """Where a peer says that its blocks lie, and under which lease."""
    blocks = true.remote_block_ids or ()
    named: dict[str, dict[str, object]]
    named = {name: {"remote_block_ids": lie(blocks)} for name, lie in BLOCKS.items()}
    return {**named, "another generation": {"remote_generation": GENERATION}}


@pytest.mark.parametrize("lie", BLOCKS.values(), ids=BLOCKS)
async def test_a_peer_that_lies_about_the_turn_before_costs_a_recompute(
    cluster: Cluster, checkpoints: dict[str, Path], lie: Callable[[Groups], Groups]
) -> None:
    p, d = await pair_of_nodes(cluster, checkpoints[FAMILY], both_ways(kv_recompute_threshold=1))
    first = await take_turn(p, d, PROMPT)
    prompt = next_prompt(first)
    alone = await generate(d, request_of(prompt))
    kept = first.kept
    claims = Claim(
        num_tokens=kept.remote_num_tokens or 0,
        groups=lie(((0,) * 5, (0,))),
        generation=GENERATION,
    )
    server = await start_server(
        [ControlService(Liar(await truth_of(d), claims))], "127.0.0.1", 0, token=None
    )
    try:
        done = await generate(p, request_of(prompt, GREEDY, elsewhere(kept, server.port)))
    finally:
        await server.close()
    assert done.token_ids == alone.token_ids[:1]
    assert done.last.kv_transfer is None
    assert done.last.kv_transfer_params is not None
    await give_up(p, [done.last.kv_transfer_params])
    await let_go(d, first)


async def truth_of(node: NodeServer) -> Handshake:
    """What an honest node says."""
    client = ControlClient(f"127.0.0.1:{node.rpc.port}", token=None, caller_engine_id="the test")
    try:
        return await asyncio.to_thread(client.handshake, timeout_s=10.0)
    finally:
        client.close()


async def ask_behind(
    liar: Liar, p: NodeServer, d: NodeServer, alone: Generation, **changes: object
) -> None:
    """A request on D whose prefill the liar claims to have."""
    server = await start_server([ControlService(liar)], "127.0.0.1", 0, token=None)
    params = await prefill(p, PROMPT)
    told = elsewhere(params, server.port, **changes)
    try:
        pair = await generate(d, request_of(PROMPT, GREEDY, told))
    except TandemError as error:
        assert "internal error" not in str(error)
    else:
        assert d.config.kv_transfer_config.kv_load_failure_policy == "recompute"
        assert (pair.token_ids, pair.logprobs) == (alone.token_ids, alone.logprobs)
        assert pair.last.kv_transfer is None
    finally:
        await server.close()
        await give_up(p, [params])


def assert_equal(pair: Generation, alone: Generation) -> None:
    """Of a hand-over that worked."""
    assert (pair.token_ids, pair.logprobs) == (alone.token_ids, alone.logprobs)
    assert pair.last.kv_transfer is not None
