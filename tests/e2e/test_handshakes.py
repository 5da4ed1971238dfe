"""Handshakes by the dozen, by nobody, by liars and very slowly: others are served meanwhile."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing
from pathlib import Path

import msgspec
import pytest

from connector.pd.decode import peer_registry
from connector.pd.decode.peer_registry import Peer, PeerRegistry
from connector.pd.decode.remote_prefills import RENEWALS_PER_LEASE, RemotePrefills
from connector.pd.metrics import TransferMetrics
from connector.pd.prefill.control_service import ControlService
from connector.pd.wire.control_client import ControlClient
from connector.pd.wire.messages import Handshake, HeldBlocks
from connector.transports.address import decode_address
from connector.transports.choose import open_transport
from connector.transports.shm import ShmTransport
from connector.transports.zmq_owner import ZmqAddress
from engine.arena import ArenaMemory
from engine.errors import DeadlineExceededError, KVLoadError, TransportError, UnavailableError
from engine.types import GenerateRequest, KVTransferParams
from serving.metrics import NodeMetrics
from serving.node.server import NodeServer
from serving.rpc.server import start_server
from tests.support.cache.leases import LEASE_S, identity
from tests.support.faults.fault_points import FaultPoint
from tests.support.faults.faults import HeldPull, recomputed
from tests.support.faults.liars import (
    BLOCKS,
    GENERATION,
    HANDSHAKES,
    Groups,
    Liar,
    elsewhere,
    give_up,
)
from tests.support.nodes.accounts import Account, at_rest, claims_of, forget_peers, identity_of
from tests.support.nodes.cluster import BASE, Cluster, Generation, generate, transfer_config, until
from tests.support.nodes.pairs import (
    GREEDY,
    assert_equal,
    count_near_ties,
    hand_over,
    prefill,
    prompt_of,
    request_of,
)
from tests.support.nodes.turns import (
    both_ways,
    forget,
    let_go,
    next_prompt,
    pair_of_nodes,
    take_turn,
)

PROMPT = prompt_of(60, salt=4)
CROWD = 64
SILENT = 60
PATIENCE_S = 1.0
GARBAGE = (b"\x00" * 4096, b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04\x95.", b"PRI * HTTP/2.0\r\n\r\nSM")


# --- by the dozen --------------------------------------------------------------------------------


async def test_64_decode_nodes_shake_hands_at_once(cluster: Cluster, model: Path) -> None:
    """Each with an incarnation and a mapping of its own."""
    p, d = await cluster.pair(model)
    alone = await generate(p, request_of(PROMPT))
    await hand_over(p, d, PROMPT)
    account = await Account.open(p, d)
    mine = identity_of(d)
    async with AsyncExitStack() as stack:
        registries = [registry_of(stack, mine, number) for number in range(CROWD)]
        asked = [it.acquire("127.0.0.1", p.rpc.port, p.engine_id) for it in registries]
        found = await asyncio.gather(*asked)
        assert {peer.engine_id for peer in found} == {p.engine_id}
        assert len({id(peer) for peer in found}) == CROWD
        assert_equal(await hand_over(p, d, PROMPT), alone, was_pulled=True)
        for registry, peer in zip(registries, found, strict=True):
            registry.release(peer)
    await account.close()


def registry_of(
    stack: AsyncExitStack,
    mine: Handshake,
    number: int,
    timeout_s: float = 30.0,
    *,
    kind: str = "shm",
) -> PeerRegistry:
    """The registry of peers of a decode node, without the node."""
    name = f"crowd-{number}"
    memory = ArenaMemory(4096)
    transport = open_transport(kind, name)
    transport.register(memory)
    mine = msgspec.structs.replace(mine, engine_id=name, transport_address=transport.address)
    registry = PeerRegistry(
        lambda: mine, transport, cluster_token=None, control_timeout_s=timeout_s
    )
    stack.callback(memory.close)
    stack.callback(transport.close)
    stack.push_async_callback(registry.close)
    return registry


async def test_64_requests_at_once_shake_hands_once(cluster: Cluster, model: Path) -> None:
    faults = HeldPull(FaultPoint.BEFORE_HANDSHAKE)
    config = transfer_config(control_s=30.0)
    p, d = await cluster.pair(model, on_p=faults, d={"kv_transfer_config": config})
    alone = await generate(p, request_of(PROMPT))
    held = [await prefill(p, PROMPT) for _ in range(CROWD)]
    waiting = [asyncio.create_task(generate(d, request_of(PROMPT, GREEDY, one))) for one in held]
    assert await asyncio.to_thread(faults.reached.wait, 20)
    await until(lambda: len(claims_of(d).all()) == CROWD)
    faults.go.set()
    pulled = await asyncio.gather(*waiting)
    count_near_ties([alone] * CROWD, pulled)
    assert all(one.last.was_pulled for one in pulled)
    assert faults.passed == 1
    for node in (p, d):
        await at_rest(node)


# --- by nobody and very slowly -------------------------------------------------------------------


async def test_garbage_and_open_connections_on_the_control_port_hinder_nobody(
    cluster: Cluster, model: Path
) -> None:
    p, d = await cluster.pair(model)
    alone = await generate(p, request_of(PROMPT))
    await hand_over(p, d, PROMPT)
    account = await Account.open(p, d)
    with ExitStack() as stack:
        for number in range(CROWD):
            opened = stack.enter_context(socket.create_connection(("127.0.0.1", p.rpc.port)))
            if number % 2:
                opened.sendall(GARBAGE[number // 2 % len(GARBAGE)])
        forget_peers(d)
        assert_equal(await hand_over(p, d, PROMPT), alone, was_pulled=True)
    await account.close()


@pytest.mark.parametrize("drop", [b"", b"\x00"], ids=["silent", "a byte at a time"])
async def test_a_handshake_that_takes_for_ever_is_bounded_and_delays_no_other(
    cluster: Cluster, model: Path, drop: bytes
) -> None:
    config = transfer_config(control_s=PATIENCE_S)
    p, d = await cluster.pair(model, d={"kv_transfer_config": config})
    alone = await generate(p, request_of(PROMPT))
    await hand_over(p, d, PROMPT)
    account = await Account.open(p, d)
    async with dripping(drop) as port:
        params = [await prefill(p, PROMPT) for _ in range(8)]
        lost = [elsewhere(one, port, remote_engine_id="another-node") for one in params]
        waiting = [
            asyncio.create_task(generate(d, request_of(PROMPT, GREEDY, one))) for one in lost
        ]
        await until(lambda: len(claims_of(d).all()) == len(params))
        other = await hand_over(p, d, PROMPT)
        done = await asyncio.gather(*waiting)
    count_near_ties([alone] * (len(done) + 1), [other, *done])
    assert other.last.was_pulled
    assert all(not one.last.was_pulled for one in done)
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


async def test_silent_addresses_by_the_dozen_delay_neither_known_peers_nor_a_new_one(
    cluster: Cluster, model: Path
) -> None:
    """The new one comes last, and waits for no more than two timeouts."""
    config = transfer_config(control_s=PATIENCE_S)
    p, late = [await cluster.start("prefill", model) for _ in range(2)]
    d = await cluster.start("decode", model, kv_transfer_config=config)
    alone = await generate(p, request_of(PROMPT))
    await hand_over(p, d, PROMPT)
    account = await Account.open(p, late, d)
    with ExitStack() as stack:
        deaf = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(SILENT)]
        ports = [server.getsockname()[1] for server in deaf]
        params = await prefill(p, PROMPT)
        silent = [elsewhere(params, port, remote_engine_id=f"silent-{port}") for port in ports]
        lost = [asyncio.create_task(generate(d, request_of(PROMPT, GREEDY, it))) for it in silent]
        await until(lambda: len(claims_of(d).all()) == SILENT)
        known, new = await asyncio.gather(hand_over(p, d, PROMPT), hand_over(late, d, PROMPT))
        count_near_ties([alone] * (SILENT + 2), [known, new, *await asyncio.gather(*lost)])
        assert known.last.was_pulled
        assert new.last.was_pulled
    assert recomputed(d) == {"peer_unreachable": SILENT * len(PROMPT)}
    await give_up(p, [params])
    forget_peers(d)
    await account.close()


async def test_an_address_that_was_silent_is_not_asked_at_once_and_many_are_not_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_registry, "MAX_ADDRESSES", 4)
    async with AsyncExitStack() as stack:
        registry = registry_of(stack, identity(), 0, timeout_s=0.2)
        deaf = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(8)]
        addresses = [server.getsockname() for server in deaf]
        for host, port in addresses:
            with pytest.raises(DeadlineExceededError):
                await registry.acquire(host, port, "p")
            with pytest.raises(UnavailableError, match="did not answer in time a moment ago"):
                await registry.acquire(host, port, "p")
        assert list(registry._entries) == addresses[4:]


# --- by liars ------------------------------------------------------------------------------------


async def test_a_peer_that_lies_costs_a_recompute_or_a_typed_error(
    cluster: Cluster, model: Path
) -> None:
    """It stands beside an honest node; what it says of its memory points into that node's.

    Or into its own, under that node's name. It is asked for digests, as that node cuts its blocks
    differently.
    """
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
            assert_equal(await hand_over(p, d, PROMPT), alone, was_pulled=True)
    with closing(ArenaMemory(1 << 20)) as own, closing(ShmTransport("liar")) as transport:
        transport.register(own)
        its_own = msgspec.structs.replace(true, transport_address=transport.address)
        for d in nodes:
            await ask_behind(Liar(its_own), p, d, alone)
            assert_equal(await hand_over(p, d, PROMPT), alone, was_pulled=True)
            await ask_behind(None, p, d, alone)
    signed = await prefill(p, PROMPT)
    await give_up(p, [signed])
    for name, changes in signed_lies(signed).items():
        print("signed", name)
        for d in nodes:
            await ask_behind(Liar(true), p, d, alone, **changes)
            assert_equal(await hand_over(p, d, PROMPT), alone, was_pulled=True)
    await account.close()


async def test_what_a_peer_says_of_hosts_and_times_is_bounded() -> None:
    """Of an address that only a library can read, its devices are the bound."""
    true = msgspec.structs.replace(identity(), transport="zmq")
    async with AsyncExitStack() as stack:
        registry = registry_of(stack, true, 0, kind="zmq")
        honest = decode_address(registry._transport.address, ZmqAddress)
        liar = Liar(true)
        server = await start_server([ControlService(liar)], "127.0.0.1", 0, token=None)
        keeper = RemotePrefills(registry, LEASE_S, TransferMetrics(NodeMetrics("m", "d")))
        stack.push_async_callback(keeper.close)

        async def meet(address: ZmqAddress = honest, lease_s: float = LEASE_S) -> Peer:
            encoded = msgspec.msgpack.encode(address)
            liar.says = msgspec.structs.replace(true, transport_address=encoded, lease_s=lease_s)
            return await registry.acquire("127.0.0.1", server.port, "p")

        for host in ("127.0.0.2", "10.1.2.3", "::1"):
            with pytest.raises(TransportError, match=f"says that its memory is at {host}"):
                await meet(msgspec.structs.replace(honest, host=host))
        for lease_s in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(TransportError, match="must be a time above 0"):
                await meet(lease_s=lease_s)
        for said, believed in ((1e-6, 1.0), (1e9, 86_400.0), (LEASE_S / 2, LEASE_S / 2)):
            peer = await meet(lease_s=said)
            assert peer.lease_s == believed
            assert keeper._interval_s() == min(believed, LEASE_S) / RENEWALS_PER_LEASE
            registry.release(peer)
            registry.forget(peer)
            assert keeper._interval_s() == LEASE_S / RENEWALS_PER_LEASE
        await server.close()


def signed_lies(true: KVTransferParams) -> dict[str, dict[str, object]]:
    """Where a peer says that its blocks lie, and under which lease."""
    blocks = true.remote_block_ids or ()
    named: dict[str, dict[str, object]]
    named = {name: {"remote_block_ids": lie(blocks)} for name, lie in BLOCKS.items()}
    return {**named, "another generation": {"remote_generation": GENERATION}}


async def test_a_peer_that_lies_about_the_turn_before_costs_a_recompute(
    cluster: Cluster, model: Path
) -> None:
    p, d = await pair_of_nodes(cluster, model, both_ways(kv_recompute_threshold=1))
    first = await take_turn(p, d, PROMPT)
    prompt = next_prompt(first)
    alone = await generate(d, request_of(prompt))
    for name, lie in BLOCKS.items():
        print("turn", name)
        await forget(p)
        forget_peers(p)
        done = await ask_for_a_turn_behind(lie, p, d, request_of(prompt, GREEDY, first.kept))
        assert done.token_ids == alone.token_ids[:1]
        assert not done.last.was_pulled
        assert done.last.kv_transfer_params is not None
        await give_up(p, [done.last.kv_transfer_params])
    await let_go(d, first)


async def ask_for_a_turn_behind(
    lie: Callable[[Groups], Groups], p: NodeServer, d: NodeServer, request: GenerateRequest
) -> Generation:
    """Asks P for a turn that D holds, while a liar says in which blocks the turn lies."""
    kept = request.kv_transfer_params
    assert kept is not None
    claims = HeldBlocks(
        num_tokens=kept.remote_num_tokens or 0,
        block_ids=lie(((0,) * 5, (0,))),
        generation=GENERATION,
    )
    liar = ControlService(Liar(await truth_of(d), claims))
    server = await start_server([liar], "127.0.0.1", 0, token=None)
    told = elsewhere(kept, server.port)
    try:
        return await generate(p, msgspec.structs.replace(request, kv_transfer_params=told))
    finally:
        await server.close()


async def truth_of(node: NodeServer) -> Handshake:
    """The handshake of an honest node."""
    address = f"127.0.0.1:{node.rpc.port}"
    async with ControlClient(
        address, token=None, caller_engine_id="the test", timeout_s=10.0
    ) as client:
        return await client.handshake()


async def ask_behind(
    liar: Liar | None, p: NodeServer, d: NodeServer, alone: Generation, **changes: object
) -> None:
    """Asks D for a prompt whose prefill the liar claims to have; None: a gRPC server, but no node.

    Asserts that D counts the tokens that it recomputes because of the lie.
    """
    services = [] if liar is None else [ControlService(liar)]
    server = await start_server(services, "127.0.0.1", 0, token=None)
    before = sum(recomputed(d).values())
    params = await prefill(p, PROMPT)
    told = elsewhere(params, server.port, **changes)
    try:
        pair = await generate(d, request_of(PROMPT, GREEDY, told))
    except KVLoadError:
        assert d.config.kv_transfer_config.kv_load_failure_policy == "fail"
    else:
        assert sum(recomputed(d).values()) - before == len(PROMPT)
        assert d.config.kv_transfer_config.kv_load_failure_policy == "recompute"
        assert (pair.token_ids, pair.logprobs) == (alone.token_ids, alone.logprobs)
        assert not pair.last.was_pulled
    finally:
        await server.close()
        await give_up(p, [params])
