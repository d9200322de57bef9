"""Run a resumable job on Ray or in this process: the same table to the byte, however computed.

`run_job` pins the settings, keeps a journal, splits the missing work into chunks, runs them on the
workers of an executor (`dpdist.cluster.executor`), which may die, and writes the table last. A kind
of work defines two classes:

* `JobSpec`: its name (`kind`), its table (`table_file`, `metadata_key`, `schema`, `columns`), the
  settings that affect its results (`identity`, and the requested `seed`), and the choices that are
  fixed before the first result (`initial_record`: a seed, an executed classifier found by
  `Executor.run_once`);
* `WorkItems`, from `JobSpec.work_items`: `items`, a payload for a worker by name, and
  `make_worker`: called once per worker with `shared`, it returns the function from a payload to the
  item's rows of the table, as JSON.

For example, an audit of a thousand trainings is

    class Audit(resumable_job.JobSpec):
        kind = job_folder.JobKind("audit", "auditing")
        table_file, metadata_key, schema = "audit.parquet", b"dpdist.audit", SCHEMA

        def identity(self):
            return {"model": ..., "settings": ...}

        def initial_record(self, output):
            return {"seed": secrets.token_hex(16)}

        def work_items(self, job_record, output):
            trials = {f"trial {i}": i for i in range(1000)}
            return WorkItems(trials, Trainer, Shared(job_record["seed"], ...))

    table = run_job(Audit(), output, actors=None, progress=show)

A payload's rows must be a pure function of payload, `shared` and pinned seed, since the chunk of a
dead or slow actor is repeated. If items take long, override `units_per_item`, `chunk_plan`,
`make_chunk`, `parse_entry` and `merge_partials` to split them (as `dpdist.certification.job` does).
If later calls may add items to the same folder, set `is_extensible`; the table then contains all of
them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from dpdist.cluster import job_folder
from dpdist.cluster.executor import Executor, open_executor, use_executor
from dpdist.cluster.job_folder import JobKind, Journal, Progress
from dpdist.cluster.work import Chunk, ChunkJob, PoolSettings
from dpdist.core.errors import InvalidResultsError, UserError
from dpdist.core.files import ColumnSpec, error_text

Item = int | str
Partial = Any  # JSON: the result of some units of an item
Row = dict[str, Any]

CHUNK_SECONDS = 1.0
_INVALID = "invalid"  # key of the journal's line with the reason why all its results are invalid


@dataclass(frozen=True)
class WorkUnit:
    """The units in [low, high) of one item."""

    item: Item
    low: int
    high: int


@dataclass(frozen=True)
class ChunkPlan:
    """The size of chunks: at most `max_units` units.

    stall_seconds: seconds without a result after which a worker is stalled.
    """

    max_units: int = 1
    stall_seconds: float = 60.0


class WorkItems:
    """The work of a job. This class does not split items; subclasses can.

    items: payloads by name, in the order of work. make_worker: called once in every actor with
    `shared`. stall_seconds: see `ChunkPlan`. weights: weights of items in the progress; 1 by
    default.
    """

    units_per_item: int = 1  # number of units that an item can be split into
    gpus_per_actor: float = 0.0
    _stall_seconds: float = 60.0
    _weights: Mapping[Item, int] = {}

    def __init__(
        self,
        items: Mapping[Item, Any],
        make_worker: Callable[[Any], Callable[[Any], Any]],
        shared: Any,
        *,
        stall_seconds: float = 60.0,
        weights: Mapping[Item, int] | None = None,
    ) -> None:
        self.items: Sequence[Item] | Mapping[Item, Any] = items
        self.make_worker, self.shared = make_worker, shared
        self._stall_seconds, self._weights = stall_seconds, weights or {}

    def chunk_plan(self, seconds: float) -> ChunkPlan:
        """Return the size of chunks that take about `seconds`; it must not affect results."""
        return ChunkPlan(stall_seconds=self._stall_seconds)

    def make_chunk(self, work_units: list[WorkUnit]) -> tuple[str, Any]:
        """Return the name of a chunk of these units, and the payload for the worker."""
        (piece,) = work_units
        return str(piece.item), self.items[piece.item]  # type: ignore[index]

    def journal_entries(self, name: str, answer: Any) -> Iterable[dict[str, Any]]:
        """Return a worker's result of the chunk of this name as lines of the journal."""
        return [{"key": name, "rows": answer}]

    def parse_entry(self, entry: dict[str, Any]) -> tuple[WorkUnit, Partial]:
        """Return the units and the partial result of a line of the journal."""
        return WorkUnit(entry["key"], 0, 1), entry["rows"]

    def merge_partials(self, first: Partial, second: Partial) -> Partial:
        """Return the partial result of two adjacent intervals of units."""
        raise NotImplementedError("items that are split need merge_partials")

    def table_rows(self, item: Item, partial: Partial) -> list[Row]:
        """Return the item's rows of the table, from the result of all its units."""
        rows: list[Row] = partial
        return rows

    def is_small(self, state: JobState) -> bool:
        """Return whether the missing work is small (`dpdist.cluster.executor`).

        It must not affect results.
        """
        return False

    def weight(self, item: Item) -> int:
        """Return the weight of a finished item in the progress."""
        return self._weights.get(item, 1)

    def effort(self, work_unit: WorkUnit, partial: Partial) -> int:
        """Return the weight of units in the rate that is shown with the progress."""
        return self.weight(work_unit.item)


