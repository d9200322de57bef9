"""HGM: the same noise power, redistributed over the hidden components (Phan et al., IJCAI 2019).

Not private: it claims robustness only. How the shares come about: `dpdist.methods.hgm_shares`.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from dpdist.methods.hidden_noise import WithoutGradientPrivacy
from dpdist.methods.redistribution import Redistribution


class HGMPixelDP(WithoutGradientPrivacy):
    """PixelDP with heterogeneous noise and any epsilon_r (HGM, IJCAI 2019). Not private either."""

    name: Literal["hgm-pixeldp"] = "hgm-pixeldp"
    known_as: ClassVar[str] = "HGM-PixelDP"
    redistribution: Redistribution = Redistribution()
