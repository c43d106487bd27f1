# ruff: noqa: E501
"""FLOPs and bytes of instructions, against XLA's for whole programs and against counts by hand."""

import jax
import jax.numpy as jnp
import pytest

from jaxops._lib.hlo import Module, module_of
from jaxops.profiling.costs import cost_of
from jaxops.profiling.scopes import scopes_of

pytestmark = pytest.mark.versions

x, w, rows = jnp.ones((64, 128)), jnp.ones((128, 256)), jnp.arange(16)
image, kernel = jnp.ones((2, 8, 16, 16)), jnp.ones((4, 8, 3, 3))
convolve = lambda k, x: jax.lax.conv(x, k, (1, 1), "VALID")
PROGRAMS = {
    "dot": (lambda x, w: x @ w, x, w),
    "batched dot": (lambda a: jnp.einsum("bij,bkj->bik", a, a), jnp.ones((3, 8, 16))),
    "mlp gradient": (jax.grad(lambda w, x: jnp.sum(jax.nn.gelu(x @ w))), w, x),
    "softmax": (jax.nn.softmax, x),
    "scatter": (lambda x, rows: x.at[rows].add(2.0), x, rows),
    "convolution": (convolve, kernel, image),
    "convolution gradient": (jax.grad(lambda k, x: convolve(k, x).sum()), kernel, image),
    "cumulative sum": (lambda x: jnp.cumsum(x, 1), x),
    "layer norm": (lambda x: (x - x.mean(1, keepdims=True)) * jax.lax.rsqrt(x.var(1, keepdims=True) + 1e-6), x),
}


def costs(function, *args):
    """XLA's of the program, and those of the instructions that no fusion has inside."""
    compiled = jax.jit(function).lower(*args).compile()
    module = module_of(compiled.runtime_executable())
    lines = module.instructions.values()
    fused = [inner for each in lines if each.opcode not in ("while", "call") for inner in module.inner(each)]
    return compiled.cost_analysis(), [cost_of(each, module) for each in lines if each not in fused]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_sum_is_xlas(name):
    whole, each = costs(*PROGRAMS[name])
    assert sum(cost.flops or 0 for cost in each) == whole.get("flops", 0)
    assert sum(cost.bytes or 0 for cost in each) == whole["bytes accessed"]


def test_products_by_hand():
    _, each = costs(lambda x, w: x @ w, x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))
    product = max(each, key=lambda cost: cost.flops or 0)
    assert product.flops is not None
    assert 2 * 64 * 128 * 256 <= product.flops <= 2 * 64 * 128 * 256 + 64 * 256  # XLA may fuse a cast


def test_an_update_in_place_writes_its_slice_only():
    def layers(stack, x):
        return jax.lax.scan(lambda x, row: (x + 1, x + row), x, stack)

    _, each = costs(layers, jnp.ones((64, 1024)), jnp.ones(1024))
    stacked = 64 * 1024 * 4
    assert all((cost.bytes or 0) <= stacked + 4 * 1024 * 4 for cost in each)


HLO = """HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(f32[] %a, f32[] %b)
}

ENTRY %main (p: bf16[32,64], q: bf16[4,64,16], offsets: s32[5]) -> bf16[32,16] {
  %p = bf16[32,64]{1,0} parameter(0), metadata={op_name="x"}
  %q = bf16[4,64,16]{2,1,0} parameter(1)
  %offsets = s32[5]{0} parameter(2)
  %stated = bf16[32,16]{1,0} custom-call(bf16[32,64]{1,0} %p, bf16[4,64,16]{2,1,0} %q, s32[5]{0} %offsets), custom_call_target="__gpu$xla.gpu.triton", frontend_attributes={jaxops_bytes="77",jaxops_flops="65536"}, metadata={op_name="jit(step)/jvp(Net)/moe/grouped_matmul_fwd/pallas_call"}, backend_config={name = "x", ir = "M(L\\22"}
  %unstated = bf16[32,16]{1,0} custom-call(bf16[32,64]{1,0} %p, bf16[4,64,16]{2,1,0} %q), custom_call_target="somebody", metadata={op_name="jit(step)/a"}
  %gemm = (bf16[32,16]{1,0}, s8[1024]{0}) custom-call(bf16[32,64]{1,0} %p, bf16[4,64,16]{2,1,0} %q), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]}}}
  %zero = bf16[] constant(0)
  %total = bf16[32]{0} reduce(bf16[32,64]{1,0} %p, bf16[] %zero), dimensions={1}, to_apply=%add
  %attention = (bf16[2,4,128,64]{3,2,1,0}, u8[999]{0}) custom-call(bf16[2,4,128,64]{3,2,1,0} %query, bf16[2,4,128,64]{3,2,1,0} %key, bf16[2,4,128,64]{3,2,1,0} %key), custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config":{"intermediate_tensor_shape":{"dimensions":["2","4","128","128"]},"mask_type":"PADDING_CAUSAL"}}
  %query = bf16[2,4,128,64]{3,2,1,0} parameter(3)
  %key = bf16[2,4,128,64]{3,2,1,0} parameter(4)
  ROOT %out = bf16[32,16]{1,0} bitcast(bf16[32,16]{1,0} %stated)
}
"""


def test_custom_calls():
    module = Module(HLO)
    assert module.name == "jit_step"
    cost = {name: cost_of(each, module) for name, each in module.instructions.items()}
    moved = 2 * (32 * 16 + 32 * 64 + 4 * 64 * 16)
    assert cost["stated"] == (65536, 77, "bfloat16")
    assert cost["unstated"] == (None, moved, None)
    assert cost["gemm"] == (2 * 32 * 16 * 64, moved, "bfloat16"), "its workspace is not counted"
    pairs = (2 * 4) * 128 * 128 // 2
    assert cost["attention"] == (2 * 2 * pairs * 64, 4 * 2 * (2 * 4 * 128 * 64), "bfloat16"), "without its workspace"
    assert cost["total"].flops == 32 * 64 - 32
    assert scopes_of(module)(module.instructions["stated"]).path == ("Net", "moe", "grouped_matmul_fwd")
