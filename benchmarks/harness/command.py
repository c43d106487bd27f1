"""The command of a benchmark whose cases are shapes times the values of some options."""

import dataclasses
import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import typer

from benchmarks import harness
from benchmarks.harness import machine


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark:
    """What a benchmark brings.

    Attributes:
      name: of its command, and of its file of rows.
      shapes, smoke: the named workloads, and the tiny one of --smoke.
      sets: further named workloads, by the name of a set that --shapes takes.
      compiled: (run, shapes) -> `Run.programs`, compiled before the first case.
      inputs: of a shape, what its cases share; made once.
      options: comma-separated options and their defaults; the first one's values are the outermost loop.
      known: what an option may have, where that is not its default.
      loops: the options that cases are made of, where not all; `Run.options` has all.
      measure: (run, shape, inputs, a value of each loop) -> checks, times and writes one case.
      peers, rounds: defaults of --peers and --rounds.
      ceilings: of `machine.measure_ceilings`.
      ceiling: the field of `Ceilings` that of_ceiling is a share of; "" for none.
      torch: the peer in torch's process, and the request of a first small case; None without one.
      answer_seconds: within which torch answers.
    """

    name: str
    shapes: Mapping[str, Any]
    smoke: Any
    sets: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    compiled: Callable[[harness.Run, list[Any]], dict[Any, Any]] = lambda run, shapes: {}
    inputs: Callable[[Any], Any]
    options: Mapping[str, tuple[str, ...]]
    known: Mapping[str, Iterable[str]] = dataclasses.field(default_factory=dict)
    loops: tuple[str, ...] | None = None
    measure: Callable[..., None]
    peers: str
    rounds: int = 5
    ceilings: Mapping[str, Any] | None = dataclasses.field(default_factory=dict)
    ceiling: str = ""
    torch: tuple[str, dict[str, Any]] | None = None
    answer_seconds: float = 180

    def of_option(self, name: str) -> list[str]:
        return list(self.known.get(name, self.options[name]))


def command(benchmark: Benchmark) -> Callable[..., None]:
    """For typer: --shapes, the benchmark's options, --peers, --out, --rounds, --smoke."""
    loops = tuple(benchmark.options) if benchmark.loops is None else benchmark.loops

    def main(shapes: str, peers: str, out: str, rounds: int, smoke: bool, **given: str) -> None:
        if benchmark.torch:
            harness.leave_room_for_torch()
        file = harness.begin(benchmark.name, out, smoke)
        with harness.torch_beside(benchmark.torch, harness.names(peers), benchmark.answer_seconds) as torch:
            ceilings = None
            if benchmark.ceilings is not None:
                ceilings = machine.measure_ceilings(file, smoke, **benchmark.ceilings)
            run = harness.Run(
                file=file,
                rounds=rounds,
                ceiling=getattr(ceilings, benchmark.ceiling, None),
                ceilings=ceilings,
                peers=[name for name in harness.names(peers) if not benchmark.torch or name != benchmark.torch[0]],
                torch=torch,
                options={name: harness.names(given[name], benchmark.of_option(name)) for name in given},
            )
            known = functools.reduce(operator.or_, map(dict, benchmark.sets.values()), dict(benchmark.shapes))
            chosen = benchmark.sets[shapes] if shapes in benchmark.sets else harness.names(shapes, known)
            chosen = [benchmark.smoke] if smoke else [known[name] for name in chosen]
            run.programs = benchmark.compiled(run, chosen)
            for shape in chosen:
                inputs = benchmark.inputs(shape)
                for values in itertools.product(*(run.options[name] for name in loops)):
                    benchmark.measure(run, shape, inputs, *values)
                del inputs
                run.done(shape.name)
        harness.end(run.left_out)

    options = {
        "shapes": (str, harness.shapes_option(benchmark.shapes, benchmark.sets)),
        **{
            name: (str, typer.Option(",".join(default), help=f"Of {', '.join(benchmark.of_option(name))}."))
            for name, default in benchmark.options.items()
        },
        "peers": (str, typer.Option(benchmark.peers, help='"" for none.')),
        "out": (str, harness.OUT),
        "rounds": (int, typer.Option(benchmark.rounds)),
        "smoke": (bool, harness.SMOKE),
    }
    # typer reads the options from the signature.
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, keyword, annotation=a, default=d) for name, (a, d) in options.items()]
    main.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    main.__annotations__ = {name: annotation for name, (annotation, _) in options.items()}
    main.__doc__ = f"Appends to <out>/{benchmark.name}.jsonl; exits with 1 if jaxops itself failed somewhere."
    return main
