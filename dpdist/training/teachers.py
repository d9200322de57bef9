"""Teachers: models trained on disjoint shards of the private records, in bulk.

A record's teacher follows from a keyed hash of its own input, and a teacher from its own shard, a
key of its own and public numbers: batch, steps and divisor are the shard's. So one record that
comes or goes changes one teacher, and no byte of another. A shard that is empty, or on which
training diverges, leaves its teacher as it began: whether that happens is a secret too, and may not
stop a run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from dpdist import bulk
from dpdist.base.errors import UserError
from dpdist.base.fields import Section
from dpdist.base.reading import read_bytes
from dpdist.base.storage import private_folder, write_json
from dpdist.base.table_files import Column
from dpdist.bulk.job import Task, Work, run
from dpdist.privacy.plan import PrivacyPlan
from dpdist.randomness.keys import derive_key, key_id
from dpdist.runs.folder import RunFolder
from dpdist.runs.planning import ordinary, plan_at
from dpdist.runs.recipe import Recipe
from dpdist.training.building import check_model, initial_model, model_spec
from dpdist.training.finite import Diverged
from dpdist.training.job import TrainJob, read_run_key
from dpdist.training.many import ManyTrainings, file_digest, files_of, kept_in, trained_here
from dpdist.training.records import source_of, training_data

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = "teachers"  # in a run's private folder
TABLE, KEY = "teachers.parquet", b"dpdist.teachers"
_WEIGHTS = "model.safetensors"
SCHEMA = pa.schema(
    [
        pa.field("model", pa.int64(), nullable=False),
        pa.field("digest", pa.string(), nullable=False),
    ]
)
COLUMNS: dict[str, Column] = {"model": (int, 0), "digest": (str, None)}


def shards_by_hash(hashes: np.ndarray, key: bytes, count: int) -> np.ndarray:
    """Which of `count` shards each record is in, by a keyed hash of its own input: int64 (N,).

    hashes: as `Dataset.hashes`. Equal inputs are in one shard, whatever their labels.
    """
    raw, size = hashes.tobytes(), hashes.dtype.itemsize

    def shard(start: int) -> int:
        digest = hashlib.blake2b(
            raw[start : start + size], digest_size=16, key=key, person=b"dpdist.shard"
        )
        return int.from_bytes(digest.digest(), "little") % count

    return np.array([shard(start) for start in range(0, len(raw), size)], dtype=np.int64)


def plan_of_shard(recipe: Recipe, records: int) -> tuple[Recipe, PrivacyPlan]:
    """What a teacher's training executes on a shard of so many records, at least one; a shard
    smaller than a batch is the batch."""
    batch = min(recipe.training.batch_size, records)
    training = recipe.training.model_copy(update={"batch_size": batch})
    privacy = recipe.privacy.model_copy(update={"nominal_records": None})
    own = recipe.model_copy(update={"training": training, "privacy": privacy})
    return own, plan_at(own, records, 0.0)


@dataclass(frozen=True)
class TeacherSetup:
    """All that teachers have in common. recipe: of their training (`planning.ordinary`)."""

    recipe: Recipe
    count: int
    key: bytes


class TeacherTrainer:
    """Called with a teacher's number; returns its files, by name."""

    def __init__(self, shared: TeacherSetup) -> None:
        import torch

        torch.set_num_threads(1)  # sums must not depend on the machine
        self._shared = shared
        self._records = training_data(shared.recipe, source_of(shared.recipe))
        key = derive_key(shared.key, "shards")
        self._shards = shards_by_hash(self._records.hashes, key, shared.count)

    def __call__(self, number: int) -> dict[str, bytes]:
        members = self._shards == number
        if not members.any():
            return self._as_it_began()
        recipe, plan = plan_of_shard(self._shared.recipe, int(members.sum()))
        key = derive_key(self._shared.key, "teacher", number)
        try:
            with trained_here(recipe, plan, self._records, members, key) as folder:
                return files_of(folder)
        except Diverged:
            return self._as_it_began()

    def _as_it_began(self) -> dict[str, bytes]:
        from dpdist import models

        spec = model_spec(self._shared.recipe, self._records)
        with TemporaryDirectory(prefix="dpdist-teacher-") as folder:
            models.save(initial_model(self._shared.recipe, spec), spec, Path(folder))
            return files_of(Path(folder))


