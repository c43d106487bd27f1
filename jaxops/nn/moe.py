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

from jaxops.nn.arguments import check_backend, check_grouped_recipe, check_sizes, devices_on, make_part
from jaxops.nn.grouped_linear import default_kernel_init
from jaxops.nn.router import Router
from jaxops.ops.grouped_glu import grouped_glu
from jaxops.ops.grouped_matmul import grouped_matmul
from jaxops.ops.moe_mlp import moe_mlp
from jaxops.ops.route import Routing, partial_routing

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "sigmoid"]


class _Shared(nnx.Module):
    """Experts that every token goes to: a gated linear unit, a down projection, and optionally a gate per token."""

    def __init__(self, in_features: int, hidden_features: int, gated: bool, make_kernel: Callable[..., jax.Array]):
        self.gate = nnx.Param(make_kernel(1, in_features, hidden_features)[0])
        self.up = nnx.Param(make_kernel(1, in_features, hidden_features)[0])
        self.down = nnx.Param(make_kernel(1, hidden_features, in_features)[0])
        self.token_gate = nnx.Param(make_kernel(1, in_features, 1)[0]) if gated else nnx.data(None)


class MoE(nnx.Module):
    """A mixture of experts: k of E gated linear units (SwiGLU by default) per token, added with the router's weights.

    `y[t] = sum_j weights[t, j] * (act(x[t] @ gate[e]) * (x[t] @ up[e])) @ down[e]`, where e is the token's choice j;
    with shared_features plus one such unit that every token goes through. No padding and no host sync; tokens are
    dropped only beyond the router's capacity. New routings never recompile.

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

    With a recipe the products of all experts run in FP8, as in `GroupedLinear`; router and token_gate do not. The
    parameters are the same, so a layer with a recipe and one without load each other's.

    >>> in_fp8 = MoE(4, 8, 16, router=functools.partial(Router, k=2), recipe="blockwise", rngs=nnx.Rngs(0))
    >>> in_fp8(jnp.ones((2, 3, 8), jnp.bfloat16))[0].shape
    (2, 3, 8)

    On several devices: inside `jax.shard_map`, with the same router and shared experts on all devices of the axis
    `expert_axis`, and gate, up and down split along their first axis. With gather_tokens each device passes its own
    tokens, equally many, and gets their results; otherwise all pass the same tokens and get the same results.

    Attributes:
      router: the router.
      gate, up: [num_experts, in_features, hidden_features] in param_dtype; with expert_axis the device's share.
      down: [num_experts, hidden_features, in_features], likewise.
      shared: None, or the shared experts: gate and up [in_features, shared_features], down [shared_features,
        in_features], and token_gate [in_features, 1] or None.

    Args:
      num_experts: experts E, of all devices together.
      in_features: columns of x and of the result.
      hidden_features: width of an expert.
      router: a `jaxops.nn.Router`, or another module or function from tokens [T, in_features] to a `jaxops.Routing`. A
        class, or a `functools.partial` of one, is called with (in_features, num_experts, rngs=rngs), so that
        `flax.nnx.bridge.to_linen` makes a new router from each key.
      activation: of the gate, as in `jaxops.grouped_glu`.
      shared_features: width of the shared experts together; 0 for none.
      gate_shared: multiplies the shared experts' output by `sigmoid(x @ token_gate)`, a number per token (Qwen2-MoE);
        that product is float32, not TF32.
      expert_axis: None, or the mesh axis over which the experts are split, or several in order.
      gather_tokens: whether tokens are split over expert_axis, too. They are gathered in dtype, the experts' results
        sent back in dtype and added in float32: a quarter of the bytes of a float32 sum over all tokens. The routing
        is that of all devices' tokens, in the devices' order.
      recipe: None, or an FP8 recipe of `jaxops.moe_mlp`. Weights are quantized from param_dtype, tokens from dtype.
      dtype: dtype of the products (with a recipe, of the values between them) and of the result; promoted from x and
        the parameters by default. Gradients of parameters have param_dtype and are never rounded to dtype; the sum over
        a token's experts is float32.
      param_dtype: dtype of the parameters.
      precision: of float32 products, as in `jaxops.grouped_matmul`; None with a recipe.
      kernel_init: called with (key, [E, in, out], param_dtype), for shared experts with E = 1. By default lecun_normal
        with the fan-in of one expert; another initializer needs `batch_axis=(0,)` for that.
      pow2_scales: with a recipe, as in `jaxops.moe_mlp`.
      backend: as in `jaxops.moe_mlp`.
      rngs: the stream `params` makes the parameters.

    Raises:
      ValueError: a size below 1, a router of other sizes, an unknown activation, recipe or backend, a precision with a
        recipe, pow2_scales without one.
      NotImplementedError: recipe "delayed"; with a recipe, an NVIDIA GPU older than compute capability 8.9.
    """

    def __init__(
        self, num_experts: int, in_features: int, hidden_features: int, *, router: Callable[..., Any],
        activation: Activation = "silu", shared_features: int = 0, gate_shared: bool = False,
        expert_axis: str | tuple[str, ...] | None = None, gather_tokens: bool = False, recipe: str | None = None,
        dtype: Dtype | None = None, param_dtype: Dtype = jnp.float32, precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init, pow2_scales: bool = False, backend: str = "auto",
        rngs: nnx.Rngs,
    ):  # fmt: skip
        check_grouped_recipe(recipe, precision, pow2_scales)
        check_sizes(num_experts=num_experts, in_features=in_features, hidden_features=hidden_features)
        if shared_features != 0:
            check_sizes(shared_features=shared_features)
        check_backend(backend, "triton", "pallas")
        if gather_tokens and expert_axis is None:
            raise ValueError("gather_tokens=True needs expert_axis, the mesh axis over which the tokens are split.")
        array = jax.ShapeDtypeStruct
        x, w, offsets = array((1, 1), jnp.float32), array((1, 1, 1), jnp.float32), array((2,), jnp.int32)
        check_op = functools.partial(grouped_glu, activation=activation, backend="xla")
        jax.eval_shape(check_op, x, w, w, offsets)  # the op's own checks

        def make_kernel(*shape: int) -> jax.Array:
            return kernel_init(rngs.params(), shape, param_dtype)

        sizes = in_features, num_experts
        self.router: Callable[[jax.Array], Routing] = make_part(router, *sizes, rngs=rngs)
        if isinstance(self.router, Router) and (self.router.in_features, self.router.num_experts) != sizes:
            found = self.router.in_features, self.router.num_experts
            raise ValueError(f"the router has (in_features, num_experts) = {found}; this layer has {sizes}.")
        self.gate = nnx.Param(make_kernel(num_experts, in_features, hidden_features))
        self.up = nnx.Param(make_kernel(num_experts, in_features, hidden_features))
        self.down = nnx.Param(make_kernel(num_experts, hidden_features, in_features))
        self.shared: _Shared | None = nnx.data(None)
        if shared_features:
            self.shared = _Shared(in_features, shared_features, gate_shared, make_kernel)
        self.num_experts, self.in_features, self.hidden_features = num_experts, in_features, hidden_features
        self.activation: Activation = activation
        self.shared_features, self.gate_shared = shared_features, gate_shared
        self.expert_axis, self.gather_tokens = expert_axis, gather_tokens
        self.dtype, self.param_dtype, self.precision, self.backend = dtype, param_dtype, precision, backend
        self.recipe, self.pow2_scales = recipe, pow2_scales

    def __call__(self, x: jax.Array) -> tuple[jax.Array, Routing]:
        """Routes every token, runs the experts over their rows, and adds up each token's results.

        Args:
          x: [..., in_features], bfloat16, float16 or float32.

        Returns:
          (y [..., in_features] in dtype, the `jaxops.Routing` of the tokens with the leading axes flattened: its
          aux_loss and z_loss are for the training loss, its load for `Router.update_bias`).

        Raises:
          ValueError: x of another shape, a router with another number of experts, a share of the experts that does not
            fit expert_axis, a call outside of `jax.shard_map` with expert_axis.
          TypeError: dtypes that the kernels do not multiply.
        """
        if x.ndim < 1 or x.shape[-1] != self.in_features:
            raise ValueError(f"x has shape {tuple(x.shape)}; it must be [..., in_features={self.in_features}].")
        gate, up, down = self.gate[...], self.up[...], self.down[...]
        devices = 1
        if self.expert_axis is not None:
            devices = devices_on("expert_axis", self.expert_axis, ", or make it without expert_axis")
        dtype = canonicalize_dtype(x, gate, up, down, dtype=self.dtype)
        tokens = own = x.reshape(-1, self.in_features)
        if self.gather_tokens:
            tokens = lax.all_gather(tokens.astype(dtype), self.expert_axis, tiled=True)
        routing = self.router(tokens)
        if (E := routing.group_offsets.shape[0] - 1) != self.num_experts:
            raise ValueError(f"the router chose among {E} experts; this layer has num_experts={self.num_experts}.")
        whole = self.expert_axis is None or self.gather_tokens
        tokens, out_dtype = tokens.astype(dtype), dtype if whole else jnp.float32
        own_experts = self._own_experts(routing, gate.shape[0], devices)
        y = self._mlp(tokens, (gate, up, down), own_experts, out_dtype)
        if self.gather_tokens:
            parts = lax.all_to_all(y.reshape(devices, *own.shape), self.expert_axis, 0, 0)
            y = jnp.sum(parts.astype(jnp.float32), axis=0).astype(dtype)
        elif self.expert_axis is not None:
            y = lax.psum(y, self.expert_axis).astype(dtype)
        if self.shared is not None:
            y = y + self._shared(self.shared, own.astype(dtype))
        return y.reshape(x.shape), routing

    def _options(self, dtype: Dtype) -> dict[str, Any]:
        return {"compute_dtype": dtype, "precision": self.precision, "backend": self.backend}

    def _mlp(
        self, tokens: jax.Array, kernels: tuple[jax.Array, jax.Array, jax.Array], routing: Routing, out_dtype: Dtype
    ) -> jax.Array:
        how: dict[str, Any] = {"activation": self.activation, "out_dtype": out_dtype, **self._options(tokens.dtype)}
        return moe_mlp(tokens, *kernels, routing, recipe=self.recipe, pow2_scales=self.pow2_scales, **how)

    def _own_experts(self, routing: Routing, experts: int, devices: int) -> Routing:
        """The routing with the offsets of this device's experts."""
        if devices * experts != self.num_experts:
            found = f"this device has {experts} of num_experts={self.num_experts} experts, and "
            found += f"expert_axis={self.expert_axis!r} has {devices} devices"
            raise ValueError(f"{found}: split the first axis of gate, up and down evenly over expert_axis.")
        if self.expert_axis is None:
            return routing
        first = lax.axis_index(self.expert_axis) * experts
        offsets = lax.dynamic_slice_in_dim(routing.group_offsets, first, experts + 1)
        return dataclasses.replace(routing, group_offsets=offsets)

    def _shared(self, shared: _Shared, tokens: jax.Array) -> jax.Array:
        """[T, in_features]; all tokens are one group."""
        gate, up, down = (kernel[...][None] for kernel in (shared.gate, shared.up, shared.down))
        group, options = jnp.array([0, tokens.shape[0]], jnp.int32), self._options(tokens.dtype)
        if self.recipe is None:
            h = grouped_glu(tokens, gate, up, group, activation=self.activation, **options)
            y = grouped_matmul(h, down, group, **options)
        else:  # by moe_mlp, which casts each tensor once
            y = self._mlp(tokens, (gate, up, down), _to_one_expert(group, tokens.shape[0]), tokens.dtype)
        if shared.token_gate is None:
            return y
        wide = (x.astype(jnp.float32) for x in (tokens, shared.token_gate[...]))
        token_gate = checkpoint_name(jnp.matmul(*wide, precision=lax.Precision.HIGHEST), "moe.token_gate")
        return y * jax.nn.sigmoid(token_gate).astype(y.dtype)


def _to_one_expert(group_offsets: jax.Array, T: int) -> Routing:
    """The rows are the tokens."""
    row = jnp.arange(T, dtype=jnp.int32)
    weights = jnp.ones((T, 1), jnp.float32)
    return partial_routing(weights=weights, row_positions=row[:, None], row_indices=row, group_offsets=group_offsets)
