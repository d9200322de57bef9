"""Shared by all tests: caches in a temporary place, where the real data lie, who runs what."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import shares

FOUND = shares.Found()
SHARED = os.environ.get(shares.FOLDER)


def pytest_runtestloop(session: pytest.Session) -> object:
    """With tests/both.py, only the files that the other process has not taken."""
    if SHARED is None or session.config.option.collectonly:
        return None
    if session.testsfailed:
        raise session.Interrupted("errors during collection")
    shares.loop(session, Path(SHARED))
    return True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    FOUND.add(report)


def pytest_sessionfinish() -> None:
    if SHARED is not None:
        FOUND.write(Path(SHARED))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    began = time.process_time()
    result = yield
    if shares.CHECK in os.environ:
        shares.within_limit(began)
    return result


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
    from support.here import without_ray

    with pytest.MonkeyPatch.context() as patch:
        without_ray(patch)
        yield


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
