"""Compare runs side by side, against the first of them, and with the same training without privacy.

Side by side: privacy claimed and proved, accuracy clean, certified and attacked. Against the first
run, on the same inputs: differences, and how sure they are.

The figures of a run without privacy are computed from the training records and nothing protects
them. So they are shown only where the user named it, on a page of its own in private/, which says
so; the report, which may leave, is the same with and without.
"""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dpdist.certification.noise import norm_name
from dpdist.certification.statistics import (
    ERROR,
    POPULATION,
    Comparison,
    CurveDifference,
    compare,
    curve_difference,
    difference_interval,
    holm,
    population_row,
)
from dpdist.certification.table import CertificateTable
from dpdist.core.console import format_bound, format_exact, format_percent
from dpdist.core.errors import UserError
from dpdist.core.fields import check_run_name
from dpdist.core.files import MissingFileError, read_json, write_json
from dpdist.privacy.guarantee import format_epsilon
from dpdist.privacy.phases import NOT_TRAINED_HERE
from dpdist.reports.results import RunResults, load_results
from dpdist.runs.folder import RunFolder

# --- side by side -----------------------------------------------------------------------------


NORMS = {norm: norm_name(norm) for norm in ("l2", "linf")}
SIZES = {"l2": (0.1, 0.25, 0.5), "linf": (0.003, 0.01, 0.02)}  # shown where none are asked for


def privacy_rows(runs: Sequence[RunResults]) -> list[list[str]]:
    """Header and one row for each run: clean accuracy, epsilon claimed, proved and audited (the
    largest lower bound), verdict."""
    header = ["run", "clean, %", "claimed epsilon", "proved epsilon", "audited epsilon", "verdict"]
    rows = [header]
    for facts in runs:
        clean = "" if facts.accuracy is None else format_percent(facts.accuracy)
        claim = facts.claim
        claimed, verdict = "none", "nothing claimed"
        if claim is not None and claim.claimed is not None:
            claimed = format_epsilon(claim.claimed.epsilon)
            verdict = f"{claim.verdict}: {claim.reason}"
        elif math.isfinite(facts.guarantee.epsilon):
            verdict = facts.guarantee.kind
        proved = format_epsilon(facts.guarantee.epsilon)
        if facts.plan.trained_elsewhere:
            proved, verdict = "none", NOT_TRAINED_HERE
        audits = [audited for audited in facts.audits if not audited.exploratory]
        strongest = max(audits, key=lambda audited: audited.epsilon, default=None)
        audited = "none" if strongest is None else strongest.table_cell
        rows.append([facts.folder.name, clean, claimed, proved, audited, verdict])
    return rows


def certified_accuracy_rows(
    runs: Sequence[RunResults], norm: str, sizes: Sequence[float]
) -> list[list[str]]:
    """Header and rows: certified accuracy in % of each run by each certificate at the sizes."""
    rows = [["run", f"certificate, {NORMS[norm]}", "table", "inputs", *map(format_exact, sizes)]]
    for facts in runs:
        numbers = math.prod(facts.input_shape) if facts.tables else 0
        for table in facts.tables:
            for found in table.sizes_in_norm(norm, numbers):
                held = found.size_if_correct(table.label)
                shares = [format_percent(float(np.mean(held >= size)), 1) for size in sizes]
                rows.append([facts.folder.name, found.title, table.name, str(len(held)), *shares])
    return rows


def population_rows(runs: Sequence[RunResults]) -> list[list[str]]:
    """Header and rows: what each table of certificates says of the population, as a report does."""
    rows = [["run", "certificate", POPULATION]]
    for facts in runs:
        for table in facts.tables:
            rows.append([facts.folder.name, table.title, population_row(table).value])
    return rows


def attacked_accuracy_rows(runs: Sequence[RunResults], norm: str) -> list[list[str]]:
    """Header and rows in %: what became of each run's inputs at each size, under all its attacks.

    correct: under each of them; incorrect: another class under at least one.
    """
    outcomes = ["correct", "abstained", "incorrect"]
    rows = [["run", "attacked", f"{NORMS[norm]} size", "attacks", *outcomes]]
    for facts in runs:
        for table in facts.attacks:
            if table.norm != norm:
                continue
            name, of = facts.folder.name, table.description
            rows.append([name, of, "0", "none", *table.outcome_shares("none", 0.0).percent()])
            for size in table.sizes:
                done = ", ".join(a for a in table.attacks if table.has(a, size))
                rows.append([name, of, format_exact(size), done, *table.worst(size).percent()])
    return rows


