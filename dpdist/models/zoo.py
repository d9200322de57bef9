"""Networks of the zoo, which `catalogue.py` names. Inputs (B, *input_shape) in [0, 1]; outputs
logits (B, classes).

No layer mixes examples (GroupNorm, never BatchNorm), so per-example gradients exist.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from dpdist.models.activations import activation_layer
from dpdist.models.denoiser import unet


def _flat_size(features: nn.Sequential, input_shape: Sequence[int]) -> int:
    """How many numbers leave convolutions and pools, by their settings: to run them where they have
    no memory loads torch's compiler, a second of processor time in every process. Raises ValueError
    for inputs that are too small for them."""
    width, sides = input_shape[0], list(input_shape[1:])
    for layer in features:
        if isinstance(layer, nn.Conv2d):
            width = layer.out_channels
        elif not isinstance(layer, nn.MaxPool2d):
            continue  # activations keep the shape
        settings = (_both(getattr(layer, n)) for n in ("kernel_size", "stride", "padding"))
        sides = [(x + 2 * p - k) // s + 1 for x, k, s, p in zip(sides, *settings, strict=True)]
        if min(sides) < 1:
            raise ValueError(f"inputs of shape {tuple(input_shape)} are too small for its layers")
    return width * math.prod(sides)


def _both(setting: Any) -> tuple[int, int]:
    """Of height and width."""
    return setting if isinstance(setting, tuple) else (setting, setting)


def linear(input_shape: Sequence[int], classes: int) -> nn.Module:
    """Multinomial logistic regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), classes))


def mlp(
    input_shape: Sequence[int],
    classes: int,
    hidden: Sequence[int] = (512, 128),
    activation: str = "relu",
) -> nn.Module:
    """Dense layers; 512-128 is DPlis' MNIST model, 1536-128 its CIFAR-10 model (PoPETs 2021)."""
    sizes = [math.prod(input_shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for width_in, width_out in itertools.pairwise(sizes):
        layers += [nn.Linear(width_in, width_out), activation_layer(activation)]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], classes))


def tf_cnn(
    input_shape: Sequence[int],
    classes: int,
    activation: str = "relu",
    width: int = 16,
    dense: bool = True,
) -> nn.Module:
    """The CNN of the TF-Privacy tutorial, as DPlis uses it: 26,010 parameters on 1x28x28.

    width: of the first convolution; the second and the dense layer have twice as many. Without a
    dense layer the last one reads what the convolutions see.
    """
    features = nn.Sequential(
        nn.Conv2d(input_shape[0], width, 8, stride=2, padding=2),
        activation_layer(activation),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(width, 2 * width, 4, stride=2),
        activation_layer(activation),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
    )
    flat = _flat_size(features, input_shape)
    if not dense:
        return nn.Sequential(*features, nn.Linear(flat, classes))
    return nn.Sequential(
        *features,
        nn.Linear(flat, 2 * width),
        activation_layer(activation),
        nn.Linear(2 * width, classes),
    )


def unet_cnn(
    input_shape: Sequence[int],
    classes: int,
    channels: Sequence[int] = (16, 32),
    kernel: int = 6,
    activation: str = "relu",
    width: int = 16,
    dense: bool = False,
) -> nn.Module:
    """`tf_cnn` behind a `unet`, as one network: what clears the noise is trained with what reads.

    channels, kernel: of the U-Net (`dpdist.models.denoiser.unet`); activation, width, dense: of the
    CNN. 43,563 parameters on 1x28x28.
    """
    return nn.Sequential(
        OrderedDict(
            unet=unet(input_shape, classes, channels, kernel),
            cnn=tf_cnn(input_shape, classes, activation, width, dense),
        )
    )


