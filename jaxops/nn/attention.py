"""`PackedAttention`, and packed attention for `flax.nnx.MultiHeadAttention`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype

from jaxops.nn.arguments import check_backend, check_dtypes, check_matrix, check_sizes
from jaxops.ops.packed_attention import Plan, packed_attention


class PackedAttention(nnx.Module):
    """Multi-head attention within packed sequences: linear layers around `jaxops.packed_attention`.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxops.nn import PackedAttention
    >>> attention = PackedAttention(4, 16, num_kv_heads=2, causal=True, rngs=nnx.Rngs(0))
    >>> tokens, offsets = jnp.ones((6, 16)), jnp.array([0, 2, 2, 5], jnp.int32)  # three sequences, one row outside
    >>> attention(tokens, offsets).shape
    (6, 16)

    It is a mixer of `AdaLNZeroBlock`.

    Attributes:
      query, key, value, out: the linear layers: in_features to num_heads * head_dim, in_kv_features to num_kv_heads *
        head_dim (twice), num_heads * head_dim to in_features.

    Args:
      num_heads: heads of the queries.
      in_features: columns of x.
      num_kv_heads: heads of keys and values, each shared by num_heads / num_kv_heads queries; num_heads by default.
      head_dim: columns of a head; in_features / num_heads by default.
      in_kv_features: columns of kv, for cross attention; in_features by default.
      causal, window, longest, crowd: as in `jaxops.packed_attention`.
      dtype: of products, attention and result; from x and the parameters by default.
      param_dtype: dtype of the parameters.
      linear: makes the layers, called as `flax.nnx.Linear`: `functools.partial(nnx.Linear, use_bias=False)`,
        `functools.partial(Fp8Linear, recipe="blockwise")`.
      backend, plan: of the attention, as in `jaxops.packed_attention`.
      rngs: the stream `params` is used.

    Raises:
      ValueError: num_kv_heads that do not divide num_heads, in_features that num_heads do not divide without head_dim.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        in_kv_features: int | None = None,
        causal: bool = False,
        window: int | None = None,
        longest: int | None = None,
        crowd: int | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        linear: Callable[..., Any] = nnx.Linear,
        backend: str = "auto",
        plan: Plan | None = None,
        rngs: nnx.Rngs,
    ):
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_sizes(num_heads=num_heads, in_features=in_features, num_kv_heads=num_kv_heads)
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}.")
        if head_dim is None and in_features % num_heads:
            raise ValueError(f"in_features={in_features} is no multiple of num_heads={num_heads}: pass head_dim.")
        head_dim = in_features // num_heads if head_dim is None else head_dim
        in_kv_features = in_features if in_kv_features is None else in_kv_features
        check_sizes(head_dim=head_dim, in_kv_features=in_kv_features)
        check_backend(backend, "triton", "cudnn", "pallas")
        check_dtypes(dtype, param_dtype)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.in_features, self.in_kv_features = in_features, in_kv_features
        self.dtype, self.param_dtype = dtype, param_dtype
        self.causal, self.window, self.longest, self.crowd = causal, window, longest, crowd
        self.backend, self.plan = backend, plan
        made_with = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.query = linear(in_features, num_heads * head_dim, **made_with)
        self.key = linear(in_kv_features, num_kv_heads * head_dim, **made_with)
        self.value = linear(in_kv_features, num_kv_heads * head_dim, **made_with)
        self.out = linear(num_heads * head_dim, in_features, **made_with)

    def __call__(
        self,
        x: jax.Array,
        sequence_offsets: jax.Array,
        kv: jax.Array | None = None,
        *,
        kv_offsets: jax.Array | None = None,
        visible_until: jax.Array | None = None,
        qk_transform: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]] | None = None,
    ) -> jax.Array:
        """Attention of each row of x over the rows of its own sequence.

        Args:
          x: [T, in_features].
          sequence_offsets: [B + 1] int32, as in `jaxops.packed_attention`.
          kv: [S, in_kv_features], rows that make keys and values, with kv_offsets [B + 1]; x by default.
          visible_until: [T] int32, as in `jaxops.packed_attention`.
          qk_transform: from queries [T, num_heads, head_dim] and keys [S, num_kv_heads, head_dim] to what is used in
            their place: rotary positions, norms.

        Returns:
          [T, in_features] in dtype. Rows outside all sequences are zero, and what they hold affects nothing.

        Raises:
          ValueError, TypeError: as `jaxops.packed_attention`; x or kv of another shape, one of kv and kv_offsets alone.
        """
        check_matrix(x, f"[T, in_features={self.in_features}]", self.in_features)
        if (kv is None) != (kv_offsets is None):
            raise ValueError("kv and kv_offsets come together: pass both, or neither.")
        if kv is not None:
            check_matrix(kv, f"[S, in_kv_features={self.in_kv_features}]", self.in_kv_features)
        x = _inside(x, sequence_offsets)
        rows = x if kv is None or kv_offsets is None else _inside(kv, kv_offsets)
        heads = lambda y: y.reshape(y.shape[0], y.shape[1] // self.head_dim, self.head_dim)
        q, k, v = heads(self.query(x)), heads(self.key(rows)), heads(self.value(rows))
        if qk_transform is not None:
            q, k = qk_transform(q, k)
        masks: dict[str, Any] = {"kv_offsets": kv_offsets, "visible_until": visible_until, "window": self.window}
        limits: dict[str, Any] = {"longest": self.longest, "crowd": self.crowd}
        options: dict[str, Any] = {"causal": self.causal, "backend": self.backend, "plan": self.plan}
        mixed = packed_attention(q, k, v, sequence_offsets, **masks, **limits, **options)
        y = self.out(mixed.reshape(x.shape[0], self.num_heads * self.head_dim))
        return _inside(y, sequence_offsets)  # where a bias would stand


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedMask:
    """Which rows see each other, where `flax.nnx.MultiHeadAttention` takes a mask.

    Attributes:
      sequence_offsets, kv_offsets: [B + 1] int32, as in `jaxops.packed_attention`.
      visible_until: [T] int32, as there.
    """

    sequence_offsets: jax.Array
    kv_offsets: jax.Array | None = None
    visible_until: jax.Array | None = None


_OF_DROPOUT = ("dropout_rate", "broadcast_dropout", "deterministic")


def packed_attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | PackedMask | None = None,
    is_causal: bool = False,
    dropout_rng: Any = None,
    dtype: Dtype | None = None,
    module: nnx.Module | None = None,
    **options: Any,
) -> jax.Array:
    """`jaxops.packed_attention` as the `attention_fn` of `flax.nnx.MultiHeadAttention`.

    The layer is called with packed rows [T, features], without a batch axis, and with `mask=sequence_offsets`. Options
    of the op are bound with `functools.partial`.

    >>> import functools
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxops.nn import packed_attention_fn
    >>> within_100 = functools.partial(packed_attention_fn, window=100)
    >>> attention = nnx.MultiHeadAttention(4, 16, attention_fn=within_100, decode=False, rngs=nnx.Rngs(0))
    >>> attention(jnp.ones((6, 16)), mask=jnp.array([0, 2, 2, 6], jnp.int32), is_causal=True).shape
    (6, 16)

    Args:
      query: [T, heads, head_dim].
      key, value: [S, kv_heads, head_dim].
      mask: sequence_offsets, int32 [B + 1], or a `PackedMask`.
      is_causal: `causal` of the op.
      dtype: the operands are cast to it.
      dropout_rng, module: what the layer passes for dropout and for sown weights, which must both be None.
      options: window, scale, longest, crowd, precision, backend and plan of the op; the layer's other options of
        dropout have no effect.

    Returns:
      [T, heads, head_dim]. The layer's rows outside all sequences are its bias.

    Raises:
      ValueError: a batch axis, no mask, or one that is no packing.
      NotImplementedError: dropout, or sow_weights.
    """
    if query.ndim != 3:
        hint = "pack the rows of all sequences into [T, features], and pass where they start as mask."
        raise ValueError(f"query has shape {tuple(query.shape)}; it must be [T, heads, head_dim]: {hint}")
    if mask is None:
        raise ValueError("mask is None; pass mask=sequence_offsets, int32 [B + 1], or a PackedMask.")
    if dropout_rng is not None:
        raise NotImplementedError("dropout_rng: packed attention has no dropout; make the layer with dropout_rate=0.")
    if module is not None:
        raise NotImplementedError("sow_weights=True: the weights of all pairs never are in memory.")
    if not isinstance(mask, PackedMask):
        if getattr(mask, "ndim", 1) != 1:
            raise ValueError(f"mask has shape {tuple(mask.shape)}; pass sequence_offsets, int32 [B + 1].")
        mask = PackedMask(mask)
    q, k, v = (x if dtype is None else x.astype(dtype) for x in (query, key, value))
    masks: dict[str, Any] = {"kv_offsets": mask.kv_offsets, "visible_until": mask.visible_until, "causal": is_causal}
    options = {name: value for name, value in options.items() if name not in _OF_DROPOUT}
    return packed_attention(q, k, v, mask.sequence_offsets, **masks, **options)


def _inside(x: jax.Array, offsets: jax.Array) -> jax.Array:
    """x with zeros in the rows outside all sequences."""
    row = jnp.arange(x.shape[0], dtype=jnp.int32)
    return jnp.where(((offsets[0] <= row) & (row < offsets[-1]))[:, None], x, 0)
