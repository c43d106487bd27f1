"""Which backend every op takes on which device, and whose plans it takes."""

import functools
from unittest import mock

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jaxops._lib.planning import device as device_module
from jaxops._lib.planning.device import Device, gluon_missing
from jaxops.ops import adaln, grouped_matmul
from tests.contracts.devices import DEVICES, problems, table, written
from tests.contracts.ops import FP8_RESULT
from tests.contracts.run import EVERYTHING, ON_A_GPU, cotangents_of, everything, parts, small
from tests.hopper import on_h200

FP8 = ("fp8_matmul", "fp8_grouped_matmul", "quantize")
HOPPER_ALONE = "`linear_cross_entropy`"


def test_the_table_in_the_docs():
    assert written() == table(), f"docs/plans.md differs; `python -m tests.contracts.devices` writes:\n{table()}"


@pytest.mark.parametrize("name", problems())
def test_auto_takes_xla_where_the_kernels_do_not_run(name):
    """Before compute capability 8.0 (FP8: 8.9), on AMD's GPUs, TPUs and CPUs; and the kernels elsewhere."""
    module, problem = problems()[name]
    needs_fp8 = any(f"`{op}`" in name for op in FP8)
    for kind, device in DEVICES.items():
        kernels = kind not in ("CPU", "TPU", "MI300X", "V100") and not (needs_fp8 and kind == "A100")
        kernels = device.is_hopper if name == HOPPER_ALONE else kernels
        with mock.patch.object(device_module, "gluon_missing", return_value=""):
            assert (module.make_plan(problem, device).backend != "xla") == kernels, kind
        if not kernels and kind != "CPU" and name != HOPPER_ALONE:
            with pytest.raises(NotImplementedError, match=f"{device.kind}.*backend='xla'"):
                module.make_plan(problem, device, backend="pallas")


@pytest.mark.parametrize("name", ["adaln", "gated_residual_adaln"])
def test_results_in_fp8_need_the_cards_instructions(name):
    op = EVERYTHING[name]
    shapes = op.shapes(op.sizes)
    for kind, kernels in (("NVIDIA A100-SXM4-80GB", False), ("NVIDIA L4", True)):
        device = AbstractDevice(device_kind=kind, num_cores=58, platform="gpu")
        with jax.sharding.use_abstract_mesh(
            AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
        ):
            jaxpr = jax.make_jaxpr(lambda a: op.call(a, **FP8_RESULT))(shapes)
        assert ("pallas_call" in str(jaxpr)) == kernels, kind


def test_unknown_cards_of_nvidia_are_newer_ones():
    for name, (module, problem) in problems().items():
        plan = module.make_plan(problem, Device("NVIDIA X900", "gpu"))
        assert (plan.backend != "xla") == (name != HOPPER_ALONE), name


@pytest.mark.versions
@pytest.mark.parametrize("name", [name for name, op in EVERYTHING.items() if not op.sharded])
def test_kernels_are_traced_where_several_devices_are(name):
    """Outside of `jax.shard_map` XLA may split any call, also that of a program of one device."""
    op = EVERYTHING[name]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (*parts(op, small(op)), cotangents_of(op)))
    for way in set(op.ways) & set(ON_A_GPU):
        if way == "triton" and gluon_missing():
            continue
        with on_h200(2):
            jax.make_jaxpr(functools.partial(everything, op, way))(*shapes)


@pytest.mark.parametrize("name", [name for name, op in EVERYTHING.items() if "plan" in next(iter(op.ways.values()))])
def test_a_plan_of_another_op(name):
    op = EVERYTHING[name]
    arguments = small(op)
    other = adaln.Plan("xla") if op.module is not adaln else grouped_matmul.Plan("xla")
    own, module = op.module.__name__, other.__module__.removesuffix(".plan")
    with pytest.raises(TypeError, match=rf"plan is a {module}\.Plan; this op takes a {own}\.Plan\."):
        op.call(arguments, **op.ways["xla"] | {"plan": other})
    with pytest.raises(
        TypeError, match=rf"plan is a str; this op takes a {own}\.Plan; a backend by itself is passed as backend="
    ):
        op.call(arguments, **op.ways["xla"] | {"plan": "xla"})
