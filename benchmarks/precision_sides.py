"""The sides of `benchmarks.bench_precision`: one training of a decoder, computed in several ways."""

import dataclasses

import jax
from flax import nnx

from benchmarks.fp8_parts import CASTS, PRODUCTS, SomeCasts
from jaxops.nn import Fp8Linear
from models.decoder import Decoder
from models.precision import PRECISIONS, Backend
from models.training import lm as train_lm
from models.training.presets import Preset

BASELINE, EXACT, NULL = "bfloat16", "float32", "bfloat16-halves"
OF_ONE_CAST = ("tensorwise", "blockwise")  # recipes whose casts are measured one by one


@dataclasses.dataclass(frozen=True)
class Side:
    """How a training is computed.

    Attributes:
      precision: of `models.precision.PRECISIONS`.
      experts: whether the recipe is for the experts' products, too, and not for the dense layers' alone.
      pow2_scales: of the dense layers.
      halves: whether a step's batch is two micro-batches, each of whose gradients is rounded to bfloat16: the same
        sums, rounded in another order.
      backend: of all ops.
      casts: of the dense layers' products, instead of the precision's.
    """

    precision: str
    experts: bool = True
    pow2_scales: bool = False
    halves: bool = False
    backend: Backend = "auto"
    casts: SomeCasts | None = None

    def preset(self, base: Preset) -> Preset:
        """The baseline's training, computed this way."""
        chosen = train_lm.configure(base, base.steps, self.backend, PRECISIONS[self.precision])
        model = dataclasses.replace(chosen.model, fp8_experts=self.experts)
        return dataclasses.replace(chosen, model=model, accumulate=2 if self.halves else 1)

    def model(self, base: Preset) -> Decoder:
        """For tracing: its parameters are those of a seed that does not matter."""
        model = Decoder(self.preset(base).model, rngs=nnx.Rngs(0))
        for path, layer in nnx.iter_modules(model):
            if isinstance(layer, Fp8Linear):
                layer.pow2_scales = self.pow2_scales
            elif self.casts is not None and isinstance(layer, nnx.Linear) and "router" not in path:
                layer.dot_general = self.casts
        return model


def training_sides() -> dict[str, Side]:
    """Those that are trained, by name; the baseline first."""
    found = {BASELINE: Side(BASELINE), NULL: Side(BASELINE, halves=True), EXACT: Side(EXACT)}
    if jax.default_backend() == "gpu":  # elsewhere every side takes the XLA backend
        found["bfloat16-xla"] = Side(BASELINE, backend="xla")
    recipes = {name.removeprefix("fp8-").replace("-", "_"): name for name in PRECISIONS if name.startswith("fp8-")}
    for recipe, precision in recipes.items():
        found[recipe] = Side(precision)
        found[f"{recipe}-dense"] = Side(precision, experts=False)
    for recipe in ("tensorwise", "blockwise"):
        found[f"{recipe}-dense-pow2"] = Side(recipes[recipe], experts=False, pow2_scales=True)
    return found


def cast_sides() -> dict[str, Side]:
    """Bfloat16 with the casts of one product of the dense layers, or with one cast."""
    return {
        f"{recipe}-dense-{cast}": Side(BASELINE, casts=SomeCasts(recipe, (cast,)))
        for recipe in OF_ONE_CAST
        for cast in (*PRODUCTS, *CASTS)
    }
