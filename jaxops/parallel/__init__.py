"""Products of a matrix whose rows are spread over the devices of a mesh axis, as sequence parallelism has them."""

from jaxops.parallel.all_gather import all_gather_matmul
from jaxops.parallel.reduce_scatter import matmul_reduce_scatter

__all__ = ["all_gather_matmul", "matmul_reduce_scatter"]
