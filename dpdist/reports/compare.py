"""Compare runs with each other, and a run with the same training without privacy.

Side by side: privacy claimed and proved; accuracy clean, certified and attacked. Against the first
run, on the same inputs: differences with intervals and p values.

The results of a run without privacy are computed from training records, and no epsilon covers
them. So they are shown only if the user named that run, and only on a separate page in private/
that states this; the report, which may be published, does not depend on them.
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
SIZES = {"l2": (0.1, 0.25, 0.5), "linf": (0.003, 0.01, 0.02)}  # the sizes shown by default


def privacy_rows(runs: Sequence[RunResults]) -> list[list[str]]:
    """Return the header and one row per run: clean accuracy, epsilons, verdict.

    The epsilons are those claimed, proved and audited (the largest lower bound).
    """
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
    """Return header and rows: certified accuracy in % of each run's certificates at the sizes."""
    rows = [["run", f"certificate, {NORMS[norm]}", "table", "inputs", *map(format_exact, sizes)]]
    for facts in runs:
        numbers = math.prod(facts.input_shape) if facts.tables else 0
        for table in facts.tables:
            for found in table.sizes_in_norm(norm, numbers):
                held = found.size_if_correct(table.label)
                at = [float(np.mean(held >= size)) for size in sizes]
                shares = [format_percent(share, 1, round_down=True) for share in at]
                rows.append([facts.folder.name, found.title, table.name, str(len(held)), *shares])
    return rows


def attacked_accuracy_rows(runs: Sequence[RunResults], norm: str) -> list[list[str]]:
    """Return header and rows: outcomes of each run's inputs in % at each size, under all attacks.

    correct: under every attack; incorrect: a wrong class under one or more attacks.
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
    """Yield the Markdown tables and paragraphs that compare runs side by side.

    Raises as `accuracy_differences`.
    """
    population = [["run", "certificate", POPULATION]]
    for facts in runs:
        name = facts.folder.name
        population += [[name, t.title, population_row(t).value] for t in facts.tables]
    grids = [privacy_rows(runs)]
    grids += [certified_accuracy_rows(runs, norm, sizes[norm]) for norm in NORMS]
    grids.append(population)
    grids += [attacked_accuracy_rows(runs, norm) for norm in NORMS]
    yield from (markdown_table(grid) for grid in grids if len(grid) > 1)
    yield from differences_section(runs, sizes)


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a Markdown table, the header first."""
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
    """A comparison of a later run with the first. size: "" for plain accuracy."""

    run: str
    quantity: str
    size: str
    comparison: Comparison


@dataclass(frozen=True, eq=False)
class PairedSizes:
    """Certified sizes of the same inputs by the first run and a later one.

    certificate: its title and norm. first, later: (N,) sizes; -1 for a wrong answer.
    """

    run: str
    certificate: str
    norm: str
    first: np.ndarray
    later: np.ndarray


