"""The modalities' benchmark: its sides compute the same, what is wrong is left out."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import shapes
from benchmarks.harness import checks
from benchmarks.ops import bench_modality_grouped_matmul as bench
from benchmarks.shapes.modality import MODALITIES


def test_a_workload_is_its_modalities():
    shape = MODALITIES["vision_text"]
    assert shape.dims == {"modalities": 2, "G": 72, "M": 32768, "K": 2048, "N": 4096}
    assert shape.flops == 2 * (24576 * 2048 * 4096 + 8192 * 2048 * 1024)
    sizes = shape.sizes("skewed")
    assert sizes[:8].sum() == 24576
    np.testing.assert_array_equal(sizes[8:], shapes.group_sizes("skewed", 64, 8192))


def test_the_check_passes_every_side_and_fails_what_is_wrong():
    inputs, offsets = bench.Inputs.make(bench.SMOKE), jnp.asarray(shapes.group_offsets(bench.SMOKE.sizes("skewed")))
    for pass_name in shapes.PASSES:
        want = bench.reference(bench.SMOKE, pass_name, inputs, offsets)
        for side in ("xla", bench.EACH, bench.PADDED):
            results = jax.jit(bench.program(side, pass_name, "xla"))(*inputs.args(side, offsets))
            results = bench.unpadded(results, bench.SMOKE) if side == bench.PADDED and pass_name == "wgrad" else results
            assert checks.within_limits(*checks.worst_errors(results, want), "bfloat16")
            for i, result in enumerate(results):
                rows = result.reshape(-1, result.shape[-1])
                for wrong in (rows.at[5, 3].add(9), jnp.roll(rows, 1, axis=0), rows.at[5, 0].set(jnp.nan)):
                    broken = [*results[:i], wrong.reshape(result.shape), *results[i + 1 :]]
                    assert not checks.within_limits(*checks.worst_errors(tuple(broken), want), "bfloat16")
