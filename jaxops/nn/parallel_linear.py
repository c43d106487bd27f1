"""`ColumnParallelLinear` and `RowParallelLinear`: linear layers whose kernels and rows are spread over the devices of a mesh axis."""

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import canonicalize_dtype
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike

from jaxops.nn.arguments import check_backend, check_sizes, devices_on
from jaxops.parallel import all_gather_matmul, matmul_reduce_scatter


class _ParallelLinear(nnx.Module):
    """What both layers are made with: `flax.nnx.Linear`'s arguments and a mesh axis."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        axis_name: str,
        *,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        backend: str = "auto",
        rngs: nnx.Rngs,
    ):
        check_sizes(in_features=in_features, out_features=out_features)
        check_backend(backend)
        self.kernel = nnx.Param(kernel_init(rngs.params(), (in_features, out_features), param_dtype))
        self.bias: nnx.Param[jax.Array] | None
        self.bias = nnx.Param(bias_init(rngs.params(), (out_features,), param_dtype)) if use_bias else nnx.data(None)
        self.in_features = in_features
        self.out_features = out_features
        self.axis_name = axis_name
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.backend = backend

    def _operands(self, x: jax.Array, columns: int, local: tuple[int, int]) -> tuple[jax.Array, jax.Array | None, dict]:
        """The kernel, the bias, and how the product is called.

        Raises:
          ValueError: x with other columns; a kernel that is not this device's part.
        """
        if x.ndim != 2 or x.shape[1] != columns:
            raise ValueError(
                f"x has shape {tuple(x.shape)}; it must be [rows, {columns}]: flatten leading axes with x.reshape(-1, x.shape[-1])."
            )
        kernel, bias = self.kernel[...], None if self.bias is None else self.bias[...]
        if kernel.shape != local:
            raise ValueError(
                f"this device has a kernel of shape {kernel.shape}, and its part of ({self.in_features}, {self.out_features}) over axis "
                f"{self.axis_name!r} is {local}: pass the layer's state through in_specs of jax.shard_map, as docs/parallel.md does."
            )
        dtype = canonicalize_dtype(x, kernel, bias, dtype=self.dtype)
        return kernel, bias, {"compute_dtype": dtype, "precision": self.precision, "backend": self.backend}

    def _part(self, size: int) -> int:
        """
        Raises:
          ValueError: no such axis here, or a size that its devices do not divide.
        """
        devices = devices_on("axis_name", self.axis_name)
        if size % devices:
            raise ValueError(f"{size} features are no multiple of the {devices} devices of axis {self.axis_name!r}.")
        return size // devices


class ColumnParallelLinear(_ParallelLinear):
    """`flax.nnx.Linear` for rows and kernel columns that are spread over a mesh axis: `jaxops.all_gather_matmul` as a
    layer.

    Made whole, outside of `jax.shard_map`; inside it has this device's columns of the kernel and the bias, P(None,
    axis_name) and P(axis_name). [A guide](docs/parallel.md) has a block.

    >>> from flax import nnx
    >>> from jaxops.nn import ColumnParallelLinear
    >>> up = ColumnParallelLinear(8, 32, "tensor", rngs=nnx.Rngs(0))
    >>> up.kernel.shape, up.bias.shape
    ((8, 32), (32,))

    Attributes:
      kernel: [in_features, out_features] in param_dtype; inside `jax.shard_map` [in_features, out_features /
        devices].
      bias: [out_features] in param_dtype, or None; inside `jax.shard_map` [out_features / devices].

    Args:
      in_features: columns of x.
      out_features: columns of the result of all devices.
      axis_name: the mesh axis.
      use_bias: whether there is a bias.
      dtype: dtype of the multiplication and of the result; promoted from x and the parameters by default. A parameter
        keeps a gradient in param_dtype that is never rounded to dtype.
      param_dtype: dtype of the parameters.
      precision: of float32 products, as in `jaxops.grouped_matmul`.
      kernel_init: called with (key, [in_features, out_features], param_dtype); lecun_normal by default.
      bias_init: called with (key, [out_features], param_dtype).
      backend: as in `jaxops.all_gather_matmul`.
      rngs: the stream `params` makes the parameters.

    Raises:
      ValueError: a size below 1, an unknown backend.
    """

    def __call__(self, x: jax.Array, rows: jax.Array | int | None = None) -> jax.Array:
        """Gathers the rows of all devices and multiplies them by this device's columns.

        Args:
          x: [m, in_features] this device's rows, bfloat16, float16 or float32.
          rows: int32 scalar: of all devices' rows, those before it count, as in `jaxops.all_gather_matmul`.

        Returns:
          [devices * m, out_features / devices] in dtype.

        Raises:
          ValueError: x of another shape, a mesh axis that is not there or does not divide out_features.
        """
        kernel, bias, how = self._operands(x, self.in_features, (self.in_features, self._part(self.out_features)))
        return all_gather_matmul(x, kernel, self.axis_name, bias=bias, rows=rows, **how)


class RowParallelLinear(_ParallelLinear):
    """`flax.nnx.Linear` for columns and kernel rows that are spread over a mesh axis: `jaxops.matmul_reduce_scatter`
    as a layer.

    Made whole, outside of `jax.shard_map`; inside it has this device's rows of the kernel, P(axis_name), and the
    whole bias, P(). [A guide](docs/parallel.md) has a block.

    >>> from flax import nnx
    >>> from jaxops.nn import RowParallelLinear
    >>> down = RowParallelLinear(32, 8, "tensor", use_bias=False, rngs=nnx.Rngs(0))
    >>> down.kernel.shape
    (32, 8)

    Attributes:
      kernel: [in_features, out_features] in param_dtype; inside `jax.shard_map` [in_features / devices,
        out_features].
      bias: [out_features] in param_dtype, or None; added once. Its gradient is the sum over the devices where
        `jax.shard_map` checks what varies (check_vma, its default); elsewhere each device has the part of its own
        rows.

    Args:
      in_features: columns of x of all devices.
      out_features: columns of the result.
      axis_name: the mesh axis.
      use_bias: whether there is a bias.
      dtype: dtype of the multiplication and of the result; promoted from x and the parameters by default. A parameter
        keeps a gradient in param_dtype that is never rounded to dtype.
      param_dtype: dtype of the parameters.
      precision: of float32 products, as in `jaxops.grouped_matmul`.
      kernel_init: called with (key, [in_features, out_features], param_dtype); lecun_normal by default.
      bias_init: called with (key, [out_features], param_dtype).
      backend: as in `jaxops.matmul_reduce_scatter`.
      rngs: the stream `params` makes the parameters.

    Raises:
      ValueError: a size below 1, an unknown backend.
    """

    def __call__(self, x: jax.Array, rows: jax.Array | int | None = None) -> jax.Array:
        """Multiplies this device's columns, sums over the devices, and keeps this device's rows.

        Args:
          x: [M, in_features / devices] this device's columns, bfloat16, float16 or float32; M is a multiple of the
            devices.
          rows: int32 scalar: of the M rows, those before it count, as in `jaxops.matmul_reduce_scatter`.

        Returns:
          [M / devices, out_features] in dtype.

        Raises:
          ValueError: x of another shape, a mesh axis that is not there or does not divide in_features or M.
        """
        part = self._part(self.in_features)
        kernel, bias, how = self._operands(x, part, (part, self.out_features))
        return matmul_reduce_scatter(x, kernel, self.axis_name, bias=bias, rows=rows, **how)
