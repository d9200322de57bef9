"""Run a resumable job on a Ray cluster: the same table to the byte, however it was computed.

`run` pins all that is executed, keeps a journal, cuts the missing work into chunks, gives them to
a pool of actors that may die, and writes the table last. A kind of work brings two descriptions:

* `Work`: its words (`kind`), its table (`file`, `key`, `schema`, `columns`), all that its results
  depend on (`identity`, with the `seed` that was asked for), and the choices fixed once before the
  first result (`begin`: a seed, an executed classifier found by
  `dpdist.cluster.actor_pool.run_once`);
* `Task`, from `Work.open`: the items to do, once that is pinned. Named `items`, each with the
  payload that a worker is called with, and the `worker`: called once per actor with `shared`, it
  returns the function from a payload to the item's rows of the table, as JSON.

So an audit of a thousand trainings, or a teacher for each shard, is

    class Audit(resumable_job.Work):
        kind = job_folder.Kind("audit", "auditing")
        file, key, schema = "audit.parquet", b"dpdist.audit", SCHEMA

        def identity(self):
            return {"model": ..., "settings": ...}

        def begin(self, output):
            return {"seed": secrets.token_hex(16)}

        def open(self, about, output):
            trials = {f"trial {i}": i for i in range(1000)}
            return Task(trials, Trainer, Shared(about["seed"], ...))

    table = run(Audit(), output, actors=None, progress=show)

A payload's rows must be a pure function of payload, `shared` and pinned seed: a chunk of a dead or
slow actor is done again elsewhere. A task whose items are long overrides `units`, `cut`, `chunk`,
`read` and `join`, and is then done in pieces anywhere (`dpdist.certification.job` does so). Work
that may be asked for more in the same folder sets `grows`: its table holds all that is there.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from dpdist.cluster import job_folder
from dpdist.cluster.actor_pool import Chunk, PoolSettings, run_chunks, run_here
from dpdist.cluster.job_folder import Journal, Kind, Progress
from dpdist.cluster.session import connect
from dpdist.core import optional_imports
from dpdist.core.errors import InvalidResults
from dpdist.core.files import Column

Item = int | str
Partial = Any  # JSON: what is known of some units of an item
Row = dict[str, Any]

CHUNK_SECONDS = 1.0
_PART_SECONDS = 60.0
_INVALID = "invalid"  # the journal's line that says why none of its results hold


@dataclass(frozen=True)
class Piece:
    """Units low..high-1 of one item."""

    item: Item
    low: int
    high: int


@dataclass(frozen=True)
class Cut:
    """How work is cut: at most `budget` units in a chunk, `step` of one item in a piece.

    silence: seconds after which a worker that says nothing must be hanging. across: one stretch of
    units after the other for all items, not one item after the other.
    """

    budget: int = 1
    step: int = 1
    silence: float = 60.0
    across: bool = False


class Task:
    """What there is to do; as it stands, for items that are done whole.

    items: payloads by name, in the order of work. worker(shared) is made once in every actor.
    silence: see `Cut`. weights: what an item counts in the progress that is shown; 1 by default.
    """

    units: int = 1  # into how many units the work on an item can be cut
    gpus: float = 0.0  # of each actor
    _silence: float = 60.0
    _weights: Mapping[Item, int] = {}

    def __init__(
        self,
        items: Mapping[Item, Any],
        worker: Callable[[Any], Callable[[Any], Any]],
        shared: Any,
        *,
        silence: float = 60.0,
        weights: Mapping[Item, int] | None = None,
    ) -> None:
        self.items: Sequence[Item] | Mapping[Item, Any] = items
        self.worker, self.shared = worker, shared
        self._silence, self._weights = silence, weights or {}

    def cut(self, seconds: float) -> Cut:
        """Chunks of about that many seconds; no result may depend on it."""
        return Cut(silence=self._silence)

    def chunk(self, pieces: list[Piece]) -> tuple[str, Any]:
        """The name of a chunk of these pieces, and what the worker is called with."""
        (piece,) = pieces
        return str(piece.item), self.items[piece.item]  # type: ignore[index]

    def entries(self, name: str, answer: Any) -> Iterable[dict[str, Any]]:
        """A worker's answer to the chunk of that name, as lines of the journal."""
        return [{"key": name, "rows": answer}]

    def read(self, entry: dict[str, Any]) -> tuple[Piece, Partial]:
        """What a line of the journal says."""
        return Piece(entry["key"], 0, 1), entry["rows"]

    def join(self, first: Partial, second: Partial) -> Partial:
        """What is known of two intervals of units that touch, in order."""
        raise NotImplementedError("items that are cut need join")

    def rows(self, item: Item, partial: Partial) -> list[Row]:
        """The item's rows of the table, from what is known of all its units."""
        rows: list[Row] = partial
        return rows

    def weight(self, item: Item) -> int:
        """What a finished item adds to the progress."""
        return self._weights.get(item, 1)

    def effort(self, piece: Piece, partial: Partial) -> int:
        """What a piece adds to the rate that is shown beside the progress."""
        return self.weight(piece.item)


