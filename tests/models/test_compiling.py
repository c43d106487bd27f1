"""A run's programs are compiled once each, beside each other, and only those that it calls.

Whole runs: test_train_lm.py and those beside it. One that is resumed: test_launch.py."""

import contextlib
import functools
import gc
import io
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer

from models.training import compiling, loop
from models.training.compiling import Compiling
from tests.models.interrupted_run import train


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
