"""The experts in FP8 beside the same ops one after another in jnp, with the same casts, and beside float32.

In a scan, under vmap and checkpoint: tests/nn/test_moe_fp8.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops._lib.numerics.activations import activate
from jaxops.ops import fp8_matmul, moe_mlp, permute
from jaxops.ops.moe_mlp.xla import weights_of_rows
from tests.ops.moe_mlp import cases
from tests.ops.moe_mlp.cases import NAMES, SHARD, Variant, check_zeros, clean, make_case, want_of
from tests.ops.permute.cases import TILE

RECIPES = [name for name, recipe in fp8_matmul.RECIPES.items() if not recipe.delayed]
WIDE = dataclasses.replace(SHARD, T=40, D=136, F=150, N=72, k=2, capacity=14, activation="gelu_tanh")
TILES = fp8_matmul.Tiles("pallas", 16, 16)
PALLAS = moe_mlp.Plan(
    "pallas", *(2 * [fp8_matmul.Plan("pallas", *(3 * [TILES]))]), permute.Plan("pallas", *(3 * [TILE]))
)
# What is interpreted: the kernels of one recipe; of blocks in tests/nn/test_moe_fp8.py.
RUNS = [*((recipe, "xla") for recipe in RECIPES), ("rowwise_with_gw_hp", "interpret")]
RUNS += [pytest.param(recipe, "gpu", marks=pytest.mark.gpu) for recipe in RECIPES]


def plan_of(run: str) -> moe_mlp.Plan | None:
    return {"xla": moe_mlp.Plan("xla"), "interpret": PALLAS}.get(run)


def compiled(variant: Variant, recipe: str, run: str, **options):
    """As cases.compiled."""
    return cases.compiled("xla", variant, **{"recipe": recipe, "precision": None, "plan": plan_of(run)} | options)


@functools.cache
def compiled_one_after_another(variant: Variant, recipe: str, backend: str):
    return jax.jit(functools.partial(one_after_another, variant=variant, recipe=recipe, backend=backend))


def one_after_another(case: dict, variant: Variant, recipe: str, backend: str) -> dict:
    """Written out: every product on its own, with the casts of `jaxops.quantize`, and JAX's gradient of the rest. gate
    and up are one matrix."""
    routing, how = case["routing"], {"recipe": recipe, "backend": backend}
    offsets, weights = routing.group_offsets, weights_of_rows(routing)
    multiply = functools.partial(jaxops.fp8_grouped_matmul, group_offsets=offsets, **how)
    rows = jaxops.permute(case["x"], routing)

    def unit(gate, up):
        wide = activate(gate.astype(jnp.float32), variant.activation) * up.astype(jnp.float32)
        return wide.astype(gate.dtype)

    w_gate_up = jnp.concatenate([case["w_gate"], case["w_up"]], axis=2)
    gate_up, from_gate_up = jax.vjp(multiply, rows, w_gate_up)
    gate, up = jnp.split(gate_up, 2, axis=1)
    h, unit_bwd = jax.vjp(unit, gate, up)
    y, h_to_y = jax.vjp(multiply, h, case["w_down"])
    out = jaxops.combine(y, routing, out_dtype=variant.out_dtype)
    dy = jaxops.permute(case["dout"].astype(gate.dtype), routing)  # before the router's weights
    dh, _ = h_to_y(dy)
    dots = jnp.sum(dh.astype(jnp.float32) * h.astype(jnp.float32), axis=1)
    _, down_wgrad = jax.vjp(multiply, (weights[:, None] * h.astype(jnp.float32)).astype(h.dtype), case["w_down"])
    dgate, dup = unit_bwd((weights[:, None] * dh.astype(jnp.float32)).astype(h.dtype))
    drows, dw_gate_up = from_gate_up(jnp.concatenate([dgate, dup], axis=1))
    dw_gate, dw_up = jnp.split(dw_gate_up, 2, axis=2)
    _, to_x = jax.vjp(lambda x: jaxops.permute(x, routing), case["x"])
    (dx,) = to_x(drows)
    position = routing.row_positions
    kept = (position >= offsets[0]) & (position < offsets[-1])
    dweights = jnp.where(kept, dots[jnp.clip(position, 0, len(dots) - 1)], 0)
    return dict(zip(NAMES, (out, dx, dweights, dw_gate, dw_up, down_wgrad(dy)[1]), strict=True))


@pytest.fixture
def _own_recipe(monkeypatch):
    """A recipe that is not in the package is one entry."""
    row, half = fp8_matmul.Format("rowwise"), frozenset({"dgrad", "wgrad"})
    monkeypatch.setitem(fp8_matmul.RECIPES, "own", fp8_matmul.Recipe("own", row, row, row, half))


@pytest.mark.usefixtures("_own_recipe")
@pytest.mark.parametrize(("recipe", "run"), [*RUNS, ("own", "xla")])
def test_values(recipe, run):
    """Experts without rows, dropped choices, rows outside the groups, NaN in tokens without a row. The products differ
    from those one by one by the order of sums, which may move a value to the next FP8 number. From float32 they differ
    by the error of FP8, with blocks of several groups and sums of several blocks. On a GPU the products one by one are
    the same kernels: XLA's have more bits than a recipe's fast sums, which moves many values of so small a case."""
    # Without blocks, and where its kernels are interpreted, in the small case, whose reference is compiled once.
    variant = WIDE if run == "xla" and recipe != "rowwise_with_gw_hp" else SHARD
    case = make_case(variant)
    got = compiled(variant, recipe, run)(case)
    check_zeros(got, case["routing"])
    want = compiled_one_after_another(variant, recipe, "auto" if run == "gpu" else "xla")(clean(case))
    exact = want_of(case, variant)
    for name in NAMES:
        assert got[name].dtype == want[name].dtype, name
        assert relative_error(got[name], want[name]) < 2e-3, name
        if run != "interpret":
            least = 1e-3 if recipe == "own" else 0.005  # in float32 it would be 1e-6
            assert least < relative_error(got[name], exact[name]) < 0.12, name


def relative_error(got, want) -> float:
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))


def test_mixed_dtypes_and_what_is_saved():
    """bfloat16 tokens, float32 experts. What is recomputed has the same bits as what was kept."""
    variant = dataclasses.replace(SHARD, dtype="bfloat16", out_dtype="float32")
    case = make_case(variant)
    case |= {name: case[name].astype(jnp.float32) for name in ("w_gate", "w_up", "w_down")}
    kept = compiled(variant, "blockwise", "xla")(case)
    assert [kept[name].dtype.name for name in NAMES] == ["float32", "bfloat16", *(4 * ["float32"])]
    again = compiled(dataclasses.replace(variant, save="nothing"), "blockwise", "xla")(case)
    jax.tree.map(np.testing.assert_array_equal, kept, again)


@pytest.mark.parametrize(("save", "casts"), [("preactivations", 4), ("nothing", 4)])
def test_each_tensor_is_cast_once(save, casts):
    """Without a gradient the tokens, h, the weights of gate and up, and those of down, in one layout each."""
    case = clean(make_case(SHARD))
    how = functools.partial(
        jaxops.moe_mlp, case["x"], recipe="blockwise", save=save, backend="xla", routing=case["routing"]
    )
    forward = lambda *experts: how(*experts)
    experts = [case[name] for name in ("w_gate", "w_up", "w_down")]
    saved = jax.eval_shape(lambda *experts: jax.vjp(forward, *experts)[1], *experts)
    in_fp8 = [leaf for leaf in jax.tree.leaves(saved) if leaf.dtype == jnp.float8_e4m3fn]
    assert len(in_fp8) == (2 if save == "preactivations" else 0)  # the weights
    text = jax.jit(forward).lower(*experts).as_text()
    assert (
        len([line for line in text.splitlines() if "stablehlo.convert" in line and line.rstrip().endswith("f8E4M3FN>")])
        == casts
    )


HUGE = 1e6  # in a scale, it would round every other number here to zero


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])  # the others have no more scales
def test_tokens_without_a_row_reach_no_scale(recipe):
    """By hand: all matrices are 1, so a token gives relu(x) * x, and its numbers are powers of two of the largest. The
    third token is dropped: expert 0 has its two."""
    x, dout = jnp.array([[7], [3.5], [HUGE], [1.75], [0.875]]), jnp.array([[1], [1], [HUGE], [1], [1.0]])
    logits = jnp.array([[1, 0], [1, 0], [1, 0], [0, 1], [0, 1.0]])
    routing, one = jaxops.route(logits, 1, capacity=2), jnp.ones((2, 1, 1))
    call = functools.partial(jaxops.moe_mlp, routing=routing, activation="relu", recipe=recipe, backend="xla")
    sums = [49 + 12.25, 3.0625 + 0.765625]
    want = [[49, 12.25, 0, 3.0625, 0.765625], [14, 7, 0, 3.5, 1.75], sums, sums, sums]

    @jax.jit
    def results(*given):
        y, vjp = jax.vjp(call, *given)
        return y, *vjp(dout)

    for found, expected in zip(results(x, one, one, one), want, strict=True):
        np.testing.assert_allclose(found.ravel(), expected, rtol=1e-6)
