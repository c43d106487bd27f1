"""FP8 layers: `Fp8Linear`, `Fp8DotGeneral` for other Flax layers, and `AmaxHistory`, the state of delayed scaling."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike

from jaxops.nn.arguments import check_backend, check_columns, check_recipe, check_sizes
from jaxops.nn.linear import LinearParameters
from jaxops.ops.fp8_matmul import RECIPES, Plan, check_out_sharding, fp8_matmul

E4M3_MAX = float(jnp.finfo(jnp.float8_e4m3fn).max)
DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


class AmaxHistory(nnx.Variable[jax.Array]):
    """The largest magnitudes of the last steps, which give delayed scaling its next scales. Not an `nnx.Param`.

    Row 0 is of the activations, row 1 of the kernel, the newest value first; zero marks a step that has not run. An
    empty row gives a scale of one, as in TransformerEngine and Flax: the first step is coarse and saturates past 448.

    >>> import jax.numpy as jnp
    >>> from jaxops.nn import AmaxHistory
    >>> history = AmaxHistory(jnp.zeros((2, 4)))
    >>> [float(amax) for amax in history.amax()]  # both rows are empty
    [448.0, 448.0]
    >>> history.record(jnp.float32(3), jnp.float32(0.5))
    >>> history.record(jnp.float32(2), jnp.float32(0.25))
    >>> history[0], [float(amax) for amax in history.amax()]
    (Array([2., 3., 0., 0.], dtype=float32), [3.0, 0.5])

    Args:
      value: [2, history] float32, zeros at the start.
      metadata: as in `flax.nnx.Variable`.

    Returns:
      A variable, like a `flax.nnx.BatchStat`; `nnx.state(model, AmaxHistory)` selects those of a model.

    Raises:
      ValueError: a value of another shape.
    """

    def __init__(self, value: jax.Array, **metadata):
        shape = jnp.shape(value)
        if len(shape) < 2 or shape[-2] != 2 or shape[-1] < 1:
            raise ValueError(f"an amax history has shape {shape}; it must be [2, history], history at least 1.")
        super().__init__(value, **metadata)

    def amax(self) -> tuple[jax.Array, jax.Array]:
        """The magnitudes to scale activations and kernel by now: float32 scalars."""
        most = jnp.max(self[...], axis=-1)
        x, kernel = jnp.where(most > 0, most, E4M3_MAX)
        return x, kernel

    def record(self, x: jax.Array, kernel: jax.Array) -> None:
        """Inserts this step's largest magnitudes and drops the oldest."""
        now = jax.lax.stop_gradient(jnp.stack([x, kernel]).astype(jnp.float32))
        self[...] = jnp.concatenate([now[:, None], self[...][:, :-1]], axis=1)


class Fp8Product(nnx.Module):
    """`jaxops.fp8_matmul` with its options, and the history of recipe "delayed"."""

    recipes: ClassVar[tuple[str, ...]] = tuple(RECIPES)

    def __init__(
        self,
        recipe: str = "blockwise",
        *,
        history: int = 16,
        pow2_scales: bool = False,
        backend: str = "auto",
        plan: Plan | None = None,
    ):
        check_recipe(recipe)
        check_sizes(history=history)
        check_backend(backend, "triton", "pallas")
        self.amax_history = AmaxHistory(jnp.zeros((2, history), jnp.float32)) if recipe == "delayed" else nnx.data(None)
        self.use_running_average = False
        self.recipe = recipe
        self.history = history
        self.pow2_scales = pow2_scales
        self.backend = backend
        self.plan = plan

    def _product(self, x: jax.Array, kernel: jax.Array, out_dtype) -> jax.Array:
        """x [..., K] @ kernel [K, N]. With recipe "delayed" it records a step, unless use_running_average.

        A wider kernel is rounded to out_dtype first, as by `flax.nnx.Linear`. XLA does that in the pass that takes a
        layer's kernel out of a stack of all layers' (it would copy a float32 one), and its gradient has half the bytes.
        """
        if jnp.dtype(out_dtype).itemsize < kernel.dtype.itemsize:
            kernel = kernel.astype(out_dtype)
        amax = None if self.amax_history is None else self.amax_history.amax()
        options = {"out_dtype": out_dtype, "pow2_scales": self.pow2_scales, "backend": self.backend, "plan": self.plan}
        out: Any = fp8_matmul(x, kernel, recipe=self.recipe, amax=amax, **options)
        if self.amax_history is None:
            return out
        out, now = out
        if not self.use_running_average:
            self.amax_history.record(*now)
        return out


