"""Where the noise of canonical blocks comes from, and on which device it is made.

A stream fills a tensor with a noise, as a pure function of a unit's key and of the tensor's shape.
Which generator makes the numbers is part of the executed classifier: another one is other noise.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
from torch import Tensor

from dpdist.certification.noises import Noise
from dpdist.randomness import philox
from dpdist.randomness.units import RandomWords

CPU = torch.device("cpu")
# Places of Philox made at a time: those of a CPU stay in its cache. A fixed number, since vector
# instructions may end a piece otherwise than they go through its middle.
_PIECE, _PIECE_ON_CPU = 1 << 22, 1 << 14


class Stream(Protocol):
    """device: where the tensors are that it fills."""

    name: ClassVar[str]

    @property
    def device(self) -> torch.device: ...

    def fill(self, noise: Noise, key: bytes, out: Tensor) -> Tensor:
        """`out`, float32 and contiguous, filled with the noise of the key."""
        ...


class Aes:
    """AES-128 in counter mode, on the CPU; a tensor elsewhere is filled here and brought over."""

    name: ClassVar[str] = "aes"

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device
        self._words = RandomWords()

    def fill(self, noise: Noise, key: bytes, out: Tensor) -> Tensor:
        made = out if out.device.type == "cpu" else torch.empty(out.shape)
        size = out.numel() + out.numel() % 2  # Box-Muller takes words in pairs
        noise.draw(self._words.fill(key, size), made.numpy().reshape(-1))
        return out if made is out else out.copy_(made)


class Philox:
    """Philox4x32-10, on the device itself: no number crosses over."""

    name: ClassVar[str] = "philox"

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device
        philox.check(device)
        self._piece = _PIECE_ON_CPU if device.type == "cpu" else _PIECE

    def fill(self, noise: Noise, key: bytes, out: Tensor) -> Tensor:
        flat = out.view(-1)
        for start in range(0, len(flat), 4 * self._piece):
            part = flat[start : start + 4 * self._piece]
            size = -(-len(part) // 4)
            words = philox.words_on(key, start // 4, size, self.device)
            made = torch.cat([*noise.numbers(*words[:2]), *noise.numbers(*words[2:])])
            part.copy_(made[: len(part)])
        return out


STREAMS: dict[str, type[Aes] | type[Philox]] = {kind.name: kind for kind in (Aes, Philox)}


def usual(device: torch.device) -> str:
    """The generator where none is asked for: AES on CPUs, as ever, Philox where there is no AES."""
    return Aes.name if device.type == "cpu" else Philox.name
