"""Random routings, tokens and experts, with NaN where nothing may be read, and the three ways to run them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops.ops import grouped_glu, permute
from jaxops.ops.moe_mlp import Plan
from jaxops.ops.moe_mlp.reference import moe_mlp_reference
from tests.arrays import put
from tests.compare import assert_close
from tests.ops.grouped_glu.cases import plan_of as unit_plan_of
from tests.ops.grouped_matmul.cases import plan_of as product_plan_of
from tests.ops.permute.cases import TILE, has_row, make_routing

# "interpret" runs the kernels in Pallas' interpreter on the CPU, "gpu" compiles the same kernels.
RUNS = ["xla", "interpret", pytest.param("gpu", marks=pytest.mark.gpu)]
FEW = ["few", pytest.param("few-gpu", marks=pytest.mark.gpu)]  # the forward's kernel for few rows, which gathers them
QUICK = RUNS[::2]  # for what the kernels that are interpreted have no part in
WEIGHTS = ("w_gate", "w_up", "w_down")
BIASES = ("b_gate", "b_up", "b_down")
NAMES = ("out", "dx", "dweights", *(f"d{name}" for name in WEIGHTS))
OF_BIASES = tuple(f"d{name}" for name in BIASES)


def plan_of(run: str) -> Plan:
    """Tiles smaller than the tests' sizes. Interpreted: the kernels of rows and activation only, not the products'."""
    if run == "xla":
        return Plan("xla")
    if run in ("few", "few-gpu"):
        plan = plan_of({"few": "interpret", "few-gpu": "gpu"}[run])
        return dataclasses.replace(plan, unit=unit_plan_of({"few": "fused", "few-gpu": "fused-gpu"}[run]))
    products = product_plan_of("xla" if run == "interpret" else run)
    unit = grouped_glu.Plan("pallas", grouped_glu.Tiles(8, 32), grouped_glu.Tiles(4, 16), products)
    return Plan("pallas", unit, products, permute.Plan("pallas", TILE, TILE, TILE))


@dataclasses.dataclass(frozen=True)
class Variant:
    """The static part of a call: shapes, dtypes, options; and the experts of the routing, of which this device has
    those from `first` to `last` - 1."""

    T: int = 13
    D: int = 19
    F: int = 37
    N: int = 19
    k: int = 3
    E: int = 6
    dtype: str = "float32"
    out_dtype: str | None = None
    capacity: int | None = None
    first: int = 0
    last: int | None = None
    activation: str = "silu"
    save: str = "preactivations"
    form: str = "two"  # "joined": gate and up in one array; "alone": no gate
    biased: tuple[str, ...] = ()  # of BIASES

    @property
    def experts(self) -> int:
        return (self.E if self.last is None else self.last) - self.first


# Rows before and after the groups, dropped choices, no size that is a power of two or equals another.
SHARD = Variant(N=11, capacity=6, first=1, last=5)


def make_case(variant: Variant, seed: int = 0) -> dict:
    """routing, x [T, D], the experts' weights, and the cotangent dout [T, N]. Tokens without a row are NaN in x and
    dout, and so are the weights of dropped choices. The first tokens' weights are 0, which have gradients, too."""
    v, rng = variant, np.random.default_rng(seed + 100)
    routing = make_routing(v, seed)  # pyright: ignore[reportArgumentType]  # all that it reads is here, too
    weights = jnp.where(np.arange(v.T)[:, None] < v.T // 4, 0 * routing.weights, routing.weights)
    routing = dataclasses.replace(routing, weights=weights)
    bad = np.where(has_row(routing).any(axis=1), 1, np.nan)[:, None]
    G, D, F, N = v.experts, v.D, v.F, v.N
    shapes = {"x": (v.T, D), "w_gate": (G, D, F), "w_up": (G, D, F), "w_down": (G, F, N), "dout": (v.T, N)}
    case = {
        name: rng.normal(size=shape) / (max(1, shape[1]) ** 0.5 if name[0] == "w" else 1)
        for name, shape in shapes.items()
    }
    case |= {name: case[name] * bad for name in ("x", "dout")}
    case = {name: put(array, (v.out_dtype if name == "dout" else None) or v.dtype) for name, array in case.items()}
    widths = dict(zip(BIASES, (F, F, N), strict=True))
    case |= {name: put(rng.normal(size=(G, n)), "float32") if name in v.biased else None for name, n in widths.items()}
    if v.form == "joined":
        case |= {"w_gate": jnp.concatenate([case["w_gate"], case["w_up"]], axis=2), "w_up": None}
        if v.biased:
            case |= {"b_gate": jnp.concatenate([case["b_gate"], case["b_up"]], axis=1), "b_up": None}
    if v.form == "alone":
        case |= {"w_gate": None, "b_gate": None}
    if v.activation == "swiglu_oai":  # a third of gate and up is clamped
        case |= {name: 8 * case[name] for name in ("w_gate", "w_up") if case[name] is not None}
    return {"routing": routing} | case


def clean(case: dict) -> dict:
    """What the reference can read: zeros for the NaN that reaches nothing."""
    kept = has_row(case["routing"])
    rows = {name: jnp.where(kept.any(axis=1)[:, None], case[name], 0) for name in ("x", "dout")}
    return (
        case
        | rows
        | {"routing": dataclasses.replace(case["routing"], weights=jnp.where(kept, case["routing"].weights, 0))}
    )


def mlp(
    variant: Variant, run: str, x, w_gate, w_up, w_down, routing: jaxops.Routing, biases=None, **options
) -> jax.Array:
    if run == "reference":
        out = moe_mlp_reference(x, w_gate, w_up, w_down, routing, biases=biases, activation=variant.activation)
        return out.astype(variant.out_dtype or variant.dtype)
    how = {
        "activation": variant.activation,
        "save": variant.save,
        "out_dtype": variant.out_dtype,
        "precision": "highest",
        "plan": plan_of(run),
    }
    if variant.form == "alone" and run != "xla":
        how["plan"] = dataclasses.replace(how["plan"], unit=how["plan"].down)
    return jaxops.moe_mlp(x, w_gate, w_up, w_down, routing, biases=biases, **how | options)


@functools.cache
def compiled(run: str, variant: Variant, **options):
    """A jitted function from a case to the result and all gradients by name; "reference" is reference.py in float32."""

    def everything(case: dict) -> dict:
        routing, v = case["routing"], variant
        operands = [case[name] for name in ("x", *WEIGHTS, *BIASES)]
        if run == "reference":
            v = dataclasses.replace(v, out_dtype="float32")
            operands = jax.tree.map(lambda a: a.astype(jnp.float32), operands)

        def weighted(x, weights, *experts):
            biases = experts[3:] if v.biased else None
            own = dataclasses.replace(routing, weights=weights)
            return mlp(v, run, x, *experts[:3], own, biases, **options)

        out, vjp = jax.vjp(weighted, operands[0], routing.weights, *operands[1:])
        every = dict(zip(NAMES + OF_BIASES, (out, *vjp(case["dout"].astype(out.dtype))), strict=True))
        return {name: x for name, x in every.items() if x is not None}

    return jax.jit(everything)


def want_of(case: dict, variant: Variant) -> dict:
    # One compilation for all that differs in nothing the reference looks at.
    same = dataclasses.replace(
        variant, out_dtype=None, capacity=None, first=0, last=variant.experts, save="preactivations"
    )
    return compiled("reference", same)(clean(case))


def check(case: dict, variant: Variant, run: str) -> dict:
    """The result and every gradient equal the reference's; zeros where no row or choice is."""
    got, want = compiled(run, variant)(case), want_of(case, variant)
    check_values(got, want, variant)
    check_zeros(got, case["routing"])
    return got


def check_values(got: dict, want: dict, variant: Variant) -> None:
    """In bfloat16 gate, up, h, their gradients and the result are rounded: twice the table's error; sums of one or two
    terms do not average the roundings."""
    dtypes = {"out": variant.out_dtype or variant.dtype} | dict.fromkeys(("dweights", *OF_BIASES), "float32")
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == dtypes.get(name, variant.dtype), name
        assert_close(got[name], want[name], variant.dtype, name, scale=2, roundings=4)


def check_zeros(got: dict, routing: jaxops.Routing) -> None:
    """Of those results and gradients that there are."""
    kept = has_row(routing)
    empty = np.diff(np.asarray(routing.group_offsets)) == 0
    nothing = dict.fromkeys(("out", "dx"), ~kept.any(axis=1)) | {"dweights": ~kept}
    nothing |= dict.fromkeys(NAMES[3:] + OF_BIASES, empty)
    for name, value in got.items():
        assert not np.asarray(value, np.float32)[nothing[name]].any(), name
