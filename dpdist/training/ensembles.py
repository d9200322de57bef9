"""Many trainings in bulk: ensembles of teachers on disjoint shards, and the answers they release.

One chunk of work is one training, in one process, by the loop that trains runs. A record's teacher
follows from a keyed hash of its own input, and a teacher from its own shard, its own key and public
numbers: batch, steps and divisor are the shard's. So adding or removing one record changes one
teacher, and no byte of the others. A shard that is empty, or on which training diverges, leaves
its teacher as it was initialized: whether that happens is secret, too, and must not stop a run.

Answers are counted in the ledger before they are computed: those of a run whose models stay
private, and votes that are released once, before the steps.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from dpdist import models
from dpdist.cluster import job_folder
from dpdist.cluster.executor import SMALL_TRAINING, Executor
from dpdist.cluster.resumable_job import (
    Item,
    JobSpec,
    JobState,
    Partial,
    Row,
    WorkItems,
    WorkUnit,
    run_job,
)
from dpdist.cluster.versions import PACKAGES, code_digest
from dpdist.core.errors import UserError
from dpdist.core.fields import Section
from dpdist.core.files import (
    TRAINING_FOLDER,
    ColumnSpec,
    make_private_folder,
    read_bytes,
    temporary_folder,
    write_atomic,
    write_json,
)
from dpdist.data import Dataset
from dpdist.privacy.ledger import JournalError, Ledger, QueriesExhausted, new_nonce
from dpdist.privacy.plan import PrivacyPlan
from dpdist.randomness.keys import derive_key, key_id, new_run_key
from dpdist.runs.charging import build_charge, reserve_charge
from dpdist.runs.folder import RunFolder, read_verified_ledger, verify_ledger
from dpdist.runs.recipe import Recipe, plan_with_noise, without_privacy
from dpdist.training.collectives import Reducer
from dpdist.training.job import CheckedTraining, TrainJob
from dpdist.training.loop import TrainingDiverged
from dpdist.training.model_setup import check_model, initial_model, model_spec
from dpdist.training.records import data_source, records_with_canaries
from dpdist.training.worker import recipe_digest, run_training

# --- many trainings ---------------------------------------------------------------------------


_MIN_RECORDS_PER_SECOND = 50.0  # records per second that an honest worker trains on


class TrainingItems(WorkItems):
    """Distribute trainings 0 to count - 1.

    The worker is called with a number and returns files by name. They are kept in a folder of that
    number, and the digest of `checked_file` in the journal. plan: of about one training.
    """

    checked_file: ClassVar[str]

    def __init__(
        self,
        count: int,
        worker: Callable[[Any], Callable[[Any], Any]],
        shared: Any,
        folder: Path,
        plan: PrivacyPlan,
    ) -> None:
        numbers: dict[Item, int] = {f"model {n}": n for n in range(count)}
        examples = plan.steps * plan.step(0).expected_batch if plan.steps else 0.0
        super().__init__(
            numbers,
            worker,
            shared,
            stall_seconds=max(600.0, 10 * examples / _MIN_RECORDS_PER_SECOND),
        )
        self._numbers, self._folder, self._examples = numbers, folder, examples

    def is_small(self, state: JobState) -> bool:
        """Return whether the missing trainings together are a small one."""
        left = sum(item not in state.finished_rows for item in self.items)
        return left * self._examples <= SMALL_TRAINING

    def read_result(self, raw: bytes, folder: Path) -> dict[str, Any]:
        """Return the table row of a training from its checked file. Raises UserError if damaged."""
        raise NotImplementedError

    def journal_entries(self, name: str, answer: Mapping[str, bytes]) -> Iterable[dict[str, Any]]:
        place = self._item_folder(name)
        for file, content in answer.items():
            write_atomic(place / file, content)
        return [{"key": name, "digest": file_digest(answer[self.checked_file])}]

    def parse_entry(self, entry: dict[str, Any]) -> tuple[WorkUnit, Partial]:
        place = self._item_folder(entry["key"])
        raw = read_bytes(place / self.checked_file)
        if file_digest(raw) != entry["digest"]:
            raise UserError(
                f"{place}: damaged: not the model that the journal knows; remove "
                f"{self._folder.parent}"
            )
        return WorkUnit(entry["key"], 0, 1), self.read_result(raw, place)

    def table_rows(self, item: Item, partial: Partial) -> list[Row]:
        return [{"model": self._numbers[item], **partial}]

    def _item_folder(self, name: Item) -> Path:
        return item_folder(self._folder, self._numbers[name])


class EnsembleJob(JobSpec):
    """Private trainings of one recipe, whose randomness follows from a secret seed.

    identity: of the job. setup: what workers share, a dataclass whose `key` follows from the seed.
    """

    def __init__(self, identity: dict[str, Any], seed: str | None, setup: Any) -> None:
        self._identity, self.seed, self.setup = identity, seed, setup

    def identity(self) -> dict[str, Any]:
        return self._identity

    def setup_of_seed(self, seed: str) -> Any:
        """Return what workers share, with the key of a seed (hex)."""
        return replace(self.setup, key=bytes.fromhex(seed))

    def initial_record(self, output: Path) -> dict[str, Any]:
        make_private_folder(output)
        return {"seed": self.seed or secrets.token_hex(32)}


def refuse_ensemble(recipe: Recipe, what: str) -> None:
    """Raise UserError for a recipe by which many models cannot be trained, each on own records."""
    withheld = recipe.method.capabilities.not_releasable_reason
    for wrong, why in (
        (recipe.tune is not None, "a private search is not a single training; give the recipe.yaml "
         "that a run of it wrote"),
        (recipe.canary_audit is not None, "audit.kind: canaries plants records in this training"),
        (recipe.user_unit is not None, "privacy.unit: user protects users, and this counts or "
         "distinguishes single records"),
        (bool(recipe.data.class_sampling), "data.class_sampling: class counts are of all records, "
         "and each model has a part of them"),
        (withheld is not None, withheld),
    ):  # fmt: skip
        if wrong:
            raise UserError(f"{recipe.name}: {what}: {why}")


def item_folder(folder: Path, number: int) -> Path:
    """Return the folder of a training's files."""
    return folder / f"{number:04d}"


