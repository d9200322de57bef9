"""The pages of the papers: tables and figures of each beside what was run here, and all systems.

    python papers/tables.py            # prints them
    python papers/tables.py --write    # writes README.md, PAPER/README.md, PAPER/results/tables.md

Published figures, with their sources, stand in PAPER/published.yaml:

* systems: what the paper builds; where it is here, a recipe of it, and a verdict.
* statements: its theorems; a verdict, and the test that holds it.
* items: its tables and figures. rows have `published` figures by column, and the recipe that makes
  them with a `change` of fields. keys: the fields of a recipe that are the columns. at: which of
  the `budgets` of the row's data set are the columns. statistic: of our trainings; the mean, or
  their `deviation`. run, why: the command of what was not run, and why it was not. smaller: results
  of our own at another size, from a file of lines (or several such); {trainings} in its command is
  their number. pictures: what is drawn of them (`picture`).

Ours come from PAPER/measured.jsonl, PAPER/run.jsonl and run_small.jsonl. Those of the same setting
stand beside the published figure with their difference from it. Its interval is Student's over
trainings, or of one training's accuracy Clopper and Pearson's, which is of the test images alone:
what another training would give is not in it. others.yaml has the systems of papers without such a
page.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import run_small
import yaml

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from _common import parse_arguments, read_lines, unpack_bits
from scipy import stats

from dpdist.audits.membership_statistics import Estimate
from dpdist.certification.statistics import compare
from dpdist.reports.charts import Axis, Line, chart
from dpdist.runs.recipe import Recipe, find_recipe, load_recipe

HERE = Path(__file__).resolve().parent
PAPERS = ("dplis", "secure-sgd", "stobatch", "residual", "transdenoiser")
OTHERS = {
    "pate": "**[PATE](pate/README.md)**: Teachers vote on public inputs, with noise, and a student "
    "learns the labels. It holds if the number of answers is fixed beforehand; then less is proved "
    "than is printed. That smoothing helps its student on MNIST is not shown.",
    "dp-cert": "**[Private and certified at once](dp-cert/README.md)**: DP-SGD on noisy copies, "
    "certified by smoothing. The published figures are reached on MNIST and passed on CIFAR-10 "
    "from radius 0.3 on; tuning is counted where a row says so.",
}
LONG = 6  # rows beyond which a table is folded


@dataclass(frozen=True)
class Result:
    """Trainings of ours in one row of an item: values of each by column.

    n: test inputs of each value; counts: of columns that have others. setting: what is not as
    published; None: nothing is. right: hexadecimal bits of the test inputs, by column and key.
    proved: epsilon of each training.
    """

    row: str
    cells: dict[str, list[float]]
    setting: str | None
    commit: str
    command: str
    keys: str = ""
    n: int | None = None
    recipe: str | None = None
    doc: str | None = None
    change: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    right: dict[str, dict[int, str]] = field(default_factory=dict)
    proved: list[str] = field(default_factory=list)

    def inputs(self, column: str) -> int | None:
        """Return the number of test inputs behind a column."""
        return self.counts.get(column, self.n)


@cache
def published(paper: str) -> dict[str, Any]:
    """Read PAPER/published.yaml."""
    return yaml.safe_load((HERE / paper / "published.yaml").read_text())


@cache
def lines_of(name: str) -> tuple[dict[str, Any], ...]:
    """Read the lines of a file of results in this folder; empty if it is missing."""
    return tuple(read_lines(HERE / name))


def recipe_of(name: str, change: dict[str, Any] | None = None) -> Recipe:
    """Load a built-in recipe with fields changed. Raises UserError."""
    return load_recipe(find_recipe(name), change)


def results(paper: str, item: dict[str, Any]) -> list[Result]:
    """Return all our results for an item."""
    own = []
    for line in lines_of(f"{paper}/measured.jsonl"):
        if line["item"] == item["id"]:
            own.append(Result(**{k: v for k, v in line.items() if k != "item"}))
    same = {"file": f"{paper}/run.jsonl", "where": {"item": item["id"]}}
    run = {"file": "run_small.jsonl", "where": {"paper": paper, "item": item["id"]}}
    smaller = item.get("smaller") or []
    several = [
        each | {"file": f"{paper}/{each['file']}"}
        for each in (smaller if isinstance(smaller, list) else [smaller])
        if each
    ]
    own += [one for source in (same, run, *several) for one in gathered(source)]
    changes = {row["row"]: row.get("change", {}) for row in item.get("rows", [])}
    return [one if one.change else replace(one, change=changes.get(one.row, {})) for one in own]


def gathered(source: dict[str, Any]) -> Iterator[Result]:
    """Yield results from the lines of a file, each a training, grouped by row and setting.

    `source` says which lines ("where") and the order of "rows".
    """
    found: dict[tuple[str, str | None], list[dict[str, Any]]] = {}
    for line in lines_of(source["file"]) if source else ():
        if source["where"].items() <= line.items():
            setting = None if "setting" in source else line["setting"]
            found.setdefault((line["row"], setting), []).append(line)
    order = source.get("rows") or list(dict.fromkeys(row for row, _ in found))
    for (row, _), trained in sorted(
        (each for each in found.items() if each[0][0] in order),
        key=lambda each: order.index(each[0][0]),
    ):
        cells: dict[str, list[float]] = {}
        right: dict[str, dict[int, str]] = {}
        for line in trained:
            for column, bits in line.get("bits", {}).items():
                right.setdefault(column, {})[line["key"]] = bits
            paths = source.get("cells") or {c: [source.get("of", "test"), c] for c in line["test"]}
            for column, path in paths.items():
                value: Any = line
                for key in path:
                    value = value.get(key) if value is not None else None
                if value is not None:
                    cells.setdefault(column, []).append(value)
        one = trained[0] | {k: v for k, v in source.items() if k in ("commit", "command")}
        command = re.sub(r"(?<=--seeds )(\d+|{trainings})", str(len(trained)), one["command"])
        commits = dict.fromkeys([source["commit"]] if "commit" in source else
                                [line["commit"] for line in trained])  # fmt: skip
        setting = source["setting"] if "setting" in source else one["setting"]
        n = one.get("n")
        if source.get("of", "test") != "test":  # no sample of anything
            setting, n = f"{setting}; accuracy on {source['of']}ing records", None
        keys = f"seeds 0 to {len(trained) - 1}" if len(trained) > 1 else "one training"
        yield Result(
            row, cells, setting, ", ".join(commits), command, keys,
            n, one.get("recipe"), change=one.get("change", {}), counts=one.get("counts", {}),
            right=right, proved=[told for line in trained for told in _proved(line)],
        )  # fmt: skip


def _proved(line: dict[str, Any]) -> list[str]:
    """Return a training's epsilon; empty if it is read at several budgets (its columns)."""
    told = line.get("proved")
    if isinstance(told, dict):
        return [f"{value:.4g}" for value in told.values()] if len(told) == 1 else []
    return [told] if isinstance(told, str) else []


