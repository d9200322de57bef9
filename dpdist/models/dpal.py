"""The network of DPAL (ICLR 2020 submission): an auto-encoder of one convolution with tied weights,
and a classifier of its code."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import grad

from dpdist.models.activations import activation_layer


class DPALNetwork(nn.Module):
    """head(last(code(x + input_noise))), inputs (B, C, H, W) in [-1, 1].

    input_noise (C, H, W), hidden_noise (filters, H', W'): drawn once for a whole training, the same
    for every record; 0 before it. They are saved with the weights.
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

    def code(self, noisy: Tensor) -> Tensor:
        """h-bar (B, filters, H', W') of noisy inputs."""
        return self.encoder(noisy) + self.hidden_noise

    def decoded(self, code: Tensor) -> Tensor:
        """theta_1 h-bar: what the code says of its input, (B, C, H, W)."""
        shape = (len(code), *self.input_noise.shape)
        stride, padding = self.encoder.stride, self.encoder.padding
        return grad.conv2d_input(shape, self.encoder.weight, code, stride, padding)

    def last(self, code: Tensor) -> Tensor:
        """h_pi, the last hidden layer: (B, dense) in [-1, 1]."""
        return self.rest(code)

    def answer(self, noisy: Tensor, besides: Tensor | float = 0.0) -> Tensor:
        """Logits of inputs that have their noise. besides: more noise on the code."""
        return self.head(self.last(self.code(noisy) + besides))

    def forward(self, x: Tensor) -> Tensor:
        return self.answer(x + self.input_noise)


def dpal_cnn(
    input_shape: Sequence[int],
    classes: int,
    filters: Sequence[int] = (32, 64),
    kernel: int = 5,
    dense: int = 256,
    activation: str = "relu",
) -> nn.Module:
    """DPAL's MNIST network; its batch normalisation, which mixes records, is layer normalisation.

    The encoder has no bias and the last layer none either, as in the paper's equations.
    """
    if len(filters) != 2 or kernel % 2 == 0:
        raise ValueError("two numbers of filters and an odd kernel are needed")
    encoder = nn.Conv2d(input_shape[0], filters[0], kernel, 2, kernel // 2, bias=False)
    second = nn.Conv2d(filters[0], filters[1], kernel, 2, kernel // 2)
    halves = [math.ceil(side / 2) for side in input_shape[1:]]
    code = [filters[0], *halves]
    deeper = [filters[1], *(math.ceil(side / 2) for side in halves)]
    rest = nn.Sequential(
        nn.LayerNorm(code), activation_layer(activation), second,
        nn.LayerNorm(deeper), activation_layer(activation), nn.Flatten(),
        nn.Linear(math.prod(deeper), dense), nn.Tanh(),
    )  # fmt: skip
    return DPALNetwork(encoder, rest, nn.Linear(dense, classes, bias=False), input_shape, code)
