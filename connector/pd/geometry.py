"""What two nodes must have in common to exchange blocks: compared value by value, refused by name.

Neither package versions nor spellings of model paths take part.
"""

from engine.errors import TransportError
from engine.kv_cache.plan import ArenaPlan
from engine.kv_cache.spec import KVCacheGroup, MambaSpec, SlidingWindowSpec
from engine.rpc.messages import Handshake

PROTOCOL_VERSION = "1"


def describe_geometry(plan: ArenaPlan, model_fingerprint: str) -> dict[str, str]:
    """This node's side of the comparison."""
    groups = {
        f"kv_cache_group.{i}": _describe(group, plan.block_size_of(i))
        for i, group in enumerate(plan.groups)
    }
    return {
        "protocol": PROTOCOL_VERSION,
        "model_fingerprint": model_fingerprint,
        "kv_layout": "head_major",
        "num_kv_cache_groups": str(len(plan.groups)),
        **groups,
    }


def check_geometry(mine: Handshake, theirs: Handshake) -> None:
    """Raises TransportError naming the first difference and both values."""
    here = {"transport": mine.transport, **mine.geometry}
    there = {"transport": theirs.transport, **theirs.geometry}
    for key in sorted(here.keys() | there.keys()):
        if here.get(key) != there.get(key):
            raise TransportError(
                f"cannot exchange KV blocks with {theirs.engine_id}: {key} is "
                f"{here.get(key, 'absent')!r} here and {there.get(key, 'absent')!r} there"
            )


def _describe(group: KVCacheGroup, block_size: int) -> str:
    spec = group.spec
    layers = ",".join(map(str, group.layers))
    if isinstance(spec, MambaSpec):
        conv = "x".join(map(str, spec.conv_shape))
        temporal = "x".join(map(str, spec.temporal_shape))
        return (
            f"mamba {spec.kind} conv={conv} {spec.conv_dtype} "
            f"temporal={temporal} {spec.temporal_dtype} layers={layers}"
        )
    window = f"window={spec.window} " if isinstance(spec, SlidingWindowSpec) else ""
    return (
        f"attention {window}kv_heads={spec.num_kv_heads} head_dim={spec.head_dim} "
        f"{spec.dtype} block_size={block_size} layers={layers}"
    )
