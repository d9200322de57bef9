"""Give access to the folder of one run: its files, its identity, and its verified ledger.

    recipe.yaml    the recipe with its defaults
    search.yaml    the recipe of a private search; recipe.yaml then has the chosen values
    run.json       format and version
    release/       SAFE to publish; only `dpdist release` writes there
    private/       NEVER publish: key, ledger, checkpoints, training metrics, the unreleased model
    certificates/  attacks/  audit/   evaluation on named test data
    report/        index.html

Epsilon is computed from the ledger, so a ledger that lost lines would give a too small epsilon. It
is always checked against the plan, the newest checkpoint and the finished training. The latter two
store the ledger's anchor at the time they were written; the ledger may have more lines than that,
and never fewer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, overload

from pydantic import ConfigDict, Field

from dpdist.core.errors import UserError
from dpdist.core.fields import FileShape, Keys, Number, WholeNumber
from dpdist.core.files import (
    MissingFileError,
    atomic_folder,
    make_private_folder,
    read_json,
    read_text,
    validate_path,
    write_atomic,
    write_json,
)
from dpdist.core.version import __version__
from dpdist.privacy.ledger import Anchor, JournalError, Ledger, LedgerError, anchor_path
from dpdist.privacy.plan import PrivacyPlan, parse_plan
from dpdist.runs import recipe
from dpdist.runs.recipe import Recipe, load_recipe, parse_recipe

# --- the folder -------------------------------------------------------------------------------


FORMAT = 2
WRITER = {"dpdist": __version__}  # the version that wrote a file, as stored in it


class RunDescription(FileShape):
    """run.json: format of the folder, and the version of dpdist that created it.

    Attributes:
        format: Format of the folder.
        dpdist: Version of dpdist that created it.
    """

    newest_format = FORMAT

    format: int
    dpdist: str = "?"


class StartRecord(FileShape):
    """private/begun-with.json: the recipes and the noise at the run's start.

    Attributes:
        recipe: The recipe with its defaults.
        asked: The recipe with its search; null without one.
        noise_multiplier: Noise multiplier of the plan; null before there is one.
    """

    recipe: Keys
    asked: Keys | None
    noise_multiplier: Number | None


class SearchTermsRecord(FileShape):
    """private/search/terms.json: the terms fixed before the first trial of a search.

    Attributes:
        data: Fingerprint of the records.
        plan: Plan of the search (`parse_plan`).
        trial: Plan of one trial.
        score_noise: Standard deviation of the noise of scores; null if scores are public.
        charge: The search's id in a budget.
        assumed: Assumptions about public parts, which dpdist did not check.
    """

    data: str
    plan: Keys
    trial: Keys
    score_noise: Number | None
    charge: str
    assumed: list[Any]


class AnchorRecord(FileShape):
    """The ledger's anchor (`dpdist.privacy.ledger.Anchor`) at the time a file was written.

    Attributes:
        records: Number of the ledger's lines, including its header.
        check: The check of the last line, which depends on all lines before it.
    """

    model_config = ConfigDict(extra="forbid")

    records: Annotated[int, Field(ge=1)]
    check: str

    def to_anchor(self) -> Anchor:
        """Return the `Anchor`."""
        return Anchor(self.records, self.check)


class CheckpointRecord(FileShape):
    """private/checkpoints/step-N/done.json, which is written last.

    Attributes:
        step: Number of steps before the checkpoint.
        ledger: Anchor of the ledger at that time.
    """

    step: WholeNumber
    ledger: AnchorRecord


class RoundingRecord(FileShape):
    """Floating-point rounding, as a finished training measured it.

    Attributes:
        precision: Of the trained parameters.
        moves: Largest change of a clipped gradient when its record moves to a different row, in
            clip norms; null if no record moves, or it was not measured.
    """

    precision: Literal["float32", "float64"]
    moves: float | None = None


class TrainingSummary(FileShape):
    """private/trained.json, which a finished training writes last.

    Attributes:
        steps: Number of training steps.
        fallback_layers: Layers whose gradients were computed record by record.
        ledger: Anchor of the ledger at the end.
        rounding: Rounding that the card states; null if no step adds gradients.
    """

    steps: WholeNumber
    fallback_layers: list[Any]
    ledger: AnchorRecord
    rounding: RoundingRecord | None = None


class DifferentRecipeError(UserError):
    """The folder contains a run of a different recipe, so this run cannot use it."""


class FileIn:
    """One file or folder of a run; as an attribute of a `RunFolder`, its whole path.

    Args:
        path: the path in the run's folder.
        description: one sentence, the attribute's documentation.
    """

    def __init__(self, path: str, description: str) -> None:
        self.path = path
        self.__doc__ = description

    @overload
    def __get__(self, folder: None, owner: type[RunFolder]) -> FileIn: ...
    @overload
    def __get__(self, folder: RunFolder, owner: type[RunFolder]) -> Path: ...
    def __get__(self, folder: RunFolder | None, owner: type[RunFolder]) -> FileIn | Path:
        return self if folder is None else folder.path / self.path


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run: its attributes are the paths of files and folders in it.

    An instance reads and writes nothing until you call a method. You mostly open `report_file` (an
    HTML page), `certificates` (a folder with one folder per certification; its
    certificates.parquet has one row per input) and `release_folder` (what may be published).
    Nothing in the folder `private` may be published. `name` is a str; docs/reference/run-folder.md
    lists all files.

    Args:
        path: the folder, which need not exist yet.

    Example:
        >>> import dpdist
        >>> from pathlib import Path
        >>> folder = dpdist.RunFolder(Path("runs/digits"))
        >>> folder.name, folder.ledger.as_posix()
        ('digits', 'runs/digits/private/ledger.jsonl')
    """

    path: Path

    recipe_file = FileIn("recipe.yaml", "The recipe with its defaults.")
    search_recipe_file = FileIn("search.yaml", "The recipe of the search that chose this run.")
    evaluation = FileIn("evaluation.json", "Accuracy on test data.")
    trials = FileIn("trials.json", "All trials of a search whose number of trials is fixed.")
    certificates = FileIn("certificates", "Folder of certifications, one folder each.")
    release_folder = FileIn("release", "Folder that is safe to publish.")
    report_file = FileIn("report/index.html", "The HTML report.")

    private = FileIn("private", "Folder that is never published.")
    ledger = FileIn("private/ledger.jsonl", "The privacy ledger.")
    run_key = FileIn("private/run.key", "The secret run key.")
    fixed_key_marker = FileIn("private/fixed-key", "Mark of a key that the recipe fixed.")
    plan = FileIn("private/plan.json", "The privacy plan.")
    start_record = FileIn("private/begun-with.json", "Recipes at the start; do not edit.")
    data_fingerprint = FileIn("private/data.json", "Fingerprint of the training records.")
    score_fingerprint = FileIn("private/scored.json", "Fingerprint of held-out private records.")
    canary_settings = FileIn("private/planted.json", "Section audit of a run with canaries.")
    pretraining_record = FileIn("private/pretrained.json", "Pretrained part and its data.")
    imported = FileIn("private/imported.json", "Origin of an imported model.")
    method_state = FileIn("private/hidden-noise.safetensors", "A method's tensors before step 0.")

    model_folder = FileIn("private/model", "The trained model, until `dpdist release` copies it.")
    checkpoints = FileIn("private/checkpoints", "Folder of training checkpoints.")
    training_summary = FileIn("private/trained.json", "A finished training writes it last.")
    metrics = FileIn("private/metrics.jsonl", "Private training metrics.")
    history = FileIn("private/history.jsonl", "Released values of each step of a script.")
    worker_groups = FileIn("private/workers.jsonl", "The group of workers of each start.")
    progress = FileIn("private/progress.json", "Progress, written by worker 0.")
    failure = FileIn("private/failure.json", "A worker's permanent error, for the driver.")
    stop_request = FileIn("private/stop-asked", "Request to end the training early.")
    interruption = FileIn("private/interrupted.json", "Checkpoint of a training that ended early.")
    errors = FileIn("private/errors.txt", "Workers' errors, which may contain private values.")
    log = FileIn("private/ray.log", "Ray's messages.")

    search_record = FileIn("private/search.json", "Plan and terms of the search that chose it.")
    search_terms = FileIn("private/search/terms.json", "Terms fixed before the first trial.")
    archive = FileIn("private/archive.json", "The archive, and this run's claim to it.")
    permit_request = FileIn("private/permit-asked.json", "Steps that the archive must record.")
    permit = FileIn("private/permit.json", "Steps that the archive has recorded.")
    baseline = FileIn("private/baseline.json", "Name of the run without privacy to compare with.")
    baseline_report = FileIn("private/baseline.html", "Report with that run's values: no epsilon.")

    def __str__(self) -> str:
        """Return the brief results of a finished run, or a line that it has not finished."""
        if not self.training_summary.exists():
            return f"Run {self.name} ({self.path}): its training has not finished"
        # The reports are above this package, and load much more.
        return str(import_module("dpdist.reports.results").load_results(self))

    @property
    def name(self) -> str:
        """Return the run's name, a str: the last part of `path`, such as "digits"."""
        return self.path.name

    def enclosing_run(self, path: Path) -> RunFolder | None:
        """Return the innermost run folder, this one or a different one, that contains a path.

        Args:
            path: any path; links are resolved.

        Returns:
            A `RunFolder`; None if the path is not in a run.
        """
        inside = path.resolve()
        for parent in (inside, *inside.parents):
            if parent == self.path.resolve() or _is_run_folder(parent):
                return RunFolder(parent)
        return None

    @property
    def parent_run(self) -> RunFolder | None:
        """Return the `RunFolder` of the search that this run is a trial of; None for other runs.

        The folder of a trial is in private/ of the run of its search.
        """
        for parent in self.path.resolve().parents:
            if parent.name == self.private.name and _is_run_folder(parent.parent):
                return RunFolder(parent.parent)
        return None

    @property
    def anchor(self) -> Path:
        """Return the `Path` of the anchor of the run's ledger: private/ledger.anchor.

        The anchor states the number of lines in the ledger and the check of the last one, so that a
        ledger that lost lines is noticed (`dpdist.privacy.ledger`).
        """
        return anchor_path(self.ledger)

    def check_same_recipe(self, recipe: Recipe) -> bool:
        """Return whether the run was started before with this recipe, a bool; write nothing.

        Args:
            recipe: the recipe to compare; differences in `resources` are allowed.

        Returns:
            True to continue the run; False if the folder is empty or does not exist.

        Raises:
            DifferentRecipeError: the folder contains a run of a different recipe.
            UserError: the folder contains something else, or a run of a newer format.
        """
        if self.path.exists() and any(self.path.iterdir()):
            self.check_format()
            different = self.read_recipe().differing_keys(recipe)
            if different:
                raise DifferentRecipeError(
                    f"{self.path}: contains a run of a different recipe ({', '.join(different)} "
                    "differ); give a different name or folder, or the same recipe to continue it"
                )
            return True
        return False

    def create_or_open(self, recipe: Recipe) -> None:
        """Create the folder with its recipe, or check that it has this recipe. Returns nothing.

        Args:
            recipe: recipe of the run.

        Raises:
            DifferentRecipeError: the folder contains a run of a different recipe.
            UserError: the folder contains something else, or a run of a newer format.
        """
        if self.check_same_recipe(recipe):
            return
        with atomic_folder(self.path, keep_existing=True) as path:
            aside = RunFolder(path)
            make_private_folder(aside.private)
            write_atomic(aside.recipe_file, recipe.to_yaml())
            write_json(path / "run.json", {"format": FORMAT, **WRITER})
        self.check_same_recipe(recipe)  # a second process may have created it first

    def pin_recipe(
        self,
        recipe: Recipe,
        noise_multiplier: float | None,
        search_recipe: Recipe | None = None,
    ) -> None:
        """Write the recipes and the noise of the run's start to `start_record`. Returns nothing.

        Args:
            recipe: recipe of the run.
            noise_multiplier: noise multiplier of the plan; None before there is a plan.
            search_recipe: the recipe with its search; None without a search.
        """
        recipes = {
            name: one and one.model_dump(mode="json", exclude={"resources"})
            for name, one in (("recipe", recipe), ("asked", search_recipe))
        }
        write_json(self.start_record, {**recipes, "noise_multiplier": noise_multiplier})

    def _read_start_record(self) -> StartRecord | None:
        """Return the content of `start_record`; None without the file."""
        try:
            return StartRecord.read(self.start_record)
        except MissingFileError:
            return None

    @property
    def start_noise_multiplier(self) -> float | None:
        """Return the noise multiplier at the run's start, a float in clip norms; None if unknown.

        It was given or calibrated. It is unknown before there is a plan, or if the file
        `start_record` is missing.
        """
        kept = self._read_start_record()
        return None if kept is None else kept.noise_multiplier

    def read_search_terms(self) -> dict[str, Any]:
        """Return the terms fixed before a search's first trial, a dict of JSON values by name.

        Returns:
            A dict with the keys "data" (str, fingerprint of the records), "plan" and "trial"
            (dicts, the plans of the search and of one trial), "score_noise" (float, standard
            deviation of the noise of scores; None if scores are public), "charge" (str, the
            search's id in a budget) and "assumed" (list of sentences).

        Raises:
            UserError: the file of the terms is damaged or missing.
        """
        return SearchTermsRecord.read_keys(self.search_terms)

    def _check_unchanged(self, name: str, path: Path, current: Recipe) -> None:
        """Raise UserError unless a recipe file is the one that the run was started with."""
        kept = getattr(self._read_start_record(), name, None)
        changed = kept and parse_recipe(kept, str(self.start_record)).differing_keys(current)
        if changed:
            raise UserError(
                f"{path}: {', '.join(changed)}: must be what this run was begun with; restore the "
                f"values in {self.start_record}, or start a new run under a different --name",
                see="explanation/privacy.md#what-a-run-really-released",
            )

    def check_format(self) -> None:
        """Raise UserError unless this version of dpdist can read the run. Returns nothing."""
        if not self.path.is_dir():
            raise UserError(f"{self.path}: no such run")
        try:
            RunDescription.read(self.path / "run.json")
        except MissingFileError:
            raise UserError(f"{self.path}: not a run folder (no run.json)") from None

    def read_recipe(self) -> Recipe:
        """Return the `Recipe` with which the run was started.

        Raises:
            UserError: the recipe is missing, damaged, or was changed since the start.
        """
        recipe = load_recipe(self.recipe_file)
        if self.canary_settings.exists():
            fixed, now = read_json(self.canary_settings), recipe.canary_audit
            if now is None or fixed != now.model_dump(mode="json"):
                raise UserError(
                    f"{self.recipe_file}: audit: must be unchanged since canaries were planted in "
                    f"this run; restore the values in {self.canary_settings}"
                )
        self._check_unchanged("recipe", self.recipe_file, recipe)
        return recipe

    def read_search_recipe(self) -> Recipe:
        """Return the `Recipe` of the run's search, as it was before the search chose values.

        Raises:
            UserError: the recipe is missing, damaged, or was changed since the start.
        """
        asked = load_recipe(self.search_recipe_file)
        self._check_unchanged("asked", self.search_recipe_file, asked)
        return asked

    def require_trained(self) -> dict[str, Any]:
        """Return the summary of the finished training, a dict of JSON values.

        Returns:
            The content of private/trained.json: "steps" (int), "seconds" (float, the duration),
            "model" (str, hash of the trained model) and others.

        Raises:
            UserError: the training never finished, or this is not a run folder.
        """
        self.check_format()
        if not self.training_summary.exists():
            raise UserError(
                f"{self.path}: training is not finished; repeat the command or script that started "
                "it (in a loop that stops early, call training.finish(); if Ray Tune stopped or "
                "cloned a trial, load the model from Ray's checkpoint)"
            )
        return TrainingSummary.read_keys(self.training_summary)

    def read_run_key(self) -> bytes:
        """Return the secret run key, 32 bytes, from which the keys of the run's noise are derived.

        Raises:
            UserError: its file is missing or damaged.
        """
        text = read_text(self.run_key, 1000)
        if not re.fullmatch(r"[0-9a-fA-F]{64}", text):  # a shorter key is easily guessed
            raise UserError(f"{self.run_key}: is damaged: must be 64 hex digits")
        return bytes.fromhex(text)

    def read_plan(self) -> PrivacyPlan:
        """Return the `PrivacyPlan` that the run executes, with `steps`, `records` and `delta`.

        Raises:
            UserError: it is missing or damaged, or is not the plan of the recipe.
        """
        plan = parse_plan(read_json(self.plan), str(self.plan))
        recipe.check_plan(self.read_recipe(), plan, self.start_noise_multiplier, str(self.plan))
        return plan


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, oldest first."""
    return sorted(path for path in folder.glob("step-*") if (path / "done.json").exists())


def open_run(name: str, runs: Path) -> RunFolder:
    """Return the run folder given by path or by name under `runs`.

    Raises UserError if there is no such run.
    """
    given = validate_path(name)
    for path in (validate_path(runs) / given, given):
        if _is_run_folder(path):
            folder = RunFolder(path)
            folder.check_format()
            return folder
    if (page := given / "report" / "index.html").exists():
        raise UserError(f"{name}: has the published files of a run, not the run; open {page}")
    if given.exists():
        raise UserError(
            f"{name}: must be a run folder, has no run.json; `dpdist import` imports a model that "
            "was trained elsewhere as a run"
        )
    factory = "; give a factory as --model" if ":" in name else ""
    raise UserError(f"{name}: no such run under {runs}/{factory}")


def _is_run_folder(path: Path) -> bool:
    return (path / "run.json").exists()


# --- the verified ledger ----------------------------------------------------------------------


_MAX_LINE_BYTES = 2**16  # bytes of a first line
_LEDGER_LOST = "the ledger was replaced or cut, and epsilon cannot be stated"


@dataclass(frozen=True)
class VerifiedLedger:
    """A run's plan, and its ledger, which contains every release that the model depends on."""

    plan: PrivacyPlan
    ledger: Ledger


