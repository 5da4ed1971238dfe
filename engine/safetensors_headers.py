"""Headers of safetensors files: names, types, shapes and places of tensors. Torch-free.

A file begins with the length of a JSON object (8 bytes, little endian), that object, and then the
tensors' bytes. Reading it reads no weights.
"""

import os
from collections.abc import Container, Iterable, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

from engine.errors import CheckpointError
from engine.model_files import weight_files
from engine.struct_types import learned

MAX_HEADER: Final = 100_000_000
"""Of a safetensors file; its own readers take no more."""
FLOAT_DTYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "F8_E4M3": "bfloat16",
        "F8_E5M2": "bfloat16",
    }
)
"""By the type of weights in files the one that a model is computed in; 8-bit floats in bfloat16."""
SCALE_SUFFIXES: Final = ("_scale_inv", "_scale")
"""After the stored name of a weight in 8-bit floats; both are what it is multiplied by."""


class StoredTensor(NamedTuple):
    """One tensor of a file: its type as safetensors name it, and its bytes' place in the file."""

    path: Path
    descriptor: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def read_headers(folder: Path) -> list[StoredTensor]:
    """The tensors of the model in `folder`, with descriptors that are closed.

    Raises CheckpointError for files that cannot be read.
    """
    found = []
    for path in weight_files(folder):
        try:
            with path.open("rb", buffering=0) as file:
                found += headers_of(path, file.fileno(), os.fstat(file.fileno()).st_size)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return found


def scaled_by(name: str, names: Container[str]) -> str | None:
    """The weight among `names` that the tensor `name` is the scale of, by its name; or None."""
    weights = (name.removesuffix(suffix) for suffix in SCALE_SUFFIXES if name.endswith(suffix))
    return next((weight for weight in weights if weight in names), None)


def main_dtype(tensors: Iterable[StoredTensor]) -> str | None:
    """The type to compute in: the one that most numbers are stored in. None: there are no floats.

    Norms and decays are often float32 in a model of 16 bits, so numbers count, not tensors.
    """
    numbers: dict[str, int] = {}
    for stored in tensors:
        if stored.dtype in FLOAT_DTYPES:
            dtype = FLOAT_DTYPES[stored.dtype]
            numbers[dtype] = numbers.get(dtype, 0) + prod(stored.shape)
    return max(numbers, key=numbers.__getitem__, default=None)


class _Entry(msgspec.Struct, frozen=True):
    """One tensor in the header of a safetensors file; offsets are from the header's end."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def headers_of(path: Path, descriptor: int, size: int) -> list[StoredTensor]:
    """The tensors of one open file of `size` bytes, in its order.

    Raises CheckpointError for a header that is none, or that names bytes outside the file; may
    raise OSError.
    """
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    header = os.pread(descriptor, length, 8) if length <= MAX_HEADER else b""
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        stored = {
            name: msgspec.json.decode(entry, type=learned(_Entry))
            for name, entry in entries.items()
        }
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: no safetensors header: {error}") from error
    tensors = []
    for name, it in stored.items():
        start, end = (8 + length + offset for offset in it.data_offsets)
        if not 8 + length <= start <= end:
            raise CheckpointError(f"{path} cannot be read: tensor {name!r} has no place in it")
        if end > size:
            raise CheckpointError(f"{path} cannot be read: it ends inside a tensor")
        tensors.append(StoredTensor(path, descriptor, name, it.dtype, it.shape, start, end - start))
    return tensors
