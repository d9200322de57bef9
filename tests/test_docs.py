"""The documentation: what it links to is there, it becomes a site, and its notebook runs."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import dpdist

pytestmark = pytest.mark.whole

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_site", ROOT / "docs" / "make_site.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["make_site"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(site):
    pytest.importorskip("markdown_it", reason="no renderer: pip install 'dpdist[docs]'")
    return site.pages()


def test_every_link_leads_somewhere(site, pages):
    assert site.broken(pages) == []
    assert len(pages) > 30 and sum(len(page.links) for page in pages) > 150


def test_pages_stand_in_a_readers_order(site, pages):
    shelves = [page.path.split("/")[1] for page in pages if page.path.startswith("docs/")]
    assert list(dict.fromkeys(shelves)) == list(site.SHELVES)
    assert len(shelves) == len(list((ROOT / "docs").rglob("*.md")))


def test_a_link_that_leads_nowhere_is_named(site, tmp_path):
    pytest.importorskip("markdown_it", reason="no renderer: pip install 'dpdist[docs]'")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "b.md").write_text("# A title, of `two`\n\n# x\n\n# x\n")
    (tmp_path / "README.md").write_text(
        "# R\n\n[1](docs/b.md#a-title-of-two) [2](docs/b.md#x-1) [3](https://nowhere.example/)\n"
        "[4](docs/b.md#nothing) [5](docs/c.md) ![6](no.png) [7](#r) [8](#s) [9](../outside)\n\n"
        "<script>alert(1)</script>\n"
    )
    found = site.pages(tmp_path)
    lost = ["docs/b.md#nothing", "docs/c.md", "no.png", "#s", "../outside"]
    assert site.broken(found, tmp_path) == [f"README.md: {link}" for link in lost]
    assert "<script>" not in found[0].body


def test_it_becomes_a_site(site, pages, tmp_path):
    site.write(pages, tmp_path)
    start = (tmp_path / "index.html").read_text()
    assert (
        'href="docs/explanation/privacy.html"' in start
        and (tmp_path / "docs/explanation/privacy.html").exists()
    )
    assert (tmp_path / "docs/pictures/report_light_dark.png").exists()
    assert "<script" not in start and 'src="http' not in start


@pytest.mark.long
def test_the_reference_has_what_users_import(site, tmp_path):
    out = tmp_path / "api"
    done = subprocess.run(
        [sys.executable, "-c", f"import make_site, pathlib\n"
         f"make_site.reference(pathlib.Path({str(out)!r}))"],
        cwd=ROOT / "docs", capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and "does not resolve" not in done.stderr, done.stderr
    page = (out / "dpdist.html").read_text()
    for name in ("run", "read_facts", "UserError", "Release"):
        assert f'id="{name}"' in page
    assert (out / "dpdist" / "privacy" / "accounting.html").exists()


def test_what_is_missing_is_named(site, monkeypatch):
    monkeypatch.setitem(sys.modules, "markdown_it", None)
    with pytest.raises(Exception, match=r"pip install 'dpdist\[docs\]'"):
        site.pages()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_holds_what_came_out(path):
    """Executed in order from the start, without an error, and nothing of the machine in it."""
    cells = json.loads(path.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert outputs and all(output["output_type"] != "error" for output in outputs)
    assert not any(word in path.read_text() for word in (str(ROOT), "/home/", "/tmp/", "/root/"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_is_public(path):
    """A notebook imports no module of dpdist, only `import dpdist` itself."""
    cells = json.loads(path.read_text())["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            assert node.module and node.module.partition(".")[0] != "dpdist"
        elif isinstance(node, ast.Import):
            assert all(not alias.name.startswith("dpdist.") for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "dpdist":
            assert node.attr in dpdist.__all__


@pytest.mark.long
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
