"""Training steps of the multimodal model with jaxops' three optimizations, and with each one replaced alone.

Fused AdaLN, one grouped product for the experts of both modalities, and activations offloaded to the host; half of the
rows are of images.

python -m benchmarks.bench_multimodal                        # the 2b preset
python -m benchmarks.bench_multimodal --smoke --out /tmp/x   # a tiny model, every code path
"""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import typer

import jaxops
from benchmarks import harness
from benchmarks.bench_offload import RESERVED, Measured, largest, measure, without_jaxops
from benchmarks.bench_train_step import APART, SHOWN, Workload, key_of, speeds, state_of
from benchmarks.traces import KERNELS
from jaxops.offload import Policy
from jaxops.offload.reports import needed_bytes
from models.multimodal import experts as modality_experts
from models.multimodal.experts import Units
from models.multimodal.interleaved import Batch, Document, Room, Tokens, captioned, illustrated, lay_out, size_of, stack
from models.multimodal.model import MultimodalConfig
from models.precision import PRECISIONS
from models.training import loop
from models.training import mm as train_mm
from models.training.presets import MULTIMODAL_PRESETS, MultimodalPreset

OURS, XLA_ADALN, APART_PRODUCTS, PADDED, JAX_REMAT, KEEP = (
    "jaxops",
    "xla_adaln",
    "product_a_modality",
    "padded_experts",
    "jax_remat",
    "keep",
)
# Layers' inputs go to the host; attention's arrays and the results of grouped products stay on the device. Attention's
# arrays have two and a half times the bytes: with them on the host, too, the copies took longer than a forward, and a
# step of 16,384 rows 177 instead of 150 ms (H200, 2026-11-25).
OFFLOAD = Policy(keep=("route", "modality_grouped_matmul", "grouped_matmul", "attention"), offload=("carry",))
POLICIES: dict[str, Policy | None] = {
    KEEP: None,
    XLA_ADALN: OFFLOAD,
    APART_PRODUCTS: OFFLOAD,
    PADDED: OFFLOAD,
    JAX_REMAT: Policy(),
    OURS: OFFLOAD,
}
PATCH = 2
WORKERS = 12  # programs that are compiled together


def products_apart(
    rows: jax.Array, units: Sequence[Units], group_offsets: jax.Array, *, dtype: Any, backend: Any
) -> jax.Array:
    """As `models.multimodal.experts.apply_units`, with three grouped products for each modality."""
    first, found = 0, jnp.zeros((), dtype)
    for unit in units:
        end = first + unit.gate.shape[0]
        multiply = functools.partial(
            jaxops.grouped_matmul, group_offsets=group_offsets[first : end + 1], compute_dtype=dtype, backend=backend
        )
        found = found + multiply(jax.nn.silu(multiply(rows, unit.gate)) * multiply(rows, unit.up), unit.down)
        first = end
    return found


def padded_to_the_widest(
    rows: jax.Array, units: Sequence[Units], group_offsets: jax.Array, *, dtype: Any, backend: Any
) -> jax.Array:
    """As `models.multimodal.experts.apply_units`, with the experts of all modalities in one array, zeros beside the
    narrow ones."""
    widest = max(unit.gate.shape[2] for unit in units)

    def together(name: str, axis: int) -> jax.Array:
        weights = [getattr(unit, name) for unit in units]
        edges = [[(0, widest - w.shape[i] if i == axis else 0) for i in range(3)] for w in weights]
        return jnp.concatenate([jnp.pad(w.astype(dtype), edge) for w, edge in zip(weights, edges, strict=True)])

    multiply = functools.partial(
        jaxops.grouped_matmul, group_offsets=group_offsets, compute_dtype=dtype, backend=backend
    )
    hidden = jax.nn.silu(multiply(rows, together("gate", 2))) * multiply(rows, together("up", 2))
    return multiply(hidden, together("down", 1))


@contextlib.contextmanager
def replaced(side: str) -> Iterator[None]:
    """One optimization replaced by what there is without it; each is looked up when a step is traced."""
    with contextlib.ExitStack() as stack:
        if side == XLA_ADALN:
            for name in ("adaln", "gated_residual_adaln", "gated_residual"):
                op = getattr(jaxops, name)
                on_xla = lambda *given, op=op, **options: op(*given, **(options | {"backend": "xla"}))
                stack.enter_context(mock.patch.object(jaxops, name, on_xla))
        for name, apply in ((APART_PRODUCTS, products_apart), (PADDED, padded_to_the_widest)):
            if side == name:
                stack.enter_context(mock.patch.object(modality_experts, "apply_units", apply))
        if side == JAX_REMAT:
            stack.enter_context(without_jaxops())
        yield


