"""Linear layers whose kernels and rows are sharded over the devices of a mesh axis."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike

from jaxops.nn.arguments import check_backend, check_matrix, check_sizes, devices_on
from jaxops.nn.linear import LinearParameters
from jaxops.parallel import all_gather_matmul, matmul_reduce_scatter


class _ParallelLinear(LinearParameters):
    """The arguments of both layers: those of `flax.nnx.Linear` and a mesh axis."""

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
        check_backend(backend, "mosaic")
        super().__init__(
            in_features, out_features, use_bias=use_bias, dtype=dtype, param_dtype=param_dtype,
            kernel_init=kernel_init, bias_init=bias_init, rngs=rngs,
        )  # fmt: skip
        self.axis_name = axis_name
        self.precision = precision
        self.backend = backend

    def _multiply(self, op: Any, x: jax.Array, rows: Any, sharded: int, **more: Any) -> jax.Array:
        """op of x and this device's kernel. sharded: which axis of the kernel is. more: further arguments of op.

        Raises:
          ValueError: no such mesh axis, a size that its devices do not divide, x with other columns, a whole kernel.
        """
        axis_name, whole = self.axis_name, (self.in_features, self.out_features)
        devices, local = devices_on("axis_name", axis_name), list(whole)
        if whole[sharded] % devices:
            raise ValueError(
                f"{whole[sharded]} features are no multiple of the {devices} devices of axis {axis_name!r}."
            )
        local[sharded] //= devices
        check_matrix(x, f"[rows, {local[0]}]", local[0])
        kernel, bias, dtype = self._parameters(x)
        if kernel.shape != tuple(local):
            raise ValueError(
                f"this device has a kernel of shape {kernel.shape}, and its part of {whole} over axis {axis_name!r} is "
                f"{tuple(local)}: pass the layer's state through in_specs of jax.shard_map, as docs/parallel.md does."
            )
        options = {"compute_dtype": dtype, "precision": self.precision, "backend": self.backend} | more
        return op(x, kernel, axis_name, bias=bias, rows=rows, **options)


class ColumnParallelLinear(_ParallelLinear):
    """`flax.nnx.Linear` whose kernel columns and input rows are sharded: `jaxops.all_gather_matmul` as a layer.

    Construct it outside of `jax.shard_map`, with the whole kernel. Inside, each device has its columns of the kernel
    and the bias: P(None, axis_name) and P(axis_name). docs/parallel.md has a block.

    >>> from flax import nnx
    >>> from jaxops.nn import ColumnParallelLinear
    >>> up = ColumnParallelLinear(8, 32, "tensor", rngs=nnx.Rngs(0))
    >>> up.kernel.shape, up.bias.shape
    ((8, 32), (32,))

    Attributes:
      kernel: [in_features, out_features] in param_dtype; inside `jax.shard_map` [in_features, out_features / devices].
      bias: [out_features] in param_dtype, or None; inside `jax.shard_map` [out_features / devices].
      save: what the backward reads of x, as in `jaxops.all_gather_matmul`: "own" unless you set it.

    Args:
      in_features, out_features: columns of x and of the result, those of all devices together.
      axis_name: the mesh axis.
      dtype: dtype of the multiplication and of the result; promoted from x and the parameters by default. The gradients
        of parameters are in param_dtype and never rounded to dtype.
      use_bias, param_dtype, kernel_init, bias_init, rngs: as in `flax.nnx.Linear`.
      precision, backend: as in `jaxops.all_gather_matmul`.

    Raises:
      ValueError: a size below 1, an unknown backend; x of another shape, a mesh axis that does not exist or does not
        divide the features.
    """

    save: Literal["own", "gathered"] = "own"

    def __call__(self, x: jax.Array, rows: jax.Array | int | None = None) -> jax.Array:
        """Gathers the rows of all devices and multiplies them by this device's columns.

        Args:
          x: [m, in_features] this device's rows, bfloat16, float16 or float32.
          rows: int32 scalar: how many of all devices' rows are valid, as in `jaxops.all_gather_matmul`.

        Returns:
          [devices * m, out_features / devices] in dtype.
        """
        return self._multiply(all_gather_matmul, x, rows, sharded=1, save=self.save)


class RowParallelLinear(_ParallelLinear):
    """`flax.nnx.Linear` whose kernel rows and input columns are sharded: `jaxops.matmul_reduce_scatter` as a layer.

    Construct it outside of `jax.shard_map`, with the whole kernel. Inside, each device has its rows of the kernel,
    P(axis_name), and the whole bias, P(). docs/parallel.md has a block.

    >>> from flax import nnx
    >>> from jaxops.nn import RowParallelLinear
    >>> down = RowParallelLinear(32, 8, "tensor", use_bias=False, rngs=nnx.Rngs(0))
    >>> down.kernel.shape
    (32, 8)

    Attributes:
      kernel: [in_features, out_features] in param_dtype; inside `jax.shard_map` [in_features / devices, out_features].
      bias: [out_features] in param_dtype, or None; added once. Its gradient is summed over the devices if
        `jax.shard_map` has check_vma=True, the default; otherwise each device has the part of its own rows.

    Args:
      in_features, out_features, axis_name, use_bias, dtype, param_dtype: as in `ColumnParallelLinear`.
      precision, kernel_init, bias_init, backend, rngs: likewise.

    Raises:
      ValueError: as `ColumnParallelLinear`; M that the devices do not divide.
    """

    def __call__(self, x: jax.Array, rows: jax.Array | int | None = None) -> jax.Array:
        """Multiplies this device's columns, sums over the devices, and keeps this device's rows.

        Args:
          x: [M, in_features / devices] this device's columns, bfloat16, float16 or float32; M is a multiple of the
            devices.
          rows: int32 scalar: how many of the M rows are valid, as in `jaxops.matmul_reduce_scatter`.

        Returns:
          [M / devices, out_features] in dtype.
        """
        return self._multiply(matmul_reduce_scatter, x, rows, sharded=0)
