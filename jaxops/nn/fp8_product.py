"""What the FP8 modules share: `AmaxHistory`, the state of delayed scaling, and the product that reads and writes it."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxops.nn.arguments import check_backend, check_sizes
from jaxops.ops.fp8_matmul import RECIPES, Plan, fp8_matmul

E4M3_MAX = float(jnp.finfo(jnp.float8_e4m3fn).max)


class AmaxHistory(nnx.Variable[jax.Array]):
    """The largest absolute values of the last steps, from which delayed scaling takes the next step's scales. Not an `nnx.Param`: nothing trains it.

    Row 0 is the activations', row 1 the kernel's, the newest value first; zero stands for a step that has not been. An empty row gives a scale of one,
    as in TransformerEngine and in Flax' own FP8 ops: a first step is coarse, and saturates past 448, and the second one has its scale.

    >>> import jax.numpy as jnp
    >>> from jaxops.nn import AmaxHistory
    >>> history = AmaxHistory(jnp.zeros((2, 4)))
    >>> [float(amax) for amax in history.amax()]  # both rows are empty
    [448.0, 448.0]
    >>> history.record(jnp.float32(3), jnp.float32(0.5))
    >>> history.record(jnp.float32(2), jnp.float32(0.25))
    >>> history[...]
    Array([[2.  , 3.  , 0.  , 0.  ],
           [0.25, 0.5 , 0.  , 0.  ]], dtype=float32)
    >>> [float(amax) for amax in history.amax()]
    [3.0, 0.5]

    Args:
      value: [2, history] float32, zeros to begin with.
      metadata: as in `flax.nnx.Variable`.

    Returns:
      A variable, as `flax.nnx.BatchStat` is one; `nnx.state(model, AmaxHistory)` finds those of a model.

    Raises:
      ValueError: a value of another shape.
    """

    def __init__(self, value: jax.Array, **metadata):
        shape = jnp.shape(value)
        if len(shape) < 2 or shape[-2] != 2 or shape[-1] < 1:
            raise ValueError(
                f"an amax history has shape {shape}; it must be [2, history], with a history of at least one step."
            )
        super().__init__(value, **metadata)

    def amax(self) -> tuple[jax.Array, jax.Array]:
        """What to scale activations and kernel by now: float32 scalars."""
        most = jnp.max(self[...], axis=-1)
        x, kernel = jnp.where(most > 0, most, E4M3_MAX)
        return x, kernel

    def record(self, x: jax.Array, kernel: jax.Array) -> None:
        """Puts this step's largest values first and forgets the oldest."""
        now = jax.lax.stop_gradient(jnp.stack([x, kernel]).astype(jnp.float32))
        self[...] = jnp.concatenate([now[:, None], self[...][:, :-1]], axis=1)


class Fp8Product(nnx.Module):
    """`jaxops.fp8_matmul` with its options, and with the history that recipe "delayed" needs.

    Attributes:
      amax_history: an `AmaxHistory`, or None for the other recipes.
      use_running_average: whether the history is only read. `train()` and `eval()` set it, as they set `flax.nnx.BatchNorm`'s.
    """

    def __init__(self, *, recipe: str, history: int, pow2_scales: bool, backend: str, plan: Plan | None):
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

    def product(self, x: jax.Array, w: jax.Array, out_dtype) -> jax.Array:
        """x[..., K] @ w[K, N]; with recipe "delayed" the history takes a step, unless it is only read."""
        amax = None if self.amax_history is None else self.amax_history.amax()
        options = {"out_dtype": out_dtype, "pow2_scales": self.pow2_scales, "backend": self.backend, "plan": self.plan}
        out: Any = fp8_matmul(x, w, recipe=self.recipe, amax=amax, **options)
        if self.amax_history is None:
            return out
        out, now = out
        if not self.use_running_average:
            self.amax_history.record(*now)
        return out


def check_recipe(recipe: str) -> None:
    if recipe not in RECIPES:
        raise ValueError(f"recipe is {recipe!r}; it must be one of {', '.join(map(repr, RECIPES))}.")
