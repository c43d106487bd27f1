"""What every test runs under."""

import atexit
import gc
import importlib.metadata
import os
import pathlib
import re
import shutil
import sys
import tempfile

import hypothesis
import pytest

# What one test has compiled, the others, the second worker and subprocesses load: a quarter of the whole run's CPU time. Read when jax is imported.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jaxops-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
if shutil.which("nvidia-smi") is None:
    # Compiling interpreted kernels is nearly all that the tests do on a CPU, and half of it is optimisation, and fusions that go through MLIR one by one: with
    # XLA's older emitter the whole run takes 30 % less CPU time. On a GPU the kernels stay what users get.
    quick = " --xla_backend_optimization_level=0"
    if tuple(map(int, re.findall(r"\d+", importlib.metadata.version("jaxlib"))[:3])) <= (
        0,
        11,
        2,
    ):  # what does not know an option ends the process
        quick += " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
else:
    # References are XLA's, which compiles and times dozens of kernels for each of their products: minutes for a test file.
    quick = " --xla_gpu_autotune_level=0"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + quick

import jax

jax.config.update("jax_num_cpu_devices", 4)  # for shard_map; must come before JAX looks for its devices
# A vector that broadcasts against a matrix unasked hides a wrong axis. Users who set this get no error from us either.
jax.config.update("jax_numpy_rank_promotion", "raise")

# One example is one compilation, so few; in CI the same ones every time.
hypothesis.settings.register_profile("jaxops", deadline=None, max_examples=8, derandomize="CI" in os.environ)
# Where another interpreter has seen all.
hypothesis.settings.register_profile("again", hypothesis.settings.get_profile("jaxops"), max_examples=3)
hypothesis.settings.load_profile("jaxops")


def pytest_configure(config):
    from jaxops._lib.device import gluon_missing

    if (
        sys.version_info < (3, 12) and gluon_missing()
    ):  # on Python 3.11 only: elsewhere the suite must see that Hopper's kernels are not taken
        config.addinivalue_line("filterwarnings", "ignore:jaxops takes its Pallas kernels:RuntimeWarning")


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and jax.default_backend() != "gpu":
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_collection_finish():
    """JAX keeps much alive, and makes much while it traces: looking through all of it again and again is a tenth of a run."""
    gc.freeze()
    gc.set_threshold(20_000)


MAPS = pathlib.Path("/proc/self/maps")


def pytest_runtest_teardown(item, nextitem):
    """A program on the CPU takes about 20 memory maps. Linux gives a process 65,530; where XLA gets no more, it ends.

    So what JAX's caches hold is let go before that, between two files, in which programs are shared.
    """
    if (
        nextitem is not None
        and nextitem.path != item.path
        and MAPS.exists()
        and MAPS.read_bytes().count(b"\n") > 30_000
    ):
        jax.clear_caches()


@pytest.fixture(autouse=True, scope="session")
def _own_cache_directory(tmp_path_factory):
    """Tuned rows that a developer has stored for their own GPU must not decide what is tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
