"""Label and certificate of single inputs, in this process, with fresh secret noise.

The noise is never reused or stored: whoever knew it beforehand could choose the input to fit it.
"""

from __future__ import annotations

import secrets
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from dpdist.certification.bounds import two_sided_p_value
from dpdist.certification.score_settings import ScoreSettings
from dpdist.certification.scores import ScoreVerdict, sensitivity
from dpdist.certification.settings import CertifySettings
from dpdist.certification.units import UnitSource
from dpdist.certification.verdict import ABSTAIN, Verdict
from dpdist.certification.worker import Assignment, Piece, Worker, probe, procedure
from dpdist.models import hidden_noise, require_split


class Predictor:
    """The randomised classifier of a model: ``certify`` and ``label`` for one input at a time.

    settings: smoothing of the inputs, or expected scores under the model's own hidden noise. Raises
    ValueError for a model that cannot be executed so.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: CertifySettings | ScoreSettings,
        classes: int,
        input_shape: tuple[int, ...],
    ) -> None:
        seed = secrets.token_hex(32)
        if isinstance(settings, ScoreSettings):
            settings = replace(settings, seed=seed)
            noise = hidden_noise(model)
            if noise is None:
                raise ValueError("it has no noise of its own")
            norms, sigma = sensitivity(require_split(model), noise, input_shape), noise.scale
        else:
            settings = replace(settings, seed=seed, noise_bank=False)
            norms, sigma = None, settings.sigma
        source = UnitSource("predict", seed, "", "", settings.noise, sigma)
        grey = np.full((1, *input_shape), 0.5, dtype=np.float32)
        assignment = Assignment(model, settings, source, classes, input_shape, grey, norms=norms)
        assignment = replace(assignment, spec=probe(assignment))
        assert assignment.spec is not None
        self._settings = settings
        self._steps = procedure(assignment)
        self._worker = Worker(assignment)
        self._asked = 0

    def certify(self, x: Tensor) -> Verdict | ScoreVerdict:
        """The certificate of one input: float32 of the input shape, in [0, 1]."""
        piece = Piece(self._next(), 0, self._steps.units, x.numpy())
        (row,) = self._worker([piece])
        return self._steps.verdict([row["partial"]])

    def label(self, x: Tensor) -> int:
        """The classifier's label from n draws, or -1 when two classes are too close.

        Expected scores: the class whose bounds exclude all others. Votes: wrong with probability at
        most alpha, by a two-sided test of the two largest counts.
        Source: Cohen et al., ICML 2019, PREDICT and Proposition 1.
        """
        if isinstance(self._settings, ScoreSettings):
            return self.certify(x).prediction
        histogram = self._worker.histogram(x, self._next(), self._settings.n)
        return label_from_counts(histogram, self._settings.alpha)

    def _next(self) -> int:
        self._asked += 1  # another index is another random unit
        return self._asked


def label_from_counts(histogram: np.ndarray, alpha: float) -> int:
    """The most frequent class, or -1 unless it beats the second at two-sided level alpha."""
    order = np.argsort(-np.asarray(histogram), kind="stable")
    first = int(histogram[order[0]])
    second = int(histogram[order[1]]) if len(order) > 1 else 0
    return int(order[0]) if two_sided_p_value(first, first + second) <= alpha else ABSTAIN


def as_input(values: np.ndarray, input_shape: tuple[int, ...]) -> Tensor:
    """Raw pixels (uint8) or numbers as the float32 input the model takes.

    Raises ValueError for complex numbers, truth values or text, when the shape is another one, or
    for an image with numbers outside [0, 1].
    """
    if values.shape != input_shape:
        raise ValueError(f"shape {values.shape}, the model takes {input_shape}")
    if values.dtype.kind not in "uif":
        raise ValueError(f"holds {values.dtype}, the model takes real numbers")
    array = np.ascontiguousarray(values)
    if array.dtype == np.uint8:
        array = array.astype(np.float32) / 255
    tensor = torch.from_numpy(array.astype(np.float32))
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError("contains numbers that are not finite")
    if tensor.dim() == 3 and not 0 <= float(tensor.min()) <= float(tensor.max()) <= 1:
        raise ValueError("pixels must lie in [0, 1] (or be uint8)")
    return tensor
