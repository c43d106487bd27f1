"""The rule for tiles of Hopper's kernels, and how sums are split."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxops._lib.planning.device import Device
from jaxops._lib.ragged.work_list import least_rows_of_part
from jaxops.ops.grouped_matmul import Problem, make_plan
from jaxops.ops.grouped_matmul.plan import heuristic

H200, H100 = Device("NVIDIA H200", "gpu"), Device("NVIDIA H100 80GB HBM3", "gpu")
pytestmark = [pytest.mark.versions, pytest.mark.usefixtures("jax_triton")]


# Of models, whole and as slices of a card: G, M, K, N; the pass; rows, columns and stages of the tiles.
RULE = {
    "GLM-4.5": ((160, 65536, 5120, 1536), "fwd", (128, 256, 3)),
    "GLM-4.5, four cards": ((40, 65536, 5120, 1536), "fwd", (256, 256, 4)),
    "Qwen3-235B": ((128, 32768, 4096, 1536), "fwd", (128, 256, 4)),
    "Qwen3-235B, a quarter of F": ((128, 32768, 4096, 384), "fwd", (128, 128, 5)),
    "Mixtral": ((8, 32768, 4096, 14336), "dgrad", (256, 256, 4)),
    "DeepSeekMoE": ((64, 32768, 2048, 1408), "fwd", (256, 128, 4)),
    "DeepSeekMoE's dgrad": ((64, 98304, 2048, 1408), "dgrad", (256, 256, 4)),
    "gpt-oss": ((32, 65536, 2880, 2880), "wgrad", (256, 256, 4)),
    "DeepSeek-V3": ((256, 32768, 7168, 2048), "wgrad", (128, 256, 4)),
    "Qwen3-30B's wgrad": ((128, 32768, 2048, 768), "wgrad", (128, 256, 4)),
    "Granite's wgrad": ((40, 32768, 1536, 512), "wgrad", (128, 128, 5)),
    "Granite, a quarter of F": ((40, 32768, 1536, 128), "fwd", (128, 128, 5)),
    "a few tiles": ((4, 512, 2048, 2048), "fwd", (128, 128, 5)),
}


@pytest.mark.parametrize(("sizes", "pass_name", "tiles"), RULE.values(), ids=RULE)
def test_rule(sizes, pass_name, tiles):
    G, M, K, N = sizes
    device = Device("NVIDIA H200", "gpu")
    found = heuristic(pass_name, Problem(*sizes, "bfloat16"), device, "triton")
    assert (found.bm, found.bn, found.stages, found.ping_pong) == (*tiles, tiles[:2] == (128, 128))
    swapped = {"fwd": "dgrad", "dgrad": "fwd", "wgrad": "wgrad"}[pass_name]
    assert heuristic(swapped, Problem(G, M, N, K, "bfloat16", True), device, "triton") == found
    beside = heuristic(pass_name, Problem(*sizes, "bfloat16"), dataclasses.replace(device, shared=True), "triton")
    assert beside == found if found.programs == 1 else (beside.bm, beside.bn) == (128, 256)


def test_wgrad_of_short_groups():
    """It only writes, which the Pallas kernel does faster where memory is slow."""

    def kernels(rows):
        problem = Problem(128, 128 * rows, 2048, 768, "bfloat16")
        return [make_plan(problem, device).wgrad.kernel for device in (H200, H100)]

    assert kernels(16) == kernels(32) == ["triton", "pallas"]
    assert kernels(33) == ["triton", "triton"]


def test_split_of_long_sums():
    """Where one group of nearly all rows would leave the card empty, and its tiles do not fill it."""

    def split(*sizes, **change):
        return make_plan(Problem(*sizes, "bfloat16", **change), H200).wgrad.split

    assert split(151, 31231, 352, 1680) > 3
    assert split(35, 49611, 272, 1192) > 1
    assert split(35, 49611, 272, 1192, transpose_rhs=True) == split(35, 49611, 1192, 272)
    assert split(40, 131072, 1536, 512) > 2
    assert split(64, 98304, 2048, 1408) > 1
    assert split(8, 32768, 4096, 14336) == split(8, 32768, 14336, 4096) == split(256, 32768, 7168, 2048) == 1
    assert split(35, 49611, 272, 1192, whole_sums=True) == 1
    assert split(0, 0, 256, 256) == split(0, 5000, 256, 256) == split(4, 0, 256, 256) == 1
    assert split(4, 128, 256, 256) == split(4, 1, 64, 64) == 1, "parts of few rows take longer to add than to multiply"


@hypothesis.given(
    st.integers(1, 256), st.integers(1, 200_000), st.integers(1, 1000), st.integers(1, 1000), st.booleans()
)
@hypothesis.settings(max_examples=100, deadline=None)
def test_parts_of_sums_are_few(G, M, K, N, transpose):
    """Their memory is bounded, and balanced groups of several tiles a multiprocessor are whole."""
    problem = Problem(G, M, 8 * K, 8 * N, "bfloat16", transpose)
    tiles = make_plan(problem, H200, backend="triton").wgrad
    count = -(-8 * (N if transpose else K) // tiles.bm) * -(-8 * (K if transpose else N) // tiles.bn)
    if tiles.split > 1:
        assert 4 * tiles.split * count * tiles.bm * tiles.bn <= 2**27
        assert 256 * tiles.split <= M
    if G * count > 6 * H200.cores and G > 32:
        assert 2 * least_rows_of_part(M, tiles.split) > M // G
