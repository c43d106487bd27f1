"""Trains the models by each FP8 recipe beside bfloat16, from the same parameters on the same batches.

python -m models.compare_precision                                       # both models, all recipes
python -m models.compare_precision lm --recipes blockwise --seeds 3      # the mean over three starts has less noise
python -m models.compare_precision dit --preset demo --steps 20 --out /tmp/x   # a look at it on a CPU
"""

import concurrent.futures
import dataclasses
import datetime
import functools
import importlib.metadata
import itertools
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import typer
from flax import nnx

from jaxops.nn import AmaxHistory
from models import train_dit, train_lm
from models.config import check_option
from models.decoder import Decoder
from models.dit import DiT
from models.images import DATA_SETS
from models.loop import place, with_steps
from models.precision import PRECISIONS, Precision
from models.presets import DIT_PRESETS, PRESETS
from models.report import plot_precisions
from models.tokenizer import Bytes

BASELINE, BATCH_SEED = "bfloat16", 0
RECIPES = tuple(name.removeprefix("fp8-") for name in PRECISIONS if name.startswith("fp8-"))
LAST = 50  # steps whose mean loss is compared
TIMED = 25  # steps between two looks at the clock, each of which waits for the device
POINTS = 50  # of a row's curve


class Workload(NamedTuple):
    """A model and its batches, in any precision.

    Attributes:
      start: seed -> the state before the first step, in BASELINE.
      model: precision -> the model, for tracing only.
      make_step: (precision, graphdef) -> the compiled step.
      inputs: step -> the step's arguments beside the state, the same for all precisions.
      shape: T tokens a step, and sizes of the model.
    """

    steps: int
    start: Callable[[int], Any]
    model: Callable[[Precision], nnx.Module]
    make_step: Callable[[Precision, nnx.GraphDef], Any]
    inputs: Callable[[int], tuple]
    shape: dict[str, int]


class Run(NamedTuple):
    """losses: of each step; us: of a step, once every TIMED steps."""

    losses: np.ndarray
    us: list[float]


def lm_workload(preset: str, steps: int) -> Workload:
    check_option("preset", preset, PRESETS)
    start = dataclasses.replace(PRESETS[preset], seed=BATCH_SEED)
    documents = train_lm.read_corpus(start.data, Bytes()).train
    rows = train_lm.make_rows(start, documents)
    chosen = lambda precision: train_lm.configure(train_lm.with_room(start, rows), steps, "auto", precision)
    plain = chosen(PRECISIONS[BASELINE])
    batches = on_device(train_lm.make_batches(plain, documents, rows), steps)
    key = jax.random.key(BATCH_SEED)
    return Workload(
        steps,
        start=lambda seed: train_lm.init_state(plain, seed)[1],
        model=lambda precision: Decoder(chosen(precision).model, rngs=nnx.Rngs(0)),
        make_step=lambda precision, graphdef: train_lm.make_step(graphdef, chosen(precision)),
        inputs=lambda step: (batches[step], key),
        shape={
            "T": plain.batch * plain.context,
            "D": plain.model.width,
            "layers": plain.model.layers,
            "experts": plain.model.experts,
        },
    )


def dit_workload(preset: str, steps: int) -> Workload:
    check_option("preset", preset, DIT_PRESETS)
    chosen, data = (
        dataclasses.replace(with_steps(DIT_PRESETS[preset], steps), seed=BATCH_SEED),
        DATA_SETS["digits"](BATCH_SEED),
    )
    sizes = lambda precision: train_dit.configure(train_dit.with_precision(chosen, precision), data)
    batches, key = on_device(train_dit.make_batches(chosen, data), steps), jax.random.key(BATCH_SEED)
    return Workload(
        steps,
        start=lambda seed: train_dit.init_state(sizes(PRECISIONS[BASELINE]), chosen, seed)[1],
        model=lambda precision: DiT(sizes(precision), rngs=nnx.Rngs(0)),
        make_step=lambda precision, graphdef: train_dit.make_step(graphdef, chosen),
        inputs=lambda step: (batches[step], key),
        shape={"T": chosen.tokens, "D": chosen.width, "layers": chosen.layers, "images": chosen.images},
    )


