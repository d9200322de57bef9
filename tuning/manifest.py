"""The private manifest of a search: number of trials, keys and settings, drawn beforehand.

An adversary that learns K or sees trials that lost learns more than the guarantee covers, so the
manifest never leaves private/. It is written once, completely, before anything runs; a continued
search reads it and draws nothing again: a second draw after looking at the first would be a second
search.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import model_validator

from dpdist.config.search import NumTrialsRecipe, TuneRecipe
from dpdist.core.fields import FileShape, Keys, Number, SecretHex, key_error
from dpdist.core.files import make_private_folder, write_json
from dpdist.privacy.plan import parse_plan
from dpdist.randomness.keys import derive_key, stream_words
from dpdist.runs.folder import RunFolder
from dpdist.tuning.space import TrialLimit, TrialValues, draw_values

FORMAT = 2


class TrialRecord(FileShape):
    """One trial of the manifest.

    Attributes:
        number: The trial's number, from 0.
        key: The trial's secret run key, in hexadecimal digits.
        tie: A text derived from the search's key, by which equal scores are decided.
        values: Values of the searched fields; null while an adaptive searcher has not chosen them.
    """

    number: int
    key: SecretHex
    tie: str
    values: Keys | None


class ManifestRecord(FileShape):
    """private/search/manifest.json: the trials as drawn, before anything runs.

    Attributes:
        format: Format of the file.
        trials: The trials.
    """

    newest_format = FORMAT

    format: int
    trials: list[TrialRecord]


class SettingsRecord(FileShape):
    """private/search/settings/N.json: of one trial, written before it starts.

    Attributes:
        values: Values of the searched fields, by dotted key.
        noise_multiplier: Noise multiplier of the trial's training.
    """

    values: Keys
    noise_multiplier: Number


class OutcomeRecord(FileShape):
    """private/search/outcome.json: the best trial.

    Attributes:
        winner: Number of the best trial; null when the search ended without a model.
    """

    winner: int | None


class ScoresRecord(FileShape):
    """private/search/scores/N.json: scores of one trial at its rungs.

    Attributes:
        scores: The scores so far, one per rung.
        done: Whether the trial has ended, so that no score follows.
        failed: Why the trial does not count; null if it does.
    """

    scores: list[Number]
    done: bool
    failed: str | None

    @model_validator(mode="after")
    def _check_scored(self) -> ScoresRecord:
        if self.done and self.failed is None and not self.scores:
            raise key_error("scores", "must be numbers, of a trial that is done")
        return self


@dataclass(frozen=True)
class Trial:
    """Hold one trial.

    key: 32 bytes, from which all its randomness follows. tie_breaker: decides between equal scores,
    independently of the data. values: of the searched fields; None while an adaptive searcher has
    not chosen them.
    """

    number: int
    key: bytes
    tie_breaker: str
    values: TrialValues | None = None


@dataclass(frozen=True)
class SearchFolder:
    """Give the paths of a search in its run folder; all are private."""

    run: RunFolder

    @property
    def path(self) -> Path:
        return self.run.private / "search"

    @property
    def manifest(self) -> Path:
        return self.path / "manifest.json"

    @property
    def processes(self) -> Path:
        """Return the file of the nonces of processes that were charged for the search."""
        return self.path / "processes.json"

    @property
    def terms(self) -> Path:
        """Return the file of what is fixed before the first trial.

        It has records, plan, limit of a trial, noise of scores, budget charge and assumptions.
        """
        return self.run.search_terms

    @property
    def outcome(self) -> Path:
        return self.path / "outcome.json"

    @property
    def disk_full_marker(self) -> Path:
        """Return the empty file by which a trial tells the driver that the disk is full."""
        return self.path / "full"

    @property
    def progress(self) -> Path:
        """Return the file of the trials' stages, for the operator."""
        return self.path / "progress.json"

    @property
    def ray_folder(self) -> Path:
        return self.path / "ray"

    def trial_folder(self, number: int) -> RunFolder:
        """Return the run folder of one trial."""
        return RunFolder(self.path / "trials" / f"{number:05d}")

    def settings_file(self, number: int) -> Path:
        """Return the file of values and noise multiplier of one trial."""
        return self.path / "settings" / f"{number:05d}.json"

    def scores_file(self, number: int) -> Path:
        """Return the file of one trial's scores at its rungs, or why it failed."""
        return self.path / "scores" / f"{number:05d}.json"


