"""The trainings of `benchmarks.bench_precision`, and their gradients: from the same parameters, on the same batches."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.precision_sides import BASELINE, EXACT, Side
from jaxops.nn import AmaxHistory
from models.data.packing import Batch, Rows
from models.data.text import Corpus
from models.distributed.mesh import name_of
from models.training import lm as train_lm
from models.training import loop
from models.training.presets import Preset


class Work(NamedTuple):
    """The baseline's training without start, its data, and the held-out batches."""

    base: Preset
    corpus: Corpus
    rows: tuple[Rows, ...]

    def batches(self, side: Side, start: int) -> Callable[[int], Batch]:
        """The same rows for every side. Each start has its own order of them."""
        preset = dataclasses.replace(side.preset(self.base), seed=start)
        return train_lm.make_batches(preset, self.corpus.train, self.rows)


class Trained(NamedTuple):
    """losses: of each step; heldout: at the end; kept: parameters by the number of steps before."""

    losses: np.ndarray
    heldout: float
    kept: dict[int, nnx.State]


def work_of(base: Preset, corpus: Corpus) -> Work:
    rows = train_lm.make_rows(base, corpus.train)
    return Work(train_lm.with_room(base, rows), corpus, rows)


def trainer(work: Work, side: Side) -> Callable[..., Trained]:
    """(start, steps whose parameters are kept) -> `Trained`; all starts share the compiled programs."""
    preset, baseline = side.preset(work.base), Side(BASELINE).preset(work.base)
    graphdef, histories = _empty(work, side)
    step, evaluate = train_lm.make_step(graphdef, preset), train_lm.make_evaluate(graphdef, preset)
    heldout = loop.place(train_lm.heldout_batches(preset, work.corpus.heldout))
    key = jax.random.key(0)

    def train(start: int, keep: Collection[int] = ()) -> Trained:
        state = train_lm.init_state(baseline, start)[1]
        state = state._replace(histories=jax.tree.map(jnp.copy, histories))
        batches, losses, kept = work.batches(side, start), [], {}
        with jax.default_matmul_precision(_products(side)):
            for number in range(preset.steps):
                if number in keep:
                    kept[number] = jax.tree.map(jnp.copy, state.params)  # the step overwrites the state
                state, metrics = step(state, loop.place(batches(number)), key)
                losses.append(metrics.loss)
            loss = evaluate(loop.kept(state), state.histories, heldout, key)
        if preset.steps in keep:
            kept[preset.steps] = state.params
        return Trained(np.array(jax.device_get(losses)), float(loss), kept)

    return train


def _empty(work: Work, side: Side) -> tuple[nnx.GraphDef, nnx.State]:
    """The side's model, and histories of no step."""
    model = nnx.eval_shape(lambda: side.model(work.base))
    graphdef, _, histories = nnx.split(model, nnx.Param, AmaxHistory)
    return graphdef, train_lm.with_histories(histories)


def _products(side: Side) -> str | None:
    """The precision of float32 products: a GPU's default is TF32."""
    return "highest" if side.precision == EXACT else None


def gradient_of(work: Work, side: Side) -> Callable[[nnx.State, int], dict[str, np.ndarray]]:
    """(parameters, step) -> the gradient [layers, ...] of each tensor on that step's batch of start 0.

    Histories of delayed scaling have seen one batch before.
    """
    preset = side.preset(work.base)
    graphdef, histories = _empty(work, side)
    objective = functools.partial(train_lm.objective, preset, preset.pack)
    gradient = jax.jit(jax.grad(loop.make_value(graphdef, objective, None, training=True), has_aux=True))
    batches, key = work.batches(side, 0), jax.random.key(0)

    def of(params: nnx.State, step: int) -> dict[str, np.ndarray]:
        micro = lambda number: jax.tree.map(lambda x: x[0], loop.place(batches(number)))
        with jax.default_matmul_precision(_products(side)):
            seen = histories
            if jax.tree.leaves(histories):
                _, (_, seen) = gradient(params, histories, micro(step + 1), key)
            grads, _ = gradient(params, seen, micro(step), key)
        return {
            name_of(path).removesuffix("/value"): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(grads)
        }

    return of


def gradient_errors(
    got: dict[str, np.ndarray], want: dict[str, np.ndarray], stacks: Mapping[str, Sequence[int]]
) -> dict[str, list[float]]:
    """{"LAYER TENSOR": [cosine, relative error]}; "all" is of the whole gradient.

    Args:
      got, want: gradients as of `gradient_of`.
      stacks: the layers of "blocks" and, if there are some, of "dense_blocks".
    """
    errors = {"all": _compare(*(np.concatenate([of[name].ravel() for name in want]) for of in (got, want)))}
    for name in want:
        stack, _, tensor = name.partition("/")
        if stack not in stacks:
            errors[name] = _compare(got[name], want[name])
            continue
        for i, layer in enumerate(stacks[stack]):
            errors[f"{layer} {tensor}"] = _compare(got[name][i], want[name][i])
    return errors


def _compare(got: np.ndarray, want: np.ndarray) -> list[float]:
    a, b = got.astype(np.float64).ravel(), want.astype(np.float64).ravel()
    length = np.linalg.norm(b)
    cosine = a @ b / max(np.linalg.norm(a) * length, 1e-300)
    return [round(float(cosine), 6), round(float(np.linalg.norm(a - b) / max(length, 1e-300)), 6)]


class Paired(NamedTuple):
    """Relative differences of pairs, their mean, and its standard error."""

    differences: np.ndarray
    mean: float
    standard_error: float

    @property
    def significant(self) -> bool:
        return abs(self.mean) > 2 * self.standard_error


def paired(losses: Any, baseline: Any) -> Paired:
    """losses over the baseline's of the same starts, minus 1; at least two of them."""
    differences = np.asarray(losses, np.float64) / np.asarray(baseline, np.float64) - 1
    error = np.std(differences, ddof=1) / np.sqrt(len(differences))
    return Paired(differences, float(np.mean(differences)), float(error))
