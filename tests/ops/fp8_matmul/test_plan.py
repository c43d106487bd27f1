"""Plans of the FP8 products: backend by device and by what is installed, tuned rows, heuristic, candidates."""

import dataclasses
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import jaxops
from jaxops._lib.planning import device as device_facts
from jaxops._lib.planning.device import Device, current_device
from jaxops.ops import fp8_matmul
from jaxops.ops.fp8_matmul import RECIPES, Plan, Problem, Tiles, candidates
from jaxops.ops.fp8_matmul.plan import PASSES, heuristic
from tests.plans import by_choices

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
    assert (plan.backend, plan.cast, kernels(plan)) == ("triton", "before", {"triton"})
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


@pytest.mark.filterwarnings("ignore:jaxops takes its Pallas kernels")
@pytest.mark.parametrize(
    ("kind", "installed", "backend"),
    [("NVIDIA H200", True, "triton"), ("NVIDIA H200", False, "pallas"), ("NVIDIA L4", True, "pallas")],
)
def test_what_a_call_is_traced_for(monkeypatch, kind, installed, backend):
    """The abstract device of the enclosing mesh, not the machine that traces."""
    monkeypatch.setattr(device_facts, "gluon_missing", lambda: "" if installed else "they are not installed")
    abstract = AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(
        AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=abstract)
    ):
        assert make_plan(PROBLEM, current_device()).backend == backend


@pytest.mark.usefixtures("_jax_triton")
def test_explicit_then_tuned_then_heuristic():
    rows = [row("fwd", mark(101)), row("dgrad", mark(102)), row("dgrad", mark(103))]
    plan = make_plan(PROBLEM, H200, rows, plan=Plan("triton", fwd=mark(100)))
    assert plan == Plan("triton", "before", mark(100), mark(102), heuristic("wgrad", PROBLEM, H200, "triton"))
    assert make_plan(PROBLEM, H200) == Plan(
        "triton", "before", *(heuristic(name, PROBLEM, H200, "triton") for name in PASSES)
    )
    whole = Plan("triton", "before", mark(100), mark(101), mark(102))
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
@pytest.mark.parametrize("M", [513, 777, 1000, 1024])
def test_new_length_inside_a_bucket_finds_the_row(M):
    rows = [row("fwd", mark(100)), row("wgrad", mark(101))]
    plan = make_plan(dataclasses.replace(PROBLEM, M=M, G=5, K=513, N=1024, dtype="float32"), H200, rows)
    assert (plan.fwd, plan.wgrad) == (mark(100), mark(101))


@pytest.mark.usefixtures("_jax_triton")
def test_rows_of_another_backend_are_not_taken():
    rows = [row(name, mark(100)) for name in PASSES]
    assert make_plan(PROBLEM, H200, rows, backend="pallas") == make_plan(PROBLEM, H200, backend="pallas")
    assert make_plan(PROBLEM, L4, rows) == make_plan(PROBLEM, L4)
    assert make_plan(PROBLEM, H200, rows, backend="xla") == Plan("xla")
    pallas = [row(name, mark(100, "pallas")) for name in PASSES]
    assert make_plan(PROBLEM, H200, pallas, backend="pallas").fwd == mark(100, "pallas")


@pytest.mark.usefixtures("_jax_triton")
def test_triton_takes_no_pallas_rows():
    """Such as a machine has stored before jax-triton was installed."""
    pallas = [row(name, mark(100, "pallas")) for name in PASSES]
    assert make_plan(PROBLEM, H200, pallas) == make_plan(PROBLEM, H200)
    assert make_plan(PROBLEM, H200, pallas, backend="triton") == make_plan(PROBLEM, H200)


@pytest.mark.parametrize("size", [(64, 128), (128, 32), (256, 128), (256, 64), (128, 512)], ids=str)
def test_tiles_that_the_triton_kernel_does_not_have(size):
    with pytest.raises(
        ValueError, match=f"{size[0]}x{size[1]}: the triton kernel has 128x128, 192x128, 128x256, 128x64"
    ):
        Tiles("triton", *size)
    Tiles("pallas", *size)