def documents(room: Room, longest: int, vocab: int, seed: int) -> list[Document]:
    """Squares of a quarter of `longest` patches to all of it, each with as many tokens of text, in both orders."""
    rng, found, tokens = np.random.default_rng(seed), [], Tokens(vocab - 2, vocab - 1, 0)
    low, high, rows = int((longest / 4) ** 0.5), int(longest**0.5), 0
    while True:
        side = int(rng.integers(low, high + 1))
        pixels = rng.integers(0, 256, (PATCH * side, PATCH * side, room.channels), np.uint8)
        make = (captioned, illustrated)[len(found) % 2]
        document = make(rng.integers(1, vocab - 2, side * side - 1).astype(np.int32), pixels, tokens)
        rows += size_of(document, PATCH)[0]
        if rows > room.rows:
            return found
        found.append(document)


def flops(c: MultimodalConfig, batch: Batch) -> float:
    """Of a step: six for each active parameter and row, predictions' logits, and attention of the rows that are seen.

    Without the embeddings, the patches' layers, and recomputation.
    """
    lengths, ends = np.diff(batch.segment_offsets), batch.segment_offsets[1:]
    starts = batch.sequence_offsets[np.searchsorted(batch.sequence_offsets, ends - 1, side="right") - 1]
    before = (ends - lengths - starts) * (lengths > 0)
    pairs = np.sum(lengths * before + np.where(batch.is_image, lengths**2, lengths * (lengths + 1) / 2), dtype=float)
    image = float(np.sum(lengths * batch.is_image))
    text = float(np.sum(lengths)) - image
    attention = c.width * c.head_dim * (2 * c.heads + 2 * c.kv_heads)
    routers = c.width * (c.text_experts + c.image_experts)
    experts = 3 * c.width * c.top_k * (text * c.text_hidden + image * c.image_hidden)
    modulations = 6 * c.width**2 * float(np.sum(batch.is_image))
    layer = (text + image) * (attention + routers) + experts + modulations
    logits = float(np.sum(batch.targets >= 0)) * c.width * c.vocab
    return 6 * (c.layers * layer + logits) + 12 * c.layers * c.heads * c.head_dim * pairs


