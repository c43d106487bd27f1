"""Memory of a mixture-of-experts layer beside its operands and results, as XLA allocates it for an H200.

python -m benchmarks.moe_memory                       # bench_moe's shapes, forward, and forward and backward
python -m benchmarks.moe_memory --shapes mixtral_t16384

The layer is compiled, not run. Without a GPU that needs XLA's CUDA compiler (`pip install jax-cuda13-pjrt` beside the
plugin) and a ptxas on the PATH as new as Triton's (for example its own ptxas-blackwell, under that name):
PATH=... XLA_FLAGS=--xla_gpu_autotune_level=0 python -m benchmarks.moe_memory
"""

import datetime
import os
from typing import Any
from unittest import mock

import jax
import typer
from jax._src import xla_bridge
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

from benchmarks import bench_moe, harness, shapes_moe
from benchmarks.shapes_moe import MoeShape

SIDES = (bench_moe.OURS, bench_moe.UNFUSED)
H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
_MESH = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=H200)
TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048
  core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 4800000000000
  l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""


def h200() -> Any:
    """A topology to compile for."""
    return topologies.get_topology_desc("", platform="cuda", topology="1x1x1", target_config=TARGET).devices[0]


def compiled_for(device: Any, side: str, shape: MoeShape, pass_name: str) -> Any:
    here = SingleDeviceSharding(device)
    inputs = jax.eval_shape(lambda: bench_moe.make_inputs(shape))
    preferred = jax.ShapeDtypeStruct((shape.T, shape.E), "float32")
    arguments = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here) for x in (preferred, *inputs)]
    # JAX calls the platform "gpu" and then looks for a device of it.
    canonicalize = xla_bridge.canonicalize_platform
    platforms = mock.patch.object(
        xla_bridge, "canonicalize_platform", lambda name: "cuda" if name in ("gpu", "cuda") else canonicalize(name)
    )
    with (
        platforms,
        mock.patch.object(harness, "on_gpu", return_value=True),
        jax.sharding.use_abstract_mesh(_MESH),
    ):
        return jax.jit(bench_moe.program(side, shape, pass_name)).lower(*arguments).compile()


def main(
    shape_names: str = harness.shapes_option(shapes_moe.MOES),
    out: str = typer.Option("", help="Folder of the rows; the H200's results by default."),
) -> None:
    """Appends to <out>/moe_memory.jsonl."""
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    folder = harness.results_folder(out or str(harness.ROOT / "benchmarks" / "results" / "nvidia_h200"))
    file = folder / "moe_memory.jsonl"
    device = h200()
    for shape in [shapes_moe.MOES[name] for name in shape_names.split(",")]:
        for pass_name in bench_moe.PASSES:
            for side in SIDES:
                needed = compiled_for(device, side, shape, pass_name).memory_analysis()
                row = {"op": "moe", "pass": pass_name, "name": shape.name, "shape": shape.dims, "dtype": "bfloat16"}
                row |= {"backend": side, "temp_bytes": needed.temp_size_in_bytes}
                row |= {"argument_bytes": needed.argument_size_in_bytes, "output_bytes": needed.output_size_in_bytes}
                row |= {"compiled_for": "NVIDIA H200", "jax": jax.__version__}
                row |= {"commit": harness.environment()["commit"]}
                harness.append_row(file, row | {"date": datetime.date.today().isoformat()})
                print(f"{shape.name} {pass_name} {side}: {needed.temp_size_in_bytes / 1e9:.3f} GB", flush=True)


if __name__ == "__main__":
    typer.run(main)
