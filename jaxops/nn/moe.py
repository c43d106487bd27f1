"""`MoE`: a mixture-of-experts layer, from tokens to tokens."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import canonicalize_dtype
from flax.typing import Dtype, Initializer, PrecisionLike
from jax import lax

from jaxops.nn.arguments import (
    check_backend,
    check_columns,
    check_dtypes,
    check_grouped_recipe,
    check_mask,
    check_sizes,
    devices_on,
    make_part,
)
from jaxops.nn.grouped_linear import default_kernel_init
from jaxops.nn.router import Router
from jaxops.ops.grouped_glu import UnitActivation, activation_name
from jaxops.ops.moe_mlp import moe_mlp
from jaxops.ops.route import Routing, route_choices
from jaxops.parallel import Dispatched, add_own_rows, collect, dispatch, gather_parts, gather_pieces


class MoE(nnx.Module):
    """A mixture of experts: k of E gated linear units (SwiGLU by default) per token, added with the router's weights.

    `y[t] = sum_j weights[t, j] * (act(x[t] @ gate[e]) * (x[t] @ up[e])) @ down[e]`, where e is the token's choice j.
    No padding and no host sync; tokens are dropped only beyond the router's capacity. New routings never recompile.

    >>> import functools
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxops.nn import MoE, Router
    >>> rngs = nnx.Rngs(0)
    >>> moe = MoE(4, 8, 16, router=functools.partial(Router, k=2), dtype=jnp.bfloat16, rngs=rngs)
    >>> moe.gate.shape, moe.up.shape, moe.down.shape
    ((4, 8, 16), (4, 8, 16), (4, 16, 8))
    >>> y, routing = moe(jnp.ones((2, 3, 8), jnp.bfloat16))
    >>> y.shape, routing.load.sum()
    ((2, 3, 8), Array(12, dtype=int32))
    >>> loss = jnp.mean(y.astype(jnp.float32) ** 2) + 0.01 * routing.aux_loss + 0.001 * routing.z_loss

    A layer with shared experts is `y, routing = moe(x); y = y + shared(x)`, with `shared` a `SharedExperts`.

    With a recipe the products of all experts run in FP8, as in `GroupedLinear`; the router's does not. The parameters
    are the same, so a layer with a recipe and one without load each other's.

    >>> in_fp8 = MoE(4, 8, 16, router=functools.partial(Router, k=2), recipe="blockwise", rngs=nnx.Rngs(0))
    >>> in_fp8(jnp.ones((2, 3, 8), jnp.bfloat16))[0].shape
    (2, 3, 8)

    On several devices: inside `jax.shard_map`, with the same router on all devices of the axis `expert_axis`, and gate,
    up and down split along their first axis. With gather_tokens or send_tokens each device passes its own tokens,
    equally many, and gets their results; otherwise all pass the same tokens and get the same results.

    Attributes:
      router: the router.
      gate, up: [num_experts, in_features, hidden_features] in param_dtype; with expert_axis the device's share.
      down: [num_experts, hidden_features, in_features], likewise.
      gate_bias, up_bias, down_bias: [num_experts, columns], likewise; None without use_bias.
      received_rows: with send_tokens, how many tokens a device has room for, as `rows` of `jaxops.parallel.dispatch`;
        None, all devices', unless you set it before `nnx.split`. Dropped choices have no row in the returned routing,
        as beyond a capacity; its load counts them.

    Args:
      num_experts: experts E, of all devices together.
      in_features: columns of x and of the result.
      hidden_features: width of an expert.
      router: a `jaxops.nn.Router`, or another module or function from tokens [T, in_features] (and mask=[T], where a
        call has a mask) to a `jaxops.Routing`, as of `jaxops.route_choices`. A class, or a `functools.partial` of one,
        is called with (in_features, num_experts, rngs=rngs), so that `flax.nnx.bridge.to_linen` makes a new router from
        each key.
      activation: of the gate, as in `jaxops.grouped_glu`; gpt-oss' experts have "swiglu_oai" and use_bias.
      use_bias: whether the experts' three products have biases, which start at zero; not with a recipe.
      expert_axis: None, or the mesh axis over which the experts are split, or several in order.
      gather_tokens: whether tokens are split over expert_axis, too. They are gathered in dtype, the experts' results
        sent back in dtype and added in float32: a quarter of the bytes of a float32 sum over all tokens. The routing
        is that of all devices' tokens, in the devices' order.
      send_tokens: instead of gather_tokens: a token is sent only to the devices that have its experts, by
        `jaxops.parallel.dispatch`, in dtype; a device's experts' results for it are one row, rounded to dtype. Needs a
        `Router` without a capacity that does not override `__call__`. The routing is that of own tokens, with load and
        losses of all devices' tokens.
      recipe: None, or an FP8 recipe of `jaxops.moe_mlp`. Weights and tokens are quantized from dtype.
      dtype: dtype of the products (with a recipe, of the values between them) and of the result; promoted from x and
        the parameters by default. Gradients of parameters have param_dtype and are never rounded to dtype; the sum over
        a token's experts is float32.
      param_dtype: dtype of the parameters.
      precision: of float32 products, as in `jaxops.grouped_matmul`; None with a recipe.
      kernel_init: called with (key, [E, in, out], param_dtype). By default lecun_normal with the fan-in of one expert;
        another initializer needs `batch_axis=(0,)` for that.
      pow2_scales: with a recipe, as in `jaxops.moe_mlp`.
      backend: as in `jaxops.moe_mlp`.
      rngs: the stream `params` makes the parameters.

    Raises:
      ValueError: a size below 1, a router of other sizes, an unknown activation, recipe or backend, a precision with a
        recipe, pow2_scales without one.
      TypeError: a router that cannot be called, a dtype that the kernels do not multiply.
      NotImplementedError: recipe "delayed"; with a recipe, use_bias, "swiglu_oai", an NVIDIA GPU older than compute
        capability 8.9.
    """

    def __init__(
        self, num_experts: int, in_features: int, hidden_features: int, *, router: Callable[..., Any],
        activation: UnitActivation = "silu", use_bias: bool = False, expert_axis: str | tuple[str, ...] | None = None,
        gather_tokens: bool = False, send_tokens: bool = False, recipe: str | None = None, dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32, precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init, pow2_scales: bool = False, backend: str = "auto",
        rngs: nnx.Rngs,
    ):  # fmt: skip
        check_grouped_recipe(recipe, precision, pow2_scales)
        check_sizes(num_experts=num_experts, in_features=in_features, hidden_features=hidden_features)
        check_backend(backend, "triton", "pallas")
        if gather_tokens and expert_axis is None:
            raise ValueError("gather_tokens=True needs expert_axis, the mesh axis over which the tokens are split.")
        if send_tokens and (expert_axis is None or gather_tokens):
            raise ValueError("send_tokens=True needs expert_axis, and replaces gather_tokens: leave that one out.")
        check_dtypes(dtype, param_dtype)

        def make_kernel(*shape: int) -> nnx.Param[jax.Array]:
            return nnx.Param(kernel_init(rngs.params(), (num_experts, *shape), param_dtype))

        sizes = in_features, num_experts
        self.router: Callable[..., Routing] = make_part(router, *sizes, rngs=rngs)
        if not callable(self.router):
            raise TypeError(f"router={router!r} cannot be called; pass e.g. functools.partial(jaxops.nn.Router, k=2).")
        if isinstance(self.router, Router) and (self.router.in_features, self.router.num_experts) != sizes:
            own = self.router.in_features, self.router.num_experts
            raise ValueError(f"the router has (in_features, num_experts) = {own}; this layer has {sizes}.")
        self.gate = make_kernel(in_features, hidden_features)
        self.up = make_kernel(in_features, hidden_features)
        self.down = make_kernel(hidden_features, in_features)
        biases = (hidden_features, hidden_features, in_features) if use_bias else (None,) * 3
        make_bias = lambda size: nnx.Param(jnp.zeros((num_experts, size), param_dtype))
        made: Any = [nnx.data(None) if size is None else make_bias(size) for size in biases]
        self.gate_bias, self.up_bias, self.down_bias = made
        self.num_experts, self.in_features, self.hidden_features = num_experts, in_features, hidden_features
        self.activation = activation_name(activation, unit=True)
        if recipe is not None and (use_bias or self.activation == "swiglu_oai"):
            raise NotImplementedError(
                f"recipe={recipe!r} has no experts with biases or 'swiglu_oai': leave recipe, or these, out."
            )
        self.expert_axis, self.gather_tokens, self.send_tokens = expert_axis, gather_tokens, send_tokens
        self.received_rows: int | None = None
        self.dtype, self.param_dtype, self.precision, self.backend = dtype, param_dtype, precision, backend
        self.recipe, self.pow2_scales = recipe, pow2_scales

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> tuple[jax.Array, Routing]:
        """Routes every token, runs the experts over their rows, and adds up each token's results.

        Args:
          x: [..., in_features], bfloat16, float16 or float32.
          mask: [...] bool, which tokens count, as in `jaxops.route`; None for all. The others get zeros.

        Returns:
          (y [..., in_features] in dtype, the `jaxops.Routing` of the tokens with the leading axes flattened: its
          aux_loss and z_loss are for the training loss, its load for `Router.update_bias`).

        Raises:
          ValueError: x or mask of another shape, a router with another number of experts, a share of the experts that
            does not fit expert_axis, a call outside of `jax.shard_map` with expert_axis, a router that cannot have
            send_tokens, received_rows without it.
          TypeError: dtypes that the kernels do not multiply; a mask that is not bool; the router's result is no
            `jaxops.Routing`.
        """
        check_columns(x, self.in_features)
        if mask is not None:
            check_mask(mask, x.shape[:-1])
            mask = mask.reshape(-1)
        gate, up, down = self.gate[...], self.up[...], self.down[...]
        devices = 1
        if self.expert_axis is not None:
            devices = devices_on("expert_axis", self.expert_axis, ", or make it without expert_axis")
        dtype = canonicalize_dtype(x, gate, up, down, dtype=self.dtype)
        if devices * gate.shape[0] != self.num_experts:
            split = f"this device has {gate.shape[0]} of num_experts={self.num_experts} experts, and "
            split += f"expert_axis={self.expert_axis!r} has {devices} devices"
            raise ValueError(f"{split}: split the first axis of gate, up and down evenly over expert_axis.")
        if self.received_rows is not None and not self.send_tokens:
            raise ValueError(f"received_rows={self.received_rows} needs send_tokens=True: leave it None.")
        tokens = x.reshape(-1, self.in_features)
        received: Any = None
        if self.send_tokens:
            received, routing = self._sent(tokens, mask, dtype)
            rows = received.x
        else:
            rows, routing = self._routed(tokens, mask, dtype)
        if not isinstance(routing, Routing):
            other = f"a {type(routing).__name__}, not a jaxops.Routing"
            raise TypeError(f"the router returned {other}: take a jaxops.nn.Router, or call jaxops.route on logits.")
        if (E := routing.group_offsets.shape[0] - 1) != self.num_experts:
            raise ValueError(f"the router chose among {E} experts; this layer has num_experts={self.num_experts}.")
        axis = self.expert_axis
        wide = axis is not None and not self.gather_tokens and received is None
        own = routing if axis is None else routing.own(gate.shape[0], axis) if received is None else received.routing
        y = moe_mlp(
            rows, gate, up, down, own, biases=self._biases(), activation=self.activation, compute_dtype=dtype,
            out_dtype=jnp.float32 if wide else dtype, precision=self.precision, recipe=self.recipe,
            pow2_scales=self.pow2_scales, backend=self.backend,
        )  # fmt: skip
        if wide:
            y = lax.psum(y, axis).astype(dtype)
        elif axis is not None:
            y = add_own_rows([y], axis)[0] if received is None else collect(y, received)
        return y.reshape(x.shape), routing

    def _biases(self) -> Any:
        if self.gate_bias is None:
            return None
        return self.gate_bias[...], self.up_bias[...], self.down_bias[...]

    def _routed(self, tokens: jax.Array, mask: jax.Array | None, dtype: Dtype) -> tuple[jax.Array, Routing]:
        """The tokens that this device's experts see, and their routing."""
        axis, router, scorer, own = self.expert_axis, self.router, self._scorer(), tokens.astype(dtype)
        if not self.gather_tokens:
            return own, _routing(router, tokens, mask)
        assert axis is not None  # __init__ checks it
        of_all = None if mask is None else gather_parts(mask, axis)
        if scorer is None:
            (rows,) = gather_pieces([own], axis)
            return rows, _routing(router, rows, of_all)
        # Scores are made where the tokens are, and are few bytes: the choice does not wait for tokens.
        logits, rows = gather_pieces([scorer.logits(own, mask), own], axis)
        return rows, scorer.choose(logits, of_all)

    def _scorer(self) -> Router | None:
        """The router, if its choice can be made apart from its scores."""
        router = self.router
        return router if isinstance(router, Router) and type(router).__call__ is Router.__call__ else None

    def _sent(self, tokens: jax.Array, mask: jax.Array | None, dtype: Dtype) -> tuple[Dispatched, Routing]:
        """What this device received, and the routing of own tokens with load and losses of all devices' tokens."""
        axis, scorer = self.expert_axis, self._scorer()
        assert axis is not None  # __init__ checks it
        # A capacity counts the tokens of all devices, and the losses of another router cannot be added up.
        if scorer is None or scorer.capacity is not None:
            needed = "a `Router` without a capacity that does not override `__call__`"
            raise ValueError(f"send_tokens=True needs {needed}: otherwise write gather_tokens=True instead.")
        logits = scorer.logits(tokens, mask)
        routing = scorer.choose(logits, mask)
        received = dispatch(tokens.astype(dtype), routing, axis, rows=self.received_rows)
        counted = scorer.over_devices(routing, logits, mask, axis)
        if self.received_rows is not None:
            kept = jnp.where(received.dropped, -1, routing.experts)
            kept = route_choices(kept, routing.weights, self.num_experts, mask=mask)
            of_all = {name: getattr(counted, name) for name in ("load", "aux_loss", "z_loss")}
            counted = dataclasses.replace(kept, **of_all)
        return received, counted


def _routing(router: Callable[..., Routing], tokens: jax.Array, mask: jax.Array | None) -> Routing:
    return router(tokens) if mask is None else router(tokens, mask=mask)
