"""Each script of benchmarks/ runs in seconds with --quick, prints its tables and leaves nothing."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from support.benchmarks import BENCHMARKS, SCRIPTS, load

CHECKOUT = BENCHMARKS.parent
# Lines of each script's output, and how many there are of each: `#` is a number, `...` anything.
SHAPES: dict[str, dict[str, int]] = {
    "adapters": {
        "ordinary step, ms #": 1,
        "clipped per document #": 1,
        "as a run does it: # rows a pass #": 1,
        "with resources.micro_batch: #, # rows a pass #": 1,
    },
    "attacks": {
        "clean accuracy #%": 1,
        "linf ... # | # # # | # # | #": 4,
        "l2 ... # | # # # | # # | #": 4,
        "# draws: # images/s, # gradients/s": 4,
    },
    "audit_opacus": {
        "| noise and clip: ... | # / # | # | # | nothing found | # |": 1,
        "| divisor of N: ... | # / # | # | # | BROKEN | # |": 1,
    },
    "bounds": {"| # | # | # | # | # |": 11},
    "bulk": {
        "| 0.25 | target | # | # | # (# to #) | # (# to #) | # (# to #) | # (# to #) |": 1,
        "train-0.25: 1 epochs, # minutes of processor time, accuracy # %, under noise # %": 1,
        "draws/s of one thread: frozen #, bf16 #, loop #; ...": 1,
    },
    "canary_audits": {"| # | # (# to #) | # | # of 1 | # |": 1, "# of 1 exceeded ...": 1},
    "certification": {
        "plain loop as published #": 1,
        "engine #": 1,
        "engine / ...: # x (to reach: #)": 3,
        "fixed n # draws (1/#) certified #%": 1,
        "early stopping # draws (1/#) certified #%": 1,
        "anytime # draws (1/#) certified #%": 1,
        "# draws each; plain loop # s each": 1,
        "2 actors against 2 processes: # x (to reach: #)": 1,
        "pool overhead at # s chunks: #% (<= # %)": 1,
    },
    "convolutions": {"| #, #, #, # | # | # | # |": 6},
    "dplis": {'{"sweep": "radius", "row": ...} {\'2 steps\': #}': 3},
    "dplis_landscape": {
        "sharpness # (box #, at least)": 1,
        "loss #, worst found in the box #": 1,
    },
    "draws": {
        "... # draws # s # % at #, # % at #": 12,
        "target-scores, # alone # draws # s # % at #": 2,
        "p_b at # alpha: mean radius #, larger on # %, smaller on # %, certified ... at #": 4,
        "one-sided: mean radius #, certified ... at #": 1,
    },
    "dsrs": {
        "balls ...; d = #, Gaussian, sigma #, # inputs, n = #": 1,
        "balls ...; d = #, generalised, k = #, sigma #, # inputs, n = #": 1,
        "r = # one noise # both # # # # # # strata # # # # # # shares ...": 14,
    },
    "flagship": {
        "| published (DP-CERT) | # | # | | # | # | # | # |": 3,
        "| public weights | # | # | # | # | # | # | # |": 1,
    },
    "functional": {"| digits... | # | # | # | # | # | 1 | # |": 2},
    "gpu": {
        "step-cnn: measured, # s: ...": 1,
        "step-gpt2-small-lora: measured, # s: ...": 1,
        "step-vit-small: measured, # s: ...": 1,
        "3 measured; # minutes now, # for all parts: ...": 1,
    },
    "grouped_units": {
        "| unit-4 | # | # | # | ... |": 1,
        "| one | # | # | # | ... |": 1,
    },
    "hidden": {
        "| ...-4 | # | 1" + " | #" * 15 + " |": 2,
        "| ...-4 | # | # | # | # | # | # | # |": 2,
    },
    "many_run_audits": {"| # | 1 | 100 | # (#) | # | # | # | # |": 1},
    "language_models": {
        f"{way} # parameters, # tokens/s (# of ordinary), peak memory # MiB (# of ordinary)": 1
        for way in ("ordinary", "private", "opacus")
    },
    "membership": {"| digits-membership | ... | inf | # [#, #] | # | # | # [#, #] | # |": 2},
    "noise": {
        "| ... | # | # |": 7,
        "a release: # million a second (aim #); # bytes an entry at the peak ...": 1,
    },
    "one_run_audits": {"| # (#) | # | # | # | #, # | #, # of 2 |": 6},
    "own_loop": {
        "... # ms/step # steps/s": 2,
        "overhead # % (# to # in 5 rounds; to reach <= 3 %) ...": 1,
        "both end at the same bits: yes": 1,
        "| dpdist | # | # | keyed Poisson |": 1,
        "| Opacus | # | # | UniformWithReplacementSampler |": 1,
        "| Opacus, poisson_sampling=False | # | # | RandomSampler |": 1,
    },
    "papers": {
        "... The five papers: what is built, ...": 1,
        "| system | where | recipe | verdict | why |": 5,
    },
    "papers_run": {
        "clean #, certified at # #, ... under PGD # #; # s": 1,
    },
    "pate": {'{"queries": 8, ..., "labels": 8, "labels right": #, "accuracy": #}': 2},
    "perplexity": {
        "p...: # documents to learn, # to test, # bytes, # left out: ...": 3,
        "base: # parameters, # public tokens, # minutes, perplexity # on public test documents": 1,
        "| base less # | # | # | # to # | |": 2,
        "| ... | # | # | # to # | |": 9,
        "all parts: # minutes": 1,
    },
    "private_prediction": {
        "epsilon #; 20 inputs; a teacher alone: # %": 1,
        "# # # (s #) # (s #)": 2,
    },
    "rare_classes": {
        "| equal | # | # | # | # | # | # | ... |": 1,
        "| rates-4 | # | # | # | # | # | # | ... |": 1,
    },
    "residual": {
        "| ... | ... | # | # | # | # | # | # | # | | 1 |": 4,
        "| ...gamma # | # | # | # | # | 1 |": 10,
    },
    "scaling": {
        "1 # # # #% strong; ...": 1,
        "1 # # # #% weak; ...": 1,
        "1 # # # for the fit; ...": 2,
        "model: # examples/s per worker, # ms fixed, # us per hop ...": 1,
        "without 1 workers, batch #: ...": 3,
        "#" + " #%" * 7 + " # workers...": 16,
        "MEASURED with one worker ...": 1,
        "| whole | # | # | # | # | # | # | # | # | #% | # |": 3,
        "| sharded... | # | # | # | # | # | # | # | # | #% | # |": 6,
        "1 # #% load average ...": 1,
        "scheduling alone, # instant actors ...": 4,
        "driver with Ray, 2 actors, ...: 5,000 chunks, #/s, ...": 1,
    },
    "sde": {
        "no noise: features #, reversed #, exact inverse #": 1,
        "...tive, gamma #: features #, reversed ... #, reversed without #, mean of 2 reversed #": 4,
    },
    "serving": {
        "linear: 10 draws, 1 replicas, 2 clients: # answers/s, bare loop #/s: ... ['200']": 1,
        "milliseconds of processor time an answer: ... #": 1,
    },
    "sharding": {"# 2 sharded # # # # # #": 2},
    "smoothing": {
        '{"row": ..., "accuracy": #}': 2,
        "accuracy, ...: mean, and less none: # [...], # [...]": 2,
    },
    "speed": {
        "cnn, 1 threads, # s: best of Opacus ..., ordinary ..., channels-last ...": 1,
        "certify-cnn, 1 threads, # s: bare forward ...": 1,
        "# minutes; done": 1,
    },
    "splits": {
        "...: #": 4,
        "| 0 | # | # | # (# to #) | | # (# to #) |": 1,
        "| 0.05 | # | # | # (# to #) | # | # (# to #) |": 1,
        "| as it is | #, #, # | # | # (# to #) | | # (# to #) |": 1,
        "| centre # | #, #, # | # | # (# to #) | # | # (# to #) |": 1,
    },
    "start_up": {"| table MLP | # # | # | # | # | # | # |": 2},
    "spreading": {"| # | # | # | # [#, #] | # | # | # [#, #] |": 4},
    "refusals": {"| `dpdist audit ...nothing...` | # | |": 2},
    "toy": {"smoothing #: # % nearer the flat minimum; loss: mean #, deviation #, ... #": 3},
    "training": {
        "ours # ms/step # examples/s": 2,
        "opacus ... # ms/step # examples/s": 8,
        "against ...: # x (to reach ... #) ...": 6,
        "ours # MiB above the libraries, # MiB in all": 1,
    },
    "training_phases": {
        "round 0: ... # steps/s": 3,
        "... # (#) # (#) # (#)": 12,
        "steps/s # # #": 1,
    },
    "training_ray": {
        "round 0: Ray # steps/s, alone #": 1,
        "2 Ray Train workers / 2 independent processes: #": 1,
    },
    "transdenoiser": {"| no-dp | none" + " | #" * 8 + " |": 1},
}
(LISTED,) = re.findall(
    r"^EXPERIMENTS := ((?:.*\\\n)*.*)$", (CHECKOUT / "Makefile").read_text(), re.MULTILINE
)
EXPERIMENTS = set(LISTED.replace("\\", "").split())
NIGHTLY = (EXPERIMENTS - {"speed"}) | {
    "language_models", "scaling", "serving", "training", "training_phases", "training_ray",
}  # fmt: skip
NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"


def pattern(shape: str) -> re.Pattern[str]:
    """Return the expression that a whole line of this shape matches."""
    told = {"#": NUMBER, "...": ".*", "": ""}
    parts = re.split(r"(#|\.\.\.|\s+)", shape)
    return re.compile("".join(r"\s+" if p.isspace() else told.get(p, re.escape(p)) for p in parts))


def files() -> dict[Path, int]:
    """Return when each file beside the scripts and of the docs was last written."""
    kept = [*BENCHMARKS.rglob("*"), *(CHECKOUT / "docs").rglob("*")]
    return {path: path.stat().st_mtime_ns for path in kept if "__pycache__" not in path.parts}


def quick(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in an empty folder, with an empty home."""
    (folder / "home").mkdir()
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick"],
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
    homes = {name: tmp_path_factory.mktemp(name) for name in asked}
    yield {name: (home, pool.submit(quick, name, home)) for name, home in homes.items()}
    pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def before() -> dict[Path, int]:
    return files()


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name in NIGHTLY)) for name in SCRIPTS],
)
def test_the_script_runs(name, before, runs):
    """A new script needs `--quick` (`_common.parse_arguments`) and its shapes above."""
    home, running = runs[name]
    done = running.result()
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.strip() for line in done.stdout.splitlines()]
    found = {
        shape: sum(pattern(shape).fullmatch(line) is not None for line in lines)
        for shape in SHAPES[name]
    }
    assert found == SHAPES[name], done.stdout
    assert not re.search(r"\bnan\b", done.stdout), done.stdout
    assert [path for path in home.rglob("*") if path.is_file()] == [], "files outside scratch()"
    assert files() == before, "files of the checkout"


