"""Routings and gradients against the float32 reference: every option, ties, NaN, dropped rows, odd sizes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxops
from jaxops.nn import Router
from jaxops.ops.route import Tiles
from tests.arrays import put
from tests.compare import assert_close
from tests.ops.route.cases import CHOSEN, DEEPSEEK, KERNELS, RUNS, Variant, check, compiled, make_case

# By default T is 37 and a program has 8 tokens in steps of two. Groups of 3 are padded to 4; groups of 8 have two
# parts.
PLAIN = Variant(12, 3)
DROPPING = Variant(8, 2, capacity=5)
GROUPED = Variant(24, 4, expert_groups=3, fwd=Tiles(16, 16, 4), bwd=Tiles(8, 1))
VARIANTS = {
    "plain": PLAIN,
    "dropping": DROPPING,
    "deepseek": DEEPSEEK,
    "grouped": GROUPED,
    "sigmoid": Variant(16, 3, dtype="bfloat16", score="sigmoid", normalize=False, fwd=Tiles(4, 1), bwd=Tiles(2, 2)),
    "biased-softmax": Variant(
        130, 5, selection_bias=True, normalize=False, weight_scale=0.5, capacity=2, fwd=Tiles(4, 4, 2)
    ),
    "one-expert": Variant(1, 1, T=5, dtype="float16", capacity=3),
    "all-experts": Variant(11, 11, T=9, dtype="bfloat16", score="sigmoid"),  # too many choices to unroll
    "one-tile": dataclasses.replace(DROPPING, fwd=Tiles(64, 64)),
    "one-tile-in-steps": dataclasses.replace(DEEPSEEK, fwd=Tiles(64, 8)),
    "masked": dataclasses.replace(DEEPSEEK, masked=True),
    "masked-one-tile": dataclasses.replace(GROUPED, masked=True, fwd=Tiles(64, 8)),
    "one-token-groups-of-one": Variant(5, 3, T=1, expert_groups=5, top_expert_groups=4, selection_bias=True),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_variants(run, variant):
    for seed in range(3):
        check(make_case(variant, seed), variant, run)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    "variant", [PLAIN, DROPPING, DEEPSEEK, GROUPED], ids=["plain", "dropping", "deepseek", "grouped"]
)
def test_ties(run, variant):
    """The lower expert wins, and the lower group. Negative zero equals zero. Where all are equal, all tokens choose the
    same experts: the others are empty, and the most rows are dropped."""
    rng = np.random.default_rng(0)
    case = make_case(variant) | {"selection_bias": jnp.zeros(variant.E)}
    for logits in (rng.integers(-1, 2, size=(variant.T, variant.E)), np.zeros((variant.T, variant.E))):
        logits = logits * np.where(rng.random(logits.shape) < 0.5, 1.0, -1.0) if not logits.any() else logits
        check(case | {"logits": put(logits, variant.dtype)}, variant, run)


@pytest.mark.parametrize("run", RUNS)
def test_scores_that_round_to_equal_numbers(run):
    """The logits decide. Scores whose sum underflows give weights of zero and finite gradients."""
    rng = np.random.default_rng(0)
    variant = VARIANTS["sigmoid"]
    case = make_case(variant)
    for offset in (40, -150):
        logits = put(offset + rng.permuted(np.tile(np.arange(variant.E), (variant.T, 1)), axis=1), variant.dtype)
        routing, gradient = compiled(run, variant)(case | {"logits": logits})
        np.testing.assert_array_equal(
            routing.experts, np.argsort(-np.asarray(logits, np.float32), axis=1)[:, : variant.k]
        )
        np.testing.assert_allclose(routing.weights, float(offset > 0), atol=1e-20)
        assert np.isfinite(np.asarray(gradient, np.float32)).all()


def smooth_in_float64(logits, experts, score: str, load, scale: float) -> tuple[np.ndarray, float]:
    """Weights and balancing loss of a choice, by logarithms in numpy."""
    logs = logits - np.log1p(np.exp(logits)) if score == "sigmoid" else logits

    def quotients(logs):
        values = np.exp(logs - logs.max(1, keepdims=True))
        return values / values.sum(1, keepdims=True)

    weights = scale * quotients(np.take_along_axis(logs, experts, 1))
    return weights, logits.shape[1] * (load / load.sum() @ quotients(logs).mean(0))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("score", "biased"), [("sigmoid", False), ("sigmoid", True), ("softmax", True)])
def test_scores_below_the_range_of_their_sums(run, score, biased):
    """Weights add up to weight_scale, and loss and gradient are right, where all (or with a bias all chosen) scores are
    far below 1e-20. The gradient is that of differences in float64."""
    variant = Variant(4, 2, T=6, score=score, weight_scale=2.5, selection_bias=biased, fwd=Tiles(4, 2))
    rng = np.random.default_rng(0)
    case = make_case(variant) | {"selection_bias": put([9, 9, 0, 0], "float32"), "dz_loss": jnp.float32(0)}
    for shift in (0, -30, -45, -60, -200):
        logits = rng.normal(size=(6, 4)) + (np.array([shift, shift, 1, 0]) if biased else shift)
        logits = logits.astype(np.float32).astype(np.float64)
        r, gradient = jax.tree.map(np.asarray, compiled(run, variant)(case | {"logits": put(logits, "float32")}))
        if biased:
            assert (np.sort(r.experts, axis=1) == [0, 1]).all()

        def loss(logits, choice=r):
            weights, aux_loss = smooth_in_float64(logits, choice.experts, score, choice.load, 2.5)
            return np.sum(weights * np.asarray(case["dweights"])) + aux_loss * float(case["daux_loss"])

        weights, aux_loss = smooth_in_float64(logits, r.experts, score, r.load, 2.5)
        np.testing.assert_allclose(r.weights.sum(1), 2.5, rtol=1e-6)
        np.testing.assert_allclose(r.weights, weights, rtol=1e-5)
        np.testing.assert_allclose(r.aux_loss, aux_loss, rtol=1e-5, atol=1e-20)
        steps = 1e-4 * np.eye(logits.size).reshape(-1, 6, 4)
        wanted = [(loss(logits + step) - loss(logits - step)) / 2e-4 for step in steps]
        np.testing.assert_allclose(gradient, np.reshape(wanted, (6, 4)), atol=2e-6)


@pytest.mark.parametrize("run", RUNS)
def test_a_mask_by_hand(run):
    """Of four tokens the first and the last count, or none: ones that round to no other expert, so weights are 1."""
    variant = Variant(3, 1, T=4, masked=True, capacity=1, fwd=Tiles(2, 2))
    logits = put([[0, 40, 0], [40, 0, 0], [0, 40, 0], [0, 40, 0]], "float32")
    case = make_case(variant) | {"logits": logits}
    r, _ = compiled(run, variant)(case | {"mask": put([True, False, False, True])})
    assert (r.load.tolist(), r.group_offsets.tolist()) == ([0, 2, 0], [0, 0, 1, 1])
    assert (r.row_positions.ravel().tolist(), r.row_indices.tolist()) == ([0, 4, 4, 4], [0, 0, 0, 0])
    assert (r.weights.ravel().tolist(), r.experts.ravel().tolist()) == ([1, 0, 0, 0], [1, 0, 0, 1])
    assert (float(r.aux_loss), float(r.z_loss)) == (3, 1600)
    r, gradient = compiled(run, variant)(case | {"mask": put([False] * 4)})
    assert (r.load.tolist(), r.group_offsets.tolist()) == ([0, 0, 0], [0, 0, 0, 0])
    assert r.row_positions.ravel().tolist() == [4] * 4
    assert (float(r.aux_loss), float(r.z_loss), np.asarray(gradient).any()) == (0, 0, False)


@pytest.mark.parametrize("run", RUNS)
def test_masked_experts(run):
    """An expert with -inf is not chosen while others are left, has a gradient of zero, and makes nothing NaN."""
    for variant in (PLAIN, DEEPSEEK):
        case = make_case(variant) | {"selection_bias": jnp.zeros(variant.E)}
        masked = case | {"logits": case["logits"].at[:, [0, 4, 10]].set(-jnp.inf)}
        routing, gradient = check(masked, variant, run)
        assert not np.isin(routing.experts, [0, 4, 10]).any()
        assert not np.asarray(gradient)[:, [0, 4, 10]].any()


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("variant", [PLAIN, DEEPSEEK, GROUPED], ids=["plain", "deepseek", "grouped"])
def test_bad_logits(run, variant):
    """NaN and infinities: every token has k different experts and its rows; other tokens' results do not change."""
    case = make_case(variant)
    logits = np.array(case["logits"])
    logits[3], logits[5, 2], logits[8, :3], logits[36, 1], logits[20] = np.nan, np.nan, np.nan, np.inf, -np.inf
    routing, gradient = compiled(run, variant)(case | {"logits": put(logits)})
    reference, _ = compiled("reference", variant)(case | {"logits": put(logits)})
    for name in CHOSEN:  # a score of NaN counts as -inf in its group, too
        np.testing.assert_array_equal(getattr(routing, name), getattr(reference, name), err_msg=name)
    assert (np.diff(np.sort(routing.experts, axis=1), axis=1) > 0).all(), "a token chose an expert twice"
    good = np.setdiff1d(np.arange(variant.T), [3, 5, 8, 20, 36])
    want, _ = compiled(run, variant)(case)
    np.testing.assert_array_equal(np.asarray(routing.experts)[good], np.asarray(want.experts)[good])
    assert np.isfinite(np.asarray(routing.weights)[good]).all()
    assert np.isfinite(np.asarray(gradient)[good]).all()
    assert np.isnan(np.asarray(routing.weights)[3]).any()
    assert np.isnan(float(routing.z_loss))
    if variant is PLAIN:
        np.testing.assert_array_equal(np.asarray(routing.experts)[3], [0, 1, 2])
        assert np.isnan(np.asarray(routing.weights)[[5, 8, 36]]).all()


