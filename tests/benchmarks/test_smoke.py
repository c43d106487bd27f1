"""The smoke runs of all benchmarks of ops on a CPU, with a fake torch: a row a case and side; and what all refuse."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import harness, shapes
from benchmarks.harness import report
from benchmarks.harness.machine import Ceilings
from benchmarks.layers import bench_moe
from benchmarks.ops import (
    bench_adaln,
    bench_fp8_grouped_matmul,
    bench_fp8_matmul,
    bench_grouped_matmul,
    bench_modality_grouped_matmul,
    bench_packed_attention,
    bench_permute,
    bench_quantize,
    bench_route,
    bench_router,
)
from benchmarks.ops.quantized_bytes import moved_bytes
from benchmarks.peers.jax_passes import jaxops_passes
from benchmarks.shapes import models as shapes_models
from tests.benchmarks.conftest import rows_of
from tests.command_line import run

FILES = sorted((harness.ROOT / "benchmarks").glob("*/bench_*.py"))
Side = tuple[str, str, str]


@dataclasses.dataclass(frozen=True)
class Smoke:
    """A benchmark's run.

    Attributes:
      sides: (pass, dist, backend) of its rows, in their order, by op.
      rate, work: "gbps" or "tflops", and bytes or operations of a row's case.
      options: of the command.
      prints: what the output must have.
    """

    module: Any
    sides: dict[str, list[Side]]
    rate: str
    work: Callable[[dict], float]
    options: str = ""
    prints: tuple[str, ...] = ()


def each(passes, dists, sides) -> list[Side]:
    return [(p, dist, side) for p in passes for dist in dists for side in sides]


def product_flops(row: dict) -> int:
    return 2 * row["shape"]["M"] * row["shape"]["K"] * row["shape"]["N"]


LENGTHS = ("unequal", "one")
BOTH, BY_MASK = ("pallas", "xla"), ("xla_mask", "xla_padded")
SEQUENCES = shapes.group_offsets(shapes.sequence_lengths("unequal", 4, 128))
MOE_SIDES = [("router", "jaxops"), ("router", "ragged_dot"), ("balanced", "jaxops"), ("skewed", "jaxops")]
TORCH_LEFT_OUT = "torch_grouped_mm at {} smoke skewed {}: RuntimeError: {}"
SMOKES = {
    "grouped_matmul": Smoke(
        bench_grouped_matmul,
        {
            "grouped_matmul": [
                *each(("fwd", "wgrad"), ("balanced",), ("pallas", "ragged_dot", "cublas", "torch_grouped_mm")),
                *each(("fwd", "wgrad"), ("skewed",), ("pallas", "cublas")),
            ]
        },
        "tflops",
        product_flops,
        "--passes fwd,wgrad --dists balanced,skewed --peers ragged_dot,torch_grouped_mm,cublas",
        (
            TORCH_LEFT_OUT.format("grouped_matmul", "fwd", "RuntimeError: strides"),
            TORCH_LEFT_OUT.format("grouped_matmul", "wgrad", "torch's process ended with 3"),
            "torch_grouped_mm: refused: repeat: no",
        ),
    ),
    "fp8_grouped_matmul": Smoke(
        bench_fp8_grouped_matmul,
        {
            "fp8_grouped_matmul": [
                *each(("fwd", "wgrad"), ("balanced", "skewed"), ("xla", "jaxops_bf16")),
                ("fwd", "balanced", "torch_grouped_mm"),
            ]
        },
        "tflops",
        product_flops,
        "--passes fwd,wgrad --peers jaxops_bf16,torch_grouped_mm",
        (TORCH_LEFT_OUT.format("fp8_grouped_matmul", "fwd", "RuntimeError: strides"),),
    ),
    "fp8_matmul": Smoke(
        bench_fp8_matmul,
        {
            "fp8_matmul": [
                *each(("fwd",), ("",), ("xla", "xla_bf16", "torch_compile")),
                *each(("gemm",), ("",), ("xla", "xla", "xla_bf16")),
            ]
        },
        "tflops",
        product_flops,
        "--recipes blockwise --passes fwd,gemm --peers xla_bf16,torch_compile",
        ("left out: cublaslt at fp8_matmul m128_k256_n128 gemm: NotImplementedError", "of floor"),
    ),
    "quantize": Smoke(
        bench_quantize,
        {"quantize": [("fwd", "", side) for side in (*BOTH, "torch_compile", *BOTH)]},
        "gbps",
        lambda row: moved_bytes("block_1x128", 256, 128, row["layouts"]),
        "--scalings block_1x128",
    ),
    "adaln": Smoke(
        bench_adaln,
        {"adaln": each(("fwd",), LENGTHS, (*BOTH, "torch_compile")) + each(("bwd",), LENGTHS, BOTH)},
        "gbps",
        lambda row: 2 * 64 * {"fwd": 2 * 96 + 2 * 5, "bwd": 3 * 96 + 3 * 5}[row["pass"]],
        "--ops adaln --passes fwd,bwd --dists one,unequal",
    ),
    "packed_attention": Smoke(
        bench_packed_attention,
        {
            "packed_attention": [
                *(2 * each(("fwd+bwd",), ("unequal",), ("jaxops", "jaxops_pallas", "jaxops_blocks", *BY_MASK))),
                *each(("fwd+bwd",), ("unequal",), ("torch_flash",)),
            ]
        },
        "tflops",
        lambda row: bench_packed_attention.SMOKE.flops("fwd+bwd", shapes.visible_pairs(row["mask"], SEQUENCES)),
        "--passes fwd+bwd --dists unequal --masks causal,text_and_images "
        "--peers jaxops_pallas,jaxops_blocks,jaxops_cudnn,xla_mask,xla_padded,torch_flash",
        (
            "left out: jaxops_cudnn at packed_attention smoke causal unequal",
            "left out: torch_flash at packed_attention smoke text_and_images unequal",
        ),
    ),
    "permute": Smoke(
        bench_permute,
        {op: each(bench_permute.PASSES, ("",), BOTH) for op in bench_permute.OPS},
        "gbps",
        lambda row: bench_permute.SMOKE.moved_bytes(row["op"], row["pass"]),
    ),
    "route": Smoke(
        bench_route,
        {"route": each(bench_route.PASSES, ("",), BOTH)},
        "gbps",
        lambda row: bench_route.SMOKE.moved_bytes(row["pass"]),
    ),
    "router": Smoke(
        bench_router,
        {"router": each(bench_router.PASSES, ("",), ("jaxops", "xla", "tf32"))},
        "gbps",
        lambda row: bench_router.moved_bytes(bench_router.SMOKE, row["pass"]),
    ),
    "modality_grouped_matmul": Smoke(
        bench_modality_grouped_matmul,
        {"modality_grouped_matmul": each(("fwd",), ("skewed",), ("jaxops", "one_call_each", "padded"))},
        "tflops",
        lambda row: bench_modality_grouped_matmul.SMOKE.flops,
        "--passes fwd --dists skewed --peers one_call_each,padded,nobody",
        ("left out: nobody at modality_grouped_matmul smoke skewed fwd",),
    ),
    "moe": Smoke(
        bench_moe,
        {"moe": [(p, *side) for p in bench_moe.PASSES for side in MOE_SIDES]},
        "tflops",
        lambda row: bench_moe.SMOKE.flops(row["pass"]),
        "--peers ragged_dot,nobody",
        ("left out: nobody at moe smoke router fwd",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("smoke", SMOKES.values(), ids=SMOKES)
def test_smoke_run_writes_a_row_a_case_and_side(smoke, tmp_path, torch_answers):
    torch_answers()
    result = run(smoke.module.main, "--smoke", "--out", str(tmp_path), "--rounds", "1", *smoke.options.split())
    assert result.exit_code == 0, result.output
    assert all(text in result.output for text in smoke.prints), result.output
    (file,) = tmp_path.iterdir()
    rows = rows_of(file)
    for op, sides in smoke.sides.items():
        assert sorted((row["pass"], row["dist"], row["backend"]) for row in rows if row["op"] == op) == sorted(sides)
    of_case: dict[tuple, list[dict]] = {}
    for row in rows:
        assert set(harness.ROW_KEYS) <= set(row)
        if row["op"] in smoke.sides:
            of_case.setdefault(tuple(row.get(key) for key in ("op", "pass", "dist", "mask", "layouts")), []).append(row)
            rate = smoke.work(row) / row["us_p50"] / {"gbps": 1e3, "tflops": 1e6}[smoke.rate]
            assert row[smoke.rate] == pytest.approx(rate, rel=1e-2)
            assert row["max_err"] is None or 0 <= row["max_err"] < 0.3
    for own, *peers in of_case.values():
        if own["pass"] != "gemm":  # whose rows are several of jaxops
            assert own["vs"] == {
                peer["backend"]: pytest.approx(peer["us_p50"] / own["us_p50"], rel=2e-2, abs=1e-3) for peer in peers
            }
            assert not any(peer["vs"] for peer in peers)
    tables = run(report.main, str(tmp_path)).output
    assert all(f"## {op}, " in tables for op in smoke.sides), tables


@pytest.mark.parametrize("name", ["adaln", "grouped_matmul", "fp8_matmul", "fp8_grouped_matmul"])
def test_shares_of_the_ceiling(name, tmp_path, monkeypatch):
    """0.2 TFLOP/s in bfloat16, 0.25 in FP8, and 2 GB/s: the roofline's time, or the rate, over what was reached."""
    for module in (bench_grouped_matmul, importlib.import_module("benchmarks.harness.machine")):
        monkeypatch.setattr(module, "measure_ceilings", lambda *_, **__: Ceilings(2.0, 0.2, 0.25))
    options = {"adaln": "--ops adaln --passes fwd", "fp8_matmul": "--recipes blockwise --passes fwd"}
    options = options.get(name, "--passes wgrad --dists balanced").split()
    smoke = SMOKES[name]
    result = run(smoke.module.main, "--smoke", "--out", str(tmp_path), "--rounds", "1", "--peers", "", *options)
    assert result.exit_code == 0, result.output
    own = rows_of(next(tmp_path.iterdir()))[0]
    work, us = smoke.work(own), own["us_p50"]
    G, M, K, N = (own["shape"].get(size, 0) for size in "GMKN")
    want = {
        "adaln": own.get("gbps", 0) / 2,
        "grouped_matmul": max(work / 0.2e6, 2 * (M * K + M * N + G * K * N) / 2e3) / us,
        "fp8_matmul": own.get("tflops", 0) / 0.25,
        "fp8_grouped_matmul": max(work / 0.25e6, 2 * (M * K + M * N + G * K * N) / 2e3) / us,
    }[name]
    assert own["of_ceiling"] == pytest.approx(want, rel=1e-2, abs=1e-4)
    if name == "fp8_matmul":
        cast_us = bench_fp8_matmul.fp8_products.cast_bytes(bench_fp8_matmul.RECIPES["blockwise"], "fwd", M, K, N) / 2e3
        assert own["floor_us"] == pytest.approx(own["gemm_us"] + cast_us, rel=1e-2)
        assert own["of_floor"] == pytest.approx(own["floor_us"] / us, rel=1e-2)


