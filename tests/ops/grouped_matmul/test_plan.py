"""Plans of the grouped products: kernel by device and shape, tuned rows, heuristic, candidates; what is lowered."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import pytest

import jaxops
from jaxops._lib.planning import device as device_facts
from jaxops._lib.planning.device import Device
from jaxops.ops import grouped_matmul
from jaxops.ops.grouped_matmul import Plan, Problem, Tiles, candidates
from jaxops.ops.grouped_matmul.plan import HOPPER_TILES, PASSES, heuristic, hopper_can
from tests.hopper import lower_for_h200
from tests.plans import by_choices

make_plan = by_choices(grouped_matmul.make_plan)

H200 = Device("NVIDIA H200", "gpu")
GPUS = [H200, Device("NVIDIA A100-SXM4-80GB", "gpu"), Device("NVIDIA L4", "gpu")]
CPU = Device("cpu", "cpu")
PROBLEM = Problem(8, 1000, 500, 700, "bfloat16")
EIGHTS = Problem(8, 1000, 504, 704, "bfloat16")  # what the Hopper kernel can multiply, PROBLEM it cannot
pytestmark = [pytest.mark.versions, pytest.mark.usefixtures("jax_triton")]


def mark(panel: int) -> Tiles:
    """Tiles that no heuristic chooses; the panel identifies them."""
    return Tiles(16, 16, 16, warps=1, stages=1, panel=panel)


def row(pass_name: str, tiles: Tiles, problem: Problem = PROBLEM, **change) -> dict:
    sizes = {name: getattr(problem, name) for name in ("G", "M", "K", "N", "dtype")}
    return {"op": "grouped_matmul", "pass": pass_name, **sizes, "tiles": dataclasses.asdict(tiles), "us": 1.0, **change}


def problem_of(row: dict) -> Problem:
    return Problem(row["G"], row["M"], row["K"], row["N"], row["dtype"])


def test_rows_serve_sizes_up_to_a_power_of_two():
    """A new length inside of one finds the row; other sizes and dtypes do not."""
    rows = [row(name, mark(100 + i)) for i, name in enumerate(PASSES)]
    for change in ({"M": 513, "K": 512}, {"M": 1024, "G": 5, "N": 513}):
        plan = make_plan(dataclasses.replace(PROBLEM, **change), H200, rows)
        assert (plan.fwd, plan.dgrad, plan.wgrad) == (mark(100), mark(101), mark(102))
    for change in ({"dtype": "float32"}, {"K": 1025}, {"N": 100}, {"M": 1025}, {"M": 512}, {"G": 9}, {"G": 4}):
        others = [row(name, mark(100), **change) for name in PASSES]
        assert make_plan(PROBLEM, H200, others) == make_plan(PROBLEM, H200)


@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_rows_of_whole_cache_lines_are_apart(transpose_rhs):
    """L2's loads bound products whose widths are no multiples of 64."""
    whole, odd = (Problem(64, 32768, 2048, N, "float32", transpose_rhs) for N in (1408, 1400))
    for problem, other in ((whole, odd), (odd, whole)):
        rows = [row(name, mark(100), problem) for name in PASSES]
        assert make_plan(problem, H200, rows) == Plan("pallas", mark(100), mark(100), mark(100))
        assert make_plan(other, H200, rows) == make_plan(other, H200)


def test_transposed_rhs_finds_rows_under_swapped_sizes_and_pass():
    """Its forward reads rhs as dgrad does: it takes the row of dgrad of the problem with K and N swapped."""
    swapped = dataclasses.replace(PROBLEM, K=PROBLEM.N, N=PROBLEM.K)
    rows = [row(name, mark(100 + i), swapped) for i, name in enumerate(PASSES)]
    assert (
        rows[0]["K"].bit_length() != rows[0]["N"].bit_length()
    )  # otherwise the sizes fall into one bucket and nothing is tested
    transposed = dataclasses.replace(PROBLEM, transpose_rhs=True)
    assert make_plan(transposed, H200, rows) == Plan("pallas", fwd=mark(101), dgrad=mark(100), wgrad=mark(102))
    assert make_plan(PROBLEM, H200, rows) == make_plan(PROBLEM, H200)
    # The same problem's own rows are not for the transposed one.
    assert make_plan(transposed, H200, [row(name, mark(100)) for name in PASSES]) == make_plan(transposed, H200)


