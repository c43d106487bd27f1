"""What a precision costs in quality: paired trainings of a decoder by every FP8 recipe, and each layer's gradients.

python -m benchmarks.bench_precision                          # all sides, 8 starts; on a CPU the small size
python -m benchmarks.bench_precision --sides blockwise        # one side beside the baseline
python -m benchmarks.bench_precision --gradients              # only gradients, with the casts one by one

Writes benchmarks/results/<device>/precision.jsonl; `python -m benchmarks.precision_report` makes the docs' table and
picture of it. Numbers of a CPU are of the XLA backend: casts and scales are those of the kernels, bit by bit, sums have
another order.
"""

import dataclasses
import pathlib
import time
from typing import Annotated

import numpy as np
import typer

from benchmarks import harness
from benchmarks.precision_sides import BASELINE, EXACT, Side, cast_sides, training_sides
from benchmarks.precision_trainings import Trained, Work, gradient_errors, gradient_of, paired, trainer, work_of
from models.data.tokenizer import Bytes
from models.decoder import DecoderConfig
from models.precision import PRECISIONS
from models.training import lm as train_lm
from models.training.presets import PRESETS, Preset
from models.training.schedule import with_steps

# All have a layer with a dense gated unit before those with experts, as DeepSeek-V3 has.
CPU = Preset(
    DecoderConfig(
        256, 128, layers=2, heads=4, kv_heads=4, head_dim=32, hidden=128, experts=4, top_k=2, dense_layers=(0,),
        dense_hidden=256, tie_embeddings=True,
    ),
    context=64, batch=8, steps=160, learning_rate=2e-3, warmup_steps=20, eval_every=160, eval_windows=512,
    balance_weight=0.0,
)  # fmt: skip
WIDE = PRESETS["wide"]
SIZES = {
    "cpu": CPU,
    # Differences scatter less at a lower learning rate, in a model that has learned less.
    "cpu_slow": dataclasses.replace(CPU, learning_rate=5e-4),
    "gpu": dataclasses.replace(
        WIDE,
        model=dataclasses.replace(WIDE.model, dense_layers=(0,), dense_hidden=2048),
        steps=1_000, learning_rate=2e-4, batch=64, eval_windows=1024, balance_weight=0.0,
    ),
}  # fmt: skip
PARTS = 24  # of a curve


def shape_of(work: Work, starts: int) -> dict[str, int]:
    base, model = work.base, work.base.model
    sizes = {"T": base.batch * base.context, "D": model.width, "layers": model.layers, "experts": model.experts}
    return sizes | {"steps": base.steps, "starts": starts}


def case(work: Work, size: str, pass_name: str, side_name: str, side: Side, starts: int) -> dict:
    precision = PRECISIONS[side.precision]
    named = {"op": "train", "pass": pass_name, "name": f"lm_{size}", "shape": shape_of(work, starts)}
    recipe = side.casts.recipe if side.casts else precision.recipe
    return named | {"dtype": precision.dtype, "backend": side.backend, "recipe": recipe, "side": side_name}


def training_row(trained: list[Trained], baseline: list[Trained]) -> dict:
    """Held-out losses of all starts, their differences to the baseline's, and the curve of the training losses'."""
    final = paired([one.heldout for one in trained], [one.heldout for one in baseline])
    parts = [
        [[float(np.mean(part)) for part in np.array_split(one.losses, min(PARTS, len(one.losses)))] for one in of]
        for of in (trained, baseline)
    ]
    curve = [paired(*part) for part in zip(*(np.array(of).T for of in parts), strict=True)]
    return {
        "heldout": [round(one.heldout, 6) for one in trained],
        "differences": [round(float(difference), 6) for difference in final.differences],
        "mean": round(final.mean, 6),
        "standard_error": round(final.standard_error, 6),
        "curve": [round(float(loss), 5) for loss in np.mean(parts[0], axis=0)],
        "curve_mean": [round(point.mean, 6) for point in curve],
        "curve_error": [round(point.standard_error, 6) for point in curve],
    }