class JobSpec:
    """A kind of job. Subclasses define everything except `is_extensible` and `finish`."""

    kind: JobKind
    table_file: ClassVar[str]  # the table's name in its folder
    metadata_key: ClassVar[bytes]  # of the settings, in the table's metadata
    schema: pa.Schema
    columns: Mapping[str, ColumnSpec] = {}  # the columns that readers need
    is_extensible: ClassVar[bool] = False  # whether later calls may add items to a finished table
    sort_columns: ClassVar[tuple[str, ...]] = ("index",)  # of the rows
    seed: str | None = None  # the requested seed

    def identity(self) -> dict[str, Any]:
        """Return all settings that affect results, as JSON; they cannot change in a folder."""
        raise NotImplementedError

    def initial_record(self, output: Path) -> dict[str, Any]:
        """Return the rest of the settings ("seed", "classifier"), fixed before the first result."""
        raise NotImplementedError

    def work_items(self, job_record: dict[str, Any], output: Path) -> WorkItems:
        """Return the work for the pinned settings."""
        raise NotImplementedError

    def finish(self, state: JobState, output: Path) -> list[Row]:
        """Return the rows of the table when all work is done; may write more files to `output`."""
        return [row for item in state.work_items.items for row in state.finished_rows[item]]

    def build_table(self, rows: list[Row], job_record: Mapping[str, Any]) -> pa.Table:
        """Return the sorted rows as a table with the settings."""
        ordered = sorted(rows, key=lambda row: tuple(row[name] for name in self.sort_columns))
        return job_folder.build_table(ordered, self.schema, job_record, self.metadata_key)

    def load_table(self, path: Path) -> pa.Table:
        """Return the table. Raises UserError if it is damaged or does not match its settings."""
        return job_folder.read_table(path, self.columns, self.metadata_key)


def run_job(
    spec: JobSpec,
    output: Path,
    *,
    actors: int | None = None,
    progress: Progress | None = None,
    chunk_seconds: float = CHUNK_SECONDS,
    executor: Executor | None = None,
) -> pa.Table:
    """Do the missing work in the folder `output`, and return the table.

    The folder gets settings.json, journal.jsonl, and at the end the table. After an interruption,
    the same call computes the missing work and returns the identical table.

    Args:
        spec: the job.
        output: its folder.
        actors: number of workers; None uses the whole cluster and grows with it.
        progress: called as progress(done, total, per second).
        chunk_seconds: approximate seconds per chunk.
        executor: where the work runs; None for the enclosing `open_executor` or `dpdist.connect`,
            else for one that is opened for this job.

    Raises:
        UserError: the folder contains different work, whose differences are listed, or a different
            process is working in it.
        ClusterError: the cluster cannot do the work.
        InvalidResultsError: a worker found that all results are invalid, now or in an earlier call.
    """
    finished, wanted = output / spec.table_file, spec.identity()
    if finished.exists() and not spec.is_extensible:
        table = spec.load_table(finished)
        found = job_folder.read_job_record(table, spec.metadata_key)
        job_folder.refuse_difference(output, spec.kind, found, wanted, spec.seed)
        return table
    with ExitStack() as stack:
        where = stack.enter_context(use_executor(executor) if executor else open_executor())
        journal = _enter_folder(stack, output, spec.kind)
        about = job_folder.pin_settings(
            journal, spec.kind, wanted, spec.seed, lambda: spec.initial_record(output)
        )
        task = spec.work_items(about, output)
        book = _resume_state(task, journal, output)
        begun, before = time.monotonic(), book.effort

        def report() -> None:
            if progress is not None:
                elapsed = max(time.monotonic() - begun, 1e-9)
                progress(book.done, book.total, (book.effort - before) / elapsed)

        def on_result(name: str, answer: Any) -> None:
            for entry in task.journal_entries(name, answer):
                journal.append(entry)
                book.add_entry(entry)
            report()

        report()
        cut = task.chunk_plan(chunk_seconds)
        pool = PoolSettings(
            actors=actors, num_gpus=task.gpus_per_actor, stall_seconds=cut.stall_seconds
        )
        place = where.place(actors is None and task.is_small(book))
        with _record_invalid_results(journal, output):
            chunks = iter_chunks(book, cut)
            place.run_chunks(ChunkJob(task.make_worker, task.shared, chunks, on_result, pool))
    job_folder.write_table(spec.build_table(spec.finish(book, output), about), finished)
    return spec.load_table(finished)


