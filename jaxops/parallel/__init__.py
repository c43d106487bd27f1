"""Matrix products across the devices of a mesh axis, for tensor and sequence parallelism, and what sends parameters,
gradients, and tokens to experts."""

from jaxops.parallel.collective_matmul import all_gather_matmul, matmul_reduce_scatter
from jaxops.parallel.dispatching import Dispatched, collect, dispatch
from jaxops.parallel.exchange import add_own_rows, gather_parts, gather_pieces, sum_parts
from jaxops.parallel.peer_memory import peer_memory_missing

__all__ = [
    "Dispatched", "add_own_rows", "all_gather_matmul", "collect", "dispatch", "gather_parts", "gather_pieces",
    "matmul_reduce_scatter", "peer_memory_missing", "sum_parts",
]  # fmt: skip
