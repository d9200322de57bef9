"""What a recipe may say about the method: one frozen section for each published system."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DPSGD(_Options):
    """Plain DP-SGD (Abadi et al. 2016).

    gradient_scale K multiplies each gradient before the clip: the control that separates DPlis'
    smoothing from the larger gradients of its summed draws.
    """

    name: Literal["dp-sgd"] = "dp-sgd"
    gradient_scale: Annotated[float, Field(gt=0)] = 1.0


class DPlis(_Options):
    """DP-SGD on a parameter-smoothed loss (DPlis, PoPETs 2021, Algorithm 2).

    Smoothing noise per weight: radius * (learning_rate / batch_size) * noise_multiplier *
    clip_norm. aggregate "sum" is the authors' released code: the draws are summed, not averaged,
    before the clip.
    """

    name: Literal["dplis"] = "dplis"
    radius: Annotated[float, Field(gt=0)] = 10.0
    draws: Annotated[int, Field(ge=1)] = 10
    aggregate: Literal["mean", "sum"] = "mean"


class InputNoise(_Options):
    """Each record's gradient averaged over noisy copies of its input before the clip
    (augmentation)."""

    name: Literal["input-noise"] = "input-noise"
    sigma: Annotated[float, Field(gt=0)]
    draws: Annotated[int, Field(ge=1)] = 4


Method = Annotated[DPSGD | DPlis | InputNoise, Field(discriminator="name")]
