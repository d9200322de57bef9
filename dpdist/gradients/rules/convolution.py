"""Conv1d, Conv2d, ConvTranspose2d: any stride, padding (and its mode), dilation and groups."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpdist.gradients.forms import Contribution, Dense, Outer
from dpdist.gradients.rules.call import LayerCall

# Gradients are formed as (out, kh, kw, in): channels-last patches copy whole pixels, which is ten
# times faster than torch's unfold.
_FROM_CHANNELS_LAST = (0, 3, 1, 2)
_FROM_CHANNELS_LAST_1D = (0, 2, 1)


def convolution(call: LayerCall) -> Iterator[tuple[str, Contribution]]:
    """A convolution is a Linear layer on its patches: one position per output pixel."""
    module = call.module
    assert isinstance(module, nn.Conv1d | nn.Conv2d)
    signal = call.backsignal
    if isinstance(module, nn.Conv1d):
        signal = signal.unsqueeze(2)
    left = signal.permute(0, 2, 3, 1).flatten(1, 2)  # (B, positions, out)
    if "weight" in call.trainable:
        yield "weight", _weight(module, call.input, left, (signal.shape[2], signal.shape[3]))
    if "bias" in call.trainable:
        yield "bias", Dense(left.sum(1))


def transposed(call: LayerCall) -> Iterator[tuple[str, Contribution]]:
    """A transposed convolution is a convolution with input and output gradient exchanged.

    One position per input pixel, and the patches are those of the output gradient.
    """
    module = call.module
    assert isinstance(module, nn.ConvTranspose2d)
    inputs, signal = call.input, call.backsignal
    if "weight" in call.trainable:
        rows, columns = (int(side) for side in module.padding)
        padded = F.pad(signal, (columns, columns, rows, rows))
        windows = _windows(module, padded, (inputs.shape[2], inputs.shape[3]))
        left = inputs.permute(0, 2, 3, 1).flatten(1, 2)  # (B, positions, in)
        yield "weight", _product(left, windows, module.groups, _FROM_CHANNELS_LAST)
    if "bias" in call.trainable:
        yield "bias", Dense(signal.sum((2, 3)))


def _weight(
    module: nn.Conv1d | nn.Conv2d, inputs: Tensor, left: Tensor, size: tuple[int, int]
) -> Contribution:
    one_dimensional = isinstance(module, nn.Conv1d)
    order = _FROM_CHANNELS_LAST_1D if one_dimensional else _FROM_CHANNELS_LAST
    windows = _windows(module, _padded(module, inputs), size)
    return _product(left, windows, module.groups, order, inputs)


def _product(
    left: Tensor,
    windows: Tensor,
    groups: int,
    order: tuple[int, ...],
    source: Tensor | None = None,
) -> Contribution:
    """Sum over positions of left (B, positions, channels) ⊗ windows, within each group."""
    if groups == 1:
        return Outer(left, windows[:, 0], order, source)
    batch, positions, channels = left.shape
    left = left.reshape(batch, positions, groups, -1).permute(0, 2, 3, 1).flatten(0, 1)
    patches = windows.reshape(batch * groups, positions, -1)
    return Dense(torch.bmm(left, patches).view(batch, channels, -1), order)


def _windows(
    module: nn.Conv1d | nn.Conv2d | nn.ConvTranspose2d, padded: Tensor, size: tuple[int, int]
) -> Tensor:
    """Overlapping view (B, groups, h, w, kh, kw, channels / groups) of padded (B, C, H, W).

    size: (h, w), how often the kernel is laid on the image.
    """
    pixels = padded.permute(0, 2, 3, 1).contiguous()
    # A Conv1d is a Conv2d of height 1.
    kernel, stride, dilation = (
        (1, *value) if len(value) == 1 else value
        for value in (module.kernel_size, module.stride, module.dilation)
    )
    batch, groups, width = pixels.shape[0], module.groups, pixels.shape[3] // module.groups
    step_example, step_row, step_column, _ = pixels.stride()
    return pixels.as_strided(
        (batch, groups, *size, *kernel, width),
        (
            step_example,
            width,
            step_row * stride[0],
            step_column * stride[1],
            step_row * dilation[0],
            step_column * dilation[1],
            1,
        ),
    )


def _padded(module: nn.Conv1d | nn.Conv2d, inputs: Tensor) -> Tensor:
    """The input as the convolution sees it, borders included: (B, C, H, W)."""
    # _reversed_padding_repeated_twice resolves "same"; a Conv1d's two entries pad the width only.
    padding = module._reversed_padding_repeated_twice
    if any(padding):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        inputs = F.pad(inputs, padding, mode=mode)
    return inputs.unsqueeze(2) if isinstance(module, nn.Conv1d) else inputs
