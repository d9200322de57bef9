"""Count answers of a randomised classifier, by votes or mean scores, with fresh noise."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from dpdist.certification import score_bounds
from dpdist.certification.certificate import ABSTAIN, ClassCounter
from dpdist.certification.inference import (
    ClassifierSpec,
    ExecutedClassifier,
    choose_inference_form,
    digest_classes,
)
from dpdist.certification.reexecution import Reexecution, RowChoice, isolated_executor
from dpdist.certification.score_bounds import SCORE_UNIT
from dpdist.certification.worker import HiddenNoiseCounter, KeyedGenerator, build_counter
from dpdist.core.errors import UserError
from dpdist.core.optional_imports import array_to_tensor
from dpdist.models import find_batch_dependence, fresh_copy
from dpdist.models.factory_code import FactoryCode
from dpdist.randomness.keys import CHECK, StreamKeys
from dpdist.randomness.noise_location import NoiseLocation, NoiseSplit

_ROWS = 500
_MAX_NUMBERS = 16 * 2**20


@dataclass(frozen=True)
class AttackedClassifier:
    """The classifier whose answers are counted, and where it is random.

    check_inputs: float32 (N, ...), some inputs on which every worker must answer alike. spec: the
    executed form, fixed before counting, of the network behind the noise when that is hidden; until
    then, one whose form and batch it is to have. votes: whether it answers by votes of draws, or by
    their mean scores; None: as the place does. choice: of the counted rows that are executed again
    (`dpdist.certification.reexecution`); None: none. code: with which the model was saved, and
    each worker must have.
    """

    model: nn.Module
    location: NoiseLocation
    classes: int
    check_inputs: np.ndarray
    spec: ClassifierSpec | None = None
    votes: bool | None = None
    choice: RowChoice | None = None
    code: FactoryCode = field(default_factory=FactoryCode)

    @property
    def predicts_by_vote(self) -> bool:
        return self.location.predicts_by_vote if self.votes is None else self.votes

    @property
    def cut(self) -> NoiseSplit:
        return self.location.split(self.model, self.check_inputs.shape[1:])


def choose_form(classifier: AttackedClassifier, source: StreamKeys) -> ClassifierSpec:
    """The executed classifier, chosen by a short probe, or of the form and batch that it has."""
    like = classifier.spec
    classifier.code.check("this worker")
    network, batch = _build_check_batch(
        classifier, classifier.cut, source, like.batch if like else None
    )
    return (
        like.for_check_batch(network, batch) if like else choose_inference_form(network, batch)[0]
    )


def require_logits(classifier: AttackedClassifier) -> None:
    """Raise UserError unless the model gives each input finite logits for each class by itself."""
    batch = array_to_tensor(classifier.check_inputs)
    with torch.inference_mode():
        logits = fresh_copy(classifier.model.eval())(batch)  # workers have it as it came
    expected = (len(batch), classifier.classes)
    if tuple(logits.shape) != expected:
        raise UserError(
            f"the model cannot be attacked: it returns {tuple(logits.shape)} for a batch, not "
            f"{expected}"
        )
    if not bool(torch.isfinite(logits).all()):
        raise UserError(
            "the model cannot be attacked: its outputs are not finite numbers (did the training "
            "diverge?)"
        )
    copies, sigma = None, classifier.location.smoothing_sigma
    if sigma is not None:
        noise = torch.randn(batch.shape, generator=torch.Generator().manual_seed(0))
        copies = batch[:1] + sigma * noise
    if found := find_batch_dependence(classifier.model, batch, copies):
        raise UserError(f"the model cannot be attacked: it looks at its batch: {found}")


class CounterFactory:
    """Counters of the executed classifier, each with noise of its own.

    batch_sizes: block sizes that will be asked for beside the executed batch. Raises UserError when
    this machine answers otherwise than the one that fixed the form, ValueError without noise or
    form.
    """

    def __init__(
        self, classifier: AttackedClassifier, source: StreamKeys, batch_sizes: tuple[int, ...] = ()
    ) -> None:
        if not classifier.location.is_random or classifier.spec is None:
            raise ValueError("nothing is random, or the executed form is not fixed")
        self._counted, self._source, spec = classifier, source, classifier.spec
        self._cut = classifier.cut
        self._network, self._others = _build_check_batch(classifier, self._cut, source, spec.batch)
        shapes = [
            (rows, *self._others.shape[1:]) for rows in dict.fromkeys((spec.batch, *batch_sizes))
        ]
        self._executed = ExecutedClassifier(self._network, spec.form, shapes)
        if digest_classes(self._executed(self._others)) != spec.check:
            raise UserError(
                "this worker computes other classes on the check batch than the model did when "
                f"the attack began ({spec.machine}, torch {spec.torch_version}): use workers of "
                "one kind"
            )
        self.batch, self._form = spec.batch, spec.form

    def build_counter(self, purpose: str) -> ClassCounter:
        """The counter whose noise belongs to ``purpose``."""
        counted = self._counted
        source = replace(self._source, purpose=f"{self._source.purpose}/{purpose}")
        shape, inspect = tuple(counted.check_inputs.shape[1:]), None
        if counted.choice is not None:
            inspect = Reexecution(
                counted.choice.for_purpose(purpose), self._network, self._executed.logits,
                self._others,
                self._form, isolated_executor(self._form, counted.code),
            )  # fmt: skip
        return build_counter(self._cut, self._executed, source, counted.classes, shape, inspect)


def split_into_blocks(draws: int, batch: int) -> list[tuple[int, int]]:
    """Return the number of each canonical block of the draws, and how many of its rows count."""
    return [(block, min(batch, draws - block * batch)) for block in range(-(-draws // batch))]


def count_answers(
    counter: ClassCounter, x: Tensor, index: int, stage: str, draws: int, batch: int
) -> np.ndarray:
    """Classes of ``draws`` fresh answers at one input (float32, no batch dimension): int64
    (classes,). Answers without a class are in none of them."""
    result: np.ndarray = np.sum(
        [
            counter.histogram(x, index, stage, block, batch, rows)
            for block, rows in split_into_blocks(draws, batch)
        ],
        axis=0,
    )
    return result


@dataclass(frozen=True)
class MeanScores:
    """Scores of fresh draws at one input, counted in bins (`dpdist.certification.score_bounds`).

    bins, excess: int64 (K, BINS). histogram: int64 (K,), how many draws say each class.
    """

    bins: np.ndarray
    excess: np.ndarray
    histogram: np.ndarray

    @classmethod
    def sample(
        cls, counter: ClassCounter, x: Tensor, index: int, stage: str, draws: int, batch: int
    ) -> MeanScores:
        """Draw them, in the blocks of `count_answers`. Raises TypeError for a counter of votes
        alone."""
        if not isinstance(counter, HiddenNoiseCounter):
            raise TypeError("mean scores need noise behind a layer")
        found = [
            counter.sample_block(x, index, block, batch, rows, binned=True, stage=stage)
            for block, rows in split_into_blocks(draws, batch)
        ]
        names = ("bins", "excess", "histogram")
        return cls(*(np.sum([getattr(each, name) for each in found], axis=0) for name in names))

    @property
    def top_class(self) -> int:
        """The class of the largest mean score."""
        return int((self.bins @ score_bounds.BIN_EDGES[:-1] + self.excess.sum(1)).argmax())

    def predict(self, alpha: float) -> int:
        """Return the class of the largest expected score, or -1 where that is not clear.

        Another class is returned with probability at most alpha. The class of the largest mean is
        named when a lower bound of its expectation is not refuted as an upper bound of any other
        one. If the bounds of all K classes from below hold, and that of the truly largest one from
        above, no smaller one is named: K + 1 statements share the error.
        """
        label, share = self.top_class, alpha / (len(self.bins) + 1)
        weights, scores = (
            score_bounds.bin_edge_weights(self.bins, self.excess),
            score_bounds.BIN_EDGES / SCORE_UNIT,
        )
        low = score_bounds.betting_lower_bound(weights[label], scores, share)
        others = np.delete(weights, label, axis=0).T
        ahead = low > 0 and score_bounds.means_exceed(others, 1 - scores, 1 - low, share).all()
        return label if ahead else ABSTAIN


def _build_check_batch(
    counted: AttackedClassifier, cut: NoiseSplit, source: StreamKeys, rows: int | None
) -> tuple[nn.Module, Tensor]:
    """The executed network and a check batch for it, under a random unit used for nothing else."""
    at = array_to_tensor(counted.check_inputs)
    if cut.before_noise is not None:
        with torch.inference_mode():
            at = cut.before_noise.eval()(at)
    shape = tuple(at.shape[1:])
    rows = rows or max(1, min(_ROWS, _MAX_NUMBERS // int(np.prod(shape))))
    normals = KeyedGenerator(source).normals((0,), CHECK, 0, rows, shape)
    return cut.after_noise, at[torch.arange(rows) % len(at)] + torch.as_tensor(cut.std) * normals
