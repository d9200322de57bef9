"""A small search on the built-in digits, whose trials run here instead of in Ray Tune."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dpdist.cluster.session import connect
from dpdist.cluster.versions import PACKAGES, package_fingerprints
from dpdist.core import optional_imports
from dpdist.privacy import accounting
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe, parse_recipe
from dpdist.tuning.manifest import read_trials
from dpdist.tuning.search import Search, prepare_search
from dpdist.tuning.trial import continue_recipe_trial, run_trial
from support.recipes import merge_sections


@pytest.fixture
def coarse_grid(monkeypatch):
    """Ten times coarser: still upper bounds, and what is said of them here depends on no grid."""
    monkeypatch.setattr(accounting, "FINEST_GRID", 1e-3)
    accounting._cached_epsilon.cache_clear()
    accounting._cached_coarse_epsilon.cache_clear()
    yield
    accounting._cached_epsilon.cache_clear()
    accounting._cached_coarse_epsilon.cache_clear()


@pytest.fixture
def recipe():
    """A recipe maker: sections given are merged into a linear model's search."""

    def make(**sections: Any) -> Recipe:
        raw: dict[str, Any] = {
            "name": "small",
            "data": {"name": "digits"},
            "model": "linear",
            "privacy": {"noise_multiplier": 4.0, "delta": 1e-4},
            "training": {"batch_size": 200, "steps": 4, "learning_rate": 0.5},
            "certify": {"sigma": 0.25, "n": 100, "max_inputs": 5},
            "tune": {
                "space": {"training.learning_rate": {"log_uniform": [0.1, 1.0]}},
                "num_trials": {"name": "geometric", "mean": 3.0},
            },
        }
        return parse_recipe(merge_sections(raw, sections), "r.yaml")

    return make


@pytest.fixture
def begin(tmp_path):
    """Prepare (or continue) a search in a run folder under tmp_path."""

    def go(recipe: Recipe, **options: Any) -> Search:
        return prepare_search(recipe, RunFolder(tmp_path / recipe.name), "r.yaml", **options)

    return go


@pytest.fixture
def run_trials():
    """Run the trials of a search one after another in this process, as Ray Tune would ask."""

    from dpdist.tuning.searchers import ManifestSearcher  # imports Ray Tune

    def go(search: Search, numbers: list[int] | None = None) -> list[list[tuple[int, float]]]:
        trials = read_trials(search.folder)
        searcher = ManifestSearcher(search.folder, trials, search.trial_noise_multiplier)
        reports = []
        for index in range(len(trials)):
            config = searcher.suggest(f"id-{index}")
            assert config == {"trial": index}
            if numbers is not None and index not in numbers:
                continue
            seen: list[tuple[int, float]] = []
            run_trial(
                search.folder.run.path,
                package_fingerprints(PACKAGES),
                index,
                lambda rung, score, seen=seen: seen.append((rung, score)),
                continue_recipe_trial,
            )
            reports.append(seen)
        assert searcher.suggest("one too many") == ManifestSearcher.FINISHED
        return reports

    return go


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A session of Ray of two CPUs, which the searches of a file share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        log = tmp_path_factory.mktemp("ray") / "ray.log"
        with connect(log, cpus=2, worker_setup=optional_imports.install_torchvision_hook):
            yield
