"""Who decides (an explicit plan, then the heuristic), and that every choice can be lowered for an H200."""

import re

import jax
import pytest

import jaxops
from jaxops._lib.planning.device import Device
from jaxops.ops import route
from jaxops.ops.route import Plan, Problem, Tiles, candidates
from jaxops.ops.route.plan import PASSES, heuristic
from tests.hopper import lower_for_h200, on_h200
from tests.plans import by_choices

pytestmark = pytest.mark.versions

make_plan = by_choices(route.make_plan)

DEVICE = Device("NVIDIA H200", "gpu")
PROBLEM = Problem(4096, 128)


@pytest.mark.parametrize("E", [1, 3, 8, 60, 128, 160, 256, 1000, 5000])
def test_heuristic_and_candidates_are_legal(E):
    """Tiles raises for what no kernel supports. At most 64 scores a thread are in registers; few programs count."""
    for T in (0, 1, 4096, 32768, 1 << 20):
        for name in PASSES:
            found = candidates(name, Problem(T, E), DEVICE)
            assert found[0] == heuristic(name, Problem(T, E), DEVICE)
            assert len(set(found)) == len(found)
            for tile in found:
                assert tile.step * (1 << (E - 1).bit_length()) <= 64 * 32 * tile.warps
        assert -(-T // heuristic("fwd", Problem(T, E), DEVICE).rows) <= max(1056, T // 64)


KERNEL = "__gpu$xla.gpu.triton"  # the target of its custom call in StableHLO


def lowered(T: int, E: int, k: int, dtype: str = "bfloat16", plan: Plan | None = None, **options) -> list[str]:
    """The kernels of a call's forward and backward, in order; nothing but kernels may stand between them."""
    has_bias, masked = options.pop("selection_bias", False), options.pop("mask", False)

    def both(logits, selection_bias, mask, dweights):
        given = {"selection_bias": selection_bias if has_bias else None, "mask": mask if masked else None}

        def smooth(logits):
            routing = jaxops.route(logits, k, plan=plan, **given, **options)
            return (routing.weights, routing.aux_loss, routing.z_loss), routing

        out, vjp, routing = jax.vjp(smooth, logits, has_aux=True)
        return routing, vjp((dweights, *out[1:]))

    s = jax.ShapeDtypeStruct
    text = lower_for_h200(both, s((T, E), dtype), s((E,), "float32"), s((T,), "bool"), s((T, k), "float32"))
    names = re.findall(r'"(route_\w+)"', text)
    assert set(re.findall(r"= \"?stablehlo\.(\w+)", text)) == {"custom_call", "reshape"}
    assert text.count(KERNEL) == len(names)
    return names


CALLS = {
    "mixtral": (4096, 8, 2, {}),
    "qwen3": (32768, 128, 8, {"dtype": "float32"}),
    "dsv3": (
        32768,
        256,
        8,
        {"score": "sigmoid", "selection_bias": True, "expert_groups": 8, "top_expert_groups": 4, "weight_scale": 2.5},
    ),
    "dsv2": (1000, 160, 6, {"expert_groups": 8, "top_expert_groups": 3, "normalize": False}),
    "odd": (77, 130, 3, {"capacity": 9, "expert_groups": 13, "top_expert_groups": 2, "dtype": "float16"}),
    "one": (1, 1, 1, {"capacity": 1}),
    "masked": (8192, 160, 6, {"mask": True, "score": "sigmoid", "expert_groups": 8, "top_expert_groups": 3}),
    "masked-decode": (32, 128, 8, {"mask": True}),
    "all": (33, 70, 70, {}),
    "many": (500, 3000, 4, {"selection_bias": True}),
    "decode": (32, 128, 8, {"dtype": "float32"}),
    "decode-dsv3": (2, 256, 8, {"score": "sigmoid", "expert_groups": 8, "top_expert_groups": 4}),
}


@pytest.mark.parametrize(("T", "E", "k", "options"), CALLS.values(), ids=CALLS)
def test_a_call_is_these_kernels(T, E, k, options):
    """A single tile of tokens, as of a decode step, is one launch."""
    few = T * E <= 4096 and E != 70
    forward = ["route_fwd"] if few else ["route_choose", "route_count", "route_place"]
    assert lowered(T, E, k, **options) == [*forward, "route_bwd"]


def test_one_tile_waits_for_its_own_stores():
    """No other test would see the race: Pallas' interpreter has no threads."""
    with on_h200():
        program = jax.make_jaxpr(lambda logits: jaxops.route(logits, 2))(jax.ShapeDtypeStruct((16, 8), "float32"))
    assert str(program).count("debug_barrier") == 1


def test_few_tokens_with_groups():
    """Several warps would spill the registers that groups take."""
    assert make_plan(Problem(16, 256), DEVICE).fwd == Tiles(16, 16, 8)
    assert make_plan(Problem(16, 256, groups=8), DEVICE).fwd == Tiles(2, 2)


def test_candidates_lower_for_an_h200():
    """Some of them: warps and rows change no shape in a kernel."""
    E = 64
    fwd, bwd = (
        list({tile.step: tile for tile in candidates(name, Problem(4096, E), DEVICE)}.values()) for name in PASSES
    )
    for i in range(0, max(len(fwd), len(bwd)), 2):
        assert len(lowered(4096, E, 2, plan=Plan("pallas", fwd[i % len(fwd)], bwd[i % len(bwd)]))) == 4
