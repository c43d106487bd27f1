"""`GroupedLinear`: one linear layer per group, over rows that are sorted by group."""

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer, PrecisionLike

from jaxops.nn.arguments import check_backend, check_grouped_recipe, check_matrix, check_sizes
from jaxops.nn.linear import LinearParameters
from jaxops.ops import fp8_matmul, grouped_matmul

# lecun_normal per group: without batch_axis the group axis would count into the fan-in, and every group would start too
# small by sqrt(num_groups).
default_kernel_init = nnx.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=(0,))
default_bias_init = nnx.initializers.zeros_init()


class GroupedLinear(LinearParameters):
    """`flax.nnx.Linear` with a kernel and a bias per group of rows, such as the experts of a mixture of experts.

    Group g is the rows `group_offsets[g]` to `group_offsets[g + 1] - 1` of x. The offsets stay on the device and new
    values never recompile; groups may be empty. Rows outside all groups are written as zeros.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxops.nn import GroupedLinear
    >>> experts = GroupedLinear(4, 8, 16, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    >>> experts.kernel.shape, experts.bias.shape
    ((4, 8, 16), (4, 16))
    >>> tokens, offsets = jnp.ones((6, 8), jnp.bfloat16), jnp.array([0, 2, 2, 5, 6], jnp.int32)  # sorted by expert
    >>> experts(tokens, offsets).shape
    (6, 16)
    >>> in_fp8 = GroupedLinear(4, 8, 16, recipe="blockwise", dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    >>> in_fp8(tokens, offsets).shape
    (6, 16)

    With a recipe the products run in FP8, as in `Fp8Linear`; the parameters are the same, so a layer with a recipe and
    one without load each other's. Delayed scaling has no grouped form: the rows of an expert differ from step to step.

    Attributes:
      kernel: [num_groups, in_features, out_features] in param_dtype.
      bias: [num_groups, out_features] in param_dtype, or None.

    Args:
      num_groups: groups G, such as experts.
      in_features, out_features: columns of x and of the result.
      recipe: None, or an FP8 recipe of `jaxops.fp8_grouped_matmul`.
      use_bias, param_dtype, rngs: as in `flax.nnx.Linear`.
      dtype: dtype of the multiplication (without a recipe) and of the result; promoted from x and the parameters by
        default. The gradients of parameters are in param_dtype and never rounded to dtype.
      precision: of float32 products, as in `jaxops.grouped_matmul`; None with a recipe.
      kernel_init: called with (key, [G, in_features, out_features], param_dtype). By default lecun_normal with the
        fan-in of one group; your own initializer needs `batch_axis=(0,)` for that.
      bias_init: called with (key, [G, out_features], param_dtype).
      pow2_scales: with a recipe, as in `jaxops.fp8_matmul`.
      backend, plan: as in `jaxops.grouped_matmul`, or with a recipe in `jaxops.fp8_grouped_matmul`.

    Raises:
      ValueError: a size below 1, an unknown recipe or backend, a precision with a recipe, pow2_scales without one; x or
        group_offsets of another shape.
      TypeError: dtypes that the op does not take, offsets that are not int32.
      NotImplementedError: recipe "delayed"; with a recipe, an NVIDIA GPU older than compute capability 8.9.
    """

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        recipe: str | None = None,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        pow2_scales: bool = False,
        backend: str = "auto",
        plan: grouped_matmul.Plan | fp8_matmul.Plan | None = None,
        rngs: nnx.Rngs,
    ):
        check_grouped_recipe(recipe, precision, pow2_scales)
        check_sizes(num_groups=num_groups, in_features=in_features, out_features=out_features)
        check_backend(backend, "triton", "pallas")
        super().__init__(
            num_groups, in_features, out_features, use_bias=use_bias, dtype=dtype, param_dtype=param_dtype,
            kernel_init=kernel_init, bias_init=bias_init, rngs=rngs,
        )  # fmt: skip
        self.num_groups = num_groups
        self.recipe = recipe
        self.precision = precision
        self.pow2_scales = pow2_scales
        self.backend = backend
        self.plan = plan

    def __call__(self, x: jax.Array, group_offsets: jax.Array) -> jax.Array:
        """Multiplies each group of rows by its own kernel and adds its own bias.

        Args:
          x: [M, in_features], bfloat16, float16 or float32, rows sorted by group.
          group_offsets: [num_groups + 1] int32, non-decreasing, within 0 to M.

        Returns:
          [M, out_features] in dtype.
        """
        G = self.num_groups
        check_matrix(x, f"[M, in_features={self.in_features}]", self.in_features)
        if tuple(group_offsets.shape) != (G + 1,):
            raise ValueError(
                f"group_offsets has shape {tuple(group_offsets.shape)}; it must be [num_groups + 1] = ({G + 1},): "
                "the cumulative sum of the group sizes, with a 0 before it."
            )
        kernel, bias, dtype = self._parameters(x)
        options = {"out_dtype": dtype, "backend": self.backend, "plan": self.plan}
        if self.recipe is None:
            options |= {"bias": bias, "precision": self.precision, "compute_dtype": dtype}
            return grouped_matmul.grouped_matmul(x, kernel, group_offsets, **options)
        options |= {"recipe": self.recipe, "pow2_scales": self.pow2_scales}
        out = fp8_matmul.fp8_grouped_matmul(x, kernel, group_offsets, **options)
        if bias is None:
            return out
        # A product over K = 0 is the bias of each row's group, zeros outside. Its gradient is summed in a fixed order,
        # which that of a gather would not be.
        no_columns, no_rows = jnp.zeros((x.shape[0], 0), dtype), jnp.zeros((G, 0, self.out_features), dtype)
        return out + grouped_matmul.grouped_matmul(no_columns, no_rows, group_offsets, bias=bias)
