"""The training loop of every model: state, the compiled step, and the loop over steps."""

import contextlib
import dataclasses
import functools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxops.profiling import Profiled
from models.distributed.mesh import (
    collect,
    constrained,
    create_sharded,
    device_bytes,
    of_own_batch,
    over,
    replicate,
    rows_of_process,
    shard_batch,
    split_objective,
)
from models.distributed.processes import is_first
from models.layers import options_for
from models.training import frozen
from models.training.checkpoints import Checkpoints, saved_steps
from models.training.compiling import Compiling
from models.training.ending import Stopped, stop_signals
from models.training.ending import kept as kept_line
from models.training.finite import Watch
from models.training.report import History, MetricsLog
from models.training.schedule import Schedule, make_learning_rate, make_optimizer
from models.training.terminal import one_line

READ_EVERY = 10
AHEAD = 2  # batches that are made while a step runs


class TrainState(NamedTuple):
    """Everything that a step changes. It is donated: the step overwrites it."""

    params: nnx.State
    histories: nnx.State  # of delayed scaling, else empty
    average: nnx.State | None  # of the trained parameters
    opt_state: optax.OptState
    step: jax.Array  # steps done, int32


class Measured(NamedTuple):
    """An objective's measurements of a micro-batch: its loss and, with experts, balancing loss and load."""

    loss: jax.Array
    balance: jax.Array | None = None
    load: jax.Array | None = None  # each expert's share [layers, experts]


class Metrics(NamedTuple):
    """Device values of one step, the first three as of `Measured`; reading them is the only wait for the device."""

    loss: jax.Array
    balance: jax.Array | None
    load: jax.Array | None
    tokens: jax.Array  # counted ones, int32
    fill: jax.Array  # their share of the batch's rows
    learning_rate: jax.Array
    gradient_norm: jax.Array  # of the trained parameters, before clipping


# (model, micro-batch, key) -> (loss to minimize, measured), means over the counted tokens: each batch has `counted()`
# and `size`.
Objective = Callable[[Any, Any, jax.Array], tuple[jax.Array, Measured]]


@dataclasses.dataclass(frozen=True)
class Task:
    """A model and its objective. Equal tasks have equal steps."""

    preset: Any  # all settings of the training
    # Whether over a mesh each device has a packed batch of its own, as of `by_device`; else it has rows of one.
    own_batches: ClassVar[bool] = False

    def model(self, rngs: nnx.Rngs, *, sharded: bool = False) -> nnx.Module:
        """A new model; sharded: as it is called over a mesh."""
        raise NotImplementedError

    def objective(self, model: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, Measured]:
        """As of `Objective`."""
        raise NotImplementedError

    def heldout_objective(self, model: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, Measured]:
        """Of held-out batches."""
        return self.objective(model, batch, key)

    def check_frozen(self) -> None:
        """As of `models.training.frozen.check`."""
        shapes = nnx.eval_shape(lambda: self.model(nnx.Rngs(0)))
        frozen.check(nnx.state(shapes, nnx.Param), self.preset.freeze)

    def start(self, mesh: Mesh | None) -> tuple[nnx.GraphDef, TrainState, Callable[[], TrainState]]:
        """The graphdef of the model on one device, and of the state before the first step the shapes and the function
        that makes it, as of `create_sharded`."""
        return create_sharded(functools.partial(first_state, self), mesh)

    def sharded_graphdef(self, mesh: Mesh) -> nnx.GraphDef:
        """Of the model as it is called over a mesh."""
        return over(nnx.eval_shape(lambda: self.model(nnx.Rngs(0), sharded=True)), mesh)


def first_state(task: Task) -> tuple[nnx.GraphDef, TrainState]:
    """A new model's graphdef and state, by the preset's seed."""
    graphdef, params, histories = nnx.split(task.model(nnx.Rngs(task.preset.seed)), nnx.Param, ...)
    return graphdef, init_state(task.preset, params, histories)


def place(arrays: Any, mesh: Mesh | None = None) -> Any:
    """Batches [N, B, ...], from the host to the device or, along B, over all devices. The only place that does so."""
    if mesh is None:
        return jax.device_put(arrays)
    return shard_batch(jax.tree.map(lambda x: x[:, rows_of_process(x.shape[1], mesh)], arrays), mesh, axis=1)


