"""Adaptive normalisation over packed sequences: `AdaLayerNorm`, `AdaRMSNorm`, and the block of a diffusion transformer that is built on them."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import canonicalize_dtype
from flax.typing import Dtype, Initializer
from jax.ad_checkpoint import checkpoint_name

from jaxops.ops.adaln import Plan, adaln, gated_residual, gated_residual_adaln

default_modulation_init = nnx.initializers.zeros_init()


def _modulation(head, parts: int, x: jax.Array, cond: jax.Array, sequence_offsets: jax.Array) -> list[jax.Array]:
    """silu(cond) through the head, cut into parts; each has as many rows as cond."""
    features = head.out_features // parts
    if x.ndim != 2 or x.shape[1] != features:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be [T, num_features={features}]: pack the sequences one after another, without padding.")
    if sequence_offsets.ndim != 1 or sequence_offsets.shape[0] < 1:
        raise ValueError(
            f"sequence_offsets has shape {tuple(sequence_offsets.shape)}; it must be [B + 1]: the cumulative sum of the sequence lengths, with a 0 before it."
        )
    B = sequence_offsets.shape[0] - 1
    if cond.ndim != 2 or cond.shape[1] != head.in_features or cond.shape[0] not in (B, x.shape[0]):
        raise ValueError(
            f"cond has shape {tuple(cond.shape)}; it must be [B, cond_features] = ({B}, {head.in_features}), a vector for each sequence, "
            f"or [T, cond_features] = ({x.shape[0]}, {head.in_features}), one for each row of x."
        )
    return jnp.split(checkpoint_name(head(jax.nn.silu(cond)), "modulation.out"), parts, axis=-1)


class _AdaNorm(nnx.Module):
    """What the two norms share."""

    norm: ClassVar[Literal["layer", "rms"]]

    def __init__(
        self,
        num_features: int,
        cond_features: int,
        *,
        epsilon: float = 1e-6,
        use_weight: bool = False,
        use_bias: bool = False,
        activation: Literal["silu", "gelu"] | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        modulation_init: Initializer = default_modulation_init,
        linear: Callable[..., Any] = nnx.Linear,
        backend: str = "auto",
        plan: Plan | None = None,
        rngs: nnx.Rngs,
    ):
        self.modulation = linear(cond_features, 2 * num_features, kernel_init=modulation_init, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.weight = nnx.Param(jnp.ones(num_features, param_dtype)) if use_weight else nnx.data(None)
        self.bias = nnx.Param(jnp.zeros(num_features, param_dtype)) if use_bias else nnx.data(None)
        self.num_features = num_features
        self.cond_features = cond_features
        self.epsilon = epsilon
        self.activation: Literal["silu", "gelu"] | None = activation
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.backend = backend
        self.plan = plan

    def __call__(self, x: jax.Array, cond: jax.Array, sequence_offsets: jax.Array) -> jax.Array:
        """Normalises each row of x, then scales and shifts it by what the head makes of its sequence's condition.

        Args:
          x: [T, num_features], bfloat16, float16 or float32: the rows of all sequences, one after another.
          cond: [B, cond_features], or [T, cond_features] for a condition of each row; where B = T, it is the sequences'.
          sequence_offsets: [B + 1] int32, non-decreasing, within 0 to T; sequence s is the rows `sequence_offsets[s]` to `sequence_offsets[s + 1] - 1`.

        Returns:
          [T, num_features] in dtype; rows outside all sequences are zero.

        Raises:
          ValueError: x, cond or sequence_offsets of another shape, an unknown backend or activation.
          TypeError: dtypes that `jaxops.adaln` does not take, offsets that are not int32.
        """
        scale, shift = _modulation(self.modulation, 2, x, cond, sequence_offsets)
        weight, bias = (None if p is None else p[...] for p in (self.weight, self.bias))
        dtype = canonicalize_dtype(x, weight, bias, self.modulation.kernel[...], dtype=self.dtype)
        return adaln(
            x,
            scale,
            shift,
            sequence_offsets,
            norm=self.norm,
            weight=weight,
            bias=bias,
            eps=self.epsilon,
            activation=self.activation,
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
      modulation: the head, a `flax.nnx.Linear` from cond_features to 2 * num_features: scale, then shift.
      weight: [num_features] in param_dtype, or None.
      bias: [num_features] in param_dtype, or None.

    Args:
      num_features: columns D of x.
      cond_features: columns of cond.
      epsilon: added to the variance.
      use_weight: whether there is a learned weight before the modulation; it starts at one.
      use_bias: whether there is a learned bias before the modulation; it starts at zero.
      activation: None, "silu" or "gelu", between norm and modulation.
      dtype: dtype of the head's multiplication and of the result; promoted from x and the parameters by default. The norm itself is float32.
      param_dtype: dtype of the parameters.
      modulation_init: of the head's kernel, called with (key, [cond_features, 2 * num_features], param_dtype); zero by default.
      linear: what the head is made by, called as `flax.nnx.Linear`; `functools.partial(Fp8Linear, recipe="blockwise")` makes one in FP8.
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
      modulation: the head, a `flax.nnx.Linear` from cond_features to 2 * num_features: scale, then shift.
      weight: [num_features] in param_dtype, or None.
      bias: [num_features] in param_dtype, or None.

    Args:
      num_features: columns D of x.
      cond_features: columns of cond.
      epsilon: added to the mean square.
      use_weight: whether there is a learned weight before the modulation; it starts at one.
      use_bias: whether there is a learned bias before the modulation; it starts at zero.
      activation: None, "silu" or "gelu", between norm and modulation.
      dtype: dtype of the head's multiplication and of the result; promoted from x and the parameters by default. The norm itself is float32.
      param_dtype: dtype of the parameters.
      modulation_init: of the head's kernel, called with (key, [cond_features, 2 * num_features], param_dtype); zero by default.
      linear: what the head is made by, called as `flax.nnx.Linear`; `functools.partial(Fp8Linear, recipe="blockwise")` makes one in FP8.
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
      modulation: the head, a `flax.nnx.Linear` from cond_features to 6 * num_features: scale, shift and gate of the mixer, then those of the mlp.

    Args:
      num_features: columns D of x.
      cond_features: columns of cond.
      mixer: called with (y, sequence_offsets), y [T, num_features] in dtype; gives [T, num_features]. Rows outside all sequences are zero in y, and what
        it gives for them reaches nothing.
      mlp: called with y alone, otherwise the same.
      norm: "layer" or "rms"; neither has a learned affine.
      epsilon: added to the variance or the mean square.
      dtype: dtype of the head's multiplication and of what mixer and mlp are given; promoted from x and the parameters by default.
      param_dtype: dtype of the head's parameters.
      modulation_init: of the head's kernel, called with (key, [cond_features, 6 * num_features], param_dtype); zero by default.
      linear: what the head is made by, called as `flax.nnx.Linear`; `functools.partial(Fp8Linear, recipe="blockwise")` makes one in FP8.
      backend, plan: as in `jaxops.adaln`.
      rngs: the stream `params` makes the parameters.
    """

    def __init__(
        self,
        num_features: int,
        cond_features: int,
        mixer: Callable[[jax.Array, jax.Array], jax.Array],
        mlp: Callable[[jax.Array], jax.Array],
        *,
        norm: Literal["layer", "rms"] = "layer",
        epsilon: float = 1e-6,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        modulation_init: Initializer = default_modulation_init,
        linear: Callable[..., Any] = nnx.Linear,
        backend: str = "auto",
        plan: Plan | None = None,
        rngs: nnx.Rngs,
    ):
        self.modulation = linear(cond_features, 6 * num_features, kernel_init=modulation_init, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.mixer = mixer
        self.mlp = mlp
        self.num_features = num_features
        self.cond_features = cond_features
        self.norm = norm
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.backend = backend
        self.plan = plan

    def __call__(self, x: jax.Array, cond: jax.Array, sequence_offsets: jax.Array) -> jax.Array:
        """One block of the transformer.

        Args:
          x: [T, num_features], bfloat16, float16 or float32: the rows of all sequences, one after another. Its dtype is the residual stream's.
          cond: [B, cond_features], or [T, cond_features] for a condition of each row; where B = T, it is the sequences'.
          sequence_offsets: [B + 1] int32, non-decreasing, within 0 to T; sequence s is the rows `sequence_offsets[s]` to `sequence_offsets[s + 1] - 1`.

        Returns:
          [T, num_features] in x's dtype; rows outside all sequences are x's.

        Raises:
          ValueError: x, cond, sequence_offsets or what mixer and mlp give of another shape, an unknown norm or backend.
          TypeError: dtypes that `jaxops.adaln` does not take, offsets that are not int32.
        """
        scale1, shift1, gate1, scale2, shift2, gate2 = _modulation(self.modulation, 6, x, cond, sequence_offsets)
        dtype = canonicalize_dtype(x, self.modulation.kernel[...], dtype=self.dtype)
        norm = {"norm": self.norm, "eps": self.epsilon, "out_dtype": dtype}
        way = {"backend": self.backend, "plan": self.plan}
        y = adaln(x, scale1, shift1, sequence_offsets, **norm, **way)
        h = self._checked("mixer", self.mixer(y, sequence_offsets), x)
        x, y = gated_residual_adaln(x, h, gate1, scale2, shift2, sequence_offsets, **norm, **way)
        return gated_residual(x, self._checked("mlp", self.mlp(y), x), gate2, sequence_offsets, **way)

    def _checked(self, name: str, h: jax.Array, x: jax.Array) -> jax.Array:
        if h.shape != x.shape:
            raise ValueError(f"{name} gave shape {tuple(h.shape)}; it must give [T, num_features] = {tuple(x.shape)}, as it is given.")
        return h
