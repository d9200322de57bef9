"""The report, as a browser and a reader meet it: well formed, whole, honest, of one file."""

from __future__ import annotations

import base64
import dataclasses
import io
import itertools
import json
import math
import re
import shutil
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.browser import BROWSER, WIDTHS, inspect_pages
from support.training import make, train

from dpdist import pipeline
from dpdist.attacks.settings import CheckSettings
from dpdist.audits.target import AuditResult
from dpdist.certification import table as tables
from dpdist.certification.cohen import Cohen
from dpdist.core.errors import UserError
from dpdist.evaluation import SplitImages, split_images
from dpdist.privacy.card import AuditFinding
from dpdist.privacy.claims import Claim
from dpdist.privacy.guarantee import Guarantee, format_epsilon
from dpdist.reports.charts import (
    PALETTE,
    Axis,
    Line,
    certified_accuracy_chart,
    chart,
    standalone_svg,
    stylesheet,
    ticks,
)
from dpdist.reports.facts import Facts, read_facts
from dpdist.reports.html import (
    IMAGES_NOT_REQUESTED,
    are_images_allowed,
    render_template,
    select_images,
    write_overview,
    write_report,
)
from dpdist.reports.summary import (
    accuracy_interval,
    explain_numbers,
    make_verdict,
    max_correct_guess_percent,
)
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import parse_recipe
from dpdist.training.records import data_source, load_test_records

pytestmark = pytest.mark.whole

HOSTILE = "<img src=x onerror=alert(1)> & 'more'"
VOID = {"meta", "img", "br", "circle", "rect", "polygon", "path"}
NAMES = [*"abcdefgh", "<i>", "j"]  # of the classes
WRONG, ABSTAINS, INPUTS = {4, 9, 14}, {6, 13}, 30


