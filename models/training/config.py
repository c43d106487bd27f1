"""A run's configuration: a preset, overlaid by a YAML file, overlaid by the command line."""

import contextlib
import dataclasses
import inspect
import json
import re
import typing
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import pydantic
import typer
from flax.traverse_util import flatten_dict

from models.layers import OFFLOADED
from models.precision import BACKENDS, PRECISIONS, Computation, for_this_machine
from models.training import settings_text
from models.training.schedule import AnySchedule, Schedule, with_steps
from models.training.terminal import one_line, show_any_text
from models.training.whole_files import replace

Given = dict[str, Any]
CHECKSUM = "# crc32 of these lines:"
HINTS = {
    "bool_type": "; write true or false",
    "string_type": "; write quotes around a text that looks like something else",
    "tuple_type": "; write a list, as [a, b]",
}


def option(default: Any, help: str, **more: Any) -> Any:
    """A field of a command's dataclass of options, with its text of --help and arguments of `typer.Option`."""
    return dataclasses.field(default=default, metadata={"help": help, **more})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every training command: what is trained, which goes to OUT/config.yaml, and where."""

    preset: str = option("demo", "What the other settings start from.")
    config: Path | None = option(None, "YAML file of settings, over the preset's. A run writes OUT/config.yaml.")
    set: list[str] | None = option(None, "A setting, over the file's: learning_rate=1e-3.", metavar="KEY=VALUE")
    steps: int | None = option(None, "Training steps, instead of the preset's.", min=1)
    out: Path | None = option(None, "Folder of all that the run writes. Default: a new one in runs/.")
    seed: int | None = option(None, "Of the parameters, the batches and the samples. Default: 0.")
    backend: str | None = option(None, "Of jaxops' ops: auto, pallas or xla. Default: auto.")
    precision: str | None = option(None, f"{', '.join(PRECISIONS)}. Default: bfloat16 on a GPU, else float32.")
    offload: bool = option(False, "Offload layers' inputs and attention to the host; recompute the rest.")
    freeze: list[str] | None = option(None, "Regular expression in the names of parameters not to train; repeatable.")
    save_every: int | None = option(None, "Steps between checkpoints, in OUT/checkpoints. Default: none.", min=1)
    resume: bool = option(False, "Go on from the newest checkpoint, if any, of OUT or the last run; with --save-every.")
    bad_steps: int = option(3, "End after so many steps in a row whose loss or gradient norm is not finite.", min=1)
    profile: bool = option(False, "Profile some of the first steps: a table, a picture and a trace in OUT/profile.")
    mesh: str | None = option(None, "Train on all devices: some of data=2,fsdp=2,expert=2,tensor=2. Default: on one.")
    coordinator: str | None = option(None, "HOST:PORT of the first process; with --processes and --process-id.")
    processes: int | None = option(None, "How many there are.", min=1)
    process_id: int | None = option(None, "This one's number, from 0.", min=0)
    distributed: bool = option(False, "Several processes, of which SLURM, Open MPI or Kubernetes says who they are.")


AnyOptions = TypeVar("AnyOptions")


def command(options: type[AnyOptions], run: Callable[[AnyOptions], None]) -> Callable[..., None]:
    """`run` as a command for typer, with an option for each field of a dataclass: of `option`, or of typer's own."""

    def main(**given: Any) -> None:
        show_any_text()
        try:
            run(options(**given))
        except typer.BadParameter as error:
            error.message = one_line(error.message)
            raise

    hints = typing.get_type_hints(options, include_extras=True)
    for field in dataclasses.fields(cast(Any, options)):
        if field.metadata:  # a flag has no second one to turn it off
            flags = [f"--{field.name.replace('_', '-')}"] if field.type is bool else []
            hints[field.name] = Annotated[hints[field.name], typer.Option(*flags, **field.metadata)]
    signature = inspect.signature(options)
    parameters = [each.replace(annotation=hints[name]) for name, each in signature.parameters.items()]
    main.__doc__, main.__annotations__ = run.__doc__, hints
    main.__dict__["__signature__"] = signature.replace(parameters=parameters)
    return main