def _enter_folder(stack: ExitStack, output: Path, kind: JobKind) -> Journal:
    """Return the journal of a folder, locked until `stack` ends.

    Raises UserError if the folder cannot be written.
    """
    try:
        return stack.enter_context(job_folder.open_job_folder(output, kind))
    except OSError as error:
        raise UserError(
            f"{output}: must be a writable folder, got {error_text(error)}; choose a different one "
            "(--output, in Python folder=)"
        ) from error


@contextmanager
def _record_invalid_results(journal: Journal, output: Path) -> Iterator[None]:
    """Record in the journal if a worker finds that all results are invalid."""
    try:
        yield
    except InvalidResultsError as error:
        journal.append({_INVALID: str(error)})
        raise InvalidResultsError(f"{output}: {error}") from None


def _resume_state(work_items: WorkItems, journal: Journal, output: Path) -> JobState:
    """Return the finished work in the journal.

    Raises InvalidResultsError if it records that all results are invalid.
    """
    book = JobState(work_items)
    for entry in journal.entries:
        if _INVALID in entry:
            raise InvalidResultsError(f"{output}: its results are invalid: {entry[_INVALID]}")
        book.add_entry(entry)
    return book


_Interval = tuple[int, int, Partial]  # low, high, result


class JobState:
    """The finished units of each item, and the rows of finished items. Overlaps count once.

    In an extensible folder it also has items of earlier calls that are not requested now.
    """

    def __init__(self, work_items: WorkItems) -> None:
        self.work_items = work_items
        self.finished_rows: dict[Item, list[Row]] = {}
        self.seconds: dict[Item, float] = defaultdict(float)
        self.total = sum(work_items.weight(item) for item in work_items.items)
        self.done = self.effort = 0
        self._known_intervals: dict[Item, list[_Interval]] = defaultdict(list)
        self._requested_items = frozenset(work_items.items)

    def add_entry(self, entry: dict[str, Any]) -> None:
        """Add a line of the journal."""
        piece, partial = self.work_items.parse_entry(entry)
        item, low, high = piece.item, piece.low, piece.high
        if item in self.finished_rows:
            return
        known = self._known_intervals[item]
        if any(low < h and l < high for l, h, _ in known):  # noqa: E741
            return
        self.seconds[item] += entry.get("seconds", 0.0)
        self.effort += self.work_items.effort(piece, partial)
        known = self._known_intervals[item] = self._merge_interval(known, (low, high, partial))
        if known[0][:2] == (0, self.work_items.units_per_item):
            self.finished_rows[item] = self.work_items.table_rows(item, known[0][2])
            del self._known_intervals[item]
            if item in self._requested_items:
                self.done += self.work_items.weight(item)

    def missing_intervals(self, item: Item) -> list[tuple[int, int]]:
        """Return the intervals of units that are not done."""
        if item in self.finished_rows:
            return []
        gaps, at = [], 0
        for low, high, _ in self._known_intervals.get(item, []):
            if low > at:
                gaps.append((at, low))
            at = high
        if at < self.work_items.units_per_item:
            gaps.append((at, self.work_items.units_per_item))
        return gaps

    def _merge_interval(self, known: list[_Interval], new: _Interval) -> list[_Interval]:
        """Return the sorted intervals with adjacent ones merged, which saves memory."""
        joined: list[_Interval] = []
        for low, high, partial in sorted([*known, new], key=lambda interval: interval[0]):
            if joined and joined[-1][1] == low:
                before, _, found = joined.pop()
                low, partial = before, self.work_items.merge_partials(found, partial)
            joined.append((low, high, partial))
        return joined


def iter_chunks(state: JobState, plan: ChunkPlan) -> Iterator[Chunk]:
    """Yield the missing units in chunks; they are not all in memory at once."""
    pieces: list[WorkUnit] = []
    number = units_in = 0
    for piece in _iter_work_units(state, plan):
        size = piece.high - piece.low
        if pieces and units_in + size > plan.max_units:
            yield Chunk(*state.work_items.make_chunk(pieces), float(number))
            pieces, units_in, number = [], 0, number + 1
        pieces.append(piece)
        units_in += size
    if pieces:
        yield Chunk(*state.work_items.make_chunk(pieces), float(number))


def _iter_work_units(state: JobState, plan: ChunkPlan) -> Iterator[WorkUnit]:
    """Yield every missing interval of units, split on a grid of ``plan.max_units``.

    The missing units of an item are looked up only when it is reached.
    """
    step = plan.max_units
    for item in state.work_items.items:
        for at in range(0, state.work_items.units_per_item, step):
            for low, high in state.missing_intervals(item):
                if low < at + step and at < high:
                    yield WorkUnit(item, max(low, at), min(high, at + step))