def file_digest(raw: bytes) -> str:
    """Return a digest of a file's content; that of a private model is private."""
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the contents of the files in a folder, by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@dataclass(frozen=True)
class _InProcessDriver:
    """Train in this process (`dpdist.methods.base.TrainingDriver`)."""

    job: TrainJob

    def run_workers(self, records: Any = None) -> None:
        job = self.job if records is None else replace(self.job, replacement_records=records)
        run_training(job, Reducer(0, 1, torch.device("cpu")))

    def train_teachers(self, count: int, sections: Any = None) -> Any:
        raise NotImplementedError("one of many trainings has no teachers")

    def release_once(self, private_source: bytes, draw: Any) -> list[float]:
        raise NotImplementedError("one of many trainings releases nothing")

    def write_summary(self) -> None:
        raise NotImplementedError("workers write the summary")


@contextmanager
def train_in_process(
    recipe: Recipe,
    plan: PrivacyPlan,
    records: Dataset,
    member_mask: np.ndarray,
    key: bytes,
    shared_cache: dict[Any, Any] | None = None,
) -> Iterator[Path]:
    """Train in this process on the records where `member_mask` is True; yield the model's folder.

    The folder is temporary. The model is a function of the arguments. shared_cache: of trainings
    that differ only in their keys (`dpdist.training.job.TrainJob`).

    Raises UserError, among others `dpdist.training.loop.TrainingDiverged`.
    """
    privacy = recipe.privacy.model_copy(update={"run_key": key.hex()})
    own = recipe.model_copy(update={"privacy": privacy})
    with temporary_folder(TRAINING_FOLDER) as place:  # the run key is in it
        folder = RunFolder(place / "run")
        checked = CheckedTraining(own, folder, plan, records.select(member_mask).fingerprint, None)
        job = replace(checked.begin(), member_mask=member_mask, shared_cache=shared_cache)
        own.method.execution().train(_InProcessDriver(job))
        yield job.folder.model_folder


