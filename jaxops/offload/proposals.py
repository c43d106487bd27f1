"""Which residuals to keep, offload or recompute, from what each was measured to need and to save."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._lib.checks import check_integer
from jaxops.offload.policies import Choice, Policy
from jaxops.offload.reports import compiler_options, needed_bytes
from jaxops.offload.residuals import count_names

HOST = jax.memory.Space.Host
HIDDEN = 0.8  # of the forward's third of a step, what copies are let take: those that all want to leave at once are waited for
RUNS = 3
TRIES = 4


@dataclasses.dataclass(frozen=True)
class Residual:
    """A name's values.

    Attributes:
      bytes: of all of them in one step.
      saves_us: how much shorter the step is if they alone are kept, against recomputing everything.
      copy_us: how long they take to the host; inf where there is no copying.
      choice: what is proposed.
    """

    bytes: int
    saves_us: float
    copy_us: float
    choice: Choice


@dataclasses.dataclass(frozen=True)
class Proposal:
    """What `propose` found.

    Attributes:
      policy: to be used.
      residuals: by name.
      step_us, device_bytes, host_bytes: of the step with that policy: measured by `propose`, estimated by `choose`.
      recompute_us, recompute_bytes: measured of the step that recomputes everything.
    """

    policy: Policy
    residuals: Mapping[str, Residual]
    step_us: float
    device_bytes: int
    host_bytes: int
    recompute_us: float
    recompute_bytes: int

    def __str__(self) -> str:
        lines = [f"{'name':28} {'MB':>9} {'saves us':>10} {'copy us':>10}  choice"]
        for name, r in self.residuals.items():
            lines.append(f"{name:28} {r.bytes / 1e6:9.1f} {r.saves_us:10.0f} {r.copy_us:10.0f}  {r.choice}")
        lines.append(
            f"recomputing everything: {self.recompute_us:,.0f} us, {self.recompute_bytes / 1e9:.2f} GB on the device"
        )
        lines.append(
            f"as proposed: {self.step_us:,.0f} us, {self.device_bytes / 1e9:.2f} GB on the device, {self.host_bytes / 1e9:.2f} GB on the host"
        )
        return "\n".join(lines)


def propose(step: Callable[..., Any], *args: Any, device_budget: int, donate_argnums: Sequence[int] = ()) -> Proposal:
    """A policy for `step(*args, policy=...)`, a whole training step or a gradient, that fits into `device_budget` bytes of the device's memory.

    Compiles and runs the step once for each name, with that one kept and everything else recomputed, and then as proposed: `args` are real arrays, and
    everything recomputed has to fit. What saves most for its bytes is kept, as long as the budget lasts; what comes next is offloaded, as long as its copies
    fit behind the forward; the rest is recomputed. A layer's input ("carry" of `jaxops.offload.scan`), with which recomputing begins, is offloaded if not
    everything can be kept and its copies hide. On a CPU nothing is offloaded.

    Args:
      device_budget: bytes for arguments, results and temporaries.
      donate_argnums: as of `jax.jit`; those arguments are copied before each run.

    Raises:
      ValueError: the step has no named values, or no policy was found with which it fits; a negative budget.
      TypeError: a budget that is no integer.
    """
    check_integer("device_budget", device_budget, 0)
    traced = lambda policy: jax.make_jaxpr(lambda *args: step(*args, policy=policy))(*args).jaxpr
    names = tuple(count_names(traced(Policy())))
    if not names:
        raise ValueError(
            "the step has no values with a checkpoint_name, so there is nothing to choose: name some, or use layers that do."
        )
    sizes = count_names(traced(Policy(keep=names)))

    options = compiler_options()

    def measure(policy: Policy) -> tuple[float, int]:
        compiled = (
            jax.jit(lambda *args: step(*args, policy=policy), donate_argnums=donate_argnums, compiler_options=options)
            .lower(*args)
            .compile()
        )
        return _time_us(compiled, args, donate_argnums), needed_bytes(compiled)[0]

    base_us, base_bytes = measure(Policy())
    rate = _copy_rate()
    residuals = {}
    for name in names:
        saves = 0.0 if name == "carry" else max(0.0, base_us - measure(Policy(keep=(name,)))[0])
        residuals[name] = Residual(sizes[name], saves, 1e6 * sizes[name] / rate if rate else math.inf, "recompute")
    room = device_budget
    for _ in range(TRIES):
        found = choose(residuals, base_us, base_bytes, room)
        us, needed = measure(found.policy)
        if needed <= device_budget:
            break
        room -= needed - device_budget
    else:
        raise ValueError(
            f"no policy was found with which the step fits into {device_budget:,} bytes: recomputing everything needs {base_bytes:,}."
        )
    return dataclasses.replace(found, step_us=us, device_bytes=needed)


def choose(residuals: Mapping[str, Residual], base_us: float, base_bytes: int, device_budget: int) -> Proposal:
    """The choices, from what was measured; see `propose`."""
    chosen = dict(residuals)
    room, copying = device_budget - base_bytes, HIDDEN * base_us / 3
    worth = sorted(
        (name for name, r in residuals.items() if r.saves_us > 0),
        key=lambda name: -residuals[name].saves_us / max(1, residuals[name].bytes),
    )
    carry = residuals.get("carry")
    if carry is not None and sum(residuals[name].bytes for name in worth) > room and carry.copy_us <= copying:
        chosen["carry"] = dataclasses.replace(carry, choice="offload")
        room, copying = room + carry.bytes, copying - carry.copy_us
    for name in worth:
        r = residuals[name]
        if r.bytes <= room:
            chosen[name], room = dataclasses.replace(r, choice="keep"), room - r.bytes
        elif r.copy_us <= copying:
            chosen[name], copying = dataclasses.replace(r, choice="offload"), copying - r.copy_us
    by_choice = lambda choice: tuple(name for name, r in chosen.items() if r.choice == choice)
    kept, offloaded = by_choice("keep"), by_choice("offload")
    saved = sum(chosen[name].saves_us for name in (*kept, *offloaded))
    return Proposal(
        Policy(kept, offloaded),
        chosen,
        max(0.0, base_us - saved),
        device_budget - room,
        sum(chosen[name].bytes for name in offloaded),
        base_us,
        base_bytes,
    )


def _time_us(compiled: Any, args: Sequence[Any], donated: Sequence[int]) -> float:
    """The median of some runs, after one to warm up."""
    times = []
    for _ in range(RUNS + 1):
        own = [jax.tree.map(jnp.copy, arg) if number in donated else arg for number, arg in enumerate(args)]
        jax.block_until_ready(own)
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*own))
        times.append(1e6 * (time.perf_counter() - begin))
    return float(np.median(times[1:]))


def _copy_rate(size: int = 1 << 28) -> float:
    """Bytes a second to the host, of one large copy; 0 on a CPU, where there is no copying."""
    if jax.default_backend() == "cpu":
        return 0.0
    away = jax.jit(lambda x: jax.device_put(x, HOST)).lower(jax.ShapeDtypeStruct((size,), jnp.uint8)).compile()
    return size / (1e-6 * _time_us(away, [jnp.zeros(size, jnp.uint8)], ()))