def accuracy_differences(
    runs: Sequence[RunResults], sizes: Mapping[str, Sequence[float]]
) -> tuple[list[AccuracyDifference], list[str]]:
    """Return the comparisons of each later run with the first, and notes on what is not compared.

    They compare plain accuracy, and certified accuracy at the sizes of each norm. Raises UserError
    for runs that have no common inputs, data set or terms of certification.
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
    """Return the differences of each later run from the first at every size up to the largest one.

    They are simultaneously valid for all sizes, certificates and runs.
    """
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
    """Return header and rows of text, rounded conservatively."""
    shown = [["run", "what", "sizes", "better", "worse", "difference, everywhere"]]
    for two, found in differences:
        upto = f"up to {found.knots[-1]:.12g}"
        ranges = map(_format_stretches, (found.better_ranges, found.worse_ranges))
        everywhere = _format_interval(float(found.low.min()), float(found.high.max()))
        shown.append([two.run, two.certificate, upto, *ranges, everywhere])
    return shown


def _format_stretches(stretches: Sequence[tuple[float, float]]) -> str:
    inside = (
        (float(format_bound(a, 5, round_up=True)), float(format_bound(b, 5))) for a, b in stretches
    )
    return ", ".join(f"above {a:.12g} to {b:.12g}" for a, b in inside) or "nowhere"


def accuracy_difference_rows(
    first: str, differences: Sequence[AccuracyDifference]
) -> list[list[str]]:
    """Return header and rows of text, in percentage points; intervals are rounded outwards."""
    shown = [[name.format(first=first) for name in _HEADER]]
    error = ERROR / max(1, len(differences))
    corrected = holm([row.comparison.p_value for row in differences])
    for row, p_holm in zip(differences, corrected, strict=True):
        it, certified = row.comparison, bool(row.size)
        shown.append(
            [
                row.run,
                row.quantity,
                row.size,
                f"{it.inputs:,}",
                format_percent(it.first, round_down=certified),
                format_percent(it.second, round_down=certified),
                f"{100 * it.difference:+.2f}",
                _format_interval(it.low, it.high),
                _format_interval(
                    *difference_interval(it.only_first, it.only_second, it.inputs, error)
                ),
                f"{it.only_first} : {it.only_second}",
                *(f"{p:.2g}" for p in (it.p_value, p_holm, it.anytime)),
            ]
        )
    return shown


def _format_interval(low: float, high: float) -> str:
    ends = format_percent(low, round_down=True), format_percent(high, round_up=True)
    return "{:+.2f} to {:+.2f}".format(*(float(end) + 0.0 for end in ends))  # + 0.0: never -0


def differences_section(
    runs: Sequence[RunResults], sizes: Mapping[str, Sequence[float]]
) -> list[str]:
    """Return `accuracy_differences` as Markdown: the table, its meaning, and its notes."""
    rows, notes = accuracy_differences(runs, sizes)
    first = runs[0].folder.name
    if not rows:
        return notes
    return [
        markdown_table(accuracy_difference_rows(first, rows)),
        f"Each run minus {first}, on the inputs of both, in percentage points. Interval: wrong "
        f"with probability at most {100 * ERROR:g} % (exact binomial bounds, conservative). All "
        f"intervals: with the same probability, one or more of all {len(rows)} is wrong, so you "
        "can compare several sizes or runs at once. p: exact two-sided McNemar test; Holm: "
        f"corrected for the {len(rows)} rows above; any time: valid however often you look while "
        "inputs are added in the table's order.",
        "The differences are about the population that these inputs are a sample of, and about "
        "these trained models, not other trainings of the same recipes. Each certificate may be "
        "wrong with probability alpha.",
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
        f"Whole curves: each run minus {first} at every size, including sizes that are not listed. "
        f"With probability {100 * (1 - ERROR):g} % or more, the whole table is correct: all sizes, "
        "certificates and runs together.",
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
    """Return whether each input was classified correctly, (N,) bool."""
    about = facts.evaluation or {}
    correct = np.ones(about["inputs"], dtype=bool)
    correct[[int(index) for index in about["wrong"].split()]] = False
    return correct


def _comparable_tables(
    first: RunResults, later: RunResults, notes: list[str]
) -> Iterator[tuple[CertificateTable, CertificateTable]]:
    """Yield the two tables with the most common inputs, for each set of terms in both runs."""
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
                "certificates with these settings)."
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
    """Return the rows of the inputs in both tables, by index; empty if their data differ."""
    data = first.job_record.get("data")
    if data is None or data != second.job_record.get("data"):
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    _, own, others = np.intersect1d(first.index, second.index, return_indices=True)
    return own, others


def _paired_sizes(first: RunResults, later: RunResults, notes: list[str]) -> Iterator[PairedSizes]:
    """Yield the sizes that both runs certify for the same inputs, on the same terms."""
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
                theirs = by_name.get(ours.name)
                if ours.is_valid and theirs is not None:
                    yield PairedSizes(
                        later.folder.name,
                        f"{ours.title}, {printed}",
                        norm,
                        ours.size_if_correct(mine.label)[own],
                        theirs.size_if_correct(other.label)[others],
                    )


def _raise_not_comparable(first: RunResults, later: RunResults, reason: str) -> None:
    raise UserError(f"{first.folder.name} and {later.folder.name}: cannot be compared: {reason}")


# --- the same training without privacy --------------------------------------------------------


# The settings that turn a recipe into one without privacy.
NON_PRIVATE_SETTINGS = {
    "privacy.epsilon": "null",
    "privacy.noise_multiplier": "0",
    "privacy.clipping": "none",
    "privacy.budget": "null",
    "privacy.budget_ceiling": "null",
    "tune": "null",
}
# keys that are not listed as differences
_IGNORED_KEYS = (*NON_PRIVATE_SETTINGS, "name", "certify.seed")


@dataclass(frozen=True)
class Baseline:
    """The comparison of a run with its baseline without privacy.

    rows: those of `accuracy_difference_rows`, the run minus the baseline; empty if they cannot be
    compared, for the reason in `notes`. changed_keys: keys in which the recipes differ, other than
    those of privacy.
    """

    name: str
    rows: list[list[str]]
    notes: list[str]
    changed_keys: list[str]


def set_baseline(folder: RunFolder, baseline: RunFolder) -> None:
    """Store the baseline of a run, for this report and later ones: a run in the same folder.

    Raises UserError for a run elsewhere, a private run, or a run on different data.
    """
    place, wanted = baseline.path.resolve().parent, folder.path.resolve().parent
    if place != wanted or baseline.name == folder.name:
        raise UserError(f"--baseline: must be a different run in {wanted}, got {baseline.path}")
    _make_baseline(load_results(folder), load_results(baseline))
    write_json(folder.baseline, {"run": baseline.name})


def baseline_command(folder: RunFolder) -> str:
    """Return the command that trains a baseline for this run."""
    values = folder.read_recipe().model_dump(mode="json")
    values |= {f"privacy.{key}": value for key, value in values["privacy"].items()}
    words = ["dpdist", "run", str(folder.recipe_file), "--name", f"{folder.name}-open"]
    for key, value in NON_PRIVATE_SETTINGS.items():
        if value != "null" or values[key] is not None:
            words += ["--set", f"{key}={value}"]
    return shlex.join(words)


def compare_with_baseline(facts: RunResults) -> Baseline | None:
    """Return the comparison with the baseline that was named for a run; None without a baseline.

    If the baseline is missing or cannot be compared any more, its notes contain the reason.
    """
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
            f"{baseline.folder.name}: must be a run without privacy, got epsilon "
            f"{format_epsilon(baseline.guarantee.epsilon)}; compare any two runs with `dpdist "
            "report A B`"
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
    """Return the radii that the report shows by norm; the default ones if it shows none."""
    shown = {
        norm: {r for table in facts.tables if table.norm == norm for r in table.reported_radii if r}
        for norm in SIZES
    }
    return {norm: tuple(sorted(radii)) or SIZES[norm] for norm, radii in shown.items()}
