"""The report: one HTML page of a run that opens offline, and one over a folder of runs.

The page shows figures, tables, and the source that each was computed from. It also states where it
comes from: code, machine, data, seeds, and the command that makes it again. No part of that is
made of private records. Their fingerprint stays private: an adversary that guesses all of them
could confirm the guess. So does the run key, whose noise would then be known.

Training records are never shown: images come from the named test split alone, by the index of a
certificate of the same data. Test images of a user's own data may be sensitive all the same, so
they are shown only where the user said so; those of built-in data are public.
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
    "test images of your own data may be sensitive; dpdist report RUN --images shows them"
)
_IMAGES_PER_ROW = 8  # images in a row of the page


class ImageSource(Protocol):
    """The test split as pictures. fingerprint: of its inputs and labels, in order."""

    @property
    def fingerprint(self) -> str: ...

    def png(self, index: int) -> bytes:
        """A small picture of one input."""


@dataclass(frozen=True)
class ImageExample:
    """One input: its picture, the name of its class, and what became of it."""

    index: int
    label: str
    answer: str
    radius: float
    png: bytes


def are_images_allowed(folder: RunFolder, requested: bool | None, built_in: bool) -> bool:
    """Whether this run's report shows test images: as asked now, or when it was asked last; never
    asked, only those of built-in data. What is asked is kept beside the report."""
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
    """Title and inputs of each row of images: from the first table that is of this data. names: of
    the classes."""
    table = next((t for t in tables if t.job_record.get("data") == images.fingerprint), None)
    if table is None:
        return []
    right = np.flatnonzero(table.size_if_correct() > 0)
    rising = right[np.argsort(table.radius[right], kind="stable")]
    wrong = np.flatnonzero(~table.correct & (table.prediction != ABSTAIN))
    firm = wrong[np.argsort(-table.radius[wrong], kind="stable")]
    rows = [
        ("Right, and most easily changed", rising[:_IMAGES_PER_ROW]),
        ("Right, and hardest to change", rising[::-1][:_IMAGES_PER_ROW]),
        ("Wrong, the surest first", firm[:_IMAGES_PER_ROW]),
        ("Not answered", np.flatnonzero(table.prediction == ABSTAIN)[:_IMAGES_PER_ROW]),
    ]
    return [(title, [_image_example(table, int(row), images, names) for row in found])
            for title, found in rows]  # fmt: skip


def _image_example(
    table: CertificateTable, row: int, images: ImageSource, names: Sequence[str]
) -> ImageExample:
    index, label, answer = (
        int(column[row]) for column in (table.index, table.label, table.prediction)
    )

    def name(number: int) -> str:
        return names[number] if number < len(names) else str(number)

    said = "no answer" if answer == ABSTAIN else f"answer {name(answer)}"
    return ImageExample(index, name(label), said, float(table.radius[row]), images.png(index))


# --- class by class ---------------------------------------------------------------------------


_MAX_CLASS_ROWS = 100  # rows of the page


def per_class_table(facts: RunResults) -> tuple[list[str], list[list[str]]]:
    """Header and rows: of each class its test inputs and accuracy with an interval, and of those
    certified the certified accuracy, and the shares that are incorrect and abstained.

    Without either evaluation or certificates there are no rows.
    """
    table = main_table(facts)
    plain = (facts.evaluation or {}).get("by_class") or []
    count = max(len(plain), 0 if table is None else 1 + int(table.label.max()))
    header = ["class"]
    if plain:
        header += ["test inputs", "accuracy, %", "95 % interval"]
    if table is not None:
        at = format_exact(statistics.smallest_shown_radius(table))
        header += [
            "with noise: inputs",
            f"certified accuracy at {at}, %",
            "incorrect, %",
            "abstained, %",
        ]
    if len(header) == 1 or count > _MAX_CLASS_ROWS:
        return [], []
    rows, names = [], facts.recipe.data.class_names
    for label in range(count):
        row = [names[label] if label < len(names) else str(label)]
        if plain:
            inputs, right = plain[label] if label < len(plain) else (0, 0)
            row += [f"{inputs:,}", _percent_of(right, inputs)]
            row.append(accuracy_interval(right, inputs) if inputs else "")
        if table is not None:
            here = table.label == label
            total = int(here.sum())
            answered = table.prediction[here]
            held = int(
                (table.size_if_correct()[here] >= statistics.smallest_shown_radius(table)).sum()
            )
            wrong = int(((answered != label) & (answered != ABSTAIN)).sum())
            silent = int((answered == ABSTAIN).sum())
            row += [f"{total:,}", *(_percent_of(part, total) for part in (held, wrong, silent))]
        rows.append(row)
    return header, rows


def _percent_of(part: int, whole: int) -> str:
    return format_percent(part / whole, 1) if whole else ""


# --- origin of a report -----------------------------------------------------------------------


_LIBRARIES = ("torch", "ray", "dp-accounting", "numpy", "scipy")


def provenance_rows(
    facts: RunResults, card: dict[str, Any], report_date: date | None
) -> list[tuple[str, str]]:
    """Name and value of all that is known and may be told. report_date: None where a date could
    tell how long something secret took."""
    begun = read_json(facts.folder.path / "run.json", {"dpdist": str})["dpdist"]
    rows = [
        ("report written", "not told: when a search ended, or how long a training took, is secret"
         if report_date is None else f"{report_date.isoformat()} (UTC)"),
        ("run begun by", f"dpdist {begun}"),
    ]  # fmt: skip
    rows += _training_rows(facts)
    rows.append(("page written by", f"dpdist {__version__}{_commit()}, {_software()}"))
    if facts.evaluation is not None:
        about = facts.evaluation
        told = f"{about['data']}, {about['inputs']:,} inputs, fingerprint {about['fingerprint']}"
        rows.append(("test data", told))
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
    rows.append(("run key", "secret, and never shown: with it the noise would be known"))
    return rows


def reproducing_command(facts: RunResults) -> str:
    """What makes such a run again, from the recipe on the page."""
    name = facts.folder.name
    if facts.plan.trained_elsewhere:
        return importing_command(facts.recipe)
    return f"dpdist run {shlex.quote(f'{name}.yaml')} --name {shlex.quote(name)}"


def importing_command(recipe: Recipe) -> str:
    """Return the command that imports such a model from elsewhere again."""
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
        return []  # on which machine the best trial ran is the search's
    identity = attempts[-1]["identity"]
    machines = identity["machines"].replace("/", " ").replace(",", ", ")
    workers, threads = identity["world_size"], identity["threads"]
    several = "any number of workers" if workers == "any" else f"{workers} worker(s)"
    rows = [("training code", f"digest {identity['code']}"),
            ("hardware", f"{several}, {threads} thread(s) each, on {machines}")]  # fmt: skip
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
    """Of the checkout that this code lies in, if any."""
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
    """Write report/index.html of a trained run, and its pictures as files of their own; where a
    baseline was named, also the page with its figures, which stays in private/.

    images: the test data, or why their inputs are not shown. reveal_date: with today's date even
    where a date may tell how long something secret took: whoever asks for the page chose the day.
    """
    facts = load_results(folder)
    rows = facts.rows()
    said = [row.text for row in rows if row.name in ("privacy", "test accuracy")]
    curves = _run_charts(facts, f"{folder.name}: {', '.join(said)}")
    pictures: dict[str, str] = {}
    if curves["certified"] is not None:
        pictures["certified_accuracy"] = curves["certified"]
    shown = dict(
        heading=folder.name,
        facts=facts,
        elsewhere=facts.plan.trained_elsewhere,
        verdict=make_verdict(facts),
        tiles=[row for row in rows if row.name in _TILES],
        meanings=explain_numbers(facts),
        by_class=dict(zip(("header", "rows"), per_class_table(facts), strict=True)),
        curves=curves,
        tables=[_certificate_section(table, folder) for table in facts.tables],
        images=_image_section(facts, images),
        attacks=_attack_sections(facts, pictures),
        checks=_check_sections(facts),
        three=_epsilon_rows(facts),
        at_delta=f", at delta = {facts.guarantee.delta:g}" * math.isfinite(facts.guarantee.epsilon),
        search=describe_search(facts.search, folder, facts.guarantee),
        trials=dict(zip(("header", "rows"), trial_table(facts), strict=True)),
        limits=limitations(facts),
        command=reproducing_command(facts),
        asked=folder.read_search_recipe().to_yaml() if folder.search_recipe_file.exists() else None,
        summary=[(row.title, row.text) for row in rows if row.name != "report"],
        **_privacy_section(
            facts,
            None if facts.is_duration_secret and not reveal_date else datetime.now(UTC).date(),
        ),
    )
    page = render_template("page.html", baseline=None, **shown)
    found = compare_with_baseline(facts)
    private = None if found is None else render_template("page.html", baseline=found, **shown)
    # Only now that nothing can be refused any more: the page and its pictures are of one report.
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
    """Return of each attack its table, what was attacked and how, what became of the inputs, its
    file and its picture, which is added to the `charts` that become files of their own."""
    folder, found = facts.folder, []
    for table in facts.attacks:
        drawn = attacked_accuracy_chart(table, facts.tables)
        charts[f"attacked_{table.name}"] = drawn
        shown = attack_outcome_table(table, facts.tables, attrgetter("description"))
        words = f"{norm_name(table.norm)}, {table.description}"
        found.append((table, words, shown, table.path.relative_to(folder.path), drawn))
    return found


def _check_sections(facts: RunResults) -> list[tuple[dict[str, Any], str, str]]:
    """Of each check what it is of, in words, and what it came to."""
    words = {table.name: table.description for table in facts.tables}
    return [
        (check, words.get(check["certificates"], check["certificates"]), check_line(check))
        for check in facts.certificate_checks
    ]


def _privacy_section(facts: RunResults, report_date: date | None) -> dict[str, Any]:
    """The privacy card, its rows, and where the page comes from."""
    card = facts.privacy_card()
    return {
        "card": card, "card_rows": _card_rows(facts, card), "origin": provenance_rows(facts, card,
            report_date)
    }  # fmt: skip


def render_template(
    template: str, *, width: str = "62rem", script: bool = False, **variables: Any
) -> str:
    """A template of this folder; everything that is shown is escaped but for our own pictures.

    Raises jinja2.UndefinedError for what a template needs and was not given.
    """
    loader = jinja2.FunctionLoader(lambda name: (files("dpdist.reports") / name).read_text())
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters["base64"] = lambda raw: base64.b64encode(raw).decode()
    return environment.get_template(template).render(
        version=__version__, width=width, script=script,
        contents=lambda body: [(name, Markup(title)) for name, title in _HEADINGS.findall(body)],
        **variables,
    )  # fmt: skip


def _run_charts(facts: RunResults, title: str) -> dict[str, Any]:
    """The charts of the whole run, None for one that there is nothing to draw of, and why."""
    clean = facts.accuracy
    certified = certified_accuracy_chart(facts.tables, clean, title) if facts.tables else None
    spent, why = None, "no steps were taken"
    if facts.search is not None:
        why = "the search is paid for as a whole, and its trials are not shown"
    elif facts.recipe.stages:
        why = "epsilon counts the runs too whose weights this one began with"
    elif facts.plan.steps:
        curve = facts.plan.epsilon_curve()
        why = "nothing is proved at any step"
        if math.isfinite(curve[-1][1]) and curve[-1][1] > 0:
            spent = epsilon_chart(curve, facts.plan.delta)
    return {"certified": certified, "spent": spent, "why": why}


def _epsilon_rows(facts: RunResults) -> list[list[str]]:
    """What is claimed, proved and audited, as runs are compared by it."""
    _, (_, _, claimed, proved, audited, said) = privacy_rows([facts])
    stated = facts.claim is not None and facts.claim.claimed is not None
    paper = f"by the method's paper: {said}" if stated else "its paper claims none of its own"
    measured = "measured on the executed mechanism: a lower bound"
    return [
        ["claimed", claimed, paper],
        ["proved", proved, "defended, of what was really executed: an upper bound"],
        ["audited", audited, measured if facts.audits else "not measured; dpdist audit does it"],
    ]


def _card_rows(facts: RunResults, card: dict[str, Any]) -> list[tuple[str, str]]:
    if facts.plan.trained_elsewhere:
        return [("privacy", facts.privacy_statement), ("model",
            facts.recipe.method.describe(facts.plan)),
                ("notes", " ".join(card["notes"]))]  # fmt: skip
    reexecuted = card["reexecuted_releases"]
    deltas = card["epsilon_at_delta"]
    rows = [
        ("guarantee", facts.privacy_statement),
        ("unit", card["unit"]),
        (
            "all runs on this data set",
            "" if facts.data_set_guarantee is None else str(facts.data_set_guarantee),
        ),
        ("mechanism", f"{'; '.join(card['mechanism'])}; clipping: {card['clip_norm']}"),
        (
            "epsilon at other deltas",
            "; ".join(
                f"{format_epsilon(row['epsilon'])} at {format_delta(row['delta'])}"
                for row in deltas
            ),
        ),
        (
            "re-executed steps",
            f"{reexecuted} releases{', included in the guarantee' if reexecuted else ''}",
        ),
        ("holds if", "; ".join(card["assumptions"])),
        ("notes", " ".join(card["notes"])),
    ]
    return [row for row in rows if row[1]]


def limitations(facts: RunResults) -> list[str]:
    """What the page does not promise."""
    unit = "Privacy is of single training records: what is true of the whole population may be "
    unit += "learned, and several records of one person are less protected than one."
    if facts.plan.user is not None:
        unit = f"Privacy is of {facts.plan.user.description}: what is true of the whole "
        unit += "population may be learned, and so may be what two users have in common."
    promised = [
        unit,
        "It holds if what the privacy card lists under holds if is true, and for this model: other "
        "runs on the same records cost on top.",
    ]
    if facts.plan.trained_elsewhere:
        promised = [
            "Nothing is promised about the records that this model was trained on: it was "
            f"{NOT_TRAINED_HERE}."
        ]
    found = [
        *promised,
        EVALUATION_UNPROTECTED,
        "Accuracy is of inputs like the test data; nothing is said of others, and classes differ.",
    ]
    if facts.tables:
        norms = sorted({norm_name(table.norm) for table in facts.tables})
        found.append(
            "Certificates are of the model together with its noise, as dpdist predict answers, "
            f"not of the bare network; of changes within {' or '.join(norms)} distance, not of "
            "rotated, cropped or otherwise different inputs; and each may be wrong with its alpha."
        )
    else:
        found.append("Nothing is certified: a small change of an input may change the answer.")
    if facts.recipe.method.capabilities.not_releasable_reason is not None:
        found.append(
            f"No model may leave: {facts.recipe.method.capabilities.not_releasable_reason}"
        )
    if facts.canary_notice is not None:
        found.append(f"Audited run: {facts.canary_notice}.")
    return found


def _image_section(facts: RunResults, images: ImageSource | str) -> dict[str, Any]:
    if not facts.tables:
        return {"rows": [], "why": None}
    if isinstance(images, str):
        return {"rows": [], "why": images}
    return {
        "rows": select_images(facts.tables, images, facts.recipe.data.class_names),
        "why": "the certificates are of other data",
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
                format_percent(table.certified_accuracy(r)),
                *_format_bounds(stated.get(r)),
            )
            for r in table.reported_radii
        ],
        "inputs_measured": statistics.input_rows(table),
        "population": ": ".join(statistics.population_row(table)[:2]),
        "file": table.path.relative_to(folder.path),
    }


def _format_bounds(bound_at_radius: statistics.PopulationBound | None) -> tuple[str, str]:
    """Right and robust, at least; not certifiable, at least: both in %, of the population."""
    if bound_at_radius is None:
        return "", ""
    spared = (
        ""
        if bound_at_radius.certifiable_upper_bound is None
        else format_percent(1 - bound_at_radius.certifiable_upper_bound)
    )
    return format_percent(bound_at_radius.accuracy_lower_bound), spared


# --- the page over all runs -------------------------------------------------------------------


_MAX_PAIRS = 28  # of eight runs; more are for `dpdist report A B`


def write_overview(folder: Path) -> Path:
    """Write FOLDER/index.html over the finished runs in it; returns the page. The others are named
    with what keeps them from it. Raises UserError where there is no run at all."""
    places = sorted(path for path in folder.iterdir() if (path / "run.json").is_file())
    if not places:
        raise UserError(f"{folder}: no runs in this folder; `dpdist run` writes them to runs/")
    runs, left_out = [], []
    for place in places:
        try:
            runs.append(load_results(RunFolder(place)))
        except UserError as error:
            left_out.append((place.name, str(error).splitlines()[0]))
    grids = [(f"Certified accuracy, {NORMS[n]}, in %", certified_accuracy_rows(runs, n, SIZES[n]),
        2)
             for n in NORMS]  # fmt: skip
    grids += [
        (f"Under attack, {NORMS[n]}, in %", attacked_accuracy_rows(runs, n), 3) for n in NORMS
    ]
    page = folder / "index.html"
    write_atomic(
        page,
        render_template(
            "overview.html",
            heading=f"Runs in {folder.resolve().name}",
            width="78rem",
            script=True,
            runs=[
                (
                    facts,
                    f"{quote(facts.folder.name)}/report/index.html"
                    if facts.folder.report_file.exists()
                    else None,
                    make_verdict(facts),
                )
                for facts in runs
            ],
            privacy=privacy_rows(runs),
            grids=[grid for grid in grids if len(grid[1]) > 1],
            pairs=[
                _compare_two_runs(*two)
                for two in itertools.islice(itertools.combinations(runs, 2), _MAX_PAIRS)
            ],
            left_out=left_out,
        ),
    )
    return page


def _compare_two_runs(
    first: RunResults, second: RunResults
) -> tuple[str, str, list[list[str]], list[str]]:
    """Return the names of two runs, the second less the first, and what is not compared, and why.

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
