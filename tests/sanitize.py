"""Every kernel once, small, for compute-sanitizer: `compute-sanitizer --tool memcheck python tests/sanitize.py`.

Or `--tool racecheck`; `... python tests/sanitize.py fp8_products` runs some. Needs an NVIDIA GPU. Run it once without
compute-sanitizer before, with JAX_COMPILATION_CACHE_DIR set: XLA's compiler crashes beside it.

Each array is an allocation of its own, so that memcheck sees the first byte out of bounds. Offsets are valid, then
broken in every way.
"""

import dataclasses
import itertools
import os
import sys

# Before JAX is imported. The autotuner would time XLA's own products for minutes.
os.environ |= {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",
}

import jax
import jax.numpy as jnp
import numpy as np

import jaxops
from jaxops.ops import adaln, fp8_matmul
from jaxops.ops import grouped_glu as units
from jaxops.ops import linear_cross_entropy as losses
from jaxops.ops import moe_mlp as experts
from jaxops.ops import permute as permuting
from jaxops.ops import quantize as quantizing
from jaxops.ops import route as routes
from jaxops.ops.grouped_matmul import Plan, Tiles
from jaxops.ops.grouped_matmul.plan import HOPPER_TILES
from jaxops.ops.moe_mlp.unit_fp8 import unit_bwd_cast, unit_cast
from jaxops.tuning import current_device
from tests.ops.modality_grouped_matmul.cases import plans as plans_from
from tests.ops.sanitized_attention import cached_attention, packed_attention
from tests.ops.sanitized_fp8 import fp8_experts, fp8_products, fp8_weights_alone
from tests.ops.sanitized_offsets import OFFSETS, K, M, N
from tests.parallel.sanitized import collective_products, tokens_to_experts

# Stored whole, and in halves.
HOPPER = tuple(
    Tiles(bm, bn, 64, 8, stages, kernel="triton", ping_pong=ping_pong)
    for bm, bn, ping_pong in HOPPER_TILES
    for stages in (3, 6 if bm * bn == 128 * 128 else 4)
)
TILES = [
    Tiles(64, 64, 32, tail=16),
    Tiles(128, 128, 64, stages=2, peel=True),
    Tiles(16, 128, 32, peel=True),
    Tiles(128, 256, 64, warps=8),
]

FEW_ROWS = [Tiles(64, 64, 64, stages=4, tail=16), Tiles(16, 32, 128, stages=5), Tiles(16, 32, 64, stages=3, split=2)]

ROWS = [
    (adaln.Tiles(16, 1, 128, 1, ahead=True), adaln.Tiles(64, 1, 64, 2, ahead=True)),
    (adaln.Tiles(8, 2, 256, 4), adaln.Tiles(4, 4, 32, 4)),
]


def grouped_matmul() -> None:
    rng = np.random.default_rng(0)
    lhs, rhs, bias, dout, acc = (
        jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((M, K), (3, K, N), (3, N), (M, N), (3, K, N))
    )
    hopper = HOPPER if current_device().is_hopper else ()
    for tiles in (*TILES, *hopper):
        wgrad = dataclasses.replace(tiles, split=5 if tiles.kernel == "triton" and tiles.stages == 3 else 1)
        plan = Plan(tiles.kernel, tiles, tiles, wgrad)

        @jax.jit
        def run(offsets, plan=plan):
            out, vjp = jax.vjp(
                lambda lhs, rhs, bias: jaxops.grouped_matmul(lhs, rhs, offsets, bias=bias, plan=plan), lhs, rhs, bias
            )
            return out, vjp(dout), jaxops.grouped_wgrad(lhs, dout, offsets, accumulate_into=acc, plan=plan)

        for offsets in OFFSETS:
            jax.block_until_ready(run(jnp.array(offsets, jnp.int32)))
        print(tiles, "done", flush=True)


