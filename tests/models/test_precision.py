"""`--precision`: the layers that it changes, delayed scaling's state, and the comparison of all precisions."""

import functools
import io
import itertools
import json
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from flax import nnx
from PIL import Image
from rich.console import Console

from jaxops.nn import AmaxHistory, Fp8Linear
from models import compare_precision, report, train_dit, train_lm
from models.data import Corpus
from models.decoder import Decoder
from models.dit import DiT
from models.dit import generate as generate_images
from models.images import DATA_SETS, DataSet, Images
from models.inference import for_inference
from models.loop import Run
from models.packing import Documents
from models.precision import PRECISIONS, for_this_machine, linear_layer
from models.presets import DIT_PRESETS, PRESETS, DiTPreset, Preset, of_bytes

TINY_MOE = of_bytes(layers=1, width=16, heads=2, experts=2, top_k=1, hidden=8)
TINY = Preset(
    TINY_MOE, context=32, batch=4, steps=12, learning_rate=2e-2, warmup_steps=2, eval_every=12, eval_windows=8
)
TINY_DIT = DiTPreset(
    layers=1, width=16, heads=2, tokens=40, images=4, steps=8, learning_rate=1e-2, warmup_steps=2, eval_every=4, ema=0.9
)
LM_PRODUCTS = {f"blocks.attention.{name}" for name in ("q", "k", "v", "out")}  # the experts' are no layers
DIT_PRODUCTS = {f"blocks.{name}" for name in ("mixer.qkv", "mixer.out", "mlp.wide", "mlp.narrow", "modulation")} | {
    "norm.modulation"
}


def few_images(seed: int) -> DataSet:
    rng = np.random.default_rng(seed)
    images = Images([rng.integers(0, 256, (4, 6, 1), np.uint8) for _ in range(8)], np.arange(8, dtype=np.int32) % 2)
    return DataSet(images, images, ("one", "other"), 2, 1, 6, ((4, 6),))


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", TINY)
    monkeypatch.setitem(DIT_PRESETS, "tiny", TINY_DIT)
    monkeypatch.setitem(DATA_SETS, "digits", few_images)


def abstract(model: str, precision: str):
    if model == "lm":
        return nnx.eval_shape(
            lambda: Decoder(train_lm.configure(TINY, None, "auto", PRECISIONS[precision]).model, rngs=nnx.Rngs(0))
        )
    return nnx.eval_shape(
        lambda: DiT(
            train_dit.configure(train_dit.with_precision(TINY_DIT, PRECISIONS[precision]), few_images(0)),
            rngs=nnx.Rngs(0),
        )
    )


@functools.cache
def shapes_in_float32(model: str):
    return parameter_shapes(abstract(model, "float32"))


def parameter_shapes(model):
    return jax.tree.map(jnp.shape, nnx.state(model, nnx.Param))


def layers(model, *types) -> dict:
    return {".".join(map(str, path)): layer for path, layer in nnx.iter_modules(model) if isinstance(layer, types)}


@pytest.mark.parametrize(("model", "products"), [("lm", LM_PRODUCTS), ("dit", DIT_PRODUCTS)])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_layers(model, products, precision):
    made = abstract(model, precision)
    fp8, plain = layers(made, Fp8Linear), layers(made, nnx.Linear)
    assert set(fp8) == (products if precision.startswith("fp8-") else set())
    assert set(fp8 | plain) >= products
    for layer in fp8.values():
        recipe = precision.removeprefix("fp8-").replace("-", "_")
        assert layer.recipe == recipe
    for name, layer in (fp8 | plain).items():
        assert layer.dtype == (jnp.float32 if precision == "float32" or name.endswith("router") else jnp.bfloat16)
    assert parameter_shapes(made) == shapes_in_float32(model), "the parameters are the same in every precision"


@pytest.mark.parametrize(("command", "options"), [(train_lm, {}), (train_dit, {"data": "digits"})], ids=["lm", "dit"])
@pytest.mark.parametrize("precision", ["fp8-rowwise-with-gw-hp", "bfloat16", None])
def test_the_commands_hand_it_on(command, options, precision, monkeypatch, tmp_path):
    def stop(preset, *args):
        config = args[0] if command is train_dit else preset.model
        raise InterruptedError(config.dtype, config.recipe)

    monkeypatch.setattr(command, "train", stop)
    with pytest.raises(InterruptedError) as stopped:
        command.main(preset="tiny", out=tmp_path, precision=precision, **options)
    assert stopped.value.args == PRECISIONS[precision or for_this_machine()]


