"""What tools and tests ask of linear_cross_entropy."""

from jaxops._lib.planning.description import Description, Function, names
from jaxops.ops.linear_cross_entropy.api import linear_cross_entropy
from jaxops.ops.linear_cross_entropy.plan import Problem
from jaxops.ops.linear_cross_entropy.reference import linear_cross_entropy_reference

DESCRIPTION = Description(
    functions=(
        Function(
            linear_cross_entropy,
            residuals=names("linear_cross_entropy", "out"),
            wrt=("x", "w", "weights", "bias"),
            reference=linear_cross_entropy_reference,
            problem=Problem(8192, 4096, 131_072, "bfloat16", "bfloat16"),
        ),
    ),
)
