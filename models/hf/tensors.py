"""The tensors of a checkpoint as floating-point arrays, whatever they are stored as."""

import dataclasses
import math
import pathlib
from collections.abc import Iterator
from typing import Literal

import ml_dtypes
import numpy as np

from models.hf import quantized as hf_quantized
from models.hf.files import DTYPES, FLOATS, Tensor, files_of, header_of


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor as it is stored.

    Attributes:
      kind: "float" for one tensor; "raw" for float8 that stays so; "fp8" and "mxfp4" for values and scales.
      tensors: one or two.
    """

    name: str
    kind: Literal["float", "raw", "fp8", "mxfp4"]
    tensors: tuple[Tensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.tensors[0].shape
        return (shape[0], math.prod(shape[2:]) * 2, shape[1]) if self.kind == "mxfp4" else shape

    def read(self, at: int | None = None) -> np.ndarray:
        """The tensor, or only number `at` of its first axis: float32, but bfloat16, float16 and raw float8 as they are.

        Raises:
          ValueError: the file ends before.
        """
        found = [tensor.read(at) for tensor in self.tensors]
        if self.kind == "fp8":
            return hf_quantized.from_fp8(*found)
        return hf_quantized.from_mxfp4(*found) if self.kind == "mxfp4" else found[0]

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


def read_headers(folder: pathlib.Path) -> Iterator[tuple[pathlib.Path, bytes, list[Tensor]]]:
    """(file, the bytes before its tensors, its tensors) of a checkpoint.

    Raises:
      FileNotFoundError, ValueError: as `files_of` and `header_of`.
    """
    for file in files_of(folder):
        yield file, *header_of(file)


def stored_in(tensors: list[Tensor], raw: bool, wrong: list[str]) -> dict[str, Stored]:
    """Tensors by the names of what they hold; `wrong` collects those that cannot be read.

    Args:
      raw: whether float8 weights and their scales stay as they are.
    """
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
