"""Bulk certification on a Ray cluster: resumable, and the same table however it was computed."""

from __future__ import annotations

import csv
import secrets
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import ray
from ray.exceptions import RayTaskError

from cluster.journal import Journal
from cluster.pool import Chunk, PoolSettings, run_chunks
from cluster.reading import parse_any_json, read_text, reason, shown
from cluster.storage import write_json
from dpdist import bulk, models
from dpdist.bulk import Progress
from dpdist.certification import score_columns, scores, units
from dpdist.certification import table as tables
from dpdist.certification.bank import BLOCKS_PER_PIECE
from dpdist.certification.classifier import ClassifierSpec
from dpdist.certification.procedures import Procedure, join
from dpdist.certification.score_settings import ScoreSettings
from dpdist.certification.settings import CertifySettings
from dpdist.certification.worker import Assignment, Piece, Worker, probe, procedure
from dpdist.errors import UserError

TABLE = "certificates.parquet"
Settings = CertifySettings | ScoreSettings
_RATE = "rate.json"  # draws per second of the probe; only sizes the chunks
_CHUNK_SECONDS = 1.0
_PART_SECONDS = 60.0


class Data(Protocol):
    """What is needed of a data set: ``dpdist.data.Dataset`` has it."""

    @property
    def classes(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def labels(self) -> np.ndarray: ...

    def batch(self, indices: np.ndarray | slice) -> Any: ...


def certify(
    model_folder: Path,
    dataset: Data,
    settings: Settings,
    output: Path,
    *,
    actors: int | None = None,
    progress: Progress | None = None,
    trusted_factory: str | None = None,
    chunk_seconds: float = _CHUNK_SECONDS,
) -> pa.Table:
    """Certify the inputs that ``settings`` names; return the table, sorted by index.

    settings: smoothing of the inputs, or, for a model with noise in its first hidden layer,
    expected scores under that noise.

    ``output`` receives certificates.parquet (written last), timings.csv, settings.json (what was
    executed, with the seed) and, while it runs, journal.jsonl and parts/. Called again after any
    interruption it computes what is missing and gives the identical table. actors: None uses the
    whole cluster and grows with it. progress(inputs done, inputs in all, inputs per second).

    Ray must be initialised. Raises UserError when ``output`` holds results of another model, data
    set or setting (naming what differs) or another process is certifying into it, ClusterError
    when the cluster cannot do it.
    """
    labels = np.asarray(dataset.labels)
    indices = settings.indices(len(labels))
    if not indices:
        raise UserError(f"certify: no inputs chosen out of {len(labels)}")
    assignment = _assignment(model_folder, dataset, settings, trusted_factory, indices)
    finished = output / TABLE
    kind = _kind(settings)
    if finished.exists():
        table = tables.read(finished)
        wanted = _identity(assignment)
        bulk.refuse_difference(output, kind, tables.about(table), wanted, settings.seed)
        return table
    with bulk.held(output, kind) as journal:
        assignment, about = _pin(journal, kind, assignment)
        assert assignment.spec is not None
        steps = procedure(assignment)
        book = _Book(steps, assignment, labels, indices)
        for entry in journal.entries:
            book.add(entry)
        parts = _Parts(output / "parts", about, book)
        meter = _Meter(book, progress)

        def on_result(_: str, rows: list[dict[str, Any]]) -> None:
            for row in rows:
                journal.append(row)
                book.add(row)
            parts.write_if_due()
            meter.show()

        cut = _cut(book, assignment.spec, chunk_seconds)
        chunks = _chunks(book, dataset, cut)
        silence = _longest_silence(cut, book, assignment.spec)
        pool = PoolSettings(actors=actors, stall_after=silence)
        run_chunks(Worker, assignment, chunks, on_result, pool)
    table = tables.build(list(book.rows.values()), about, book.schema)
    _write_timings(output / "timings.csv", book)
    tables.write(table, finished)
    parts.remove()
    return tables.read(finished)


def timings(output: Path) -> dict[int, float]:
    """Seconds of computing per input, from the sidecar file; empty when there is none."""
    path = output / "timings.csv"
    if not path.exists():
        return {}
    lines = read_text(path).splitlines()
    try:
        return {int(row["index"]): float(row["seconds"]) for row in csv.DictReader(lines)}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: damaged: {reason(error)}") from None


def _assignment(
    model_folder: Path,
    dataset: Data,
    settings: Settings,
    trusted_factory: str | None,
    indices: range,
) -> Assignment:
    model = models.load(model_folder, trusted_factory=trusted_factory)
    some = np.asarray(indices[: min(len(indices), 64)])
    check_inputs = dataset.batch(some).numpy()
    shape = tuple(check_inputs.shape[1:])
    norms = None
    if isinstance(settings, ScoreSettings):
        noise = models.hidden_noise(model)
        if noise is None:
            raise UserError(
                f"{model_folder}: the model has no noise of its own; give the sigma of input noise"
            )
        norms, sigma = scores.sensitivity(models.require_split(model), noise, shape), noise.scale
    else:
        sigma = settings.sigma
    source = units.UnitSource(
        "certify",
        settings.seed or secrets.token_hex(16),
        models.model_hash(model_folder),
        dataset.fingerprint,
        settings.noise,
        sigma,
    )
    return Assignment(model, settings, source, dataset.classes, shape, check_inputs, norms=norms)


def _pin(
    journal: Journal, kind: bulk.Kind, assignment: Assignment
) -> tuple[Assignment, dict[str, Any]]:
    """Fix seed and classifier before the first count, or take them from the interrupted run."""
    output = journal.path.parent

    def begin() -> dict[str, Any]:
        try:
            spec = ray.get(ray.remote(probe).options(num_cpus=1).remote(assignment))
        except RayTaskError as error:
            raise UserError(f"the model cannot be certified: {error.cause}") from error.cause
        classifier = asdict(spec)
        rate = classifier.pop("rate")  # a measured time, different each time
        write_json(output / _RATE, rate)
        return {"seed": assignment.source.seed, "classifier": classifier}

    seed = assignment.settings.seed
    about = bulk.pin(journal, kind, _identity(assignment), seed, begin)
    classifier = {**about["classifier"], "notes": tuple(about["classifier"]["notes"])}
    norms = about.get("sensitivity")
    return replace(
        assignment,
        source=replace(assignment.source, seed=about["seed"]),
        spec=ClassifierSpec(**classifier, rate=_stored_rate(output)),
        norms=None if norms is None else scores.Sensitivity(**norms),
    ), about


def _kind(settings: Settings) -> bulk.Kind:
    # Norms may differ in their last bits elsewhere: those stored at the beginning are used. With
    # fixed n the radii are only what is to be shown of the results.
    free = {"sensitivity", "radii"} if settings.mode in ("fixed", "scores") else {"sensitivity"}
    return bulk.Kind("certification", "certifying", frozenset(free))


def _identity(assignment: Assignment) -> dict[str, Any]:
    settings = asdict(assignment.settings)
    settings.pop("seed")
    settings["mode"] = assignment.settings.mode
    identity = {
        "settings": settings,
        "model": assignment.source.model_hash,
        "data": assignment.source.data_hash,
        "classes": assignment.classes,
    }
    if assignment.norms is not None:
        identity["sensitivity"] = scores.describe(assignment.norms)
    return identity


def _stored_rate(output: Path) -> float:
    path = output / _RATE
    rate = parse_any_json(read_text(path), str(path)) if path.exists() else 1000.0
    if not isinstance(rate, int | float) or rate <= 0:
        raise UserError(f"{path}: damaged: must be a number > 0, got {shown(rate)}")
    return float(rate)


_Interval = tuple[int, int, dict[str, Any]]  # low, high, what was counted there


class _Book:
    """What is done of each input, and the finished rows. Overlapping records count once."""

    def __init__(
        self, steps: Procedure, assignment: Assignment, labels: np.ndarray, indices: range
    ) -> None:
        self.steps = steps
        self.settings = settings = assignment.settings
        self.sigma = assignment.source.sigma
        by_scores = isinstance(settings, ScoreSettings)
        self.schema = score_columns.SCHEMA if by_scores else tables.SCHEMA
        self.labels = labels
        self.indices = indices
        self.rows: dict[int, dict[str, Any]] = {}
        self.seconds: dict[int, float] = defaultdict(float)
        self.draws = 0
        self._done: dict[int, list[_Interval]] = defaultdict(list)
        self._wanted = set(indices)

    def add(self, entry: dict[str, Any]) -> None:
        index, low, high = entry["index"], entry["low"], entry["high"]
        if index not in self._wanted or index in self.rows:
            return
        pieces = self._done[index]
        if any(low < h and l < high for l, h, _ in pieces):  # noqa: E741
            return
        partial = entry["partial"]
        self.seconds[index] += entry["seconds"]
        self.draws += partial["n"] if "n" in partial else sum(partial["histogram"])
        pieces = self._done[index] = _with_piece(pieces, (low, high, partial))
        if pieces[0][:2] == (0, self.steps.units):
            self.rows[index] = self._row(index, self.steps.verdict([pieces[0][2]]))
            del self._done[index]

    def _row(self, index: int, verdict: Any) -> dict[str, Any]:
        label = int(self.labels[index])
        if isinstance(self.settings, ScoreSettings):
            return scores.row(index, label, verdict, self.settings, self.sigma)
        return tables.row(index, label, verdict, self.settings, self.steps.spending)

    def missing(self, index: int) -> list[tuple[int, int]]:
        """Intervals of units that are not done."""
        if index in self.rows:
            return []
        gaps, at = [], 0
        for low, high, _ in self._done.get(index, []):
            if low > at:
                gaps.append((at, low))
            at = high
        if at < self.steps.units:
            gaps.append((at, self.steps.units))
        return gaps


def _with_piece(pieces: list[_Interval], new: _Interval) -> list[_Interval]:
    """The intervals in order, those that touch joined: an input takes little memory at any time."""
    joined: list[_Interval] = []
    for low, high, partial in sorted([*pieces, new], key=lambda piece: piece[0]):
        if joined and joined[-1][1] == low:
            before, _, counts = joined.pop()
            low, partial = before, join(counts, partial)
        joined.append((low, high, partial))
    return joined


@dataclass(frozen=True)
class _Cut:
    """How work is cut: at most ``budget`` units in a chunk, ``step`` of one input in a piece."""

    budget: int
    step: int


def _cut(book: _Book, spec: ClassifierSpec, seconds: float) -> _Cut:
    """Chunks of about ``seconds``; no result depends on how they are cut."""
    # A sequential test usually needs a small part of its cap; counting it as a twentieth keeps
    # chunks near the wanted size.
    per_unit = spec.batch if book.steps.units > 1 else max(spec.batch, book.settings.n // 20)
    budget = max(1, int(seconds * spec.rate / per_unit))
    # With a noise bank the same few blocks are counted for many inputs in turn.
    return _Cut(budget, min(budget, BLOCKS_PER_PIECE) if book.settings.noise_bank else budget)


def _pieces(book: _Book, cut: _Cut) -> Iterator[tuple[int, int, int]]:
    """(input, low, high) of every missing interval of units, cut on a grid of ``cut.step``.

    One input after the other, so that few are half done at any time; with a noise bank one stretch
    of the bank after the other, for all inputs. What is missing of a piece is found out when its
    turn comes: nobody else computes it, so that it does not matter when.
    """
    grid = range(0, book.steps.units, cut.step)
    if book.settings.noise_bank:
        places: Iterator[tuple[int, int]] = ((index, at) for at in grid for index in book.indices)
    else:
        places = ((index, at) for index in book.indices for at in grid)
    for index, at in places:
        for low, high in book.missing(index):
            if low < at + cut.step and at < high:
                yield index, max(low, at), min(high, at + cut.step)


def _chunks(book: _Book, dataset: Data, cut: _Cut) -> Iterator[Chunk]:
    """Missing units, packed into chunks. A stream: a million chunks are never there at once."""
    pieces: list[tuple[int, int, int]] = []
    number = units_in = 0
    for piece in _pieces(book, cut):
        size = piece[2] - piece[1]
        if pieces and units_in + size > cut.budget:
            yield _chunk(pieces, dataset, number)
            pieces, units_in, number = [], 0, number + 1
        pieces.append(piece)
        units_in += size
    if pieces:
        yield _chunk(pieces, dataset, number)


def _longest_silence(cut: _Cut, book: _Book, spec: ClassifierSpec) -> float:
    """Seconds after which a silent worker must be hanging: ten times the longest honest chunk.

    A sequential test may need its whole cap, on a machine slower than the probe found it.
    """
    per_unit = spec.batch if book.steps.units > 1 else book.settings.n
    units_most = min(cut.budget, len(book.indices) * book.steps.units)
    return max(60.0, 10 * units_most * per_unit / spec.rate)


def _chunk(pieces: list[tuple[int, int, int]], dataset: Data, number: int) -> Chunk:
    inputs = dataset.batch(np.asarray([index for index, _, _ in pieces])).numpy()
    payload = [
        Piece(index, low, high, np.array(x))
        for (index, low, high), x in zip(pieces, inputs, strict=True)
    ]
    first = pieces[0]
    return Chunk(f"inputs {first[0]}.. units {first[1]}..", payload, float(number))


class _Parts:
    """Finished rows, appended as Parquet parts while the job runs, for whoever watches it."""

    def __init__(self, folder: Path, about: dict[str, Any], book: _Book) -> None:
        self._folder = folder
        self._about = about
        self._book = book
        self._written: set[int] = set()
        self._last = time.monotonic()
        self.remove()  # the journal holds all of them

    def write_if_due(self) -> None:
        now = time.monotonic()
        if now - self._last < _PART_SECONDS:  # asked for every chunk: nothing else happens here
            return
        self._last = now
        fresh = [row for index, row in self._book.rows.items() if index not in self._written]
        if not fresh:
            return
        self._written |= {row["index"] for row in fresh}
        number = len(list(self._folder.glob("*.parquet"))) if self._folder.exists() else 0
        tables.write(
            tables.build(fresh, self._about, self._book.schema),
            self._folder / f"part-{number:05d}.parquet",
        )

    def remove(self) -> None:
        if self._folder.exists():
            for path in self._folder.glob("*.parquet"):
                path.unlink()
            self._folder.rmdir()


class _Meter:
    """Inputs finished, and draws per second since this call began."""

    def __init__(self, book: _Book, progress: Progress | None) -> None:
        self._book = book
        self._progress = progress
        self._start = time.monotonic()
        self._before = book.draws
        self.show()

    def show(self) -> None:
        if self._progress is None:
            return
        elapsed = max(time.monotonic() - self._start, 1e-9)
        rate = (self._book.draws - self._before) / elapsed
        self._progress(len(self._book.rows), len(self._book.indices), rate)


def _write_timings(path: Path, book: _Book) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["index", "draws", "seconds"])
        for index in book.indices:
            writer.writerow([index, book.rows[index]["n"], f"{book.seconds[index]:.6f}"])
