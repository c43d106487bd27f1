"""Frozen parameters stay, and cost no gradient, moment or average; the others train as if those were constants."""

import dataclasses

import jax
import numpy as np
import pytest
import typer
from flax import nnx

from models.data.packing import Batch, Documents
from models.decoder import DecoderConfig
from models.distributed.mesh import name_of
from models.training import lm as train_lm
from models.training import loop
from models.training.presets import Preset, rates
from tests.models.interrupted_run import train

CONFIG = DecoderConfig(256, 16, 2, 2, 2, 8, 24, backend="xla")  # dense: experts take thrice as long to compile
FREEZE = (r"^embed", "mlp/(gate|up|down)", "attention/[qk]/")
PRESET = Preset(CONFIG, 8, 8, ema=0.5, freeze=FREEZE, **rates(8, 1e-2, 1, 8))
FROZEN = {
    "embed/embedding", "blocks/mlp/gate/kernel", "blocks/mlp/up/kernel", "blocks/mlp/down/kernel",
    "blocks/attention/q/kernel", "blocks/attention/k/kernel",
}  # fmt: skip


def by_name(params: nnx.State) -> dict[str, np.ndarray]:
    return {name_of(path).removesuffix("/value"): np.asarray(x) for path, x in jax.tree.leaves_with_path(params)}


def batch_of(preset: Preset) -> Batch:
    """Of one document a row."""
    tokens = np.random.default_rng(0).integers(0, 256, (1, 9 * 8), np.uint8)
    documents = Documents(tokens[0], np.arange(0, 73, 9))
    return train_lm.make_batches(preset, documents, train_lm.make_rows(preset, documents))(0)


def test_they_stay_and_nothing_is_stored_for_them():
    """The step by hand: test_step_by_hand.py."""
    graphdef, state = loop.first_state(train_lm.LmTask(PRESET))
    before = by_name(state.params)
    assert set(by_name(state.average)) == set(before) - FROZEN
    names = [name_of(path) for path, _ in jax.tree.leaves_with_path(state.opt_state)]
    for moment in ("mu", "nu"):
        found = {name.split(f"/{moment}/")[1].removesuffix("/value") for name in names if f"/{moment}/" in name}
        assert found == set(before) - FROZEN
    step, batch = loop.make_step(graphdef, train_lm.LmTask(PRESET)), loop.place(batch_of(PRESET))
    for _ in range(2):  # the first one's learning rate is zero
        state, _ = step(state, batch, jax.random.key(0))
    for params in (state.params, loop.kept(state)):
        after = by_name(params)
        assert {name for name in before if np.array_equal(after[name], before[name])} == FROZEN


def test_their_gradients_are_not_computed():
    """A step that trains the head alone has no backward through the blocks. Counted before XLA removes unused work, but
    for the experts: where there are several devices, their layer is one operation until XLA has split it."""

    def flops(freeze: tuple[str, ...], **sizes) -> float:
        model = dataclasses.replace(CONFIG, **{"layers": 1, "hidden": 400, "unroll": True} | sizes)
        preset = dataclasses.replace(PRESET, ema=None, freeze=freeze, model=model)
        task, batch = train_lm.LmTask(preset), batch_of(preset)
        graphdef, state = jax.eval_shape(lambda: loop.first_state(task))
        step = loop.make_step(graphdef, task)
        program = step.lower(state, batch, jax.eval_shape(lambda: jax.random.key(0)))
        return (program.compile() if sizes else program).cost_analysis()["flops"]

    whole, blocks, head = flops(()), flops((r"^blocks.*kernel",)), flops((r"^(embed|blocks|norm)",))
    assert head < 0.5 * whole
    assert head < blocks < 0.75 * whole
    experts = {"experts": 3, "top_k": 2}
    assert flops(("moe/(gate|up|down)",), **experts) < 0.8 * flops((), **experts)


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