def linear_cross_entropy() -> None:
    """Forward and backward; targets in and outside of the vocabulary."""
    if not current_device().is_hopper:
        return
    rng = np.random.default_rng(0)
    x, w, bias = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((M, 136), (136, 392), (392,)))
    targets = jnp.asarray(rng.choice([-100, -1, 0, 391, 392, 2**31 - 1], M), jnp.int32)
    for tiles in HOPPER:
        plan = losses.Plan("triton", rows=128, products=Plan("triton", tiles, tiles, tiles))
        for more in ({}, {"soft_cap": 5.0, "label_smoothing": 0.1}):
            loss = lambda x, w, bias, plan=plan, more=more: jaxops.linear_cross_entropy(
                x, w, targets, bias=bias, plan=plan, **more
            )
            jax.block_until_ready(jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(x, w, bias))
        print(tiles, "done", flush=True)


def modality_grouped_matmul() -> None:
    """Three modalities of one group each, with grouped_matmul's offsets. Widths are no whole tiles, on Hopper multiples
    of 8. Tiles differ by modality, then are all equal."""
    rng = np.random.default_rng(0)
    plans = [(plans_from("pallas", TILES[:3], TILES[1:], (TILES[0],) * 3), 0)]
    if current_device().is_hopper:
        plans += [(Plan("triton", tiles, tiles, tiles), 4) for tiles in HOPPER]
        plans += [(plans_from("triton", HOPPER[:3], HOPPER[1:4], HOPPER[:3]), 4)]
    for plan, more in plans:
        shapes = ((1, K, 52 + more), (1, 36 + more, N), (1, 124 + more, 12 + more))
        lhs, dout, *rhs = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((M, K), (M, N), *shapes))

        @jax.jit
        def run(offsets, plan=plan, lhs=lhs, dout=dout, rhs=tuple(rhs)):
            out, vjp = jax.vjp(lambda lhs, rhs: jaxops.modality_grouped_matmul(lhs, rhs, offsets, plan=plan), lhs, rhs)
            return out, vjp(dout)

        for offsets in OFFSETS:
            jax.block_until_ready(run(jnp.array(offsets, jnp.int32)))
        print(plan, "done", flush=True)


def many_overlapping_groups() -> None:
    """Broken offsets of so many groups that each row is in hundreds of them: more tiles than the work list has."""
    rng = np.random.default_rng(0)
    offsets = jnp.array([0, M] * 300, jnp.int32)
    lhs, dout = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((M, 64), (M, 136)))
    rhs = jnp.asarray(rng.normal(size=(599, 64, 136)), jnp.bfloat16)
    for backend in ("pallas", "triton") if current_device().is_hopper else ("pallas",):
        for rhs_of in (lambda rhs: rhs, lambda rhs: (rhs[:100], rhs[100:])):
            matmul = jaxops.grouped_matmul if rhs_of(rhs) is rhs else jaxops.modality_grouped_matmul

            @jax.jit
            def run(offsets, backend=backend, rhs_of=rhs_of, matmul=matmul):
                out, vjp = jax.vjp(lambda lhs, rhs: matmul(lhs, rhs_of(rhs), offsets, backend=backend), lhs, rhs)
                return out, vjp(dout)

            jax.block_until_ready(run(offsets))
        print(backend, "done", flush=True)


def row_kernels() -> None:
    """All three ops, both passes, vectors per sequence and per row; then FP8. 3 sequences, and 290: two searches."""
    rng = np.random.default_rng(0)
    x, h, dy, *vectors = (
        jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in (*[(M, K)] * 3, (3, K), (290, K), (M + 1, K))
    )
    weight, vectors[2] = vectors[2][-1], vectors[2][:M]
    for fwd, bwd in ROWS:
        for save_stats in (False, True):
            plan = adaln.Plan("pallas", fwd, bwd, save_stats)

            @jax.jit
            def run(offsets, vector, plan=plan):
                def ops(x, h, vector, weight):
                    new, y = jaxops.gated_residual_adaln(
                        x, h, vector, vector, vector, offsets, weight=weight, bias=weight, activation="gelu", plan=plan
                    )
                    y = y + jaxops.adaln(x, vector, vector, offsets, norm="rms", activation="silu", plan=plan)
                    return jaxops.gated_residual(new, y, vector, offsets, plan=plan)

                out, vjp = jax.vjp(ops, x, h, vector, weight)
                return (
                    out,
                    vjp(dy),
                    [
                        jaxops.adaln(x, vector, vector, offsets, out_dtype=fp8, plan=plan)
                        for fp8 in ("float8_e4m3fn", "float8_e5m2")
                    ],
                )

            for vector in vectors:
                for offsets in OFFSETS:
                    B = 290 if len(vector) == 290 else 3
                    jax.block_until_ready(run(jnp.resize(jnp.array(offsets, jnp.int32), (B + 1,)), vector))
            print(plan, "done", flush=True)


