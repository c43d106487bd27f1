"""Products across devices."""

GATHER, SCATTER, OPERANDS = (f"parallel/{name}.py" for name in ("all_gather", "reduce_scatter", "operands"))
VALUES = "tests/parallel/test_values.py"
ROWS, KEPT, BLOCK = (
    f"{VALUES}::{name}" for name in ("test_rows", "test_only_local_rows_are_kept", "test_a_megatron_block")
)

# fmt: off
MUTATIONS = {
    "parallel rows: the last one that counts is left out": (OPERANDS, "dtype=jnp.int32) < rows)", "dtype=jnp.int32) + 1 < rows)", ROWS),
    "parallel rows: each device counts from 0": (OPERANDS, "lax.axis_index(spec.axis_name) * x.shape[0]", "0", ROWS),
    "parallel rows: cotangents past them count": (GATHER, "dys = tuple(only(rows, dy) for dy in dys)", "dys = tuple(dys)", ROWS),
    "parallel rows: the bias is there past them": (
        GATHER, "y = only(rows, y + bias.astype(jnp.float32)[None])", "y = y + bias.astype(jnp.float32)[None]", ROWS),
    "parallel rows: the weight gradient reads past them": (SCATTER, "dot(spec, only(rows, h), gathered, (0, 0))", "dot(spec, h, gathered, (0, 0))", ROWS),
    "parallel bias: each device adds it to its part of the sum": (
        SCATTER, "y = scatter_sum(spec, dot(spec, only(rows, h), w, (1, 0)))",
        "y = scatter_sum(spec, dot(spec, only(rows, h), w, (1, 0)) + (0 if bias is None else bias[None]))", VALUES),
    "parallel gradient: x's is of the first weight alone": (GATHER, "functools.reduce(jnp.add, [", "functools.reduce(lambda a, b: a, [", VALUES),
    "parallel gradient: a wide weight's is rounded": (
        GATHER, "dot(spec, gathered, dy, (0, 0)).astype(dtype)", "dot(spec, gathered, dy, (0, 0)).astype(spec.dtype).astype(dtype)",
        f"{VALUES}::test_float32_weights_under_bfloat16"),
    "parallel memory: the gathered rows are kept": (GATHER, "x, dys = barrier((x, dys))", "x, dys = x, dys", KEPT),
    "parallel axes: a replicated weight's gradient is one device's": (
        GATHER, "x, rows, *both = vary_over(axis_name, x, check_rows(rows), *weights, *biases)",
        "x, rows, *both = x, check_rows(rows), *weights, *biases", f"{VALUES}::test_another_axis_beside"),
    "parallel sizes: XLA is asked to gather nothing": (OPERANDS, "    if not x.size:  # XLA", "    if False:  # XLA", f"{VALUES}::test_random_sizes"),
    "parallel layer: the row-parallel layer's bias is forgotten": (
        "nn/parallel_linear.py", "return matmul_reduce_scatter(x, kernel, self.axis_name, bias=bias,",
        "return matmul_reduce_scatter(x, kernel, self.axis_name, bias=None,", "tests/contracts/test_eager.py"),
}
