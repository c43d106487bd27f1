"""Decode steps of Qwen3-30B-A3B's sizes against the memory's limit, with random weights and a batch of full rows.

python -m benchmarks decode                                 # bfloat16 and FP8, 1 to 256 rows
python -m benchmarks decode --sides jaxops --batches 16     # 63 GB of device memory
python -m benchmarks decode --smoke --out /tmp/x            # tiny sizes, every code path, CPU too

The limit is the time to read what a step needs once, at the copy bandwidth of the same run: all weights, but of the
experts only those that a row has chosen and of the embeddings one of each row, and the keys and values of all tokens so
far. A step's time is that of `models.generate.slots.advance`, with the host's look at the tokens every STEPS steps.
"""

import dataclasses
import functools
import math
import pathlib
import re
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import typer
from flax import nnx

from benchmarks import harness
from benchmarks.harness import checks
from benchmarks.harness.machine import measure_ceilings
from benchmarks.training.bench_train_step import SHOWN, profiled
from jaxops.offload.reports import needed_bytes
from models.decoder import Cache, Decoder, DecoderConfig
from models.distributed.mesh import name_of
from models.generate.inference import for_inference
from models.generate.sampling import Sampling
from models.generate.slots import CACHE_MULTIPLE, Drawn, Fixed, Rows, advance
from models.training.presets import PRESETS

STEPS = 16  # that the host waits for together, as `models.generate.slots.Batching` has it
OURS, OURS_FP8, XLA = "jaxops", "jaxops_fp8_blockwise", "xla"
SIDES = {OURS: {}, OURS_FP8: {"stored_fp8": True}, XLA: {"backend": "xla"}}  # settings of the configuration
EXPERTS = re.compile(r"^blocks/(\d+)/.*\bmoe/(gate|up|down)\b")


class Workload(NamedTuple):
    """A model, and the tokens that each row has before the first step."""

    name: str
    config: DecoderConfig
    length: int


QWEN3_30B = dataclasses.replace(PRESETS["30b"].model, dtype="bfloat16", policy=None)
SMOKE = DecoderConfig(256, 128, 2, 2, 1, 64, 128, experts=8, top_k=2, qk_norm=True, dtype="bfloat16")


def nbytes(tree: Any) -> int:
    """Bytes of all arrays, or of shapes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def shapes_of(config: DecoderConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """A model for inference, without its arrays."""
    return nnx.split(nnx.eval_shape(lambda: for_inference(Decoder(config, rngs=nnx.Rngs(0)))))


def random_params(shapes: nnx.State) -> nnx.State:
    """Made on the device, array by array. Matrices keep the size of what they multiply; norms are ones."""

    def make(seed: int, path: tuple, x: Any) -> jax.Array:
        name = name_of(path)
        if re.search(r"\bscale\b", name):  # of a norm, or of a stored float8 matrix: [..., out / 128, in / 128]
            return jnp.full(x.shape, 1.0 if x.ndim == 1 else (128 * x.shape[-1]) ** -0.5, x.dtype)
        if x.dtype == jnp.float8_e4m3fn:
            return harness.normal(seed, x.shape, jnp.bfloat16).astype(x.dtype)
        ins = x.shape[-1] if "embedding" in name else x.shape[-2]
        return harness.normal(seed, x.shape, x.dtype) * jnp.asarray(ins**-0.5, x.dtype)

    leaves, tree = jax.tree.flatten_with_path(shapes)
    return jax.tree.unflatten(tree, [make(seed, path, x) for seed, (path, x) in enumerate(leaves)])


def row_shapes(graphdef: nnx.GraphDef, params: nnx.State, batch: int, length: int) -> Rows:
    """The shapes of rows whose cache has so many tokens."""
    numbers: Any = jax.ShapeDtypeStruct((batch,), jnp.int32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch))
    cache = jax.eval_shape(lambda params: nnx.merge(graphdef, params).empty_cache(batch, length), params)
    return Rows(cache, numbers, numbers, numbers, keys)


def random_rows(shapes: Rows, vocab: int, length: int) -> Rows:
    """Rows with `length` tokens in the cache, and more left to draw than are drawn."""
    batch = shapes.token.shape[0]
    leaves, tree = jax.tree.flatten(shapes.cache)
    return Rows(
        jax.tree.unflatten(tree, [harness.normal(seed, x.shape, x.dtype) for seed, x in enumerate(leaves)]),
        jnp.asarray(np.random.default_rng(0).integers(0, vocab, batch), jnp.int32),
        jnp.full(batch, length, jnp.int32),
        jnp.full(batch, 1 << 30, jnp.int32),
        jax.random.split(jax.random.key(0), batch),
    )


class Watched:
    """A block's experts, and each call's number of experts that a token has chosen, in `chosen`."""

    def __init__(self, experts: Any, chosen: list[jax.Array]):
        self.experts, self.chosen = experts, chosen

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> Any:
        y, routed = self.experts(x, mask)
        self.chosen.append(jnp.sum(routed.load > 0, dtype=jnp.int32))
        return y, routed


@functools.partial(jax.jit, static_argnums=0)
def experts_chosen(graphdef: nnx.GraphDef, params: nnx.State, rows: Rows) -> jax.Array:
    """How many experts of each layer the rows' next step reads, int32 [layers]."""
    model, chosen = nnx.merge(graphdef, params), list[jax.Array]()
    for block in model.blocks:
        block.mlp = nnx.static(Watched(block.mlp, chosen))
    model.extend(rows.token[:, None], rows.cache, rows.at, jnp.ones_like(rows.at))
    return jnp.stack(chosen)