@pytest.mark.parametrize("run", RUNS)
def test_scores_that_are_all_zero(run):
    """Sigmoids of -inf: weights of 0, not 0 / 0."""
    variant = VARIANTS["all-experts"]
    case = make_case(variant)
    routing, _ = compiled(run, variant)(case | {"logits": case["logits"].at[2].set(-jnp.inf)})
    np.testing.assert_allclose(routing.weights.sum(axis=1), np.arange(variant.T) != 2, rtol=1e-5)


@pytest.mark.parametrize("run", RUNS)
def test_a_group_with_a_nan(run):
    """It has the sum of its two best others, of whatever sign the NaN is: 0 / 0 has one on x86, and `np.nan` none."""
    case = make_case(DEEPSEEK)
    logits = np.array(case["logits"])
    logits[::2, 2], logits[1::2, 2] = np.nan, -np.nan
    case["logits"] = put(logits)
    routing, _ = compiled(run, DEEPSEEK)(case)
    reference, _ = compiled("reference", DEEPSEEK)(case)
    np.testing.assert_array_equal(routing.experts, reference.experts)
    for tokens in (slice(0, None, 2), slice(1, None, 2)):
        assert np.isin(np.asarray(routing.experts)[tokens], [0, 1]).any()


@pytest.mark.parametrize("run", RUNS)
def test_groups_of_tiny_scores(run):
    """Sums of two scores choose the group also where float32 has no such small scores. A NaN is the least."""
    variant = Variant(8, 2, T=6, score="sigmoid", expert_groups=4, top_expert_groups=1, fwd=Tiles(4, 2))
    logits = np.random.default_rng(0).normal(size=(6, 8)) - 200 * (np.arange(6) != 1)[:, None]
    logits[1, :2] = np.nan, 9
    routing, _ = compiled(run, variant)(make_case(variant) | {"logits": put(logits, "float32")})
    scores = np.where(np.isnan(logits), -np.inf, 1 / (1 + np.exp(-logits))).reshape(6, 4, 2)
    best = scores.sum(axis=2).argmax(axis=1)
    order = np.argsort(-scores[np.arange(6), best], axis=1)
    np.testing.assert_array_equal(routing.experts, 2 * best[:, None] + order)


