"""Plans of the FP8 products: tuned rows, what tiles there are, heuristic, candidates."""

import dataclasses
import itertools

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxops._lib.planning import device as device_facts
from jaxops._lib.planning.device import Device
from jaxops.ops import fp8_matmul
from jaxops.ops.fp8_matmul import RECIPES, Plan, Problem, Tiles, candidates
from jaxops.ops.fp8_matmul.plan import PASSES, heuristic
from tests.plans import by_choices

pytestmark = pytest.mark.versions

make_plan = by_choices(fp8_matmul.make_plan)

H200, L4 = Device("NVIDIA H200", "gpu"), Device("NVIDIA L4", "gpu")
PROBLEM = Problem(1000, 520, 700, "blockwise", "bfloat16", 8)


@pytest.fixture
def _jax_triton(monkeypatch):
    monkeypatch.setattr(device_facts, "gluon_missing", lambda: "")


def mark(panel: int, kernel: str = "triton") -> Tiles:
    """Tiles that no heuristic chooses; the panel identifies them."""
    return Tiles(kernel, 128, 128, stages=2, panel=panel)


def row(pass_name: str, tiles: Tiles, problem: Problem = PROBLEM, **change) -> dict:
    sizes = {name: getattr(problem, name) for name in ("M", "K", "N", "G", "recipe")}
    return {"op": "fp8_matmul", "pass": pass_name, **sizes, "tiles": dataclasses.asdict(tiles), **change}


@pytest.mark.usefixtures("_jax_triton")
def test_explicit_then_tuned_then_heuristic():
    rows = [row("fwd", mark(101)), row("dgrad", mark(102)), row("dgrad", mark(103))]
    plan = make_plan(PROBLEM, H200, rows, plan=Plan("triton", fwd=mark(100)))
    assert plan == Plan("triton", mark(100), mark(102), heuristic("wgrad", PROBLEM, H200, "triton"))
    # Of another kernel, as a machine has stored before jax-triton was installed.
    pallas = [row(name, mark(100, "pallas")) for name in PASSES]
    assert make_plan(PROBLEM, H200, pallas) == make_plan(PROBLEM, H200)
    assert make_plan(PROBLEM, H200, pallas, backend="pallas").fwd == mark(100, "pallas")
    # Recipes with the same products share rows: tensorwise's forward has other scales.
    other = [row("fwd", mark(101), recipe="blockwise_with_gw_hp"), row("dgrad", mark(102), recipe="tensorwise")]
    assert make_plan(PROBLEM, H200, other) == dataclasses.replace(make_plan(PROBLEM, H200), fwd=mark(101))


@pytest.mark.usefixtures("_jax_triton")
@pytest.mark.parametrize(
    "change",
    [{"recipe": "rowwise"}, {"K": 1025}, {"K": 512}, {"N": 1025}, {"M": 1025}, {"M": 512}, {"G": 9}, {"G": 0}],
    ids=lambda c: "-".join(map(str, *c.items())),
)
def test_row_of_another_key_is_not_taken(change):
    rows = [row(name, mark(100), **change) for name in PASSES]
    assert make_plan(PROBLEM, H200, rows) == make_plan(PROBLEM, H200)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bm": 48}, r"Tiles\.bm=48.*power of two.*16"),
        ({"bm": 192}, "power of two"),
        ({"bm": 8}, "at least 16"),
        ({"bm": 4, "swap": True}, "at least 8"),
        ({"bn": 8}, r"Tiles\.bn=8.*power of two.*16"),
        ({"warps": 3}, r"Tiles\.warps=3.*power of two and at most 16"),
        ({"stages": 0}, r"Tiles\.stages=0.*at least 1"),
        ({"panel": 0}, r"Tiles\.panel=0.*at least 1"),
        ({"split": 0}, "at least 1"),
        ({"kernel": "cuda"}, r"Tiles\.kernel='cuda'.*'triton', 'pallas', 'xla'"),
        ({"kernel": "triton", "split": 2}, "no split, swap and cast_lhs"),
        ({"kernel": "triton", "cast_lhs": True}, "no split, swap and cast_lhs"),
        ({"kernel": "xla", "swap": True}, "no split, swap and cast_lhs"),
        ({"kernel": "triton", "stages": 1}, "stages=1 must be at least 2"),
        *(
            ({"kernel": "triton", "bm": bm, "bn": bn}, f"{bm}x{bn}: the triton kernel has 128x128, 192x128, 128x256")
            for bm, bn in ((64, 128), (128, 32), (256, 128), (256, 64), (128, 512))
        ),
    ],
    ids=str,
)
def test_tiles_that_no_kernel_can_have(options, message):
    with pytest.raises(ValueError, match=message):
        Tiles(**options)


