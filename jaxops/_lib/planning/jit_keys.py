"""What the keys of JAX's caches of traced and compiled functions have beside arguments, all of it from the import of
jaxops on.

A value that came later, such as with an op's first import inside a trace, would change the key: JAX would trace and
compile once more whatever called the op, and every function that was compiled before.
"""

import importlib

import jax

if jax.__version_info__ < (0, 10, 2):
    raise ImportError(f"jaxops needs JAX 0.10.2 or newer, this is {jax.__version__}: pip install 'jax>=0.10.2,<0.13'")

rows_source = jax.make_user_context(default_value=None)  # see `jaxops.tuning.use_rows`
problems = jax.make_user_context(default_value=None)  # see `jaxops.tuning.record`
plans_watched = jax.make_user_context(default_value=None)  # see `jaxops._lib.planning.recorded`

if jax.__version_info__ >= (0, 11):
    # Pallas has three values of its own, and JAX imports this part of it when it lowers the first kernel. 0.1 s.
    importlib.import_module("jax.experimental.pallas.fuser")
