"""Cluster files: what is wrong in one is named by line and key, by us and by an editor."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator

from connector.registry import builder_of
from deploy.config import DEMO_CLUSTER, load_cluster
from engine.errors import ConfigError
from tests.options_page import CLUSTER_SCHEMA

SHARED = "model: m\nconfig:\n\n  drain_timeout: 700\ndecode: {replicas: 2}\n"
WRONG = [
    ("model: m\nfoo: 1\n", "2: Object contains unknown field `foo`"),
    ("prefill: {}\n", "1: Object missing required field `model`"),
    ("model: m\nname: -x\n", "2: name: Expected `str` matching regex"),
    (
        "model: m\nprefill:\n  config:\n    prot: 1\n",
        "4: prefill.config: Object contains unknown field `prot`",
    ),
    ("model: m\nconfig:\n  prot: 1\n", "3: config: Object contains unknown field `prot`"),
    ("model: m\nproxy:\n  replicas: x\n", "3: proxy.replicas: Expected `int`, got `str`"),
    ("model: m\nproxy:\n  num_cpus: -1\n", "3: proxy.num_cpus: Expected `float` >= 0.0"),
    (
        "model: m\nconfig:\n  kv_transfer_config:\n    kv_role: x\n",
        "4: config.kv_transfer_config.kv_role: Invalid enum value 'x'",
    ),
    (
        "model: m\nproxy:\n  config:\n    allowed_origins: [3]\n",
        "4: proxy.config.allowed_origins: Expected `str`, got `int`",
    ),
    ("model: m\nproxy:\n  resources:\n    a: -1\n", "3: proxy.resources: Expected `float` >= 0"),
    (
        "model: m\ndecode:\n  autoscaling: {min_replicas: 3, max_replicas: 1}\n",
        "3: decode.autoscaling: min_replicas 3 is above max_replicas 1",
    ),
    ("model: m\ndecode:\n  replicas: 0\n", "3: decode.replicas: must be at least 1"),
    (
        "model: m\ndecode: {config: {port: 8200}}\n",
        "2: decode.config.port: leave it out: nodes take free ones and tell them",
    ),
    (
        "model: m\ndecode: {config: {prefix_hash_seed: b}}\n",
        "2: decode.config.prefix_hash_seed: differs between nodes; give it once, in config",
    ),
    (
        "model: m\nproxy:\n  config: {routing_policy: x}\n",
        "3: proxy.config: --routing-policy 'x' is none of: ",
    ),
    # An option of all members is wrong where it stands, and not where it is decoded.
    (SHARED, "4: prefill.config.drain_timeout: 700 is more than 600 seconds"),
    ("model: m\nmodel: n\n", "2: model: is there twice"),
    ("model: [\n", "2: expected the node content, but found '<stream end>'"),
    ("model: *b\n", "1: found undefined alias 'b'"),
    ("model: m\nconfig: {x: &b [*b]}\n", "2: config: Object contains unknown field `x`"),
]


@pytest.mark.parametrize(("text", "words"), WRONG, ids=[words for _, words in WRONG])
def test_an_error_names_file_line_and_key(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_cluster(file)
    assert str(caught.value).startswith(f"{file}:{words}")


@pytest.mark.parametrize("text", ["", "- 1\n", "\0"])
def test_what_holds_no_mapping_is_named(text: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="must hold a mapping in YAML"):
        load_cluster(file)
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        load_cluster(tmp_path / "nowhere.yaml")


EXAMPLES = sorted(DEMO_CLUSTER.parent.glob("*.yaml"))


@pytest.fixture(scope="module")
def schema() -> Draft202012Validator:
    told = json.loads(CLUSTER_SCHEMA.read_text())
    Draft202012Validator.check_schema(told)
    return Draft202012Validator(told)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_is_a_cluster_for_us_and_for_an_editor(
    file: Path, schema: Draft202012Validator
) -> None:
    config = load_cluster(file)
    for role in ("prefill", "decode"):
        builder_of(config.node(role).kv_transfer_config)
    first, _, text = file.read_text().partition("\n")
    assert (file.parent / first.removeprefix("# yaml-language-server: $schema=")).samefile(
        CLUSTER_SCHEMA
    )
    # What the file is for, in one line that a reader sees.
    assert text.startswith("# ")
    schema.validate(msgspec.yaml.decode(text))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prefill": {"config": {"prot": 1}}}, "'prot' was unexpected"),
        ({"proxy": {"config": {"max_num_seqs": 1}}}, "'max_num_seqs' was unexpected"),
        ({"config": {"port": "x"}}, "'x' is not of type 'integer'"),
        ({"decode": {"strategy": "PAKC"}}, "'PAKC' is not one of"),
    ],
)
def test_an_editor_sees_wrong_keys_and_values(
    fields: dict[str, Any], words: str, schema: Draft202012Validator
) -> None:
    (error,) = schema.iter_errors({"model": "m", **fields})
    assert words in error.message
