"""Many trainings in bulk: one chunk of work is one training, in one process, by the loop that
trains runs. Banks of shadow models and teachers on disjoint shards are made so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from dpdist.base.errors import UserError
from dpdist.base.reading import read_bytes
from dpdist.base.storage import TRAINING_FOLDER, temporary_folder, write_atomic
from dpdist.bulk.job import Item, Partial, Piece, Row, Task
from dpdist.data import Dataset
from dpdist.privacy.plan import PrivacyPlan
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe
from dpdist.training.job import CheckedTraining, TrainJob

_SLOW = 50.0  # records per second that an honest worker trains on


class ManyTrainings(Task):
    """Trainings 0 to count - 1. The worker is called with a number and answers with files by name;
    they are kept in a folder of that number, the digest of the one named `witness` in the journal.

    examples: about how many one training takes.
    """

    witness: ClassVar[str]

    def __init__(
        self,
        count: int,
        worker: Callable[[Any], Callable[[Any], Any]],
        shared: Any,
        folder: Path,
        examples: float,
    ) -> None:
        numbers: dict[Item, int] = {f"model {n}": n for n in range(count)}
        super().__init__(numbers, worker, shared, silence=max(600.0, 10 * examples / _SLOW))
        self._numbers, self._folder = numbers, folder

    def found(self, raw: bytes, place: Path) -> dict[str, Any]:
        """What the witness says, for the row of its training. Raises UserError when damaged."""
        raise NotImplementedError

    def entries(self, name: str, answer: Mapping[str, bytes]) -> Iterable[dict[str, Any]]:
        place = self._place(name)
        for file, content in answer.items():
            write_atomic(place / file, content)
        return [{"key": name, "digest": file_digest(answer[self.witness])}]

    def read(self, entry: dict[str, Any]) -> tuple[Piece, Partial]:
        place = self._place(entry["key"])
        raw = read_bytes(place / self.witness)
        if file_digest(raw) != entry["digest"]:
            raise UserError(
                f"{place}: damaged: not the model that the journal knows; remove "
                f"{self._folder.parent}"
            )
        return Piece(entry["key"], 0, 1), self.found(raw, place)

    def rows(self, item: Item, partial: Partial) -> list[Row]:
        return [{"model": self._numbers[item], **partial}]

    def _place(self, name: Item) -> Path:
        return kept_in(self._folder, self._numbers[name])


def kept_in(folder: Path, number: int) -> Path:
    """Where the files of a training lie."""
    return folder / f"{number:04d}"


def file_digest(raw: bytes) -> str:
    """Names a file's content; of a private model it stays private."""
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


def files_of(folder: Path) -> dict[str, bytes]:
    """The files in a folder, by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@dataclass(frozen=True)
class _Here:
    """A training in this process (`dpdist.methods.base.Run`)."""

    job: TrainJob

    def workers(self, records: Any = None) -> None:
        import torch

        from dpdist.training.loop import run
        from dpdist.training.reducer import Reducer

        job = self.job if records is None else replace(self.job, given=records)
        run(job, Reducer(0, 1, torch.device("cpu")))

    def teachers(self, count: int, sections: Any = None) -> Any:
        raise UserError(f"{self.job.recipe.name}: one of many trainings has no teachers of its own")

    def release(self, about: bytes, draw: Any) -> list[float]:
        raise NotImplementedError("nothing is paid for")

    def finish(self) -> None:
        raise NotImplementedError("workers sum it up")


@contextmanager
def trained_here(
    recipe: Recipe,
    plan: PrivacyPlan,
    records: Dataset,
    members: np.ndarray,
    key: bytes,
    kept: dict[Any, Any] | None = None,
) -> Iterator[Path]:
    """The folder, while it lasts, of the model that the recipe trains in this process on those of
    its training records where `members` is true: a function of these and of what they hold. kept:
    of trainings that differ in nothing but their keys (`dpdist.training.job.TrainJob`).

    Raises UserError, `dpdist.training.finite.Diverged` among others.
    """
    privacy = recipe.privacy.model_copy(update={"run_key": key.hex()})
    own = recipe.model_copy(update={"privacy": privacy})
    with temporary_folder(TRAINING_FOLDER) as place:  # the run key is in it
        folder = RunFolder(place / "run")
        checked = CheckedTraining(own, folder, plan, records.only(members), None)
        job = replace(checked.begin(), members=members, kept=kept)
        own.method.train(_Here(job))
        yield job.folder.model
