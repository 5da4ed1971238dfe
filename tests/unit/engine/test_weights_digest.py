"""The digest of a model's weights: what counts, and when an earlier one is believed."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from structlog.testing import capture_logs
from torch import Tensor

from engine.errors import CheckpointError
from engine.weights import digest
from engine.weights.digest import BESIDE, MAX_RECORDS, WeightsDigest
from engine.weights.files import BLOCK_BYTES, WeightFiles

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b": torch.ones(5, dtype=torch.bfloat16),
    "large": torch.arange(BLOCK_BYTES // 4 + 7, dtype=torch.int32),
    "none": torch.empty(0),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, which nothing has made yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # The times of files tick every few milliseconds here: the tests need not wait for seconds.
    monkeypatch.setattr(digest, "TICK_NS", 300_000_000)
    return tmp_path / "cache" / "tandem"


def folder_of(path: Path, *shards: dict[str, Tensor], **metadata: str) -> Path:
    path.mkdir()
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"part-{number}.safetensors" for number in range(len(shards))]
        weight_map = {key: name for name, it in zip(names, shards, strict=True) for key in it}
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for name, stored in zip(names, shards, strict=True):
        save_file(stored, path / name, metadata or None)
    return path


def wait_until_old(folder: Path) -> None:
    """Until a change could not have the time of the last one."""
    files = list(folder.glob("*.safetensors"))
    while time.time_ns() - max(path.stat().st_ctime_ns for path in files) < digest.TICK_NS:
        time.sleep(0.05)


def read(folder: Path) -> tuple[str, dict[str, Any]]:
    """The digest, and what the log says of it."""
    with capture_logs() as lines, WeightFiles(folder) as files:
        found = WeightsDigest(files).result()
    (line,) = lines
    assert line["digest"] == found
    return found, dict(line)


def test_every_byte_of_every_tensor_counts_and_nothing_else(tmp_path: Path) -> None:
    one, _ = read(folder_of(tmp_path / "one", TENSORS))
    shards = [{"large": TENSORS["large"]}, {key: TENSORS[key] for key in ("none", "b", "a")}]
    assert read(folder_of(tmp_path / "shards", *shards))[0] == one
    assert read(folder_of(tmp_path / "note", TENSORS, written_by="another"))[0] == one
    (tmp_path / "one" / "unused.safetensors").write_bytes(b"no part of the model")
    assert read(tmp_path / "one")[0] == one
    large = TENSORS["large"].clone()
    large[BLOCK_BYTES // 4 + 3] += 1
    others = [
        TENSORS | {"large": large},
        TENSORS | {"a": TENSORS["a"].reshape(4, 3)},
        TENSORS | {"a": TENSORS["a"].view(torch.int32)},
        TENSORS | {"more": torch.empty(0)},
        {("c" if key == "a" else key): it for key, it in TENSORS.items()},
    ]
    found = {read(folder_of(tmp_path / f"{n}", it))[0] for n, it in enumerate(others)}
    assert len(found | {one}) == len(others) + 1


def test_a_digest_is_found_again_until_its_file_is_written(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", TENSORS)
    first, line = read(folder)
    assert line["bytes_hashed"] and line["kept_in"] is None, "too young to be kept"
    wait_until_old(folder)
    assert read(folder)[1]["kept_in"] == str(folder / BESIDE)
    again, line = read(folder)
    assert again == first
    assert (line["bytes_hashed"], line["kept_in"]) == (0, None)
    with capture_logs() as lines, WeightFiles(folder) as files:
        digest = WeightsDigest(files)
        for tensor in files.tensors:
            files.read(tensor)
        assert digest.result() == first
    assert lines[0]["bytes_hashed"] == 0, "nor are those that a model loads"

    # Written in place, as long as before, and with its old time: only the kernel's own time tells.
    path = folder / "model.safetensors"
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"last")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (
        before.st_ino,
        before.st_size,
        before.st_mtime_ns,
    )
    assert read(folder)[0] != first


def test_only_the_files_that_changed_are_read_again(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", {"a": TENSORS["a"]}, {"b": TENSORS["b"]})
    wait_until_old(folder)
    first, _ = read(folder)
    save_file({"b": TENSORS["b"] + 1}, folder / "part-1.safetensors")
    again, line = read(folder)
    assert again != first
    assert line["bytes_known"] == (folder / "part-0.safetensors").stat().st_size


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "a folder", "another's", "version"])
def test_a_record_that_is_damaged_or_of_another_folder_is_not_believed(
    tmp_path: Path, damage: str
) -> None:
    folder = folder_of(tmp_path / "model", TENSORS)
    wait_until_old(folder)
    first, _ = read(folder)
    record = folder / BESIDE
    text = record.read_text()
    (digest,) = (known["digest"] for known in json.loads(text)["files"])
    if damage == "a folder":
        record.unlink()
        record.mkdir()
    elif damage == "another's":
        other = tmp_path / "other"
        shutil.copytree(folder, other)  # other inodes, later times
        save_file(TENSORS | {"a": TENSORS["a"] + 1}, other / "model.safetensors")
        os.utime(other / "model.safetensors", ns=(0, 0))
        assert read(other)[0] != first
        return
    else:
        changed = {
            "cut": text[:-20],
            "flipped": text.replace(digest, digest[::-1]),
            "empty": "",
            "version": text.replace('"version":2', '"version":1'),
        }
        assert changed[damage] != text
        record.write_text(changed[damage])
    again, line = read(folder)
    assert again == first
    assert line["bytes_hashed"] and line["kept_in"]


def test_where_a_folder_cannot_be_written_to_the_users_cache_keeps_digests(
    tmp_path: Path, cache: Path
) -> None:
    folder = folder_of(tmp_path / "model", TENSORS)
    (folder / BESIDE).mkdir()  # root may write anywhere, but not here
    cache.mkdir(parents=True)
    for number in range(MAX_RECORDS + 3):
        os.utime(_touched(cache / f"weights-{number}.json"), ns=(number, number))
    wait_until_old(folder)
    first, line = read(folder)
    kept = Path(line["kept_in"])
    assert kept.parent == cache and len(list(cache.iterdir())) == MAX_RECORDS
    again, line = read(folder)
    assert (again, line["bytes_hashed"]) == (first, 0)

    # Neither: each start reads the weights.
    shutil.rmtree(cache)
    cache.write_text("in the way")
    again, line = read(folder)
    assert (again, line["kept_in"]) == (first, None)
    assert line["bytes_hashed"] > 0


def _touched(path: Path) -> Path:
    path.touch()
    return path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no safetensors header"),
        (bytes([255] * 8), "no safetensors header"),
        ((9).to_bytes(8, "little") + b'{"a":[1]}', "no safetensors header"),
        (
            (60).to_bytes(8, "little")
            + b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'.ljust(60),
            "it ends inside a tensor",
        ),
        (
            (60).to_bytes(8, "little")
            + b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[-99,0]}}'.ljust(60),
            "cannot be read",
        ),
    ],
)
def test_a_file_that_is_no_model_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors.*{message}"):
        read(tmp_path)


def test_weights_that_change_while_they_are_loaded_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", TENSORS)
    with WeightFiles(folder) as files:
        digest = WeightsDigest(files)
        save_file(TENSORS, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match="changed while they were loaded"):
            digest.result()