def on_device(batches: Callable[[int], Any], steps: int) -> list[Any]:
    """All of them, before the measurement."""
    return [place(batches(step)) for step in range(steps)]


WORKLOADS = {"lm": lm_workload, "dit": dit_workload}


def start_in(workload: Workload, precision: str, start: Any) -> tuple[nnx.GraphDef, Any]:
    """The model in another precision, and a copy of the state for it: the same parameters, empty histories."""
    graphdef, _, histories = nnx.split(
        nnx.eval_shape(lambda: workload.model(PRECISIONS[precision])), nnx.Param, AmaxHistory
    )
    return graphdef, jax.tree.map(jnp.copy, start)._replace(
        histories=jax.tree.map(lambda h: jnp.zeros(h.shape, h.dtype), histories)
    )


def compile_steps(workload: Workload, precisions: list[str], start: Any) -> dict[str, Any]:
    """Each precision's training step, compiled in parallel: compilation is most of a comparison's time."""

    def lower(precision: str):
        graphdef, state = start_in(workload, precision, start)
        return workload.make_step(PRECISIONS[precision], graphdef).lower(state, *workload.inputs(0))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return dict(
            zip(
                precisions,
                pool.map(lambda lowered: lowered.compile(), [lower(precision) for precision in precisions]),
                strict=True,
            )
        )


def train(workload: Workload, step: Callable[..., tuple[Any, Any]], state: Any) -> Run:
    """All steps from a state, which is donated. The host waits only when it reads the clock."""
    losses, us, last = [], [], time.perf_counter()
    for i in range(workload.steps):
        state, metrics = step(state, *workload.inputs(i))
        losses.append(metrics.loss)
        if (i + 1) % TIMED == 0 or i + 1 == workload.steps:
            jax.block_until_ready(state)
            us.append(1e6 * (time.perf_counter() - last) / (i % TIMED + 1))
            last = time.perf_counter()
    return Run(np.array(jax.device_get(losses)), us)


def make_row(model: str, workload: Workload, precision: str, seed: int, run: Run, baseline: Run) -> dict:
    """A row in the benchmarks' format, with the losses and a curve of their means over equal parts of the training."""
    us, last = np.percentile(run.us, (20, 50, 80)), min(LAST, workload.steps)
    loss, wanted = (float(np.mean(of.losses[-last:])) for of in (run, baseline))
    return {
        "op": "train",
        "pass": "step",
        "name": model,
        "shape": workload.shape,
        "dtype": PRECISIONS[precision].dtype,
        "dist": f"seed {seed}",
        "backend": "auto",
        "recipe": PRECISIONS[precision].recipe,
        "model": model,
        "precision": precision,
        "seed": seed,
        "steps": workload.steps,
        "loss_last50": round(loss, 6),
        "ratio_to_bf16": round(loss / wanted, 6),
        "finite": bool(np.isfinite(run.losses).all()),
        "us_p50": round(us[1], 1),
        "us_p20": round(us[0], 1),
        "us_p80": round(us[2], 1),
        "tokens_per_s": round(1e6 * workload.shape["T"] / us[1]),
        "of_ceiling": None,
        "max_err": None,
        "vs": {} if precision == BASELINE else {BASELINE: round(float(np.percentile(baseline.us, 50)) / us[1], 3)},
        "curve": [round(float(np.mean(part)), 5) for part in np.array_split(run.losses, min(POINTS, workload.steps))],
        **environment(),
    }


