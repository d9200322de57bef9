"""The exact list of files after every command, who may read them, and that no key is in them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.local_execution import command, run_without_ray
from support.recipes import write_recipe
from support.settings import sets

from dpdist.runs.archive import publishable_files
from dpdist.runs.folder import RunFolder
from dpdist.tuning.manifest import SearchFolder, read_trials

RECIPE = {
    "name": "small",
    "data": {"name": "digits", "max_train": 400},
    "model": "linear",
    "privacy": {"noise_multiplier": 2.0, "delta": 1e-4},
    "training": {"batch_size": 50, "steps": 5, "learning_rate": 0.1},
    "certify": {"sigma": 0.25, "n": 50, "n0": 10, "max_inputs": 4},
    "resources": {"workers": 2, "cpus_per_worker": 1},
}
SEARCH = {
    "space": {"training.learning_rate": {"log_uniform": [0.1, 1.0]}},
    "num_trials": {"name": "fixed", "runs": 2},
}
BEGUN = {"recipe.yaml", "run.json", "evaluation.json"}
RELEASE = {
    "release/model.safetensors", "release/model.json", "release/privacy_card.json",
    "release/privacy_card.md", "release/release.json", "release/README.md", "release/SHA256SUMS",
}  # fmt: skip
CERTIFIED = {
    "certificates.parquet", "journal.jsonl", "rate.json", "settings.json", "timings.csv",
}  # fmt: skip
PRIVATE = {
    "run.key", "plan.json", "begun-with.json", "ledger.jsonl", "ledger.anchor", "data.json",
    "trained.json", "progress.json", "metrics.jsonl", "workers.jsonl",
    "model/model.json", "model/model.safetensors", "model/trained-tensors.json",
    "checkpoints/step-00000005/state.safetensors", "checkpoints/step-00000005/done.json",
}  # fmt: skip
_OF_LOOP = ("checkpoints", "progress", "metrics", "workers")


@pytest.fixture
def dpdist(tmp_path, monkeypatch, capsys):
    """Run a command without Ray; it must end well."""
    run_without_ray(monkeypatch)

    def run(*arguments: object, code: int = 0) -> str:
        done = command(monkeypatch, capsys, tmp_path, *arguments)
        assert done.code == code, done.err
        return done.out

    return run


def write(tmp_path: Path, **more) -> Path:
    return write_recipe(tmp_path, {**RECIPE, **more}, f"{more.get('name', 'small')}.yaml")


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def outside(run: Path) -> set[str]:
    return {name for name in files(run) if not name.startswith("private/")}


def public(run: Path) -> set[str]:
    """Those outside, without the report's pages."""
    return {name for name in outside(run) if not name.startswith("report/")}


def check_secrecy(run: Path, keys: list[bytes]) -> None:
    """Only the owner reads private/; no key is anywhere else, as bytes or as text."""
    private = run / "private"
    assert private.stat().st_mode & 0o777 == 0o700
    readable = {p for p in private.rglob("*") if p.is_file() and p.stat().st_mode & 0o777 != 0o600}
    assert not readable, "not only by the owner"
    for path in run.rglob("*"):
        if path.is_file() and path.name not in ("run.key", "manifest.json"):
            content = path.read_bytes()
            for key in keys:
                assert key not in content and key.hex().encode() not in content, path


def key_of(run: Path) -> bytes:
    return bytes.fromhex((run / "private" / "run.key").read_text())


@pytest.mark.slow
def test_train_certify_attack_report_release(dpdist, tmp_path):
    recipe = write(tmp_path)
    run = tmp_path / "runs" / "small"
    dpdist("run", "--until", "train", recipe)
    assert outside(run) == BEGUN
    assert files(run / "private") == PRIVATE
    assert files(tmp_path) - {f"runs/small/{f}" for f in files(run)} == {"small.yaml"}
    check_secrecy(run, [key_of(run)])

    dpdist("release", "small")
    assert outside(run) == BEGUN | RELEASE

    dpdist("run", recipe)
    certified = {f"certificates/sigma-0.25-fixed-n-50/{name}" for name in CERTIFIED}
    pages = outside(run) - public(run)
    assert public(run) == BEGUN | RELEASE | certified
    assert "report/index.html" in pages and {Path(p).suffix for p in pages} <= {".html", ".svg"}
    dpdist("attack", "small", *sets("attack", "max_inputs=4", "attacks=[fgsm]", "sizes=[0.1]"))
    attacked = {n for n in outside(run) if n.startswith("attacks/linf-steps-10-first-4/")}
    assert {Path(n).name for n in attacked} == {"attacks.parquet", "journal.jsonl", "settings.json"}
    assert public(run) == BEGUN | RELEASE | certified | attacked
    # None of these commands touched what is private, but for the log of a session.
    assert files(run / "private") - {"ray.log"} == PRIVATE
    check_secrecy(run, [key_of(run)])
    # What may leave a cluster is what lies outside private/, but for what continues a run.
    leaving = {p.as_posix() for p in publishable_files(RunFolder(run))}
    assert leaving == outside(run) - {"run.json"}


@pytest.mark.slow
def test_tune(dpdist, tmp_path):
    recipe = write(tmp_path, name="searched", tune=SEARCH, resources={"workers": 1})
    run = tmp_path / "runs" / "searched"
    dpdist("tune", recipe)
    assert outside(run) == BEGUN | {"search.yaml", "trials.json"}
    inside = {n for n in files(run / "private") if not n.startswith("search/")}
    own = {n for n in PRIVATE if not n.startswith(_OF_LOOP)}
    assert inside == own | {"search.json"}
    dpdist("release", "searched")
    assert outside(run) == BEGUN | {"search.yaml", "trials.json"} | RELEASE
    trials = read_trials(SearchFolder(RunFolder(run)))
    keys = [key_of(run / "private/search/trials" / f"{t.number:05d}") for t in trials]
    check_secrecy(run, [*keys, *(t.key for t in trials)])
    assert (run / "private/search").stat().st_mode & 0o777 == 0o700
    leaving = {p.as_posix() for p in publishable_files(RunFolder(run))}
    assert leaving == outside(run) - {"run.json", "search.yaml", "trials.json"}


def test_pretrain(dpdist, tmp_path):
    training = {"batch_size": 20, "steps": 3, "learning_rate": 0.1}
    data = {"name": "digits", "public": 0.5}
    recipe = write(
        tmp_path, data=data, model={"name": "linear", "initial": str(tmp_path / "initial")},
        public={"training": training},
    )  # fmt: skip
    dpdist("run", recipe, "--until", "pretrain")
    made = {"model.json", "model.safetensors", "provenance.json", "records.npy"}
    assert files(tmp_path / "initial") == made
    assert files(tmp_path) == {"small.yaml"} | {f"initial/{name}" for name in made}


def test_a_refused_command_leaves_nothing(dpdist, tmp_path):
    recipe = write(tmp_path, training={**RECIPE["training"], "batch_size": 5000})
    dpdist("run", "--until", "train", recipe, code=2)
    dpdist("run", recipe, code=2)
    dpdist("release", "small", code=2)
    assert files(tmp_path) == {"small.yaml"}
