"""Networks of the zoo: small classifiers, residual networks, denoisers, torchvision's.

Inputs are (B, *input_shape) in [0, 1]; outputs are logits (B, classes), or images for denoisers. No
layer mixes examples (GroupNorm, never BatchNorm), so per-example gradients exist. In a torchvision
network BatchNorm becomes a fixed map by its running statistics, which are public constants, and
dropout is removed, so it may be a frozen public part after a trained one.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dpdist.core.optional_imports import import_torchvision

# --- activations ------------------------------------------------------------------------------


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "elu": nn.ELU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
}


class TemperedSigmoid(nn.Module):
    """scale * sigmoid(temperature * x) - offset (Papernot et al. 2021); the defaults are tanh."""

    def __init__(self, scale: float = 2.0, temperature: float = 2.0, offset: float = 1.0) -> None:
        super().__init__()
        self.scale, self.temperature, self.offset = scale, temperature, offset

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * torch.sigmoid(self.temperature * x) - self.offset


ACTIVATIONS["tempered-sigmoid"] = TemperedSigmoid


def activation_layer(name: str) -> nn.Module:
    """Return the named activation. Raises ValueError for an unknown name."""
    if name not in ACTIVATIONS:
        known = ", ".join(sorted(ACTIVATIONS))
        raise ValueError(f"activation: must be one of {known}, got {name!r}")
    return ACTIVATIONS[name]()


# --- normalization by public constants --------------------------------------------------------


class NormalizedNetwork(nn.Module):
    """(x - mean) / std, then the network, so that radii are in units of the input."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.network((x - self.mean) / self.std)
        return output


# --- classifiers and language models ----------------------------------------------------------


def flat_size(features: nn.Sequential, input_shape: Sequence[int]) -> int:
    """Return the number of outputs of convolutions and pools.

    Raises RuntimeError for inputs that are too small.
    """
    with torch.no_grad():
        return features(torch.zeros(1, *input_shape)).numel()  # type: ignore[no-any-return]


def linear(input_shape: Sequence[int], classes: int) -> nn.Module:
    """Return a model of multinomial logistic regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), classes))


def mlp(
    input_shape: Sequence[int],
    classes: int,
    hidden: Sequence[int] = (512, 128),
    activation: str = "relu",
) -> nn.Module:
    """Return linear layers; DPlis (PoPETs 2021) has 512-128 for MNIST and 1536-128 for CIFAR-10."""
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
    """Return the CNN of the TF-Privacy tutorial, as in DPlis: 26,010 parameters on 1x28x28.

    width: filters of the first convolution; the second, and the dense layer, are twice as wide.
    dense: whether there is a dense layer before the last one.
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
    flat = flat_size(features, input_shape)
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
    """Return a `unet` followed by a `tf_cnn`, which are trained together.

    channels, kernel: of the U-Net (`dpdist.models.zoo.unet`); activation, width, dense: of the CNN.
    It has 43,563 parameters on 1x28x28.
    """
    return nn.Sequential(
        OrderedDict(
            unet=unet(input_shape, classes, channels, kernel),
            cnn=tf_cnn(input_shape, classes, activation, width, dense),
        )
    )


def small_cnn(
    input_shape: Sequence[int], classes: int, width: int = 16, activation: str = "tanh"
) -> nn.Module:
    """Return two 3x3 convolutions and one linear layer, for images of at least 8x8."""
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
    whiten: float = 0.0,
) -> nn.Module:
    """Return convolutions, all but the first before a 2x2 max pool, and a linear layer.

    The first one has stride 2. The network has 115,274 parameters on 3x32x32. kernels: odd sizes.
    groups: of a GroupNorm after each convolution, 0 without. whiten: ridge of a `WhiteningLayer`
    before the last layer, 0 without.
    """
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
    size = flat_size(features, input_shape)
    white = [WhiteningLayer(size, whiten)] if whiten else []
    return nn.Sequential(*features, *white, nn.Linear(size, classes))


