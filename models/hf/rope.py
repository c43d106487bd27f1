"""The rotary positions of Hugging Face's config.json, to and from `models.decoder.RopeScaling`."""

import math
from typing import Annotated, Any, Literal

import pydantic
from pydantic import PositiveFloat, PositiveInt

from models.decoder import RopeScaling

STRICT = pydantic.ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)
# Of each kind its numbers, and the settings that they are.
NUMBERS = {
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "llama3": {"factor": "factor", "low_freq_factor": "low", "high_freq_factor": "high"},
    "yarn": {"factor": "factor", "beta_slow": "slow", "beta_fast": "fast", "truncate": "whole"},
}
Whole = Annotated[float, pydantic.Field(ge=1, le=1)]  # of partial_rotary_factor the decoder has only this
OPTIONAL = ("slow", "fast")  # with the defaults of `RopeScaling`


class Rope(pydantic.BaseModel):
    """`rope_parameters`, or `rope_scaling` before transformers 5."""

    model_config = STRICT

    rope_type: Literal["default", "linear", "dynamic", "llama3", "yarn"] = "default"
    rope_theta: PositiveFloat | None = None
    factor: PositiveFloat | None = None
    original_max_position_embeddings: PositiveInt | None = None
    low_freq_factor: PositiveFloat | None = None
    high_freq_factor: PositiveFloat | None = None
    beta_fast: PositiveFloat | None = None
    beta_slow: PositiveFloat | None = None
    attention_factor: PositiveFloat | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial_rotary_factor: Whole = 1.0

    @pydantic.model_validator(mode="before")
    @classmethod
    def _by_its_older_name(cls, given: Any) -> Any:
        if isinstance(given, dict) and "type" in given:
            return {"rope_type": given["type"]} | {key: value for key, value in given.items() if key != "type"}
        return given

    def scaling(self, longest: int, original: int | None) -> RopeScaling | None:
        """By the configuration's max_position_embeddings and original_max_position_embeddings."""
        kind = self.rope_type
        if kind == "default":
            return None
        original = original or self.original_max_position_embeddings or longest
        numbers: dict[str, Any] = {ours: getattr(self, theirs) for theirs, ours in NUMBERS[kind].items()}
        if kind == "yarn":
            numbers["factor"] = self.factor or longest / original
            numbers["magnitude"] = self._magnitude(numbers["factor"])
        if lacking := [name for name, value in numbers.items() if value is None and name not in OPTIONAL]:
            raise ValueError(f"rope type {kind!r} lacks its numbers: {', '.join(lacking)}")
        numbers = {name: value for name, value in numbers.items() if value is not None}
        return RopeScaling(kind, original_length=longest if kind in ("dynamic", "linear") else original, **numbers)

    def _magnitude(self, factor: float) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_magnitude(factor, self.mscale) / yarn_magnitude(factor, self.mscale_all_dim)
        return yarn_magnitude(factor)


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def rope_keys(base: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """The keys of `rope_parameters`."""
    if scaling is None:
        return {"rope_type": "default", "rope_theta": base}
    found = {theirs: getattr(scaling, ours) for theirs, ours in NUMBERS[scaling.kind].items()}
    if scaling.kind in ("llama3", "yarn"):
        found["original_max_position_embeddings"] = scaling.original_length
    if scaling.kind == "yarn":
        found["attention_factor"] = scaling.magnitude
    if scaling.sharpness:
        found["mscale_all_dim"] = scaling.sharpness
    return {"rope_type": scaling.kind, "rope_theta": base} | found
