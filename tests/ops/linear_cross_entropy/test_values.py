"""Values and gradients beside NumPy in float64, tokens that do not count, a split vocabulary, work and memory."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops.ops.linear_cross_entropy import Plan
from jaxops.ops.linear_cross_entropy.plan import LIMIT_BYTES, TILE, WHOLE_BYTES, Problem, rows_at_a_time
from tests.arrays import put
from tests.compare import assert_close
from tests.jaxprs import equations
from tests.parallel.cases import AXIS, mesh_of

IGNORED = -100
Arrays = dict[str, np.ndarray]


def operands(T: int, D: int, V: int, seed: int = 0, transpose_w: bool = False) -> Arrays:
    """A fifth of the targets do not count."""
    rng = np.random.default_rng(seed)
    targets = np.where(rng.random(T) < 0.2, IGNORED, rng.integers(0, V, T)).astype(np.int32)
    w = rng.normal(size=(V, D) if transpose_w else (D, V)) * max(D, 1) ** -0.5
    return {
        "x": rng.normal(size=(T, D)),
        "w": w,
        "targets": targets,
        "weights": rng.random(T),
        "bias": rng.normal(size=V),
    }


def expected(
    a: Arrays, reduction: str, cotangents: tuple, transpose_w=False, label_smoothing=0.0, z_loss=0.0, soft_cap=None, **_
) -> tuple[list, dict[str, Any]]:
    """(results, gradients by name) in float64. cotangents: of the results."""
    w = a["w"].T if transpose_w else a["w"]
    V, counts = w.shape[1], a["targets"] != IGNORED
    rows = np.arange(len(counts))
    z = a["x"] @ w + a["bias"]
    u = z if soft_cap is None else soft_cap * np.tanh(z / soft_cap)
    most = u.max(1, keepdims=True)
    log_sums = np.log(np.exp(u - most).sum(1)) + most[:, 0]
    wanted = np.full(u.shape, label_smoothing / V)
    wanted[rows, np.where(counts, a["targets"], 0)] += 1 - label_smoothing
    losses = log_sums - (wanted * u).sum(1) + z_loss * log_sums**2
    losses, log_sums = np.where(counts, losses, 0), np.where(counts, log_sums, 0)
    if reduction == "none":
        results, (of_loss, of_sum) = [losses, log_sums], cotangents
        dweights = None
    else:
        weights = a["weights"] * counts
        total = weights.sum() or 1.0 if reduction == "mean" else 1.0
        loss = (weights * losses).sum() / total
        results, of_loss, of_sum = [loss], cotangents[0] * weights / total, 0 * losses
        dweights = cotangents[0] * counts * (losses - (loss if reduction == "mean" else 0)) / total
    d = (of_loss * (1 + 2 * z_loss * log_sums) + of_sum)[:, None] * np.exp(
        np.minimum(u - log_sums[:, None], 0)
    ) - of_loss[:, None] * wanted
    d = np.where(counts[:, None], d, 0) * (1 if soft_cap is None else 1 - (u / soft_cap) ** 2)
    dw = d.T @ a["x"] if transpose_w else a["x"].T @ d
    return results, {"x": d @ w.T, "w": dw, "bias": d.sum(0), "weights": dweights}


def loss(*operands, chunk: int | None = None, backend="xla", **options) -> Any:
    """chunk: rows at a time; None: all."""
    return jaxops.linear_cross_entropy(*operands, **options, plan=Plan(backend, rows=chunk))


def found(
    a: Arrays, reduction: str, cotangents: tuple, dtypes: dict[str, str], **options
) -> tuple[list, dict[str, Any]]:
    names = ["x", "w", "bias", *(["weights"] if reduction != "none" else [])]

    @jax.jit
    def run(given, targets, cotangents):
        def call(given):
            out = loss(targets=targets, reduction=reduction, **given, **options)
            return out if reduction == "none" else (out,)

        out, vjp = jax.vjp(call, given)
        return out, vjp(cotangents)[0]

    given = {name: put(a[name], dtypes.get(name, "float32")) for name in names}
    return run(given, a["targets"], tuple(jnp.asarray(c, jnp.float32) for c in cotangents))


@functools.cache
def cotangents_of(T: int, reduction: str) -> tuple:
    rng = np.random.default_rng(9)
    return (rng.normal(size=T), rng.normal(size=T)) if reduction == "none" else (1.7,)


CASES = [
    (13, 7, 11, "mean", {}),
    (67, 5, 131, "sum", {"chunk": 16, "label_smoothing": 0.1, "z_loss": 0.01, "soft_cap": 2.0}),
    (67, 33, 257, "none", {"chunk": 16, "label_smoothing": 0.2, "z_loss": 0.1, "transpose_w": True}),
    (64, 16, 128, "mean", {"chunk": 16, "transpose_w": True, "soft_cap": 5.0}),
    (29, 3, 2, "none", {"soft_cap": 1.0}),
    (0, 5, 7, "mean", {}),
    (1, 1, 1, "sum", {"chunk": 1}),
    (5, 0, 3, "mean", {"chunk": 2}),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("T", "D", "V", "reduction", "options"), CASES)
def test_float32(T, D, V, reduction, options, device):
    a, cotangents = operands(T, D, V, seed=T, transpose_w="transpose_w" in options), cotangents_of(T, reduction)
    got = found(a, reduction, cotangents, {}, precision="highest", **options)
    want = expected(a, reduction, cotangents, **options)
    for index, (g, w) in enumerate(zip(got[0], want[0], strict=True)):
        assert_close(g, np.asarray(w), "float32", f"result {index}", scale=2)
    for name, g in got[1].items():
        assert_close(g, want[1][name], "float32", name, scale=2)


HALF = {"x": "bfloat16", "w": "bfloat16", "bias": "bfloat16"}


@pytest.mark.parametrize("logits_dtype", [None, "float32"])
@pytest.mark.parametrize(("dtypes", "compute"), [(HALF, None), ({"x": "bfloat16"}, "bfloat16"), ({}, "bfloat16")])
def test_bfloat16(dtypes, compute, logits_dtype):
    """Gradients have the dtypes of their operands; those of float32 weights are sums in float32."""
    a = operands(200, 64, 300)
    a |= {name: np.asarray(put(a[name], "bfloat16"), np.float64) for name in ("x", "w", "bias")}
    options = {"compute_dtype": compute, "logits_dtype": logits_dtype, "chunk": 64}
    got, want = found(a, "mean", (1.0,), dtypes, **options), expected(a, "mean", (1.0,))
    assert abs(float(got[0][0]) - want[0][0]) < (2e-4 if logits_dtype else 2e-3)
    for name, g in got[1].items():
        assert g.dtype == dtypes.get(name, "float32")
        assert_close(g, want[1][name], "bfloat16", name)


def test_float16_gradients_do_not_vanish():
    """Those of a mean over many tokens: a logit's is 1 / (T V)."""
    a = operands(4096, 8, 512)
    a["targets"][:] = 3
    a |= {name: np.asarray(put(a[name], "float16"), np.float64) for name in ("x", "w", "bias")}
    got, want = found(a, "mean", (1.0,), dict.fromkeys(HALF, "float16")), expected(a, "mean", (1.0,))
    assert_close(got[1]["bias"].astype(np.float32), want[1]["bias"], "float16", scale=4)


