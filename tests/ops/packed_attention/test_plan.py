"""Plans of packed attention: what "auto" takes, tuned rows, candidates; what is lowered for an H200, and its costs."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

import jaxops
from jaxops._lib.planning.device import Device
from jaxops.ops import packed_attention
from jaxops.ops.packed_attention import Plan, Problem, Tiles, candidates
from jaxops.ops.packed_attention.plan import PASSES, heuristic, shared_bytes
from tests.hopper import lower_for_h200
from tests.ops.packed_attention.cases import H200
from tests.plans import by_choices

pytestmark = pytest.mark.versions

make_plan = by_choices(packed_attention.make_plan)
CPU = Device("cpu", "cpu")
PLAIN = Problem(16384, 16384, 24, 8, 128, "bfloat16", "causal")


@pytest.mark.parametrize(
    ("change", "backend"),
    [
        ({}, "cudnn"),
        ({"longest": 2049}, "cudnn"),
        ({"longest": 2048}, "pallas"),
        ({"longest": 2048, "head_dim": 256}, "xla"),
        ({"longest": 2048, "mask": "whole"}, "cudnn"),
        ({"mask": "rows"}, "pallas"),
        ({"cross": True, "longest": 100}, "pallas"),
        ({"cross": True, "head_dim": 264}, "xla"),
        ({"dtype": "float32"}, "xla"),
        ({"head_dim": 264, "mask": "rows"}, "xla"),
    ],
    ids=str,
)
def test_what_auto_takes_on_a_gpu(change, backend):
    plan = make_plan(dataclasses.replace(PLAIN, **change), H200)
    assert (plan.backend, plan.block) == (backend, 512 if backend == "xla" else None)
    assert make_plan(dataclasses.replace(PLAIN, **change), CPU) == Plan("xla", block=64)


def test_explicit_then_tuned_then_heuristic():
    tiles, other = Tiles(16, 16), Tiles(32, 32)
    sizes = {name: x for name, x in vars(PLAIN).items() if name not in ("cross", "longest")}
    row = {"op": "packed_attention", "pass": "fwd", **sizes, "T": 9000, "tiles": dataclasses.asdict(other)}
    rows = [row, row | {"pass": "dq"}, row | {"pass": "dkv", "heads": 16}]
    plan = make_plan(PLAIN, H200, rows, plan=Plan(fwd=tiles))
    assert plan == Plan("pallas", fwd=tiles, dq=other, dkv=heuristic("dkv", PLAIN, H200))
    explicit = Plan("xla", block=7)
    assert make_plan(PLAIN, H200, rows, plan=explicit) == explicit


SHARED = {"NVIDIA H200": 232_448, "NVIDIA A100-SXM4-80GB": 166_912, "NVIDIA L4": 101_376}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", SHARED)
def test_heuristic_and_candidates_fit(dtype, kind):
    for head_dim in (1, 24, 64, 80, 128, 192, 256):
        problem, device = dataclasses.replace(PLAIN, head_dim=head_dim, dtype=dtype), Device(kind, "gpu")
        for name in PASSES:
            found = candidates(name, problem, device)
            assert found[0] == heuristic(name, problem, device)
            assert len(set(found)) == len(found)
            assert max(shared_bytes(name, tiles, problem) for tiles in found) <= SHARED[kind]


@pytest.mark.parametrize(
    ("name", "tiles", "found"),
    [
        ("fwd", Tiles(128, 64, 8, 3), 131_072),
        ("fwd", Tiles(128, 128, 8, 2), 163_840),
        ("dq", Tiles(128, 64, 8, 3), 163_840),
        ("dkv", Tiles(64, 64, 8, 2), 99_328),
        ("dkv", Tiles(128, 64, 8, 3), 233_472),
    ],
)
def test_shared_memory(name, tiles, found):
    """At least what Triton 3.9 gave the compiled kernels for sm_90 (2026-11-24; causal, 16 and 2 heads of 128), and at
    most 8 % more."""
    assert found <= shared_bytes(name, tiles, PLAIN) <= 1.08 * found


MASKS = {"whole": {}, "causal": {"causal": True}, "window": {"causal": True, "window": 100}, "until": {}}


def lowered(problem: Problem, plan: Plan | None, mask: str, backward: bool = True) -> str:
    p, s = problem, jax.ShapeDtypeStruct
    q, kv = s((p.T, p.heads, p.head_dim), p.dtype), s((p.S, p.kv_heads, p.head_dim), p.dtype)
    offsets, until = s((6,), "int32"), s((p.T,), "int32")

    def forward(q, k, v, offsets, kv_offsets, until):
        how = MASKS[mask] | ({"visible_until": until} if mask == "until" else {})
        how |= {"kv_offsets": kv_offsets} if p.cross else {}
        return jaxops.packed_attention(q, k, v, offsets, plan=plan, **how)

    def both(q, k, v, dout, *others):
        out, vjp = jax.vjp(lambda *x: forward(*x, *others), q, k, v)
        return out, vjp(dout)

    operands = (offsets, offsets, until)
    return lower_for_h200(both, q, kv, kv, q, *operands) if backward else lower_for_h200(forward, q, kv, kv, *operands)


def kernels_of(text: str) -> list[str]:
    return re.findall(r'"(packed_attention_\w+)"', text)


SMALL = Problem(1000, 1000, 4, 2, 64, "bfloat16")


@pytest.mark.parametrize("cross", [False, True], ids=["one", "cross"])
@pytest.mark.parametrize("mask", MASKS)
def test_a_call_is_these_kernels(mask, cross):
    problem = dataclasses.replace(SMALL, cross=cross, S=1100 if cross else 1000)
    plan = None if mask in ("window", "until") or cross else Plan("pallas")  # "auto", where it takes the kernels
    assert kernels_of(lowered(problem, plan, mask, backward=False)) == ["packed_attention_fwd"]
    found = kernels_of(lowered(problem, plan, mask))
    assert found == [f"packed_attention_{name}" for name in PASSES]


def test_candidates_are_lowered():
    """Some of them, all passes' in one program each. Of a wider head fewer fit, and no others."""
    wide = dataclasses.replace(SMALL, head_dim=128)
    assert all(set(candidates(name, wide, H200)[1:]) < set(candidates(name, SMALL, H200)) for name in PASSES)
    lists = {name: candidates(name, SMALL, H200) for name in PASSES}
    for i in range(0, max(map(len, lists.values())), 3):
        plan = Plan("pallas", **{name: tiles[i % len(tiles)] for name, tiles in lists.items()})
        assert len(kernels_of(lowered(SMALL, plan, "until"))) == 3


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(1, "bfloat16"), (80, "float16"), (128, "bfloat16"), (256, "bfloat16"), (64, "float32")]
)
def test_other_rows_are_lowered(head_dim, dtype):
    problem = dataclasses.replace(SMALL, head_dim=head_dim, dtype=dtype)
    assert len(kernels_of(lowered(problem, Plan("pallas"), "until"))) == 3


