"""A mixture-of-experts layer whose experts are split over the cards of one host: what sending tokens and results costs.

python -m benchmarks.bench_expert_exchange                          # every layer, forward, and forward and backward
python -m benchmarks.bench_expert_exchange --smoke --out /tmp/x     # a tiny layer on host devices

T tokens of a shape are those of all devices. A device gathers all tokens, runs its experts over them with the same
kernels on every side, and sends results back, which their devices add. The sides differ in what sends:

- `jaxops`: `jaxops.parallel.gather_pieces` and `add_own_rows`, by the cards' copy engines, as the models compile them.
- `jaxops_nccl`: the same by NCCL, as without that option of XLA.
- `xla`: `jax.lax.all_gather` and `jax.lax.psum_scatter`.
- `alone`: nothing; tokens are on every device, and a device's results stay with it.

TFLOP/s are of one device. `of_alone` is the time over that of `alone`. `jax.lax.ragged_all_to_all` is not a side: on
GPUs it has open cases of wrong results and of hanging (openxla/xla#33386).
"""

import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import typer
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxops
from benchmarks import bench_moe, harness, shapes_moe
from benchmarks.bench_collective_matmul import Timed, ready
from benchmarks.collective_sides import AXIS, Side, mesh_of_all, program
from benchmarks.shapes_moe import MoeShape
from jaxops.parallel import add_own_rows, gather_pieces

OURS, NCCL, XLA, ALONE = "jaxops", "jaxops_nccl", "xla", "alone"
SIDES = (ALONE, OURS, NCCL, XLA)
OPTIONS = {OURS: {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}}  # as of models.layers.options_for
PASSES = ("fwd", "fwd+bwd")
CALLS = 3  # in a program
SMOKE, SMOKE_DEVICES = MoeShape("smoke", 64, 8, 2, 16, 32), 4
SPLIT = (P(AXIS), P(), P(AXIS), P(AXIS), P(AXIS))  # tokens, router, gate, up, down


class Sending(NamedTuple):
    """How a side sends.

    Attributes:
      gather: (logits, tokens) of a device -> those of all.
      scatter: results for all tokens, of a device's experts -> the sums for its own tokens.
    """

    gather: Callable[[jax.Array, jax.Array], Any]
    scatter: Callable[[jax.Array], jax.Array]


def _gather_by_xla(*arrays: jax.Array) -> list[jax.Array]:
    return [lax.all_gather(x, AXIS, tiled=True) for x in arrays]


_PARTS = Sending(lambda *arrays: gather_pieces(arrays, AXIS), lambda y: add_own_rows([y], AXIS)[0])
SENDING = {
    OURS: _PARTS,
    NCCL: _PARTS,
    XLA: Sending(_gather_by_xla, lambda y: lax.psum_scatter(y, AXIS, tiled=True)),
    ALONE: Sending(lambda *arrays: arrays, lambda y: y),
}


