"""The checks before the clock pass what is right, of every side, and fail what is not."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import harness, shapes
from benchmarks.harness import checks
from benchmarks.harness.packing import Sequences
from benchmarks.layers import bench_moe
from benchmarks.ops import (
    bench_adaln,
    bench_fp8_matmul,
    bench_modality_grouped_matmul,
    bench_packed_attention,
    bench_permute,
    bench_quantize,
    bench_route,
)
from benchmarks.peers import adaln as peers_adaln
from benchmarks.peers import attention as peers_attention
from benchmarks.peers import fp8 as peers_fp8
from benchmarks.peers.jax_passes import jaxops_passes, vjp_passes
from benchmarks.shapes import DenseShape, GroupedShape
from benchmarks.shapes import moe as shapes_moe

SHAPE = GroupedShape("tiny", 3, 40, 16, 24)


def grouped_inputs() -> tuple[jax.Array, ...]:
    dims = [(SHAPE.M, SHAPE.K), (SHAPE.G, SHAPE.K, SHAPE.N), (SHAPE.M, SHAPE.N)]
    return tuple(harness.normal(seed, size, jnp.bfloat16) for seed, size in enumerate(dims))


@pytest.mark.parametrize("dist", shapes.DISTS)
@pytest.mark.parametrize("pass_name", shapes.PASSES)
def test_grouped(pass_name, dist):
    inputs, offsets = grouped_inputs(), shapes.group_offsets(shapes.group_sizes(dist, SHAPE.G, SHAPE.M))
    out = vjp_passes(jax.lax.ragged_dot)[pass_name](*inputs, jnp.asarray(offsets), jnp.asarray(np.diff(offsets)))
    errors = checks.grouped_errors(pass_name, SHAPE, out, inputs, offsets)
    assert errors[0] > 0
    assert checks.within_limits(*errors, "bfloat16")
    for wrong in (out * 1.05, out.at[...].set(jnp.nan)):
        assert not checks.within_limits(*checks.grouped_errors(pass_name, SHAPE, wrong, inputs, offsets), "bfloat16")
    with pytest.raises(ValueError, match=rf"{pass_name} returned \(40,\), it must be"):
        checks.grouped_errors(pass_name, SHAPE, jnp.zeros(40), inputs, offsets)


def test_an_empty_groups_gradient_must_be_zero():
    inputs, offsets = grouped_inputs(), shapes.group_offsets(shapes.group_sizes("one_group", SHAPE.G, SHAPE.M))
    out = jaxops_passes("xla")["wgrad"](*inputs, jnp.asarray(offsets), None)
    assert checks.grouped_errors("wgrad", SHAPE, out, inputs, offsets)[0] < 4e-2
    assert checks.grouped_errors("wgrad", SHAPE, out.at[0].set(1e-30), inputs, offsets)[0] == np.inf


@pytest.mark.parametrize(("op", "dist"), [("adaln", "unequal"), ("gated_residual_adaln", "third_empty")])
def test_adaln(op, dist):
    offsets, smoke = shapes.group_offsets(shapes.sequence_lengths(dist, 5, 96)), bench_adaln.SMOKE
    inputs, side = bench_adaln.case_inputs(op, bench_adaln.row_tensors(smoke), offsets), peers_adaln.jax_side(op, "xla")
    passes = lambda results: checks.within_limits(*checks.packed_errors(results, inputs, offsets), bench_adaln.LIMITS)
    results = jax.jit(side.fwd_bwd)(inputs)
    assert passes(results)
    row = shapes.sampled_packed_rows(offsets)[1][0]  # the first row of the shortest sequence
    for name, result in results.items():
        at = row if len(result) == smoke.T else int(np.argmax(np.diff(offsets)))
        assert not passes(results | {name: result.at[at].multiply(1.1)}), name
        assert not passes(results | {name: result.at[at, 3].set(jnp.nan)}), name
    # Rows that come from the neighbouring sequence's modulation.
    assert not passes(jax.jit(side.fwd_bwd)(inputs | {"sequence_ids": jnp.roll(inputs["sequence_ids"], 1)}))
    if dist == "third_empty":
        empty = int(np.flatnonzero(np.diff(offsets) == 0)[0])
        not_zero = results | {"dshift": results["dshift"].at[empty, 0].set(1e-30)}
        assert checks.packed_errors(not_zero, inputs, offsets)[0] == np.inf
    with pytest.raises(ValueError, match=r"dscale has shape \(4, 64\), it must be \(5, 64\)"):
        checks.packed_errors(results | {"dscale": results["dscale"][1:]}, inputs, offsets)
    # The backward alone has the same gradients.
    program = bench_adaln.Program.of(side, "bwd", inputs)
    gradients = program.compiled[0](*program.args(inputs))
    assert set(results) - set(gradients) == set(peers_adaln.OUTPUTS[op])
    for name, gradient in gradients.items():
        got, want = (np.asarray(x, np.float32) for x in (gradient, results[name]))
        np.testing.assert_allclose(got, want, atol=0.1, rtol=0.02)


def test_linear_sees_a_block_that_is_missing():
    x, w, dy = bench_fp8_matmul.Inputs.make(DenseShape(128, 256, 128)).args
    right = {form: jax.jit(peers_fp8.fp8_passes(form)["fwd"])(x, w, dy)["y"] for form in ("scaled", "direct")}
    passes = lambda limits, **results: checks.within_limits(*checks.linear_errors(results, x, w, dy), limits)
    for name, y in (right | {"bfloat16": x @ w}).items():
        assert passes("fp8", y=y)
        assert passes("bfloat16", y=y) == (name == "bfloat16")
    dw = x.T @ dy
    assert passes("bfloat16", y=x @ w, dw=dw)
    assert not passes("fp8", y=x[:, 128:] @ w[128:])
    assert not passes("fp8 e5m2", y=x @ w, dw=dw.at[0, 0].set(jnp.nan))


@pytest.mark.parametrize("scaling", ["rowwise", "block_128x128"])
def test_quantize(scaling):
    x = harness.normal(0, (256, 384), jnp.bfloat16)
    got = jax.jit(peers_fp8.quantize, static_argnums=(1, 2))(x, scaling, "both")
    assert checks.within_limits(*bench_quantize.peer_errors(scaling, got, x), "fp8 cast")
    wrong = got | {"values_t": got["values_t"].T.reshape(got["values_t"].shape)}
    assert not checks.within_limits(*bench_quantize.peer_errors(scaling, wrong, x), "fp8 cast")


def test_quantize_sees_one_other_bit():
    want = {"values": jnp.array([1.0, jnp.nan], jnp.float8_e4m3fn), "scales": jnp.array([1.0], jnp.float32)}
    bench_quantize.demand_same_bits(want, want)
    with pytest.raises(ArithmeticError, match=r"other bits than the xla backend's: \{'scales': 1\}"):
        bench_quantize.demand_same_bits(want | {"scales": jnp.nextafter(want["scales"], 2)}, want)
    with pytest.raises(ArithmeticError, match="values must be"):
        bench_quantize.demand_same_bits(want | {"values": want["values"][:1]}, want)


def all_wrong(parts: dict[Any, jax.Array]) -> Iterator[dict[Any, jax.Array]]:
    """Each part with a wrong number, rows that are the next ones, and a NaN."""
    for name, part in parts.items():
        rows = part.reshape(-1, part.shape[-1])
        for wrong in (rows.at[5, 1].add(9), jnp.roll(rows, 1, axis=0), rows.at[5, 0].set(jnp.nan)):
            yield parts | {name: wrong.reshape(part.shape)}


def test_modalities():
    """Every side computes the same."""
    bench = bench_modality_grouped_matmul
    inputs, offsets = bench.Inputs.make(bench.SMOKE), jnp.asarray(shapes.group_offsets(bench.SMOKE.sizes("skewed")))
    for pass_name in shapes.PASSES:
        want = bench.reference(bench.SMOKE, pass_name, inputs, offsets)
        for side in ("xla", bench.EACH, bench.PADDED):
            results = jax.jit(bench.program(side, pass_name, "xla"))(*inputs.args(side, offsets))
            results = bench.unpadded(results, bench.SMOKE) if side == bench.PADDED and pass_name == "wgrad" else results
            assert checks.within_limits(*checks.worst_errors(results, want), "bfloat16")
            for wrong in all_wrong(dict(enumerate(results))) if side == "xla" else ():
                assert not checks.within_limits(*checks.worst_errors(tuple(wrong.values()), want), "bfloat16")


def test_permute():
    inputs, routing = bench_permute.make_inputs(bench_permute.SMOKE), bench_permute.make_routing(bench_permute.SMOKE)
    for op in bench_permute.OPS:
        for pass_name in bench_permute.PASSES:
            parts = jax.jit(bench_permute.side(op, pass_name, "xla"))(inputs, routing)
            assert checks.worst_errors(parts, parts) == (0, 0)
            for wrong in all_wrong(parts):
                assert not checks.within_limits(*checks.worst_errors(wrong, parts), bench_permute.DTYPE)


def test_moe():
    smoke = bench_moe.SMOKE
    inputs = (jnp.asarray(shapes_moe.preferences("skewed", smoke)), *bench_moe.make_inputs(smoke))
    of = lambda side: jax.jit(bench_moe.program(side, smoke, "fwd+bwd"))(*inputs)
    want = of("xla")
    assert len(want) == 6  # y, and the gradients of tokens, router, gate, up, down
    for side in ("ragged_dot", "jaxops", "jaxops_unfused"):
        assert float(bench_moe.errors(of(side), want)[1]) < bench_moe.LIMIT
    for i, result in enumerate(want):
        for wrong in (result.at[1].multiply(1.5), result.at[1].set(jnp.nan)):
            assert not float(bench_moe.errors((*want[:i], wrong, *want[i + 1 :]), want)[1]) < bench_moe.LIMIT


@pytest.mark.parametrize("form", bench_moe.SIDES)
def test_moe_of_other_forms(form):
    smoke = dataclasses.replace(bench_moe.SMOKE, form=form)
    inputs = (jnp.asarray(shapes_moe.preferences("skewed", smoke)), *bench_moe.make_inputs(smoke))
    found = {}
    for side in bench_moe.SIDES[form]:
        joined = bench_moe.joins(side, smoke)
        results = jax.jit(bench_moe.program(side, smoke, "fwd+bwd"))(*(bench_moe.join(inputs) if joined else inputs))
        assert len(results) == len(inputs) - 1 - joined  # without preferences; y instead of dy
        found[side] = bench_moe.apart(results) if joined else results
        assert float(bench_moe.errors(found[side], found[bench_moe.OURS])[1]) < bench_moe.LIMIT
    with pytest.raises(ValueError, match=f"no layer of the form '{form}'"):
        bench_moe.layer_of("ragged_dot", smoke)


def test_route():
    smoke, bench = bench_route.SMOKE, bench_route
    of = lambda inputs: jax.jit(bench.side(smoke, "fwd+bwd", "xla"))(inputs)
    parts = of(bench.make_inputs(smoke))
    assert bench.errors(parts, parts) == (0, 0)
    for name in ("weights", "dlogits"):
        assert bench.errors(parts | {name: parts[name].at[5].multiply(1.1)}, parts)[0] > 1e-2
        assert not bench.errors(parts | {name: parts[name].at[5, 0].set(jnp.nan)}, parts)[0] < 1e-2
    for name in ("row_indices", "row_positions", "group_offsets", "load"):
        with pytest.raises(ArithmeticError, match="tokens, experts, load, order of the rows are right"):
            bench.errors(parts | {name: jnp.roll(parts[name], 1, axis=0)}, parts)
    others = of(bench.make_inputs(smoke) | {"selection_bias": jnp.arange(smoke.E, dtype=jnp.float32)})
    with pytest.raises(ArithmeticError, match=r"only 0\.\d+ of the tokens"):
        bench.errors(others, parts)


@functools.cache
def attention_operands() -> list[jax.Array]:
    return bench_packed_attention.make_inputs(bench_packed_attention.SMOKE)


@pytest.mark.parametrize("mask", shapes.ATTENTION_MASKS)
def test_attention_sees_a_row_that_attends_to_a_neighbour(mask, monkeypatch):
    monkeypatch.setattr(shapes, "_PART", 8)
    if mask in shapes.WINDOWS:
        monkeypatch.setitem(shapes.WINDOWS, mask, 20)
    offsets = shapes.group_offsets(shapes.sequence_lengths("unequal", 4, 128))
    sequences = Sequences.of(offsets, mask)
    want = checks.attention_reference(*attention_operands(), sequences)
    moved = Sequences.of(offsets + np.array([0, 1, 0, 0, 0], np.int32), mask)
    attend = jax.jit(peers_attention.fwd_bwd(peers_attention.SIDES["jaxops"]))
    for each, right in ((sequences, True), (moved, False)):  # the first sequence has taken a row of the second
        for name, x in attend(*attention_operands(), each).items():
            errors = checks.attention_errors({name: x}, want)
            assert checks.within_limits(*errors, bench_packed_attention.LIMITS) == right, (name, errors)
    nan = checks.attention_errors({"out": want["out"].at[5].set(jnp.nan)}, want)
    assert not checks.within_limits(*nan, bench_packed_attention.LIMITS)