def test_costs():
    """T 1000 rows of 4 heads of 64, keys of 2: 512,000 bytes of q, 256,000 of k; runs 8,000 bytes and 16 of what is
    inside. A causal row sees half of the rows, a window of 100 at most 101; a product is 2 * pairs * 4 * 64."""
    from tests.hopper import costs_of

    product, rows, keys, runs, sums = 2 * 4 * 64, 512_000, 256_000, 8_000 + 16, 16_000
    for mask, pairs in (("whole", 1_000_000), ("causal", 500_500), ("window", 101_000), ("until", 1_000_000)):
        found = costs_of(lowered(SMALL, Plan("pallas"), mask))
        blocks = 2 * -(-1000 // 64) * 4  # of dkv's list
        assert found == [
            ("packed_attention_fwd", 2 * product * pairs, 2 * rows + 2 * keys + runs + sums),
            ("packed_attention_dq", 3 * product * pairs, 3 * rows + 2 * keys + runs + 2 * sums),
            ("packed_attention_dkv", 4 * product * pairs, 2 * rows + 4 * keys + runs + 2 * sums + blocks),
        ]


def test_jnp_is_not_asked_for_the_mask_of_all_pairs():
    """On a CPU neither forward nor backward holds T * S of anything."""
    rows = 4096
    x, offsets = jax.ShapeDtypeStruct((rows, 1, 8), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.int32)
    step = jax.jit(
        jax.grad(lambda q, k, v, o: jnp.sum(jaxops.packed_attention(q, k, v, o, backend="xla")), argnums=(0, 1, 2))
    )
    memory = step.lower(x, x, x, offsets).compile().memory_analysis()
    assert memory.temp_size_in_bytes < rows * rows / 4