def layer(name: str, shape: MoeShape) -> Callable[..., jax.Array]:
    """A side's layer, of what a device has."""

    def call(tokens: jax.Array, router: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        logits, tokens = SENDING[name].gather(tokens.astype(jnp.float32) @ router, tokens)
        routing = jaxops.route(logits, shape.k).own(gate.shape[0], AXIS)
        return SENDING[name].scatter(jaxops.moe_mlp(tokens, gate, up, down, routing))

    return call


def side_of(name: str, shape: MoeShape, pass_name: str) -> Side:
    """(tokens, router, gate, up, down[, dy]) -> (y,), and with the backward the gradients of tokens and experts."""
    run, rows = layer(name, shape), P() if name == ALONE else P(AXIS)
    # The devices' results are concatenated, those of `alone` too: nobody adds them.
    split = (rows, *SPLIT[1:])
    if pass_name == "fwd":
        return Side(lambda *given: (run(*given),), split, (P(AXIS),))

    def both(tokens: jax.Array, router: jax.Array, *others: jax.Array) -> tuple:
        *experts, dy = others
        y, vjp = jax.vjp(lambda tokens, *experts: run(tokens, router, *experts), tokens, *experts)
        return y, *vjp(dy)

    return Side(both, (*split, rows), (P(AXIS), P(AXIS), *SPLIT[2:]))


def arguments(shape: MoeShape, over: Mesh, side: Side) -> tuple[jax.Array, ...]:
    """Random, each array made where the side wants it."""
    order = (1, 2, 3, 4, 5, 0)[: len(side.operands)]  # of bench_moe.make_inputs, whose first one is dy

    def make(number: int) -> jax.Array:
        return bench_moe.make_inputs(shape)[number]

    return tuple(
        jax.jit(functools.partial(make, number), out_shardings=NamedSharding(over, lies))()
        for number, lies in zip(order, side.operands, strict=True)
    )


def reference(shape: MoeShape, pass_name: str) -> tuple[jax.Array, ...]:
    """The same layer on one device, with all experts and XLA's products."""
    dy, tokens, router, *experts = bench_moe.make_inputs(shape)
    preferred = jnp.zeros((shape.T, shape.E), jnp.float32)
    results = jax.jit(bench_moe.program("xla", shape, pass_name))(preferred, dy, tokens, router, *experts)
    if pass_name == "fwd":
        return results
    y, dtokens, _, *dexperts = results
    return y, dtokens, *dexperts


def check(name: str, shape: MoeShape, got: tuple[jax.Array, ...], want: tuple[jax.Array, ...]) -> float:
    """The largest error of a side's results.

    Raises:
      ArithmeticError: a result is wrong.
    """
    got = tuple(jax.device_put(x, next(iter(want[0].devices()))) for x in got)
    if name == ALONE:  # what nobody has added: results and gradients of the tokens, of each device
        add = lambda x: jnp.sum(x.reshape(-1, shape.T, shape.D).astype(jnp.float32), axis=0)
        got = (*map(add, got[:2]), *got[2:])
    max_err, rms_err = (float(error) for error in bench_moe.errors(got, want))
    if not rms_err <= bench_moe.LIMIT:
        raise ArithmeticError(f"wrong result: RMS error {rms_err:.2e} of the RMS")
    return max_err


def measure_case(run: harness.Run, over: Mesh, shape: MoeShape, pass_name: str) -> None:
    """Compiles all sides together, checks and times them."""
    args: dict[str, tuple[jax.Array, ...]] = {}
    timed: dict[str, Timed] = {}
    want = functools.cache(lambda: reference(shape, pass_name))

    def trace(name: str) -> Callable[[], Any]:
        side = side_of(name, shape, pass_name)
        args[name] = arguments(shape, over, side)
        lowered = program(side, over, CALLS).lower(*args[name])
        return lambda: lowered.compile(OPTIONS.get(name) if harness.on_gpu() else None)

    with ThreadPoolExecutor(len(SIDES)) as pool:
        building = {name: harness.start_compiling(pool, functools.partial(trace, name)) for name in (OURS, *run.peers)}

    def make(name: str) -> harness.Ready:
        found = building[name].result()
        timed[name] = Timed(found.result, args[name], CALLS)
        right = lambda results: max(check(name, shape, each, want()) for each in results)
        return ready(over.size, name, timed[name], right, compile_s=found.seconds)

    label = f"{shape.name} {pass_name}"
    sides = run.ready_sides(OURS, label, {name: functools.partial(make, name) for name in building})
    times = harness.interleave([side.variant for side in sides.values()], run.rounds)
    run.left_out += OURS in sides and OURS not in times
    for name, t in times.items():
        sides[name].facts["host_us"] = timed[name].host_us
        if ALONE in times:
            sides[name].facts["of_alone"] = t.us_p50 / times[ALONE].us_p50
    case = harness.case_of("moe", pass_name, shape, bench_moe.DTYPE, "router")
    run.write(OURS, case, sides, times, "tflops", shape.flops(pass_name) / over.size)
    parts = [f"{name} {t.us_p50:.1f} us (host {timed[name].host_us:.1f})" for name, t in times.items()]
    print(f"{label:36}{' | '.join(parts)}", flush=True)


def main(
    shape_names: str = harness.shapes_option(shapes_moe.EXCHANGES),
    passes: str = typer.Option(",".join(PASSES)),
    sides: str = typer.Option(",".join(SIDES), help=f"What {OURS} is measured beside."),
    rounds: int = typer.Option(5),
    time_limit: float = typer.Option(1e4, help="Seconds after which no further case starts."),
    out: str = harness.OUT,
    smoke: bool = typer.Option(False, help="A tiny layer on host devices, every code path; needs --out."),
) -> None:
    """Appends to <out>/expert_exchange.jsonl after each case; exits with 1 if jaxops itself failed somewhere."""
    begin = time.perf_counter()
    if smoke:
        harness.host_devices(SMOKE_DEVICES)
    over = mesh_of_all()
    file = harness.begin("expert_exchange", out, smoke, over.size)
    peers = [name for name in harness.names(sides, SIDES) if name != OURS]
    run = harness.Run(file=file, rounds=rounds, ceiling=None, peers=peers)
    for shape in [SMOKE] if smoke else [shapes_moe.EXCHANGES[name] for name in harness.names(shape_names)]:
        for pass_name in harness.names(passes, PASSES):
            if time.perf_counter() - begin < time_limit:
                measure_case(run, over, shape, pass_name)
            else:
                print(f"  left out: {shape.name} {pass_name}: the time limit", flush=True)
        run.done(shape.name)
    harness.end(run.left_out)


if __name__ == "__main__":
    typer.run(main)
