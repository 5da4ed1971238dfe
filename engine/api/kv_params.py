"""Decodes `kv_transfer_params`, which are hostile until proven otherwise.

Knows nothing of leases or peers.
"""

from typing import Final

from msgspec import Raw

from engine.api.json_body import MAX_ITEMS, convert, decode_any
from engine.errors import InvalidRequestError, KVTransferParamsError
from engine.prompt_checks import FLAGS, check_details
from engine.types import MAX_KV_TRANSFER_PARAMS_BYTES, KVTransferParams

MAX_COLONS: Final = 4096


def parse_kv_transfer_params(value: object) -> KVTransferParams | None:
    """Typed parameters, or None when they ask for nothing (null, {}, flags false and no more).

    Raises KVTransferParamsError for wrong types, unknown keys and details without a request for a
    remote prefill; whether a remote prefill can be believed is for the connector to say.
    """
    if isinstance(value, Raw):
        value = _read(value)
    if value is None:
        return None
    params = _decode(value)
    check_details(params)
    return params if params.do_remote_prefill or params.do_remote_decode else None


def _read(raw: Raw) -> object:
    """Raises KVTransferParamsError before millions of ids or keys are made objects of."""
    text = bytes(memoryview(raw))
    if len(text) > MAX_KV_TRANSFER_PARAMS_BYTES:
        raise KVTransferParamsError(
            f"kv_transfer_params: {len(text)} bytes, {MAX_KV_TRANSFER_PARAMS_BYTES} are allowed"
        )
    if text.count(b",") > MAX_ITEMS or text.count(b":") > MAX_COLONS:
        raise KVTransferParamsError(
            f"kv_transfer_params: more than {MAX_ITEMS} ids or too many keys"
        )
    return decode_any(raw)


def _decode(value: object) -> KVTransferParams:
    if isinstance(value, dict):  # proxies send null where they mean false
        value = {key: it for key, it in value.items() if key not in FLAGS or it is not None}
    try:
        return convert(value, KVTransferParams)
    except InvalidRequestError as error:
        raise KVTransferParamsError(f"kv_transfer_params: {error}") from error
