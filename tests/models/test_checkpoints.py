"""Checkpoints: which are written, which stay, what is read from them. Runs that are killed are in tests/models/test_launch.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from models.checkpoints import Checkpoints
from models.train_lm import init_state
from tests.models.interrupted_run import TINY


def assert_same_bits(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for ours, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert ours.dtype == wanted.dtype
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(wanted))


def test_histories_of_delayed_scaling(tmp_path):
    """Compiles nothing: the state's shapes, filled with numbers."""
    preset = dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, recipe="delayed"))
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda x: jnp.asarray(rng.integers(0, 99, x.shape), x.dtype), jax.eval_shape(lambda: init_state(preset, 0)[1]))
    assert len(jax.tree.leaves(state.histories)) == 7
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, 2)
    with Checkpoints(tmp_path) as checkpoints:
        assert_same_bits(checkpoints.start(state)[0], state)


def arrays(width: int = 4, **more):
    return {"params": {"kernel": jnp.arange(8.0 * width).reshape(8, width), **more}, "step": jnp.int32(0)}


def test_an_empty_folder_starts_from_the_beginning(tmp_path):
    state = arrays()
    with Checkpoints(tmp_path / "new") as checkpoints:
        assert checkpoints.start(state) == (state, 0)


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
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(arrays(), 2)
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(typer.BadParameter, match=message):
        checkpoints.start(state)


def test_which_stay(tmp_path):
    """The newest two, and the best."""
    heldout = {2: 3.0, 4: 1.0, 6: float("nan"), 8: 2.0}
    with Checkpoints(tmp_path, keep=2, keep_best=True) as checkpoints:
        for done in (2, 4, 6, 8, 10, 11):
            checkpoints.save(arrays(), done, heldout=heldout.get(done))
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps == [4, 10, 11]


def test_onto_other_devices(tmp_path):
    """Saved from four devices, read onto two with another axis split, and onto one."""
    if jax.device_count() < 4:
        pytest.skip("needs four devices")

    def place(state, devices: int, spec: P):
        mesh = jax.make_mesh((devices,), ("d",), devices=jax.devices()[:devices], axis_types=(AxisType.Auto,))
        return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec if x.ndim else P())), state)

    saved = arrays()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(place(saved, 4, P("d")), 2)
    for like in (place(jax.tree.map(jnp.zeros_like, saved), 2, P(None, "d")), jax.tree.map(jnp.zeros_like, saved)):
        with Checkpoints(tmp_path) as checkpoints:
            read, _ = checkpoints.start(like)
        assert_same_bits(read, saved)
        jax.tree.map(lambda ours, wanted: np.testing.assert_equal(ours.sharding.is_equivalent_to(wanted.sharding, ours.ndim), True), read, like)