# --- teachers on disjoint shards --------------------------------------------------------------


FOLDER = "teachers"  # in a run's private folder
TABLE, KEY = "teachers.parquet", b"dpdist.teachers"
_WEIGHTS = "model.safetensors"
SCHEMA = pa.schema(
    [pa.field("model", pa.int64(), nullable=False), pa.field("digest", pa.string(), nullable=False)]
)
COLUMNS: dict[str, ColumnSpec] = {"model": (int, 0), "digest": (str, None)}


def shards_by_hash(hashes: np.ndarray, key: bytes, count: int) -> np.ndarray:
    """Return the shard of each record, of `count`, by a keyed hash of its input: int64 (N,).

    hashes: as `Dataset.hashes`. Equal inputs are in one shard, also with different labels.
    """
    raw, size = hashes.tobytes(), hashes.dtype.itemsize

    def shard(start: int) -> int:
        digest = hashlib.blake2b(
            raw[start : start + size], digest_size=16, key=key, person=b"dpdist.shard"
        )
        return int.from_bytes(digest.digest(), "little") % count

    return np.array([shard(start) for start in range(0, len(raw), size)], dtype=np.int64)


def plan_of_shard(recipe: Recipe, records: int) -> tuple[Recipe, PrivacyPlan]:
    """Return recipe and plan of a teacher's training on a shard of `records` >= 1.

    A shard smaller than a batch is the batch.
    """
    batch = min(recipe.training.batch_size, records)
    training = recipe.training.model_copy(update={"batch_size": batch})
    privacy = recipe.privacy.model_copy(update={"nominal_records": None})
    own = recipe.model_copy(update={"training": training, "privacy": privacy})
    return own, plan_with_noise(own, records, 0.0)


@dataclass(frozen=True)
class TeacherSetup:
    """Hold what all teachers have in common. recipe: of their training."""

    recipe: Recipe
    count: int
    key: bytes


class TeacherTrainer:
    """Train the teacher of a number, and return its files by name."""

    def __init__(self, shared: TeacherSetup) -> None:
        torch.set_num_threads(1)  # sums must not depend on the machine
        self._shared = shared
        self._records = records_with_canaries(shared.recipe, data_source(shared.recipe))
        key = derive_key(shared.key, "shards")
        self._shards = shards_by_hash(self._records.hashes, key, shared.count)

    def __call__(self, number: int) -> dict[str, bytes]:
        members = self._shards == number
        if not members.any():
            return self._initial_model_files()
        recipe, plan = plan_of_shard(self._shared.recipe, int(members.sum()))
        key = derive_key(self._shared.key, "teacher", number)
        try:
            with train_in_process(recipe, plan, self._records, members, key) as folder:
                return read_files(folder)
        except TrainingDiverged:
            return self._initial_model_files()

    def _initial_model_files(self) -> dict[str, bytes]:
        spec = model_spec(self._shared.recipe, self._records)
        with TemporaryDirectory(prefix="dpdist-teacher-") as folder:
            models.save(initial_model(self._shared.recipe, spec), spec, Path(folder))
            return read_files(Path(folder))


class _TeacherItems(TrainingItems):
    checked_file = _WEIGHTS

    def read_result(self, raw: bytes, folder: Path) -> dict[str, Any]:
        return {"digest": file_digest(raw)}


