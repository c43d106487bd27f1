"""Frozen parameters stay, and cost no gradient, moment or average; the others train as if those were constants."""

import dataclasses
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import typer
from flax import nnx

from models.data.packing import Documents
from models.data.text import split
from models.decoder import DecoderConfig
from models.decoder.loss import loss_fn
from models.distributed.mesh import make_mesh, name_of, replicate, shard_state
from models.training import frozen, loop
from models.training import lm as train_lm
from models.training.presets import Preset
from tests.arrays import put
from tests.compare import assert_close
from tests.devices import needs_four
from tests.models.interrupted_run import EVERY, train

CONFIG = DecoderConfig(256, 16, 2, 2, 2, 8, 24, backend="xla")  # dense: experts take thrice as long to compile
PRESET = Preset(
    CONFIG, 8, 8, steps=8, learning_rate=1e-2, warmup_steps=1, eval_every=8, clip_norm=0.05, accumulate=2, ema=0.5,
    balance_weight=0.0, freeze=(r"^embed", "mlp/(gate|up|down)", "attention/[qk]/"),
)  # fmt: skip
LENGTHS = np.random.default_rng(1).integers(2, 30, 40)
CORPUS = split(
    Documents(np.random.default_rng(0).integers(0, 256, LENGTHS.sum(), dtype=np.uint8), np.cumsum([0, *LENGTHS]))
)
FROZEN = {
    "embed/embedding", "blocks/mlp/gate/kernel", "blocks/mlp/up/kernel", "blocks/mlp/down/kernel",
    "blocks/attention/q/kernel", "blocks/attention/k/kernel",
}  # fmt: skip


def by_name(params: nnx.State) -> dict[str, np.ndarray]:
    return {name_of(path).removesuffix("/value"): np.asarray(x) for path, x in jax.tree.leaves_with_path(params)}


def batches_of(preset: Preset):
    return train_lm.make_batches(preset, CORPUS.train, train_lm.make_rows(preset, CORPUS.train))


def two_steps(shape: str | None = None):
    """The states before and after, and the metrics."""
    mesh = None if shape is None else make_mesh(shape)
    graphdef, state = train_lm.init_state(PRESET, 0)
    before = by_name(state.params)
    if mesh is not None:
        graphdef, state = train_lm.sharded_graphdef(PRESET, mesh), shard_state(state, mesh)
    step, read = train_lm.make_step(graphdef, PRESET, mesh), []
    for number in range(2):
        batch = loop.place(batches_of(PRESET)(number), mesh)
        state, metrics = step(state, batch, replicate(jax.random.key(0), mesh))
        read.append(metrics)
    return before, state, read


@pytest.fixture(scope="module")
def done():
    return two_steps()


def test_two_steps_by_hand(done):
    """AdamW of the trained parameters, with clipping by their norm alone and an average of them alone."""
    before, state, metrics = done
    graphdef, whole = train_lm.init_state(PRESET, 0)
    loss = lambda params, batch: loss_fn(nnx.merge(graphdef, params, whole.histories), batch)[0]
    params, gradient = whole.params, jax.jit(jax.grad(loss))
    moments = average = None
    for number in range(2):
        batch = batches_of(PRESET)(number)
        micros = [jax.tree.map(lambda x, i=i: put(x[i]), batch) for i in range(2)]
        counts = [int(micro.counted()) for micro in micros]
        each = [by_name(gradient(params, micro)) for micro in micros]
        grads = {name: sum(c * g[name] for c, g in zip(counts, each, strict=True)) / sum(counts) for name in before}
        grads = {name: grad.astype(np.float64) for name, grad in grads.items() if name not in FROZEN}
        norm = np.sqrt(sum((grad**2).sum() for grad in grads.values()))
        assert norm > PRESET.clip_norm
        np.testing.assert_allclose(metrics[number].gradient_norm, norm, rtol=1e-4)
        grads = {name: grad * PRESET.clip_norm / norm for name, grad in grads.items()}
        moments = moments or (dict.fromkeys(grads, 0), dict.fromkeys(grads, 0))
        mean = {name: 0.9 * moments[0][name] + 0.1 * grad for name, grad in grads.items()}
        square = {name: 0.98 * moments[1][name] + 0.02 * grad**2 for name, grad in grads.items()}
        moments, rate, old = (mean, square), float(metrics[number].learning_rate), by_name(params)
        new = dict(old)
        for name in grads:
            adam = mean[name] / (1 - 0.9 ** (number + 1)) / (np.sqrt(square[name] / (1 - 0.98 ** (number + 1))) + 1e-8)
            new[name] = old[name] - rate * (adam + (0.0 if re.search("scale", name) else 0.1) * old[name])
        average = average or {name: before[name] for name in grads}
        keep = min(0.5, (1 + number) / (10 + number))
        average = {name: keep * average[name] + (1 - keep) * new[name] for name in grads}
        params = jax.tree.unflatten(jax.tree.structure(params), [put(new[n], jnp.float32) for n in old])
    for name, value in by_name(state.params).items():
        np.testing.assert_allclose(value, new[name], rtol=1e-3, atol=2e-6, err_msg=name)
        assert (name in FROZEN) == np.array_equal(value, before[name])
    for name, value in by_name(state.average).items():
        np.testing.assert_allclose(value, average[name], rtol=1e-3, atol=2e-6, err_msg=name)
    kept = by_name(loop.kept(state))
    assert kept.keys() == before.keys()
    assert all(np.array_equal(kept[name], before[name]) == (name in FROZEN) for name in before)


