"""`jax.lax.dot`'s spellings of a precision, as a `lax.Precision` and the dtype that operands are cast to."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

# Presets for float32 operands with float32 accumulation: the precision, and what operands are cast to.
_OF_FLOAT32 = {
    "DEFAULT": (lax.Precision.DEFAULT, "float32"),
    "TF32_TF32_F32": (lax.Precision.HIGH, "float32"),
    "F32_F32_F32": (lax.Precision.HIGHEST, "float32"),
    "BF16_BF16_F32": (lax.Precision.DEFAULT, "bfloat16"),
    "F16_F16_F32": (lax.Precision.DEFAULT, "float16"),
}
# Products of 16-bit operands are exact in float32: every preset that accumulates in float32, and does not cast to the
# other 16-bit format, is the same.
_WIDER = ("DEFAULT", "TF32_TF32_F32", "TF32_TF32_F32_X3", "F32_F32_F32")
_OF_HALF = {
    "bfloat16": (*_WIDER, "BF16_BF16_F32", "BF16_BF16_F32_X3", "BF16_BF16_F32_X6", "BF16_BF16_F32_X9"),
    "float16": (*_WIDER, "F16_F16_F32"),
}


def resolve_precision(precision: lax.PrecisionLike, dtype) -> tuple[lax.Precision, jnp.dtype]:
    """The `lax.Precision` of a product of operands in `dtype`, and the dtype to cast them to first.

    None follows `jax_default_matmul_precision`, as `x @ w` does. Of a pair, one for each operand, the higher one
    counts.

    Raises:
      NotImplementedError: an algorithm that the kernels do not have, such as BF16_BF16_F32_X3 of float32 operands.
      ValueError: not a precision.
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
            needed = "write one precision, or a pair, one for each operand."
            raise ValueError(f"precision={precision!r} has {len(precision)} entries; {needed}")
        return max((resolve_precision(p, dtype) for p in precision), key=lambda found: found[0].value)  # pyright: ignore[reportArgumentType]
    if isinstance(precision, lax.DotAlgorithmPreset):
        precision = precision.name
    if isinstance(precision, str) and precision in lax.DotAlgorithmPreset.__members__:
        if precision in _OF_HALF.get(dtype.name, ()):
            return lax.Precision.DEFAULT, dtype
        if dtype.name in _OF_HALF or precision not in _OF_FLOAT32:
            raise NotImplementedError(
                f"precision={precision} of {dtype.name} operands: no kernel has it. Write {_alternatives(dtype)}."
            )
        precision, name = _OF_FLOAT32[precision]
        return precision, jnp.dtype(name)
    try:
        # lax.Precision(1) and lax.Precision(True) would pass, too.
        if precision is None or isinstance(precision, (str, lax.Precision)):
            return lax.Precision(precision), dtype
    except ValueError:
        pass
    known = "None, 'default', 'high', 'highest', or the name of a jax.lax.DotAlgorithmPreset"
    raise ValueError(f"precision={precision!r}: write {known}.")


def kernels_have(precision: lax.PrecisionLike, dtype) -> bool:
    """Whether `resolve_precision` takes it."""
    try:
        resolve_precision(precision, dtype)
    except NotImplementedError:
        return False
    return True


def _alternatives(dtype: jnp.dtype) -> str:
    if dtype.name in _OF_HALF:
        return "precision=None, or cast the operands to float32"
    return "'default', 'high', 'highest' or 'BF16_BF16_F32'"


def named_cast(x: jax.Array, dtype, name: str) -> jax.Array:
    """x in dtype with that checkpoint name; x itself, without it, if it has the dtype already."""
    return x if x.dtype == dtype else checkpoint_name(x.astype(dtype), name)
