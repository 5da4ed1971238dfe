"""Decodes `kv_transfer_params`, which are hostile until proven otherwise.

Knows nothing of leases or peers.
"""

from typing import Final

from msgspec import Raw

from engine.api.json_body import MAX_ITEMS, convert, decode_json
from engine.errors import InvalidRequestError, KVTransferParamsError
from engine.types import MAX_KV_TRANSFER_PARAMS_BYTES, KVTransferParams

MAX_COLONS: Final = 4096
FLAGS: Final = frozenset({"do_remote_decode", "do_remote_prefill"})


def decode_kv_transfer_params(raw: Raw) -> KVTransferParams | None:
    """Typed parameters, or None when they ask for nothing (absent, null, {}, flags false).

    Raises KVTransferParamsError for wrong types and unknown keys; what they mean, and whether they
    can be believed, is for the connector to say.
    """
    text = bytes(memoryview(raw))
    if len(text) > MAX_KV_TRANSFER_PARAMS_BYTES:
        raise KVTransferParamsError(
            f"kv_transfer_params: {len(text)} bytes, {MAX_KV_TRANSFER_PARAMS_BYTES} are allowed"
        )
    # Before millions of ids or keys become objects.
    if text.count(b",") > MAX_ITEMS or text.count(b":") > MAX_COLONS:
        raise KVTransferParamsError(
            f"kv_transfer_params: more than {MAX_ITEMS} ids or too many keys"
        )
    # Plain values first: the flags may be null, which their type does not allow.
    value = decode_json(text or b"null", object)
    if value is None:
        return None
    if isinstance(value, dict):  # proxies send null where they mean false
        value = {key: it for key, it in value.items() if key not in FLAGS or it is not None}
    try:
        params = convert(value, KVTransferParams)
    except InvalidRequestError as error:
        raise KVTransferParamsError(f"kv_transfer_params: {error}") from error
    return None if params == KVTransferParams() else params