def test_quick_stands_for_defaults_and_writes_into_a_temporary_folder(monkeypatch):
    common = load("_common", monkeypatch)
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
    common = load("_common")
    monkeypatch.setenv("DPDIST_DATA_ROOT", str(tmp_path))
    for given, code in ((None, 0), (tmp_path, 2)):
        with pytest.raises(SystemExit) as stopped:
            common.require_data(given, "mnist")
        assert stopped.value.code == code
        assert f"not run: needs mnist as Parquet under {tmp_path}" in capsys.readouterr().out
    (tmp_path / "mnist").mkdir()
    assert common.require_data(None, "mnist") == tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dplis", ["--item", "Table 2"]),
        ("flagship", []),
        ("functional", []),
        ("hidden", []),
        ("membership", []),
        ("papers_run", []),
        ("pate", []),
        ("private_prediction", []),
        ("residual", []),
        ("smoothing", []),
        ("smoothing", ["docstrings-lstm"]),
        ("transdenoiser", []),
    ],
)
def test_a_script_that_needs_data_says_so(name, words, tmp_path, monkeypatch, capsys):
    """It has no results to begin with: what is there is not made again."""
    monkeypatch.setenv("DPDIST_DATA_ROOT", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [f"{name}.py", *words])
    script = load(name)
    monkeypatch.setattr(script, "RESULTS", tmp_path / "results.jsonl", raising=False)
    with pytest.raises(SystemExit) as stopped:
        script.main()
    assert stopped.value.code == 0
    assert f"{name}.py: not run: needs " in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.whole
def test_make_bench_all_runs_every_script_but_the_experiments():
    assert EXPERIMENTS <= set(SCRIPTS) == set(SHAPES)
    asked = ["make", "--no-print-directory", "-n", "-C", str(CHECKOUT), "bench-all"]
    printed = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    (loop,) = [line for line in printed.splitlines() if line.startswith("for script in ")]
    assert re.findall(r"benchmarks/(\w+)\.py", loop) == sorted(set(SCRIPTS) - EXPERIMENTS)
