"""The average over views: what a model says of an image, of the image moved by a few pixels, and of
their mirror images.

With noise on the input it is a function of the noisy image like any other, so what certifies a
model certifies it. It costs as many passes a draw as it has views; where the description says
`denoised_shifts` it is views of what the denoiser shows, so that the denoiser runs once.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from dpdist.base.errors import UserError
from dpdist.base.views import shifts_within
from dpdist.models.spec import CLASSIFIER, DENOISER, ModelSpec


def check_views(spec: ModelSpec) -> None:
    """Raise UserError for inputs that have no such views."""
    shape, key = tuple(spec.input_shape), "shifts" if spec.shifts else "mirrored"
    if spec.averages and len(shape) != 3:
        raise UserError(f"model.{key}: needs images, got inputs of shape {shape}")
    if spec.shifts and spec.shifts >= min(shape[1:]):
        raise UserError(
            f"model.shifts: must be below the image's sides, got {spec.shifts} for {shape[1:]}"
        )


class ViewAverage(nn.Module):
    """Mean log-probability of each class over `shifts_within(reach)` of an image (B, C, H, W), and
    over each one's mirror image (mirrored), or (denoised) of what the network's denoiser makes of
    it.

    What leaves the image on one side enters on the other, so that the noise on a moved image has
    the law of noise on an image, and no edge without noise tells how far it was moved.
    """

    def __init__(
        self, network: nn.Module, reach: int, denoised: bool = False, mirrored: bool = False
    ) -> None:
        super().__init__()
        self.network, self._denoised = network, denoised
        self._shifts, self._mirrored = shifts_within(reach), mirrored

    def forward(self, x: Tensor) -> Tensor:
        network = self.network
        if self._denoised:
            x = network.get_submodule(DENOISER)(x)
            network = network.get_submodule(CLASSIFIER)
        total, views = network(x).log_softmax(1), 1
        for view in self._others(x):
            total, views = total + network(view).log_softmax(1), views + 1
        return total / views

    def _others(self, x: Tensor) -> Iterator[Tensor]:
        """The views but x itself, one at a time: a batch of them all would be many."""
        for shift in self._shifts[1:]:
            yield x.roll(shift, (2, 3))
        for shift in self._shifts if self._mirrored else []:
            yield x.roll(shift, (2, 3)).flip(3)
