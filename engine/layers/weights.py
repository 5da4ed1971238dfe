"""Checkpoint tensors by name: each is taken once; what is missing, extra or misshapen is named.

Reads safetensors, single or sharded. Knows nothing of architectures.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from copy import copy
from pathlib import Path
from typing import Any, Self

import structlog
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import CheckpointError
from engine.layers.float8 import Scales
from engine.layers.skipped import Skipped
from engine.model_configs.model_config import Renames, renamed
from engine.model_configs.quantization import Float8Config
from engine.model_files import weight_files
from engine.ops.backend import ops_for

TELL_S = 5.0

log = structlog.get_logger()


class Weights:
    """The tensors of one model folder, opened lazily; use as a context manager.

    `renames`: see `model_config.Renames`. `quantization`: how tensors are stored that are not plain
    numbers; they come multiplied by their scales. `ops` are the operators of `device`, the same for
    all layers that are built from these weights.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        *,
        renames: Renames,
        quantization: Float8Config | None = None,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.ops = ops_for(device)
        self._prefix = ""
        self._files = ExitStack()
        self._where: dict[str, tuple[Any, str]] = {}
        self._stored: dict[str, tuple[Any, Path]] = {}
        for path in weight_files(folder):
            self._open(path)
        self._scales = Scales(quantization, self._stored)
        self._skipped = Skipped(renames)
        self._name(renames)
        self._untaken = set(self._where)
        self._progress = _Progress()

    def below(self, name: str) -> Self:
        """The same tensors by shorter names: `take("x")` of it takes `<name>.x`."""
        # A shallow copy: files, taken names and progress stay those of the whole folder.
        part = copy(self)
        part._prefix = f"{self._prefix}{name}."
        return part

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """The tensor `name`, converted to `dtype` (default: the model's), on the model's device.

        Raises CheckpointError when it is missing or its shape is not `shape`.
        """
        name = self._prefix + name
        stored = self._stored_name(name)
        tensor: Tensor = self._where[name][0].get_tensor(stored)
        scale = self._scales.of(stored, tensor.dtype)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"tensor {stored!r} has shape {tuple(tensor.shape)}, config.json implies {shape}"
            )
        self._untaken.discard(name)
        self._progress.tell(len(self._where) - len(self._untaken), len(self._where))
        dtype = dtype or self.dtype
        if scale is None:
            return tensor.to(device=self.device, dtype=dtype)
        out = torch.empty(shape, dtype=dtype, device=self.device)
        self._scales.multiply((stored, tensor), self._stored[scale][0].get_tensor(scale), out)
        return out

    def take_joined(self, names: Sequence[str], shape: tuple[int, ...]) -> Tensor:
        """The tensors `names` end to end along the first dimension, together of `shape`.

        Each may hold any share of the rows: transformers saves a matrix that it had merged in
        equal parts, whatever they were before. Raises CheckpointError as `take`.
        """
        shapes = {name: self._shape(name) for name in names}
        rows = sum(own[0] for own in shapes.values())
        for name, own in shapes.items():
            if (rows, *own[1:]) != shape:
                raise CheckpointError(
                    f"tensor {self._stored_name(self._prefix + name)!r} has shape {own}, and with "
                    f"its neighbours {rows} rows; config.json implies {shape}"
                )
        return torch.cat([self.take(name, own) for name, own in shapes.items()])

    def _stored_name(self, name: str) -> str:
        if name not in self._where:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}")
        return self._where[name][1]

    def _shape(self, name: str) -> tuple[int, ...]:
        stored = self._stored_name(self._prefix + name)
        return tuple(self._where[self._prefix + name][0].get_slice(stored).get_shape())

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._where

    def finish(self) -> None:
        """Raises CheckpointError naming the tensors that nobody took."""
        if self._untaken:
            some = ", ".join(sorted(self._where[name][1] for name in self._untaken)[:5])
            raise CheckpointError(
                f"{len(self._untaken)} tensors are not part of this architecture: {some}"
            )
        self._scales.tell(self.dtype)
        self._skipped.tell()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def _open(self, path: Path) -> None:
        try:
            # For the reason: safetensors says of all files that it cannot open that there is none.
            path.open("rb").close()
            file = self._files.enter_context(safe_open(str(path), framework="pt"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        for stored in file.keys():  # noqa: SIM118 - not a dict
            if stored in self._stored:
                other = self._stored[stored][1].name
                raise CheckpointError(f"tensor {stored!r} is in {other} and in {path.name}")
            self._stored[stored] = (file, path)

    def _name(self, renames: Renames) -> None:
        for stored, (file, _) in self._stored.items():
            if stored in self._scales:
                continue
            name = renamed(stored, renames)
            if name is None:
                self._skipped.add(stored, file.get_tensor(stored).nbytes)
            else:
                self._where[name] = (file, stored)


class _Progress:
    """Large models take minutes to load: says now and then how far it is."""

    def __init__(self) -> None:
        self._told = time.monotonic()

    def tell(self, done: int, total: int) -> None:
        if time.monotonic() - self._told > TELL_S:
            self._told = time.monotonic()
            log.info("loading", tensors=done, of=total)
