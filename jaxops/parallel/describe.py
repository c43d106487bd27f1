"""What tools and tests ask of the products across devices."""

from jaxops._lib.planning.description import Description, Function, names
from jaxops.parallel.collective_matmul import all_gather_matmul, matmul_reduce_scatter

# `jaxops.inspect` examines calls on one device: there is no reference of a device's part.
DESCRIPTION = Description(
    functions=(
        Function(all_gather_matmul, residuals=names("all_gather_matmul", "x rows out"), wrt=("x", "w", "bias")),
        Function(matmul_reduce_scatter, residuals=names("matmul_reduce_scatter", "h out"), wrt=("h", "w", "bias")),
    ),
)
