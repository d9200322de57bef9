"""Each script of benchmarks/ and papers/ runs in seconds with --quick and leaves nothing."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from support.benchmarks import BENCHMARKS, CHECKOUT, PAPERS, SCRIPTS, load


def files() -> dict[Path, int]:
    """Return when each file beside the scripts and of the docs was last written."""
    kept = [each for at in (BENCHMARKS, PAPERS, CHECKOUT / "docs") for each in at.rglob("*")]
    return {path: path.stat().st_mtime_ns for path in kept if "__pycache__" not in path.parts}


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


@pytest.mark.long
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


def test_quick_stands_for_defaults_and_writes_into_a_temporary_folder(monkeypatch):
    common = load("benchmarks/_common", monkeypatch)
    home = os.environ["HOME"]

    def parsed(*words: str) -> argparse.Namespace:
        parser = argparse.ArgumentParser()
        parser.add_argument("--rounds", type=int, default=9)
        parser.add_argument("--results", type=Path, default=Path("kept.jsonl"))
        return common.parse_arguments(parser, {"rounds": 1}, ["results"], list(words))

    plain = parsed()
    assert (plain.rounds, plain.results, plain.quick) == (9, Path("kept.jsonl"), False)
    assert os.environ["HOME"] == home
    tiny = parsed("--quick")
    assert (tiny.rounds, tiny.results) == (1, common.scratch_folder() / "results")
    assert Path(os.environ["HOME"]).parent == Path(os.environ["DPDIST_CACHE"]).parent
    assert (
        Path(os.environ["HOME"]).parent == common.scratch_folder()
        and common.scratch_folder().is_dir()
    )
    assert parsed("--quick", "--rounds", "3").rounds == 3  # what is asked for wins


def test_missing_data_end_a_script_well_unless_a_folder_was_named(tmp_path, monkeypatch, capsys):
    common = load("benchmarks/_common")
    monkeypatch.setenv("DPDIST_DATA_ROOT", str(tmp_path))
    for given, code in ((None, 0), (tmp_path, 2)):
        with pytest.raises(SystemExit) as stopped:
            common.require_data(given, "mnist")
        assert stopped.value.code == code
        assert f"not run: needs mnist as Parquet under {tmp_path}" in capsys.readouterr().out
    (tmp_path / "mnist").mkdir()
    assert common.require_data(None, "mnist") == tmp_path