@pytest.mark.parametrize(
    ("names", "dists", "count", "first", "own"),
    [
        ("dsv3,qwen3_30b", (), 2, "dsv3", ("balanced", "skewed", "one_group")),
        ("held_out", (), 20, "held_out_00", ("balanced",)),
        ("models", (), 60, shapes_models.models()[0].name, ("balanced", "router", "zipf", "huge")),
        ("all_models", ("half",), 470, "mixtral_8x7b_t4096_whole_up", ("half",)),
    ],
)
def test_shapes_and_their_distributions(names, dists, count, first, own):
    cases = bench_grouped_matmul.cases_of(names, dists)
    assert (len(cases), cases[0][0].name, cases[0][1]) == (count, first, own)


def test_a_part_of_the_models_shapes(tmp_path, monkeypatch, torch_answers):
    """The second of three shapes, with all four routings; every case counts as a miss."""
    torch_answers()
    monkeypatch.setattr(shapes_models, "LAYERS", {"tiny": (4, 2, 64, 128)})
    monkeypatch.setattr(shapes_models, "TOKENS", (16, 32, 48))
    monkeypatch.setattr(bench_grouped_matmul, "AGAIN_BELOW", {bench_grouped_matmul.TORCH: 1e9})
    monkeypatch.setattr(bench_grouped_matmul, "measure_ceilings", lambda *_, **__: Ceilings(2.0, 0.2))
    options = ["--shapes", "models", "--first", "1", "--count", "1", "--passes", "fwd", "--work-us", "1000"]
    options += ["--peers", "torch_grouped_mm", "--rounds", "1", "--out", str(tmp_path)]
    result = run(bench_grouped_matmul.main, *options)
    assert result.exit_code == 0, result.output
    rows = rows_of(tmp_path / "grouped_matmul.jsonl")
    assert {row["name"] for row in rows} == {shapes_models.models()[1].name}
    both = [(dist, side) for dist in shapes_models.DISTS for side in ("pallas", "torch_grouped_mm")]
    assert [(row["dist"], row["backend"], row["again"]) for row in rows] == [(*each, True) for each in both]


