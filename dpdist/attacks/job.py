"""Attack a test set, or its certificates, on a Ray cluster: resumable, with an identical table.

Certificates against attacks: no other class may be certified inside a certified radius. Each
certified input is attacked within its radius and certified again at the attacked point, in the same
way with fresh noise. A *contradiction* is a different class certified there. A single noisy answer
of a different class is not a contradiction, and neither is ABSTAIN: a valid certificate allows
both.

Each certificate is wrong with probability at most alpha, so some contradictions are allowed. Let A
points be attacked for each input. A contradiction needs a wrong first certificate (probability at
most alpha) or, if the first is correct, a wrong one at one of the points (at most alpha each, since
their noise is drawn after the point was fixed): at most (1 + A) alpha by the union bound, for every
input that was *submitted* to certification. Among the certified inputs only, the fraction of wrong
certificates may be larger, so the count is compared with all submitted inputs.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from dpdist.attacks import table as tables
from dpdist.attacks.gradient_attacks import (
    Ball,
    RandomizedClassifier,
    attack,
    distance,
    input_range,
)
from dpdist.attacks.table import VERDICT, AttackOptions, Plausibility, assess_plausibility
from dpdist.certification import score_bounds, table_reader
from dpdist.certification import worker as counting
from dpdist.certification.certificate import Certificate, ClassCounter, NoiseSampler
from dpdist.certification.cohen import Cohen, predict, sample_under_noise
from dpdist.certification.inference import ClassifierSpec, read_classifier_spec, use_single_thread
from dpdist.certification.noise import Gaussian
from dpdist.certification.reexecution import Reexecution
from dpdist.certification.score_bounds import SCORE_UNIT
from dpdist.certification.subject import NamedDatasetLike, Subject, require_logits
from dpdist.certification.table import ABSTAIN, CertificateTable
from dpdist.certification.worker import HiddenNoiseCounter, KeyedGenerator
from dpdist.cluster import job_folder
from dpdist.cluster.executor import SMALL_TRAINING, current_executor
from dpdist.cluster.resumable_job import Item, JobSpec, JobState, Row, WorkItems
from dpdist.core.errors import UserError
from dpdist.core.fields import NORMS, Norm
from dpdist.core.files import write_json
from dpdist.core.optional_imports import array_to_tensor
from dpdist.models import NO_CLASS, find_batch_dependence, predicted_classes
from dpdist.models.factory_code import FactoryCode
from dpdist.randomness.keys import StreamKeys
from dpdist.randomness.noise_location import NoiseLocation, find_noise_location

# --- counting answers -------------------------------------------------------------------------


_ROWS = 500
_MAX_NUMBERS = 16 * 2**20


def counting_assignment(
    model: nn.Module,
    location: NoiseLocation,
    classes: int,
    check_inputs: np.ndarray,
    stream_keys: StreamKeys,
    *,
    n: int,
    n0: int | None = None,
    backend: ClassifierSpec | None = None,
    code: FactoryCode | None = None,
) -> counting.Assignment:
    """Return what a worker of a certification needs to count answers under a model's noise.

    check_inputs: float32 (N, ...), inputs on which every worker must give the same answers. n:
    samples for an answer. n0: size of a second block that will be counted. backend: form and batch
    of the certificates that are attacked.
    """
    shape = tuple(check_inputs.shape[1:])
    cut = location.split(model, shape)
    numbers = int(np.prod(location.normals_shape(model, shape) or shape))
    batch = backend.batch if backend else max(1, min(_ROWS, _MAX_NUMBERS // numbers))
    noise = Gaussian(float(cut.std) if location.is_random and cut.before_noise is None else 1.0)
    return counting.Assignment(
        model,
        Cohen(sigma=noise.sigma, n0=n0 or batch, n=max(n, batch), batch=batch),
        counting.VoteSampler(noise, location),
        stream_keys,
        classes,
        shape,
        check_inputs,
        code=code or FactoryCode(),
    )


def choose_backend(
    assignment: counting.Assignment, backend: ClassifierSpec | None = None
) -> ClassifierSpec:
    """Return the executed classifier: in the given form and batch, or else chosen by a probe.

    Raises as `dpdist.certification.worker.probe`.
    """
    if backend is None:
        return counting.probe(assignment)
    network, batch = assignment.sampler.check_batch(assignment.on_device())
    return backend.for_check_batch(network, batch)


def require_attackable(assignment: counting.Assignment) -> None:
    """Raise UserError unless a model without noise returns logits for each input by itself."""
    batch = array_to_tensor(assignment.check_inputs)
    try:
        require_logits(assignment.model, batch, assignment.classes)
    except ValueError as error:
        raise UserError(f"the model cannot be attacked: {error}") from None
    if found := find_batch_dependence(assignment.model, batch, None):
        raise UserError(
            f"the model cannot be attacked: it looks at its batch: {found}",
            see="explanation/certificates.md#a-model-that-looks-at-its-batch",
        )


def count_answers(
    counter: ClassCounter, x: Tensor, index: int, stage: str, samples: int, batch: int
) -> np.ndarray:
    """Return the counts of each class in ``samples`` fresh answers at one input: int64 (classes,).

    x: float32, without a batch dimension. Answers without a class are not counted.
    """
    blocks = range(-(-samples // batch))
    return sample_under_noise(counter, x, index, blocks, batch, samples, stage)


@dataclass(frozen=True)
class MeanScores:
    """Scores of fresh samples at one input, in bins (`dpdist.certification.score_bounds`).

    bins, excess: int64 (K, BINS). histogram: int64 (K,), the samples that answer each class.
    """

    bins: np.ndarray
    excess: np.ndarray
    histogram: np.ndarray

    @classmethod
    def sample(
        cls, counter: ClassCounter, x: Tensor, index: int, stage: str, samples: int, batch: int
    ) -> MeanScores:
        """Return the scores of ``samples`` answers, drawn in the blocks of `count_answers`."""
        if not isinstance(counter, HiddenNoiseCounter):
            raise TypeError("mean scores need noise after a layer")
        rows = [min(batch, samples - start) for start in range(0, samples, batch)]
        blocks = [
            counter.sample_block(x, index, block, batch, draws, binned=True, stage=stage)
            for block, draws in enumerate(rows)
        ]
        names = ("bins", "excess", "histogram")
        return cls(*(np.sum([getattr(block, name) for block in blocks], axis=0) for name in names))

    @property
    def top_class(self) -> int:
        """Return the class of the largest mean score."""
        return int((self.bins @ score_bounds.BIN_EDGES[:-1] + self.excess.sum(1)).argmax())

    def predict(self, alpha: float) -> int:
        """Return the class of the largest expected score, or -1 if that is not certain.

        A different class is returned with probability at most alpha. The class of the largest mean
        is returned if a lower bound of its expected score is above that of every other class, each
        by a test. No smaller class is returned if the lower bounds of all K classes are valid, and
        the upper bound of the truly largest one: K + 1 statements share the error.
        """
        label, share = self.top_class, alpha / (len(self.bins) + 1)
        weights = score_bounds.bin_edge_weights(self.bins, self.excess)
        scores = score_bounds.BIN_EDGES / SCORE_UNIT
        low = score_bounds.betting_lower_bound(weights[label], scores, share)
        others = np.delete(weights, label, axis=0).T
        ahead = low > 0 and score_bounds.means_exceed(others, 1 - scores, 1 - low, share).all()
        return label if ahead else ABSTAIN


# --- the worker -------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttackBatch:
    """A block of the attacked inputs and its attack.

    rows: of the attacked inputs. sizes: float64, the attack's size for each of them; all are equal
    except in a check of certificates.
    """

    attack: str
    rows: slice
    sizes: np.ndarray


@dataclass(frozen=True)
class Assignment:
    """All that workers share; put into the object store once: workers need no data set.

    counting: how answers are counted. location: where the attacked classifier is random. inputs:
    float32 (N, ...), the attacked ones. indices: (N,), their positions in the data set. targets:
    int64 (N,), the classes that attacks lead away from. predicts_by_vote: whether the classifier
    answers by votes of noise samples, not by their mean scores.
    """

    counting: counting.Assignment
    location: NoiseLocation
    settings: AttackOptions
    inputs: np.ndarray
    indices: np.ndarray
    targets: np.ndarray
    predicts_by_vote: bool


class Attacker:
    """Finds the attacked points of blocks, with random numbers that depend on the input only."""

    def __init__(self, assignment: Assignment) -> None:
        use_single_thread()
        self._assignment = assignment
        self._randomness = KeyedGenerator(assignment.counting.stream_keys)
        model = assignment.counting.on_device().model.eval().requires_grad_(False)
        self.classifier = RandomizedClassifier(
            model, assignment.location, assignment.predicts_by_vote
        )

    def centers(self, batch: AttackBatch) -> Tensor:
        """Return the block's inputs: float32 (B, ...)."""
        return torch.from_numpy(self._assignment.inputs[batch.rows].copy())

    def find_points(self, batch: AttackBatch, targets: Tensor) -> tuple[Tensor, np.ndarray]:
        """Return attacked points, float32 (B, ...), and their distances from the inputs, (B,).

        Raises RuntimeError for a point that is not within its size.
        """
        settings, centers = self._assignment.settings, self.centers(batch)
        if batch.attack == tables.NONE:
            return centers, np.zeros(len(centers))
        points = attack(
            batch.attack,  # type: ignore[arg-type]
            self.classifier,
            Ball(centers, torch.tensor(batch.sizes), settings.norm, input_range(centers)),
            targets,
            self._assignment.indices[batch.rows].tolist(),
            self._randomness,
            steps=settings.steps,
            samples=settings.samples,
            restarts=settings.restarts,
            step_scale=settings.step_scale,
        )
        moved = distance(points.numpy(), centers.numpy(), settings.norm)
        if not (moved <= batch.sizes).all():
            raise RuntimeError(f"{batch.attack} left its ball")
        return points, moved


