"""Damages files of a run, kills writers, checks the result: `python -m tests.faults --cases 2000 --seed 1`.

Each case is one fault, drawn from a seed: bits flipped, a file cut, removed, emptied or overwritten in part, a folder
emptied, a writer killed at a random moment. The run must end in the same bits as without the fault, in an earlier
checkpoint and a line that says so, or in an error of one line that names the file or its folder. Any other end is
printed, with the seed that repeats it. Folders and files have drawn names, of characters that shells, patterns, formats
and terminals treat differently.
"""

import collections
import dataclasses
import functools
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import typer
from flax import nnx

from models import hf
from models.decoder import Decoder
from models.training import terminal
from models.training.checkpoints import Checkpoints
from models.training.presets import of_bytes
from tests.models.interrupted_run import EVERY, train

ROOT = Path(__file__).parents[1]
DENSE = dataclasses.replace(of_bytes(layers=2, width=16, heads=2, experts=1, top_k=1, hidden=16), experts=0, top_k=0)
STEPS = (2, 4, 6)
SHARES = {"checkpoint": 670, "hf": 300, "run": 20, "kill": 10}  # of a thousand cases
PARTS = (
    *(
        "[x]",
        "]",
        "[",
        "[!a]",
        "*",
        "**",
        "?",
        "{a,b}",
        "{}",
        "{0}",
        "{",
        "\\",
        "\\n",
        "\\\\",
        " ",
        "  ",
        "%",
        "%20",
        "%s",
    ),
    *(
        "~",
        "$HOME",
        "${x}",
        "`x`",
        "'",
        '"',
        "#",
        "&",
        ";",
        "|",
        "<",
        ">",
        "(",
        "!",
        ":",
        "=",
        ",",
        "@",
        "^",
        "a.b",
        "...",
    ),
    *("-x", "--", ".x", "file:", "gs:", "\n", "\r\n", "\t", "\x1b[31m", "\x7f", "caf\u00e9", "e\u0301", "\u4f60\u597d"),
    *("\U0001f600", "\u2028", "\u202e", "\u00a0", "\ufeff", "2", ".damaged", ".orbax-checkpoint-tmp", ".unfinished"),
    *("a" * 50, "a" * 250, "\u00e9" * 120, "\udcff"),
)
LONGEST = 255  # bytes of a name


class WrongError(Exception):
    """What a fault must not lead to."""