def comparison_tables(
    runs: Sequence[RunResults], sizes: Mapping[str, Sequence[float]]
) -> Iterator[str]:
    """Yield the tables and paragraphs, as Markdown, that put runs side by side and subtract them.

    Raises as `accuracy_differences`.
    """
    grids = [privacy_rows(runs)]
    grids += [certified_accuracy_rows(runs, norm, sizes[norm]) for norm in NORMS]
    grids.append(population_rows(runs))
    grids += [attacked_accuracy_rows(runs, norm) for norm in NORMS]
    yield from (markdown_table(grid) for grid in grids if len(grid) > 1)
    yield from differences_section(runs, sizes)


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A grid as a table of Markdown."""
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# --- against the first run --------------------------------------------------------------------


_HEADER = (
    "run",
    "what",
    "size",
    "inputs",
    "{first}, %",
    "run, %",
    "difference",
    "interval",
    "all intervals",
    "only {first} : only run",
    "p",
    "p, Holm",
    "p, any time",
)


@dataclass(frozen=True)
class AccuracyDifference:
    """A later run against the first: what was compared, at which size ("" for plain accuracy)."""

    run: str
    quantity: str
    size: str
    comparison: Comparison


@dataclass(frozen=True, eq=False)
class PairedSizes:
    """Certified sizes of the same inputs, by the first run and by a later one: (N,), -1 where the
    answer is wrong. certificate: by which certificate, in which norm."""

    run: str
    certificate: str
    norm: str
    first: np.ndarray
    later: np.ndarray


def accuracy_differences(
    runs: Sequence[RunResults], sizes: Mapping[str, Sequence[float]]
) -> tuple[list[AccuracyDifference], list[str]]:
    """Every later run against the first, in plain accuracy and at the sizes of each norm.

    Also what could not be compared, in words. Raises UserError for runs of which no inputs, no data
    set or no terms of certification are the same.
    """
    rows: list[AccuracyDifference] = []
    notes: list[str] = []
    for later in runs[1:]:
        rows += _plain_accuracy_difference(runs[0], later, notes)
        for two in _paired_sizes(runs[0], later, notes):
            for size in sizes[two.norm]:
                found = compare(two.first >= size, two.later >= size)
                rows.append(AccuracyDifference(two.run, two.certificate, format_exact(size), found))
    return rows, notes


def curve_differences(
    runs: Sequence[RunResults], sizes: Mapping[str, Sequence[float]]
) -> list[tuple[PairedSizes, CurveDifference]]:
    """Every later run against the first, at every size up to the largest listed one: all sizes,
    certificates and runs together."""
    pairs = [
        two for later in runs[1:] for two in _paired_sizes(runs[0], later, []) if sizes[two.norm]
    ]
    return [
        (two, curve_difference(two.first, two.later, max(sizes[two.norm]), ERROR / len(pairs)))
        for two in pairs
    ]


def curve_difference_rows(
    differences: Sequence[tuple[PairedSizes, CurveDifference]],
) -> list[list[str]]:
    """Header and rows of text, rounded so that no more is said than holds."""
    shown = [["run", "what", "sizes", "better", "worse", "difference, everywhere"]]
    for two, found in differences:
        everywhere = _format_interval(float(found.low.min()), float(found.high.max()))
        upto = f"up to {found.knots[-1]:.12g}"
        shown.append(
            [
                two.run,
                two.certificate,
                upto,
                _format_stretches(found.better_ranges),
                _format_stretches(found.worse_ranges),
                everywhere,
            ]
        )
    return shown


def _format_stretches(stretches: Sequence[tuple[float, float]]) -> str:
    inside = (
        (float(format_bound(a, 5, round_up=True)), float(format_bound(b, 5))) for a, b in stretches
    )
    return ", ".join(f"above {a:.12g} to {b:.12g}" for a, b in inside) or "nowhere"


def accuracy_difference_rows(
    first: str, differences: Sequence[AccuracyDifference]
) -> list[list[str]]:
    """Header and rows of text; differences and intervals in percentage points, rounded outwards."""
    shown = [[name.format(first=first) for name in _HEADER]]
    for row, corrected in zip(
        differences, holm([row.comparison.p_value for row in differences]), strict=True
    ):
        it = row.comparison
        every = difference_interval(
            it.only_first, it.only_second, it.inputs, ERROR / len(differences)
        )
        shown.append(
            [
                row.run,
                row.quantity,
                row.size,
                f"{it.inputs:,}",
                format_percent(it.first),
                format_percent(it.second),
                f"{100 * it.difference:+.2f}",
                _format_interval(it.low, it.high),
                _format_interval(*every),
                f"{it.only_first} : {it.only_second}",
                *(f"{p:.2g}" for p in (it.p_value, corrected, it.anytime)),
            ]
        )
    return shown


def _format_interval(low: float, high: float) -> str:
    # + 0.0: never -0
    ends = float(format_percent(low)) + 0.0, float(format_percent(high, round_up=True)) + 0.0
    return f"{ends[0]:+.2f} to {ends[1]:+.2f}"


def differences_section(
    runs: Sequence[RunResults], sizes: Mapping[str, Sequence[float]]
) -> list[str]:
    """Paragraphs of Markdown: `accuracy_differences` as a table, what it claims, what it leaves
    out."""
    rows, notes = accuracy_differences(runs, sizes)
    first = runs[0].folder.name
    if not rows:
        return notes
    return [
        markdown_table(accuracy_difference_rows(first, rows)),
        f"Each run less {first}, on the inputs of both, in percentage points. Interval: wrong with "
        f"probability at most {100 * ERROR:g} % (exact binomial bounds, conservative); all "
        f"intervals: any of the {len(rows)} with probability at most that, so a curve over sizes, "
        "or several runs, are compared as a whole. p: exact "
        f"two-sided McNemar; Holm: corrected for the {len(rows)} rows above; any time: valid "
        "however often one looks while inputs are added in the table's order.",
        "Claimed for the population that these inputs are a sample of, and for these trained "
        "models, not for other trainings of the same recipes. Certificates are taken as made: each "
        "may be wrong with its own alpha.",
        *_curves_section(runs, sizes, first),
        *notes,
    ]


def _curves_section(
    runs: Sequence[RunResults], sizes: Mapping[str, Sequence[float]], first: str
) -> list[str]:
    curves = curve_differences(runs, sizes)
    if not curves:
        return []
    return [
        markdown_table(curve_difference_rows(curves)),
        f"Whole curves: each run less {first} at every size, between those listed too. Any of this "
        f"table is wrong with probability at most {100 * ERROR:g} %: all sizes, certificates and "
        "runs together.",
    ]


def _plain_accuracy_difference(
    first: RunResults, later: RunResults, notes: list[str]
) -> list[AccuracyDifference]:
    two = []
    for facts in (first, later):
        if not facts.evaluation or "measures" in facts.evaluation:
            return []
        if "next_tokens" in facts.evaluation:
            notes.append(
                f"Next tokens of {later.folder.name} are not compared one by one: those of a "
                "document are not independent; repeat the runs and compare perplexities."
            )
            return []
        two.append(_correct_inputs(facts))
    if first.evaluation["fingerprint"] != later.evaluation["fingerprint"]:  # type: ignore[index]
        _raise_not_comparable(first, later, "they were evaluated on different data")
    return [AccuracyDifference(later.folder.name, "plain accuracy", "", compare(two[0], two[1]))]


def _correct_inputs(facts: RunResults) -> np.ndarray:
    """Return whether each input was answered rightly, bool (N,)."""
    about = facts.evaluation or {}
    right = np.ones(about["inputs"], dtype=bool)
    right[[int(index) for index in about["wrong"].split()]] = False
    return right


def _comparable_tables(
    first: RunResults, later: RunResults, notes: list[str]
) -> Iterator[tuple[CertificateTable, CertificateTable]]:
    """Yield the two tables with the most common inputs, for each terms in both runs."""
    matched = set()
    for mine in first.tables:
        others = [other for other in later.tables if other.comparison_key == mine.comparison_key]
        rivals = [table for table in first.tables if table.comparison_key == mine.comparison_key]
        if not others or mine is not rivals[0]:
            continue
        found = max(itertools.product(rivals, others), key=lambda two: len(_common_rows(*two)[0]))
        matched |= {id(table) for table in (*rivals, *others)}
        yield found
    if first.tables and later.tables and not matched:
        closest = min((_differing_terms(a, b) for a in first.tables for b in later.tables), key=len)
        _raise_not_comparable(first, later, f"their certificates differ in {', '.join(closest)}")
    for facts in (first, later):
        names = [table.name for table in facts.tables if id(table) not in matched]
        if names:
            notes.append(
                f"Not compared: {', '.join(names)} of {facts.folder.name} (the other run has no "
                "certificates on these terms)."
            )


def _differing_terms(first: CertificateTable, second: CertificateTable) -> list[str]:
    terms, others = first.comparison_key, second.comparison_key
    return [
        f"{name} ({terms.get(name)} and {others.get(name)})"
        for name in {**terms, **others}
        if terms.get(name) != others.get(name)
    ]


def _common_rows(
    first: CertificateTable, second: CertificateTable
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the inputs that both tables have, by index, in its order; none of other data."""
    data = first.job_record.get("data")
    if data is None or data != second.job_record.get("data"):
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    _, own, others = np.intersect1d(first.index, second.index, return_indices=True)
    return own, others


