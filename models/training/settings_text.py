"""Settings as YAML text: read by the rules of YAML 1.2's core schema, written so that YAML 1.1 reads the same.

PyYAML's own rules are those of YAML 1.1, by which `no` is False, 012 is 10, 1:30 is 90, 2026-11-27 a date, 1e-3 a text,
and of two equal keys the last one counts.
"""

import re
from typing import Any

import yaml
from yaml.constructor import ConstructorError

TAG = "tag:yaml.org,2002:"
NUMBERS = {
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?",
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's own attribute

    def mapping(self, node: yaml.MappingNode) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in node.value:
            key = self.construct_object(name, deep=True)
            if not isinstance(key, str) or key in found:
                wrong = "stands here a second time: leave one out" if key in found else "is no name of a setting"
                raise ConstructorError(None, None, f"{key} {wrong}", name.start_mark)
            found[key] = self.construct_object(value, deep=True)
        return found

    def integer(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        return int(text, 0 if text[:2] in ("0o", "0x") else 10)


class _Dumper(yaml.SafeDumper):
    """Puts a text in quotes that YAML 1.1 or 1.2 reads as something else."""


_Loader.add_implicit_resolver(f"{TAG}null", re.compile(r"(~|null|Null|NULL|)\Z"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(f"{TAG}bool", re.compile(r"(true|True|TRUE|false|False|FALSE)\Z"), list("tTfF"))
for _name, _form in NUMBERS.items():
    for _each in (_Loader, _Dumper):
        _each.add_implicit_resolver(TAG + _name, re.compile(rf"({_form})\Z"), list("-+.0123456789"))
_Loader.add_constructor(f"{TAG}int", _Loader.integer)
_Loader.add_constructor(f"{TAG}map", _Loader.mapping)


def load(text: str | bytes, source: str) -> Any:
    """The value of a YAML text, None of an empty one; bytes are UTF-8, or UTF-16 with a byte order mark."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f", line {mark.line + 1}"
        problem = " ".join(f"{error.context or ''} {error.problem}".split())
        raise ValueError(f"{source}{where} cannot be read as YAML: {problem}.") from error
    except (yaml.YAMLError, ValueError, KeyError, RecursionError) as error:
        raise ValueError(f"{source} cannot be read as YAML: {' '.join(str(error).split())}.") from error


def dump(settings: dict[str, Any]) -> str:
    return yaml.dump(settings, Dumper=_Dumper, sort_keys=False)
