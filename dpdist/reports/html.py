"""Write the report, an HTML page of one run that opens offline, and the overview of a run folder.

The page shows charts, tables and their source files, and the origin of the run: code, machine,
data, seeds and the command that repeats it. Nothing in it is computed from private records, except
what epsilon covers. The fingerprint of the records stays private, since an attacker could use it
to confirm a guess of all of them, and so does the run key, since it determines the noise.

Training records are never shown: images come only from the named test split, by the index of a
certificate on the same data. Test images of a user's own data may be sensitive too, so they are
shown only if the user requests it; those of built-in data are public.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import platform
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from importlib.resources import files
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import jinja2
import numpy as np
from markupsafe import Markup

from dpdist.attacks.table import AttackTable, check_line
from dpdist.certification import statistics
from dpdist.certification.noise import norm_name
from dpdist.certification.table import ABSTAIN, CertificateTable
from dpdist.core.console import format_bound, format_exact, format_percent
from dpdist.core.errors import UserError
from dpdist.core.files import (
    MissingFileError,
    read_json,
    write_atomic,
    write_files_atomic,
    write_json,
)
from dpdist.core.version import PACKAGE, __version__
from dpdist.privacy.card import EVALUATION_UNPROTECTED
from dpdist.privacy.guarantee import format_delta, format_epsilon
from dpdist.privacy.phases import NOT_TRAINED_HERE, UNKNOWN_DATA
from dpdist.reports import compare
from dpdist.reports.charts import (
    TextTable,
    attack_outcome_table,
    attacked_accuracy_chart,
    certified_accuracy_chart,
    epsilon_chart,
)
from dpdist.reports.compare import (
    NORMS,
    SIZES,
    attacked_accuracy_rows,
    certified_accuracy_rows,
    compare_with_baseline,
    privacy_rows,
)
from dpdist.reports.results import RunResults, describe_search, load_results, trial_table
from dpdist.reports.summary import (
    accuracy_interval,
    explain_numbers,
    main_table,
    make_verdict,
)
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe

# --- test images ------------------------------------------------------------------------------


IMAGES_NOT_REQUESTED = (
    "test images of your own data may be sensitive; to show them, use dpdist report RUN --images"
)
_IMAGES_PER_ROW = 8  # images in a row of the page


class ImageSource(Protocol):
    """The test split as images. fingerprint: that of its inputs and labels, in order."""

    @property
    def fingerprint(self) -> str: ...

    def png(self, index: int) -> bytes:
        """Return a small image of one input as a PNG file."""


@dataclass(frozen=True)
class ImageExample:
    """One input: its image, the name of its class, the answer and its certified radius."""

    index: int
    label: str
    answer: str
    radius: float
    png: bytes


def are_images_allowed(folder: RunFolder, requested: bool | None, built_in: bool) -> bool:
    """Return whether this run's report shows test images, and store the request for later reports.

    requested: None repeats the last request; without one, only images of built-in data are shown.
    """
    kept = folder.report_file.parent / "shown.json"
    if requested is not None:
        write_json(kept, {"test_images": requested})
        return requested
    try:
        return bool(read_json(kept, {"test_images": bool})["test_images"])
    except MissingFileError:
        return built_in


def select_images(
    tables: Sequence[CertificateTable], images: ImageSource, names: Sequence[str]
) -> list[tuple[str, list[ImageExample]]]:
    """Return title and inputs of each row of images, from the first table of this data.

    names: those of the classes.
    """
    table = next((t for t in tables if t.job_record.get("data") == images.fingerprint), None)
    if table is None:
        return []
    correct = np.flatnonzero(table.size_if_correct() > 0)
    rising = correct[np.argsort(table.radius[correct], kind="stable")]
    wrong = np.flatnonzero(~table.correct & (table.prediction != ABSTAIN))
    falling = wrong[np.argsort(-table.radius[wrong], kind="stable")]
    rows = [
        ("Correct, smallest radius first", rising),
        ("Correct, largest radius first", rising[::-1]),
        ("Incorrect, largest radius first", falling),
        ("No answer", np.flatnonzero(table.prediction == ABSTAIN)),
    ]

    def name(number: int) -> str:
        return names[number] if number < len(names) else str(number)

    def example(row: int) -> ImageExample:
        columns = (table.index, table.label, table.prediction)
        index, label, prediction = (int(column[row]) for column in columns)
        answer = "no answer" if prediction == ABSTAIN else f"answer {name(prediction)}"
        return ImageExample(index, name(label), answer, float(table.radius[row]), images.png(index))

    return [(title, [example(row) for row in found[:_IMAGES_PER_ROW]]) for title, found in rows]


# --- class by class ---------------------------------------------------------------------------


_MAX_CLASS_ROWS = 100  # rows of the page


def per_class_table(facts: RunResults) -> tuple[list[str], list[list[str]]]:
    """Return header and rows, one per class; both empty without an evaluation or certificates.

    The columns are test inputs and accuracy with an interval, and for certified inputs the
    fractions that are certified, incorrect and abstained.
    """
    table = main_table(facts)
    plain = (facts.evaluation or {}).get("by_class") or []
    count = max(len(plain), 0 if table is None else 1 + int(table.label.max()))
    header = ["class"]
    if plain:
        header += ["test inputs", "accuracy, %", "95 % interval"]
    radius = 0.0
    if table is not None:
        radius = statistics.smallest_shown_radius(table)
        header += ["with noise: inputs", f"certified accuracy at {format_exact(radius)}, %"]
        header += ["incorrect, %", "abstained, %"]
    if len(header) == 1 or count > _MAX_CLASS_ROWS:
        return [], []
    rows, names = [], facts.recipe.data.class_names
    for label in range(count):
        row = [names[label] if label < len(names) else str(label)]
        if plain:
            inputs, correct = plain[label] if label < len(plain) else (0, 0)
            row += [f"{inputs:,}", _percent_of(correct, inputs)]
            row.append(accuracy_interval(correct, inputs) if inputs else "")
        if table is not None:
            here = table.label == label
            total, predicted = int(here.sum()), table.prediction[here]
            certified = int((table.size_if_correct()[here] >= radius).sum())
            abstained = int((predicted == ABSTAIN).sum())
            incorrect = int((predicted != label).sum()) - abstained
            row += [f"{total:,}", _percent_of(certified, total, round_down=True)]
            row += [_percent_of(part, total) for part in (incorrect, abstained)]
        rows.append(row)
    return header, rows


def _percent_of(part: int, whole: int, *, round_down: bool = False) -> str:
    return format_percent(part / whole, 1, round_down=round_down) if whole else ""


# --- origin of a report -----------------------------------------------------------------------


_LIBRARIES = ("torch", "ray", "dp-accounting", "numpy", "scipy")


def provenance_rows(
    facts: RunResults, card: dict[str, Any], report_date: date | None
) -> list[tuple[str, str]]:
    """Return name and value of the known origin. report_date: None if the date may be secret."""
    started = read_json(facts.folder.path / "run.json", {"dpdist": str})["dpdist"]
    written = "the date is hidden, since the duration of the search or training is secret"
    if report_date is not None:
        written = f"{report_date.isoformat()} (UTC)"
    rows = [("report written", written), ("run started by", f"dpdist {started}")]
    rows += _training_rows(facts)
    rows.append(("page written by", f"dpdist {__version__}{_commit()}, {_software()}"))
    if facts.evaluation is not None:
        about = facts.evaluation
        text = f"{about['data']}, {about['inputs']:,} inputs, fingerprint {about['fingerprint']}"
        rows.append(("test data", text))
    known = f"{facts.recipe.data.name}; the fingerprint of the records stays private"
    rows.append(("training data", UNKNOWN_DATA if facts.plan.trained_elsewhere else known))
    if card["plan"]:
        rows.append(("privacy plan", f"fingerprint {card['plan']}"))
    if "model" in facts.training_summary:
        rows.append(("model", f"hash {facts.training_summary['model']}"))
    for table in facts.tables:
        if seed := table.job_record.get("seed"):
            rows.append(
                (f"seed of: {table.description}", f"{seed} (drawn after the model was fixed)")
            )
    rows.append(("run key", "secret, and never shown, since it determines the noise"))
    return rows


def reproducing_command(facts: RunResults) -> str:
    """Return the command that repeats the run from the recipe on the page."""
    name = facts.folder.name
    if facts.plan.trained_elsewhere:
        return importing_command(facts.recipe)
    return f"dpdist run {shlex.quote(f'{name}.yaml')} --name {shlex.quote(name)}"


def importing_command(recipe: Recipe) -> str:
    """Return the command that imports a model that was trained elsewhere."""
    model, method = recipe.model, recipe.method.model_dump()
    words = ["dpdist", "import", recipe.name, "--model", model.name]
    for key, value in model.options.items():
        words += ["--set", f"model.options.{key}={json.dumps(value)}"]
    words += ["--weights", method["weights"]] if method.get("weights") else []
    if model.mean or model.std:
        pair = "/".join(",".join(f"{v:g}" for v in values) for values in (model.mean, model.std))
        words += ["--normalize", pair]
    return shlex.join([*words, "--data", recipe.data.name])


def _training_rows(facts: RunResults) -> list[tuple[str, str]]:
    attempts = facts.ledger.attempts
    if facts.search is not None or not attempts:
        return []  # the machine of the best trial is the search's secret
    identity = attempts[-1]["identity"]
    machines = identity["machines"].replace("/", " ").replace(",", ", ")
    workers, threads = identity["world_size"], identity["threads"]
    several = "any number of workers" if workers == "any" else f"{workers} worker(s)"
    rows = [
        ("training code", f"digest {identity['code']}"),
        ("hardware", f"{several}, {threads} thread(s) each, on {machines}"),
    ]
    if not facts.is_duration_secret:
        rows.append(("training took", facts.training_took))
    return rows


def _software() -> str:
    found = [f"Python {platform.python_version()}"]
    for name in _LIBRARIES:
        try:
            found.append(f"{name} {installed(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def _commit() -> str:
    """Return the commit of the checkout that this code is in; "" without one."""
    root = PACKAGE.resolve().parent
    if not (root / ".git").exists():
        return ""
    asked = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(asked, check=False, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return f" (commit {done.stdout.strip()})" if done.returncode == 0 else ""


# --- the page of a run ------------------------------------------------------------------------


_TILES = ("privacy", "test accuracy", "perplexity", "certified accuracy")
_HEADINGS = re.compile(r'<h2 id="([^"]+)">(.*?)</h2>')


def write_report(
    folder: RunFolder,
    images: ImageSource | str = IMAGES_NOT_REQUESTED,
    *,
    reveal_date: bool = False,
) -> None:
    """Write report/index.html of a trained run, and its charts as separate files.

    If a baseline was named, also write the page that compares with it, which stays in private/.

    images: the test data, or the reason why test inputs are not shown. reveal_date: show today's
    date even if the duration is secret: the user who asks for the page chose the day.
    """
    facts = load_results(folder)
    rows = facts.rows()
    texts = [row.text for row in rows if row.name in ("privacy", "test accuracy")]
    curves = _run_charts(facts, f"{folder.name}: {', '.join(texts)}")
    pictures: dict[str, str] = {}
    if curves["certified"] is not None:
        pictures["certified_accuracy"] = curves["certified"]
    card = facts.privacy_card()
    hidden = facts.is_duration_secret and not reveal_date
    proved = math.isfinite(facts.guarantee.epsilon)
    searched = folder.read_search_recipe() if folder.search_recipe_file.exists() else None
    shown: dict[str, Any] = {
        "heading": folder.name,
        "facts": facts,
        "elsewhere": facts.plan.trained_elsewhere,
        "verdict": make_verdict(facts),
        "tiles": [row for row in rows if row.name in _TILES],
        "meanings": explain_numbers(facts),
        "by_class": dict(zip(("header", "rows"), per_class_table(facts), strict=True)),
        "curves": curves,
        "tables": [_certificate_section(table, folder) for table in facts.tables],
        "images": _image_section(facts, images),
        "attacks": _attack_sections(facts, pictures),
        "checks": _check_sections(facts),
        "three": _epsilon_rows(facts),
        "at_delta": f", at delta = {facts.guarantee.delta:g}" * proved,
        "search": describe_search(facts.search, folder, facts.guarantee),
        "trials": dict(zip(("header", "rows"), trial_table(facts), strict=True)),
        "limits": limitations(facts),
        "command": reproducing_command(facts),
        "asked": searched and searched.to_yaml(),
        "summary": [(row.title, row.text) for row in rows if row.name != "report"],
        "card": card,
        "card_rows": _card_rows(facts, card),
        "origin": provenance_rows(facts, card, None if hidden else datetime.now(UTC).date()),
    }
    page = render_template("page.html", baseline=None, **shown)
    found = compare_with_baseline(facts)
    private = None if found is None else render_template("page.html", baseline=found, **shown)
    # All together, after everything that can fail: the page and its charts are of one report.
    files = {folder.report_file: page}
    files |= {folder.report_file.parent / f"{name}.svg": text for name, text in pictures.items()}
    if private is not None:
        files[folder.baseline_report] = private
    write_files_atomic(files)
    if private is None:
        folder.baseline_report.unlink(missing_ok=True)


def _attack_sections(
    facts: RunResults, charts: dict[str, str]
) -> list[tuple[AttackTable, str, TextTable, Path, str]]:
    """Return table, description, outcomes, file and chart of each attack.

    The charts are added to `charts`, which become separate files.
    """
    sections = []
    for table in facts.attacks:
        drawn = attacked_accuracy_chart(table, facts.tables)
        charts[f"attacked_{table.name}"] = drawn
        shown = attack_outcome_table(table, facts.tables, attrgetter("description"))
        words = f"{norm_name(table.norm)}, {table.description}"
        sections.append((table, words, shown, table.path.relative_to(facts.folder.path), drawn))
    return sections


def _check_sections(facts: RunResults) -> list[tuple[dict[str, Any], str, str]]:
    """Return each check of certificates, their description, and the result in a line."""
    words = {table.name: table.description for table in facts.tables}
    return [
        (check, words.get(check["certificates"], check["certificates"]), check_line(check))
        for check in facts.certificate_checks
    ]


def render_template(
    template: str, *, width: str = "62rem", script: bool = False, **variables: Any
) -> str:
    """Return a rendered template of this folder; all values but our own charts are escaped.

    Raises jinja2.UndefinedError for a missing variable.
    """
    loader = jinja2.FunctionLoader(lambda name: (files("dpdist.reports") / name).read_text())
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters["base64"] = lambda raw: base64.b64encode(raw).decode()
    return environment.get_template(template).render(
        version=__version__,
        width=width,
        script=script,
        contents=lambda body: [(name, Markup(title)) for name, title in _HEADINGS.findall(body)],
        **variables,
    )


def _run_charts(facts: RunResults, title: str) -> dict[str, Any]:
    """Return the charts of the whole run, None for a missing one, and why epsilon has no chart."""
    clean = facts.accuracy
    certified = certified_accuracy_chart(facts.tables, clean, title) if facts.tables else None
    spent, why = None, "no steps were taken"
    if facts.search is not None:
        why = "epsilon covers the search as a whole, and its trials are not shown"
    elif facts.recipe.stages:
        why = "epsilon also covers the runs whose weights this run started from"
    elif facts.plan.steps:
        curve = facts.plan.epsilon_curve()
        why = "no step has a finite epsilon above 0"
        if math.isfinite(curve[-1][1]) and curve[-1][1] > 0:
            spent = epsilon_chart(curve, facts.plan.delta)
    return {"certified": certified, "spent": spent, "why": why}


def _epsilon_rows(facts: RunResults) -> list[list[str]]:
    """Return the rows of the epsilons that are claimed, proved and audited."""
    _, (_, _, claimed, proved, audited, verdict) = privacy_rows([facts])
    stated = facts.claim is not None and facts.claim.claimed is not None
    paper = f"by the method's paper: {verdict}" if stated else "its paper claims no own epsilon"
    measured = "measured on the executed mechanism: a lower bound"
    return [
        ["claimed", claimed, paper],
        ["proved", proved, "computed from what was executed: an upper bound"],
        ["audited", audited, measured if facts.audits else "not measured; use dpdist audit"],
    ]


def _card_rows(facts: RunResults, card: dict[str, Any]) -> list[tuple[str, str]]:
    if facts.plan.trained_elsewhere:
        return [
            ("privacy", facts.privacy_statement),
            ("model", facts.recipe.method.describe(facts.plan)),
            ("notes", " ".join(card["notes"])),
        ]
    total, reexecuted = facts.data_set_guarantee, card["reexecuted_releases"]
    epsilons = (
        f"{format_epsilon(row['epsilon'])} at {format_delta(row['delta'])}"
        for row in card["epsilon_at_delta"]
    )
    included = ", included in the guarantee" if reexecuted else ""
    rows = [
        ("guarantee", facts.privacy_statement),
        ("unit", card["unit"]),
        ("all runs on this data set", "" if total is None else str(total)),
        ("mechanism", f"{'; '.join(card['mechanism'])}; clipping: {card['clip_norm']}"),
        ("epsilon at other deltas", "; ".join(epsilons)),
        ("re-executed steps", f"{reexecuted} releases{included}"),
        ("valid if", "; ".join(card["assumptions"])),
        ("notes", " ".join(card["notes"])),
    ]
    return [row for row in rows if row[1]]


def limitations(facts: RunResults) -> list[str]:
    """Return sentences about what the report does not guarantee."""
    unit = "Privacy is that of single training records: the model may reveal what is true of the "
    unit += "whole population, and several records of one person are less protected than one."
    if facts.plan.user is not None:
        unit = f"Privacy is that of {facts.plan.user.description}: the model may reveal what is "
        unit += "true of the whole population, and what two users have in common."
    lines = [
        unit,
        "The guarantee is about this model only, and valid if the assumptions in the privacy card "
        "are true: other runs on the same records add to epsilon.",
    ]
    if facts.plan.trained_elsewhere:
        lines = [
            "Nothing is guaranteed about the records that this model was trained on: it was "
            f"{NOT_TRAINED_HERE}."
        ]
    lines += [
        EVALUATION_UNPROTECTED,
        "The accuracy is that on inputs like the test data; it may differ on other inputs, and "
        "differs between classes.",
    ]
    if facts.tables:
        norms = sorted({norm_name(table.norm) for table in facts.tables})
        lines.append(
            "Certificates are about the model with its noise, as dpdist predict uses it, and not "
            f"about the network without noise. They cover changes within {' or '.join(norms)} "
            "distance, and no rotated, cropped or otherwise different inputs. Each may be wrong "
            "with probability alpha."
        )
    else:
        lines.append("Nothing is certified: a small change of an input may change the answer.")
    if (reason := facts.recipe.method.capabilities.not_releasable_reason) is not None:
        lines.append(f"The models must not be published: {reason}")
    if facts.canary_notice is not None:
        lines.append(f"Audited run: {facts.canary_notice}.")
    return lines


def _image_section(facts: RunResults, images: ImageSource | str) -> dict[str, Any]:
    if not facts.tables:
        return {"rows": [], "why": None}
    if isinstance(images, str):
        return {"rows": [], "why": images}
    return {
        "rows": select_images(facts.tables, images, facts.recipe.data.class_names),
        "why": "the certificates are about different data",
    }


def _certificate_section(table: CertificateTable, folder: RunFolder) -> dict[str, object]:
    stated = {at.radius: at for at in statistics.stated_bounds(table)}
    return {
        "words": table.description,
        "mode": table.mode,
        "n0": table.n0,
        "n": table.n,
        "alpha": table.alpha,
        "norm": norm_name(table.norm),
        "inputs": len(table.index),
        "abstained": format_percent(table.abstention_rate),
        "average_radius": format_bound(table.average_radius, 4),
        "rows": [
            (
                format_exact(r),
                format_percent(table.certified_accuracy(r), round_down=True),
                *_format_bounds(stated.get(r)),
            )
            for r in table.reported_radii
        ],
        "inputs_measured": statistics.input_rows(table),
        "population": ": ".join(statistics.population_row(table)[:2]),
        "file": table.path.relative_to(folder.path),
    }


def _format_bounds(bound_at_radius: statistics.PopulationBound | None) -> tuple[str, str]:
    """Return lower bounds for the population in %: correct and robust, and not certifiable."""
    if bound_at_radius is None:
        return "", ""
    certifiable = bound_at_radius.certifiable_upper_bound
    impossible = "" if certifiable is None else format_percent(1 - certifiable, round_down=True)
    return format_percent(bound_at_radius.accuracy_lower_bound, round_down=True), impossible


# --- the overview of a folder -----------------------------------------------------------------


_MAX_PAIRS = 28  # those of eight runs; for more, use `dpdist report A B`


def write_overview(folder: Path) -> Path:
    """Write FOLDER/index.html about the finished runs in a folder, and return its path.

    Other runs are listed with the reason why they are not shown. Raises UserError without any run.
    """
    places = sorted(path for path in folder.iterdir() if (path / "run.json").is_file())
    if not places:
        raise UserError(f"{folder}: no runs in this folder; `dpdist run` writes them to runs/")
    runs, left_out, entries = [], [], []
    for place in places:
        try:
            facts = load_results(RunFolder(place))
        except UserError as error:
            left_out.append((place.name, str(error).splitlines()[0]))
            continue
        link = f"{quote(place.name)}/report/index.html"
        runs.append(facts)
        entries.append(
            (facts, link if facts.folder.report_file.exists() else None, make_verdict(facts))
        )
    grids = [
        (f"Certified accuracy, {NORMS[n]}, in %", certified_accuracy_rows(runs, n, SIZES[n]), 2)
        for n in NORMS
    ]
    grids += [
        (f"Under attack, {NORMS[n]}, in %", attacked_accuracy_rows(runs, n), 3) for n in NORMS
    ]
    pairs = itertools.islice(itertools.combinations(runs, 2), _MAX_PAIRS)
    page = folder / "index.html"
    text = render_template(
        "overview.html",
        heading=f"Runs in {folder.resolve().name}",
        width="78rem",
        script=True,
        runs=entries,
        privacy=privacy_rows(runs),
        grids=[grid for grid in grids if len(grid[1]) > 1],
        pairs=[_compare_two_runs(*two) for two in pairs],
        left_out=left_out,
    )
    write_atomic(page, text)
    return page


def _compare_two_runs(
    first: RunResults, second: RunResults
) -> tuple[str, str, list[list[str]], list[str]]:
    """Return the names of two runs, the rows of the second minus the first, and notes.

    The rows are those of `accuracy_difference_rows`, the header first.
    """
    names = (first.folder.name, second.folder.name)
    try:
        rows, notes = compare.accuracy_differences([first, second], SIZES)
    except UserError as error:
        return (*names, [], [f"{error}."])
    if not rows:
        return (*names, [], [*notes, "Nothing to compare."])
    return (*names, compare.accuracy_difference_rows(names[0], rows), notes)
