"""Which intermediate values stay on the device for the backward, which go to the host, and which are recomputed."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax

from jaxops._lib.arrays.checks import type_name
from jaxops._lib.arrays.residual_names import check_name
from jaxops.offload.residuals import check_known, covers, residual_bytes

Choice = Literal["keep", "offload", "recompute"]


@dataclasses.dataclass(frozen=True)
class Policy:
    """A policy for `jax.checkpoint`, `nnx.remat` and `jaxops.offload.scan`, by the names of `checkpoint_name`.

    A name covers itself and every name that continues it after a dot: "moe_mlp" covers "moe_mlp.up". The longest name
    that covers a value decides. Values that no name covers are recomputed. Hashable. `jaxops.offload.scan` raises for a
    name that none of its layer's values has; JAX's own functions ask about one value at a time: with them call
    `policy.check(function, *args)` first.

    Attributes:
      keep: names whose values stay in device memory.
      offload: names whose values go to the host until the backward.
      recompute: names of what is recomputed although a shorter name is kept or offloaded.

    Raises:
      TypeError, ValueError: names that are no strings, no tuple, or empty; a name with two choices.
    """

    keep: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()

    def __post_init__(self):
        for choice in get_args(Choice):
            names = getattr(self, choice)
            if not isinstance(names, (tuple, list)):
                wanted = f"write a tuple of names, as in Policy({choice}=('moe_mlp',))"
                raise TypeError(f"{choice} is {type_name(names)}; {wanted}.")
            for name in names:
                check_name(name, choice)
            object.__setattr__(self, choice, tuple(names))
        if len({*self.names}) < len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise ValueError(f"{twice!r} is in {self} twice: write each name once.")

    @property
    def names(self) -> tuple[str, ...]:
        """All names that have a choice."""
        return self.keep + self.offload + self.recompute

    def choice(self, name: str) -> Choice:
        choices: dict[str, Choice] = {known: choice for choice in get_args(Choice) for known in getattr(self, choice)}
        longest = max((known for known in choices if covers((known,), name)), key=len, default=None)
        return "recompute" if longest is None else choices[longest]

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
        check_known(self.names, residual_bytes(function, *args), "the function")

    def on_device(self) -> "Policy":
        """The same policy, with offloaded values kept."""
        return Policy(keep=self.keep + self.offload, recompute=self.recompute)

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


def policy(names: Mapping[str, Choice]) -> Policy:
    """A `Policy` from one mapping: `policy({"moe_mlp": "offload", "adaln": "recompute", "router": "keep"})`.

    Raises:
      ValueError: an unknown choice, or an empty name.
      TypeError: names that are no mapping of strings.
    """
    if not isinstance(names, Mapping):
        raise TypeError(
            f"names is {type_name(names)}; write a choice for each name, as in policy({{'moe_mlp': 'offload'}})."
        )
    of: dict[str, list[str]] = {choice: [] for choice in get_args(Choice)}
    for name, choice in names.items():
        check_name(name, "names")
        if choice not in of:
            raise ValueError(f"the choice for {name!r} is {choice!r}; it must be one of {', '.join(map(repr, of))}.")
        of[choice].append(name)
    return Policy(**{choice: tuple(chosen) for choice, chosen in of.items()})
