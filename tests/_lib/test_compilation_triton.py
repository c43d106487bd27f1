"""Triton's compiler runs once for a kernel: results on disk, faults of files, and a program's kernels side by side."""

import errno
import functools
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("jax_triton", reason="jax-triton needs Python >= 3.12")

from triton.backends.nvidia.compiler import CUDABackend
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaxops._lib.gluon import compilation_triton
from jaxops._lib.gluon.launch_triton import triton_call
from tests.configured import configured
from tests.gluon import compiled
from tests.hopper import lower_for_h200, on_h200

pytestmark = pytest.mark.versions
FACTOR = gl.constexpr(2)


@gluon.jit
def _times(x):
    return FACTOR * x


@gluon.jit
def _scaled(x, y, BLOCK: gl.constexpr):
    at = gl.arange(0, BLOCK, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(y + at, _times(gl.load(x + at)))


@gluon.jit
def _cannot_be_compiled(x, y, BLOCK: gl.constexpr):
    gl.static_assert(BLOCK == 0, "no block has this size")


def scaled(x, block=128, kernel=_scaled):
    how = {"out_type": jax.ShapeDtypeStruct(x.shape, x.dtype), "grid": 1, "name": "scaled", "flops": x.size}
    return triton_call(x, kernel=kernel, BLOCK=block, **how)


X = jax.ShapeDtypeStruct((512,), "float32")


class Process:
    """Stands for processes that have compiled no kernel yet, and counts the runs of Triton's compiler."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: pathlib.Path):
        self._patch, self.folder, self.runs = patch, folder, 0
        make_ptx = CUDABackend.make_ptx

        def counted(*args):
            self.runs += 1
            return make_ptx(*args)

        patch.setattr(CUDABackend, "make_ptx", counted)

    def compile_all(self, fn) -> tuple[list, int]:
        """A new process' kernels, and how often the compiler ran."""
        for kernel in (_scaled, _cannot_be_compiled):
            self._patch.setattr(kernel, "_jT_kernel_cache", {}, raising=False)
        before = self.runs
        return compiled(fn, X), self.runs - before

    def compile(self, block=128) -> tuple:
        (kernel,), runs = self.compile_all(functools.partial(scaled, block=block))
        return kernel, runs

    def file(self) -> pathlib.Path:
        (file,) = self.folder.iterdir()
        return file


@pytest.fixture
def process(monkeypatch, tmp_path):
    with configured(jax_compilation_cache_dir=str(tmp_path / "of_jax")):
        yield Process(monkeypatch, tmp_path / "of_jax" / "jaxops_kernels")


def test_a_kernel_is_compiled_by_the_first_process(process):
    first = process.compile()
    assert first[1] == 1
    assert process.compile() == (first[0], 0)
    assert process.compile(block=256)[1] == 1
    assert len(list(process.folder.iterdir())) == 2
    assert process.folder.stat().st_mode & 0o777 == 0o700


def test_what_decides_the_result(process, monkeypatch):
    """A helper's constant, Triton's version, options, compilers' variables; not the operands' sizes."""
    kernel, _ = process.compile()
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "FACTOR", gl.constexpr(3))
        other, runs = process.compile()
        assert runs == 1
        assert other.ptx != kernel.ptx
    with monkeypatch.context() as patch:
        key = compilation_triton._key
        patch.setattr(compilation_triton, "_key", lambda *given: key(*given[:-1], [*given[-1], "another version"]))
        assert process.compile() == (kernel, 1)
    variables = {"TRITON_F32_DEFAULT": ("ieee", [1, 0]), "TRITON_CUOBJDUMP_PATH": ("x", [1, 0])}
    for name, (value, runs) in (variables | {"MLIR_ENABLE_DUMP": ("0", [1, 1])}).items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert [process.compile()[1] for _ in range(2)] == runs, name
    assert process.compile() == (kernel, 0)


