"""How precisely float32 operands are multiplied, and in which dtype others."""

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

_PRESETS = {
    "DEFAULT": lax.Precision.DEFAULT,
    "TF32_TF32_F32": lax.Precision.HIGH,
    "F32_F32_F32": lax.Precision.HIGHEST,
}


def resolve_precision(precision: lax.PrecisionLike) -> lax.Precision:
    """The one `lax.Precision` for a product, from everything that `jax.lax.dot` takes as its precision.

    None follows `jax_default_matmul_precision`, as `x @ w` does. Of two operand precisions the higher one counts.

    Raises:
      NotImplementedError: an algorithm that the kernels do not have, such as BF16_BF16_F32_X3.
    """
    if precision is None:
        precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(precision, lax.DotAlgorithm):  # before tuples: it is one
        raise NotImplementedError(f"precision={precision}: a DotAlgorithm is not supported; pass 'default', 'high' or 'highest' instead.")
    if isinstance(precision, (tuple, list)):
        return max((resolve_precision(p) for p in precision), key=lambda p: p.value)  # pyright: ignore[reportArgumentType]
    if isinstance(precision, lax.DotAlgorithmPreset):
        precision = precision.name
    if isinstance(precision, str) and precision in lax.DotAlgorithmPreset.__members__:
        if precision not in _PRESETS:
            raise NotImplementedError(f"precision={precision} is not among {sorted(_PRESETS)}; pass 'default', 'high' or 'highest' instead.")
        return _PRESETS[precision]
    return lax.Precision(precision)


def named_cast(x: jax.Array, dtype, name: str) -> jax.Array:
    """x in dtype, with that checkpoint name; x itself, as whoever made it named it, where it has that dtype."""
    return x if x.dtype == dtype else checkpoint_name(x.astype(dtype), name)
