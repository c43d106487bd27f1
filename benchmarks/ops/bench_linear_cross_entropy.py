"""The last layer and its loss, beside plain XLA, a `jax.checkpoint` around chunks of rows, and torch.

python -m benchmarks linear_cross_entropy                          # everything: 8 shapes, fwd+bwd
python -m benchmarks linear_cross_entropy --smoke --out /tmp/x     # a tiny shape, every code path, CPU too

Rates count three products in fwd+bwd, one in fwd. temp_gb: XLA's temporaries beside operands and results; loss_err: the
relative error of the loss. torch's process has plain torch, torch.compile and, where liger_kernel can be imported,
Liger's fused linear cross-entropy: the fastest of them is timed.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxops
from benchmarks import harness
from benchmarks.harness import checks
from benchmarks.harness.command import Benchmark, command
from benchmarks.shapes import by_name

DTYPE = jnp.bfloat16
PASSES = ("fwd", "fwd+bwd")
LIMITS = "bfloat16 adaln"  # one factor of the products, a gradient of logits, is rounded once more
TORCH = "torch_loss"
CHUNKS = 16
ROWS = 24  # of a gradient that are checked

Arrays = dict[str, jax.Array]


def shape_of(T: int, D: int, V: int) -> harness.Named:
    """T rows of D columns, a vocabulary of V words."""
    return harness.Named(f"t{T}_d{D}_v{V}", {"T": T, "D": D, "V": V})


SHAPES = by_name(
    shape_of(8192, 4096, 131072),  # Llama-3 8B, rounded up
    shape_of(16384, 2048, 151936),  # Qwen3 30B-A3B
    shape_of(8192, 2880, 201088),  # gpt-oss
    shape_of(65536, 4096, 32000),  # Mixtral
    shape_of(4096, 7168, 129280),  # DeepSeek-V3
    shape_of(4096, 3072, 256000),  # Gemma 7B
    shape_of(32768, 5120, 152064),  # Qwen2.5 32B
    shape_of(16384, 2048, 50304),  # OLMo 1B
)
SMOKE = shape_of(48, 32, 203)._replace(name="smoke")


def make_inputs(shape: harness.Named) -> Arrays:
    """Also what a right result is: the loss, and sampled rows of dx and columns of dw, in float32."""
    T, D, V = shape.dims.values()
    x = harness.normal(0, (T, D), DTYPE)
    w = (harness.normal(1, (D, V), jnp.float32) * D**-0.5).astype(DTYPE)
    targets = jax.random.randint(jax.random.key(2), (T,), 0, V, jnp.int32)
    return {"x": x, "w": w, "targets": targets} | _expected(x, w, targets)


@jax.jit
def _expected(x: jax.Array, w: jax.Array, targets: jax.Array) -> Arrays:
    T, V = x.shape[0], w.shape[1]
    logits_of = lambda x, w: jnp.dot(x, w, preferred_element_type=jnp.float32)

    def statistics(row):
        x, target = row
        logits = logits_of(x[None], w)[0]
        return jax.nn.logsumexp(logits), logits[target]

    log_sums, chosen = lax.map(statistics, (x, targets), batch_size=256)
    rows, words = _sampled(T), _sampled(V)
    d = jnp.exp(logits_of(x[rows], w) - log_sums[rows, None]) - jax.nn.one_hot(targets[rows], V)
    dx = jnp.dot(d, w.T.astype(jnp.float32), precision="highest") / T
    d = jnp.exp(logits_of(x, w[:, words]) - log_sums[:, None]) - (targets[:, None] == words)
    dw = jnp.dot(d.T, x.astype(jnp.float32), precision="highest") / T
    return {"loss": jnp.mean(log_sums - chosen), "dx": dx, "dw": dw}


def _sampled(count: int) -> np.ndarray:
    return np.unique(np.linspace(0, count - 1, ROWS).astype(np.int32))


def plain(x: jax.Array, w: jax.Array, targets: jax.Array) -> jax.Array:
    logits = (x @ w).astype(jnp.float32)
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0])


def in_chunks(x: jax.Array, w: jax.Array, targets: jax.Array) -> jax.Array:
    chunk = jax.checkpoint(lambda piece: plain(piece[0], w, piece[1]), prevent_cse=False)
    pieces = x.reshape(CHUNKS, -1, x.shape[1]), targets.reshape(CHUNKS, -1)
    return jnp.mean(lax.map(chunk, pieces))


LOSSES: dict[str, Callable[..., jax.Array]] = {
    "jaxops": jaxops.linear_cross_entropy,
    "jaxops_float32_logits": lambda *a: jaxops.linear_cross_entropy(*a, logits_dtype=jnp.float32),
    "xla": plain,
    "chunks": in_chunks,
}


def side(name: str, pass_name: str) -> Callable[..., Arrays]:
    def both(x: jax.Array, w: jax.Array, targets: jax.Array) -> Arrays:
        loss, (dx, dw) = jax.value_and_grad(LOSSES[name], (0, 1))(x, w, targets)
        return {"loss": loss, "dx": dx, "dw": dw}

    return both if pass_name == "fwd+bwd" else lambda *a: {"loss": LOSSES[name](*a)}


def ready_side(name: str, pass_name: str, inputs: Arrays) -> harness.Ready:
    given = tuple(inputs[key] for key in ("x", "w", "targets"))
    compiled: Any
    compiled, seconds = harness.compile_fits(side(name, pass_name), *given)
    found = {}

    def check(results: Arrays) -> float:
        found["loss_err"] = abs(float(results["loss"]) / float(inputs["loss"]) - 1)
        errors = [jnp.array([found["loss_err"], found["loss_err"]])]
        if "dx" in results:
            dx, dw = results["dx"][_sampled(len(results["dx"]))], results["dw"].T[_sampled(results["dw"].shape[1])]
            errors += [checks.relative_errors(dx, inputs["dx"]), checks.relative_errors(dw, inputs["dw"])]
        max_err, rms_err = (float(x) for x in jnp.max(jnp.stack(errors), axis=0))
        return checks.demand_right(max_err, rms_err, LIMITS)

    temp_gb = compiled.memory_analysis().temp_size_in_bytes / 1e9
    ready = harness.checked(name, (compiled, seconds), given, check, temp_gb=temp_gb)
    ready.facts |= found
    return ready


def measure(run: harness.Run, shape: harness.Named, inputs: Arrays, pass_name: str) -> None:
    row = harness.case_of("linear_cross_entropy", pass_name, shape, DTYPE)
    makers = run.sides("jaxops", ready_side, pass_name, inputs) | run.torch_side(TORCH, row, LIMITS)
    products = {"fwd": 1, "fwd+bwd": 3}[pass_name]
    run.measure("jaxops", row, makers, "tflops", products * 2 * math.prod(shape.dims.values()))


main = command(
    Benchmark(
        name="linear_cross_entropy",
        shapes=SHAPES,
        smoke=SMOKE,
        inputs=make_inputs,
        options={"passes": ("fwd+bwd",)},
        known={"passes": PASSES},
        measure=measure,
        peers=f"jaxops_float32_logits,xla,chunks,{TORCH}",
        ceilings={"dtype": DTYPE},
        ceiling="dense_tflops",
        torch=(
            TORCH,
            {
                "op": "linear_cross_entropy",
                "pass": "fwd+bwd",
                "dist": "",
                "limits": checks.LIMITS[LIMITS],
                **SMOKE.dims,
            },
        ),
    )
)
