"""The residual names that a policy may contain, and errors for names that match no value."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

CARRY = "carry"  # a layer's input in `jaxops.offload.scan`
# The residual names of jaxops' ops and layers. A test compares them with docs/residual_names.md.
OF_JAXOPS = tuple(
    f"{op}.{name}"
    for op, names in {
        "adaln": "out stats",
        "all_gather_matmul": "x out",
        "combine": "out",
        "fp8_grouped_matmul": "lhs rhs out",
        "fp8_matmul": "lhs rhs out",
        "gated_residual": "out",
        "gated_residual_adaln": "residual out stats",
        "grouped_glu": "x gate up gate_up out",
        "grouped_matmul": "lhs out",
        "grouped_wgrad": "out",
        "matmul_reduce_scatter": "h out",
        "modality_grouped_matmul": "lhs out",
        "modulation": "out",
        "moe": "token_gate",
        "moe_mlp": "x gate up out",
        "permute": "rows",
        "route": "routing",
        "router": "logits",
    }.items()
    for name in names.split()
)


def covers(names: Iterable[str], name: str) -> bool:
    """Whether name is one of names, or continues one of them after a dot."""
    return any(name == known or name.startswith(known + ".") for known in names)


def check_name(name: Any, where: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"{where} has {name!r}, a {type(name).__name__}; names are strings.")
    if not all(name.split(".")):
        raise ValueError(f"{where} has the name {name!r}: a name and each of its parts between dots must not be empty.")


def unknown(names: Sequence[str], seen: Iterable[str]) -> list[str]:
    """Names that cover neither a value in seen nor a name of jaxops: one policy may serve layers that differ."""
    known = {*seen, *OF_JAXOPS, CARRY}
    return [name for name in names if not any(covers((name,), other) for other in known)]


def check_known(names: Sequence[str], seen: Iterable[str], of: str) -> None:
    """
    Raises:
      ValueError: one of the names is unknown.
    """
    seen = sorted(seen)
    if wrong := unknown(names, seen):
        raise ValueError(
            f"the policy names {wrong[0]!r}, but no value of {of} is called so."
            f"{did_you_mean(wrong[0], (*seen, *OF_JAXOPS, CARRY))} Its names are {', '.join(seen) or 'none at all'}; "
            f"{CARRY!r} is a layer's input in jaxops.offload.scan; docs/residual_names.md lists jaxops' own."
        )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence with the closest known name or prefix before a dot; empty if none is close."""
    near = difflib.get_close_matches(name, [*known, *(other.partition(".")[0] for other in known)], 1)
    return f" Did you mean {near[0]!r}?" if near else ""