def test_large_logits():
    a = operands(33, 8, 65)
    a["w"] *= 1e4
    got, want = found(a, "mean", (1.0,), {}, precision="highest", chunk=16), expected(a, "mean", (1.0,))
    assert_close(got[0][0], np.asarray(want[0][0]), "float32", scale=10)
    assert_close(got[1]["x"], want[1]["x"], "float32", scale=10)


@pytest.mark.parametrize("chunk", [None, 4])
def test_tokens_that_do_not_count(chunk):
    """What their rows hold reaches nothing; without any other, loss and gradients are zero."""
    a = operands(13, 7, 11)
    a["x"][a["targets"] == IGNORED] = np.nan
    got = found(a, "mean", (1.0,), {}, chunk=chunk)
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(got))
    a["targets"][:] = IGNORED
    got = found(a, "mean", (1.0,), {}, chunk=chunk)
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(got))
    without_gradients = jax.jit(lambda *given: [loss(*given, reduction=r, chunk=chunk) for r in ("mean", "none")])
    got = without_gradients(put(a["x"]), put(a["w"]), put(a["targets"]))
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(got))
    a["targets"][:] = 12345  # is ignored by another number, too
    assert found(a, "sum", (1.0,), {}, ignore_index=12345)[0][0] == 0


@pytest.mark.parametrize("target", [-1, 11, 2**31 - 1, -(2**31)])
def test_a_target_outside_of_the_vocabulary(target):
    """NaN, and in the token alone where each has its own."""
    a = operands(13, 7, 11)
    a["targets"][:] = 2
    a["targets"][5] = target
    (losses, log_sums), d = found(a, "none", (np.ones(13), np.zeros(13)), {}, chunk=4)
    assert list(np.flatnonzero(np.isnan(losses))) == [5]
    assert np.isfinite(log_sums).all()
    assert set(np.argwhere(np.isnan(d["x"]))[:, 0]) == {5}
    total, d = found(a, "mean", (1.0,), {}, chunk=4)
    assert np.isnan(total[0])
    assert np.isnan(d["w"]).all()


