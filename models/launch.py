"""The start of a training command: its processes, its devices, and a folder to write to."""

import contextlib
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import typer
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from models import config, device_memory
from models.checkpoints import saved_steps
from models.config import Options
from models.distributed import initialize, is_first, make_console
from models.ending import in_one_line
from models.hf_config import read_json
from models.loop import Run
from models.mesh import make_mesh
from models.schedule import Schedule
from models.whole_files import replace

NAMED = 5  # files, in one error


def start_processes(options: Options) -> None:
    """Call it before anything asks JAX for its devices."""
    device_memory.disable_partitioning()
    named = (options.coordinator, options.processes, options.process_id)
    if options.distributed or any(value is not None for value in named):
        initialize(*named)


def choose_mesh(options: Options, backend: str) -> Mesh | None:
    """The mesh of the run.

    Raises:
      typer.BadParameter: several processes that would each train alone, interpreted kernels that cannot be sharded, or
        as of `make_mesh`.
    """
    if options.mesh is not None:
        if backend == "pallas" and jax.default_backend() != "gpu":
            raise typer.BadParameter(
                "over a mesh Pallas' kernels need GPUs: write xla, or leave --mesh out.", param_hint="--backend"
            )
        return make_mesh(options.mesh)
    if jax.process_count() > 1:
        raise typer.BadParameter(
            f"{jax.process_count()} processes train together on a mesh: write data={jax.device_count()}, or another "
            "one.",
            param_hint="--mesh",
        )
    return None


def devices(mesh: Mesh | None) -> str:
    """The line about the devices."""
    kind = jax.devices()[0].device_kind
    return (
        kind
        if mesh is None
        else f"{mesh.size} x {kind} ({', '.join(f'{axis}={size}' for axis, size in mesh.shape.items() if size > 1)})"
    )


@contextlib.contextmanager
def ended_in_one_line(run: Run) -> Iterator[None]:
    """A signal or a full disk inside ends the command, and the line names the kept checkpoint."""
    with in_one_line(run.finished, run.say):
        yield


def begin(options: Options, chosen: Schedule, mesh: Mesh | None, default: Path, data: Mapping[str, Path]) -> Run:
    """The run in its folder, with config.yaml written, and data.json if it writes checkpoints.

    Args:
      chosen: all settings of the run.
      default: the folder without --out.
      data: all training files by name.

    Raises:
      typer.BadParameter: the folder has checkpoints of another run, or --resume without --save-every.
      ValueError: the run to resume had other settings, or other data.
    """
    out = default if options.out is None else options.out
    run = Run(out, make_console(), mesh, options.save_every, options.stop_within, options.profile)
    if options.resume and options.save_every is None:
        raise typer.BadParameter(
            "a run that is resumed writes checkpoints, too: add --save-every N.", param_hint="--resume"
        )
    saved = saved_steps(run.checkpoints)
    if saved and not options.resume:
        raise typer.BadParameter(
            f"{run.checkpoints} has checkpoints up to step {saved[-1]}: write --resume to go on from there, or take "
            "another folder with --out.",
            param_hint="--resume",
        )
    sums = {} if options.save_every is None else {name: zlib.crc32(file.read_bytes()) for name, file in data.items()}
    if saved:
        config.check_unchanged(chosen, out / "config.yaml")
        check_data(sums, out / "data.json")
    multihost_utils.sync_global_devices("all processes have looked at the folder before one writes to it")
    if is_first():
        out.mkdir(parents=True, exist_ok=True)
        config.write(chosen, out / "config.yaml")
        if options.save_every is not None:
            replace(out / "data.json", json.dumps(sums, indent=0) + "\n")
    return run


def check_data(sums: dict[str, int], file: Path) -> None:
    """Compares the data with those of the run that wrote `file`.

    Raises:
      ValueError: they differ; the first differing files are named.
    """
    if not file.exists():
        return
    before = read_json(file)
    states = {(True, True): "has changed", (True, False): "is new", (False, True): "is missing"}
    differing = [
        f"{name} {states[name in sums, name in before]}"
        for name in {**sums, **before}
        if sums.get(name) != before.get(name)
    ]
    if differing:
        more = f", and {len(differing) - NAMED} more" if len(differing) > NAMED else ""
        raise ValueError(
            f"the data is not what the run began with: {', '.join(differing[:NAMED])}{more}. Put it back, take another "
            "folder with --out, "
            f"or remove {file} to go on with this data."
        )
