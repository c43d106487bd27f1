"""The cases of bench_before: calls of public functions that both packages accept (operands by position).

A call gets the package and the backend, then its operands.
"""

import dataclasses
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, shapes
from benchmarks.ops import quantized_bytes
from benchmarks.shapes import DenseShape, GroupedShape, MatrixShape, PackedShape
from benchmarks.shapes import moe as shapes_moe
from benchmarks.shapes.modality import MODALITIES, ModalityShape
from benchmarks.shapes.moe import MoeShape

DTYPE = jnp.bfloat16
DISTS = ("balanced", "skewed")
RECIPES = ("tensorwise", "rowwise", "blockwise")
SCALINGS = ("tensorwise", "rowwise", "block_1x128", "block_128x128")
Make = Callable[[], tuple]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row.

    Attributes:
      shape: of benchmarks/shapes. Cases of one shape share what `inputs` makes.
      work, rate: operations ("tflops") or bytes ("gbps") in the time.
      call: (package, backend, *operands) -> results.
      operands: (package, inputs) -> what call gets; by default the inputs.
      more: of the program, beside op, shape, pass and facts; other cases differ in data only.
    """

    op: str
    pass_name: str
    shape: Any
    dist: str = ""
    work: float
    rate: str = "tflops"
    call: Callable[..., Any]
    inputs: Make
    operands: Callable[[ModuleType, tuple], tuple] = lambda package, inputs: inputs
    facts: dict[str, str] = dataclasses.field(default_factory=dict)
    more: str = ""

    @property
    def row(self) -> dict:
        return harness.case_of(self.op, self.pass_name, self.shape, DTYPE, self.dist) | self.facts

    @property
    def label(self) -> str:
        return harness.label_of(self.row)

    @property
    def program(self) -> str:
        return " ".join((self.op, self.shape.name, *self.facts.values(), self.pass_name, self.more))


def with_backward(function: Callable, dout: Any, *operands: Any) -> tuple:
    """Results and gradients, so that XLA drops neither pass."""
    out, vjp = jax.vjp(function, *operands)
    return out, vjp(dout)


def gradient(function: Callable, operand: Any, dout: Any) -> tuple:
    """XLA drops the forward."""
    return jax.vjp(function, operand)[1](dout)


def normals(*sizes: tuple[int, ...], dtype=DTYPE) -> tuple[jax.Array, ...]:
    return tuple(harness.normal(seed, size, dtype) for seed, size in enumerate(sizes))


def product_inputs(s: GroupedShape) -> Make:
    """lhs, rhs, dout."""
    return lambda: normals((s.M, s.K), (s.G, s.K, s.N), (s.M, s.N))


def ragged(s: GroupedShape, dist: str) -> Callable[[ModuleType, tuple], tuple]:
    """The inputs and the offsets."""
    offsets = shapes.group_offsets(shapes.group_sizes(dist, s.G, s.M))
    return lambda package, inputs: (*inputs, jnp.asarray(offsets))


def grouped_cases(op: str, every: list[GroupedShape]) -> Iterator[Case]:
    calls: dict[str, Callable] = {
        "fwd": lambda p, b, lhs, rhs, dout, o: p.grouped_matmul(lhs, rhs, o, backend=b),
        "dgrad": lambda p, b, lhs, rhs, dout, o: p.grouped_matmul(dout, rhs, o, transpose_rhs=True, backend=b),
        "wgrad": lambda p, b, lhs, rhs, dout, o: p.grouped_wgrad(lhs, dout, o, backend=b),
    }
    for s in every:
        for name in ("wgrad",) if op == "grouped_wgrad" else ("fwd", "dgrad"):
            for dist in DISTS:
                how: dict[str, Any] = {"call": calls[name], "inputs": product_inputs(s), "operands": ragged(s, dist)}
                yield Case(op=op, pass_name=name, shape=s, dist=dist, work=s.flops, **how)


def glu_cases(every: list[GroupedShape]) -> Iterator[Case]:
    def fwd(p, b, x, gate, up, dout, o):
        return p.grouped_glu(x, gate, up, o, backend=b)

    def both(p, b, x, gate, up, dout, o):
        return with_backward(lambda *args: p.grouped_glu(*args, o, backend=b), dout, x, gate, up)

    for s in every:
        inputs = lambda s=s: normals((s.M, s.K), (s.G, s.K, s.N), (s.G, s.K, s.N), (s.M, s.N))
        for name, call, products in (("fwd", fwd, 2), ("fwd+bwd", both, 6)):
            for dist in DISTS:
                how: dict[str, Any] = {
                    "call": call,
                    "inputs": inputs,
                    "operands": ragged(s, dist),
                    "work": products * s.flops,
                }
                yield Case(op="grouped_glu", pass_name=name, shape=s, dist=dist, **how)


def moe_cases(every: list[MoeShape]) -> Iterator[Case]:
    for s in every:

        def layer(p, b, preferred, tokens, router, *experts, s=s):
            routing = p.route(tokens.astype(jnp.float32) @ router + preferred, s.k, backend=b)
            return p.moe_mlp(tokens, *experts, routing, backend=b)

        def fwd(p, b, dout, preferred, *given, layer=layer):
            return layer(p, b, preferred, *given)

        def both(p, b, dout, preferred, *given, layer=layer):
            return with_backward(lambda *args: layer(p, b, preferred, *args), dout, *given)

        def inputs(s=s):
            rows, up = (s.T, s.D), (s.E, s.D, s.F)
            dout, tokens, router, *experts = normals(rows, rows, (s.D, s.E), up, up, (s.E, s.F, s.D))
            router = router.astype(jnp.float32) * s.D**-0.5
            return dout, tokens, router, *(w * jnp.asarray(w.shape[1] ** -0.5, DTYPE) for w in experts)

        for dist in DISTS:
            preferred = shapes_moe.preferences(dist, s)

            def operands(package, inputs, preferred=preferred):
                return inputs[0], jnp.asarray(preferred), *inputs[1:]

            for name, call in (("fwd", fwd), ("fwd+bwd", both)):
                how: dict[str, Any] = {"call": call, "inputs": inputs, "operands": operands, "work": s.flops(name)}
                yield Case(op="moe", pass_name=name, shape=s, dist=dist, **how)


def fp8_cases(every: list[DenseShape]) -> Iterator[Case]:
    for s in every:
        inputs = lambda s=s: normals((s.M, s.K), (s.K, s.N), (s.M, s.N))
        for recipe in RECIPES:

            def fwd(p, b, lhs, rhs, dout, recipe=recipe):
                return p.fp8_matmul(lhs, rhs, recipe=recipe, backend=b)

            def both(p, b, lhs, rhs, dout, recipe=recipe):
                return with_backward(lambda *args: p.fp8_matmul(*args, recipe=recipe, backend=b), dout, lhs, rhs)

            for name, call, products in (("fwd", fwd, 1), ("fwd+bwd", both, 3)):
                how: dict[str, Any] = {
                    "call": call,
                    "inputs": inputs,
                    "work": products * s.flops,
                    "facts": {"recipe": recipe},
                }
                yield Case(op="fp8_matmul", pass_name=name, shape=s, **how)


def fp8_grouped_cases(every: list[GroupedShape]) -> Iterator[Case]:
    """Blockwise, the weights quantised before and every cast of activations and gradients counted."""

    def product(p, b, o, lhs, rhs, q=None):
        return p.fp8_grouped_matmul(lhs, rhs, o, recipe="blockwise", rhs_quantized=q, backend=b)

    calls: dict[str, tuple[Callable, int]] = {
        "fwd": (lambda p, b, lhs, rhs, dout, q, o: product(p, b, o, lhs, q), 1),
        "dgrad": (lambda p, b, lhs, rhs, dout, q, o: gradient(lambda lhs: product(p, b, o, lhs, q), lhs, dout), 1),
        "fwd+bwd": (
            lambda p, b, lhs, rhs, dout, q, o: with_backward(lambda x, w: product(p, b, o, x, w, q), dout, lhs, rhs),
            3,
        ),
    }
    for s in every:
        for name, (call, products) in calls.items():
            for dist in DISTS:
                with_offsets = ragged(s, dist)

                def operands(package, inputs, with_offsets=with_offsets):
                    q = package.quantize(inputs[1], scaling="block_128x128", layouts="both")
                    return with_offsets(package, (*inputs, q))

                how: dict[str, Any] = {
                    "call": call,
                    "inputs": product_inputs(s),
                    "operands": operands,
                    "work": products * s.flops,
                }
                facts = {"recipe": "blockwise"}
                yield Case(op="fp8_grouped_matmul", pass_name=name, shape=s, dist=dist, facts=facts, **how)


def quantize_cases(every: list[MatrixShape]) -> Iterator[Case]:
    for s in every:
        inputs = lambda s=s: normals((s.M, s.K))
        for scaling in SCALINGS:
            for layouts in ("row", "both"):

                def call(p, b, x, scaling=scaling, layouts=layouts):
                    q = p.quantize(x, scaling=scaling, layouts=layouts, backend=b)
                    return q.values, q.scales, q.values_t, q.scales_t

                moved = quantized_bytes.moved_bytes(scaling, s.M, s.K, layouts)
                how: dict[str, Any] = {
                    "call": call,
                    "inputs": inputs,
                    "facts": {"scaling": scaling, "layouts": layouts},
                }
                yield Case(op="quantize", pass_name="fwd", shape=s, work=moved, rate="gbps", **how)


def adaln_cases(op: str, every: list[PackedShape]) -> Iterator[Case]:
    rows = {"adaln": 1, "gated_residual_adaln": 2}[op]  # operands with a row for each token, and results

    def fwd(p, b, douts, operands, o):
        return getattr(p, op)(*operands, o, backend=b)

    def both(p, b, douts, operands, o):
        return with_backward(lambda *args: fwd(p, b, douts, args, o), douts if rows == 2 else douts[0], *operands)

    for named in every:
        for dist in named.dists:
            s = named.of_dist(dist)
            offsets = shapes.group_offsets(shapes.sequence_lengths(dist, named.B, named.T))
            inputs = lambda s=s: normals(*[(s.T, s.D)] * (2 * rows))

            def operands(package, inputs, s=s, offsets=offsets):
                vectors = tuple(harness.normal(10 + i, (s.B, s.D), DTYPE) for i in range(rows + 1))
                return inputs[:rows], (*inputs[rows:], *vectors), jnp.asarray(offsets)

            for name, call in (("fwd", fwd), ("fwd+bwd", both)):
                how: dict[str, Any] = {
                    "call": call,
                    "inputs": inputs,
                    "operands": operands,
                    "work": s.moved_bytes(op, name),
                }
                yield Case(op=op, pass_name=name, shape=s, dist=dist, rate="gbps", more=str(s.B), **how)


def modality_cases(every: list[ModalityShape]) -> Iterator[Case]:
    def product(p, b, lhs, rhs, o):
        return p.modality_grouped_matmul(lhs, rhs, o, backend=b)

    calls: dict[str, Callable] = {
        "fwd": lambda p, b, lhs, dout, rhs, o: product(p, b, lhs, rhs, o),
        "dgrad": lambda p, b, lhs, dout, rhs, o: gradient(lambda lhs: product(p, b, lhs, rhs, o), lhs, dout),
        "wgrad": lambda p, b, lhs, dout, rhs, o: gradient(lambda rhs: product(p, b, lhs, rhs, o), rhs, dout),
    }
    for s in every:

        def inputs(s=s):
            M, K, N = (s.dims[name] for name in "MKN")
            lhs, dout, *rhs = normals((M, K), (M, N), *((part.G, part.K, part.N) for part in s.parts))
            return lhs, dout, tuple(rhs)

        for name, call in calls.items():
            for dist in DISTS:
                offsets = shapes.group_offsets(s.sizes(dist))
                operands = lambda package, inputs, offsets=offsets: (*inputs, jnp.asarray(offsets))
                how: dict[str, Any] = {"call": call, "inputs": inputs, "operands": operands, "work": s.flops}
                yield Case(op="modality_grouped_matmul", pass_name=name, shape=s, dist=dist, **how)


_TINY = [GroupedShape("smoke", 4, 384, 256, 128)]
_TINY_MODALITY = [ModalityShape("smoke", (GroupedShape("a", 2, 40, 32, 48), GroupedShape("b", 3, 24, 48, 16)))]
_UP = [shapes.GROUPED[name] for name in ("mixtral_up", "dsmoe16b", "qwen3_30b", "dsv3", "dsv3_small")]
# op -> (its cases of a list of shapes, the named shapes, tiny ones)
OPS: dict[str, tuple[Callable[[list], Iterator[Case]], list, list]] = {
    "grouped_matmul": (lambda every: grouped_cases("grouped_matmul", every), [*shapes.GROUPED.values()], _TINY),
    "grouped_wgrad": (lambda every: grouped_cases("grouped_wgrad", every), [*shapes.GROUPED.values()], _TINY),
    "grouped_glu": (glu_cases, _UP, _TINY),
    "moe": (moe_cases, [*shapes_moe.MOES.values()], [MoeShape("smoke", 24, 4, 2, 16, 32)]),
    "modality_grouped_matmul": (modality_cases, [*MODALITIES.values()], _TINY_MODALITY),
    "fp8_matmul": (fp8_cases, [*shapes.DENSE.values()], [DenseShape(128, 256, 128)]),
    "fp8_grouped_matmul": (fp8_grouped_cases, [*shapes.GROUPED.values()], _TINY),
    "quantize": (quantize_cases, [*shapes.MATRICES.values()], [MatrixShape(256, 128)]),
    **{
        op: (
            lambda every, op=op: adaln_cases(op, every),
            [*shapes.PACKED.values()],
            [PackedShape("smoke", 96, 64, 5, ("unequal", "many"))],
        )
        for op in shapes.PACKED_OPS
    },
}


def cases_of(op: str, smoke: bool) -> list[Case]:
    make, named, tiny = OPS[op]
    return list(make(tiny if smoke else named))


def geometric_mean(ratios: list[float]) -> float:
    return float(np.exp(np.mean(np.log(ratios))))
