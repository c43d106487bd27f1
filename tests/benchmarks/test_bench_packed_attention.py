"""The ways to attend within packed sequences that run on a CPU, the check before timing, the rows, a fake torch."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import harness, shapes
from benchmarks.harness import checks
from benchmarks.harness.packing import Sequences, to_blocks, to_packed
from benchmarks.ops import bench_packed_attention
from benchmarks.ops.bench_packed_attention import SMOKE
from benchmarks.peers import attention as peers_attention
from tests.command_line import run

HEADS = (SMOKE.N, SMOKE.K, SMOKE.K, SMOKE.N)
OFFSETS = shapes.group_offsets(shapes.sequence_lengths("unequal", SMOKE.B, SMOKE.T))
FAKE_TORCH = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if asked["do"] == "time":
        answer = {"us": [10.0] * asked["iterations"]}
    elif asked["mask"] == "text_and_images":
        answer = {"error": "NotImplementedError: no such mask"}
    else:
        assert asked["sequences"] == 4 and asked["K"] == 2
        answer = {"us": 10.0, "recipe": "torch 0, flash_attn", "max_err": 0.01, "refusals": ["varlen: gone"]}
    print(json.dumps({"answer": answer}), flush=True)
"""


@pytest.fixture
def fake_torch(torch_answers):
    torch_answers(FAKE_TORCH)


@functools.cache
def operands() -> list[jax.Array]:
    return [harness.normal(seed, (SMOKE.T, n, SMOKE.H), jnp.bfloat16) for seed, n in enumerate(HEADS)]


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


def test_masks():
    """Of one sequence of text, an image, text, and the start of an image; and the pairs that count."""
    offsets = np.array([0, 2, 2, 2 + 3 * 256 + 5], np.int32)
    text, image = shapes.visible_until("causal", offsets), shapes.visible_until("text_and_images", offsets)
    np.testing.assert_array_equal(text, np.arange(len(text)) + 1)
    assert image[[0, 1, 2, 257, 258, 300, 513, 514, 769]].tolist() == [1, 2, 3, 258, 514, 514, 514, 515, 770]
    assert image[770:].tolist() == [775] * 5
    lengths = np.diff(offsets).astype(int)
    assert shapes.visible_pairs("whole", offsets) == sum(lengths**2)
    assert shapes.visible_pairs("causal", offsets) == sum(lengths * (lengths + 1) // 2)
    more = sum(range(256)) + sum(range(5))  # pairs within images above the diagonal
    assert shapes.visible_pairs("text_and_images", offsets) == sum(lengths * (lengths + 1) // 2) + more


@pytest.mark.parametrize("mask", shapes.ATTENTION_MASKS)
def test_the_check_sees_a_row_that_attends_to_a_neighbour(mask, monkeypatch):
    monkeypatch.setattr(shapes, "_PART", 8)
    sequences = Sequences.of(OFFSETS, mask)
    want = checks.attention_reference(*operands(), sequences)
    moved = Sequences.of(OFFSETS + np.array([0, 1, 0, 0, 0], np.int32), mask)
    attend = jax.jit(peers_attention.fwd_bwd(peers_attention.SIDES["jaxops"]))
    for each, right in ((sequences, True), (moved, False)):  # the first sequence has taken a row of the second
        for name, x in attend(*operands(), each).items():
            errors = checks.attention_errors({name: x}, want)
            assert checks.within_limits(*errors, "bfloat16 attention") == right, (name, errors)
    assert not checks.within_limits(
        *checks.attention_errors({"out": want["out"].at[5].set(jnp.nan)}, want), "bfloat16 attention"
    )


def test_flops_are_those_of_the_pairs_that_see_each_other():
    assert SMOKE.flops("fwd", 34) == 4 * SMOKE.N * SMOKE.H * 34
    assert SMOKE.flops("fwd+bwd", 34) == 14 * SMOKE.N * SMOKE.H * 34


def test_smoke_run_writes_a_row_for_each_way_that_works(tmp_path, fake_torch):
    """Every way is checked against the reference before it is timed. Images by the ways that no kernel has."""
    options = ["--smoke", "--out", str(tmp_path), "--rounds", "1", "--passes", "fwd+bwd", "--dists", "unequal"]
    ways = "xla_mask,xla_padded,pallas_mha_32,torch_flash"
    every = f"jaxops_pallas,jaxops_blocks,jaxops_cudnn,{ways}"
    causal = run(bench_packed_attention.main, *options, "--ways", every, "--masks", "causal")
    images = run(bench_packed_attention.main, *options, "--ways", ways, "--masks", "text_and_images")
    output = causal.output + images.output
    assert (causal.exit_code, images.exit_code) == (0, 0), output
    rows = [json.loads(line) for line in (tmp_path / "packed_attention.jsonl").read_text().splitlines()]
    found = {mask: [row["backend"] for row in rows if row["mask"] == mask] for mask in ("causal", "text_and_images")}
    own = ["jaxops", "jaxops_pallas", "jaxops_blocks", "xla_mask", "xla_padded"]
    assert found == {"text_and_images": [own[0], *own[3:]], "causal": [*own, "pallas_mha_32", "torch_flash"]}
    for what in ("jaxops_cudnn at smoke unequal causal", "pallas_mha_32 at smoke unequal text", "torch_flash at smoke"):
        assert f"left out: {what}" in output
    assert "torch_flash at smoke: refused: varlen: gone" in output
    for row in rows:
        assert set(harness.ROW_KEYS) <= set(row)
        assert row["shape"] == {"T": 128, "N": 4, "H": 16, "K": 2, "B": 4}
        assert row["tflops"] > 0
        assert 0 < row["max_err"] < 0.25
    assert set(rows[0]["vs"]) == {*own[1:], "pallas_mha_32", "torch_flash"}
