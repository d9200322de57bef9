"""Public docstrings: each has its sections and an example, and the examples run as printed."""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

import dpdist

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("here")]

# Examples read the run that the first of these makes, and its release: they run first, whichever
# tests a process has.
ORDER = ("run", "write_release")
# As they are before `here` replaces what starts Ray.
PUBLIC = {name: getattr(dpdist, name) for name in dpdist.__all__}
ON_RAY = ("connect", "tune")  # seconds each
NAMES = [*ORDER, *sorted(set(dpdist.__all__) - {*ORDER, *ON_RAY, "__version__"})]


@pytest.fixture(scope="module", autouse=True)
def _found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """All examples run in one new folder, without Ray; what those of `ORDER` printed wrongly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("session"))
        yield {}


def failures(text: str, name: str, known: Mapping[str, object] | None = None) -> str:
    """Return what doctest prints of a docstring's examples that fail; nothing when all pass."""
    test = doctest.DocTestParser().get_doctest(text, dict(known or {}), name, None, 0)
    assert test.examples, f"{name} has no example"
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    return "".join(said)


def sections_missing(function: Callable[..., object]) -> list[str]:
    """Return the sections that a function's docstring lacks."""
    text = inspect.getdoc(function) or ""
    wanted = ["Returns|Yields", "Raises"] + ["Args"] * bool(inspect.signature(function).parameters)
    return [name for name in wanted if not re.search(rf"^({name}):$", text, flags=re.M)]


@pytest.mark.parametrize(
    "name", [*NAMES, *(pytest.param(each, marks=pytest.mark.e2e) for each in ON_RAY)]
)
def test_a_public_docstring_is_complete_and_its_example_runs(
    name: str, _found: dict[str, str]
) -> None:
    public = PUBLIC[name]
    if not inspect.isclass(public):
        assert sections_missing(public) == []
        documented = inspect.getdoc(public) or ""
        for parameter in inspect.signature(public).parameters:
            assert re.search(rf"^    {parameter}: ", documented, flags=re.M), parameter
    for each in (*ORDER, name):
        if each not in _found:
            _found[each] = failures(inspect.getdoc(PUBLIC[each]) or "", each)
    assert _found[name] == ""
    if name == "run":
        assert Path("runs/small/report/index.html").exists()
