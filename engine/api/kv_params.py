"""Decodes `kv_transfer_params`, which are hostile until proven otherwise.

Knows nothing of leases or peers.
"""

from engine.api.json_body import convert, member_sizes
from engine.errors import InvalidRequestError, KVTransferParamsError
from engine.prompt_checks import FLAGS, check_details
from engine.types import MAX_KV_TRANSFER_PARAMS_BYTES, KVTransferParams


def parse_kv_transfer_params(value: object) -> KVTransferParams | None:
    """Typed parameters, or None when they ask for nothing (null, {}, flags false and no more).

    Raises KVTransferParamsError for wrong types, unknown keys and details without a request for a
    remote prefill; whether a remote prefill can be believed is for the connector to say.
    """
    if value is None:
        return None
    params = _decode(value)
    check_details(params)
    return params if params.do_remote_prefill or params.do_remote_decode else None


def check_size(body: bytes) -> None:
    """Raises KVTransferParamsError before millions of ids are made objects of."""
    if len(body) <= MAX_KV_TRANSFER_PARAMS_BYTES:
        return
    size = member_sizes(body).get("kv_transfer_params", 0)
    if size > MAX_KV_TRANSFER_PARAMS_BYTES:
        raise KVTransferParamsError(
            f"kv_transfer_params: {size} bytes, {MAX_KV_TRANSFER_PARAMS_BYTES} are allowed"
        )


def _decode(value: object) -> KVTransferParams:
    if isinstance(value, dict):  # proxies send null where they mean false
        value = {key: it for key, it in value.items() if key not in FLAGS or it is not None}
    try:
        return convert(value, KVTransferParams)
    except InvalidRequestError as error:
        raise KVTransferParamsError(f"kv_transfer_params: {error}") from error
