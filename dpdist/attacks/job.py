"""A test set under attack, on a Ray cluster: resumable, the same table however it was computed."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import pyarrow as pa

from dpdist import bulk, models
from dpdist.attacks import table as tables
from dpdist.attacks.counting import Counted, fix_form, require_logits
from dpdist.attacks.worker import Assignment, Block, Worker
from dpdist.base.errors import UserError
from dpdist.bulk import Progress
from dpdist.bulk.job import Book, Item, Row, Task, Work, run
from dpdist.certification import job as certification
from dpdist.certification.classifier import ClassifierSpec
from dpdist.certification.reexecution import RowChoice
from dpdist.cluster.calls import run_once
from dpdist.randomness.places import place_of
from dpdist.randomness.units import UnitSource

if TYPE_CHECKING:
    from dpdist.attacks.settings import AttackSettings

_SLOW = 1000.0  # forward passes per second of an honest worker


class Data(certification.Data, Protocol):
    """What is needed of a data set: ``dpdist.data.Dataset`` has it."""

    @property
    def name(self) -> str: ...


def attack_model(
    model_folder: Path,
    dataset: Data,
    settings: AttackSettings,
    output: Path,
    *,
    actors: int | None = None,
    progress: Progress | None = None,
    trusted_factory: str | None = None,
) -> pa.Table:
    """Attack the inputs that ``settings`` names at every size; return the table.

    ``output`` receives attacks.parquet and what `dpdist.bulk.job.run` says, which names the other
    arguments and what is raised. Called again it computes what is missing: after an interruption,
    or when more attacks or sizes are asked for; the table holds all that the folder has.
    """
    work = Attack(model_folder, dataset, settings, trusted_factory)
    return run(work, output, actors=actors, progress=progress)


class Attacking(Work):
    """What attacks on inputs and attacks on certificates have in common, as bulk jobs.

    purpose: in the names of random numbers. worker: takes `shared` and then blocks; answers: draws
    that it makes of the noise at each attacked point; certain: those that it makes at all of them.
    """

    kind, key, grows = bulk.Kind("attack", "attacking"), tables.KEY, True
    purpose: ClassVar[str]
    worker: ClassVar[Any]
    answers: int
    certain: int

    def __init__(
        self,
        model_folder: Path,
        dataset: Data,
        settings: AttackSettings,
        indices: np.ndarray,
        targets: np.ndarray,
        trusted_factory: str | None,
        like: ClassifierSpec | None = None,
        votes: bool | None = None,
    ) -> None:
        """votes: whether answers are votes of draws or their mean scores; None: as the model's
        noise asks."""
        model = models.load(model_folder, trusted_factory=trusted_factory)
        place = place_of(model)
        if settings.sigma is not None:
            place = place.smoothed(settings.sigma)
        inputs = np.ascontiguousarray(dataset.batch(indices).numpy())
        counted = Counted(
            model, place, dataset.classes, inputs[:64], like, votes,
            code=models.code_of(model_folder),
        )  # fmt: skip
        require_logits(counted)
        source = UnitSource(
            self.purpose,
            settings.seed or secrets.token_hex(16),
            models.model_hash(model_folder),
            dataset.fingerprint,
            str(place.describe()),
            settings.sigma or 0.0,
        )
        self.seed, self._data = settings.seed, dataset.name
        self.assignment = Assignment(
            counted, settings, source, inputs, indices, targets.astype(np.int64)
        )

    def identity(self) -> dict[str, Any]:
        it = self.assignment
        return {
            "model": it.source.model_hash,
            "data": it.source.data_hash,
            "dataset": self._data,
            "classes": it.counted.classes,
            "input_shape": list(it.inputs.shape[1:]),
            "noise": it.counted.place.describe(),
            "settings": it.settings.identity,
        }

    def begin(self, output: Path) -> dict[str, Any]:
        form = None
        if self.assignment.counted.place.random:
            form = run_once(_form, self.assignment, "the model cannot be attacked").pinned
        return {"seed": self.assignment.source.seed, "classifier": form}

    def open(self, about: dict[str, Any], output: Path) -> Task:
        it, form = self.assignment, about["classifier"]
        spec = form and ClassifierSpec.of(form)
        each = self.certain if spec else 1
        choice = RowChoice(len(it.indices) * each, -(-each // spec.batch) if spec else 1)
        it = self.assignment = replace(
            it,
            source=replace(it.source, seed=about["seed"]),
            counted=replace(it.counted, spec=spec, choice=choice),
        )
        size = it.settings.block(it.inputs[0].size)
        blocks = self.blocks([slice(i, i + size) for i in range(0, len(it.indices), size)])
        # Ten times the longest honest block.
        draws = it.settings.draws if it.counted.place.random else 1
        passes = 3 * it.settings.steps * it.settings.restarts * draws + self.answers
        return Task(
            blocks,
            self.worker,
            self.shared(),
            silence=max(120.0, 10 * size * passes / _SLOW),
            weights={key: len(block.sizes) for key, block in blocks.items()},
        )

    def blocks(self, rows: list[slice]) -> dict[Item, Block]:
        """What is to be done with these rows of the inputs, by name."""
        raise NotImplementedError

    def shared(self) -> Any:
        return self.assignment


class Attack(Attacking):
    """Attacks on the inputs of a data set at every size."""

    file, schema, columns = tables.TABLE, tables.SCHEMA, tables.COLUMNS
    order, purpose, worker = ("attack", "size", "index"), "attack", Worker

    def __init__(
        self,
        model_folder: Path,
        dataset: Data,
        settings: AttackSettings,
        trusted_factory: str | None = None,
    ) -> None:
        labels = np.asarray(dataset.labels)
        indices = np.asarray(settings.indices(len(labels)), dtype=np.int64)
        if not len(indices):
            raise UserError(f"attack: no inputs chosen out of {len(labels)}")
        super().__init__(model_folder, dataset, settings, indices, labels[indices], trusted_factory)
        self.answers = self.certain = settings.n

    def identity(self) -> dict[str, Any]:
        by_votes = self.assignment.counted.by_votes
        return super().identity() | ({} if by_votes else {tables.ANSWERS: tables.MEAN_SCORES})

    def begin(self, output: Path) -> dict[str, Any]:
        it = self.assignment
        return super().begin(output) | {bulk.LABELS: bulk.label_digest(it.indices, it.targets)}

    def blocks(self, rows: list[slice]) -> dict[Item, Block]:
        self._each = len(rows)
        count = len(self.assignment.indices)
        return {
            f"{attack} {size!r} rows {part.start}": Block.of(attack, part, np.full(count, size))
            for attack, size in self.assignment.settings.pairs
            for part in rows
        }

    def finish(self, book: Book, output: Path) -> list[Row]:
        """The rows of each attack and size of which every block is there."""
        by_pair: dict[str, list[list[Row]]] = {}
        for key, rows in book.rows.items():
            by_pair.setdefault(str(key).rsplit(" rows ", 1)[0], []).append(rows)
        whole = [some for some in by_pair.values() if len(some) == self._each]
        return [row for some in whole for rows in some for row in rows]


def _form(assignment: Assignment) -> ClassifierSpec:
    """Chosen on the kind of machine that will execute it."""
    return fix_form(assignment.counted, assignment.source)
