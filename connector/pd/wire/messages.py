"""The messages between nodes about a hand-over: the structs behind protobuf's `KvControl`.

Knows neither protobuf nor sockets.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

ANY_GENERATION: Final = 0
"""Names whichever lease a request has; no lease has it."""

BlockIds = tuple[tuple[int, ...], ...]
"""By KV cache group of the node that holds them: the numbers of its blocks or its state. Its
geometry (`geometry.GroupGeometry.offset`) says where in its arena each one begins."""

Digests = tuple[tuple[int, ...], ...]
"""By range, one unsigned 64-bit number per block or state."""


class Handshake(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach a node's registered memory, and what its bytes look like.

    `transport_address` leads to two regions, the arena and the lease records. `lease_s`: seconds
    for which the node holds a finished request that nobody renews.
    """

    engine_id: str
    transport: str
    transport_address: bytes
    geometry: Mapping[str, str]
    lease_s: float


class BlockRange(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens `start` to `end` of some layers, in blocks of `block_size` tokens.

    `kept` is what these layers keep (`connector.pd.wire.geometry.describe_spec`). Blocks end at
    multiples of their size; the first and the last may be parts. A state is always one block.
    """

    kept: str
    layers: tuple[int, ...]
    block_size: int
    start: int = 0
    end: int = 0

    @property
    def num_blocks(self) -> int:
        """Blocks in the range, at least one."""
        size = max(self.block_size, 1)
        return max(-(-self.end // size) - self.start // size, 1)


class DigestsQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """Asks incarnation `engine_id` for digests of these ranges, under one of its leases."""

    engine_id: str
    request_id: str
    generation: int
    ranges: tuple[BlockRange, ...]


class HeldBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks that a lease holds, and how many tokens they hold.

    `generation` tells this lease from any other, also of the same request.
    """

    num_tokens: int
    block_ids: BlockIds
    generation: int = ANY_GENERATION
