"""route_choices beside route, which chooses the same; moe_mlp of a router of one's own; Routings in exported programs.

tests/contracts compares it with its reference: choices of no expert, repeated ones, tokens that do not count."""

import dataclasses

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxops
from jaxops.nn import MoE
from jaxops.ops.route import Plan, Tiles
from tests.arrays import put
from tests.compare import assert_close
from tests.ops.route.cases import CHOSEN, RUNS, SMOOTH, Variant, compiled, make_case

TILES = {"tiles": Tiles(8, 2), "one-tile": Tiles(128, 16), "wide": Tiles(16, 16, 4)}
PLAIN = Variant(12, 3)
VARIANT = dataclasses.replace(PLAIN, masked=True)


def plan_of(run: str, tiles: str) -> Plan:
    return Plan("xla") if run == "xla" else Plan("pallas", TILES[tiles])


@pytest.mark.parametrize(
    ("run", "tiles"),
    [
        ("xla", "tiles"),
        *(("interpret", tiles) for tiles in TILES),
        *(pytest.param("gpu", tiles, marks=pytest.mark.gpu) for tiles in TILES),
    ],
)
def test_of_the_choices_of_route(run, tiles):
    """The same Routing, and with the weights' own arithmetic the same gradient of the logits."""
    case = make_case(VARIANT)
    want, wanted_gradient = compiled("reference", VARIANT)(case)

    def smooth(logits):
        top, experts = jax.lax.top_k(jnp.where(case["mask"][:, None], logits, 0), VARIANT.k)
        weights = jax.nn.softmax(top).astype(jnp.float32)
        how = {"mask": case["mask"], "logits": logits, "plan": plan_of(run, tiles)}
        r = jaxops.route_choices(experts, weights, VARIANT.E, **how)
        return tuple(getattr(r, name) for name in SMOOTH), r

    @jax.jit
    def results(logits, cotangents):
        _, vjp, r = jax.vjp(smooth, logits, has_aux=True)
        return r, *vjp(cotangents)

    got, gradient = results(case["logits"], tuple(case[f"d{name}"] for name in SMOOTH))
    for name in set(CHOSEN) - {"experts"}:
        assert getattr(got, name).dtype == jnp.int32, name
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
    for name in SMOOTH:
        assert_close(getattr(got, name), getattr(want, name), "float32", name)
    assert_close(gradient, wanted_gradient, "float32", "gradient", scale=2)


@pytest.mark.parametrize("run", RUNS)
def test_by_hand(run):
    """Token 0 takes expert 2 twice, token 1 one that is not there, token 2 does not count. Weights in bfloat16 have a
    gradient in bfloat16."""
    experts, mask = put([[2, 2], [0, 3], [1, 0], [-1, 1]], "int32"), put([True, True, False, True], bool)
    weights = put([[1, 2], [3, np.nan], [np.nan, 4], [5, 6]], "bfloat16")

    def weights_of(weights):
        r = jaxops.route_choices(experts, weights, 3, mask=mask, plan=plan_of(run, "tiles"))
        return r.weights, r

    kept, vjp, r = jax.vjp(weights_of, weights, has_aux=True)
    assert r.load.tolist() == [1, 1, 2]
    assert r.group_offsets.tolist() == [0, 1, 2, 4]
    assert r.row_indices.tolist() == [1, 3, 0, 0, 0, 0, 0, 0]
    assert r.row_positions.tolist() == [[2, 3], [0, 8], [8, 8], [8, 1]]
    assert kept.tolist() == [[1, 2], [3, 0], [0, 0], [0, 6]]
    assert r.experts.tolist() == experts.tolist()
    assert (r.aux_loss, r.z_loss) == (None, None)
    (gradient,) = vjp(jnp.full(kept.shape, 7.0))
    assert gradient.dtype == jnp.bfloat16
    assert gradient.tolist() == [[7, 7], [7, 0], [0, 0], [0, 7]]


def test_an_even_load_with_choices_of_no_expert():
    """aux_loss is 1 for an even load, whatever else was chosen, and 0 without any row."""
    experts, logits = put([[0, -1], [1, -1], [2, 9], [3, -1]], "int32"), jnp.zeros((4, 4))
    aux_loss = lambda experts: jaxops.route_choices(experts, jnp.ones((4, 2)), 4, logits=logits).aux_loss
    assert (float(aux_loss(experts)), float(aux_loss(0 * experts - 1))) == (1, 0)


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "E", "k"), [(4096, 8, 2), (32768, 128, 8), (3, 1000, 4)])
def test_heuristic_plans(T, E, k):
    """On the GPU, with the plans that users get."""
    rng = np.random.default_rng(0)
    experts, weights = put(rng.integers(-1, E, (T, k)), "int32"), put(rng.random((T, k)), "float32")
    got, want = (jaxops.route_choices(experts, weights, E, backend=backend) for backend in ("pallas", "xla"))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_layer_with_a_router_of_its_own():
    """As the experts one after another: each choice's result times its weight, added; padding gives zeros."""
    rng = np.random.default_rng(0)
    T, E, D, F, k = 24, 4, 8, 12, 2
    x, gate, up, down = (put(rng.normal(size=s), "float32") for s in ((T, D), (E, D, F), (E, D, F), (E, F, D)))
    experts, weights = put(rng.integers(0, E, (T, k)), "int32"), put(rng.random((T, k)), "float32")
    mask = jnp.arange(T) < 20
    router = lambda tokens, mask=None: jaxops.route_choices(experts, weights, E, mask=mask)
    moe = MoE(E, D, F, router=router, precision="highest", rngs=nnx.Rngs(0))
    moe.gate[...], moe.up[...], moe.down[...] = gate, up, down
    each = jnp.einsum("etf,efd->etd", jax.nn.silu(x @ gate) * (x @ up), down)
    want = jnp.einsum("tk,tkd->td", weights * mask[:, None], each[experts, jnp.arange(T)[:, None]])
    got, routing = moe(x, mask=mask)
    assert_close(got, want, "float32", scale=5)
    assert (int(routing.load.sum()), routing.aux_loss) == (40, None)


def again(f, *given):
    """f(*given), from a serialized program."""
    pytest.importorskip("flatbuffers", reason="jax.export serializes with it")
    exported = jax.export.export(jax.jit(f))(*jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given))
    return jax.export.deserialize(exported.serialize()).call(*given)


def test_routings_in_exported_programs():
    """As a result, and as an argument; without losses, too."""
    logits = make_case(PLAIN)["logits"]
    r = jaxops.route(logits, 3)
    found = again(lambda logits: jaxops.route(logits, 3), logits)
    assert isinstance(found, jaxops.Routing)
    jax.tree.map(np.testing.assert_array_equal, found, r)
    x = put(np.random.default_rng(0).normal(size=(PLAIN.T, 8)), "float32")
    for routing in (r, dataclasses.replace(r, aux_loss=None, z_loss=None)):
        np.testing.assert_array_equal(again(jaxops.permute, x, routing), jaxops.permute(x, r))


def test_quantized_weights_in_exported_programs():
    """Static fields, too."""
    x = put(np.random.default_rng(0).normal(size=(4, 32)), "float32")
    quantize = lambda x: jaxops.quantize(x, scaling="rowwise")
    found, want = again(quantize, x), quantize(x)
    assert jax.tree.structure(found) == jax.tree.structure(want)
    assert (found.scaling, found.dtype) == ("rowwise", "float32")
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a).view("u1"), np.asarray(b).view("u1"))
