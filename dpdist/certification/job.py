"""Certify a data set on a Ray cluster: resumable, with the same table on any number of actors."""

from __future__ import annotations

import csv
import io
import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dpdist import models
from dpdist.certification import inference, table_reader
from dpdist.certification import table as tables
from dpdist.certification.certificate import Certificate, merge_partials
from dpdist.certification.inference import CPU, ClassifierSpec
from dpdist.certification.registry import require_readable
from dpdist.certification.subject import DatasetLike, Subject
from dpdist.certification.table import CertificateTable
from dpdist.certification.worker import (
    CLEAN_DRAWS,
    Assignment,
    CleanBatch,
    CleanWorker,
    InputWorkUnit,
    Worker,
    probe,
)
from dpdist.cluster import job_folder
from dpdist.cluster.executor import SMALL_JOB_SECONDS, LocalExecutor, current_executor
from dpdist.cluster.job_folder import Progress
from dpdist.cluster.resumable_job import (
    CHUNK_SECONDS,
    ChunkPlan,
    Item,
    JobSpec,
    JobState,
    Partial,
    Row,
    WorkItems,
    run_job,
)
from dpdist.cluster.resumable_job import WorkUnit as Interval
from dpdist.cluster.session import is_elastic
from dpdist.cluster.work import Chunk, ChunkJob, PoolSettings
from dpdist.core.errors import UserError
from dpdist.core.files import read_text, write_atomic, write_json
from dpdist.randomness import keys
from dpdist.randomness.noise_location import find_noise_location

TABLE = tables.TABLE
_RATE = "rate.json"  # draws per second of the probe; it only determines the size of chunks
_TIMINGS = "timings.csv"
_CLEAN_ROWS = 100  # answered at a time without smoothing noise


def certify(
    subject: Subject,
    dataset: DatasetLike,
    settings: Certificate,
    output: Path,
    *,
    actors: int | None = None,
    progress: Progress | None = None,
    chunk_seconds: float = CHUNK_SECONDS,
    gpus: float | None = None,
    log: Callable[[str], None] | None = None,
) -> CertificateTable:
    """Certify inputs with a model, and return the finished table, read once and checked.

    The table is the same to the byte on any number of actors, and the same call continues an
    interrupted certification. A certification stays on the kind of device that it started on.

    Args:
        subject: the model.
        dataset: the labeled inputs, such as `dpdist.data.load` returns.
        settings: the certificate, and which inputs are certified.
        output: receives certificates.parquet, timings.csv, settings and the journal.
        actors: number of actors; None for as many as fit.
        progress: called with inputs done, inputs in all, and draws per second.
        chunk_seconds: seconds of work that an actor gets at a time.
        gpus: GPUs of each actor, a fraction or a whole number; 0 counts on CPUs, None on GPUs if
            the cluster has them.
        log: function that gets lines (str) about checks and GPUs.

    Raises:
        UserError: settings, model and data do not fit, or `output` has a different certification.
        ClusterError: the actors failed permanently.
    """
    work = CertificationJob(subject, dataset, settings, gpus=gpus, log=log)
    table = run_job(work, output, actors=actors, progress=progress, chunk_seconds=chunk_seconds)
    return table_reader.checked(table, output / TABLE)