class _Teachings(ManyTrainings):
    witness = _WEIGHTS

    def found(self, raw: bytes, place: Path) -> dict[str, Any]:
        return {"digest": file_digest(raw)}


class Teachers(Work):
    """The teachers of one run; all of it is private."""

    kind = bulk.Kind("set of teachers", "training teachers")
    file, key, schema, columns, order = TABLE, KEY, SCHEMA, COLUMNS, ("model",)

    def __init__(
        self, job: TrainJob, count: int, sections: Mapping[str, Section] | None = None
    ) -> None:
        self._job, self._count = job, count
        self.recipe = ordinary(job.recipe, sections)

    def identity(self) -> dict[str, Any]:
        """The folder is the run's, whose recipe does not change."""
        settings = {"teachers": self._count, "key": key_id(read_run_key(self._job.folder))}
        return {"data": self._job.own_records().fingerprint, "settings": settings}

    def begin(self, output: Path) -> dict[str, Any]:
        private_folder(output)
        return {"seed": derive_key(read_run_key(self._job.folder), "teachers").hex()}

    def open(self, about: dict[str, Any], output: Path) -> Task:
        recipe = self.recipe
        shared = TeacherSetup(recipe, self._count, bytes.fromhex(about["seed"]))
        records = len(self._job.own_records())
        _, plan = plan_of_shard(recipe, max(1, records // self._count))
        examples = plan.steps * plan.step(0).expected_batch
        return _Teachings(self._count, TeacherTrainer, shared, output / "models", examples)


class Ensemble:
    """Trained teachers. PRIVATE: what they say may leave only as a method releases it."""

    def __init__(self, folder: RunFolder, trusted_factory: str | None = None) -> None:
        """Raises UserError when they are missing, or not the ones that were trained."""
        from dpdist import models

        home = folder.private / FOLDER
        table = bulk.read_table(home / TABLE, COLUMNS, KEY)
        self._places = [kept_in(home / "models", n) for n in table["model"].to_pylist()]
        for place, digest in zip(self._places, table["digest"].to_pylist(), strict=True):
            if file_digest(read_bytes(place / _WEIGHTS)) != digest:
                raise UserError(f"{place}: damaged: not the teacher that this run trained")
        self._factory = trusted_factory
        self.input_shape = tuple(models.read_spec(self._places[0]).input_shape)

    def __len__(self) -> int:
        return len(self._places)

    def scores(self, inputs: Tensor) -> np.ndarray:
        """What each teacher says of each input (B, *input_shape): logits, float64 (K, B, C)."""
        import torch

        from dpdist import models

        found = []
        for place in self._places:
            model = models.load(place, trusted_factory=self._factory)
            with torch.inference_mode():
                found.append(model(inputs).double().numpy())
        return np.stack(found)


def train_teachers(
    job: TrainJob,
    count: int,
    sections: Mapping[str, Section] | None = None,
    *,
    here: bool = False,
) -> Ensemble:
    """Train the teachers of a run, or those that are missing, on the pool of actors.

    sections: of the recipe, in place of its own. here: in this process instead.
    """
    import torch

    def show(done: int, total: int, rate: float) -> None:
        write_json(job.folder.progress, {"done": done, "steps": total, "rate": rate})

    work, output = Teachers(job, count, sections), job.folder.private / FOLDER
    if sections:  # the recipe's own was checked before the run
        check_model(work.recipe, job.own_records())
    actors, threads = job.recipe.resources.certify_actors, torch.get_num_threads()
    try:
        run(work, output, actors=actors, progress=show, here=here)
    finally:
        torch.set_num_threads(threads)  # a teacher in this process took one
    return Ensemble(job.folder, work.recipe.model.name)
