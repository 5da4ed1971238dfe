"""Checkpoint tensors by name: each is taken once; what is missing, extra or misshapen is named.

Knows nothing of architectures.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from math import prod
from types import MappingProxyType
from typing import Final, Self

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.model_configs.model_config import Renames, renamed
from engine.model_configs.quantization import Float8Config
from engine.ops.backend import Ops
from engine.safetensors_headers import StoredTensor
from engine.weights.files import WeightFiles, Writable
from engine.weights.float8 import Scales
from engine.weights.skipped import Skipped
from engine.weights.staging import Staging

STORED_DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)


class Weights:
    """The tensors of one model folder, read when they are taken, while its `files` are open.

    No tensor is whole on the host on its way to a device (`Staging`), or twice in the memory where
    it stays: what is converted is so in place, slice by slice.

    `renames`: see `model_config.Renames`. `quantization`: how tensors are stored that are not plain
    numbers; they come multiplied by their scales. `ops` are the operators of `device`, the same for
    all layers that are built from these weights.
    """

    def __init__(
        self,
        files: WeightFiles,
        dtype: torch.dtype,
        device: torch.device,
        *,
        ops: Ops,
        renames: Renames,
        quantization: Float8Config | None = None,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.ops = ops
        self._prefix = ""
        self._files = files
        self._staging = staging_for(device)
        self._stored = _by_stored_name(files)
        self._scales = Scales(quantization, self._stored)
        self._skipped = Skipped(renames)
        self._where: dict[str, StoredTensor] = {}
        for stored in files.tensors:
            name = renamed(stored.name, renames)
            if name is None:
                self._skipped.add(stored.name, stored.num_bytes)
            elif name in self._where:
                raise CheckpointError(
                    f"tensors {self._where[name].name!r} and {stored.name!r} are both {name!r}"
                )
            elif stored.name not in self._scales:
                self._where[name] = stored
        self._untaken = set(self._where)
        files.read_ahead(self._where.values())

    def below(self, name: str) -> Self:
        """The same tensors by shorter names: `take("x")` of it takes `<name>.x`."""
        # A shallow copy: files and taken names stay those of the whole folder.
        part = copy(self)
        part._prefix = f"{self._prefix}{name}."
        return part

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """The tensor `name`, converted to `dtype` (default: the model's), on the model's device.

        `out`, contiguous, is filled and returned instead of a new tensor: of several that make up
        one matrix, no copy is made. Raises CheckpointError when the tensor is missing, its shape is
        not `shape`, or it cannot be read.
        """
        stored = self._find(name)
        if stored.shape != shape:
            raise CheckpointError(
                f"tensor {stored.name!r} has shape {stored.shape}, config.json implies {shape}"
            )
        scale = self._scales.of(stored.name, _dtype_of(stored))
        if out is None:
            out = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        if scale is None:
            self._fill(out, stored)
        else:
            weight = (stored.name, self._as_stored(stored, at_end_of=out))
            self._scales.multiply(weight, self._as_stored(self._stored[scale]), out)
        self._untaken.discard(self._prefix + name)
        return out

    def holds_twice(self, name: str, other: str) -> bool:
        """True if `name` is stored with the very type, shape and bytes of `other`.

        Then `name` counts as taken. Compares up to the first block that differs, on the host.
        Raises CheckpointError as `take`.
        """
        it, its = self._find(name), self._find(other)
        # Of 8-bit floats the scales would have to be equal, too.
        is_plain = all(self._scales.of(each.name, _dtype_of(each)) is None for each in (it, its))
        same_kind = (it.dtype, it.shape) == (its.dtype, its.shape)
        is_same = is_plain and same_kind and self._files.are_equal(it, its)
        if is_same:
            self._untaken.discard(self._prefix + name)
        return is_same

    def take_joined(self, names: Sequence[str], shape: tuple[int, ...]) -> Tensor:
        """The tensors `names` end to end along the first dimension, together of `shape`.

        Each may hold any share of the rows: transformers saves a matrix that it had merged in
        equal parts, whatever they were before. Raises CheckpointError as `take`.
        """
        parts = {name: self._find(name) for name in names}
        rows = sum(stored.shape[0] for stored in parts.values())
        for stored in parts.values():
            if (rows, *stored.shape[1:]) != shape:
                raise CheckpointError(
                    f"tensor {stored.name!r} has shape {stored.shape}, and with its neighbours "
                    f"{rows} rows; config.json implies {shape}"
                )
        whole = torch.empty(shape, dtype=self.dtype, device=self.device)
        sizes = [stored.shape[0] for stored in parts.values()]
        for (name, stored), part in zip(parts.items(), whole.split_with_sizes(sizes), strict=True):
            self.take(name, stored.shape, out=part)
        return whole

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._where

    def finish(self) -> None:
        """Waits for copies to the device.

        Raises CheckpointError naming the tensors that nobody took.
        """
        if self._untaken:
            some = ", ".join(sorted(self._where[name].name for name in self._untaken)[:5])
            raise CheckpointError(
                f"{len(self._untaken)} tensors are not part of this architecture: {some}"
            )
        if self._staging is not None:
            self._staging.finish()
        self._scales.tell(self.dtype)
        self._skipped.tell()

    def _find(self, name: str) -> StoredTensor:
        name = self._prefix + name
        if name not in self._where:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}")
        return self._where[name]

    def _as_stored(self, stored: StoredTensor, at_end_of: Tensor | None = None) -> Tensor:
        """In its own type, on the device; in the last bytes of a tensor that has as many or more.

        So 8-bit floats are multiplied out into the tensor at whose end they lie, from its beginning
        on, k bytes for each: what is written ends at k * n bytes, and what is unread begins n bytes
        after (k - 1) * N, so it is read before it is written over, up to the last, where n is N.

            |                          | stored 8-bit floats |   k = 2
            | multiplied ->   |        |   | unread          |
        """
        dtype = _dtype_of(stored)
        if at_end_of is None:
            tensor = torch.empty(stored.shape, dtype=dtype, device=self.device)
        else:
            place = at_end_of.view(-1).view(torch.uint8)
            tensor = place[len(place) - stored.num_bytes :].view(dtype).view(stored.shape)
        self._fill(tensor, stored)
        return tensor

    def _fill(self, out: Tensor, stored: StoredTensor) -> None:
        """Reads `stored` into `out`, converted."""
        self._files.read(stored, self._writable(out.view(-1), _dtype_of(stored)))

    def _writable(self, flat: Tensor, dtype: torch.dtype) -> Writable:
        """Where blocks of a tensor that is stored in `dtype` become those of `flat`."""
        staging = self._staging

        def queued(offset: int, size: int) -> AbstractContextManager[memoryview]:
            assert staging is not None
            first, count = offset // dtype.itemsize, size // dtype.itemsize
            return staging.filled(flat[first : first + count], dtype)

        @contextmanager
        def converted(offset: int, size: int) -> Iterator[memoryview]:
            with self._files.buffer(size) as block:
                yield block
                if size:
                    items = torch.frombuffer(block, dtype=dtype)
                    flat[offset // dtype.itemsize :][: len(items)].copy_(items)

        if staging is not None:
            return queued
        if dtype != flat.dtype:
            return converted
        memory = flat.view(torch.uint8).numpy().data
        return lambda at, size: nullcontext(memory[at : at + size])


def staging_for(device: torch.device) -> Staging | None:
    """None on the host: there, files are read to where their tensors stay."""
    return None if device.type == "cpu" else Staging(device)


def _by_stored_name(files: WeightFiles) -> dict[str, StoredTensor]:
    """All tensors; CheckpointError for one that is in two files."""
    found: dict[str, StoredTensor] = {}
    for stored in files.tensors:
        if stored.name in found:
            other = found[stored.name].path.name
            raise CheckpointError(f"tensor {stored.name!r} is in {other} and in {stored.path.name}")
        found[stored.name] = stored
    return found


def _dtype_of(stored: StoredTensor) -> torch.dtype:
    """CheckpointError for a type that is not known, or where type and shape need other bytes."""
    dtype = STORED_DTYPES.get(stored.dtype)
    fits = dtype is not None and min(stored.shape, default=0) >= 0
    if dtype is None or not fits or prod(stored.shape) * dtype.itemsize != stored.num_bytes:
        raise CheckpointError(
            f"{stored.path} cannot be read: tensor {stored.name!r} of type {stored.dtype} and "
            f"shape {stored.shape} has {stored.num_bytes} bytes"
        )
    return dtype