@dataclass(frozen=True)
class Artifact:
    """A file that depends on the first `steps` steps. anchor: that of the ledger at the time."""

    description: str
    steps: int
    anchor: Anchor


def has_released(folder: RunFolder) -> bool:
    """Return whether the run may have released anything, so that its ledger must exist.

    Files without a complete line do not count: a crash or a full disk ended their first write.
    """
    files = (folder.ledger, folder.anchor, folder.training_summary, folder.worker_groups)
    return any(map(_has_line, files)) or bool(complete_checkpoints(folder.checkpoints))


def _has_line(path: Path) -> bool:
    if not path.is_file():
        return path.exists()
    with open(path, "rb") as file:
        return b"\n" in file.read(_MAX_LINE_BYTES)


def read_verified_ledger(folder: RunFolder) -> VerifiedLedger:
    """Return the actual releases of a run. Raises UserError if its ledger cannot be trusted."""
    plan = folder.read_plan()
    # Before the ledger: a training that runs meanwhile only appends to the ledger.
    artifacts = _released_artifacts(folder)
    try:
        ledger = Ledger.read(folder.ledger)
        _check_ledger(folder, plan, ledger, artifacts)
    except FileNotFoundError:
        raise UserError(
            f"{folder.ledger}: is missing: {_LEDGER_LOST}",
            see="explanation/privacy.md#what-a-run-really-released",
        ) from None
    except JournalError as error:
        raise UserError(
            str(error), see="explanation/privacy.md#what-a-run-really-released"
        ) from error
    return VerifiedLedger(plan, ledger)


