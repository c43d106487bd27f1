"""Ops with numpy arrays and without jit, layers under jit: results, all gradients, values outside, recompilation."""

import contextlib
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from tests.contracts.entry import Op
from tests.contracts.run import EVERYTHING, bits, cases, check, cotangents_of, run, small, spoiled, wanted


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """What XLA compiles inside, or loads from the cache on disk."""
    found = []

    def listener(event: str, seconds: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


def check_outside(op: Op, arguments, results, gradients, spoilt) -> None:
    """Values outside change no bit; results and gradients outside are zero, unless the op passes them through."""
    of_arguments, of_results = op.outside(arguments) if op.outside else ({}, [])
    of_results = [*of_results, *[None] * (len(jax.tree.leaves(results)) - len(of_results))]
    leaves = list(zip(jax.tree.leaves(results), jax.tree.leaves(spoilt[0]), of_results, strict=True))
    for argument in op.wrt:
        of_leaves = [of_arguments.get(argument)] * len(jax.tree.leaves(gradients[argument]))
        leaves += zip(
            jax.tree.leaves(gradients[argument]), jax.tree.leaves(spoilt[1][argument]), of_leaves, strict=True
        )
    for clean, got, mask in leaves:
        inside = np.broadcast_to(True if mask is None else ~mask, clean.shape)
        np.testing.assert_array_equal(bits(got)[inside], bits(clean)[inside])
        assert op.passes or not got[~inside].any()
    assert not op.outside or any(np.any(mask) for mask in [*of_arguments.values(), *of_results] if mask is not None), (
        "nothing is outside"
    )


@pytest.mark.parametrize(("name", "way"), cases())
def test_results_and_gradients(name, way):
    """As the reference, the same bits twice, with NaN in all that must not be read; new values compile nothing."""
    op = EVERYTHING[name]
    arguments, cotangents = small(op), cotangents_of(op)
    results, gradients = run(op, way, arguments, cotangents)
    assert all(x.dtype.itemsize <= 4 for x in jax.tree.leaves((results, gradients)))
    check(op, way, (results, gradients), wanted(op, arguments, cotangents))
    with compilations() as compiled:
        again = run(op, way, arguments, cotangents)
        run(op, way, small(op, 1), cotangents_of(op, 1))
        spoilt = run(op, way, *spoiled(op, arguments, cotangents))
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves((results, gradients)), strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))
    check_outside(op, arguments, results, gradients, spoilt)
    assert not compiled, f"calls after the first one compile {len(compiled)} programs"


@pytest.mark.parametrize(
    ("name", "way"), cases(("xla", "gpu", "triton"), where=lambda op, way: bool(op.wrt) and not op.sharded)
)
def test_a_second_call_without_gradient_compiles_nothing(name, way):
    op = EVERYTHING[name]
    arguments = small(op)
    jax.block_until_ready(op.call(arguments, **op.ways[way]))
    with compilations() as compiled:
        jax.block_until_ready(op.call(arguments, **op.ways[way]))
    assert not compiled, f"it compiles {len(compiled)} programs"
