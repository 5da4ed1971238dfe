"""Options of a node: flags over file over defaults, and the defaults that people meet."""

import json
import re
from pathlib import Path
from typing import cast

import pytest
import structlog
import typer
from typer.testing import CliRunner

from connector.pd.config import PdConnectorConfig
from connector.registry import builder_of
from deploy.config import Role, load_cluster
from engine.errors import ConfigError
from proxy.config import ProxyConfig
from serving.cli import node_app
from serving.config import KVTransferConfig, NodeConfig, decode_config, load_config
from serving.node.callers import token_for_calls
from serving.process import Server
from serving.vllm_flags import ANY_VALUE, ONLY, REFUSED, SWITCHES


def test_prefixes_are_cached_unless_told_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "node.yaml"
    file.write_text("model: m\nenable-prefix-caching: false\n")
    assert NodeConfig(model="m").enable_prefix_caching
    assert not load_config(NodeConfig, file, {}).enable_prefix_caching
    assert load_config(NodeConfig, file, {"enable_prefix_caching": True}).enable_prefix_caching


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_every_node_of_the_demo_caches_prefixes(kind: Role) -> None:
    assert load_cluster().node(kind).enable_prefix_caching


def no_server(config: NodeConfig) -> Server:
    raise AssertionError("no command is run here")


def test_every_option_is_a_flag() -> None:
    command = typer.main.get_command(node_app("prefill", 8100, no_server))
    given = {option.name for option in command.params}
    assert set(NodeConfig.__struct_fields__) == given - {"config"}


def test_help_names_flags_in_full_and_their_defaults() -> None:
    told = CliRunner().invoke(node_app("prefill", 8100, no_server), ["--help"]).output
    default = NodeConfig(model="m")
    for flag, value in {
        "--no-enable-prefix-caching": "yes" if default.enable_prefix_caching else "no",
        "--mamba-checkpoint-share": str(default.mamba_checkpoint_share),
        "--mamba-decode-checkpoint-interval": str(default.mamba_decode_checkpoint_interval),
        "--dtype": default.dtype,
    }.items():
        assert re.search(rf"{flag}\s[^\[]*\[{re.escape(value)}\]", told), flag


class Made(Exception):
    """A node was about to be made, with these options."""


def started(*words: str) -> tuple[NodeConfig, str]:
    """The options that a command line gives, and what it says."""

    def keep(config: NodeConfig) -> Server:
        raise Made(config)

    done = CliRunner().invoke(node_app("prefill", 8100, keep), words)
    structlog.reset_defaults()
    assert isinstance(done.exception, Made), done.output
    return cast(NodeConfig, done.exception.args[0]), done.output


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("m --served-model-name a b --port 1", ("a", "b")),
        ("--served-model-name a b m", ("a", "b")),
        ("--served-model-name a m", ("a",)),
        ("--port 1 m --served-model-name a --served-model-name b c", ("a", "b", "c")),
        ("--api-key -k --served-model-name=a m --enable-prefix-caching", ("a",)),
    ],
)
def test_a_flag_takes_several_words(words: str, names: tuple[str, ...]) -> None:
    config, _ = started(*words.split())
    assert (config.model, config.served_model_name) == ("m", names)


def test_flags_of_vllm_without_effect_are_taken_with_a_line() -> None:
    words = "m --enable-auto-tool-choice --seed 0 -tp 1 --load-format=auto --max-num-seqs 3"
    config, told = started(*words.split())
    assert config.max_num_seqs == 3
    (line,) = told.splitlines()
    assert json.loads(line)["flags"] == [
        "--enable-auto-tool-choice",
        "--seed 0",
        "--tensor-parallel-size 1",
        "--load-format auto",
    ]


@pytest.mark.parametrize("words", ["-q int8", "-q=int8", "--quantization int8"])
def test_int8_is_asked_for_as_in_vllm(words: str) -> None:
    config, told = started(*f"m {words} --seed 1".split())
    assert config.compute.quantization == "int8"
    assert "--quantization" not in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tensor-parallel-size 2", "--tensor-parallel-size '2' of vLLM is not served here: only"),
        ("--load-format dummy", "only auto or safetensors"),
        ("--root-path /x", "--root-path of vLLM is not served here: let the proxy"),
        ("-q=fp8", "--quantization 'fp8' of vLLM is not served here: leave it out"),
        ("--quantization awq", "leave it out"),
        ("--seed", "--seed of vLLM needs a value"),
        ("--no-such-flag", "No such option"),
    ],
)
def test_flags_that_would_mean_something_are_refused(words: str, message: str) -> None:
    done = CliRunner().invoke(node_app("prefill", 8100, no_server), ["m", *words.split()])
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