class WhiteningLayer(nn.Linear):
    """A frozen map of features (B, D) to uncorrelated ones; the identity until it is fitted.

    It is fitted once, to public records at the end of their training, and does not depend on
    private records. A head on whitened features learns in fewer noisy steps.

    ridge: added to each eigenvalue of the covariance, as a fraction of their mean, so that
    directions of little variance are not amplified.
    """

    def __init__(self, size: int, ridge: float) -> None:
        super().__init__(size, size)
        self.ridge = ridge
        self.requires_grad_(False)
        nn.init.eye_(self.weight)
        nn.init.zeros_(self.bias)

    def fit(self, mean: Tensor, covariance: Tensor) -> None:
        """Set the map for features of this mean (D,) and covariance (D, D).

        The mean square of the features stays the same.
        """
        values, vectors = torch.linalg.eigh(covariance)
        values = values.clamp(min=0.0)
        inverse = (values + self.ridge * values.mean()).clamp(min=1e-12).rsqrt()
        scale = (values.sum() / (values * inverse.square()).sum().clamp(min=1e-12)).sqrt()
        matrix = scale * (vectors * inverse) @ vectors.T
        with torch.no_grad():
            self.weight.copy_(matrix)
            self.bias.copy_(-matrix @ mean)


class _TokenEmbedding(nn.Module):
    """Embeds tokens: (B, length) floats to (B, length, width)."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.vocabulary = vocabulary

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.embedding(x.long().clamp(min=0))  # padding has no targets
        return output


class _Windows(nn.Module):
    """Concatenates the last `count` positions at each one, with zeros before the first.

    (B, length, width) to (B, length, count * width).
    """

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
        output: Tensor = self.lstm(x)[0]
        return output


class NextWord(nn.Sequential):
    """Tokens (B, length), negative after a document's end, to logits (B, length, vocabulary).

    The logits of the next token depend on this token and those before it.
    """

    def __init__(self, tokens: _TokenEmbedding, *layers: nn.Module) -> None:
        super().__init__(tokens, *layers)
        self.vocabulary = tokens.vocabulary


def next_word_mlp(
    input_shape: Sequence[int],
    classes: int,
    context: int = 20,
    embedding: int = 64,
    hidden: Sequence[int] = (500, 250, 50),
) -> nn.Module:
    """Return linear layers 500-250-50 over the last 20 words (DPlis, PoPETs 2021, Section 5.5).

    classes: size of the vocabulary. The paper does not state the embedding's width.
    """
    sizes = [context * embedding, *hidden]
    layers: list[nn.Module] = [_Windows(context)]
    for width_in, width_out in itertools.pairwise(sizes):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return NextWord(_TokenEmbedding(classes, embedding), *layers, nn.Linear(sizes[-1], classes))


def next_word_lstm(
    input_shape: Sequence[int], classes: int, embedding: int = 256, units: int = 96
) -> nn.Module:
    """Return an LSTM over all previous words (DPlis: embedding 256, 96 units)."""
    return NextWord(
        _TokenEmbedding(classes, embedding), _States(embedding, units), nn.Linear(units, classes)
    )


# --- residual networks ------------------------------------------------------------------------


class ResidualBlock(nn.Module):
    """One step x + F(x) of a residual network, to which residual perturbation adds noise."""


def residual_blocks(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the residual blocks in ``model.named_modules()``."""
    return tuple(name for name, m in model.named_modules() if isinstance(m, ResidualBlock))


