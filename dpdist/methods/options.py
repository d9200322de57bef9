"""What a recipe may say about the method: one frozen section for each published system."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from dpdist.fields import (
    Count,
    FilePath,
    NotNegative,
    Number,
    Positive,
    PositiveNoise,
    PositiveOrZero,
    Section,
    Share,
    Text,
)
from dpdist.privacy.phases import Phase
from dpdist.privacy.releases import GaussianReleases, NonPrivate

Draws = Annotated[int, Number, Field(ge=1, le=10_000)]


class _Options(Section):
    @property
    def besides(self) -> tuple[Phase, ...]:
        """What the method itself reads from the private records, beside the steps of training.

        Whoever states or searches the cost of a training takes it from here.
        """
        return ()


class DPSGD(_Options):
    """Plain DP-SGD (Abadi et al. 2016).

    gradient_scale K multiplies each gradient before the clip: the control that separates DPlis'
    smoothing from the larger gradients of its summed draws.
    """

    name: Literal["dp-sgd"] = "dp-sgd"
    gradient_scale: Positive = 1.0


class DPlis(_Options):
    """DP-SGD on a parameter-smoothed loss (DPlis, PoPETs 2021, Algorithm 2).

    Smoothing noise per weight: radius * (learning_rate / batch_size) * noise_multiplier *
    clip_norm. aggregate "sum" is the authors' released code: the draws are summed, not averaged,
    before the clip. per_example: a draw of its own for every record, as the paper writes it; False
    shares the draws over the batch, as the authors' code does. sigma: each draw has input noise
    too, as method input-noise; not in the paper.
    """

    name: Literal["dplis"] = "dplis"
    radius: Positive = 10.0
    draws: Draws = 10
    aggregate: Literal["mean", "sum"] = "mean"
    per_example: bool = False
    sigma: PositiveOrZero = 0.0


class InputNoise(_Options):
    """Each record's gradient averaged over noisy copies of its input before the clip
    (augmentation).

    consistency: weight of the term that lets a record's copies agree (Jeong & Shin, NeurIPS 2020).
    """

    name: Literal["input-noise"] = "input-noise"
    sigma: Positive
    draws: Draws = 4
    consistency: PositiveOrZero = 0.0

    @model_validator(mode="after")
    def _copies_to_agree(self) -> InputNoise:
        if self.consistency and self.draws < 2:
            raise ValueError("consistency is between a record's copies: give draws >= 2")
        return self


class Redistribution(Section):
    """Where the shares r of heterogeneous noise come from (HGM, IJCAI 2019, Equation 7).

    r_k is the mean over records of |dL/dh_k|^beta, normalised, and at least `floor` of the uniform
    share. source:

    * "public": records of the public data set `data` (under `root`, with `classes` classes; images
      are resized to the model's), and the network trained on them for `steps` steps;
    * "paid": the private records, in one clipped and noised sum that the plan pays for; the network
      at its initial weights;
    * "private": the private records, for nothing, as the paper does it, and the network trained on
      them for `steps` steps. Needs paper_faithful: true; nothing is then proved.
    """

    source: Literal["public", "paid", "private"] = "public"
    data: Text = "digits"
    root: FilePath | None = None
    classes: Annotated[int, Number, Field(ge=1, le=100_000)] = 10
    steps: Annotated[int, Number, Field(ge=0, le=1_000_000)] = 200
    beta: Positive = 1.0
    floor: Share = 0.1
    max_records: Count = 2000
    noise_multiplier: PositiveNoise = 20.0
    clip_norm: Positive = 1.0
    sample_rate: Share = 1.0


class HiddenNoiseMethod(_Options):
    """Gaussian noise behind the first layer, in training and at every prediction.

    Its scale sigma_r is `sigma`, or what `mechanism` needs for (epsilon_r, delta_r) against changes
    of the input of size `attack_size` in `norm`, for a first layer of L2 norm `sensitivity`; the
    layer is scaled back to that norm after every update. These are parameters of robustness and
    say nothing about training records. draws: independent noises per record and step, averaged
    before the clip. paper_faithful: one noise for the whole training, as Algorithm 1 of Secure-SGD
    has it, instead of a fresh one for every record and step.
    """

    name: str
    sigma: Positive | None = None
    epsilon_r: Positive = 1.0
    delta_r: Annotated[float, Number, Field(ge=1e-30, lt=0.5)] = 0.05
    attack_size: Positive = 0.1
    norm: Literal["l2", "linf"] = "l2"
    mechanism: Literal["classical", "analytic", "extended"] = "extended"
    sensitivity: Positive = 1.0
    redistribution: Redistribution | None = None
    draws: Draws = 1
    paper_faithful: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> HiddenNoiseMethod:
        if self.mechanism == "classical" and self.epsilon_r > 1 and self.sigma is None:
            raise ValueError("the classical mechanism needs epsilon_r <= 1; use extended")
        unpaid = self.redistribution is not None and self.redistribution.source == "private"
        if unpaid and not self.paper_faithful:
            raise ValueError(
                "redistribution.source private reads private records for nothing, which voids the "
                "guarantee: use public or paid, or set paper_faithful: true to see that"
            )
        return self

    @property
    def besides(self) -> tuple[Phase, ...]:
        """What the shares r cost: nothing, one noised sum, or everything."""
        section = self.redistribution
        if section is None or section.source == "public":
            return ()
        if section.source == "paid":
            return (GaussianReleases(section.noise_multiplier, 1, section.sample_rate),)
        return (NonPrivate("the redistribution r is computed from private records"),)


class PixelDP(HiddenNoiseMethod):
    """Certified robustness by equal noise behind the first layer (Lecuyer et al., IEEE S&P 2019).

    Trained without gradient privacy: nothing is proved about training records.
    """

    name: Literal["pixeldp"] = "pixeldp"
    mechanism: Literal["classical", "analytic", "extended"] = "classical"
    redistribution: None = None


class HGMPixelDP(HiddenNoiseMethod):
    """PixelDP with heterogeneous noise and any epsilon_r (HGM, IJCAI 2019). Not private either."""

    name: Literal["hgm-pixeldp"] = "hgm-pixeldp"
    redistribution: Redistribution = Redistribution()


class SecureSGD(HiddenNoiseMethod):
    """DP-SGD on a network with noise behind its first layer (HGM, IJCAI 2019, Algorithm 1).

    A composition: DP-SGD (clip, noise, Poisson sampling), HGM's noise behind the first layer,
    PixelDP's certificate at prediction. Privacy is that of DP-SGD and of what r cost.
    redistribution: null gives every component the same noise; with mechanism: analytic that is the
    paper's AGM variant.
    """

    name: Literal["secure-sgd"] = "secure-sgd"
    redistribution: Redistribution | None = Redistribution()


class TransDenoiser(_Options):
    """A denoiser before a frozen public classifier, by squared error (TransDenoiser, ICLR 2022).

    Needs model.classifier. sigma: input noise; draws: noisy copies of each record per step,
    averaged before the clip. variant:

    * "separate-dp": DP-SGD; what privacy says is proved.
    * "no-dp": needs privacy.noise_multiplier: 0 and clipping: none.
    * "full": Algorithm 1, a reference that is NOT private: it adds noise itself, xi_up (or less)
      clip norms, so privacy.noise_multiplier must be 0, and one worker does it. xi_low, xi_up:
      bounds of the split (the paper gives no xi_low); credit_steps: multiply S_min by the number
      of steps, as the paper does; thin: take the smallest value of a thin decomposition for S_min;
      iterations: Lanczos products per step where S_min is not known to be 0.
    """

    name: Literal["transdenoiser"] = "transdenoiser"
    variant: Literal["separate-dp", "no-dp", "full"] = "separate-dp"
    sigma: Positive = 0.25
    draws: Draws = 1
    xi_low: NotNegative = 1.0
    xi_up: Positive = 2.0
    credit_steps: bool = True
    thin: bool = False
    iterations: Annotated[int, Number, Field(ge=1, le=10_000)] = 20

    @model_validator(mode="after")
    def _consistent(self) -> TransDenoiser:
        if self.xi_low > self.xi_up:
            raise ValueError("xi_low must be <= xi_up")
        if self.variant == "full" and self.draws != 1:
            raise ValueError("variant full has one draw for each record: draws: 1")
        return self

    @property
    def besides(self) -> tuple[Phase, ...]:
        """What the split between transformed and added noise costs: all, in variant full."""
        if self.variant != "full":
            return ()
        return (
            NonPrivate(
                "TransDenoiser's Algorithm 1 chooses the added noise from the private records "
                "(sign of the remainder, S_min)"
            ),
        )


Method = Annotated[
    DPSGD | DPlis | InputNoise | PixelDP | HGMPixelDP | SecureSGD | TransDenoiser,
    Field(discriminator="name"),
]
