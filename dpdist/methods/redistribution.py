"""The options of heterogeneous noise (HGM, IJCAI 2019): what its shares are computed from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dpdist.base.conditions import OnlyWith
from dpdist.base.fields import (
    Count,
    FilePath,
    Number,
    Positive,
    PositiveNoise,
    Section,
    Share,
    Text,
)


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

    conditions = (
        OnlyWith(
            ("data", "root", "classes"), "with source: public", lambda it: it.source == "public"
        ),
        OnlyWith(
            ("steps", "max_records"),
            "with source: public and private",
            lambda it: it.source != "paid",
        ),
        OnlyWith(
            ("noise_multiplier", "clip_norm", "sample_rate"),
            "with source: paid",
            lambda it: it.source == "paid",
        ),
    )

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