def init_state(schedule: Schedule, params: nnx.State, histories: nnx.State) -> TrainState:
    """The state before the first step."""
    frozen.check(params, schedule.freeze)
    trained, _ = frozen.split(params, schedule.freeze)
    average = None if schedule.ema is None else jax.tree.map(jnp.copy, trained)
    return TrainState(params, histories, average, make_optimizer(schedule).init(trained), jnp.zeros((), jnp.int32))


def make_value(
    graphdef: nnx.GraphDef, objective: Objective, mesh: Mesh | None, *, training: bool
) -> Callable[..., tuple[jax.Array, tuple[Measured, nnx.State]]]:
    """(params, histories, micro-batch, key) -> (loss, (measured, histories)), over all devices of the mesh."""

    def value(params: nnx.State, histories: nnx.State, batch: Any, key: jax.Array):
        # A copy: the call changes the histories, which jax.grad has not made its own.
        model = nnx.merge(graphdef, params, histories, copy=True)
        if not training:
            model.eval()
        loss, measured = objective(model, batch, key)
        return loss, (measured, nnx.state(model, nnx.Not(nnx.Param)))

    return value if mesh is None else split_objective(value, mesh, counted=lambda batch: batch.counted())


def make_step(
    graphdef: nnx.GraphDef, task: Task, mesh: Mesh | None = None
) -> Callable[[TrainState, Any, jax.Array], tuple[TrainState, Metrics]]:
    """The training step as one compiled program for each shape of batches: gradient, update, average.

    It takes the state, micro-batches [accumulate, ...], with `own_batches` over a mesh [accumulate, parts, ...], and a
    key that is the same in every step. Each micro-batch's float32 gradient is weighted by its counted tokens: for an
    objective that is a mean over tokens the sum is the gradient of the whole batch. Over a mesh the objective is called
    with each device's parts; see `models.distributed.mesh.split_objective`.
    """
    schedule = task.preset
    optimizer, learning_rate = make_optimizer(schedule), make_learning_rate(schedule)
    value = make_value(graphdef, _over_mesh(task, task.objective, mesh), mesh, training=True)

    def scaled_gradient(params: nnx.State, histories: nnx.State, micro: tuple[Any, jax.Array, jax.Array]):
        batch, share, key = micro
        of_trained = lambda trained, *given: value(frozen.joined(params, trained), *given)
        trained, _ = frozen.split(params, schedule.freeze)
        grads, (measured, histories) = jax.grad(of_trained, has_aux=True)(trained, histories, batch, key)
        return jax.tree.map(lambda x: share * x, (grads, measured)), histories

    def gradient(params: nnx.State, histories: nnx.State, micros: tuple[Any, jax.Array, jax.Array]):
        first = jax.tree.map(lambda x: x[0], micros)
        if schedule.accumulate == 1:
            return scaled_gradient(params, histories, first)

        def add(carry, micro):
            total, histories = carry
            more, histories = scaled_gradient(params, histories, micro)
            return (jax.tree.map(jnp.add, total, more), histories), None

        shapes, _ = jax.eval_shape(scaled_gradient, params, histories, first)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return jax.lax.scan(add, (zeros, histories), micros)[0]

    def step(state: TrainState, batch: Any, key: jax.Array) -> tuple[TrainState, Metrics]:
        counted = jax.vmap(lambda micro: micro.counted())(batch)
        tokens = jnp.sum(counted)
        keys = jax.random.split(jax.random.fold_in(key, state.step), schedule.accumulate)
        micros = (batch, counted / jnp.maximum(tokens, 1), keys)
        (grads, measured), histories = gradient(state.params, state.histories, micros)
        trained, _ = frozen.split(state.params, schedule.freeze)
        updates, opt_state = optimizer.update(grads, state.opt_state, trained)
        trained = cast(nnx.State, optax.apply_updates(trained, updates))
        average = None
        if schedule.ema is not None:
            # A shorter average at first: it would still contain the initial random weights.
            keep = jnp.minimum(schedule.ema, (1 + state.step) / (10 + state.step))
            average = jax.tree.map(lambda old, new: keep * old + (1 - keep) * new, state.average, trained)
        rate, norm = jnp.asarray(learning_rate(state.step)), optax.tree.norm(grads)
        fill = tokens / batch.size
        metrics = Metrics(**measured._asdict(), tokens=tokens, fill=fill, learning_rate=rate, gradient_norm=norm)
        params = frozen.joined(state.params, trained)
        return constrained(TrainState(params, histories, average, opt_state, state.step + 1), mesh), metrics

    policy = getattr(getattr(schedule, "model", schedule), "policy", None)
    return jax.jit(step, donate_argnums=0, compiler_options=options_for(policy, mesh))