def verify_ledger(folder: RunFolder, plan: PrivacyPlan, ledger: Ledger) -> None:
    """Raise LedgerError unless the ledger has every release that the model depends on.

    A step that the plan does not have is an error too. Raises UserError for other damaged files.
    """
    _check_ledger(folder, plan, ledger, _released_artifacts(folder))


def _check_ledger(
    folder: RunFolder, plan: PrivacyPlan, ledger: Ledger, artifacts: list[Artifact]
) -> None:
    if ledger.plan_fingerprint != plan.fingerprint():
        raise LedgerError(
            f"{ledger.path}: was not written under the plan of {folder.plan}: {_LEDGER_LOST}"
        )
    if max(ledger.release_counts, default=-1) >= plan.steps:
        raise LedgerError(f"{ledger.path}: has steps that {folder.plan} has not: {_LEDGER_LOST}")
    if ledger.num_queries > plan.num_queries:
        raise LedgerError(f"{ledger.path}: has more answers than {folder.plan}: {_LEDGER_LOST}")
    for made in artifacts:
        if made.steps > plan.steps:
            raise LedgerError(
                f"{made.description}: has more steps than {folder.plan}: {_LEDGER_LOST}"
            )
        complete = ledger.release_counts.keys() >= set(range(made.steps))
        if not complete or not ledger.contains_anchor(made.anchor):
            raise LedgerError(
                f"{ledger.path}: lacks releases before {made.description}: {_LEDGER_LOST}"
            )
    if folder.training_summary.exists():
        steps = TrainingSummary.read(folder.training_summary).steps
        if steps != plan.steps:
            raise LedgerError(
                f"{folder.training_summary}: steps: must be those of {folder.plan}: {_LEDGER_LOST}"
            )


def _released_artifacts(folder: RunFolder) -> list[Artifact]:
    found = []
    for checkpoint in complete_checkpoints(folder.checkpoints)[-1:]:
        done = CheckpointRecord.read(checkpoint / "done.json")
        words = f"the checkpoint of step {done.step}"
        found.append(Artifact(words, done.step, done.ledger.to_anchor()))
    if folder.training_summary.exists():
        trained = TrainingSummary.read(folder.training_summary)
        found.append(Artifact("the trained model", trained.steps, trained.ledger.to_anchor()))
    return found
