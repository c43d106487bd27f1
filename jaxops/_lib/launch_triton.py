"""Gluon kernels called from JAX through jax-triton. Imported only where such a kernel is called: jax-triton needs Python >= 3.12.

Three things that jax-triton 0.4 does otherwise; each correction goes away when upstream has it.
"""

import re
from typing import Any

import jax
import jax_triton
from jax_triton import triton_lib

TensorDescriptor = jax_triton.TensorDescriptor


class _AllWarps:
    """It launches the `num_warps` that it was told; `gl.warp_specialize` adds warps, whose total stands in the PTX."""

    def __init__(self, library):
        self._library = library

    def __getattr__(self, name):
        return getattr(self._library, name)

    def TritonKernel(self, name, num_warps, num_ctas, shared, ptx, *rest):
        threads = re.search(r"\.reqntid\s+(\d+)", ptx if isinstance(ptx, str) else ptx.decode())
        return self._library.TritonKernel(name, int(threads[1]) // 32 if threads else num_warps, num_ctas, shared, ptx, *rest)


class _GluonPasses:
    """It runs Triton's passes, which choose layouts, over Gluon's kernels, which have chosen theirs: stores then went through shared memory once more."""

    def __init__(self, backend):
        self._backend = backend

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def make_ttir(self, module, metadata, options, capability):
        return module

    def make_ttgir(self, module, metadata, options, capability):
        return self._backend.gluon_to_ttgir(module, metadata, options, capability)


def _compile(module, backend, options, target, upstream=triton_lib.compile_ttir_inplace):
    if "ttg.num-warps" not in str(module):  # Triton's own language: no layouts yet
        return upstream(module, backend, options, target)
    return triton_lib.compile_ttir_to_ptx_inplace(module, _GluonPasses(backend), options, target.arch)


triton_lib.triton_kernel_call_lib = _AllWarps(triton_lib.triton_kernel_call_lib)
triton_lib.compile_ttir_inplace = _compile


def triton_call(
    *operands, kernel, out_type, grid: int, name: str, out_tile: tuple[tuple[int, ...], Any] | None = None, num_warps: int = 4, **named
) -> jax.Array:
    """One launch on a Hopper GPU, with one result; its pointer is the one parameter of the kernel that is not given.

    `jax_triton.triton_call` makes TMA descriptors of operands only. With one that the kernel builds itself it would take memory from the driver at every
    launch, which CUDA graphs refuse. So here a result may have one, too: as a parameter `c_desc`, whose memory, uninitialised, becomes the result's.

    Args:
      operands, named: values of the kernel's parameters, in order and by name: arrays, TensorDescriptors, None, numbers, constants.
      out_type: shape and dtype of the result.
      grid: how many programs.
      name: what profilers show.
      out_tile: (block shape, shared layout) of `c_desc`; None passes None for it, if the kernel has it.
      num_warps: of the kernel, or of its first partition.
    """
    function = triton_lib.TritonFunction(kernel)
    out = jax.ShapeDtypeStruct(out_type.shape, out_type.dtype)
    values = dict(function.signature.bind_partial(*operands, **named).arguments)
    constants = {parameter: values.pop(parameter) for parameter in list(values) if parameter in function.constexpr_param_names}
    arguments, aliases = [], {}
    for parameter in function.non_constexpr_param_names:
        if parameter == "c_desc" and out_tile is not None:
            aliases[sum(argument is not None for argument in arguments)] = 0
            arguments.append(TensorDescriptor.from_array(jax.lax.empty(out.shape, out.dtype), out_tile[0], layout=out_tile[1]))
        elif parameter in values or parameter == "c_desc":
            arguments.append(jax.tree.map(triton_lib._StaticArg.maybe_wrap, values.get(parameter)))
        else:
            arguments.append(triton_lib._OutputPlaceholder(0))
    arrays, tree = jax.tree.flatten(arguments)
    # Fusion is said, because Triton 3.9 warns where it is not and 3.10 will choose otherwise: sum + product * scale is one instruction.
    options = {"num_warps": num_warps, "num_stages": 3, "num_ctas": 1, "enable_fp_fusion": True}
    (result,) = triton_lib.triton_kernel_call_p.bind(
        *arrays, fn=kernel, name=name, in_tree=tree, out_shapes=(out,), grid=(grid,), compute_capability=90, backend_options=triton_lib.FrozenDict(options),
        input_output_aliases=triton_lib.FrozenDict(aliases), zeroed_outputs=(), serialized_metadata=b"", cost_estimate=None, has_side_effect=False,
        metaparams=triton_lib.FrozenDict(constants),
    )  # fmt: skip
    return result
