"""PixelDP: certified robustness from noise behind the first layer (Lecuyer et al., IEEE S&P 2019).

Not private: it claims robustness only.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from dpdist.methods.hidden_noise import WithoutGradientPrivacy


class PixelDP(WithoutGradientPrivacy):
    """Certified robustness by equal noise behind the first layer (Lecuyer et al., IEEE S&P 2019).

    Trained without gradient privacy: nothing is proved about training records.
    """

    name: Literal["pixeldp"] = "pixeldp"
    known_as: ClassVar[str] = "PixelDP"
    mechanism: Literal["classical", "analytic", "extended"] = "classical"
    redistribution: None = None
