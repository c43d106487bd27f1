"""Adaptive norms over packed sequences, `AdaLayerNorm` and `AdaRMSNorm`, and the diffusion transformer's block."""

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

from jaxops.nn.arguments import check_backend, check_dtypes, check_sizes, make_part
from jaxops.ops.adaln import Plan, adaln, gated_residual, gated_residual_adaln
from jaxops.ops.grouped_glu import Activation, activation_name

Per = Literal["sequence", "row"]
default_modulation_init = nnx.initializers.zeros_init()


class _Modulated(nnx.Module):
    """A layer whose modulation comes from a condition: `modulation` is a head, or without cond_features a table."""

    modulation: Any
    num_features: int
    cond_features: int | None
    dtype: Dtype | None
    param_dtype: Dtype

    def _check(self, *epsilons: float, backend: str, **options: Any) -> None:
        """Checks the constructor's arguments; the op checks its own options, on shapes alone."""
        cond = {} if self.cond_features is None else {"cond_features": self.cond_features}
        check_sizes(num_features=self.num_features, **cond)
        check_backend(backend, "pallas")
        check_dtypes(self.dtype, self.param_dtype)
        row = jax.ShapeDtypeStruct((1, 1), jnp.float32)
        for epsilon in epsilons:
            jax.eval_shape(functools.partial(adaln, epsilon=epsilon, backend="xla", **options), row, row, row)

    def _make_modulation(self, parts: int, linear: Callable, init: Initializer, rngs: nnx.Rngs) -> Any:
        """A head from cond_features to parts * num_features, or a table [parts, num_features]."""
        if self.cond_features is None:
            return nnx.Param(init(rngs.params(), (parts, self.num_features), self.param_dtype))
        dtypes = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        return linear(self.cond_features, parts * self.num_features, kernel_init=init, rngs=rngs, **dtypes)

    def _modulate(self, x: jax.Array, cond: jax.Array, sequence_offsets: jax.Array) -> list[jax.Array]:
        """silu(cond) through the head, or cond plus the table, split into the parts; each has as many rows as cond."""
        is_table, head = isinstance(self.modulation, nnx.Param), self.modulation
        features = head.shape[1] if is_table else self.num_features
        parts = head.shape[0] if is_table else head.out_features // features
        columns = parts * features if is_table else head.in_features
        if x.ndim != 2 or x.shape[1] != features:
            needed = f"[T, num_features={features}]: pack the sequences one after another, without padding."
            raise ValueError(f"x has shape {tuple(x.shape)}; it must be {needed}")
        if sequence_offsets.ndim != 1 or sequence_offsets.shape[0] < 1:
            needed = "[B + 1]: the cumulative sum of the sequence lengths, with a 0 before it."
            raise ValueError(f"sequence_offsets has shape {tuple(sequence_offsets.shape)}; it must be {needed}")
        B = sequence_offsets.shape[0] - 1
        if cond.ndim != 2 or cond.shape[1] != columns or cond.shape[0] not in (B, x.shape[0]):
            name = f"{parts} * num_features" if is_table else "cond_features"
            raise ValueError(
                f"cond has shape {tuple(cond.shape)}; it must be [B, {name}] = ({B}, {columns}), a vector for each "
                f"sequence, or [T, {name}] = ({x.shape[0]}, {columns}), one for each row of x."
            )
        if is_table:
            dtype = canonicalize_dtype(cond, head[...], dtype=self.dtype)
            made = cond.astype(dtype) + head[...].astype(dtype).reshape(1, -1)
        else:
            made = head(jax.nn.silu(cond))
        return jnp.split(checkpoint_name(made, "modulation.out"), parts, axis=-1)

    def _dtype_of(self, x: jax.Array, *parameters: jax.Array | None) -> Any:
        """The dtype of the norm's result."""
        head = self.modulation[...] if isinstance(self.modulation, nnx.Param) else self.modulation.kernel[...]
        return canonicalize_dtype(x, *parameters, head, dtype=self.dtype)


class _AdaNorm(_Modulated):
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
        per: Per | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        modulation_init: Initializer = default_modulation_init,
        linear: Callable[..., Any] = nnx.Linear,
        backend: str = "auto",
        plan: Plan | None = None,
        rngs: nnx.Rngs,
    ):
        self.num_features, self.cond_features = num_features, cond_features
        self.epsilon, self.dtype, self.param_dtype, self.backend, self.plan = epsilon, dtype, param_dtype, backend, plan
        self.activation: str | None = activation_name(activation, optional=True)
        self.per: Per | None = per
        self._check(epsilon, backend=backend, norm=self.norm, activation=activation, per=per)
        self.modulation = self._make_modulation(2, linear, modulation_init, rngs)
        self.weight = nnx.Param(jnp.ones(num_features, param_dtype)) if use_weight else nnx.data(None)
        self.bias = nnx.Param(jnp.zeros(num_features, param_dtype)) if use_bias else nnx.data(None)

    def __call__(self, x: jax.Array, cond: jax.Array, sequence_offsets: jax.Array) -> jax.Array:
        """Normalises each row of x, then scales and shifts it by the head's output for its sequence.

        Args:
          x: [T, num_features], bfloat16, float16 or float32: the rows of all sequences, one after another.
          cond: [B, cond_features], or [T, cond_features]; without cond_features of 2 * num_features columns.
          sequence_offsets: [B + 1] int32, as in `jaxops.adaln`.

        Returns:
          [T, num_features] in dtype; rows outside all sequences are zero.

        Raises:
          ValueError: x, cond or sequence_offsets of another shape.
          TypeError: dtypes that `jaxops.adaln` does not take, offsets that are not int32.
        """
        scale, shift = self._modulate(x, cond, sequence_offsets)
        weight, bias = (None if p is None else p[...] for p in (self.weight, self.bias))
        options: dict[str, Any] = {"norm": self.norm, "activation": self.activation, "per": self.per}
        options |= {"epsilon": self.epsilon, "out_dtype": self._dtype_of(x, weight, bias)}
        options |= {"backend": self.backend, "plan": self.plan}
        return adaln(x, scale, shift, sequence_offsets, weight=weight, bias=bias, **options)


