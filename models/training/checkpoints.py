"""Checkpoints of a training run: written in the background, atomic, verified when read, for any number of devices."""

import contextlib
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import typer
from etils import epath
from jax.experimental import multihost_utils

from models.distributed.mesh import name_of
from models.distributed.processes import exchanged, is_first
from models.training.ending import quiet_writers
from models.training.terminal import first_of

State = TypeVar("State")
NAMED = 3  # differences, in one error
UNFINISHED = ".orbax-checkpoint-tmp"  # in the names of folders that are being written, or removed
# What we add to a checkpoint's metadata. OWN is the checksum of the others.
CHECKSUMS, HELDOUT, OWN = "checksums", "heldout", "crc32"
# Orbax takes other characters of a path as a pattern, and TensorStore a backslash as a slash.
PLAIN = re.compile(r"[\w./-]+", re.ASCII)
DESCRIPTORS = Path("/proc/self/fd")


class Checkpoints:
    """The checkpoints of one run, each a folder named by its step. A context manager: its end waits for the last write.

    A checkpoint is the whole training state: a resumed run computes the same bits. `save` copies it from the devices,
    and threads write it while training goes on. It gets its name when it is complete on disk: a killed process leaves
    the earlier checkpoints intact, and the next process removes the partial one. With several processes all of them
    call every method, and share the folder. Each array's checksum is stored and verified when read.

    Args:
      folder: of any name; created if missing.
      keep, keep_best: how many of the newest are kept, and whether the one with the lowest held-out loss is, too.

    Raises:
      typer.BadParameter: the folder cannot be created or read.
    """

    def __init__(self, folder: Path, *, keep: int = 3, keep_best: bool = False):
        import orbax.checkpoint as ocp  # a second, which XLA compiles the step in

        self.folder, self._keep, self._keep_best = folder.resolve(), keep, keep_best
        self._newest: int | None = None
        self._args, self._handler = ocp.args, ocp.StandardCheckpointHandler()
        self._writer = ocp.AsyncCheckpointer(self._handler)
        with self._must_hold():
            if is_first():
                self.folder.mkdir(parents=True, exist_ok=True)
                for unfinished in self.folder.glob(f"*{UNFINISHED}*"):
                    shutil.rmtree(unfinished)
        with self._must_hold():  # another one: all processes wait here until the first one has made the folder
            self._descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
            by_number = DESCRIPTORS / str(self._descriptor)
            if not PLAIN.fullmatch(str(self.folder)) and not by_number.exists():
                raise OSError("its path may have letters, digits and _ . - / on this machine")
        self._path = epath.Path(self.folder if PLAIN.fullmatch(str(self.folder)) else by_number)  # for the libraries

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_) -> None:
        try:
            self._writer.close()
            self._remove_others()
        finally:
            os.close(self._descriptor)

    @property
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return saved_steps(self.folder)

    def start(self, state: State, say: Callable[[str], None] = lambda _: None) -> tuple[State, int]:
        """(state to train from, steps done): the newest intact checkpoint, or `state` and 0 if there is none.

        Newer, damaged checkpoints are renamed to STEP.damaged after an intact one has been read. In a folder without
        checkpoints one is written and removed, so that a folder that cannot hold any is an error before the training.

        Args:
          state: a new run's pytree of arrays. The result has its shapes, dtypes and shardings.
          say: called with a line for each damaged checkpoint.

        Raises:
          typer.BadParameter: a checkpoint of another model, all checkpoints are damaged, or none can be written.
        """
        wanted = _by_name(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state))
        damaged: dict[int, str] = {}
        for step in reversed(self.steps):
            with quiet_writers():
                found, wrong = self._read(step, wanted)
            if found is not None:
                self._set_aside(damaged, say)
                self._newest = step
                return jax.tree.unflatten(jax.tree.structure(state), [found[name] for name in wanted]), step
            damaged[step] = wrong
        if not damaged:
            self._try()
            return state, 0
        problems = "; ".join(f"{self.folder / str(step)}: {wrong}" for step, wrong in damaged.items())
        raise typer.BadParameter(
            f"all checkpoints are damaged. {problems}. Take another folder with --out, or remove them to begin again.",
            param_hint="--resume",
        )

    def save(self, state: Any, done: int, *, heldout: float | None = None) -> None:
        """Starts writing the state after `done` steps, unless it is saved already; `state` may be donated afterwards.

        Waits for the devices, and for the previous write. A failed write raises in the next `save`, or at the end.
        """
        if done == self._newest:
            return
        arrays = _by_name(state)
        with jax.transfer_guard("allow"):
            metadata: dict[str, Any] = {CHECKSUMS: checksums(arrays)}
            if heldout is not None and math.isfinite(heldout):
                metadata[HELDOUT] = heldout
            self._writer.wait_until_finished()
            self._remove_others()
            metadata[OWN] = _crc(metadata)
            self._writer.save(self._path / str(done), args=self._args.StandardSave(arrays), custom_metadata=metadata)
        self._newest = done

    def wait(self) -> None:
        """Waits for the write that `save` started."""
        self._writer.wait_until_finished()

    def check(self) -> None:
        """Raises the error of a failed write."""
        self._writer.check_for_errors()

    def _try(self) -> None:
        trial = f"trial{UNFINISHED}"
        try:
            with self._must_hold(), quiet_writers():
                self._writer.save(self._path / trial, args=self._args.StandardSave({"trial": np.zeros(1)}))
                self._writer.wait_until_finished()
        finally:
            for left in self.folder.glob(f"{trial}*") if is_first() else ():
                shutil.rmtree(left, ignore_errors=True)

    @contextlib.contextmanager
    def _must_hold(self) -> Iterator[None]:
        """An error inside, in any process, is in all of them that the folder cannot hold checkpoints."""
        wrong, cause = "", None
        try:
            yield
        except Exception as error:  # of any type, as in _read
            wrong, cause = _first_line(error), error
        if wrong := exchanged(wrong):
            raise typer.BadParameter(
                f"{self.folder} cannot hold checkpoints: {wrong}. Take another folder with --out.", param_hint="--out"
            ) from cause

    def _remove_others(self) -> None:
        """Renames each checkpoint before removing it, so that no partial folder looks complete."""
        if not is_first():
            return
        stay = set(self.steps[-self._keep :])
        if self._keep_best:
            losses = {step: loss for step in self.steps if (loss := self._heldout(step)) is not None}
            stay |= {min(losses, key=losses.__getitem__)} if losses else set()
        for step in set(self.steps) - stay:
            shutil.rmtree((self.folder / str(step)).rename(self.folder / f"{step}{UNFINISHED}"))

    def _metadata(self, step: int) -> dict[str, Any]:
        found = json.loads((self.folder / str(step) / "_CHECKPOINT_METADATA").read_bytes())["custom_metadata"]
        if found.pop(OWN) != _crc(found):
            raise ValueError("its own checksum is not what was saved")
        return found

    def _heldout(self, step: int) -> float | None:
        try:
            return self._metadata(step).get(HELDOUT)
        except (OSError, ValueError, LookupError, AttributeError, TypeError):
            return None

    def _read(self, step: int, wanted: dict[str, jax.ShapeDtypeStruct]) -> tuple[dict[str, jax.Array] | None, str]:
        """(arrays, "") or (None, the error), the same in all processes."""
        found, wrong, sums, stored = None, "", {}, {}
        try:
            metadata = self._metadata(step)
            sums = metadata[CHECKSUMS]
            stored = {key: _describe(x) for key, x in self._handler.metadata(self._path / str(step)).tree.items()}
        except Exception as error:  # of any type: Orbax, TensorStore and JSON have their own
            wrong = f"its metadata cannot be read: {_first_line(error)}"
        wrong = exchanged(wrong) or self._compare(step, sums, stored, wanted)
        if not wrong:
            try:  # the handler alone: a checkpointer would wait here for a process that cannot read its part
                found = self._handler.restore(self._path / str(step), args=self._args.StandardRestore(wanted))
            except Exception as error:
                wrong = f"its arrays cannot be read: {_first_line(error)}"
            wrong = exchanged(wrong)
        if found is not None and not wrong:
            read = checksums(found)
            if differing := [name for name in read if read[name] != sums[name]]:
                wrong = f"the checksum of {first_of(differing, NAMED)} is not what was saved"
        return (None, wrong) if wrong else (found, "")

    def _compare(
        self, step: int, sums: dict[str, int], stored: dict[str, str], wanted: dict[str, jax.ShapeDtypeStruct]
    ) -> str:
        """The error in the metadata, or ""."""
        if sums.keys() != stored.keys():
            differing = first_of(sorted(sums.keys() ^ stored.keys()), NAMED)
            return f"its arrays and checksums are not of the same names: {differing}"
        ours = {name: _describe(array) for name, array in wanted.items()}
        if differing := [name for name in {**ours, **stored} if ours.get(name) != stored.get(name)]:
            there, here = ({name: types.get(name, "missing") for name in differing} for types in (stored, ours))
            problems = [f"{name} is {there[name]} there and {here[name]} here" for name in differing]
            raise typer.BadParameter(
                f"step {step} in {self.folder} is of another model or optimizer: {first_of(problems, NAMED, '; ')}. "
                "Resume with the configuration that it was trained with, or take another folder.",
                param_hint="--resume",
            )
        return ""

    def _set_aside(self, damaged: dict[int, str], say: Callable[[str], None]) -> None:
        for step, wrong in damaged.items():
            folder = self.folder / str(step)
            aside = folder.with_name(f"{step}.damaged")
            say(f"{folder} is damaged: {wrong}. It is now {aside.name}, and the checkpoint before it is taken.")
            if is_first():
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)
        if damaged:
            multihost_utils.sync_global_devices("damaged checkpoints are renamed")


