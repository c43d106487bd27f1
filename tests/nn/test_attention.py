"""`PackedAttention` and `packed_attention_fn` against Flax's own attention of each sequence by itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxops.nn import AdaLNZeroBlock, PackedAttention, PackedMask, packed_attention_fn
from tests.arrays import put
from tests.compare import assert_close

T, S, WIDTH, HEADS = 13, 9, 16, 4
ENDS, KEY_ENDS = np.array([1, 4, 4, 11], np.int32), np.array([0, 2, 3, 8], np.int32)
RNG = np.random.default_rng(0)
X, KV = (RNG.normal(size=(rows, WIDTH)).astype(np.float32) for rows in (T, S))


@pytest.fixture(autouse=True)
def exact():
    with jax.default_matmul_precision("highest"):
        yield


def flax_attention(**more) -> nnx.MultiHeadAttention:
    bias = nnx.initializers.normal(1.0)
    return nnx.MultiHeadAttention(
        HEADS, WIDTH, num_kv_heads=2, decode=False, bias_init=bias, out_bias_init=bias, rngs=nnx.Rngs(0), **more
    )


def ours(like: nnx.MultiHeadAttention, **more) -> PackedAttention:
    """With the parameters of that one."""
    layer = PackedAttention(HEADS, WIDTH, num_kv_heads=2, rngs=nnx.Rngs(1), **more)
    for name in ("query", "key", "value", "out"):
        own, other = getattr(layer, name), getattr(like, name)
        own.kernel[...] = other.kernel[...].reshape(own.kernel.shape)
        own.bias[...] = other.bias[...].reshape(own.bias.shape)
    return layer


@functools.partial(nnx.jit, static_argnames=("is_causal", "qk_transform"))
def call(layer, *given, **how) -> jax.Array:
    """In one program. By themselves its operations would be two dozen."""
    return layer(*given, **how)


@functools.partial(nnx.jit, static_argnames="causal")
def one_at_a_time(flax: nnx.MultiHeadAttention, causal: bool, kv=None) -> jax.Array:
    """Flax's attention, whose keys and values are repeated for grouped queries."""
    out = jnp.zeros((T, WIDTH), jnp.float32)
    for b in range(3):
        rows, keys = slice(*ENDS[b : b + 2]), slice(*(ENDS if kv is None else KEY_ENDS)[b : b + 2])
        if rows.stop > rows.start:
            mask = np.tri(rows.stop - rows.start, dtype=bool) if causal else None
            out = out.at[rows].set(flax(X[rows], X[keys] if kv is None else kv[keys], mask=mask))
    return out


def repeated(query, key, value, **how):
    key, value = (jnp.repeat(x, HEADS // x.shape[-2], axis=-2) for x in (key, value))
    return nnx.dot_product_attention(query, key, value, **how)


@pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])
def test_as_flax(causal):
    flax = flax_attention(attention_fn=repeated)
    want = one_at_a_time(flax, causal)
    spoilt = X.copy()
    spoilt[[0, 11, 12]] = np.nan
    assert_close(call(ours(flax, causal=causal), spoilt, ENDS), want, "float32")
    packed = flax_attention(attention_fn=packed_attention_fn)
    got = call(packed, X, mask=put(ENDS), is_causal=causal)
    assert_close(got[ENDS[0] : ENDS[-1]], want[ENDS[0] : ENDS[-1]], "float32")
    assert_close(got[:1], packed.out.bias[...][None], "float32")


def test_cross_attention():
    flax = flax_attention(attention_fn=repeated)
    want = one_at_a_time(flax, False, KV)
    assert_close(call(ours(flax), X, ENDS, KV, kv_offsets=KEY_ENDS), want, "float32")
    got = call(flax_attention(attention_fn=packed_attention_fn), X, KV, mask=PackedMask(ENDS, KEY_ENDS))
    assert_close(got[ENDS[0] : ENDS[-1]], want[ENDS[0] : ENDS[-1]], "float32")


