"""Hundreds of wrong `kv_transfer_params`, made from one that a node really answered; seeded."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec import to_builtins

from connector.pd.wire.params import REQUIRED, ParamsSigner
from engine.kv_cache.prefix import PrefixHasher
from engine.types import KVTransferParams
from serving.rpc.proof import signing_key

Fields = dict[str, Any]
PER_FAMILY = 30
TEN_MILLION = 10_000_000
NO_PROMPT_NEEDS = 1_860_000
"""Bytes; a longer body is refused over HTTP by its length, whatever it is."""

VALUES: tuple[Any, ...] = (
    *(True, False, 0, -1, 1.5, 1e308, float("nan"), float("inf"), -float("inf")),
    *(2**31, 2**63, 2**64, 2**70, -(2**63), -(2**70), 10**4000),
    *("", "x", "1", "\0", "\u202e\u0000\U0001f600", "\ud800", "a" * 300, "\u00e9" * 100_000),
    *([], {}, [[]], [{}], [[[]]], [[-1]], [[2**70]], [["1"]], [[0.5]], {"0": 0}, [True]),
    *([2**70], [-1], [2**40], [1] * 100, [[1]] * 100, [[0] * 300_000]),
    *([[2**70, -1.0]], [[1, "high"]], [[1, -1.0, [[2**70, -1.0]]]], [[-1, -1.0]]),
)
HOSTS = (
    *("10.1.2.3", "169.254.169.254", "0.0.0.0", "::1", "127.1", "localhost", "evil.example"),
    *("127.0.0.1:1", "[::1]", "unix:/run/x.sock", "dns:///evil.example", "http://127.0.0.1"),
    *(
        "127.0.0.1\r\nHost: x",
        "127.0.0.1\0",
        " 127.0.0.1",
        "2130706433",
        "\u2460.0.0.1",
        "a.b" * 80,
    ),
)
BEYOND_64_BITS: tuple[Fields, ...] = (
    {"remote_block_ids": [[2**70]]},
    {"first_token_ids": [2**70]},
    {"first_token_logprobs": [[2**70, -1.0, []]]},
    {"first_token_logprobs": [[1, -1.0, [[2**70, -1.0]]]]},
    {"remote_num_cached_tokens": 2**70},
    {"remote_filled_from": [2**70]},
)
GARBAGE = (
    *(b"[]", b'"x"', b"1", b"true", b"NaN", b"{", b"}", b"[" * 100_000, b'{"a":' * 100_000),
    *(b"\x80\x04\x95\x05\x00\x00\x00.", b"\xff\xfe{}", b'{"remote_host": "\xff"}', b"{'a': 1}"),
    *(b'{"do_remote_prefill": tru}', b'{"do_remote_prefill": true,}', b'{"remote_port": 01}'),
    *(b'{"remote_host": "\\ud800"}', b'{"remote_port": ' + b"9" * 5000 + b"}"),
    b'{"signature": "' + b"\\u0000" * 100_000 + b'"}',
)


def hostile_params(valid: Fields, token: str, seed: int) -> Iterator[bytes]:
    """The JSON, or what stands in its place, of objects that no node may accept.

    `valid` is P's answer for the prompt that all are sent with; `token` is the cluster's, for
    objects that a node gone wrong could sign.
    """
    chance = random.Random(seed)
    yield from GARBAGE
    yield from (json.dumps({**valid, **change}).encode() for change in BEYOND_64_BITS)
    for made in (_mistyped, _partial, _nested, _flags, _foreign_host, _signature, _large):
        for _ in range(PER_FAMILY):
            yield from _changed(valid, made(chance, valid))
    for fields in (*_signed_nonsense(valid, token), {**valid, "signature": "0" * 64}):
        yield json.dumps(fields).encode()
    yield _ten_million_ids()
    yield from _bit_flips(chance, valid)


def outdated_params(valid: Fields, token: str) -> Iterator[Fields]:
    """Signed by a node of the cluster, for this prompt, and nothing that P holds."""
    blocks = valid["remote_block_ids"]
    changes: tuple[Fields, ...] = (
        {"remote_engine_id": "prefill-0123456789abcdef"},
        {"remote_generation": valid["remote_generation"] + 1},
        {"remote_block_ids": [[block + 1 for block in group] for group in blocks]},
        {"remote_block_ids": [[2**40] * len(group) for group in blocks]},
        {"remote_block_ids": [group[:1] for group in blocks]},
        {"remote_block_ids": blocks * 2},
        {"remote_filled_from": [1] * len(blocks)},
        {"remote_filled_from": [0]},
        {"remote_block_ids": []},
    )
    return (_signed({**valid, **change}, token) for change in changes)


def hostile_returns(valid: Fields, token: str, seed: int) -> Iterator[bytes]:
    """As `hostile_params`, of D's answer for P: what no P may accept."""
    chance = random.Random(seed)
    wrong = (json.dumps({**valid, **change}).encode() for change in BEYOND_64_BITS)
    yield from wrong
    for made in (_mistyped, _partial, _nested, _flags, _foreign_host, _signature, _large):
        for _ in range(PER_FAMILY):
            fields = made(chance, valid)
            if fields.get("do_remote_prefill") is not None:  # null means false, as it was
                yield from _changed(valid, fields)
    for change in (
        {"first_token_ids": [3]},
        {"first_token_logprobs": [[1, -1.0, []]]},
        {"do_remote_prefill": True},
        {"do_remote_decode": False},
    ):
        yield json.dumps(_signed({**valid, **change}, token)).encode()
    yield from _bit_flips(chance, valid)


