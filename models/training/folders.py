"""The folder that a run writes to: a new one for each run, or that of the run to resume."""

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import typer

from models.distributed.processes import exchanged, is_first
from models.training.checkpoints import saved_steps

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None

CONFIG, DATA, CHECKPOINTS = "config.yaml", "data.json", "checkpoints"
WRITTEN = (
    *(CONFIG, DATA, CHECKPOINTS, "metrics.jsonl", "tensorboard", "profile"),
    *("report.png", "samples.png", "checkpoint-hf"),
)


def to_resume(out: Path | None, default: Path) -> Path | None:
    """The folder of the run to go on with, None if there is none: `out`, else the newest that `new` makes of `default`.

    It has checkpoints, or had not written its first one: a run without --save-every leaves no data.json.
    """
    folders = [out] if out is not None else [_numbered(default, number) for number in sorted(_numbers(default))]
    began = lambda folder: _has_settings(folder) and (folder / DATA).exists()
    return next((f for f in reversed(folders) if saved_steps(f / CHECKPOINTS) or began(f)), None)


def new(out: Path | None, default: Path, *, resumes: bool) -> Path:
    """`out`, or `default`, or with -2, -3, ... at its end, claimed: of two processes that ask together one gets it.

    With `resumes` `out` may be what a run left that was killed before its config.yaml was whole.
    """
    if out is None:
        for number in itertools.count(1 + max(_numbers(default), default=0)):
            with contextlib.suppress(FileExistsError):
                _numbered(default, number).mkdir(parents=True)
                return _numbered(default, number)
    assert out is not None
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is no folder: write another one with --out.")
    out.mkdir(parents=True, exist_ok=True)
    if steps := saved_steps(out / CHECKPOINTS):
        raise ValueError(
            f"{out / CHECKPOINTS} has checkpoints up to step {steps[-1]}: write --resume to go on from there, or take "
            "another folder with --out."
        )
    held = [name for name in WRITTEN if (out / name).exists()]
    if resumes and {CONFIG} <= set(held) <= {CONFIG, DATA} and not _has_settings(out):
        return out
    with contextlib.suppress(FileExistsError):
        if not held:
            (out / CONFIG).touch(exist_ok=False)
            return out
    raise ValueError(
        f"{out} holds a run already, or what looks like one: {', '.join(held or [CONFIG])}. Take another folder with "
        "--out, or move that away."
    )


@contextlib.contextmanager
def written_by_one(out: Path) -> Iterator[None]:
    """Inside, no other run may begin to write there; a file system without locks does not hinder it."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "metrics.jsonl" if is_first() else Path(os.devnull)).open("ab") as file:
        wrong = ""
        try:
            if fcntl is not None and is_first():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            wrong = f"another process is writing to {out}: wait for its end, or take another folder with --out."
        except OSError:
            pass
        if wrong := exchanged(wrong):
            raise typer.BadParameter(wrong)
        yield


def _has_settings(folder: Path) -> bool:
    config = folder / CONFIG
    return config.exists() and config.stat().st_size > 0


def _numbered(default: Path, number: int) -> Path:
    return default if number == 1 else default.with_name(f"{default.name}-{number}")


def _numbers(default: Path) -> list[int]:
    """Of the folders that are there."""
    names = [path.name for path in default.parent.iterdir()] if default.parent.is_dir() else []
    ends = [name.removeprefix(f"{default.name}-") for name in names if name.startswith(f"{default.name}-")]
    return [1] * (default.name in names) + [int(end) for end in ends if end.isdecimal()]
