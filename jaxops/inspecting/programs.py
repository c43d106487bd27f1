"""Compiled programs: time, kernels, and how near they come to the card's ceilings."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxops._lib.planning.device import Device
from jaxops.profiling.costs import cost_of
from jaxops.profiling.device_times import device_times_us, kernel_times_us, wall_times_us
from jaxops.profiling.hlo import parse
from jaxops.profiling.machine import Ceilings, ceilings

MOST_CALLS, MOST_US, MOST_BYTES = 20, 2e5, 4e9  # of a measurement: CUPTI's keeps the results of all its calls


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel that one call launches, and its microseconds."""

    name: str
    us: float


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled pass.

    Attributes:
      name: "forward" (without gradients), or "backward" (the gradients from the cotangents and the residuals).
      compile_s: seconds to trace, lower and compile; less where JAX's compilation cache has the program.
      us: median microseconds of a call: on a GPU device time, the sum of its kernels, elsewhere wall time. None where
        nothing ran.
      on_device: whether `us` is device time.
      kernels: in the order of the launches; empty without a GPU.
      flops, bytes: of a call: what jaxops' kernels state, plus XLA's count of everything else. None where the kernels
        are interpreted.
      silent: targets of custom calls that nobody can count.
      least_us: the time of that work at the card's ceilings; None without a GPU.
      dtype: of the dense rate in `least_us`.
    """

    name: str
    compile_s: float
    us: float | None
    on_device: bool
    kernels: tuple[Kernel, ...]
    flops: float | None
    bytes: float | None
    silent: tuple[str, ...]
    least_us: float | None
    dtype: str

    @property
    def tflops(self) -> float | None:
        return self.flops / self.us / 1e6 if self.flops is not None and self.us else None

    @property
    def gbps(self) -> float | None:
        return self.bytes / self.us / 1e3 if self.bytes is not None and self.us else None

    @property
    def of_ceiling(self) -> float | None:
        """Share of the ceiling that binds: of the card's copy bandwidth, or of its dense rate."""
        return self.least_us / self.us if self.least_us is not None and self.us else None


def compiled(function: Callable, *args: Any) -> tuple[Callable, float]:
    """(`function`, compiled for these arguments, seconds)."""
    start = time.perf_counter()
    made = jax.jit(function).lower(*args).compile()
    return made, time.perf_counter() - start


@dataclasses.dataclass(frozen=True)
class Setting:
    """What programs run on.

    Attributes:
      card: the ceilings of a GPU, if known.
      dtype: of the products' operands.
      interpreted: kernels run in Pallas' interpreter, whose own work XLA would count.
    """

    device: Device
    card: Ceilings | None
    dtype: str
    interpreted: bool


def measured(name: str, program: tuple[Callable, float], args: tuple, setting: Setting) -> Program:
    """Calls a program, from `compiled`, several times."""
    call, compile_s = program
    flops, moved, silent = (None, None, ()) if setting.interpreted else work_of(call)
    on_gpu, card, kernels, times = setting.device.platform == "gpu", setting.card, (), []
    if on_gpu:
        result = call(*args)
        kernels = tuple(Kernel(*each) for each in kernel_times_us(call, *args))
        one_us = sum(kernel.us for kernel in kernels)
        result_bytes = sum(x.nbytes for x in jax.tree.leaves(result))
        del result
        if kernels:
            count = int(min(MOST_CALLS, MOST_US / max(one_us, 1.0), MOST_BYTES / max(result_bytes, 1)))
            times = device_times_us(call, *args, iterations=max(1, count))
    else:
        times = wall_times_us(call, *args, iterations=3)
    us = float(np.median(times)) if times else None
    least = None if card is None or flops is None or moved is None else least_us(card, flops, moved, setting.dtype)
    return Program(name, compile_s, us, on_gpu, kernels, flops, moved, silent, least, setting.dtype)


def work_of(call: Any) -> tuple[float, float, tuple[str, ...]]:
    """(FLOPs, bytes, custom calls that state neither) of a compiled program, of one iteration of its loops."""
    module, flops, moved, silent = parse(call.as_text()), 0.0, 0.0, []
    for name, (found, _) in module.launched.items():
        cost = cost_of(name, module)
        flops, moved = flops + (cost.flops or 0), moved + (cost.bytes or 0)
        if cost.flops is None or cost.bytes is None:
            silent.append(found.target or found.opcode)
        if found.opcode == "while":
            silent.append("a loop, of which one iteration counts")
    return flops, moved, tuple(dict.fromkeys(silent))


def least_us(card: Ceilings, flops: float, moved: float, dtype: str) -> float:
    """At the ceiling that binds; of the memory alone, where no products of this dtype were measured."""
    return card.least_us(flops if card.product_tflops(dtype) else 0, moved, dtype)


def card_of(device: Any) -> tuple[Ceilings | None, str]:
    """(a GPU's ceilings, or why there are none). They take seconds where this machine has not measured them yet."""
    try:
        return ceilings(device), ""
    except (MemoryError, RuntimeError) as error:
        return None, f"no share of the card's ceilings: {error}"
