"""Files of safetensors, read and written tensor by tensor.

safetensors checks each file. Its NumPy reader has no float8, and copies through mapped memory at a quarter of the
speed of `numpy.fromfile` (64 MB in 75 ms, 2026-11), so tensors are read here.
"""

import concurrent.futures
import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from models.hf.config import read_json

INDEX = "model.safetensors.index.json"
DTYPES: dict[str, Any] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "U8": np.uint8,
    "F64": np.float64,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "BOOL": np.bool_,
}
FLOATS = ("F32", "F16", "BF16")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a file.

    Attributes:
      start, end: its bytes in the file.
    """

    file: pathlib.Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    def read(self, at: int | None = None) -> np.ndarray:
        """The tensor, or only number `at` of its first axis.

        Raises:
          ValueError: the file ends before.
        """
        shape, start, size = self.shape, self.start, self.end - self.start
        if at is not None:
            size //= shape[0]
            start, shape = start + at * size, shape[1:]
        data = np.fromfile(self.file, np.uint8, size, offset=start)
        if len(data) < size:
            raise ValueError(f"{self.file} cannot be read: it ends within {self.name}. Copy the file again.")
        return data.view(DTYPES[self.dtype]).reshape(shape)


def read_ahead(reads: Iterable[Callable[[], np.ndarray]]) -> Iterator[np.ndarray]:
    """The arrays that `reads` return, in their order. A thread reads the next one while the caller uses one."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        before = None
        for read in reads:
            following = thread.submit(read)
            if before is not None:
                yield before.result()
            before = following
        if before is not None:
            yield before.result()


def files_of(folder: pathlib.Path) -> list[pathlib.Path]:
    """
    Raises:
      FileNotFoundError: there is no checkpoint, or it lacks a file that its index names.
      ValueError: an index that says no files.
    """
    index, names = folder / INDEX, ["model.safetensors"]
    if index.exists():
        named = read_json(index).get("weight_map")
        names = (
            sorted(set(named.values()))
            if isinstance(named, dict) and all(isinstance(name, str) for name in named.values())
            else []
        )
        if not names or any(pathlib.Path(name).name != name for name in names):
            raise ValueError(
                f'{index}: "weight_map" must give a file in this folder for each tensor. Copy the file again.'
            )
    if missing := [name for name in names if not (folder / name).exists()]:
        raise FileNotFoundError(f"{folder} has no {', '.join(missing)}. Copy what is missing.")
    return [folder / name for name in names]


def header_of(file: pathlib.Path) -> tuple[bytes, list[Tensor]]:
    """The bytes before the first tensor, and the tensors in the order of their bytes.

    Raises:
      ValueError: no safetensors file.
    """
    try:
        with safetensors.safe_open(file, "np"):  # checks the header, and that the tensors fill the file
            pass
        with file.open("rb") as stored:
            first = stored.read(8)
            text = stored.read(int.from_bytes(first, "little"))
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{file} cannot be read: {error}. Copy the file again.") from error
    begin, tensors = 8 + len(text), []
    for name, entry in json.loads(text).items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            tensors.append(Tensor(file, name, entry["dtype"], tuple(entry["shape"]), begin + start, begin + end))
    return first + text, sorted(tensors, key=lambda tensor: (tensor.start, tensor.end))


def new_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The header of a file of (name, dtype, shape) in that order."""
    said: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + np.dtype(DTYPES[dtype]).itemsize * math.prod(shape)
        said[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(said, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_file(file: pathlib.Path, header: bytes, tensors: Iterable[Callable[[], np.ndarray]]) -> None:
    """Writes a header and the tensors, each made when it is written."""
    with file.open("wb") as stored:
        stored.write(header)
        for make in tensors:
            stored.write(np.ascontiguousarray(make()).reshape(-1).view(np.uint8).data)
