"""Flags over file over defaults, and wrong ones refused by name."""

import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import ConfigError
from proxy.config import ProxyConfig
from serving.config import load_config

D = "http://127.0.0.1:8200"


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "proxy.yaml"
    file.write_text(
        f"decode: [{D}]\nrequest-timeout: 5\nport: 9000\nrouting_policy: least_loaded\n"
    )
    config = load_config(ProxyConfig, file, {"port": 9001, "host": None})
    assert config.decode == (D,)
    assert (config.port, config.request_timeout) == (9001, 5.0)
    assert (config.host, config.routing_policy) == ("127.0.0.1", "least_loaded")


@pytest.mark.parametrize(("given", "is_read_as"), [("auto", "auto"), ("64", 64), (64, 64)])
def test_the_threshold_is_a_number_or_auto(given: str | int, is_read_as: str | int) -> None:
    config = load_config(ProxyConfig, None, {"decode": (D,), "disagg_threshold": given})
    assert config.threshold == is_read_as


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("surprise: 1", "surprise"),
        ("port: many", "port"),
        ("port: 70000", "port"),
        ("decode: 5", "decode"),
        ("- a list", "mapping"),
        ("a: [", "mapping"),
        ("request-timeout: 0", "request_timeout"),
        ("cluster-token: ''", "cluster_token"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, names: str) -> None:
    file = tmp_path / "proxy.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=names):
        load_config(ProxyConfig, file, {"decode": (D,)} if "decode" not in text else {})


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        load_config(ProxyConfig, tmp_path / "absent.yaml", {})


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ({}, "--decode"),
        ({"decode": ("localhost:8200",)}, "localhost:8200"),
        ({"decode": ("ftp://h:1",)}, "ftp://h:1"),
        ({"decode": ("http://h",)}, "http://h"),
        ({"decode": ("http://h:99999",)}, "99999"),
        ({"decode": ("http://h:1/v1",)}, "after the port"),
        ({"decode": ("http://user@h:1",)}, "after the port"),
        ({"decode": (D,), "prefill": (D + "/",)}, "twice"),
        ({"decode": (D,), "routing_policy": "psychic"}, "psychic"),
        ({"decode": (D,), "disagg_threshold": "some"}, "disagg-threshold 'some'"),
        ({"decode": (D,), "disagg_threshold": -1}, "disagg-threshold -1"),
    ],
)
def test_flags_that_cannot_be_are_refused(flags: dict[str, object], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        load_config(ProxyConfig, None, flags)


def test_the_command_line_reports_a_wrong_flag_in_one_line() -> None:
    command = [sys.executable, "-m", "proxy", "--decode", "nonsense"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr == (
        "error: node URL 'nonsense' must be http://host:port or grpc://host:port, with TLS "
        "https:// or grpcs://\n"
    )
