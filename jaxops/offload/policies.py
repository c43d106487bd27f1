"""Which of a function's intermediate values its backward keeps, which it fetches back from the host's memory, and which it computes again."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax

from jaxops._lib.checks import check_integer
from jaxops.offload.names import check_known, check_name, covers, did_you_mean
from jaxops.offload.residuals import residual_bytes

Choice = Literal["keep", "offload", "recompute"]


@dataclasses.dataclass(frozen=True)
class Policy:
    """A policy for `jax.checkpoint`, `nnx.remat` and `jaxops.offload.scan`, over values named by `jax.ad_checkpoint.checkpoint_name`.

    A name stands for itself and for all names that go on after it with a dot: "moe_mlp" for "moe_mlp.gate" and "moe_mlp.up". What no name covers is computed
    again. Hashable: the same names give the same compiled program.

    `jaxops.offload.scan` refuses a name that none of its layer's values has. JAX's own functions ask a policy about one value at a time, so with them call
    `policy.check(function, *args)` first.

    Attributes:
      keep: names whose values stay in the device's memory.
      offload: names whose values go to the host's memory and come back for the backward; "moe_mlp.up" may go where "moe_mlp" is kept.

    Raises:
      TypeError: names that are no strings, or a string in place of a tuple of them.
      ValueError: an empty name, or one that is kept and offloaded.
    """

    keep: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()

    def __post_init__(self):
        for field in ("keep", "offload"):
            names = getattr(self, field)
            if not isinstance(names, (tuple, list)):
                raise TypeError(
                    f"{field} is a {type(names).__name__}; write a tuple of names, as in Policy({field}=('moe_mlp',))."
                )
            for name in names:
                check_name(name, field)
            object.__setattr__(self, field, tuple(names))
        if both := [name for name in self.keep if covers(self.offload, name)]:
            raise ValueError(
                f"{both[0]!r} is in keep, and offload={self.offload!r} covers it, too: write it into one of them."
            )

    def choice(self, name: str) -> Choice:
        if covers(self.offload, name):
            return "offload"
        return "keep" if covers(self.keep, name) else "recompute"

    def check(self, function: Callable[..., Any], *args: Any) -> None:
        """Traces `function(*args)` and its gradient, and looks for the values that the policy names.

        >>> import jax.numpy as jnp
        >>> from jaxops import offload
        >>> from jax.ad_checkpoint import checkpoint_name
        >>> layer = lambda x: jnp.sin(checkpoint_name(2 * x, "hidden"))
        >>> offload.Policy(keep=("hidden",)).check(layer, jnp.ones(3))  # with "hiden" a ValueError, which asks whether "hidden" was meant

        Args:
          args: arrays or `jax.ShapeDtypeStruct`s.

        Raises:
          ValueError: a name that is neither in function's values nor one of jaxops' own, which other functions may have.
        """
        check_known(self.keep + self.offload, residual_bytes(function, *args), "the function")

    def on_device(self) -> "Policy":
        """The same with nothing offloaded: kept instead."""
        return Policy(self.keep + self.offload)

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> Any:
        """What `jax.checkpoint` asks."""
        if prim.name != "name":
            return False
        choice = self.choice(params["name"])
        if choice != "offload":
            return choice == "keep"
        names = {"names_which_can_be_saved": [], "names_which_can_be_offloaded": [params["name"]]}
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            **names, offload_src="device", offload_dst="pinned_host"
        )(prim, *avals, **params)


def policy(
    names: Mapping[str, Choice], *, budget_bytes: int | None = None, sizes: Mapping[str, int] | None = None
) -> Policy:
    """A `Policy` in one line: `policy({"moe_mlp": "offload", "adaln": "recompute", "router": "keep"})`.

    Args:
      names: what becomes of the values of each name; see `Policy` for what a name covers. An entry for a longer name is for its own values alone, whatever a
        shorter one says: {"moe_mlp": "offload", "moe_mlp.gate": "keep"} needs `sizes` to know the others by name.
      budget_bytes: the most that is offloaded, of one call of the function, at least 0. Names are offloaded in their order as long as they fit, the others
        recomputed.
      sizes: bytes by name, as of `residual_bytes`; needed for a budget.

    Raises:
      ValueError: an unknown choice, a negative budget, a budget or overlapping names without sizes, or a name that is in no value's.
      TypeError: names that are no mapping, a budget or sizes that are no integers.
    """
    if not isinstance(names, Mapping):
        raise TypeError(
            f"names is a {type(names).__name__}; write a choice for each name, as in policy({{'moe_mlp': 'offload'}})."
        )
    if sizes is not None and not isinstance(sizes, Mapping):
        raise TypeError(
            f"sizes is a {type(sizes).__name__}; pass what jaxops.offload.residual_bytes(function, *arguments) gave."
        )
    if budget_bytes is not None:
        budget_bytes = check_integer("budget_bytes", budget_bytes, 0)
    for name, choice in names.items():
        check_name(name, "names")
        if choice not in get_args(Choice):
            raise ValueError(
                f"the choice for {name!r} is {choice!r}; it must be one of {', '.join(map(repr, get_args(Choice)))}."
            )
    overlapping = [name for name in names if any(covers((other,), name) for other in names if other != name)]
    if sizes is None:
        if budget_bytes is not None or overlapping:
            why = (
                "budget_bytes is given"
                if budget_bytes is not None
                else f"{overlapping[0]!r} stands under another name, too"
            )
            raise ValueError(
                f"{why}, and that needs sizes: pass sizes=jaxops.offload.residual_bytes(function, *arguments)."
            )
        by_choice = lambda choice: tuple(name for name, of in names.items() if of == choice)
        return Policy(by_choice("keep"), by_choice("offload"))
    for known, size in sizes.items():
        check_integer(f"sizes[{known!r}]", size, 0)
    if unknown := [name for name in names if not any(covers((name,), known) for known in sizes)]:
        raise ValueError(
            f"no value is called {unknown[0]!r}; the names are {', '.join(sorted(sizes)) or 'none at all'}.{did_you_mean(unknown[0], sizes)}"
        )
    left, kept, offloaded = math.inf if budget_bytes is None else budget_bytes, [], []
    for name in names:
        for known, size in sizes.items():
            if max((other for other in names if covers((other,), known)), key=len, default=None) != name:
                continue
            if names[name] == "keep":
                kept.append(known)
            elif names[name] == "offload" and size <= left:
                left -= size
                offloaded.append(known)
    return Policy(tuple(kept), tuple(offloaded))