class Worker:
    """Called with a block; returns a JSON row for each of its inputs."""

    def __init__(self, assignment: Assignment) -> None:
        self._attacker = Attacker(assignment)
        self._assignment, self._settings = assignment, assignment.settings
        self._counter: ClassCounter | None = None
        self._reexecution: Reexecution | None = None
        counted = assignment.counting
        if assignment.location.is_random:
            self._counter = counting.build_checked_counter(counted).for_purpose("answers")
            self._batch = counted.executed_spec.batch
        else:
            others = array_to_tensor(counted.check_inputs)
            self._reexecution = counted.build_reexecution(
                counted.model, self._logits, others, "eager"
            )

    def __call__(self, batch: AttackBatch) -> list[dict[str, Any]]:
        indices = self._assignment.indices[batch.rows].tolist()
        labels = self._assignment.targets[batch.rows].tolist()
        targets = torch.tensor(labels)
        if self._settings.labels == "predicted" and batch.attack != tables.NONE:
            found = self._predict(self._attacker.centers(batch), indices, "targets")[0]
            targets = torch.where(found == NO_CLASS, targets, found)
        points, moved = self._attacker.find_points(batch, targets)
        stage = f"predict/{batch.attack}/{float(batch.sizes[0]).hex()}"
        predictions, hits = self._predict(points, indices, stage)
        return [
            {
                "index": index,
                "label": labels[i],
                "attack": batch.attack,
                "size": float(batch.sizes[i]),
                "distance": float(moved[i]),
                "prediction": int(predictions[i]),
                "hits": int(hits[i]),
                "n": 1 if self._counter is None else self._settings.n,
            }
            for i, index in enumerate(indices)
        ]

    def _logits(self, points: Tensor) -> Tensor:
        with torch.inference_mode():
            return self._attacker.classifier.logits(points, None)

    def _predict(self, points: Tensor, indices: list[int], stage: str) -> tuple[Tensor, Tensor]:
        """Return the classes and the number of answers of the most frequent one, int64 (B,) each.

        A deterministic model answers the largest logit, -1 if the logits are not finite. A
        randomized one answers with fresh noise, -1 if it abstains: by votes as PREDICT (Cohen et
        al., ICML 2019), by mean scores the class of the largest. For the stage "targets" it answers
        the most likely class and never abstains.
        """
        if self._counter is None:
            logits = self._logits(points)
            if self._reexecution is not None:
                self._reexecution(indices[0], stage, 0, points, logits, len(points))
            found = predicted_classes(logits)
            return found, (found != NO_CLASS).long()
        n, alpha = self._settings.n, None if stage == "targets" else self._settings.alpha
        labels, hits = [], []
        for x, index in zip(points, indices, strict=True):
            asked = self._counter, x, index, stage, n, self._batch
            if self._assignment.predicts_by_vote:
                histogram = count_answers(*asked)
                labels.append(predict(histogram, 1.0 if alpha is None else alpha, n))
            else:
                scores = MeanScores.sample(*asked)
                histogram = scores.histogram
                labels.append(scores.top_class if alpha is None else scores.predict(alpha))
            hits.append(int(histogram.max()))
        return torch.tensor(labels), torch.tensor(hits)


