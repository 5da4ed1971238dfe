"""Peers that lie, beside honest ones, and objects that lead to them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from connector.pd.prefill.control_handler import ControlHandler
from connector.pd.wire.messages import Digests, Handshake, HeldBlocks
from connector.pd.wire.params import ParamsSigner
from connector.transports.auto import AutoAddress, address_for
from connector.transports.shm import ShmAddress, ShmRegion
from engine.types import KVTransferParams
from serving.node.server import NodeServer
from tests.support.nodes.engine_thread import run_in_engine

UNASKED = HeldBlocks(num_tokens=0, block_ids=())


def elsewhere(params: KVTransferParams, port: int, **changes: object) -> KVTransferParams:
    """As if P were at another port, signed like a node of this cluster."""
    return ParamsSigner(None).sign(msgspec.structs.replace(params, remote_port=port, **changes))


async def give_up(p: NodeServer, params: list[KVTransferParams]) -> None:
    """Ends leases that nobody knows of but P."""
    scheduler = p.engine.core.scheduler
    for one in params:
        await run_in_engine(p.engine, partial(scheduler.abort, str(one.remote_request_id)))


@dataclass(slots=True)
class Liar(ControlHandler):
    """Answers as a prefill node would, with something in it that is not true."""

    says: Handshake
    claims: HeldBlocks = UNASKED
    num_released: int = 0

    def handshake(self, wanted: Sequence[str] = ()) -> Handshake:
        return self.says

    def claim(self, engine_id: str, request_id: str) -> HeldBlocks:
        return self.claims

    def renew(self, engine_id: str, request_ids: Any, generations: Any) -> tuple[str, ...]:
        return ()

    def release(self, engine_id: str, request_id: str, reason: str, *, generation: int) -> bool:
        self.num_released += 1
        return True

    def digests(
        self, engine_id: str, request_id: str, generation: int, *, ranges: Any, left: Any
    ) -> Digests:
        return tuple((0,) for _ in ranges)


def geometry(change: Callable[[dict[str, str]], object]) -> Callable[[Handshake], Handshake]:
    """The true handshake with one thing changed in its geometry."""

    def lie(true: Handshake) -> Handshake:
        said = dict(true.geometry)
        change(said)
        return msgspec.structs.replace(true, geometry=said)

    return lie


def regions(
    change: Callable[[ShmRegion, ShmRegion], tuple[ShmRegion, ...]],
) -> Callable[[Handshake], Handshake]:
    """The true handshake over shm with its arena or its lease records somewhere else."""

    def lie(true: Handshake) -> Handshake:
        near = address_for("shm", true.transport, true.transport_address)
        address = msgspec.msgpack.decode(near, type=ShmAddress)
        said = msgspec.structs.replace(address, regions=change(*address.regions[:2]))
        blob = msgspec.msgpack.encode(said)
        return msgspec.structs.replace(true, transport="shm", transport_address=blob)

    return lie


def ways(**change: object) -> Callable[[Handshake], Handshake]:
    """The true handshake of a node that has all transports, with something else in its address."""

    def lie(true: Handshake) -> Handshake:
        told = msgspec.msgpack.decode(true.transport_address, type=AutoAddress)
        blob = msgspec.msgpack.encode(msgspec.structs.replace(told, **change))
        return msgspec.structs.replace(true, transport_address=blob)

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
    "a number of five thousand digits": geometry(
        lambda said: said.update({f"kv_cache_group.{'9' * 5_000}": "{}"})
    ),
    "a thousand keys": geometry(lambda said: said.update({str(n): "x" for n in range(1000)})),
    "no address": lambda true: msgspec.structs.replace(true, transport_address=b""),
    "any address": lambda true: msgspec.structs.replace(true, transport_address=b"\xff" * 9999),
    "another transport": lambda true: msgspec.structs.replace(true, transport="carrier pigeon"),
    "another name": lambda true: msgspec.structs.replace(true, engine_id="somebody"),
    "no name": lambda true: msgspec.structs.replace(true, engine_id=""),
    "another nonce": ways(nonce=bytes(32)),
    "ways that lead nowhere, and others that are never served": ways(ways={"shm": b"\xff"}),
    "no records": regions(lambda arena, records: (arena,)),
    "records in the arena": regions(lambda arena, records: (arena, arena)),
    "an arena of records": regions(lambda arena, records: (records, records)),
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
