"""A run's configuration: a preset, overlaid by a YAML file, overlaid by the command line."""

import contextlib
import dataclasses
import inspect
import json
import re
import typing
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pydantic
import typer
from flax.traverse_util import flatten_dict

from models.layers import OFFLOADED
from models.precision import BACKENDS, PRECISIONS
from models.training import settings_text
from models.training.schedule import AnySchedule, Schedule
from models.training.terminal import one_line, show_any_text
from models.training.whole_files import replace

Given = dict[str, Any]
CHECKSUM = "# crc32 of these lines:"
HINTS = {
    "bool_type": "; write true or false",
    "string_type": "; write quotes around a text that looks like something else",
    "tuple_type": "; write a list, as [a, b]",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every training command: what is trained, which goes to OUT/config.yaml, and where."""

    preset: Annotated[str, typer.Option(help="What the other settings start from.")] = "demo"
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file of settings, over the preset's. Each run writes its own to OUT/config.yaml."),
    ] = None
    set: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="A setting of such a file, over the file's: learning_rate=1e-3."),
    ] = None
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps, instead of the preset's.")] = None
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of all that the run writes; holds no other run. Default: a new one in runs/."),
    ] = None
    seed: Annotated[int | None, typer.Option(help="Of the parameters, the batches and the samples. Default: 0.")] = None
    backend: Annotated[str | None, typer.Option(help="Of jaxops' ops: auto, pallas or xla. Default: auto.")] = None
    precision: Annotated[
        str | None, typer.Option(help=f"{', '.join(PRECISIONS)}. Default: bfloat16 on a GPU, else float32.")
    ] = None
    offload: Annotated[
        bool,
        typer.Option(
            "--offload",
            help="Offload layers' inputs and attention to the host, on a GPU; recompute the rest. Or set policy.",
        ),
    ] = False
    freeze: Annotated[
        list[str] | None,
        typer.Option(help="Do not train parameters with this regular expression in their name; repeatable."),
    ] = None
    save_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between checkpoints, in OUT/checkpoints. Default: none is written.")
    ] = None
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from the newest checkpoint, if there is one, of OUT or the newest run. Needs --save-every.",
        ),
    ] = False
    bad_steps: Annotated[
        int, typer.Option(min=1, help="End after so many steps in a row whose loss or gradient norm is not finite.")
    ] = 3
    profile: Annotated[
        bool,
        typer.Option(
            "--profile", help="Profile some of the first steps: a table, a picture and a trace in OUT/profile."
        ),
    ] = False
    mesh: Annotated[
        str | None,
        typer.Option(help="Train on all devices: data=2,fsdp=2,expert=2,tensor=2 or some of these. Default: on one."),
    ] = None
    coordinator: Annotated[
        str | None, typer.Option(help="HOST:PORT of the first of several processes. With --processes and --process-id.")
    ] = None
    processes: Annotated[int | None, typer.Option(min=1, help="How many there are.")] = None
    process_id: Annotated[int | None, typer.Option(min=0, help="This one's number, from 0.")] = None
    distributed: Annotated[
        bool,
        typer.Option(
            "--distributed", help="Several processes, of which SLURM, Open MPI or Kubernetes says who they are."
        ),
    ] = False


AnyOptions = TypeVar("AnyOptions")


def command(options: type[AnyOptions], run: Callable[[AnyOptions], None]) -> Callable[..., None]:
    """`run` as a command for typer, with an option for each field of a dataclass."""

    def main(**given: Any) -> None:
        show_any_text()
        try:
            run(options(**given))
        except typer.BadParameter as error:
            error.message = one_line(error.message)
            raise

    main.__doc__, main.__annotations__ = run.__doc__, typing.get_type_hints(options, include_extras=True)
    main.__dict__["__signature__"] = inspect.signature(options)
    return main


@contextlib.contextmanager
def errors_of_options() -> Iterator[None]:
    """Wrong settings or data end the command with the error's message.

    Not for the training itself, whose errors need their traceback.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error


def check_option(option: str, value: str, known: typing.Iterable[str]) -> None:
    if value not in known:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(known)}.", param_hint=f"--{option}")


def read(file: Path) -> Given:
    """
    Raises:
      ValueError: as of `models.training.settings_text.load`; no settings, or no mapping.
    """
    try:
        found = settings_text.load(file.read_bytes(), str(file))
    except OSError as error:
        raise ValueError(f"{file} cannot be read as YAML: {error}") from error
    if not isinstance(found, dict):
        holds = "no settings" if found is None else type(found).__name__
        raise ValueError(f"{file} holds {holds}; it must be a mapping, as `learning_rate: 0.001`.")
    return found


