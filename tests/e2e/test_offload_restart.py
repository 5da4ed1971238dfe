"""A node finds in the folder what an earlier node computed, which ended or got a kill -9."""

import json
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL

import aiohttp
import pytest

from tests.support.nodes.asking import ask, question
from tests.support.nodes.cluster import until
from tests.support.nodes.pairs import prompt_of
from tests.support.nodes.processes import STOP_S, Launcher, ServerProcess
from tests.tiers import everyday

FAMILIES = ("qwen3_5", "nemotron_h", "bamba", "gemma3", "qwen3")
SYSTEM = prompt_of(64, salt=3)
PROMPTS = [(*SYSTEM, *prompt_of(40 + 11 * number, salt=number)) for number in range(10)]


def flags(folder: Path) -> tuple[str, ...]:
    extra = {"host_bytes": 4 << 20, "disk_path": str(folder), "disk_bytes": 256 << 20}
    config = {"kv_connector": "OffloadConnector", "kv_connector_extra_config": extra}
    return "--enable-prefix-caching", "--kv-transfer-config", json.dumps(config)


@pytest.mark.parametrize("family", everyday(FAMILIES, ("qwen3_5",)))
@pytest.mark.parametrize("end", everyday(("kill", "stop"), ("kill",)))
async def test_another_node_goes_on_with_what_the_folder_has(
    real: Launcher, checkpoints: dict[str, Path], tmp_path: Path, *, family: str, end: str
) -> None:
    real.model = checkpoints[family]
    plain = real.node("prefill_node")
    expected = [(await ask(plain.url, question(list(it)))).token_ids for it in PROMPTS]
    plain.stop()
    first = real.node("prefill_node", *flags(tmp_path))
    assert [(await ask(first.url, question(list(it)))).token_ids for it in PROMPTS] == expected
    if end == "kill":
        await_writes(first)
        first.kill()
    else:
        first.stop()
    again = real.node("decode_node", *flags(tmp_path))
    await_scan(again, tmp_path)
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        before = loaded(again)
        assert (await ask(again.url, question(list(prompt)))).token_ids == tokens
        # Of a model of attention alone only what several prompts share was on disk at a kill.
        found = again.metrics()["vllm:prefix_cache_hits_total"] + loaded(again) - before
        assert found > 0
    assert loaded(again) > 0
    again.stop()


async def test_a_kill_in_the_middle_of_a_file_leaves_nothing_that_is_trusted(
    real: Launcher, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    plain = real.node("prefill_node")
    expected = [(await ask(plain.url, question(list(it)))).token_ids for it in PROMPTS]
    plain.stop()
    root = str(Path(__file__).parents[2])
    killed = real.node("tests.support.nodes.killed_writer", *flags(folder), PYTHONPATH=root)
    with suppress(aiohttp.ClientError):
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            assert (await ask(killed.url, question(list(prompt)))).token_ids == tokens
    assert killed.process.wait(STOP_S) == -SIGKILL
    (half,) = folder.glob("*.tmp")
    (whole,) = folder.glob("*.kv")
    again = real.node("decode_node", *flags(folder))
    again.wait_for_at_least("tandem:kv_offload_items", 1)
    os.utime(half, (0, 0))  # nobody has written to it for long
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        assert (await ask(again.url, question(list(prompt)))).token_ids == tokens
    assert loaded(again) > 0
    assert not again.metrics().get("tandem:kv_offload_bad_files_total")
    await until(lambda: not half.exists())
    assert whole.exists()
    again.stop()


def loaded(node: ServerProcess) -> float:
    """Tokens that tiers brought."""
    return node.metrics()["vllm:external_prefix_cache_hits_total"]


def await_writes(node: ServerProcess) -> None:
    """Waits until nothing more is written early."""
    seen, last = -1.0, 0.0
    while not last or seen != last:
        time.sleep(0.3)
        seen, last = last, node.metrics().get("vllm:kv_offload_store_bytes_total", 0.0)


def await_scan(node: ServerProcess, folder: Path) -> None:
    """Waits until the node knows the files."""
    assert [name for name in folder.iterdir() if re.fullmatch(r"tandem-.*\.kv", name.name)]
    node.wait_for_at_least("tandem:kv_offload_items", len(SYSTEM) // 16)
