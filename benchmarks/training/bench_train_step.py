"""Training steps of the models' large presets: jaxops in bfloat16 and FP8, and the same models on plain XLA.

python -m benchmarks train_step                        # the 3b mixture of experts and the 1b DiT
python -m benchmarks train_step --smoke --out /tmp/x   # tiny models, every code path
"""

import collections
import dataclasses
import functools
import itertools
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import typer
from flax import nnx
from jax.sharding import Mesh

from benchmarks import harness
from benchmarks.harness.machine import measure_ceilings
from benchmarks.harness.traces import device_events
from benchmarks.training.free_memory import check_fits
from jaxops.offload.reports import needed_bytes
from models.data.images import Batch as Images
from models.data.text import Corpus
from models.data.tokenizer import Bytes
from models.distributed.mesh import parts_of, replicate, shardings
from models.dit.model import DiTConfig
from models.precision import PRECISIONS
from models.training import dit as train_dit
from models.training import lm as train_lm
from models.training import loop
from models.training.config import with_model
from models.training.presets import DIT_PRESETS, PRESETS, DiTPreset, Preset

OURS, XLA = "jaxops", "xla"
SIDES = {  # side -> backend, precision; those that others are compared with come first
    XLA: ("xla", "bfloat16"),
    "xla_fp8_tensorwise": ("xla", "fp8-tensorwise"),
    OURS: ("auto", "bfloat16"),
    "jaxops_fp8_tensorwise": ("auto", "fp8-tensorwise"),
    "jaxops_fp8_blockwise": ("auto", "fp8-blockwise"),
}
PEAK_TFLOPS = 989.4  # of an H200 in bfloat16, as its data sheet has it: what MFU is a share of
APART = 0.02  # losses of the first step, of any side, in bfloat16 or FP8
SHOWN = 25  # kernels of a row
WARMUP = 2  # steps


class Workload(NamedTuple):
    """A model in one precision, on one backend.

    Attributes:
      start: makes the state before the first step; called when the previous state is freed.
      step: compiled with `lower`.
      batches: on the device.
      tokens, flops: of a step; flops that training needs, without recomputation.
      shape: of its rows.
      mesh: of the devices; None for one.
    """

    start: Callable[[], Any]
    step: Any
    batches: list[Any]
    tokens: int
    flops: float
    shape: dict[str, int]
    mesh: Mesh | None = None


def lm_flops(preset: Preset, batch: Any) -> float:
    """Six for each active parameter and token, without the embeddings, and causal attention within documents."""
    c = preset.model
    attention = c.width * c.head_dim * (2 * c.heads + 2 * c.kv_heads)
    experts = 3 * c.width * c.hidden * max(1, c.top_k) + c.width * c.experts
    starts = np.flatnonzero(np.diff(batch.documents.reshape(-1, batch.documents.shape[-1]), axis=1, prepend=-2).ravel())
    lengths = np.diff(np.append(starts, batch.documents.size)).astype(float)
    pairs = float(np.sum(lengths**2)) / 2
    return (
        6 * batch.documents.size * (c.layers * (attention + experts) + c.width * c.vocab)
        + 12 * c.layers * c.heads * c.head_dim * pairs
    )


@functools.cache
def corpus() -> Corpus:
    return train_lm.read_corpus((), Bytes())


def lm(preset: Preset, backend: str, precision: str, steps: int, mesh: Mesh | None = None) -> Workload:
    """On packed sources of Python's standard library, as bytes."""
    documents = corpus().train
    rows = train_lm.make_rows(preset, documents)
    preset = train_lm.with_attention(with_model(preset, backend=backend, **PRECISIONS[precision]._asdict()))
    preset = train_lm.with_room(preset, rows)
    make, task = train_lm.make_batches(preset, documents, rows), train_lm.LmTask(preset)
    c, T = preset.model, preset.batch * preset.context
    shape = {"T": T, "D": c.width, "layers": c.layers, "experts": c.experts, "top_k": c.top_k}
    batches = [make(step) for step in range(steps)]
    flops = float(np.mean([lm_flops(preset, batch) for batch in batches]))
    placed = [loop.place(batch, mesh) for batch in batches]
    return Workload(lambda: task.start(mesh)[2](), step_of(task, mesh), placed, T, flops, shape, mesh)


