"""What every test runs under."""

import atexit
import functools
import gc
import importlib.metadata
import os
import pathlib
import platform
import re
import shutil
import sys
import tempfile
import zlib

import hypothesis
import pytest

# Large programs that one process has compiled, the other worker and subprocesses load from disk. Read when jax is
# imported. A program that took less than a second is hardly faster to load, and few are needed twice: to write those
# of 0.2 s costs 4 % of a training step's compilation (2026-11-26).
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jaxops-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1.0")
# glibc reads these when a process starts: a run's workers and subprocesses. XLA's compiler takes and gives back memory
# for each program: in one arena that is not trimmed it takes about 5 % less CPU time (2026-11-25).
os.environ.setdefault("MALLOC_ARENA_MAX", "1")
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(1 << 28))
os.environ.setdefault("MALLOC_TOP_PAD_", str(1 << 26))
# The simulator's products are small: a second thread costs them more than it saves (13 ms instead of 0.1).
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if shutil.which("nvidia-smi") is None:
    # Half of the CPU time is XLA's compiler, for programs that run once or twice. The older fusion emitter saves 30 %
    # of the run, one LLVM module a program 10 % of compiling, AVX2 instead of AVX-512 another 8 %. On a GPU the kernels
    # stay what users get. XLA ends the process for an option that it does not know.
    quick = " --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    if platform.machine() == "x86_64":
        quick += " --xla_cpu_max_isa=AVX2"
    if tuple(map(int, re.findall(r"\d+", importlib.metadata.version("jaxlib"))[:3])) <= (0, 11, 2):
        quick += " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
else:
    # References are XLA's, which compiles and times dozens of kernels for each of their products: minutes for a file.
    quick = " --xla_gpu_autotune_level=0"
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share the card
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + quick

import jax
from jax._src.interpreters import mlir

# JAX makes an MLIR context for every program, 3 ms (2026-11-26). Types and attributes of all programs stay in this one,
# modules do not.
if hasattr(mlir, "make_ir_context"):
    mlir.make_ir_context = functools.cache(mlir.make_ir_context)

# JAX keeps many objects alive and makes many more: with Python's thresholds, garbage collection is a tenth of a run.
gc.set_threshold(100_000, 20, 100)
# The Python line of each operation in a program takes 2 % of the run to write. Only profiling/test_scopes.py reads it.
jax.config.update("jax_traceback_in_locations_limit", 0)
jax.config.update("jax_num_cpu_devices", 4)  # for shard_map; must come before JAX looks for its devices
# A vector that broadcasts against a matrix hides a wrong axis. Users who set this get no error from jaxops either.
jax.config.update("jax_numpy_rank_promotion", "raise")

# One example is one compilation, so few; in CI the same ones every time.
hypothesis.settings.register_profile("jaxops", deadline=None, max_examples=8, derandomize="CI" in os.environ)
# For a second interpreter (.ci/run).
hypothesis.settings.register_profile("again", hypothesis.settings.get_profile("jaxops"), max_examples=3)
hypothesis.settings.load_profile("jaxops")


def pytest_configure(config):
    from jaxops._lib.planning.device import gluon_missing

    # On Python 3.11 only: elsewhere the suite must see that Hopper's kernels are not taken.
    if sys.version_info < (3, 12) and gluon_missing():
        config.addinivalue_line("filterwarnings", "ignore:jaxops takes its Pallas kernels:RuntimeWarning")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    # First, in a new process: a profile and a memory report read every program that the process has.
    items.sort(key=lambda item: "profiling" not in item.nodeid)
    if jax.default_backend() == "gpu":
        for item in items:
            if item.get_closest_marker("hopper"):
                item.add_marker(pytest.mark.gpu)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and jax.default_backend() != "gpu":
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        for item in marked:
            if item.get_closest_marker("alone"):
                item.add_marker(pytest.mark.skip(reason="needs the GPU for itself: run -m alone -n 0"))


def pytest_collection_finish():
    """Modules and parameters of tests stay until the end: the garbage collector need not look at them."""
    gc.freeze()


MAPS = pathlib.Path("/proc/self/maps")


@pytest.hookimpl(trylast=True)  # a module's fixtures have ended
def pytest_runtest_teardown(item, nextitem):
    """Between two files, garbage is collected, and the collector need not look again at what stays: of five files of
    tests/models this leaves 2.5 s of 8 s in the collector, of 100 s (2026-11-26).

    A program on the CPU takes about 20 memory maps, of the 65,530 that Linux gives a process; XLA aborts without. So
    JAX's caches are emptied before that: the tests of one file share programs, and none has a thousand. Twice in a run
    it took 8 and 10 s of CPU time (2026-11-25).
    """
    if nextitem is None or nextitem.path == item.path:
        return
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > 45_000:
        gc.unfreeze()
        jax.clear_caches()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Without a GPU, tests of Hopper's kernels run in the simulator, each in its own order of events."""
    if not item.get_closest_marker("hopper") or jax.default_backend() == "gpu":
        return (yield)
    from tests.gluon_simulator import simulated

    with simulated(seed=zlib.crc32(item.nodeid.encode()) % 6):
        return (yield)


@pytest.fixture(autouse=True)
def _warned_anew():
    """Warnings that jaxops gives once a process, it gives once a test."""
    from jaxops._lib.planning.device import warn_once

    warn_once.cache_clear()


@pytest.fixture(autouse=True, scope="session")
def _own_cache_directory(tmp_path_factory):
    """Tuned rows that a developer has stored for their own GPU must not decide what is tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