def interval(values: list[float], n: int | None, statistic: str = "mean") -> Estimate:
    """Return the 95 % interval of trainings' values; infinite if their spread is unknown.

    A deviation's is by the chi-square distribution, for normal values.
    """
    if statistic == "deviation":
        if len(values) < 2:
            return Estimate(math.nan, 0.0, math.inf)
        freedom, squares = len(values) - 1, float(np.var(values)) * len(values)
        low, high = (math.sqrt(squares / stats.chi2.ppf(q, freedom)) for q in (0.975, 0.025))
        return Estimate(math.sqrt(squares / freedom), low, high)
    if len(values) > 1 or n is None:
        return Estimate.from_values(values)
    share = Estimate.from_counts(round(values[0] / 100 * n), n)
    return Estimate(values[0], 100 * share.low, 100 * share.high)


def number(value: float) -> str:
    """Format a value with four digits."""
    if abs(value) >= 1000 or (float(value).is_integer() and abs(value) >= 100):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _reach(estimate: Estimate, digits: int = 3) -> str:
    if not math.isfinite(estimate.low) or not math.isfinite(estimate.high):
        return ""
    return f" [{estimate.low:.{digits}g}, {estimate.high:.{digits}g}]"


def beside(value: float | None, ours: Result | None, column: str, statistic: str) -> str:
    """Return a cell: the published figure; under it ours, and the difference with its interval."""
    cell = "" if value is None else f"{value:,}".removesuffix(".0")  # to its last digit
    if ours is None or column not in ours.cells:
        return cell
    found = interval(ours.cells[column], ours.inputs(column), statistic)
    told = f"**{number(found.value)}**"
    if value is not None:
        apart = Estimate(found.value - value, found.low - value, found.high - value)
        told += f" ({apart.value:+.2g}{_reach(apart, 2)})"
    return f"{cell}<br>{told}"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [
        f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(r)} |" for r in rows)
    ]  # fmt: skip