def test_layers_of_models(tmp_path, monkeypatch):
    """A set by its name, one of its layers by its own; the rate with a router's groups over that with even ones."""
    layers = shapes_models.MODEL_LAYERS
    assert len(layers) == 22
    assert layers["granite_3b_a800m_t4096"].dims == {"T": 4096, "E": 40, "k": 8, "D": 1536, "F": 512}
    for name in list(layers)[2:]:
        monkeypatch.delitem(layers, name)
    for name in layers:
        monkeypatch.setitem(layers, name, dataclasses.replace(bench_moe.SMOKE, name=name))
    machine = importlib.import_module("benchmarks.harness.machine")
    monkeypatch.setattr(machine, "measure_ceilings", lambda *_, **__: None)
    for names, measured in (("models", 2), ("mixtral_8x7b_t16384", 1)):
        out = tmp_path / names
        options = ["--passes", "fwd", "--dists", "balanced,router", "--peers", "", "--rounds", "1"]
        result = run(bench_moe.main, "--shapes", names, "--out", str(out), *options)
        assert result.exit_code == 0, result.output
        rows = rows_of(out / "moe.jsonl")
        assert [row["dist"] for row in rows] == ["balanced", "router"] * measured
        for even, routed in zip(rows[::2], rows[1::2], strict=True):
            assert even["name"] == routed["name"] in layers
            assert even["of_balanced"] == 1
            assert routed["of_balanced"] == pytest.approx(even["us_p50"] / routed["us_p50"], rel=1e-2)


