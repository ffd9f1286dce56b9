"""What a user may choose of a random view of a picture. Frozen, validated, free of torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

Probability = Annotated[float, Field(ge=0, le=1)]
Strength = Annotated[float, Field(ge=0, le=1)]


class Settings(BaseModel):
    """Settings that do not change, know no other names, and take no value out of range."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ViewSettings(Settings):
    """How a random view of a picture is made"""

    crop_scale: tuple[float, float] = Field((0.2, 1.0), description="share of the picture's area that a crop takes")
    crop_ratio: tuple[float, float] = Field((3 / 4, 4 / 3), description="width : height of a crop")
    flip_probability: Probability = Field(0.5, description="chance of a left-right flip")
    jitter_probability: Probability = Field(0.8, description="chance that the colours are changed at all")
    brightness: Strength = Field(0.4, description="colour jitter: largest change of brightness")
    contrast: Strength = Field(0.4, description="colour jitter: largest change of contrast")
    saturation: Strength = Field(0.4, description="colour jitter: largest change of saturation")
    hue: Annotated[float, Field(ge=0, le=0.5)] = Field(0.1, description="colour jitter: largest turn of the hue circle")
    grayscale_probability: Probability = Field(0.2, description="chance that the colours are dropped")
    grayscale_first: bool = Field(False, description="drop colours before the jitter (v1) instead of after it (v2)")
    blur_probability: Probability = Field(0.5, description="chance of a Gaussian blur")
    blur_sigma: tuple[float, float] = Field((0.1, 2.0), description="standard deviation of the blur, in pixels")
    solarize_probability: Probability = Field(0.0, description="chance that bright pixels are inverted")
    gain: Strength = Field(
        0.0, description="largest change of each channel's intensity by itself, for pictures that are not photographs"
    )
    noise: Strength = Field(0.0, description="standard deviation of noise on every value, as a share of the full range")

    @model_validator(mode="after")
    def _ranges(self) -> ViewSettings:
        for name in ("crop_scale", "crop_ratio", "blur_sigma"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise ValueError(f"{name} must be two numbers 0 < low ≤ high, not {low:g} {high:g}")
        if self.crop_scale[1] > 1:
            raise ValueError(f"crop_scale is a share of the area: at most 1, not {self.crop_scale[1]:g}")
        return self