def test_no_flag_of_ours_is_taken_for_one_of_vllm() -> None:
    command = typer.main.get_command(node_app("prefill", 8100, no_server))
    ours = {flag for option in command.params for flag in option.opts}
    assert not ours & (SWITCHES | ANY_VALUE | ONLY.keys() | REFUSED.keys())


@pytest.mark.parametrize(
    ("name", "value"),
    [("mamba_checkpoint_share", 1.5), ("mamba_decode_checkpoint_interval", -16)],
)
def test_impossible_values_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        decode_config({"model": "m", name: value}, NodeConfig, "flags")


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_concurrent_pulls", 0), ("max_concurrent_pulls_per_peer", 0), ("max_waiting_pulls", 0)],
)
def test_limits_of_pulls_are_at_least_one(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=name):
        builder_of(KVTransferConfig(kv_connector_extra_config={name: value}))


def test_one_peer_gets_no_more_pulls_than_the_node() -> None:
    asked = {"max_concurrent_pulls": 2, "max_concurrent_pulls_per_peer": 3}
    with pytest.raises(ConfigError, match="per_peer 3 is more than max_concurrent_pulls 2; lower"):
        builder_of(KVTransferConfig(kv_connector_extra_config=asked))
    assert PdConnectorConfig(max_concurrent_pulls=2).pulls_per_peer == 2


@pytest.mark.parametrize(
    ("children", "told"),
    [
        ([], "connectors is empty; name at least one"),
        ([{}, {}], "PdConnector is there twice; leave one out"),
        ([{"kv_connector": "Nope"}], r"connectors\[0\] \(Nope\): kv_connector 'Nope' is not known"),
        (
            [{"kv_connector_extra_config": {"transprot": "shm"}}],
            r"connectors\[0\] \(PdConnector\): .* unknown field `transprot`",
        ),
    ],
)
def test_a_child_that_cannot_be_built_is_named(children: list[object], told: str) -> None:
    extra = {"connectors": children}
    config = KVTransferConfig(kv_connector="MultiConnector", kv_connector_extra_config=extra)
    with pytest.raises(ConfigError, match=told):
        builder_of(config)


def test_a_connector_that_nobody_knows_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match="'LMCacheConnector' is not known; use one of Pd"):
        builder_of(KVTransferConfig(kv_connector="LMCacheConnector"))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "open"),
        ({"host": "::1"}, "open"),
        ({"host": "0.0.0.0"}, "closed"),
        ({"host": "::"}, "closed"),
        ({"host": "10.0.0.1"}, "closed"),
        ({"host": "node-7"}, "closed"),
        ({"api_key": "k"}, "closed"),
        ({"host": "0.0.0.0", "cluster_token": "t"}, "members"),
        ({"cluster_token": "t"}, "members"),
    ],
)
def test_grpc_is_open_to_this_machine_only(fields: dict[str, str], expected: str) -> None:
    config = decode_config({"model": "m", **fields}, NodeConfig, "flags")
    token = token_for_calls(config)
    assert {None: "open", "t": "members"}.get(token, "closed") == expected
    assert expected != "closed" or token != token_for_calls(config)


@pytest.mark.parametrize("name", ["api_key", "cluster_token"])
@pytest.mark.parametrize("value", ["", " ", "two\nlines", "secret\n", "\x00", "\x7f"])
def test_a_secret_that_is_none_is_refused_by_name(name: str, value: str, tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text(json.dumps({name.replace("_", "-"): value}))
    for read in (
        lambda: load_config(NodeConfig, None, {"model": "m", name: value}),
        lambda: load_config(NodeConfig, file, {"model": "m"}),
        lambda: load_config(ProxyConfig, None, {"decode": ("grpc://h:1",), name: value}),
        lambda: load_config(ProxyConfig, file, {"decode": ("grpc://h:1",)}),
    ):
        with pytest.raises(ConfigError, match=f"{name} (is empty|has line ends)"):
            read()
