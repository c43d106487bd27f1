"""How a row's cache is split, and what the kernel can hold."""

import dataclasses

import pytest

from jaxops._lib.planning.device import Device
from jaxops.ops import cached_attention
from jaxops.ops.cached_attention import Plan, Problem, Tiles, candidates
from jaxops.ops.cached_attention.plan import heuristic, shared_bytes
from tests.ops.packed_attention.test_plan import SHARED
from tests.plans import by_choices

pytestmark = pytest.mark.versions

make_plan = by_choices(cached_attention.make_plan)

H200 = Device("NVIDIA H200", "gpu")
QWEN3 = Problem(16, 32, 4, 1152, 128, "bfloat16")


def test_explicit_then_tuned_then_heuristic():
    tiles = {"parts": 2, "block": 128, "warps": 8, "stages": 2}
    row = dataclasses.asdict(QWEN3) | {"op": "cached_attention", "pass": "fwd", "tiles": tiles}
    assert make_plan(QWEN3, H200) == Plan(fwd=Tiles(4, 64))
    assert make_plan(QWEN3, H200, [row]).fwd == Tiles(**tiles)
    assert make_plan(QWEN3, H200, [row], plan=Plan(fwd=Tiles(1, 16))).fwd == Tiles(1, 16)
    assert make_plan(QWEN3, H200, [row | {"S": 4096}]).fwd == Tiles(4, 64)


@pytest.mark.parametrize(
    ("rows", "kv_heads", "S", "tiles"),
    [
        (1, 4, 1152, Tiles(16, 32)),
        (64, 4, 1152, Tiles(1, 64)),
        (1, 4, 32_768, Tiles(64, 32)),
        (1, 1, 32_768, Tiles(128, 32)),
        (1, 1, 63, Tiles(1, 64)),
    ],
)
def test_how_a_row_is_split(rows, kv_heads, S, tiles):
    """Two programs for each of 132 multiprocessors where the rows are few, never parts of less than 64 tokens."""
    assert heuristic("fwd", Problem(rows, 8 * kv_heads, kv_heads, S, 128, "bfloat16"), H200) == tiles


@pytest.mark.parametrize(
    ("group", "head_dim", "dtype", "found"),
    [
        (8, 256, "bfloat16", 141_312),
        (8, 256, "float32", 282_624),
        (8, 512, "bfloat16", 280_576),
        (64, 256, "bfloat16", 229_376),
        (128, 128, "bfloat16", 131_072),
        (8, 128, "bfloat16", 71_680),
    ],
)
def test_shared_memory(group, head_dim, dtype, found):
    """At least what Triton 3.9 gave the kernel compiled for sm_90, with blocks of 64 in 3 stages (2026-11-25)."""
    assert found <= shared_bytes(Tiles(1, 64), Problem(64, 4 * group, 4, 1152, head_dim, dtype)) <= 1.3 * found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", SHARED)
def test_heuristic_and_candidates_fit(dtype, kind):
    for head_dim in (1, 24, 64, 80, 128, 192, 256):
        problem, device = dataclasses.replace(QWEN3, head_dim=head_dim, dtype=dtype), Device(kind, "gpu")
        found = candidates("fwd", problem, device)
        assert found[0] == heuristic("fwd", problem, device)
        assert len(set(found)) == len(found)
        assert max(shared_bytes(tiles, problem) for tiles in found) <= SHARED[kind]
        assert make_plan(problem, device).backend == "pallas"


def test_heads_that_do_not_fit_take_xla():
    device = Device("NVIDIA L4", "gpu")
    for more, message in (
        ({"head_dim": 257}, "head_dim of at most 256"),
        ({"head_dim": 576}, "head_dim of at most 256, not 576"),
        ({"heads": 512}, "128 queries of a key head"),
    ):
        problem = dataclasses.replace(QWEN3, dtype="float32", **more)
        assert make_plan(problem, device).backend == "xla"
        with pytest.raises(NotImplementedError, match=message):
            make_plan(problem, device, backend="pallas")