def bytes_read(params: nnx.State, cache: Cache, chosen: np.ndarray, tokens: float) -> dict[str, float]:
    """Bytes that a step needs, by what they are.

    Args:
      cache: of all rows, or its shapes.
      chosen: as of `experts_chosen`.
      tokens: in the cache that are valid, of all rows.
    """
    read = {"experts": 0.0, "weights": 0.0}
    batch, length = cache[0][0].shape[0], cache[0][0].shape[2]
    for path, x in jax.tree.leaves_with_path(params):
        if layer := EXPERTS.match(name_of(path)):
            read["experts"] += nbytes(x) * float(chosen[int(layer[1])]) / x.shape[0]
        else:
            read["weights"] += nbytes(x) * (batch / x.shape[0] if "embedding" in name_of(path) else 1)
    return read | {"cache": tokens * nbytes(cache) / (batch * length)}


def error_of(config: DecoderConfig, params: nnx.State, rows: Rows) -> float:
    """The largest error of the first layer's logits over their RMS, against the portable backends in float32.

    Of one layer, and of as many experts as a token chooses: a rounding may decide between two experts that are nearly
    as likely.

    Raises:
      ArithmeticError: the RMS error is more than 1.25 times that of the portable backends in config.dtype.
    """
    logits, own = [], {name_of(path): x for path, x in jax.tree.leaves_with_path(params)}
    for backend, dtype in ((config.backend, config.dtype), (XLA, config.dtype), (XLA, "float32")):
        how = {"layers": 1, "experts": config.top_k, "backend": backend, "dtype": dtype}
        graphdef, shapes = shapes_of(dataclasses.replace(config, **how))
        leaves, tree = jax.tree.flatten_with_path(shapes)
        cut = [own[name_of(path)][tuple(map(slice, x.shape))].astype(x.dtype) for path, x in leaves]
        first = jax.tree.unflatten(tree, cut)
        cache = jax.tree.map(lambda x, dtype=dtype: x.astype(dtype), rows.cache[:1])
        step = lambda params, rows, graphdef=graphdef: nnx.merge(graphdef, params).extend(
            rows.token[:, None], rows.cache, rows.at, jnp.ones_like(rows.at)
        )[0]
        logits.append(jax.jit(step)(first, rows._replace(cache=cache)))
    (max_err, rms_err), (_, portable) = (checks.relative_errors(found, logits[2]) for found in logits[:2])
    if not rms_err <= 1.25 * portable:
        raise ArithmeticError(f"wrong result: RMS error {float(rms_err):.2e}, that of XLA {float(portable):.2e}")
    return float(max_err)


def timed(compiled: Any, params: nnx.State, rows: Rows, calls: int) -> tuple[list[float], Rows]:
    """Microseconds a step of each call but the first, and the rows afterwards."""
    stop, us = np.zeros(rows.token.shape[0], bool), []
    for _ in range(calls + 1):
        begin = time.perf_counter()
        rows, drawn = compiled(params, rows, stop)
        drawn: Drawn = jax.device_get(drawn)
        us.append(1e6 * (time.perf_counter() - begin) / STEPS)
        if not np.all(drawn.made == STEPS):
            raise ArithmeticError(f"rows have drawn {sorted(set(drawn.made.tolist()))} tokens, not {STEPS}")
    return us[1:], rows


def compile_advance(graphdef: nnx.GraphDef, params: nnx.State, rows: Rows) -> Any:
    """The program of STEPS steps; params and rows may be shapes."""
    stop = jax.ShapeDtypeStruct(rows.token.shape, jnp.bool_)
    return advance.lower(Fixed(graphdef, Sampling(), ()), params, rows, stop, STEPS).compile()


