"""Errors of each FP8 recipe against float64, by length of the sum, with and without outliers.

python -m benchmarks.fp8_errors                         # sums of 1,024, 4,096 and 16,384; on a GPU
python -m benchmarks.fp8_errors --small --out /tmp/x    # short sums, on a CPU too

Relative Frobenius error and largest error of y, dx and dw. Operands are normal in bfloat16, the gradient dy 1e-3 as
large; with outliers, one of a thousand entries of x and of dy is 100 times as large. The float64 products are NumPy's,
of the same bfloat16 operands. XLA's bfloat16 linear is measured beside the recipes.
"""

import dataclasses
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import typer

import jaxops
from benchmarks import harness, peers_fp8
from jaxops.ops.fp8_matmul.recipes import RECIPES

DTYPE = jnp.bfloat16
SUMS = {"y": "K", "dx": "N", "dw": "M"}  # result -> the dimension that it sums over
LENGTHS, SIDE = (1024, 4096, 16384), 2048
SMALL_LENGTHS, SMALL_SIDE = (128, 512), 128
OUTLIERS, OUTLIER_FACTOR, DY_FACTOR = 1e-3, 100.0, 1e-3
LINE = "{:26}{:4}{:>8}{:>10}{:>14}{:>14}"


@dataclasses.dataclass(frozen=True)
class Case:
    """One result: its sum has the given length, every other dimension is `side`."""

    result: str
    length: int
    side: int

    @property
    def dims(self) -> dict[str, int]:
        return dict.fromkeys("MKN", self.side) | {SUMS[self.result]: self.length}

    def operands(self, outliers: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x, w, dy."""
        M, K, N = self.dims.values()
        x, w, dy = (harness.normal(seed, dims, DTYPE) for seed, dims in enumerate([(M, K), (K, N), (M, N)]))
        if outliers:
            x, dy = (_with_outliers(seed, tensor) for seed, tensor in ((10, x), (12, dy)))
        return x, w, (dy * DY_FACTOR).astype(DTYPE)


def _with_outliers(seed: int, tensor: jax.Array) -> jax.Array:
    return jnp.where(
        jax.random.bernoulli(jax.random.key(seed), OUTLIERS, tensor.shape), tensor * OUTLIER_FACTOR, tensor
    )


def exact(result: str, x: np.ndarray, w: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """The result in float64, from float64 operands."""
    return {"y": lambda: x @ w, "dx": lambda: dy @ w.T, "dw": lambda: x.T @ dy}[result]()


def errors(got: np.ndarray, want: np.ndarray) -> tuple[float, float]:
    """(Frobenius norm of the difference over that of want, largest difference over the root mean square of want)."""
    diff = got - want
    return float(np.linalg.norm(diff) / np.linalg.norm(want)), float(np.max(np.abs(diff)) / np.sqrt(np.mean(want**2)))


def linear(recipe: str, result: str):
    """(x, w, dy) -> one of y, dx and dw."""

    def call(x, w, dy):
        if recipe == "bfloat16":
            return peers_fp8.bf16_passes()["fwd+bwd"](x, w, dy)[result]
        y, vjp = jax.vjp(lambda x, w: jaxops.fp8_matmul(x, w, recipe=recipe), x, w)
        return dict(zip(SUMS, (y, *vjp(dy)), strict=True))[result]

    return call


def measure_case(case: Case, recipes: list[str], file: pathlib.Path) -> int:
    """Writes two rows a recipe, without and with outliers; returns the number of failed recipes."""
    tensors = {outliers: case.operands(outliers) for outliers in (False, True)}
    wanted = {
        outliers: exact(case.result, *(np.asarray(tensor).astype(np.float64) for tensor in operands))
        for outliers, operands in tensors.items()
    }
    failed = 0
    for recipe in recipes:
        try:
            compiled, _ = harness.compile_fits(linear(recipe, case.result), *tensors[False], cublas=True)
            found = {
                outliers: errors(np.asarray(compiled(*tensors[outliers])).astype(np.float64), want)
                for outliers, want in wanted.items()
            }
        except Exception as error:
            harness.print_left_out(f"{recipe} {case.result} {case.length}", error)
            failed += 1
            continue
        for outliers, (frobenius, largest) in found.items():
            row = {
                "op": "fp8_matmul",
                "table": "errors",
                "recipe": recipe,
                "result": case.result,
                "length": case.length,
                "shape": case.dims,
            }
            row |= {"outliers": outliers, "frobenius": float(f"{frobenius:.4g}"), "max_err": float(f"{largest:.4g}")}
            harness.append_row(file, row | harness.environment())
            line = (
                recipe,
                case.result,
                f"{case.length:,}",
                "outliers" if outliers else "normal",
                f"{frobenius:.3e}",
                f"{largest:.3e}",
            )
            print(LINE.format(*line), flush=True)
    return failed


def main(
    recipes: str = typer.Option(
        ",".join(["bfloat16", *(name for name, recipe in RECIPES.items() if not recipe.delayed)])
    ),
    results: str = typer.Option(",".join(SUMS)),
    out: str = typer.Option("", help="Folder of the rows; benchmarks/results/<device> by default."),
    small: bool = typer.Option(False, help="Short sums of small matrices; needs --out."),
) -> None:
    """Appends to <out>/fp8_errors.jsonl; exits with 1 if a recipe failed."""
    if not out and (small or not harness.on_gpu()):
        raise typer.BadParameter("without a GPU, or with --small, the rows are no results: pass --out.")
    start = time.perf_counter()
    file = harness.results_folder(out) / "fp8_errors.jsonl"
    print(LINE.format("recipe", "", "sum of", "operands", "Frobenius", "largest/RMS"), flush=True)
    failed = 0
    for result in results.split(","):
        for length in SMALL_LENGTHS if small else LENGTHS:
            failed += measure_case(Case(result, length, SMALL_SIDE if small else SIDE), recipes.split(","), file)
    print(f"done after {time.perf_counter() - start:.0f} s", flush=True)
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
