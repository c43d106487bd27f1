"""`GroupedLinear`: one linear layer a group, over rows that are sorted by group."""

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import canonicalize_dtype
from flax.typing import Dtype, Initializer, PrecisionLike

from jaxops.nn.arguments import check_backend, check_sizes
from jaxops.ops.grouped_matmul import Plan, grouped_matmul

# lecun_normal a group: the plain one would count the group axis into the fan-in and start every group too small by sqrt(num_groups).
default_kernel_init = nnx.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=(0,))
default_bias_init = nnx.initializers.zeros_init()


class GroupedLinear(nnx.Module):
    """`flax.nnx.Linear` with a kernel and a bias for each group of rows, as the experts of a mixture of experts have.

    Group g is the rows `group_offsets[g]` to `group_offsets[g + 1] - 1` of x. The offsets stay on the device and new values never recompile;
    groups may be empty. Rows outside all groups come out zero.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxops.nn import GroupedLinear
    >>> experts = GroupedLinear(4, 8, 16, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    >>> experts.kernel.shape, experts.bias.shape
    ((4, 8, 16), (4, 16))
    >>> tokens = jnp.ones((6, 8), jnp.bfloat16)  # sorted by expert
    >>> experts(tokens, jnp.array([0, 2, 2, 5, 6], jnp.int32)).shape
    (6, 16)

    Attributes:
      kernel: [num_groups, in_features, out_features] in param_dtype.
      bias: [num_groups, out_features] in param_dtype, or None.

    Args:
      num_groups: groups G, such as experts.
      in_features: columns of x.
      out_features: columns of the result.
      use_bias: whether each group adds a bias.
      dtype: dtype of the multiplication and of the result; promoted from x and the parameters by default. A parameter keeps a gradient in
        param_dtype that is never rounded to dtype.
      param_dtype: dtype of the parameters.
      precision: of float32 products, as in `jaxops.grouped_matmul`.
      kernel_init: called with (key, [G, in, out], param_dtype). By default lecun_normal with the fan-in of one group; an initializer of your own
        needs `batch_axis=(0,)` for that.
      bias_init: called with (key, [G, out], param_dtype).
      backend, plan: as in `jaxops.grouped_matmul`.
      rngs: the stream `params` makes the parameters.

    Raises:
      ValueError: a size below 1, an unknown backend.
    """

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        backend: str = "auto",
        plan: Plan | None = None,
        rngs: nnx.Rngs,
    ):
        check_sizes(num_groups=num_groups, in_features=in_features, out_features=out_features)
        check_backend(backend, "triton", "pallas")
        self.kernel = nnx.Param(kernel_init(rngs.params(), (num_groups, in_features, out_features), param_dtype))
        self.bias: nnx.Param[jax.Array] | None
        if use_bias:
            self.bias = nnx.Param(bias_init(rngs.params(), (num_groups, out_features), param_dtype))
        else:
            self.bias = nnx.data(None)
        self.num_groups = num_groups
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.backend = backend
        self.plan = plan

    def __call__(self, x: jax.Array, group_offsets: jax.Array) -> jax.Array:
        """Multiplies each group of rows by its own kernel and adds its own bias.

        Args:
          x: [M, in_features], bfloat16, float16 or float32, rows sorted by group.
          group_offsets: [num_groups + 1] int32, non-decreasing, within 0 to M.

        Returns:
          [M, out_features] in dtype.

        Raises:
          ValueError: x or group_offsets of another shape, an unknown backend.
          TypeError: dtypes that `jaxops.grouped_matmul` does not multiply, offsets that are not int32.
        """
        check_rows(x, group_offsets, self.in_features, self.num_groups)
        kernel, bias = self.kernel[...], None if self.bias is None else self.bias[...]
        dtype = canonicalize_dtype(x, kernel, bias, dtype=self.dtype)
        return grouped_matmul(
            x,
            kernel,
            group_offsets,
            bias=bias,
            precision=self.precision,
            compute_dtype=dtype,
            out_dtype=dtype,
            backend=self.backend,
            plan=self.plan,
        )


def check_rows(x: jax.Array, group_offsets: jax.Array, in_features: int, num_groups: int) -> None:
    if x.ndim != 2 or x.shape[1] != in_features:
        raise ValueError(
            f"x has shape {tuple(x.shape)}; it must be [M, in_features={in_features}]: flatten leading axes with x.reshape(-1, x.shape[-1])."
        )
    if tuple(group_offsets.shape) != (num_groups + 1,):
        raise ValueError(
            f"group_offsets has shape {tuple(group_offsets.shape)}; it must be [num_groups + 1] = ({num_groups + 1},): "
            "the cumulative sum of the group sizes, with a 0 before it."
        )
