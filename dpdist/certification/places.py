"""The place of a model's noise as a certificate samples it: by votes, or by sums of scores.

It knows the network that is executed behind the noise, a batch on which every worker must answer
alike, and the sampler that counts under the noise.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from dpdist.base.errors import UserError
from dpdist.base.tensors import tensor_of
from dpdist.certification import operator_norms
from dpdist.certification.bank import BankSampler, split_first_layer
from dpdist.certification.certificate import Counter
from dpdist.certification.classifier import ClassifierSpec, ExecutedClassifier
from dpdist.certification.expected_score_bounds import Sensitivity
from dpdist.certification.noises import Gaussian, Noise
from dpdist.certification.quadrature import Quadrature, stated
from dpdist.certification.sampling import HiddenNoiseSampler, Sampler
from dpdist.models import SplitModel, require_split
from dpdist.randomness import units
from dpdist.randomness.places import BehindLayer, NoiseCut, Nowhere, Place, place_of

if TYPE_CHECKING:
    from dpdist.certification.worker import Assignment


@dataclass(frozen=True)
class SmoothedPlace:
    """Votes under noise on the input, and under what noise the model has behind it. bank: the same
    stream for all inputs, behind a dense first layer once; keeps_blocks: the first blocks of it
    stay. where: the place, beside the law that ``noise`` has on the input. quadrature: what noise
    behind an affine first layer certifies with it."""

    noise: Noise
    bank: bool = False
    keeps_blocks: bool = True
    where: Place = field(default_factory=Nowhere)
    quadrature: Quadrature | None = None

    @property
    def sigma(self) -> float:
        return self.noise.sigma

    @property
    def certified(self) -> Noise:
        """The noise on the input that all of it is worth."""
        return self.noise if self.quadrature is None else Gaussian(self.quadrature.both)

    @property
    def identity(self) -> dict[str, Any]:
        return {} if self.quadrature is None else self.quadrature.about

    def pinned(self, about: dict[str, Any]) -> SmoothedPlace:
        """A norm may differ in its last bits elsewhere: the one stored at the beginning is used."""
        return replace(self, quadrature=stated(about, self.sigma))

    def check_batch(
        self, assignment: Assignment, *, copies: bool = False
    ) -> tuple[nn.Module, Tensor]:
        cut = self.where.cut(assignment.model, assignment.input_shape)
        if cut.first is not None:
            return _check_behind(cut, assignment, copies)
        noise, inputs = self._check_parts(assignment, copies)
        return cut.rest, noise + inputs

    def sampler(self, assignment: Assignment, spec: ClassifierSpec) -> tuple[Counter, Tensor]:
        cut = self.where.cut(assignment.model, assignment.input_shape)
        if cut.first is not None:
            return _sampler_behind(cut, assignment, spec)
        source, classes, stream = assignment.source, assignment.classes, assignment.stream
        shapes = [(rows, *assignment.input_shape) for rows in (spec.batch, assignment.settings.n0)]
        if self.bank and (parts := split_first_layer(cut.rest)) is not None:
            bank = BankSampler(
                *parts, spec.form, self.noise, source, classes, shapes,
                evict=not self.keeps_blocks, stream=stream,
            )  # fmt: skip
            parts_of = self._check_parts(assignment)
            others = bank.behind_first(*parts_of)
            bank.inspect = assignment.reexecution(parts[1], bank.logits, others, spec)
            return bank, bank.classes_of(*parts_of)
        classify = ExecutedClassifier(cut.rest, spec.form, shapes, stream.device)
        batch = self.check_batch(assignment)[1]
        sampler = Sampler(
            classify, self.noise, source, classes, assignment.input_shape, bank=self.bank,
            stream=stream, inspect=assignment.reexecution(cut.rest, classify.logits, batch, spec),
        )  # fmt: skip
        return sampler, classify(batch)

    def _check_parts(self, assignment: Assignment, copies: bool = False) -> tuple[Tensor, Tensor]:
        """Noise and inputs of the check batch."""
        stream, rows = assignment.stream, assignment.rows(int(np.prod(assignment.input_shape)))
        inputs = tensor_of(assignment.check_inputs).to(stream.device)
        unit = assignment.source.key(None, units.CHECK, 0)
        values = torch.empty(rows, *assignment.input_shape, device=stream.device)
        return stream.fill(self.noise, unit, values), inputs[_in_turn(rows, inputs, copies)]


@dataclass(frozen=True)
class ScoredPlace:
    """Sums of scores under the model's own noise behind its first layer. sigma: sigma_r; norms: of
    that layer."""

    sigma: float
    norms: Sensitivity

    @classmethod
    def of(cls, model: nn.Module, input_shape: tuple[int, ...]) -> Self:
        """Of a model with such noise. Raises UserError for another."""
        noise = place_of(model).behind_first()
        return cls(noise.scale, sensitivity(require_split(model), noise, input_shape))

    @property
    def identity(self) -> dict[str, Any]:
        return {"sensitivity": asdict(self.norms)}

    def pinned(self, about: dict[str, Any]) -> ScoredPlace:
        """Norms may differ in their last bits elsewhere: those stored at the beginning are used."""
        return replace(self, norms=Sensitivity(**about["sensitivity"]))

    def check_batch(
        self, assignment: Assignment, *, copies: bool = False
    ) -> tuple[nn.Module, Tensor]:
        return _check_behind(self._cut(assignment), assignment, copies)

    def sampler(self, assignment: Assignment, spec: ClassifierSpec) -> tuple[Counter, Tensor]:
        return _sampler_behind(self._cut(assignment), assignment, spec)

    def _cut(self, assignment: Assignment) -> NoiseCut:
        return place_of(assignment.model).cut(assignment.model, assignment.input_shape)


def _in_turn(rows: int, inputs: Tensor, copies: bool) -> Tensor:
    """Which of the inputs stands in each row of a check batch."""
    return torch.arange(rows) % (1 if copies else len(inputs))


def _check_behind(
    cut: NoiseCut, assignment: Assignment, copies: bool = False
) -> tuple[nn.Module, Tensor]:
    """`check_batch` of a place with a network before its noise."""
    assert cut.first is not None
    stream = assignment.stream
    inputs = tensor_of(assignment.check_inputs).to(stream.device)
    sampler = HiddenNoiseSampler(cut.first, cut.rest, cut.std, assignment.source, stream=stream)
    with torch.inference_mode():
        at_zero = cut.first(torch.zeros_like(inputs[:1]))
        rows = assignment.rows(at_zero.numel())
        quiet = cut.first(inputs[_in_turn(rows, inputs, copies)])
        noise = sampler.noisy(torch.zeros_like(inputs[0]), None, units.CHECK, 0, rows)
        return cut.rest, quiet + (noise - at_zero)


def _sampler_behind(
    cut: NoiseCut, assignment: Assignment, spec: ClassifierSpec
) -> tuple[Counter, Tensor]:
    """`sampler` of a place with a network before its noise."""
    assert cut.first is not None
    network, batch = _check_behind(cut, assignment)
    shapes = [(rows, *batch.shape[1:]) for rows in (spec.batch, assignment.settings.n0)]
    stream = assignment.stream
    executed = ExecutedClassifier(network, spec.form, shapes, stream.device)
    sampler = HiddenNoiseSampler(
        cut.first, executed.logits, cut.std, assignment.source, stream=stream,
        inspect=assignment.reexecution(network, executed.logits, batch, spec),
    )  # fmt: skip
    return sampler, executed(batch)


def sensitivity(split: SplitModel, noise: BehindLayer, input_shape: tuple[int, ...]) -> Sensitivity:
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