def prompt_digest(token_ids: Sequence[int]) -> str:
    """As a node of the default seed names a prompt without a salt."""
    return PrefixHasher(1).digest(token_ids, None).hex()


def outdated_returns(valid: Fields, shorter_digest: str, token: str) -> dict[str, Fields]:
    """Signed by a node of the cluster, and not what D holds for this prompt: by cause.

    `shorter_digest`: of the prompt's beginning that is one token shorter than what D has computed.
    """
    one_less = {"remote_num_tokens": valid["remote_num_tokens"] - 1}
    changes: dict[str, Fields] = {
        "other_tokens": one_less,
        "not_longer": {"remote_num_tokens": 2**20},
        "mismatched": {**one_less, "remote_prompt_digest": shorter_digest},
        "foreign": {"remote_engine_id": "decode-0123456789abcdef"},
        "expired": {"remote_request_id": "cmpl-that-never-was"},
        "peer_unreachable": {"remote_port": 1},
    }
    return {cause: _signed({**valid, **change}, token) for cause, change in changes.items()}


def _changed(valid: Fields, fields: Fields) -> Iterator[bytes]:
    """`fields` as JSON, unless chance has hit what was there already."""
    if repr(fields) != repr(valid):
        yield json.dumps(fields).encode()


def _mistyped(chance: random.Random, valid: Fields) -> Fields:
    return {**valid, chance.choice(sorted(valid)): chance.choice(VALUES)}


def _partial(chance: random.Random, valid: Fields) -> Fields:
    needed = [name for name in REQUIRED if valid.get(name) is not None]
    gone = chance.sample(needed, chance.randint(1, len(needed)))
    if chance.random() < 0.5:
        return {**valid, **dict.fromkeys(gone)}
    return {key: value for key, value in valid.items() if key not in gone}


def _nested(chance: random.Random, valid: Fields) -> Fields:
    wraps: tuple[Callable[[Any], Any], ...] = (
        lambda it: {"kv_transfer_params": it},
        lambda it: {**valid, "remote_block_ids": [[it]]},
        lambda it: {**valid, "unknown": it},
        lambda it: {**valid, "remote_engine_id": it},
        lambda it: {**valid, "__proto__": it},
    )
    value: Any = valid
    for _ in range(chance.randint(1, 5)):
        value = chance.choice(wraps)(value)
    return {**valid, "first_token_ids": [value]} if chance.random() < 0.2 else dict(value)


