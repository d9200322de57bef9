"""Shared by all tests: what is run and in which order, caches in a temporary place, real data."""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer.main
import typer.testing
from support import hypothesis_settings

if TYPE_CHECKING:
    from support.local_execution import Done

    from dpdist.runs.folder import RunFolder

COST = {"e2e": 100, "slow": 20}  # about, of others 1


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    os.environ["COLUMNS"] = "10000"  # no line is wrapped
    if config.pluginmanager.has_plugin("terminalreporter"):
        config.get_terminal_writer().fullwidth = 100  # of pytest's own lines
    if "not slow" not in config.option.markexpr:
        os.environ[hypothesis_settings.RUN_SLOW_TESTS] = "1"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not collection_path.name.startswith("test_"):
        return None
    # by name only: `test_devices.py` says why
    if collection_path.name.endswith(hypothesis_settings.DEVICE_TEST_SUFFIX):
        asked = any(hypothesis_settings.DEVICE_TEST_SUFFIX in str(each) for each in config.args)
        return None if asked else True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The files that probably take longest come first: two processes that each take the next file
    then end at about the same time. What is marked nightly goes unless `make nightly` runs, or a
    test is named (FILE::TEST)."""
    if not (os.environ.get("DPDIST_NIGHTLY") or any("::" in str(each) for each in config.args)):
        left = [item for item in items if item.get_closest_marker("nightly")]
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=left)
    cost: Counter[str] = Counter()
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        cost[_file(item.nodeid)] += max((COST[each] for each in marks & COST.keys()), default=1)
    items.sort(key=lambda item: -cost[_file(item.nodeid)])


def pytest_collection_finish() -> None:
    """What is imported by now stays: the collector need not look at it again and again."""
    gc.collect()
    gc.freeze()


def _file(nodeid: str) -> str:
    return nodeid.split("::")[0]


def _torch_settings() -> list[Any] | None:
    versions = sys.modules.get("dpdist.cluster.versions")
    return versions.torch_settings() if versions and "torch" in sys.modules else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    if "torch" in sys.modules:  # what a test draws does not depend on the tests before it
        sys.modules["torch"].manual_seed(0)
    settings, interrupts = _torch_settings(), signal.getsignal(signal.SIGINT)
    try:
        result = yield
    finally:
        signal.signal(signal.SIGINT, interrupts)  # Ray Tune leaves one of its own
    left = _torch_settings()
    # They are part of a training's identity: the noise of a later test would be another one.
    assert settings in (None, left), f"torch's settings are {left} after the test, not {settings}"
    return result


# All commands and options are read from their functions once a process, not once a call, which
# takes 0.08 s of processor time.
typer.main.get_command = functools.cache(typer.main.get_command)
typer.testing._get_command = typer.main.get_command

# Ray runs its workers at nice 15: beside a second process of tests they would hardly run at all.
os.environ.setdefault("RAY_worker_niceness", "0")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Decoded data go to a temporary cache, never to the user's."""
    before = os.environ.get("DPDIST_CACHE")
    os.environ["DPDIST_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["DPDIST_CACHE"]
    else:
        os.environ["DPDIST_CACHE"] = before


@pytest.fixture(scope="module")
def here() -> Iterator[None]:
    """Jobs and commands of the whole module run in this process, without Ray."""
    from support.local_execution import run_without_ray

    with pytest.MonkeyPatch.context() as patch:
        run_without_ray(patch)
        yield


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], RunFolder]:
    """`golden(KIND, RUNS)`: a copy, in RUNS, of a run that the session makes once."""
    from support.golden import copy_run, session_folder

    return lambda kind, runs: copy_run(kind, runs, session_folder(tmp_path_factory))


@pytest.fixture
def dpdist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., Done]:
    """`dpdist ARGUMENTS` in this process and in the test's own folder: what the command left."""
    from support.local_execution import command

    return lambda *arguments: command(monkeypatch, capsys, tmp_path, *arguments)


@pytest.fixture
def dpdist_without_ray(
    monkeypatch: pytest.MonkeyPatch, dpdist: Callable[..., Done]
) -> Callable[..., Done]:
    """The same, and nothing starts Ray."""
    from support.local_execution import run_without_ray

    run_without_ray(monkeypatch)
    return dpdist


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder with MNIST and CIFAR-10 as Parquet: $DPDIST_DATA_ROOT, or shared/data beside the
    checkout."""
    root = Path(
        os.environ.get("DPDIST_DATA_ROOT")
        or Path(__file__).resolve().parent.parent.parent / "shared" / "data"
    )
    if not (root / "mnist").is_dir():
        pytest.skip(f"needs MNIST as Parquet under {root} (set DPDIST_DATA_ROOT)")
    return root