def _code(name: str, change: dict[str, Any] | None) -> str:
    """Describe a recipe and its change."""
    told = ", ".join(f"{k} {'none' if v is None else v}" for k, v in (change or {}).items())
    return f"`{name}`" + (f" with {told}" if told else "")


def _folded(lines: list[str], rows: int, title: str) -> list[str]:
    if rows <= LONG:
        return lines
    return [f"<details><summary>{title}</summary>", "", *lines, "", "</details>"]


def _heading(paper: str, item: dict[str, Any]) -> str:
    return f"{published(paper)['name']}, {item['id'][0].lower()}{item['id'][1:]}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def item_lines(paper: str, item: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of one table or figure."""
    told = f"{_capital(item['shows'])}. **{_capital(item['verdict'])}.**"
    yield from (f"## {_heading(paper, item)}", "", told, "")
    if "says" in item:
        yield from (f"The paper: {item['says']}.", "")
    found, statistic = results(paper, item), item.get("statistic", "mean")
    columns, rows = item.get("columns", []), item.get("rows", [])
    if statistic == "deviation":  # of one training there is none
        found = [one for one in found if max(map(len, one.cells.values())) > 1]
    same = {one.row: one for one in found if one.setting is None}
    if rows:
        body = []
        for row in rows:
            told = [*row["published"], *[None] * (len(columns) - len(row["published"]))]
            cells = [
                beside(value, same.get(row["row"]), column, statistic)
                for column, value in zip(columns, told, strict=True)
            ]
            recipe = _code(row["recipe"], row.get("change")) if "recipe" in row else ""
            body.append([row["row"], *cells, recipe])
        lines = table(["published" + (", **ours**" if same else ""), *columns, "recipe"], body)
        run_here = f", {len(same)} of them run here" if same else ""
        yield from _folded(lines, len(rows), f"{len(rows)} rows{run_here}")
        yield ""
    if "keys" in item:
        yield from ("The recipes have exactly these.", "")
    if "note" in item:
        yield from (f"{_capital(item['note'])}.", "")
    yield from _others([one for one in found if one.setting is not None], statistic)
    yield from pictures_of(item)
    yield from _told(item, found)
    yield from _open(paper, item)


def _open(paper: str, item: dict[str, Any]) -> Iterator[str]:
    """Yield the settings of run_small.py that have no training yet."""
    done = {(line["setting"], line["item"]) for line in lines_of("run_small.jsonl")}
    left: dict[str, list[str]] = {}
    for cell in run_small.cells().values():
        if (cell.paper, cell.item) == (paper, item["id"]) and (cell.setting, cell.item) not in done:
            left.setdefault(cell.setting.split(",")[0], []).append(cell.row)
    for setting, rows in left.items():
        command = "python papers/run_small.py --data-root DATA"
        told = f"{setting}, {', '.join(rows)}"
        yield from (f"* Not run, for want of machine hours: {told}: `{command}`", "")


def pictures_of(item: dict[str, Any]) -> Iterator[str]:
    """Show an item's pictures."""
    for one in item.get("pictures", []):
        about = f"{one['title']}: {one['y']} against {one['x']}"
        yield from (f"![{about}](pictures/{one['file']})", "")


