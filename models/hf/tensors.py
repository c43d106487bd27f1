"""The tensors of a checkpoint, read and written one by one, as floating-point arrays whatever they are stored as.

safetensors checks each file. Its NumPy reader has no float8, and copies through mapped memory at a quarter of the
speed of `numpy.fromfile` (64 MB in 75 ms, 2026-11), so tensors are read here.
"""

import concurrent.futures
import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import ml_dtypes
import numpy as np
import safetensors

from models.hf import quantized as hf_quantized
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
    """A tensor of a file."""

    file: pathlib.Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # its bytes in the file
    end: int

    def read(self, at: int | None = None) -> np.ndarray:
        """The tensor, or only number `at` of its first axis."""
        shape, start, size = self.shape, self.start, self.end - self.start
        if at is not None:
            size //= shape[0]
            start, shape = start + at * size, shape[1:]
        data = np.fromfile(self.file, np.uint8, size, offset=start)
        if len(data) < size:
            raise ValueError(f"{self.file} cannot be read: it ends within {self.name}. Copy the file again.")
        return data.view(DTYPES[self.dtype]).reshape(shape)


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor as it is stored: "float" in one tensor, or "raw" in float8 that stays so, or as values and scales."""

    name: str
    kind: Literal["float", "raw", "fp8", "mxfp4"]
    tensors: tuple[Tensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.tensors[0].shape
        return (shape[0], math.prod(shape[2:]) * 2, shape[1]) if self.kind == "mxfp4" else shape

    def read(self, at: int | None = None) -> np.ndarray:
        """As of `Tensor.read`: float32, but bfloat16, float16 and raw float8 as they are."""
        arrays = [tensor.read(at) for tensor in self.tensors]
        if self.kind == "fp8":
            return hf_quantized.from_fp8(*arrays)
        return hf_quantized.from_mxfp4(*arrays) if self.kind == "mxfp4" else arrays[0]

    def write(self, array: np.ndarray) -> list[np.ndarray]:
        """What `tensors` become for other values: float32, or raw float8."""
        if self.kind in ("float", "raw"):
            return [array.astype(DTYPES[self.tensors[0].dtype])]
        scales = self.tensors[1].read()
        if self.kind == "fp8":
            values, scales = hf_quantized.to_fp8(array, scales.astype(np.float32))
            return [values, scales.astype(DTYPES[self.tensors[1].dtype])]
        made = [hf_quantized.to_mxfp4(expert, own) for expert, own in zip(array, scales, strict=True)]
        return [np.stack([part[number] for part in made]) for number in range(2)]


def files_of(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files of a checkpoint, or an error if one is missing."""
    index, names = folder / INDEX, ["model.safetensors"]
    if index.exists():
        given = read_json(index).get("weight_map")
        names = list(given.values()) if isinstance(given, dict) else []
        if not names or not all(isinstance(name, str) and pathlib.Path(name).name == name for name in names):
            raise ValueError(
                f'{index}: "weight_map" must give a file in this folder for each tensor. Copy the file again.'
            )
    files = [folder / name for name in sorted(set(names))]
    if missing := [file.name for file in files if not file.exists()]:
        raise FileNotFoundError(f"{folder} has no {', '.join(missing)}. Copy what is missing.")
    return files


def read_headers(folder: pathlib.Path) -> Iterator[tuple[pathlib.Path, bytes, list[Tensor]]]:
    """(file, the bytes before its tensors, its tensors in the order of their bytes) of each file of a checkpoint."""
    for file in files_of(folder):
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
        yield file, first + text, sorted(tensors, key=lambda tensor: (tensor.start, tensor.end))


def stored_in(tensors: list[Tensor], raw: bool, wrong: list[str]) -> dict[str, Stored]:
    """Tensors by the names of what they hold; `wrong` collects those that cannot be read; `raw` keeps float8."""
    by_name: dict[str, Tensor] = {}
    for tensor in tensors:
        if tensor.name in by_name:
            wrong.append(f"{tensor.name} is in {by_name[tensor.name].file.name} and in {tensor.file.name}")
        by_name[tensor.name] = tensor
    found: dict[str, Stored] = {}
    for name, tensor in by_name.items():
        scale, base = by_name.get(f"{name}_scale_inv"), name.removesuffix("_blocks")
        exponents = by_name.get(f"{base}_scales")
        if name.endswith("_scale_inv") and name.removesuffix("_scale_inv") in by_name and not raw:
            continue  # with its values
        if name.endswith("_scales") and f"{name.removesuffix('_scales')}_blocks" in by_name:
            continue
        if tensor.dtype == "F8_E4M3" and scale is not None and len(tensor.shape) == 2:
            needed = hf_quantized.fp8_scales(tensor.shape)
            if scale.shape != needed or scale.dtype not in FLOATS:
                wrong.append(f"{scale.name} is {scale.dtype} {list(scale.shape)}, and needs {list(needed)}")
            found[name] = Stored(name, "raw", (tensor,)) if raw else Stored(name, "fp8", (tensor, scale))
        elif base != name and exponents is not None and (tensor.dtype, exponents.dtype) == ("U8", "U8"):
            if len(tensor.shape) != 4 or tensor.shape != (*exponents.shape, hf_quantized.FP4_BLOCK // 2):
                wrong.append(f"{name} is {list(tensor.shape)}, and its scales are {list(exponents.shape)}")
            else:
                found[base] = Stored(base, "mxfp4", (tensor, exponents))
        else:
            if tensor.dtype not in FLOATS:
                wrong.append(
                    f"{name} in {tensor.file.name} is {tensor.dtype}; only {', '.join(FLOATS)} are read, and F8_E4M3 "
                    "with a weight_scale_inv"
                )
            found[name] = Stored(name, "float", (tensor,))
    return found


def is_finite(array: np.ndarray) -> bool:
    if array.dtype == ml_dtypes.bfloat16:  # numpy's own test of it is slow
        return not ((array.view(np.uint16) & 0x7F80) == 0x7F80).any()
    return bool(np.isfinite(array.astype(np.float32) if array.dtype.itemsize == 1 else array).all())


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