class Fp8Linear(Fp8Product, LinearParameters):
    """`flax.nnx.Linear` in FP8: each step quantizes input, kernel and cotangent as the recipe says.

    The parameters are those of `flax.nnx.Linear`, by name, shape, dtype and initial value, so either loads the other's:
    `nnx.update(linear, nnx.state(fp8_linear, nnx.Param))`, and the other way round.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxops.nn import Fp8Linear
    >>> layer = Fp8Linear(128, 256, recipe="blockwise", dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((4, 128), jnp.bfloat16)).shape, layer.kernel.dtype
    ((4, 256), dtype('float32'))

    With recipe "delayed" the scales come from the largest magnitudes of the last steps, in `amax_history`. A call in
    training mode updates it, as `flax.nnx.BatchNorm` does its statistics; in `eval()` mode it is only read.

    >>> delayed = Fp8Linear(128, 256, recipe="delayed", history=4, rngs=nnx.Rngs(0))
    >>> _ = delayed(3 * jnp.ones((4, 128)))
    >>> delayed.eval()
    >>> _ = delayed(5 * jnp.ones((4, 128)))
    >>> delayed.amax_history[0]
    Array([3., 0., 0., 0.], dtype=float32)

    Attributes:
      recipes: the names of all recipes.
      kernel, bias: as in `flax.nnx.Linear`.
      amax_history: an `AmaxHistory` [2, history] with recipe "delayed", else None.
      use_running_average: whether amax_history is only read; `train()` and `eval()` set it.

    Args:
      in_features, out_features: sizes of the last axis of x and of the result.
      recipe: one of `Fp8Linear.recipes`, as in `jaxops.fp8_matmul`.
      dtype: dtype of the result; promoted from x and the parameters by default. A wider kernel is rounded to it before
        it is quantized, and its gradient is computed in it, as by `flax.nnx.Linear`; x is quantized from its own dtype.
      use_bias, param_dtype, kernel_init, bias_init, rngs: as in `flax.nnx.Linear`.
      history: steps that recipe "delayed" looks back.
      pow2_scales, backend, plan: as in `jaxops.fp8_matmul`.

    Raises:
      ValueError: a size or a history below 1, an unknown recipe or backend; x of another shape.
      TypeError: dtypes that `jaxops.fp8_matmul` does not quantize.
      NotImplementedError: an NVIDIA GPU without FP8, older than compute capability 8.9.
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
        Fp8Product.__init__(self, recipe, history=history, pow2_scales=pow2_scales, backend=backend, plan=plan)
        LinearParameters.__init__(
            self, in_features, out_features, use_bias=use_bias, dtype=dtype, param_dtype=param_dtype,
            kernel_init=kernel_init, bias_init=bias_init, rngs=rngs,
        )  # fmt: skip

    def __call__(self, x: jax.Array) -> jax.Array:
        """Multiplies x by the kernel and adds the bias.

        Args:
          x: [..., in_features], bfloat16, float16 or float32.

        Returns:
          [..., out_features] in dtype.
        """
        check_columns(x, self.in_features)
        out, bias = self.multiply(x), self.bias
        return out if bias is None else out + bias[...].astype(out.dtype).reshape((1,) * (out.ndim - 1) + (-1,))

    def multiply(self, x: jax.Array) -> jax.Array:
        """The product without the bias, also by a device's own part of the kernel.

        Args:
          x: [..., kernel.shape[0]], as in a call.

        Returns:
          [..., kernel.shape[1]] in dtype.
        """
        kernel, _, dtype = self._parameters(x)
        return self._product(x, kernel, dtype)


class Fp8DotGeneral(Fp8Product):
    """`jax.lax.dot_general` in FP8, for the `dot_general` argument of Flax layers, e.g. `nnx.Linear` and `nn.Dense`.

    The first operand is quantized as activations, the second as weights.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxops.nn import Fp8DotGeneral
    >>> rowwise = {"qkv_dot_general": Fp8DotGeneral("rowwise"), "out_dot_general": Fp8DotGeneral("rowwise")}
    >>> attention = nnx.MultiHeadAttention(4, 128, **rowwise, decode=False, rngs=nnx.Rngs(0))
    >>> attention(jnp.ones((2, 8, 128))).shape
    (2, 8, 128)

    Recipe "delayed" keeps its history here (`dot_general` in the layer's state): each product needs its own instance.
    `dot_general_cls` would make a new one, with an empty history, at every call.

    Attributes:
      amax_history, use_running_average: as in `Fp8Linear`.

    Args:
      recipe, history: as in `Fp8Linear`.
      pow2_scales, backend, plan: as in `jaxops.fp8_matmul`.

    Raises:
      ValueError: a history below 1, an unknown recipe or backend; contracted axes of different sizes, a precision.
      TypeError: dtypes that `jaxops.fp8_matmul` does not quantize.
      NotImplementedError: batch axes, no contracted axis, an out_sharding that splits an axis, an NVIDIA GPU
        without FP8.
    """

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: DimensionNumbers,
        precision: PrecisionLike = None,
        preferred_element_type: Dtype | None = None,
        out_sharding=None,
    ) -> jax.Array:
        """`jax.lax.dot_general` of activations and weights; at least one contracted axis, no batch axes.

        Returns:
          An array with lhs's remaining axes, then rhs's, in preferred_element_type or the promoted dtype.
        """
        contracted, batch = dimension_numbers
        if any(map(len, batch)) or not all(map(len, contracted)):
            raise NotImplementedError(
                f"dimension_numbers are {dimension_numbers}; an FP8 product has one contracted axis or more and no "
                "batch axes. Leave this layer's dot_general at its default, or put the product under jax.vmap."
            )
        check_out_sharding(out_sharding)
        if precision not in (None, "default", jax.lax.Precision.DEFAULT):
            raise ValueError(f"precision is {precision!r}; it must be None: the recipe sets the precision.")
        lhs_axes, rhs_axes = ([axis % x.ndim for axis in axes] for x, axes in zip((lhs, rhs), contracted, strict=True))
        sides = ((lhs, lhs_axes), (rhs, rhs_axes))
        lhs_rest, rhs_rest = ([i for i in range(x.ndim) if i not in axes] for x, axes in sides)
        lhs, rhs = lhs.transpose(lhs_rest + lhs_axes), rhs.transpose(rhs_axes + rhs_rest)
        M, lhs_K = lhs.shape[: len(lhs_rest)], lhs.shape[len(lhs_rest) :]
        rhs_K, N = rhs.shape[: len(rhs_axes)], rhs.shape[len(rhs_axes) :]
        if lhs_K != rhs_K:
            raise ValueError(f"lhs's contracted axes have sizes {lhs_K}, those of rhs {rhs_K}: they must be equal.")
        dtype = jnp.result_type(lhs, rhs) if preferred_element_type is None else preferred_element_type
        K = math.prod(lhs_K)
        return self._product(lhs.reshape(math.prod(M), K), rhs.reshape(K, math.prod(N)), dtype).reshape(M + N)
