"""A small real hand-over from P to D, checked against the same request on D alone."""

import secrets
from typing import Any

import msgspec

from connector.doctor.findings import DoctorError, Finding, good, wrong
from connector.doctor.probe import NodeReport
from engine.errors import TandemError
from engine.types import KVTransferStats

SUBJECT = "canary P to D"
PATH = "/v1/completions"
PROMPT_TOKENS = 1024
OUTPUT_TOKENS = 4
NO_TOKEN = 2  # the first ids of a vocabulary are often special


class _Choice(msgspec.Struct, frozen=True):
    token_ids: list[int]


class _Usage(msgspec.Struct, frozen=True):
    kv_transfer: KVTransferStats | None = None


class _Reply(msgspec.Struct, frozen=True):
    """The fields of a completion that the canary reads; it asks for one choice."""

    choices: tuple[_Choice]
    usage: _Usage
    kv_transfer_params: dict[str, Any] | None = None


async def fly(p: NodeReport, d: NodeReport, api_key: str | None) -> Finding:
    """Prefills on P, decodes on D, and repeats on D alone: the tokens must be equal."""
    assert p.info is not None and d.info is not None
    # A random prompt, which no cache has, as long as both contexts allow, up to a bound.
    length = min(PROMPT_TOKENS, min(p.info.max_model_len, d.info.max_model_len) // 2)
    highest = min(p.info.vocab_size, d.info.vocab_size)
    lowest = min(NO_TOKEN, highest - 1)
    prompt = [lowest + secrets.randbelow(highest - lowest) for _ in range(max(1, length))]
    try:
        # P and D name one salt, or D refuses the hand-over; nobody else has it, so nothing hits.
        salt = secrets.token_hex(8)
        body = {
            "prompt": prompt,
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "cache_salt": salt,
            "kv_transfer_params": None,
        }
        to_p = body | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        held = await _ask(p, api_key, to_p)
        params = held.kv_transfer_params
        if params is None:
            fix = 'start P with kv_role "kv_producer" or "kv_both" in --kv-transfer-config'
            return wrong(SUBJECT, "P answered without kv_transfer_params", fix)
        pulled = await _ask(d, api_key, body | {"kv_transfer_params": params})
        # D alone must compute the prompt itself: another salt, so it cannot hit what was pulled.
        alone = await _ask(d, api_key, body | {"cache_salt": secrets.token_hex(8)})
    except DoctorError as error:
        return error.finding
    except TandemError as error:
        return wrong(SUBJECT, f"no answer: {error}", "look into the logs of both nodes")
    return _judge(params, pulled, alone)


def _judge(params: dict[str, Any], pulled: _Reply, alone: _Reply) -> Finding:
    moved = pulled.usage.kv_transfer
    if moved is None or not moved.attention_bytes + moved.state_bytes:
        where = f"{params.get('remote_host')}:{params.get('remote_port')}"
        text = f"D computed the prompt itself instead of reading it from P at {where}"
        fix = "see D's log; give P an --advertise-host that D can reach, or change the transport"
        return wrong(SUBJECT, text, fix)
    after, without = (reply.choices[0].token_ids for reply in (pulled, alone))
    if after != without:
        text = f"tokens {after} after the transfer, {without} on D alone"
        return wrong(SUBJECT, text, "send no traffic; report it with both nodes' flags")
    if not moved.verified:
        text = f"{_rate(moved)}; the tokens are right, but D did not compare digests"
        return wrong(SUBJECT, text, "set verify_transfers on D")
    return good(SUBJECT, f"{_rate(moved)}, verified; the tokens equal those of D alone")


def _rate(moved: KVTransferStats) -> str:
    total, seconds = moved.attention_bytes + moved.state_bytes, moved.transfer_ms / 1e3
    rate = f"{total / seconds / 1e9:.3f} GB/s" if seconds > 0 else "too fast to tell"
    return (
        f"{moved.attention_bytes} B of attention and {moved.state_bytes} B of state in "
        f"{moved.transfer_ms:.2f} ms, {rate}"
    )


async def _ask(node: NodeReport, api_key: str | None, body: dict[str, Any]) -> _Reply:
    answer = await node.http.post(PATH, api_key, body)
    if answer.status == 401:
        fix = "give the doctor the nodes' --api-key (or VLLM_API_KEY)"
        raise DoctorError(SUBJECT, f"{node.name} refuses the API key", fix)
    if answer.status != 200:
        raise DoctorError(SUBJECT, f"{node.name} answers {answer.error}", "look into its log")
    try:
        return msgspec.convert(answer.body, _Reply)
    except msgspec.ValidationError as error:
        text = f"{node.name}'s answer cannot be read: {error}"
        raise DoctorError(SUBJECT, text, "run the same version everywhere") from error
