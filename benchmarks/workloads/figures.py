"""The statistics of a request stream, as papers publish them of theirs. Knows no generator."""

import statistics
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from benchmarks.workloads.traces import Record, arrivals, ideal_hits

SOON_S = 10.0


def figures(records: Sequence[Record]) -> dict[str, float]:
    """By name; lengths in tokens, times in seconds. What a stream has none of is left out."""
    hits = ideal_hits(records)
    lengths = [record.input_length for record in records]
    found = {"requests": float(len(records))}
    found |= _times(records)
    found |= _lengths("input", lengths)
    found |= _lengths("output", [record.output_length for record in records])
    found["ideal hits, % of the tokens"] = 100 * sum(hits) / sum(lengths)
    found |= _lengths("new", [n - hit for n, hit in zip(lengths, hits, strict=True)])
    return found | _sessions(records) | _reuse(records)


def _lengths(name: str, tokens: Sequence[int]) -> dict[str, float]:
    p50, p90, p99 = (float(np.percentile(tokens, rank)) for rank in (50, 90, 99))
    return {
        f"{name} tokens, mean": statistics.mean(tokens),
        f"{name} tokens, p50": p50,
        f"{name} tokens, p90": p90,
        f"{name} tokens, p99": p99,
    }


def _times(records: Sequence[Record]) -> dict[str, float]:
    """Rate, and the variation of the gaps between arrivals: 1 is Poisson."""
    times = list(arrivals(records))
    if len(times) < 3 or not times[-1]:
        return {}
    gaps = [later - earlier for earlier, later in pairwise(times)]
    cv = statistics.stdev(gaps) / statistics.mean(gaps)
    return {"requests per s": len(times) / times[-1], "CV of the gaps between arrivals": cv}


def _sessions(records: Sequence[Record]) -> dict[str, float]:
    thought = [record.think_time / 1000 for record in records if record.think_time is not None]
    if not thought:
        return {}
    p50, p90 = (float(np.percentile(thought, rank)) for rank in (50, 90))
    first = sum(record.parent is None for record in records)
    return {
        "requests per session": len(records) / first,
        "think time s, p50": p50,
        "think time s, p90": p90,
    }


def _reuse(records: Sequence[Record]) -> dict[str, float]:
    """How long ago the last block that a prompt shares was asked for."""
    seen: dict[int, float] = {}
    gaps = []
    for at, record in zip(arrivals(records), records, strict=True):
        known = [number for number in record.hash_ids if number in seen]
        if known:
            gaps.append(at - seen[known[-1]])
        seen |= dict.fromkeys(record.hash_ids, at)
    if not gaps:
        return {}
    soon = sum(gap <= SOON_S for gap in gaps) / len(gaps)
    return {
        "reuse gap s, p50": float(np.percentile(gaps, 50)),
        "reuse gap s, p90": float(np.percentile(gaps, 90)),
        f"reuses within {SOON_S:g} s, %": 100 * soon,
    }
