"""`jax_triton.triton_call` for Gluon kernels with warp specialisation. Imported only where such a kernel is called: jax-triton needs Python >= 3.12.

Two things that jax-triton 0.4.1 does otherwise; each correction goes away when upstream has it.
"""

import functools
import re

import jax_triton
from jax_triton import triton_lib

TensorDescriptor = jax_triton.TensorDescriptor
# Said, because Triton 3.9 warns where it is not and 3.10 will choose otherwise: sum + product * scale is one instruction.
triton_call = functools.partial(jax_triton.triton_call, backend_options={"enable_fp_fusion": True})


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