def test_transposed_heuristic_is_that_of_the_swapped_problem():
    skewed = Problem(4, 4096, 32, 4096, "bfloat16")
    plan = make_plan(dataclasses.replace(skewed, transpose_rhs=True), H200)
    swapped = make_plan(dataclasses.replace(skewed, K=skewed.N, N=skewed.K), H200)
    assert plan == Plan("triton", swapped.dgrad, swapped.fwd, swapped.wgrad)


def test_kernel_by_device_and_problem(monkeypatch):
    """Triton on Hopper: 16-bit numbers, widths in multiples of 8, groups of 8 rows or more, jax-triton installed."""

    def kernels(problem, device=H200, **named):
        plan = make_plan(problem, device, **named)
        return plan.backend, *(getattr(plan, name).kernel for name in PASSES)

    pallas = ("pallas",) * 4
    assert (
        kernels(EIGHTS) == kernels(EIGHTS, backend="triton") == kernels(EIGHTS, plan=Plan("triton")) == ("triton",) * 4
    )
    assert kernels(EIGHTS, backend="pallas") == kernels(EIGHTS, GPUS[1]) == pallas
    assert [
        hopper_can(dataclasses.replace(EIGHTS, **change))
        for change in ({"K": 500}, {"N": 700}, {"dtype": "float32"}, {"K": 0})
    ] == [False] * 4
    assert kernels(dataclasses.replace(EIGHTS, K=500)) == pallas
    few = dataclasses.replace(EIGHTS, M=7 * EIGHTS.G)
    assert kernels(few) == ("triton", "pallas", "pallas", "triton")
    assert kernels(few, backend="triton") == ("triton",) * 4
    monkeypatch.setattr(device_facts, "gluon_missing", lambda: "they are not installed")
    with pytest.warns(
        RuntimeWarning, match="jaxops takes its Pallas kernels on this NVIDIA H200.*they are not installed"
    ):
        make_plan(EIGHTS, H200)
    assert kernels(EIGHTS) == pallas  # said once
    with pytest.raises(NotImplementedError, match=r"they are not installed.*backend='auto'"):
        make_plan(EIGHTS, H200, backend="triton")


@pytest.mark.parametrize(
    ("change", "said"), [({"dtype": "float32"}, "this is float32"), ({"K": 500}, "K=500"), ({"N": 700}, "N=700")]
)
def test_triton_says_what_it_cannot(change, said):
    with pytest.raises(
        NotImplementedError, match=f"bfloat16 and float16, with K and N multiples of 8.*{said}.*backend='pallas'"
    ):
        make_plan(dataclasses.replace(EIGHTS, **change), H200, backend="triton")
    with pytest.raises(NotImplementedError, match="needs a Hopper GPU"):
        make_plan(EIGHTS, CPU, plan=Plan("triton"))


def test_triton_tiles_under_another_backend_raise():
    with pytest.raises(ValueError, match=r"plan\.fwd has kernel='triton'.*'pallas'.*write Plan\('triton'"):
        make_plan(EIGHTS, H200, plan=Plan("pallas", fwd=heuristic("fwd", EIGHTS, H200, "triton")))


SPLIT = Tiles(128, 256, 64, 8, 3, kernel="triton", split=6)


@pytest.mark.parametrize(
    ("name", "tiles"), [("dgrad", Tiles(16, 16, 16, split=2)), ("wgrad", Tiles(16, 16, 16, split=2)), ("fwd", SPLIT)]
)
def test_split_is_not_of_these_kernels(name, tiles):
    with pytest.raises(ValueError, match=rf"plan\.{name}=.*only wgrad with kernel='triton', and grouped_glu's kernel"):
        make_plan(EIGHTS, H200, plan=Plan(tiles.kernel, **{name: tiles}))


