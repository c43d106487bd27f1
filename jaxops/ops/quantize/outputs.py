"""What a cast reads and writes: its sources, the tensors computed from them, and the format and layouts of each result.
How the passes of `quantize_computed` are cut into programs."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax

from jaxops._lib.arrays.powers import power_of_2
from jaxops._lib.numerics.fp8 import BLOCK, Quantized, scale_and_factor
from jaxops.ops.quantize.plan import WHOLE_ROW, Tiles

_WIDTHS = (512, 256)  # columns of a tile without a column layout, where they divide a row


@dataclasses.dataclass(frozen=True)
class Format:
    """How one tensor is quantized.

    Attributes:
      scaling: as in `jaxops.quantize`.
      dtype: name of an FP8 dtype.
      pow2: scales are powers of two.
    """

    scaling: Literal["tensorwise", "rowwise", "block_1x128", "block_128x128"] = "block_1x128"
    dtype: str = "float8_e4m3fn"
    pow2: bool = False

    def scale_and_factor(self, amax: jax.Array, is_bfloat16: bool = False) -> tuple[jax.Array, jax.Array]:
        """(scale, factor) of what has the largest magnitude amax."""
        return scale_and_factor(amax, self.dtype, self.pow2, is_bfloat16)


class Halves(NamedTuple):
    """One array [R, 2 * C] as two operands [R, C]: its left and its right half."""

    x: jax.Array


class Gathered(NamedTuple):
    """Rows of x [T, C] as an operand [R, C]: row r is x[indices[r]], indices are int32 and clamped to [0, T)."""

    x: jax.Array
    indices: jax.Array


class Beside(NamedTuple):
    """Two matrices (or stacks) as an operand: the columns of x, then those of right."""

    x: jax.Array
    right: jax.Array


# Matrices [R, C], a stack [G, R, C], vectors [R], and the sources above.
Operands = tuple[Any, ...]


def size_of(operands: Operands) -> tuple[int, int, int]:
    """G, R and C of the tensors that are cast; G is 1 without a stack."""
    for operand in operands:
        if isinstance(operand, Halves):
            return 1, operand.x.shape[0], operand.x.shape[1] // 2
        if isinstance(operand, Gathered):
            return 1, operand.indices.shape[0], operand.x.shape[-1]
        x = operand.x if isinstance(operand, Beside) else operand
        if x.ndim > 1:
            more = operand.right.shape[-1] if isinstance(operand, Beside) else 0
            return (1, *x.shape)[-3], x.shape[-2], x.shape[-1] + more
    raise ValueError("one of the operands must be a matrix [R, C], or Halves of one [R, 2 * C].")


def itemsize_of(operands: Operands) -> int:
    """Bytes of a number of the widest matrix."""
    matrices = [operand[0] if isinstance(operand, tuple) else operand for operand in operands]
    return max(x.dtype.itemsize for x in matrices if x.ndim > 1)


def kinds_of(operands: Operands) -> tuple[str, ...]:
    """The class of each source, "vector" or "matrix"."""
    names = {True: "vector", False: "matrix"}
    return tuple(type(x).__name__ if isinstance(x, tuple) else names[x.ndim == 1] for x in operands)


@dataclasses.dataclass(frozen=True)
class Output:
    """How one result is written: `parts` computed tensors [R, C], side by side [R, parts * C] in the row layout.

    Attributes:
      form: of the values; block_128x128 of one tensor that is not computed. All parts share a tensorwise scale.
      layouts: "row", "col", "both", or "none". A column layout is that of one part.
      parts: how many of the computed tensors.
      plain: also writes each part as it is, in the dtype to which it is rounded.
    """

    form: Format = Format()
    layouts: Literal["row", "col", "both", "none"] = "row"
    parts: int = 1
    plain: bool = False

    @property
    def scaling(self) -> str:
        return self.form.scaling

    @property
    def row(self) -> bool:
        return self.layouts in ("row", "both")

    @property
    def col(self) -> bool:
        return self.layouts in ("col", "both")

    @property
    def measured(self) -> bool:
        """Whether the largest magnitude is known before the cast: given, or found by a pass."""
        return self.scaling == "tensorwise" and self.layouts != "none"


class Computed(NamedTuple):
    """One result.

    Attributes:
      row: of [R, parts * C], values and scales only; or None.
      cols: of each part [R, C], values_t and scales_t only; or ().
      plain: each part [R, C]; or ().
    """

    row: Quantized | None = None
    cols: tuple[Quantized, ...] = ()
    plain: tuple[jax.Array, ...] = ()


@dataclasses.dataclass(frozen=True)
class Computation:
    """What is static in a call, beside shapes and dtypes.

    Attributes:
      compute: see `quantize_computed`; None casts the one operand as it is.
      kinds: see `kinds_of`, of the operands.
      outputs: the results, in the order of the tensors that compute returns.
      dtype: name of the dtype to which computed tensors are rounded first.
      sums: how many tensors compute returns whose rows are added up.
    """

    compute: Callable | None
    kinds: tuple[str, ...]
    outputs: tuple[Output, ...]
    dtype: str
    sums: int = 0

    def steps(self) -> list[tuple[int, range]]:
        """Number of its output, and parts of this one, of the tensors that are cast together: they share a scale."""
        steps = []
        for n, output in enumerate(self.outputs):
            together = output.scaling == "rowwise" and output.row
            steps += [(n, range(output.parts))] if together else [(n, range(i, i + 1)) for i in range(output.parts)]
        return steps

    def tensors(self) -> list[tuple[int, int]]:
        """Number of its output, and its number among this one's parts, of each tensor that compute returns."""
        return [(n, part) for n, output in enumerate(self.outputs) for part in range(output.parts)]

    @property
    def col(self) -> bool:
        return any(output.col for output in self.outputs)

    @property
    def measured(self) -> tuple[int, ...]:
        """Numbers of the outputs whose largest magnitude is known before the cast."""
        return tuple(n for n, output in enumerate(self.outputs) if output.measured)

    def flops_of_element(self, known: bool = False) -> int:
        """About four operations to compute each tensor, its magnitude and a comparison. Of a tensor that is cast as it
        is, the last two unless its scale is known, and in each layout a product with the factor."""
        if self.compute is not None:
            return 6 * len(self.tensors())
        return 2 * (not known) + self.outputs[0].row + self.outputs[0].col

    def in_one_pass(self, C: int) -> bool:
        """Whether the kernel casts tensors of C columns: a program's tile holds all that shares a scale."""
        for output in self.outputs:
            if output.scaling == "rowwise" and (output.col or (output.row and (self.col or C > WHOLE_ROW))):
                return False
            if output.scaling == "block_1x128" and output.row and output.parts > 1 and C % BLOCK:
                return False  # a block of the row layout would hold columns of two parts
        return True