class _PostActivation(ResidualBlock):
    """Two 3x3 convolutions with GroupNorm around an identity (or 1x1 projection)."""

    def __init__(self, width_in: int, width_out: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width_out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, width_out)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(width_out, width_out, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, width_out)
        self.relu2 = nn.ReLU()
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or width_in != width_out:
            self.skip = nn.Conv2d(width_in, width_out, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu1(self.norm1(self.conv1(x)))
        output: Tensor = self.relu2(self.norm2(self.conv2(out)) + self.skip(x))
        return output


def residual_stages(depth: int, width: int) -> Iterator[tuple[int, int, int]]:
    """Yield (width in, width out, stride) of each block of the 6n + 2 network (He et al. 2016)."""
    if depth < 8 or (depth - 2) % 6:
        raise ValueError(f"depth: must be 6n + 2 with n >= 1 (8, 14, 20, ...), got {depth}")
    width_in = width
    for stage, width_out in enumerate((width, 2 * width, 4 * width)):
        for block in range((depth - 2) // 6):
            yield width_in, width_out, 2 if stage > 0 and block == 0 else 1
            width_in = width_out


def resnet_gn(
    input_shape: Sequence[int], classes: int, depth: int = 20, width: int = 16, groups: int = 8
) -> nn.Module:
    """Return the 6n + 2 residual network for 32x32 images (He et al. 2016) with GroupNorm."""
    blocks = [_PostActivation(*stage, groups) for stage in residual_stages(depth, width)]
    return nn.Sequential(
        nn.Conv2d(input_shape[0], width, 3, padding=1, bias=False),
        nn.GroupNorm(groups, width),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, classes),
    )


# --- denoisers --------------------------------------------------------------------------------


class ResidualDenoiser(nn.Module):
    """x - network(x): the network predicts the noise (Zhang et al. 2017, "DnCNN")."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x - self.network(x)
        return output


def conv_autoencoder(
    input_shape: Sequence[int],
    classes: int,
    channels: Sequence[int] = (16, 32),
    activation: str = "relu",
    residual: bool = False,
) -> nn.Module:
    """Return convolutions of stride 2, then as many transposed ones (TransDenoiser).

    channels: filters of the convolutions, outermost first; the paper's widths are unknown. The
    sides of the image must be divisible by 2^len(channels). residual: return x - network(x), with a
    last layer that starts at 0, so that training starts at the identity. classes: unused.
    """
    widths = [input_shape[0], *channels]
    layers: list[nn.Module] = []
    for width_in, width_out in itertools.pairwise(widths):
        layers += [
            nn.Conv2d(width_in, width_out, 3, stride=2, padding=1),
            activation_layer(activation),
        ]
    for width_in, width_out in itertools.pairwise(reversed(widths)):
        layers += [
            nn.ConvTranspose2d(width_in, width_out, 4, stride=2, padding=1),
            activation_layer(activation),
        ]
    return _build_denoiser(layers[:-1], residual)


class _Level(nn.Module):
    """Maps inputs to `width` maps of half the size, adds those of `inner`, and maps them back."""

    def __init__(self, width_in: int, width: int, kernel: int, inner: nn.Module | None) -> None:
        super().__init__()
        padding = kernel // 2 - 1
        self.down = nn.Conv2d(width_in, width, kernel, stride=2, padding=padding)
        self.inner = inner
        self.same = nn.Conv2d(width, width, 3, padding=1)
        self.up = nn.ConvTranspose2d(width, width_in, kernel, stride=2, padding=padding)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.down(x).relu()
        if self.inner is not None:
            seen = (seen + self.inner(seen)).relu()
        output: Tensor = self.up((seen + self.same(seen)).relu())
        return output


def unet(
    input_shape: Sequence[int],
    classes: int,
    channels: Sequence[int] = (16, 32),
    kernel: int = 6,
) -> nn.Module:
    """Return a U-Net (Ronneberger et al. 2015) whose levels each halve the image.

    channels: of the levels, outermost first; the sides of the image must be divisible by
    2^len(channels). kernel: even size of the outermost level; the others have 4. classes: unused.
    """
    widths = [input_shape[0], *channels]
    inner: _Level | None = None
    for depth in reversed(range(len(channels))):
        inner = _Level(widths[depth], widths[depth + 1], 4 if depth else kernel, inner)
    assert inner is not None
    return inner


def dncnn(
    input_shape: Sequence[int],
    classes: int,
    depth: int = 17,
    width: int = 64,
    groups: int = 8,
) -> nn.Module:
    """Return DnCNN, the denoiser of denoised smoothing (Salman et al. 2020), with GroupNorm.

    It has 3x3 convolutions at full size that predict the noise. groups: of the GroupNorm between
    them, 0 without. classes: unused.
    """
    if depth < 2:
        raise ValueError(f"depth: must be >= 2, got {depth}")
    layers: list[nn.Module] = [nn.Conv2d(input_shape[0], width, 3, padding=1), nn.ReLU()]
    for _ in range(depth - 2):
        layers.append(nn.Conv2d(width, width, 3, padding=1, bias=not groups))
        if groups:
            layers.append(nn.GroupNorm(groups, width))
        layers.append(nn.ReLU())
    layers.append(nn.Conv2d(width, input_shape[0], 3, padding=1))
    return _build_denoiser(layers, residual=True)


def _build_denoiser(layers: list[nn.Module], residual: bool) -> nn.Module:
    network = nn.Sequential(*layers)
    if not residual:
        return network
    last = layers[-1]
    assert isinstance(last, nn.Conv2d | nn.ConvTranspose2d) and last.bias is not None
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return ResidualDenoiser(network)


# --- torchvision's classifiers ----------------------------------------------------------------


_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


class FixedBatchNorm(nn.Module):
    """BatchNorm by stored statistics: (x - mean) / sqrt(var + eps) * weight + bias, per channel.

    Its tensors have the names of BatchNorm2d. Only inside `batch_statistics` it normalizes by the
    batch and updates the statistics, which mixes examples, for training on public records.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, features: int, eps: float, momentum: float | None) -> None:
        super().__init__()
        self.eps, self.momentum = eps, 0.1 if momentum is None else momentum
        self.uses_batch_statistics = False
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        if self.uses_batch_statistics:
            return nn.functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias,
                training=True, momentum=self.momentum, eps=self.eps,
            )  # fmt: skip
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        shape = 1, -1, *[1] * (x.dim() - 2)
        return x * scale.view(shape) + shift.view(shape)


