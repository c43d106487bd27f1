"""Paired trainings: the statistics by hand, the casts one by one, and the tool on a tiny model."""

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

import jaxops
from benchmarks import bench_precision, precision_report
from benchmarks.fp8_parts import CASTS, PRODUCTS, SomeCasts
from benchmarks.precision_sides import BASELINE, Side, cast_sides, training_sides
from benchmarks.precision_trainings import gradient_errors, paired, work_of
from jaxops.nn import Fp8Linear
from models.data.packing import Documents
from models.data.text import Corpus
from models.decoder import DecoderConfig
from models.distributed.mesh import name_of
from models.training.presets import Preset
from tests.command_line import run

TINY = Preset(
    DecoderConfig(
        256, 16, layers=2, heads=2, kv_heads=2, head_dim=8, hidden=8, experts=2, top_k=1, dense_layers=(0,),
        dense_hidden=16, tie_embeddings=True,
    ),
    context=16, batch=4, steps=3, learning_rate=1e-2, warmup_steps=1, eval_every=3, eval_windows=8, balance_weight=0.0,
)  # fmt: skip
# For what experts change nothing of: they take thrice as long to compile.
DENSE = dataclasses.replace(
    TINY,
    model=dataclasses.replace(TINY.model, layers=1, hidden=16, experts=0, top_k=0, dense_layers=(), dense_hidden=None),
)
TWO_DENSE = dataclasses.replace(DENSE, model=dataclasses.replace(DENSE.model, layers=2))
TEXT = Documents(np.random.default_rng(0).integers(1, 256, 1024).astype(np.uint8), np.array([0, 300, 700, 1024]))
DIMENSIONS = (((1,), (0,)), ((), ()))


def test_paired_differences_by_hand():
    found = paired([2.02, 4.0, 3.06], [2.0, 4.0, 3.0])
    np.testing.assert_allclose(found.differences, [0.01, 0.0, 0.02], atol=1e-12)
    assert found.mean == pytest.approx(0.01)
    assert found.standard_error == pytest.approx(0.01 / 3**0.5)  # of the sample: the sum of squares over n - 1
    assert precision_report.significant({"mean": -0.0201, "standard_error": 0.01})
    assert not precision_report.significant({"mean": 0.0199, "standard_error": 0.01})


def test_gradient_errors_by_hand():
    """A stacked tensor by layer, numbered as the model's; the whole gradient is one vector."""
    want = {"blocks/w": np.array([[3.0, 0.0], [0.0, 4.0]]), "embed": np.array([0.0, 2.0])}
    got = {"blocks/w": np.array([[3.0, 4.0], [0.0, 2.0]]), "embed": np.array([0.0, -2.0])}
    errors = gradient_errors(got, want, {"blocks": (1, 3)})
    assert errors == {
        "all": pytest.approx([(9 + 8 - 4) / (33 * 29) ** 0.5, 6 / 29**0.5], abs=1e-6),
        "1 w": pytest.approx([0.6, 4 / 3], abs=1e-6),
        "3 w": [1.0, 0.5],
        "embed": [-1.0, 2.0],
    }


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_all_casts_are_the_recipe(recipe):
    """All six together are `fp8_matmul`; one changes its own product only; none is the plain product."""
    rng = np.random.default_rng(1)
    x, w, dout = (rng.normal(size=size).astype(np.float32) for size in ((137, 150), (150, 131), (137, 131)))
    w *= np.exp(np.arange(131, dtype=np.float32) / 20)  # so that rows and columns differ

    def results(call):
        @jax.jit
        def all_three(x, w, dout):
            out, vjp = jax.vjp(call, x, w)
            return out, *vjp(dout)

        return dict(zip(PRODUCTS, map(np.asarray, all_three(x, w, dout)), strict=True))

    of = lambda *casts: results(lambda x, w: SomeCasts(recipe, casts)(x, w, DIMENSIONS))
    plain, fp8 = results(jnp.matmul), results(lambda x, w: jaxops.fp8_matmul(x, w, recipe=recipe))
    close = lambda a, b: np.linalg.norm(a - b) < 1e-5 * np.linalg.norm(b)
    for found, wanted in ((of(), plain), (of(*CASTS), fp8), (of(*PRODUCTS), fp8)):
        assert all(close(found[name], wanted[name]) for name in PRODUCTS)
    for cast in CASTS:
        found = of(cast)
        assert {name for name in PRODUCTS if not close(found[name], plain[name])} == {cast.split(".")[0]}
        assert not close(found[cast.split(".")[0]], fp8[cast.split(".")[0]])


