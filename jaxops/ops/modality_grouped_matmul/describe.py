"""What tools and tests ask of modality_grouped_matmul."""

from jaxops._lib.planning.description import Description, Function, names, product_bytes
from jaxops.ops.grouped_matmul import Problem
from jaxops.ops.modality_grouped_matmul.api import modality_grouped_matmul
from jaxops.ops.modality_grouped_matmul.reference import modality_grouped_matmul_reference

DESCRIPTION = Description(
    functions=(
        Function(
            modality_grouped_matmul,
            residuals=names("modality_grouped_matmul", "lhs out"),
            wrt=("lhs", "rhs"),
            reference=lambda a: modality_grouped_matmul_reference(
                a["lhs"], a["rhs"], a["group_offsets"], transpose_rhs=a["transpose_rhs"]
            ),
            reference_bytes=product_bytes("lhs", "rhs"),
            problem=Problem(1, 4096, 4096, 4096, "bfloat16"),
        ),
    )
)
