"""Gluon kernels called from JAX through jax-triton. Imported only where such a kernel is called.

jax-triton 0.4 is loaded a second time here, as a module of our own, and corrected in four places. Other users of jax-triton in the process have the library as
it is. The corrections use private names of it, so `device.gluon_missing` refuses other versions. Each goes away when upstream has it.
"""

import dataclasses
import functools
import importlib.util
import re
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import jax_triton.triton_lib
from jax.interpreters import partial_eval

from jaxops._lib.manual_axes import vary_as


class _AllWarps:
    """`gl.warp_specialize` adds warps to the `num_warps` of a launch. jax-triton launches `num_warps`; the total is in the PTX."""

    def __init__(self, library):
        self._library = library

    def __getattr__(self, name):
        return getattr(self._library, name)

    def TritonKernel(self, name, num_warps, num_ctas, shared, ptx, *rest):
        threads = re.search(r"\.reqntid\s+(\d+)", ptx if isinstance(ptx, str) else ptx.decode())
        return self._library.TritonKernel(
            name, int(threads[1]) // 32 if threads else num_warps, num_ctas, shared, ptx, *rest
        )


class _GluonPasses:
    """jax-triton runs Triton's layout passes on Gluon IR, whose layouts are explicit: stores then go through shared memory once more. This skips them."""

    def __init__(self, backend):
        self._backend = backend

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def make_ttir(self, module, metadata, options, capability):
        return module

    def make_ttgir(self, module, metadata, options, capability):
        return self._backend.gluon_to_ttgir(module, metadata, options, capability)


def _corrected(upstream: ModuleType) -> ModuleType:
    """A copy of jax-triton's module that launches all warps, compiles Gluon as Gluon, and whose calls JAX may drop where nothing reads their results."""
    spec = importlib.util.find_spec(upstream.__name__)
    assert spec is not None
    assert spec.loader is not None
    own = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own)
    compile_ttir = own.compile_ttir_inplace

    def compile_inplace(module, backend, options, target):
        if "ttg.num-warps" not in str(module):  # Triton's own language: no layouts yet
            return compile_ttir(module, backend, options, target)
        return own.compile_ttir_to_ptx_inplace(module, _GluonPasses(backend), options, target.arch)

    own.compile_ttir_inplace = compile_inplace
    own.triton_kernel_call_lib = _AllWarps(own.triton_kernel_call_lib)
    # jax-triton's rule keeps calls that nothing reads, and takes two arguments where JAX 0.12 passes three. JAX's default rule serves.
    del partial_eval.dce_rules[own.triton_kernel_call_p]
    return own


triton_lib = _corrected(jax_triton.triton_lib)
TensorDescriptor = triton_lib.TensorDescriptor


def row_windows(x: jax.Array, block: tuple[int, int], layout) -> TensorDescriptor:
    """A TMA descriptor of x[rows, columns] as overlapping windows of block[0] rows: [first row of the window, row in it, column].

    A box that starts late in a window that ends where a group does is cut off there: what lies behind is not read (zeros come instead) and not written. So
    no load or store of a group's last rows needs a mask, or a descriptor of its own.
    """
    (rows, columns), height = x.shape, block[0]
    shape = (max(rows - height + 1, 1), min(height, rows), columns)
    step = columns if rows > height else rows * columns  # one window has none after it
    return TensorDescriptor(x, shape, (step, columns, 1), (1, *block), layout)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["first"], meta_fields=["block", "layout", "result", "windows"]
)
@dataclasses.dataclass(frozen=True)
class OutTile:
    """Stands, as an operand, for a TMA descriptor of a result; what a call with it gives is in the same memory.

    Attributes:
      block: rows and columns of what one store writes.
      layout: of the shared memory that it is stored from.
      first: what stands there before, of the result's shape and dtype; None for anything.
      result: which one of the results.
      windows: whether it is described as `row_windows`.
    """

    block: tuple[int, int]
    layout: Any
    first: jax.Array | None = None
    result: int = 0
    windows: bool = False


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Scratch:
    """Stands, as an operand, for an array that the kernel also writes to, and that nobody reads afterwards."""

    array: jax.Array


