"""A node's description of itself to the proxy. Knows neither protobuf nor sockets."""

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from engine.types import HandOverProblem

TEMPLATE_FILES: Final = (
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/default.jinja",
    "additional_chat_templates/tool_use.jinja",
)

TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    *TEMPLATE_FILES,
)
"""The files of a model folder that a proxy needs; a node sends those of them that it has."""


Rate = Annotated[float, Meta(ge=0)]
"""Of something per second; 0 where nothing was measured yet. NaN is refused as well."""


class KVGroupInfo(msgspec.Struct, frozen=True):
    """One KV cache group: `kind` in vLLM's words, `sliding_window` in tokens if it has one.

    Kinds: "full_attention", "sliding_window", "mamba".
    """

    kind: str
    sliding_window: int | None = None


Publisher = Literal["tandem", "vllm", "sglang"]


class KVEventsInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a node publishes the events of its KV cache, and what their digests are made of.

    `endpoint`, `replay_endpoint`: ZMQ addresses that others can reach. `hash_block_size`: tokens
    per digest. `groups`: in the order of the group index of events. `model_identity`: digest of all
    that changes the model's results; blocks of two identities are no copies of each other.

    `publisher`: the project whose events they are. An engine of another one names blocks by hashes
    that nobody else can compute: then `hash_block_size` is the block size of its attention,
    `hash_seed` means nothing, and `groups` is what is known before its events tell: it resumes
    nowhere before there was an event of each kind.
    """

    endpoint: str
    topic: str = ""
    hash_block_size: Annotated[int, Meta(ge=1)]
    hash_seed: str = ""
    # Without a group there is nothing that a node could lack of a prompt.
    groups: Annotated[tuple[KVGroupInfo, ...], Meta(min_length=1)]
    replay_endpoint: str | None = None
    model_identity: Annotated[str, Meta(max_length=64)] = ""
    # Never in a node's own description, where it has no field: that is of Tandem's nodes.
    publisher: Publisher = "tandem"


class ArenaUse(msgspec.Struct, frozen=True, kw_only=True):
    """Units of the arena by what they hold: in use, or idle, which is kept for reuse."""

    num_units: int = 0
    attention: int = 0
    idle_attention: int = 0
    states: int = 0
    idle_states: int = 0


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One node's self-description: `engine_id` is its incarnation, `kv_cache_usage` 0 to 1.

    `kind` ("prefill" or "decode") says how the node was started; it answers the same calls either
    way. `reason` is empty when the node is ready. `hand_over_problems` name the peers whose
    prefills it fails to take. `num_waiting_tokens`: of prompts, neither computed nor being loaded.
    Rates are measured, of late, and 0 where nothing was measured yet: tokens of steps that prefill
    and of steps that only decode, and bytes of one pull. `kv_bytes_per_token`: in all attention
    groups; `state_bytes`: one sequence's states in all Mamba groups. `kv_events` is absent if this
    node publishes none. `num_requests_loading` of the running ones wait for blocks from elsewhere;
    `num_held` have finished, and peers may still read them. `prefix_*`: since the node's start.
    `root`: the folder or hub name that the model was loaded from; older nodes do not tell.
    `model_identity`: digest of all that changes the model's results.
    """

    engine_id: str
    kind: str
    model_names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    num_requests_running: int = 0
    num_requests_waiting: int = 0
    kv_cache_usage: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    ready: bool = False
    reason: str = ""
    hand_over_problems: tuple[HandOverProblem, ...] = ()
    num_waiting_tokens: int = 0
    prefill_tokens_per_s: Rate = 0.0
    decode_tokens_per_s: Rate = 0.0
    link_bytes_per_s: Rate = 0.0
    kv_bytes_per_token: int = 0
    state_bytes: int = 0
    kv_events: KVEventsInfo | None = None
    num_requests_loading: int = 0
    num_held: int = 0
    arena: ArenaUse | None = None
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    root: str = ""
    model_identity: Annotated[str, Meta(max_length=64)] = ""
