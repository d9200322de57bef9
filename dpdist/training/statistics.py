"""Bought statistics: ranges and fills of columns from noisy counts, without public constants.

Everything is one release: the counts of all columns on their fixed grids
(`dpdist.data.histograms`), with Gaussian noise of one deviation. The ledger has it durably before
its noise is drawn, and the noisy counts before anything computed from them is written, so that a
repeated call, also after a kill, is the same release. Ranges, fills and fractions are
post-processing: other quantiles do not affect epsilon. A folder never counts twice: different
records or columns are a different sum, for which its ledger raises an error.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dpdist.config.sections import PrivacyRecipe, as_privacy
from dpdist.config.statistics import MEDIAN
from dpdist.config.training import Stage
from dpdist.core.errors import UserError
from dpdist.core.files import (
    make_folder,
    make_private_folder,
    read_json,
    remove_leftovers,
    write_json,
)
from dpdist.core.preprocessing import ColumnPreprocessing
from dpdist.core.script_errors import warn
from dpdist.data.dataset import UserDataset
from dpdist.data.histograms import (
    ColumnEstimate,
    count_cells,
    estimate,
    linear_edges,
    universal_edges,
)
from dpdist.data.parquet import rows_of_nobody, users_of
from dpdist.data.preprocessing import Preprocessing, as_table_file, checked_rule, preprocess
from dpdist.data.protocol import Users
from dpdist.gradients.noise import add_noise
from dpdist.privacy.calibration import counts_noise_for
from dpdist.privacy.card import build_card
from dpdist.privacy.guarantee import Guarantee
from dpdist.privacy.ledger import JournalError, Ledger, ReplayConflict
from dpdist.privacy.phases import GaussianCounts, Phase
from dpdist.privacy.plan import PrivacyPlan, UserUnit
from dpdist.randomness.keys import derive_key, key_id
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe
from dpdist.training.job import ensure_run_key
from dpdist.training.records import by_unit, data_source, training_records

RESULT_FILE = "statistics.json"
_CONTEXT = "statistics"
_USER = "unit_id"  # name of the column of users in plans of scripts


# --- what is counted --------------------------------------------------------------------------


@dataclass(frozen=True)
class CountedColumn:
    """Count a column of numbers.

    rule: of its preprocessing; its `range` is the declared outer range, without which the grid is
    the universal one. values: (N,) float64 in the column's own units, NaN for missing cells.
    """

    name: str
    rule: ColumnPreprocessing
    values: np.ndarray

    @property
    def edges(self) -> np.ndarray:
        """Return the ends of the cells of its grid."""
        if self.rule.range is None:
            return universal_edges(signed=not self.rule.log1p)
        return linear_edges(*self.rule.range)

    def counts(self, users: Users | None) -> np.ndarray:
        """Return its counts (COUNTS,)."""
        return count_cells(self.values, self.edges, users)

    def check(self) -> None:
        """Raise UserError for a range in which float64 has fewer numbers than cells."""
        if not (np.diff(self.edges) > 0).all():
            raise UserError(f"{_CONTEXT}: columns.{self.name}.range: must be wider")

    def constants(self, found: ColumnEstimate) -> ColumnPreprocessing:
        """Return the rule with the range, and with the fill unless it has its own."""
        fill = found.median if self.rule.missing is None else self.rule.missing
        update = {"range": (found.low, found.high), "missing": fill}
        return ColumnPreprocessing.model_validate(self.rule.model_dump() | update)


def plan_of(
    privacy: PrivacyRecipe, records: int, phases: tuple[Phase, ...], user: UserUnit | None
) -> PrivacyPlan:
    """Return the plan of only the statistics. records: their number; of users if they are given."""
    return PrivacyPlan(
        privacy.nominal_records or records, phases, privacy.delta, adjacency=privacy.adjacency,
        nominal=privacy.nominal_records is not None, user=user,
    )  # fmt: skip


# --- the release ------------------------------------------------------------------------------


def release_counts(
    path: Path, plan: PrivacyPlan, counts: np.ndarray, fixed_key: str | None
) -> np.ndarray:
    """Return counts with the noise of the plan's phase, the only release of the folder.

    Args:
        path: the folder, created if it does not exist.
        plan: of `plan_of`.
        counts: exact counts of all columns, concatenated.
        fixed_key: 64 hex digits, for tests; None for a new key.

    Raises:
        UserError: the folder contains the release of other counts, or under a different plan.
    """
    folder = RunFolder(path)
    (phase,) = plan.phases
    assert isinstance(phase, GaussianCounts)
    make_private_folder(folder.private)
    if fixed_key is None and folder.fixed_key_marker.exists():
        raise UserError(
            f"{_CONTEXT}: {path}: was bought with a fixed run key, which is NOT PRIVATE; give "
            "another folder"
        )
    ensure_run_key(folder, fixed_key)
    key = folder.read_run_key()
    counted = hashlib.blake2b(counts.tobytes(), digest_size=32).hexdigest()
    release = derive_key(key, "statistics counted", counted).hex()
    try:
        with Ledger.open(folder.ledger, plan.fingerprint()) as ledger:
            identity = {"key": key_id(key)}
            if any(attempt["identity"] != identity for attempt in ledger.attempts):
                raise UserError(
                    f"{_CONTEXT}: {folder.run_key}: is not the key of this folder's release; "
                    "restore it, or give another folder"
                )
            ledger.begin_attempt(identity)
            ledger.record(0, release)
            kept = ledger.find_answer(release)
            if kept is None:
                # Different counts, as in a copy of the folder, get different noise.
                noise = derive_key(key, "statistics noise", plan.fingerprint(), counted)
                kept = add_noise(counts, noise, phase.deviation).tolist()
                ledger.record_answer(release, kept)
    except ReplayConflict:
        raise UserError(
            f"{_CONTEXT}: {path}: contains statistics of other records or columns; restore these, "
            "or give another folder (of a recipe: another name)"
        ) from None
    except JournalError as error:
        raise UserError(f"{_CONTEXT}: {error}") from error
    return np.array(kept)


def buy(
    path: Path,
    plan: PrivacyPlan,
    columns: Sequence[CountedColumn],
    *,
    users: Users | None,
    unit: str,
    quantiles: tuple[float, float],
    fixed_key: str | None,
) -> dict[str, ColumnPreprocessing]:
    """Return the rules of the columns with constants from noisy counts, and write them.

    The folder's file has them, with the card of their privacy cost.

    Args:
        path: the folder of the statistics.
        plan: of `plan_of`, for these columns.
        columns: the counted columns.
        users: whom the records belong to; None if the unit is a record.
        unit: what is protected, in words.
        quantiles: fractions of a column's numbers below its range and up to its end.
        fixed_key: as in `release_counts`.

    Raises:
        UserError: as `release_counts` does.
    """
    for column in columns:
        column.check()
    _check_folder(path)
    counts = np.concatenate([column.counts(users) for column in columns])
    noisy = release_counts(path, plan, counts, fixed_key)
    (phase,) = plan.phases
    assert isinstance(phase, GaussianCounts)
    found = {
        column.name: estimate(part, column.edges, quantiles, phase.deviation)
        for column, part in zip(columns, np.split(noisy, len(columns)), strict=True)
    }
    rules = {column.name: column.constants(found[column.name]) for column in columns}
    private = not RunFolder(path).fixed_key_marker.exists()
    written = {
        "columns": {name: rule.model_dump(mode="json") for name, rule in rules.items()},
        "missing": {name: each.missing for name, each in found.items()},
        "quantiles": list(quantiles),
        "card": build_card(plan, private=private, unit=unit),
    }
    write_json(path / RESULT_FILE, written)
    return rules


def _check_folder(path: Path) -> None:
    """Create the folder. Raises UserError if it contains something else."""
    remove_leftovers(path)
    names = {each.name for each in path.iterdir()} if path.is_dir() else set()
    # A first call that was killed leaves at most the private folder.
    if not names <= {RunFolder.private.path, RESULT_FILE}:
        raise UserError(f"{_CONTEXT}: folder: {path}: must be new, or contain only statistics")
    make_folder(path)


def read_statistics_stage(path: Path) -> Stage | None:
    """Return the stage of the statistics in a folder; None for any other folder."""
    if not (path / RESULT_FILE).exists():
        return None
    card = read_json(path / RESULT_FILE, {"card": dict})["card"]
    return Stage(
        name=path.name, places=[str(path.resolve())], plan=card["accounted"], unit=card["unit"],
        guarantee=card["guarantee"], fixed_key=not card["private"], assumed=card["assumptions"],
        in_target=True,
    )  # fmt: skip


def warn_if_uncounted(records: int, stages: Sequence[Stage]) -> None:
    """Warn about statistics of as many records from this process that a training does not name.

    Its epsilon would omit them.
    """
    named = {place for each in stages for place in each.places}
    for each in list(_bought):
        if each.num_records == records and str(each.path) not in named:
            warn(
                f"began_with: does not name {each.path}, statistics of {records:,} records that "
                "were bought in this process: if they prepared these records, give them, or "
                "epsilon omits them"
            )


# --- in a recipe ------------------------------------------------------------------------------


def statistics_folder(folder: RunFolder) -> Path:
    """Return the folder of a run's statistics, next to the run, since it exists before the run."""
    return folder.path.with_name(f"{folder.name}-statistics")