def grouped_glu() -> None:
    """Both activation kernels, with gate and up as two arrays and as one; blocks larger and smaller than the arrays.
    The forward in one kernel, on Hopper both of them."""
    rng = np.random.default_rng(0)
    x, w_gate, w_up, dh = (
        jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((M, K), (3, K, N), (3, K, N), (M, N))
    )
    blocks = (None, units.Tiles(16, 256), units.Tiles(8, 64, 1))
    plans = [
        (units.Plan("pallas", block, block, Plan("pallas")), joined)
        for block, joined in itertools.product(blocks, (False, True))
    ]
    plans += [(units.Plan("pallas", fused=tiles), False) for tiles in FEW_ROWS]
    hopper = [(units.Plan("triton"), joined) for joined in (False, True)]
    bias = jnp.ones((3, N), jnp.float32)
    for plan, joined in plans + (hopper if current_device().is_hopper else []):

        @jax.jit
        def run(offsets, plan=plan, joined=joined):
            weights = (jnp.concatenate([w_gate, w_up], axis=2), None) if joined else (w_gate, w_up)
            biases = (jnp.concatenate([bias, bias], axis=1), None) if joined else (bias, bias)
            h, vjp = jax.vjp(lambda x: jaxops.grouped_glu(x, *weights, offsets, biases=biases, plan=plan), x)
            return h, vjp(dh)

        for offsets in OFFSETS:
            jax.block_until_ready(run(jnp.array(offsets, jnp.int32)))
        print(plan, joined, "done", flush=True)


def routings(rng: np.random.Generator, k: int = 2, E: int = 3) -> list[jaxops.Routing]:
    """Of M tokens: row positions and offsets valid, then broken in every way."""
    wild = jnp.array([-(2**31), -1, 0, 3, 2**31 - 1], jnp.int32)
    good = jaxops.route(jnp.asarray(rng.normal(size=(M, E)), jnp.float32), k, capacity=k * M // E)
    bad = dataclasses.replace(good, row_positions=jnp.resize(wild, (M, k)), row_indices=jnp.resize(wild, k * M))
    offsets = [good.group_offsets, *(jnp.array(offsets, jnp.int32) for offsets in OFFSETS)]
    return [dataclasses.replace(r, group_offsets=each) for r, each in itertools.product((good, bad), offsets)]


EXPERTS = ((M, K), (3, K, N), (3, K, N), (3, N, K))  # x and the weights


def moe_mlp() -> None:
    """By Pallas and by Gluon, whose backward is this op's own."""
    rng = np.random.default_rng(0)
    x, w_gate, w_up, w_down, dout = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in (*EXPERTS, (M, K)))
    plans = [experts.Plan("pallas"), *(experts.Plan(unit=units.Plan(fused=tiles)) for tiles in FEW_ROWS)]
    if current_device().is_hopper:
        orders = (experts.TileOrder(4), experts.TileOrder(1))
        plans += [experts.Plan("triton", fused=order) for order in orders]
    joined = (jnp.concatenate([w_gate, w_up], axis=2), None, w_down)
    biases = (jnp.ones((3, 2 * N)), None, jnp.ones((3, K)))
    for plan, save, weights in itertools.product(
        plans, ("preactivations", "nothing"), ((w_gate, w_up, w_down), joined)
    ):
        unit = {} if weights[1] is not None else {"biases": biases, "activation": "swiglu_oai"}
        if unit and plan.unit is not None:  # the kernel for few rows reads two arrays
            continue

        @jax.jit
        def run(routing, plan=plan, save=save, weights=weights, unit=unit):
            def f(x, factors, *matrices):
                own = dataclasses.replace(routing, weights=factors)
                return jaxops.moe_mlp(x, *matrices, own, save=save, plan=plan, **unit)

            out, vjp = jax.vjp(f, x, routing.weights, *weights)
            return out, vjp(dout)

        for routing in routings(rng):
            jax.block_until_ready(run(routing))
        print(plan, save, "done", flush=True)