def step_of(task: loop.Task, mesh: Mesh | None) -> Any:
    graphdef = jax.eval_shape(lambda: loop.first_state(task))[0] if mesh is None else task.sharded_graphdef(mesh)
    return loop.make_step(graphdef, task, mesh)


def images(preset: DiTPreset, sizes: DiTConfig, seed: int) -> Images:
    """Squares of a quarter of `longest` tokens to all of it, until the budget is full, with noise as pixels."""
    rng, sides = np.random.default_rng(seed), []
    low, high = int((sizes.longest / 4) ** 0.5), int(sizes.longest**0.5)
    while sum(side * side for side in sides) + high * high <= preset.tokens and len(sides) < preset.images:
        sides.append(int(rng.integers(low, high + 1)))
    grids = np.ones((1, preset.images, 2), np.int32)
    grids[0, : len(sides)] = np.array(sides, np.int32)[:, None]
    lengths = np.zeros(preset.images, np.int32)
    lengths[: len(sides)] = np.square(sides)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)[None]
    tokens = rng.normal(size=(1, preset.tokens, sizes.token)).astype(np.float32)
    return Images(tokens, offsets, grids, rng.integers(0, sizes.classes, (1, preset.images)).astype(np.int32))


class PartsInTurn(train_dit.DitTask):
    """The objective over a mesh, on one device: of parts [parts, ...], each with the noise of its number."""

    def objective(self, model: Any, batch: Images, key: jax.Array) -> tuple[jax.Array, loop.Measured]:
        graphdef, state = nnx.split(model)

        def of_part(given: tuple[Images, jax.Array]) -> jax.Array:
            part, number = given
            own_key = jax.random.fold_in(key, number)
            return part.counted() * super(PartsInTurn, self).objective(nnx.merge(graphdef, state), part, own_key)[0]

        numbers = jnp.arange(len(batch.tokens))
        loss = jnp.sum(jax.lax.map(of_part, (batch, numbers))) / jnp.maximum(batch.counted(), 1)
        return loss, loop.Measured(loss)


