"""Adaptive normalisation over packed sequences: `AdaLayerNorm`, `AdaRMSNorm`, and the block of a diffusion transformer that is built on them."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import canonicalize_dtype
from flax.typing import Dtype, Initializer
from jax.ad_checkpoint import checkpoint_name

from jaxops.nn.arguments import check_backend, check_sizes, make_part
from jaxops.ops.adaln import Plan, adaln, gated_residual, gated_residual_adaln

Activation = Literal["silu", "gelu", "gelu_tanh"]
default_modulation_init = nnx.initializers.zeros_init()


def _check(num_features: int, cond_features: int | None, backend: str, *epsilons: float, **options: Any) -> None:
    """What the constructors are given. The op checks its own options, on shapes alone."""
    check_sizes(num_features=num_features, **({} if cond_features is None else {"cond_features": cond_features}))
    check_backend(backend, "pallas")
    row = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    for epsilon in epsilons:
        jax.eval_shape(functools.partial(adaln, epsilon=epsilon, backend="xla", **options), row, row, row)


def _make_modulation(
    parts: int,
    num_features: int,
    cond_features: int | None,
    linear: Callable,
    init: Initializer,
    rngs: nnx.Rngs,
    **dtypes: Any,
) -> Any:
    """A head from cond_features to parts * num_features; without cond_features a table [parts, num_features]."""
    if cond_features is None:
        return nnx.Param(init(rngs.params(), (parts, num_features), dtypes["param_dtype"]))
    return linear(cond_features, parts * num_features, kernel_init=init, rngs=rngs, **dtypes)


def _kernel(modulation: Any) -> jax.Array:
    return modulation[...] if isinstance(modulation, nnx.Param) else modulation.kernel[...]


def _modulate(
    modulation: Any, parts: int, x: jax.Array, cond: jax.Array, sequence_offsets: jax.Array, dtype: Dtype | None
) -> list[jax.Array]:
    """silu(cond) through the head, or cond plus the table, cut into parts; each has as many rows as cond."""
    is_table = isinstance(modulation, nnx.Param)
    features = modulation.shape[1] if is_table else modulation.out_features // parts
    columns = parts * features if is_table else modulation.in_features
    if x.ndim != 2 or x.shape[1] != features:
        raise ValueError(
            f"x has shape {tuple(x.shape)}; it must be [T, num_features={features}]: pack the sequences one after another, without padding."
        )
    if sequence_offsets.ndim != 1 or sequence_offsets.shape[0] < 1:
        raise ValueError(
            f"sequence_offsets has shape {tuple(sequence_offsets.shape)}; it must be [B + 1]: the cumulative sum of the sequence lengths, with a 0 before it."
        )
    B = sequence_offsets.shape[0] - 1
    if cond.ndim != 2 or cond.shape[1] != columns or cond.shape[0] not in (B, x.shape[0]):
        name = f"{parts} * num_features" if is_table else "cond_features"
        raise ValueError(
            f"cond has shape {tuple(cond.shape)}; it must be [B, {name}] = ({B}, {columns}), a vector for each sequence, "
            f"or [T, {name}] = ({x.shape[0]}, {columns}), one for each row of x."
        )
    if is_table:
        dtype = canonicalize_dtype(cond, modulation[...], dtype=dtype)
        made = cond.astype(dtype) + modulation[...].astype(dtype).reshape(1, -1)
    else:
        made = modulation(jax.nn.silu(cond))
    return jnp.split(checkpoint_name(made, "modulation.out"), parts, axis=-1)


class _AdaNorm(nnx.Module):
    """What the two norms share."""

    norm: ClassVar[Literal["layer", "rms"]]

    def __init__(
        self,
        num_features: int,
        cond_features: int | None,
        *,
        epsilon: float = 1e-6,
        use_weight: bool = False,
        use_bias: bool = False,
        activation: Activation | None = None,
        per: Literal["sequence", "row"] | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        modulation_init: Initializer = default_modulation_init,
        linear: Callable[..., Any] = nnx.Linear,
        backend: str = "auto",
        plan: Plan | None = None,
        rngs: nnx.Rngs,
    ):
        _check(num_features, cond_features, backend, epsilon, norm=self.norm, activation=activation, per=per)
        self.modulation = _make_modulation(
            2, num_features, cond_features, linear, modulation_init, rngs, dtype=dtype, param_dtype=param_dtype
        )
        self.weight = nnx.Param(jnp.ones(num_features, param_dtype)) if use_weight else nnx.data(None)
        self.bias = nnx.Param(jnp.zeros(num_features, param_dtype)) if use_bias else nnx.data(None)
        self.num_features = num_features
        self.cond_features = cond_features
        self.epsilon = epsilon
        self.activation: Activation | None = activation
        self.per: Literal["sequence", "row"] | None = per
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.backend = backend
        self.plan = plan

    def __call__(self, x: jax.Array, cond: jax.Array, sequence_offsets: jax.Array) -> jax.Array:
        """Normalises each row of x, then scales and shifts it by what the head makes of its sequence's condition.

        Args:
          x: [T, num_features], bfloat16, float16 or float32: the rows of all sequences, one after another.
          cond: [B, cond_features], or [T, cond_features] for a condition of each row; see `per`. Without cond_features
            it has all the modulation's columns.
          sequence_offsets: [B + 1] int32, non-decreasing, within 0 to T; sequence s is the rows `sequence_offsets[s]` to `sequence_offsets[s + 1] - 1`.

        Returns:
          [T, num_features] in dtype; rows outside all sequences are zero.

        Raises:
          ValueError: x, cond or sequence_offsets of another shape, an unknown backend or activation.
          TypeError: dtypes that `jaxops.adaln` does not take, offsets that are not int32.
        """
        scale, shift = _modulate(self.modulation, 2, x, cond, sequence_offsets, self.dtype)
        weight, bias = (None if p is None else p[...] for p in (self.weight, self.bias))
        dtype = canonicalize_dtype(x, weight, bias, _kernel(self.modulation), dtype=self.dtype)
        return adaln(
            x,
            scale,
            shift,
            sequence_offsets,
            norm=self.norm,
            weight=weight,
            bias=bias,
            epsilon=self.epsilon,
            activation=self.activation,
            per=self.per,
            out_dtype=dtype,
            backend=self.backend,
            plan=self.plan,
        )


class AdaLayerNorm(_AdaNorm):
    """`flax.nnx.LayerNorm` whose scale and shift come from a condition, such as a timestep or a class, over packed sequences of unequal length.

    `act(norm(x) * weight + bias) * (1 + scale) + shift`, where `scale, shift = Linear(silu(cond))` has one vector for each sequence. The head starts
    at zero, and so the layer as a plain norm. Lengths stay on the device and new ones never recompile; sequences may be empty.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxops.nn import AdaLayerNorm
    >>> norm = AdaLayerNorm(8, 4, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    >>> norm.modulation.kernel.shape, norm.modulation.bias.shape
    ((4, 16), (16,))
    >>> tokens = jnp.ones((6, 8), jnp.bfloat16)
    >>> timestep = jnp.ones((3, 4))  # one vector for each of three sequences
    >>> norm(tokens, timestep, jnp.array([0, 2, 2, 6], jnp.int32)).shape
    (6, 8)

    Attributes:
      modulation: the head, a `flax.nnx.Linear` from cond_features to 2 * num_features: scale, then shift. Without
        cond_features a parameter [2, num_features], scale, then shift.
      weight: [num_features] in param_dtype, or None.
      bias: [num_features] in param_dtype, or None.

    Args:
      num_features: columns D of x.
      cond_features: columns of cond; or None, where cond [B, 2 * num_features] is a modulation already: a table of the
        layer's own is added to it (PixArt).
      epsilon: added to the variance.
      use_weight: whether there is a learned weight before the modulation; it starts at one.
      use_bias: whether there is a learned bias before the modulation; it starts at zero.
      activation: None, "silu", "gelu" or "gelu_tanh", between norm and modulation.
      per: whether cond has a vector for each "sequence" or each "row"; None reads it from the shapes. As in `jaxops.adaln`.
      dtype: dtype of the head's multiplication and of the result; promoted from x and the parameters by default. The norm itself is float32.
      param_dtype: dtype of the parameters.
      modulation_init: of the head's kernel, called with (key, [cond_features, 2 * num_features], param_dtype), or of the
        table, with [2, num_features]; zero by default.
      linear: what the head is made by, called as `flax.nnx.Linear`: `functools.partial(nnx.Linear, use_bias=False)` makes
        one without bias, `functools.partial(Fp8Linear, recipe="blockwise")` one in FP8.
      backend, plan: as in `jaxops.adaln`.
      rngs: the stream `params` makes the parameters.
    """

    norm = "layer"


class AdaRMSNorm(_AdaNorm):
    """`flax.nnx.RMSNorm` whose scale and shift come from a condition, such as a timestep or a class, over packed sequences of unequal length.

    As `AdaLayerNorm`, without taking the mean away: `act(x / rms(x) * weight + bias) * (1 + scale) + shift`.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxops.nn import AdaRMSNorm
    >>> norm = AdaRMSNorm(8, 4, use_weight=True, rngs=nnx.Rngs(0))
    >>> tokens, each_token = jnp.full((6, 8), 2.0), jnp.ones((6, 4))  # a condition of each row
    >>> norm(tokens, each_token, jnp.array([0, 2, 5], jnp.int32))[:, 0].round(3)  # the last row is in no sequence
    Array([1., 1., 1., 1., 1., 0.], dtype=float32)

    Attributes:
      modulation: the head, a `flax.nnx.Linear` from cond_features to 2 * num_features: scale, then shift. Without
        cond_features a parameter [2, num_features], scale, then shift.
      weight: [num_features] in param_dtype, or None.
      bias: [num_features] in param_dtype, or None.

    Args:
      num_features: columns D of x.
      cond_features: columns of cond; or None, where cond [B, 2 * num_features] is a modulation already: a table of the
        layer's own is added to it (PixArt).
      epsilon: added to the mean square.
      use_weight: whether there is a learned weight before the modulation; it starts at one.
      use_bias: whether there is a learned bias before the modulation; it starts at zero.
      activation: None, "silu", "gelu" or "gelu_tanh", between norm and modulation.
      per: whether cond has a vector for each "sequence" or each "row"; None reads it from the shapes. As in `jaxops.adaln`.
      dtype: dtype of the head's multiplication and of the result; promoted from x and the parameters by default. The norm itself is float32.
      param_dtype: dtype of the parameters.
      modulation_init: of the head's kernel, called with (key, [cond_features, 2 * num_features], param_dtype), or of the
        table, with [2, num_features]; zero by default.
      linear: what the head is made by, called as `flax.nnx.Linear`: `functools.partial(nnx.Linear, use_bias=False)` makes
        one without bias, `functools.partial(Fp8Linear, recipe="blockwise")` one in FP8.
      backend, plan: as in `jaxops.adaln`.
      rngs: the stream `params` makes the parameters.
    """

    norm = "rms"


class AdaLNZeroBlock(nnx.Module):
    """The adaLN-Zero block of a diffusion transformer (Peebles & Xie 2022, arXiv:2212.09748), over packed sequences of unequal length.

    A norm, the mixer (such as attention inside each sequence), a gated residual, a norm, the mlp, a gated residual; both scales, shifts and gates come
    from one head over the condition. The head starts at zero, and so the block as the identity. The first residual and the norm after it are one kernel.

    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxops.nn import AdaLNZeroBlock
    >>> rngs = nnx.Rngs(0)
    >>> mlp = nnx.Sequential(nnx.Linear(8, 32, rngs=rngs), jax.nn.gelu, nnx.Linear(32, 8, rngs=rngs))
    >>> class Mixer(nnx.Module):  # an attention would stand here
    ...     def __call__(self, y, sequence_offsets):
    ...         return jnp.cumsum(y, axis=0)
    >>> block = AdaLNZeroBlock(8, 4, Mixer(), mlp, rngs=rngs)
    >>> tokens, cond, offsets = jnp.ones((6, 8)), jnp.ones((3, 4)), jnp.array([0, 2, 2, 6], jnp.int32)
    >>> bool((block(tokens, cond, offsets) == tokens).all())  # the identity, before any training
    True

    Attributes:
      modulation: the head, a `flax.nnx.Linear` from cond_features to 6 * num_features: scale, shift and gate of the mixer,
        then scale, shift and gate of the mlp (in diffusers and DiT shift comes before scale). Without cond_features a
        parameter [6, num_features] in that order.
      mixer, mlp: what was given, or made.

    Args:
      num_features: columns D of x.
      cond_features: columns of cond; or None, where cond [B, 6 * num_features] is a modulation already, made by one head
        for all blocks: a table of the block's own is added to it (adaLN-single of PixArt, arXiv:2310.00426).
      mixer: called with (y, sequence_offsets), y [T, num_features] in dtype; gives [T, num_features]. Rows outside all
        sequences are zero in y, and what it gives for them reaches nothing. A class, or a `functools.partial` of one, is
        called with rngs=rngs when the block is made; so `flax.nnx.bridge.to_linen` makes new parameters from each key.
      mlp: called with y alone, otherwise the same. It may give (y, aux), as `MoE` does: then the block gives (x, aux).
      norm: "layer" or "rms"; neither has a learned affine.
      epsilon: added to the variance or the mean square; two numbers are those before the mixer and before the mlp.
      per: whether cond has a vector for each "sequence" or each "row"; None reads it from the shapes. As in `jaxops.adaln`.
      dtype: dtype of the head's multiplication and of what mixer and mlp are given; promoted from x and the parameters by default.
      param_dtype: dtype of the head's parameters.
      modulation_init: of the head's kernel, called with (key, [cond_features, 6 * num_features], param_dtype), or of the
        table, with [6, num_features]; zero by default.
      linear: what the head is made by, called as `flax.nnx.Linear`: `functools.partial(nnx.Linear, use_bias=False)` makes
        one without bias, `functools.partial(Fp8Linear, recipe="blockwise")` one in FP8.
      backend, plan: as in `jaxops.adaln`.
      rngs: the stream `params` makes the parameters.
    """

    def __init__(
        self,
        num_features: int,
        cond_features: int | None,
        mixer: Callable[[jax.Array, jax.Array], jax.Array] | Callable[..., Any],
        mlp: Callable[..., Any],
        *,
        norm: Literal["layer", "rms"] = "layer",
        epsilon: float | tuple[float, float] = 1e-6,
        per: Literal["sequence", "row"] | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        modulation_init: Initializer = default_modulation_init,
        linear: Callable[..., Any] = nnx.Linear,
        backend: str = "auto",
        plan: Plan | None = None,
        rngs: nnx.Rngs,
    ):
        self.epsilon = epsilon
        _check(num_features, cond_features, backend, *self._epsilons(), norm=norm, per=per)
        self.mixer = make_part(mixer, rngs=rngs)
        self.mlp = make_part(mlp, rngs=rngs)
        _check_takes_offsets(self.mixer)
        self.modulation = _make_modulation(
            6, num_features, cond_features, linear, modulation_init, rngs, dtype=dtype, param_dtype=param_dtype
        )
        self.num_features = num_features
        self.cond_features = cond_features
        self.norm = norm
        self.per = per
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.backend = backend
        self.plan = plan

    def __call__(self, x: jax.Array, cond: jax.Array, sequence_offsets: jax.Array) -> Any:
        """One block of the transformer.

        Args:
          x: [T, num_features], bfloat16, float16 or float32: the rows of all sequences, one after another. Its dtype is the residual stream's.
          cond: [B, cond_features], or [T, cond_features] for a condition of each row; see `per`. Without cond_features
            it has all the modulation's columns.
          sequence_offsets: [B + 1] int32, non-decreasing, within 0 to T; sequence s is the rows `sequence_offsets[s]` to `sequence_offsets[s + 1] - 1`.

        Returns:
          [T, num_features] in x's dtype; rows outside all sequences are x's. Where the mlp gives (y, aux): (that, aux).

        Raises:
          ValueError: x, cond, sequence_offsets or what mixer and mlp give of another shape, an unknown norm or backend.
          TypeError: dtypes that `jaxops.adaln` does not take, offsets that are not int32.
        """
        made = _modulate(self.modulation, 6, x, cond, sequence_offsets, self.dtype)
        scale1, shift1, gate1, scale2, shift2, gate2 = made
        before_mixer, before_mlp = self._epsilons()
        dtype = canonicalize_dtype(x, _kernel(self.modulation), dtype=self.dtype)
        norm: dict[str, Any] = {"norm": self.norm, "out_dtype": dtype}
        way: dict[str, Any] = {"per": self.per, "backend": self.backend, "plan": self.plan}
        y = adaln(x, scale1, shift1, sequence_offsets, epsilon=before_mixer, **norm, **way)
        h = _checked("mixer", self.mixer(y, sequence_offsets), x)
        x, y = gated_residual_adaln(x, h, gate1, scale2, shift2, sequence_offsets, epsilon=before_mlp, **norm, **way)
        h = self.mlp(y)
        has_aux = isinstance(h, tuple) and len(h) == 2
        h, aux = h if has_aux else (h, None)
        x = gated_residual(x, _checked("mlp", h, x), gate2, sequence_offsets, **way)
        return (x, aux) if has_aux else x

    def _epsilons(self) -> tuple[float, float]:
        if not isinstance(self.epsilon, tuple):
            return self.epsilon, self.epsilon
        if len(self.epsilon) != 2:
            raise ValueError(f"epsilon={self.epsilon}: write one number, or two: before the mixer and before the mlp.")
        return self.epsilon


def _checked(name: str, h: Any, x: jax.Array) -> jax.Array:
    if not hasattr(h, "shape"):
        hint = " or (such an array, aux)" if name == "mlp" else ""
        raise TypeError(f"{name} gave a {type(h).__name__}; it must give an array [T, num_features]{hint}.")
    if h.shape != x.shape:
        raise ValueError(
            f"{name} gave shape {tuple(h.shape)}; it must give [T, num_features] = {tuple(x.shape)}, as it is given."
        )
    return h


def _check_takes_offsets(mixer: Any) -> None:
    """A layer such as `nnx.Linear` has another optional argument where the offsets would go."""
    if isinstance(mixer, nnx.Sequential) and len(mixer.layers):
        mixer = mixer.layers[0]  # it is given all arguments
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(mixer).parameters.values())
    named = [p for p in parameters if p.kind in kinds]
    if len(named) > 1:
        takes = named[1].default is inspect.Parameter.empty or "offsets" in named[1].name
    else:
        takes = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
    if not takes:
        raise ValueError(
            f"mixer is a {type(mixer).__name__} with arguments {inspect.signature(mixer)}; it is called with (y, "
            "sequence_offsets). Wrap a layer that takes y alone in an nnx.Module whose __call__(self, y, sequence_offsets) "
            "calls it."
        )
