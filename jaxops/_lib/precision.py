"""How precisely a product is computed: every spelling that `jax.lax.dot` takes, as a `lax.Precision` and the dtype in which operands are multiplied."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

_HALF = ("bfloat16", "float16")
# Presets of float32 operands that the kernels have: the precision, and the dtype that operands are cast to. All of them are summed in float32.
_OF_FLOAT32 = {
    "DEFAULT": (lax.Precision.DEFAULT, "float32"),
    "TF32_TF32_F32": (lax.Precision.HIGH, "float32"),
    "F32_F32_F32": (lax.Precision.HIGHEST, "float32"),
    "BF16_BF16_F32": (lax.Precision.DEFAULT, "bfloat16"),
    "F16_F16_F32": (lax.Precision.DEFAULT, "float16"),
}
# Of operands with 16 bits: products of them are exact in float32, so each algorithm that sums in float32 and does not cast to the other format is the same.
_OF_HALF = {
    "bfloat16": (
        "DEFAULT",
        "BF16_BF16_F32",
        "BF16_BF16_F32_X3",
        "BF16_BF16_F32_X6",
        "BF16_BF16_F32_X9",
        "TF32_TF32_F32",
        "TF32_TF32_F32_X3",
        "F32_F32_F32",
    ),
    "float16": ("DEFAULT", "F16_F16_F32", "TF32_TF32_F32", "TF32_TF32_F32_X3", "F32_F32_F32"),
}


def resolve_precision(precision: lax.PrecisionLike, dtype) -> tuple[lax.Precision, jnp.dtype]:
    """What a product of operands in `dtype` (bfloat16, float16 or float32) does: its `lax.Precision`, and the dtype to cast operands to before it.

    None follows `jax_default_matmul_precision`, as `x @ w` does. Of two operand precisions the higher one counts.

    Raises:
      NotImplementedError: an algorithm that the kernels do not have, such as BF16_BF16_F32_X3 of float32 operands.
      ValueError: no precision at all.
    """
    dtype = jnp.dtype(dtype)
    if precision is None:
        precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(precision, lax.DotAlgorithm):  # before tuples: it is one
        raise NotImplementedError(
            f"precision={precision}: a DotAlgorithm is not supported. Write {_alternatives(dtype)}."
        )
    if isinstance(precision, (tuple, list)):
        if len(precision) != 2:
            raise ValueError(
                f"precision={precision!r} has {len(precision)} entries; write one precision, or a pair, one for each operand."
            )
        return max((resolve_precision(p, dtype) for p in precision), key=lambda found: found[0].value)  # pyright: ignore[reportArgumentType]
    if isinstance(precision, lax.DotAlgorithmPreset):
        precision = precision.name
    if isinstance(precision, str) and precision in lax.DotAlgorithmPreset.__members__:
        if dtype.name in _HALF and precision in _OF_HALF[dtype.name]:
            return lax.Precision.DEFAULT, dtype
        if dtype.name in _HALF or precision not in _OF_FLOAT32:
            raise NotImplementedError(
                f"precision={precision} of {dtype.name} operands: no kernel has it. Write {_alternatives(dtype)}."
            )
        precision, name = _OF_FLOAT32[precision]
        return precision, jnp.dtype(name)
    try:
        if precision is None or isinstance(
            precision, (str, lax.Precision)
        ):  # an enumeration takes its numbers, too, and True for one of them
            return lax.Precision(precision), dtype
    except ValueError:
        pass
    raise ValueError(
        f"precision={precision!r}: write None, 'default', 'high', 'highest', or the name of a jax.lax.DotAlgorithmPreset."
    )


def kernels_have(precision: lax.PrecisionLike, dtype) -> bool:
    """Whether `resolve_precision` takes it."""
    try:
        resolve_precision(precision, dtype)
    except NotImplementedError:
        return False
    return True


def _alternatives(dtype: jnp.dtype) -> str:
    return (
        "precision=None, or cast the operands to float32"
        if dtype.name in _HALF
        else "'default', 'high', 'highest' or 'BF16_BF16_F32'"
    )


def named_cast(x: jax.Array, dtype, name: str) -> jax.Array:
    """x in dtype, with that checkpoint name; x itself, as whoever made it named it, where it has that dtype."""
    return x if x.dtype == dtype else checkpoint_name(x.astype(dtype), name)
