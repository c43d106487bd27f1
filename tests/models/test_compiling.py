"""A run's programs are compiled once each, beside each other, and only those that it calls."""

import collections
import contextlib
import dataclasses
import functools
import gc
import io
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer

from models.training import compiling, loop
from models.training import dit as train_dit
from models.training import lm as train_lm
from models.training.compiling import Compiling
from models.training.presets import DIT_PRESETS, PRESETS, rates
from tests.models.interrupted_run import EVERY, MODEL, TINY, train

COMPILED = "/jax/core/compile/backend_compile_duration"
LICENSE = str(Path(__file__).parents[2] / "LICENSE")
# Sizes of no other test's, so that none of the programs is there already.
OTHER = dataclasses.replace(TINY, model=dataclasses.replace(MODEL, layers=1, width=24), context=24, steps=3)


@pytest.fixture
def compiled():
    """How often a program of each name is compiled; without JAX's cache on disk, which would hide a second time."""
    found = collections.Counter()

    def count(event: str, duration_secs: float, **given: Any) -> None:
        if event == COMPILED and duration_secs:
            found[given["fun_name"].removeprefix("jit(").removesuffix(")")] += 1

    before = getattr(jax.config, "jax_enable_compilation_cache")  # noqa: B009 - pyright does not know it
    jax.config.update("jax_enable_compilation_cache", False)
    jax.monitoring.register_event_duration_secs_listener(count)
    yield found
    jax.monitoring.unregister_event_duration_listener(count)
    jax.config.update("jax_enable_compilation_cache", before)


def test_a_language_model_run(compiled, tmp_path, monkeypatch):
    """The state, both keys, step, evaluate, and the sampler: nothing twice, and few others."""
    monkeypatch.setitem(PRESETS, "other", OTHER)
    train_lm.main(preset="other", data=[LICENSE], out=tmp_path, backend="xla")
    once = ("step", "evaluate", "_prefill", "advance", "_converted")
    assert [compiled[name] for name in once] == len(once) * [1]
    assert sum(compiled.values()) < 30, compiled
    first, *others = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first["compile_s"] > 0
    assert all("compile_s" not in row for row in others)


def test_an_image_run(compiled, tmp_path, monkeypatch):
    tiny = {"layers": 1, "width": 24, "heads": 1, "tokens": 72, "images": 4, "sample_steps": 1}
    monkeypatch.setitem(DIT_PRESETS, "one", train_dit.DiTPreset(**tiny, **rates(2, 1e-3, 1, 2)))
    train_dit.main(preset="one", out=tmp_path, backend="xla")
    assert [compiled[name] for name in ("step", "evaluate", "_drawn")] == [1, 1, 1]
    assert sum(compiled.values()) < 10, compiled


@pytest.mark.usefixtures("tiny")
def test_a_resumed_run(compiled, tmp_path, whole, monkeypatch):
    """With a checkpoint's arrays it takes the programs of a new run. A finished one compiles no step."""
    started, start = [], Compiling.start
    record = lambda self, name, *given: (started.append(name), start(self, name, *given))
    monkeypatch.setattr(Compiling, "start", record)
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    train(out, save_every=EVERY, resume=True)
    assert started == []
    for step in ("4", "5"):
        shutil.rmtree(out / "checkpoints" / step)
    shutil.rmtree(out / "checkpoint-hf")
    train(out, save_every=EVERY, resume=True)
    assert started == ["step", "evaluate"]
    assert compiled["step"] == compiled["evaluate"] == 0  # `whole` has compiled them


def test_its_own_line_while_it_compiles(monkeypatch):
    lines, hold, done = [], threading.Event(), threading.Event()

    class Slow:
        def trace(self, x):
            self.jaxpr = jax.make_jaxpr(jnp.sin)(x)
            return self

        def lower(self):
            return self

        def compile(self):
            hold.wait(60)
            done.set()
            return "a program"

    with Compiling() as programs:
        programs.start("step", Slow(), 1.0)
        programs.start("evaluate", lambda x: x, 1.0)  # not jitted: its call compiles nothing ahead
        monkeypatch.setattr(compiling, "_kernels", lambda *_: iter("ab"))
        programs.start("other", Slow(), 1.0)
        assert programs.wait("evaluate", lines.append) is None
        assert not done.is_set()
        threading.Timer(1.5, hold.set).start()
        seconds = [programs.wait(name, lines.append) for name in ("step", "other")]
        assert all(s is not None and s > 1 for s in seconds)
        assert programs.wait("step", lines.append) is None
    assert lines[0].startswith("compiling step: 1 s")
    assert programs._kernels == {"step": "", "other": "2 kernels, "}


