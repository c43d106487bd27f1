"""Runs with the same settings in one process share their compiled programs, most of a test's time."""

import dataclasses
import functools

import jax
import pytest

from models.training import lm as train_lm
from models.training import loop
from models.training.presets import PRESETS
from tests.models.interrupted_run import EVERY, TINY, train

# Fields of a model's configuration that change no parameter.
SAME_STATE = {"max_documents": None, "policy": None, "unroll": False}


def _key(task):
    """Of tasks whose states come from one program; other settings of the optimizer do not change it."""
    preset, model = task.preset, getattr(task, "sizes", None) or task.preset.model
    same = {name: value for name, value in SAME_STATE.items() if hasattr(model, name)}
    return type(task), dataclasses.replace(model, **same), preset.ema is None, preset.freeze, preset.seed


def _shared_first_states(first_state):
    programs, graphdef = {}, functools.cache(lambda task: jax.eval_shape(lambda: first_state(task))[0])

    def shared(task):
        if _key(task) not in programs:
            programs[_key(task)] = jax.jit(lambda: first_state(task)[1])
        return graphdef(task), programs[_key(task)]()

    return shared


def _shared_starts(start):
    programs, graphdef = {}, functools.cache(lambda task: jax.eval_shape(lambda: loop.first_state(task))[0])

    def shared(task, mesh):
        key = *_key(task), mesh
        if key not in programs:
            programs[key] = start(task, mesh)[1:]
        return graphdef(task), *programs[key]

    return shared


loop.first_state, loop.Task.start = _shared_first_states(loop.first_state), _shared_starts(loop.Task.start)
loop.make_step, loop.make_evaluate = functools.cache(loop.make_step), functools.cache(loop.make_evaluate)


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
