"""Matrix products across the devices of a mesh axis, for tensor and sequence parallelism, and what sends parameters,
gradients, and tokens to experts."""

from jaxops.parallel.collective_matmul import all_gather_matmul, matmul_reduce_scatter
from jaxops.parallel.exchange import gather_parts, sum_parts
from jaxops.parallel.token_pieces import add_own_rows, gather_pieces

__all__ = [
    "add_own_rows",
    "all_gather_matmul",
    "gather_parts",
    "gather_pieces",
    "matmul_reduce_scatter",
    "sum_parts",
]
