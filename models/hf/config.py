"""config.json of Hugging Face's transformers, to and from `models.decoder.DecoderConfig`."""

import dataclasses
import json
import pathlib
import typing
from collections.abc import Collection
from typing import Any

import pydantic

from models.decoder import DecoderConfig
from models.hf.families import MODELS, Keys, keys_of, layer_kinds, settings_of
from models.hf.rope import Rope
from models.hf.unread import MEANINGLESS, MEANINGLESS_OF_ROPE, READ_FOR_ALL, says_nothing
from models.precision import Computation

NAME = "config.json"
MOST_TOKENS = 2**31  # tokens are int32
NULL_COUNTS = {key for key, of in Keys.model_fields.items() if type(None) in typing.get_args(of.annotation)}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # transformers reads any of them
# Settings of a `DecoderConfig` that no checkpoint has.
OF_A_RUN = (
    *(field.name for field in dataclasses.fields(Computation)),
    *("fp8_experts", "attention", "max_documents", "stored_fp8"),
)


def fitting(config: DecoderConfig) -> str | None:
    """The architecture that a model of this configuration is saved as; None if none fits."""
    return next((name for name in MODELS if not _differing(name, config, keys_of(MODELS[name], config))), None)


def _number(text: str) -> int | float:
    """A JSON number with a point or an exponent: 1024.0 is 1024."""
    value = float(text)
    return int(value) if value.is_integer() else value


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """Numbers that are whole are int, however they are written."""
    try:
        found = json.loads(file.read_bytes(), parse_float=_number)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds a {type(found).__name__}; it must be a JSON object.")
    return found


def _architecture(given: dict[str, Any]) -> str:
    """By "architectures", or "model_type" if that is missing; both must agree."""
    named, model_type = given.get("architectures"), given.get("model_type")
    if named is None:
        named = [name for name, kind in MODELS.items() if kind.model_type == model_type]
    known = f"these are known: {', '.join(MODELS)}"
    if not isinstance(named, list) or len(named) != 1 or named[0] not in MODELS:
        raise ValueError(
            f"architectures is {given.get('architectures')!r} and model_type {model_type!r}; one must be named, and "
            f"{known}"
        )
    if model_type not in (None, MODELS[named[0]].model_type):
        raise ValueError(f"architectures is {named!r}, and model_type is {model_type!r}, which is another one")
    return named[0]


def _flat(given: dict[str, Any]) -> dict[str, Any]:
    """With the keys of the rotary positions that `Rope` does not have beside the others, as rope_scaling.KEY."""
    flat = dict(given)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(given.get(name), dict):
            inner = {key: value for key, value in given[name].items() if value is not None}
            flat[name] = {key: inner.pop(key) for key in list(inner) if key in (*Rope.model_fields, "type")} or None
            flat |= {f"{name}.{key}": value for key, value in inner.items() if key not in MEANINGLESS_OF_ROPE}
    return flat


def _check_unread(architecture: str, given: dict[str, Any], unread: list[str], ignored: Collection[str] | None) -> None:
    """Refuses unread keys that are not ignored, and ignored keys that are not there or count."""
    counts = {*MODELS[architecture].reads, *READ_FOR_ALL, *(EXPERTS if MODELS[architecture].has_experts else ())}
    if wrong := [key for key in ignored or () if key not in given or key in counts]:
        raise ValueError(
            f"ignore_config has {', '.join(wrong)}: no key of this file, or one that a {architecture} is computed by. "
            "Leave it out"
        )
    may = [key for key in unread if key not in counts]
    if refused := [key for key in unread if key not in (may if ignored is None else ignored)]:
        hint = "".join(f" --ignore-config {key}" for key in may if key in refused)
        raise ValueError(
            f"{', '.join(f'{key} = {json.dumps(given[key])}' for key in refused)}: the decoder does not have this "
            f"checkpoint's {', '.join(refused)}: no {architecture} known here has it"
            + (f". If it changes nothing that is computed, pass{hint} (in Python ignore_config=[...])" if hint else "")
        )


