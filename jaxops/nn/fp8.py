"""`Fp8Linear` and `Fp8GroupedLinear`: linear layers whose products run in FP8, forward and backward, from parameters that stay float32 or bfloat16."""

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import canonicalize_dtype
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.typing import Dtype, Initializer

from jaxops.nn import grouped_linear
from jaxops.nn.arguments import check_backend, check_sizes
from jaxops.nn.fp8_product import Fp8Product, check_recipe
from jaxops.ops.fp8_matmul import Plan, fp8_grouped_matmul
from jaxops.ops.grouped_matmul import grouped_matmul


class Fp8Linear(Fp8Product):
    """`flax.nnx.Linear` in FP8: input, kernel and incoming gradient are quantised as the recipe says, in each step and from unrounded parameters.

    The parameters are those of `flax.nnx.Linear`, by name, shape, dtype and initial value, so either loads the other's:
    `nnx.update(linear, nnx.state(fp8_linear, nnx.Param))`, and the other way round.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxops.nn import Fp8Linear
    >>> layer = Fp8Linear(128, 256, recipe="blockwise", dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    >>> layer.kernel.shape, layer.kernel.dtype
    ((128, 256), dtype('float32'))
    >>> x = jnp.ones((4, 128), jnp.bfloat16)
    >>> layer(x).shape
    (4, 256)
    >>> grads = nnx.grad(lambda layer: layer(x).astype(jnp.float32).sum())(layer)
    >>> grads.kernel.shape, grads.kernel.dtype
    ((128, 256), dtype('float32'))

    With recipe "delayed" the scales come from the largest values of the last steps, kept in `amax_history`. A call in training mode changes it, as one
    of `flax.nnx.BatchNorm` changes its statistics; in `eval()` mode it is only read.

    >>> delayed = Fp8Linear(128, 256, recipe="delayed", history=4, rngs=nnx.Rngs(0))
    >>> _ = delayed(3 * jnp.ones((4, 128)))
    >>> delayed.amax_history[0]
    Array([3., 0., 0., 0.], dtype=float32)
    >>> delayed.eval()
    >>> _ = delayed(5 * jnp.ones((4, 128)))
    >>> delayed.amax_history[0]
    Array([3., 0., 0., 0.], dtype=float32)

    Attributes:
      kernel: [in_features, out_features] in param_dtype.
      bias: [out_features] in param_dtype, or None.
      amax_history: an `AmaxHistory` [2, history], or None for all recipes but "delayed".
      use_running_average: whether amax_history is only read; `train()` and `eval()` set it.

    Args:
      in_features: last axis of x.
      out_features: last axis of the result.
      recipe: "tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise" or "blockwise_with_gw_hp", as in `jaxops.fp8_matmul`.
      use_bias: whether a bias is added, in dtype.
      dtype: dtype of the result; promoted from x and the parameters by default. x and kernel are quantised from their own dtypes.
      param_dtype: dtype of the parameters, and of their gradients.
      kernel_init: called with (key, [in, out], param_dtype).
      bias_init: called with (key, [out], param_dtype).
      history: steps that recipe "delayed" looks back.
      pow2_scales, backend, plan: as in `jaxops.fp8_matmul`.
      rngs: the stream `params` makes the parameters.

    Raises:
      ValueError: a size or a history below 1, an unknown recipe or backend.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        recipe: str = "blockwise",
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        history: int = 16,
        pow2_scales: bool = False,
        backend: str = "auto",
        plan: Plan | None = None,
        rngs: nnx.Rngs,
    ):
        check_sizes(in_features=in_features, out_features=out_features)
        super().__init__(recipe=recipe, history=history, pow2_scales=pow2_scales, backend=backend, plan=plan)
        self.kernel = nnx.Param(kernel_init(rngs.params(), (in_features, out_features), param_dtype))
        self.bias: nnx.Param[jax.Array] | None
        if use_bias:
            self.bias = nnx.Param(bias_init(rngs.params(), (out_features,), param_dtype))
        else:
            self.bias = nnx.data(None)
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """Multiplies x by the kernel and adds the bias.

        Args:
          x: [..., in_features], bfloat16, float16 or float32.

        Returns:
          [..., out_features] in dtype.

        Raises:
          ValueError: x of another shape, an unknown backend.
          TypeError: dtypes that `jaxops.fp8_matmul` does not quantise.
          NotImplementedError: an NVIDIA GPU without FP8, older than compute capability 8.9.
        """
        if x.ndim < 1 or x.shape[-1] != self.in_features:
            raise ValueError(f"x has shape {tuple(x.shape)}; it must be [..., in_features={self.in_features}].")
        kernel, bias = self.kernel[...], None if self.bias is None else self.bias[...]
        dtype = canonicalize_dtype(x, kernel, bias, dtype=self.dtype)
        out = self.product(x, kernel, dtype)
        return out if bias is None else out + bias.astype(dtype).reshape((1,) * (out.ndim - 1) + (-1,))


class Fp8GroupedLinear(nnx.Module):
    """`GroupedLinear` in FP8, for the experts of a mixture of experts: as `Fp8Linear` is to `flax.nnx.Linear`.

    Groups may be empty and unaligned and nothing pads them, forward or backward; their offsets stay on the device. Rows outside all groups come out
    zero, and reach no scale. The parameters are `GroupedLinear`'s, and either loads the other's. There is no delayed scaling: which rows an expert gets,
    and so their largest value, is another in every step.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxops.nn import Fp8GroupedLinear
    >>> experts = Fp8GroupedLinear(4, 128, 256, recipe="blockwise", dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    >>> tokens = jnp.ones((6, 128), jnp.bfloat16)  # sorted by expert
    >>> experts(tokens, jnp.array([0, 2, 2, 5, 6], jnp.int32)).shape
    (6, 256)

    Attributes:
      kernel: [num_groups, in_features, out_features] in param_dtype.
      bias: [num_groups, out_features] in param_dtype, or None.

    Args:
      num_groups: groups G, such as experts.
      in_features: columns of x.
      out_features: columns of the result.
      recipe: as in `Fp8Linear`, "delayed" excepted.
      use_bias: whether each group adds a bias.
      dtype: dtype of the result; promoted from x and the parameters by default. x and kernel are quantised from their own dtypes.
      param_dtype: dtype of the parameters, and of their gradients.
      kernel_init: called with (key, [G, in, out], param_dtype). By default lecun_normal with the fan-in of one group.
      bias_init: called with (key, [G, out], param_dtype).
      pow2_scales, backend, plan: as in `jaxops.fp8_grouped_matmul`.
      rngs: the stream `params` makes the parameters.

    Raises:
      ValueError: a size below 1, an unknown recipe or backend.
      NotImplementedError: recipe "delayed".
    """

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        recipe: str = "blockwise",
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = grouped_linear.default_kernel_init,
        bias_init: Initializer = grouped_linear.default_bias_init,
        pow2_scales: bool = False,
        backend: str = "auto",
        plan: Plan | None = None,
        rngs: nnx.Rngs,
    ):
        if recipe == "delayed":
            raise NotImplementedError(
                "recipe is 'delayed', and groups have no delayed scaling: an expert's rows are others in every step. Take 'tensorwise', with current scales."
            )
        check_recipe(recipe)
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
        self.recipe = recipe
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
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

        Raises:
          ValueError: x or group_offsets of another shape, an unknown backend.
          TypeError: dtypes that `jaxops.fp8_grouped_matmul` does not quantise, offsets that are not int32.
          NotImplementedError: an NVIDIA GPU without FP8, older than compute capability 8.9.
        """
        grouped_linear.check_rows(x, group_offsets, self.in_features, self.num_groups)
        kernel, bias = self.kernel[...], None if self.bias is None else self.bias[...]
        dtype = canonicalize_dtype(x, kernel, bias, dtype=self.dtype)
        out = fp8_grouped_matmul(
            x,
            kernel,
            group_offsets,
            recipe=self.recipe,
            out_dtype=dtype,
            pow2_scales=self.pow2_scales,
            backend=self.backend,
            plan=self.plan,
        )
        if bias is None:
            return out
        # A product over no columns is the bias of each row's group, zero outside them; its gradient is summed in a fixed order, as a gather's would not be.
        none = jnp.zeros((x.shape[0], 0), dtype)
        return out + grouped_matmul(
            none, jnp.zeros((self.num_groups, 0, self.out_features), dtype), group_offsets, bias=bias
        )