@functools.cache
def environment() -> dict[str, str | None]:
    """Where and with what it was measured; JAXOPS_COMMIT is the commit of a copy of the sources."""
    here = Path(__file__).parent
    commit = os.environ.get("JAXOPS_COMMIT") or _first_line("git", "-C", str(here), "rev-parse", "--short", "HEAD")
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    driver = _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "jax": jax.__version__,
        "triton": triton,
        "driver": driver,
        "device": jax.devices()[0].device_kind,
        "commit": commit,
        "date": datetime.date.today().isoformat(),
    }


def _first_line(*command: str) -> str | None:
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    return printed[0].strip() if printed else None


def results_folder() -> Path:
    if jax.default_backend() != "gpu":
        raise typer.BadParameter("without a GPU the rows are no results: pass a folder.", param_hint="--out")
    return Path(__file__).parents[1] / "benchmarks" / "results" / jax.devices()[0].device_kind.lower().replace(" ", "_")


def main(
    models: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(WORKLOADS)}; all by default.")] = None,
    preset: Annotated[str, typer.Option(help="As of `python -m models.train`.")] = "wide",
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each.")] = 500,
    recipes: Annotated[str, typer.Option(help="FP8 recipes, separated by commas.")] = ",".join(RECIPES),
    seeds: Annotated[int, typer.Option(min=1, help="Parameters to start from: every recipe is trained from each.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the rows and the picture. Default: benchmarks/results/DEVICE.")
    ] = None,
) -> None:
    """Appends to OUT/precision.jsonl and draws OUT/precision.png.

    Bfloat16 is trained from two starts at least: their difference is the noise.
    """
    for name in models or ():
        check_option("models", name, WORKLOADS)
    chosen = [
        recipe.replace("_", "-") for recipe in recipes.split(",")
    ]  # as `--precision` writes them, or as jaxops does
    for recipe in chosen:
        check_option("recipes", recipe, RECIPES)
    precisions = [f"fp8-{recipe}" for recipe in chosen]
    folder = results_folder() if out is None else out
    folder.mkdir(parents=True, exist_ok=True)
    file, begin = folder / "precision.jsonl", time.perf_counter()

    for model in models or WORKLOADS:
        workload = WORKLOADS[model](preset, steps)
        starts = {seed: workload.start(seed) for seed in range(max(seeds, 2))}
        compiled = compile_steps(workload, [BASELINE, *precisions], starts[0])
        print(f"{model}: {len(compiled)} steps compiled; {time.perf_counter() - begin:.0f} s in all", flush=True)
        baselines: dict[int, Run] = {}
        ratios: dict[str, list[float]] = {}
        for precision, seed in [*((BASELINE, seed) for seed in starts), *itertools.product(precisions, range(seeds))]:
            run = train(workload, compiled[precision], start_in(workload, precision, starts[seed])[1])
            if precision == BASELINE:
                baselines[seed] = run
            row = make_row(model, workload, precision, seed, run, baselines[0 if precision == BASELINE else seed])
            if precision != BASELINE:
                ratios.setdefault(precision, []).append(row["ratio_to_bf16"] - 1)
            with file.open("a") as lines:
                lines.write(json.dumps(row) + "\n")
            print(
                f"{model} {precision:26} seed {seed}: loss {row['loss_last50']:.4f} ({row['ratio_to_bf16'] - 1:+.3%} "
                "of bfloat16's), "
                f"{row['tokens_per_s']:,} tokens/s; {time.perf_counter() - begin:.0f} s in all",
                flush=True,
            )
        if seeds > 1:
            for precision, found in ratios.items():
                mean, error = np.mean(found), np.std(found, ddof=1) / seeds**0.5
                print(
                    f"{model} {precision:26} {mean:+.3%} of bfloat16's loss, the mean of {seeds} starts, standard "
                    f"error {error:.3%}",
                    flush=True,
                )
    plot_precisions([json.loads(line) for line in file.read_text().splitlines()], BASELINE, folder / "precision.png")


if __name__ == "__main__":
    typer.run(main)