class TeacherJob(JobSpec):
    """Train the teachers of one run; all of it is private."""

    kind = job_folder.JobKind("set of teachers", "training teachers")
    table_file, metadata_key = TABLE, KEY
    schema, columns, sort_columns = SCHEMA, COLUMNS, ("model",)

    def __init__(
        self, job: TrainJob, count: int, sections: Mapping[str, Section] | None = None
    ) -> None:
        self._job, self._count = job, count
        self.recipe = without_privacy(job.recipe, sections)

    def identity(self) -> dict[str, Any]:
        """Return data and settings; the recipe of the run's folder does not change."""
        settings = {"teachers": self._count, "key": key_id(self._job.folder.read_run_key())}
        return {"data": self._job.records_without_canaries().fingerprint, "settings": settings}

    def initial_record(self, output: Path) -> dict[str, Any]:
        make_private_folder(output)
        return {"seed": derive_key(self._job.folder.read_run_key(), "teachers").hex()}

    def work_items(self, job_record: dict[str, Any], output: Path) -> WorkItems:
        recipe = self.recipe
        shared = TeacherSetup(recipe, self._count, bytes.fromhex(job_record["seed"]))
        records = len(self._job.records_without_canaries())
        _, plan = plan_of_shard(recipe, max(1, records // self._count))
        return _TeacherItems(self._count, TeacherTrainer, shared, output / "models", plan)


class TeacherEnsemble:
    """Answer by trained teachers. PRIVATE: only a method may release their answers.

    Raises UserError if they are missing, or are not those that were trained.
    """

    def __init__(self, folder: RunFolder, trusted_factory: str | None = None) -> None:
        home = folder.private / FOLDER
        table = job_folder.read_table(home / TABLE, COLUMNS, KEY)
        self._folders = [item_folder(home / "models", n) for n in table["model"].to_pylist()]
        for place, digest in zip(self._folders, table["digest"].to_pylist(), strict=True):
            if file_digest(read_bytes(place / _WEIGHTS)) != digest:
                raise UserError(f"{place}: damaged: not the teacher that this run trained")
        self._factory = trusted_factory
        self.input_shape = tuple(models.read_spec(self._folders[0]).input_shape)

    def __len__(self) -> int:
        return len(self._folders)

    def class_scores(self, inputs: Tensor) -> np.ndarray:
        """Return each teacher's logits of each input (B, *input_shape): float64 (K, B, C)."""
        found = []
        for place in self._folders:
            model = models.load(place, trusted_factory=self._factory)
            with torch.inference_mode():
                found.append(model(inputs).double().numpy())
        return np.stack(found)


def train_teachers(
    job: TrainJob,
    count: int,
    sections: Mapping[str, Section] | None = None,
    *,
    executor: Executor | None = None,
) -> TeacherEnsemble:
    """Train the missing teachers of a run, and return all.

    sections: replace those of the recipe. executor: as in `run_job`.
    """

    def show(done: int, total: int, rate: float) -> None:
        write_json(job.folder.progress, {"done": done, "steps": total, "rate": rate})

    work, output = TeacherJob(job, count, sections), job.folder.private / FOLDER
    if sections:  # the recipe's own was checked before the run
        check_model(work.recipe, job.records_without_canaries())
    actors = job.recipe.resources.certify_actors
    run_job(work, output, actors=actors, progress=show, executor=executor)
    return TeacherEnsemble(job.folder, work.recipe.model.name)


# --- answers with a privacy cost --------------------------------------------------------------


class QueryOracle:
    """Answer by a run's teachers, as its method releases them, at most as often as planned.

    An input that was answered before gets the same answer, at no further cost. answers_left: number
    of new answers that are left. Raises UserError.
    """

    def __init__(self, recipe: Recipe, folder: RunFolder) -> None:
        folder.require_trained()
        released = read_verified_ledger(folder)
        self._recipe, self._folder, self._plan = recipe, folder, released.plan
        self._teachers = TeacherEnsemble(folder, recipe.model.name)
        self._nonce, self._charged = new_nonce(), recipe.privacy.budget is None
        self.answers_left = self._plan.num_queries - released.ledger.num_queries
        self.input_shape = self._teachers.input_shape

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return noisy scores (B, classes), float64, of inputs (B, *input_shape).

        Raises UserError, before any answer, if fewer answers are left than inputs are new.
        """
        questions = [_question_id(one) for one in inputs]
        private = self._teachers.class_scores(inputs).swapaxes(0, 1)
        try:
            # Open until the end: of two processes at once, one takes the last answer.
            with Ledger.open(
                self._folder.ledger, self._plan.fingerprint(), nonce=self._nonce
            ) as ledger:
                verify_ledger(self._folder, self._plan, ledger)
                new = sum(ledger.find_answer(one) is None for one in dict.fromkeys(questions))
                self.answers_left = self._plan.num_queries - ledger.num_queries
                if new > self.answers_left:
                    raise UserError(
                        f"{self._folder.path}: {self.answers_left:,} of {self._plan.num_queries:,} "
                        f"answers are left, {new:,} would be needed; nothing was asked",
                        see="how-to/private-prediction.md#what-is-proved-and-why",
                    )
                if new:
                    self._charge_budget(ledger)
                found = [
                    self._answer(ledger, *each) for each in zip(questions, private, strict=True)
                ]
                self.answers_left = self._plan.num_queries - ledger.num_queries
        except JournalError as error:
            raise UserError(str(error)) from error
        return torch.tensor(found, dtype=torch.float64)

    def _charge_budget(self, ledger: Ledger) -> None:
        """Charge the records' budget for this process's answers, before its first one.

        The run was charged for all its answers before its training. A copy of its folder may answer
        as well, and counts separately. Raises UserError.
        """
        if not self._charged:
            process = ledger.announce_process()
            charge = build_charge(self._recipe, self._folder, process)
            reserve_charge(self._recipe, None, charge, str(self._folder.recipe_file))
            self._charged = True

    def num_affordable(self, inputs: Tensor) -> int:
        """Return how many of these inputs, from the first on, can still be answered.

        A crash uses up the answer that it interrupts.
        """
        ledger, new = Ledger.read(self._folder.ledger), set[str]()
        for count, question in enumerate(map(_question_id, inputs)):
            if ledger.find_answer(question) is None:
                new.add(question)
            if len(new) > self.answers_left:
                return count
        return len(inputs)

    def _answer(self, ledger: Ledger, question: str, scores: np.ndarray) -> list[float]:
        known = ledger.find_answer(question)
        if known is not None:
            return known
        number = ledger.record_query(question, self._plan)
        fixed = self._recipe.privacy.run_key is not None  # for tests, which want the same again
        key = derive_key(self._folder.read_run_key() if fixed else new_run_key(), "answer", number)
        execution = self._recipe.method.execution()
        values: list[float] = execution.answer(scores, self._plan, key).tolist()
        ledger.record_answer(question, values)
        return values


def _question_id(one: Tensor) -> str:
    """Return a digest of an input."""
    digest = hashlib.blake2b(digest_size=32, person=b"dpdist.asked")
    digest.update(str(tuple(one.shape)).encode())
    digest.update((one + 0.0).contiguous().numpy().tobytes())
    return digest.hexdigest()


def _source_id(private_source: bytes) -> str:
    """Return a digest of the private source of a release."""
    return hashlib.blake2b(private_source, digest_size=32, person=b"dpdist.once").hexdigest()


def release_once(
    job: TrainJob, private_source: bytes, draw: Callable[[bytes], Sequence[float]]
) -> list[float]:
    """Release values once: `dpdist.methods.base.TrainingDriver.release_once`.

    The key depends on everything that the values are drawn from, including the recipe: drawing them
    again after a crash is an exact replay. A copy of the folder with any difference draws different
    noise, or raises UserError.
    """
    about_id = _source_id(private_source)
    question = _source_id(private_source + recipe_digest(job.recipe).encode())
    folder, plan = job.folder, job.plan
    with Ledger.open(folder.ledger, plan.fingerprint()) as ledger:
        verify_ledger(folder, plan, ledger)
        kept = ledger.find_answer(question)
        if kept is not None:
            return kept
        try:
            nonce = ledger.nonce_of_query(question, plan)
        except QueriesExhausted:
            raise UserError(
                f"{folder.path}: what is private has changed since it was released, and would be "
                "released a second time; choose another --name"
            ) from None
        # A fixed key is for tests, which want the same again.
        labels = [nonce, code_digest(PACKAGES)] if job.recipe.privacy.run_key is None else []
        key = derive_key(folder.read_run_key(), "released", plan.fingerprint(), about_id, *labels)
        values = list(draw(key))
        ledger.record_answer(question, values)
        return values