def test_training_in_delayed_scaling(tmp_path):
    """Every step appends to each history, evaluations do not; the returned model is in evaluation mode."""
    text = Documents(np.tile(np.frombuffer(b"abcdefgh", np.uint8), 64), np.array([0, 512]))
    preset = train_lm.configure(TINY, None, "auto", PRECISIONS["fp8-delayed"])
    model, history = train_lm.train(preset, Corpus(text, text), "nats", Run(tmp_path, Console(file=io.StringIO())))
    assert history.heldout[-1][1] < history.heldout[0][1] - 0.5
    histories = jax.tree.leaves(nnx.state(model, AmaxHistory))
    assert [(h.shape, np.count_nonzero(h[0]), np.count_nonzero(h[1])) for layers in histories for h in layers] == 4 * [
        ((2, 16), TINY.steps, TINY.steps)
    ]
    assert model.blocks.attention.q.use_running_average


def draw_two(model):
    model = for_inference(model)

    def step(carry, _):
        logits, cache = model.extend(carry[0], carry[1], jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32))
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return (token[None], cache), token[0]

    return jax.lax.scan(step, (jnp.zeros((1, 1), jnp.int32), model.empty_cache(1, 8)), length=2)[1]


@pytest.mark.parametrize("model", ["lm", "dit"])
def test_every_program_in_delayed_scaling(model):
    """Traced only: a loop over the model raises if the model changes a history, as in evaluation and sampling."""
    workload = compare_precision.WORKLOADS[model]("tiny", steps=2)
    made = abstract(model, "fp8-delayed")
    graphdef, params, histories = nnx.split(made, nnx.Param, AmaxHistory)
    state = jax.eval_shape(lambda: workload.start(0))._replace(histories=histories)
    after, metrics = jax.eval_shape(workload.make_step(PRECISIONS["fp8-delayed"], graphdef), state, *workload.inputs(1))
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    assert metrics.loss.shape == ()

    made.eval()
    sampled, whole = nnx.split(made)
    if model == "lm":
        evaluate = train_lm.make_evaluate(graphdef, TINY)
        draw = lambda whole: draw_two(nnx.merge(sampled, whole))
    else:
        images = jax.tree.map(lambda x: x[0], workload.inputs(0)[0])
        evaluate = train_dit.make_evaluate(graphdef)
        draw = lambda whole: generate_images(nnx.merge(sampled, whole), images, jax.random.key(0), 2)
    assert jax.eval_shape(evaluate, params, histories, *workload.inputs(0)).shape == ()
    assert jax.eval_shape(draw, whole).shape == ((2,) if model == "lm" else images.tokens.shape)


class ToyState(NamedTuple):
    params: nnx.State
    histories: nnx.State


class ToyMetrics(NamedTuple):
    loss: jax.Array


def toy_workload(preset: str, steps: int) -> compare_precision.Workload:
    """Learns that the answer is zero, by gradient descent with one linear layer."""
    make = lambda precision, seed=0: linear_layer(precision.recipe, "auto")(8, 4, use_bias=False, rngs=nnx.Rngs(seed))

    def make_step(precision, graphdef):
        def objective(params, histories, x):
            layer = nnx.merge(graphdef, params, histories, copy=True)
            return jnp.mean(layer(x) ** 2), nnx.state(layer, AmaxHistory)

        @functools.partial(jax.jit, donate_argnums=0)
        def step(state, x):
            (loss, histories), grads = jax.value_and_grad(objective, has_aux=True)(*state, x)
            return ToyState(jax.tree.map(lambda p, g: p - 0.1 * g, state.params, grads), histories), ToyMetrics(loss)

        return step

    inputs = [np.random.default_rng(i).normal(size=(16, 8)).astype(np.float32) for i in range(steps)]
    start = lambda seed: ToyState(*nnx.split(make(PRECISIONS["bfloat16"], seed), nnx.Param, AmaxHistory)[1:])
    return compare_precision.Workload(steps, start, make, make_step, lambda step: (inputs[step],), {"T": 16, "D": 8})