def _elements(computation: Computation) -> int:
    """Of a tile of 8 warps."""
    return 8192 if len(computation.tensors()) == 1 else 4096


def cast_tiles(computation: Computation, C: int) -> Tiles:
    """32 elements a thread, or 16 of each of several tensors; with 128 rows and several tensors 32 of each.

    Column layouts want patches of 64 rows, though each thread then holds more. H200, 2026-11-26, the gated unit's
    backward of 131,072 x 512: 370 us with block scales, with patches of 32 rows 388; tensorwise 348 with its maxima.
    """
    rows = [output.scaling for output in computation.outputs if output.row]
    elements = _elements(computation)
    if computation.col and "block_1x128" in rows:
        return Tiles(BLOCK, BLOCK, 64, 2, 16)
    if computation.col:
        return Tiles(BLOCK, BLOCK // 2, 64, 1, 8)  # two programs run at once on a multiprocessor
    if "rowwise" in rows:
        cols = max(BLOCK, power_of_2(C))
        return Tiles(max(1, elements // cols), cols, warps=max(8, 8 * cols // elements))
    return amax_tiles(computation, C, 528)


def amax_tiles(computation: Computation, C: int, programs: int) -> Tiles:
    cols = next((width for width in _WIDTHS if C % width == 0), BLOCK)
    return Tiles(_elements(computation) // cols, cols, warps=8, programs=programs)