# --- the job ----------------------------------------------------------------------------------


_SLOW = 1000.0  # forward passes per second of an honest worker


class _AttackItems(WorkItems):
    """Blocks of attacked inputs. passes: the most passes of the model for each input."""

    def __init__(self, *work: Any, passes: int, **more: Any) -> None:
        super().__init__(*work, **more)
        self._passes = passes

    def is_small(self, state: JobState) -> bool:
        """Return whether the missing blocks need no more passes than a small training."""
        left = sum(self.weight(i) for i in self.items if i not in state.finished_rows)
        return left * self._passes <= SMALL_TRAINING


class BaseAttackJob(JobSpec):
    """Base of attacks on inputs and of attacks on certificates, as resumable jobs.

    purpose: in the keys of random numbers. worker: built from `worker_setup`, called with blocks.
    draws_per_point: the most noise samples that are answered at an attacked point;
    min_draws_per_point: the fewest. n0: size of a second block that is counted.
    """

    kind, metadata_key, is_extensible = job_folder.JobKind("attack", "attacking"), tables.KEY, True
    purpose: ClassVar[str]
    worker: ClassVar[Any]
    n0: int | None = None
    draws_per_point: int
    min_draws_per_point: int
    _blocks_per_attack: int

    def __init__(
        self,
        subject: Subject,
        dataset: NamedDatasetLike,
        settings: AttackOptions,
        indices: np.ndarray,
        targets: np.ndarray,
        backend: ClassifierSpec | None = None,
        predicts_by_vote: bool | None = None,
    ) -> None:
        """predicts_by_vote: see `Assignment`; None: as the location of the noise asks."""
        place = find_noise_location(subject.model)
        if settings.sigma is not None:
            place = place.with_input_noise(settings.sigma)
        inputs = np.ascontiguousarray(dataset.batch(indices).numpy())
        source = StreamKeys(
            self.purpose,
            settings.seed or secrets.token_hex(16),
            subject.digest,
            dataset.fingerprint,
            str(place.describe()),
            settings.sigma or 0.0,
        )
        counted = counting_assignment(
            subject.model, place, dataset.classes, inputs[:64], source,
            n=settings.n, n0=self.n0, backend=backend, code=subject.code,
        )  # fmt: skip
        if not place.is_random:
            require_attackable(counted)
        self._backend = backend
        self.seed, self._data = settings.seed, dataset.name
        if predicts_by_vote is None:
            predicts_by_vote = place.predicts_by_vote
        self.assignment = Assignment(
            counted, place, settings, inputs, indices, targets.astype(np.int64), predicts_by_vote
        )

    def identity(self) -> dict[str, Any]:
        it = self.assignment
        return {
            "model": it.counting.stream_keys.model_hash,
            "data": it.counting.stream_keys.data_hash,
            "dataset": self._data,
            "classes": it.counting.classes,
            "input_shape": list(it.inputs.shape[1:]),
            "noise": it.location.describe(),
            "settings": it.settings.identity,
        }

    def initial_record(self, output: Path) -> dict[str, Any]:
        it, backend = self.assignment, None
        if it.location.is_random:
            asked = self._backend

            def choose(counting: counting.Assignment) -> ClassifierSpec:  # Ray takes no partial
                return choose_backend(counting, backend=asked)

            chosen = current_executor().run_once(
                choose, it.counting, "the model cannot be attacked"
            )
            backend = chosen.pinned_fields
        return {"seed": it.counting.stream_keys.seed, "classifier": backend}

    def work_items(self, job_record: dict[str, Any], output: Path) -> WorkItems:
        it, backend = self.assignment, job_record["classifier"]
        counted = replace(
            it.counting,
            stream_keys=replace(it.counting.stream_keys, seed=job_record["seed"]),
            spec=ClassifierSpec.from_pinned(backend) if backend else None,
            inputs=len(it.indices),
            least_draws=self.min_draws_per_point if backend else 1,
        )
        it = self.assignment = replace(it, counting=counted)
        size = it.settings.batch_size(it.inputs[0].size)
        parts = [slice(start, start + size) for start in range(0, len(it.indices), size)]
        self._blocks_per_attack, blocks = len(parts), self.batches(parts)
        # Stalled: after ten times the time of the longest block.
        samples = it.settings.samples if it.location.is_random else 1
        passes = 3 * it.settings.steps * it.settings.restarts * samples + self.draws_per_point
        return _AttackItems(
            blocks,
            self.worker,
            self.worker_setup(),
            stall_seconds=max(120.0, 10 * size * passes / _SLOW),
            weights={key: len(block.sizes) for key, block in blocks.items()},
            passes=passes,
        )

    def batches(self, rows: list[slice]) -> dict[Item, AttackBatch]:
        """Return the blocks of work on these parts of the inputs, by name."""
        raise NotImplementedError

    def worker_setup(self) -> Any:
        return self.assignment

    def whole_attacks(self, state: JobState) -> dict[str, list[Row]]:
        """Return the rows of each attack, and size, all of whose blocks are finished."""
        found: dict[str, list[list[Row]]] = {}
        for key, rows in state.finished_rows.items():
            found.setdefault(str(key).rsplit(" rows ", 1)[0], []).append(rows)
        return {
            name: [row for rows in blocks for row in rows]
            for name, blocks in found.items()
            if len(blocks) == self._blocks_per_attack
        }


