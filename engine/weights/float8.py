"""Weights stored as 8-bit floats: each is multiplied by its scales once, when it is loaded.

A product of such weights would round activations to 8 bits as well; nothing here does.
"""

from collections.abc import Iterable
from typing import Final

import structlog
import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.model_configs.quantization import ADVICE, Float8Config
from engine.safetensors_headers import scaled_by

FLOAT8: Final = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
PLAIN: Final = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
SCALES: Final = frozenset({*PLAIN, torch.float8_e8m0fnu})
NUMBERS: Final = 1 << 19
"""So many are float32 at a time, or a row of blocks if that is more: in a core's cache they stay.

Temporaries take 10 bytes each.
"""
NUMBERS_ON_DEVICE: Final = 1 << 21
"""On a device, whose queue takes longer to fill than a small slice to be computed: 20 MiB."""
E4M3_UNIT: Final = 256.0
"""float16 has exponents of twice the range: the bits of an e4m3 there are its value / 2^8."""

log = structlog.get_logger()


class Scales:
    """The scales of a folder's 8-bit floats, by the stored names of both.

    `stored`: the names of all tensors. `name in scales`: it is taken with its weight, not alone.
    """

    def __init__(self, config: Float8Config | None, stored: Iterable[str]) -> None:
        self._config = config
        self._of: dict[str, str] = {}
        self._applied = 0
        names = set(stored) if config is not None else set()
        for name in names:
            if (weight := scaled_by(name, names)) is not None:
                self._of[weight] = name
        self._all = frozenset(self._of.values())

    def __contains__(self, stored: str) -> bool:
        return stored in self._all

    def of(self, stored: str, dtype: torch.dtype) -> str | None:
        """The name of the scale of the weight `stored`; None: it is stored in plain numbers.

        Raises CheckpointError for 8-bit floats without a scale, a scale without 8-bit floats, and
        all other types.
        """
        scale, is_float8 = self._of.get(stored), dtype in FLOAT8
        if is_float8 and self._config is None:
            raise CheckpointError(
                f"tensor {stored!r} has type {dtype}, and config.json has no 'quantization_config'"
            )
        if is_float8 and scale is None:
            raise CheckpointError(f"tensor {stored!r} has type {dtype} and no scale")
        if not is_float8 and scale is not None:
            raise CheckpointError(
                f"tensor {stored!r} has type {dtype} and a scale {scale!r}; only 8-bit floats have"
            )
        if not is_float8 and dtype not in PLAIN:
            raise CheckpointError(f"tensor {stored!r} has type {dtype}: {ADVICE}")
        return scale

    def multiply(self, stored: tuple[str, Tensor], scale: Tensor, out: Tensor) -> None:
        """Fills `out` with the weight `stored` (name and tensor) times `scale`, from float32.

        Slice by slice from the first row on, so the weight may lie at the end of `out`. All three
        are on one device.

        The weight is [rows, columns], or [experts, rows, columns]. Without blocks, a scale is of
        the whole tensor, of each expert, or of each row. Raises CheckpointError for other shapes.
        """
        name, weight = stored
        shape = weight.shape
        scales = self._checked(name, shape, scale).float()
        block = None if self._config is None else self._config.block
        if weight.dtype is torch.float8_e4m3fn:
            scales = scales * E4M3_UNIT
        # Whole blocks at a time, so that each part of a matrix begins with one.
        height = 1 if block is None else block[0]
        numbers = NUMBERS if out.device.type == "cpu" else NUMBERS_ON_DEVICE
        rows = max(1, numbers // (height * shape[-1])) * height
        # Flat experts would not begin with a block either.
        parts = zip(
            *(it if it.dim() > 2 else it[None] for it in (out, weight, scales)), strict=True
        )
        for filled, matrix, own in parts:
            for start in range(0, len(matrix), rows):
                part = _half(matrix[start : start + rows]).float()
                _multiply_(part, own, block=block, start=start)
                filled[start : start + rows] = part
        self._applied += 1

    def tell(self, dtype: torch.dtype) -> None:
        """Says once what was done, if anything was."""
        if self._applied:
            log.info(
                "weights in 8-bit floats were multiplied by their scales; they take the bytes of "
                "the computed type, and activations are not quantized",
                tensors=self._applied,
                dtype=str(dtype).removeprefix("torch."),
            )

    def _checked(self, name: str, shape: tuple[int, ...], scale: Tensor) -> Tensor:
        """The scales [(experts,) rows or 1, 1], or one for each block."""
        of = self._of[name]
        if scale.dtype not in SCALES:
            raise CheckpointError(f"scale {of!r} has type {scale.dtype}, expected floats")
        found, expected = tuple(scale.shape), "one, one for each expert, or one for each row"
        if self._config is not None and self._config.block is not None and len(shape) > 1:
            rows, columns = self._config.block
            grid = (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns))
            if found == grid:
                return scale
            expected = f"{grid} for blocks of {rows} x {columns}"
        else:
            leading = (*found, *(1 for _ in shape[len(found) :]))
            if scale.numel() == 1:
                leading = tuple(1 for _ in shape)
            fits = all(size in (1, whole) for size, whole in zip(leading, shape, strict=False))
            if fits and len(leading) == len(shape) > 1 and leading[-1] == 1:
                return scale.reshape(leading).expand(*shape[:-2], *leading[-2:])
        raise CheckpointError(
            f"scale {of!r} has shape {found}, tensor {name!r} of shape {tuple(shape)} needs "
            f"{expected}"
        )


def _half(stored: Tensor) -> Tensor:
    """8-bit floats in float16, of e4m3 divided by `E4M3_UNIT`; exact, a NaN of e4m3 is 480.

    By shifts, because torch converts these types one by one, at a tenth of the speed.
    """
    if stored.dtype is torch.float8_e5m2:
        return (stored.view(torch.uint8).to(torch.int16) << 8).view(torch.float16)
    # The sign is extended to bits 14 and 15; it belongs in the upper one.
    return (
        (stored.view(torch.int8).to(torch.int16) << 7).bitwise_and_(~(1 << 14)).view(torch.float16)
    )


def _multiply_(part: Tensor, scales: Tensor, *, block: tuple[int, int] | None, start: int) -> None:
    """Multiplies float32 rows [rows, columns] from `start` on IN PLACE by those of their matrix."""
    rows, columns = part.shape
    if block is None:
        part.mul_(scales if len(scales) == 1 else scales[start : start + rows])
        return
    height, width = block
    count = -(-rows // height)
    wide = scales[start // height :][:count].repeat_interleave(width, 1)[:, :columns]
    if count * height == rows:
        part.view(count, height, columns).mul_(wide.unsqueeze(1))
    else:
        part.mul_(wide.repeat_interleave(height, 0)[:rows])
