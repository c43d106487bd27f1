"""What rows say of times: benchmarks/."""

HARNESS = "tests/benchmarks/test_bench_harness.py"
RATES, MACHINE = f"{HARNESS}::test_rates_and_their_part_of_the_ceiling", f"{HARNESS}::test_what_the_machine_reaches"
GROUPED = "tests/benchmarks/test_bench_grouped_matmul.py::test_smoke_run_writes_a_row_a_case_and_side"
FP8, FP8_GROUPED = (
    f"tests/benchmarks/test_bench_fp8.py::test_{name}_smoke_run" for name in ("fp8_matmul", "fp8_grouped_matmul")
)
STEP = "tests/benchmarks/test_bench_train_step.py::test_smoke_run_writes_a_row_a_side"

# fmt: off
MUTATIONS = {
    "benchmarks: of_ceiling the other way round": (
        "harness.py", "reached / self.ceiling", "self.ceiling / reached", RATES),
    "benchmarks: ratios the other way round": (
        "harness.py", "peer: other.us_p50 / times[side].us_p50", "peer: times[side].us_p50 / other.us_p50", RATES),
    "benchmarks: GB/s are MB/s": (
        "harness.py", '{"tflops": 1e6, "gbps": 1e3}', '{"tflops": 1e6, "gbps": 1e0}', RATES),
    "benchmarks: the median is the fastest": (
        "harness.py", "(20, 50, 80)", "(20, 20, 80)", f"{HARNESS}::test_percentiles"),
    "benchmarks: a copy is read alone": (
        "harness.py", "return 2 * copied_bytes / times.us_p50", "return copied_bytes / times.us_p50", MACHINE),
    "benchmarks: a product is half its operations": (
        "harness.py", "rates = [2 * m * k * width", "rates = [m * k * width", MACHINE),
    "benchmarks: the slower product is the ceiling": (
        "harness.py", 'times["copy"]), max(rates))', 'times["copy"]), min(rates))', MACHINE),
    "benchmarks: grouped_matmul's of_ceiling the other way round": (
        "bench_grouped_matmul.py", "least_us / t.us_p50, harness", "t.us_p50 / least_us, harness", GROUPED),
    "benchmarks: grouped_matmul's slower product is the ceiling": (
        "bench_grouped_matmul.py", "dense_tflops=max(rates.values())", "dense_tflops=min(rates.values())", GROUPED),
    "benchmarks: fp8_matmul's of_ceiling the other way round": (
        "bench_fp8_matmul.py", 'facts["tflops"] / run.dense_tflops', 'run.dense_tflops / facts["tflops"]', FP8),
    "benchmarks: fp8_grouped_matmul's of_ceiling the other way round": (
        "bench_fp8_grouped_matmul.py", "else least_us / t.us_p50, harness", "else t.us_p50 / least_us, harness", FP8_GROUPED),
    "benchmarks: fp8_grouped_matmul's ceiling is bfloat16's": (
        "bench_fp8_grouped_matmul.py", "dataclasses.replace(run.ceilings, dense_tflops=run.dense_tflops).least_us", "run.ceilings.least_us", FP8_GROUPED),
    "benchmarks: the CPU's of_ceiling the other way round": (
        "bench_cpu_backend.py", "tflops / ceilings.dense_tflops", "ceilings.dense_tflops / tflops",
        "tests/benchmarks/test_bench_grouped_matmul.py::test_cpu_backend"),
    "benchmarks: a training step's of_ceiling the other way round": (
        "bench_train_step.py", 'facts["tflops"] / dense, vs', 'dense / facts["tflops"], vs', STEP),
    "benchmarks: offloading's of_ceiling the other way round": (
        "bench_offload.py", 'facts["tflops"] / dense, vs', 'dense / facts["tflops"], vs', "tests/benchmarks/test_bench_offload.py::test_smoke"),
}
# fmt: on
