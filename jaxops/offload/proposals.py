"""Proposes which residuals to keep, offload or recompute, from measured times and sizes."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._lib.arrays.checks import check_integer
from jaxops.offload.policies import Choice, Policy
from jaxops.offload.reports import compiler_options, needed_bytes
from jaxops.offload.residuals import CARRY, count_names

HIDDEN = 0.8  # part of the forward's time (a third of a step) that copies may take: they do not start evenly spread
RUNS = 3
TRIES = 4


@dataclasses.dataclass(frozen=True)
class Residual:
    """The values of one name in a step, and the choice for them."""

    bytes: int
    saves_us: float  # of keeping them alone, over recomputing everything
    copy_us: float  # to the host; inf on a CPU
    choice: Choice


@dataclasses.dataclass(frozen=True)
class Proposal:
    """The result of `propose`: a policy, each name's residuals, and the step's time and memory with the policy."""

    policy: Policy
    residuals: Mapping[str, Residual]
    step_us: float
    device_bytes: int
    host_bytes: int
    recompute_us: float  # with everything recomputed, as is recompute_bytes
    recompute_bytes: int

    def __str__(self) -> str:
        lines = [f"{'name':28} {'MB':>9} {'saves us':>10} {'copy us':>10}  choice"]
        for name, r in self.residuals.items():
            lines.append(f"{name:28} {r.bytes / 1e6:9.1f} {r.saves_us:10.0f} {r.copy_us:10.0f}  {r.choice}")
        device, host, before = (x / 1e9 for x in (self.device_bytes, self.host_bytes, self.recompute_bytes))
        lines.append(f"recomputing everything: {self.recompute_us:,.0f} us, {before:.2f} GB on the device")
        lines.append(f"as proposed: {self.step_us:,.0f} us, {device:.2f} GB on the device, {host:.2f} GB on the host")
        return "\n".join(lines)


def propose(step: Callable[..., Any], *args: Any, device_budget: int, donate_argnums: Sequence[int] = ()) -> Proposal:
    """A policy for `step(*args, policy=...)`, a training step or a gradient, that fits in `device_budget` bytes.

    Compiles and runs the step for each name, with it kept and everything else recomputed, then with the proposal:
    `args` `args` are real arrays. Residuals that save most time per byte are kept while the budget lasts, the next ones
    offloaded while their copies hide behind the forward. A layer's input ("carry" of `jaxops.offload.scan`) is
    offloaded if not everything can be kept and its copies hide. On a CPU nothing is offloaded.

    Args:
      device_budget: bytes for arguments, results and temporaries; everything recomputed must fit.
      donate_argnums: as of `jax.jit`; those arguments are copied before each run.

    Raises:
      ValueError: the step has no named values, no policy fits, or the budget is negative. TypeError: it is no integer.
    """
    check_integer("device_budget", device_budget, 0)
    names_of = lambda policy: count_names(jax.make_jaxpr(lambda *args: step(*args, policy=policy))(*args).jaxpr)
    names = tuple(names_of(Policy()))
    if not names:
        raise ValueError("the step has no values with a checkpoint_name: name some, or use layers that do.")
    sizes = names_of(Policy(keep=names))
    options = compiler_options()

    def measure(policy: Policy) -> tuple[float, int]:
        program = jax.jit(
            lambda *args: step(*args, policy=policy), donate_argnums=donate_argnums, compiler_options=options
        )
        compiled = program.lower(*args).compile()
        return _time_us(compiled, args, donate_argnums), needed_bytes(compiled)[0]

    base_us, base_bytes = measure(Policy())
    rate = _copy_rate()
    residuals = {}
    for name in names:
        saves = 0.0 if name == CARRY else max(0.0, base_us - measure(Policy(keep=(name,)))[0])
        residuals[name] = Residual(sizes[name], saves, 1e6 * sizes[name] / rate if rate else math.inf, "recompute")
    room = device_budget
    for _ in range(TRIES):
        proposal = choose(residuals, base_us, base_bytes, room)
        us, needed = measure(proposal.policy)
        if needed <= device_budget:
            return dataclasses.replace(proposal, step_us=us, device_bytes=needed)
        room -= needed - device_budget
    raise ValueError(
        f"no policy was found with which the step fits into {device_budget:,} bytes: "
        f"recomputing everything needs {base_bytes:,}."
    )


def choose(residuals: Mapping[str, Residual], base_us: float, base_bytes: int, device_budget: int) -> Proposal:
    """The choices of `propose`, with estimated times and bytes."""
    chosen = dict(residuals)
    room, copying = device_budget - base_bytes, HIDDEN * base_us / 3
    saving = sorted(
        (name for name, r in residuals.items() if r.saves_us > 0),
        key=lambda name: -residuals[name].saves_us / max(1, residuals[name].bytes),
    )
    carry = residuals.get(CARRY)
    if carry is not None and sum(residuals[name].bytes for name in saving) > room and carry.copy_us <= copying:
        chosen[CARRY] = dataclasses.replace(carry, choice="offload")
        room, copying = room + carry.bytes, copying - carry.copy_us
    for name in saving:
        r = residuals[name]
        if r.bytes <= room:
            chosen[name], room = dataclasses.replace(r, choice="keep"), room - r.bytes
        elif r.copy_us <= copying:
            chosen[name], copying = dataclasses.replace(r, choice="offload"), copying - r.copy_us
    of = lambda choice: tuple(name for name, r in chosen.items() if r.choice == choice)
    policy = Policy(of("keep"), of("offload"))
    step_us = max(0.0, base_us - sum(chosen[name].saves_us for name in policy.on_device().keep))
    host_bytes = sum(chosen[name].bytes for name in policy.offload)
    return Proposal(policy, chosen, step_us, device_budget - room, host_bytes, base_us, base_bytes)


def _time_us(compiled: Any, args: Sequence[Any], donated: Sequence[int]) -> float:
    """The median of RUNS calls after a warm-up."""
    times = []
    for _ in range(RUNS + 1):
        own = [jax.tree.map(jnp.copy, arg) if number in donated else arg for number, arg in enumerate(args)]
        jax.block_until_ready(own)
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*own))
        times.append(1e6 * (time.perf_counter() - begin))
    return float(np.median(times[1:]))


def _copy_rate(size: int = 1 << 28) -> float:
    """Bytes a second of one large copy to the host; 0 on a CPU."""
    if jax.default_backend() == "cpu":
        return 0.0
    to_host = jax.jit(lambda x: jax.device_put(x, jax.memory.Space.Host))
    compiled = to_host.lower(jax.ShapeDtypeStruct((size,), jnp.uint8)).compile()
    return size / (1e-6 * _time_us(compiled, [jnp.zeros(size, jnp.uint8)], ()))
