"""The report: one HTML page of a run that opens offline, and one page over all runs of a folder.

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
from dataclasses import dataclass, field
from datetime import date
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
from dpdist.certification.certificate import ABSTAIN, CertificateTable
from dpdist.certification.noise import norm_name
from dpdist.core.console import bound, exact, percent
from dpdist.core.errors import UserError
from dpdist.core.files import NoSuchFile, read_json, write_atomic, write_json, write_together
from dpdist.core.version import PACKAGE, __version__
from dpdist.privacy.card import EVALUATION_UNPROTECTED
from dpdist.privacy.guarantee import format_delta, format_epsilon
from dpdist.privacy.phases import NOT_TRAINED_HERE, UNKNOWN_DATA
from dpdist.reports import compare
from dpdist.reports.charts import (
    Grid,
    alone,
    attacked_accuracy,
    certified_accuracy,
    grid,
    privacy_spent,
    style,
)
from dpdist.reports.compare import NORMS, SIZES, attacked_grid, beside, certified_grid, privacy_grid
from dpdist.reports.facts import Facts, described, read_facts
from dpdist.reports.summary import (
    clean_interval,
    first_radius,
    in_short,
    interval,
    main_table,
    meanings,
)
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe

# --- test images ------------------------------------------------------------------------------


UNASKED = "test images of your own data may be sensitive; dpdist report RUN --images shows them"
_EACH = 8  # images in a row of the page


class Images(Protocol):
    """The test split as pictures. fingerprint: of its inputs and labels, in order."""

    @property
    def fingerprint(self) -> str: ...

    def png(self, index: int) -> bytes:
        """A small picture of one input."""


@dataclass(frozen=True)
class Shown:
    """One input: its picture, the name of its class, and what became of it."""

    index: int
    label: str
    answer: str
    radius: float
    png: bytes


def allowed(folder: RunFolder, asked: bool | None, built_in: bool) -> bool:
    """Whether this run's report shows test images: as asked now, or when it was asked last; never
    asked, only those of built-in data. What is asked is kept beside the report."""
    kept = folder.report.parent / "shown.json"
    if asked is not None:
        write_json(kept, {"test_images": asked})
        return asked
    try:
        return bool(read_json(kept, {"test_images": bool})["test_images"])
    except NoSuchFile:
        return built_in


def picked(
    tables: Sequence[CertificateTable], images: Images, names: Sequence[str]
) -> list[tuple[str, list[Shown]]]:
    """Title and inputs of each row of images: from the first table that is of this data. names: of
    the classes."""
    table = next((t for t in tables if t.about.get("data") == images.fingerprint), None)
    if table is None:
        return []
    right = np.flatnonzero(table.certified() > 0)
    rising = right[np.argsort(table.radius[right], kind="stable")]
    wrong = np.flatnonzero(~table.correct & (table.prediction != ABSTAIN))
    firm = wrong[np.argsort(-table.radius[wrong], kind="stable")]
    rows = [
        ("Right, and most easily changed", rising[:_EACH]),
        ("Right, and hardest to change", rising[::-1][:_EACH]),
        ("Wrong, the surest first", firm[:_EACH]),
        ("Not answered", np.flatnonzero(table.prediction == ABSTAIN)[:_EACH]),
    ]
    return [(title, [_shown(table, int(row), images, names) for row in found])
            for title, found in rows]  # fmt: skip


def _shown(table: CertificateTable, row: int, images: Images, names: Sequence[str]) -> Shown:
    index, label, answer = (
        int(column[row]) for column in (table.index, table.label, table.prediction)
    )

    def name(number: int) -> str:
        return names[number] if number < len(names) else str(number)

    said = "no answer" if answer == ABSTAIN else f"answer {name(answer)}"
    return Shown(index, name(label), said, float(table.radius[row]), images.png(index))


# --- class by class ---------------------------------------------------------------------------


_MOST_CLASS_ROWS = 100  # rows of the page


def class_table(facts: Facts) -> tuple[list[str], list[list[str]]]:
    """Header and rows: of each class its test inputs, those answered rightly with an interval, and
    of those certified the shares that are right and certified, wrong, not answered.

    Without either evaluation or certificates there are no rows.
    """
    table = main_table(facts)
    plain = (facts.evaluation or {}).get("by_class") or []
    count = max(len(plain), 0 if table is None else 1 + int(table.label.max()))
    header = ["class"]
    if plain:
        header += ["test inputs", "right, %", "95 % interval"]
    if table is not None:
        at = exact(first_radius(table))
        header += [
            "with noise: inputs",
            f"right and certified at {at}, %",
            "wrong, %",
            "no answer, %",
        ]
    if len(header) == 1 or count > _MOST_CLASS_ROWS:
        return [], []
    rows, names = [], facts.recipe.data.class_names
    for label in range(count):
        row = [names[label] if label < len(names) else str(label)]
        if plain:
            inputs, right = plain[label] if label < len(plain) else (0, 0)
            row += [f"{inputs:,}", *_share(right, inputs)]
        if table is not None:
            here = table.label == label
            total = int(here.sum())
            answered = table.prediction[here]
            held = int((table.certified()[here] >= first_radius(table)).sum())
            wrong = int(((answered != label) & (answered != ABSTAIN)).sum())
            silent = int((answered == ABSTAIN).sum())
            row += [f"{total:,}", *(_percent(part, total) for part in (held, wrong, silent))]
        rows.append(row)
    return header, rows


def _share(hits: int, inputs: int) -> tuple[str, str]:
    return (_percent(hits, inputs), interval(hits, inputs)) if inputs else ("", "")


def _percent(part: int, whole: int) -> str:
    return percent(part / whole, 1) if whole else ""


# --- origin of a report -----------------------------------------------------------------------


_LIBRARIES = ("torch", "ray", "dp-accounting", "numpy", "scipy")


def origin(facts: Facts, card: dict[str, Any], written: date | None) -> list[tuple[str, str]]:
    """Name and value of all that is known and may be told. written: None where a date could tell
    how long something secret took."""
    begun = read_json(facts.folder.path / "run.json", {"dpdist": str})["dpdist"]
    rows = [
        ("report written", "not told: when a search ended, or how long a training took, is secret"
         if written is None else f"{written.isoformat()} (UTC)"),
        ("run begun by", f"dpdist {begun}"),
    ]  # fmt: skip
    rows += _training(facts)
    rows.append(("page written by", f"dpdist {__version__}{_commit()}, {_software()}"))
    if facts.evaluation is not None:
        about = facts.evaluation
        told = f"{about['data']}, {about['inputs']:,} inputs, fingerprint {about['fingerprint']}"
        rows.append(("test data", told))
    known = f"{facts.recipe.data.name}; the fingerprint of the records stays private"
    rows.append(("training data", UNKNOWN_DATA if facts.plan.trained_elsewhere else known))
    if card["plan"]:
        rows.append(("privacy plan", f"fingerprint {card['plan']}"))
    if "model" in facts.trained:
        rows.append(("model", f"hash {facts.trained['model']}"))
    for table in facts.tables:
        if seed := table.about.get("seed"):
            rows.append((f"seed of: {table.words}", f"{seed} (drawn after the model was fixed)"))
    rows.append(("run key", "secret, and never shown: with it the noise would be known"))
    return rows


def reproducing_command(facts: Facts) -> str:
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
        words += ["--option", f"{key}={json.dumps(value)}"]
    words += ["--weights", method["weights"]] if method.get("weights") else []
    if model.mean or model.std:
        pair = "/".join(",".join(f"{v:g}" for v in values) for values in (model.mean, model.std))
        words += ["--normalize", pair]
    return shlex.join([*words, "--data", recipe.data.name])


def _training(facts: Facts) -> list[tuple[str, str]]:
    attempts = facts.ledger.attempts
    if facts.search is not None or not attempts:
        return []  # on which machine the best trial ran is the search's
    identity = attempts[-1]["identity"]
    machines = identity["machines"].replace("/", " ").replace(",", ", ")
    workers, threads = identity["world_size"], identity["threads"]
    several = "any number of workers" if workers == "any" else f"{workers} worker(s)"
    rows = [("training code", f"digest {identity['code']}"),
            ("hardware", f"{several}, {threads} thread(s) each, on {machines}")]  # fmt: skip
    if not facts.times_hidden:
        rows.append(("training took", f"{facts.trained['seconds']:.0f} s"))
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


_HEADINGS = re.compile(r'<h2 id="([^"]+)">(.*?)</h2>')


def write_report(
    folder: RunFolder,
    images: Images | str = UNASKED,
    *,
    dated: bool = False,
) -> None:
    """Write report/index.html of a trained run, and its pictures as files of their own; where a
    baseline was named, also the page with its figures, which stays in private/.

    images: the test data, or why their inputs are not shown. dated: with today's date even where a
    date may tell how long something secret took: whoever asks for the page chose the day.
    """
    facts = read_facts(folder)
    curves = _curves(facts)
    pictures: dict[str, str] = {}
    if curves["certified"] is not None:
        pictures["certified_accuracy"] = alone(curves["certified"], _headline(facts))
    shown = dict(
        heading=folder.name,
        facts=facts,
        elsewhere=facts.plan.trained_elsewhere,
        verdict=in_short(facts),
        tiles=_tiles(facts),
        meanings=meanings(facts),
        by_class=dict(zip(("header", "rows"), class_table(facts), strict=True)),
        curves=curves,
        tables=[_table(table, folder) for table in facts.tables],
        images=_images(facts, images),
        attacks=_attacked(facts, pictures),
        checks=_checked(facts),
        three=_three(facts),
        search=described(facts.search, folder, facts.guarantee),
        limits=_limits(facts),
        command=reproducing_command(facts),
        asked=folder.read_asked().to_yaml() if folder.asked.exists() else None,
        summary=[row for row in facts.summary() if row[0] != "report"],
        **_card(facts, None if facts.times_hidden and not dated else _today()),
    )
    page = render("page.html", baseline=None, **shown)
    found = beside(facts)
    private = None if found is None else render("page.html", baseline=found, **shown)
    # Only now that nothing can be refused any more: the page and its pictures are of one report.
    files = {folder.report: page}
    files |= {folder.report.parent / f"{name}.svg": text for name, text in pictures.items()}
    if private is not None:
        files[folder.beside_baseline] = private
    write_together(files)
    if private is None:
        folder.beside_baseline.unlink(missing_ok=True)


def _attacked(
    facts: Facts, pictures: dict[str, str]
) -> list[tuple[AttackTable, str, Grid, Path, str]]:
    """Return of each attack its table, what was attacked and how, what became of the inputs, its
    file and its picture, which is added to the `pictures` that become files of their own."""
    folder, found = facts.folder, []
    for number, table in enumerate(facts.attacks):
        drawn = attacked_accuracy(table, facts.tables, f"attacked{number}")
        pictures[f"attacked_{table.name}"] = alone(drawn, f"{folder.name}: {table.classifier}")
        shown = grid(table, facts.tables, attrgetter("words"))
        words = f"{norm_name(table.norm)}, {table.classifier}"
        found.append((table, words, shown, table.path.relative_to(folder.path), drawn))
    return found


def _checked(facts: Facts) -> list[tuple[dict[str, Any], str, str]]:
    """Of each check what it is of, in words, and what it came to."""
    words = {table.name: table.words for table in facts.tables}
    return [
        (check, words.get(check["certificates"], check["certificates"]), check_line(check))
        for check in facts.checks
    ]


def _card(facts: Facts, written: date | None) -> dict[str, Any]:
    """The privacy card, its rows, and where the page comes from."""
    card = facts.card()
    return {
        "card": card, "card_rows": _card_rows(facts, card), "origin": origin(facts, card, written)
    }  # fmt: skip


def render(template: str, *, width: str = "62rem", script: bool = False, **shown: Any) -> str:
    """A template of this folder; everything that is shown is escaped but for our own pictures.

    Raises jinja2.UndefinedError for what a template needs and was not given.
    """
    loader = jinja2.FunctionLoader(lambda name: (files("dpdist.reports") / name).read_text())
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters["base64"] = lambda raw: base64.b64encode(raw).decode()
    return environment.get_template(template).render(
        version=__version__, style=Markup(style()), width=width, script=script, contents=_contents,
        **shown,
    )  # fmt: skip


def _contents(body: str) -> list[tuple[str, Markup]]:
    """Name and title of every section of a page, in order."""
    return [(name, Markup(title)) for name, title in _HEADINGS.findall(body)]


def _today() -> date:
    from datetime import UTC, datetime

    return datetime.now(UTC).date()


def _curves(facts: Facts) -> dict[str, Any]:
    """The charts of the whole run, None for one that there is nothing to draw of, and why."""
    clean = facts.accuracy
    certified = certified_accuracy(facts.tables, clean) if facts.tables else None
    spent, why = None, "no steps were taken"
    if facts.search is not None:
        why = "the search is paid for as a whole, and its trials are not shown"
    elif facts.plan.steps:
        curve = facts.plan.epsilon_curve()
        why = "nothing is proved at any step"
        if math.isfinite(curve[-1][1]) and curve[-1][1] > 0:
            spent = privacy_spent(curve, facts.plan.delta)
    return {"certified": certified, "spent": spent, "why": why}


def _headline(facts: Facts) -> str:
    """Of a picture that stands alone."""
    guarantee = facts.guarantee
    private = (
        f"epsilon {format_epsilon(guarantee.epsilon)} at delta {format_delta(guarantee.delta)}"
    )
    if facts.plan.trained_elsewhere:
        private = NOT_TRAINED_HERE
    elif facts.fixed_key or math.isinf(guarantee.epsilon):
        private = "not private"
    right = ""
    if facts.accuracy is not None:
        right = f", {percent(facts.accuracy, 1)} % right"
    return f"{facts.folder.name}: {private}{right}"


def _tiles(facts: Facts) -> list[tuple[str, str, str]]:
    """The figures that a reader looks for first: name, value, and how sure it is."""
    guarantee = facts.guarantee
    private = not facts.fixed_key and math.isfinite(guarantee.epsilon)
    found = [
        (
            "epsilon (proved)",
            format_epsilon(guarantee.epsilon),
            f"at delta {format_delta(guarantee.delta)}",
        )
        if private
        else (
            "epsilon (proved)",
            "none",
            "not trained by dpdist" if facts.plan.trained_elsewhere else "not private",
        )
    ]
    about = facts.evaluation or {}
    found += [(n, v, f"on {about['inputs']:,} test inputs") for n, v in facts.measures.items()]
    if facts.accuracy is not None:
        share = f"{percent(facts.accuracy, 1)} %"
        sure = f"{clean_interval(facts)}\u00a0% of inputs like these, 95\u00a0% sure"
        if facts.next_tokens is not None:
            sure = f"of {facts.next_tokens:,} next tokens"
            found.append(("perplexity", f"{about['perplexity']:.1f}", sure))
        found.append(("right", share, sure))
    table = main_table(facts)
    if table is not None:
        radius = first_radius(table)
        share = f"{percent(table.certified_accuracy(radius), 1)} %"
        name = f"right and certified at {norm_name(table.norm)} {exact(radius)}"
        sure, stated = "the inputs share one noise bank: nothing is said of others", _stated(table)
        if radius in stated:
            low = percent(stated[radius].low)
            sure = f"at least {low}\u00a0% of inputs like these, 95\u00a0% sure"
        found.append((name, share, sure))
    return found


def _three(facts: Facts) -> list[list[str]]:
    """What is claimed, proved and audited, as runs are compared by it."""
    _, (_, _, claimed, proved, audited, said) = privacy_grid([facts])
    stated = facts.claim is not None and facts.claim.claimed is not None
    paper = f"by the method's paper: {said}" if stated else "its paper claims none of its own"
    measured = "measured on the executed mechanism: a lower bound"
    return [
        ["claimed", claimed, paper],
        ["proved", proved, "defended, of what was really executed: an upper bound"],
        ["audited", audited, measured if facts.audits else "not measured; dpdist audit does it"],
    ]


def _card_rows(facts: Facts, card: dict[str, Any]) -> list[tuple[str, str]]:
    if facts.plan.trained_elsewhere:
        return [("privacy", facts.privacy_line), ("model", facts.recipe.method.words(facts.plan)),
                ("notes", " ".join(card["notes"]))]  # fmt: skip
    superseded = card["superseded_releases"]
    deltas = card["epsilon_at_delta"]
    rows = [
        ("guarantee", facts.privacy_line),
        ("unit", card["unit"]),
        ("all runs on this data set", "" if facts.data_set is None else str(facts.data_set)),
        ("mechanism", f"{'; '.join(card['mechanism'])}; clipping: {card['clip_norm']}"),
        (
            "epsilon at other deltas",
            "; ".join(
                f"{format_epsilon(row['epsilon'])} at {format_delta(row['delta'])}"
                for row in deltas
            ),
        ),
        (
            "superseded attempts",
            f"{superseded} releases{', included in the guarantee' if superseded else ''}",
        ),
        ("holds if", "; ".join(card["assumptions"])),
        ("notes", " ".join(card["notes"])),
    ]
    return [row for row in rows if row[1]]


def _limits(facts: Facts) -> list[str]:
    """What the page does not promise."""
    promised = [
        "Privacy is of single training records: what is true of the whole population may be "
        "learned, and several records of one person are less protected than one.",
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
    if facts.recipe.method.withheld is not None:
        found.append(f"No model may leave: {facts.recipe.method.withheld}")
    if facts.audited_run is not None:
        found.append(f"Audited run: {facts.audited_run}.")
    return found


def _images(facts: Facts, images: Images | str) -> dict[str, Any]:
    if not facts.tables:
        return {"rows": [], "why": None}
    if isinstance(images, str):
        return {"rows": [], "why": images}
    return {
        "rows": picked(facts.tables, images, facts.recipe.data.class_names),
        "why": "the certificates are of other data",
    }


def _table(table: CertificateTable, folder: RunFolder) -> dict[str, object]:
    stated = _stated(table)
    return {
        "words": table.words,
        "mode": table.mode,
        "n0": table.n0,
        "n": table.n,
        "alpha": table.alpha,
        "norm": norm_name(table.norm),
        "inputs": len(table.index),
        "abstained": percent(table.abstained),
        "average_radius": bound(table.average_radius, 4),
        "rows": [
            (exact(r), percent(table.certified_accuracy(r)), *_bounds(stated.get(r)))
            for r in table.shown_radii
        ],
        "file": table.path.relative_to(folder.path),
    }


def _stated(table: CertificateTable) -> dict[float, statistics.OfPopulation]:
    """Of inputs like these, at every radius that is shown, all together; nothing where the inputs
    are no independent sample."""
    if table.terms["noise_bank"]:
        return {}
    return {at.radius: at for at in statistics.population_bounds(table)}


def _bounds(stated: statistics.OfPopulation | None) -> tuple[str, str]:
    """Right and robust, at least; not certifiable, at least: both in %, of the population."""
    if stated is None:
        return "", ""
    spared = "" if stated.certifiable is None else percent(1 - stated.certifiable)
    return percent(stated.low), spared


# --- the page over all runs -------------------------------------------------------------------


_PAIRS = 28  # of eight runs; more are for `dpdist compare`


@dataclass(frozen=True)
class Pair:
    """The second run less the first. rows: of `differences.grid`, the header first; notes: what is
    not compared, and why."""

    first: str
    second: str
    rows: list[list[str]] = field(default_factory=list)
    notes: Sequence[str] = ()


def write_overview(folder: Path) -> Path:
    """Write FOLDER/index.html over the finished runs in it; returns the page. The others are named
    with what keeps them from it. Raises UserError where there is no run at all."""
    places = sorted(path for path in folder.iterdir() if (path / "run.json").is_file())
    if not places:
        raise UserError(f"{folder}: no runs in this folder; `dpdist run` writes them to runs/")
    runs, left_out = [], []
    for place in places:
        try:
            runs.append(read_facts(RunFolder(place)))
        except UserError as error:
            left_out.append((place.name, str(error).splitlines()[0]))
    grids = [(f"Certified accuracy, {NORMS[n]}, in %", certified_grid(runs, n, SIZES[n]), 1)
             for n in NORMS]  # fmt: skip
    grids += [(f"Under attack, {NORMS[n]}, in %", attacked_grid(runs, n), 3) for n in NORMS]
    page = folder / "index.html"
    write_atomic(
        page,
        render(
            "overview.html",
            heading=f"Runs in {folder.resolve().name}",
            width="78rem",
            script=True,
            runs=[(facts, _link(facts), in_short(facts)) for facts in runs],
            privacy=privacy_grid(runs),
            grids=[grid for grid in grids if len(grid[1]) > 1],
            pairs=_pairs(runs),
            left_out=left_out,
        ),
    )
    return page


def _link(facts: Facts) -> str | None:
    """Where the run's own report lies, from the page."""
    return f"{quote(facts.folder.name)}/report/index.html" if facts.folder.report.exists() else None


def _pairs(runs: Sequence[Facts]) -> list[Pair]:
    """Each two runs, as `dpdist compare` compares them; of very many the first few."""
    return [_pair(*two) for two in itertools.islice(itertools.combinations(runs, 2), _PAIRS)]


def _pair(first: Facts, second: Facts) -> Pair:
    names = (first.folder.name, second.folder.name)
    try:
        rows, notes = compare.differences([first, second], SIZES)
    except UserError as error:
        return Pair(*names, notes=[f"{error}."])
    found = compare.differences_grid(first.folder.name, rows) if rows else []
    return Pair(*names, found, [*notes, *([] if rows else ["Nothing to compare."])])