def _paired_sizes(first: RunResults, later: RunResults, notes: list[str]) -> Iterator[PairedSizes]:
    """Yield the sizes that both runs certify of the same inputs, on the same terms."""
    for mine, other in _comparable_tables(first, later, notes):
        own, others = _common_rows(mine, other)
        if not len(own):
            raise UserError(
                f"{mine.path} and {other.path}: no input in common, or not of the same data set"
            )
        if (mine.label[own] != other.label[others]).any():
            raise UserError(f"{mine.path} and {other.path}: different labels for the same inputs")
        numbers = math.prod(later.input_shape)
        for norm, printed in NORMS.items():
            two = [table.sizes_in_norm(norm, numbers) for table in (mine, other)]
            by_name = {theirs.name: theirs for theirs in two[1]}
            for ours in two[0]:
                if not ours.is_valid:
                    continue
                if (theirs := by_name.get(ours.name)) is None:
                    continue
                yield PairedSizes(
                    later.folder.name,
                    f"{ours.title}, {printed}",
                    norm,
                    ours.size_if_correct(mine.label)[own],
                    theirs.size_if_correct(other.label)[others],
                )


def _raise_not_comparable(first: RunResults, later: RunResults, reason: str) -> None:
    raise UserError(
        f"{first.folder.name} and {later.folder.name}: no difference can be stated: {reason}"
    )


