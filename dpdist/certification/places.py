"""Where a certified model is random: on its input, or behind its first layer by its own noise.

A place knows the network that is executed there, a batch on which every worker must answer alike,
and the sampler that counts under its noise.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn

from dpdist.base.errors import UserError
from dpdist.certification import operator_norms
from dpdist.certification.bank import BankSampler, split_first_layer
from dpdist.certification.classifier import ClassifierSpec, ExecutedClassifier
from dpdist.certification.expected_score_bounds import Sensitivity
from dpdist.certification.noises import Noise
from dpdist.certification.sampling import Counter, HiddenNoiseSampler, Sampler
from dpdist.models import HiddenNoise, SplitModel, hidden_noise, require_split
from dpdist.randomness import units

if TYPE_CHECKING:
    from dpdist.certification.worker import Assignment


class Place(Protocol):
    """sigma: of the noise, which names it in the keys of random units."""

    @property
    def sigma(self) -> float: ...

    @property
    def identity(self) -> dict[str, Any]:
        """What results depend on beside settings and model, as JSON."""
        ...

    def pinned(self, about: dict[str, Any]) -> Place:
        """With what was pinned when the certification began."""
        ...

    def check_batch(self, assignment: Assignment) -> tuple[nn.Module, Tensor]:
        """The executed network, and a batch for it under a random unit used for nothing else."""
        ...

    def sampler(self, assignment: Assignment, spec: ClassifierSpec) -> tuple[Counter, Tensor]:
        """What counts on the executed classifier, and its classes of the check batch."""
        ...


@dataclass(frozen=True)
class InputPlace:
    """Noise on the input. bank: the same stream for all inputs, behind a dense first layer once;
    keeps_blocks: the first blocks of it stay."""

    noise: Noise
    bank: bool = False
    keeps_blocks: bool = True

    @property
    def sigma(self) -> float:
        return self.noise.sigma

    @property
    def identity(self) -> dict[str, Any]:
        return {}

    def pinned(self, about: dict[str, Any]) -> InputPlace:
        return self

    def check_batch(self, assignment: Assignment) -> tuple[nn.Module, Tensor]:
        noise, inputs = self._check_parts(assignment)
        return assignment.model, noise + inputs

    def sampler(self, assignment: Assignment, spec: ClassifierSpec) -> tuple[Counter, Tensor]:
        source, classes = assignment.source, assignment.classes
        shapes = [(rows, *assignment.input_shape) for rows in (spec.batch, assignment.settings.n0)]
        if self.bank and (parts := split_first_layer(assignment.model)) is not None:
            bank = BankSampler(
                *parts, spec.form, self.noise, source, classes, shapes, evict=not self.keeps_blocks
            )
            return bank, bank.classes_of(*self._check_parts(assignment))
        classify = ExecutedClassifier(assignment.model, spec.form, shapes)
        sampler = Sampler(
            classify, self.noise, source, classes, assignment.input_shape, bank=self.bank
        )
        return sampler, classify(self.check_batch(assignment)[1])

    def _check_parts(self, assignment: Assignment) -> tuple[Tensor, Tensor]:
        """Noise and inputs of the check batch."""
        rows = assignment.settings.executed_batch(int(np.prod(assignment.input_shape)))
        inputs = torch.from_numpy(assignment.check_inputs)
        values = torch.empty(rows, *assignment.input_shape)
        words = units.RandomWords(values.numel() + values.numel() % 2)
        unit = words.fill(assignment.source.key(None, units.CHECK, 0))
        self.noise.draw(unit, values.numpy().reshape(-1))
        return values, inputs[torch.arange(rows) % len(inputs)]


@dataclass(frozen=True)
class HiddenPlace:
    """The model's own noise behind its first layer. sigma: sigma_r; norms: of that layer."""

    sigma: float
    norms: Sensitivity

    @classmethod
    def of(cls, model: nn.Module, input_shape: tuple[int, ...]) -> Self:
        """Of a model with noise of its own. Raises UserError for another."""
        noise = hidden_noise(model)
        if noise is None:
            raise UserError("the model has no noise of its own; give the sigma of input noise")
        return cls(noise.scale, sensitivity(require_split(model), noise, input_shape))

    @property
    def identity(self) -> dict[str, Any]:
        return {"sensitivity": asdict(self.norms)}

    def pinned(self, about: dict[str, Any]) -> HiddenPlace:
        """Norms may differ in their last bits elsewhere: those stored at the beginning are used."""
        return replace(self, norms=Sensitivity(**about["sensitivity"]))

    def check_batch(self, assignment: Assignment) -> tuple[nn.Module, Tensor]:
        split = require_split(assignment.model)
        hidden = split.hidden_shape(assignment.input_shape)
        rows = assignment.settings.executed_batch(int(np.prod(hidden)))
        inputs = torch.from_numpy(assignment.check_inputs)
        sampler = self._sampler(assignment, None)
        with torch.inference_mode():
            quiet = split.first(inputs[torch.arange(rows) % len(inputs)])
            noise = sampler.noisy(torch.zeros_like(inputs[0]), None, units.CHECK, 0, rows)
            at_zero = split.first(torch.zeros_like(inputs[:1]))
            return split.rest, quiet + (noise - at_zero)

    def sampler(self, assignment: Assignment, spec: ClassifierSpec) -> tuple[Counter, Tensor]:
        network, batch = self.check_batch(assignment)
        shapes = [(rows, *batch.shape[1:]) for rows in (spec.batch, assignment.settings.n0)]
        executed = ExecutedClassifier(network, spec.form, shapes)
        return self._sampler(assignment, executed), executed(batch)

    def _sampler(
        self, assignment: Assignment, executed: ExecutedClassifier | None
    ) -> HiddenNoiseSampler:
        split, noise = require_split(assignment.model), hidden_noise(assignment.model)
        assert noise is not None
        logits = split.rest if executed is None else executed.logits
        return HiddenNoiseSampler(split.first, logits, noise.std, assignment.source)


def sensitivity(split: SplitModel, noise: HiddenNoise, input_shape: tuple[int, ...]) -> Sensitivity:
    """Of the actual first layer, normalisation included. Raises UserError without noise."""
    if not bool((noise.std > 0).all()) or not bool(noise.std.isfinite().all()):
        raise UserError("every hidden component needs noise: some deviations are not positive")
    layer, shares = split.affine(input_shape), noise.shares
    l2 = operator_norms.l2_to_l2(layer, input_shape, shares)
    linf = operator_norms.linf_to_l2(layer, input_shape, shares, l2=l2)
    printed = operator_norms.hgm_linf_to_l2_as_printed(
        layer, input_shape, shares, feature_map=0 if shares.dim() > 1 else None
    )
    return Sensitivity(l2, linf, printed)