def read_own(file: Path) -> Given:
    """The settings that a run wrote.

    Raises:
      ValueError: the file was edited.
    """
    text, _, checksum = file.read_text("utf-8", errors="replace").rpartition(CHECKSUM)
    if checksum.strip() != _crc(text):
        raise ValueError(
            f"{file} is not as the run wrote it: its checksum is another. Put it back, or take another folder with "
            "--out."
        )
    return read(file)


def check_unchanged(config: Schedule, file: Path) -> None:
    """Compares the settings with those of the run that wrote `file`.

    Raises:
      ValueError: they differ, with all differences named, or the file was edited.
    """
    ours, theirs = (flatten_dict(dataclasses.asdict(of), sep=".") for of in (config, resolve(config, read_own(file))))
    if differing := [
        f"{key} is {theirs[key]!r} there and {ours[key]!r} here" for key in ours if ours[key] != theirs[key]
    ]:
        raise ValueError(
            f"{file} is of another run: {'; '.join(differing)}. Resume with --config {file}, or take another folder "
            "with --out."
        )


def write(config: Schedule, file: Path) -> None:
    """Writes what `read` reads, and its checksum in a comment."""
    text = settings_text.dump(dataclasses.asdict(config))
    replace(file, f"{text}{CHECKSUM} {_crc(text)}\n")


def _crc(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def overlay(below: Given, above: Given) -> Given:
    """Both mappings merged, nested ones too; of two other values the upper one counts."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = overlay(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged


def assignments(texts: Sequence[str]) -> Given:
    """KEY=VALUE texts, with dots for nested keys -> the mapping of an equal file.

    Raises:
      ValueError: a text without "=", or a value that is no YAML.
    """
    found: Given = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name.strip() and equals):
            raise ValueError(f"--set {text}: write KEY=VALUE, as learning_rate=1e-3.")
        setting: Any = settings_text.load(value, f"--set {text}")
        for part in reversed(name.strip().split(".")):
            setting = {part: setting}
        found = overlay(found, setting)
    return found


def given_by(options: Options, own: Given, nested: bool) -> Given:
    """The settings of the file, --set and the other options, each over those before.

    Args:
      own: the options of one command, None for those not given.
      nested: whether the model's settings are under "model".
    """
    model: Given = {}
    if options.backend is not None:
        check_option("backend", options.backend, BACKENDS)
        model["backend"] = options.backend
    if options.precision is not None:
        check_option("precision", options.precision, PRECISIONS)
        model |= PRECISIONS[options.precision]._asdict()
    if options.offload:
        model |= {"policy": dataclasses.asdict(OFFLOADED), "unroll": False}
    named = {"steps": options.steps, "seed": options.seed, "freeze": options.freeze, **own}
    named = {key: value for key, value in named.items() if value is not None} | (
        {"model": model} if nested and model else model
    )
    from_file = {} if options.config is None else read(options.config)
    return overlay(overlay(from_file, assignments(options.set or ())), named)


def resolve(preset: AnySchedule, given: Given) -> AnySchedule:
    """The preset's dataclass with the given settings.

    Raises:
      ValueError: names every unknown key, beside the known ones, and every value of a wrong type or out of range.
    """
    # Only of JSON does pydantic read a dataclass strictly.
    merged = json.dumps(overlay(dataclasses.asdict(preset), given), default=str, allow_nan=False)
    try:
        return pydantic.TypeAdapter(type(preset)).validate_json(merged, strict=True, extra="forbid")
    except pydantic.ValidationError as error:
        raise ValueError("; ".join(_say(preset, wrong) for wrong in error.errors())) from None


def _say(preset: Any, wrong: Any) -> str:
    key = ".".join(map(str, wrong["loc"]))
    if wrong["type"] == "unexpected_keyword_argument":
        for part in wrong["loc"][:-1]:
            preset = getattr(preset, part)
        return f"{key} is no setting: write one of {', '.join(field.name for field in dataclasses.fields(preset))}"
    if wrong["type"] == "value_error":
        return str(wrong["ctx"]["error"])
    if wrong["type"] == "json_invalid":
        names = re.findall(r'"[^"]*\\ud[89a-f][^"]*"', wrong["input"])
        return f"{', '.join(names)} is not UTF-8: give the file or folder another name."
    hint = "" if isinstance(wrong["input"], list | dict) else HINTS.get(wrong["type"], "")
    return f"{key} is {wrong['input']!r}: {wrong['msg']}{hint}"
