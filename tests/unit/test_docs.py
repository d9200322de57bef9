"""The documentation: its links, its order, what is generated into it, its site, its notebooks."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dpdist

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.fixture(scope="module", autouse=True)
def _tools_are_found():
    """`docs/` is where the tools of the site are imported from, as Sphinx does."""
    sys.path.insert(0, str(ROOT / "docs"))
    yield
    sys.path.remove(str(ROOT / "docs"))


@pytest.fixture(scope="module")
def pages(_tools_are_found):
    from tools import pages

    return [pages.parse(path) for path in pages.sources()]


def test_every_link_leads_somewhere(pages):
    from tools.pages import dead_links

    assert dead_links(pages) == []
    assert len(pages) > 30 and sum(len(page.links) for page in pages) > 150


def test_every_page_is_on_a_shelf_once(pages):
    """The index lists each page on the shelf of its folder; the side bar is made of these lists."""
    from tools import pages as tools

    index = (ROOT / tools.INDEX).read_text()
    shelves = tools.shelves(index)
    listed = [path for entries in shelves.values() for _, path in entries]
    beside = {page.path for page in pages if page.path.startswith(tools.BESIDE)}
    beside -= {f"{folder}/README.md" for folder in tools.BESIDE}
    assert sorted(listed) == sorted({page.path for page in pages} - {tools.INDEX} - beside)
    folders = {"docs/tutorials": "Tutorials", "examples": "Tutorials", "docs/how-to": "How-to",
               "docs/explanation": "Explanation", "docs/reference": "Reference",
               "docs/contributing": "Contributing", ".": "The project", "docs": "The project",
               "papers": "The project", "benchmarks": "The project"}  # fmt: skip
    for shelf, entries in shelves.items():
        assert entries and {folders[str(Path(path).parent)] for _, path in entries} == {shelf}


def test_every_test_that_a_page_for_contributors_names_exists():
    """A finding stays fixed as long as the test that its row names passes."""
    pages = [*(ROOT / "docs" / "contributing").glob("*.md"), *(ROOT / "tests").glob("*.md")]
    named = {
        match
        for page in pages
        for match in re.findall(r"`(?:tests/)?((?!benchmarks)[\w/]+\.py)::(\w+)", page.read_text())
    }
    assert len(named) > 50
    for file, name in named:
        tree = ast.parse((ROOT / "tests" / file).read_text())
        defined = {getattr(node, "name", "") for node in tree.body}
        assert name in defined, f"{file}::{name}"


def test_the_reference_is_that_of_the_code():
    """`make reference` renews the pages of docs/reference after a change of the code."""
    from tools import reference

    stale = [path.name for path in reference.stale()]
    assert stale == [], "run `make reference`, and commit what it writes"
    text = (ROOT / "docs" / "reference" / "api.md").read_text()
    for name in set(dpdist.__all__) - {"__version__"}:
        assert text.count(f"\n### {name}\n") == 1, name


def test_every_page_that_a_message_names_is_there(pages):
    anchors = {f"{page.path}#{anchor}" for page in pages for anchor in page.anchors}
    named = [
        keyword.value.value
        for folder in ("dpdist", "cluster", "tuning")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for keyword in (node.keywords if isinstance(node, ast.Call) else ())
        if keyword.arg == "see" and isinstance(keyword.value, ast.Constant)
    ]
    assert len(named) >= 30
    assert [each for each in named if f"docs/{each}" not in anchors] == []


@pytest.mark.e2e
def test_the_site_builds_without_a_warning(tmp_path):
    """`make docs` makes pages that hold what a reader looks for, and fetches nothing."""
    made = re.search(r"^docs: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), flags=re.M)
    assert made
    (line,) = [one for one in made[1].splitlines() if "sphinx" in one]
    _, _, options = line.rpartition(" -m sphinx ")
    words = options.replace("build/doctrees", str(tmp_path / "doctrees")).split()
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *words[:-1], str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and not done.stderr, done.stderr
    site = tmp_path / "site"
    assert (site / "docs" / "index.html").exists() and (site / "searchindex.js").exists()
    assert (site / "examples" / "first_run.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            text = "".join(cell["source"])
            for most, few in (('epochs": 10', 'epochs": 1'), ('inputs": 60', 'inputs": 5')):
                text = text.replace(most, few)
            exec(text, names)
    certified = {"own_loop": 60, "own_data": 50, "certify_any_model": 40}
    if path.stem == "first_run":
        assert names["facts"].guarantee.epsilon <= 3  # type: ignore[attr-defined]
    else:
        assert len(names["table"].radius) == certified[path.stem]  # type: ignore[attr-defined]
