"""`kv_transfer_params`: how a node signs them, and what a node checks before it believes them.

The object passes through clients and proxies that anybody may run. So the node that holds a request
signs it with a key of the cluster, and a node that pulls talks only to hosts that a signed object
names. Without a cluster token there is no secret key, and only loopback peers are accepted.
"""

import hashlib
import hmac
from array import array
from collections.abc import Sequence

import msgspec

from connector.pd.wire.messages import BlockIds
from engine.errors import InvalidRequestError, KVTransferParamsError, TransportError
from engine.kv_cache.prefix import PrefixHasher
from engine.kv_connector import FirstToken
from engine.prompt_checks import check_token_ids
from engine.types import GenerateRequest, KVTransferParams
from serving.rpc.address import is_loopback

REQUIRED_TO_RETURN = (
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "remote_num_tokens",
    "remote_prompt_digest",
    "signature",
)
REQUIRED = (*REQUIRED_TO_RETURN, "remote_generation", "first_token_ids")
FLAGS = frozenset({"do_remote_decode", "do_remote_prefill"})
FIRST_TOKEN = frozenset({"first_token_ids", "first_token_logprobs"})


class ParamsSigner:
    """Signs and verifies with the cluster's signing key; None means loopback peers only."""

    def __init__(self, signing_key: bytes | None) -> None:
        self._has_key = signing_key is not None
        self._key = signing_key or b"loopback"

    def sign(self, params: KVTransferParams) -> KVTransferParams:
        return msgspec.structs.replace(params, signature=self._digest(params))

    def verify(self, params: KVTransferParams) -> None:
        """Raises KVTransferParamsError unless a node of this cluster signed exactly this object."""
        given = (params.signature or "").encode()
        if not hmac.compare_digest(self._digest(params).encode(), given):
            raise KVTransferParamsError(
                "kv_transfer_params were not issued by a node of this cluster, or were changed "
                "on the way; send P's object as it is, and give all nodes the same cluster token",
                code="foreign_kv_transfer_params",
            )
        if not self._has_key and not is_loopback(params.remote_host or ""):
            raise KVTransferParamsError(
                f"remote_host {params.remote_host!r} is not this machine; start all nodes with "
                "the same cluster token to allow other hosts",
                code="foreign_kv_transfer_params",
            )

    def _digest(self, params: KVTransferParams) -> str:
        unsigned = msgspec.structs.replace(params, signature=None)
        return hmac.new(self._key, msgspec.msgpack.encode(unsigned), hashlib.sha256).hexdigest()


def holding_of(prompt_digest: str, block_ids: BlockIds) -> bytes:
    """Binds a lease to the tokens that it holds and to their blocks: 32 bytes of SHA-256.

    Ids suffice: D takes the geometry that places them from the same incarnation, not from a client.
    Raises TransportError for values that no node could hold.
    """
    try:
        hashed = hashlib.sha256(bytes.fromhex(prompt_digest))
        for group in block_ids:
            hashed.update(array("Q", [len(group), *group]).tobytes())
    except (ValueError, OverflowError) as error:
        raise TransportError(f"no node holds such blocks: {error}") from error
    return hashed.digest()


def check_details(params: KVTransferParams) -> None:
    """Raises KVTransferParamsError for details without the flag that they belong to.

    The object of a turn that D keeps has all details but the first token.
    """
    if params.do_remote_prefill:
        return
    details = sorted(frozenset(params.__struct_fields__) - FLAGS)
    for name in FIRST_TOKEN if params.is_return_pull else details:
        if getattr(params, name) is not None:
            raise KVTransferParamsError(f"{name} is only accepted with do_remote_prefill=true")


def first_token_of(params: KVTransferParams, vocab_size: int) -> FirstToken | None:
    """P's first token. Raises KVTransferParamsError for tokens that the model does not have."""
    logprobs = params.first_token_logprobs or ()
    beside = [token for entry in logprobs for token, _ in entry.top]
    chosen = [entry.token_id for entry in logprobs]
    try:
        check_token_ids(params.first_token_ids or (), vocab_size, "first_token_ids")
        check_token_ids([*chosen, *beside], vocab_size, "first_token_logprobs")
    except InvalidRequestError as error:
        raise KVTransferParamsError(f"kv_transfer_params: {error}") from error
    if not params.first_token_ids:
        return None
    return FirstToken(params.first_token_ids[0], logprobs[0] if logprobs else None)


def check_remote_prefill(request: GenerateRequest, params: KVTransferParams) -> None:
    """Raises KVTransferParamsError naming what is missing or does not fit `request`."""
    if params.do_remote_decode:
        raise KVTransferParamsError("do_remote_decode and do_remote_prefill exclude each other")
    _check_complete(params, REQUIRED, "do_remote_prefill")
    num_tokens = len(request.token_ids)
    if params.remote_num_tokens != num_tokens:
        raise KVTransferParamsError(
            f"P computed {params.remote_num_tokens} tokens but this prompt has {num_tokens}; "
            "send the same prompt to both",
            code="mismatched_kv_transfer_params",
        )


def check_return_pull(params: KVTransferParams) -> None:
    """Raises KVTransferParamsError naming what is missing to pull the turn before from D."""
    _check_complete(params, REQUIRED_TO_RETURN, "do_remote_decode with remote_engine_id")


def why_not_from(
    request: GenerateRequest, params: KVTransferParams, hasher: PrefixHasher
) -> str | None:
    """The cause for which this prompt cannot go on from the tokens that D has computed, if any.

    It must begin with exactly these tokens, because D's state is the state after all of them, and
    have at least one more. Clients may edit their history, so a mismatch is not an error.
    """
    num_tokens = params.remote_num_tokens or 0
    if len(request.token_ids) <= num_tokens:
        return "not_longer"
    beginning = hasher.digest(request.token_ids[:num_tokens], request.cache_salt)
    return None if beginning.hex() == params.remote_prompt_digest else "other_tokens"


def _check_complete(params: KVTransferParams, names: Sequence[str], purpose: str) -> None:
    missing = [name for name in names if getattr(params, name) is None]
    if missing:
        raise KVTransferParamsError(
            f"{purpose} needs {', '.join(missing)}; send the node's object as it is",
            code="partial_kv_transfer_params",
        )