@pytest.mark.usefixtures("_jax_triton")
def test_tiles_that_a_product_cannot_have():
    """wgrad sums rows; shared memory has an end."""
    for options in ({"split": 2}, {"swap": True}, {"cast_lhs": True}):
        with pytest.raises(ValueError, match=r"plan\.wgrad=.*no split, swap or cast_lhs"):
            make_plan(PROBLEM, L4, plan=Plan("pallas", wgrad=Tiles(**options)))
    with pytest.raises(ValueError, match=r"plan\.dgrad=.*stages=9.* bytes of shared memory.*use fewer stages"):
        make_plan(PROBLEM, H200, plan=Plan("triton", dgrad=Tiles("triton", 128, 128, stages=9)))


def sizes_of(M, K, N, recipe, G=0, cores=132):
    device = dataclasses.replace(H200, cores=cores)
    found = (heuristic(name, Problem(M, K, N, recipe, "bfloat16", G), device, "triton") for name in PASSES)
    return [(tiles.bm, tiles.bn) for tiles in found]


@pytest.mark.parametrize(
    ("sizes", "fast", "promoted"),
    [
        ((333, 4096, 4096), (128, 128), (128, 128)),  # 48 tiles of 256 columns, 96 of 128, 192 of 64
        ((1024, 4096, 4096), (128, 256), (128, 128)),  # 128 tiles of 256 columns take as long as two rounds of 128
        ((333, 7168, 2048), (128, 64), (128, 64)),  # 24, 48, and 96 of 64
        ((1024, 4096, 14336), (128, 128), (128, 128)),  # 448 are three rounds and a part of a fourth, 896 almost seven
        ((1, 4096, 2048), (128, 64), (128, 64)),
    ],
    ids=str,
)
def test_few_tiles_leave_no_multiprocessor_idle(sizes, fast, promoted):
    for recipe in RECIPES:
        found = sizes_of(*sizes, recipe)
        assert found[0] == (fast if "fwd" in RECIPES[recipe].fast else promoted)
    M, K, N = sizes
    assert sizes_of(M, N, K, "blockwise")[1] == sizes_of(M, K, N, "blockwise")[0]  # dgrad is the same by columns of K
    assert sizes_of(K, M, N, "blockwise")[2][1] == sizes_of(M, K, N, "blockwise")[0][1]  # and wgrad by M as K


SIZES = st.one_of(st.integers(0, 300), st.sampled_from([512, 1408, 4096, 14336, 32768]))


@hypothesis.settings(max_examples=100)
@hypothesis.given(
    M=SIZES,
    K=SIZES,
    N=SIZES,
    G=st.sampled_from([0, 1, 8, 256]),
    recipe=st.sampled_from(list(RECIPES)),
    kind=st.sampled_from(["triton", "pallas"]),
)
def test_heuristic(M, K, N, G, recipe, kind):
    """It fits its device and is the first candidate. Only sums that the tensor core does whole have 256 columns."""
    problem = Problem(M, K, N, recipe, "bfloat16", G)
    device = H200 if kind == "triton" else L4
    for name in PASSES:
        found = candidates(name, problem, device, kind)
        assert found[0] == heuristic(name, problem, device, kind)
        assert len(set(found)) == len(found) >= 2
        assert {tiles.kernel for tiles in found} == {kind}
        assert all(tiles.shared_bytes <= device.shared_bytes for tiles in found)
        assert all(tiles.bn <= 128 or name in RECIPES[recipe].fast for tiles in found)


