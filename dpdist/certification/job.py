"""Certify a data set on a Ray cluster: resumable, and the same table however it was computed."""

from __future__ import annotations

import csv
import io
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from dpdist import models
from dpdist.certification import inference
from dpdist.certification import table as tables
from dpdist.certification.certificate import Certificate, join
from dpdist.certification.inference import CPU, ClassifierSpec
from dpdist.certification.worker import BLOCKS_PER_PIECE, Assignment, Piece, Worker, probe
from dpdist.cluster import actor_pool, job_folder
from dpdist.cluster.actor_pool import run_once
from dpdist.cluster.job_folder import Progress
from dpdist.cluster.resumable_job import (
    CHUNK_SECONDS,
    Book,
    Cut,
    Item,
    Partial,
    Row,
    Task,
    Work,
    run,
)
from dpdist.cluster.resumable_job import (
    Piece as Interval,
)
from dpdist.core.errors import UserError
from dpdist.core.files import parse_any_json, read_text, reason, shown, write_atomic, write_json
from dpdist.models.factory_code import FactoryCode
from dpdist.randomness import keys

if TYPE_CHECKING:
    from torch import nn

TABLE = tables.TABLE
_RATE = "rate.json"  # draws per second of the probe; only sizes the chunks
_TIMINGS = "timings.csv"


class Data(Protocol):
    """The part of a data set that a certification reads: ``dpdist.data.Dataset`` has it."""

    @property
    def classes(self) -> int:
        """Return the number of classes."""

    @property
    def fingerprint(self) -> str:
        """Return the hash that identifies the records."""

    @property
    def labels(self) -> np.ndarray:
        """Return the labels: int (N,)."""

    def batch(self, indices: np.ndarray | slice) -> Any:
        """Return the inputs of these indices as a tensor (B, ...)."""


def certify(
    model_folder: Path,
    dataset: Data,
    settings: Certificate,
    output: Path,
    *,
    actors: int | None = None,
    progress: Progress | None = None,
    trusted_factory: str | None = None,
    chunk_seconds: float = CHUNK_SECONDS,
    gpus: float | None = None,
    say: Callable[[str], None] | None = None,
) -> pa.Table:
    """Certify inputs with an existing model on Ray actors; return the table, sorted by index.

    The table is the same to the byte on any number of actors, and the same call continues an
    interrupted certification. A certification stays on the kind of device that it began on.

    Args:
        model_folder: model.json and model.safetensors.
        dataset: the labelled inputs, such as `dpdist.data.load` returns.
        settings: the certificate, and which inputs are certified.
        output: receives certificates.parquet, timings.csv, settings and the journal.
        actors: number of actors; None for as many as fit.
        progress: called with inputs done, inputs in all, and draws per second.
        trusted_factory: "package.module:factory" that may be imported to build the model.
        chunk_seconds: the work that an actor gets at a time.
        gpus: of each actor, a share or a whole number; 0 counts on CPUs, None on GPUs where the
            cluster has them.
        say: is told of GPUs.

    Returns:
        One row per input: label, prediction (-1 for ABSTAIN), counts, bound and radius.

    Raises:
        UserError: settings, model and data do not fit, or `output` holds another certification.
        ClusterError: the actors failed for good.

    Example:
        After `dpdist.run` made runs/small:

        >>> import dpdist
        >>> from dpdist.data import Source, load
        >>> from pathlib import Path
        >>> settings = dpdist.settings_of({"sigma": 0.5, "n": 100, "max_inputs": 3})
        >>> test = load(Source("digits", classes=10), "test")
        >>> model = dpdist.read_facts("small").folder.model
        >>> with dpdist.connect(cpus=2):
        ...     table = dpdist.certify(model, test, settings, Path("certified"), actors=1)
        >>> table.num_rows, table["sigma"][0].as_py()
        (3, 0.5)
    """
    work = Certification(
        Subject.load(model_folder, trusted_factory), dataset, settings, gpus=gpus, say=say
    )
    return run(work, output, actors=actors, progress=progress, chunk_seconds=chunk_seconds)


@dataclass(frozen=True)
class Subject:
    """A model to certify.

    model: in evaluation mode. digest: hex, of everything that its answers depend on: whoever
    continues must have the same. where: begins complaints. code: that each worker must have.
    """

    model: nn.Module
    digest: str
    where: object
    code: FactoryCode = field(default_factory=FactoryCode)

    @classmethod
    def load(cls, folder: Path, trusted_factory: str | None) -> Subject:
        """Return the model that a folder holds. Raises UserError."""
        model = models.load(folder, trusted_factory=trusted_factory)
        return cls(model, models.model_hash(folder), folder, models.code_of(folder))


def timings(output: Path) -> dict[int, float]:
    """Return the seconds of computing per input, from the sidecar file; empty without one."""
    path = output / _TIMINGS
    if not path.exists():
        return {}
    lines = read_text(path).splitlines()
    try:
        return {int(row["index"]): float(row["seconds"]) for row in csv.DictReader(lines)}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: damaged: {reason(error)}") from None


