"""The base class of evaluations: attacks, audits and membership inference of a trained model.

A kind of evaluation is one class without torch: its settings, whether its results are private, the
only reader of its results and the lines that a report prints of them. `work` describes the job
that computes them (`dpdist.cluster.resumable_job`), which imports torch. `dpdist.audits.registry`
lists the classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, final

from dpdist.core.errors import UserError

if TYPE_CHECKING:
    from dpdist.certification.subject import Subject
    from dpdist.cluster.resumable_job import JobSpec

FOLDER = "attacks"  # of all evaluations: below the run folder, or below its private/


class RunFolderLike(Protocol):
    """The part of a run folder that evaluations read: ``dpdist.runs.folder.RunFolder`` has it."""

    @property
    def path(self) -> Path: ...

    @property
    def private(self) -> Path: ...

    def enclosing_run(self, path: Path) -> RunFolderLike | None: ...


@dataclass(frozen=True)
class EvaluatedModel:
    """The evaluated model and its data.

    subject: the model; None for evaluations that need none. test_data: the named test data.
    load_training_data: reads the private records. recipe: of the model, for evaluations that train
    others like it.
    """

    subject: Subject | None
    test_data: Any
    load_training_data: Callable[[], Any]
    recipe: Any = None


class Evaluation:
    """One evaluation: its settings, the only reader of its results, and its job.

    file: name of the results that `read` reads, in their own folder. private: whether results
    depend on single training records. Then they are in private/: releases, reports, archives
    without private state and `cluster fetch` do not include them. needs_trained_model: whether it
    evaluates the run's own model. progress_unit: what its progress counts.
    """

    name: ClassVar[str]
    file: ClassVar[str]
    private: ClassVar[bool]
    needs_trained_model: ClassVar[bool] = True
    progress_unit: ClassVar[str] = "inputs"

    @property
    def folder_name(self) -> str:
        """Return the default name of the results' folder."""
        raise NotImplementedError

    def data_recipe(self, recipe: Any) -> Any:
        """Return the recipe whose data are read, from that of the run. Raises UserError."""
        return recipe

    def job_spec(self, subject: EvaluatedModel) -> JobSpec:
        """Return the job that computes the results."""
        raise NotImplementedError

    @classmethod
    def read(cls, path: Path) -> Any:
        """Return the results in a file, with its `path` and the hash of their `model` if stated.

        Raises UserError if the file is damaged.
        """
        raise NotImplementedError

    @classmethod
    def summary_rows(cls, results: Sequence[Any]) -> list[tuple[str, str]]:
        """Return name and value of results, for the summary and the report of a run."""
        raise NotImplementedError

    @classmethod
    def results_folder(cls, run: RunFolderLike) -> Path:
        """Return the folder of all results of this kind."""
        return (run.private if cls.private else run.path) / FOLDER

    @classmethod
    @final
    def read_all(cls, run: RunFolderLike) -> list[Any]:
        """Return all finished results of a run."""
        return [cls.read(path) for path in sorted(cls.results_folder(run).glob(f"*/{cls.file}"))]

    @final
    def output_folder(self, run: RunFolderLike, output: Path | None = None) -> Path:
        """Return the folder of the results.

        Raises UserError for a folder from which private results could be published.
        """
        if output is None:
            return self.results_folder(run) / self.folder_name
        around = run.enclosing_run(output)
        if self.private and around and not output.resolve().is_relative_to(around.private):
            raise UserError(
                f"{output}: results of {self.name} depend on single training records, and files "
                f"there may be published; choose a folder in {around.private}, or outside the run"
            )
        return output