class AdaLayerNorm(_AdaNorm):
    """`flax.nnx.LayerNorm` whose scale and shift come from a condition (a timestep, a class), over packed sequences.

    `act(norm(x) * weight + bias) * (1 + scale) + shift`, with `scale, shift = Linear(silu(cond))` for each sequence.
    The head starts at zero: then the layer is a plain norm. Sequences may be empty; new lengths never recompile.

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
      modulation: the head, a `flax.nnx.Linear` from cond_features to 2 * num_features, or without cond_features a
        parameter [2, num_features]: scale, then shift.
      weight, bias: [num_features] in param_dtype, or None.

    Args:
      num_features: columns D of x.
      cond_features: columns of cond. None: cond [B, 2 * num_features] is a modulation already, to which the layer adds
        a table of its own (PixArt).
      epsilon: added to the variance.
      use_weight, use_bias: a learned weight (ones at first) and bias (zeros) before the modulation.
      activation: None, or as in `jaxops.grouped_glu`: between norm and modulation.
      per: whether cond has a vector for each "sequence" or each "row"; as in `jaxops.adaln`.
      dtype: of the head's product and of the result; from x and the parameters by default. The norm is float32.
      param_dtype: dtype of the parameters.
      modulation_init: of the head's kernel, called with (key, [cond_features, 2 * num_features], param_dtype), or of
        the table, with [2, num_features]; zero by default.
      linear: makes the head, called as `flax.nnx.Linear`: `functools.partial(nnx.Linear, use_bias=False)`,
        `functools.partial(Fp8Linear, recipe="blockwise")`.
      backend, plan: as in `jaxops.adaln`.
      rngs: the stream `params` is used.
    """

    norm = "layer"


class AdaRMSNorm(_AdaNorm):
    """`flax.nnx.RMSNorm` whose scale and shift come from a condition: `AdaLayerNorm` without subtracting the mean.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxops.nn import AdaRMSNorm
    >>> norm = AdaRMSNorm(8, 4, use_weight=True, rngs=nnx.Rngs(0))
    >>> tokens, each_token = jnp.full((6, 8), 2.0), jnp.ones((6, 4))  # a condition for each row
    >>> norm(tokens, each_token, jnp.array([0, 2, 5], jnp.int32))[:, 0].round(3)  # the last row is in no sequence
    Array([1., 1., 1., 1., 1., 0.], dtype=float32)

    Attributes:
      modulation, weight, bias: as in `AdaLayerNorm`.

    Args:
      epsilon: added to the mean square.
      num_features, cond_features, use_weight, use_bias, activation, per: as in `AdaLayerNorm`.
      dtype, param_dtype, modulation_init, linear, backend, plan, rngs: as in `AdaLayerNorm`.
    """

    norm = "rms"


