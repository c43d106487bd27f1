"""`Router`: the linear layer that scores the experts for each token, and the choice among them."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_kernel_init
from flax.typing import Dtype, Initializer
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxops.nn.arguments import check_backend, check_dtypes, check_mask, check_matrix, check_sizes
from jaxops.ops.route import Routing, mean_shares, route, router_logits, update_router_bias


class RouterBias(nnx.Variable[jax.Array]):
    """The selection bias of a `Router` (DeepSeek-V3's loss-free balancing). Not an `nnx.Param`: no optimizer updates
    it.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxops.nn import Router, RouterBias
    >>> router = Router(8, 3, k=1, use_bias=True, rngs=nnx.Rngs(0))
    >>> nnx.state(router, RouterBias)["selection_bias"][...]
    Array([0., 0., 0.], dtype=float32)

    Args:
      value: [num_experts] float32, initially zeros.
      metadata: as in `flax.nnx.Variable`.

    Returns:
      A variable, like `flax.nnx.BatchStat`; `nnx.state(model, RouterBias)` finds those of a model.

    Raises:
      TypeError: a value in another dtype: in bfloat16 a step of 0.001 would be lost.
    """

    def __init__(self, value: jax.Array, **metadata):
        if hasattr(value, "dtype") and value.dtype != jnp.float32:
            lost = "in bfloat16 a step of 0.001 would be lost"
            raise TypeError(f"selection_bias is {value.dtype}; it must be float32: {lost}.")
        super().__init__(value, **metadata)


class Router(nnx.Module):
    """Scores the experts for each token with a linear map in float32, and chooses among them: `jaxops.route` as a
    layer.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxops.nn import Router
    >>> router = Router(8, 4, k=2, score="sigmoid", use_bias=True, rngs=nnx.Rngs(0))
    >>> router.kernel.shape, router.selection_bias.shape
    ((8, 4), (4,))
    >>> routing = router(jnp.ones((6, 8), jnp.bfloat16))
    >>> routing.experts.shape, routing.load.sum()
    ((6, 2), Array(12, dtype=int32))
    >>> router.update_bias(routing.load, rate=0.001)  # once per training step
    >>> sorted({abs(round(float(b), 3)) for b in router.selection_bias[...]})
    [0.001]

    Attributes:
      kernel: [in_features, num_experts] in param_dtype.
      selection_bias: a `RouterBias` [num_experts] float32, or None.

    Args:
      in_features: columns of x.
      num_experts: experts E to choose from.
      k: experts per token.
      score, normalize, weight_scale, expert_groups, top_expert_groups, capacity, backend: as in `jaxops.route`.
      use_bias: whether there is a selection_bias, which `update_bias` moves towards equal loads of the experts.
      param_dtype: dtype of the kernel.
      kernel_init: called with (key, [in_features, num_experts], param_dtype); lecun_normal by default.
      rngs: the stream `params` makes the kernel.

    Raises:
      ValueError: a size below 1; k, groups or capacity that do not fit num_experts, an unknown score or backend.
      TypeError: k, groups, capacity or weight_scale that are not Python numbers.
    """

    def __init__(
        self, in_features: int, num_experts: int, k: int, *, score: Literal["softmax", "sigmoid"] = "softmax",
        normalize: bool = True, weight_scale: float = 1.0, expert_groups: int = 1, top_expert_groups: int = 1,
        capacity: int | None = None, use_bias: bool = False, param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = default_kernel_init, backend: str = "auto", rngs: nnx.Rngs,
    ):  # fmt: skip
        check_sizes(in_features=in_features, num_experts=num_experts)
        check_backend(backend, "pallas")
        check_dtypes(None, param_dtype)
        self.in_features, self.num_experts, self.k = in_features, num_experts, k
        self.score: Literal["softmax", "sigmoid"] = score
        self.normalize, self.weight_scale, self.capacity = normalize, weight_scale, capacity
        self.expert_groups, self.top_expert_groups = expert_groups, top_expert_groups
        self.use_bias, self.param_dtype, self.backend = use_bias, param_dtype, backend
        no_token = jax.ShapeDtypeStruct((0, num_experts), jnp.float32)
        jax.eval_shape(
            functools.partial(route, **self._options() | {"backend": "xla"}), no_token
        )  # the op's own checks
        self.kernel = nnx.Param(kernel_init(rngs.params(), (in_features, num_experts), param_dtype))
        self.selection_bias: RouterBias | None
        self.selection_bias = RouterBias(jnp.zeros(num_experts, jnp.float32)) if use_bias else nnx.data(None)

    def _options(self) -> dict[str, Any]:
        names = "k", "score", "normalize", "weight_scale", "expert_groups", "top_expert_groups", "capacity", "backend"
        return {name: getattr(self, name) for name in names}

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> Routing:
        """Chooses k experts for each token, and sorts the tokens' rows by expert.

        Args:
          x: [T, in_features], bfloat16, float16 or float32.
          mask: [T] bool, which tokens count, as in `jaxops.route`.

        Returns:
          A `jaxops.Routing`, with weights, load and losses.

        Raises:
          ValueError: x or mask of another shape, or as `jaxops.route`.
          TypeError: a mask that is not bool.
        """
        return self.choose(self.logits(x, mask), mask)

    def logits(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """The scores before softmax or sigmoid, without selection_bias.

        Args:
          x, mask: as in a call. Tokens that do not count are read as zeros.

        Returns:
          [T, num_experts] float32.

        Raises:
          ValueError: x or mask of another shape.
          TypeError: a mask that is not bool.
        """
        check_matrix(x, f"[T, in_features={self.in_features}]", self.in_features)
        if mask is not None:
            check_mask(mask, x.shape[:1])
            # Their logits have zero gradients, but NaN times zero in the kernel's gradient would be NaN.
            x = jnp.where(mask[:, None], x, 0)
        return checkpoint_name(router_logits(x, self.kernel[...], backend=self.backend), "router.logits")

    def mean_shares(self, logits: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Each expert's P in `Routing.aux_loss`, which multiplies it by the experts' shares of the load.

        For balance over several devices: the mean of P over all tokens, and the sum of the devices' load.

        Args:
          logits, mask: as of `choose`.

        Returns:
          [num_experts] float32, the mean over the tokens that count of each one's scores over their sum.
        """
        return mean_shares(self.score, logits, mask)

    def choose(self, logits: jax.Array, mask: jax.Array | None = None) -> Routing:
        """`jaxops.route` with this router's options and selection_bias: a call is `choose(logits(x), mask)`.

        Args:
          logits: [T, num_experts].
          mask: as of a call.

        Returns:
          As a call.

        Raises:
          ValueError: as `jaxops.route`.
        """
        bias = None if self.selection_bias is None else self.selection_bias[...]
        return route(logits, selection_bias=bias, mask=mask, **self._options())

    def over_devices(
        self, routing: Routing, logits: jax.Array, mask: jax.Array | None, axis_name: str | tuple[str, ...]
    ) -> Routing:
        """routing, with load, aux_loss and z_loss of all devices' tokens, inside `jax.shard_map`.

        Args:
          routing: of this device's tokens, by `choose(logits, mask)`.
          logits, mask: as of `choose`.
          axis_name: the mesh axis, or several, over which the tokens are split.

        Returns:
          A `jaxops.Routing` whose load, aux_loss and z_loss are equal on all devices of axis_name.
        """
        load = lax.psum(routing.load, axis_name)
        total = jnp.maximum(jnp.sum(load), 1).astype(jnp.float32)
        weight = jnp.sum(routing.load).astype(jnp.float32) / total
        means = weight * self.mean_shares(logits, mask), weight * routing.z_loss
        shares, z_loss = lax.psum(means, axis_name)
        aux_loss = self.num_experts * jnp.sum(load.astype(jnp.float32) / total * shares)
        return dataclasses.replace(routing, load=load, aux_loss=aux_loss, z_loss=z_loss)

    def update_bias(self, load: jax.Array, rate: float) -> None:
        """Moves selection_bias once per training step, outside of the gradient, by `jaxops.update_router_bias`.

        Args:
          load: [num_experts], the `load` of the returned Routing, or its sum over devices or microbatches.
          rate: the size of the step.

        Raises:
          ValueError: a router without selection_bias, a load of another shape.
        """
        if self.selection_bias is None:
            raise ValueError("this router has no selection_bias to update: make it with use_bias=True.")
        self.selection_bias[...] = update_router_bias(self.selection_bias[...], load, rate)