class AttackJob(BaseAttackJob):
    """Attacks on the inputs of a data set at every size."""

    table_file, schema, columns = tables.TABLE, tables.SCHEMA, tables.COLUMNS
    sort_columns, purpose, worker = ("attack", "size", "index"), "attack", Worker

    def __init__(
        self, subject: Subject, dataset: NamedDatasetLike, settings: AttackOptions
    ) -> None:
        labels = np.asarray(dataset.labels)
        indices = np.asarray(settings.indices(len(labels)), dtype=np.int64)
        if not len(indices):
            raise UserError(f"attack: no inputs chosen out of {len(labels)}")
        super().__init__(subject, dataset, settings, indices, labels[indices])
        self.draws_per_point = self.min_draws_per_point = settings.n

    def identity(self) -> dict[str, Any]:
        by_votes = self.assignment.predicts_by_vote
        return super().identity() | ({} if by_votes else {tables.ANSWERS: tables.MEAN_SCORES})

    def initial_record(self, output: Path) -> dict[str, Any]:
        it = self.assignment
        return super().initial_record(output) | {
            job_folder.LABEL_DIGEST_KEY: job_folder.label_digest(it.indices, it.targets)
        }

    def batches(self, rows: list[slice]) -> dict[Item, AttackBatch]:
        count = len(self.assignment.indices)
        return {
            f"{attack} {size!r} rows {part.start}": AttackBatch(
                attack, part, np.full(count, size)[part]
            )
            for attack, size in self.assignment.settings.attack_sizes
            for part in rows
        }

    def finish(self, state: JobState, output: Path) -> list[Row]:
        return [row for rows in self.whole_attacks(state).values() for row in rows]