def test_products():
    """One a chunk without gradients; three with; where each token has a cotangent, the logits are made again. Twice: of
    the first chunk, and of the loop over the others."""
    x, w, targets = jnp.ones((64, 8)), jnp.ones((8, 32)), jnp.zeros(64, jnp.int32)

    def products(f) -> int:
        return sum(e.primitive.name == "dot_general" for e in equations(jax.make_jaxpr(f)(x, w).jaxpr))

    mean = lambda x, w: loss(x, w, targets, chunk=16)
    each = lambda x, w: jnp.sum(loss(x, w, targets, chunk=16, reduction="none")[0])
    assert (products(mean), products(jax.grad(mean, (0, 1)))) == (2, 6)
    assert (products(each), products(jax.grad(each, (0, 1)))) == (2, 8)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_memory(reduction):
    """Temporaries grow with a chunk's rows, not with all rows."""
    T, D, V = 2048, 16, 1000

    def total(x, w, targets):
        found = loss(x, w, targets, chunk=128, reduction=reduction)
        return jnp.sum(found[0]) if reduction == "none" else found

    step = jax.jit(jax.grad(total, (0, 1)))
    shapes = (jax.ShapeDtypeStruct(s, d) for s, d in (((T, D), "float32"), ((D, V), "float32"), ((T,), "int32")))
    used = step.lower(*shapes).compile().memory_analysis()
    assert used.temp_size_in_bytes < 6 * 128 * V * 4 + 8 * T * D * 4


def test_rows_at_a_time():
    """Within the limit, or one tile; few rows of the last chunk empty. Where a narrow w's gradient needs no float32
    sum, its bytes may be logits."""
    rows_of = lambda T, D, V, size=2, wide=True, in_place=False: rows_at_a_time(
        Problem(T, D, V, "bfloat16", {2: "bfloat16", 4: "float32"}[size], w_dtype="float32" if wide else None), in_place
    )
    for rows, T, D, V in (
        (2816, 8192, 4096, 131_072), (2816, 16_384, 2048, 151_936), (2048, 8192, 2880, 201_088),
        (2048, 4096, 7168, 129_280), (3072, 32_768, 5120, 152_064), (8192, 16_384, 2048, 50_304),
    ):  # fmt: skip
        assert rows_of(T, D, V) == rows
        assert rows_of(T, D, V, wide=False) == (None if D == 7168 else rows)
        assert rows_of(T, D, V, wide=False, in_place=True) == (rows if V in (151_936, 152_064) else None)
    assert rows_at_a_time(Problem(8192, 4096, 131_072, "float16", "float16"), True) == 2816
    assert rows_of(4096, 1, 122_000) is None
    assert rows_of(1000, 1, 1 << 40, 4) == TILE
    rng = np.random.default_rng(0)
    for _ in range(200):
        T, D, V = (int(rng.integers(1, most)) for most in (1 << 17, 10_000, 300_000))
        size, wide, in_place = int(rng.choice([2, 4])), *map(bool, rng.integers(2, size=2))
        rows = rows_of(T, D, V, size, wide, in_place)
        used, most = (rows or T) * V * size, max(WHOLE_BYTES, LIMIT_BYTES + (0 if wide else 4 * D * V))
        assert used <= LIMIT_BYTES or rows == TILE or (rows is None and (2 - in_place) * used <= most)
        if rows is not None:
            chunks = -(-T // rows)
            assert rows % TILE == 0
            assert chunks * rows < T + chunks * TILE


@pytest.mark.versions
@pytest.mark.parametrize(
    ("reduction", "transpose_w", "check_vma"),
    [("mean", False, True), ("sum", True, True), ("none", False, True), ("none", False, False)],
)
def test_a_split_vocabulary(reduction, transpose_w, check_vma):
    """Over four devices: results and gradients of one, some words on no target's device."""
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.01, "soft_cap": 3.0, "transpose_w": transpose_w}
    options |= {"precision": "highest", "chunk": 8, "reduction": reduction}
    a = operands(21, 6, 20, transpose_w=transpose_w)
    names = ["x", "w", "bias", *(["weights"] if reduction != "none" else [])]
    given, targets = {name: put(a[name]) for name in names}, put(a["targets"])

    def part(given, targets):
        out = loss(targets=targets, axis_name=AXIS, **given, **options)
        return out if reduction == "none" else (out,)

    specs = {"x": P(), "w": P(AXIS) if transpose_w else P(None, AXIS), "bias": P(AXIS), "weights": P()}
    specs = {name: specs[name] for name in names}
    split = jax.shard_map(part, mesh=mesh_of(4), in_specs=(specs, P()), out_specs=P(), check_vma=check_vma)
    cotangents = tuple(jnp.asarray(c, jnp.float32) for c in cotangents_of(21, reduction))

    @jax.jit
    def results(given):
        out, vjp = jax.vjp(lambda given: split(given, targets), given)
        return out, vjp(cotangents)[0]

    out, gradients = results(given)
    want = expected(a, cotangents=cotangents_of(21, reduction), **options)
    for got, wanted in zip(out, want[0], strict=True):
        assert_close(got, np.asarray(wanted), "float32", scale=2)
    for name, got in gradients.items():
        assert_close(got, want[1][name], "float32", name, scale=2)