@pytest.mark.parametrize("run", KERNELS)
def test_more_tiles_than_one_step_counts(run, monkeypatch):
    """The sums over tiles go in steps."""
    monkeypatch.setattr("jaxops.ops.route.fwd_pallas._TILES", 16)
    variant = Variant(8, 2, T=70, score="sigmoid", fwd=Tiles(2, 2))
    check(make_case(variant), variant, run)


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "E", "k"), [(4096, 8, 2), (32768, 128, 8), (5000, 160, 6), (300, 1000, 3)])
def test_heuristic_plans(T, E, k):
    """On the GPU, with the plans that users get; the sums over so many tokens round more."""
    groups = {"expert_groups": 8, "top_expert_groups": 4} if E % 8 == 0 and E > 8 else {}
    logits = put(np.random.default_rng(0).normal(size=(T, E)), jnp.bfloat16)
    got = jaxops.route(logits, k, score="sigmoid", capacity=T // 2, **groups, backend="pallas")
    want = jaxops.route(logits, k, score="sigmoid", capacity=T // 2, **groups, backend="xla")
    for routing in (got, want):
        np.testing.assert_array_equal(np.diff(routing.group_offsets), np.minimum(routing.load, T // 2))
        kept = np.asarray(routing.row_positions) < T * k
        rows = np.asarray(routing.row_positions)[kept]
        np.testing.assert_array_equal(np.asarray(routing.row_indices)[rows], np.nonzero(kept)[0])
    same = (np.asarray(got.experts) == np.asarray(want.experts)).all(1)
    assert same.mean() > 0.999  # sums of two scores may round to the other group
    assert_close(np.asarray(got.weights)[same], np.asarray(want.weights)[same], "float32", scale=5)
    np.testing.assert_allclose([got.aux_loss, got.z_loss], [want.aux_loss, want.z_loss], rtol=1e-4)


def test_the_bias_update():
    selection_bias, load = jnp.array([0.25, 0.0, -1.0, 3.0]), jnp.array([10, 30, 20, 20], jnp.int32)
    np.testing.assert_array_equal(jaxops.update_router_bias(selection_bias, load, 0.5), [0.75, -0.5, -1.0, 3.0])
    np.testing.assert_array_equal(
        jax.jit(jaxops.update_router_bias)(selection_bias, load.astype(jnp.float32), 0.5), [0.75, -0.5, -1.0, 3.0]
    )


@pytest.mark.parametrize(("score", "wanted"), [("softmax", (3 / 8, 5 / 8)), ("sigmoid", (9 / 20, 11 / 20))])
def test_mean_shares_by_hand(score, wanted):
    """Shares of 1/4 and 3/4 (sigmoid: of 2/5 and 3/5), of halves, and of a token that does not count."""
    router = Router(1, 2, 1, score=score, rngs=nnx.Rngs(0))
    logits, mask = put([[0.0, np.log(3.0)], [9.0, 1.0], [2.0, 2.0]], "float32"), put([True, False, True], bool)
    np.testing.assert_allclose(router.mean_shares(logits, mask), wanted, rtol=1e-6)
    np.testing.assert_allclose(router.mean_shares(logits[::2]), wanted, rtol=1e-6)