def moe_mlp_stored() -> None:
    """Weights stored in FP8: rows copied, and gathered by the unit's kernel."""
    rng = np.random.default_rng(0)
    x, *weights = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in EXPERTS)
    stored = [jaxops.quantize(w, scaling="block_128x128", layouts="col") for w in weights]
    sizes = (16, 32, 4, 5), (64, 64, 4, 3), (1, 16, 4, 1, 8, 256), (8, 64, 4, 3, 8, 128, 2, True)
    tiles = [fp8_matmul.Tiles("pallas", *each) for each in sizes]
    gathered = [experts.Plan(unit=fp8_matmul.Plan("pallas", fwd=each), gather=True) for each in tiles]
    for plan in (experts.Plan(gather=False), *gathered):
        run = jax.jit(lambda routing, plan=plan: jaxops.moe_mlp(x, *stored, routing, plan=plan))
        for routing in routings(rng):
            jax.block_until_ready(run(routing))
        print(plan, "done", flush=True)


def routing() -> None:
    """Each kernel of the router: numbers of experts that are powers of two or not, expert groups, capacity; NaN; a
    mask; one tile of tokens and several; logits of few tokens; choices that are given."""
    rng = np.random.default_rng(0)
    for E, k, options in (
        (64, 8, {}),
        (13, 3, {"capacity": 20, "score": "sigmoid"}),
        (160, 6, {"expert_groups": 8, "top_expert_groups": 3, "capacity": 9}),
        (256, 9, {"expert_groups": 8, "top_expert_groups": 4, "score": "sigmoid"}),
    ):
        logits, bias = rng.normal(size=(M + 1, E)).astype(np.float32), jnp.asarray(rng.normal(size=E), jnp.float32)
        logits[7], logits[9, 1] = np.nan, np.inf
        x, kernel = jnp.asarray(rng.normal(size=(3, K)), jnp.bfloat16), jnp.asarray(rng.normal(size=(K, E)), "float32")
        jax.block_until_ready(routes.router_logits(x, kernel))
        for tile in (None, routes.Tiles(8, 2, 4), routes.Tiles(16, 16), routes.Tiles(512, 16, 4)):

            @jax.jit
            def run(logits, bias, mask, E=E, k=k, options=options, tile=tile):
                def smooth(logits):
                    how = options | {"mask": mask, "plan": routes.Plan("pallas", tile, tile)}
                    r = jaxops.route(logits, k, selection_bias=bias, **how)
                    return (r.weights, r.aux_loss, r.z_loss), r

                found, vjp, r = jax.vjp(smooth, logits, has_aux=True)
                wild = r.experts + 7 * (r.experts % 3) - 2  # some are the same, some are no expert's number
                plan = routes.Plan("pallas", tile, tile)
                return r, vjp(found), jaxops.route_choices(wild, r.weights, E, mask=mask, plan=plan)

            for dtype, mask in (("float32", None), ("bfloat16", jnp.asarray(rng.random(M + 1) < 0.7))):
                jax.block_until_ready(run(jnp.asarray(logits, dtype), bias, mask))
            print(E, k, options, tile, "done", flush=True)


def permute() -> None:
    """Permute, combine and their gradients: widths that are powers of two or not, all choices at a time or fewer."""
    rng = np.random.default_rng(0)
    for D, k in ((K, 3), (K + 1, 9), (64, 1)):
        x, rows = (jnp.asarray(rng.normal(size=size), "float32") for size in ((M, D), (M * k, D)))
        for tile in (None, permuting.Tiles(4, 64, 2, 2), permuting.Tiles(1, 256, 16, 8)):

            @jax.jit
            def run(x, rows, routing, tile=tile):
                plan = permuting.Plan("pallas", tile, tile, tile)

                def both(x, rows, weights):
                    routed = dataclasses.replace(routing, weights=weights)
                    return jaxops.permute(x, routed, plan=plan), jaxops.combine(rows, routed, plan=plan)

                out, vjp = jax.vjp(both, x, rows, routing.weights)
                return out, vjp(out)

            for dtype, routing in itertools.product(("float32", "bfloat16"), routings(rng, k, 16)):
                jax.block_until_ready(run(x.astype(dtype), rows.astype(dtype), routing))
            print(D, k, tile, "done", flush=True)


