"""What the tuner needs of each op that has tuned rows: operands, a call with a given plan, how much work that is."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._lib.numerics.fp8 import SCALINGS, Quantized
from jaxops._lib.planning.device import Device, current_device, runs_gluon
from jaxops._lib.planning.plans import Planner
from jaxops.ops import (
    adaln,
    cached_attention,
    fp8_matmul,
    grouped_glu,
    grouped_matmul,
    packed_attention,
    permute,
    quantize,
    route,
)
from jaxops.ops.adaln.plan import PLANNER as ADALN
from jaxops.ops.cached_attention.plan import PLANNER as CACHED_ATTENTION
from jaxops.ops.fp8_matmul import product as fp8_product
from jaxops.ops.fp8_matmul.plan import PLANNER as FP8_MATMUL
from jaxops.ops.grouped_glu.api import unit_backward, unit_forward
from jaxops.ops.grouped_glu.plan import PLANNER as GROUPED_GLU
from jaxops.ops.grouped_glu.plan import Spec as UnitSpec
from jaxops.ops.grouped_matmul.plan import PLANNER as GROUPED_MATMUL
from jaxops.ops.packed_attention.plan import PLANNER as PACKED_ATTENTION
from jaxops.ops.permute.plan import PLANNER as PERMUTE
from jaxops.ops.quantize.plan import LAYOUTS
from jaxops.ops.quantize.plan import PLANNER as QUANTIZE
from jaxops.ops.route.plan import PLANNER as ROUTE


class Tunable:
    """How an op is tuned.

    Attributes:
      planner, problem: of its plans; the class of its problems.
      shape: fields of the problem that the command's --shape gives, in this order.
      unit: of its speed, "tflops" or "gbps".
      values: field -> (what the command takes for it, its default): it tunes each of them.
      may_be_0: fields of `shape` with a meaning of 0; a problem with another size of 0 runs no kernel.
      tensors: problem -> random arrays.
      operands: (pass, problem, tensors, offsets) -> the operands of one call; offsets [G + 1] of a split, or None.
      run: (pass, problem, plan, *operands) -> results.
      work: (pass, problem, *operands) -> floating-point operations or bytes of a call, after `unit`.
      largest_error: of an element beside the xla backend's, over its own size and the RMS of all; None for the usual
        limit of the dtype.
    """

    planner: Planner
    problem: type
    shape: tuple[str, ...]
    unit: str
    values: dict[str, tuple[Sequence, Sequence]]
    may_be_0: tuple[str, ...] = ()
    tensors: Callable[[Any], Any]
    operands: Callable[[str, Any, Any, Any], tuple]
    run: Callable[..., Any]
    work: Callable[..., float]
    largest_error: float | None = None

    def splits(self, problem) -> Sequence[np.ndarray | None]:
        """The default group sizes, one array each; None where there are no groups."""
        return [None]

    def is_empty(self, problem) -> bool:
        return any(getattr(problem, name) == 0 for name in self.shape if name not in self.may_be_0)

    def passes(self, problem) -> tuple[str, ...]:
        """Passes to measure, in this order: each is measured beside the fastest tiles of those before it."""
        return self.planner.passes

    def kernels(self, problem, device: Device) -> tuple[str, ...]:
        """Kernels to measure."""
        return ("pallas",)


def _random(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def _split(rows: int, shares: np.ndarray) -> np.ndarray:
    """Group sizes in proportion to shares; they add up to rows."""
    ends = np.concatenate([[0], np.cumsum(shares / shares.sum())])
    return np.diff(np.floor(ends * rows + 0.5).astype(int))


def _transposed(problem: Any) -> bool:
    """Whether rhs is [G, N, K]; a `Problem` of fp8_matmul has no such form."""
    return getattr(problem, "transpose_rhs", False)


class _GroupedMatmul(Tunable):
    planner, problem, shape, unit, values = GROUPED_MATMUL, grouped_matmul.Problem, ("G", "M", "K", "N"), "tflops", {}

    def splits(self, problem):
        """An even split of M over G groups, and a Zipf split in shuffled order."""
        if not problem.G:
            return [None]
        even = np.diff(np.arange(problem.G + 1) * problem.M // problem.G)
        return [even, _split(problem.M, np.random.default_rng(0).permutation(1 / np.arange(1, problem.G + 1)))]

    def kernels(self, problem, device) -> tuple[str, ...]:
        return ("pallas", "triton") if grouped_matmul.runs_triton(problem, device) else ("pallas",)

    def tensors(self, problem):
        p = problem
        rhs = (p.G, p.N, p.K) if _transposed(p) else (p.G, p.K, p.N)
        shapes = {"lhs": (p.M, p.K), "rhs": rhs if p.G else rhs[1:], "dout": (p.M, p.N)}
        return {name: _random(seed, shape, p.dtype) for seed, (name, shape) in enumerate(shapes.items())}

    def operands(self, name, problem, tensors, offsets):
        a, b = {"fwd": ("lhs", "rhs"), "dgrad": ("dout", "rhs"), "wgrad": ("lhs", "dout")}[name]
        if name == "wgrad" and _transposed(problem):  # the gradient has rhs' shape, [G, N, K]
            a, b = b, a
        return tensors[a], tensors[b], offsets

    def run(self, name, problem, plan, a, b, offsets):
        if name == "wgrad":
            return grouped_matmul.grouped_wgrad(a, b, offsets, plan=plan)
        # dgrad alone: the forward pass of a transposed rhs runs the same kernel.
        plan = dataclasses.replace(plan, fwd=getattr(plan, name))
        transpose_rhs = (name == "dgrad") != _transposed(problem)
        return grouped_matmul.grouped_matmul(a, b, offsets, transpose_rhs=transpose_rhs, plan=plan)

    def work(self, name, problem, a, b, offsets):
        return 2 * (problem.M if offsets is None else int(offsets[-1])) * problem.K * problem.N


class _Fp8Matmul(_GroupedMatmul):
    """The products alone, without their casts."""

    planner, problem, may_be_0 = FP8_MATMUL, fp8_matmul.Problem, ("G",)
    values = {"recipe": (tuple(fp8_matmul.RECIPES), ("tensorwise", "rowwise", "blockwise"))}  # noqa: RUF012
    sides = {  # noqa: RUF012  # the operands of each pass, and their layouts
        "fwd": (("lhs", "row"), ("rhs", "col")),
        "dgrad": (("dout", "row"), ("rhs", "row")),
        "wgrad": (("lhs", "col"), ("dout", "col")),
    }

    def kernels(self, problem, device) -> tuple[str, ...]:
        return ("triton",) if runs_gluon(device) and problem.quantize_lhs else ("pallas",)

    def passes(self, problem) -> tuple[str, ...]:
        return super().passes(problem) if problem.quantize_lhs else ("fwd", "dgrad")  # rhs has no gradient

    def operands(self, name, problem, tensors, offsets):
        found = []
        for tensor, layout in self.sides[name]:
            if tensor != "rhs" and not problem.quantize_lhs:
                found.append(fp8_product.unquantized(tensors[tensor]))
                continue
            form = getattr(fp8_matmul.RECIPES[problem.recipe], tensor)
            how: dict[str, Any] = {"scaling": form.scaling, "dtype": form.dtype, "layouts": layout}
            ragged = offsets if layout == "col" and tensor != "rhs" else None
            found.append(quantize.quantize(tensors[tensor], **how, group_offsets=ragged))
        return *found, offsets

    def run(self, name, problem, plan, a, b, offsets):
        plan, dtype = fp8_matmul.make_plan(problem, current_device(), plan=plan), problem.dtype
        spec = fp8_product.Spec(fp8_matmul.RECIPES[problem.recipe], plan, dtype, dtype, dtype, False)
        layouts = {"row": fp8_product.rows_of, "col": fp8_product.cols_of}
        a, b = (
            layouts[layout](side) if isinstance(side, Quantized) else side
            for side, (_, layout) in zip((a, b), self.sides[name], strict=True)
        )
        return fp8_product.multiply(spec, name, a, b, offsets, dtype, problem.M if name == "wgrad" else None)


class _Adaln(Tunable):
    """bwd is measured with the forward."""

    planner, problem, shape, unit = ADALN, adaln.Problem, ("T", "D", "B"), "gbps"
    values = {"gated": ((False, True), (False, True))}  # noqa: RUF012

    def splits(self, problem):
        """Lengths of sequences that differ by up to a factor of seven."""
        shares = 0.25 + 1.5 * np.random.default_rng(0).permutation(problem.B) / max(problem.B - 1, 1)
        return [_split(problem.T, shares)]

    def tensors(self, problem):
        """x (with a gate: residual and h) and the cotangents of the results; (gate,) scale and shift."""
        p, gated = problem, problem.gated
        arrays = [_random(seed, (p.T, p.D), p.dtype) for seed in range(4 if gated else 2)]
        return arrays, [_random(4 + seed, (p.B, p.D), p.dtype) for seed in range(3 if gated else 2)]

    def operands(self, name, problem, tensors, offsets):
        return *tensors, offsets

    def run(self, name, problem, plan, arrays, modulation, offsets):
        op: Callable = adaln.gated_residual_adaln if problem.gated else adaln.adaln
        inputs, cotangents = (arrays[:2], tuple(arrays[2:])) if problem.gated else (arrays[:1], arrays[1])

        def forward(*inputs):
            return op(*inputs, offsets, per="sequence", plan=plan)

        if name == "fwd":
            return forward(*inputs, *modulation)
        out, vjp = jax.vjp(forward, *inputs, *modulation)
        return out, vjp(cotangents)

    def work(self, name, problem, *operands):
        arrays = {"fwd": 2, "bwd": 5}[name] * (2 if problem.gated else 1)
        return problem.T * problem.D * jnp.dtype(problem.dtype).itemsize * arrays


class _Quantize(Tunable):
    """A whole call is measured, whichever pass is tuned."""

    planner, problem, shape, unit = QUANTIZE, quantize.Problem, ("M", "K"), "gbps"
    values = {"scaling": (SCALINGS, SCALINGS), "layouts": (LAYOUTS, LAYOUTS)}  # noqa: RUF012

    def passes(self, problem):
        return ("amax", "cast") if problem.looks_first else ("cast",)

    def tensors(self, problem):
        return _random(0, (problem.M, problem.K), problem.dtype)

    def operands(self, name, problem, tensors, offsets):
        return (tensors,)

    def run(self, name, problem, plan, x):
        q = quantize.quantize(x, scaling=problem.scaling, layouts=problem.layouts, plan=plan)
        return [jnp.atleast_1d(leaf) for leaf in jax.tree.leaves(q)]

    def work(self, name, problem, x):
        return x.size * (x.dtype.itemsize + (2 if problem.layouts == "both" else 1))


class _GroupedGlu(Tunable):
    """The gated unit and its gradients alone: the products have rows of grouped_matmul."""

    planner, problem, shape, unit, values = GROUPED_GLU, grouped_glu.Problem, ("G", "M", "K", "F"), "gbps", {}

    def splits(self, problem):
        return [np.array([problem.M])]

    def tensors(self, problem):
        """The pre-activations (gate and up, or both in one array) and the cotangent of h."""
        p, columns = problem, [problem.F] * 2 if not problem.joined else [2 * problem.F]
        pre = tuple(_random(seed, (p.M, N), p.dtype) for seed, N in enumerate(columns))
        return pre, _random(2, (p.M, p.F), p.dtype)

    def operands(self, name, problem, tensors, offsets):
        pre, dh = tensors
        return (pre, offsets) if name == "fwd" else (pre, dh, offsets)

    def run(self, name, problem, plan, *operands):
        dtype = jnp.dtype(problem.dtype)
        plan = grouped_glu.make_plan(problem, current_device(), plan=plan)
        spec = UnitSpec(plan, "silu", True, None, dtype, dtype, dtype, dtype)
        return (unit_forward if name == "fwd" else unit_backward)(spec, *operands)

    def work(self, name, problem, *operands):
        return problem.M * problem.F * jnp.dtype(problem.dtype).itemsize * {"fwd": 3, "bwd": 5}[name]


class _PackedAttention(Tunable):
    """Sixteen sequences of up to seven times the shortest; mask "rows" is causal by visible_until. dq and dkv are
    measured with the forward.

    The first rows of a sequence see few keys, so their gradients are many times the RMS of all, and an element of them
    that is nearly zero has the error of large terms: 0.077 at most of 67 million (H200, 2026-11-24; RMS 0.003).
    """

    planner, problem, unit = PACKED_ATTENTION, packed_attention.Problem, "tflops"
    shape = ("T", "S", "heads", "kv_heads", "head_dim")
    largest_error = 0.25
    values = {"mask": (("whole", "causal", "rows"), ("whole", "causal", "rows"))}  # noqa: RUF012

    def splits(self, problem):
        return [_split(problem.T, 0.25 + 1.5 * np.random.default_rng(0).permutation(16) / 15)]

    def tensors(self, problem):
        """q, k, v and the cotangent of the result."""
        p = problem
        heads = (p.T, p.heads), (p.S, p.kv_heads), (p.S, p.kv_heads), (p.T, p.heads)
        return [_random(seed, (*shape, p.head_dim), p.dtype) for seed, shape in enumerate(heads)]

    def operands(self, name, problem, tensors, offsets):
        return *tensors, offsets

    def run(self, name, problem, plan, q, k, v, dout, offsets):
        how: dict[str, Any] = {"causal": problem.mask == "causal", "plan": plan}
        in_keys = lambda rows: (rows.astype(jnp.float32) * (problem.S / problem.T)).astype(jnp.int32)
        if problem.cross or problem.S != problem.T:
            how["kv_offsets"] = in_keys(offsets)
        if problem.mask == "rows":
            how["visible_until"] = in_keys(jnp.arange(1, problem.T + 1))

        def forward(q, k, v):
            return packed_attention.packed_attention(q, k, v, offsets, **how)

        if name == "fwd":
            return forward(q, k, v)
        out, vjp = jax.vjp(forward, q, k, v)
        return out, vjp(dout)

    def work(self, name, problem, q, k, v, dout, offsets):
        """Of two products forward and seven with a backward."""
        pairs = float(np.sum(np.diff(np.asarray(offsets)).astype(np.float64) ** 2)) * problem.S / max(problem.T, 1)
        half = 1 if problem.mask == "whole" else 2
        return (2 if name == "fwd" else 7) * 2 * problem.heads * problem.head_dim * pairs / half


class _CachedAttention(Tunable):
    """The last tokens that fit into the caches, one after another as in decoding: the caches are copied once."""

    planner, problem, unit, values = CACHED_ATTENTION, cached_attention.Problem, "gbps", {}
    shape = ("B", "heads", "kv_heads", "S", "head_dim")
    tokens = 16

    def tensors(self, problem):
        """Queries, keys and values, and the caches."""
        p = problem
        cache = p.B, p.kv_heads, p.S, p.head_dim
        shapes = ((p.B, p.heads + 2 * p.kv_heads, p.head_dim), cache, cache)
        return [_random(seed, shape, p.dtype) for seed, shape in enumerate(shapes)]

    def operands(self, name, problem, tensors, offsets):
        return tensors

    def run(self, name, problem, plan, qkv, k_cache, v_cache):
        def step(caches, at):
            k_cache, v_cache = caches
            found = cached_attention.cached_attention(qkv, k_cache, v_cache, jnp.full(problem.B, at), plan=plan)
            return found[1:], found[0]

        at = jnp.arange(max(0, problem.S - self.tokens), problem.S, dtype=jnp.int32)
        return jax.lax.scan(step, (k_cache, v_cache), at)[1]

    def work(self, name, problem, qkv, k_cache, v_cache):
        return min(self.tokens, problem.S) * 2 * k_cache.nbytes


class _Permute(Tunable):
    planner, problem, shape, unit, values = PERMUTE, permute.Problem, ("T", "D", "k"), "gbps", {}

    def tensors(self, problem):
        """x, the rows of the choices, and a routing of random logits."""
        p = problem
        logits = _random(2, (p.T, max(8, 4 * p.k)), "float32")
        return _random(0, (p.T, p.D), p.dtype), _random(1, (p.T * p.k, p.D), p.dtype), route.route(logits, p.k)

    def operands(self, name, problem, tensors, offsets):
        x, rows, routing = tensors
        return {"permute": (x, routing), "combine": (rows, routing), "combine_bwd": (rows, routing, x)}[name]

    def run(self, name, problem, plan, rows, routing, *dout):
        if name == "permute":
            return permute.permute(rows, routing, plan=plan)
        if name == "combine":
            return permute.combine(rows, routing, plan=plan)

        def combine(rows, weights):
            return permute.combine(rows, dataclasses.replace(routing, weights=weights), plan=plan)

        return jax.vjp(combine, rows, routing.weights)[1](*dout)  # XLA drops the forward

    def work(self, name, problem, *operands):
        rows = {"permute": 1 + problem.k, "combine": 1 + problem.k, "combine_bwd": 1 + 2 * problem.k}[name]
        return problem.T * problem.D * jnp.dtype(problem.dtype).itemsize * rows


class _Route(Tunable):
    """bwd is measured with the forward. Logits are float32; a token has up to 8 choices."""

    planner, problem, shape, unit, values = ROUTE, route.Problem, ("T", "E"), "gbps", {}

    def tensors(self, problem):
        """Logits whose scores differ by more than rounding: each backend makes the same choices."""
        steps = jnp.broadcast_to(jnp.arange(problem.E) * (8 / problem.E), (problem.T, problem.E))
        return jax.random.permutation(jax.random.key(0), steps.astype(jnp.float32), axis=1, independent=True)

    def operands(self, name, problem, tensors, offsets):
        return (tensors,)

    def run(self, name, problem, plan, logits):
        def forward(logits):
            return route.route(logits, min(8, problem.E), plan=plan)

        if name == "fwd":
            return [jnp.atleast_1d(leaf) for leaf in jax.tree.leaves(forward(logits))]

        def floats(logits):
            routing = forward(logits)
            return routing.weights, routing.aux_loss, routing.z_loss

        out, vjp = jax.vjp(floats, logits)
        cotangents = jax.random.normal(jax.random.key(1), out[0].shape), jnp.float32(1), jnp.float32(1)
        return vjp(cotangents)

    def work(self, name, problem, *operands):
        return problem.T * problem.E * 4 * {"fwd": 1, "bwd": 3}[name]


OPS: dict[str, Tunable] = {
    "grouped_matmul": _GroupedMatmul(),
    "adaln": _Adaln(),
    "quantize": _Quantize(),
    "fp8_matmul": _Fp8Matmul(),
    "grouped_glu": _GroupedGlu(),
    "packed_attention": _PackedAttention(),
    "cached_attention": _CachedAttention(),
    "permute": _Permute(),
    "route": _Route(),
}
