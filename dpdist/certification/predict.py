"""Label and certify single inputs in this process, with fresh secret noise.

The noise is never reused or stored: an adversary that knew it beforehand could choose the input to
fit it.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dpdist.certification.certificate import Certificate
from dpdist.randomness.keys import StreamKeys

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dpdist.certification.worker import Progress

# For one input, choosing among forms and trying batches of a thousand took longer than its draws.
_FORM, _BATCH = "eager", 250


class Predictor:
    """The randomized classifier of a model: ``certify`` and ``predict`` for one input at a time.

    Raises UserError for a model that is not random where ``settings`` says, ValueError for one that
    cannot be executed so.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Certificate,
        classes: int,
        input_shape: tuple[int, ...],
    ) -> None:
        from dpdist.certification.worker import Assignment, Worker, probe

        seed = secrets.token_hex(32)
        batch = min(_BATCH, settings.executed_batch_size(math.prod(input_shape)))
        quick = {"backend": settings.backend or _FORM, "batch": batch}
        settings = settings.with_seed(seed).model_copy(update=quick)
        place = settings.build_sampler(model, input_shape)
        source = StreamKeys("predict", seed, "", "", settings.noise, place.sigma)
        gray = np.full((1, *input_shape), 0.5, dtype=np.float32)
        # The rows that are executed again in a whole job are those of the first input.
        assignment = Assignment(model, settings, place, source, classes, input_shape, gray, last=1)
        self._worker = Worker(replace(assignment, spec=probe(assignment)))
        self._asked = 0

    def certify(self, x: Tensor, progress: Progress = lambda done, units, rate: None) -> Any:
        """The certificate of one input: float32 of the input shape, in [0, 1]."""
        return self._worker.certify(x.numpy(), self._next(), progress)

    def predict(self, x: Tensor) -> int:
        """The classifier's label from n draws, or -1 when two classes are too close.

        Expected scores: the class whose bounds exclude all others. Votes: wrong with probability at
        most alpha, by PREDICT (``dpdist.certification.cohen``).
        """
        return self._worker.predict(x, self._next())

    def _next(self) -> int:
        self._asked += 1  # another index is another random unit
        return self._asked


def to_model_input(
    values: np.ndarray, input_shape: tuple[int, ...], *, bounded: bool = True
) -> Tensor:
    """Raw pixels (uint8) or numbers as the float32 input the model takes.

    bounded: whether numbers of images must lie in [0, 1]; False where no range was declared.

    Raises ValueError for complex numbers, truth values or text, when the shape is another one, or
    for an image with numbers outside [0, 1].
    """
    if values.shape != input_shape:
        raise ValueError(f"shape {values.shape}, the model takes {input_shape}")
    if values.dtype.kind not in "uif":
        raise ValueError(f"holds {values.dtype}, the model takes real numbers")
    with np.errstate(over="ignore"):  # refused below
        array = np.ascontiguousarray(values).astype(np.float32)
    if values.dtype == np.uint8:
        array /= np.float32(255)
    if not np.isfinite(array).all():
        raise ValueError("contains numbers that are not finite as float32")
    if bounded and array.ndim == 3 and not 0 <= float(array.min()) <= float(array.max()) <= 1:
        raise ValueError("pixels must lie in [0, 1] (or be uint8)")
    import torch  # only now: what cannot be used is refused at once

    return torch.from_numpy(array)