def quantize() -> None:
    """Every scaling in both layouts, each dtype, ragged, stochastic rounding, a stack; rows read through indices that
    may be wild; two matrices side by side, with a border inside of a tile and between two; two kinds of tiles."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(M, K)), jnp.bfloat16)
    indices = jnp.asarray(rng.choice([-(2**31), -1, *range(40), M, 2**31 - 1], M), jnp.int32)
    tiles = {
        "block_1x128": [None, quantizing.Tiles(128, 128, 4, 8, 4, 1)],
        "tensorwise": [None, quantizing.Tiles(128, 64, 32, 2, 8, 2)],
    }
    for scaling in ("tensorwise", "rowwise", "block_1x128", "block_128x128"):
        for tile in tiles.get(scaling, [None]):

            @jax.jit
            def run(offsets, key, scaling=scaling, tile=tile):
                both = {"scaling": scaling, "layouts": "both", "plan": quantizing.Plan(cast=tile)}
                found = [jaxops.quantize(a, **both) for a in (x, x.astype(jnp.float32), x[:, 1:], x.reshape(3, 100, K))]
                found += [
                    jaxops.quantize(x, **both, key=key),
                    jaxops.quantize(x, scaling=scaling, dtype="float8_e5m2"),
                    jaxops.quantize(x[:1], scaling=scaling),
                ]
                form, plan = quantizing.Format(scaling), quantizing.Plan(cast=tile)
                sides = [quantizing.Beside(x[:, :n], x[:, n:]) for n in (K // 2, 64, 128)]
                found += [quantizing.cast(source, form, "both", plan=plan)[0] for source in sides]
                if scaling == "block_128x128":
                    return found
                rows = [quantizing.Gathered(x[:n], indices) for n in (1, 40)]
                found += [quantizing.cast(source, form, "col", group_offsets=offsets, plan=plan)[0] for source in rows]
                return [*found, jaxops.quantize(x, **both, group_offsets=offsets, key=key)]

            for offsets in OFFSETS:
                jax.block_until_ready(run(jnp.array(offsets, jnp.int32), jax.random.key(0)))
            print(scaling, tile, "done", flush=True)


def quantize_computed() -> None:
    """The gated unit and its backward, cast by each recipe; columns that are cut, and that are not."""
    rng = np.random.default_rng(0)
    for recipe, F in itertools.product(
        ("tensorwise", "blockwise", "blockwise_with_gw_hp", "rowwise_with_gw_hp"), (128, 200)
    ):
        dh, gate_up = (jnp.asarray(rng.normal(size=(M, n * F)), jnp.bfloat16) for n in (1, 2))
        weights, form = jnp.asarray(rng.normal(size=M), jnp.float32), fp8_matmul.RECIPES[recipe]

        @jax.jit
        def run(offsets, dh=dh, gate_up=gate_up, weights=weights, form=form):
            backward = unit_bwd_cast("silu", form, dh, gate_up, weights, offsets)
            return unit_cast("silu", form, gate_up, offsets), backward

        for offsets in OFFSETS:
            jax.block_until_ready(run(jnp.array(offsets, jnp.int32)))
        print(recipe, F, "done", flush=True)


if __name__ == "__main__":
    checks = {
        check.__name__: check
        for check in (
            grouped_matmul,
            linear_cross_entropy,
            modality_grouped_matmul,
            many_overlapping_groups,
            grouped_glu,
            moe_mlp,
            moe_mlp_stored,
            row_kernels,
            quantize,
            quantize_computed,
            routing,
            permute,
            fp8_products,
            fp8_weights_alone,
            fp8_experts,
            packed_attention,
            cached_attention,
            collective_products,
            tokens_to_experts,
        )
    }
    for name in sys.argv[1:] or checks:
        checks[name]()
