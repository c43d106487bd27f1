"""Profiles of whole training steps: what jaxops.profiling accounts for, and what it costs.

python -m benchmarks.bench_profile                        # the 3b mixture of experts, the 1b DiT, a plain nnx model
python -m benchmarks.bench_profile --smoke --out /tmp/x   # tiny models, every code path
"""

import functools
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from flax import nnx

from benchmarks import harness
from benchmarks.bench_train_step import SMOKE, WORKLOADS, WorkloadMaker
from jaxops import profiling

STEPS = 3


class Layer(nnx.Module):
    """A layer of a transformer, of flax's parts alone."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, dtype=jnp.bfloat16, rngs=rngs)
        self.norm_1, self.norm_2 = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, dtype=jnp.bfloat16, rngs=rngs)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(jax.nn.gelu(self.up(self.norm_2(x))))


class Plain(nnx.Module):
    """A language model that uses nothing of jaxops."""

    def __init__(self, vocab: int, width: int, heads: int, layers: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.layers = nnx.List([Layer(width, heads, rngs) for _ in range(layers)])
        self.head = nnx.Linear(width, vocab, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens).astype(jnp.bfloat16)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def plain(vocab: int, width: int, heads: int, layers: int, shape: tuple[int, int]) -> tuple[Callable, tuple]:
    """A step with optax's AdamW, and its arguments."""
    model = Plain(vocab, width, heads, layers, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.Param)

    def loss_of(model: Plain, tokens: jax.Array) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens).astype(jnp.float32), tokens)
        return jnp.mean(losses)

    @nnx.jit
    def step(model: Plain, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(loss_of)(model, tokens)
        optimizer.update(model, gradients)
        return loss

    tokens = np.random.default_rng(0).integers(0, vocab, shape).astype(np.int32)
    return step, (model, optimizer, jnp.asarray(tokens))


def ours(make: WorkloadMaker, preset: Any) -> tuple[Callable, tuple]:
    """The same of one of bench_train_step's models."""
    workload = make(preset, "auto", "bfloat16", 1)
    return workload.step, (workload.start(), workload.batches[0], jax.random.key(0))


def cases(smoke: bool) -> dict[str, Callable[[], tuple[Callable, tuple]]]:
    models = SMOKE if smoke else WORKLOADS
    found: dict[str, Callable[[], tuple[Callable, tuple]]] = {
        name: functools.partial(ours, *each) for name, each in models.items()
    }
    sizes = (64, 32, 2, 1, (2, 16)) if smoke else (32_768, 1024, 16, 12, (16, 1024))
    return found | {"plain_smoke" if smoke else "plain_nnx": functools.partial(plain, *sizes)}


def record_xplane(step: Callable, args: tuple, folder: pathlib.Path) -> None:
    """What `jax.profiler` and so xprof see of one step, with a step marker."""
    args = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, args)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(str(folder), profiler_options=options), jax.profiler.StepTraceAnnotation("s", step_num=0):
        jax.block_until_ready(step(*args))


def main(
    models: str = typer.Option("", help="Comma-separated; by default all."),
    xplane: str = typer.Option("", help="Folder for jax.profiler's own trace of the same steps."),
    out: str = harness.OUT,
    smoke: bool = harness.SMOKE,
) -> None:
    """Appends to <out>/profile.jsonl, and writes each report's text, picture and JSON to <out>/profiles/."""
    file = harness.begin("profile", out, smoke)
    known, left_out = cases(smoke), 0
    begin = time.perf_counter()
    ceilings = profiling.ceilings()
    print(f"ceilings after {time.perf_counter() - begin:.1f} s: {ceilings}", flush=True)
    for name in harness.names(models) or known:
        try:
            step, args = known[name]()
            begin = time.perf_counter()
            report = profiling.profile(step, *args, steps=STEPS)
            seconds = time.perf_counter() - begin
            report.save(file.parent / "profiles", name)
            write(file, name, report, seconds)
            if xplane:
                record_xplane(step, args, pathlib.Path(xplane, name))
        except Exception as error:
            harness.print_left_out(name, error)
            left_out += 1
        jax.clear_caches()
    harness.end(left_out)


def write(file: pathlib.Path, name: str, report: profiling.Report, seconds: float) -> None:
    """The row of a profile. Its time is the step's without the profiler."""
    print(f"{name}: profiled in {seconds:.1f} s\n{report.summary}", flush=True)
    case = {"op": "profile", "pass": "step", "name": name, "shape": {}, "dtype": "bfloat16", "dist": ""}
    facts = {
        "accounted": report.accounted,
        "profiled_us": report.profiled_us,
        "busy_us": report.busy_us,
        "floor_us": report.floor_us,
        "mfu": report.mfu,
        "peak_bytes": (report.memory or {}).get("peak_bytes"),
        "profile_s": seconds,
        "kernels": len(report.kernels),
    }
    times = harness.Times(report.step_us, report.step_us, report.step_us)
    of_ceiling = None if report.floor_us is None else report.floor_us / report.step_us
    harness.append_row(file, harness.make_row(case | {"backend": "jaxops"}, times, of_ceiling, {}, None, **facts))


if __name__ == "__main__":
    typer.run(main)
