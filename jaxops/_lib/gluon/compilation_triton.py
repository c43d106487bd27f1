"""How jax-triton's kernels are compiled: a program's side by side, each once, and kept on disk between processes.

jax-triton compiles a kernel while JAX lowers its call, one after another, before the key of JAX's compilation cache
exists. Here the first call that is lowered starts all kernels of its program in a pool of threads: Triton's passes,
LLVM and hashing release the GIL. No kernel is compiled that is traced but not lowered, such as the primal of a
`custom_vjp` under `jax.grad`.

The results' files are named by a hash of the kernel's IR, as Triton's frontend has just made it, and of all that the
compiler reads besides (`_key`). So no change of a kernel, its helpers, constants, globals or argument types needs to be
noticed elsewhere. Hashing the sources instead would save the frontend too, a tenth of the time, but Triton's
`JITFunction.cache_key` leaves out some of what the IR depends on: constants of other modules (`module.NAME`), functions
inside tuples, Gluon's own library.

Why the files are our own: Triton's `FileCacheManager` has no limit, checksum or check of who may write, and its key
reads 500 MB of library at each start (1.4 s); JAX's `LRUCache` writes in place.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from types import ModuleType
from typing import Any

import jax
import triton
from jax.extend.core import jaxprs_in_params
from jax.interpreters import mlir

from jaxops._lib.planning.cache_files import cache_folder
from jaxops._lib.planning.device import warn_once

LIMIT_BYTES = 256 << 20  # of all files; the largest has 0.75 MB
# Of jax-triton's `CompilationResult`. What is left out only goes into its dumps.
FIELDS = ("binary", "name", "shared_mem_bytes", "global_scratch_size", "global_scratch_align", "tensordesc_meta")
# Variables of compilers. They are part of the key; with one of these words in its name nothing is read or kept.
PREFIXES = ("TRITON_", "MLIR_", "LLVM_", "NVPTX_", "PTXAS_", "DISABLE_", "ALLOW_", "USE_IR_", "AMDGCN_")
ANEW = {"ALWAYS", "DIAGNOSTICS", "DUMP", "PLUGIN", "REPRODUCER", "TIMING"}
STACK_BYTES = 16 << 20  # a thread's: with `ulimit -s unlimited`, as clusters set it, glibc gives it 2 MB
_LOCK = threading.Lock()


def install(own: ModuleType) -> None:
    """Changes a copy of `jax_triton.triton_lib`. With JAX_TRITON_DUMP_DIR everything is compiled and dumped as ever."""
    if own._JAX_TRITON_DUMP_DIR:
        return
    own.compile_ttir_inplace = _kept(own.compile_ttir_inplace, own.CompilationResult, _compiler(own))
    mlir.register_lowering(own.triton_kernel_call_p, _side_by_side(own), platform="cuda")


# Side by side


class _Frontend(threading.local):
    """One thread at a time makes IR. That is Python: with a dozen threads, all would reach LLVM late and then wait for
    the GIL between passes."""

    _lock, _held = threading.Lock(), False

    def enter(self) -> None:
        self._lock.acquire()
        self._held = True

    def leave(self) -> None:
        if self._held:
            self._held = False
            self._lock.release()


_FRONTEND = _Frontend()


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="jaxops-compile")


def _start(function, *call) -> Future:
    """Compiles a kernel in the pool, unless it is there. The future is kept beside the function's kernels."""
    spec, target, _, options = call
    key, cache = function._make_cache_key(spec, target, options), function._kernel_cache

    def compile_kernel():
        _FRONTEND.enter()
        try:
            kernel, _, _, result = function._compile_kernel(*call)
        finally:
            _FRONTEND.leave()
        cache[key] = kernel, result.tensordesc_meta  # where jax-triton's lowering looks

    with _LOCK:
        future = cache.get(("future", key))
        if future is None or future.cancelled() or (future.done() and future.exception()):
            before = threading.stack_size(STACK_BYTES)
            try:
                future = cache["future", key] = _pool().submit(compile_kernel)
            finally:
                threading.stack_size(before)
    return future