def saved_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, ascending."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal())


def checksums(arrays: dict[str, jax.Array]) -> dict[str, int]:
    """32 bits of each array: the sum over its words of a hash of word and index, for any sharding.

    The hash is MurmurHash3's finalizer, a bijection of 32 bits: one changed element always changes the sum.
    Dtype and shape change it, too.
    """
    # One array after another: compiled once a shape. Collectives of two programs at a time abort XLA's host devices.
    types = {name: zlib.crc32(_describe(array).encode()) for name, array in arrays.items()}
    return {name: int(_checksum(array)) ^ types[name] for name, array in arrays.items()}


@jax.jit
def _checksum(array: jax.Array) -> jax.Array:
    bits = min(8 * array.dtype.itemsize, 32)
    words = jax.lax.bitcast_convert_type(array, f"uint{bits}").astype(jnp.uint32)
    place = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        place = place * jnp.uint32(size % 2**32) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    x = words + place * jnp.uint32(0x9E3779B1)
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(x ^ (x >> 16), dtype=jnp.uint32)


def _crc(metadata: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(metadata, sort_keys=True).encode())


def _first_line(error: BaseException) -> str:
    """Of the innermost cause: the outer exceptions repeat it."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0][:200].rstrip(".")


def _by_name(state: Any) -> dict[str, Any]:
    """The leaves by path, so that no Python class is named on disk."""
    return {name_of(path): leaf for path, leaf in jax.tree.leaves_with_path(state)}


def _describe(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}"