class Certification(Work):
    """The certification of a data set, as a resumable job."""

    file, key, columns = TABLE, tables.KEY, tables.COLUMNS

    def __init__(
        self,
        subject: Subject,
        dataset: Data,
        settings: Certificate,
        *,
        gpus: float | None = None,
        say: Callable[[str], None] | None = None,
        here: bool = False,
    ) -> None:
        """Check that a place for the noise exists.

        Args:
            subject: the model.
            dataset: the labelled inputs.
            settings: the certificate, and which inputs are certified.
            gpus: of each actor, as in `certify`.
            say: is told of GPUs.
            here: whether all is done in this process, on its CPU and without Ray.
        """
        self._gpus, self._say, self._here = 0.0 if here else gpus, say, here
        count = len(dataset.labels)
        self._indices = settings.indices(count)
        if not self._indices:
            raise UserError(f"certify: no inputs chosen out of {count}")
        self._dataset, self.seed = dataset, settings.seed
        # What a place measures may differ in its last bits elsewhere: the stored one is used.
        free = settings.free | {"sensitivity"}
        self.kind = job_folder.Kind("certification", "certifying", free)
        self.schema = settings.table_schema()
        self._assignment = _assignment(subject, dataset, settings, self._indices)

    def identity(self) -> dict[str, Any]:
        """Return the entries of settings.json that a continued certification must equal."""
        assignment = self._assignment
        return {
            "settings": assignment.settings.identity,
            "model": assignment.source.model_hash,
            "data": assignment.source.data_hash,
            "classes": assignment.classes,
            **assignment.place.identity,
        }

    def begin(self, output: Path) -> dict[str, Any]:
        """Choose device and executed classifier; return the entries that settings.json pins."""
        gpus = self._gpus
        if gpus is None:
            gpus = 1.0 if actor_pool.gpus() >= 1 else 0.0
        _require_gpus(gpus)
        device = inference.GPU if gpus else CPU.type
        assignment = replace(self._assignment, device=device, gpus=gpus)
        if self._say is not None:
            self._say(
                "certifying: checking the model and choosing how it is executed (seconds, or at "
                "most a twentieth of the whole)"
            )
        failed = "the model cannot be certified"
        if self._here:
            spec = _probed(assignment, failed)
        else:
            spec = run_once(probe, assignment, failed, num_gpus=gpus)
        low, high, looked = _range_of(self._dataset, self._indices)
        write_json(output / _RATE, spec.rate)
        write_json(output / tables.RANGE, {"low": low, "high": high, "inputs": looked})
        if self._say is not None:
            self._say(f"certifying: {tables.range_words(low, high, assignment.settings.sigma)}")
        labels = np.asarray(self._dataset.labels)[np.asarray(self._indices)]
        return {
            "seed": self._assignment.source.seed,
            "classifier": spec.pinned,
            "inputs": len(self._dataset.labels),  # by which a reader knows that no row is missing
            job_folder.LABELS: job_folder.label_digest(self._indices, labels),
        }

    def open(self, about: dict[str, Any], output: Path) -> Task:
        """Return the task for what settings.json pins."""
        return Inputs(self._pinned(about, output), self._dataset, self._indices)

    def _pinned(self, about: dict[str, Any], output: Path) -> Assignment:
        spec = ClassifierSpec.of(about["classifier"], _stored_rate(output))
        return replace(
            self._assignment,
            source=replace(self._assignment.source, seed=about["seed"]),
            spec=spec,
            place=self._assignment.place.pinned(about),
            device=spec.device,
            gpus=self._gpus_for(spec, output),
        )

    def _gpus_for(self, spec: ClassifierSpec, output: Path) -> float:
        """Return the GPUs of each actor on the pinned kind of device; without one, of any kind."""
        if spec.device == CPU.type:
            if self._gpus:
                raise UserError(
                    f"{output}: counting began on CPUs, and goes on there: set "
                    "resources.certify_gpus: 0, or choose another folder with --output"
                )
            return 0.0
        if self._gpus == 0:
            raise UserError(
                f"{output}: counting began on GPUs ({spec.machine}), and goes on there: leave out "
                "resources.certify_gpus: 0, or choose another folder with --output"
            )
        gpus = self._gpus or 1.0
        _require_gpus(gpus)
        if self._say is not None:
            self._say(
                f"certifying on GPUs ({spec.machine}), {gpus:g} for each actor; hosts without one "
                "do not take part"
            )
        return gpus

    def finish(self, book: Book, output: Path) -> list[Row]:
        """Write timings.csv and return the rows of the table."""
        rows = super().finish(book, output)
        file = io.StringIO(newline="")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["index", "draws", "seconds"])
        for row in rows:
            writer.writerow([row["index"], row["n"], f"{book.seconds[row['index']]:.6f}"])
        write_atomic(output / _TIMINGS, file.getvalue())
        return rows


_MOST_LOOKED_AT = 1000


