"""Label and certify single inputs in this process, with fresh secret noise.

The noise is never reused or stored: an adversary that knew it in advance could choose the input
accordingly.
"""

from __future__ import annotations

import itertools
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

# For one input, to choose a backend and to test batches of a thousand takes longer than its draws.
_BACKEND, _BATCH = "eager", 250


class Predictor:
    """The randomized classifier of a model: ``certify`` and ``predict`` for one input at a time.

    Raises UserError for a model without the noise that ``settings`` needs, ValueError for one that
    cannot be executed in batches.
    """

    def __init__(
        self, model: nn.Module, settings: Certificate, classes: int, input_shape: tuple[int, ...]
    ) -> None:
        from dpdist.certification.worker import Assignment, Worker, probe

        seed = secrets.token_hex(32)
        batch = min(_BATCH, settings.executed_batch_size(math.prod(input_shape)))
        quick = {"backend": settings.backend or _BACKEND, "batch": batch}
        settings = settings.with_seed(seed).model_copy(update=quick)
        sampler = settings.build_sampler(model, input_shape)
        source = StreamKeys("predict", seed, "", "", settings.noise, sampler.sigma)
        gray = np.full((1, *input_shape), 0.5, dtype=np.float32)
        # As many rows are re-executed as in a job of one input, which is the first one here.
        assignment = Assignment(
            model, settings, sampler, source, classes, input_shape, gray, last=1
        )
        self._worker = Worker(replace(assignment, spec=probe(assignment)))
        self._inputs = itertools.count(1)  # the noise of each input has its index in the key

    def certify(self, x: Tensor, progress: Progress = lambda done, units, rate: None) -> Any:
        """Return the verdict on one input: float32 of the input shape, in [0, 1]."""
        return self._worker.certify(x.numpy(), next(self._inputs), progress)

    def predict(self, x: Tensor) -> int:
        """Return the classifier's label from n draws, or -1 if two classes are too close.

        Expected scores: the class whose bounds exclude all others. Votes: wrong with probability at
        most alpha, by PREDICT (``dpdist.certification.cohen``).
        """
        return self._worker.predict(x, next(self._inputs))


def to_model_input(
    values: np.ndarray, input_shape: tuple[int, ...], *, bounded: bool = True
) -> Tensor:
    """Return raw pixels (uint8) or numbers as the model's input: float32 of its shape.

    bounded: whether numbers of images must lie in [0, 1]; False if no range was declared.

    Raises ValueError for a wrong shape, for complex numbers, truth values or text, or for an image
    with numbers outside [0, 1].
    """
    if values.shape != input_shape:
        raise ValueError(f"shape {values.shape}, the model takes {input_shape}")
    if values.dtype.kind not in "uif":
        raise ValueError(f"must be real numbers, got {values.dtype}")
    with np.errstate(over="ignore"):  # refused below
        array = np.ascontiguousarray(values).astype(np.float32)
    if values.dtype == np.uint8:
        array /= np.float32(255)
    if not np.isfinite(array).all():
        raise ValueError("contains numbers that are not finite as float32")
    if bounded and array.ndim == 3 and not 0 <= float(array.min()) <= float(array.max()) <= 1:
        raise ValueError("pixels must lie in [0, 1] (or be uint8)")
    import torch  # late, so that wrong inputs are rejected at once

    return torch.from_numpy(array)
