"""A shared noise bank: one stream of noise for all inputs, through a dense first layer only once.

That layer is affine, so layer(x + noise) = layer(noise) + layer(x) - layer(0): what it makes
of the noise is kept and only shifted for each input. Each certificate is as valid as with noise of
its own; but the errors of different inputs can coincide, so statements about a whole set need
Bonferroni's inequality.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from dpdist.certification.classifier import ExecutedClassifier
from dpdist.certification.noises import Noise
from dpdist.certification.sampling import Inspector, class_counts
from dpdist.certification.streams import Aes, Stream
from dpdist.models import split_first
from dpdist.randomness.units import UnitSource

# Blocks of one piece of work at fixed n: they are kept while all inputs of a chunk pass.
BLOCKS_PER_PIECE = 8
_CACHE_BYTES = 512 * 2**20


def split_first_layer(model: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    """(first, rest) with rest(first(x)) = model(x) when the model begins with a dense layer.

    None otherwise. A convolution fused with what follows it runs faster than anything split (76,500
    against 48,000 draws/s for the TF-Privacy tutorial's CNN), so it is left whole.
    """
    split = split_first(model)
    if split is None or not isinstance(split.layer, nn.Linear):
        return None
    return split.first.eval(), split.rest.eval()


class BankSampler:
    """As ``Sampler``, with the noise named without the input and kept behind the first layer.

    evict: drop kept blocks for newer ones (work that passes over the blocks once); otherwise the
    first blocks stay (sequential tests, which all begin with them). inspect: set later, sees each
    block that was counted, as behind the first layer.
    """

    def __init__(
        self,
        first: nn.Module,
        rest: nn.Module,
        form: str,
        noise: Noise,
        units: UnitSource,
        classes: int,
        shapes: list[tuple[int, ...]],
        *,
        evict: bool,
        stream: Stream | None = None,
    ) -> None:
        self._first, self._stream = first, stream or Aes()
        self.inspect: Inspector | None = None
        self._shape, device = shapes[0][1:], self._stream.device
        with torch.inference_mode():
            self._zero = first(torch.zeros(1, *self._shape, device=device))
        hidden = tuple(self._zero.shape[1:])
        behind = [(rows, *hidden) for rows, *_ in shapes]
        self._classify = ExecutedClassifier(rest, form, behind, device)
        self._noise = noise
        self._units = units
        self._classes = classes
        self._evict = evict
        self._kept: dict[bytes, Tensor] = {}
        self._kept_bytes = 0

    def histogram(
        self, x: Tensor, index: int, stage: str, block: int, rows: int, draws: int
    ) -> np.ndarray:
        """int64 (classes,): classes of the first ``draws`` of the block's ``rows`` noisy copies."""
        with torch.inference_mode():
            shift = self._first(x[None]) - self._zero
            noisy = self._hidden(self._units.key(None, stage, block), rows) + shift
        logits = self.logits(noisy)
        if self.inspect is not None:
            self.inspect(index, stage, block, noisy, logits, draws)
        return class_counts(logits[:draws], self._classes).cpu().numpy()

    def classes_of(self, noise: Tensor, inputs: Tensor) -> Tensor:
        """What this form says about inputs + noise, row by row: for the check against the model."""
        return self._classify(self.behind_first(noise, inputs))

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, classes), of what the first layer made: (B, *hidden)."""
        return self._classify.logits(hidden)

    def behind_first(self, noise: Tensor, inputs: Tensor) -> Tensor:
        """What the first layer makes of inputs + noise, (B, ...) each: (B, *hidden)."""
        with torch.inference_mode():
            return self._first(noise) + (self._first(inputs) - self._zero)

    def _hidden(self, key: bytes, rows: int) -> Tensor:
        if key in self._kept:
            return self._kept[key]
        noise = torch.empty(rows, *self._shape, device=self._stream.device)
        hidden = self._first(self._stream.fill(self._noise, key, noise))
        if self._kept_bytes + hidden.nbytes > _CACHE_BYTES and self._evict:
            self._kept.clear()
            self._kept_bytes = 0
        if self._kept_bytes + hidden.nbytes <= _CACHE_BYTES:
            self._kept[key] = hidden
            self._kept_bytes += hidden.nbytes
        return hidden