class Page(HTMLParser):
    """What is in a page: elements in order, text by element, whatever is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.said: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.said.append((self.open[-1], data))

    def all(self, *tags: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag in tags]


def certify(run: RunFolder, name: str = "mine", data: str | None = None) -> None:
    """Certificates of the first test inputs, ever less sure; some wrong, some not answered."""
    recipe = run.read_recipe()
    test = load_test_records(recipe, data_source(recipe))
    settings, rows = Cohen(sigma=0.5, n=1000, radii=(0.1, 0.25)), []
    for index in range(INPUTS):
        label = int(test.labels[index])
        selected = (label + 1) % 10 if index in WRONG else label
        hits = 500 if index in ABSTAINS else 995 - 10 * index
        counts = [0] * 10
        counts[selected], counts[(selected + 5) % 10] = hits, 1000 - hits
        verdict = settings.decide(
            [{"selected": selected, "histogram": counts}], settings.build_sampler(None, ())
        )
        rows.append(settings.table_row(index, label, verdict, None))
    about = {
        "settings": {"n": 1000, "mode": "fixed", "noise": "gaussian", "sigma": 0.5,
                     "radii": [0.1, 0.25]},
        "model": read_facts(run).training_summary["model"], "data": data or test.fingerprint,
        "seed": "5eed",
    }  # fmt: skip
    tables.write(tables.build(rows, about), run.certificates / name / "certificates.parquet")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    recipe, run = make(
        tmp_path_factory.mktemp("runs"), HOSTILE, data__max_train=40, training__batch_size=40,
        training__steps=3, model="linear", privacy__run_key=None, data__names=NAMES,
    )  # fmt: skip
    train(recipe, run)
    pipeline.evaluate_stage(recipe, run)
    certify(run)
    pipeline.report_stage(run)
    return run


@pytest.fixture(scope="module")
def facts(run: RunFolder) -> Facts:
    return read_facts(run)


def check_page(text: str) -> Page:
    """What holds of every page of ours."""
    page = Page(text)
    assert len(text.encode()) < 2 * 2**20
    headings = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert headings.count(1) == 1 == headings[0]
    assert all(b - a <= 1 for a, b in itertools.pairwise(headings))
    names = [name for _, at in page.elements if (name := at.get("id"))]
    assert len(names) == len(set(names))
    links = [at["href"] or "" for at in page.all("a")]
    assert {link[1:] for link in links if link.startswith("#")} <= set(names)
    contents = [at["id"] for at in page.all("h2")]
    assert [link for link in links if link[1:] in contents] == [f"#{name}" for name in contents]
    # Nothing is fetched, and nothing runs but the page's own script.
    assert not re.search(r"url\(|@import|https?:|<link|<iframe|javascript:", text)
    for _, at in page.elements:
        assert not [name for name in at if name.startswith("on")]
        assert (at.get("src") or "data:image/png;base64,").startswith("data:image/png;base64,")
    policy = [at["content"] for at in page.all("meta") if "http-equiv" in at]
    assert "default-src 'none'" in (policy[0] or "")
    # For whoever does not see it, or uses the keyboard.
    assert page.all("html") == [{"lang": "en"}] and len(page.all("main", "header", "footer")) == 3
    assert all(at.get("aria-label") for at in page.all("nav"))
    assert all((at.get("alt") or "").strip() for at in page.all("img"))
    for at in page.all("svg"):
        assert at["role"] == "img" and set((at["aria-labelledby"] or "").split()) <= set(names)
    assert len(page.all("table")) == len(page.all("caption")) > 0
    assert {at.get("scope") for at in page.all("th")} == {"row", "col"}
    assert all(at.get("tabindex") == "0" for at in page.all("div") if at.get("class") == "wide")
    # Nothing is wider than a telephone.
    rules = text.partition("<style>")[2].partition("</style>")[0]
    fixed = re.findall(r"(?<!max-)(?<!stroke-)(?:min-)?width: *([\d.]+)(px|rem)", rules)
    fixed += re.findall(r"minmax\((?:min\()?([\d.]+)(px|rem)", rules)
    assert all(float(size) * (16 if unit == "rem" else 1) <= 288 for size, unit in fixed)
    assert "prefers-color-scheme: dark" in rules and "viewport" in text
    return page


@pytest.mark.long
def test_the_page_is_whole_and_open_to_everybody(run: RunFolder) -> None:
    text = run.report_file.read_text()
    page = check_page(text)
    assert page.all("script") == []
    shown = " ".join(part for _, part in page.said)
    for word in (
        "Verdict", "What the numbers mean", "Class by class", "95 % interval", "not certifiable",
        "Epsilon against step", "claimed", "proved", "audited", "Intended use", "fingerprint",
        "5eed", "dpdist run", "Smoothing by Gaussian noise 0.5, 1,000 draws an input",
    ):  # fmt: skip
        assert word in shown, word
    # The folder's name is somebody's text, and is only ever shown.
    assert HOSTILE in shown and "<img src=x" not in text and "<i>" not in text
    assert text.index("verdict") < text.index("<nav") and text.count("<svg") == 2
    drawn = ElementTree.parse(run.report_file.with_name("certified_accuracy.svg")).getroot()
    assert len(drawn.findall("{*}svg")) == 1 and HOSTILE.split()[0] in " ".join(drawn.itertext())


@pytest.mark.long
def test_what_is_secret_stays_secret(run: RunFolder) -> None:
    text = run.report_file.read_text()
    assert run.run_key.read_text().strip() not in text
    for mark in re.findall(r"[0-9a-f]{32,}", run.data_fingerprint.read_text()):
        assert mark not in text


def test_colours_can_be_told_apart() -> None:
    """WCAG 2.2 AA: 4.5 for text, 3 for lines, on both grounds, light and dark."""

    def luminance(shade: str) -> float:
        parts = [int(shade[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return float(np.dot([0.2126, 0.7152, 0.0722], linear))

    for mode in (0, 1):
        for ground in ("ground", "raised"):
            for name, shades in PALETTE.items():
                if name in ("ground", "raised", "rule"):
                    continue
                both = sorted((luminance(shades[mode]), luminance(PALETTE[ground][mode])))
                assert (both[1] + 0.05) / (both[0] + 0.05) >= 4.5, (name, ground, mode)


def test_images_are_test_inputs_and_shown_where_somebody_said_so(
    run: RunFolder, tmp_path: Path
) -> None:
    recipe = run.read_recipe()
    images = split_images(recipe)
    assert isinstance(images, SplitImages)
    rows = dict(select_images(read_facts(run).tables, images, NAMES))
    least, most, wrong, silent = rows.values()
    assert {it.index for it in wrong} == WRONG and {it.index for it in silent} == ABSTAINS
    assert all(a.radius <= b.radius for a, b in itertools.pairwise(least))
    assert most[0].index == 0 and least[0].radius < most[0].radius
    test = load_test_records(recipe, data_source(recipe))
    assert wrong[0].label == NAMES[int(test.labels[wrong[0].index])]
    assert wrong[0].answer == f"answer {NAMES[(int(test.labels[wrong[0].index]) + 1) % 10]}"
    pixels = np.asarray(Image.open(io.BytesIO(wrong[0].png)))
    assert (pixels == test.inputs[wrong[0].index, 0]).all()
    text = run.report_file.read_text()
    found = [base64.b64decode(raw) for raw in re.findall(r"base64,([^\"]+)", text)]
    every = [it.png for row in rows.values() for it in row]
    assert found == every and len(Page(text).all("img")) == len(every)
    # Of other data an index names another input.
    assert select_images(read_facts(run).tables, SplitImages(test.first(20)), NAMES) == []
    with pytest.raises(UserError, match="has 358 inputs, no 358"):
        images.png(358)
    # Built-in data are public; of one's own nothing is shown before it is asked for, and then on.
    other = RunFolder(tmp_path / "own")
    assert [are_images_allowed(other, None, built_in) for built_in in (True, False)] == [
        True,
        False,
    ]
    assert are_images_allowed(other, True, False) and are_images_allowed(other, None, False)
    assert not are_images_allowed(other, False, True) and not are_images_allowed(other, None, True)
    write_report(run)
    try:
        text = run.report_file.read_text()
        assert "base64" not in text and IMAGES_NOT_REQUESTED.partition(";")[0] in text
    finally:
        pipeline.report_stage(run)


def test_a_run_with_canaries_shows_no_test_input(run: RunFolder) -> None:
    recipe = run.read_recipe()
    audit = {"kind": "canaries", "canaries": 20}
    planted = parse_recipe({**recipe.model_dump(mode="json"), "audit": audit}, "test")
    assert planted.canary_audit is not None and "canaries" in str(split_images(planted))


def audit(**changes: Any) -> AuditFinding:
    given = {
        "kind": "mechanism", "method": "m", "epsilon": 5.0, "delta": 1e-4, "alpha": 0.05,
        "view": "all", "neighbours": "add-or-remove-one", "trials": 10, "rule": "r",
        "proved": math.inf, "claimed": 1.0,
    }  # fmt: skip
    return AuditFinding(**(given | changes))


def with_results(facts: Facts, kind: type, result: Any) -> Facts:
    return dataclasses.replace(facts, evaluations={**facts.evaluations, kind: [result]})


def test_the_sentence_says_what_holds(facts: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    about = facts.evaluation  # three steps may have taught it no more than the commonest class
    right = {"correct": 300, "accuracy": 300 / about["inputs"]}
    facts = dataclasses.replace(facts, evaluation=about | right)
    told = make_verdict(facts)
    assert told.severity == ("caution" if facts.guarantee.epsilon > 10 else "good")
    assert f"with epsilon {format_epsilon(facts.guarantee.epsilon)}" in told.sentence
    assert told.sentence.count(". ") == 0
    share = 100 * facts.tables[0].certified_accuracy(0.1)
    assert f"{share:.1f} % of 30." in told.sentence
    assert "within L2 distance 0.1" in told.sentence
    none = make_verdict(dataclasses.replace(facts, tables=[], evaluation=None))
    assert "nothing is certified" in none.sentence and "was not measured" in none.sentence
    infinite = Guarantee(math.inf, 1e-4, "add-or-remove-one", "proved", "none")
    open_ = dataclasses.replace(
        facts, account=dataclasses.replace(facts.account, guarantee=infinite)
    )
    assert (
        make_verdict(open_).severity == "bad"
        and "epsilon is infinite" in make_verdict(open_).sentence
    )
    assert "single records away" in dict(explain_numbers(open_))["epsilon"]
    bug = make_verdict(with_results(facts, AuditResult, audit(proved=1.0)))
    assert bug.severity == "bad" and bug.sentence.startswith("An audit contradicts what is proved")
    broken = make_verdict(with_results(facts, CheckSettings, {"plausible": False}))
    assert broken.severity == "bad" and broken.sentence.startswith("An attack contradicts")
    claimed = Guarantee(1.0, 1e-4, "add-or-remove-one", "claimed", "Theorem 1")
    claim = Claim("X", "here", None, claimed, facts.guarantee, "not sound", "no proof")
    monkeypatch.setattr(Facts, "claim", claim)
    assert "the paper's epsilon 1 does not hold" in make_verdict(facts).sentence
    refuted = make_verdict(with_results(facts, AuditResult, audit()))
    assert refuted.severity != "good" and "is refuted by an audit" in refuted.sentence
    monkeypatch.setattr(Facts, "has_fixed_key", True)
    assert (
        make_verdict(facts).severity == "bad"
        and "run key was fixed" in make_verdict(facts).sentence
    )


def test_what_epsilon_lets_a_guess_be_right() -> None:
    def at(epsilon: float, delta: float) -> float:
        return float(
            max_correct_guess_percent(
                Guarantee(epsilon, delta, "add-or-remove-one", "proved", "none")
            )
        )

    assert at(0.0, 0.0) == 50 and at(math.log(3), 0.0) == pytest.approx(75, abs=0.011)
    assert at(3.0, 1e-4) >= 100 * (math.exp(3) + 1e-4) / (1 + math.exp(3)) > at(3.0, 1e-4) - 0.01
    assert at(1.0, 0.01) >= 100 * (math.e + 0.01) / (1 + math.e) > at(1.0, 0.01) - 0.01
    assert at(800.0, 1e-4) == 100
    low, high = map(float, accuracy_interval(90, 100).split(" to "))
    assert low < 83 < 90 < 95 < high


def test_a_chart_never_shows_more_than_is_certified(facts: Facts) -> None:
    """Also where there are more radii than it has places for."""
    radii = np.linspace(0.001, 2.0, 1000)
    table = dataclasses.replace(
        facts.tables[0], radius=radii, index=np.arange(1000), label=np.zeros(1000, int),
        prediction=np.zeros(1000, int),
    )  # fmt: skip
    drawn = certified_accuracy_chart([table], 0.9)
    (path,) = [p for p in re.findall(r'class="c0" d="([^"]+)"', drawn) if "V" in p]
    assert len(drawn) < 20_000
    bottom = max(float(v) for v in re.findall(r"V([\d.]+)", path))
    first = float(re.match(r"M[\d.]+ ([\d.]+)", path)[1])  # type: ignore[index]
    for up, across in re.findall(r"V([\d.]+)H([\d.]+)", path):
        radius = (float(across) - 46) / (360 - 10 - 46) * 1.05 * 2.0
        share = (bottom - float(up)) / (bottom - first)
        assert share <= np.mean(radii >= radius - 0.01) + 0.005


def test_charts_have_round_ticks_and_stand_alone() -> None:
    for end in (1e-3, 0.07, 0.42, 1.0, 3.14, 100.0, 60_000.0):
        found = ticks(end)
        assert found[0] == 0 and 3 <= len(found) <= 7 and found[-1] <= end * (1 + 1e-9)
    drawn = chart([Line("<a>", [(0, 1), (1, 0)])], Axis("x", 1), Axis("y", 1), description="&",
        element_id="n",
                  title="t")  # fmt: skip
    whole = standalone_svg(drawn, "<b>")
    assert "<a>" not in whole and "&lt;a&gt;" in whole and "&lt;b&gt;" in whole
    assert stylesheet() in whole and whole.count("xmlns") == 1
    ElementTree.fromstring(whole)


def test_an_axis_by_doublings() -> None:
    axis = Axis("epsilon", 8, 0.25)
    assert axis.ticks() == [0.25, 0.5, 1, 2, 4, 8]
    assert [axis.position(tick) for tick in axis.ticks()] == pytest.approx(
        [0, 0.2, 0.4, 0.6, 0.8, 1]
    )
    assert (axis.position(0.01), axis.position(99)) == (0, 1)
    for begin in (0, -1, 8, 9):
        with pytest.raises(ValueError, match="by doublings"):
            Axis("epsilon", 8, begin)
    line = Line("l", [(0.25, 0), (0.5, 1), (8, 0)], show_markers=True)
    drawn = chart([line], axis, Axis("y", 1), description="", element_id="n", title="t")
    assert re.findall(r'cx="([\d.]+)"', drawn) == ["46", "106.8", "350"]
    assert '<text x="106.8" y="' in drawn and ">0.5</text>" in drawn


def test_one_page_over_all_runs(run: RunFolder, tmp_path: Path) -> None:
    runs = run.path.parent
    unfinished = runs / "unfinished"
    unfinished.mkdir(exist_ok=True)
    (unfinished / "run.json").write_text('{"format": 1, "dpdist": "0.1.0"}')
    shutil.copytree(run.path, runs / "other")
    shutil.rmtree(runs / "other" / "report")
    text = write_overview(runs).read_text()
    page = check_page(text)
    shown = " ".join(part for _, part in page.said)
    assert HOSTILE in shown and "other" in shown and "<img src=x" not in text
    assert "never finished training" in shown and "plain accuracy" in shown
    assert len(page.all("details")) == 1 and len(page.all("script")) == 1
    links = [at["href"] for at in page.all("a") if (at["href"] or "").endswith("index.html")]
    assert len(links) == 1 and "<" not in (links[0] or "")
    with pytest.raises(UserError, match="no runs in this folder"):
        write_overview(tmp_path)


@pytest.mark.parametrize("by_class", [[[1, 2]], [[1]], "x", [[1.5, 1]], [[-1, -1]]])
def test_a_damaged_evaluation_is_refused(run: RunFolder, by_class: Any) -> None:
    kept = run.evaluation.read_text()
    run.evaluation.write_text(json.dumps(json.loads(kept) | {"by_class": by_class}))
    try:
        with pytest.raises(UserError, match="damaged: its accuracy"):
            read_facts(run)
    finally:
        run.evaluation.write_text(kept)


@pytest.mark.skipif(BROWSER is None, reason="no chromium here (apt install chromium)")
@pytest.mark.parametrize("dark", [False, True])
def test_in_a_browser_nothing_sticks_out_and_columns_sort(
    run: RunFolder, tmp_path: Path, dark: bool
) -> None:
    long = "x" * 200
    rows = [[name, value, *["0.123"] * 14]
            for name, value in ((long, "1,234.5"), ("<b>", "inf"), ("c", ">= 7 (x)"))]  # fmt: skip
    overview = render_template(
        "overview.html", heading=long, script=True, runs=[], grids=[], pairs=[],
        privacy=[["run", *[f"column {i}" for i in range(15)]], *rows], left_out=[(long, long)],
    )  # fmt: skip
    found = inspect_pages(tmp_path, [run.report_file.read_text(), overview], dark)
    assert [page["wide"] for page in found] == [*WIDTHS, *WIDTHS]
    for page in found:
        assert page["out"] == [] and page["scrolls"] <= page["wide"]
        assert page["ground"] == ("rgb(18, 22, 27)" if dark else "rgb(255, 255, 255)")
    for page in found[2:]:
        assert page["sorted"][:2] == [["<b>", "c", long], ["c", long, "<b>"]]


def test_a_report_that_fails_leaves_the_one_before(run: RunFolder, monkeypatch) -> None:
    """Page and pictures are of one report: what is refused late replaced nothing."""
    before = {path: path.read_bytes() for path in run.report_file.parent.iterdir()}
    assert len(before) > 1
    table = run.certificates / "mine/certificates.parquet"
    whole = table.read_bytes()

    def refused(facts: Facts) -> None:
        raise UserError("refused late")

    monkeypatch.setattr("dpdist.reports.html.compare_with_baseline", refused)
    certify(run, data="0" * 32)
    monkeypatch.setattr("dpdist.reports.html._headline", lambda facts: "another picture")
    try:
        with pytest.raises(UserError, match="refused late"):
            write_report(run)
        assert {path: path.read_bytes() for path in run.report_file.parent.iterdir()} == before
    finally:
        table.write_bytes(whole)