def buy_for_recipe(recipe: Recipe, path: Path) -> dict[str, ColumnPreprocessing]:
    """Return the constants of a recipe's bought columns, from counts of its training records.

    Raises UserError as `release_counts` does, and for columns that are not numbers.
    """
    section, columns = recipe.statistics, recipe.data.columns
    assert section is not None
    rules = {
        name: columns.preprocessing[name].model_copy(
            update={
                "range": each.range,
                "missing": None if each.missing == MEDIAN else each.missing,
            }
        )
        for name, each in section.columns.items()
    }
    # With raw numbers the records keep their hashes, and so the split into training records.
    plain = {
        name: ColumnPreprocessing(date=rule.date, missing="flag") for name, rule in rules.items()
    }
    asked = recipe.with_constants(plain)
    records = by_unit(asked, training_records(asked, data_source(asked)))
    places, inputs = {}, 0
    for name, rule in asked.data.columns.feature_rules.items():
        places[name] = inputs
        inputs += len(rule.names(name))
    if records.input_shape != (inputs,):
        raise UserError(f"{_CONTEXT}: data.columns.features: must be columns of numbers, got lists")
    numbers = {
        name: numbers_of_flagged(np.asarray(records.inputs[:, at : at + 2]))[:, 0]
        for name, at in places.items()
        if name in rules
    }
    plan = plan_of(recipe.privacy, len(records), recipe.statistics_phases, recipe.user_unit)
    return buy(
        path, plan,
        [CountedColumn(name, rule, numbers[name]) for name, rule in rules.items()],
        users=records.users if isinstance(records, UserDataset) else None,
        unit=recipe.privacy_unit,
        quantiles=section.quantiles, fixed_key=recipe.privacy.run_key,
    )  # fmt: skip


