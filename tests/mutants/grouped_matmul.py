"""Grouped products: grouped_matmul, modality_grouped_matmul, grouped_glu, and the work list that they read."""

GROUPED, MODALITY, GLU = "ops/grouped_matmul", "ops/modality_grouped_matmul", "ops/grouped_glu"
VALUES = "tests/ops/grouped_matmul/test_values.py"
ROUTINGS, STEPS, PATTERNS = (
    f"{VALUES}::test_float32",
    f"{VALUES}::test_wgrad_steps",
    f"{VALUES}::test_every_pattern_of_empty_groups",
)
MODALITIES, CHAIN, NAN_ROW, DEAD = (
    f"tests/ops/modality_grouped_matmul/test_values.py::test_{name}"
    for name in (
        "float32",
        "a_chain_of_two_needs_nothing_in_between",
        "a_row_that_is_nan_stays_in_its_group_and_columns",
        "modalities_of_size_zero",
    )
)
MODAL_TILES, MODAL_PLAN = (
    "tests/ops/modality_grouped_matmul/test_triton.py",
    "tests/ops/modality_grouped_matmul/test_plan.py",
)
UNITS, OUTSIDE, GELU, RELU, SIGMOID, TANH = (
    f"tests/ops/grouped_glu/test_values.py::test_{name}"
    for name in (
        "routings",
        "what_stands_outside_is_not_read",
        "activations[gelu-interpret]",
        "activations[relu-interpret]",
        "activations[sigmoid-interpret]",
        "activations[gelu_tanh-interpret]",
    )
)