def _over_mesh(task: Task, objective: Objective, mesh: Mesh | None) -> Objective:
    return of_own_batch(objective, mesh) if task.own_batches else objective


def kept(state: TrainState) -> nnx.State:
    """The parameters that are evaluated and saved."""
    return state.params if state.average is None else frozen.joined(state.params, state.average)


def make_evaluate(
    graphdef: nnx.GraphDef, task: Task, mesh: Mesh | None = None
) -> Callable[[nnx.State, nnx.State, Any, jax.Array], jax.Array]:
    """Mean held-out loss over micro-batches [N, ...], with the same random draws in every evaluation."""
    value = make_value(graphdef, _over_mesh(task, task.heldout_objective, mesh), mesh, training=False)

    @functools.partial(jax.jit, compiler_options=options_for(None, mesh))
    def evaluate(params: nnx.State, histories: nnx.State, batches: Any, key: jax.Array) -> jax.Array:
        counted = jax.vmap(lambda batch: batch.counted())(batches)
        keys = jax.random.split(key, counted.shape[0])
        losses = jax.lax.map(lambda given: value(params, histories, *given)[1][0].loss, (batches, keys))
        return jnp.sum(losses * counted) / jnp.maximum(jnp.sum(counted), 1)

    return evaluate


def prefetched(batches: Callable[[int], Any], first: int, end: int, mesh: Mesh | None = None) -> Iterator[Any]:
    """batches(first) to batches(end - 1) through `place`, made on another thread while steps run."""
    with ThreadPoolExecutor(1) as pool:
        start = lambda step: pool.submit(lambda: place(batches(step), mesh))
        waiting = deque(start(step) for step in range(first, min(first + AHEAD, end)))
        for step in range(first, end):
            batch = waiting.popleft().result()
            if step + AHEAD < end:
                waiting.append(start(step + AHEAD))
            yield batch


@dataclasses.dataclass(frozen=True)
class Run:
    """Where a training runs and writes."""

    out: Path  # the folder of everything that it writes
    console: Console
    mesh: Mesh | None = None  # of devices; None for one
    save_every: int | None = None  # steps between checkpoints; None for none. The run starts from the newest one
    profile: bool = False  # whether some of the first steps are profiled, into OUT/profile
    bad_steps: int = 3  # as of `models.training.finite.Watch`

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"

    def say(self, line: str) -> None:
        """Prints one line, whatever the names in it are."""
        self.console.print(one_line(line))

    def kept(self) -> str:
        """The line about the finished checkpoints."""
        return kept_line(None if self.save_every is None else saved_steps(self.checkpoints), self.out)

    def saved_steps(self) -> list[int]:
        """Steps of the finished checkpoints, ascending."""
        return [] if self.save_every is None else saved_steps(self.checkpoints)

    def saves(self, done: int, steps: int) -> bool:
        return self.save_every is not None and (done % self.save_every == 0 or done == steps)


