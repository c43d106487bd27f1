"""Programs whose memory can be counted by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxops import offload
from jaxops.offload.reports import needed_bytes
from jaxops.profiling import memory, trace
from jaxops.profiling.memory import _numbers

pytestmark = pytest.mark.versions

ONE = 64 * 64 * 4  # bytes of a matrix
LAYERS, ROWS, WIDTH, HIDDEN = 5, 256, 32, 128


def three_sorts(x, y, z):
    """XLA fuses no sort, so three matrices are there at once."""
    with jax.named_scope("model"), jax.named_scope("mlp"):
        return jnp.sum(jnp.sort(x, 0) * jnp.sort(y, 0) * jnp.sort(z, 0))


def matrices(count):
    return [jnp.ones((64, 64)) for _ in range(count)]


def test_three_matrices_at_once():
    compiled = jax.jit(three_sorts).lower(*matrices(3)).compile()
    peak = memory(compiled)
    assert (peak.argument_bytes, peak.output_bytes, peak.host_bytes) == (3 * ONE, 4, 0)
    assert abs(peak.unexplained_bytes) < 0.01 * peak.peak_bytes
    assert peak.by_scope()["model/mlp/sort"] == peak.by_scope(2)["model/mlp"] - 4 == 3 * ONE
    assert list(peak.by_scope().values()) == sorted(peak.by_scope().values(), reverse=True)
    arguments = [each for each in peak.holders if each.kind == "argument"]
    assert sorted(each.scope for each in arguments) == ["x", "y", "z"]
    assert all((each.shape, each.bytes, each.stage) == ("f32[64,64]", ONE, None) for each in arguments)
    assert (peak.peak_bytes, peak.host_bytes) == needed_bytes(compiled)
    assert offload.report(compiled).device_bytes == peak.peak_bytes
    assert "3 x f32[64,64]" in str(peak)


def test_a_donated_argument_counts_once():
    step = lambda x, y: x + y
    kept = memory(jax.jit(step), *matrices(2))
    donated = memory(jax.jit(step, donate_argnums=0), *matrices(2))
    assert (kept.peak_bytes, donated.peak_bytes) == (3 * ONE, 2 * ONE)
    assert sorted(each.kind for each in kept.holders) == ["argument", "argument", "output"]
    assert [each.kind for each in donated.holders] == ["argument", "argument"]
    assert kept.unexplained_bytes == donated.unexplained_bytes == 0


@pytest.mark.parametrize("kept", [(), ("gate",), ("gate", "up")])
def test_stacks_of_kept_residuals_are_largest(kept):
    """A gradient through a scan, where no compiler removes a recomputation. They lie in a loop's tuple."""

    def layer(x, w):
        gate = checkpoint_name(x @ w["gate"], "gate")
        up = checkpoint_name(x @ w["up"], "up")
        return x + (jnp.tanh(gate) * up) @ w["down"], None

    policy = jax.checkpoint_policies.save_only_these_names(*kept)
    step = jax.grad(lambda w, x: jnp.sum(jax.lax.scan(jax.checkpoint(layer, policy=policy), x, w)[0] ** 2))
    shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    weights = {name: jax.ShapeDtypeStruct((LAYERS, *shape), jnp.float32) for name, shape in shapes.items()}
    peak = memory(jax.jit(step), weights, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32))
    stacks = [each for each in peak.holders if each.shape == f"f32[{LAYERS},{ROWS},{HIDDEN}]"]
    assert len(stacks) == len(kept)
    assert all(each.kind == "temporary" for each in stacks)
    assert abs(peak.unexplained_bytes) < 0.01 * peak.peak_bytes


def test_an_index_above_127_takes_two_bytes():
    """In XLA's record, of results of loops with so many arrays."""
    assert _numbers(b"\x05\x96\x01") == [5, 150]


def test_a_long_table_ends_with_sums():
    peak = memory(jax.jit(lambda x: [(i + x) * jnp.ones(150 + i) for i in range(150)]), jnp.ones(()))
    shapes = [each.shape for each in peak.holders if each.kind == "output" and each.bytes > 4 * 100]
    assert shapes == [f"f32[{150 + i}]" for i in reversed(range(150))]
    lines = str(peak).splitlines()
    assert any("others" in line for line in lines)
    assert len(lines) < 30
    assert max(map(len, lines)) <= 130


def test_programs_of_one_name_are_told_apart():
    step = [jax.jit(three_sorts).lower(*(jnp.ones((64, width)) for _ in range(3))).compile() for width in (64, 32)]
    assert [each.kind for width in step for each in memory(width).holders].count("temporary") == 6
    assert {each.shape for each in memory(step[1]).holders} == {"f32[64,32]", "f32[]"}


def test_without_a_record_the_sizes_are_known():
    with trace.recorded():  # no other profile can be recorded, where XLA would write it
        peak = memory(jax.jit(three_sorts), *matrices(3))
    assert (peak.holders, peak.argument_bytes) == ((), 3 * ONE)
    assert "hands out no record" in str(peak)


def test_bad_arguments():
    compiled = jax.jit(three_sorts).lower(*matrices(3)).compile()
    with pytest.raises(TypeError, match="a compiled program alone"):
        memory(compiled, 1)
    with pytest.raises(TypeError, match=r"a function from jax\.jit or a compiled program, not function"):
        memory(three_sorts, *matrices(3))
