"""docs/fp8.md's tables and the picture of `benchmarks.bench_precision`: `python -m benchmarks.precision_report`.

Of a side that was measured more than once with the same sizes, the newest row counts. Needs matplotlib.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import Annotated

import typer

from benchmarks.fp8_parts import CASTS, PRODUCTS
from benchmarks.harness import ROOT
from benchmarks.precision_sides import BASELINE, NULL

DOCS = ROOT / "docs" / "fp8.md"
PICTURE = "precision.png"
BEGIN, END = "<!-- {}: written by `python -m benchmarks.precision_report` -->", "<!-- end of {} -->"
CAST = "-dense-{}"  # of the sides with one cast, or those of one product


Rows = dict[tuple, dict]  # by (side, step); step is None of a whole training


def read_rows(file: pathlib.Path) -> dict[tuple[str, str], Rows]:
    """The newest rows by pass and name, in the order in which they were first measured."""
    found: dict[tuple[str, str], Rows] = {}
    for line in file.read_text("utf-8").splitlines():
        row = json.loads(line)
        found.setdefault((row["pass"], row["name"]), {})[row["side"], row.get("step")] = row
    return found


def percent(share: float, digits: int = 2) -> str:
    return f"{100 * share:+.{digits}f} %"


def significant(row: dict) -> bool:
    return abs(row["mean"]) > 2 * row["standard_error"]


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def losses_table(rows: Rows) -> str:
    """Of each side the mean difference to the baseline, and those of all starts."""
    lines = [
        [
            f"`{side}`",
            ("**{}**" if significant(row) else "{}").format(percent(row["mean"], 3)),
            f"{100 * row['standard_error']:.3f} %",
            ", ".join(f"{100 * difference:+.2f}" for difference in row["differences"]),
        ]
        for (side, _), row in rows.items()
        if side != BASELINE
    ]
    return markdown(["side", "mean", "standard error", "each start, %"], lines)


def points(rows: Rows) -> list[int]:
    return sorted({step for _, step in rows})


def gradients_table(rows: Rows, casts: Sequence[str]) -> str:
    """Of each side the whole gradient's error at every point, and the tensor with the largest mean error."""
    steps, lines = points(rows), []
    for side in dict.fromkeys(side for side, _ in rows):
        if any(side.endswith(CAST.format(cast)) for cast in casts):
            continue
        at = [rows[side, step]["errors"] for step in steps]
        mean = {tensor: sum(errors[tensor][1] for errors in at) / len(at) for tensor in at[0] if tensor != "all"}
        worst = max(mean, key=mean.__getitem__)
        both = [f"{errors['all'][0]:.4f}, {100 * errors['all'][1]:.1f} %" for errors in at]
        lines.append([f"`{side}`", *both, f"{worst} ({100 * mean[worst]:.0f} %)"])
    return markdown(["side", *(f"step {step}" for step in steps), "worst tensor"], lines)


def casts_table(rows: Rows, casts: Sequence[str]) -> str:
    """The whole gradient's error by one cast or one product's casts: a line each, a column a recipe."""
    steps = points(rows)
    recipes = [side.removesuffix(CAST.format(casts[0])) for side, step in rows if side.endswith(CAST.format(casts[0]))]
    recipes = list(dict.fromkeys(recipes))
    lines = [
        [
            f"`{cast}`",
            *(
                ", ".join(f"{100 * rows[recipe + CAST.format(cast), step]['errors']['all'][1]:.1f}" for step in steps)
                + " %"
                for recipe in recipes
            ),
        ]
        for cast in casts
    ]
    return markdown(["rounded", *recipes], lines)


def draw(rows: Rows, path: pathlib.Path) -> None:
    """Left the training loss' difference with a recipe in all layers, right every side's held-out differences."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    colors = colormaps["tab20"]
    figure = Figure(figsize=(13, 5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    trained = [(side, row) for (side, _), row in rows.items() if side != BASELINE]
    for place, (side, row) in enumerate(trained):
        color = "black" if side == NULL else colors(place % colors.N)
        count, steps = len(row["curve_mean"]), row["shape"]["steps"]
        middles = [(i + 0.5) * steps / count for i in range(count)]
        if "-dense" not in side:
            left.plot(middles, [100 * mean for mean in row["curve_mean"]], color=color, linewidth=1, label=side)
        right.plot([100 * one for one in row["differences"]], [-place] * len(row["differences"]), ".", color="silver")
        right.errorbar(100 * row["mean"], -place, xerr=200 * row["standard_error"], fmt="o", color=color, capsize=3)
    left.set(xlabel="step", ylabel=f"% from {BASELINE}", title="training loss, mean of all starts")
    left.legend(fontsize=7, ncols=3, loc="upper left")
    left.margins(y=0.2)
    right.axvline(0, color="gray", linewidth=0.8)
    right.set_yticks([-place for place in range(len(trained))], [side for side, _ in trained], fontsize=7)
    right.set(xlabel=f"% from {BASELINE}", title="held-out loss: starts, mean, 2 standard errors")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def with_table(text: str, name: str, table: str) -> str:
    """The document with the table between its marks.

    Raises:
      ValueError: the marks are not there.
    """
    begin, end = BEGIN.format(name), END.format(name)
    if begin not in text or end not in text:
        raise ValueError(f"the text lacks {begin} or {end}")
    before, after = text.split(begin)[0], text.split(end)[1]
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"


def tables(rows: dict[tuple[str, str], Rows], size: str) -> dict[str, str]:
    casts, gradients = (*PRODUCTS, *CASTS), rows["gradient", f"lm_{size}"]
    return {
        "losses": losses_table(rows["step", f"lm_{size}"]),
        "slow losses": losses_table(rows["step", f"lm_{size}_slow"]),
        "gradients": gradients_table(gradients, casts),
        "casts": casts_table(gradients, casts),
    }


def main(
    folder: Annotated[pathlib.Path, typer.Argument(help="Has precision.jsonl.")] = ROOT / "benchmarks/results/cpu",
    size: Annotated[str, typer.Option(help="As of `benchmarks.bench_precision`.")] = "cpu",
) -> None:
    """Writes the tables into docs/fp8.md, and the picture beside the rows."""
    rows, text = read_rows(folder / "precision.jsonl"), DOCS.read_text("utf-8")
    for name, table in tables(rows, size).items():
        text = with_table(text, name, table)
    DOCS.write_text(text, "utf-8")
    draw(rows["step", f"lm_{size}"], folder / PICTURE)


if __name__ == "__main__":
    typer.run(main)