# --- in Python --------------------------------------------------------------------------------


class Statistics(Preprocessing):
    """Preprocess by constants that were bought: a `Preprocessing` with its privacy cost.

    Guarantee: the constants are (epsilon, delta)-differentially private as `guarantee` states. A
    row of `transform` follows from that record and the constants.

    `dpdist.statistics` returns it.

    Attributes:
        path: the folder, for `began_with` of `dpdist.PrivateTraining`, which takes this object too.
        guarantee: the `Guarantee` of only the statistics.
        columns: by name, the rules with their constants, as dicts of JSON values, for
            `dpdist.Preprocessing` or a recipe.
        missing: by name, the fraction of missing cells, a float from 0 to 1.
        num_records: number of the table's rows, an int.

    Example:
        >>> import tempfile, dpdist
        >>> made = dpdist.statistics(
        ...     {"age": [20 + (7 * row) % 60 for row in range(2000)]}, {"age": {"range": [0, 150]}},
        ...     privacy={"epsilon": 0.5, "delta": 1e-5}, folder=tempfile.mkdtemp() + "/bought",
        ... )
        >>> low, high = made.columns["age"]["range"]
        >>> 0 <= low < made.columns["age"]["missing"] < high <= 150
        True
    """

    path: Path
    guarantee: Guarantee
    columns: dict[str, dict[str, Any]]
    missing: dict[str, float]
    num_records: int