def train(
    task: Task, batches: Callable[[int], Any], heldout: Any, unit: str, run: Run,
    sampler: Callable[[Any], Iterable[jax.stages.Lowered]] | None = None,
) -> tuple[Any, History]:  # fmt: skip
    """Runs the steps after the first state or the newest checkpoint, with evaluations; prints and logs progress.

    Args:
      batches: step -> its batch on the host, a function of the number only, so that a resumed training sees the same
        ones.
      heldout: micro-batches of held-out data [N, ...], on the host.
      unit: of the loss, printed after a number.
      sampler: from the result's shapes to programs that the caller needs after the training. Without a mesh they are
        compiled beside it.

    Returns:
      The model with the weights that are `kept`, as of `models.distributed.mesh.collect`, in evaluation mode.

    Raises:
      Stopped: after SIGTERM or Ctrl-C; the finished steps are saved.
      NotFinite: the run's numbers are not finite; the checkpoints are those before.
    """
    preset, mesh = task.preset, run.mesh
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with contextlib.ExitStack() as stack:
        compiling = stack.enter_context(Compiling(device_bytes() if mesh is None else math.inf))
        graphdef, shapes, create = task.start(mesh)
        key, heldout_key = replicate(jax.jit(lambda: tuple(jax.random.split(jax.random.key(preset.seed))))(), mesh)
        run.console.print(f"{sum(p.size for p in jax.tree.leaves(shapes.params)):,} parameters")
        run.console.print(frozen.remark(shapes.params, preset.freeze), end="")
        called = graphdef if mesh is None else task.sharded_graphdef(mesh)
        step, evaluate, placed = make_step(called, task, mesh), make_evaluate(called, task, mesh), place(heldout, mesh)
        before = max(run.saved_steps(), default=0)
        if before < preset.steps and not run.profile:  # the profiler compiles its step
            compiling.start("step", step, shapes, place(batches(before), mesh), key)
        created = compiling.run(create)  # not before the step is lowered: both need Python
        if before < preset.steps:
            compiling.start("evaluate", evaluate, kept(shapes), shapes.histories, placed, heldout_key)
        if run.profile:
            step = Profiled(step)
        state = created.result()
        asked = stack.enter_context(stop_signals())
        checkpoints = None
        if run.save_every is not None:
            checkpoints = stack.enter_context(Checkpoints(run.checkpoints, keep_best=True))
            state, done = checkpoints.start(state, run.say)
            if done:
                run.console.print(f"goes on from the checkpoint of step {done}")
        # The guard makes any implicit transfer, and so any hidden wait, an error.
        stack.enter_context(jax.transfer_guard("disallow"))
        first = int(jax.device_get(state.step))
        log, watch = stack.enter_context(MetricsLog(run.out, first, is_first(), run.say)), Watch(run.bad_steps)
        progress = stack.enter_context(Progress(*columns, console=run.console))
        bar = progress.add_task("compiling", total=preset.steps, completed=first)
        show = lambda line: progress.update(bar, description=line)
        compile_s = compiling.wait("step", show)
        if sampler is not None and mesh is None:  # beside the training: it would delay the step
            model = nnx.merge(graphdef, kept(shapes), shapes.histories)
            model.eval()
            compiling.run(lambda: [program.compile() for program in sampler(model)])
        unread, last_read = [], time.perf_counter()
        for done, batch in enumerate(prefetched(batches, first, preset.steps, mesh), first + 1):
            state, metrics = step(state, batch, key)
            unread.append(metrics)
            stop = asked(done)
            at_eval = done % preset.eval_every == 0 or done in (1, preset.steps)
            at_save = run.saves(done, preset.steps) or (stop is not None and run.save_every is not None)
            if not at_eval and not at_save and stop is None and len(unread) < READ_EVERY:
                continue
            read = jax.device_get(unread)
            rate = sum(int(metrics.tokens) for metrics in read) / (time.perf_counter() - last_read)
            progress.update(bar, completed=done, description=f"loss {float(read[-1].loss):.3f}  {rate:,.0f} tokens/s")
            loss = None
            if at_eval:
                compiling.wait("evaluate", show)
                loss = float(jax.device_get(evaluate(kept(state), state.histories, placed, heldout_key)))
            log.add(done, read, rate, loss, compile_s)
            compile_s = None
            watch.add(done, read, loss)
            if checkpoints is not None:
                checkpoints.check()
                if at_save and watch.finite:
                    checkpoints.save(state, done, heldout=loss)  # what is logged is never behind it
            watch.check(ended=done == preset.steps)
            if stop is not None:
                raise Stopped(stop)
            if loss is not None:
                speed = f", {rate:,.0f} tokens/s" if done > first + 1 else ""
                progress.console.print(f"step {done}: held-out {loss:.3f} {unit}{speed}")
            unread.clear()
            last_read = time.perf_counter()
    if isinstance(step, Profiled) and not step.done:
        run.say(f"no profile: it needs {step.calls_needed} steps.")
    elif isinstance(step, Profiled) and is_first():
        files = step.report.save(run.out / "profile")
        run.console.print(step.report.summary)
        run.say(f"the profile is in {', '.join(map(str, files))}")
    model = nnx.merge(graphdef, *collect((kept(state), state.histories), mesh))
    model.eval()
    return model, log.history
