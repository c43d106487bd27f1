"""The start of a training command: its processes, its devices, and a folder to write to."""

import contextlib
import datetime
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import typer
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from models import layers
from models.distributed import device_memory
from models.distributed.mesh import make_mesh
from models.distributed.processes import exchanged, initialize, is_first
from models.hf.config import read_json
from models.precision import Computation
from models.training import config, folders
from models.training.config import Options
from models.training.ending import in_one_line
from models.training.loop import Run
from models.training.schedule import Schedule
from models.training.terminal import Terminal, first_of
from models.training.whole_files import replace

NAMED = 5  # files, in one error


def start_processes(options: Options) -> None:
    """Call it before anything asks JAX for its devices."""
    device_memory.disable_partitioning()
    named = (options.coordinator, options.processes, options.process_id)
    if options.distributed or any(value is not None for value in named):
        initialize(*named)


def choose_mesh(options: Options, backend: str) -> Mesh | None:
    """The mesh of the run."""
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


def print_model(options: Options, model: Computation, run: Run, remark: str = "") -> None:
    """Prints a remark about the data, if there is one, and lines about precision, devices and policy."""
    if remark:
        run.say(remark.strip())
    devices = jax.devices()[0].device_kind
    if run.mesh is not None:
        axes = ", ".join(f"{axis}={size}" for axis, size in run.mesh.shape.items() if size > 1)
        devices = f"{run.mesh.size} x {devices} ({axes})"
    run.console.print(f"preset {options.preset}, {model.dtype}, recipe {model.recipe}, on {devices}")
    run.console.print(layers.remark(model.policy), end="")


@contextlib.contextmanager
def ended_in_one_line(run: Run) -> Iterator[None]:
    """As of `in_one_line`. Inside, no other process begins to write to the run's folder."""
    with in_one_line(run.kept, run.say), folders.written_by_one(run.out):
        yield


def begin(options: Options, chosen: Schedule, mesh: Mesh | None, default: Path, data: Mapping[str, Path]) -> Run:
    """The run in its folder, by default one of `default`, with config.yaml, and data.json if it writes checkpoints."""
    if options.resume and options.save_every is None:
        raise typer.BadParameter(
            "a run that is resumed writes checkpoints, too: add --save-every N.", param_hint="--resume"
        )
    sums = {} if options.save_every is None else {name: zlib.crc32(file.read_bytes()) for name, file in data.items()}
    before = folders.to_resume(options.out, default) if options.resume else None
    if before is not None:
        config.check_unchanged(chosen, before / folders.CONFIG)
        check_data(sums, before / folders.DATA)
    multihost_utils.sync_global_devices("all processes have looked at the folder before one writes to it")

    def claim() -> str:
        out = before or folders.new(options.out, default, resumes=options.resume)
        if options.save_every is not None:
            replace(out / folders.DATA, json.dumps(sums, indent=0) + "\n")
        config.write(chosen, out / folders.CONFIG)
        return str(out)

    out = Path(of_first(claim))
    run = Run(out, Terminal(quiet=not is_first()), mesh, options.save_every, options.profile, options.bad_steps)
    if options.out is None:
        run.say(f"writes to {out}/")
    return run


def begun(options: Options, default: Path) -> str:
    """When the run to resume began, or this one, in ISO 8601."""
    before = folders.to_resume(options.out, default) if options.resume else None
    given = None if before is None else config.read_own(before / folders.CONFIG).get("date")
    return given or of_first(lambda: datetime.datetime.now().isoformat(timespec="seconds"))


def of_first(find: Callable[[], str]) -> str:
    """What the first process finds, in all of them."""
    if jax.process_count() == 1:
        return find()
    answer = ""
    if is_first():
        try:
            answer = f"={find()}"
        except (ValueError, OSError) as error:
            answer = f"!{error}"
    answer = exchanged(answer)
    if answer.startswith("!"):
        raise ValueError(answer[1:])
    return answer[1:]


def check_data(sums: dict[str, int], file: Path) -> None:
    """Compares the data with those of the run that wrote `file`."""
    if not file.exists():
        return
    before = read_json(file)
    states = {(True, True): "has changed", (True, False): "is new", (False, True): "is missing"}
    changed = [name for name in {**sums, **before} if sums.get(name) != before.get(name)]
    if changed:
        named = first_of([f"{name} {states[name in sums, name in before]}" for name in changed], NAMED)
        raise ValueError(
            f"the data is not what the run began with: {named}. Put it back, take another folder with --out, or "
            f"remove {file} to go on with this data."
        )
