"""Plans of the FP8 products: backend by device and by what is installed, tuned rows, heuristic, candidates."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import pytest

import jaxops
from jaxops._lib.planning import device as device_facts
from jaxops._lib.planning.device import Device
from jaxops.ops import fp8_matmul
from jaxops.ops.fp8_matmul import RECIPES, Plan, Problem, Tiles, candidates
from jaxops.ops.fp8_matmul.plan import PASSES, heuristic
from tests.plans import by_choices

pytestmark = pytest.mark.versions

make_plan = by_choices(fp8_matmul.make_plan)

H200, L4 = Device("NVIDIA H200", "gpu"), Device("NVIDIA L4", "gpu")
HOPPER = ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H20", "NVIDIA H800", "NVIDIA GH200 480GB"]
OTHER = [
    "NVIDIA L4",
    "NVIDIA L40S",
    "NVIDIA GeForce RTX 4090",
    "NVIDIA RTX 6000 Ada Generation",
    "NVIDIA B200",
    "NVIDIA GeForce RTX 5090",
]
BEFORE_ADA = ["NVIDIA A100-SXM4-80GB", "NVIDIA A10G", "NVIDIA GeForce RTX 3090", "Tesla V100-SXM2-16GB"]
PROBLEM = Problem(1000, 520, 700, "blockwise", "bfloat16", 8)


@pytest.fixture
def _jax_triton(monkeypatch):
    monkeypatch.setattr(device_facts, "gluon_missing", lambda: "")


@pytest.fixture
def _no_jax_triton(monkeypatch):
    monkeypatch.setattr(device_facts, "gluon_missing", lambda: "they are not installed")


def mark(panel: int, kernel: str = "triton") -> Tiles:
    """Tiles that no heuristic chooses; the panel identifies them."""
    return Tiles(kernel, 128, 128, stages=2, panel=panel)


def row(pass_name: str, tiles: Tiles, problem: Problem = PROBLEM, **change) -> dict:
    sizes = {name: getattr(problem, name) for name in ("M", "K", "N", "G", "recipe")}
    return {"op": "fp8_matmul", "pass": pass_name, **sizes, "tiles": dataclasses.asdict(tiles), **change}


def kernels(plan: Plan) -> set[str]:
    return {getattr(plan, name).kernel for name in PASSES}


@pytest.mark.usefixtures("_jax_triton")
@pytest.mark.parametrize("kind", HOPPER)
def test_hopper_takes_triton(kind):
    device = Device(kind, "gpu")
    plan = make_plan(PROBLEM, device)
    assert (plan.backend, kernels(plan)) == ("triton", {"triton"})
    assert make_plan(PROBLEM, device, backend="triton") == make_plan(PROBLEM, device, plan=Plan("triton")) == plan
    assert kernels(make_plan(PROBLEM, device, backend="pallas")) == {"pallas"}
    assert make_plan(PROBLEM, device, backend="xla") == Plan("xla")


@pytest.mark.usefixtures("_no_jax_triton")
@pytest.mark.filterwarnings("ignore:jaxops takes its Pallas kernels")
@pytest.mark.parametrize("kind", HOPPER)
def test_hopper_without_jax_triton_takes_pallas(kind):
    plan = make_plan(PROBLEM, Device(kind, "gpu"))
    assert (plan.backend, kernels(plan)) == ("pallas", {"pallas"})
    for named in ({"backend": "triton"}, {"plan": Plan("triton")}):
        with pytest.raises(NotImplementedError, match=r"not installed.*backend='auto'"):
            make_plan(PROBLEM, Device(kind, "gpu"), **named)


@pytest.mark.usefixtures("_jax_triton")
@pytest.mark.parametrize("kind", OTHER)
def test_other_cards_with_fp8_take_pallas(kind):
    plan = make_plan(PROBLEM, Device(kind, "gpu"))
    assert (plan.backend, kernels(plan)) == ("pallas", {"pallas"})
    for named in ({"backend": "triton"}, {"plan": Plan("triton")}):
        with pytest.raises(NotImplementedError, match=rf"needs a Hopper GPU.*{kind}.*backend='auto'"):
            make_plan(PROBLEM, Device(kind, "gpu"), **named)


@pytest.mark.usefixtures("_jax_triton")
@pytest.mark.parametrize("kind", BEFORE_ADA)
def test_cards_before_ada_take_xla(kind):
    """XLA converts where the card cannot."""
    assert (
        make_plan(PROBLEM, Device(kind, "gpu")) == make_plan(PROBLEM, Device(kind, "gpu"), backend="xla") == Plan("xla")
    )
    for named in ({"backend": "pallas"}, {"plan": Plan()}):
        with pytest.raises(NotImplementedError, match=rf"capability 8\.9 or newer.*{kind}.*backend='xla'"):
            make_plan(PROBLEM, Device(kind, "gpu"), **named)
    with pytest.raises(NotImplementedError, match=f"Hopper.*{kind}"):
        make_plan(PROBLEM, Device(kind, "gpu"), backend="triton")


@pytest.mark.usefixtures("_jax_triton")
def test_explicit_then_tuned_then_heuristic():
    rows = [row("fwd", mark(101)), row("dgrad", mark(102)), row("dgrad", mark(103))]
    plan = make_plan(PROBLEM, H200, rows, plan=Plan("triton", fwd=mark(100)))
    assert plan == Plan("triton", mark(100), mark(102), heuristic("wgrad", PROBLEM, H200, "triton"))
    assert make_plan(PROBLEM, H200) == Plan("triton", *(heuristic(name, PROBLEM, H200, "triton") for name in PASSES))
    whole = Plan("triton", mark(100), mark(101), mark(102))
    assert make_plan(PROBLEM, H200, rows, plan=whole) == whole


@pytest.mark.usefixtures("_jax_triton")
@pytest.mark.parametrize(
    "change",
    [{"recipe": "rowwise"}, {"K": 1025}, {"K": 512}, {"N": 1025}, {"M": 1025}, {"M": 512}, {"G": 9}, {"G": 0}],
    ids=lambda c: "-".join(map(str, *c.items())),
)
def test_row_of_another_key_is_not_taken(change):
    rows = [row(name, mark(100), **change) for name in PASSES]
    assert make_plan(PROBLEM, H200, rows) == make_plan(PROBLEM, H200)


@pytest.mark.usefixtures("_jax_triton")
def test_rows_of_another_backend_are_not_taken():
    rows = [row(name, mark(100)) for name in PASSES]
    assert make_plan(PROBLEM, H200, rows, backend="pallas") == make_plan(PROBLEM, H200, backend="pallas")
    assert make_plan(PROBLEM, L4, rows) == make_plan(PROBLEM, L4)
    assert make_plan(PROBLEM, H200, rows, backend="xla") == Plan("xla")
    pallas = [row(name, mark(100, "pallas")) for name in PASSES]
    assert make_plan(PROBLEM, H200, pallas, backend="pallas").fwd == mark(100, "pallas")
    for backend in ("auto", "triton"):  # such as a machine has stored before jax-triton was installed
        assert make_plan(PROBLEM, H200, pallas, backend=backend) == make_plan(PROBLEM, H200)


@pytest.mark.parametrize("size", [(64, 128), (128, 32), (256, 128), (256, 64), (128, 512)], ids=str)
def test_tiles_that_the_triton_kernel_does_not_have(size):
    with pytest.raises(
        ValueError, match=f"{size[0]}x{size[1]}: the triton kernel has 128x128, 192x128, 128x256, 128x64"
    ):
        Tiles("triton", *size)
    Tiles("pallas", *size)


def test_tiles_of_few_rows():
    """One row takes no tensor core; the numbers that it loads at a time are whole blocks. Nothing of it is wgrad's."""
    assert Tiles("pallas", 1, 4, bk=384, split=2).shared_bytes == 0
    for wrong, message in (
        ({"bm": 1, "bk": 100}, "multiple of 128"),
        ({"bm": 1, "swap": True}, "no tensor core"),
        ({"bm": 1, "bn": 24}, "power of two"),
        ({"bn": 8}, "at least 16"),
        ({"bm": 8}, "at least 16"),
        ({"bm": 4, "swap": True}, "at least 8"),
        ({"kernel": "triton", "split": 2}, "no bk, split, swap and cast_lhs"),
        ({"kernel": "xla", "bk": 256}, "no bk, split, swap and cast_lhs"),
        ({"kernel": "pallas", "dynamic": True}, "are not dynamic"),
        ({"kernel": "xla", "dynamic": True}, "are not dynamic"),
        ({"split": 0}, "at least 1"),
        ({"kernel": "triton", "stages": 1}, "stages=1 must be at least 2"),
        ({"bm": 192}, "power of two"),
    ):
        with pytest.raises(ValueError, match=message):
            Tiles(**wrong)
    for tiles in (Tiles(bm=1), Tiles(bk=256), Tiles(split=2), Tiles(swap=True)):
        with pytest.raises(ValueError, match=r"plan\.wgrad=.*no bm below 16, bk, split, swap or cast_lhs"):
            make_plan(PROBLEM, L4, plan=Plan("pallas", wgrad=tiles))


@pytest.mark.usefixtures("_jax_triton")
def test_only_groups_have_dynamic_tiles():
    tiles, dense = Tiles("triton", 128, 128, stages=4, dynamic=True), dataclasses.replace(PROBLEM, G=0)
    for name in PASSES:
        assert getattr(make_plan(PROBLEM, H200, plan=Plan("triton", **{name: tiles})), name) == tiles
        with pytest.raises(ValueError, match=rf"plan\.{name}=.*only products over groups have dynamic tiles"):
            make_plan(dense, H200, plan=Plan("triton", **{name: tiles}))


@pytest.mark.usefixtures("_jax_triton")
def test_tiles_that_do_not_fit_shared_memory():
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


@hypothesis.settings(max_examples=200)
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


def test_a_call_on_a_cpu_needs_no_jax_triton(monkeypatch):
    monkeypatch.setattr(device_facts, "gluon_missing", lambda: pytest.fail("asked for"))
    assert jax.eval_shape(
        jaxops.fp8_matmul, jax.ShapeDtypeStruct((3, 4), "float32"), jax.ShapeDtypeStruct((4, 5), "float32")
    ).shape == (3, 5)