# --- the same training without privacy --------------------------------------------------------


# What makes the training of a recipe one without privacy.
NON_PRIVATE_SETTINGS = {
    "privacy.epsilon": "null",
    "privacy.noise_multiplier": "0",
    "privacy.clipping": "none",
    "privacy.budget": "null",
    "privacy.budget_ceiling": "null",
    "tune": "null",
}
# of the keys in which two such recipes may differ
_IGNORED_KEYS = (*NON_PRIVATE_SETTINGS, "name", "certify.seed")


@dataclass(frozen=True)
class Baseline:
    """rows: of `accuracy_differences.grid`, the run less the baseline, the header first; empty
    where nothing is comparable. notes: why. changed_keys: what is different in the recipes beside
    privacy."""

    name: str
    rows: list[list[str]]
    notes: list[str]
    changed_keys: list[str]


def set_baseline(folder: RunFolder, baseline: RunFolder) -> None:
    """Name the baseline of a run, for this report and later ones: a run beside it.

    Raises UserError for a run elsewhere, one that is private, or one of other data.
    """
    if (
        baseline.path.resolve().parent != folder.path.resolve().parent
        or baseline.name == folder.name
    ):
        raise UserError(
            f"--baseline: must be another run beside {folder.name}, got {baseline.path}"
        )
    _make_baseline(load_results(folder), load_results(baseline))
    write_json(folder.baseline, {"run": baseline.name})


def baseline_command(folder: RunFolder) -> str:
    """The command that trains a baseline of this run."""
    said = folder.read_recipe().model_dump(mode="json")
    said |= {f"privacy.{key}": value for key, value in said["privacy"].items()}
    needed = (
        key
        for key, value in NON_PRIVATE_SETTINGS.items()
        if value != "null" or said[key] is not None
    )
    changes = (word for key in needed for word in ("--set", f"{key}={NON_PRIVATE_SETTINGS[key]}"))
    recipe = str(folder.path / "recipe.yaml")
    return shlex.join(["dpdist", "run", recipe, "--name", f"{folder.name}-open", *changes])


def compare_with_baseline(facts: RunResults) -> Baseline | None:
    """The baseline that was named for a run, None where none was; one that is gone, or that is no
    baseline any more, with the reason in its notes."""
    try:
        name = str(read_json(facts.folder.baseline, {"run": str})["run"])
    except MissingFileError:
        return None
    try:
        check_run_name(name)
        return _make_baseline(facts, load_results(RunFolder(facts.folder.path.parent / name)))
    except (UserError, ValueError) as error:
        return Baseline(name, [], [f"{str(error).splitlines()[0]}."], [])


def _make_baseline(facts: RunResults, baseline: RunResults) -> Baseline:
    if not math.isinf(baseline.guarantee.epsilon):
        raise UserError(
            f"{baseline.folder.name}: is private (epsilon "
            f"{format_epsilon(baseline.guarantee.epsilon)}), so it is no baseline; `dpdist "
            "report` puts any two runs side by side"
        )
    rows, notes = accuracy_differences([baseline, facts], _compared_sizes(facts))
    changed = [
        key
        for key in baseline.recipe.differing_keys(facts.recipe)
        if not any(key == own or key.startswith(f"{own}.") for own in _IGNORED_KEYS)
    ]
    found = accuracy_difference_rows(baseline.folder.name, rows) if rows else []
    return Baseline(baseline.folder.name, found, notes, changed)


def _compared_sizes(facts: RunResults) -> dict[str, tuple[float, ...]]:
    """The radii that the report shows anyway; in a norm of which it shows none, the usual ones."""
    shown = {
        norm: {r for table in facts.tables if table.norm == norm for r in table.reported_radii if r}
        for norm in SIZES
    }
    return {norm: tuple(sorted(radii)) or SIZES[norm] for norm, radii in shown.items()}
