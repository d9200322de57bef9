"""The networks of HGM's experiments (Phan et al., IJCAI 2019, Section 5)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from dpdist.models.zoo import activation_layer, flat_size


def hgm_cnn(
    input_shape: Sequence[int],
    classes: int,
    filters: Sequence[int] = (32, 64),
    kernels: Sequence[int] = (5, 5),
    strides: Sequence[int] = (2, 2),
    dense: int = 256,
    activation: str = "relu",
) -> nn.Module:
    """Return HGM's MNIST network: convolutions, one dense layer (IJCAI 2019, Section 5).

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
    flat = flat_size(features, input_shape)
    return nn.Sequential(
        *features, nn.Linear(flat, dense), activation_layer(activation), nn.Linear(dense, classes)
    )
