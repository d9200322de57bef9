from __future__ import annotations

import mpmath as mp
import numpy as np
import pytest

from dpdist.certification import noise as radii
from dpdist.core import binomial


@pytest.mark.parametrize("p", [0.5000001, 0.6, 0.999, 1 - 1e-9, 1 - 2**-53])
def test_gaussian_radius_is_never_rounded_up(p: float) -> None:
    mp.mp.dps = 40
    for sigma in (0.12, 0.5):
        got = float(radii.gaussian_l2_radius(p, sigma))
        exact = mp.mpf(sigma) * mp.sqrt(2) * mp.erfinv(2 * mp.mpf(p) - 1)
        assert got <= exact
        assert got == pytest.approx(float(exact), rel=1e-8)
    assert list(radii.gaussian_l2_radius([0.0, 0.3, 0.5], 0.5)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("bad", [(-0.1, 0.5), (1.1, 0.5), (0.9, 0.0), (0.9, -1.0), (np.nan, 1.0)])
def test_bad_input_is_refused(bad: tuple[float, float]) -> None:
    with pytest.raises(ValueError):
        radii.gaussian_l2_radius(*bad)


def test_printing_never_enlarges() -> None:
    assert radii.format_radius(0.95299999) == "0.952"
    for radius in (0.953, 0.3, 0.1, 2.5):  # 0.3 was printed as 0.299
        assert radii.format_radius(radius) == f"{radius:.3f}"
        assert float(radii.format_radius(np.nextafter(radius, 0))) < radius
    assert radii.format_radius(0.0) == "0.000"


# The largest radii of two per-image tables published with Cohen et al. (CIFAR-10, ResNet-110, three
# significant digits, n = 100,000). Up there neighboring counts differ in the printed digits, so
# the numbers tell which alpha was used: 0.01 in the first table, 0.001 in the second.
PUBLISHED = {
    (0.25, 0.01): "0.863 0.866 0.873 0.88 0.889 0.894 0.906 0.92 0.929 0.941 0.955 0.978",
    (0.12, 0.001): "0.417 0.419 0.421 0.423 0.425 0.428 0.431 0.434 0.438 0.443 0.449 0.457",
}


@pytest.mark.parametrize(("sigma", "alpha"), list(PUBLISHED))
def test_published_radii_are_those_of_whole_counts(sigma: float, alpha: float) -> None:
    printed = PUBLISHED[(sigma, alpha)].split()
    hits = np.arange(90_000, 100_001)
    draws = 100_000

    def of_counts(level: float) -> set[str]:
        values = radii.gaussian_l2_radius(binomial.clopper_pearson_lower(hits, draws, level), sigma)
        return {f"{value:.3}" for value in np.asarray(values)}

    assert set(printed) <= of_counts(alpha)
    other = {0.01: 0.001, 0.001: 0.01}[alpha]
    assert not set(printed) <= of_counts(other)
