"""`Fp8DotGeneral`: FP8 products inside existing Flax layers, through their `dot_general` argument."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax.typing import Dtype, PrecisionLike

from jaxops.nn.fp8_product import Fp8Product
from jaxops.ops.fp8_matmul import Plan

DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


class Fp8DotGeneral(Fp8Product):
    """`jax.lax.dot_general` in FP8, for the `dot_general` argument of Flax layers: `nnx.Linear`, `nnx.LinearGeneral`, and Linen's `nn.Dense`.

    The first operand is quantised as activations, the second one as weights. `nnx.MultiHeadAttention` takes it as `qkv_dot_general` and
    `out_dot_general`. Where the layer is yours to choose, `Fp8Linear` is cheaper: these layers cast their kernel to dtype before they call this.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxops.nn import Fp8DotGeneral
    >>> layer = nnx.Linear(128, 256, dtype=jnp.bfloat16, dot_general=Fp8DotGeneral("blockwise"), rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((4, 128))).shape
    (4, 256)
    >>> rowwise = {"qkv_dot_general": Fp8DotGeneral("rowwise"), "out_dot_general": Fp8DotGeneral("rowwise")}
    >>> attention = nnx.MultiHeadAttention(4, 128, **rowwise, decode=False, rngs=nnx.Rngs(0))
    >>> attention(jnp.ones((2, 8, 128))).shape
    (2, 8, 128)

    Recipe "delayed" keeps its history in here, and the layer's state has it under `dot_general`: each product needs an instance of its own, and
    `dot_general_cls` would make a new one, without a past, at every call.

    Attributes:
      amax_history: an `AmaxHistory` [2, history], or None for all recipes but "delayed".
      use_running_average: whether amax_history is only read; `train()` and `eval()` set it.

    Args:
      recipe: as in `Fp8Linear`.
      history: steps that recipe "delayed" looks back.
      pow2_scales, backend, plan: as in `jaxops.fp8_matmul`.

    Raises:
      ValueError: a history below 1, an unknown recipe or backend.
    """

    def __init__(
        self,
        recipe: str = "blockwise",
        *,
        history: int = 16,
        pow2_scales: bool = False,
        backend: str = "auto",
        plan: Plan | None = None,
    ):
        super().__init__(recipe=recipe, history=history, pow2_scales=pow2_scales, backend=backend, plan=plan)

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: DimensionNumbers,
        precision: PrecisionLike = None,
        preferred_element_type: Dtype | None = None,
        out_sharding=None,
    ) -> jax.Array:
        """As `jax.lax.dot_general`.

        Args:
          lhs: activations, bfloat16, float16 or float32.
          rhs: weights, likewise.
          dimension_numbers: ((lhs's contracted axes, rhs's), (lhs's batch axes, rhs's)); one contracted axis or more, no batch axes.
          precision: None or "default".
          preferred_element_type: dtype of the result; promoted from lhs and rhs by default.
          out_sharding: None.

        Returns:
          An array with lhs's remaining axes, then rhs's.

        Raises:
          ValueError: contracted axes of different sizes, a precision that FP8 cannot have, an unknown backend.
          TypeError: dtypes that `jaxops.fp8_matmul` does not quantise.
          NotImplementedError: batch axes, no contracted axis, an out_sharding, an NVIDIA GPU without FP8.
        """
        contracted, batch = dimension_numbers
        if any(map(len, batch)) or not all(map(len, contracted)):
            raise NotImplementedError(
                f"dimension_numbers are {dimension_numbers}; an FP8 product has one contracted axis or more and no batch axes. "
                "Leave this layer's dot_general as it is, or put the product under jax.vmap."
            )
        if out_sharding is not None:
            raise NotImplementedError(
                f"out_sharding is {out_sharding}; it must be None. Constrain the result: jax.lax.with_sharding_constraint."
            )
        if precision not in (None, "default", jax.lax.Precision.DEFAULT):
            raise ValueError(
                f"precision is {precision!r}; it must be None: the recipe decides how an FP8 product is rounded."
            )
        lhs_axes, rhs_axes = ([axis % x.ndim for axis in axes] for x, axes in zip((lhs, rhs), contracted, strict=True))
        rows, columns = (
            [axis for axis in range(x.ndim) if axis not in axes] for x, axes in ((lhs, lhs_axes), (rhs, rhs_axes))
        )
        lhs, rhs = lhs.transpose(rows + lhs_axes), rhs.transpose(rhs_axes + columns)
        M, lhs_K, rhs_K, N = (
            lhs.shape[: len(rows)],
            lhs.shape[len(rows) :],
            rhs.shape[: len(rhs_axes)],
            rhs.shape[len(rhs_axes) :],
        )
        if lhs_K != rhs_K:
            raise ValueError(
                f"the contracted axes of lhs have sizes {lhs_K}, those of rhs {rhs_K}; they must be equal."
            )
        dtype = jnp.result_type(lhs, rhs) if preferred_element_type is None else preferred_element_type
        K = math.prod(lhs_K)
        return self.product(lhs.reshape(math.prod(M), K), rhs.reshape(K, math.prod(N)), dtype).reshape(M + N)