def picture(paper: str, item: dict[str, Any], told: dict[str, Any]) -> str:
    """Draw means of ours as SVG; the table has their intervals.

    Args:
        told: `file`, `title`, `x`, `y` and `to`, the end of y; `settings`: beginnings of those
            that are drawn, all without it; `rows` or `columns`: which of them lies where along x;
            `item`: whose figures, if not this one's.
    """
    drawn: dict[str, list[tuple[float, float]]] = {}
    source = told.get("item", item["id"])
    for one in results(paper, next(i for i in published(paper)["items"] if i["id"] == source)):
        if one.setting is None or not one.setting.startswith(tuple(told.get("settings", [""]))):
            continue
        for column, values in one.cells.items():
            name, place = (one.row, column) if "columns" in told else (column, one.row)
            places = told["columns"] if "columns" in told else told["rows"]
            if place in places:
                drawn.setdefault(name, []).append((places[place], float(np.mean(values))))
    lines = [Line(name, sorted(points), show_markers=True) for name, points in drawn.items()]
    x = Axis(told["x"], max(point[0] for line in lines for point in line.points))
    about = f"{told['y']} against {told['x']}"
    return chart(lines, x, Axis(told["y"], told["to"]), description=about, title=told["title"])


def pictures() -> dict[str, str]:
    """Return every picture by its path from this folder."""
    return {
        f"{paper}/pictures/{told['file']}": picture(paper, item, told)
        for paper in PAPERS
        for item in published(paper)["items"]
        for told in item.get("pictures", [])
    }


def _others(found: list[Result], statistic: str) -> Iterator[str]:
    """Yield our results at another size or for other rows, a table for each setting."""
    groups: dict[str | None, list[Result]] = {}
    for one in found:
        groups.setdefault(one.setting, []).append(one)
    for setting, own in groups.items():
        columns = list(dict.fromkeys(column for one in own for column in one.cells))
        head = f"**Ours**, {setting}"
        if counts := sorted({one.n for one in own if one.n}):
            head += f"; {' and '.join(f'{n:,}' for n in counts)} test inputs"
            others = {f"{c}: {n:,}" for one in own for c, n in one.counts.items() if n != one.n}
            head += f" ({', '.join(sorted(others))})" if others else ""
        head += "; standard deviation" if statistic == "deviation" else ""
        body = []
        for one in own:
            told = [_estimate(one, column, statistic) for column in columns]
            proved = [", ".join(dict.fromkeys(one.proved))] if own[0].proved else []
            body.append([one.row, *told, str(max(map(len, one.cells.values()))), *proved])
        names = ["", *columns, "trainings", *(["proved epsilon"] if own[0].proved else [])]
        body += [[*each, *[""] * (len(names) - len(each))] for each in _differences(own, columns)]
        yield from (f"{head} [95 % interval]:", "", *table(names, body), "")
        if statistic == "deviation":
            yield from _ratios(own)


def _differences(found: list[Result], columns: list[str]) -> Iterator[list[str]]:
    """Yield each later row's difference from the first row, counted on the same images.

    One key has McNemar's exact p; several keys have their mean with Student's interval.
    """
    first, *rest = found
    for one in rest:
        told = dict.fromkeys(columns, "")
        for column in first.right.keys() & one.right.keys() if first.n == one.n else ():
            pairs = [
                [unpack_bits(each.right[column][key], first.n) for each in (first, one)]
                for key in sorted(first.right[column].keys() & one.right[column].keys())
            ]
            gaps = [100 * float(b.mean() - a.mean()) for a, b in pairs]
            more = f" (p {compare(*pairs[0]).p_value:.2g})"
            if len(gaps) > 1:
                more = _reach(Estimate.from_values(gaps), 2)
            told[column] = f"{np.mean(gaps):+.2g}{more}"
        if any(told.values()):
            yield [f"{one.row}, less {first.row} on the same images", *told.values(), ""]


def _estimate(result: Result, column: str, statistic: str) -> str:
    if column not in result.cells:
        return ""
    found = interval(result.cells[column], result.inputs(column), statistic)
    return "" if math.isnan(found.value) else number(round(found.value, 6)) + _reach(found)