def test_no_garbage_is_collected_while_a_program_is_lowered():
    enabled = []

    class Traced:
        def trace(self, x):
            enabled.append(gc.isenabled())
            self.jaxpr = jax.make_jaxpr(jnp.sin)(x)
            return self

        def lower(self):
            enabled.append(gc.isenabled())
            raise ValueError("cannot be lowered")

    with pytest.raises(ValueError, match="cannot be lowered"):
        Compiling().start("step", Traced(), 1.0)
    assert [*enabled, gc.isenabled()] == [False, False, True]


@pytest.mark.parametrize("name", ["step", "evaluate"])
@pytest.mark.usefixtures("tiny")
def test_a_compilers_error_is_the_runs(name, tmp_path, monkeypatch):
    """From its thread, as it was."""
    make = getattr(loop, f"make_{name}")

    class Failing:
        def __init__(self, *given):
            self.function = make(*given)

        def __call__(self, *given):
            return self.function(*given)

        def trace(self, *given):
            self.jaxpr = self.function.trace(*given).jaxpr
            return self

        def lower(self):
            return self

        def compile(self):
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(loop, f"make_{name}", Failing)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        train(tmp_path)


@pytest.mark.usefixtures("tiny")
def test_an_interrupt_while_it_compiles_does_not_wait(tmp_path, monkeypatch):
    """Ctrl-C before the first step, while a thread compiles."""
    hold = threading.Event()

    class Slow:
        def trace(self, *given):
            self.jaxpr = jax.make_jaxpr(jnp.sin)(1.0)
            return self

        def lower(self):
            return self

        def compile(self):
            hold.wait(60)

    def interrupted(*_):
        raise KeyboardInterrupt

    printed = io.StringIO()
    monkeypatch.setattr(loop, "make_step", lambda *_: Slow())
    monkeypatch.setattr(loop, "make_evaluate", interrupted)
    with contextlib.redirect_stdout(printed), pytest.raises(typer.Exit) as ended:
        train(tmp_path)
    assert ended.value.exit_code == 130
    assert not hold.is_set()
    hold.set()


def test_kernels_are_counted_once():
    """Equal calls of one kernel are one; other shapes are another."""
    from jax.experimental import pallas as pl

    def double(x_ref, y_ref):
        y_ref[...] = 2 * x_ref[...]

    twice = lambda x: pl.pallas_call(double, out_shape=x, interpret=True)(x)
    f = lambda x: (jax.jit(twice)(x), twice(x), jax.lax.map(twice, x[None]), twice(x[:2]))
    kernels = compiling._kernels(jax.make_jaxpr(f)(np.ones(4, np.float32)).jaxpr, set())
    assert len(set(kernels)) == 2


def losses(x, stack):
    """Of layers in a scan, and its gradients."""
    scanned = lambda x, stack: jnp.sum(jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, stack)[0])
    return jax.value_and_grad(scanned, (0, 1))(x, stack)


def test_what_a_scan_needs_at_least():
    x, stack = np.ones((8, 4), np.float32), np.ones((3, 4, 4), np.float32)
    given, stacks = compiling.least_bytes(jax.make_jaxpr(losses)(x, stack).jaxpr)
    assert given == x.nbytes + stack.nbytes
    # Each layer's input, sine's slope, and the gradient of w.
    assert stacks == 3 * (2 * x.nbytes) + stack.nbytes
    analysis = jax.jit(losses).lower(x, stack).compile().memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes + analysis.output_size_in_bytes >= stacks
    unrolled = lambda x, stack: jax.grad(lambda s: jnp.sum(functools.reduce(lambda x, w: jnp.sin(x @ w), s, x)))(stack)
    assert compiling.least_bytes(jax.make_jaxpr(unrolled)(x, stack).jaxpr) == (given, 0)


@pytest.mark.usefixtures("tiny")
def test_a_step_that_cannot_fit_ends_in_one_line(tmp_path, monkeypatch):
    """Before XLA compiles it."""
    monkeypatch.setattr(loop, "device_bytes", lambda: 50_000)
    with pytest.raises(typer.BadParameter, match=r"step needs more than 0\.0 GB.*unroll: true.*policy: \{\}"):
        train(tmp_path)
