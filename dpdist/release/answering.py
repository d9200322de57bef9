"""Answers of a released model: class and certified radius, or ABSTAIN, for one image at a time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dpdist.base.errors import UserError
from dpdist.certification.predict import Predictor, as_input

if TYPE_CHECKING:
    from dpdist.certification.certificate import Certificate
    from dpdist.release.reading import Release


@dataclass(frozen=True)
class Answer:
    """label: index of the class, -1 for ABSTAIN. name: of the class, None for ABSTAIN. radius: no
    change of the input below it in `norm` changes the answer of the smoothed classifier; wrong with
    probability at most `alpha`, over the noise drawn for this answer. sigma: of noise on the input;
    None where the model's own noise certifies."""

    label: int
    name: str | None
    radius: float
    norm: str
    sigma: float | None
    alpha: float

    @property
    def abstain(self) -> bool:
        return self.label == -1

    @property
    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"abstain": self.abstain}


class Answerer:
    """Answers by one certificate. The noise is drawn afresh for each call and told nobody. Not to
    be shared by threads."""

    def __init__(self, release: Release, settings: Certificate) -> None:
        self._release, self._settings = release, settings
        shape = release.spec.input_shape
        try:
            self._predictor = Predictor(release.model, settings, release.spec.classes, shape)
        except ValueError as error:
            raise UserError(f"{release.path}: the model cannot be certified: {error}") from error

    def __call__(self, image: np.ndarray) -> Answer:
        """image: of the model's input shape, uint8 or numbers in [0, 1]. Raises ValueError for
        anything else."""
        verdict = self._predictor.certify(as_input(image, self._release.spec.input_shape))
        label = int(verdict.prediction)
        settings = self._settings
        return Answer(
            label,
            None if label == -1 else self._release.about.classes[label],
            float(verdict.radius),
            getattr(settings, "norm", "l2"),
            settings.sigma,
            settings.alpha,
        )
