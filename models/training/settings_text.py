"""Settings as YAML text: read by the rules of YAML 1.2's core schema, written so that YAML 1.1 reads the same.

PyYAML's own rules are those of YAML 1.1, by which `no` is False, 012 is 10, 1:30 is 90, 2026-11-27 a date, 1e-3 a text,
and of two equal keys the last one counts.
"""

import json
import math
import re
from typing import Any

import yaml
from yaml.constructor import ConstructorError, SafeConstructor

TAG = "tag:yaml.org,2002:"
NUMBERS = {
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?",
}


class Key(str):
    """A setting's name. Attribute where: the file and line, or the option, that has it."""

    where: str = ""


class _Loader(yaml.SafeLoader):
    source = ""

    def at(self, node: yaml.Node) -> str:
        return f"{self.source}, line {node.start_mark.line + 1}"

    def mapping(self, node: yaml.MappingNode) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in node.value:
            key = self.construct_object(name, deep=True)
            if not isinstance(key, str):
                raise _wrong(name, f"{key!r} is no name of a setting")
            if key in found:
                raise _wrong(name, f"{key} stands here a second time: leave one out")
            key = Key(key)
            key.where = self.at(name)
            found[key] = self.construct_object(value, deep=True)
        return found

    def text(self, node: yaml.ScalarNode) -> str:
        if node.value == "" and node.style is None:
            raise _wrong(node, "there is no value: write null, or '' for an empty text")
        return self.construct_scalar(node)

    def integer(self, node: yaml.ScalarNode) -> int:
        if re.fullmatch(r"[-+]?0[0-9]+", node.value):
            raise _wrong(
                node, f'{node.value} begins with a zero: write {int(node.value)}, or "{node.value}" for a text'
            )
        return int(node.value, 0)

    def number(self, node: yaml.ScalarNode) -> float:
        if not math.isfinite(number := float(node.value)):
            raise _wrong(node, f"{node.value} is no finite number")
        return number


class _Dumper(yaml.SafeDumper):
    """Puts a text in quotes that YAML 1.1 or 1.2 reads as something else."""


def _wrong(node: yaml.Node, problem: str) -> ConstructorError:
    return ConstructorError(None, None, problem, node.start_mark)


_Loader.yaml_implicit_resolvers = {}
_Loader.add_implicit_resolver(f"{TAG}null", re.compile(r"(~|null|Null|NULL)\Z"), list("~nN"))
_Loader.add_implicit_resolver(f"{TAG}bool", re.compile(r"(true|True|TRUE|false|False|FALSE)\Z"), list("tTfF"))
for _name, _form in NUMBERS.items():
    for _each in (_Loader, _Dumper):
        _each.add_implicit_resolver(TAG + _name, re.compile(rf"({_form})\Z"), list("-+.0123456789"))
_Loader.yaml_constructors = {
    None: SafeConstructor.construct_undefined,
    f"{TAG}null": SafeConstructor.construct_yaml_null,
    f"{TAG}bool": SafeConstructor.construct_yaml_bool,
    f"{TAG}int": _Loader.integer,
    f"{TAG}float": _Loader.number,
    f"{TAG}str": _Loader.text,
    f"{TAG}seq": lambda loader, node: loader.construct_sequence(node, deep=True),
    f"{TAG}map": _Loader.mapping,
}


def load(text: str | bytes, source: str, *, comments: bool = True) -> Any:
    """The value of a YAML text, None of an empty one; names in mappings are `Key`s.

    Args:
      text: bytes are UTF-8, or UTF-16 with a byte order mark.
      source: its name in errors.
      comments: whether text after # is left out; else it is an error.

    Raises:
      ValueError: in one line, with the line's number: what no YAML is, or would be read differently by others.
    """
    try:
        loader = _Loader(text)
        loader.source = source
        node = loader.get_single_node()
        if node is None and comments:
            return None
        if node is None:
            raise ValueError("there is no value: write null, or '' for an empty text")
        if not comments and node.end_mark.index < len(text.rstrip()):
            raise _wrong(node, "what stands after # is left out: put quotes around the value")
        found = loader.construct_document(node)
        json.dumps(found)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f", line {mark.line + 1}"
        problem = " ".join(f"{error.context or ''} {error.problem}".split())
        raise ValueError(f"{source}{where} cannot be read as YAML: {problem}.") from error
    except yaml.reader.ReaderError as error:
        raise ValueError(
            f"{source} cannot be read as YAML: {error.reason} at {error.position}. It must be text in UTF-8."
        ) from error
    except (ValueError, KeyError, RecursionError) as error:  # of tags such as !!int, and of what contains itself
        raise ValueError(f"{source} cannot be read as YAML: {' '.join(str(error).split())}.") from error
    return found


def dump(settings: dict[str, Any]) -> str:
    return yaml.dump(settings, Dumper=_Dumper, sort_keys=False)
