"""A choice that is made when a program is lowered: only then are the numbers of the mesh's devices known."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir


def if_devices_in_order(kernel: Callable, plain: Callable, *operands: Any) -> Any:
    """kernel(*operands) if the mesh's devices are numbered 0, 1, 2 and so on in order, which JAX's Mosaic kernels need;
    else plain(*operands).

    Both give results of the same types. For `jax.jit`; neither `jax.vmap` nor a gradient may reach it.
    """
    leaves, tree = jax.tree.flatten(operands)
    traced = [
        jax.make_jaxpr(lambda *leaves, f=f: f(*tree.unflatten(leaves)), return_shape=True)(*leaves)
        for f in (kernel, plain)
    ]
    (of_kernel, result), (of_plain, _) = traced
    results = _choose.bind(*leaves, kernel=of_kernel, plain=of_plain)
    return jax.tree.unflatten(jax.tree.structure(result), results)


_choose = Primitive("if_devices_in_order")
_choose.multiple_results = True


@_choose.def_abstract_eval
def _types(*_: Any, kernel: Any, plain: Any) -> Any:
    assert [(x.shape, x.dtype) for x in kernel.out_avals] == [(x.shape, x.dtype) for x in plain.out_avals]
    return kernel.out_avals


def _lower(context: Any, *operands: Any, kernel: Any, plain: Any) -> Any:
    mesh = getattr(context.module_context.axis_context, "mesh", None)
    # An abstract mesh has no devices yet.
    in_order = isinstance(mesh, jax.sharding.Mesh) and np.array_equal(mesh.device_ids.ravel(), np.arange(mesh.size))
    name, chosen = ("kernel", kernel) if in_order else ("plain", plain)
    return mlir.core_call_lowering(context, *operands, name=name, call_jaxpr=chosen)


mlir.register_lowering(_choose, _lower)
