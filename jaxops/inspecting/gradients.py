"""The gradient of a call, and what results and gradients should be."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops.inspecting import references
from jaxops.inspecting.calls import Call
from jaxops.inspecting.programs import Program, Setting, compiled, measured
from jaxops.inspecting.references import is_float
from jaxops.inspecting.residuals import Kept, kept_of
from jaxops.inspecting.values import Named

MOST_ON_HOST = 1 << 24  # elements


@dataclasses.dataclass(frozen=True)
class Backward:
    """A call's backward.

    Attributes:
      named: the gradients, each called "gradient of" its argument.
      cotangents: of the results that have gradients, random normal numbers.
    """

    named: Named
    cotangents: list[jax.Array]
    kept: tuple[Kept, ...]
    program: Program


def of(call: Call, setting: Setting) -> tuple[Backward | None, str]:
    """(the backward, or None where the call has no gradient; what has none)."""
    held, others = call.split(call.arrays)
    left_out = ", ".join(others_of(call))
    reason = call.entry.no_gradient
    if not held:
        return None, f"no gradient: {reason or 'nothing that was passed has one'}"

    def forward(held: Any, others: Any) -> Any:
        return jax.vjp(
            lambda held: [x for x in jax.tree.leaves(call.run(call.join(held, others))) if is_float(x)], held
        )

    try:
        traced = jax.jit(forward).trace(held, others)
        kept = kept_of(traced, [*call.differentiable.values(), *others_of(call)])
        out, vjp = traced.lower().compile()(held, others)
        cotangents = _normal(out)
        program = compiled(lambda vjp, cotangents: vjp(cotangents)[0], vjp, cotangents)
    except (NotImplementedError, ValueError) as error:  # the call itself is right: the forward has run
        return None, f"no gradient: {error}"
    found = program[0](vjp, cotangents)
    named = [(f"gradient of {name}", x) for name, x in zip(call.differentiable.values(), found, strict=True)]
    backward = Backward(named, cotangents, kept, measured("backward", program, (vjp, cotangents), setting))
    return backward, f"no gradient of {left_out}{reason and ': '}{reason}" if left_out else ""


def others_of(call: Call) -> list[str]:
    """Names of the arrays without gradients."""
    return [name for i, name in enumerate(call.names) if i not in call.differentiable]


def _normal(like: Sequence[jax.Array]) -> list[jax.Array]:
    """Random normal numbers: large arrays are made on the device, small ones need no program to be compiled."""
    rng, found = np.random.default_rng(0), []
    for number, x in enumerate(like):
        if x.size > MOST_ON_HOST:
            found.append(jax.random.normal(jax.random.key(number), x.shape, x.dtype))
        else:
            found.append(jax.device_put(rng.standard_normal(x.shape, np.float32).astype(x.dtype), x.sharding))
    return found


def wanted(call: Call, backward: Backward | None, finite: bool) -> tuple[str, list[jax.Array]]:
    """(what the reference is, its results and gradients).

    Args:
      finite: all floating arguments are.

    Raises:
      JaxRuntimeError: they do not fit in memory.
    """
    given = call.parameters(call.arrays)
    reference, how = references.choose(call.op, call.entry, given, finite)
    wide = lambda arrays: [x.astype(jnp.float32) if is_float(x) else x for x in arrays]

    def everything(held: Any, others: Any, cotangents: Any) -> Any:
        def results(held: Any) -> Any:
            found = references.comparable(reference(call.parameters(call.join(held, wide(others)))))
            leaves = jax.tree.leaves(found)
            return [x for x in leaves if is_float(x)], leaves

        if not cotangents:
            return results(wide(held))[1]
        _, vjp, leaves = jax.vjp(results, wide(held), has_aux=True)
        return leaves + vjp(wide(cotangents))[0]

    with jax.default_matmul_precision("highest"):
        found = jax.jit(everything)(*call.split(call.arrays), backward.cotangents if backward else [])
    return how, jax.block_until_ready(found)