def test_unquantized_rows():
    """Sums are split where programs are too few, and only there; lhs' two bytes a number fit."""
    problem = lambda M, K=2048, N=768, G=0: Problem(M, K, N, "blockwise", "bfloat16", G, quantize_lhs=False)
    of = lambda *sizes, device=H200, **groups: make_plan(problem(*sizes, **groups), device)
    size = lambda plan: (plan.fwd.bm, plan.fwd.bn, plan.fwd.split)
    dense = {M: size(of(M)) for M in (0, 1, 8, 9, 16, 17, 32, 64, 128, 300, 4096)}
    assert dense == {
        **dict.fromkeys((0, 1, 8), (8, 64, 8)),
        **dict.fromkeys((9, 16), (16, 64, 8)),
        **dict.fromkeys((17, 32), (32, 128, 8)),
        64: (64, 128, 8),
        128: (128, 64, 8),
        300: (128, 64, 2),
        4096: (128, 128, 1),
    }
    grouped = {M: size(of(M, G=128)) for M in (8, 512, 513, 1024, 2048, 10**5)}
    assert grouped == {8: (8, 64, 4), 512: (8, 64, 1), 513: (8, 64, 1), 1024: (16, 128, 1), 2048: (32, 128, 1)} | {
        10**5: (64, 128, 1)
    }
    assert [size(of(8, K, N))[2] for K, N in ((768, 768), (1024, 768), (2048, 5120), (2048, 150_000))] == [1, 4, 8, 1]
    for device, M, (K, N), G in itertools.product(
        (H200, L4), (0, 1, 5, 16, 20, 64, 100, 10**4), ((1, 1), (100, 40_000), (40_000, 16)), (0, 1, 8, 128)
    ):
        plan = of(M, K, N, G, device=device)
        assert plan.fwd.kernel == plan.dgrad.kernel == "pallas"
        for tiles in (plan.fwd, plan.dgrad):
            assert tiles.stages * 128 * (2 * tiles.bm + tiles.bn) <= device.shared_bytes
            assert min(tiles.stages, tiles.warps // 4) >= 1
            assert not tiles.swap or tiles.bn >= 64
        assert not plan.wgrad.of_pallas
    with pytest.raises(NotImplementedError, match="with quantize_lhs=False use 'pallas'"):
        make_plan(problem(1), H200, backend="triton")


def test_where_rows_are_cast_in_the_product():
    """ "auto" takes it on Ada for up to 16 rows; elsewhere a plan does."""
    problem = Problem(16, 520, 400, "blockwise", "bfloat16")
    of = lambda change, device: make_plan(dataclasses.replace(problem, **change), device, backend="pallas")
    for change, device, expected in (
        ({}, L4, True),
        ({"M": 1, "G": 3}, L4, True),
        ({"M": 17}, L4, False),
        ({"recipe": "rowwise"}, L4, False),
        ({"quantize_lhs": False}, L4, False),
        ({}, H200, False),
    ):
        plan = of(change, device)
        assert (plan.fwd.cast_lhs, plan.dgrad.cast_lhs, plan.wgrad.cast_lhs) == (expected, False, False)
    tiles = Tiles("pallas", 16, 32, cast_lhs=True)
    with pytest.raises(ValueError, match=r"leave cast_lhs out"):
        make_plan(dataclasses.replace(problem, recipe="rowwise"), L4, plan=Plan("pallas", fwd=tiles))
