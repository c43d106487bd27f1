"""What a start costs on the host: `import jaxops`, the first op, eager and under jit, and a training's compilation.

Each value is of new processes, without JAX's compilation cache, beside JAX's own: `import jax`, `jax.lax.ragged_dot`.
Of a training command, by JAX's events: tracing, lowering and XLA, added over its threads, and the whole command.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import typer

from benchmarks import harness
from benchmarks.harness import rows

IMPORT = """
import time
begin = time.perf_counter()
__import__(sys.argv[1])
print(json.dumps({f"import {sys.argv[1]}": time.perf_counter() - begin}))
"""

OPS = """
import time, jax, jax.numpy as jnp, jaxops
operands = jnp.ones((256, 128)), jnp.ones((4, 128, 128)), jnp.array([0, 64, 64, 200, 256])
jax.block_until_ready(operands)
plain = lambda lhs, rhs, offsets: jax.lax.ragged_dot(lhs, rhs, jnp.diff(offsets))
name, how = sys.argv[1:]
op = {"grouped_matmul": jaxops.grouped_matmul, "ragged_dot": plain}[name]
op, found = jax.jit(op) if how == "jit" else op, {}
for call in ("first", "second"):
    begin = time.perf_counter()
    jax.block_until_ready(op(*operands))
    found[f"{call} {name} {how}"] = time.perf_counter() - begin
print(json.dumps(found))
"""

TRAINING = """
import collections, time, jax
found, names = collections.Counter(), {
    "jaxpr_trace_duration": "tracing", "jaxpr_to_mlir_module_duration": "lowering", "backend_compile_duration": "XLA"
}
def listen(name, seconds, **_):
    if (short := names.get(name.rsplit("/", 1)[1])):
        found[short] += seconds
        found["programs"] += short == "XLA"
jax.monitoring.register_event_duration_secs_listener(listen)
begin = time.perf_counter()
from models.train import app
app(sys.argv[1:], standalone_mode=False)
found["whole"] = time.perf_counter() - begin
print()
print(json.dumps(found))
"""


def measured(code: str, *words: str) -> dict[str, float]:
    environment = {name: x for name, x in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    command = [sys.executable, "-c", f"import json, sys\n{code}", *words]
    done = subprocess.run(command, env=environment, cwd=rows.ROOT, capture_output=True, encoding="utf-8", check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(
    out: str = typer.Option("", help="Folder of the rows; by default the GPU's results."),
    rounds: int = typer.Option(5, help="Processes of each case."),
    trainings: str = typer.Option("lm", help="Training commands, with their words; comma-separated. Empty for none."),
    smoke: bool = typer.Option(False, help="One process of each."),
) -> None:
    file, samples = harness.begin("host_costs", out, smoke), {}
    cases = [(IMPORT, "jax"), (IMPORT, "jaxops")]
    cases += [(OPS, op, how) for how in ("eager", "jit") for op in ("ragged_dot", "grouped_matmul")]
    for case in cases * (1 if smoke else rounds):
        for name, seconds in measured(*case).items():
            samples.setdefault(name, []).append(1e6 * seconds)
    times = {name: rows.Times.of(found) for name, found in samples.items()}
    for name in times:
        peer = name.replace("jaxops", "jax").replace("grouped_matmul", "ragged_dot")
        vs = {} if peer == name else {peer.split()[1]: times[peer].us_p50 / times[name].us_p50}
        write(file, name, times[name], vs, {"M": 256, "K": 128, "N": 128, "G": 4})
    for words in harness.names(trainings):
        with tempfile.TemporaryDirectory() as runs:
            found = measured(TRAINING, *words.split(), "--out", f"{runs}/out")
        programs = int(found.pop("programs"))
        for name, seconds in found.items():
            write(file, f"{words}: {name}", rows.Times.of([1e6 * seconds]), {}, {"programs": programs})


def write(file: pathlib.Path, name: str, times: rows.Times, vs: dict[str, float], shape: dict[str, int]) -> None:
    case = rows.case_of("host_costs", "start", rows.Named(name, shape), "float32") | {"backend": "auto"}
    rows.append_row(file, rows.make_row(case, times, None, vs, None))
    print(f"{name:28s} {times.us_p50 / 1e6:9.4f} s  {vs or ''}", flush=True)