def test_split_of_explicit_and_tuned_tiles():
    """Explicit tiles are obeyed. Tuned rows were measured with groups of like lengths."""
    problem, tiles = Problem(35, 49611, 272, 1192, "bfloat16"), dataclasses.replace(SPLIT, split=1)
    chosen = make_plan(problem, H200).wgrad.split
    assert chosen > 1
    for own in (1, 2, 6):
        explicit = dataclasses.replace(tiles, split=own)
        assert make_plan(problem, H200, plan=Plan("triton", wgrad=explicit)).wgrad == explicit
    found = make_plan(problem, H200, [row("wgrad", tiles, problem)]).wgrad
    assert (found.bm, found.bn, found.stages) == (128, 256, 3)
    assert found.split > 1
    assert make_plan(problem, H200, [row("wgrad", SPLIT, problem)]).wgrad == SPLIT
    assert make_plan(problem, H200, backend="pallas").wgrad.split == 1


@pytest.mark.parametrize(
    "change",
    [
        *({"bm": 64}, {"bn": 64}, {"ping_pong": True}, {"bk": 32}, {"warps": 4}, {"tail": 16}, {"stages": 1}),
        {"bm": 256, "ping_pong": True},  # a cluster is cooperative
    ],
    ids=str,
)
def test_tiles_that_the_triton_kernel_has_not(change):
    with pytest.raises(ValueError, match=r"the triton kernel has tiles of 128x256.*256x256"):
        dataclasses.replace(Tiles(128, 256, 64, 8, kernel="triton"), **change)


SIZES = st.one_of(st.integers(0, 300), st.sampled_from([512, 768, 1408, 2048, 4096, 7168, 14336, 32768]))


