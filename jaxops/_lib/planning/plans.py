"""How an op's plan is chosen: what an explicit plan gives, else a tuned row, else the op's heuristic."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from jaxops._lib.arrays.manual_axes import vary_together
from jaxops._lib.arrays.partitioning import warn_if_split
from jaxops._lib.arrays.symbolic import is_symbolic
from jaxops._lib.planning.device import Capability, Device, device_of, warn_once
from jaxops._lib.planning.recorded import Decision, Source, note, watched
from jaxops._lib.planning.tuned import tuned_rows

AMPERE, ADA = (8, 0), (8, 9)  # compute capabilities: the least of the Pallas kernels, and the least with FP8


@dataclasses.dataclass(frozen=True)
class BasePlan:
    """Base class of each op's Plan: its backend and, of what is not None, how the kernels run.

    `make_plan` fills what is None; print its result to see the choice. The xla backend has no tiles.

    Attributes:
      backend: one of the op's.
      device: what the plan is made for; None is the device of the call's operands.
    """

    backend: str = "pallas"
    device: Device | None = dataclasses.field(default=None, kw_only=True, repr=False)

    @property
    def on(self) -> Device:
        """The device of a plan that `make_plan` has made."""
        assert self.device is not None
        return self.device


ProblemT = TypeVar("ProblemT")
PlanT = TypeVar("PlanT", bound=BasePlan)
TilesT = TypeVar("TilesT", bound=Any)


@dataclasses.dataclass(frozen=True)
class Call(Generic[ProblemT, PlanT]):
    """A call of `make_plan` whose backend is chosen.

    Attributes:
      problem, device, rows: as passed.
      asked: the argument `backend`.
      backend: the chosen one.
      plan: the explicit plan; without one a plan of the backend alone.
      free: neither a backend nor a plan was passed.
    """

    problem: ProblemT
    device: Device
    rows: Sequence[dict]
    asked: str
    backend: str
    plan: PlanT
    free: bool

    def part(self, make_plan: Callable, problem: Any, plan: Any, backend: str | None = None) -> Any:
        """The plan of an op inside this one: `plan` completed; without one, that of `backend` (this call's)."""
        backend = "auto" if self.free or plan is not None else backend or self.backend
        return make_plan(problem, self.device, self.rows, backend=backend, plan=plan)


@dataclasses.dataclass(frozen=True)
class Planner(Generic[ProblemT, PlanT, TilesT]):
    """What one op brings to the choice of its plans.

    Attributes:
      plan, tiles: the op's classes. The fields of the plan named in `passes` hold tiles.
      passes: passes that have tiles of their own.
      heuristic: (pass, problem, device, kernel) -> tiles for a shape without a tuned row. kernel: "pallas" or "triton".
      search: (pass, problem, device, kernel) -> tiles worth measuring, beside the heuristic's.
      key: (pass, **fields) -> what tuned rows are looked up by; the fields are those of a problem, or of a row.
      needs: problem -> least compute capability of the Pallas kernels.
      triton: (problem, device) -> whether "auto" takes the Triton kernels; None where the op has none.
      library: a backend of the op that calls a library, and like "xla" has no tiles, such as "cudnn"; "" for none.
      auto: (problem, device) -> what "auto" takes; None for the rule of `make_plan`.
      kernel: (pass, call) -> the kernel of a pass; by default, the backend's.
      fit: (pass, tiles, call) -> the tiles as this problem takes them, or an error.
      others: call -> the plan's other fields, or an error for what the backend cannot do.
      symbolic: fields of the problem that may be symbolic sizes of `jax.export`, on the portable backend.
      splits: whether rows that XLA has split over devices need no warning: the op has a rule for them (`partitioned`),
        or they are of few numbers.
      pallas: whether the op has Pallas kernels.
    """

    plan: type[PlanT]
    tiles: type[TilesT] | None = None
    passes: tuple[str, ...] = ()
    heuristic: Callable[[str, ProblemT, Device, str], TilesT] | None = None
    search: Callable[[str, ProblemT, Device, str], Iterable[TilesT]] | None = None
    key: Callable[..., tuple] | None = None
    needs: Callable[[ProblemT], Capability] = lambda problem: AMPERE
    triton: Callable[[ProblemT, Device], bool] | None = None
    library: str = ""
    auto: Callable[[ProblemT, Device], str] | None = None
    kernel: Callable[[str, Call[ProblemT, PlanT]], str] = lambda name, call: call.backend
    fit: Callable[[str, TilesT, Call[ProblemT, PlanT]], TilesT] = lambda name, tiles, call: tiles
    others: Callable[[Call[ProblemT, PlanT]], dict[str, Any]] = lambda call: {}
    symbolic: tuple[str, ...] = ()
    splits: bool = False
    pallas: bool = True

    def make_plan(
        self,
        problem: ProblemT,
        device: Device,
        rows: Iterable[dict] = (),
        *,
        backend: str = "auto",
        plan: PlanT | None = None,
    ) -> PlanT:
        """Decides how to run `problem` on `device`; a pure function of its arguments, counted by `tuning.record`.

        Args:
          problem: static shapes and dtypes.
          device: see `jaxops.tuning.current_device()`. A plan's own device comes first.
          rows: tuned rows (`jaxops.tuning.tuned_rows`) of this op and of those that it is made of, best source first.
          backend: "auto" takes "triton" on Hopper, where the op has it and jax-triton is installed, "pallas" on other
            NVIDIA GPUs, "xla" elsewhere. Others are obeyed or raise. On a CPU, "pallas" runs in Pallas' interpreter.
          plan: kept; what it leaves None is filled by tuned rows, then by the heuristic.

        Raises:
          ValueError: an unknown backend, one that contradicts the plan, or tiles that the problem cannot have; a row
            that does not name its op.
          TypeError: the plan is not of this op.
          NotImplementedError: the backend cannot run this problem on this device.
        """
        note(problem)
        decisions = watched()
        before = len(decisions or ())
        free, asked = backend == "auto" and plan is None, backend
        device, backend = self.choose(problem, device, backend, plan)
        given: PlanT = self.plan(backend) if plan is None else plan
        rows = tuple(rows)
        if not all("op" in row for row in rows):
            raise ValueError("each of rows needs the name of its op: pass those of tuned_rows(op, device).")
        call = Call(problem, device, rows, asked, backend, given, free)
        others = self.others(call)
        found = {name: self._tiles(name, call) for name in self.passes if backend not in ("xla", self.library)}
        chosen = {name: tiles for name, (tiles, _) in found.items()}
        made = self.plan(backend, **chosen, **others, device=device)
        if decisions is not None:
            sources = {name: source for name, (_, source) in found.items()}
            # What `others` has decided is a part of this decision.
            decisions[before:] = [Decision(self.op, problem, given, made, sources, tuple(decisions[before:]))]
        return made

    def prepare(self, problem: ProblemT, backend: str, plan: PlanT | None, *operands: Any) -> tuple[Any, ...]:
        """What an op does between its checks and its kernels: (the plan on the operands' device, with its tuned rows,
        and the operands, pytrees, as `vary_together` marks them)."""
        device = device_of(*operands)
        plan = self.make_plan(problem, device, tuned_rows(self.op, device), backend=backend, plan=plan)
        operands = vary_together(*operands)
        kernel = plan.backend not in ("xla", self.library)
        return plan, *(warn_if_split(self.op, *operands) if kernel and not self.splits else operands)

    def candidates(self, pass_name: str, problem: ProblemT, device: Device, kernel: str = "pallas") -> list[TilesT]:
        """Tiles worth measuring for one pass, without repeats: the heuristic's first."""
        assert self.heuristic is not None
        assert self.search is not None
        first = self.heuristic(pass_name, problem, device, kernel)
        return list(dict.fromkeys([first, *self.search(pass_name, problem, device, kernel)]))

    @property
    def op(self) -> str:
        return self.plan.__module__.split(".")[-2]

    def row_key(self, row: dict) -> tuple:
        """What a tuned row is found by: the op's key, and the kernel that the tiles are for. () of a row that cannot be
        read, as one of another version or that was edited: no op stops for it."""
        assert self.key is not None
        try:
            return *self.key(row["pass"], **row), row["tiles"].get("kernel", "pallas")
        except (KeyError, TypeError, AttributeError) as error:
            self._leave_out(row, error)
            return ()

    def _leave_out(self, row: dict, error: Exception) -> None:
        hint = "`python -m jaxops.tuning clear` deletes your rows, --again measures them again"
        warn_once(f"jaxops goes on without a tuned row of {self.op} that it cannot read ({error!r}): {row}; {hint}.")

    def _tiles(self, name: str, call: Call[ProblemT, PlanT]) -> tuple[TilesT, Source]:
        tiles, kernel = getattr(call.plan, name), self.kernel(name, call)
        if tiles is not None:
            return self.fit(name, tiles, call), Source("explicit")
        key = row = None
        if self.key is not None and self.tiles is not None:
            key = (*self.key(name, **vars(call.problem)), kernel)
            row, tiles = self._find(key, call.rows)
        if tiles is None:
            assert self.heuristic is not None
            tiles = self.heuristic(name, call.problem, call.device, kernel)
        return self.fit(name, tiles, call), Source("heuristic" if row is None else "tuned", key, row)

    def _find(self, key: tuple, rows: Iterable[dict]) -> tuple[dict | None, Any]:
        """The first row with this key, and its tiles."""
        assert self.tiles is not None
        for row in rows:
            if row["op"] == self.op and self.row_key(row) == key:
                try:
                    return row, self.tiles(**row["tiles"])
                except (TypeError, ValueError) as error:
                    self._leave_out(row, error)
        return None, None

    def choose(self, problem: ProblemT, device: Device, backend: str, plan: PlanT | None) -> tuple[Device, str]:
        """Device and backend of a call with these arguments; see `make_plan` for its errors."""
        if plan is not None and not isinstance(plan, self.plan):
            hint = "; a backend by itself is passed as backend=" if isinstance(plan, str) else ""
            raise TypeError(f"plan is {_name(type(plan))}; this op takes {_name(self.plan)}{hint}.")
        own = {"triton": self.triton, self.library: self.library, "pallas": self.pallas}
        known = ("auto", *(name for name, there in own.items() if there), "xla")
        if not isinstance(backend, str) or backend not in known:
            raise ValueError(f"backend={backend!r}: write {', '.join(map(repr, known[:-1]))} or {known[-1]!r}.")
        needs = self.needs(problem)
        if plan is not None:
            device = plan.device or device
            if backend not in ("auto", plan.backend):
                raise ValueError(f"backend={backend!r} contradicts plan.backend={plan.backend!r}: pass one of them.")
            backend = plan.backend
        symbolic = [name for name, size in vars(problem).items() if is_symbolic(size)]
        if symbolic:
            backend = "xla" if backend == "auto" else backend
            self._check_symbolic(problem, symbolic, backend)
        elif backend == "auto" and self.auto is not None:
            backend = self.auto(problem, device)
        elif backend == "auto" and self.triton is not None and self.triton(problem, device):
            backend = "triton"
        elif backend == "auto":
            backend = "pallas" if self.pallas and device.has(needs) else "xla"
        if backend == "pallas" and not (device.interpret or device.has(needs)):
            least = ".".join(map(str, needs))
            raise NotImplementedError(
                f"backend='pallas' needs an NVIDIA GPU of compute capability {least} or newer (or a CPU, where the "
                f"kernels are interpreted); this is {device.kind}. Use backend='xla'."
            )
        return device, backend

    def _check_symbolic(self, problem: ProblemT, names: list[str], backend: str) -> None:
        """
        Raises:
          NotImplementedError: the backend needs these sizes of the problem as numbers.
        """
        sizes = ", ".join(f"{name}={getattr(problem, name)}" for name in names)
        if not set(names) <= set(self.symbolic):
            raise NotImplementedError(f"{sizes} is symbolic; {self.op} needs a number: export once for each size.")
        if backend != "xla":
            raise NotImplementedError(
                f"{sizes} is symbolic; kernels need sizes that are known. Export with backend='xla', or once for each "
                "length."
            )


def _name(kind: type) -> str:
    module = "" if kind.__module__ == "builtins" else kind.__module__.removesuffix(".plan") + "."
    return f"a {module}{kind.__qualname__}"


def check_fields(
    tiles: Any,
    *names: str,
    power_of_2: bool = False,
    least: int = 1,
    most: int | None = None,
    among: Sequence[Any] | None = None,
) -> None:
    """The named attributes of a tile class are in a range, or are among given values.

    Raises:
      ValueError: one is not.
    """
    rules = ["a power of two"] if power_of_2 else []
    rules += [f"at least {least}"] if least > 1 or not power_of_2 else []
    rules += [f"at most {most}"] if most is not None else []
    rule = " and ".join(rules) if among is None else f"one of {', '.join(map(repr, among))}"
    for name in names:
        value = getattr(tiles, name)
        if among is not None:
            legal = value in among
        else:
            legal = least <= value <= (most or value) and not (power_of_2 and value & (value - 1))
        if not legal:
            raise ValueError(f"{type(tiles).__name__}.{name}={value!r} must be {rule}.")
