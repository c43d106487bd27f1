"""Stand-ins for the modules that jaxops' kernels import, and copies of the kernels' modules that have imported them.

So the simulator needs no Triton, and beside an installed one it leaves the real modules alone.
"""

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

import jaxops
from tests.gluon_simulator import hopper, language, launch, layouts
from tests.gluon_simulator.shared import Buffer
from tests.gluon_simulator.tensors import TYPES, Tensor, constexpr, pointer_type


def _module(name: str, **names: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(names, __path__=[])
    return module


class PropagateNan:
    ALL, NONE = "all", "none"


class TritonFunction:
    def __init__(self, kernel: language.Jit):
        self.name, self.signature = kernel.__name__, kernel.signature
        self.param_names = list(kernel.signature.parameters)
        self.constexpr_param_names = [
            name for name, parameter in kernel.signature.parameters.items() if parameter.annotation is constexpr
        ]
        self.non_constexpr_param_names = [x for x in self.param_names if x not in self.constexpr_param_names]


class _Call:
    """jax-triton's primitive: binds as a callback that simulates the launch."""

    def bind(
        self, *arrays, fn, name, in_tree, out_shapes, grid, backend_options, input_output_aliases, metaparams, **_
    ):
        run = functools.partial(
            launch.run, fn, name, in_tree, tuple((x.shape, x.dtype) for x in out_shapes), grid[0],
            backend_options["num_ctas"], dict(input_output_aliases), dict(metaparams),
        )  # fmt: skip
        return jax.pure_callback(run, list(out_shapes), *arrays, vmap_method="sequential")


class _TritonLib:
    """Loads the stand-in for jax-triton's module; launch_triton.py loads it once more, to change it."""

    @staticmethod
    def create_module(_spec):
        return None

    @staticmethod
    def exec_module(module):
        call = _Call()
        partial_eval.dce_rules[call] = None
        module.__dict__.update(
            TensorDescriptor=launch.TensorDescriptor, TritonFunction=TritonFunction, _StaticArg=launch.StaticArg,
            _OutputPlaceholder=launch.OutputPlaceholder, triton_kernel_call_p=call, FrozenDict=dict,
            compile_ttir_inplace=None, triton_kernel_call_lib=None, _JAX_TRITON_DUMP_DIR="nothing is compiled",
        )  # fmt: skip


def _triton_lib() -> types.ModuleType:
    spec = importlib.machinery.ModuleSpec("jax_triton.triton_lib", _TritonLib)
    module = importlib.util.module_from_spec(spec)
    _TritonLib.exec_module(module)
    return module


def _stand_ins() -> dict[str, types.ModuleType]:
    gl = _module(
        "triton.experimental.gluon.language",
        **language.NAMES,
        **{name: getattr(layouts, name) for name in (
            "BlockedLayout", "SliceLayout", "NVMMADistributedLayout", "DotOperandLayout", "NVMMASharedLayout",
            "SwizzledSharedLayout")},
        **TYPES, static_range=language._range, constexpr=constexpr,
        pointer_type=pointer_type, tensor=Tensor, shared_memory_descriptor=Buffer,
    )  # fmt: skip
    mbarrier = _module(
        "mbarrier", allocate_mbarrier=hopper.allocate_mbarrier, MBarrierLayout=layouts.MBarrierLayout, init=hopper.init,
        wait=hopper.wait, arrive=hopper.arrive, expect=hopper.expect,
    )  # fmt: skip
    tma = _module(
        "tma", async_load=hopper.async_load, async_store=hopper.async_store, async_atomic_add=hopper.async_atomic_add,
        store_wait=hopper.store_wait,
    )  # fmt: skip
    gluon = _module(
        "triton.experimental.gluon", language=gl, jit=language.jit, aggregate=language.aggregate,
        constexpr_function=lambda function: function,
    )  # fmt: skip
    copies = _module("async_copy", async_load=hopper.copy_to_shared, mbarrier_arrive=hopper.mbarrier_arrive)
    tl = _module("triton.language", **gl.__dict__ | {"PropagateNan": PropagateNan})
    triton = _module("triton", jit=language.jit, language=tl)
    return {
        "triton": triton, "triton.language": tl, "triton.experimental": _module("triton.experimental", gluon=gluon),
        "triton.experimental.gluon": gluon, "triton.experimental.gluon.language": gl,
        "triton.experimental.gluon.language.nvidia": _module("nvidia"),
        "triton.experimental.gluon.language.nvidia.ampere": _module("ampere", async_copy=copies),
        "triton.experimental.gluon.language.nvidia.hopper": _module(
            "hopper", mbarrier=mbarrier, tma=tma, fence_async_shared=hopper.fence_async_shared,
            warpgroup_mma=hopper.warpgroup_mma, warpgroup_mma_wait=hopper.warpgroup_mma_wait,
        ),
    }  # fmt: skip


def _undefined(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """In place of uninitialised memory: NaN, or -1."""
    return jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.floating) else -1, dtype)


def _is_kernel(name: str) -> bool:
    return name.startswith("jaxops.") and name.endswith("_triton")


def kernel_modules() -> list[str]:
    root = pathlib.Path(jaxops.__file__).parent
    files = sorted(root.rglob("*_triton.py"))
    return [".".join(("jaxops", *file.relative_to(root).with_suffix("").parts)) for file in files]


@contextlib.contextmanager
def in_place_of(found: dict[str, types.ModuleType]) -> Iterator[None]:
    """sys.modules and the packages' attributes with these modules instead of the real ones."""
    names = {name for name in sys.modules if name.partition(".")[0] in ("triton", "jax_triton") or _is_kernel(name)}
    before = {name: sys.modules.pop(name) for name in names}
    attributes = {name: _attribute(name) for name in kernel_modules()}
    try:
        sys.modules.update(found)
        for name, module in found.items():
            if _is_kernel(name):
                _set_attribute(name, module)
        yield
    finally:
        for name in [x for x in sys.modules if x.partition(".")[0] in ("triton", "jax_triton") or _is_kernel(x)]:
            del sys.modules[name]
        sys.modules.update(before)
        for name, module in attributes.items():
            _set_attribute(name, module)


def _attribute(name: str) -> types.ModuleType | None:
    package, _, last = name.rpartition(".")
    return getattr(sys.modules.get(package), last, None)


def _set_attribute(name: str, module: types.ModuleType | None) -> None:
    package, _, last = name.rpartition(".")
    if module is not None:
        setattr(importlib.import_module(package), last, module)
    elif hasattr(sys.modules.get(package), last):
        delattr(sys.modules[package], last)


@functools.cache
def simulated_modules() -> dict[str, types.ModuleType]:
    """The stand-ins, and jaxops' kernels on top of them."""
    found = _stand_ins()
    lib = _triton_lib()
    found["jax_triton"] = _module("jax_triton", triton_lib=lib)
    found["jax_triton.triton_lib"] = lib
    with in_place_of(found):
        for name in kernel_modules():
            importlib.import_module(name)
        found |= {name: sys.modules[name] for name in kernel_modules()}
    found["jaxops._lib.gluon.launch_triton"].allocated = _undefined
    return found