def measure_case(
    file: pathlib.Path, workload: Workload, side: str, batch: int, calls: int, gbps: float, model: tuple[Any, nnx.State]
) -> None:
    """Checks, times and writes one batch of one side.

    Raises:
      MemoryError: it does not fit. ArithmeticError: wrong results.
    """
    graphdef, params = model
    config, length = configured(workload, side), workload.length
    drawn = (calls + 2) * STEPS  # with the first call, and the profiled one
    room = -(-(length + drawn) // CACHE_MULTIPLE) * CACHE_MULTIPLE
    shapes = row_shapes(graphdef, params, batch, room)
    begin = time.perf_counter()
    compiled = compile_advance(graphdef, params, shapes)
    compile_s, peak_bytes = time.perf_counter() - begin, needed_bytes(compiled)[0]
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", math.inf)
    if peak_bytes > limit:
        raise MemoryError(f"needs {peak_bytes / 1e9:.1f} GB, and the device has {limit / 1e9:.1f} GB")
    rows = random_rows(shapes, config.vocab, length)
    max_err = error_of(config, params, rows)
    before = np.asarray(experts_chosen(graphdef, params, rows))
    us, rows = timed(compiled, params, rows, calls)
    chosen = (before + np.asarray(experts_chosen(graphdef, params, rows))) / 2
    kernels = profiled(lambda: compiled(params, rows, np.zeros(batch, bool)))
    # A step reads the tokens so far and its own; the first timed one comes after STEPS others.
    tokens = batch * (length + STEPS + (calls * STEPS + 1) / 2)
    read = bytes_read(params, shapes.cache, chosen, tokens)
    times, total = harness.Times.of(us), sum(read.values())
    reached = total / times.us_p50 / 1e3
    shape = {"B": batch, "length": length, "D": config.width, "layers": config.layers}
    shape |= {"experts": config.experts, "top_k": config.top_k}
    case = harness.case_of("decode", "step", harness.Named(workload.name, shape), "bfloat16") | {"backend": side}
    facts: dict[str, Any] = {"recipe": "blockwise" if config.stored_fp8 else None, "gbps": reached}
    facts |= {"tokens_per_s": 1e6 * batch / times.us_p50, "bytes_read": {part: round(n) for part, n in read.items()}}
    facts |= {"experts_chosen": float(np.mean(chosen)), "cache_length": room, "peak_bytes": peak_bytes}
    facts |= {"compile_s": compile_s, "steps": STEPS * calls}
    busy = sum(us for _, us in kernels) or math.inf
    facts["kernels"] = [[name[:80], round(us / STEPS, 2), round(us / busy, 4)] for name, us in kernels[:SHOWN]]
    harness.append_row(file, harness.make_row(case, times, reached / gbps, {}, max_err, **facts))
    line = (
        f"{times.us_p50 / 1e3:.2f} ms a step, {facts['tokens_per_s']:,.0f} tokens/s, {reached:.0f} GB/s of {gbps:.0f}"
    )
    line += f": {reached / gbps:.2f}; {np.mean(chosen):.1f} of {config.experts} experts, {peak_bytes / 1e9:.1f} GB"
    print(f"{workload.name} {side} B={batch}: {line}, compiled in {compile_s:.0f} s", flush=True)


def configured(workload: Workload, side: str) -> DecoderConfig:
    return dataclasses.replace(workload.config, **SIDES[side])


def main(
    sides: str = typer.Option(f"{OURS},{OURS_FP8}", help="Also: xla, the portable backends."),
    batches: str = typer.Option("1,4,16,64,256", help="Rows that are decoded together."),
    length: int = typer.Option(1024, min=1, help="Tokens of each row before the first step."),
    calls: int = typer.Option(6, min=1, help=f"Timed calls of {STEPS} steps each."),
    out: str = harness.OUT,
    smoke: bool = harness.SMOKE,
) -> None:
    """Appends to <out>/decode.jsonl; exits with 1 if jaxops itself failed somewhere."""
    harness.take_memory()
    file = harness.begin("decode", out, smoke)
    gbps = measure_ceilings(file, smoke).copy_gbps
    workload = Workload("smoke", SMOKE, 20) if smoke else Workload("qwen3_30b_a3b", QWEN3_30B, length)
    left_out = 0
    for side in harness.names(sides, SIDES):
        graphdef, shapes = shapes_of(configured(workload, side))
        params = random_params(shapes)
        for batch in map(int, harness.names(batches)):
            try:
                measure_case(file, workload, side, batch, calls, gbps, (graphdef, params))
            except Exception as error:
                harness.print_left_out(f"{side} at {batch} rows", error)
                left_out += side != XLA
        del params
        jax.clear_caches()
    harness.end(left_out)
