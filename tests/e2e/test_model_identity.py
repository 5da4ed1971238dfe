"""The same weights under another config.json are another model: nothing of it is taken over."""

import json
import shutil
from pathlib import Path

import pytest

from serving.node.server import NodeServer
from tests.e2e.test_doctor import ask_doctor, only_wrong
from tests.support.cache.offload import (
    MIB,
    start_with_tiers,
    stats_of,
    tier_config,
    tiers_settled,
)
from tests.support.nodes.cluster import Cluster, generate, sample, transfer_config
from tests.support.nodes.pairs import hand_over, prompt_of, request_of

PROMPTS = tuple(prompt_of(90, salt=number) for number in range(4))


@pytest.fixture
def turned(model: Path, tmp_path: Path) -> Path:
    """A copy of the Qwen3.5 checkpoint whose attention rotates by another base."""
    folder = tmp_path / "turned"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_parameters"]["rope_theta"] == 10000.0
    config["rope_parameters"]["rope_theta"] = 2.0
    (folder / "config.json").write_text(json.dumps(config))
    return folder


async def answers(node: NodeServer) -> list[list[int]]:
    return [(await generate(node, request_of(prompt))).token_ids for prompt in PROMPTS]


async def test_nothing_is_pulled_from_a_node_whose_config_differs(
    cluster: Cluster, model: Path, turned: Path
) -> None:
    config = transfer_config()
    p = await cluster.start("prefill", model, kv_transfer_config=config)
    d = await cluster.start("decode", turned, kv_transfer_config=config)
    alone = await answers(d)
    assert alone != await answers(p)
    assert [(await hand_over(p, d, prompt)).token_ids for prompt in PROMPTS] == alone
    failures = sample(d, "tandem:kv_hand_over_failures_total", cause="peer_does_not_fit")
    assert failures == len(PROMPTS)
    (problem,) = d.engine.hand_over_problems
    assert "model.attention.rope.theta is '2.0' here and '10000.0' there" in problem.detail
    (finding,) = only_wrong(await ask_doctor(p.url, d.url))
    assert finding.subject == "model.attention.rope.theta"
    assert finding.text == "'10000.0' on P and '2.0' on D"
    assert "same model folder" in finding.fix


async def test_a_folder_of_another_config_is_not_read(
    cluster: Cluster, model: Path, turned: Path, tmp_path: Path
) -> None:
    disk = {"disk_path": str(tmp_path / "folder"), "disk_bytes": 64 * MIB}
    config = tier_config(host_bytes=4 * MIB, **disk)
    before = await start_with_tiers(cluster, model, config)
    await answers(before)
    await tiers_settled(before)
    await before.close()
    cluster.nodes.remove(before)
    plain = await cluster.start("decode", turned)
    after = await start_with_tiers(cluster, turned, config)
    await tiers_settled(after)
    assert await answers(after) == await answers(plain)
    assert after.engine.core.scheduler.stats.external_hits == 0
    assert stats_of(after).bad_files["foreign"]