def _side_by_side(own: ModuleType):
    """The lowering of a call. The first of a program starts the compilation of all its kernels."""
    last = threading.local()

    def lowering(ctx, *args, **params):
        program = _program_of_lowering()
        if program is not None and program is not getattr(last, "program", lambda: None)():
            last.program = weakref.ref(program)
            last.futures = [_start(*_kernel_of(own, *call)) for call in _calls(own, program)]
        try:
            kernel = _kernel_of(own, params, ctx.avals_in, ctx.avals_out)
            while True:
                with contextlib.suppress(CancelledError):  # by another thread, whose program failed
                    _start(*kernel).result()
                    break
        except BaseException:  # also an interrupt: Python would compile the others before it exits
            for future in getattr(last, "futures", ()):
                future.cancel()
            raise
        return own.triton_kernel_call_lowering(own.make_cuda_target, ctx, *args, **params)

    return lowering


def _program_of_lowering() -> Any:
    """The jaxpr that JAX is lowering in this thread; None where JAX has renamed the function: then kernels are compiled
    one after another. The rule's context does not have it."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "lower_jaxpr_to_module":
        frame = frame.f_back
    return frame and frame.f_locals.get("jaxpr")


def _calls(own: ModuleType, program) -> list[tuple[dict, tuple, tuple]]:
    """A program's calls of kernels: parameters, types of operands and of results. Of equal ones, one."""
    seen: dict[int, Any] = {}

    def visit(jaxpr) -> Iterator[tuple]:
        if id(jaxpr) in seen:  # layers share what they call
            return
        seen[id(jaxpr)] = jaxpr
        for equation in jaxpr.eqns:
            if equation.primitive is own.triton_kernel_call_p:
                params = equation.params
                types = [tuple(v.aval for v in side) for side in (equation.invars, equation.outvars)]
                decide = (params[name] for name in ("fn", "in_tree", "backend_options", "metaparams"))
                yield (*decide, *types), (params, *types)
            for inner in jaxprs_in_params(equation.params):
                yield from visit(inner)

    return list(dict(visit(program)).values())


def _kernel_of(own: ModuleType, params: dict, operands: Sequence, results: Sequence) -> tuple:
    """The function of a call and what its `_compile_kernel` takes, as jax-triton's lowering has them."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(
        params["in_tree"].unflatten(operands),
        is_leaf=lambda x: isinstance(x, (own._StaticArg, own._OutputPlaceholder, own.TensorDescriptor)),
    )
    values = {own._StaticArg: lambda x: x.value, own._OutputPlaceholder: lambda x: results[x.ordinal]}
    args = [values.get(type(leaf), lambda x: x)(leaf) for _, leaf in leaves]
    function, options = own.TritonFunction(params["fn"]), dict(params["backend_options"])
    target = own.make_cuda_target(params["compute_capability"], options["num_ctas"])
    backend = triton.compiler.make_backend(target)
    paths = [tuple(key.idx for key in path) for path, _ in leaves]
    spec = own.KernelSpecialization.build(
        function.non_constexpr_param_names, args, [own.get_type_id(x) for x in args], tree, paths,
        dict(params["metaparams"]), backend,
    )  # fmt: skip
    return function, spec, target, backend, options


# On disk


def _kept(compile_inplace, result_type, compiler: list | None):
    """jax-triton's `compile_ttir_inplace`, which reads what an earlier process compiled."""

    def read_or_compile(module, backend, options, target):
        _FRONTEND.leave()
        folder = None if compiler is None or options.debug or _must_compile() else kernel_folder()
        if folder is None:
            return compile_inplace(module, backend, options, target)
        key = _key(str(module), backend, options, target, compiler)
        file = folder / f"{key}.json"
        found = _read(file, key)
        if found is not None:
            return result_type(**found, ttgir="", llir="")
        result = compile_inplace(module, backend, options, target)
        _write(file, key, {name: getattr(result, name) for name in FIELDS})
        return result

    return read_or_compile


def _must_compile() -> bool:
    names = (name for name in os.environ if name.startswith(PREFIXES))
    passes = getattr(getattr(triton, "_instrumentation", None), "_callbacks", None)  # that tools have added
    return any(ANEW & set(name.split("_")) for name in names) or bool(passes)