def wrong_grouped(backend):
    passes = jaxops_passes("xla")
    return passes | {"fwd": lambda *args: passes["fwd"](*args) * 1.1}


def wrong_bits(right):
    def side(scaling, layouts, backend):
        def call(x):
            parts = right(scaling, layouts, "xla")(x)
            return parts | {"scales": parts["scales"].at[0, 0].multiply(1 + 1e-6)} if backend == "pallas" else parts

        return call

    return side


@pytest.mark.parametrize(
    ("name", "patched", "wrong", "options", "reason"),
    [
        ("grouped_matmul", "jaxops_passes", lambda _: wrong_grouped, "--dists balanced", "wrong result"),
        ("quantize", "jaxops_side", wrong_bits, "--scalings block_1x128 --layouts row", "wrong result: other bits"),
        (
            "fp8_matmul",
            "own_passes",
            lambda right: lambda *how: {"fwd": lambda *args: {"y": right(*how)["fwd"](*args)["y"] * 1.5}},
            "--recipes tensorwise",
            "wrong result",
        ),
    ],
)
def test_a_failed_check_writes_no_row_and_fails_the_run(name, patched, wrong, options, reason, tmp_path, monkeypatch):
    module = SMOKES[name].module
    monkeypatch.setattr(module, patched, wrong(getattr(module, patched)))
    options = [*options.split(), *([] if name == "quantize" else ["--passes", "fwd"]), "--peers", ""]
    result = run(module.main, "--smoke", "--out", str(tmp_path), "--rounds", "1", *options)
    assert result.exit_code == 1
    assert f"ArithmeticError: {reason}" in result.output
    assert {row["op"] for row in rows_of(next(tmp_path.iterdir()))} <= {"copy", "matmul"}


def test_an_option_that_is_unknown(tmp_path):
    result = run(bench_route.main, "--smoke", "--out", str(tmp_path), "--passes", "fwd,sideways")
    assert result.exit_code == 2
    assert "sideways" in result.output


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_without_a_gpu_nothing_lands_among_the_results(file):
    module = importlib.import_module(f"benchmarks.{file.parent.name}.{file.stem}")
    assert run(module.main).exit_code == 2