@hypothesis.settings(max_examples=200)
@hypothesis.given(
    G=st.sampled_from([0, 1, 2, 8, 60, 128, 256]),
    M=st.one_of(SIZES, st.just(1 << 20)),
    K=SIZES,
    N=SIZES,
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    transpose_rhs=st.booleans(),
    device=st.sampled_from(GPUS),
)
def test_heuristic_fits_every_device(G, M, K, N, dtype, transpose_rhs, device):
    """Tiles raises for what no kernel supports. A tile is less than twice as large as what it covers: all rows, since
    one group may hold them; the tail covers the mean group."""
    plan = make_plan(Problem(G, M, K, N, dtype, transpose_rhs), device)
    rows = -(-M // max(G, 1))
    covered = {"fwd": (M, N), "dgrad": (M, K), "wgrad": (N, K) if transpose_rhs else (K, N)}
    for name in PASSES:
        tiles = getattr(plan, name)
        assert tiles.shared_bytes(dtype) <= device.shared_bytes
        if tiles.kernel == "triton":  # its tiles are what they are
            continue
        assert tiles.bm < 2 * max(16, covered[name][0])
        assert tiles.bn < 2 * max(16, covered[name][1])
        assert tiles.peel in (False, name == "wgrad")
        assert tiles.tail < 2 * max(16, rows)
        assert tiles.tail == 0 if name == "wgrad" or tiles.bm == 16 else 16 <= tiles.tail < tiles.bm


@pytest.mark.parametrize("pass_name", PASSES)
@hypothesis.given(
    G=st.sampled_from([1, 8, 64, 256]), M=st.integers(1, 32768), K=st.integers(1, 7168), N=st.integers(1, 14336),
    dtype=st.sampled_from(["bfloat16", "float32"]), device=st.sampled_from(GPUS),
)  # fmt: skip
@hypothesis.example(G=8, M=256, K=64, N=64, dtype="bfloat16", device=H200)
@hypothesis.example(G=4, M=32768, K=4096, N=4096, dtype="bfloat16", device=H200)
def test_candidates(pass_name, G, M, K, N, dtype, device):
    """Every problem has some, or tuning would stop; they fit the device, and the problem and the chip suit them."""
    problem = Problem(G, M, K, N, dtype)
    for kernel in ("pallas", *(["triton"] if device is H200 and hopper_can(problem) else [])):
        found = candidates(pass_name, problem, device, kernel)
        assert 0 < len(set(found)) == len(found)
        assert all(tiles.shared_bytes(dtype) <= device.shared_bytes for tiles in found)
        assert pass_name == "wgrad" or not any(tiles.peel for tiles in found)
        if kernel == "triton":
            assert {(tiles.bm, tiles.bn, tiles.ping_pong) for tiles in found} <= set(HOPPER_TILES)


def test_candidates_are_those_that_the_chip_suits():
    """Tiles of 256 columns are left out where the result has half as many."""
    assert len(candidates("fwd", Problem(4, 32768, 4096, 4096, "bfloat16"), GPUS[1])) <= 100
    columns = lambda N: {t.bn for t in candidates("fwd", Problem(4, 32768, 4096, N, "bfloat16"), H200, "triton")}
    assert columns(4096) >= {128, 256} > columns(128) == {128}


# Lowering does not depend on sizes beyond what is masked, so one small problem stands for all.
SMALL = Problem(4, 512, 512, 512, "bfloat16")


def lowered(pass_name: str, tiles: Tiles, problem: Problem = SMALL) -> str:
    """The StableHLO of one pass alone; lhs is [M, K] in fwd and wgrad, and dout [M, N] in dgrad."""

    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, problem.dtype)

    G, M, K, N = problem.G, problem.M, problem.K, problem.N
    rhs = shape(G, K, N)
    a, b = {"fwd": (shape(M, K), rhs), "dgrad": (shape(M, N), rhs), "wgrad": (shape(M, K), shape(M, N))}[pass_name]
    plan = Plan("pallas", tiles, tiles, tiles)

    def run(a, b, offsets):
        if pass_name == "wgrad":
            return jaxops.grouped_wgrad(a, b, offsets, plan=plan)
        return jaxops.grouped_matmul(a, b, offsets, transpose_rhs=pass_name == "dgrad", plan=plan)

    return lower_for_h200(run, a, b, jax.ShapeDtypeStruct((G + 1,), "int32"))


def assert_one_kernel(text: str, pass_name: str) -> None:
    """The pass, and wgrad's schedule; no copy, transpose or cast of an operand beside them."""
    kernels = 2 if pass_name == "wgrad" else 1
    assert text.count("__gpu$xla.gpu.triton") == kernels
    assert f'"grouped_matmul_{pass_name}"' in text
    assert ("schedule_groups" in text) == (pass_name == "wgrad")
    operations = [line.split("stablehlo.")[1].split()[0] for line in text.splitlines() if "stablehlo." in line]
    assert operations == ["custom_call"] * kernels


def kernels_of(pass_name: str, tiles: list[Tiles]) -> list[Tiles]:
    """One for each kernel that differs in more than numbers: warps, depth and panel change no shape in it."""
    return sorted({dataclasses.replace(t, warps=4, stages=3, panel=8) for t in tiles}, key=dataclasses.astuple)


@pytest.mark.parametrize("pass_name", PASSES)
def test_candidates_lower_for_an_h200(pass_name):
    for tiles in kernels_of(pass_name, candidates(pass_name, SMALL, H200))[
        ::2
    ]:  # every second: each size of each dimension is still among them
        assert_one_kernel(lowered(pass_name, tiles), pass_name)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("pass_name", PASSES)
def test_heuristic_lowers_for_an_h200(pass_name, dtype):
    """Odd sizes, so that every load is masked."""
    problem = Problem(3, 301, 203, 77, dtype)
    assert_one_kernel(lowered(pass_name, heuristic(pass_name, problem, H200), problem), pass_name)