@contextlib.contextmanager
def errors_of_options() -> Iterator[None]:
    """Wrong settings or data end the command with a message; not for the training, whose errors need a traceback."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error


def check_option(option: str, value: str, known: typing.Iterable[str]) -> None:
    if value not in known:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(known)}.", param_hint=f"--{option}")


def read(file: Path) -> Given:
    """A YAML file's mapping of settings."""
    try:
        found = settings_text.load(file.read_bytes(), str(file))
    except OSError as error:
        raise ValueError(f"{file} cannot be read as YAML: {error}") from error
    if not isinstance(found, dict):
        holds = "no settings" if found is None else type(found).__name__
        raise ValueError(f"{file} holds {holds}; it must be a mapping, as `learning_rate: 0.001`.")
    return found


def read_own(file: Path) -> Given:
    """The settings that a run wrote."""
    text, _, checksum = file.read_text("utf-8", errors="replace").rpartition(CHECKSUM)
    if checksum.strip() != _crc(text):
        raise ValueError(
            f"{file} is not as the run wrote it: its checksum is another. Put it back, or take another folder with "
            "--out."
        )
    return read(file)


def check_unchanged(config: Schedule, file: Path) -> None:
    """Compares the settings with those of the run that wrote `file`."""
    ours, theirs = (flatten_dict(dataclasses.asdict(of), sep=".") for of in (config, resolve(config, read_own(file))))
    differing = [f"{key} is {theirs[key]!r} there and {ours[key]!r} here" for key in ours if ours[key] != theirs[key]]
    if differing:
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
    """KEY=VALUE texts, with dots for nested keys -> the mapping of an equal file."""
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


def given_by(options: Options, presets: Mapping[str, Schedule]) -> Given:
    """The settings of the file, --set and the other options, each over those before; `no_x` makes x false."""
    check_option("preset", options.preset, presets)
    model: Given = {}
    if options.backend is not None:
        check_option("backend", options.backend, BACKENDS)
        model["backend"] = options.backend
    if options.precision is not None:
        check_option("precision", options.precision, PRECISIONS)
        model |= PRECISIONS[options.precision]._asdict()
    if options.offload:
        model |= {"policy": dataclasses.asdict(OFFLOADED), "unroll": False}
    of_all = {field.name for field in dataclasses.fields(Options)} - {"steps", "seed", "freeze"}
    named: Given = {}
    for name, value in vars(options).items():
        if name not in of_all and value is not None and value is not False:
            named |= {name.removeprefix("no_"): False} if name.startswith("no_") else {name: value}
    if model:
        named |= {"model": model} if hasattr(presets[options.preset], "model") else model
    from_file = {} if options.config is None else read(options.config)
    return overlay(overlay(from_file, assignments(options.set or ())), named)


def with_model(preset: AnySchedule, **settings: Any) -> AnySchedule:
    """The preset with other settings of its model."""
    if (model := getattr(preset, "model", None)) is not None:
        settings = {"model": dataclasses.replace(model, **settings)}
    return dataclasses.replace(preset, **settings)


def with_dtype(preset: AnySchedule, given: Given) -> AnySchedule:
    """The preset with the given dtype of the computation, or this machine's."""
    model = given.get("model") if hasattr(preset, "model") else given
    dtype = (model if isinstance(model, dict) else {}).get("dtype", PRECISIONS[for_this_machine()].dtype)
    return with_model(preset, dtype=dtype)


def choose(options: Options, presets: Mapping[str, AnySchedule]) -> AnySchedule:
    """The preset, this machine's precision, and the options, each over the one before.

    Raises:
      ValueError: an unknown or impossible setting.
    """
    given = given_by(options, presets)
    return finish(with_dtype(presets[options.preset], given), given)


def finish(preset: AnySchedule, given: Given) -> AnySchedule:
    """As `resolve`; without a given warm-up a short run has a shorter one."""
    chosen = resolve(preset, given)
    return chosen if "warmup_steps" in given else with_steps(chosen, None)


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
        known = [field.name for field in dataclasses.fields(preset)]
        known.sort(key=lambda name: hasattr(Computation, name))  # the model's sizes first
        return f"{key} is no setting: write one of {', '.join(known)}"
    if wrong["type"] == "value_error":
        return str(wrong["ctx"]["error"])
    if wrong["type"] == "json_invalid":
        names = re.findall(r'"[^"]*\\ud[89a-f][^"]*"', wrong["input"])
        return f"{', '.join(names)} is not UTF-8: give the file or folder another name."
    hint = "" if isinstance(wrong["input"], list | dict) else HINTS.get(wrong["type"], "")
    return f"{key} is {wrong['input']!r}: {wrong['msg']}{hint}"