class AdaLNZeroBlock(_Modulated):
    """The adaLN-Zero block of a diffusion transformer (Peebles & Xie 2022, arXiv:2212.09748), over packed sequences.

    Norm, mixer (such as attention within each sequence), gated residual, norm, mlp, gated residual. One head over the
    condition makes both scales, shifts and gates; it starts at zero: then the block is the identity. The first residual
    and the norm after it are one kernel.

    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxops.nn import AdaLNZeroBlock
    >>> rngs = nnx.Rngs(0)
    >>> mlp = nnx.Sequential(nnx.Linear(8, 32, rngs=rngs), jax.nn.gelu, nnx.Linear(32, 8, rngs=rngs))
    >>> class Mixer(nnx.Module):  # in place of attention
    ...     def __call__(self, y, sequence_offsets):
    ...         return jnp.cumsum(y, axis=0)
    >>> block = AdaLNZeroBlock(8, 4, Mixer(), mlp, rngs=rngs)
    >>> tokens, cond, offsets = jnp.ones((6, 8)), jnp.ones((3, 4)), jnp.array([0, 2, 2, 6], jnp.int32)
    >>> bool((block(tokens, cond, offsets) == tokens).all())  # the identity, before training
    True

    Attributes:
      modulation: the head, a `flax.nnx.Linear` from cond_features to 6 * num_features, or without cond_features a
        parameter [6, num_features]: scale, shift, gate of the mixer, then of the mlp (diffusers: shift before scale).
      mixer, mlp: the modules passed, or made.

    Args:
      num_features: columns D of x.
      cond_features: columns of cond. None: cond [B, 6 * num_features] is a modulation already, of one head for all
        blocks, to which the block adds a table of its own (adaLN-single of PixArt, arXiv:2310.00426).
      mixer: called with (y, sequence_offsets), y [T, num_features] in dtype; returns [T, num_features]. Rows of y
        outside all sequences are zero, and their results are ignored. A class, or a `functools.partial` of one, is
        called with rngs=rngs when the block is made; so `flax.nnx.bridge.to_linen` makes new parameters from each key.
      mlp: as mixer, but called with y alone. It may return (y, aux), as `MoE` does: then the block returns (x, aux).
      norm: "layer" or "rms", without weight and bias.
      epsilon: added to the variance or the mean square; a pair is for the norms before the mixer and before the mlp.
      per: whether cond has a vector for each "sequence" or each "row"; as in `jaxops.adaln`.
      dtype: of the head's product and of the norms' results; promoted from x and the parameters by default.
      param_dtype: dtype of the head's parameters.
      modulation_init, linear: as in `AdaLayerNorm`, with 6 instead of 2.
      backend, plan: as in `jaxops.adaln`.
      rngs: the stream `params` is used.
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
        per: Per | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        modulation_init: Initializer = default_modulation_init,
        linear: Callable[..., Any] = nnx.Linear,
        backend: str = "auto",
        plan: Plan | None = None,
        rngs: nnx.Rngs,
    ):
        self.num_features, self.cond_features = num_features, cond_features
        self.epsilon, self.dtype, self.param_dtype, self.backend, self.plan = epsilon, dtype, param_dtype, backend, plan
        self.norm, self.per = norm, per
        self._check(*self._epsilons(), backend=backend, norm=norm, per=per)
        self.mixer = make_part(mixer, rngs=rngs)
        self.mlp = make_part(mlp, rngs=rngs)
        _check_takes_offsets(self.mixer)
        self.modulation = self._make_modulation(6, linear, modulation_init, rngs)

    def __call__(
        self, x: jax.Array, cond: jax.Array, sequence_offsets: jax.Array, *, mixer_offsets: jax.Array | None = None
    ) -> Any:
        """One block of the transformer.

        Args:
          x: [T, num_features], bfloat16, float16 or float32: the residual stream.
          cond: [B, cond_features], or [T, cond_features]; without cond_features of 6 * num_features columns.
          sequence_offsets: [B + 1] int32, as in `jaxops.adaln`.
          mixer_offsets: what the mixer is called with; None for sequence_offsets. With sequence parallelism x has one
            device's rows and sequence_offsets are of these, and the mixer needs those of all devices' rows.

        Returns:
          [T, num_features] in x's dtype; rows outside all sequences are x's. If the mlp returns (y, aux): (that, aux).

        Raises:
          ValueError: x, cond, sequence_offsets or the results of mixer and mlp of another shape.
          TypeError: dtypes that `jaxops.adaln` does not take, offsets that are not int32.
        """
        scale1, shift1, gate1, scale2, shift2, gate2 = self._modulate(x, cond, sequence_offsets)
        before_mixer, before_mlp = self._epsilons()
        norm: dict[str, Any] = {"norm": self.norm, "out_dtype": self._dtype_of(x)}
        run: dict[str, Any] = {"per": self.per, "backend": self.backend, "plan": self.plan}
        y = adaln(x, scale1, shift1, sequence_offsets, epsilon=before_mixer, **norm, **run)
        mixed = self.mixer(y, sequence_offsets if mixer_offsets is None else mixer_offsets)
        h = _checked("mixer", mixed, x)
        x, y = gated_residual_adaln(x, h, gate1, scale2, shift2, sequence_offsets, epsilon=before_mlp, **norm, **run)
        h = self.mlp(y)
        has_aux = isinstance(h, tuple) and len(h) == 2
        h, aux = h if has_aux else (h, None)
        x = gated_residual(x, _checked("mlp", h, x), gate2, sequence_offsets, **run)
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
        needed = f"[T, num_features] = {tuple(x.shape)}, the shape of its input."
        raise ValueError(f"{name} gave shape {tuple(h.shape)}; it must give {needed}")
    return h


def _check_takes_offsets(mixer: Any) -> None:
    """The second argument must not be another option, as in a call of `nnx.Linear`."""
    if isinstance(mixer, nnx.Sequential) and len(mixer.layers):
        mixer = mixer.layers[0]  # it is given all arguments
    signature = inspect.signature(mixer)
    parameters = list(signature.parameters.values())
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(named) > 1:
        takes = named[1].default is inspect.Parameter.empty or "offsets" in named[1].name
    else:
        takes = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if not takes:
        raise ValueError(
            f"mixer is a {type(mixer).__name__} with arguments {signature}; it is called with (y, sequence_offsets). "
            "Wrap a layer that takes y alone in an nnx.Module whose __call__(self, y, sequence_offsets) calls it."
        )