def _ratios(found: list[Result]) -> Iterator[str]:
    """Yield Fisher's test of each row's spread against that of the first."""
    first, *rest = found
    told = []
    for one in rest:
        for column, values in one.cells.items():
            base = first.cells.get(column, [])
            if min(len(values), len(base)) > 1:
                ratio = float(np.var(values, ddof=1) / np.var(base, ddof=1))
                p = float(stats.f.cdf(ratio, len(values) - 1, len(base) - 1))
                told.append(f"{one.row} at {column} p = {p:.2g}")
    if told:
        than = f'F test, that runs spread less than those of "{first.row}"'
        yield from (f"{than}: {'; '.join(told)}.", "")


def _told(item: dict[str, Any], found: list[Result]) -> Iterator[str]:
    """Yield how our results were made, and what was not run and why."""
    made: dict[tuple[str, ...], list[str]] = {}
    for one in found:
        key = (one.command, one.commit, one.keys, f" ([more]({one.doc}))" if one.doc else "")
        name = _code(one.recipe, one.change) if one.recipe else f'"{one.row}"'
        if name not in made.setdefault(key, []):
            made[key].append(name)
    for (command, commit, keys, more), names in made.items():
        who = ", ".join(names) if len(names) < 4 else f"{len(names)} rows"
        commits = f"commit{'s' if ',' in commit else ''} {commit}"
        yield f"* Run: {who}: `{command}`, {keys}, {commits}{more}"
    if "why" in item:
        rows = [row for row in item.get("rows", []) if "recipe" in row]
        rest = "Not built" if item["verdict"] == "not built" else "Not run"
        partly = " (what has no figure of ours)" if found and rows else ""
        told = f"* {rest}{partly}: {item['why'].strip()}"
        yield told + (f": `{item['run']}`" if "run" in item else "")
    elif "run" in item and not found:
        yield f"* `{item['run']}`"
    yield ""


def anchor(title: str) -> str:
    """Return a heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def summary(paper: str) -> Iterator[str]:
    """Yield a summary of a paper: what it builds and states, and whether that holds."""
    about = published(paper)
    more = f"{about['cite']}. More: [what was measured]({about['doc']})."
    yield from (f"# {about['title']}: what is built, and does it hold?", "", more, "")
    yield from (about["short"].strip(), "")
    yield from ("[How to read this page](../README.md#how-to-read-the-pages).", "")
    body = [
        [
            one["system"], f"[{one['code']}](../../{one['code']})",
            f"`{one['recipe']}`" if "recipe" in one else "", f"**{one['verdict']}**", one["why"],
        ]
        for one in about["systems"]
    ]  # fmt: skip
    yield from (*table(["system", "where", "recipe", "verdict", "why"], body), "")
    body = []
    for one in about["statements"]:
        path, _, name = one.get("test", "").partition("::")
        link = f"[{name.removeprefix('test_').replace('_', ' ')}](../../{path})" if name else ""
        body.append([one["what"], f"**{one['verdict']}**", one["why"], link])
    yield from (*table(["statement", "verdict", "why", "test"], body), "")


def contents(paper: str) -> Iterator[str]:
    """Yield links to a paper's tables and figures, with verdicts and one value of each."""
    body = []
    for item in published(paper)["items"]:
        link = f"[{item['id']}](results/tables.md#{anchor(_heading(paper, item))})"
        body.append([link, item["shows"], item["verdict"], _one_figure(paper, item)])
    yield from ("## Tables and figures of the paper", "")
    yield (
        "Every figure of ours, with its interval, its command and its commit, is in "
        "[the tables](results/tables.md). The lines behind them are in the `.jsonl` files of this "
        "folder and in [run_small.jsonl](../run_small.jsonl)."
    )
    head = ["", "shows", "verdict", "published, ours in the same setting"]
    yield from ("", *table(head, body), "")


def _one_figure(paper: str, item: dict[str, Any]) -> str:
    """Return the first published figure that was run here in the same setting, and ours."""
    same = {one.row: one for one in results(paper, item) if one.setting is None}
    for row in item.get("rows", []):
        if row["row"] in same:
            for column, value in zip(item["columns"], row["published"], strict=False):
                ours = same[row["row"]].cells.get(column)
                if ours and value is not None:
                    return f"{row['row']}, {column}: {value}, {number(float(np.mean(ours)))}"
    return ""