def resized(preset: MultimodalPreset, rows: int, policy: Policy | None) -> MultimodalPreset:
    """With that many rows a step, in one micro-batch."""
    model = dataclasses.replace(preset.model, policy=policy, unroll=False)
    sizes = {name: getattr(preset, name) * rows // preset.rows for name in ("predictions", "documents")}
    return dataclasses.replace(preset, model=model, rows=rows, accumulate=1, **sizes)


def workload(preset: MultimodalPreset, precision: str, steps: int) -> Workload:
    preset = train_mm.with_precision(preset, PRECISIONS[precision])
    c = preset.model
    room = Room(preset.rows, preset.predictions, preset.documents, PATCH, c.patch_values // PATCH**2)
    batches = [stack([lay_out(documents(room, preset.longest, c.vocab, step), room)]) for step in range(steps)]
    work = float(np.mean([flops(c, jax.tree.map(lambda x: x[0], batch)) for batch in batches]))
    graphdef = jax.eval_shape(lambda: train_mm.init_state(preset, 0))[0]
    shape = {"T": preset.rows, "D": c.width, "layers": c.layers, "experts": c.text_experts + c.image_experts}
    return Workload(
        lambda: train_mm.init_state(preset, 0)[1],
        train_mm.make_step(graphdef, preset),
        [loop.place(batch) for batch in batches],
        preset.rows,
        work,
        shape | {"images": int(np.sum(batches[0].is_image)), "top_k": c.top_k},
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """A preset, and the sides and rows that are run, and those that are only compiled, for their memory."""

    preset: MultimodalPreset
    runs: Sequence[tuple[str, int]]
    compiled: Sequence[tuple[str, int]]


def case_of(preset: MultimodalPreset, many: int) -> Case:
    """All sides with the preset's rows, and those that save memory with `many` times as many; ours last."""
    R = preset.rows
    runs = [(side, rows) for rows in (R, many * R) for side in POLICIES if (side, rows) != (KEEP, many * R)]
    return Case(preset, runs, [(KEEP, 2 * R), (JAX_REMAT, 2 * R), (OURS, 2 * R)])


CASES = {"multimodal_2b": case_of(MULTIMODAL_PRESETS["2b"], 8)}
TINY = dataclasses.replace(
    MULTIMODAL_PRESETS["demo"].model, layers=1, width=32, heads=2, kv_heads=2, head_dim=16, text_hidden=16
)
SMOKE = {
    "multimodal_smoke": case_of(
        dataclasses.replace(
            MULTIMODAL_PRESETS["demo"], model=TINY, rows=128, predictions=96, documents=16, longest=16, ema=None
        ),
        2,
    )
}


def build(side: str, rows: int, preset: MultimodalPreset, smoke: bool) -> Callable[[], tuple[Workload, Any]]:
    """Traces a side's step; the result compiles it. JAX keeps what it has traced, so its caches are cleared first."""
    jax.clear_caches()
    with replaced(side):
        work = workload(resized(preset, rows, POLICIES[side]), "float32" if smoke else "bfloat16", 3)
        start = jax.jit(work.start).lower()
        lowered = work.step.lower(state_of(work), work.batches[0], key_of(work))
    return lambda: (work._replace(start=start.compile()), lowered.compile())


def measure_case(name: str, case: Case, file: pathlib.Path, dense: float, limit_s: float, smoke: bool) -> int:
    """The number of failed programs.

    All are compiled before the first runs, together but for the first one: the others take what XLA's autotuner chose
    for it.
    """
    needed: dict[tuple[str, int], int] = {}
    per_token: dict[tuple[str, int], float] = {}
    losses: dict[int, float] = {}
    only_compiled = [it for it in case.compiled if it not in case.runs]
    failed = 0
    with ThreadPoolExecutor(WORKERS) as pool:
        start = lambda it: harness.start_compiling(pool, functools.partial(build, *it, case.preset, smoke))
        building = {case.runs[0]: start(case.runs[0])}
        wait(building.values())
        building |= {it: start(it) for it in [*case.runs[1:], *only_compiled]}
    # A run's row needs the bytes of the programs that are only compiled: they come first.
    for side, rows in [*only_compiled, *case.runs]:
        try:
            (work, step), compile_s = building[side, rows].result()
            needed[side, rows] = needed_bytes(step)[0]
            if (side, rows) in only_compiled:
                print(f"{name} {side} of {rows:,} rows: {needed[side, rows] / 1e9:.1f} GB", flush=True)
                continue
            measured = measure(work, step, compile_s, limit_s)
            first = losses.setdefault(rows, measured.losses[0])
            if not abs(measured.losses[0] / first - 1) <= APART:
                raise ArithmeticError(f"the first loss is {measured.losses[0]}, that of the first side {first}")
            per_token[side, rows] = float(np.median(measured.us)) / work.tokens
            write(file, name, side, work, measured, dense, needed, per_token)
        except Exception as error:
            failed += 1
            harness.print_left_out(f"{side} of {rows:,} rows at {name}", error)
    return failed


def write(
    file: pathlib.Path,
    name: str,
    side: str,
    work: Workload,
    measured: Measured,
    dense: float,
    needed: dict[tuple[str, int], int],
    per_token: dict[tuple[str, int], float],
) -> None:
    """A run's row. needed and per_token are of all runs so far, including this one; vs is of equal rows."""
    rows, times = work.tokens, harness.Times.of(measured.us)
    mine = per_token[side, rows]
    vs = {peer: us / mine for (peer, n), us in per_token.items() if side == OURS and n == rows and peer != OURS}
    budget = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0) - RESERVED
    facts: dict[str, Any] = speeds(work, times)
    facts |= {"peak_bytes": measured.report.device_bytes, "host_bytes": measured.report.host_bytes}
    facts |= {"largest_rows": largest(needed, side, budget), "compile_s": measured.compile_s}
    facts |= {"loss": measured.losses[0]}
    totals: dict[str, float] = {}
    for event in measured.events:
        if event.lane == KERNELS:
            totals[event.name] = totals.get(event.name, 0.0) + event.us
    longest = sorted(totals.items(), key=lambda item: -item[1])[:SHOWN]
    facts |= {"kernels": [[kernel[:80], round(us, 1), round(us / sum(totals.values()), 4)] for kernel, us in longest]}
    row = {"op": "train_step", "pass": "step", "name": name, "shape": work.shape, "dtype": "bfloat16"}
    row |= {"dist": f"{rows} rows", "backend": side}
    harness.append_row(file, harness.make_row(row, times, facts["tflops"] / dense, vs, None, **facts))
    print(
        f"{name} {side} of {rows:,} rows: {times.us_p50 / 1e3:.1f} ms, {facts['tokens_per_s']:,.0f} tokens/s, "
        f"MFU {facts['mfu']:.1%}, {facts['peak_bytes'] / 1e9:.1f} GB, fits {facts['largest_rows']}, {vs}",
        flush=True,
    )


def main(
    sides: str = typer.Option(",".join(POLICIES)),
    limit: float = typer.Option(6.0, help="Seconds of timed steps of each side."),
    out: str = harness.OUT,
    smoke: bool = typer.Option(False, help="A tiny model, every code path; needs --out."),
) -> None:
    """Appends to <out>/multimodal.jsonl; exits with 1 if a run failed. A row's `vs` is of times a token."""
    harness.take_memory(XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB="112")
    file = harness.begin("multimodal", out, smoke)
    dense = harness.write_dense(file, np.float32 if smoke else jnp.bfloat16, smoke)
    chosen, failed = harness.names(sides, POLICIES), 0
    for name, case in (SMOKE if smoke else CASES).items():
        wanted = [[it for it in its if it[0] in chosen] for its in (case.runs, case.compiled)]
        failed += measure_case(name, Case(case.preset, *wanted), file, dense, 0.0 if smoke else limit, smoke)
    harness.end(failed)


if __name__ == "__main__":
    typer.run(main)
