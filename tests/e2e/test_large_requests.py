"""Requests that are far too large: refused, cheaply, and a stream beside them goes on."""

import pytest
from rich.console import Console

from benchmarks.serving.pauses import CASES, run
from benchmarks.support.model_folders import DEMO_MODEL

HOSTILE = ("text of 30 MB", "7 million ids"), ("text of 15 MB", "1 million keys")
MAX_GROWTH = 300_000_000


# Every day tests/unit/serving/test_request_bodies.py shows that large bodies wait and small ones
# pass. How long the stream pauses meanwhile is measured by `python -m benchmarks.serving.pauses`.
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("names", HOSTILE)
def test_no_large_request_ends_a_stream_or_fills_memory(names: tuple[str, ...]) -> None:
    cases = {name: CASES[name] for name in names}
    for row in run(str(DEMO_MODEL), [], cases, console=Console(quiet=True)):
        before, after = row.rss
        assert set(row.statuses) <= {400, 413}, row
        assert after - before < MAX_GROWTH, row