def test_a_mask_by_row_and_a_window():
    """A row of text is causal; rows of an image see all of it."""
    until = np.arange(1, T + 1, dtype=np.int32)
    until[5:8] = 8
    flax = flax_attention(attention_fn=functools.partial(packed_attention_fn, window=2))
    want = call(flax, X, mask=PackedMask(ENDS, visible_until=until))
    got = call(ours(flax, window=2), X, ENDS, visible_until=until)
    assert_close(got[1:11], want[1:11], "float32")
    changed = X.copy()
    changed[7] += 1
    after = call(ours(flax, window=2), changed, ENDS, visible_until=until)
    assert [row for row in range(T) if (np.asarray(got[row]) != np.asarray(after[row])).any()] == [5, 6, 7, 8, 9]


def test_rotary_positions_and_other_widths():
    layer = PackedAttention(2, WIDTH, head_dim=6, in_kv_features=5, rngs=nnx.Rngs(0))
    swap = lambda q, k: (2 * q, k / 2)
    kv = RNG.normal(size=(S, 5)).astype(np.float32)
    got = call(layer, X, ENDS, kv, kv_offsets=KEY_ENDS, qk_transform=swap)
    assert got.shape == (T, WIDTH)
    assert_close(got, call(layer, X, ENDS, kv, kv_offsets=KEY_ENDS), "float32")


def test_is_a_mixer():
    rngs = nnx.Rngs(0)
    block = AdaLNZeroBlock(WIDTH, 4, functools.partial(PackedAttention, HEADS, WIDTH), jnp.tanh, rngs=rngs)
    assert block(X, jnp.ones((3, 4)), put(ENDS)).shape == (T, WIDTH)


def test_parameters_of_key_rows_outside_get_no_gradient():
    """Of `kv`: its rows outside may be NaN."""
    spoilt = KV.copy()
    spoilt[KEY_ENDS[-1] :] = np.nan
    layer = ours(flax_attention())
    gradient = nnx.jit(nnx.grad(lambda layer, kv: jnp.sum(layer(X, ENDS, kv, kv_offsets=KEY_ENDS) ** 2)))
    got, want = (jax.tree.leaves(gradient(layer, kv)) for kv in (spoilt, KV))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: PackedAttention(4, 16, num_kv_heads=3, rngs=nnx.Rngs(0)), ValueError, "num_heads=4 must be a multip"),
        (lambda: PackedAttention(3, 16, rngs=nnx.Rngs(0)), ValueError, "in_features=16 is no multiple.*pass head_dim"),
        (lambda: ours(flax_attention())(X[None], ENDS), ValueError, r"x has shape \(1, 13, 16\).*\[T, in_features=16"),
        (lambda: ours(flax_attention())(X, ENDS, X), ValueError, "kv and kv_offsets come together"),
        (lambda: flax_attention(attention_fn=packed_attention_fn)(X), ValueError, "mask is None; pass mask=sequence_"),
        (
            lambda: flax_attention(attention_fn=packed_attention_fn)(X[None], mask=ENDS),
            ValueError,
            r"query has shape \(1, 13, 4, 4\).*pack the rows",
        ),
        (
            lambda: flax_attention(attention_fn=packed_attention_fn)(X, mask=np.ones((T, T), bool)),
            ValueError,
            r"mask has shape \(13, 13\); pass sequence_offsets",
        ),
        (
            lambda: flax_attention(attention_fn=packed_attention_fn)(X, mask=ENDS, sow_weights=True),
            NotImplementedError,
            "sow_weights=True",
        ),
        (
            lambda: flax_attention(attention_fn=packed_attention_fn, dropout_rate=0.1, deterministic=False)(
                X, mask=ENDS, rngs=nnx.Rngs(0)
            ),
            NotImplementedError,
            "dropout_rng: packed attention has no dropout",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
