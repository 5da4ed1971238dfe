"""Standard error that cannot be written: no caller fails or waits, and losses are counted."""

import io
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.log_writer import LOSSES, MAX_WAITING_BYTES, LogWriter

IN_TIME_S = 20.0


@pytest.fixture
def pipe() -> Iterator[tuple[int, LogWriter]]:
    """The end of a reader, and a writer into the other end."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        yield reading, LogWriter(stream)


def dropped_by(*lines: str, into: LogWriter) -> int:
    before = LOSSES.num_dropped
    for line in lines:
        into.write(line)
        into.flush()
    assert into.drain(IN_TIME_S)
    return LOSSES.num_dropped - before


def test_lines_arrive_in_order_and_at_the_latest_when_they_are_waited_for(
    pipe: tuple[int, LogWriter],
) -> None:
    reading, writer = pipe
    lines = [f"line {number} \ud800é\n" for number in range(200)]
    assert dropped_by(*lines, into=writer) == 0
    said = os.read(reading, 1 << 20).decode()
    assert said == "".join(lines).replace("\ud800", "\\ud800")
    os.close(reading)


def test_a_reader_that_left_costs_lines_and_nothing_else(pipe: tuple[int, LogWriter]) -> None:
    reading, writer = pipe
    os.close(reading)
    assert dropped_by("one\n", "two\nthree\n", into=writer) == 3


@pytest.mark.parametrize("blocks", [True, False])
def test_a_reader_that_does_not_read_makes_nobody_wait(
    pipe: tuple[int, LogWriter], blocks: bool
) -> None:
    reading, writer = pipe
    os.set_blocking(writer.fileno(), blocks)
    line = "x" * 999 + "\n"
    number = 2 * MAX_WAITING_BYTES // len(line)
    before = LOSSES.num_dropped
    for _ in range(number):
        writer.write(line)
    lost = LOSSES.num_dropped - before
    assert 0 < lost < number
    assert not writer.drain(0.01)
    # It reads again: what has waited comes whole, and so does what follows.
    kept = (number - lost) * len(line)
    said: list[bytes] = []

    def read_all() -> None:
        while sum(map(len, said)) < kept + len("last\n"):
            said.append(os.read(reading, 1 << 20))

    reader = threading.Thread(target=read_all)
    reader.start()
    assert writer.drain(IN_TIME_S)
    writer.write("last\n")
    reader.join(IN_TIME_S)
    assert b"".join(said) == line.encode() * (number - lost) + b"last\n"
    os.close(reading)


def test_no_standard_error_a_closed_one_and_one_without_a_descriptor(tmp_path: Path) -> None:
    assert dropped_by("one\n", into=LogWriter(None)) == 1
    stream = (tmp_path / "log").open("w")
    writer = LogWriter(stream)
    stream.close()
    assert dropped_by("one\n", into=writer) == 1
    assert dropped_by("one\n", into=LogWriter(stream)) == 1
    memory = io.StringIO()
    assert dropped_by("one\n", into=LogWriter(memory)) == 0
    assert memory.getvalue() == "one\n"


def test_a_line_that_is_cut_by_a_full_disk_does_not_swallow_the_next(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with (tmp_path / "log").open("w") as stream:
        writer = LogWriter(stream)
        resource.setrlimit(resource.RLIMIT_FSIZE, (6, hard))  # as a disk with room for six bytes
        try:
            assert dropped_by("abc\n", "def\n", "ghi\n", into=writer) == 2
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert dropped_by("jkl\n", into=writer) == 0
    assert (tmp_path / "log").read_text() == "abc\nde\njkl\n"


ENDS = """
import os, sys
from serving.process import configure_logging
from serving.log_writer import fill_standard_descriptors
fill_standard_descriptors()
assert os.open("/dev/null", os.O_RDONLY) > 2
configure_logging()
import structlog
structlog.get_logger().info("last words")
raise ValueError("a bug")
"""


@pytest.mark.parametrize("redirection", ["", "2>&-", "<&- >&- 2>&-", "2>/dev/full"])
def test_a_process_ends_as_it_would_and_says_its_last_words_if_it_can(redirection: str) -> None:
    command = f'exec "$@" {redirection}'
    done = subprocess.run(
        ["sh", "-c", command, "sh", sys.executable, "-c", ENDS],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    said = done.stderr.splitlines()
    assert (len(said) > 1 and "last words" in said[0] and said[-1] == "ValueError: a bug") or (
        redirection and not said
    )