HEAD = """# The papers: what is built, and does it hold?

The systems of the papers that dpdist is built from, each with a recipe that trains it, and their
baselines. A page for each paper has its statements, tables and figures beside what came out here.
Run the commands from a checkout: `dpdist recipes --papers` lists the recipes, and a recipe may be
given by its name or as the path `papers/PAPER/recipes/NAME.yaml`.

{short}

{systems}

*Works*: the recipe loads, makes its plan and trains two steps in the tests. Every night each recipe
of a paper runs to its end, tiny and on invented records (`tests/unit/test_recipes_smoke.py`). The
verdict is of the paper's statement.

Each folder has a README, `recipes/`, `run.py`, which measured what its pages state, its results as
lines of JSON, and `results/`, the pages with all tables.
`python papers/run_small.py --data-root DATA` trains the rows that a CPU can train.

## How to read the pages

* Tables have the published figure. Where the same setting was run, **ours** stands under it, with
  the difference and its 95 % interval: over trainings (Student) where there are several, otherwise
  of one training's accuracy on its test inputs (Clopper and Pearson), which leaves out what another
  training would give. Published figures count as exact, though most are of single runs.
* Of what a CPU can train three keys were planned, in ten machine hours: a table with fewer
  trainings has no more keys, and an order that it shows may be chance.
* Runs of another size stand under a heading of their own: they are not there to be compared with
  the published figures, but to show whether the same order appears.
* *Not run* comes with the reason and the command. A test holds every command against the command
  line; words in capitals, such as `DATA` and `FILE`, are yours to fill in.
* A commit is the one that first stated the figure, or the tree that ran.
* Accuracy under attack of networks with noise in a hidden layer was counted by votes; since
  commit 81764ed `dpdist attack` counts the mean scores that their certificates speak of.

This page and those of the five papers are made by `python papers/tables.py --write`; a test
compares.
"""


def readme() -> str:
    """Return the page of all papers."""
    short = [
        f"* **[{about['title']}]({paper}/README.md)**: {about['short'].strip()}"
        for paper, about in ((each, published(each)) for each in PAPERS)
    ]
    short += [f"* {told}" for told in OTHERS.values()]
    others = yaml.safe_load((HERE / "others.yaml").read_text())
    systems = {paper: published(paper)["systems"] for paper in PAPERS} | others
    body = []
    for paper, found in systems.items():
        for one in found:
            recipe = f"`dpdist run {one['recipe']}`" if "recipe" in one else ""
            verdict = one["verdict"].replace("](../", "](")
            works = "yes" if recipe else f"[code](../{one['code']})"
            body.append([f"[{paper}]({paper}/README.md)", one["system"], works, recipe, verdict])
    head = ["paper", "system or baseline", "works", "command", "verdict"]
    return HEAD.format(short="\n".join(short), systems="\n".join(table(head, body)))


def _text(lines: Iterable[str]) -> str:
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def page(paper: str) -> str:
    """Return the page of one paper."""
    return _text([*summary(paper), *contents(paper)])


def tables(paper: str) -> str:
    """Return the page of a paper's tables and figures; its links begin one folder below."""
    how = "[How to read them](../README.md#how-to-read-the-pages)."
    lines = [f"# {published(paper)['title']}: tables and figures", "", how, ""]
    for item in published(paper)["items"]:
        lines += item_lines(paper, item)
    text = re.sub(r"\]\((?!http|#|results/)", "](../", _text(lines))
    return text.replace("](results/", "](")


def pages() -> dict[str, str]:
    """Return every page by its path from this folder."""
    made = {"README.md": readme()} | {f"{paper}/README.md": page(paper) for paper in PAPERS}
    return made | {f"{paper}/results/tables.md": tables(paper) for paper in PAPERS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--write", action="store_true", help="into the folders of the papers")
    if parse_arguments(parser, {}).write:
        for name, text in (pages() | pictures()).items():
            (HERE / name).write_text(text)
    else:
        print("\n".join(pages().values()))


if __name__ == "__main__":
    main()
