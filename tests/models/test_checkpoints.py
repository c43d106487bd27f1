"""Checkpoints: a run that is stopped, by SIGKILL in the middle of a write, goes on to the bits of one that is not."""

import dataclasses
import functools
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from models.checkpoints import Checkpoints
from models.train_lm import init_state
from tests.models.interrupted_run import EVERY, TINY, start, train

ROOT = Path(__file__).parents[2]
open_checkpoints = functools.partial(Checkpoints, every=EVERY)


def assert_same_bits(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for ours, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert ours.dtype == wanted.dtype
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(wanted))


def test_a_killed_run_goes_on_to_the_same_bits(tmp_path):
    """The run in another process is killed while its second checkpoint is half written; the first was written while later steps overwrote the state."""
    command = [sys.executable, "-m", "tests.models.interrupted_run", str(tmp_path)]
    advance, state = start()
    at_two, _ = train(advance, None, state, 0, 2)
    wanted = jax.tree.map(np.array, at_two)
    at_six, metrics = train(advance, None, at_two, 2, 6)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert {process.stdout.readline() for _ in range(2)} == {"writing\n", "saved\n"}
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"2", "4.orbax-checkpoint-tmp"}
    assert any((tmp_path / "4.orbax-checkpoint-tmp").rglob("*.ocdbt")), "the write had begun"
    shutil.copytree(tmp_path / "4.orbax-checkpoint-tmp", tmp_path / "3.orbax-checkpoint-tmp")  # as of a step that is not written again

    with open_checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps == [2]
        resumed, done = checkpoints.start(start()[1], resume=True)
        assert done == 2
        assert_same_bits(resumed, wanted)
        resumed, resumed_metrics = train(advance, checkpoints, resumed, done, 6)
    assert_same_bits(resumed, at_six)
    assert_same_bits(resumed_metrics, metrics)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4", "6"]


def test_histories_of_delayed_scaling(tmp_path):
    """Compiles nothing: the state's shapes, filled with numbers."""
    preset = dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, recipe="delayed"))
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda x: jnp.asarray(rng.integers(0, 99, x.shape), x.dtype), jax.eval_shape(lambda: init_state(preset, 0)[1]))
    assert len(jax.tree.leaves(state.histories)) == 4
    with open_checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, 2)
    with open_checkpoints(tmp_path) as checkpoints:
        assert_same_bits(checkpoints.start(state, resume=True)[0], state)


def arrays(width: int = 4, **more):
    return {"params": {"kernel": jnp.arange(8.0 * width).reshape(8, width), **more}, "step": jnp.int32(0)}


def test_an_empty_folder_starts_from_the_beginning(tmp_path):
    state = arrays()
    with open_checkpoints(tmp_path / "new") as checkpoints:
        assert checkpoints.start(state, resume=True) == (state, 0)
        assert checkpoints.start(state, resume=False) == (state, 0)


def test_checkpoints_are_not_overwritten_unasked(tmp_path):
    with open_checkpoints(tmp_path) as checkpoints:
        checkpoints.save(arrays(), 4)
    with open_checkpoints(tmp_path) as checkpoints, pytest.raises(typer.BadParameter, match=r"has checkpoints up to step 4: write --resume"):
        checkpoints.start(arrays(), resume=False)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (arrays(5), r"params/kernel is float32\[8, 4\] there and float32\[8, 5\] here\. Resume"),
        (arrays(bias=jnp.zeros(4)), r"params/bias is missing there and float32\[4\] here"),
        ({"step": jnp.int32(0)}, r"params/kernel is float32\[8, 4\] there and missing here"),
        ({**arrays(), "step": jnp.float32(0)}, r"step is int32\[\] there and float32\[\] here"),
        (arrays(5, a=jnp.zeros(4), b=jnp.zeros(4), c=jnp.zeros(4)), r"params/a is.*params/b is.*params/c is missing there and float32\[4\] here, and 1 more"),
    ],
    ids=["shape", "one more", "one less", "dtype", "many"],
)
def test_another_model_is_an_error(state, message, tmp_path):
    with open_checkpoints(tmp_path) as checkpoints:
        checkpoints.save(arrays(), 2)
    with open_checkpoints(tmp_path) as checkpoints, pytest.raises(typer.BadParameter, match=message):
        checkpoints.start(state, resume=True)


def test_which_are_written_and_which_stay(tmp_path):
    """Each second step's and the last one's; of them the newest two, and the best."""
    heldout = {2: 3.0, 4: 1.0, 6: float("nan"), 8: 2.0}
    with Checkpoints(tmp_path, every=EVERY, keep=2, keep_best=True) as checkpoints:
        for done in range(1, 12):
            checkpoints.save(arrays(), done, heldout=heldout.get(done), last=done == 11)
    with open_checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps == [4, 10, 11]


def test_onto_other_devices(tmp_path):
    """Saved from four devices, read onto two with another axis split, and onto one."""
    if jax.device_count() < 4:
        pytest.skip("needs four devices")

    def place(state, devices: int, spec: P):
        mesh = jax.make_mesh((devices,), ("d",), devices=jax.devices()[:devices], axis_types=(AxisType.Auto,))
        return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec if x.ndim else P())), state)

    saved = arrays()
    with open_checkpoints(tmp_path) as checkpoints:
        checkpoints.save(place(saved, 4, P("d")), 2)
    for like in (place(jax.tree.map(jnp.zeros_like, saved), 2, P(None, "d")), jax.tree.map(jnp.zeros_like, saved)):
        with open_checkpoints(tmp_path) as checkpoints:
            read, _ = checkpoints.start(like, resume=True)
        assert_same_bits(read, saved)
        jax.tree.map(lambda ours, wanted: np.testing.assert_equal(ours.sharding.is_equivalent_to(wanted.sharding, ours.ndim), True), read, like)
