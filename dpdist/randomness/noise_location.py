"""Describe the location of a model's noise at prediction: input, first layer, modules or none.

The model's own forward pass draws nothing. One draw of the randomized classifier takes standard
normals, independent for every record: in evaluation and attacks by `logits`, in certificates and
counts by `split`. Input noise followed by noise further inside is randomized smoothing of the input
at `sigma`: all later noise is post-processing. Noise on parameters is used in training only
(`dpdist.gradients.perturbations`). A new location is a class in `NOISE_LOCATIONS`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from dpdist.core.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class NoiseSplit:
    """A network split at its noise: one draw is after_noise(before_noise(x) + std * normals).

    before_noise: None if the noise is on the input itself. std: one number, or float32 of the
    shape of one example's noise.
    """

    before_noise: nn.Module | None
    after_noise: nn.Module
    std: float | Tensor


class NoiseLocation:
    """The location of a classifier's noise at prediction.

    kind: its name in tables and keys. certified_kind: the kind in certificates of the same
    classifier. is_random: whether there is noise. smoothing_sigma: standard deviation of the noise
    on the input, in input units; None without noise on the input. has_inner_noise: whether noise
    after the input stays when the input is smoothed. predicts_by_vote: whether the randomized
    classifier predicts the class of most draws; if not, the class of the largest mean score, as in
    the certificates of the same noise.
    """

    kind: ClassVar[str]
    certified_kind: ClassVar[str]
    is_random: ClassVar[bool] = True
    has_inner_noise: ClassVar[bool] = False
    predicts_by_vote: ClassVar[bool] = True

    @property
    def smoothing_sigma(self) -> float | None:
        return None

    def with_input_noise(self, sigma: float) -> NoiseLocation:
        """Return the location with Gaussian noise of that sigma on the input, replacing its own."""
        return InputNoise(sigma)

    def split(self, model: nn.Module, input_shape: tuple[int, ...]) -> NoiseSplit:
        """Return the model split at its noise.

        Raises UserError for a model without such a location.
        """
        raise NotImplementedError

    def normals_shape(
        self, model: nn.Module, input_shape: tuple[int, ...]
    ) -> tuple[int, ...] | None:
        """Return the shape of one draw's standard normals for one record; None without noise."""
        raise NotImplementedError

    def logits(self, model: nn.Module, x: Tensor, normals: Tensor | None) -> Tensor:
        """Return logits (B, classes) for inputs (B, ...) and normals (B, *normals_shape).

        Without normals there is no noise.
        """
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Return the location as JSON, for keys and tables.

        A tensor of deviations is given by its scale and digest.
        """
        return {"kind": self.kind}

    def as_module_noise(self) -> ModuleNoise:
        """Return the same noise as noise of the input and of modules."""
        return ModuleNoise({}, input_std=self.smoothing_sigma or 0.0)

    def as_first_layer_noise(self) -> HiddenNoise:
        """Return the noise after the first layer. Raises UserError if there is noise elsewhere."""
        raise UserError("the model has no noise of its own; give the sigma of input noise")

    def first_affine_noise(
        self, model: nn.Module, input_shape: tuple[int, ...]
    ) -> HiddenNoise | None:
        """Return the noise on the outputs of the model's first affine layer, or None.

        None unless every component gets noise, and the rest of the model sees the input only
        through that layer.
        """
        return None

    def attach(self, model: nn.Module) -> None:
        """Make this the model's own noise. Raises UserError for a model without such a location."""

    @classmethod
    def describe_classifier(cls, sigma: float | None) -> str:
        """Return the kind of the classifier with this noise, as text."""
        raise NotImplementedError


class NoNoise(NoiseLocation):
    """The network itself."""

    kind = certified_kind = "none"
    is_random = False

    def split(self, model: nn.Module, input_shape: tuple[int, ...]) -> NoiseSplit:
        return NoiseSplit(None, model, 0.0)

    def normals_shape(self, model: nn.Module, input_shape: tuple[int, ...]) -> None:
        return None

    def logits(self, model: nn.Module, x: Tensor, normals: Tensor | None) -> Tensor:
        logits: Tensor = model(x)
        return logits

    @classmethod
    def describe_classifier(cls, sigma: float | None) -> str:
        return "the network itself"


