"""The average over shifts: what a model says of an image, and of the image moved by a few pixels.

With noise on the input it is a function of the noisy image like any other, so what certifies a
model certifies it. It costs as many passes a draw as it has shifts; where the description says
`denoised_shifts` it is what the denoiser shows that is moved, so that the denoiser runs once.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from dpdist.base.errors import UserError
from dpdist.base.shifts import shifts_within
from dpdist.models.spec import CLASSIFIER, DENOISER


def check_shifts(reach: int, input_shape: Sequence[int]) -> None:
    """Raise UserError for inputs that cannot be moved so far."""
    if len(input_shape) != 3:
        raise UserError(f"model.shifts: needs images, got inputs of shape {tuple(input_shape)}")
    if reach >= min(input_shape[1:]):
        raise UserError(
            f"model.shifts: must be below the image's sides, got {reach} for "
            f"{tuple(input_shape[1:])}"
        )


class ShiftAverage(nn.Module):
    """Mean log-probability of each class over `shifts_within(reach)` of an image (B, C, H, W), or
    (denoised) of what the network's denoiser makes of it.

    What leaves the image on one side enters on the other, so that the noise on a moved image has
    the law of noise on an image, and no edge without noise tells how far it was moved.
    """

    def __init__(self, network: nn.Module, reach: int, denoised: bool = False) -> None:
        super().__init__()
        self.network, self._denoised = network, denoised
        self._shifts = shifts_within(reach)

    def forward(self, x: Tensor) -> Tensor:
        network = self.network
        if self._denoised:
            x = network.get_submodule(DENOISER)(x)
            network = network.get_submodule(CLASSIFIER)
        total = network(x).log_softmax(1)
        for shift in self._shifts[1:]:
            total = total + network(x.roll(shift, (2, 3))).log_softmax(1)
        return total / len(self._shifts)