# --- certificates against attacks -------------------------------------------------------------


@dataclass(frozen=True)
class _CheckSetup:
    """All that checkers share. certificate, sampler: the settings and the noise of certificates of
    attacked points."""

    assignment: Assignment
    certificate: Certificate
    sampler: NoiseSampler


class Checker:
    """Called with a block of certified inputs; returns a JSON row for each attacked point."""

    def __init__(self, shared: _CheckSetup) -> None:
        self._shared, self._assignment = shared, shared.assignment
        self._attacker = Attacker(self._assignment)
        self._counter = counting.build_checked_counter(self._assignment.counting)
        self._batch = self._assignment.counting.executed_spec.batch

    def __call__(self, batch: AttackBatch) -> list[Row]:
        certified = torch.from_numpy(self._assignment.targets[batch.rows].copy())
        indices = self._assignment.indices[batch.rows].tolist()
        points, moved = self._attacker.find_points(batch, certified)
        counter = self._counter.for_purpose(f"certify/{batch.attack}")
        certificate, sampler = self._shared.certificate, self._shared.sampler
        by_vote = self._assignment.predicts_by_vote
        rows = []
        for i, (index, target) in enumerate(zip(indices, certified.tolist(), strict=True)):
            verdict = certificate.certify_other_class(
                counter, points[i], index, target, self._batch, sampler
            )
            verdict = certificate.verdict_for_classifier(by_vote, verdict, sampler)
            rows.append(
                {
                    "attack": batch.attack,
                    "index": index,
                    "certified": target,
                    "radius": float(batch.sizes[i]),
                    "distance": float(moved[i]),
                    "selected": verdict.selected,
                    "prediction": verdict.prediction,
                    "k": verdict.k,
                    "n": verdict.n,
                    "p_lower": verdict.p_lower,
                    "contradiction": verdict.prediction not in (ABSTAIN, target),
                }
            )
        return rows


