"""The same thing done twice, held against itself."""

from __future__ import annotations

import numpy as np

from dpdist.audits.step_harness import reuses_noise


class Played:
    """Releases of noise; the last one repeats so many numbers of the first."""

    attempt = ""

    @property
    def step(self) -> Played:
        return self

    def __init__(self, common: int) -> None:
        self.noise = np.random.default_rng(0).standard_normal((8, 128))
        self.noise[-1, :common] = self.noise[0, :common]
        self.done = 0

    def run_step(self, coordinates: np.ndarray, step: int) -> np.ndarray:
        self.done += 1
        return self.noise[self.done - 1]


def test_a_number_in_common_is_chance_and_a_key_in_common_is_not():
    """On the noise's grid of 2^-24 of its scale, two of 1,024 are equal in 1 % of all audits."""
    assert not reuses_noise(Played(2))  # type: ignore[arg-type]
    assert reuses_noise(Played(128))  # type: ignore[arg-type]