def test_comparison(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(compare_precision.WORKLOADS, "toy", toy_workload)
    compare_precision.main(["toy"], steps=60, recipes="delayed,blockwise_with_gw_hp", seeds=2, out=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "precision.jsonl").read_text().splitlines()]
    assert [(row["precision"], row["seed"]) for row in rows] == list(
        itertools.product(["bfloat16", "fp8-delayed", "fp8-blockwise-with-gw-hp"], [0, 1])
    )
    for row in rows:
        plain = rows[
            row["seed"] if row["precision"] != "bfloat16" else 0
        ]  # from the same start, and bfloat16 from the first one
        assert (row["op"], row["model"], row["steps"], row["finite"], row["device"]) == (
            "train",
            "toy",
            60,
            True,
            jax.devices()[0].device_kind,
        )
        assert row["ratio_to_bf16"] == pytest.approx(row["loss_last50"] / plain["loss_last50"], rel=1e-3)
        assert row["tokens_per_s"] == pytest.approx(1e6 * 16 / row["us_p50"], rel=0.01)
        assert row["vs"] == (
            {}
            if row["precision"] == "bfloat16"
            else {"bfloat16": pytest.approx(plain["us_p50"] / row["us_p50"], rel=1e-2)}
        )
        parts = [2] * 10 + [1] * 40  # steps of which the curve's 50 numbers are means
        assert row["loss_last50"] == pytest.approx(np.average(row["curve"][5:], weights=parts[5:]), rel=1e-3)
        assert len(row["curve"]) == 50
        assert row["curve"][-1] < 0.5 * row["curve"][0]
    assert rows[0]["ratio_to_bf16"] == 1
    assert rows[1]["curve"][0] != rows[0]["curve"][0]
    for row in rows[2:]:
        plain = rows[row["seed"]]
        assert row["curve"] != plain["curve"]
        assert row["curve"][0] == pytest.approx(plain["curve"][0], rel=0.05), "the same parameters, the same batch"
        assert row["ratio_to_bf16"] == pytest.approx(1, abs=0.05)
    printed = capsys.readouterr().out
    assert re.search(r"fp8-blockwise-with-gw-hp +[-+][.0-9]+% of bfloat16's loss, the mean of 2 starts", printed)
    with Image.open(tmp_path / "precision.png") as picture:
        assert picture.width > 500


def test_the_picture_compares_what_was_trained_together(tmp_path, monkeypatch):
    """The newest curve of each precision over its own run's baseline; of other starts only the baseline's second."""
    rows = [
        {"model": "toy", "precision": precision, "seed": seed, "steps": 2, "curve": curve}
        for precision, seed, curve in [
            *(("bfloat16", 0, [2.0, 1.0]), ("fp8-rowwise", 0, [2.2, 1.0]), ("fp8-delayed", 0, [9.0, 9.0])),
            *(
                ("bfloat16", 0, [4.0, 2.0]),
                ("bfloat16", 1, [4.4, 2.0]),
                ("fp8-delayed", 0, [4.0, 2.1]),
                ("fp8-delayed", 1, [7.0, 7.0]),
            ),
        ]
    ]
    drawn = []
    monkeypatch.setattr(report.Figure, "savefig", lambda figure, *_, **__: drawn.extend(figure.axes))
    report.plot_precisions(rows, "bfloat16", tmp_path / "x.png")
    above, below = ([line.get_ydata().tolist() for line in axes.lines] for axes in drawn)
    assert above == [[4.0, 2.0], [2.2, 1.0], [4.0, 2.1], [4.4, 2.0]]
    np.testing.assert_allclose(below, [[0, 0], [10, 0], [0, 5], [10, 0]], atol=1e-9)


@pytest.mark.parametrize(
    "call",
    [
        lambda: train_lm.main(precision="fp8"),
        lambda: train_dit.main(precision="int8"),
        lambda: compare_precision.main(["vae"]),
        lambda: compare_precision.main(["lm"], recipes="fp8-blockwise"),
        lambda: compare_precision.main(["dit"], preset="huge"),
    ],
)
def test_wrong_options(call, tmp_path, monkeypatch):
    monkeypatch.setattr(compare_precision, "results_folder", lambda: tmp_path)
    with pytest.raises(typer.BadParameter, match="is not one of"):
        call()


def test_without_a_gpu_nothing_lands_among_the_results():
    if jax.default_backend() == "gpu":
        pytest.skip("this machine has one")
    with pytest.raises(typer.BadParameter, match="pass a folder"):
        compare_precision.main(["lm"])
