"""The doctor on a folder of the offload tier: a healthy one, and every kind of bad file in it."""

import os
import time
from pathlib import Path

from connector.doctor.findings import Verdict
from connector.doctor.folder import examine_folder
from connector.offload.tiers.folder import STALE_S
from tests.support.cache.offload import MIB, forget, start_with_tiers, tier_config
from tests.support.nodes.cluster import Cluster, generate
from tests.support.nodes.forks import run_command
from tests.support.nodes.pairs import prompt_of, request_of


async def filled(cluster: Cluster, model: Path, folder: Path) -> list[Path]:
    """The files that a node leaves in a folder, at least two."""
    config = tier_config(disk_path=str(folder), disk_bytes=64 * MIB)
    node = await start_with_tiers(cluster, model, config)
    for salt in range(2):
        await generate(node, request_of(prompt_of(100, salt)))
        await forget(node)
    await node.close()
    return files_of(folder)


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("tandem-*.kv"))


async def test_every_kind_of_bad_file_is_named(
    cluster: Cluster, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "tier"
    files = await filled(cluster, model, folder)
    before = sorted(folder.iterdir())
    findings = examine_folder(folder)
    assert sorted(folder.iterdir()) == before  # the probe is gone
    assert [finding.verdict for finding in findings] == [Verdict.GOOD] * 3
    assert f"{len(files)} files of {sum(map(size_of, files)):,} bytes" in findings[2].text

    content = bytearray(files[0].read_bytes())
    content[-1] ^= 1
    files[0].write_bytes(content)
    os.truncate(files[1], 5000)
    (folder / "photo.jpg").write_bytes(b"x")
    left = folder / f"{files[0].name}.tmp"
    left.write_bytes(b"x")
    os.utime(left, (time.time() - STALE_S - 1,) * 2)
    texts = [finding.text for finding in examine_folder(folder)[3:]]
    assert "2 files are damaged" in texts[0]
    assert f"{files[0].name} (corrupt)" in texts[0] and f"{files[1].name} (short)" in texts[0]
    assert texts[1] == "1 temporary files were left by a crash"
    assert texts[2] == "1 files are not of the tier, first photo.jpg"


def size_of(file: Path) -> int:
    return file.stat().st_size


def test_the_command_takes_a_folder_alone(tmp_path: Path) -> None:
    well = run_command(tmp_path, "connector.doctor", str(tmp_path))
    assert well.returncode == 0 and "0 files of 0 bytes" in well.stdout
    wrong = run_command(tmp_path, "connector.doctor", str(tmp_path / "missing"))
    assert wrong.returncode == 1 and "is no folder; fix: create it" in wrong.stdout
    refused = run_command(tmp_path, "connector.doctor", "http://127.0.0.1:1")
    assert refused.returncode == 2 and "name a prefill and a decode node" in refused.stderr