@dataclass(frozen=True)
class InputNoise(NoiseLocation):
    """N(0, sigma^2) on every number of the input (randomized smoothing). sigma in input units."""

    sigma: float
    kind = certified_kind = "input"

    @property
    def smoothing_sigma(self) -> float:
        return self.sigma

    def split(self, model: nn.Module, input_shape: tuple[int, ...]) -> NoiseSplit:
        return NoiseSplit(None, model, self.sigma)

    def normals_shape(self, model: nn.Module, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(input_shape)

    def logits(self, model: nn.Module, x: Tensor, normals: Tensor | None) -> Tensor:
        logits: Tensor = model(x if normals is None else x + self.sigma * normals)
        return logits

    def describe(self) -> dict[str, Any]:
        return {"kind": self.kind, "sigma": self.sigma}

    def attach(self, model: nn.Module) -> None:
        from dpdist.models import BlockNoise, attach_block_noise

        attach_block_noise(model, BlockNoise(()), [], self.sigma)

    @classmethod
    def describe_classifier(cls, sigma: float | None) -> str:
        return f"smoothed, sigma {sigma:g}"


@dataclass(frozen=True)
class HiddenNoise(NoiseLocation):
    """N(0, std^2) on every component of one module's output.

    Used by PixelDP, HGM-PixelDP and Secure-SGD.

    module: its name in ``model.named_modules()``; for `split` it is the first affine layer.
    std: float32, the shape of one example's output.
    """

    module: str
    std: Tensor
    kind = certified_kind = "hidden"
    predicts_by_vote = False

    @property
    def rms_std(self) -> float:
        """Return the root mean square sigma_r of the deviations; std is sigma_r sqrt(K r)."""
        return float(self.std.double().square().mean().sqrt())

    @property
    def relative_variances(self) -> Tensor:
        """Return K r, float64, mean 1: every component's variance relative to the mean."""
        squares = self.std.double().square()
        return squares / squares.mean()

    def with_input_noise(self, sigma: float) -> NoiseLocation:
        """Return the location with both its own noise and noise on the input."""
        return replace(self.as_module_noise(), input_std=sigma)

    def split(self, model: nn.Module, input_shape: tuple[int, ...]) -> NoiseSplit:
        from dpdist.models import require_split

        split = require_split(model)
        return NoiseSplit(split.first, split.rest, self.std)

    def normals_shape(self, model: nn.Module, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        from dpdist.randomness.noisy_modules import output_shapes

        (shape,) = output_shapes(model, (self.module,), input_shape)
        return shape

    def logits(self, model: nn.Module, x: Tensor, normals: Tensor | None) -> Tensor:
        from dpdist.randomness.noisy_modules import override_outputs

        logits: Tensor
        if normals is None:
            logits = model(x)
            return logits
        std = self.std.to(x.device)
        with override_outputs(model, {self.module: lambda output: output + std * normals}):
            logits = model(x)
            return logits

    def describe(self) -> dict[str, Any]:
        return {"kind": self.kind, "module": self.module, **_describe_std(self.std)}

    def as_first_layer_noise(self) -> HiddenNoise:
        return self

    def first_affine_noise(
        self, model: nn.Module, input_shape: tuple[int, ...]
    ) -> HiddenNoise | None:
        return self.as_module_noise().first_affine_noise(model, input_shape)

    def as_module_noise(self) -> ModuleNoise:
        return ModuleNoise({self.module: self.std})

    def attach(self, model: nn.Module) -> None:
        from dpdist.models import attach_noise

        attach_noise(model, self.std)

    @classmethod
    def describe_classifier(cls, sigma: float | None) -> str:
        return "noise in the first hidden layer"


@dataclass(frozen=True)
class ModuleNoise(NoiseLocation):
    """Noise on the input and on the outputs of modules, in one draw.

    Used by residual perturbation and sound StoBatch.

    stds: standard deviation by the module's name in ``model.named_modules()``, public; float32 of
    the shape of one example's output if components differ. mode: form of the noise on a module's
    output (`dpdist.randomness.noisy_modules.MODES`). input_std: standard deviation of the noise on
    the input, in input units. floor: least size of an output in multiplicative noise. The normals
    of a draw are one row: those of the input, then of each module in turn.
    """

    stds: Mapping[str, float | Tensor]
    mode: str = "additive"
    input_std: float = 0.0
    floor: float = 0.0
    kind = "several"
    certified_kind = "input"
    has_inner_noise = True

    def __post_init__(self) -> None:
        from dpdist.randomness.noisy_modules import MODES

        if self.mode not in MODES:
            known = ", ".join(MODES)
            raise UserError(f"noise in modules: mode: must be one of {known}, got {self.mode!r}")
        others = (("the input", self.input_std), ("modules, its floor", self.floor))
        for where, std in (*self.stds.items(), *others):
            if not _usable(std):
                raise UserError(f"noise on {where}: must be a finite number >= 0, got {std}")

    @property
    def smoothing_sigma(self) -> float | None:
        return self.input_std or None

    def with_input_noise(self, sigma: float) -> NoiseLocation:
        return replace(self, input_std=sigma)

    def as_module_noise(self) -> ModuleNoise:
        return self

    def split(self, model: nn.Module, input_shape: tuple[int, ...]) -> NoiseSplit:
        from dpdist.randomness.noisy_modules import split_at_module_noise

        noise = (self.stds, self.mode, self.floor, self.input_std)
        return NoiseSplit(*split_at_module_noise(model, *noise, input_shape))

    def normals_shape(self, model: nn.Module, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        from dpdist.randomness.noisy_modules import output_shapes

        shapes = (tuple(input_shape), *output_shapes(model, tuple(self.stds), input_shape))
        return (sum(math.prod(shape) for shape in shapes),)

    def logits(self, model: nn.Module, x: Tensor, normals: Tensor | None) -> Tensor:
        logits: Tensor
        if normals is None:
            logits = model(x)
            return logits
        cut = self.split(model, tuple(x.shape[1:]))
        assert cut.before_noise is not None
        logits = cut.after_noise(cut.before_noise(x) + cut.std * normals)
        return logits

    def describe(self) -> dict[str, Any]:
        stds = {
            name: std if isinstance(std, float | int) else _describe_std(std)
            for name, std in self.stds.items()
        }
        noise = {"modules": stds, "mode": self.mode, "floor": self.floor}
        return {"kind": self.kind, "sigma": self.smoothing_sigma, **noise}

    def first_affine_noise(
        self, model: nn.Module, input_shape: tuple[int, ...]
    ) -> HiddenNoise | None:
        import torch

        from dpdist.models import split_after_first_layer

        split = split_after_first_layer(model)
        if split is None or split.name not in self.stds or self.mode != "additive":
            return None
        std = torch.as_tensor(self.stds[split.name], dtype=torch.float64)
        std = std.expand(split.hidden_shape(input_shape))
        return HiddenNoise(split.name, std) if bool((std > 0).all()) else None

    def as_first_layer_noise(self) -> HiddenNoise:
        raise UserError(
            "the model's own noise is not behind its first layer alone; give the sigma of input "
            "noise"
        )

    def attach(self, model: nn.Module) -> None:
        from dpdist.models import BlockNoise, attach_block_noise

        stds = [std for std in self.stds.values() if isinstance(std, float | int)]
        if len(stds) < len(self.stds):
            raise UserError("noise in modules: a model stores one number for each module")
        noise = BlockNoise(tuple(self.stds), self.mode, self.floor)
        attach_block_noise(model, noise, stds, self.input_std)

    @classmethod
    def describe_classifier(cls, sigma: float | None) -> str:
        return "noise inside" + (f" and on the input, sigma {sigma:g}" if sigma else "")


NOISE_LOCATIONS: dict[str, type[NoiseLocation]] = {
    place.kind: place for place in (NoNoise, InputNoise, HiddenNoise, ModuleNoise)
}


def find_noise_location(model: nn.Module) -> NoiseLocation:
    """Return the location of the noise that a model carries."""
    from dpdist.models import noise as hidden
    from dpdist.models import require_split

    std = getattr(model, hidden.HIDDEN_STD, None)
    if std is not None:
        return HiddenNoise(require_split(model).name, std)
    noise = getattr(model, hidden.BLOCK_NOISE_ATTRIBUTE, None)
    if noise is None:
        return NoNoise()
    stds = getattr(model, hidden.BLOCK_STDS).tolist()
    sigma = float(getattr(model, hidden.INPUT_STD))
    if stds:
        by_name = dict(zip(noise.modules, stds, strict=True))
        return ModuleNoise(by_name, noise.mode, sigma, noise.floor)
    return InputNoise(sigma) if sigma else NoNoise()


def resolve_smoothing_sigma(model: nn.Module, sigma: float | None, context: object) -> float | None:
    """Return the input noise to smooth with: the requested one, or the model's own.

    None for a model that is random elsewhere. Raises UserError, which names `context`, for a model
    without noise.
    """
    place = find_noise_location(model)
    if sigma is None and not place.is_random:
        raise UserError(f"{context}: certify.sigma: must be given, as the model has no noise")
    return place.smoothing_sigma if sigma is None else sigma


def _usable(std: Any) -> bool:
    if isinstance(std, float | int):
        return math.isfinite(std) and std >= 0
    return bool((std.isfinite() & (std >= 0)).all())


def _describe_std(std: Any) -> dict[str, Any]:
    """Return a tensor of deviations as JSON, by its root mean square and digest."""
    raw = std.detach().float().cpu().contiguous().numpy().tobytes()
    digest = hashlib.blake2b(raw, digest_size=8).hexdigest()
    return {"std": float(std.double().square().mean().sqrt()), "digest": digest}
