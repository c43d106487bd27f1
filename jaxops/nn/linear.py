"""The parameters that all linear layers share."""

from typing import Any

import jax
from flax import nnx
from flax.nnx.nn.dtypes import canonicalize_dtype
from flax.typing import Dtype, Initializer

from jaxops.nn.arguments import check_dtypes


class LinearParameters(nnx.Module):
    """Kernel and bias, with the names, shapes, dtypes and initial values of `flax.nnx.Linear`, or a stack of them.

    Attributes:
      kernel: [*stack, in_features, out_features] in param_dtype.
      bias: [*stack, out_features] in param_dtype, or None.

    Raises:
      TypeError: a dtype that the kernels do not multiply.
    """

    def __init__(
        self, *shape: int, use_bias: bool, dtype: Dtype | None, param_dtype: Dtype,
        kernel_init: Initializer, bias_init: Initializer, rngs: nnx.Rngs,
    ):  # fmt: skip
        check_dtypes(dtype, param_dtype)
        *stack, self.in_features, self.out_features = shape
        self.kernel = nnx.Param(kernel_init(rngs.params(), shape, param_dtype))
        self.bias: nnx.Param[jax.Array] | None = nnx.data(None)
        if use_bias:
            self.bias = nnx.Param(bias_init(rngs.params(), (*stack, self.out_features), param_dtype))
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype

    def _parameters(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None, Any]:
        """(kernel, bias, dtype of the result)."""
        kernel, bias = self.kernel[...], None if self.bias is None else self.bias[...]
        return kernel, bias, canonicalize_dtype(x, kernel, bias, dtype=self.dtype)
