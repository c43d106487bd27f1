"""The rotary positions of Hugging Face's config.json."""

import math
from typing import Any

import pydantic
from pydantic import PositiveFloat, PositiveInt

from models.decoder import RopeScaling


class Rope(pydantic.BaseModel):
    """`rope_parameters`, or `rope_scaling` before transformers 5."""

    model_config = pydantic.ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    rope_type: str = "default"
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
    partial_rotary_factor: float = 1.0

    @pydantic.model_validator(mode="before")
    @classmethod
    def _by_its_older_name(cls, given: Any) -> Any:
        if isinstance(given, dict) and "type" in given:
            return {"rope_type": given["type"]} | {key: value for key, value in given.items() if key != "type"}
        return given

    def scaling(self, longest: int, original: int | None) -> RopeScaling | None:
        """
        Args:
          longest, original: the configuration's max_position_embeddings and original_max_position_embeddings.

        Raises:
          ValueError: another kind, or one without its numbers.
        """
        kind = self.rope_type
        if kind == "default":
            return None
        if kind not in ("linear", "dynamic", "llama3", "yarn"):
            raise ValueError(f"the decoder does not have this checkpoint's rope type {kind!r}")
        original = original or self.original_max_position_embeddings or longest
        factor = self.factor or (longest / original if kind == "yarn" else None)
        given = {"factor": factor}
        if kind == "llama3":
            given |= {"low": self.low_freq_factor, "high": self.high_freq_factor}
        if lacking := [name for name, value in given.items() if value is None]:
            raise ValueError(f"rope type {kind!r} lacks its numbers: {', '.join(lacking)}")
        if kind == "yarn":
            given |= {"slow": self.beta_slow or 1.0, "fast": self.beta_fast or 32.0}
        numbers: dict[str, Any] = {name: float(value) for name, value in given.items() if value is not None}
        length = longest if kind in ("dynamic", "linear") else original
        magnitude = self._magnitude(numbers["factor"]) if kind == "yarn" else 1.0
        return RopeScaling(kind, original_length=length, whole=self.truncate, magnitude=magnitude, **numbers)

    def _magnitude(self, factor: float) -> float:
        if self.attention_factor is not None:
            return float(self.attention_factor)
        if self.mscale and self.mscale_all_dim:
            return yarn_magnitude(factor, self.mscale) / yarn_magnitude(factor, self.mscale_all_dim)
        return yarn_magnitude(factor)


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
