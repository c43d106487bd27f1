"""Matrix products across the devices of a mesh axis, for tensor and sequence parallelism."""

from jaxops.parallel.collective_matmul import all_gather_matmul, matmul_reduce_scatter

__all__ = ["all_gather_matmul", "matmul_reduce_scatter"]