# fmt: off
MUTATIONS = {
    "mask: a modality's columns of zeros are multiplied": (
        f"{MODALITY}/fwd_pallas.py", "(j < pl.cdiv(width, bn))", "(j < pl.cdiv(N, bn))", MODALITIES),
    "mask: a modality's last tile of columns is not cut": (
        f"{MODALITY}/fwd_pallas.py", "if width % bn and width < N:", "if width % bn and width > N:", NAN_ROW),
    "mask: zeros are not stored": (
        f"{MODALITY}/fwd_pallas.py", "pl.when(~product)", "pl.when(product & ~product)", MODALITIES),
    "mask: a modality stores past its groups' ends": (
        f"{MODALITY}/fwd_pallas.py", "jnp.arange(height, dtype=jnp.int32) < end)[:, None]", "jnp.arange(height, dtype=jnp.int32) < M)[:, None]", MODALITIES),
    "mask: K is the widest modality's": (
        "_lib/grouped_gemm_pallas.py", "jnp.arange(bk, dtype=jnp.int32) < K)", "jnp.arange(bk, dtype=jnp.int32) < lhs_ref.shape[1])", MODALITIES),
    "index: a modality's groups are counted from the first of all": (
        f"{MODALITY}/fwd_pallas.py", "jnp.clip(group - first, 0,", "jnp.clip(group, 0,", MODALITIES),
    "index: a modality has its neighbour's group, too": (
        f"{MODALITY}/fwd_pallas.py", "(group < last)", "(group <= last)", MODALITIES),
    "index: a matrix's gradient lands in its neighbour's": (
        f"{MODALITY}/wgrad_pallas.py", "jnp.clip(group - first, 0, G - 1)", "jnp.clip(group, 0, G - 1)", MODALITIES),
    "index: wgrad looks up the ranks of the first modality": (
        f"{MODALITY}/wgrad_pallas.py", "rank = first + number", "rank = number", MODALITIES),
    "index: wgrad's tiles all are the first modality's": (
        f"{MODALITY}/wgrad_pallas.py", "before += count", "before -= count", MODALITIES),
    "index: the work list forgets which runs are a launch's": (
        "_lib/schedule_pallas.py", "hi = jnp.where(mine, hi, lo)", "hi = jnp.where(mine, hi, hi)", "tests/_lib/test_schedule.py"),
    "offset: where a launch's modalities end": (
        "_lib/schedule_pallas.py", "jnp.where(r < end, count, 0)", "jnp.where(r <= end, count, 0)", "tests/_lib/test_schedule.py"),
    "bound: more tiles than the work list has": (
        "_lib/schedule_pallas.py", "total = jnp.minimum(total, tile_bound(M, G, bm))", "total = jnp.minimum(total, M * M)", "tests/_lib/test_schedule.py"),
    "offset: the last groups are in no program's block": (
        "_lib/schedule_pallas.py", "programs = pl.cdiv(count, block)", "programs = count // block", f"{VALUES}::test_a_hundred_groups"),
    "offset: the last groups are in no block of the work list": (
        "_lib/schedule_pallas.py", "programs = pl.cdiv(count, block)", "programs = count // block", "tests/_lib/test_schedule.py"),
    "index: the largest group of all comes first": (
        "_lib/schedule_pallas.py", "& ~((h >= first)[None, :] & (g < first)[:, None])", "", "tests/_lib/test_schedule.py"),
    "index: rows between modalities are nobody's": (
        f"{MODALITY}/parts.py", "*(1 + firsts[i] for i in found[1:])", "*(2 + firsts[i] for i in found[1:])", DEAD),
    "index: rows behind all groups are nobody's": (
        f"{MODALITY}/parts.py", "firsts[-1] + 2]", "firsts[-1] + 1]", MODALITIES),
    "launch: all launches write results of their own": (
        f"{MODALITY}/api.py", "for part in parts), offsets, result", "for part in parts), offsets, None", MODALITIES),
    "xla: a modality's columns are the widest's": (
        f"{MODALITY}/xla.py", "k, n = w.shape[1:][::-1] if transpose_rhs else w.shape[1:]", "k, n = w.shape[1:]",
        "tests/ops/modality_grouped_matmul/test_values.py::test_transposed"),
    "gradient: dgrad with the forward's tiles": (
        f"{MODALITY}/api.py", "plan = dataclasses.replace(plan, fwd=plan.dgrad, dgrad=plan.fwd)", "plan = dataclasses.replace(plan, fwd=plan.fwd)",
        "tests/ops/modality_grouped_matmul/test_contracts.py::test_dgrad_has_tiles_of_its_own"),
    "gradient: of a wgrad, the operands change places": (
        f"{MODALITY}/api.py", "return dlhs, ddout, None", "return ddout, dlhs, None",
        "tests/contracts/test_transforms.py::test_second_order[modality_grouped_matmul-xla]"),
    "index: a Hopper tile's first row tile": (
        f"{MODALITY}/gemm_triton.py", "first = gl.where(here, start, first)", "first = gl.where(here, 0, first)", MODAL_TILES),
    "index: a Hopper tile of zeros starts at the first column": (
        f"{MODALITY}/gemm_triton.py", "return first + i, (left + j) * BN, part", "return first + i, j * BN, part", MODAL_TILES),
    "index: a Hopper wgrad's rank": (
        f"{MODALITY}/gemm_triton.py", "first = gl.where(here, sizes[p][0], first)", "first = 0", MODAL_TILES),
    "plan: tiles of one size stay apart": (
        f"{MODALITY}/plan.py", "return tuple(found[_size(own)] for own in tiles)", "return tiles", MODAL_PLAN),
    "plan: the smallest matrices decide": (
        f"{MODALITY}/plan.py", "key=lambda i: -problem.shapes[i][1]", "key=lambda i: problem.shapes[i][1]", MODAL_PLAN),
    "plan: a launch of five": (
        f"{MODALITY}/parts.py", "MOST = 4", "MOST = 5", MODAL_PLAN),
    "mask: wgrad reads its neighbour's rows": (
        "_lib/grouped_gemm_pallas.py", "* bk + jnp.arange(bk, dtype=jnp.int32) < end)", "* bk + jnp.arange(bk, dtype=jnp.int32) < M)", STEPS),
    "mask: fwd stores past its group's end": (
        f"{GROUPED}/fwd_pallas.py", "stored = start + jnp.arange(height, dtype=jnp.int32) < end", "stored = start + jnp.arange(height, dtype=jnp.int32) < M",
        ROUTINGS),
    "mask: fwd multiplies past K": (
        "_lib/grouped_gemm_pallas.py", "k * bk + jnp.arange(bk, dtype=jnp.int32) < K)", "k * bk + jnp.arange(bk, dtype=jnp.int32) < K + 1)", ROUTINGS),
    "mask: rows outside the groups are multiplied": (
        f"{GROUPED}/fwd_pallas.py", "inside = group < G", "inside = group <= G", ROUTINGS),
    "index: every group takes the first matrix": (
        f"{GROUPED}/fwd_pallas.py", "jnp.clip(group, 0, G - 1)", "jnp.clip(group, 0, 0)", ROUTINGS),
    "index: tile columns": (
        "_lib/tiling.py", "return first + inside % height, inside // height", "return first + inside % panel, inside // panel", ROUTINGS),
    "index: wgrad's groups keep their order": (
        "_lib/schedule_pallas.py", "(h[None, :] < g[:, None])", "(h[None, :] <= g[:, None])", ROUTINGS),
    "offset: a tile's first row": (
        "_lib/tiling.py", "(t[:, None] - first[None, :]) * bm)", "(t[:, None] - first[None, :]) * (bm - 1))", ROUTINGS),
    "offset: runs start a group late": (
        "_lib/ragged.py", "offsets_at(jnp.clip(r - 1, 0, G))", "offsets_at(jnp.clip(r, 0, G))", ROUTINGS),
    "offset: the run behind the groups is forgotten": (
        "_lib/ragged.py", "hi = jnp.where(r <= G, offsets_at(jnp.clip(r, 0, G)), M)", "hi = offsets_at(jnp.clip(r, 0, G))", ROUTINGS),
    "offset: one tile too few": (
        "_lib/tiling.py", "return -(-M // bm) + G + 1", "return -(-M // bm)", PATTERNS),
    "glu mask: rows outside are read": (
        f"{GLU}/halves_pallas.py", "mask=self.inside, other=0.0", "mask=self.there, other=0.0", OUTSIDE),
    "glu mask: a row more than the groups have": (
        f"{GLU}/halves_pallas.py", "(rows < end), shape)", "(rows <= end), shape)", OUTSIDE),
    "glu mask: columns past F are stored": (
        f"{GLU}/halves_pallas.py", "there & jnp.broadcast_to(columns < F, shape)", "there & jnp.broadcast_to(columns <= F, shape)", UNITS),
    "glu mask: rows outside are not written": (
        f"{GLU}/halves_pallas.py", "astype(ref.dtype), mask=self.there)", "astype(ref.dtype), mask=self.inside)", OUTSIDE),
    "glu index: up is read where gate lies": (
        f"{GLU}/halves_pallas.py", "(refs[-1], F if len(refs) == 1 else 0)", "(refs[-1], 0)", UNITS),
    "glu index: a block's rows and columns change places": (
        f"{GLU}/halves_pallas.py", "program // across * block.rows", "program % across * block.rows", UNITS),
    "glu offset: the last columns are left out": (
        f"{GLU}/halves_pallas.py", "* pl.cdiv(F, block.columns)", "* (F // block.columns)", UNITS),
    "glu sum: the slope of silu": (
        "_lib/activations.py", "s * (1 + u * (1 - s))", "s * (1 + u * s)", UNITS),
    "glu sum: the slope of gelu": (
        "_lib/activations.py", "jnp.exp(-0.5 * u * u)", "jnp.exp(-u * u)", GELU),
    "glu sum: the slope of gelu_tanh": (
        "_lib/activations.py", "(1 + 3 * 0.044715 * u * u)", "(1 + 2 * 0.044715 * u * u)", TANH),
    "glu sum: the slope of relu": (
        "_lib/activations.py", "jnp.where(u > 0, jnp.ones_like(u), 0.0)", "jnp.where(u > 0, jnp.ones_like(u), 0.1)", RELU),
    "glu sum: the slope of sigmoid": (
        "_lib/activations.py", "return s, s * (1 - s)", "return s, s", SIGMOID),
    "glu sum: the gradients of gate and up change places": (
        "_lib/activations.py", "return dh * up.astype(jnp.float32) * slope, dh * value", "return dh * value, dh * up.astype(jnp.float32) * slope", UNITS),
    "glu sum: the gradients of x are rounded before they are added": (
        f"{GROUPED}/api.py", "wide = out if len(lhs) == 1 else jnp.float32", "wide = jnp.dtype(lhs[0].dtype)",
        "tests/ops/grouped_glu/test_values.py::test_compute_dtype"),
    "glu sum: the gradients of x are rounded to its own dtype before they are added": (
        f"{GROUPED}/api.py", "wide = out if len(lhs) == 1 else jnp.float32", "wide = out", "tests/ops/grouped_glu/test_values.py::test_compute_dtype"),
}
# fmt: on
