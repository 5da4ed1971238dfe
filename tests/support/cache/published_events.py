"""The KV events of other projects as they have published them over time.

vLLM cannot be installed beside this project: these are its struct definitions and those of SGLang,
written down from their public sources as tables, field by field and in their order. msgspec, which
both use, encodes and decodes them here, so the bytes are those of the projects.
"""

from typing import Any, NamedTuple, Union

import msgspec

IntHash = int
AnyHash = bytes | int


class PublishedForm(NamedTuple):
    """One version of the structs: of a batch and of the three events."""

    batch: Any
    stored: Any
    removed: Any
    cleared: Any
    is_array: bool
    takes_bytes: bool

    def encode(self, *events: Any, rank: int | None = None) -> bytes:
        """A batch as this version sends it."""
        return msgspec.msgpack.encode(self.batch(1.5, list(events), rank))

    def decode(self, payload: bytes) -> Any:
        """The batch as this version reads it."""
        return msgspec.msgpack.decode(payload, type=self.batch)


def _form(
    block_hash: Any,
    stored: list[Any],
    removed: list[Any],
    *,
    is_array: bool,
    rank: str = "data_parallel_rank",
    batch_is_array: bool = True,
) -> PublishedForm:
    options: dict[str, Any] = dict(array_like=is_array, omit_defaults=True, gc=False, tag=True)
    hashes = ("block_hashes", list[block_hash])
    first = [hashes, ("parent_block_hash", block_hash | None), ("token_ids", list[int])]
    make: Any = msgspec.defstruct
    kinds = (
        make("BlockStored", [*first, ("block_size", int), *stored], **options),
        make("BlockRemoved", [hashes, *removed], **options),
        make("AllBlocksCleared", [], **options),
    )
    events: Any = list[Union[kinds]]  # type: ignore[valid-type]  # noqa: UP007
    fields: list[Any] = [("ts", float), ("events", events), (rank, int | None, None)]
    batch = msgspec.defstruct(
        "KVEventBatch", fields, array_like=batch_is_array, omit_defaults=True, gc=False
    )
    return PublishedForm(batch, *kinds, is_array=is_array, takes_bytes=block_hash is not IntHash)


_LORA: list[Any] = [("lora_id", int | None)]
_MEDIUM: list[Any] = [("medium", str | None)]
_NAME: list[Any] = [("lora_name", str | None)]
_EXTRA: list[Any] = [("extra_keys", list[tuple[Any, ...] | None] | None, None)]
_GROUP: list[Any] = [("group_idx", int | None, None)]
_KIND: list[Any] = [
    ("kv_cache_spec_kind", str | None, None),
    ("kv_cache_spec_sliding_window", int | None, None),
]
_PLACE: list[Any] = [("locality", str | None, None), ("ownership", str | None, None)]
_SESSION: list[Any] = [("session_id", str | None, None)]
_SGLANG: list[Any] = [("medium", str | None, None), ("cache_salt", str | None, None), *_SESSION]

_NAMED = [*_LORA, *_MEDIUM, *_NAME]
_WITH_KIND = [*_NAMED, *_EXTRA, *_GROUP, *_KIND]

FORMS = {
    "vllm arrays": _form(IntHash, _LORA, [], is_array=True),
    "vllm arrays with media": _form(IntHash, [*_LORA, *_MEDIUM], _MEDIUM, is_array=True),
    "vllm arrays with bytes": _form(AnyHash, _NAMED, _MEDIUM, is_array=True),
    "vllm arrays with keys": _form(AnyHash, [*_NAMED, *_EXTRA], _MEDIUM, is_array=True),
    "vllm arrays with groups": _form(AnyHash, _WITH_KIND, [*_MEDIUM, *_GROUP], is_array=True),
    "vllm maps": _form(AnyHash, _WITH_KIND, [*_MEDIUM, *_GROUP], is_array=False),
    "vllm maps, batch too": _form(
        AnyHash, _WITH_KIND, [*_MEDIUM, *_GROUP], is_array=False, batch_is_array=False
    ),
    "vllm maps of today": _form(
        AnyHash,
        [*_WITH_KIND, *_PLACE, *_SESSION],
        [*_MEDIUM, *_GROUP, *_PLACE],
        is_array=False,
    ),
    "sglang arrays": _form(
        IntHash, [*_LORA, ("medium", str | None, None)], [("medium", str | None, None)],
        is_array=True, rank="attn_dp_rank",
    ),
    "sglang maps": _form(
        IntHash, [*_LORA, *_SGLANG], [("medium", str | None, None)],
        is_array=False, rank="attn_dp_rank",
    ),
}  # fmt: skip
TODAY = FORMS["vllm maps of today"]
