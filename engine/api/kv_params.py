"""Decodes `kv_transfer_params`, which are hostile until proven otherwise.

Knows nothing of leases or peers.
"""

from engine.api.json_body import convert
from engine.errors import InvalidRequestError, KVTransferParamsError
from engine.types import KVTransferParams

_FLAGS = frozenset({"do_remote_decode", "do_remote_prefill"})
_REQUIRED_BY_PREFILL = (
    "remote_engine_id",
    "remote_request_id",
    "remote_block_ids",
    "remote_host",
    "remote_port",
    "remote_num_tokens",
    "first_token_ids",
)


def parse_kv_transfer_params(value: object) -> KVTransferParams | None:
    """Typed parameters, or None when they ask for nothing (null, {}, both flags false and the rest
    null).

    Raises KVTransferParamsError for wrong types, unknown keys, partial answers of P and both flags
    at once.
    """
    if value is None:
        return None
    params = _decode(value)
    given = [name for name in params.__struct_fields__ if getattr(params, name) is not None]
    details = [name for name in given if name not in _FLAGS]
    if params.do_remote_decode and params.do_remote_prefill:
        raise KVTransferParamsError("do_remote_decode and do_remote_prefill cannot both be true")
    if params.do_remote_prefill:
        _require_complete(details)
        return params
    if details:
        raise KVTransferParamsError(f"{details[0]} is only accepted with do_remote_prefill=true")
    return params if params.do_remote_decode else None


def _decode(value: object) -> KVTransferParams:
    if isinstance(value, dict):  # proxies send null where they mean false
        value = {key: it for key, it in value.items() if key not in _FLAGS or it is not None}
    try:
        return convert(value, KVTransferParams)
    except InvalidRequestError as error:
        raise KVTransferParamsError(f"kv_transfer_params: {error}") from error


def _require_complete(given: list[str]) -> None:
    missing = [name for name in _REQUIRED_BY_PREFILL if name not in given]
    if missing:
        raise KVTransferParamsError(
            f"do_remote_prefill=true needs {', '.join(missing)}: pass on P's reply unchanged"
        )
