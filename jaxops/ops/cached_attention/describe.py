"""What tools and tests ask of cached_attention."""

import jax
import jax.numpy as jnp

from jaxops._lib.planning.description import Description, Function, Given, Tuning, random
from jaxops.ops.cached_attention.api import cached_attention
from jaxops.ops.cached_attention.plan import PLANNER, Problem
from jaxops.ops.cached_attention.reference import cached_attention_reference


def _reference(a: Given) -> tuple[jax.Array, ...]:
    options = {name: a[name] for name in ("qk_norm", "epsilon", "rotary", "scale", "window", "sinks")}
    return cached_attention_reference(a["qkv"], a["k_cache"], a["v_cache"], a["at"], **options)


class _Tuning(Tuning):
    """The last tokens that fit into the caches, one after another as in decoding: the caches are copied once."""

    planner, problem, unit = PLANNER, Problem, "gbps"
    shape = ("B", "heads", "kv_heads", "S", "head_dim")
    tokens = 16

    def tensors(self, problem):
        """Queries, keys and values, and the caches."""
        p = problem
        cache = p.B, p.kv_heads, p.S, p.head_dim
        shapes = ((p.B, p.heads + 2 * p.kv_heads, p.head_dim), cache, cache)
        return [random(seed, shape, p.dtype) for seed, shape in enumerate(shapes)]

    def run(self, name, problem, plan, qkv, k_cache, v_cache):
        def step(caches, at):
            k_cache, v_cache = caches
            out, *caches = cached_attention(qkv, k_cache, v_cache, jnp.full(problem.B, at), plan=plan)
            return tuple(caches), out

        at = jnp.arange(max(0, problem.S - self.tokens), problem.S, dtype=jnp.int32)
        return jax.lax.scan(step, (k_cache, v_cache), at)[1]

    def work(self, name, problem, qkv, k_cache, v_cache):
        return min(self.tokens, problem.S) * 2 * k_cache.nbytes


DESCRIPTION = Description(
    functions=(
        Function(
            cached_attention,
            wrt=("qkv", "k_cache", "v_cache", "sinks", "qk_norm", "rotary"),
            reference=_reference,
            reference_bytes=lambda a: 8 * a["qkv"].shape[1] * a["k_cache"][:, 0].size,
            problem=Problem(16, 32, 4, 1152, 128, "bfloat16"),
        ),
    ),
    tuning=_Tuning(),
)