class CertificateCheckJob(BaseAttackJob):
    """Attacks on the certificates of a table, each within its radius; and their verdict."""

    table_file, schema, columns = tables.CHECK_TABLE, tables.CHECK_SCHEMA, tables.CHECK_COLUMNS
    sort_columns, purpose, worker = ("attack", "index"), "check certificates", Checker
    verdict: Plausibility  # of the finished job

    def __init__(
        self,
        subject: Subject,
        dataset: NamedDatasetLike,
        certificates: Path,
        settings: AttackOptions,
        claim: str | None = None,
    ) -> None:
        found = table_reader.read(certificates)
        _check_same_origin(found, subject, dataset)
        found, rows, by_vote = _apply_claim(found, claim)
        self._found, self._claim = found, claim
        self._submitted = [rows[i] for i in settings.indices(len(rows))]
        self._certified = [row for row in self._submitted if row["prediction"] != ABSTAIN]
        if not self._certified:
            count = len(self._submitted)
            raise UserError(f"{found.path}: none of the {count} chosen inputs is certified")
        # The probe of this job fills in the rest. Attacks count on CPUs.
        executed = read_classifier_spec(found.job_record, found.path)
        backend = replace(executed, notes=(), check="").on_cpu()
        backend.check_memory(dataset.batch(slice(0, 1)).shape[1:], found.path)
        norm: Norm = "l2" if found.norm == "l2" else "linf"  # no other passes
        if found.attack_noise is None:
            raise UserError(
                f"{found.path}: only Gaussian smoothing can be attacked, not {found.noise}"
            )
        certificate, self._sampler = found.certificate_class.recreate(found, norm, backend.batch)
        self._certificate = certificate
        own = {"norm": norm, "n": found.n, "sigma": certificate.sigma}
        settings = settings.model_copy(update=own)
        self.n0 = self.min_draws_per_point = certificate.n0
        self.draws_per_point = certificate.n0 + certificate.n
        indices, targets = self._column("index"), self._column("prediction")
        super().__init__(subject, dataset, settings, indices, targets, backend, by_vote)

    def _column(self, name: str) -> np.ndarray:
        return np.array([row[name] for row in self._certified])

    def identity(self) -> dict[str, Any]:
        about = {
            "certificates": _digest(self._submitted),
            "again": self._certificate.model_dump(mode="json"),
        }
        by_vote = self.assignment.predicts_by_vote
        if by_vote != self._found.predicts_by_vote:
            about[tables.ANSWERS] = tables.VOTES if by_vote else tables.MEAN_SCORES
        return {**super().identity(), **about, "claim": self._claim}

    def batches(self, rows: list[slice]) -> dict[Item, AttackBatch]:
        radii = self._column("radius")
        return {
            f"{attack} rows {part.start}": AttackBatch(attack, part, radii[part])
            for attack in self.assignment.settings.attacks
            for part in rows
        }

    def initial_record(self, output: Path) -> dict[str, Any]:
        return super().initial_record(output) | {"submitted": len(self._submitted)}

    def worker_setup(self) -> _CheckSetup:
        return _CheckSetup(self.assignment, self._certificate, self._sampler)

    def finish(self, state: JobState, output: Path) -> list[Row]:
        # All attacks in the folder count, those of earlier calls too.
        whole = self.whole_attacks(state)
        rows = [row for some in whole.values() for row in some]
        found, settings = self._found, self.assignment.settings
        self.verdict = verdict = assess_plausibility(
            len({row["index"] for row in rows if row["contradiction"]}),
            len(self._submitted),
            found.alpha,
            len(whole),
        )
        about = {
            **asdict(verdict),
            "plausible": verdict.plausible,
            "alpha": found.alpha,
            "certified": len(self._certified),
            "points": len(rows),
            "same_class": sum(row["selected"] == row["certified"] for row in rows),
            "attacks": sorted(whole),
            "steps": settings.steps,
            "restarts": settings.restarts,
            "sigma": found.sigma,
            "certificates": " ".join(filter(None, (found.name, self._claim))),
        }
        write_json(output / VERDICT, about)
        return rows


