"""Each script of benchmarks/ and papers/ runs in seconds with --quick and leaves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from support.benchmarks import BENCHMARKS, CHECKOUT, PAPERS, SCRIPTS


def files() -> dict[Path, int]:
    """Return when each file beside the scripts and of the docs was last written."""
    kept = [each for at in (BENCHMARKS, PAPERS, CHECKOUT / "docs") for each in at.rglob("*")]
    return {
        path: path.stat().st_mtime_ns
        for path in kept
        if path.is_file() and "__pycache__" not in path.parts
    }


def quick(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in an empty folder, with an empty home."""
    (folder / "home").mkdir()
    return subprocess.run(
        [sys.executable, str(CHECKOUT / f"{name}.py"), "--quick"],
        cwd=folder,
        env={**os.environ, "HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, tuple[Path, Future]]]:
    """All scripts that are asked for, two at a time: much of Ray's start is waiting."""
    asked = [
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == Path(__file__) and "runs" in getattr(item, "fixturenames", ())
    ]
    pool = ThreadPoolExecutor(2)
    homes = {name: tmp_path_factory.mktemp("script") for name in asked}
    yield {name: (home, pool.submit(quick, name, home)) for name, home in homes.items()}
    pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def before() -> dict[Path, int]:
    return files()


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_runs(name, before, runs):
    """A new script needs `--quick` (`_common.parse_arguments`)."""
    home, running = runs[name]
    done = running.result()
    assert done.returncode == 0, done.stderr[-3000:]
    assert [path for path in home.rglob("*") if path.is_file()] == [], "files outside scratch()"
    assert files() == before, "files of the checkout"