def draw_number_of_trials(num_trials: NumTrialsRecipe, key: bytes) -> int:
    """Return the number of trials K, drawn with a secret key, or fixed."""
    secret = num_trials.secret_distribution
    if secret is None:
        assert num_trials.runs is not None
        return num_trials.runs
    return secret.quantile(_uniform_stream(derive_key(key, "search", "count"))())


def draw_trials(tune: TuneRecipe, key: bytes) -> list[Trial]:
    """Return all trials of a search, with their settings and keys, drawn with a secret key."""
    trials = []
    for number in range(draw_number_of_trials(tune.num_trials, key)):
        values = None
        if tune.searcher == "random":
            values = draw_values(tune, _uniform_stream(derive_key(key, "search", "values", number)))
        tie = derive_key(key, "search", "tie", number).hex()
        trials.append(Trial(number, derive_key(key, "search", "trial", number), tie, values))
    return trials


def ensure_manifest(folder: SearchFolder, tune: TuneRecipe, key: bytes) -> None:
    """Draw the trials with a secret key and write them, unless they are written."""
    if folder.manifest.exists():
        return
    make_private_folder(folder.path)
    trials = [
        {"number": t.number, "key": t.key.hex(), "tie": t.tie_breaker, "values": t.values}
        for t in draw_trials(tune, key)
    ]
    write_json(folder.manifest, {"format": FORMAT, "trials": trials})


def read_trials(folder: SearchFolder) -> list[Trial]:
    """Return the trials as drawn. Raises UserError for a missing, damaged or newer manifest."""
    found = ManifestRecord.read(folder.manifest).trials
    return [Trial(t.number, bytes.fromhex(t.key), t.tie, t.values) for t in found]


def best_trial(trials: list[Trial], scores: dict[int, float]) -> int | None:
    """Return the number of the best trial, ties broken by the drawn label; None without a score.

    scores: of the trials that did not fail; a failed trial counts as minus infinity.
    """
    done = [trial for trial in trials if trial.number in scores]
    if not done:
        return None
    return max(done, key=lambda trial: (scores[trial.number], trial.tie_breaker)).number


def _uniform_stream(key: bytes) -> Callable[[], float]:
    """Return a function that returns new numbers in [0, 1), with 53 bits from a key's stream."""
    position = 0

    def uniform() -> float:
        nonlocal position
        (word,) = stream_words(key, position, 1)
        position += 1
        return float(int(word) >> 11) * 2.0**-53

    return uniform


def read_settings(folder: SearchFolder, number: int) -> dict[str, Any]:
    """Return values and noise multiplier of a trial, as written before it started."""
    return SettingsRecord.read_keys(folder.settings_file(number))


def read_terms(folder: SearchFolder) -> dict[str, Any]:
    """Return the terms fixed before the first trial. Raises UserError for damaged ones."""
    return folder.run.read_search_terms()


def read_trial_limit(folder: SearchFolder) -> TrialLimit:
    """Return the limit of a trial's privacy cost, as accounted."""
    return TrialLimit(parse_plan(read_terms(folder)["trial"], f"{folder.terms}: trial"))


def read_winner(folder: SearchFolder) -> int | None:
    """Return the number of the best trial; None if the search ended without a model."""
    return OutcomeRecord.read(folder.outcome).winner


def read_scores(folder: SearchFolder, number: int) -> dict[str, Any]:
    """Return the keys of `ScoresRecord`; no scores if the trial has not started."""
    path = folder.scores_file(number)
    if not path.exists():
        return {"scores": [], "done": False, "failed": None}
    return ScoresRecord.read_keys(path)
