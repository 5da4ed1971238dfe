"""Protobuf <-> messages that are tuples of tuples; `engine.rpc.convert` translates the others."""

from connector.pd.wire.messages import Digests, HeldBlocks
from engine.rpc.pb import node_pb2 as pb


def held_blocks_to_pb(held: HeldBlocks) -> pb.ClaimReply:
    """P's answer to a claim."""
    return pb.ClaimReply(
        num_tokens=held.num_tokens,
        groups=[pb.GroupBlocks(ids=ids) for ids in held.block_ids],
        generation=held.generation,
    )


def held_blocks_from_pb(message: pb.ClaimReply) -> HeldBlocks:
    """A claimed prefill as D reads it."""
    return HeldBlocks(
        num_tokens=message.num_tokens,
        block_ids=tuple(tuple(group.ids) for group in message.groups),
        generation=message.generation,
    )


def digests_to_pb(digests: Digests) -> pb.DigestsReply:
    """P's answer to a question for digests."""
    return pb.DigestsReply(ranges=[pb.RangeDigests(digests=blocks) for blocks in digests])


def digests_from_pb(message: pb.DigestsReply) -> Digests:
    """The digests of a prefill as D reads them."""
    return tuple(tuple(blocks.digests) for blocks in message.ranges)
