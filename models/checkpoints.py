"""Checkpoints of a training run: written beside the training, whole or not there at all, read onto any number of devices."""

import math
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
import typer
from orbax.checkpoint import checkpoint_managers

from models.mesh import name_of

State = TypeVar("State")
NAMED_DIFFERENCES = 3


class Checkpoints:
    """The checkpoints of one run, each a folder named by its step; a context manager, whose end waits for the last write.

    A checkpoint is the whole training state, so that a run that was stopped goes on to the same bits. It is copied from the devices when `save` is called, and
    written by threads while training goes on. It gets its name when all of it is on the disk: a process that is killed in between leaves the checkpoints
    before as they were, and the next one removes what it left. With several processes all of them call everything here, and the folder is one that all see.

    Args:
      folder: made where it is missing.
      keep: how many of the newest stay.
      keep_best: whether the one with the lowest held-out loss stays, too, among those that were saved with one.
    """

    def __init__(self, folder: Path, *, keep: int = 3, keep_best: bool = False):
        self.folder = folder.resolve()
        stay: list[Any] = [checkpoint_managers.LatestN(keep)]
        if keep_best:
            lowest = checkpoint_managers.BestN(get_metric_fn=lambda metrics: metrics["heldout"], reverse=True, n=1, keep_checkpoints_without_metrics=False)
            stay.append(lowest)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(stay), cleanup_tmp_directories=True, enable_async_checkpointing=True
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=ocp.StandardCheckpointHandler())

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_) -> None:
        self._manager.close()

    @property
    def steps(self) -> list[int]:
        """Of the whole checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def start(self, state: State) -> tuple[State, int]:
        """What to train from, and how many steps it has done: the newest checkpoint, or `state` and 0 where there is none.

        Args:
          state: a pytree of arrays as a new run has it. What is read has its shapes, dtypes and shardings, whatever devices it was saved from.

        Raises:
          typer.BadParameter: a checkpoint of another model.
        """
        if not self.steps:
            return state, 0
        newest = self.steps[-1]
        wanted = _by_name(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state))
        self._check(newest, wanted)
        found = self._manager.restore(newest, args=ocp.args.StandardRestore(wanted))
        return jax.tree.unflatten(jax.tree.structure(state), [found[name] for name in wanted]), newest

    def save(self, state: Any, done: int, *, heldout: float | None = None) -> None:
        """Begins to write what `done` steps have led to; `state` may be donated right after.

        Waits for the devices, and for the write before if that still goes on. An error of a write is raised by the next `save`, or at the end.

        Args:
          heldout: the held-out loss of this state, where it was evaluated.
        """
        metrics = {"heldout": heldout} if heldout is not None and math.isfinite(heldout) else None
        with jax.transfer_guard("allow"):
            self._manager.save(done, args=ocp.args.StandardSave(_by_name(state)), metrics=metrics, force=True)

    def _check(self, step: int, wanted: dict[str, jax.ShapeDtypeStruct]) -> None:
        metadata = self._manager.item_metadata(step)
        assert metadata is not None
        theirs, ours = ({name: _describe(array) for name, array in arrays.items()} for arrays in (metadata.tree, wanted))
        differing = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        if differing:
            lines = [f"{name} is {theirs.get(name, 'missing')} there and {ours.get(name, 'missing')} here" for name in differing[:NAMED_DIFFERENCES]]
            more = f", and {len(differing) - len(lines)} more" if len(differing) > len(lines) else ""
            raise typer.BadParameter(
                f"step {step} in {self.folder} is of another model or optimizer: {'; '.join(lines)}{more}. "
                "Resume with the configuration that it was trained with, or take another folder.",
                param_hint="--resume",
            )


def _by_name(state: Any) -> dict[str, Any]:
    """The leaves by their paths: what is on the disk names no Python class."""
    return {name_of(path): leaf for path, leaf in jax.tree.leaves_with_path(state)}


def _describe(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}"
