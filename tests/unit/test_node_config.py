"""Options of a node: flags over file over defaults, and the defaults that people meet."""

from pathlib import Path

import pytest

from deploy.config import load_cluster
from engine.config import NodeConfig
from engine.node.settings import node_config


def test_prefixes_are_cached_unless_told_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "node.yaml"
    file.write_text("model: m\nenable-prefix-caching: false\n")
    assert NodeConfig(model="m").enable_prefix_caching
    assert not node_config({}, file, {}).enable_prefix_caching
    assert node_config({"enable_prefix_caching": True}, file, {}).enable_prefix_caching


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_every_node_of_the_demo_caches_prefixes(kind: str) -> None:
    assert load_cluster().node(kind).enable_prefix_caching