@pytest.mark.parametrize("fault", ["truncated", "empty", "flipped", "foreign", "another kernel's", "a folder"])
def test_damaged_files(process, fault):
    """One line, the right kernel, and a whole file again."""
    kernel, _ = process.compile()
    file = process.file()
    whole = file.read_bytes()
    process.compile(block=256)
    (other,) = set(process.folder.iterdir()) - {file}
    if fault == "a folder":
        file.unlink()
        file.mkdir()
    else:
        at = len(whole) // 2
        damaged = {"truncated": whole[:at], "empty": b"", "foreign": b"\x80\nno kernel\n"}
        damaged["flipped"] = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        damaged["another kernel's"] = other.read_bytes()
        file.write_bytes(damaged[fault])
    with pytest.warns(RuntimeWarning, match="jaxops_kernels cannot be|jaxops_kernels are damaged") as caught:
        assert process.compile() == (kernel, 1)
    assert len(caught) == (2 if fault == "a folder" else 1)  # neither read nor written
    if fault != "a folder":
        assert file.read_bytes() == whole
        assert process.compile() == (kernel, 0)


def _full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_folders_that_cannot_be_used(process, monkeypatch, tmp_path):
    """Full, read-only, no folder, and open to others: each time the kernel, and one line for two kernels."""

    def lines(blocks=(128, 256)) -> list[str]:
        compilation_triton.warn_once.cache_clear()
        with pytest.warns(RuntimeWarning) as caught:
            assert [process.compile(block)[1] for block in blocks] == [1, 1]
        return [str(each.message) for each in caught]

    def full(*args, **named):
        file = temporary(*args, **named)
        monkeypatch.setattr(file, "write", _full)
        return file

    temporary = tempfile.NamedTemporaryFile
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "NamedTemporaryFile", full)
        (line,) = lines()
    assert line.endswith("cannot be written (No space left on device).")
    assert not list(process.folder.iterdir())
    with monkeypatch.context() as patch:  # root may write into a folder of mode 0o500
        patch.setattr(tempfile, "NamedTemporaryFile", _full)
        assert len(lines()) == 1
    process.folder.chmod(0o770)
    (line,) = lines()
    assert "others may write to it" in line
    process.folder.rmdir()
    process.folder.write_text("a file")
    assert len(lines()) == 1
    process.folder.unlink()
    process.folder.mkdir(mode=0o700)
    if os.getuid() == 0:  # the folder of another user
        os.chown(process.folder, 12345, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    (line,) = lines()
    assert "belongs to another user" in line


def test_a_file_that_others_may_write_is_not_read(process):
    kernel, _ = process.compile()
    process.file().chmod(0o666)
    with pytest.warns(RuntimeWarning, match="others may write"):
        assert process.compile() == (kernel, 1)
    assert process.compile() == (kernel, 0)


def test_a_folder_that_may_only_be_read(process, monkeypatch):
    kernel, _ = process.compile()
    with monkeypatch.context() as patch:
        patch.setattr(os, "utime", _full)
        patch.setattr(tempfile, "NamedTemporaryFile", _full)
        assert process.compile() == (kernel, 0)


def test_turned_off_with_jax_s_cache(process):
    with configured(jax_enable_compilation_cache=False):
        assert [process.compile()[1] for _ in range(2)] == [1, 1]
    assert not process.folder.exists()


@pytest.mark.parametrize("of_jax", [None, "gs://bucket/cache"])
def test_without_a_local_folder_of_jax_s_the_user_s(monkeypatch, tmp_path, of_jax):
    process = Process(monkeypatch, tmp_path / "jaxops" / "kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with configured(jax_compilation_cache_dir=of_jax):
        assert [process.compile()[1] for _ in range(2)] == [1, 0]
    assert process.file().suffix == ".json"


def test_the_files_not_used_for_longest_are_deleted(process, monkeypatch):
    blocks = 128, 256, 512
    files, left = [], process.folder / "left.part"  # by a process that was killed
    for block in blocks:
        process.compile(block)
        files += set(process.folder.iterdir()) - set(files)
    left.write_bytes(bytes(100_000))
    for i, file in enumerate([left, *files]):
        os.utime(file, (i, i))
    assert process.compile(128)[1] == 0  # a use: now the second one is the oldest
    monkeypatch.setattr(compilation_triton, "LIMIT_BYTES", sum(file.stat().st_size for file in files) - 1)
    files[2].unlink()
    assert process.compile(512)[1] == 1
    assert set(process.folder.iterdir()) == {files[0], files[2]}


def test_two_processes_at_once(tmp_path):
    """Equal kernels, no line, one whole file."""
    program = (
        "from tests._lib.test_compilation_triton import *\n"
        "(kernel,) = compiled(scaled, X)\n"
        "import hashlib; print(hashlib.sha256(kernel.ptx.encode()).hexdigest())"
    )
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "PYTHONWARNINGS": "error::RuntimeWarning"}
    command, root = [sys.executable, "-c", program], pathlib.Path(__file__).parents[2]
    both = [
        subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    out = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], out
    assert out[0][0] == out[1][0] != ""
    (file,) = (tmp_path / "jaxops_kernels").iterdir()
    assert file.suffix == ".json"


# Side by side


@pytest.fixture
def threads(monkeypatch):
    """Sets the number of threads that compile."""
    pools = []

    def use(number: int) -> compilation_triton.ThreadPoolExecutor:
        pools.append(compilation_triton.ThreadPoolExecutor(number))
        monkeypatch.setattr(compilation_triton, "_pool", lambda: pools[-1])
        return pools[-1]

    yield use
    for pool in pools:
        pool.shutdown()


def test_kernels_of_a_program_are_compiled_at_the_same_time(process, monkeypatch, threads):
    """Each of the two waits for the other inside the compiler; each is compiled once, though called in two places."""
    threads(2)
    with configured(jax_enable_compilation_cache=False):
        alone = [process.compile(block)[0] for block in (128, 256)]
        meeting, make_llir = threading.Barrier(2), CUDABackend.make_llir

        def together(*args):
            meeting.wait(timeout=60)
            return make_llir(*args)

        monkeypatch.setattr(CUDABackend, "make_llir", together)
        kernels, runs = process.compile_all(lambda x: layers(x))
    assert runs == 2
    assert {kernel.ptx for kernel in kernels} == {kernel.ptx for kernel in alone}


def layers(x):
    def layer(x, _):
        return scaled(jnp.sin(scaled(x, 256))), None

    return jax.lax.scan(layer, scaled(x), None, length=3)[0]


def test_what_is_not_lowered_is_not_compiled(process):
    """A jaxpr, and the primal of a `custom_vjp` under `jax.grad`."""

    @jax.custom_vjp
    def op(x):
        return scaled(x, 512)

    op.defvjp(lambda x: (scaled(x, 128), None), lambda _, dy: (scaled(dy, 256),))
    with on_h200():
        jax.make_jaxpr(op)(X)
    kernels, runs = process.compile_all(jax.value_and_grad(lambda x: op(x).sum()))
    assert (len(kernels), runs, process.runs) == (2, 2, 2)


def test_a_kernel_that_cannot_be_compiled(process):
    """Its error is raised where it is lowered, each time; the kernels beside it can be compiled."""

    def both(x):
        return scaled(scaled(x, kernel=_cannot_be_compiled), 256)

    with pytest.raises(Exception, match="no block has this size"):
        process.compile_all(both)
    with pytest.raises(Exception, match="no block has this size"):
        lower_for_h200(both, X)
    (kernel,) = compiled(functools.partial(scaled, block=256), X)
    assert kernel.name == "_scaled"


def test_a_compiler_that_fails_once(process, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(CUDABackend, "make_llir", _full)
        with pytest.raises(OSError, match="No space left"):
            process.compile()
    assert len(compiled(lambda x: scaled(x), X)) == 1


def test_an_interrupt(process, monkeypatch, threads):
    """What has not begun is not compiled before Python ends, but when it is needed again."""
    pool, free = threads(1), threading.Event()
    pool.submit(free.wait, 20)

    def interrupt(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Future, "result", interrupt)
        with pytest.raises(KeyboardInterrupt):
            process.compile_all(lambda x: layers(x))  # lowered anew
    free.set()
    pool.submit(int).result()
    assert process.runs == 0
    assert len(compiled(lambda x: layers(x), X)) >= 2
    assert process.runs == 2


def test_a_compilation_that_another_thread_has_cancelled(process, monkeypatch):
    start, cancelled = compilation_triton._start, Future()
    cancelled.cancel()
    given = iter([cancelled, cancelled])
    monkeypatch.setattr(compilation_triton, "_start", lambda *kernel: next(given, None) or start(*kernel))
    assert process.compile()[1] == 1