class CertificationJob(JobSpec):
    """The certification of a data set, as a resumable job."""

    table_file, metadata_key, columns = TABLE, tables.KEY, tables.COLUMNS

    def __init__(
        self,
        subject: Subject,
        dataset: DatasetLike,
        settings: Certificate,
        *,
        gpus: float | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        """Check settings, data and model; arguments are those of `certify`. Raises UserError."""
        self._gpus, self._log = gpus, log or (lambda line: None)
        require_readable(type(settings))
        count = len(dataset.labels)
        self._indices = settings.indices(count)
        if not self._indices:
            raise UserError(f"certify: no inputs chosen out of {count}")
        self._dataset, self.seed = dataset, settings.seed
        # Machines may compute other last bits of the sensitivity: the stored one is used.
        free = settings.result_free_fields | {"sensitivity"}
        self.kind = job_folder.JobKind("certification", "certifying", free)
        self.schema = settings.table_schema()
        self._assignment = build_assignment(subject, dataset, settings, self._indices)

    def identity(self) -> dict[str, Any]:
        """Return the entries of settings.json that a continued certification must equal."""
        assignment = self._assignment
        return {
            "settings": assignment.settings.identity,
            "model": assignment.stream_keys.model_hash,
            "data": assignment.stream_keys.data_hash,
            "classes": assignment.classes,
            **assignment.sampler.identity,
        }

    def initial_record(self, output: Path) -> dict[str, Any]:
        """Choose device and executed classifier; return the entries that settings.json pins."""
        executor, gpus = current_executor(), self._gpus
        if gpus is None:
            gpus = 1.0 if executor.gpus >= 1 else 0.0
        _require_gpus(gpus)
        device = inference.GPU if gpus else CPU.type
        assignment = replace(self._assignment, device=device, gpus=gpus)
        self._log("certifying: checking the model and choosing how it is executed")
        spec = executor.run_once(probe, assignment, "the model cannot be certified", num_gpus=gpus)
        write_json(output / _RATE, spec.rate)
        asked = assignment.settings
        if spec.batch == 1 < asked.n and asked.batch is None:
            self._log(
                "certifying: every draw is executed in a batch of its own, since it takes too long "
                "to check whether so large a network looks at its batch"
            )
        low, high = tables.input_range(self._dataset, self._indices)
        self._log(f"certifying: {tables.range_words(low, high, asked.sigma)}")
        shape = list(self._assignment.input_shape)
        step = None if len(shape) == 3 else tables.input_step(self._dataset, self._indices)
        labels = np.asarray(self._dataset.labels)[np.asarray(self._indices)]
        answers = self._clean_answers(assignment, spec)
        wrong = np.asarray(self._indices)[answers != labels].tolist()
        return {
            "seed": self._assignment.stream_keys.seed,
            tables.INPUT_SHAPE: shape,
            tables.INPUT_RANGE: [low, high],
            **({} if step is None else {tables.INPUT_STEP: step}),
            tables.CLEAN_WRONG: " ".join(map(str, wrong)),
            "classifier": spec.pinned_fields,
            "inputs": len(self._dataset.labels),  # so that readers detect missing rows
            job_folder.LABEL_DIGEST_KEY: job_folder.label_digest(self._indices, labels),
        }

    def _clean_answers(self, assignment: Assignment, spec: ClassifierSpec) -> np.ndarray:
        """Return the class of each input without smoothing noise, int64 (N,), by the workers.

        For a large network this would take long in one process.
        """
        rows, count = min(spec.batch, _CLEAN_ROWS), len(self._indices)
        answers = np.full(count, models.NO_CLASS, np.int64)

        def chunks() -> Iterator[Chunk]:
            for first in range(0, count, rows):
                chosen = np.asarray(self._indices[first : first + rows])
                inputs = self._dataset.batch(chosen).numpy()
                yield Chunk(f"clean inputs {first}..", CleanBatch(first, inputs))

        def keep(key: Any, classes: list[int]) -> None:
            first = int(key.removeprefix("clean inputs ").removesuffix(".."))
            answers[first : first + len(classes)] = classes

        passes = CLEAN_DRAWS if find_noise_location(assignment.model).is_random else 1
        small = count * passes <= SMALL_JOB_SECONDS * spec.rate and assignment.gpus == 0
        pool = PoolSettings(num_gpus=assignment.gpus)
        job = ChunkJob(CleanWorker, assignment, chunks(), keep, pool)
        current_executor().place(small).run_chunks(job)
        return answers

    def work_items(self, job_record: dict[str, Any], output: Path) -> WorkItems:
        """Return the work of the pinned settings."""
        rate = json.loads(read_text(output / _RATE)) if (output / _RATE).exists() else 1000.0
        spec = ClassifierSpec.from_pinned(job_record["classifier"], rate)
        assignment = replace(
            self._assignment,
            stream_keys=replace(self._assignment.stream_keys, seed=job_record["seed"]),
            spec=spec,
            sampler=self._assignment.sampler.with_pinned(job_record),
            device=spec.device,
            gpus=self._gpus_per_actor(spec, output),
        )
        return CertificationWorkItems(assignment, self._dataset, self._indices)

    def _gpus_per_actor(self, spec: ClassifierSpec, output: Path) -> float:
        """Return the GPUs of each actor on the pinned kind of device."""
        on_cpus = spec.device == CPU.type
        if self._gpus is not None and on_cpus == bool(self._gpus):
            device, cure = ("CPUs", "set") if on_cpus else (f"GPUs ({spec.machine})", "remove")
            raise UserError(
                f"{output}: this certification started on {device} and must continue there: {cure} "
                "resources.certify_gpus: 0, or choose a different folder with --output",
                see="how-to/certification.md#on-gpus",
            )
        if on_cpus:
            return 0.0
        gpus = self._gpus or 1.0
        _require_gpus(gpus)
        self._log(
            f"certifying on GPUs ({spec.machine}), {gpus:g} for each actor; hosts without one "
            "do not take part"
        )
        return gpus

    def finish(self, state: JobState, output: Path) -> list[Row]:
        """Write timings.csv and return the rows of the table."""
        rows = super().finish(state, output)
        file = io.StringIO(newline="")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["index", "draws", "seconds"])
        for row in rows:
            writer.writerow([row["index"], row["n"], f"{state.seconds[row['index']]:.6f}"])
        write_atomic(output / _TIMINGS, file.getvalue())
        return rows