def dit(
    preset: DiTPreset, backend: str, precision: str, steps: int, mesh: Mesh | None = None, parts: int | None = None
) -> Workload:
    """On packed images of random sizes.

    Args:
      parts: computes on one device what a mesh with so many parts of a batch does; None for a batch without parts.
    """
    preset = with_model(preset, backend=backend, **PRECISIONS[precision]._asdict())
    sizes = train_dit.sizes_of(preset, token=16, classes=1000, longest=preset.longest)
    count = parts or parts_of(mesh)
    each = dataclasses.replace(preset, tokens=preset.tokens // count, images=preset.images // count)
    packed = [[images(each, sizes, step * count + part) for part in range(count)] for step in range(steps)]
    batches = [jax.tree.map(lambda *x: np.concatenate(x), *some) for some in packed]
    square = float(np.mean([np.sum(np.diff(batch.sequence_offsets).astype(float) ** 2) for batch in batches]))
    flops = (
        6 * preset.width**2 * preset.layers * (12 * preset.tokens + 6 * preset.images)
        + 12 * preset.layers * preset.width * square
    )
    if mesh is not None or parts is not None:
        batches = [jax.tree.map(lambda x: x[None], batch) for batch in batches]
    task = (train_dit.DitTask if parts is None else PartsInTurn)(preset, sizes)
    shape = {"T": preset.tokens, "D": preset.width, "layers": preset.layers, "images": preset.images}
    placed = [loop.place(batch, mesh) for batch in batches]
    return Workload(lambda: task.start(mesh)[2](), step_of(task, mesh), placed, preset.tokens, flops, shape, mesh)


WorkloadMaker = Callable[..., Workload]
WORKLOADS = {"moe_3b": (lm, PRESETS["3b"]), "dit_1b": (dit, DIT_PRESETS["1b"])}
_TINY = dataclasses.replace(PRESETS["demo"].model, layers=1)
_TINY_DIT = {"layers": 1, "width": 64, "heads": 2, "tokens": 64, "images": 4, "longest": 16}
SMOKE = {
    "moe_smoke": (lm, dataclasses.replace(PRESETS["demo"], model=_TINY, context=64, batch=2)),
    "dit_smoke": (dit, dataclasses.replace(DIT_PRESETS["demo"], **_TINY_DIT)),
}


class Measured(NamedTuple):
    """One side's measurements.

    Attributes:
      us: from one step's end to the next one's.
      losses: of each step.
      bytes: that a step needs at its peak.
      kernels: (name, microseconds) of one step, the longest first.
    """

    us: list[float]
    losses: list[float]
    bytes: int
    compile_s: float
    kernels: list[tuple[str, float]]


def measure(workload: Workload, limit_s: float) -> Measured:
    """Timed steps, then one under the profiler.

    Raises:
      MemoryError: the step needs more than the free device memory.
    """
    begin = time.perf_counter()
    compiled = compile_step(workload)
    compile_s = time.perf_counter() - begin
    check_fits(compiled)
    state, us, losses = run_steps(compiled, workload.start(), workload, limit_s)
    kernels = profiled(lambda: compiled(state, workload.batches[0], key_of(workload)))
    return Measured(us, losses, needed_bytes(compiled)[0], compile_s, kernels)


def run_steps(
    compiled: Any, state: Any, workload: Workload, limit_s: float
) -> tuple[loop.TrainState, list[float], list[float]]:
    """(state, microseconds from one step's end to the next one's, losses) of a step a batch; state is donated.

    As in training, a step is started before the host waits for the previous one, which hides the host's work. The end
    of the last step is not timed: the end of a program that the host waits in is seen late, all others by the same
    delay. WARMUP steps are not timed.
    """
    losses, ends, ahead, key = [], [], None, key_of(workload)
    begin = time.perf_counter()
    for batch in workload.batches:
        state, metrics = compiled(state, batch, key)
        if ahead is not None:
            losses.append(float(ahead))
            ends.append(time.perf_counter())
        ahead = metrics.loss
        if len(ends) > WARMUP and ends[-1] - begin > limit_s:
            break
    losses += [] if ahead is None else [float(ahead)]
    jax.block_until_ready(state)  # the profile is of one step alone
    return state, [1e6 * (end - start) for start, end in itertools.pairwise(ends[WARMUP - 1 :])], losses


def key_of(workload: Workload) -> jax.Array:
    return replicate(jax.random.key(0), workload.mesh)


def state_of(workload: Workload) -> Any:
    """Shapes of the state before the first step, over a mesh with shardings."""
    state, mesh = jax.eval_shape(workload.start), workload.mesh
    if mesh is None:
        return state
    give = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.tree.map(give, state, shardings(state, mesh))


def compile_step(workload: Workload) -> Any:
    return workload.step.lower(state_of(workload), workload.batches[0], key_of(workload)).compile()


def profiled(run: Callable[[], Any]) -> list[tuple[str, float]]:
    """Each kernel's time in one call; equal names are summed."""
    totals: dict[str, float] = collections.defaultdict(float)
    for event in device_events(run):
        totals[event.name] += event.us
    return sorted(totals.items(), key=lambda item: -item[1])


def measure_case(
    name: str, make: WorkloadMaker, preset: Any, sides: list[str], file: pathlib.Path, dense: float, steps: int,
    limit_s: float,
) -> int:  # fmt: skip
    """All sides of a model, one after another; each row is written at its end.

    Returns:
      How often jaxops failed.
    """
    losses: dict[str, float] = {}
    step_us: dict[str, float] = {}
    for side in sides:
        try:
            workload = make(preset, *SIDES[side], steps)
            measured = measure(workload, limit_s)
            losses[side] = measured.losses[0]
            first = next(iter(losses))
            if abs(losses[side] / losses[first] - 1) > APART:
                raise ArithmeticError(f"the first loss is {losses[side]}, that of {first} {losses[first]}")
            step_us[side] = float(np.median(measured.us))
            write(file, name, side, workload, measured, dense, step_us)
        except Exception as error:
            harness.print_left_out(f"{side} at {name}", error)
        jax.clear_caches()
    return OURS in sides and OURS not in step_us


def write(
    file: pathlib.Path, name: str, side: str, workload: Workload, measured: Measured, dense: float,
    step_us: dict[str, float],
) -> None:  # fmt: skip
    """A side's row. step_us is of all sides so far, including this one."""
    backend, precision = SIDES[side]
    times, total = harness.Times.of(measured.us), sum(us for _, us in measured.kernels)
    case = harness.case_of("train_step", "step", harness.Named(name, workload.shape), "bfloat16") | {"backend": side}
    facts: dict[str, Any] = {"recipe": PRECISIONS[precision].recipe} | speeds(workload, times)
    facts |= {"peak_bytes": measured.bytes, "compile_s": measured.compile_s, "loss": measured.losses[-1]}
    facts |= {"kernels": [[kernel[:80], round(us, 1), round(us / total, 4)] for kernel, us in measured.kernels[:SHOWN]]}
    vs = {peer: us / step_us[side] for peer, us in step_us.items() if SIDES[peer][0] == XLA} if backend != XLA else {}
    harness.append_row(file, harness.make_row(case, times, facts["tflops"] / dense, vs, None, **facts))
    line = f"{times.us_p50 / 1e3:.1f} ms a step, {facts['tokens_per_s']:,.0f} tokens/s, MFU {facts['mfu']:.1%}"
    line += f", {measured.bytes / 1e9:.1f} GB"
    print(f"{name} {side}: {line}, compiled in {measured.compile_s:.0f} s, {vs}", flush=True)


def speeds(workload: Workload, times: harness.Times) -> dict[str, float]:
    """The entries of a row that follow from a step's time."""
    tflops = workload.flops / times.us_p50 / 1e6
    return {"tflops": tflops, "mfu": tflops / PEAK_TFLOPS, "tokens_per_s": 1e6 * workload.tokens / times.us_p50}


def main(
    models: str = typer.Option(",".join(WORKLOADS)),
    sides: str = typer.Option(",".join(SIDES)),
    steps: int = typer.Option(
        12, min=WARMUP + 2, help="Training steps of each side: two warm up, and the last is not timed."
    ),
    limit: float = typer.Option(30.0, help="Seconds of steps after which a side has no further one."),
    out: str = harness.OUT,
    smoke: bool = typer.Option(False, help="Tiny models, every code path; needs --out."),
) -> None:
    """Appends to <out>/train_step.jsonl; exits with 1 if jaxops itself failed somewhere."""
    # Preallocated: in memory that grew with one side, the next side finds no contiguous block for its temporaries.
    harness.take_memory()
    file = harness.begin("train_step", out, smoke)
    chosen = sorted(sides.split(","), key=list(SIDES).index)
    dense = measure_ceilings(file, smoke, dtype=jnp.bfloat16).dense_tflops
    left_out = 0
    for name, (make, preset) in (SMOKE if smoke else {name: WORKLOADS[name] for name in models.split(",")}).items():
        left_out += measure_case(name, make, preset, chosen, file, dense, steps, limit)
    harness.end(left_out)