class Work:
    """What a job of one kind is. Subclasses say everything but `grows` and `finish`."""

    kind: Kind
    file: ClassVar[str]  # the table's name in its folder
    key: ClassVar[bytes]  # of what was executed, in the table's metadata
    schema: pa.Schema
    columns: Mapping[str, Column] = {}  # what readers rely on
    grows: ClassVar[bool] = False  # the same folder may be asked for more: a table is no end
    order: ClassVar[tuple[str, ...]] = ("index",)  # columns by which rows are sorted
    seed: str | None = None  # the one asked for

    def identity(self) -> dict[str, Any]:
        """All that results depend on, as JSON: who continues must have the same."""
        raise NotImplementedError

    def begin(self, output: Path) -> dict[str, Any]:
        """The rest of what is executed ("seed", "classifier"), fixed before the first result."""
        raise NotImplementedError

    def open(self, about: dict[str, Any], output: Path) -> Task:
        """What there is to do, given all that is pinned."""
        raise NotImplementedError

    def finish(self, book: Book, output: Path) -> list[Row]:
        """The rows of the table, from all that is done; may write files beside it."""
        return [row for item in book.task.items for row in book.rows[item]]

    def build(self, rows: list[Row], about: Mapping[str, Any]) -> pa.Table:
        """The rows in their order, with what was executed."""
        ordered = sorted(rows, key=lambda row: tuple(row[name] for name in self.order))
        return job_folder.build_table(ordered, self.schema, about, self.key)

    def load(self, path: Path) -> pa.Table:
        """The table. Raises UserError when it is damaged, or not of its settings."""
        return job_folder.read_table(path, self.columns, self.key)


def run(
    work: Work,
    output: Path,
    *,
    actors: int | None = None,
    progress: Progress | None = None,
    chunk_seconds: float = CHUNK_SECONDS,
    here: bool = False,
) -> pa.Table:
    """Do what is missing of the work in the folder `output`; return the table.

    ``output`` receives the table (written last), settings.json (what was executed) and, while it
    runs, journal.jsonl and parts/. Called again after any interruption it computes what is missing
    and gives the identical table. actors: None uses the whole cluster and grows with it.
    progress(done, in all, per second). here: in this process, without Ray.

    Without an enclosing `dpdist.connect` a session of its own is started, on loopback. Raises
    UserError when ``output`` holds other work (naming what differs) or another process is working
    in it, ClusterError when the cluster cannot do it; InvalidResults when a worker found that none
    of the results hold, then and whenever it is called again.
    """
    finished, wanted = output / work.file, work.identity()
    if finished.exists() and not work.grows:
        table = work.load(finished)
        found = job_folder.about_table(table, work.key)
        job_folder.refuse_difference(output, work.kind, found, wanted, work.seed)
        return table
    session = (
        nullcontext() if here else connect(worker_setup=optional_imports.install_torchvision_hook)
    )
    with session, job_folder.held(output, work.kind) as journal:
        about = job_folder.pin(journal, work.kind, wanted, work.seed, lambda: work.begin(output))
        task = work.open(about, output)
        book = _taken_up(task, journal, output)
        parts = _Parts(output / "parts", work, about, book)
        meter = _Meter(book, progress)

        def on_result(name: str, answer: Any) -> None:
            for entry in task.entries(name, answer):
                journal.append(entry)
                book.add(entry)
            parts.write_if_due()
            meter.show()

        cut = task.cut(chunk_seconds)
        pool = PoolSettings(actors=actors, num_gpus=task.gpus, stall_after=cut.silence)
        execute = run_here if here else run_chunks
        with _invalidating(journal, parts, output):
            execute(task.worker, task.shared, chunks(book, cut), on_result, pool)
    job_folder.write_table(work.build(work.finish(book, output), about), finished)
    parts.remove()
    return work.load(finished)


@contextmanager
def _invalidating(journal: Journal, parts: _Parts, output: Path) -> Iterator[None]:
    """Record in the journal when a worker finds that none of the results hold."""
    try:
        yield
    except InvalidResults as error:
        journal.append({_INVALID: str(error)})
        parts.remove()
        raise InvalidResults(f"{output}: {error}") from None


def _taken_up(task: Task, journal: Journal, output: Path) -> Book:
    """Return what the journal says is done. Raises InvalidResults where it says that none holds."""
    book = Book(task)
    for entry in journal.entries:
        if _INVALID in entry:
            raise InvalidResults(f"{output}: its results do not hold: {entry[_INVALID]}")
        book.add(entry)
    return book


_Interval = tuple[int, int, Partial]  # low, high, what is known


