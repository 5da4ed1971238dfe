"""The disk tier's folder, without a tier around it."""

from pathlib import Path

from structlog.testing import capture_logs

from connector.offload.items import Item
from connector.offload.messages import FileItems
from connector.offload.stats import OffloadStats
from connector.offload.tiers.files import Files
from connector.offload.tiers.folder import Folder
from connector.offload.tiers.tier_file import Header, encode

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