def triton_call(*operands, kernel, out_type, grid: int, name: str, **named) -> Any:
    """One launch on a Hopper GPU; its results' pointers are the parameters of the kernel that are not given, in their order.

    `jax_triton.triton_call` makes TMA descriptors of operands only. One that the kernel builds itself would take memory from the driver at every launch,
    which CUDA graphs refuse. So where an operand is an `OutTile`, its descriptor is that of an array, uninitialised or what it brings, whose memory
    becomes the result's.

    Args:
      operands, named: values of the kernel's parameters, in order and by name: arrays, TensorDescriptors, at most one OutTile a result, at most
        one Scratch, None, numbers, constants.
      out_type: `out_struct` of the result; or a tuple of them, for a tuple of results.
      grid: how many programs.
      name: what profilers show.

    Raises:
      TypeError: more or fewer parameters given than all but the results'.
    """
    function = triton_lib.TritonFunction(kernel)
    values = dict(function.signature.bind_partial(*operands, **named).arguments)
    missing = [parameter for parameter in function.param_names if parameter not in values]
    results = out_type if isinstance(out_type, tuple) else (out_type,)
    if len(missing) != len(results) or set(missing) & set(function.constexpr_param_names):
        pointers = "the result's pointer" if len(results) == 1 else f"the {len(results)} results' pointers"
        raise TypeError(
            f"{function.name} needs all of its parameters but {pointers}; these are not given: {', '.join(missing) or 'none'}."
        )
    # It passes the operands' buffers and then the results', whatever stands between the parameters.
    last = max(
        (i for i, name in enumerate(function.param_names) if any(map(_is_buffer, _operands(values.get(name))))),
        default=-1,
    )
    if last > function.param_names.index(missing[0]):
        raise TypeError(
            f"{function.name} takes {function.param_names[last]}, an array, after the pointer of a result, {missing[0]}: it must come before."
        )
    constants = tuple(
        (parameter, values.pop(parameter)) for parameter in list(values) if parameter in function.constexpr_param_names
    )
    arguments = [
        triton_lib._OutputPlaceholder(missing.index(parameter))
        if parameter in missing
        else jax.tree.map(triton_lib._StaticArg.maybe_wrap, values[parameter])
        for parameter in function.non_constexpr_param_names
    ]
    found = _launch(
        arguments,
        kernel,
        tuple((tuple(result.shape), jnp.dtype(result.dtype)) for result in results),
        grid,
        name,
        constants,
    )
    # The primitive says of its results that they vary over no axis of a mesh: the type that the caller says is what check_vma needs.
    found = tuple(vary_as(result, x) for result, x in zip(results, found, strict=True))
    return found if isinstance(out_type, tuple) else found[0]


def _is_buffer(operand) -> bool:
    return isinstance(operand, (OutTile, Scratch, TensorDescriptor)) or hasattr(operand, "shape")


def _operands(argument) -> list:
    """Of one parameter, which may be a tuple; None is none."""
    return jax.tree.leaves(
        argument, is_leaf=lambda x: isinstance(x, (OutTile, Scratch, TensorDescriptor, triton_lib._StaticArg))
    )


# Compiled as a whole where the call is not under jit: else the uninitialised array would be another program's result, and copied.
@functools.partial(jax.jit, static_argnums=range(1, 6), inline=True)
def _launch(arguments: list, kernel, results: tuple, grid: int, name: str, constants: tuple) -> list[jax.Array]:
    aliases, types = {}, [jax.ShapeDtypeStruct(*result) for result in results]
    # XLA may read an operand that is a slice, of layers' stacked weights say, where it lies, and write a result into such a slice (dynamic-slice fusion). What
    # it makes of the call then no longer says that results lie in operands' memory: what TMA stores, through a descriptor of that, would be lost. It does not
    # reach through a barrier.
    arguments = jax.lax.optimization_barrier(arguments)
    for place, argument in enumerate(arguments):
        number = len(_operands(arguments[:place]))
        if isinstance(argument, OutTile):
            aliases[number] = argument.result
            there = jax.lax.empty(*results[argument.result]) if argument.first is None else argument.first
            describe = row_windows if argument.windows else TensorDescriptor.from_array
            arguments[place] = describe(there, argument.block, argument.layout)
        elif isinstance(argument, Scratch):
            aliases[number] = len(types)
            arguments[place] = argument.array
            types.append(jax.ShapeDtypeStruct(argument.array.shape, argument.array.dtype))
    arrays, tree = jax.tree.flatten(arguments)
    # Fusion is said, because Triton 3.9 warns where it is not and 3.10 will choose otherwise: sum + product * scale is one instruction.
    options = {"num_warps": 4, "num_stages": 3, "num_ctas": 1, "enable_fp_fusion": True}
    found = triton_lib.triton_kernel_call_p.bind(
        *arrays, fn=kernel, name=name, in_tree=tree, out_shapes=tuple(types), grid=(grid,), compute_capability=90,
        backend_options=triton_lib.FrozenDict(options), input_output_aliases=triton_lib.FrozenDict(aliases), zeroed_outputs=(), serialized_metadata=b"",
        cost_estimate=None, has_side_effect=False, metaparams=triton_lib.FrozenDict(dict(constants)),
    )  # fmt: skip
    return list(jax.lax.optimization_barrier(tuple(found[: len(results)])))
