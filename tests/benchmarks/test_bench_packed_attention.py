"""The ways to attend within packed sequences that run on a CPU, the check before timing, and the rows."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import bench_packed_attention, checks, harness, peers_attention, shapes
from benchmarks.bench_packed_attention import SMOKE
from benchmarks.packing import Sequences, to_blocks, to_packed
from tests.command_line import run


def test_blocks_and_back_are_each_others_transpose():
    sequences = Sequences.of(np.array([0, 3, 3, 8], np.int32))
    packed = harness.normal(0, (8, 2, 4), jnp.float32)
    blocks = to_blocks(packed, sequences)
    assert blocks.shape == (3, 128, 2, 4)
    np.testing.assert_array_equal(to_packed(blocks, sequences), packed)
    np.testing.assert_array_equal(blocks[2, :5], packed[3:])
    assert float(jnp.sum(jnp.abs(blocks))) == pytest.approx(float(jnp.sum(jnp.abs(packed))))
    grad = harness.normal(1, blocks.shape, jnp.float32)
    back = jax.jit(lambda packed, grad: jax.vjp(lambda packed: to_blocks(packed, sequences), packed)[1](grad)[0])(
        packed, grad
    )
    assert float(jnp.vdot(grad, blocks)) == pytest.approx(float(jnp.vdot(back, packed)), rel=1e-4)
    forth = jax.jit(lambda blocks, grad: jax.vjp(lambda blocks: to_packed(blocks, sequences), blocks)[1](grad)[0])(
        blocks, packed
    )
    np.testing.assert_array_equal(forth, blocks)


def test_the_check_sees_a_row_that_attends_to_a_neighbour():
    offsets = shapes.group_offsets(shapes.sequence_lengths("unequal", SMOKE.B, SMOKE.T))
    qkv_dout = [harness.normal(seed, (SMOKE.T, SMOKE.N, SMOKE.H), jnp.bfloat16) for seed in range(4)]
    want = checks.attention_reference(*qkv_dout, Sequences.of(offsets))
    moved = offsets + np.array([0, 1, 0, 0, 0], np.int32)
    attend = jax.jit(peers_attention.fwd_bwd(peers_attention.SIDES["xla_mask"]))
    for sequences, right in (
        (Sequences.of(offsets), True),
        (Sequences.of(moved), False),
    ):  # the first sequence has taken a row of the second
        for name, result in attend(*qkv_dout, sequences).items():
            assert (
                checks.within_limits(*checks.attention_errors({name: result}, want), "bfloat16 attention") == right
            ), name
    assert not checks.within_limits(
        *checks.attention_errors({"out": want["out"].at[5].set(jnp.nan)}, want), "bfloat16 attention"
    )


def test_flops_are_those_of_the_pairs_within_sequences():
    lengths = np.array([3, 0, 5], np.int32)
    assert SMOKE.flops("fwd", lengths) == 4 * SMOKE.N * SMOKE.H * 34
    assert SMOKE.flops("fwd+bwd", lengths) == 14 * SMOKE.N * SMOKE.H * 34


def test_smoke_run_writes_a_row_for_each_way_that_works(tmp_path):
    result = run(
        bench_packed_attention.main,
        "--smoke",
        "--out",
        str(tmp_path),
        "--rounds",
        "1",
        "--passes",
        "fwd+bwd",
        "--ways",
        "xla_mask,xla_padded,cudnn_ragged",
    )
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "packed_attention.jsonl").read_text().splitlines()]
    assert [(row["pass"], row["backend"]) for row in rows] == [("fwd+bwd", "xla_mask"), ("fwd+bwd", "xla_padded")]
    assert "left out: cudnn_ragged at smoke unequal fwd+bwd: RuntimeError" in result.output
    for row in rows:
        assert set(harness.ROW_KEYS) <= set(row)
        assert row["shape"] == {"T": 128, "N": 2, "H": 16, "B": 4}
        assert row["tflops"] > 0
        assert 0 < row["max_err"] < 0.25


def test_without_a_gpu_nothing_lands_among_the_results():
    assert run(bench_packed_attention.main).exit_code == 2