def _flags(chance: random.Random, valid: Fields) -> Fields:
    both = chance.choice([(True, True), (True, False), (False, False), (None, False), (True, None)])
    return {**valid, "do_remote_decode": both[0], "do_remote_prefill": both[1]}


def _foreign_host(chance: random.Random, valid: Fields) -> Fields:
    changed = {**valid, "remote_host": chance.choice(HOSTS)}
    if chance.random() < 0.5:
        changed["remote_port"] = chance.randint(1, 65_535)
    return _signed(changed, "another cluster") if chance.random() < 0.5 else changed


def _signature(chance: random.Random, valid: Fields) -> Fields:
    right = str(valid["signature"])
    wrong = (
        right[:-1],
        right + "0",
        right.upper(),
        right[::-1],
        "0" * 64,
        "\u00e9" * 64,
        " " + right,
    )
    if chance.random() < 0.3:
        return _signed(valid, chance.choice(["another cluster", "loopback", "x"]))
    return {**valid, "signature": chance.choice(wrong)}


def _large(chance: random.Random, valid: Fields) -> Fields:
    number = chance.choice([1_000, 100_000, 262_145])
    ids = [chance.randint(0, 2**63)] * number
    changes: tuple[Fields, ...] = (
        {"remote_block_ids": [ids]},
        {"remote_block_ids": [[1]] * number},
        {"first_token_ids": ids},
        {"first_token_logprobs": [[1, -1.0, [[1, -1.0]] * number]]},
        {"remote_host": "h" * number},
        {"x" * number: 1},
        {f"key {i}": i for i in range(min(number, 1_000))},
        {"remote_engine_id": "\U0001f600" * number},
    )
    return {**valid, **chance.choice(changes)}


def _signed_nonsense(valid: Fields, token: str) -> Iterator[Fields]:
    """With the true key: what is wrong must be found by looking, not by its signature."""
    for change in (
        {"first_token_ids": [2**63 - 1]},
        {"first_token_ids": [2**32]},
        {"first_token_ids": [512]},
        {"first_token_logprobs": [[2**40, -1.0, []]]},
        {"first_token_logprobs": [[600, -1.0, []]]},
        {"first_token_logprobs": [[-1, -1.0, []]]},
        {"first_token_logprobs": [[1, -1.0, [[2**40, -1.0]]]]},
        {"first_token_logprobs": [[1, -1.0, [[1, -1.0]] * 1_000]]},
        {"remote_num_tokens": valid["remote_num_tokens"] - 1},
        {"remote_prompt_digest": "0" * 64},
        {"do_remote_decode": True},
    ):
        yield _signed({**valid, **change}, token)


def _signed(fields: Fields, token: str) -> Fields:
    """Not checked by the schema, as a node gone wrong would not."""
    params = ParamsSigner(signing_key(token)).sign(KVTransferParams(**fields))
    return dict(to_builtins(params))


def _ten_million_ids() -> bytes:
    ids = b"7," * (TEN_MILLION - 1) + b"7"
    return b'{"do_remote_prefill": true, "remote_block_ids": [[' + ids + b"]]}"


def _bit_flips(chance: random.Random, valid: Fields) -> Iterator[bytes]:
    """One bit of a valid object's JSON; a flip that means the same (1e-5, 1E-5) is left out."""
    for _ in range(2 * PER_FAMILY):
        data = bytearray(json.dumps(valid).encode())
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        if not _means(bytes(data), valid):
            yield bytes(data)


def _means(data: bytes, valid: Fields) -> bool:
    try:
        return bool(json.loads(data) == valid)
    except ValueError:
        return False