def _check_same_origin(
    certificates: CertificateTable, subject: Subject, dataset: NamedDatasetLike
) -> None:
    path, about = certificates.path, certificates.job_record
    if "classifier" not in about or not about.get("settings"):
        raise UserError(f"{path}: does not state its settings and its classifier; certify again")
    if about["model"] != subject.digest:
        raise UserError(f"{path}: must be certificates of {subject.where}, got another model's")
    if about["data"] != dataset.fingerprint:
        raise UserError(f"{path}: must be certificates of {dataset.name}, got other data's")
    if certificates.norm not in NORMS:
        raise UserError(
            f"{path}: only L2 and L-infinity certificates can be attacked, these are "
            f"{certificates.norm.upper()}"
        )


def _apply_claim(
    certificates: CertificateTable, claim: str | None
) -> tuple[CertificateTable, list[dict[str, Any]], bool]:
    """Return the table, its rows and whether the claimed sizes are of the classifier by votes.

    claim: a column of sizes, which replaces radius and prediction of each row; None: none does.
    """
    rows = certificates.table.to_pylist()
    if claim is None:
        return certificates, rows, certificates.predicts_by_vote
    certificate, _, norm = claim.rpartition("_")
    sizes = certificates.select_sizes(certificate, norm)
    claimed = [
        {**row, "radius": size, "prediction": answer}
        for row, size, answer in zip(
            rows, sizes.size.tolist(), sizes.prediction.tolist(), strict=True
        )
    ]
    return replace(certificates, norm=norm), claimed, sizes.predicts_by_vote


def _digest(rows: list[dict[str, Any]]) -> str:
    """Return the digest of the certificates' columns that a check depends on."""
    kept = [[row[name] for name in ("index", "prediction", "radius", "alpha")] for row in rows]
    return hashlib.blake2b(json.dumps(kept).encode(), digest_size=16).hexdigest()