def hgm_cnn(
    input_shape: Sequence[int],
    classes: int,
    filters: Sequence[int] = (32, 64),
    kernels: Sequence[int] = (5, 5),
    strides: Sequence[int] = (2, 2),
    dense: int = 256,
    activation: str = "relu",
) -> nn.Module:
    """Convolutions, one dense layer: HGM's MNIST network (IJCAI 2019, Section 5).

    Its CIFAR-10 network has filters 128, 128, 256 and kernels 3, 5, 5. Strides are not in the
    paper; 2 is PixelDP's.
    """
    if not len(filters) == len(kernels) == len(strides) > 0:
        raise ValueError("filters, kernels and strides must be lists of one length")
    layers: list[nn.Module] = []
    width_in = input_shape[0]
    for width, kernel, stride in zip(filters, kernels, strides, strict=True):
        layers += [
            nn.Conv2d(width_in, width, kernel, stride=stride, padding=kernel // 2),
            activation_layer(activation),
        ]
        width_in = width
    features = nn.Sequential(*layers, nn.Flatten())
    flat = _flat_size(features, input_shape)
    return nn.Sequential(
        *features, nn.Linear(flat, dense), activation_layer(activation), nn.Linear(dense, classes)
    )


def small_cnn(
    input_shape: Sequence[int], classes: int, width: int = 16, activation: str = "tanh"
) -> nn.Module:
    """Two 3x3 convolutions and one dense layer, for images of 8x8 and up."""
    return nn.Sequential(
        nn.Conv2d(input_shape[0], width, 3, padding=1),
        activation_layer(activation),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        activation_layer(activation),
        nn.Flatten(),
        nn.Linear(2 * width * math.prod(math.ceil(side / 2) for side in input_shape[1:]), classes),
    )


def pool_cnn(
    input_shape: Sequence[int],
    classes: int,
    filters: Sequence[int] = (32, 64, 128),
    kernels: Sequence[int] = (5, 3, 3),
    groups: int = 0,
    activation: str = "relu",
) -> nn.Module:
    """Convolutions that keep their maps' size, the first of stride 2, each other one before a 2x2
    max pool, and a last layer that reads what they see: 115,274 parameters on 3x32x32.

    kernels: odd. groups: of a GroupNorm behind each convolution, 0 for none.
    """
    if not len(filters) == len(kernels) > 0 or not all(kernel % 2 for kernel in kernels):
        raise ValueError("filters and kernels must be lists of one length, kernels odd")
    layers: list[nn.Module] = []
    widths = itertools.pairwise([input_shape[0], *filters])
    for depth, ((width_in, width), kernel) in enumerate(zip(widths, kernels, strict=True)):
        stride = 1 if depth else 2
        layers.append(nn.Conv2d(width_in, width, kernel, stride=stride, padding=kernel // 2))
        if groups:
            layers.append(nn.GroupNorm(groups, width))
        layers.append(activation_layer(activation))
        if depth:
            layers.append(nn.MaxPool2d(2))
    features = nn.Sequential(*layers, nn.Flatten())
    return nn.Sequential(*features, nn.Linear(_flat_size(features, input_shape), classes))


class _Tokens(nn.Module):
    """Embeds the token numbers of a feature row: (B, length) floats to (B, length, width)."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.vocabulary = vocabulary

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding(x.long().clamp(min=0))  # behind the end nothing is asked


class _Windows(nn.Module):
    """At each position the last `count` ones, it among them: (B, length, width) to (B, length,
    count * width). Before the beginning there are zeros."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        filled = nn.functional.pad(x, (0, 0, self.count - 1, 0))
        return filled.unfold(1, self.count, 1).flatten(2)


class _States(nn.Module):
    """The hidden states of an LSTM: (B, length, width) to (B, length, units)."""

    def __init__(self, width: int, units: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, units, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class NextWord(nn.Sequential):
    """Token numbers (B, length), below 0 behind a document's end, to what comes after each of them:
    logits (B, length, vocabulary), which depend on it and those before it."""

    def __init__(self, tokens: _Tokens, *layers: nn.Module) -> None:
        super().__init__(tokens, *layers)
        self.vocabulary = tokens.vocabulary


def next_word_mlp(
    input_shape: Sequence[int],
    classes: int,
    context: int = 20,
    embedding: int = 64,
    hidden: Sequence[int] = (500, 250, 50),
) -> nn.Module:
    """Next word from the last 20 by dense layers 500-250-50 (DPlis, PoPETs 2021, Section 5.5).

    classes is the vocabulary, of inputs and outputs. The embedding's width is not in the paper.
    """
    sizes = [context * embedding, *hidden]
    layers: list[nn.Module] = [_Windows(context)]
    for width_in, width_out in itertools.pairwise(sizes):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return NextWord(_Tokens(classes, embedding), *layers, nn.Linear(sizes[-1], classes))


def next_word_lstm(
    input_shape: Sequence[int], classes: int, embedding: int = 256, units: int = 96
) -> nn.Module:
    """Next word from all before it by an LSTM (DPlis: embedding 256, 96 units)."""
    return NextWord(
        _Tokens(classes, embedding), _States(embedding, units), nn.Linear(units, classes)
    )