_bought: weakref.WeakSet[Statistics] = weakref.WeakSet()  # in use by this process


def statistics(
    data: Any,
    columns: Mapping[str, Mapping[str, Any] | ColumnPreprocessing],
    *,
    privacy: PrivacyRecipe | Mapping[str, Any],
    folder: str | Path,
    user: str | None = None,
    quantiles: tuple[float, float] = (0.01, 0.99),
) -> Statistics:
    """Buy the range and the fill of columns with noisy counts, if no public constants are known.

    Guarantee: all constants together are (epsilon, delta)-differentially private as `guarantee` of
    the result states. Each column of numbers is counted on a fixed grid, and all counts get
    Gaussian noise once. If you repeat the call, also after a crash, you get the same constants at
    no further cost. Rows are never dropped.

    Args:
        data: the private table: a pandas DataFrame, a pyarrow Table, a dict of columns, or the path
            of a Parquet, CSV or JSONL file. All of its rows are counted.
        columns: by name, the rules of `dpdist.Preprocessing`, in the order of the inputs. Of a
            column of numbers or dates, `range` is the widest that is possible, declared without
            looking at the data: the result's is inside. Without it, a fixed grid of all numbers
            (with log1p, from 0 on) up to 5e8 is used, whose cells are 2.2 % wide. `missing` is the
            median unless you give it. `categories` are declared, and cost nothing.
        privacy: a `dpdist.Privacy`, or its fields as a dict: epsilon or noise_multiplier, of the
            statistics alone, with the delta, relation and unit of the training.
        folder: folder of the statistics, created if it does not exist.
        user: column that says whom a record belongs to; required with unit: user. A user adds the
            mean of its records, however many it has.
        quantiles: fractions of a column's numbers below the range, and up to its end; an end that
            the noise hides is put further inside.

    Returns:
        A `Statistics`: a `dpdist.Preprocessing` with `guarantee`, `columns`, `missing` and `path`.
        Give it to `began_with` of `dpdist.PrivateTraining`, whose `privacy.epsilon` then covers
        statistics and training together.

    Raises:
        UserError: an argument is wrong, a cell does not fit its column, by row and without its
            value, or the folder holds statistics of other records or columns; nothing was released.

    Source:
        Hay et al., "Boosting the accuracy of differentially private histograms through
        consistency", VLDB 2010.

    Example:
        >>> import tempfile, dpdist
        >>> table = {"age": [20 + (7 * row) % 60 for row in range(2000)]}
        >>> made = dpdist.statistics(
        ...     table, {"age": {"range": [0, 150]}},
        ...     privacy={"epsilon": 0.5, "delta": 1e-5}, folder=tempfile.mkdtemp() + "/bought",
        ... )
        >>> made.guarantee.epsilon <= 0.5, made.transform(table).shape
        (True, (2000, 1))
    """
    settings = as_privacy(privacy, _CONTEXT)
    rules = {name: checked_rule(name, rule) for name, rule in columns.items()}
    counted = [name for name, rule in rules.items() if not (rule.categories or rule.drop)]
    _check(settings, counted, user, quantiles)
    values, codes = _read(data, {name: rules[name] for name in counted}, user)
    users, unit, words = None, None, "one record"
    if settings.unit == "user":
        assert settings.max_records_per_user is not None and user is not None
        users = Users.from_values(codes, settings.max_records_per_user)
        unit = UserUnit(_USER, settings.max_records_per_user)
        words = replace(unit, column=user).description
    count = len(values) if users is None else len(users)
    counted_units = settings.nominal_records or count
    if settings.delta >= 1 / counted_units and not settings.allow_large_delta:
        raise UserError(  # a whole record may be published
            f"{_CONTEXT}: privacy.delta: must be < 1 / {counted_units:,}, the number of records or "
            f"users, got {settings.delta:g}",
            see="explanation/privacy.md#cost-of-a-training-run",
        )
    noise = settings.noise_multiplier
    if noise is None:
        assert settings.epsilon is not None
        noise = counts_noise_for(settings.epsilon, settings.delta, settings.adjacency)
    plan = plan_of(settings, count, (GaussianCounts.of_columns(noise, len(counted)),), unit)
    path = Path(folder).resolve()
    found = buy(
        path, plan,
        [CountedColumn(name, rules[name], values[:, k]) for k, name in enumerate(counted)],
        users=users, unit=words, quantiles=quantiles, fixed_key=settings.run_key,
    )  # fmt: skip
    made = Statistics(rules | found)
    made.path = path
    fixed = RunFolder(path).fixed_key_marker.exists()
    made.guarantee = replace(plan.guarantee(), fixed_key=fixed)
    made.num_records = len(values)
    _bought.add(made)
    made.columns = {
        name: rule.model_dump(mode="json", exclude_defaults=True)
        for name, rule in (rules | found).items()
    }
    made.missing = read_json(path / RESULT_FILE, {"missing": dict})["missing"]
    return made


