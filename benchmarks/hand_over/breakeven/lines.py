"""Two lines of this machine: seconds to compute a prompt, and seconds to hand it over.

Both over the tokens of the prompt, with two real nodes that are asked over their own gRPC.
"""

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from time import monotonic

import msgspec
import numpy as np

from benchmarks.hand_over.pd_pair import DEADLINES, Pair, Prefilled, blocking, pair
from benchmarks.support import report
from benchmarks.support.models import WIDE, random_prompts, save_random
from benchmarks.support.pairs import Spread, alternate, turns

OUTPUT_TOKENS = 9
P_BYTES, D_BYTES = 512 << 20, 512 << 20


class Point(msgspec.Struct, frozen=True):
    """Milliseconds for prompts of one length, over the rounds; bytes of one hand-over.

    `ratio`: of prefill to path, by round.
    """

    tokens: int
    prefill: Spread
    path: Spread
    ratio: Spread
    rounds: int
    moved_bytes: int


class Sample(msgspec.Struct, frozen=True):
    """One prompt, in seconds."""

    prefill: float
    path: float
    moved_bytes: int


class Lines(msgspec.Struct, frozen=True):
    """All points, and the lines through their medians."""

    points: tuple[Point, ...]
    prefill_us_per_token: float
    path_us_per_token: float
    path_fixed_ms: float

    @classmethod
    def of(cls, points: Sequence[Point]) -> "Lines":
        """Least squares; the path has a fixed part, computing has none."""
        tokens = np.array([point.tokens for point in points], dtype=float)
        prefill = np.array([point.prefill.median for point in points])
        slope, fixed = np.polyfit(tokens, [point.path.median for point in points], 1)
        through_zero = float(tokens @ prefill / (tokens @ tokens))
        return cls(tuple(points), 1e3 * through_zero, 1e3 * float(slope), float(fixed))

    def breakeven(self) -> float | None:
        """Tokens from which computing takes longer, between the points; None: at no length.

        0 where that is so at the shortest length already.
        """
        gains = [(point.tokens, point.prefill.median - point.path.median) for point in self.points]
        losing = [place for place, (_, gain) in enumerate(gains) if gain < 0]
        if not losing:
            return 0.0
        if losing[-1] == len(gains) - 1:
            return None
        (left, loss), (right, gain) = gains[losing[-1]], gains[losing[-1] + 1]
        return left + (right - left) * loss / (loss - gain)


def measure(found: report.Report, lengths: Sequence[int], rounds: int) -> Lines:
    """Every length once per round, in turning order; each prompt is a new one."""
    seeds = count()
    with (
        tempfile.TemporaryDirectory() as folder,
        asyncio.Runner() as loop,
        report.progress(found.console, turns(rounds) * len(lengths)) as tell,
    ):
        done = tell("two nodes")
        model = save_random(WIDE, Path(folder))
        with pair(loop, model, "shm", p_bytes=P_BYTES, d_bytes=D_BYTES, pulls=1) as nodes:
            ways = {
                str(length): blocking(loop, partial(_sample, nodes, length, seeds))
                for length in lengths
            }
            samples = alternate(ways, rounds, until=found.share(1), done=done)
    return Lines.of([_point(int(length), taken) for length, taken in samples.items()])


async def _sample(nodes: Pair, tokens: int, seeds: Iterator[int]) -> Sample:
    (prompt,) = random_prompts(1, tokens, next(seeds))
    began = monotonic()
    held = await nodes.prefill(prompt, OUTPUT_TOKENS)
    path, moved = await _path(nodes, held)
    return Sample(held.answered - began, path, moved)


async def _path(nodes: Pair, held: Prefilled) -> tuple[float, int]:
    """From asking D to its first own token, without the step that made it; and bytes.

    The prompt's first token came from P; D sends it at once.
    """
    request = msgspec.structs.replace(held.request, kv_transfer_params=held.params)
    began, times, moved = monotonic(), [], 0
    async for output in nodes.to_d.generate(request, DEADLINES):
        times += [monotonic()] * len(output.token_ids)
        if output.kv_transfer is not None:
            moved = output.kv_transfer.attention_bytes + output.kv_transfer.state_bytes
    if not moved:
        raise RuntimeError("D did not pull the prompt")
    step = (times[-1] - times[1]) / (len(times) - 2)
    return times[1] - began - step, moved


def _point(tokens: int, samples: Sequence[Sample]) -> Point:
    return Point(
        tokens,
        Spread.of([1e3 * sample.prefill for sample in samples]),
        Spread.of([1e3 * sample.path for sample in samples]),
        Spread.of([sample.prefill / sample.path for sample in samples]),
        len(samples),
        samples[0].moved_bytes,
    )
