"""DPAL's network (ICLR 2020 submission), model `dpal-cnn`.

It is an auto-encoder of one convolution with tied weights, and a classifier of its code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import grad

from dpdist.models.zoo import activation_layer


class DPALNetwork(nn.Module):
    """head(last(code(x + input_noise))), x the center of inputs (B, C, H, W) in [-1, 1].

    input_noise (C, side, side), hidden_noise (filters, H', W'): drawn once for a whole training,
    the same for every record; 0 before it. They are saved with the weights.
    """

    input_noise: Tensor
    hidden_noise: Tensor

    def __init__(
        self,
        encoder: nn.Conv2d,
        rest: nn.Module,
        head: nn.Linear,
        input_shape: Sequence[int],
        code_shape: Sequence[int],
    ) -> None:
        super().__init__()
        self.encoder, self.rest, self.head = encoder, rest, head
        self.register_buffer("input_noise", torch.zeros(*input_shape))
        self.register_buffer("hidden_noise", torch.zeros(*code_shape))

    def center(self, x: Tensor) -> Tensor:
        """Return the center of images (B, C, H, W), of input_noise's size: what is read."""
        height, width = self.input_noise.shape[1:]
        top, left = (x.shape[2] - height) // 2, (x.shape[3] - width) // 2
        return x[:, :, top : top + height, left : left + width]

    def encode(self, noisy: Tensor) -> Tensor:
        """Return h-bar (B, filters, H', W') of noisy inputs."""
        result: Tensor = self.encoder(noisy) + self.hidden_noise
        return result

    def decode(self, code: Tensor) -> Tensor:
        """Return theta_1 h-bar, the reconstruction of the input (B, C, H, W)."""
        shape = (len(code), *self.input_noise.shape)
        stride, padding = self.encoder.stride, self.encoder.padding
        result: Tensor = grad.conv2d_input(shape, self.encoder.weight, code, stride, padding)
        return result

    def last_hidden(self, code: Tensor) -> Tensor:
        """Return h_pi, the last hidden layer: (B, dense) in [-1, 1]."""
        result: Tensor = self.rest(code)
        return result

    def logits(self, noisy: Tensor, code_noise: Tensor | float = 0.0) -> Tensor:
        """Return logits of noisy inputs. code_noise: additional noise on the code."""
        result: Tensor = self.head(self.last_hidden(self.encode(noisy) + code_noise))
        return result

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.center(x) + self.input_noise)


def dpal_cnn(
    input_shape: Sequence[int],
    classes: int,
    filters: Sequence[int] = (32, 64),
    kernels: Sequence[int] = (5, 5),
    dense: int = 256,
    activation: str = "relu",
    side: int = 0,
) -> nn.Module:
    """Return DPAL's network, with layer normalization instead of batch normalization.

    The defaults are that of MNIST. The encoder has no bias and the last layer none either, as in
    the paper's equations. Each convolution has stride 2.

    Args:
        input_shape: (channels, height, width) of the inputs.
        classes: Number of logits.
        filters: Number of filters of each convolution, two or more; the first is the encoder.
        dense: Size of the last hidden layer.
        activation: Name of the activation after each convolution.
        kernels: Side of each kernel. CIFAR-10's network has 4, 5, 5.
        side: Side of the center of an image that the network reads; 0 is all of it. The paper's
            CIFAR-10 has 28.
    """
    if len(filters) < 2 or len(kernels) != len(filters) or min(kernels) < 1:
        raise ValueError("two or more numbers of filters, and a kernel for each, are needed")
    if not 0 <= side <= min(input_shape[1:]):
        raise ValueError(f"side: must be 0 to {min(input_shape[1:])}, the images', got {side}")
    seen = [input_shape[0], *((side, side) if side else input_shape[1:])]
    shape, layers, encoder = list(seen), list[nn.Module](), None
    for size, width in zip(kernels, filters, strict=True):
        padding = (size - 1) // 2
        convolution = nn.Conv2d(shape[0], width, size, 2, padding, bias=encoder is not None)
        shape = [width, *((length + 2 * padding - size) // 2 + 1 for length in shape[1:])]
        if min(shape) < 1:
            raise ValueError(f"kernels: images of {seen[1:]} are too small for {list(kernels)}")
        if encoder is None:
            encoder, code = convolution, shape
        else:
            layers.append(convolution)
        layers += [nn.LayerNorm(shape), activation_layer(activation)]
    rest = nn.Sequential(*layers, nn.Flatten(), nn.Linear(math.prod(shape), dense), nn.Tanh())
    assert encoder is not None
    return DPALNetwork(encoder, rest, nn.Linear(dense, classes, bias=False), seen, code)
