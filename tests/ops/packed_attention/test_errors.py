"""Bad input is an error before anything is launched, and its message says what was passed and what to write instead."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxops

ROWS = 8
Q, KV = jnp.ones((ROWS, 4, 6)), jnp.ones((ROWS, 2, 6))
OFFSETS = np.array([0, 2, 5, 8], np.int32)
RIGHT = {"q": Q, "k": KV, "v": KV, "sequence_offsets": OFFSETS}
UNTIL = np.zeros(ROWS, np.int32)
ERRORS = {
    "q-rank": ({"q": Q[None]}, ValueError, r"q has shape \(1, 8, 4, 6\).*\[T, heads, head_dim\]"),
    "q-list": ({"q": [[[1.0]]]}, TypeError, r"q is a list.*\[T, heads, head_dim\]"),
    "q-int": ({"q": Q.astype(jnp.int32)}, TypeError, r"q is int32.*bfloat16, float16, float32.*q\.astype"),
    "k-dtype": ({"k": KV.astype(jnp.bfloat16)}, TypeError, r"k is bfloat16 and q is float32: cast one"),
    "k-width": ({"k": KV[..., :5]}, ValueError, r"head_dim of k is 5, but that of q is 6"),
    "v-shape": ({"v": KV[:, :1]}, ValueError, r"k has shape \(8, 2, 6\) and v \(8, 1, 6\)"),
    "heads": ({"k": Q[:, :3], "v": Q[:, :3]}, ValueError, r"q has 4 heads and k and v have 3.*multiple of kv_heads"),
    "no-heads": ({"k": Q[:, :0], "v": Q[:, :0]}, ValueError, r"q has 4 heads and k and v have 0"),
    "rows": ({"k": KV[:7], "v": KV[:7]}, ValueError, r"S of k and v without kv_offsets.* is 7, but T of q is 8"),
    "offsets": ({"sequence_offsets": OFFSETS[None]}, ValueError, r"sequence_offsets has shape \(1, 4\).*\(B \+ 1,\)"),
    "offsets-int64": ({"sequence_offsets": OFFSETS.astype(np.int64)}, TypeError, r"sequence_offsets is int64.*astype"),
    "kv_offsets": ({"kv_offsets": OFFSETS[:3]}, ValueError, r"len\(kv_offsets\) is 3.*len\(sequence_offsets\).* is 4"),
    "until-shape": ({"visible_until": UNTIL[1:]}, ValueError,
     r"visible_until has shape \(7,\).*\(8,\).*first row of k"),
    "until-dtype": ({"visible_until": UNTIL * 1.0}, TypeError,
     r"visible_until is float64; write visible_until\.astype"),
    "until-causal": ({"visible_until": UNTIL, "causal": True}, ValueError,
     r"visible_until and causal=True.*leave causal away.*own index \+ 1"),
    "wide": (dict.fromkeys("qkv", jnp.ones((ROWS, 1, 257))) | {"backend": "pallas"}, NotImplementedError,
     r"head_dim of at most 256, not 257\. Use 'xla'"),
    "cudnn-here": ({"backend": "cudnn"}, NotImplementedError, r"'cudnn' cannot run.*this is cpu.*Use backend='auto'"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    change, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        jaxops.packed_attention(**(RIGHT | change))
