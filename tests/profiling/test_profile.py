"""Steps that are profiled as they are called, on this machine's device."""

import itertools
import types

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from jaxops.profiling import Profiled, profile, profiled
from jaxops.profiling.building import programs_of
from jaxops.profiling.trace import Event, ProfilerBusy, recorded

pytestmark = pytest.mark.versions

x = jnp.ones((256, 256))


@jax.jit
def double(x):
    return jnp.tanh(x @ x)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.up = nnx.LayerNorm(64, rngs=rngs), nnx.Linear(64, 256, rngs=rngs)
        self.down = nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


def loss_of(model, x):
    return jnp.mean(jnp.square(model(x)))


@pytest.fixture(scope="module")
def plain_step():
    """A step that uses nothing of jaxops: an nnx model, and an optimizer of optax."""
    model = Block(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        loss, gradients = nnx.value_and_grad(loss_of)(model, x)
        optimizer.update(model, gradients)
        return loss

    return profile(step, model, optimizer, jnp.ones((512, 64)), steps=2)


def test_a_flax_model_and_an_optax_optimizer_are_accounted_for(plain_step):
    assert plain_step.accounted >= 0.95
    assert plain_step.step_us > 0
    assert (
        sum(each.flops or 0 for each in plain_step.kernels) >= 3 * 2 * 2 * 512 * 64 * 256
    )  # forward, and each gradient
    assert {"forward", "backward"} <= {each.stage for each in plain_step.kernels}
    assert plain_step.memory is not None
    assert plain_step.memory.peak_bytes > 512 * 256 * 4


def test_a_cpu_says_what_it_cannot_know(plain_step):
    if jax.default_backend() == "cpu":
        assert "nothing here says how long a GPU would take" in plain_step.notes[0]


def test_the_step_goes_on_as_if_it_were_called_itself():
    step, state = Profiled(double, steps=2), x / 1000
    for _ in range(step.calls_needed + 2):
        state = step(state)
    expected = x / 1000
    for _ in range(step.calls_needed + 2):
        expected = double(expected)
    assert bool(jnp.all(state == expected))
    assert step.done
    assert step.report is step.report
    assert step.report.steps == 2


def test_too_few_calls_are_an_error():
    step = Profiled(double, steps=1)
    step(x)
    assert not step.done
    with pytest.raises(RuntimeError, match="was called 1 times; its profile needs 5: 2 to warm up, 1 timed"):
        _ = step.report


def test_donated_arguments_stay_valid_and_train_on():
    seen = []

    @jax.jit
    def log(x):
        return x.sum()

    update = jax.jit(lambda state, batch: ({"w": state["w"] + batch}, log(state["w"])), donate_argnums=0)

    def step(state, batch):
        state, total = update(state, batch)
        seen.append(float(total))
        return state, total

    step.lower = update.lower
    state = {"w": jnp.zeros(8)}
    report = profile(step, state, jnp.ones(8), steps=1)
    assert not state["w"].is_deleted()
    assert seen == [8.0 * i for i in range(len(seen))]
    assert report.program == "jit__lambda"


def test_a_donated_argument_without_a_successor_is_an_error():
    with pytest.raises(ValueError, match=r"donates argument 0, but nothing in its result has"):
        profile(jax.jit(lambda x: jnp.reshape(x + 1, (4, 2)), donate_argnums=0), jnp.ones(8))


def test_a_function_that_is_not_jitted():
    report = profile(lambda x: double(double(x)), x, steps=1)
    assert report.program == "jit_double"
    assert report.kernels
    assert report.memory is not None, "of the program with most time"


def test_times_are_those_of_one_step(monkeypatch):
    """By a clock that goes on by a second each time it is read."""
    clock = itertools.count()
    monkeypatch.setattr(profiled, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    report = profile(double, x, steps=4)
    assert (report.step_us, report.profiled_us) == (250_000, 250_000)


def test_a_name_of_different_programs_is_nobodys():
    programs = [jax.jit(lambda x, i=i: x * i).lower(x).compile() for i in (2, 3)]
    event = Event("mul", 0.0, 1.0, 0, "", programs[0].runtime_executable().hlo_modules()[0].name)
    assert programs_of([event]) == {}


def test_static_arguments():
    power = jax.jit(lambda n, x: x @ x + n, static_argnums=0)
    assert profile(power, 2, x, steps=1).kernels


def test_an_error_of_the_step_ends_the_recording():
    calls = []

    def step(x):
        calls.append(1)
        if len(calls) == 5:  # the first recorded one
            raise ZeroDivisionError
        return double(x)

    failing = Profiled(step, steps=1)
    for _ in range(4):
        failing(x)
    with pytest.raises(ZeroDivisionError):
        failing(x)
    with recorded() as events:  # nothing else records
        double(x).block_until_ready()
    assert events


def test_two_recordings_at_once_are_an_error():
    with recorded(), pytest.raises(ProfilerBusy, match="records a profile already"), recorded():
        pass


@pytest.mark.parametrize("numbers", [{"steps": 0}, {"warmup": 0}, {"steps": 1.5}, {"steps": True}])
def test_bad_numbers(numbers):
    with pytest.raises(ValueError, match=r"write a whole number of at least 1"):
        profile(double, x, **numbers)


@pytest.mark.gpu
@pytest.mark.alone
def test_cuda_graphs_hide_no_origin():
    """The products are cuBLAS's, whose kernels have no name of an instruction."""

    @jax.jit
    def step(w, x):
        gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) @ w.T))(w)
        return w - 1e-3 * gradient

    w = jnp.ones((1024, 1024), jnp.bfloat16)
    report = profile(step, w, w)
    assert report.accounted >= 0.95
    assert sum(each.flops or 0 for each in report.kernels) >= 4 * 2 * 1024**3
    assert report.ceilings is not None
    assert 0 < (report.mfu or 0) < 1.1
