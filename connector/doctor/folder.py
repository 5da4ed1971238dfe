"""A folder of the offload tier: its room, its speed, and files that no node can use."""

import mmap
import os
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from connector.doctor.findings import Finding, Verdict, good, wrong
from connector.offload.tiers.files import Files, FoundFile
from connector.offload.tiers.folder import PREFIX, is_left_over, is_of_tier
from connector.offload.tiers.tier_file import TierFileError, check, read_items

SUBJECT = "offload folder"
PROBE_BYTES = 64 << 20
READ_BYTES = 4 << 30
"""Of items, compared with their digests; of further files only the headers are read."""
LITTLE_ROOM = 0.05
"""Of the file system: with less free, a tier soon finds the disk full."""


def examine_folder(path: Path) -> list[Finding]:
    """Reads the tier's files, up to a bound whole; writes one probe and removes it."""
    if not path.is_dir():
        fix = "create it, or name the disk_path of the node's kv_connector_extra_config"
        return [wrong(SUBJECT, f"{path} is no folder", fix)]
    return [_room(path), _speed(path), *_contents(Files(path))]


def _room(path: Path) -> Finding:
    usage = shutil.disk_usage(path)
    text = f"{usage.free:,} of {usage.total:,} bytes are free"
    if usage.free < LITTLE_ROOM * usage.total:
        return Finding(Verdict.NOTE, SUBJECT, text, "free some, or lower disk_bytes")
    return good(SUBJECT, text)


def _speed(path: Path) -> Finding:
    """Of one large file, synced to the device and read again past the page cache if it can be."""
    probe = path / f"check-{secrets.token_hex(8)}"
    content = memoryview(mmap.mmap(-1, PROBE_BYTES))  # begins at a page, as direct reads want
    try:
        started = time.monotonic()
        with probe.open("xb", buffering=0) as file:
            for _ in range(PROBE_BYTES >> 20):
                file.write(secrets.token_bytes(1 << 20))
            os.fsync(file.fileno())
        written = time.monotonic()
        how = _read_whole(probe, content)
        read = time.monotonic()
    except OSError as error:
        fix = "let the nodes' user write there, or free some room"
        return wrong(SUBJECT, f"a file of {PROBE_BYTES:,} bytes cannot be written: {error}", fix)
    finally:
        probe.unlink(missing_ok=True)
    write, again = (PROBE_BYTES / 1e9 / took for took in (written - started, read - written))
    return good(SUBJECT, f"{write:.2f} GB/s written and synced, {again:.2f} GB/s read {how}")


def _read_whole(path: Path, target: memoryview) -> str:
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        how = "from the device"
    except OSError:  # tmpfs, and some network file systems
        file, how = os.open(path, os.O_RDONLY), "from memory"
    try:
        done = 0
        while done < len(target) and (more := os.preadv(file, [target[done:]], done)):
            done += more
    finally:
        os.close(file)
    return how


def _contents(files: Files) -> Iterator[Finding]:
    found = files.scan()
    ours = [file for file in found if is_of_tier(file.name)]
    geometries = Counter(file.name.split("-")[1] for file in ours)
    nbytes = sum(file.nbytes for file in ours)
    yield good(
        SUBJECT,
        f"{len(ours)} files of {nbytes:,} bytes, of {len(geometries)} models or layouts",
    )
    left, bad = READ_BYTES, []
    for file in ours:
        if why := _damage(files, file, with_items=left > 0):
            bad.append((file, why))
        left -= file.nbytes
    if bad:
        names = ", ".join(f"{file.name} ({why})" for file, why in bad[:3])
        text = f"{len(bad)} files are damaged, first {names}"
        yield Finding(Verdict.NOTE, SUBJECT, text, "remove them; nodes pass them over")
    old = [file for file in found if is_left_over(file)]
    if old:
        text = f"{len(old)} temporary files were left by a crash"
        yield Finding(Verdict.NOTE, SUBJECT, text, "a node with this folder removes them")
    foreign = [file for file in found if not file.name.startswith(PREFIX)]
    if foreign:
        text = f"{len(foreign)} files are not of the tier, first {foreign[0].name}"
        yield Finding(Verdict.NOTE, SUBJECT, text, "give the tier a folder of its own")


def _damage(files: Files, file: FoundFile, *, with_items: bool) -> str | None:
    """Why nodes cannot use a file, if they cannot."""

    def read(offset: int, target: memoryview) -> int:
        return files.read(file.name, offset, target)

    try:
        geometry = file.name.split("-")[1]
        items = read_items(file.name, file.nbytes, geometry, read=read)
        for found in items.ranges if with_items else ():
            content = memoryview(bytearray(found.nbytes))
            if read(found.offset, content) < found.nbytes:
                return "short"
            check(found, content)
    except TierFileError as error:
        return error.cause
    except FileNotFoundError:
        return None  # a node has just removed it
    except OSError as error:
        return str(error)
    return None
