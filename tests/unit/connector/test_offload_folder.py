"""The disk tier's folder, without a tier around it."""

import os
import stat
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from connector.offload.connector import open_folder
from connector.offload.messages import FileItems, Item
from connector.offload.metrics import OffloadStats
from connector.offload.tiers.folder import Folder
from connector.offload.tiers.tier_file import Files, Header, encode

GEOMETRY = "0123456789abcdef"
NUM_BAD = 50


def test_many_bad_files_are_all_counted_and_the_first_of_a_cause_is_named(tmp_path: Path) -> None:
    """A full disk may leave thousands; their lines would hide all others."""
    stats = OffloadStats()
    folder = Folder(Files(tmp_path), lambda: GEOMETRY, 1 << 30, stats=stats)
    item = Item(0, 0, 16, bytes(32), (bytes(32),))
    head = encode(Header(GEOMETRY, (item,), (0,), (4096,), (0,)))
    for _ in range(NUM_BAD):
        folder.files.write(folder.new_name(), (memoryview(head),))
        folder.files.write(folder.new_name(), (memoryview(bytes(4096)),))
    good = folder.new_name()
    folder.files.write(good, (memoryview(head), memoryview(bytes(4096))))
    with capture_logs() as lines:
        found = [it for it in folder.rescan() if isinstance(it, FileItems)]
    assert [it.name for it in found] == [good]
    assert dict(stats.bad_files) == {"short": NUM_BAD, "foreign": NUM_BAD}
    assert sorted(line["why"].split(":")[0] for line in lines) == ["foreign", "short"]


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_files_and_a_new_folder_are_for_one_user(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        files = Files(tmp_path / "new" / "folder")
        files.write("name", (memoryview(b"K/V"),))
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(each.stat().st_mode) for each in (files.folder, files.folder / "name")]
    assert modes == [0o700, 0o600]
    assert not files.is_open_to_others()


def test_a_folder_that_others_may_enter_is_named_and_stays_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with capture_logs() as lines:
        open_folder(str(tmp_path))
    (line,) = lines
    assert f"chmod -R go= {tmp_path}" in line["event"]
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
