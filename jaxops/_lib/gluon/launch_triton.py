"""Triton and Gluon kernels called from JAX through jax-triton. Imported only where such a kernel is called.

jax-triton 0.4 is loaded a second time here, as a module of our own, and corrected in four places;
compilation_triton.py changes when and how often it compiles. Other users of jax-triton in the process keep the library
as it is. The corrections use its private names, so `device.gluon_missing` refuses other versions. Each correction goes
away when upstream has it.
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

from jaxops._lib.arrays.manual_axes import vary_as
from jaxops._lib.gluon import compilation_triton
from jaxops._lib.planning.costs import Cost, allocated


class _AllWarps:
    """Launches all warps. `gl.warp_specialize` adds warps to a launch's `num_warps`, but jax-triton launches
    `num_warps`; the PTX has the total."""

    def __init__(self, library):
        self._library = library

    def __getattr__(self, name):
        return getattr(self._library, name)

    def TritonKernel(self, name, num_warps, num_ctas, shared, ptx, *rest):
        threads = re.search(r"\.reqntid\s+(\d+)", ptx if isinstance(ptx, str) else ptx.decode())
        warps = int(threads[1]) // 32 if threads else num_warps
        return self._library.TritonKernel(name, warps, num_ctas, shared, ptx, *rest)


class _GluonPasses:
    """Skips Triton's layout passes. jax-triton runs them on Gluon IR, whose layouts are explicit; stores then took a
    detour through shared memory."""

    def __init__(self, backend):
        self._backend = backend

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def make_ttir(self, module, metadata, options, capability):
        return module

    def make_ttgir(self, module, metadata, options, capability):
        return self._backend.gluon_to_ttgir(module, metadata, options, capability)


def _corrected(upstream: ModuleType) -> ModuleType:
    """A copy of jax-triton's module that launches all warps and compiles Gluon as Gluon, and whose calls JAX's
    dead-code elimination may drop."""
    spec = importlib.util.find_spec(upstream.__name__)
    assert spec is not None
    assert spec.loader is not None
    own = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own)
    compile_ttir = own.compile_ttir_inplace

    def compile_inplace(module, backend, options, target):
        if module.get_int_attr("ttg.num-warps") is None:  # Triton's own language, which has no layouts yet
            return compile_ttir(module, backend, options, target)
        return own.compile_ttir_to_ptx_inplace(module, _GluonPasses(backend), options, target.arch)

    own.compile_ttir_inplace = compile_inplace
    own.triton_kernel_call_lib = _AllWarps(own.triton_kernel_call_lib)
    # jax-triton's rule keeps calls without users, and takes two arguments where JAX 0.12 passes three. JAX's default
    # serves.
    del partial_eval.dce_rules[own.triton_kernel_call_p]
    compilation_triton.install(own)
    return own


triton_lib = _corrected(jax_triton.triton_lib)
TensorDescriptor = triton_lib.TensorDescriptor


def row_windows(x: jax.Array, block: tuple[int, int], layout, halves: int = 1) -> TensorDescriptor:
    """A TMA descriptor of x[rows, columns] as overlapping windows of block[0] rows: [first row of the window, row in
    it, column].

    One window starts at each row. A box inside a window that ends where a group ends is cut off there: loads fill in
    zeros behind it, stores write nothing. So the last rows of a group need no mask and no descriptor of their own.

    halves: 2: a row's columns are two halves, and a box lies in one: windows 2 i and 2 i + 1 are those of row i.
    """
    (rows, columns), height = x.shape, block[0]
    width = columns // halves
    shape = (halves * max(rows - height + 1, 1), min(height, rows), width)
    step = width if rows > height or halves > 1 else rows * columns  # a single window has no next one
    return TensorDescriptor(x, shape, (step, columns, 1), (1, *block), layout)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["before"], meta_fields=["block", "layout", "result", "halves"]
)
@dataclasses.dataclass(frozen=True)
class OutTile:
    """An operand that becomes a TMA descriptor of a result.

    Attributes:
      block: of one store: rows and columns; or of the result's dimensions.
      layout: of the shared memory that is stored: for `row_windows` of one dimension more than the block, for a plain
        descriptor of as many.
      before: an array that gives its memory and contents to the result; None: uninitialised memory.
      result: number of the result.
      halves: as in `row_windows`.
    """

    block: tuple[int, ...]
    layout: Any
    before: jax.Array | None = None
    result: int = 0
    halves: int = 1


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["result"])
@dataclasses.dataclass(frozen=True)
class Scratch:
    """An operand whose memory the kernel also writes to.

    Attributes:
      result: number of the result that has this memory; None if it is not used afterwards.
    """

    array: jax.Array
    result: int | None = None


def triton_call(
    *operands,
    kernel,
    out_type,
    grid: int,
    name: str,
    flops: int,
    bytes_accessed: int | None = None,
    programs: int = 1,
    **named,
) -> Any:
    """One launch on a Hopper GPU. The results' pointers are the kernel's parameters that are not given, in their order.

    `jax_triton.triton_call` makes TMA descriptors of operands only. One made by the kernel would allocate memory in the
    driver at each launch, which CUDA graphs refuse. So an `OutTile`'s descriptor is that of an array whose memory
    becomes the result's.

    Args:
      operands, named: values of the kernel's parameters, in order and by name: arrays, TensorDescriptors, at most one
        OutTile a result, at most one Scratch, None, numbers, constants, tuples of these.
      out_type: `out_struct` of the result; a tuple of them for a tuple of results.
      grid: number of programs, or of clusters.
      programs: of a cluster, on multiprocessors beside each other.
      name: of the call, in compiled programs' texts.
      flops: see `Cost`.
      bytes_accessed: where each operand and each result once is not the least traffic. By default an OutTile's `before`
        counts as an operand that is read, an operand that several descriptors share once.

    Raises:
      TypeError: more or fewer parameters are given than all but the results'.
    """
    function = triton_lib.TritonFunction(kernel)
    values = dict(function.signature.bind_partial(*operands, **named).arguments)
    missing = [parameter for parameter in function.param_names if parameter not in values]
    results = out_type if isinstance(out_type, tuple) else (out_type,)
    if len(missing) != len(results) or set(missing) & set(function.constexpr_param_names):
        pointers = "the result's pointer" if len(results) == 1 else f"the {len(results)} results' pointers"
        raise TypeError(
            f"{function.name} needs all of its parameters but {pointers}; these are not given: "
            f"{', '.join(missing) or 'none'}."
        )
    # jax-triton passes the operands' buffers, then the results', whatever the order of the parameters.
    last = max(
        (i for i, name in enumerate(function.param_names) if any(map(_is_buffer, _operands(values.get(name))))),
        default=-1,
    )
    if last > function.param_names.index(missing[0]):
        raise TypeError(
            f"{function.name} takes {function.param_names[last]}, an array, after the pointer of a result, "
            f"{missing[0]}: it must come before."
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
    # By identity, since several descriptors may share an array.
    read = {id(array): array for value in values.values() for array in map(_array, _operands(value))}
    outputs = _launch(
        arguments,
        kernel,
        tuple((tuple(result.shape), jnp.dtype(result.dtype)) for result in results),
        grid,
        programs,
        name,
        constants,
        Cost.of(flops, read.values(), results, bytes_accessed),
    )
    # The primitive's results vary over no mesh axis; check_vma needs the caller's type.
    outputs = tuple(vary_as(result, x) for result, x in zip(results, outputs, strict=True))
    return outputs if isinstance(out_type, tuple) else outputs[0]


def _is_buffer(operand) -> bool:
    return isinstance(operand, (OutTile, Scratch, TensorDescriptor)) or hasattr(operand, "shape")


def _array(operand) -> Any:
    """The array that the kernel may read through this operand, or None."""
    if isinstance(operand, OutTile):
        return operand.before
    if isinstance(operand, Scratch):
        return operand.array
    if isinstance(operand, TensorDescriptor):
        return operand.base
    return operand if hasattr(operand, "shape") else None


def _operands(argument) -> list:
    """Leaves of one parameter, which may be a tuple; None has none."""
    return jax.tree.leaves(
        argument, is_leaf=lambda x: isinstance(x, (OutTile, Scratch, TensorDescriptor, triton_lib._StaticArg))
    )


# Under jit, since outside of it the uninitialised array would be another program's result, and copied.
@functools.partial(jax.jit, static_argnums=range(1, 8), inline=True)
def _launch(
    arguments: list, kernel, results: tuple, grid: int, programs: int, name: str, constants: tuple, cost: Cost
) -> list[jax.Array]:
    aliases, types = {}, [jax.ShapeDtypeStruct(*result) for result in results]
    # XLA may let a call read a slice (of layers' stacked weights, say) or write its result into one in place
    # (dynamic-slice fusion). The fused call no longer says that results share memory with operands, and TMA stores are
    # lost; and a slice may start at an address that TMA does not accept. Barriers prevent the fusion. Launches without
    # TMA and aliases have none, so that XLA merges equal ones: those that make work lists.
    apart = any(isinstance(x, (OutTile, Scratch, TensorDescriptor)) for each in arguments for x in _operands(each))
    if apart:
        arguments = jax.lax.optimization_barrier(arguments)
    for i, argument in enumerate(arguments):
        number = len(_operands(arguments[:i]))
        if isinstance(argument, OutTile):
            aliases[number] = argument.result
            before = allocated(*results[argument.result]) if argument.before is None else argument.before
            if argument.layout.rank > len(argument.block):
                arguments[i] = row_windows(before, argument.block, argument.layout, argument.halves)
            else:
                arguments[i] = TensorDescriptor.from_array(before, argument.block, layout=argument.layout)
        elif isinstance(argument, Scratch):
            aliases[number] = len(types) if argument.result is None else argument.result
            arguments[i] = argument.array
            if argument.result is None:
                types.append(jax.ShapeDtypeStruct(argument.array.shape, argument.array.dtype))
    arrays, tree = jax.tree.flatten(arguments)
    # enable_fp_fusion is explicit: Triton 3.9 warns without it, 3.10 will change the default.
    options = {"num_warps": 4, "num_stages": 3, "num_ctas": programs, "enable_fp_fusion": True}
    with cost.attached(), jax.named_scope(name):
        outputs = triton_lib.triton_kernel_call_p.bind(
            *arrays, fn=kernel, name=name, in_tree=tree, out_shapes=tuple(types), grid=(grid,), compute_capability=90,
            backend_options=triton_lib.FrozenDict(options), input_output_aliases=triton_lib.FrozenDict(aliases),
            zeroed_outputs=(), serialized_metadata=b"", cost_estimate=None, has_side_effect=False,
            metaparams=triton_lib.FrozenDict(dict(constants)),
        )  # fmt: skip
    outputs = outputs[: len(results)]
    return list(jax.lax.optimization_barrier(tuple(outputs)) if apart else outputs)
