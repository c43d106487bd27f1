"""`MoE`: a mixture-of-experts layer, from tokens to tokens."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import canonicalize_dtype
from flax.typing import Dtype, Initializer, PrecisionLike
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxops.nn.arguments import check_backend, check_sizes, devices_on, make_part
from jaxops.nn.grouped_linear import default_kernel_init
from jaxops.nn.router import Router
from jaxops.ops.grouped_glu import grouped_glu
from jaxops.ops.grouped_matmul import grouped_matmul
from jaxops.ops.moe_mlp import moe_mlp
from jaxops.ops.route import Routing

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "sigmoid"]


class _Shared(nnx.Module):
    """Experts that every token goes to: one gated linear unit with a down projection, times a gate of the token's own if wanted."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        gated: bool,
        param_dtype: Dtype,
        kernel_init: Initializer,
        rngs: nnx.Rngs,
    ):
        def kernel(rows: int, columns: int) -> nnx.Param[jax.Array]:
            return nnx.Param(kernel_init(rngs.params(), (1, rows, columns), param_dtype)[0])

        self.gate = kernel(in_features, hidden_features)
        self.up = kernel(in_features, hidden_features)
        self.down = kernel(hidden_features, in_features)
        self.token_gate = kernel(in_features, 1) if gated else nnx.data(None)