def _range_of(dataset: Data, indices: Sequence[int]) -> tuple[float, float, int]:
    """Return the least and the largest number in up to 1,000 of the chosen inputs, spread out."""
    count = len(indices)
    places = np.unique(np.linspace(0, count - 1, min(count, _MOST_LOOKED_AT)).astype(np.int64))
    some = np.asarray(indices)[places]
    low, high = np.inf, -np.inf
    for start in range(0, len(some), 100):
        batch = dataset.batch(some[start : start + 100])
        low, high = min(low, float(batch.min())), max(high, float(batch.max()))
    return low, high, len(some)


def _probed(assignment: Assignment, failed: str) -> ClassifierSpec:
    """Probe in this process. Raises UserError for whatever a user's model does."""
    try:
        return probe(assignment)
    except Exception as error:
        raise UserError(f"{failed}: {error}") from error


def _require_gpus(gpus: float) -> None:
    """Raise UserError where an actor with so many GPUs could never start."""
    have = actor_pool.gpus()
    if gpus > have and not actor_pool.may_grow():
        raise UserError(
            f"resources.certify_gpus: each actor needs {gpus:g} GPUs, this machine has {have:g}; "
            "leave it out or set 0 to count on CPUs, or set RAY_ADDRESS to a cluster with GPUs"
        )


def _assignment(
    subject: Subject, dataset: Data, settings: Certificate, indices: range
) -> Assignment:
    some = np.asarray(indices[: min(len(indices), 64)])
    check_inputs = dataset.batch(some).numpy()
    shape = tuple(check_inputs.shape[1:])
    try:
        place = settings.place(subject.model, shape)
    except UserError as error:
        raise UserError(f"{subject.where}: {error}") from None
    source = keys.UnitSource(
        "certify",
        settings.seed or secrets.token_hex(16),
        subject.digest,
        dataset.fingerprint,
        settings.noise,
        place.sigma,
    )
    return Assignment(
        subject.model, settings, place, source, dataset.classes, shape, check_inputs,
        inputs=len(indices), code=subject.code, apart=True,
    )  # fmt: skip


def _stored_rate(output: Path) -> float:
    path = output / _RATE
    rate = parse_any_json(read_text(path), str(path)) if path.exists() else 1000.0
    if not isinstance(rate, int | float) or rate <= 0:
        raise UserError(f"{path}: damaged: must be a number > 0, got {shown(rate)}")
    return float(rate)


class Inputs(Task):
    """Every chosen input, in canonical blocks of draws (or whole, by a sequential test)."""

    def __init__(self, assignment: Assignment, dataset: Data, indices: range) -> None:
        self.items, self.worker, self.shared = indices, Worker, assignment
        self._assignment, self._settings = assignment, assignment.settings
        self._dataset, self._labels = dataset, np.asarray(dataset.labels)
        self.units, self.gpus = assignment.units, assignment.gpus

    def cut(self, seconds: float) -> Cut:
        """Return chunks sized by the rate that the probe found.

        Silence is ten times the longest honest chunk.
        """
        spec, settings = self._assignment.executed, self._settings
        # A sequential test usually needs a small part of its cap; counting it as a twentieth keeps
        # chunks near the wanted size. Its silence counts the whole, on a slower machine.
        usual, most = max(spec.batch, settings.n // 20), settings.n
        if self.units > 1:
            usual = most = spec.batch
        budget = max(1, int(seconds * spec.rate / usual))
        # With a noise bank the same few blocks are counted for many inputs in turn.
        bank = settings.noise_bank
        longest = min(budget, len(self.items) * self.units)
        silence = max(60.0, 10 * longest * most / spec.rate)
        return Cut(budget, min(budget, BLOCKS_PER_PIECE) if bank else budget, silence, across=bank)

    def chunk(self, pieces: list[Interval]) -> tuple[str, list[Piece]]:
        """Return name and payload of a chunk of intervals."""
        inputs = self._dataset.batch(np.asarray([piece.item for piece in pieces])).numpy()
        payload = [
            Piece(int(piece.item), piece.low, piece.high, np.array(x))
            for piece, x in zip(pieces, inputs, strict=True)
        ]
        return f"inputs {pieces[0].item}.. units {pieces[0].low}..", payload

    def entries(self, name: str, answer: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
        """Return the journal's entries of an answer."""
        return answer

    def read(self, entry: dict[str, Any]) -> tuple[Interval, Partial]:
        """Return the interval and the counts of a journal's entry."""
        return Interval(entry["index"], entry["low"], entry["high"]), entry["partial"]

    def join(self, first: Partial, second: Partial) -> Partial:
        """Return the counts of two intervals that touch."""
        return join(first, second)

    def rows(self, item: Item, partial: Partial) -> list[Row]:
        """Return the input's row of the table."""
        index, verdict = int(item), self._assignment.verdict(partial)
        return [
            self._settings.row(index, int(self._labels[index]), verdict, self._assignment.place)
        ]

    def effort(self, piece: Interval, partial: Partial) -> int:
        """Return the number of draws of an interval."""
        return partial["n"] if "n" in partial else sum(partial["histogram"])