def _require_gpus(gpus: float) -> None:
    """Raise UserError if an actor with this number of GPUs could never start."""
    executor = current_executor()
    if not gpus or gpus <= (have := executor.gpus):
        return
    if isinstance(executor, LocalExecutor):
        raise UserError(
            f"resources.certify_gpus: must be 0 in one process, got {gpus:g}; unset "
            "DPDIST_EXECUTOR to count on GPUs"
        )
    if not is_elastic():
        raise UserError(
            f"resources.certify_gpus: must be at most {have:g}, the GPUs of this machine, got "
            f"{gpus:g}; remove it or set 0 to count on CPUs, or set RAY_ADDRESS to a cluster with "
            "GPUs"
        )


def build_assignment(
    subject: Subject, dataset: DatasetLike, settings: Certificate, indices: Sequence[int]
) -> Assignment:
    """Return what workers share. indices: of the certified inputs. Raises UserError."""
    check_inputs = dataset.batch(np.asarray(indices[:64])).numpy()
    shape = tuple(check_inputs.shape[1:])
    try:
        sampler = settings.build_sampler(subject.model, shape)
    except UserError as error:
        raise UserError(f"{subject.where}: {error}") from None
    source = keys.StreamKeys(
        "certify",
        settings.seed or secrets.token_hex(16),
        subject.digest,
        dataset.fingerprint,
        settings.noise,
        sampler.sigma,
    )
    return Assignment(
        subject.model,
        settings,
        sampler,
        source,
        dataset.classes,
        shape,
        check_inputs,
        inputs=len(indices),
        code=subject.code,
    )


class CertificationWorkItems(WorkItems):
    """Every chosen input, in canonical blocks of draws (or whole, by a sequential test)."""

    def __init__(self, assignment: Assignment, dataset: DatasetLike, indices: range) -> None:
        self.items, self.make_worker, self.shared = indices, Worker, assignment
        self._assignment, self._settings = assignment, assignment.settings
        self._dataset, self._labels = dataset, np.asarray(dataset.labels)
        self.units_per_item, self.gpus_per_actor = assignment.num_units, assignment.gpus

    def chunk_plan(self, seconds: float) -> ChunkPlan:
        """Return chunks sized by the rate of the probe; a worker stalls after ten times as long."""
        spec, settings = self._assignment.executed_spec, self._settings
        # A sequential test usually needs a small part of its cap, so chunks count a twentieth of
        # it; the longest time of a chunk counts all of it, on a slower machine.
        most = spec.batch if self.units_per_item > 1 else settings.n
        budget = max(1, int(seconds * spec.rate / self._usual_draws))
        longest = min(budget, len(self.items) * self.units_per_item)
        return ChunkPlan(budget, stall_seconds=max(60.0, 10 * longest * most / spec.rate))

    def is_small(self, state: JobState) -> bool:
        """Return whether one process makes the missing draws within `SMALL_JOB_SECONDS`."""
        left = sum(high - low for i in self.items for low, high in state.missing_intervals(i))
        on_cpu = self._assignment.device == CPU.type
        draws = left * self._usual_draws
        return on_cpu and draws <= SMALL_JOB_SECONDS * self._assignment.executed_spec.rate

    @property
    def _usual_draws(self) -> int:
        """Return the usual number of draws of a unit; a sequential test uses a small part of n."""
        batch, n = self._assignment.executed_spec.batch, self._settings.n
        return batch if self.units_per_item > 1 else max(batch, n // 20)

    def make_chunk(self, work_units: list[Interval]) -> tuple[str, list[InputWorkUnit]]:
        """Return name and payload of a chunk of intervals."""
        inputs = self._dataset.batch(np.asarray([piece.item for piece in work_units])).numpy()
        payload = [
            InputWorkUnit(int(piece.item), piece.low, piece.high, np.array(x))
            for piece, x in zip(work_units, inputs, strict=True)
        ]
        return f"inputs {work_units[0].item}.. units {work_units[0].low}..", payload

    def journal_entries(self, name: str, answer: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
        """Return the journal's entries of an answer."""
        return answer

    def parse_entry(self, entry: dict[str, Any]) -> tuple[Interval, Partial]:
        """Return the interval and the counts of a journal's entry."""
        return Interval(entry["index"], entry["low"], entry["high"]), entry["partial"]

    def merge_partials(self, first: Partial, second: Partial) -> Partial:
        """Return the counts of two adjacent intervals."""
        return merge_partials(first, second)

    def table_rows(self, item: Item, partial: Partial) -> list[Row]:
        """Return the input's row of the table."""
        index, assignment = int(item), self._assignment
        verdict, label = assignment.decide(partial), int(self._labels[index])
        return [self._settings.table_row(index, label, verdict, assignment.sampler)]

    def effort(self, work_unit: Interval, partial: Partial) -> int:
        """Return the number of draws of an interval."""
        return partial["n"] if "n" in partial else sum(partial["histogram"])