class MoE(nnx.Module):
    """A mixture of experts: each token goes through k of E gated linear units (SwiGLU by default), whose outputs are added with the router's weights.

    `y[t] = sum_j weights[t, j] * (act(x[t] @ gate[e]) * (x[t] @ up[e])) @ down[e]`, e the token's j-th choice; plus, with shared_features, one such unit that
    every token goes through. Nothing is padded, dropped only past the router's capacity, and read by the host never: other routings run the same program.

    >>> import functools
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxops.nn import MoE, Router
    >>> rngs = nnx.Rngs(0)
    >>> moe = MoE(4, 8, 16, router=functools.partial(Router, k=2), shared_features=16, dtype=jnp.bfloat16, rngs=rngs)
    >>> moe.gate.shape, moe.up.shape, moe.down.shape, moe.shared.down.shape
    ((4, 8, 16), (4, 8, 16), (4, 16, 8), (16, 8))
    >>> y, routing = moe(jnp.ones((2, 3, 8), jnp.bfloat16))
    >>> y.shape, routing.load.sum()
    ((2, 3, 8), Array(12, dtype=int32))
    >>> loss = jnp.mean(y.astype(jnp.float32) ** 2) + 0.01 * routing.aux_loss + 0.001 * routing.z_loss

    Over several devices: inside `jax.shard_map`, with the same tokens on all devices of the axis `expert_axis` and with gate, up and down split along their
    first axis. Each device runs its own experts and the results are added over the axis; router and shared experts are replicated.

    Attributes:
      router: what was given, or made.
      gate, up: [num_experts, in_features, hidden_features] in param_dtype; on a device of expert_axis its share of the experts, as of down.
      down: [num_experts, hidden_features, in_features] in param_dtype.
      shared: None, or what every token goes through, with gate and up [in_features, shared_features], down [shared_features, in_features], and token_gate
        [in_features, 1] or None.

    Args:
      num_experts: experts E, on all devices together.
      in_features: columns of x and of the result.
      hidden_features: width inside an expert.
      router: from tokens [T, in_features] to a `jaxops.Routing` to E experts: a `jaxops.nn.Router`, or any other module or
        function. A class, or a `functools.partial` of one such as `functools.partial(Router, k=2)`, is called with
        (in_features, num_experts, rngs=rngs) when the layer is made; so `flax.nnx.bridge.to_linen` makes a new router from
        each key.
      activation: of the gate, as in `jaxops.grouped_glu`.
      shared_features: width of the shared experts together; 0 for none.
      gate_shared: whether the shared experts' output is multiplied by `sigmoid(x @ token_gate)`, a number a token
        (Qwen2-MoE); that product is float32, not TF32.
      expert_axis: None, or the name of the mesh axis over which the experts are split.
      dtype: dtype of the products and of the result; promoted from x and the parameters by default. Parameters keep gradients in param_dtype that are never
        rounded to dtype; the sum over a token's experts is float32.
      param_dtype: dtype of the parameters.
      precision: of float32 products, as in `jaxops.grouped_matmul`.
      kernel_init: called with (key, [E, in, out], param_dtype), for shared experts with E = 1. By default lecun_normal with the fan-in of one expert; an
        initializer of your own needs `batch_axis=(0,)` for that.
      backend: as in `jaxops.moe_mlp`.
      rngs: the stream `params` makes the parameters.

    Raises:
      ValueError: a size below 1, a router of other sizes, an unknown activation or backend.
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        hidden_features: int,
        *,
        router: Callable[..., Any],
        activation: Activation = "silu",
        shared_features: int = 0,
        gate_shared: bool = False,
        expert_axis: str | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        backend: str = "auto",
        rngs: nnx.Rngs,
    ):
        check_sizes(num_experts=num_experts, in_features=in_features, hidden_features=hidden_features)
        if shared_features != 0:
            check_sizes(shared_features=shared_features)
        check_backend(backend, "triton", "pallas")
        x, w, offsets = (
            jax.ShapeDtypeStruct(*of) for of in (((1, 1), jnp.float32), ((1, 1, 1), jnp.float32), ((2,), jnp.int32))
        )
        jax.eval_shape(
            functools.partial(grouped_glu, activation=activation, backend="xla"), x, w, w, offsets
        )  # the op's own checks
        self.router: Callable[[jax.Array], Routing] = make_part(router, in_features, num_experts, rngs=rngs)
        if isinstance(self.router, Router):
            sizes = self.router.in_features, self.router.num_experts
            if sizes != (in_features, num_experts):
                raise ValueError(
                    f"the router has (in_features, num_experts) = {sizes}; this layer has {(in_features, num_experts)}."
                )
        self.gate = nnx.Param(kernel_init(rngs.params(), (num_experts, in_features, hidden_features), param_dtype))
        self.up = nnx.Param(kernel_init(rngs.params(), (num_experts, in_features, hidden_features), param_dtype))
        self.down = nnx.Param(kernel_init(rngs.params(), (num_experts, hidden_features, in_features), param_dtype))
        self.shared: _Shared | None
        self.shared = (
            _Shared(in_features, shared_features, gate_shared, param_dtype, kernel_init, rngs)
            if shared_features
            else nnx.data(None)
        )
        self.num_experts = num_experts
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.activation: Activation = activation
        self.shared_features = shared_features
        self.gate_shared = gate_shared
        self.expert_axis = expert_axis
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.backend = backend

    def __call__(self, x: jax.Array) -> tuple[jax.Array, Routing]:
        """Routes every token, runs the experts over their rows, and adds up each token's results.

        Args:
          x: [..., in_features], bfloat16, float16 or float32.

        Returns:
          (y [..., in_features] in dtype, the `jaxops.Routing` of the tokens, leading axes flattened: its aux_loss and z_loss are for the training loss,
          its load for `Router.update_bias`).

        Raises:
          ValueError: x of another shape, a router with another number of experts, a share of the experts that does not fit
            expert_axis, a call outside of `jax.shard_map` with expert_axis.
          TypeError: dtypes that the kernels do not multiply.
        """
        if x.ndim < 1 or x.shape[-1] != self.in_features:
            raise ValueError(f"x has shape {tuple(x.shape)}; it must be [..., in_features={self.in_features}].")
        gate, up, down = self.gate[...], self.up[...], self.down[...]
        devices = self._devices()
        dtype = canonicalize_dtype(x, gate, up, down, dtype=self.dtype)
        tokens = x.reshape(-1, self.in_features)
        routing = self.router(tokens)
        if routing.group_offsets.shape[0] != self.num_experts + 1:
            raise ValueError(
                f"the router chose among {routing.group_offsets.shape[0] - 1} experts; this layer has num_experts={self.num_experts}."
            )
        tokens = tokens.astype(dtype)
        own = dataclasses.replace(routing, group_offsets=self._own_offsets(routing, gate.shape[0], devices))
        out_dtype = dtype if self.expert_axis is None else jnp.float32
        y = moe_mlp(tokens, gate, up, down, own, activation=self.activation, out_dtype=out_dtype, **self._how(dtype))
        if self.expert_axis is not None:
            y = lax.psum(y, self.expert_axis).astype(dtype)
        if self.shared is not None:
            y = y + self._shared(self.shared, tokens)
        return y.reshape(x.shape), routing

    def _how(self, dtype: Dtype) -> dict[str, Any]:
        return {"compute_dtype": dtype, "precision": self.precision, "backend": self.backend}

    def _devices(self) -> int:
        """Those that share the experts."""
        if self.expert_axis is None:
            return 1
        return devices_on("expert_axis", self.expert_axis, ", or make it without expert_axis")

    def _own_offsets(self, routing: Routing, experts: int, devices: int) -> jax.Array:
        """Those of the experts that this device has."""
        if devices * experts != self.num_experts:
            raise ValueError(
                f"this device has {experts} of num_experts={self.num_experts} experts, and expert_axis={self.expert_axis!r} has {devices} devices: "
                "split gate, up and down evenly along their first axis, over all devices of expert_axis."
            )
        if self.expert_axis is None:
            return routing.group_offsets
        return lax.dynamic_slice_in_dim(routing.group_offsets, lax.axis_index(self.expert_axis) * experts, experts + 1)

    def _shared(self, shared: _Shared, tokens: jax.Array) -> jax.Array:
        """[T, in_features]: one group that all tokens are in."""
        gate, up, down = (kernel[...][None] for kernel in (shared.gate, shared.up, shared.down))
        all_tokens, how = jnp.array([0, tokens.shape[0]], jnp.int32), self._how(tokens.dtype)
        y = grouped_matmul(
            grouped_glu(tokens, gate, up, all_tokens, activation=self.activation, **how), down, all_tokens, **how
        )
        if shared.token_gate is None:
            return y
        wide = (x.astype(jnp.float32) for x in (tokens, shared.token_gate[...]))
        token_gate = checkpoint_name(jnp.matmul(*wide, precision=lax.Precision.HIGHEST), "moe.token_gate")
        return y * jax.nn.sigmoid(token_gate).astype(y.dtype)
