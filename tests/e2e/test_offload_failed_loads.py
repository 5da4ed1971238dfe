"""Loads from a tier that fail in part, take too long, or are no longer wanted."""

import asyncio
from functools import partial
from os import SEEK_CUR
from pathlib import Path

import pytest

from connector.offload.messages import STATES, Key
from engine.errors import TandemError
from engine.kv_cache.prefix import PrefixDigests
from serving.node.server import NodeServer
from tests.e2e.test_offload_faults import files_of, nothing_left
from tests.e2e.test_prefix_cache import assert_same, request_of, room_for
from tests.support.cache.offload import (
    MIB,
    forget,
    start_with_tiers,
    stats_of,
    tier_config,
    tiers_of,
    tiers_settled,
)
from tests.support.faults.faulty_files import FaultyFiles
from tests.support.nodes.cluster import Cluster, Generation, generate, until
from tests.support.nodes.pairs import prompt_of
from tests.tiers import everyday

PROMPT = prompt_of(150)
OTHER = prompt_of(100, salt=5)
BLOCK = 16
LOADED = 144
"""Tokens of PROMPT that come from a tier; it was filled by this prompt, so the rest is a tail."""
EARLIER = 64
"""Where another checkpoint of it is, left by a shorter prompt."""
WINDOW = 96
"""The start of the block in which the window before LOADED begins."""
DAMAGED = [
    ("qwen3_5", STATES, EARLIER, LOADED),
    ("qwen3_5", STATES, LOADED, EARLIER),
    ("qwen3_5", 1, 48, 0),
    ("qwen3_5", 1, 64, EARLIER),
    ("qwen3_5", 1, 128, EARLIER),
    ("nemotron_h", STATES, LOADED, EARLIER),
    ("nemotron_h", 1, 96, EARLIER),
    ("qwen3", 0, 0, 0),
    ("qwen3", 0, 128, 128),
    ("gemma3", 0, WINDOW - 16, LOADED),
    ("gemma3", 0, WINDOW, WINDOW),
    ("gemma3", 0, 128, 128),
    ("gemma3", 1, 32, 32),
    ("gemma3", 1, 128, 128),
]
"""Family, group and first token of the damaged item, and the tokens that are not computed."""


async def fill(cluster: Cluster, model: Path, folder: Path) -> Generation:
    """A node puts all it knows into the folder and ends; its answer to PROMPT."""
    config = tier_config(disk_path=str(folder), disk_bytes=64 * MIB)
    node = await start_with_tiers(cluster, model, config)
    for prompt in (PROMPT[:70], OTHER):
        await generate(node, request_of(prompt))
    answer = await generate(node, request_of(PROMPT))
    await tiers_settled(node)
    await node.close()
    cluster.nodes.remove(node)
    return answer


async def start(
    cluster: Cluster, model: Path, folder: Path, *, fault: str = "", **extra: float
) -> NodeServer:
    """A node that knows the whole folder; the disk is bad from now on."""
    config = tier_config(disk_path=str(folder), disk_bytes=64 * MIB, **extra)
    files = partial(FaultyFiles, fault=fault)
    node = await start_with_tiers(
        cluster, model, config, files, kv_cache_memory_bytes=room_for(model, 2)
    )
    index, names = tiers_of(node).scheduler.index, {file.name for file in files_of(node).scan()}
    await until(lambda: {entry.file.name for entry in index if entry.file} == names)
    files_of(node).is_bad = True
    return node


def damage(node: NodeServer, group: int, start: int) -> None:
    """Flips the last bit of what a file has of PROMPT."""
    prefix = PrefixDigests(node.engine.core.scheduler.cache.hasher, list(PROMPT), None)
    end = start if group == STATES else start + BLOCK
    entry = tiers_of(node).scheduler.index.get(Key(group, prefix.digest_at(end)))
    assert entry is not None and entry.file is not None
    with (files_of(node).folder / entry.file.name).open("r+b") as file:
        file.seek(entry.file.offset + entry.file.nbytes - 1)
        (last,) = file.read(1)
        file.seek(-1, SEEK_CUR)
        file.write(bytes([last ^ 1]))


