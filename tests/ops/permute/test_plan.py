"""Who decides (an explicit plan, then the heuristic), and that every choice can be lowered for an H200."""

import dataclasses
import re

import jax
import pytest

import jaxops
from jaxops import Routing
from jaxops._lib.planning.device import Device
from jaxops.ops import permute
from jaxops.ops.permute import Plan, Problem, candidates
from jaxops.ops.permute.plan import PASSES, heuristic
from tests.hopper import lower_for_h200
from tests.plans import by_choices

pytestmark = pytest.mark.versions

make_plan = by_choices(permute.make_plan)

DEVICE = Device("NVIDIA H200", "gpu")
PROBLEM = Problem(4096, 2048, 8, "bfloat16")


@pytest.mark.parametrize("D", [1, 7, 64, 768, 2048, 2880, 7168, 16384])
def test_heuristic_and_candidates_are_legal(D):
    """Tiles raises for what no kernel supports. A thread loads 16 bytes at a time, and holds at most 16 such loads."""
    for k in (1, 2, 6, 8, 70):
        for dtype in ("bfloat16", "float32"):
            problem = Problem(4096, D, k, dtype)
            for name in PASSES:
                found = candidates(name, problem, DEVICE)
                assert found[0] == heuristic(name, problem, DEVICE)
                assert len(set(found)) == len(found)
                for tile in found:
                    held = tile.rows * tile.block / (32 * tile.warps)
                    assert problem.lane <= held
                    assert held * tile.choices <= 16 * problem.lane
            assert (
                -(-D // found[0].block) * found[0].block < 2 * D or D < 256
            )  # columns that are not there are fewer than those that are


def lowered(T: int, D: int, k: int, dtype: str = "bfloat16", out_dtype=None, plan: Plan | None = None) -> list[str]:
    """The kernels of both ops, forward and backward, in order; nothing but kernels may stand there."""

    def both(x, rows, drows, dout, weights, positions, indices, offsets):
        def ops(x, rows, weights):
            routing = Routing(
                weights, positions, indices, positions, offsets, offsets[1:], weights[0, 0], weights[0, 0]
            )
            return jaxops.permute(x, routing, plan=plan), jaxops.combine(rows, routing, out_dtype=out_dtype, plan=plan)

        out, vjp = jax.vjp(ops, x, rows, weights)
        return *out, *vjp((drows, dout))

    s = jax.ShapeDtypeStruct
    shapes = [
        ((T, D), dtype),
        ((T * k, D), dtype),
        ((T * k, D), dtype),
        ((T, D), out_dtype or dtype),
        ((T, k), "float32"),
    ]
    shapes += [((T, k), "int32"), ((T * k,), "int32"), ((9,), "int32")]
    text = lower_for_h200(both, *(s(*shape) for shape in shapes))
    names = re.findall(r'name = "(\w+)"', text)
    assert text.count("__gpu$xla.gpu.triton") == len(names)
    return sorted(names)


CALLS = {
    "qwen3": (32768, 2048, 8, {}),
    "mixtral": (16384, 4096, 2, {"out_dtype": "float32"}),
    "dsv3": (131072, 7168, 8, {}),  # rows of more than 2^32 bytes: 64-bit addresses
    "odd": (77, 131, 5, {"dtype": "float16"}),
    "one": (1, 1, 1, {"dtype": "float32"}),
    "many-choices": (33, 24, 70, {}),
    "wide": (64, 16384, 1, {}),
}


@pytest.mark.parametrize(("T", "D", "k", "options"), CALLS.values(), ids=CALLS)
def test_a_call_is_these_kernels(T, D, k, options):
    assert lowered(T, D, k, **options) == ["combine", "combine_bwd", "permute", "permute_bwd"]


@pytest.mark.parametrize("D", [96, 2048])
def test_candidates_lower_for_an_h200(D):
    """Some of them: warps change no shape in a kernel."""
    found = list(
        {
            (t.rows, t.block, t.choices): t for t in candidates("combine", dataclasses.replace(PROBLEM, D=D), DEVICE)
        }.values()
    )
    for tile in found[::13]:
        assert len(lowered(4096, D, 8, plan=Plan("pallas", tile, tile, tile))) == 4
