"""PATE: noisy votes of teachers on disjoint shards label public inputs, which train a student.

The student may be released. Papernot et al., "Semi-supervised Knowledge Transfer" (ICLR 2017) and
"Scalable Private Learning with PATE" (ICLR 2018: Confident-GNMax); with a smoothed student, as in
Section 5.7 of DPlis (PoPETs 2021).

Labels can spread over a graph of public inputs, from answered inputs to all others: Zhou et al.,
"Learning with Local and Global Consistency" (NIPS 2003), in closed form, with the class mass
normalization of Zhu et al. (ICML 2003). scikit-learn's LabelSpreading has a directed, unweighted
graph of neighbors without class normalization: on MNIST's public inputs its labels are three to
eight points less accurate.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from dpdist.config.sections import BaseRecipe, ModelRecipe
from dpdist.config.training import TrainingRecipe
from dpdist.core.errors import UserError
from dpdist.core.fields import (
    MIN_POSITIVE,
    Count,
    FilePath,
    FractionBelowOne,
    Positive,
    PositiveOrZero,
    RejectBool,
    Section,
    Text,
)
from dpdist.methods.base import (
    Capabilities,
    DrawCount,
    Execution,
    Method,
    MethodState,
    PublicRecords,
)
from dpdist.privacy.phases import GaussianSteps, NoisyVotes
from dpdist.privacy.plan import PrivacyPlan, StepPlan

if TYPE_CHECKING:
    from collections.abc import Callable

    from scipy.sparse import csr_matrix
    from torch import Tensor

    from dpdist.data import Dataset
    from dpdist.gradients.perturbations import Perturbation
    from dpdist.methods.base import TrainingDriver
    from dpdist.privacy.claims import Claim
    from dpdist.privacy.guarantee import Guarantee
    from dpdist.privacy.phases import Phase


# --- spreading of labels ----------------------------------------------------------------------


FEATURES = "method.spreading.features"
_BATCH, _TOLERANCE = 500, 1e-8


class SpreadingRecipe(Section):
    """The spreading of released labels over all public inputs along a graph.

    Only public inputs and released labels are read: post-processing without privacy cost.

    Attributes:
        features: Distances are between inputs as they are, or between the fixed scattering of
            images (the model of that name).
        neighbors: Number of nearest inputs that each input is tied to.
        alpha: How far a label goes: an answer counts 1 - alpha against its neighbors' word, so
            that a wrong one is overruled.
        equal_classes: Divide each class's scores by their sum, which takes classes for equally
            common: a class that is ten times rarer than others is then given to many of them
            (papers/pate/README.md has figures).
    """

    features: Literal["inputs", "scattering"] = "inputs"
    neighbors: Count = 10
    alpha: Annotated[float, RejectBool, Field(ge=MIN_POSITIVE, le=0.9999)] = 0.99
    equal_classes: bool = True

    def check(self, public: Dataset, context: str) -> None:
        """Raise UserError for too few public inputs, or inputs without such features."""
        if len(public) <= self.neighbors:
            raise UserError(
                f"{context}: method.spreading.neighbors: must be < {len(public):,}, the public "
                f"inputs of {public.name}, got {self.neighbors:,}"
            )
        if self.features != "inputs":
            try:
                _feature_transform(self.features, public)
            except UserError as error:
                raise UserError(f"{context}: {error}") from error

    def build_graph(self, public: Dataset) -> csr_matrix:
        """Return the similarity graph of all public inputs, which passed `check`."""
        transform = _feature_transform(self.features, public)
        found = [
            transform(public.batch(slice(start, start + _BATCH)))
            for start in range(0, len(public), _BATCH)
        ]
        return similarity_graph(np.concatenate(found), self.neighbors)

    def spread_labels(
        self, graph: csr_matrix, answered: np.ndarray, released_labels: np.ndarray, classes: int
    ) -> np.ndarray:
        """Return the label of every public input, int64 (N,); -1 if no label reaches it.

        A label may also be lost in the solution's tolerance (far along weak edges, or with a small
        alpha). answered (A,): places of the answered inputs; released_labels (A,): their labels.
        """
        scores = spread_scores(graph, answered, released_labels, classes, self.alpha)
        if self.equal_classes:
            masses = scores.sum(axis=0)
            scores = scores / np.where(masses > 0, masses, 1.0)  # classes without a label stay 0
        return np.where(scores.max(axis=1) > 0, scores.argmax(axis=1), -1)


def _feature_transform(name: str, public: Dataset) -> Callable[[Tensor], np.ndarray]:
    """Return the function from a batch of inputs (B, ...) to features, float64 (B, D)."""
    import torch

    if name == "inputs":
        return lambda batch: batch.flatten(1).double().numpy()
    from dpdist.models.features import scattering

    shape = public.input_shape
    if len(shape) != 3:
        raise UserError(f"{FEATURES}: scattering is of images, {public.name} has inputs of {shape}")
    try:
        module = scattering(shape, 1)[0]
    except ValueError as error:
        raise UserError(f"{FEATURES}: scattering of {shape}: {error}; take inputs") from error

    def transform(batch: Tensor) -> np.ndarray:
        with torch.inference_mode():
            result: np.ndarray = module(batch).double().numpy()
            return result

    return transform


def similarity_graph(points: np.ndarray, neighbors: int) -> csr_matrix:
    """Return S = D^(-1/2) W D^(-1/2), sparse (N, N), of points (N, D).

    w_ij = exp(-d_ij^2 / (2 s^2)) for the nearest `neighbors` of each point, where s is half the
    mean distance of the farthest; W is the mean of these weights and their transpose.
    """
    from scipy import sparse
    from sklearn.neighbors import NearestNeighbors

    distances, near = NearestNeighbors(n_neighbors=neighbors).fit(points).kneighbors()
    width = max(float(distances[:, -1].mean()) / 2, 1e-12)
    weights = np.exp(-((distances / width) ** 2) / 2)
    rows = np.repeat(np.arange(len(points)), neighbors)
    shape = (len(points), len(points))
    one_way = sparse.csr_matrix((weights.ravel(), (rows, near.ravel())), shape=shape)
    both = (one_way + one_way.T) / 2
    roots = np.sqrt(np.maximum(np.asarray(both.sum(axis=1)).ravel(), 1e-300))
    scale = sparse.diags(1 / roots)
    return (scale @ both @ scale).tocsr()


def spread_scores(
    graph: csr_matrix, answered: np.ndarray, released_labels: np.ndarray, classes: int, alpha: float
) -> np.ndarray:
    """Return scores F = (I - alpha S)^(-1) Y, float64 (N, classes); Y has a 1 for each label.

    The matrix is positive definite, so conjugate gradients solve the system, to a residual of 1e-8
    of Y's norm.
    """
    from scipy import sparse
    from scipy.sparse.linalg import cg

    count = graph.shape[0]
    given = np.zeros((count, classes))
    given[answered, released_labels] = 1.0
    system = sparse.identity(count, format="csr") - alpha * graph
    columns = [cg(system, given[:, each], rtol=_TOLERANCE)[0] for each in range(classes)]
    result: np.ndarray = np.maximum(np.stack(columns, axis=1), 0.0)
    return result


# --- PATE -------------------------------------------------------------------------------------


VOTES = "votes.npy"  # in a run's private folder
UNANSWERED = -1.0


class PublicQueries(Section):
    """The public inputs that teachers are asked about; their labels are never read.

    Attributes:
        data: Name of the data set, whose training split is asked about; of the run's own data set,
            the records that data.public declares public.
        root: Folder that holds the data set; by default that of the recipe's own data.
        classes: Number of classes of the data set.
    """

    data: Text
    root: FilePath | None = None
    classes: Annotated[int, RejectBool, Field(ge=1, le=100_000)] = 10


class TeacherOverrides(Section):
    """The parts of the recipe that differ for teachers: the model, its training.

    Attributes:
        model: The teachers' model; by default the student's.
        training: The teachers' training; by default the student's.
    """

    model: ModelRecipe | None = None
    training: TrainingRecipe | None = None

    @field_validator("model", mode="before")
    @classmethod
    def _model_by_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @property
    def overridden_sections(self) -> dict[str, Section]:
        """Return the sections that are given, by name."""
        return {name: section for name, section in self if section is not None}


class SmoothedLoss(Section):
    """The student's loss is the mean over `draws` of its loss at parameters + std * N(0, I).

    Attributes:
        std: Standard deviation of the noise on each parameter.
        augmentations: Number of noisy copies of the parameters.
    """

    std: Positive
    augmentations: DrawCount = 10


@dataclass(frozen=True)
class QueriedRecords(PublicRecords):
    """Public records of which teachers label the first `queries`."""

    queries: int = 0
    spreading: SpreadingRecipe | None = None

    def check(self, public_dataset: Any, private_dataset: Any, context: str) -> None:
        shape = private_dataset.input_shape
        if public_dataset.input_shape != shape or len(public_dataset) < self.queries:
            raise UserError(
                f"{context}: method.queries: needs {self.queries:,} public inputs of shape "
                f"{shape}, {public_dataset.name} has {len(public_dataset):,} of "
                f"{public_dataset.input_shape}"
            )
        if self.spreading is not None:
            self.spreading.check(public_dataset, context)


class PATE(Method):
    """(epsilon, delta)-DP of the student, by the noise on the votes that it learns from.

    Each record is in the shard of one of the `teachers` by a keyed hash, and each teacher is
    trained on its shard without a clip or noise, by the sections of `teaching` (default: the
    student's). Each votes for one class of each of the first `queries` public inputs: a record
    that comes or goes moves one vote of each. With a `threshold`, an input passes if the most votes
    for a class, plus noise, reach it; the first `answers` of those that pass get the class with the
    most votes, each count plus noise. Both numbers are fixed beforehand and counted in full; inputs
    that pass beyond `answers` stay without a label. One Gaussian of mu = 1 /
    privacy.noise_multiplier covers all of it (the noise is given, or computed for privacy.epsilon).

    The student sees only those inputs and labels: its training is post-processing and has no
    privacy cost.

    Attributes:
        teachers: Number of teachers, each with a shard of the records.
        public: The public inputs that teachers are asked about.
        queries: Number of public inputs that are voted on.
        answers: The most inputs that get a label.
        threshold: Number of votes, plus noise, that an input needs to pass; 0 lets all pass.
        screening: Part of mu^2 for the thresholds.
        teaching: Sections of the recipe that differ for teachers.
        spreading: Spread the labels over all public inputs, and train the student on these.
        smoothing: Smooth the student's loss (DPlis).
    """

    name: Literal["pate"] = "pate"
    display_name: ClassVar[str] = "PATE"
    excluded: ClassVar[Mapping[str, str]] = {
        "audit": ": what is private is released before the steps",
        "data.max_train": ", a share of the number of records (take data.fraction)",
        "privacy.batch_cap": "",
        "resources.archive_private": ": votes stay where they are",
    }
    teachers: Annotated[int, RejectBool, Field(ge=1, le=10_000)]
    public: PublicQueries
    queries: Count
    answers: Count
    threshold: PositiveOrZero = 0.0
    screening: FractionBelowOne = 0.0
    teaching: TeacherOverrides = TeacherOverrides()
    spreading: SpreadingRecipe | None = None
    smoothing: SmoothedLoss | None = None

    @model_validator(mode="after")
    def _consistent(self) -> PATE:
        if self.answers > self.queries:
            raise ValueError("answers: must be <= queries, of which they are a part")
        if bool(self.threshold) != bool(self.screening):
            raise ValueError("threshold and screening belong together: give both, or neither")
        if 0 < self.screening < MIN_POSITIVE:
            raise ValueError(f"screening: must be 0, or at least {MIN_POSITIVE:g}")
        if not self.threshold and self.answers < self.queries:
            raise ValueError(
                f"answers: must equal queries, {self.queries}, without a threshold, got "
                f"{self.answers}"
            )
        return self

    # --- said in the recipe, the plan and the report

    def check(self, recipe: BaseRecipe) -> None:
        super().check(recipe)
        model = self.teaching.model
        if model and model.pretrained_part not in (None, recipe.model.pretrained_part):
            raise ValueError(  # every teacher depends on the data of those weights
                f"method {self.name} does not support public weights of method.teaching.model, "
                "which are not compared with the records: use those of model for the teachers"
            )
        own = self.public.data == recipe.data.name and self.public.root in (None, recipe.data.root)
        if own and not recipe.data.public:
            raise ValueError(
                "data.public: required: method.public names the run's own data set, of which some "
                "records must be public"
            )

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(takes_gradient_steps=False, steps_are_post_processing=True)

    @property
    def public_records(self) -> QueriedRecords:
        public = self.public
        return QueriedRecords(
            "method.public.data", public.data, public.classes, public.root, used_for_training=True,
            queries=self.queries, spreading=self.spreading,
        )  # fmt: skip

    def cost(self, steps: GaussianSteps) -> tuple[Phase, ...]:
        """Return the phase of the votes: the student's steps are post-processing."""
        counts = (self.queries, self.answers, self.screening)
        return (NoisyVotes(steps.noise_multiplier, *counts, steps.steps, steps.sample_rate),)

    def claim(self, plan: PrivacyPlan, proved: Guarantee) -> Claim | None:
        from dpdist.privacy.claims import Claim

        votes = _votes_phase(plan)
        if votes.noise_multiplier == 0:
            return None
        return Claim(
            "PATE, Confident-GNMax",
            f"{votes.queries} queries, thresholds {votes.screen_noise:.4g}, {votes.answers} "
            f"answers, votes {votes.vote_noise:.4g}",
            None,
            pate_claim(
                votes.queries, votes.answers, votes.screen_noise, votes.vote_noise, plan.delta
            ),
            proved,
            "sound",
            "Renyi bounds at numbers fixed beforehand; the exact Gaussian profile is smaller. What "
            "is printed in papers depends on the votes, and tells of them",
        )

    def reported_values(self, private_folder: Path) -> list[tuple[str, str]]:
        """Return the number of labels, which follows from the release."""
        from dpdist.privacy.ledger import Ledger

        found = Ledger.read(private_folder / "ledger.jsonl").recorded_answers
        if not found:
            return []
        given = sum(label != UNANSWERED for label in found[0])
        of = f"{self.answers:,} that epsilon pays for, of {self.queries:,} inputs asked about"
        return [("labels", f"{given:,} of {of}")]

    def describe(self, plan: PrivacyPlan) -> str:
        votes = _votes_phase(plan)
        screened = ""
        if votes.screening:
            screened = (
                f"those with {self.threshold:g} votes or more under noise {votes.screen_noise:.4g} "
                f"are answered, at most {votes.answers:,}, "
            )
        return (
            f"{self.teachers:,} teachers on disjoint shards vote on {votes.queries:,} public "
            f"inputs; {screened}with noise {votes.vote_noise:.4g} on each count of votes; "
            f"{'' if self.spreading is None else 'labels spread over all public inputs; '}then "
            f"{plan.steps:,} steps on these labels, expected batch {plan.step(0).expected_batch:g}"
        )

    def execution(self) -> Execution[Any]:
        return PATEExecution(self)


class PATEExecution(Execution[PATE]):
    """Teachers vote in bulk, before the workers; these train the student on the labels."""

    def train(self, run: TrainingDriver) -> None:
        job, method = run.job, self.method
        public, own = job.public_records(), job.records_without_canaries()
        given = method.spreading
        spread = None if given is None else partial(given.spread_labels, given.build_graph(public))
        inputs = public.batch(slice(0, method.queries))
        votes = self._votes(run, inputs, own.classes)
        told = run.release_once(
            votes.tobytes(), lambda key: self.release_labels(votes, job.plan, key)
        )
        labels = np.array(told, dtype=np.int64)
        answered = labels != UNANSWERED
        if not answered.any():
            raise UserError(
                f"{job.recipe.name}: none of {method.queries:,} inputs passed method.threshold, "
                "and the budget is spent; begin again with a lower one"
            )
        if spread is not None:
            asked = np.flatnonzero(answered)
            labels = spread(asked, labels[answered], own.classes)
            inputs, answered = public.batch(slice(0, len(public))), labels != UNANSWERED
        run.run_workers(
            LabeledQueries(
                public.name, own.classes, inputs.numpy()[answered], labels[answered],
                job.plan.records,
            )
        )  # fmt: skip

    def _votes(self, run: TrainingDriver, inputs: Tensor, classes: int) -> np.ndarray:
        """Return the PRIVATE votes, computed once and kept in the private folder."""
        from dpdist.core.files import write_atomic

        path = run.job.folder.private / VOTES
        if not path.exists():
            sections = self.method.teaching.overridden_sections
            teachers = run.train_teachers(self.method.teachers, sections)
            buffer = io.BytesIO()
            np.save(buffer, count_votes(teachers.class_scores(inputs)))
            write_atomic(path, buffer.getvalue())
        votes: np.ndarray = np.load(path, allow_pickle=False)
        if votes.shape != (len(inputs), classes):
            raise UserError(f"{path}: damaged: remove it to let the teachers vote again")
        return votes

    def release_labels(self, votes: np.ndarray, plan: PrivacyPlan, key: bytes) -> list[float]:
        """Return the answers that the plan pays for: the label of each question, or UNANSWERED.

        votes: PRIVATE, (queries, classes). Confident-GNMax (Papernot et al. 2018, Algorithm 1), all
        thresholds before the first answer. key: used for nothing else.
        """
        from dpdist.gradients.noise import add_noise
        from dpdist.randomness.keys import derive_key

        paid, votes = _votes_phase(plan), votes.astype(np.float64)
        passed = np.arange(paid.queries)
        if paid.screening:
            most = votes[: paid.queries].max(axis=1)
            noisy = add_noise(most, derive_key(key, "threshold"), paid.screen_noise)
            passed = np.flatnonzero(noisy >= self.method.threshold)
        asked = passed[: paid.answers]
        labels = np.full(len(votes), UNANSWERED)
        counts = add_noise(votes[asked], derive_key(key, "answer"), paid.vote_noise)
        labels[asked] = counts.argmax(axis=1)
        return labels.tolist()

    def transform_records(self, records: Any, plan: PrivacyPlan, key: bytes) -> LabeledQueries:
        """Return the answered inputs. Raises UserError for other records, which are unprotected."""
        if not isinstance(records, LabeledQueries):
            raise UserError("method pate: the student learns from answers, never from records")
        return records

    def perturbation(
        self, step: StepPlan, learning_rate: float, state: MethodState
    ) -> Perturbation:
        from dpdist.gradients.perturbations import ParameterPerturbation, Perturbation

        smooth = self.method.smoothing
        if smooth is None:
            return Perturbation()
        return ParameterPerturbation(smooth.augmentations, smooth.std)


def pate_claim(
    queries: int, answers: int, threshold_std: float, vote_std: float, delta: float = 1e-5
) -> Guarantee:
    """Return Confident-GNMax's epsilon by Renyi bounds that do not look at votes.

    epsilon = rho + 2 sqrt(rho ln(1/delta)), rho = Q / 2 s1^2 + A / s2^2. Source: Papernot et
    al. 2018.
    """
    from dpdist.privacy.claims import claimed_guarantee

    rho = queries / (2 * threshold_std**2) + answers / vote_std**2
    return claimed_guarantee(
        rho + 2 * math.sqrt(rho * math.log(1 / delta)),
        delta,
        "add-or-remove-one",
        "Confident-GNMax, Renyi bounds independent of the data",
        (f"at most {queries} queries and {answers} answers, fixed beforehand",),
    )


def _votes_phase(plan: PrivacyPlan) -> Any:
    """Return the phase of the votes."""
    return plan.phases[0]


def count_votes(scores: np.ndarray) -> np.ndarray:
    """Return votes, int64 (B, classes), from the scores of teachers (teachers, B, classes).

    Each teacher has one vote on each input, or no vote if its scores are not finite: a record moves
    at most one vote.
    """
    import torch

    from dpdist.models import predicted_classes

    _, inputs, classes = scores.shape
    choices = predicted_classes(torch.from_numpy(scores)).numpy() + 1
    return np.stack([np.bincount(choices[:, i], minlength=classes + 1)[1:] for i in range(inputs)])


@dataclass(frozen=True, eq=False)
class LabeledQueries:
    """Inputs (A, ...) and their labels (A,), repeated up to `records`.

    So the plan's sampling rate and batch are also the student's, for any number of answers.
    """

    name: str
    classes: int
    inputs: np.ndarray
    labels: np.ndarray
    records: int

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.inputs.shape[1:])

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=16, person=b"dpdist.answered")
        digest.update(np.ascontiguousarray(self.inputs).tobytes())
        digest.update(self.labels.tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return self.records

    def batch(self, indices: np.ndarray | slice) -> Tensor:
        """Return inputs, float32 (B, *input_shape)."""
        import torch

        return torch.from_numpy(self.inputs[self._input_indices(indices)])

    def targets(self, indices: np.ndarray | slice) -> Tensor:
        """Return labels, int64 (B,)."""
        import torch

        return torch.from_numpy(self.labels[self._input_indices(indices)])

    def _input_indices(self, indices: np.ndarray | slice) -> np.ndarray:
        return np.arange(self.records)[indices] % len(self.labels)
