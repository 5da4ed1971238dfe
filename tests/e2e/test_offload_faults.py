"""A tier never changes a token, whatever the disk does; and it leaves nothing behind."""

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import pytest
from structlog.testing import capture_logs

from connector.offload import worker
from serving.node.server import NodeServer
from tests.e2e.test_prefix_cache import assert_same, conversation_prompts, request_of, room_for
from tests.support.cache.offload import (
    start_with_tiers,
    stats_of,
    tier_config,
    tiers_of,
    tiers_settled,
)
from tests.support.faults.faulty_files import FaultyFiles
from tests.support.nodes.cluster import Cluster, Generation, generate
from tests.tiers import everyday, l_and_diagonal

KIB = 1 << 10
CAUSES: dict[str, set[str]] = {
    "slow": set(),
    "short": {"short"},
    "flipped": {"corrupt"},
    "EIO on read": {"io"},
    "deleted": {"vanished"},
}
WRITE_CAUSES = {"ENOSPC": {"ENOSPC"}, "EIO on write": {"EIO"}, "read-only": {"EROFS"}}
"""By fault, the causes that are counted for loads and for writes."""
FAMILIES = ("qwen3_5", "gemma3", "nemotron_h", "qwen3", "falcon_h1")
TIERS: dict[str, dict[str, Any]] = {
    "disk": {"disk_bytes": 768 * KIB},
    "both": {"host_bytes": 512 * KIB, "disk_bytes": 768 * KIB},
}
PROMPTS = conversation_prompts(Random(11), 14)
ASKED = (*PROMPTS, *PROMPTS)  # each is evicted before it is asked again
PLAIN: dict[str, list[Generation]] = {}
"""By family, what a node without tiers and cache answers."""


async def plain_answers(cluster: Cluster, model: Path, family: str) -> list[Generation]:
    if family not in PLAIN:
        node = await cluster.start("prefill", model)
        PLAIN[family] = [await generate(node, request_of(prompt)) for prompt in ASKED]
    return PLAIN[family]


async def start(
    cluster: Cluster,
    model: Path,
    folder: Path,
    name: str,
    *,
    fault: str = "",
    period: int = 1,
    room: int = 1,
    scale: int = 1,
) -> NodeServer:
    """A node with tiny tiers, `scale` as large, on a disk that is bad now, every `period`-th time.

    Its arena has room for `room` requests.
    """
    tiers = {limit: scale * size for limit, size in TIERS[name].items()}
    node = await start_with_tiers(
        cluster,
        model,
        tier_config(disk_path=str(folder), **tiers),
        partial(FaultyFiles, fault=fault, period=period),
        kv_cache_memory_bytes=room_for(model, room),
    )
    files_of(node).is_bad = True
    return node


def files_of(node: NodeServer) -> FaultyFiles:
    folder = tiers_of(node).worker._folder
    assert folder is not None and isinstance(folder.files, FaultyFiles)
    return folder.files


def loaded(node: NodeServer) -> int:
    """Tokens that tiers were to bring."""
    return node.engine.core.scheduler.stats.external_hits


async def nothing_left(node: NodeServer) -> None:
    """No pins, slots, loads or half files; descriptors and threads are the cluster's to count."""
    await tiers_settled(node)
    assert not node.engine.core.scheduler._saving
    assert not tiers_of(node).worker._jobs
    assert not [file for file in files_of(node).scan() if file.name.endswith(".tmp")]


@pytest.mark.parametrize(
    ("family", "fault", "name"),
    l_and_diagonal(
        FAMILIES, (*CAUSES, *WRITE_CAUSES), TIERS, corner=("qwen3_5", "flipped", "disk")
    ),
)
async def test_a_bad_disk_never_changes_a_token(
    cluster: Cluster,
    checkpoints: dict[str, Path],
    tmp_path: Path,
    *,
    family: str,
    fault: str,
    name: str,
) -> None:
    model = checkpoints[family]
    expected = await plain_answers(cluster, model, family)
    period = 3 if name == "disk" else 1  # good reads between bad ones, where there are many
    scale = 2 if family == "falcon_h1" else 1  # its items are the largest: few would be read again
    node = await start(cluster, model, tmp_path, name, fault=fault, period=period, scale=scale)
    for prompt, plain in zip(ASKED, expected, strict=True):
        assert_same(await generate(node, request_of(prompt)), plain)
        # Or else a disk too slow to make room would decide what is there to be read again.
        await tiers_settled(node)
    await nothing_left(node)
    stats, num_faults = stats_of(node), files_of(node).num_faults
    print(f"{family}, {name}, {fault}: {num_faults} faults, {loaded(node)} tokens, {stats}")
    assert loaded(node)
    assert num_faults
    # Its own small bound makes a file go now and then before it is read. A load that fails twice
    # counts the cause of its first bad token.
    failed = set(stats.failed_loads)
    assert failed - {"vanished"} == CAUSES.get(fault, set()) - {"vanished"}
    assert set(stats.failed_writes) == WRITE_CAUSES.get(fault, set())


