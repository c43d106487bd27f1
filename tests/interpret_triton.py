"""Runs a Triton kernel (not a Gluon one) on the CPU by Triton's interpreter, over NumPy arrays and without torch."""

import inspect
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def _value(x: Any) -> Any:
    if not isinstance(x, np.ndarray):
        return interpreter._implicit_cvt(x)
    assert x.dtype == np.int32
    assert x.flags.c_contiguous
    return tl.tensor(
        interpreter.TensorHandle(np.array([x.ctypes.data], np.uint64), tl.pointer_type(tl.int32)),
        tl.pointer_type(tl.int32),
    )


def interpret(kernel, programs: int, *arguments, **named) -> None:
    """Runs `programs` programs of a `triton.jit` function, one after another.

    Args:
      arguments, named: the kernel's: int32 arrays for pointers (written in place), numbers, constants.
    """
    given = inspect.signature(kernel.fn).bind(*arguments, **named).arguments
    constants = {name for name, x in inspect.signature(kernel.fn).parameters.items() if x.annotation is tl.constexpr}
    values = {name: x if name in constants else _value(x) for name, x in given.items()}
    scope = interpreter._patch_lang(kernel.fn)
    try:
        interpreter.interpreter_builder.set_grid_dim(programs, 1, 1)
        for i in range(programs):
            interpreter.interpreter_builder.set_grid_idx(i, 0, 0)
            kernel.rewrite()(**values)
    finally:
        scope.restore()
