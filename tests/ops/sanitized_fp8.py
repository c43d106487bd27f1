"""What compute-sanitizer runs of the FP8 products; see tests/sanitize.py."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

import jaxops
from jaxops.ops import fp8_matmul
from jaxops.ops import moe_mlp as experts
from jaxops.tuning import current_device
from tests.ops.sanitized_offsets import OFFSETS, K, M, N


def fp8_products() -> None:
    """Both FP8 products and their gradients, with each kind of scales, by Pallas and by Gluon (rows of multiples of 16
    bytes); with the heuristic's consumers and with three; without groups also tiles of 64 columns."""
    rng = np.random.default_rng(0)
    wide, narrow = (fp8_matmul.Tiles("triton", *size, stages=3) for size in ((192, 128), (128, 64)))
    plans = [(fp8_matmul.Plan("pallas"), fp8_matmul.Plan("pallas"), 200, 136)]
    if current_device().is_hopper:
        heuristic, three = fp8_matmul.Plan("triton"), fp8_matmul.Plan("triton", dgrad=wide, wgrad=wide)
        plans += [(heuristic, three, 208, 144), (three, fp8_matmul.Plan("triton", narrow, narrow, narrow), 208, 144)]
    for plan, dense, k, n in plans:
        for recipe in ("tensorwise", "rowwise", "blockwise"):
            x, w, dy = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((M, k), (3, k, n), (M, n)))
            options = {"recipe": recipe, "plan": plan}

            @jax.jit
            def run(offsets, x=x, w=w, dy=dy, options=options, dense=options | {"plan": dense}):
                y, vjp = jax.vjp(
                    lambda x, w: (
                        jaxops.fp8_grouped_matmul(x, w, offsets, **options) + jaxops.fp8_matmul(x, w[0], **dense)
                    ),
                    x,
                    w,
                )
                return y, vjp(dy)

            for offsets in OFFSETS:
                jax.block_until_ready(run(jnp.array(offsets, jnp.int32)))
            print(options, "done", flush=True)


def fp8_weights_alone() -> None:
    """Rows that are not quantized, forward and gradient, with each kind of the weights' scales."""
    rng = np.random.default_rng(0)
    x, w, dy = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((M, K), (3, K, N), (M, N)))
    for recipe in ("tensorwise", "rowwise", "blockwise"):
        scaling = fp8_matmul.RECIPES[recipe].rhs.scaling
        w8 = jaxops.quantize(w, scaling=scaling, layouts="both")

        @jax.jit
        def run(offsets, w8=w8, recipe=recipe):
            multiply = lambda x: jaxops.fp8_grouped_matmul(x, w8, offsets, recipe=recipe, quantize_lhs=False)
            y, vjp = jax.vjp(multiply, x)
            return y, vjp(dy)

        for offsets in OFFSETS:
            jax.block_until_ready(run(jnp.array(offsets, jnp.int32)))
        print(recipe, "done", flush=True)


def fp8_experts() -> None:
    """Experts with block scales, on Hopper with the unit cast by the kernel of its products, which gathers rows or not,
    and by one of its own. Row indices valid and wild."""
    rng = np.random.default_rng(0)
    F = 128
    sizes = ((M, K), (3, K, F), (3, K, F), (3, F, N), (M, N))
    x, w_gate, w_up, w_down, dout = (jnp.asarray(rng.normal(size=size), jnp.bfloat16) for size in sizes)
    plans = [experts.Plan("pallas")]
    if current_device().is_hopper:
        tiles = [fp8_matmul.Tiles("triton", 128, 128, stages=stages) for stages in (4, 3)]
        units = [fp8_matmul.Plan("triton", fwd=each) for each in tiles]
        ways = itertools.product(units, (False, True))
        plans += [experts.Plan("triton", unit=unit, unit_inside=True, gather=gather) for unit, gather in ways]
        plans += [experts.Plan("triton", unit_inside=False)]
    good = jaxops.route(jnp.asarray(rng.normal(size=(M, 3)), jnp.float32), 2, capacity=2 * M // 3)
    wild = jnp.resize(jnp.array([-(2**31), -1, 0, 3, 2**31 - 1], jnp.int32), good.row_indices.shape)
    for plan, save in itertools.product(plans, ("preactivations", "nothing")):

        @jax.jit
        def run(offsets, indices, plan=plan, save=save):
            routing = dataclasses.replace(good, group_offsets=offsets, row_indices=indices)
            call = lambda *given: jaxops.moe_mlp(*given, routing, recipe="blockwise", save=save, plan=plan)
            out, vjp = jax.vjp(call, x, w_gate, w_up, w_down)
            return out, vjp(dout)

        for offsets, indices in itertools.product((good.group_offsets, *OFFSETS), (good.row_indices, wild)):
            jax.block_until_ready(run(jnp.asarray(offsets, jnp.int32), indices))
        print(plan, save, "done", flush=True)