@pytest.mark.parametrize(
    ("family", "fault"),
    [
        ("nemotron_h", "deleted"),
        ("nemotron_h", "flipped"),
        *(
            pytest.param(family, fault, marks=pytest.mark.long)
            for family, fault in zip(("gemma3", "qwen3_5") * 3, (*CAUSES, "ENOSPC"), strict=True)
        ),
    ],
)
async def test_all_at_once_on_a_bad_disk(
    cluster: Cluster, checkpoints: dict[str, Path], tmp_path: Path, family: str, fault: str
) -> None:
    """Requests are preempted while others load, and loads fail while others go on."""
    model = checkpoints[family]
    requests = [request_of(prompt, max_tokens=64) for prompt in PROMPTS]
    off = await cluster.start("prefill", model)
    expected = await asyncio.gather(*(generate(off, request) for request in requests))
    node = await start(cluster, model, tmp_path, "both", fault=fault, room=2)
    for _ in range(2):
        found = await asyncio.gather(*(generate(node, request) for request in requests))
        ties = sum(map(assert_same, found, expected))
    await nothing_left(node)
    preempted, faults = node.engine.core.scheduler.stats.num_preemptions, files_of(node).num_faults
    print(f"{family}, {fault}: {preempted} preemptions, {ties} ties, {faults} {stats_of(node)}")
    assert preempted and faults and loaded(node)


@pytest.mark.parametrize("family", everyday(FAMILIES, ("qwen3_5",)))
async def test_two_nodes_that_evict_each_other_s_files(
    cluster: Cluster, checkpoints: dict[str, Path], tmp_path: Path, family: str
) -> None:
    model = checkpoints[family]
    expected = await plain_answers(cluster, model, family)
    one, other = [await start(cluster, model, tmp_path, "disk") for _ in range(2)]
    last = len(ASKED) - 1
    for number in range(len(ASKED)):
        for node, place in ((one, number), (other, last - number)):
            # One sees all files, and makes room for its own; the other is never told.
            tiers_of(one).worker._next_scan = 0.0
            tiers_of(other).worker._next_scan = monotonic() + 60.0
            assert_same(await generate(node, request_of(ASKED[place])), expected[place])
    for node in (one, other):  # both write into this folder
        await tiers_settled(node)
    for node in (one, other):
        await nothing_left(node)
        print(f"{family}: {loaded(node)} tokens, {stats_of(node)}")
        assert loaded(node)
    causes = stats_of(one).failed_loads + stats_of(other).failed_loads
    assert set(causes) <= {"vanished"}
    # Where items are of other sizes, a file may go only when nobody looks for it.
    assert causes or family != "qwen3_5"


async def test_a_full_disk_is_no_tier_until_it_has_room_again(
    cluster: Cluster, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "FIRST_PAUSE_S", 0.2)
    expected = await plain_answers(cluster, model, "qwen3_5")
    with capture_logs() as logs:
        node = await start(cluster, model, tmp_path, "both", fault="ENOSPC")
        asked = cycle(zip(ASKED, expected, strict=True))

        async def ask_until(condition: Callable[[], bool]) -> None:
            async with asyncio.timeout(60):
                while not condition():
                    prompt, plain = next(asked)
                    assert_same(await generate(node, request_of(prompt)), plain)
                    await asyncio.sleep(0.1)

        await ask_until(lambda: files_of(node).num_faults >= 3)  # at most two are written at once
        assert not files_of(node).scan()
        files_of(node).is_bad = False
        await ask_until(lambda: bool(stats_of(node).stored_bytes["disk"]))
        await nothing_left(node)
    said = [line["event"] for line in logs if "written to" in line["event"]]
    assert said == [
        "the offload folder cannot be written to; what is there is still used",
        "the offload folder can be written to again",
    ]
    assert set(stats_of(node).failed_writes) == {"ENOSPC"}