def _settings(architecture: str, given: dict[str, Any], ignored: Collection[str] | None = ()) -> dict[str, Any]:
    """What the given keys of a config.json say of a `DecoderConfig`; ignored: `ignore_config` of `read_config`."""
    family = MODELS[architecture]
    given = _flat(given)
    read = {key: value for key, value in given.items() if value is not None or key in NULL_COUNTS & family.reads}
    experts = {key: read.pop(key) for key in EXPERTS if key in read and family.has_experts}
    if len({json.dumps(value) for value in experts.values()}) > 1:
        raise ValueError(f"{' and '.join(f'{key} is {value}' for key, value in experts.items())}; they mean the same")
    known = family.defaults | {key: read.pop(key) for key in list(read) if key in family.reads}
    keys = Keys.model_validate(known | ({"num_experts": next(iter(experts.values()))} if experts else {}))
    settings = settings_of(family, keys)
    harmless = {key for key in read if key in MEANINGLESS or says_nothing(key, given)}
    if read.get("layer_types") == layer_kinds(settings["layers"], settings["window"], settings["sliding"]):
        harmless.add("layer_types")
    _check_unread(architecture, given, [key for key in read if key not in harmless], ignored)
    return settings


def read_config(
    folder: str | pathlib.Path, *, ignore_config: Collection[str] | None = (), **options: Any
) -> tuple[str, DecoderConfig]:
    """(architecture, configuration) of a checkpoint's config.json; missing keys have transformers' defaults.

    Args:
      ignore_config: keys of config.json to go on without, such as "a_key" or "rope_scaling.a_key". Not those that a
        model is computed by. None for all that are unknown.
      options: settings that a checkpoint does not have, such as dtype or backend.

    Raises:
      FileNotFoundError: no config.json.
      ValueError: an architecture that is not in `MODELS`, an unsupported feature, an unknown key, or an invalid value;
        named with the file.
    """
    file = pathlib.Path(folder) / NAME
    if not file.exists():
        raise FileNotFoundError(f"{file} does not exist: name a checkpoint's folder, of a run its checkpoint-hf.")
    given = read_json(file)
    try:
        architecture = _architecture(given)
        return architecture, DecoderConfig(**_settings(architecture, given, ignore_config), **options)
    except pydantic.ValidationError as error:
        wrong = [(".".join(map(str, one["loc"])), one["input"], one["msg"]) for one in error.errors()]
        problems = "; ".join(f"{key} is {value!r}: {says}" for key, value, says in wrong)
        raise ValueError(f"{file}: {problems}.") from error
    except ValueError as error:
        raise ValueError(f"{file}: {str(error).rstrip('.')}.") from error


def _differing(architecture: str, config: DecoderConfig, keys: dict[str, Any]) -> list[str]:
    """Settings that a config.json of these keys would not give back."""
    try:
        settings = _settings(architecture, keys)
    except ValueError as error:  # pydantic's, too
        return [str(error).splitlines()[0]]
    again = dataclasses.replace(DecoderConfig(**settings), **{name: getattr(config, name) for name in OF_A_RUN})
    names = [field.name for field in dataclasses.fields(config)]
    return [name for name in names if getattr(again, name) != getattr(config, name)]


def write_config(folder: pathlib.Path, architecture: str, config: DecoderConfig, end: int | None) -> None:
    """Writes config.json of a model that it can describe; end: the token that ends a text."""
    family = MODELS[architecture]
    keys = keys_of(family, config)
    if differing := _differing(architecture, config, keys):
        raise ValueError(f"this model is no {architecture}: they differ in {', '.join(differing)}.")
    named = {family.experts if key == "num_experts" else key: value for key, value in keys.items()}
    found = {"architectures": [architecture], "model_type": family.model_type, **named}
    if "sliding_window" not in found:
        found |= {"sliding_window": None}
    if end is not None:
        found |= {"eos_token_id": end}
    (folder / NAME).write_text(json.dumps(found, indent=2) + "\n", "utf-8")


def ends_in(file: pathlib.Path) -> tuple[int, ...]:
    """The tokens that end a text, as eos_token_id of a config.json or generation_config.json says; of no file none."""
    given = read_json(file).get("eos_token_id") if file.exists() else None
    found = given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(token) is int and 0 <= token < MOST_TOKENS for token in found):
        raise ValueError(f"{file}: eos_token_id is {given!r}; it must be a token's number, or a list of them.")
    return tuple(found)


def end_token(folder: pathlib.Path) -> int | None:
    """The first token that ends a text, as config.json says, else generation_config.json."""
    return next(iter(ends_in(folder / NAME) or ends_in(folder / "generation_config.json")), None)