# Every day one of each kind: a state, attention after and before a state, a window and beside it.
@pytest.mark.parametrize("case", everyday(DAMAGED, (*DAMAGED[1:4], *DAMAGED[9:11], DAMAGED[12])))
async def test_the_longest_prefix_that_is_good_in_all_groups_is_kept(
    cluster: Cluster, checkpoints: dict[str, Path], tmp_path: Path, case: tuple[str, int, int, int]
) -> None:
    family, group, first, good = case
    model = checkpoints[family]
    plain = await fill(cluster, model, tmp_path)
    node = await start(cluster, model, tmp_path)
    damage(node, group, first)
    assert_same(await generate(node, request_of(PROMPT)), plain)
    stats = node.engine.core.scheduler.stats
    assert stats.external_hits == LOADED
    assert stats.prompt_tokens["local_compute"] == len(PROMPT) - good
    assert sum(stats.prompt_tokens.values()) == len(PROMPT)
    if good == LOADED:  # the damaged item is not needed
        assert not stats_of(node).failed_loads and not stats.recomputed_tokens
    else:
        assert stats_of(node).failed_loads == {"corrupt": 1}
        assert stats.recomputed_tokens == {"corrupt": LOADED - good}
    await nothing_left(node)


async def test_a_load_that_takes_too_long_is_computed_and_no_other_waits_for_the_disk(
    cluster: Cluster, model: Path, tmp_path: Path
) -> None:
    plain = await fill(cluster, model, tmp_path)
    node = await start(cluster, model, tmp_path, fault="hanging", load_timeout_seconds=0.2)
    assert_same(await generate(node, request_of(PROMPT)), plain)
    stats = node.engine.core.scheduler.stats
    assert stats_of(node).failed_loads == {"timeout": 1}
    assert stats.recomputed_tokens == {"timeout": LOADED}
    assert stats.prompt_tokens["local_compute"] == len(PROMPT)
    computed = await generate(node, request_of(OTHER))
    assert stats_of(node).failed_loads == {"timeout": 1}
    assert stats.prompt_tokens["local_compute"] == len(PROMPT) + len(OTHER)
    files_of(node).go_on.set()
    await nothing_left(node)
    await forget(node)
    assert_same(await generate(node, request_of(OTHER)), computed)
    assert stats_of(node).failed_loads == {"timeout": 1}
    assert stats.prompt_tokens["external_kv_transfer"] == len(OTHER) // BLOCK * BLOCK


async def loading(node: NodeServer) -> "asyncio.Task[Generation]":
    """A request that waits for a disk that hangs."""
    task = asyncio.create_task(generate(node, request_of(PROMPT)))
    await until(lambda: bool(node.engine.core.scheduler.loads))
    return task


async def test_a_request_that_is_aborted_while_it_loads_gives_everything_back(
    cluster: Cluster, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    model = checkpoints["gemma3"]
    plain = await fill(cluster, model, tmp_path)
    node = await start(cluster, model, tmp_path, fault="hanging")
    task = await loading(node)
    assert task.cancel()
    await asyncio.wait([task])
    scheduler = node.engine.core.scheduler
    await until(lambda: not scheduler._requests)
    assert scheduler.cache.usage, "its blocks are free, and a load writes to them"
    files_of(node).go_on.set()
    await nothing_left(node)
    assert_same(await generate(node, request_of(PROMPT)), plain)
    assert not stats_of(node).failed_loads


async def test_others_are_preempted_while_a_request_loads(
    cluster: Cluster, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    model = checkpoints["nemotron_h"]
    plain = await fill(cluster, model, tmp_path)
    node = await start(cluster, model, tmp_path, fault="hanging")
    off = await cluster.start("prefill", model)
    task = await loading(node)
    long = [request_of(prompt_of(100, salt=salt), max_tokens=250) for salt in (7, 8, 9)]
    found = await asyncio.gather(*(generate(node, request) for request in long))
    assert node.engine.core.scheduler.stats.num_preemptions
    assert not task.done()
    files_of(node).go_on.set()
    assert_same(await task, plain)
    for request, answer in zip(long, found, strict=True):
        assert_same(answer, await generate(off, request))
    await nothing_left(node)


async def test_a_node_ends_while_its_disk_hangs(
    cluster: Cluster, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    model = checkpoints["qwen3"]
    await fill(cluster, model, tmp_path)
    node = await start(cluster, model, tmp_path, fault="hanging")
    task = await loading(node)
    files = files_of(node)
    await node.close()
    cluster.nodes.remove(node)
    with pytest.raises(TandemError):
        await task
    files.go_on.set()  # the thread finds that it is too late: arena and host tier are gone
