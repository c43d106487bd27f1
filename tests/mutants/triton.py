"""Mutations of the Gluon kernels: those that a run on a Hopper GPU sees, with the tests that are marked gpu, and those that the compiled code shows."""

LIB = "_lib/grouped_gemm_triton.py"
PRODUCT, UNIT, EXPERTS = (f"tests/ops/{op}/test_triton.py" for op in ("grouped_matmul", "grouped_glu", "moe_mlp"))
MODALITIES = "tests/ops/modality_grouped_matmul/test_triton.py"
WGRAD, FP8_PRODUCTS = (
    "tests/ops/grouped_matmul/test_values.py::test_wgrad_on_hopper",
    "tests/ops/fp8_matmul/test_triton.py",
)
FP8, FP8_INSIDE = "tests/ops/fp8_matmul/test_gemm.py", "tests/ops/fp8_matmul/test_inside.py"
RELEASE = "mbarrier.arrive(empty.index((s + STAGES - 1) % STAGES), count=1"

# fmt: off
MUTATIONS = {
    "triton epilogue: the router weights' gradient has the weights in it": (
        "ops/moe_mlp/bwd_triton.py", "dot = dh * h\n        dh = dh * weight", "dh = dh * weight\n        dot = dh * h", EXPERTS),
    "triton epilogue: gate's gradient and up's change places": (
        "ops/moe_mlp/bwd_triton.py", "return (dh * up * slope).to(gate.dtype), (dh * value).to(gate.dtype)",
        "return (dh * value).to(gate.dtype), (dh * up * slope).to(gate.dtype)", EXPERTS),
    "triton epilogue: gate and up change places": (
        "ops/grouped_glu/fwd_triton.py", "gate, up = pre.reshape", "up, gate = pre.reshape", UNIT),
    "triton epilogue: columns of the next expert": (
        "ops/moe_mlp/bwd_triton.py", "part = gl.where((cols < F - left)[None, :], part, 0.0)", "part = part", EXPERTS),
    "triton epilogue: the lower rows take the upper rows' weights": (
        "ops/moe_mlp/bwd_triton.py", "(upper if i == 0 else lower)", "upper", EXPERTS),
    "triton slope: silu's sign": ("_lib/activations_triton.py", "slope = s + (y - y * s)", "slope = s - (y - y * s)", EXPERTS),
    "triton slope: gelu's sign": ("_lib/activations_triton.py", "cdf + x * gl.exp", "cdf - x * gl.exp", EXPERTS),
    "triton slope: gelu_tanh's sign": ("_lib/activations_triton.py", "slope = s + y * (1.0 - s)", "slope = s - y * (1.0 - s)", EXPERTS),
    "triton slope: sigmoid's sign": ("_lib/activations_triton.py", "slope = y - y * y", "slope = y + y * y", EXPERTS),
    "triton bias: the first group's for all": (
        "ops/grouped_matmul/gemm_triton.py", "gl.load(bias + group * N + cols", "gl.load(bias + cols", PRODUCT),
    "triton accumulate: an empty group's is overwritten": (
        "ops/grouped_matmul/gemm_triton.py", "if not ACCUMULATE or group >= 0:", "if True:", WGRAD),
    "triton store: past the group's end, by TMA": (
        "_lib/hopper_triton.py", "first = max(min(row, end - HEIGHT), 0)", "first = max(row, 0)", PRODUCT),
    "triton store: past the group's end, by pointers": (
        "_lib/hopper_triton.py", "(rows < end - row)[:, None]", "(rows < end - row + 1)[:, None]", PRODUCT),
    "triton store: past the last column": (
        "_lib/hopper_triton.py", "(cols < stride - col)[None, :]", "(cols < stride - col + 8)[None, :]", PRODUCT),
    "triton pipeline: a stage is released before its product is done": (
        LIB, f"{RELEASE}, pred=k > 0)\n        s, phase = advance(s, phase, STAGES)\n    if PARTS == 1:\n"
        f"        hand_over(turns, places, s, phase, 1 - WHICH)\n    acc = warpgroup_mma_wait(0, deps=[acc])\n    {RELEASE})",
        "mbarrier.arrive(empty.index(s), count=1)\n        s, phase = advance(s, phase, STAGES)\n    if PARTS == 1:\n"
        "        hand_over(turns, places, s, phase, 1 - WHICH)\n    acc = warpgroup_mma_wait(0, deps=[acc])", PRODUCT),
    "triton pipeline: a stage's phase": (
        "_lib/hopper_triton.py", "phase ^= 1", "phase ^= 0", PRODUCT),
    "triton sum: the next group's rows": (
        LIB, "left = min(first + size - at, BK)", "left = BK", PRODUCT),
    "triton sum: rows at the end of a group stay": (
        LIB, "gl.where(rows + 8 * i < first, value", "gl.where(rows + 8 * i < first + 1, value", PRODUCT),
    "triton sum: the second product's steps start one step late": (
        LIB, "turn = gl.where(size > 0, steps * BK, K + BK)", "turn = gl.where(size > 0, steps * BK + BK, K + BK)", EXPERTS),
    "triton rows: the lower half of a tile": (
        LIB, "tma.async_load(a_desc, [row + i * PART, at]", "tma.async_load(a_desc, [row, at]", PRODUCT),
    "triton rows: the first group's matrix for all": (
        LIB, "tma.async_load(b_desc, [group * N + col, at]", "tma.async_load(b_desc, [col, at]", PRODUCT),
    "triton rows: gathered rows of the lower half": (
        LIB, "number = gl.load(indices + row + PART + rows", "number = gl.load(indices + row + rows", EXPERTS),
    "triton rows: wild indices": (
        LIB, "first = a_ptr + (gl.minimum(gl.maximum(number, 0), T - 1).to(gl.int64) * K)[:, None]",
        "first = a_ptr + (gl.maximum(number, 0).to(gl.int64) * K)[:, None]",
        f"{EXPERTS}::test_gathered_rows_are_tokens_whatever_the_indices"),
    "triton modality: the next modality's columns": (
        "ops/modality_grouped_matmul/gemm_triton.py", "return first + i, (left + j) * BN, part", "return first + i, j * BN, part", MODALITIES),
    "triton fp8: the first group's scale for all": (
        "ops/fp8_matmul/gemm_triton.py", "gl.load(sb + group if KIND == ROWS else sb)", "gl.load(sb)", FP8),
    "triton fp8: the first group's block scales for all": (
        "ops/fp8_matmul/gemm_triton.py", "(group * gl.cdiv(N, 128) + col // 128)", "(col // 128)", FP8),
    "triton fp8: a block's scale is the step's before": (
        "ops/fp8_matmul/gemm_triton.py", "scale = gl.load(sb_first + min(k + 1, steps - 1))", "scale = gl.load(sb_first + k)", FP8),
    "triton fp8: scales of rows that lie before the group's": (
        "ops/fp8_matmul/gemm_triton.py", "sa.gather(early + gl.arange", "sa.gather(0 * early + gl.arange", FP8),
    "triton fp8: rows outside are scaled": (
        "ops/fp8_matmul/gemm_triton.py", "c_end - row if inside else 0, N - col if inside else 0", "c_end - row, N - col", FP8),
    "triton fp8 inside: an infinity saturates": (
        "ops/fp8_matmul/inside_triton.py", 'scale = gl.where(amax < float("inf"), scale, float("nan"))', "scale = scale", FP8_INSIDE),
    "triton fp8 inside: the second block's scale": (
        "ops/fp8_matmul/inside_triton.py", "narrow_scales = sb + min(narrow // 128, last) * steps",
        "narrow_scales = sb + min(wide // 128, last) * steps", FP8_INSIDE),
}
# What no run is sure to see: a look at the compiled code does, on any machine with Triton. (Fences between generic and TMA accesses of one warp group are not
# here: Triton puts one in where ours is missing.)
COMPILED = {
    "triton fence: after rows are gathered": (
        LIB, "if GATHERED:  # what", "if False:  # what", UNIT),
    "triton pipeline: no wait for the product before": (
        LIB, "acc = warpgroup_mma_wait(1, deps=[acc])", "acc = warpgroup_mma_wait(4, deps=[acc])", PRODUCT),
    "triton fp8: a stage is released before its product is done": (
        "ops/fp8_matmul/gemm_triton.py", "acc = warpgroup_mma_wait(1, deps=[acc])", "acc = warpgroup_mma_wait(4, deps=[acc])", FP8_PRODUCTS),
}