@contextmanager
def batch_statistics(module: nn.Module) -> Iterator[None]:
    """Let every `FixedBatchNorm` normalize by the batch and update its statistics."""
    layers = [layer for layer in module.modules() if isinstance(layer, FixedBatchNorm)]
    for layer in layers:
        layer.uses_batch_statistics = True
    try:
        yield
    finally:
        for layer in layers:
            layer.uses_batch_statistics = False


def torchvision_classifier(
    input_shape: Sequence[int], classes: int, architecture: str = "resnet18"
) -> nn.Module:
    """Return an architecture of torchvision.models with `classes` outputs, for (3, H, W) images."""
    options = {"init_weights": True} if architecture in ("googlenet", "inception_v3") else {}
    network = import_torchvision("models").get_model(
        architecture, weights=None, num_classes=classes, **options
    )
    return replace_batch_norm_and_dropout(network)


def download_weights(architecture: str) -> tuple[dict[str, Tensor], str]:
    """Return torchvision's default weights of an architecture, downloaded, and their name.

    They are stored in torch.hub's folder. Their checksum is verified, and nothing is executed.
    Raises ValueError if there are none, OSError or RuntimeError if the download fails.
    """
    weights = import_torchvision("models").get_model_weights(architecture).DEFAULT
    tensors = weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
    return tensors, str(weights)


def replace_batch_norm_and_dropout(module: nn.Module) -> nn.Module:
    """Replace, in place, every BatchNorm2d by `FixedBatchNorm` and every dropout by nothing."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            if child.running_mean is None or child.running_var is None or not child.affine:
                raise ValueError(f"{name}: must be a BatchNorm with statistics and weights")
            layer = FixedBatchNorm(child.num_features, child.eps, child.momentum)
            state = child.state_dict()
            layer.load_state_dict({key: state[key] for key in layer.state_dict()})
            setattr(module, name, layer)
        elif isinstance(child, _DROPOUT):
            setattr(module, name, nn.Identity())
        else:
            replace_batch_norm_and_dropout(child)
    return module