def test_nothing_is_stored_for_them(done):
    before, state, _ = done
    trained = set(before) - FROZEN
    assert set(by_name(state.average)) == trained
    names = [name_of(path) for path, _ in jax.tree.leaves_with_path(state.opt_state)]
    for moment in ("mu", "nu"):
        found = {name.split(f"/{moment}/")[1].removesuffix("/value") for name in names if f"/{moment}/" in name}
        assert found == trained


@needs_four
def test_over_a_mesh(done):
    before, state, metrics = two_steps("fsdp=4")
    _, wanted, alone = done
    for ours, want in zip(metrics, alone, strict=True):
        np.testing.assert_allclose(ours.loss, want.loss, rtol=1e-4)
        np.testing.assert_allclose(ours.gradient_norm, want.gradient_norm, rtol=1e-3)
    for name, value in by_name(wanted.params).items():
        assert_close(by_name(state.params)[name], value, "float32", name, scale=100)
    assert all(np.array_equal(by_name(state.params)[name], before[name]) for name in FROZEN)


def test_their_gradients_are_not_computed():
    """A step that trains the head alone has no backward through the blocks. Counted before XLA removes unused work."""

    def flops(freeze: tuple[str, ...], **sizes) -> float:
        model = dataclasses.replace(CONFIG, **{"layers": 1, "hidden": 400, "unroll": True} | sizes)
        preset = dataclasses.replace(PRESET, accumulate=1, ema=None, freeze=freeze, model=model)
        graphdef, state = jax.eval_shape(lambda: train_lm.init_state(preset, 0))
        batch = batches_of(preset)(0)
        step = loop.make_step(graphdef, preset, lambda *given: train_lm.objective(preset, True, *given))
        return step.lower(state, batch, jax.eval_shape(lambda: jax.random.key(0))).cost_analysis()["flops"]

    whole, blocks, head = flops(()), flops((r"^blocks.*kernel",)), flops((r"^(embed|blocks|norm)",))
    assert head < 0.5 * whole
    assert head < blocks < 0.75 * whole
    experts = {"experts": 3, "top_k": 2}
    assert flops(("moe/(gate|up|down)",), **experts) < 0.8 * flops((), **experts)


def test_a_run_goes_on_to_the_same_bits(tiny, tmp_path):
    out, freeze = tmp_path / "whole", ["embed", "norm"]
    train(out, save_every=EVERY, freeze=freeze)
    again = shutil.copytree(out, tmp_path / "again")
    for step in ("4", "5"):
        shutil.rmtree(again / "checkpoints" / step)
    train(again, save_every=EVERY, freeze=freeze, resume=True)
    one, other = (
        ocp.StandardCheckpointer().restore((folder / "checkpoints" / "5").resolve()) for folder in (out, again)
    )
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert not [name for name in one if "opt_state" in name and "embed" in name]
    losses = [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]
    assert "freeze:\n- embed\n- norm\n" in (out / "config.yaml").read_text()
    with pytest.raises(typer.BadParameter, match=r"freeze is \('embed', 'norm'\) there and \('embed',\) here"):
        train(again, save_every=EVERY, freeze=["embed"], resume=True)


@pytest.mark.parametrize(
    ("patterns", "says"),
    [
        (["embed", "atention"], "freeze 'atention' matches no parameter; these are .*blocks/attention/q/kernel"),
        (["("], r"freeze '\(' is no regular expression"),
        ([""], r"freeze \[''\] leaves no parameter to train"),
    ],
)
def test_what_is_wrong(tiny, tmp_path, patterns, says):
    """Said before anything is read or written."""
    with pytest.raises(typer.BadParameter, match=says):
        train(tmp_path / "out", freeze=patterns)
    assert not (tmp_path / "out").exists()


def test_parts(done):
    params = train_lm.init_state(PRESET, 0)[1].params
    trained, others = frozen.split(params, PRESET.freeze)
    assert set(by_name(others)) == FROZEN
    assert jax.tree.structure(frozen.joined(params, trained)) == jax.tree.structure(params)
    assert jax.tree.structure(frozen.split(params, ())[0]) == jax.tree.structure(params)
    assert frozen.remark(params, ()) == ""
    count = sum(x.size for x in by_name(others).values())
    assert frozen.remark(params, PRESET.freeze).startswith(f"{count:,} of ")
