"""A node's description of itself to the proxy. Knows neither protobuf nor sockets."""

from typing import Final

import msgspec

from engine.types import HandOverProblem

TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""The files of a model folder that a proxy needs; a node sends those of them that it has."""


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One node's self-description: `engine_id` is its incarnation, `kv_cache_usage` 0 to 1.

    `kind` ("prefill" or "decode") says how the node was started; it answers the same calls either
    way. `reason` is empty when the node is ready. `hand_over_problems` name the peers whose
    prefills it fails to take.
    """

    engine_id: str
    kind: str
    model_names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    num_requests_running: int = 0
    num_requests_waiting: int = 0
    kv_cache_usage: float = 0.0
    ready: bool = False
    reason: str = ""
    hand_over_problems: tuple[HandOverProblem, ...] = ()