def kernel_folder() -> pathlib.Path | None:
    """Where kernels are kept: in the folder of JAX's compilation cache, else in the user's cache folder. None where
    JAX's cache is turned off; or, with a warning, where there is no folder that only this user may write."""
    if not jax.config.jax_enable_compilation_cache:
        return None
    try:
        of_jax = str(jax.config.jax_compilation_cache_dir or "://")
        folder = cache_folder("kernels") if "://" in of_jax else pathlib.Path(of_jax) / "jaxops_kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(folder.stat(), folder)
    except OSError as error:
        _warn(f"jaxops compiles its Triton kernels at every start: {error}.")
        return None
    return folder


def _check_owner(found: os.stat_result, path: pathlib.Path) -> None:
    """
    Raises:
      PermissionError: another user but root may have written it.
    """
    if found.st_uid not in (0, os.getuid()) or found.st_mode & 0o022:
        raise PermissionError(f"{path} belongs to another user, or others may write to it")


def _compiler(own: ModuleType) -> list | None:
    """Which compiler this process has; None where that is not in files. Asked when launch_triton.py is imported, since
    files may change later."""
    import triton.backends.nvidia.compiler as backend
    from triton._C import libtriton

    here = pathlib.Path(__file__)
    sources = here, here.with_name("launch_triton.py"), own.__file__, backend.__file__
    try:
        library = pathlib.Path(libtriton.__file__).stat()
        digests = [hashlib.sha256(pathlib.Path(file).read_bytes()).hexdigest() for file in sources]
    except OSError:
        return None
    versions = [importlib.metadata.version(name) for name in ("jax-triton", "triton")]
    return [*versions, library.st_size, library.st_mtime_ns, *digests]


def _key(ir: str, backend, options, target, compiler: list) -> str:
    """All that decides the result: the IR with its line numbers, the options with the contents of libdevice, the
    version of ptxas, whose newest PTX is written, and what the environment says to compilers."""
    environment = sorted((name, value) for name, value in os.environ.items() if name.startswith(PREFIXES))
    knobs = [getattr(triton.knobs, name).knobs for name in ("compilation", "language", "runtime")]
    text = repr([compiler, backend.hash(), options.hash(), target, environment, knobs])
    return hashlib.sha256(f"{text}\n{ir}".encode()).hexdigest()


def _digest(key: str, text: bytes) -> bytes:
    return hashlib.sha256(key.encode() + text).hexdigest().encode()


def _read(file: pathlib.Path, key: str) -> dict | None:
    try:
        with file.open("rb") as opened:
            _check_owner(os.fstat(opened.fileno()), file.parent)
            digest, _, text = opened.read().partition(b"\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn(f"jaxops compiles Triton kernels anew: {file.parent} cannot be read ({error.strerror or error}).")
        return None
    if digest != _digest(key, text):  # a file under another's name, too
        _warn(f"jaxops compiles Triton kernels anew: files in {file.parent} are damaged.")
        return None
    with contextlib.suppress(OSError):  # of a folder that may only be read
        os.utime(file)
    return json.loads(text)


def _write(file: pathlib.Path, key: str, fields: dict) -> None:
    """Writes a file at once, and deletes those that were not used for longest."""
    try:
        text = json.dumps(fields).encode()
        with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".part", delete_on_close=False) as part:
            part.write(_digest(key, text) + b"\n" + text)
            part.close()
            pathlib.Path(part.name).replace(file)
        _delete_oldest(file.parent)
    except (OSError, TypeError) as error:
        why = getattr(error, "strerror", None) or error
        _warn(f"jaxops does not keep the Triton kernels that it compiles: {file.parent} cannot be written ({why}).")


def _delete_oldest(folder: pathlib.Path) -> None:
    """Also what killed processes left."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # another process deletes, too
                found.append((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= LIMIT_BYTES:
            break
        pathlib.Path(path).unlink(missing_ok=True)
        total -= size


def _warn(text: str) -> None:
    with _LOCK:  # once in all threads
        warn_once(text)