class Book:
    """What is done of each item, and the rows of the finished ones. Overlaps count once.

    Of a folder that grows it also holds items of earlier calls that were not asked for now.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.rows: dict[Item, list[Row]] = {}
        self.seconds: dict[Item, float] = defaultdict(float)
        self.total = sum(task.weight(item) for item in task.items)
        self.done = self.effort = 0
        self._pieces: dict[Item, list[_Interval]] = defaultdict(list)
        self._wanted = frozenset(task.items)

    def add(self, entry: dict[str, Any]) -> None:
        """Take in a line of the journal."""
        piece, partial = self.task.read(entry)
        item, low, high = piece.item, piece.low, piece.high
        if item in self.rows:
            return
        known = self._pieces[item]
        if any(low < h and l < high for l, h, _ in known):  # noqa: E741
            return
        self.seconds[item] += entry.get("seconds", 0.0)
        self.effort += self.task.effort(piece, partial)
        known = self._pieces[item] = self._with(known, (low, high, partial))
        if known[0][:2] == (0, self.task.units):
            self.rows[item] = self.task.rows(item, known[0][2])
            del self._pieces[item]
            if item in self._wanted:
                self.done += self.task.weight(item)

    def missing(self, item: Item) -> list[tuple[int, int]]:
        """Intervals of units that are not done."""
        if item in self.rows:
            return []
        gaps, at = [], 0
        for low, high, _ in self._pieces.get(item, []):
            if low > at:
                gaps.append((at, low))
            at = high
        if at < self.task.units:
            gaps.append((at, self.task.units))
        return gaps

    def _with(self, known: list[_Interval], new: _Interval) -> list[_Interval]:
        """The intervals in order, those that touch joined: an item takes little memory."""
        joined: list[_Interval] = []
        for low, high, partial in sorted([*known, new], key=lambda interval: interval[0]):
            if joined and joined[-1][1] == low:
                before, _, found = joined.pop()
                low, partial = before, self.task.join(found, partial)
            joined.append((low, high, partial))
        return joined


def chunks(book: Book, cut: Cut) -> Iterator[Chunk]:
    """Missing units, packed into chunks. A stream: a million chunks are never there at once."""
    pieces: list[Piece] = []
    number = units_in = 0
    for piece in _pieces(book, cut):
        size = piece.high - piece.low
        if pieces and units_in + size > cut.budget:
            yield Chunk(*book.task.chunk(pieces), float(number))
            pieces, units_in, number = [], 0, number + 1
        pieces.append(piece)
        units_in += size
    if pieces:
        yield Chunk(*book.task.chunk(pieces), float(number))


def _pieces(book: Book, cut: Cut) -> Iterator[Piece]:
    """Every missing interval of units, cut on a grid of ``cut.step``.

    What is missing of a piece is found out when its turn comes: nobody else computes it, so that it
    does not matter when.
    """
    grid = range(0, book.task.units, cut.step)
    if cut.across:
        places = ((item, at) for at in grid for item in book.task.items)
    else:
        places = ((item, at) for item in book.task.items for at in grid)
    for item, at in places:
        for low, high in book.missing(item):
            if low < at + cut.step and at < high:
                yield Piece(item, max(low, at), min(high, at + cut.step))


class _Parts:
    """Finished rows, appended as Parquet parts while the job runs, for whoever watches it."""

    def __init__(self, folder: Path, work: Work, about: dict[str, Any], book: Book) -> None:
        self._folder, self._work, self._about, self._book = folder, work, about, book
        self._written: set[Item] = set()
        self._last = time.monotonic()
        self.remove()  # the journal holds all of them

    def write_if_due(self) -> None:
        now = time.monotonic()
        if now - self._last < _PART_SECONDS:  # asked for every chunk: nothing else happens here
            return
        self._last = now
        fresh = {i: rows for i, rows in self._book.rows.items() if i not in self._written}
        if not fresh:
            return
        self._written |= fresh.keys()
        number = len(list(self._folder.glob("*.parquet"))) if self._folder.exists() else 0
        rows = [row for some in fresh.values() for row in some]
        job_folder.write_table(
            self._work.build(rows, self._about), self._folder / f"part-{number:05d}.parquet"
        )

    def remove(self) -> None:
        if self._folder.exists():
            for path in self._folder.glob("*.parquet"):
                path.unlink()
            self._folder.rmdir()


class _Meter:
    """What is finished, and what was done per second since this call began."""

    def __init__(self, book: Book, progress: Progress | None) -> None:
        self._book, self._progress = book, progress
        self._start = time.monotonic()
        self._before = book.effort
        self.show()

    def show(self) -> None:
        if self._progress is None:
            return
        elapsed = max(time.monotonic() - self._start, 1e-9)
        rate = (self._book.effort - self._before) / elapsed
        self._progress(self._book.done, self._book.total, rate)
