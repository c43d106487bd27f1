"""Which intermediate values stay on the device for the backward, which go to the host, and which are recomputed."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax

from jaxops._lib.arrays.checks import check_integer, type_name
from jaxops._lib.arrays.residual_names import check_name
from jaxops.offload.residuals import check_known, covers, did_you_mean, residual_bytes

Choice = Literal["keep", "offload", "recompute"]


@dataclasses.dataclass(frozen=True)
class Policy:
    """A policy for `jax.checkpoint`, `nnx.remat` and `jaxops.offload.scan`, by the names of `checkpoint_name`.

    A name covers itself and every name that continues it after a dot: "moe_mlp" covers "moe_mlp.up". Values that no
    name covers are recomputed. Hashable. `jaxops.offload.scan` raises for a name that none of its layer's values has;
    JAX's own functions ask about one value at a time: with them call `policy.check(function, *args)` first.

    Attributes:
      keep: names whose values stay in device memory.
      offload: names whose values go to the host until the backward; they may be longer names of what keep covers.

    Raises:
      TypeError, ValueError: names that are no strings, no tuple, or empty; a name in keep that offload covers.
    """

    keep: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()

    def __post_init__(self):
        for field in ("keep", "offload"):
            names = getattr(self, field)
            if not isinstance(names, (tuple, list)):
                wanted = f"write a tuple of names, as in Policy({field}=('moe_mlp',))"
                raise TypeError(f"{field} is {type_name(names)}; {wanted}.")
            for name in names:
                check_name(name, field)
            object.__setattr__(self, field, tuple(names))
        if both := [name for name in self.keep if covers(self.offload, name)]:
            raise ValueError(f"{both[0]!r} is in keep, and offload={self.offload!r} covers it too: write it in one.")

    def choice(self, name: str) -> Choice:
        if covers(self.offload, name):
            return "offload"
        return "keep" if covers(self.keep, name) else "recompute"

    def check(self, function: Callable[..., Any], *args: Any) -> None:
        """Traces `function(*args)` and its gradient, and checks that the policy's names occur.

        >>> import jax.numpy as jnp
        >>> from jaxops import offload
        >>> from jax.ad_checkpoint import checkpoint_name
        >>> layer = lambda x: jnp.sin(checkpoint_name(2 * x, "hidden"))
        >>> offload.Policy(keep=("hidden",)).check(layer, jnp.ones(3))  # "hiden" would raise and suggest "hidden"

        `args` are arrays or `jax.ShapeDtypeStruct`s. ValueError for a name that neither function's values nor any of
        jaxops' ops have.
        """
        check_known(self.keep + self.offload, residual_bytes(function, *args), "the function")

    def on_device(self) -> "Policy":
        """The same policy, with offloaded values kept."""
        return Policy(self.keep + self.offload)

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> Any:
        """The policy function that `jax.checkpoint` calls."""
        if prim.name != "name":
            return False
        choice = self.choice(params["name"])
        if choice != "offload":
            return choice == "keep"
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[params["name"]],
            offload_src="device",
            offload_dst="pinned_host",
        )(prim, *avals, **params)


def policy(
    names: Mapping[str, Choice], *, budget_bytes: int | None = None, sizes: Mapping[str, int] | None = None
) -> Policy:
    """A `Policy` from one mapping: `policy({"moe_mlp": "offload", "adaln": "recompute", "router": "keep"})`.

    Args:
      names: the choice for each name. The longest name that covers a value decides.
      budget_bytes: the most that one call of the function offloads. Names are offloaded in their order while they fit;
        the others are recomputed.
      sizes: bytes by name, from `residual_bytes`; needed with a budget, or where a name covers another.

    Raises:
      ValueError: an unknown choice, a negative budget, missing sizes, or a name that covers none of sizes.
      TypeError: names or sizes that are no mapping, a budget or a size that is no integer.
    """
    pass_sizes = "pass sizes=jaxops.offload.residual_bytes(function, *arguments)"
    write_names = "write a choice for each name, as in policy({'moe_mlp': 'offload'})"
    for argument, value, needed in (("names", names, write_names), ("sizes", sizes, pass_sizes)):
        if not isinstance(value, Mapping) and (argument == "names" or value is not None):
            raise TypeError(f"{argument} is {type_name(value)}; {needed}.")
    left = math.inf if budget_bytes is None else check_integer("budget_bytes", budget_bytes, 0)
    for name, choice in names.items():
        check_name(name, "names")
        if choice not in (known := get_args(Choice)):
            raise ValueError(f"the choice for {name!r} is {choice!r}; it must be one of {', '.join(map(repr, known))}.")
    if sizes is None:
        if budget_bytes is not None:
            raise ValueError(f"budget_bytes needs sizes: {pass_sizes}.")
        if overlapping := [name for name in names if covers(names.keys() - {name}, name)]:
            raise ValueError(f"another name covers {overlapping[0]!r} too, which needs sizes: {pass_sizes}.")
        sizes = dict.fromkeys(names, 0)
    for known, size in sizes.items():
        check_integer(f"sizes[{known!r}]", size, 0)
    if unknown := [name for name in names if not any(covers((name,), known) for known in sizes)]:
        near, known = did_you_mean(unknown[0], sizes), ", ".join(sorted(sizes)) or "none at all"
        raise ValueError(f"no value is called {unknown[0]!r}; the names are {known}.{near}")
    chosen: dict[str, list[str]] = {"keep": [], "offload": [], "recompute": []}
    for name, choice in names.items():
        for known, size in sizes.items():
            longest = max((other for other in names if covers((other,), known)), key=len, default=None)
            if longest == name and (choice != "offload" or size <= left):
                chosen[choice].append(known)
                left -= size if choice == "offload" else 0
    return Policy(tuple(chosen["keep"]), tuple(chosen["offload"]))
