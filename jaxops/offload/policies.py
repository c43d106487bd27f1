"""Which of a function's intermediate values its backward keeps, which it fetches back from the host's memory, and which it computes again."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax

Choice = Literal["keep", "offload", "recompute"]


@dataclasses.dataclass(frozen=True)
class Policy:
    """A policy for `jax.checkpoint`, `nnx.remat` and `jaxops.offload.scan`, over values named by `jax.ad_checkpoint.checkpoint_name`.

    A name stands for itself and for all names that go on after it with a dot: "moe_mlp" for "moe_mlp.gate" and "moe_mlp.up". What no name covers is computed
    again. Hashable: the same names give the same compiled program.

    Attributes:
      keep: names whose values stay in the device's memory.
      offload: names whose values go to the host's memory and come back for the backward. A name that both cover is offloaded.
    """

    keep: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()

    def choice(self, name: str) -> Choice:
        if _covers(self.offload, name):
            return "offload"
        return "keep" if _covers(self.keep, name) else "recompute"

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
        return jax.checkpoint_policies.save_and_offload_only_these_names(**names, offload_src="device", offload_dst="pinned_host")(prim, *avals, **params)


def _covers(names: tuple[str, ...], name: str) -> bool:
    return any(name == known or name.startswith(known + ".") for known in names)


def policy(names: Mapping[str, Choice], *, budget_bytes: int | None = None, sizes: Mapping[str, int] | None = None) -> Policy:
    """A `Policy` in one line: `policy({"moe_mlp": "offload", "adaln": "recompute", "router": "keep"})`.

    Args:
      names: what becomes of the values of each name; see `Policy` for what a name covers. An entry for a longer name is for its own values alone, whatever a
        shorter one says: {"moe_mlp": "offload", "moe_mlp.gate": "keep"} needs `sizes` to know the others by name.
      budget_bytes: the most that is offloaded, of one call of the function. Names are offloaded in their order as long as they fit, the others recomputed.
      sizes: bytes by name, as of `residual_bytes`; needed for a budget.

    Raises:
      ValueError: an unknown choice, a budget or overlapping names without sizes, or a name that is in no value's.
    """
    for name, choice in names.items():
        if choice not in get_args(Choice):
            raise ValueError(f"the choice for {name!r} is {choice!r}; it must be one of {', '.join(map(repr, get_args(Choice)))}.")
    overlapping = [name for name in names if any(_covers((other,), name) for other in names if other != name)]
    if sizes is None:
        if budget_bytes is not None or overlapping:
            why = "budget_bytes is given" if budget_bytes is not None else f"{overlapping[0]!r} stands under another name, too"
            raise ValueError(f"{why}, and that needs sizes: pass sizes=jaxops.offload.residual_bytes(function, *arguments).")
        by_choice = lambda choice: tuple(name for name, of in names.items() if of == choice)
        return Policy(by_choice("keep"), by_choice("offload"))
    if unknown := [name for name in names if not any(_covers((name,), known) for known in sizes)]:
        raise ValueError(f"no value is called {unknown[0]!r}; the names are {', '.join(sorted(sizes)) or 'none at all'}.")
    left, kept, offloaded = math.inf if budget_bytes is None else budget_bytes, [], []
    for name in names:
        for known, size in sizes.items():
            if max((other for other in names if _covers((other,), known)), key=len, default=None) != name:
                continue
            if names[name] == "keep":
                kept.append(known)
            elif names[name] == "offload" and size <= left:
                left -= size
                offloaded.append(known)
    return Policy(tuple(kept), tuple(offloaded))
