"""Protobuf <-> `connector.pd.wire.messages`, only here. Knows no channel."""

from collections.abc import Iterable

import msgspec

from connector.pd.wire.messages import BlockRange, Digests, DigestsQuestion, Handshake, HeldBlocks
from engine.rpc.pb import node_pb2 as pb


def handshake_to_pb(handshake: Handshake) -> pb.HandshakeReply:
    """A handshake on its way to the peer that asked."""
    return pb.HandshakeReply(**msgspec.structs.asdict(handshake))


def handshake_from_pb(message: pb.HandshakeReply) -> Handshake:
    """A peer's answer to a handshake."""
    return Handshake(
        engine_id=message.engine_id,
        transport=message.transport,
        transport_address=message.transport_address,
        geometry=dict(message.geometry),
        lease_s=message.lease_s,
        lease_records=message.lease_records,
        capabilities=tuple(message.capabilities),
    )


def held_blocks_to_pb(held: HeldBlocks) -> pb.ClaimReply:
    """A claimed prefill on its way to D."""
    return pb.ClaimReply(
        num_tokens=held.num_tokens,
        groups=[pb.GroupBlocks(offsets=offsets) for offsets in held.groups],
        generation=held.generation,
    )


def held_blocks_from_pb(message: pb.ClaimReply) -> HeldBlocks:
    """A claimed prefill as D reads it."""
    return HeldBlocks(
        num_tokens=message.num_tokens,
        groups=tuple(tuple(group.offsets) for group in message.groups),
        generation=message.generation,
    )


def digests_question_to_pb(question: DigestsQuestion) -> pb.DigestsRequest:
    """What D asks P."""
    return pb.DigestsRequest(
        engine_id=question.engine_id,
        request_id=question.request_id,
        generation=question.generation,
        ranges=[pb.BlockRange(**msgspec.structs.asdict(asked)) for asked in question.ranges],
    )


def ranges_from_pb(ranges: Iterable[pb.BlockRange]) -> tuple[BlockRange, ...]:
    """What P is asked digests of."""
    return tuple(
        BlockRange(
            kept=asked.kept,
            layers=tuple(asked.layers),
            block_size=asked.block_size,
            start=asked.start,
            end=asked.end,
        )
        for asked in ranges
    )


def digests_to_pb(digests: Digests) -> pb.DigestsReply:
    """The digests of a prefill on their way to D."""
    return pb.DigestsReply(ranges=[pb.RangeDigests(digests=blocks) for blocks in digests])


def digests_from_pb(message: pb.DigestsReply) -> Digests:
    """The digests of a prefill as D reads them."""
    return tuple(tuple(blocks.digests) for blocks in message.ranges)