def layers_of(side: Side) -> Any:
    return side.model(TINY).layers()


def test_what_a_side_changes():
    """Every side has the same parameters; a recipe, powers of two and single casts are where their names say."""
    sides = training_sides() | cast_sides()
    assert next(iter(sides)) == BASELINE
    names = ("blockwise-dense-pow2", "blockwise", "blockwise-dense-wgrad.dout")
    powers, whole, cast = (layers_of(sides[name]) for name in names)
    for block in powers:
        assert isinstance(block.attention.q, Fp8Linear)
        assert block.attention.q.pow2_scales
    assert powers[1].mlp.config.recipe is None
    assert whole[1].mlp.config.recipe == "blockwise"
    assert not whole[0].mlp.gate.pow2_scales
    assert cast[0].mlp.gate.dot_general == cast[1].attention.out.dot_general == SomeCasts("blockwise", ("wgrad.dout",))
    assert sides["bfloat16-halves"].preset(TINY).accumulate == 2
    changed = {path for path, x in nnx.iter_modules(cast[1]) if isinstance(getattr(x, "dot_general", None), SomeCasts)}
    assert changed == {("attention", name) for name in ("q", "k", "v", "out")}, "not the router, not the experts"


def test_every_side_has_the_same_rows_and_each_start_its_own():
    work = work_of(TINY, Corpus(TEXT, TEXT))
    whole, halves = (work.batches(side, 1)(2).tokens for side in (Side("fp8-blockwise"), Side(BASELINE, halves=True)))
    np.testing.assert_array_equal(whole.reshape(-1), halves.reshape(-1))
    assert halves.shape == (2, 2, 16)
    assert np.any(work.batches(Side(BASELINE), 0)(2).tokens != whole)


def rows_of(tmp_path, *options) -> list[dict]:
    result = run(bench_precision.main, "--size", "cpu", "--out", str(tmp_path), *options)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in (tmp_path / "precision.jsonl").read_text().splitlines()]


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(bench_precision.SIZES, "cpu", TINY)
    monkeypatch.setattr(bench_precision.train_lm, "read_corpus", lambda *_: Corpus(TEXT, TEXT))


def test_trainings(tiny, monkeypatch, tmp_path):
    """A row a side, after the baseline, whose differences are those of the losses that it has."""
    monkeypatch.setitem(bench_precision.SIZES, "cpu", DENSE)
    plain, fp8 = rows_of(tmp_path, "--sides", "blockwise", "--starts", "2")
    assert [row["side"] for row in (plain, fp8)] == ["bfloat16", "blockwise"]
    assert plain["differences"] == [0, 0]
    assert plain["heldout"][0] != plain["heldout"][1]
    again = paired(fp8["heldout"], plain["heldout"])
    np.testing.assert_allclose(fp8["differences"], again.differences, atol=2e-6)
    assert (fp8["mean"], fp8["standard_error"]) == pytest.approx((again.mean, again.standard_error), abs=2e-6)
    assert 1e-6 < max(map(abs, fp8["differences"])) < 1e-2
    assert len(fp8["curve"]) == len(fp8["curve_mean"]) == len(fp8["curve_error"]) == TINY.steps
    np.testing.assert_allclose(fp8["curve"], plain["curve"], rtol=1e-2)
    assert fp8["shape"] == {"T": 64, "D": 16, "layers": 1, "experts": 0, "steps": 3, "starts": 2}


def test_gradients(tiny, monkeypatch, tmp_path):
    """A row a side and point. Casts of wgrad alone reach the dense layers' own kernels and no other tensor."""
    monkeypatch.setitem(bench_precision.SIZES, "cpu", TWO_DENSE)
    rows = rows_of(tmp_path, "--sides", "delayed,tensorwise-dense-wgrad", "--gradients")
    at = {(row["side"], row["step"]): {name: error for name, (_, error) in row["errors"].items()} for row in rows}
    assert len(rows) == len(at) == 9
    assert {step for _, step in at} == {0, 1, 3}
    for step in (0, 1, 3):
        plain, delayed, wgrad = (at[side, step] for side in (BASELINE, "delayed", "tensorwise-dense-wgrad"))
        assert 0 < plain["all"] < wgrad["all"] < delayed["all"] < 0.5
        for name in ("0 mlp/gate/kernel", "1 attention/q/kernel"):
            assert wgrad[name] > 1.1 * plain[name]
        for name in ("1 mlp_norm/scale", "embed/embedding"):
            assert wgrad[name] == plain[name] < delayed[name]


