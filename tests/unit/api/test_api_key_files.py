"""API keys by themselves: what a file of them may hold, how they are found, and their limits."""

import json
import random
from contextlib import suppress

import pytest

from engine.errors import ConfigError
from proxy.access.api_key import ApiKey, KeyTable, parse_keys
from proxy.access.bucket import Bucket, duration
from proxy.config import ProxyConfig
from serving.config import load_config
from tests.unit.api.test_api_keys import A, B, entry


@pytest.mark.parametrize("text", [" " + A, A + " ", A + "\n", A + "\xa0", A[:8] + "\r" + A[8:]])
def test_a_key_that_no_header_can_carry_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"the key of a .* header") as caught:
        parse_keys(json.dumps({"keys": [entry("a", text)]}).encode(), "file")
    assert A not in str(caught.value)
    with pytest.raises(ConfigError, match="api_key"):
        load_config(ProxyConfig, None, {"decode": ("grpc://h:1",), "api_key": text})


@pytest.mark.parametrize("opener", ["[", "{a: ", "- "])
def test_a_file_of_nothing_but_nesting_is_refused(opener: str) -> None:
    """The parser recurses on the C stack, which would end the process."""
    with pytest.raises(ConfigError, match="nested deeper"):
        parse_keys(opener.encode() * 100_000, "file")


@pytest.mark.parametrize(
    "name", ["2024-02-30", "2001-13-01", "!!int 'abc'", "!!bool 'x'", "!!timestamp 'x'", "12:30"]
)
def test_no_name_is_taken_for_a_date_or_a_number(name: str) -> None:
    """YAML's own reading of such texts fails in ways of its own."""
    with suppress(ConfigError):  # a colon is in no name
        (key,) = parse_keys(f"keys: [{{name: a, key: {A}, tenant: {name}}}]".encode(), "file")
        assert key.tenant is not None and key.tenant in name


def test_numbers_and_switches_of_a_key_are_read_as_such() -> None:
    text = f"keys:\n- {{name: a, key: {A}, weight: 0.2, tokens_per_minute: 600, operator: true}}"
    (key,) = parse_keys(text.encode(), "file")
    assert (key.weight, key.tokens_per_minute, key.operator) == (0.2, 600, True)
    with pytest.raises(ConfigError, match="weight"):
        parse_keys(text.replace("0.2", "much").encode(), "file")


def test_random_files_are_refused_with_one_error_and_no_key() -> None:
    """Every damaged file is a ConfigError, never another exception, and never quotes a key."""
    draw = random.Random(5)
    whole = json.dumps({"keys": [entry("a", A, weight=2), entry("b", B, operator=True)]}).encode()
    yaml = f"keys:\n- name: a\n  key: {A}\n- {{name: b, key: {B}}}\n".encode()
    for _ in range(500):
        data = bytearray(draw.choice((whole, yaml)))
        for _ in range(draw.randint(1, 6)):
            at = draw.randrange(len(data))
            data[at : at + draw.choice((0, 1, 30))] = bytes(
                draw.choices(b"[]{}:,'\"\n\t-&*!\x00\xff", k=2)
            )
        try:
            parse_keys(bytes(data), "file")
        except ConfigError as error:
            assert A[4:] not in str(error) and B[4:] not in str(error), error


def test_a_table_finds_its_keys_only() -> None:
    keys = [ApiKey(name=f"n{i}", key=f"key number {i} of many").hashed() for i in range(200)]
    table = KeyTable(keys)
    assert [table.find(b"key number %d of many" % i) for i in range(200)] == [k.name for k in keys]
    assert all(key.key is None for key in keys)
    assert table.find(b"") is None and table.find((keys[0].sha256 or "").encode()) is None


def test_a_bucket_holds_its_limit_on_average() -> None:
    """Against arithmetic: whatever is asked when, no more than the limit and one request begins."""
    draw, now = random.Random(3), 0.0
    bucket = Bucket(60, lambda: now)
    taken = 0.0
    for _ in range(5000):
        now += draw.expovariate(1)
        if bucket.level > 0:
            amount = draw.uniform(0, 30)
            bucket.take(amount)
            taken += amount
        else:
            wait = bucket.seconds_until(1)
            assert wait > 0
    assert taken <= 60 + now + 30
    assert taken >= 0.9 * now, "and it does not hold up more than that"
    bucket.limit = 6
    assert bucket.level <= 6


def test_durations_are_written_as_clients_read_them() -> None:
    written = [duration(seconds) for seconds in (0, 0.0201, 1.5, 59, 60, 83, 3600)]
    assert written == ["0ms", "21ms", "1.5s", "59s", "1m0s", "1m23s", "60m0s"]