def measure_trainings(work: Work, size: str, chosen: dict[str, Side], starts: int, file: pathlib.Path) -> None:
    baseline: list[Trained] = []
    for name, side in chosen.items():
        begin, train = time.perf_counter(), trainer(work, side)
        trained = [train(start) for start in range(starts)]
        baseline = baseline or trained
        row = training_row(trained, baseline)
        harness.append_row(file, case(work, size, "step", name, side, starts) | row | harness.environment())
        print(
            f"{name:32}{np.mean(row['heldout']):8.4f} nats a byte, {row['mean']:+.3%} from {BASELINE}, standard error "
            f"{row['standard_error']:.3%}; {time.perf_counter() - begin:.0f} s",
            flush=True,
        )


def measure_gradients(work: Work, size: str, chosen: dict[str, Side], file: pathlib.Path) -> None:
    """At the start, in the middle and at the end of the baseline's training from start 0."""
    steps = (0, work.base.steps // 2, work.base.steps)
    kept = trainer(work, Side(BASELINE))(0, steps).kept
    stacks: dict[str, tuple[int, ...]] = dict(zip(("blocks", "dense_blocks"), work.base.model.stacks(), strict=False))
    exact_of = gradient_of(work, Side(EXACT))
    exact = {step: exact_of(kept[step], step) for step in steps}
    for name, side in chosen.items():
        begin, of = time.perf_counter(), gradient_of(work, side)
        for step in steps:
            errors = gradient_errors(of(kept[step], step), exact[step], stacks)
            row = case(work, size, "gradient", name, side, 1) | {"step": step, "errors": errors}
            harness.append_row(file, row | harness.environment())
            print(f"{name:32}step {step}: cosine {errors['all'][0]:.5f}, error {errors['all'][1]:.2%}", flush=True)
        print(f"{name:32}{time.perf_counter() - begin:.0f} s", flush=True)


def choose(default: dict[str, Side], given: str) -> dict[str, Side]:
    """The named sides after the baseline; those of `default` without names."""
    known, names = training_sides() | cast_sides(), harness.names(given) or list(default)
    if unknown := set(names) - set(known):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))} is not one of {', '.join(known)}.")
    return {name: known[name] for name in dict.fromkeys((BASELINE, *names))}


def main(
    size: Annotated[str, typer.Option(help=f"Of {', '.join(SIZES)}; by default this machine's.")] = "",
    sides: Annotated[str, typer.Option(help="Names, separated by commas, also of single casts.")] = "",
    starts: Annotated[int, typer.Option(min=2, help="Parameters to start from, and orders of the batches.")] = 8,
    steps: Annotated[int, typer.Option(help="Of a training; the size's by default.")] = 0,
    gradients: Annotated[
        bool, typer.Option("--gradients", help="Measure gradients, and train the baseline only.")
    ] = False,
    out: Annotated[str, typer.Option(help="Folder of the rows; benchmarks/results/<device> by default.")] = "",
) -> None:
    """Appends a row a side, and for gradients a row a side and point of the training."""
    size = size or ("gpu" if harness.on_gpu() else "cpu")
    if size not in SIZES:
        raise typer.BadParameter(f"{size} is not one of {', '.join(SIZES)}.")
    work = work_of(with_steps(SIZES[size], steps or None), train_lm.read_corpus((), Bytes()))
    file = harness.results_folder(out) / "precision.jsonl"
    if gradients:
        # A gradient is of one micro-batch.
        chosen = {
            name: side for name, side in choose(training_sides() | cast_sides(), sides).items() if not side.halves
        }
        measure_gradients(work, size, chosen, file)
    else:
        measure_trainings(work, size, choose(training_sides(), sides), starts, file)


if __name__ == "__main__":
    typer.run(main)
