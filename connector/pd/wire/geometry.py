"""The geometry of a node's KV cache: compared value by value, refused by name.

Two nodes exchange KV if their models are one (`engine.model_configs.identity` says what counts: the
parsed config, every byte of the weights, the types; not the kind of device) and each layer keeps
the same things. Groups of layers, tokens per block and unit sizes may differ: `layout` translates.
Package versions and spellings of model paths do not count.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec

from connector.pd.wire.messages import Handshake
from connector.transports.address import AUTO
from engine.errors import TransportError
from engine.kv_cache.arena_plan import ArenaPlan
from engine.kv_cache.spec import LatentAttentionSpec, LayerSpec, MambaSpec, SlidingWindowSpec
from engine.model_configs.identity import LAYERS, by_layer
from engine.struct_types import learned

PROTOCOL_VERSION = "12"
PROTOCOL = "protocol"
GROUP_PREFIX = "kv_cache_group."
MODEL_PREFIX = "model."
MAX_LAYERS = 4096
MAX_SHOWN = 200
"""Characters of a value in an error: a peer may say anything."""
MAX_BLOCK_SIZE = 1 << 20
MAX_BYTES = 1 << 50

_Layer = Annotated[int, msgspec.Meta(ge=0, lt=MAX_LAYERS)]
_Bytes = Annotated[int, msgspec.Meta(ge=1, le=MAX_BYTES)]


class GroupGeometry(msgspec.Struct, frozen=True):
    """One KV cache group of a node: spec and order of its layers in a block, tokens per block.

    `layers` are indexes in the model; `block_size` has no meaning for states. Blocks are numbered
    through the arena; here with `blocks_per_unit` = 3:

        unit 0                          unit 1
        | block 0 | 1 | 2 |  (waste)  | | block 3 | 4 | 5 |  (waste)  |
        0         block_bytes           unit_bytes
    """

    spec: Annotated[str, msgspec.Meta(max_length=500)]
    layers: Annotated[tuple[_Layer, ...], msgspec.Meta(min_length=1, max_length=MAX_LAYERS)]
    block_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCK_SIZE)]
    unit_bytes: _Bytes
    blocks_per_unit: _Bytes
    block_bytes: _Bytes

    def offset(self, block: int) -> int:
        """The byte offset of a block or state in the arena."""
        unit, slot = divmod(block, self.blocks_per_unit)
        return unit * self.unit_bytes + slot * self.block_bytes


@dataclass(slots=True, frozen=True)
class Difference:
    """One value that two nodes must share and do not."""

    key: str
    here: str
    there: str


def describe_geometry(
    plan: ArenaPlan, model: Mapping[str, str], *, prefix_hash_seed: str
) -> dict[str, str]:
    """This node's side of the comparison, with a digest of the seed, which may be secret.

    `model`: the fields of its identity, a few dozen and one word for each layer.
    """
    return {
        PROTOCOL: PROTOCOL_VERSION,
        **{f"{MODEL_PREFIX}{name}": value for name, value in model.items()},
        "prefix_hash_seed": hashlib.sha256(f"seed {prefix_hash_seed}".encode()).hexdigest()[:12],
        "kv_layout": "head_major",
        **{
            f"{GROUP_PREFIX}{number}": msgspec.json.encode(geometry).decode()
            for number, geometry in enumerate(geometry_of(plan))
        },
    }


def geometry_of(plan: ArenaPlan) -> tuple[GroupGeometry, ...]:
    """The groups of one arena."""
    return tuple(
        GroupGeometry(
            describe_spec(group.spec),
            group.layers,
            plan.block_size_of(number),
            unit_bytes=plan.unit_bytes,
            blocks_per_unit=plan.blocks_per_unit[number],
            block_bytes=plan.block_bytes(number),
        )
        for number, group in enumerate(plan.groups)
    )


def groups_of(peer: Handshake) -> tuple[GroupGeometry, ...]:
    """The groups of a peer. Raises TransportError if they are not a list of groups."""
    found = {key for key in peer.geometry if key.startswith(GROUP_PREFIX)}
    names = [f"{GROUP_PREFIX}{number}" for number in range(min(len(found), MAX_LAYERS))]
    if found != set(names):
        listed = str(sorted(found))[:500]
        raise TransportError(f"{peer.engine_id} lists its KV cache groups as {listed}")
    try:
        return tuple(
            msgspec.json.decode(peer.geometry[name], type=learned(GroupGeometry)) for name in names
        )
    except msgspec.DecodeError as error:
        raise TransportError(f"{peer.engine_id} describes no KV cache group: {error}") from error


def check_geometry(mine: Handshake, theirs: Handshake) -> None:
    """Raises TransportError naming the first difference and both values."""
    for found in differences(mine, theirs):
        raise TransportError(
            f"cannot exchange KV blocks with {theirs.engine_id}: {found.key[:MAX_SHOWN]} is "
            f"{found.here[:MAX_SHOWN]!r} here and {found.there[:MAX_SHOWN]!r} there"
        )


def differences(mine: Handshake, theirs: Handshake) -> list[Difference]:
    """Everything that keeps two nodes from exchanging blocks, sorted by key, the protocol first.

    Raises TransportError for a peer that describes no groups.
    """
    here = _plain(mine) | _by_layer(groups_of(mine))
    there = _plain(theirs) | _by_layer(groups_of(theirs))
    # One that finds its transports out may have the one that the other was told to take.
    if AUTO not in (mine.transport, theirs.transport):
        here["transport"], there["transport"] = mine.transport, theirs.transport
    return [
        Difference(key, here.get(key, "absent"), there.get(key, "absent"))
        # Nodes of two protocols may not even know of each other's other keys.
        for key in sorted(here.keys() | there.keys(), key=lambda key: (key != PROTOCOL, key))
        if here.get(key) != there.get(key)
    ]


def describe_spec(spec: LayerSpec) -> str:
    """Everything that determines the bytes of one layer, except tokens per block."""
    if isinstance(spec, MambaSpec):
        parts = (f"{'x'.join(map(str, part.shape))} {part.dtype}" for part in spec.parts)
        return f"mamba {spec.kind} {', '.join(parts)}"
    if isinstance(spec, LatentAttentionSpec):
        return f"latent attention width={spec.head_dim} {spec.dtype}"
    window = f"window={spec.window} " if isinstance(spec, SlidingWindowSpec) else ""
    return f"attention {window}kv_heads={spec.num_kv_heads} head_dim={spec.head_dim} {spec.dtype}"


def _plain(node: Handshake) -> dict[str, str]:
    plain = {k: v for k, v in node.geometry.items() if not k.startswith(GROUP_PREFIX)}
    layers = plain.pop(f"{MODEL_PREFIX}{LAYERS}", "")
    return plain | {f"{MODEL_PREFIX}{name}": mixer for name, mixer in by_layer(layers, MAX_LAYERS)}


def _by_layer(groups: Iterable[GroupGeometry]) -> dict[str, str]:
    """The spec of each layer; a layer may have several."""
    kept: dict[str, list[str]] = {}
    for group in groups:
        for layer in group.layers:
            kept.setdefault(f"layer {layer}", []).append(group.spec)
    return {layer: "; ".join(sorted(specs)) for layer, specs in kept.items()}
