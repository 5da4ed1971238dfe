"""The batch that operators are tried on, and how what they did to it is judged.

    rows   decode, decode, decode | padding ... | segment of 65 | 130, an export after 100 | 64

Rows of padding are there where a column takes them: their unit is -1, as are their slots.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isnan
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.sheet import Sheet
from engine.forward import SequenceLens, StateExport, StateIndex
from engine.ops.backend import Ops

LIMITS: Mapping[torch.dtype, float] = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
OUTPUTS, STATES = "outputs", "states"
DECODES = 3
CONTEXT = [40, 7, 200, 0, 30, 100]
UNITS = [5, 2, 7, 1, 8, 3]  # of the sequences; unit 9 takes the export
NUM_UNITS = 10


class Segments(NamedTuple):
    """Their lengths, and the export from inside of one."""

    lens: list[int]
    export: StateExport


FULL = Segments([65, 130, 64], StateExport(segment=1, offset=100, unit=9))
SMALL = Segments([5, 70, 2], StateExport(segment=1, offset=66, unit=9))


@dataclass(slots=True, frozen=True)
class Trial:
    """One column of operators in one dtype; `small`: shapes that Triton's interpreter can bear."""

    sheet: Sheet
    ops: Ops
    device: torch.device
    dtype: torch.dtype
    small: bool = False
    largest: dict[str, float] = field(default_factory=lambda: {OUTPUTS: 0.0, STATES: 0.0})

    @property
    def pads(self) -> int:
        """Rows of padding in the batch."""
        return 2 if self.ops.recorder is not None and self.ops.recorder.takes_padding else 0

    @property
    def name(self) -> str:
        """Of column and dtype."""
        return f"{self.ops.name}, {str(self.dtype).removeprefix('torch.')}"

    @property
    def limit(self) -> float:
        """The largest error of a result that has the dtype of its inputs."""
        return LIMITS[self.dtype]

    @property
    def segments(self) -> Segments:
        """Of the batch."""
        return SMALL if self.small else FULL

    @property
    def query_lens(self) -> list[int]:
        """Without padding."""
        return [1] * DECODES + self.segments.lens

    @property
    def tokens(self) -> int:
        """Without padding."""
        return sum(self.query_lens)

    @property
    def exports(self) -> list[tuple[int, int]]:
        """As naive operators want them, which know no decodes."""
        export = self.segments.export
        return [(DECODES + export.segment, export.offset)]

    @property
    def lens(self) -> SequenceLens:
        """Of all rows; a row of padding has no context."""
        own = [1] * (DECODES + self.pads) + self.segments.lens
        context = CONTEXT[:DECODES] + [0] * self.pads + CONTEXT[DECODES:]
        return SequenceLens(DECODES + self.pads, own, context)

    def index(self) -> StateIndex:
        """The places of the states, on the device."""
        units = UNITS[:DECODES] + [-1] * self.pads + UNITS[DECODES:]
        return StateIndex(
            torch.tensor(units, device=self.device), None, self.lens, (self.segments.export,)
        )

    def rows(self, *parts: Tensor) -> list[Tensor]:
        """Rows of the batch on the device; those of padding are not numbers."""
        found = []
        for part in parts:
            pads = torch.full((self.pads, *part.shape[1:]), float("nan"), dtype=part.dtype)
            found.append(torch.cat([part[:DECODES], pads, part[DECODES:]]).to(self.device))
        return found

    def kept(self, y: Tensor) -> Tensor:
        """Without padding."""
        return torch.cat([y[:DECODES], y[DECODES + self.pads :]])

    def pool(self, like: Tensor) -> Tensor:
        """A copy on the device, after memory that unit -1 would be."""
        memory = torch.cat([torch.zeros_like(like[:1]), like]).to(self.device, copy=True)
        return memory[1:]

    def near(
        self, case: str, found: Tensor, truth: Tensor, *, limit: float, kind: str = OUTPUTS
    ) -> None:
        """Tells an error, and remembers the largest."""
        error = self.sheet.near(f"{self.name}: {case}", found, truth, limit=limit)
        # An error that is not a number stays: nothing is larger.
        if not (isnan(self.largest[kind]) or error <= self.largest[kind]):
            self.largest[kind] = error

    def states(
        self, case: str, limit: float, *, y: tuple[Tensor, Tensor], pools: tuple[Tensor, Tensor]
    ) -> None:
        """The outputs of steps and chunks, and all states: those of nobody must be the same."""
        found, truth = self.kept(y[0]), y[1]
        self.near(f"{case}, steps", found[:DECODES], truth[:DECODES], limit=limit)
        self.near(f"{case}, chunks", found[DECODES:], truth[DECODES:], limit=limit)
        if self.pads:
            # The memory from unit -1 on: a write of padding would be there.
            before = pools[0].as_strided(pools[0][0].shape, pools[0][0].stride(), 0)
            is_right = not before.any()
            figure = "nothing written" if is_right else "written"
            self.sheet.tell(
                f"{self.name}: {case}, padding", figure, "right" if is_right else "wrong"
            )
        self.near(f"{case}, states", pools[0], pools[1], limit=limit, kind=STATES)

    def moved(self, pool: Tensor, final: Tensor, exported: Tensor) -> Tensor:
        """`pool` as it should be after the batch."""
        after = pool.clone()
        after[UNITS] = final.to(pool.dtype)
        after[self.segments.export.unit] = exported[0].to(pool.dtype)
        return after