def state_of(step: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(step)
    return {
        "params": jnp.asarray(rng.standard_normal((40, 30)), jnp.float32),
        "half": jnp.asarray(rng.standard_normal((7, 9)), jnp.bfloat16),
        "zeros": jnp.zeros((64, 64)),
        "step": jnp.int32(step),
    }


@functools.cache
def model_of(version: int) -> Decoder:
    return Decoder(DENSE, rngs=nnx.Rngs(version))


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def draw_name(rng: np.random.Generator, end: str = "") -> str:
    """A name of one to three parts and an end; without bytes that are not UTF-8 where it has an end."""
    name = "".join(PARTS[part] for part in rng.integers(0, len(PARTS) - bool(end), rng.integers(1, 4)))
    room = LONGEST - len(os.fsencode(end))
    return os.fsencode(name)[:room].decode(errors="ignore" if end else "surrogateescape") + end


def damage(root: Path, rng: np.random.Generator) -> Path:
    """Damages one file below a folder (large files more often) or one of the folders; returns its path."""
    paths = sorted(
        root.rglob("*"), key=lambda path: (path.is_file(), path.stat().st_size, path)
    )  # some names are random
    weights = np.array([4 + path.is_file() * path.stat().st_size ** 0.5 for path in paths])
    file = paths[rng.choice(len(paths), p=weights / weights.sum())]
    if file.is_dir():
        shutil.rmtree(file)
        if rng.integers(2):
            file.mkdir()
        return file
    content = bytearray(file.read_bytes())
    fault = rng.choice(["flip", "flip", "flip", "cut", "remove", "empty", "zeros", "noise", "longer"])
    start, end = sorted(rng.integers(0, len(content) + 1, 2))
    if fault == "flip":
        for place in rng.integers(0, 8 * len(content), rng.integers(1, 4)) if content else ():
            content[place // 8] ^= 1 << place % 8
    elif fault == "cut":
        content = content[:start]
    elif fault == "empty":
        content = bytearray()
    elif fault == "zeros":
        content[start:end] = bytes(end - start)
    elif fault == "noise":
        content[start:end] = rng.bytes(end - start)
    elif fault == "longer":
        content += rng.bytes(rng.integers(1, 99))
    file.unlink() if fault == "remove" else file.write_bytes(content)
    return file


def one_line(error: Exception, *names: Path) -> str:
    """The words of an error that a user gets; they name what was damaged."""
    said = error.message if isinstance(error, typer.BadParameter) else str(error)
    if not is_one_line(said, *names):
        raise WrongError(f"{type(error).__name__}: {said[:600]!r}") from error
    return said


def is_one_line(said: str, *names: Path) -> bool:
    """Whether it is a line that names one of them. Names may have line ends, which the commands escape."""
    without = functools.reduce(lambda text, name: text.replace(str(name), "NAME"), sorted(names, reverse=True), said)
    # By Python in an OSError, and by the commands.
    escaped = any(form in said for name in names for form in (repr(str(name))[1:-1], terminal.one_line(str(name))))
    return len(without.strip().splitlines()) == 1 and (without != said or escaped)


def read_checkpoints(folder: Path, finished: set[int], hit: set[int]) -> str:
    """
    Args:
      finished: the steps of which there was a whole checkpoint.
      hit: those of them that are damaged.
    """
    said: list[str] = []
    like = jax.tree.map(jnp.zeros_like, state_of(0))
    try:
        with Checkpoints(folder) as checkpoints:
            state, done = checkpoints.start(like, said.append)
    except typer.BadParameter as error:
        one_line(error, folder)
        if finished - hit:
            raise WrongError(f"steps {finished - hit} are whole, and nothing is read: {error.message}") from error
        return "named"
    if done == 0:
        if finished - hit:
            raise WrongError("whole checkpoints are not found")
        return "nothing was left"
    if bits(state) != bits(state_of(done)):
        raise WrongError(f"the checkpoint of step {done} has other numbers")
    if done < max(finished - hit, default=0):
        raise WrongError(f"step {done} is read, and a newer one is whole")
    if done == max(finished) and not said:
        return "same"
    newest_is_gone = not any((folder / f"{max(finished)}{end}").exists() for end in ("", ".damaged"))
    if not newest_is_gone and not (said and all(is_one_line(line, folder) for line in said)):
        raise WrongError(f"step {done} is read without a word: {said}")
    return "the one before" if said else "the one before, of a folder that is gone"


def checkpoint_case(whole: Path, folder: Path, rng: np.random.Generator) -> str:
    shutil.copytree(whole / "checkpoints", folder)
    file = damage(folder / str(rng.choice([*STEPS, max(STEPS), max(STEPS)])) if rng.integers(4) else folder, rng)
    hit = {int(part) for part in file.relative_to(folder).parts[:1]}
    return read_checkpoints(folder, set(STEPS), hit)


def hf_case(whole: Path, folder: Path, rng: np.random.Generator) -> str:
    shutil.copytree(whole / "hf", folder)
    damage(folder, rng)
    try:
        _, model = hf.load(folder)
    except (ValueError, OSError) as error:
        one_line(error, folder)
        return "named"
    if bits(nnx.state(model)) != bits(nnx.state(model_of(0))):
        raise WrongError("the model has other weights")
    return "same"


def run_case(whole: Path, folder: Path, rng: np.random.Generator) -> str:
    """A run that is resumed: its own files, or its data, are damaged."""
    shutil.copytree(whole / "run", folder / "run")
    original = data_in(whole)
    data = Path(shutil.copy(original, folder / "data.txt"))
    for step in ("4", "5"):
        shutil.rmtree(folder / "run" / "checkpoints" / step)
    shutil.rmtree(folder / "run" / "checkpoint-hf")
    # Data lies where it lay when the run began: that is a part of the run's settings.
    place = rng.integers(4)
    if place == 0:
        scratch = folder / "damaged"
        scratch.mkdir()
        damaged = Path(shutil.copy(data, scratch / "data.txt"))
        while damaged.exists() and damaged.read_bytes() == original.read_bytes():
            damage(scratch, rng)
        names = [original]
    else:
        damage(folder / "run", rng)
        names = [folder, original]
    try:
        if place == 0:
            original.unlink()
            if (folder / "damaged" / "data.txt").exists():
                shutil.copy(folder / "damaged" / "data.txt", original)
        train(folder / "run", data=[str(original)], save_every=EVERY, resume=True)
    except typer.BadParameter as error:
        one_line(error, *names)
        return "named"
    finally:
        shutil.copy(data, original)
    got, want = ((out / "checkpoint-hf" / "model.safetensors").read_bytes() for out in (folder / "run", whole / "run"))
    if got != want:
        raise WrongError("the trained model has other weights")
    return "same"


def kill_case(_: Path, folder: Path, rng: np.random.Generator) -> str:
    """A process that writes a checkpoint and a model for transformers again and again is killed."""
    began, finished, wanted = 0, 0, int(rng.integers(2, 6))
    command = [sys.executable, "-m", "tests.faults", "--writer", str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, bufsize=1) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            word, step = line.split()
            began, finished = (int(step), finished) if word == "begins" else (began, int(step))
            if began >= wanted:
                break
        select.select([], [], [], rng.uniform(0, 0.15))  # somewhere in the write
        writer.send_signal(signal.SIGKILL)
        for line in writer.stdout:
            word, step = line.split()
            began, finished = (int(step), finished) if word == "begins" else (began, int(step))
    whole = {int(path.name) for path in folder.glob("checkpoints/*") if path.name.isdecimal()}
    if finished and finished not in whole:
        raise WrongError(f"step {finished} was finished, and is gone: {whole}")
    outcome = read_checkpoints(folder / "checkpoints", whole, set())
    if not (folder / "hf").exists():
        return outcome
    try:
        _, model = hf.load(folder / "hf")
    except (ValueError, OSError) as error:
        one_line(error, folder / "hf")
        return f"{outcome}, model named"
    if bits(nnx.state(model)) not in [bits(nnx.state(model_of(version))) for version in range(finished, began + 1)]:
        raise WrongError("the model is none of those that were written last")
    return f"{outcome}, model whole"


def write_until_killed(folder: Path) -> None:
    with Checkpoints(folder / "checkpoints") as checkpoints:
        step = 0
        while True:
            step += 1
            print(f"begins {step}", flush=True)
            checkpoints.save(state_of(step), step)
            checkpoints.wait()
            hf.save(folder / "hf", "LlamaForCausalLM", model_of(step), max_bytes=9_000)
            print(f"finished {step}", flush=True)


CASES: dict[str, Callable[[Path, Path, np.random.Generator], str]] = {
    "checkpoint": checkpoint_case,
    "hf": hf_case,
    "run": run_case,
    "kill": kill_case,
}


def data_in(whole: Path) -> Path:
    """Of the prepared run."""
    (file,) = (whole / "data").glob("*/*.txt")
    return file


def prepare(folder: Path, seed: int) -> None:
    """What the cases damage copies of."""
    rng = np.random.default_rng(seed)
    with Checkpoints(folder / "checkpoints") as checkpoints:
        for step in STEPS:
            checkpoints.save(state_of(step), step, heldout=1 / step)
    hf.save(folder / "hf", "LlamaForCausalLM", model_of(0), max_bytes=9_000, beside={"tokenizer.json": "{}"})
    data = folder / "data" / draw_name(rng, "d") / draw_name(rng, ".txt")
    data.parent.mkdir(parents=True)
    shutil.copy(ROOT / "LICENSE", data)
    train(folder / "run", data=[str(data)], save_every=EVERY)


def kinds(cases: int) -> list[str]:
    """By their shares, each at least once."""
    counts = {kind: max(1, cases * share // 1000) for kind, share in SHARES.items()}
    counts["checkpoint"] += cases - sum(counts.values())
    return [kind for kind, count in counts.items() for _ in range(count)]


def run_cases(cases: int, seed: int, whole: Path, say: Callable[[str], None] = print) -> collections.Counter[str]:
    """Runs them, and counts how they ended; "WRONG" are those that must not be, each of which is said."""
    counts: collections.Counter[str] = collections.Counter()
    for number, kind in enumerate(kinds(cases)):
        rng = np.random.default_rng([seed, number])
        name = f"{draw_name(rng)}/{draw_name(rng)}"
        with tempfile.TemporaryDirectory() as scratch:
            try:
                (Path(scratch) / name).parent.mkdir()
                outcome = CASES[kind](whole, Path(scratch) / name, rng)
            except Exception as error:  # any other error is a traceback that a user would see
                said = error if isinstance(error, WrongError) else f"{type(error).__name__}: {str(error)[:300]!r}"
                say(f"{kind}, seed {seed}, case {number}, in {name!r}: {said}")
                outcome = "WRONG"
        counts[f"{kind}: {outcome}"] += 1
    return counts


def main(
    cases: Annotated[int, typer.Option(min=4)] = 200,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    writer: Annotated[Path | None, typer.Option(help="Only writes into this folder, until it is killed.")] = None,
) -> None:
    if writer is not None:
        write_until_killed(writer)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        prepare(Path(scratch), seed)
        counts = run_cases(cases, seed, Path(scratch), lambda line: typer.echo(line, err=True))
    for outcome, count in sorted(counts.items()):
        typer.echo(f"{count:6} {outcome}")
    typer.echo(f"{counts.total():6} in {time.perf_counter() - begin:.0f} s")
    raise typer.Exit(any(outcome.endswith("WRONG") for outcome in counts))


if __name__ == "__main__":
    typer.run(main)