def _check(
    privacy: PrivacyRecipe, counted: Sequence[str], user: str | None, quantiles: tuple[float, float]
) -> None:
    """Raise UserError for settings that are not supported."""
    if not counted:
        raise UserError(f"{_CONTEXT}: columns: must name a column of numbers, got none")
    if privacy.noise_multiplier == 0:
        raise UserError(f"{_CONTEXT}: privacy.noise_multiplier: must be > 0, got 0")
    if privacy.budget is not None:
        raise UserError(
            f"{_CONTEXT}: privacy.budget: must be left out: a budget knows records by a model's "
            "inputs, which a raw table does not have"
        )
    if (privacy.unit == "user") != (user is not None):
        raise UserError(
            f"{_CONTEXT}: user: must be the column of the users with privacy.unit: user, and left "
            "out without it"
        )
    low, high = quantiles
    if not 0 <= low < high <= 1:
        raise UserError(f"{_CONTEXT}: quantiles: must be 0 <= LOW < HIGH <= 1, got {low}, {high}")


def _read(
    data: Any, rules: Mapping[str, ColumnPreprocessing], user: str | None
) -> tuple[np.ndarray, list[object]]:
    """Return the numbers of a table's columns, (N, columns), NaN if missing, and the users."""
    file = as_table_file(data)
    parts, users = [], []
    for first, table in file.rows([*rules, *([] if user is None else [user])]):
        found = []
        for name, rule in rules.items():
            plain = ColumnPreprocessing(date=rule.date, missing="flag")
            cells = preprocess(table, [name], {name: plain}, file, first)[0]
            if cells.shape[1] != 2:
                raise file.error("must hold one number per record, got lists", column=name)
            found.append(numbers_of_flagged(cells))
        parts.append(np.concatenate(found, axis=1))
        if user is not None:
            named = users_of(table, file, first, user)
            if unknown := rows_of_nobody(named):
                raise file.error("must name the user of each record", first + unknown[0], user)
            users += named
    if not parts:
        raise file.error("must have at least one record, got none")
    return np.concatenate(parts), users


def numbers_of_flagged(inputs: np.ndarray) -> np.ndarray:
    """Return numbers (N, k) with NaN where flagged, from pairs of a number and its flag (N, 2k)."""
    return np.where(inputs[:, 1::2] > 0, np.nan, inputs[:, ::2].astype(np.float64))