def test_one_stage_would_wait_for_itself():
    with pytest.raises(ValueError, match=r"Tiles\.stages=1 must be at least 2"):
        Tiles("triton", 128, 128, stages=1)
    assert Tiles("pallas", 128, 128, stages=1).stages == 1


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
        ({"kernel": "triton", "split": 2}, "no bk, split and swap"),
        ({"kernel": "xla", "bk": 256}, "no bk, split and swap"),
        ({"kernel": "pallas", "dynamic": True}, "are not dynamic"),
        ({"kernel": "xla", "dynamic": True}, "are not dynamic"),
        ({"split": 0}, "at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            Tiles(**wrong)
    for tiles in (Tiles(bm=1), Tiles(bk=256), Tiles(split=2), Tiles(swap=True)):
        with pytest.raises(ValueError, match=r"plan\.wgrad=.*no bm below 16, bk, split or swap"):
            make_plan(PROBLEM, L4, plan=Plan("pallas", wgrad=tiles))


@pytest.mark.usefixtures("_jax_triton")
def test_only_groups_have_dynamic_tiles():
    tiles, dense = Tiles("triton", 128, 128, stages=4, dynamic=True), dataclasses.replace(PROBLEM, G=0)
    for name in PASSES:
        assert getattr(make_plan(PROBLEM, H200, plan=Plan("triton", **{name: tiles})), name) == tiles
        with pytest.raises(ValueError, match=rf"plan\.{name}=.*only products over groups have dynamic tiles"):
            make_plan(dense, H200, plan=Plan("triton", **{name: tiles}))


def test_tiles_that_it_has():
    for bm, bn in ((128, 128), (192, 128), (128, 256), (128, 64)):
        assert (Tiles("triton", bm, bn).bm, Tiles("triton", bm, bn).bn) == (bm, bn)
    with pytest.raises(ValueError, match=r"Tiles\.bm=192 must be a power of two"):
        Tiles("pallas", 192, 128)


def test_three_consumers_where_their_tiles_fill_the_card():
    def rows_of_a_tile(M, K, N, G=0, recipe="blockwise"):
        return [heuristic(name, Problem(M, K, N, recipe, "bfloat16", G), H200, "triton").bm for name in PASSES]

    assert rows_of_a_tile(8192, 8192, 8192) == [192, 192, 192]
    assert rows_of_a_tile(8192, 8192, 8192, recipe="tensorwise") == [
        128,
        192,
        192,
    ]  # the forward's sums are the tensor core's, 256 columns wide
    assert rows_of_a_tile(8192, 4096, 4096)[2] == 128  # 704 tiles are five rounds and a third, 1,024 almost eight
    assert rows_of_a_tile(8192, 7168, 2048)[0] == 128  # 688, or 1,024
    assert rows_of_a_tile(32768, 2048, 768, G=128)[:2] == [128, 128]  # groups of 256 rows are two tiles of either


@pytest.mark.parametrize("bn", [64, 128, 256])
def test_shared_memory_has_room_for_a_tile_of_two_bytes(bn):
    """Beside the stages of each depth: whole, else half; a depth that leaves no room for either does not fit."""
    for stages in range(2, 12):
        tiles = Tiles("triton", 128, bn, stages=stages)
        pipeline = stages * ((128 + 8) * (128 + bn) + 20) + 512
        left = 232_448 - pipeline
        columns = bn if 256 * bn <= left else bn // 2 if 128 * bn <= left else 0
        assert tiles.stored(2) == columns
        assert (tiles.shared_bytes <= 232_448) == (columns > 0)
        assert tiles.shared_bytes == pipeline + 256 * (columns or bn)


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


def test_the_choice_depends_on_the_card():
    assert sizes_of(333, 4096, 4096, "blockwise", cores=78)[0] == (192, 128)  # 64 tiles, or 96 in two rounds
    assert sizes_of(333, 4096, 4096, "tensorwise", cores=78)[0] == (128, 256)  # 48, or two rounds of half as long
    assert sizes_of(333, 4096, 4096, "tensorwise", cores=96)[0] == (128, 128)


def test_groups_have_no_tiles_of_64_columns():
    for M, G in ((8, 8), (333, 2), (4096, 128)):
        for recipe in RECIPES:
            found = sizes_of(M, 7168, 2048, recipe, G)
            assert {bn for _, bn in found} <= {128, 256}
            assert found[0][1] == (256 if RECIPES[recipe].fast else 128)


@pytest.mark.parametrize("M", [4096, 8192, 16384, 32768])
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_many_tiles(M, recipe):
    """Whatever the widths, results of at least 1,024 columns have tiles that fill the card once: 256 columns where the
    tensor core does the whole sum, and such tiles fill it four times."""
    for K, N in itertools.product((1024, 1536, 2048, 4096, 5120, 7168, 14336), repeat=2):
        fwd, dgrad, wgrad = sizes_of(M, K, N, recipe)
        many = M // 128 * (N // 256) > 4 * 132
        whole = [(128, 256)] if many else [(128, 256), (128, 128)]
        assert fwd in (whole if RECIPES[recipe].fast else [(128, 128), (192, 128)])
        assert dgrad in ((128, 128), (192, 128))
        assert (wgrad == (128, 64)) == (K * N == 1024 * 1024)  # 64 tiles of 128x128


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
