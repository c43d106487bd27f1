"""The kernels of grouped_matmul."""

from jaxops.ops.grouped_matmul.gemm_triton import modality_fwd_triton as fwd_triton
from jaxops.ops.grouped_matmul.gemm_triton import modality_wgrad_triton as wgrad_triton

__all__ = ["fwd_triton", "wgrad_triton"]