def test_gradients_by_layer(tiny, monkeypatch, tmp_path):
    """With stacks of experts and of dense layers; the gradients are made up."""
    shapes = nnx.state(layerwise := nnx.eval_shape(lambda: Side(BASELINE).model(TINY)), nnx.Param)
    assert layerwise.config.stacks() == ((1,), (0,))
    ones = {name_of(path).removesuffix("/value"): np.ones(x.shape) for path, x in jax.tree.leaves_with_path(shapes)}
    kept = SimpleNamespace(kept=dict.fromkeys(range(4)))
    monkeypatch.setattr(bench_precision, "trainer", lambda *_: lambda *_: kept)
    monkeypatch.setattr(bench_precision, "gradient_of", lambda *_: lambda *_: ones)
    (*_, row) = rows_of(tmp_path, "--sides", "rowwise", "--gradients")
    assert row["errors"].keys() >= {"0 mlp/gate/kernel", "1 mlp/moe/gate", "0 attention/q/kernel", "embed/embedding"}
    assert "0 mlp/moe/gate" not in row["errors"]


def test_the_report(tmp_path, monkeypatch):
    """Of two rows of a side the newer one counts; what is significant is bold; both kinds of sides have a table."""
    step = {"pass": "step", "curve_mean": [0.1, 0.2], "shape": {"steps": 4}, "standard_error": 0.001}
    rows = [
        step | {"side": "bfloat16", "mean": 0.0, "differences": [0.0, 0.0]},
        step | {"side": "blockwise", "mean": 0.5, "differences": [0.5, 0.5]},
        step | {"side": "rowwise", "mean": -0.0019, "differences": [-0.0029, -0.0009]},
        step | {"side": "blockwise", "mean": 0.0021, "differences": [0.0011, 0.0031]},
    ]
    for side, error in [("blockwise", 0.2), *((f"blockwise-dense-{cast}", 0.1) for cast in (*PRODUCTS, *CASTS))]:
        errors = {"all": [0.9, error], "0 mlp/gate/kernel": [0.8, 0.3], "embed": [1.0, 0.0]}
        rows += [{"pass": "gradient", "side": side, "step": step, "errors": errors} for step in (0, 4)]
    rows = [row | {"name": "lm_x"} for row in rows] + [rows[1] | {"name": "lm_x_slow", "mean": 0.7}]
    (tmp_path / "precision.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    both = (precision_report.BEGIN, precision_report.END)
    marks = [mark.format(name) for name in ("losses", "slow losses", "gradients", "casts") for mark in both]
    (document := tmp_path / "fp8.md").write_text("before\n" + "\nold\n".join(marks) + "\nafter\n")
    monkeypatch.setattr(precision_report, "DOCS", document)
    precision_report.main(tmp_path, "x")
    text = document.read_text()
    assert "| `blockwise` | **+0.210 %** | 0.100 % | +0.11, +0.31 |" in text
    assert "| `blockwise` | **+70.000 %** |" in text
    assert "| `rowwise` | -0.190 % | 0.100 % | -0.29, -0.09 |" in text
    assert "| `blockwise` | 0.9000, 20.0 % | 0.9000, 20.0 % | 0 mlp/gate/kernel (30 %) |" in text
    assert "| `wgrad.dout` | 10.0, 10.0 % |" in text
    assert text.startswith("before")
    assert text.endswith("after\n")
    precision_report.main(tmp_path, "x")
    assert document.read_text() == text, "written again it is the same"
    with Image.open(tmp_path / "precision.png") as picture:
        assert picture.width > 500


def test_the_docs_have_the_rows_tables():
    folder = precision_report.ROOT / "benchmarks/results/cpu"
    text = precision_report.DOCS.read_text()
    for name, table in precision_report.tables(precision_report.read_rows(folder / "precision.jsonl"), "cpu").items():
        assert precision_report.with_table(text, name, table) == text, "run python -m benchmarks.precision_report"


@pytest.mark.parametrize("options", [("--size", "huge"), ("--sides", "int4")])
def test_wrong_options(options):
    result = run(bench_precision.main, *options)
    assert result.exit_code == 2
    assert "is not one of" in result.output
