"""Runs with the same settings in one process share their compiled programs, most of a test's time."""

import dataclasses
import functools

import jax
import pytest

from models.training import dit as train_dit
from models.training import lm as train_lm
from models.training import mm as train_mm
from models.training.presets import PRESETS
from tests.models.interrupted_run import EVERY, TINY, train

# Fields of a model's configuration that change no parameter.
SAME_STATE = {"max_documents": None, "crowd": None, "policy": None, "unroll": False}


def _share_first_states(module):
    """States of the same model and seed come from one program; other settings of the optimizer do not change them."""
    init_state, programs = module.init_state, {}
    graphdef = functools.cache(lambda *given: jax.eval_shape(lambda: init_state(*given))[0])

    def shared(*given):
        *sizes, preset, seed = given
        if getattr(preset, "init_from", None) is not None:
            return init_state(*given)
        (model,) = sizes or [preset.model]
        same = {name: value for name, value in SAME_STATE.items() if hasattr(model, name)}
        key = dataclasses.replace(model, **same), preset.ema is None, preset.freeze, seed
        if key not in programs:
            programs[key] = jax.jit(lambda: init_state(*given)[1])
        return graphdef(*given), programs[key]()

    module.init_state = shared


def _commit_first_states(module):
    """To the device, as those that a checkpoint is read into: a run that goes on takes the programs of the first."""
    create_sharded = module.create_sharded

    def committed(create, mesh):
        graphdef, state = create_sharded(create, mesh)
        return graphdef, state if mesh is not None else jax.device_put(state, jax.devices()[0])

    module.create_sharded = committed


for _module in (train_lm, train_dit, train_mm):
    _share_first_states(_module)
    _commit_first_states(_module)
    for _name in ("make_step", "make_evaluate"):
        setattr(_module, _name, functools.cache(getattr(_module, _name)))


def _as_tiny(patch):
    """What `tests.models.interrupted_run.train` changes."""
    patch.setitem(PRESETS, "tiny", TINY)
    patch.setattr(train_lm, "plot_report", None)
    patch.setattr(train_lm, "write_sample", None)


@pytest.fixture(scope="module")
def tiny():
    """Restores it."""
    with pytest.MonkeyPatch.context() as patch:
        _as_tiny(patch)
        yield


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The folder of an uninterrupted run on one device; tests change only copies."""
    with pytest.MonkeyPatch.context() as patch:
        _as_tiny(patch)
        out = tmp_path_factory.mktemp("whole")
        train(out, save_every=EVERY)
    return out
