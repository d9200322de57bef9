"""The searched space: what may be searched, how values are drawn and put into a recipe."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import yaml
from scipy import stats

from dpdist.config.search import Domain
from dpdist.core.errors import UserError
from dpdist.runs.recipe import parse_recipe
from dpdist.tuning.space import (
    apply_values,
    check_space,
    domain_value,
    draw_values,
    settings_of_recipe,
)


def test_every_kind_of_domain_has_its_distribution():
    """Kolmogorov-Smirnov and chi-square on 4,000 draws; each fails by chance once in 10^4 seeds."""
    uniforms = np.random.default_rng(3).random(4000)

    def drawn(**kind) -> list:
        return [domain_value(Domain(**kind), float(u)) for u in uniforms]

    logs = (np.log(drawn(log_uniform=(0.1, 10.0))) - math.log(0.1)) / math.log(100)
    assert stats.kstest(logs, "uniform").pvalue > 1e-4
    assert stats.kstest(drawn(uniform=(2.0, 5.0)), "uniform", args=(2, 3)).pvalue > 1e-4
    for values, cells in ((drawn(integer=(3, 7)), 5), (drawn(choice=("a", "b", "c")), 3)):
        counts = np.unique(values, return_counts=True)[1]
        assert len(counts) == cells and stats.chisquare(counts).pvalue > 1e-4
    top = 1 - 2.0**-53  # ends belong to a domain, and nothing lies beyond
    assert domain_value(Domain(integer=(1, 3)), top) == 3
    assert 0.1 <= domain_value(Domain(log_uniform=(0.1, 0.3)), top) <= 0.3


def test_fields_that_only_go_together_are_set_together(recipe):
    """Each value of the list brings its own values of other fields, in the list's order, or the
    same one."""
    linked = {"certify.sigma": [0.5, 0.25, 0.125], "training.batch_size": [50, 100, 200]}
    space = {
        "method.sigma": {"choice": [0.1, 0.2, 0.4], "linked": linked},
        "model.options.width": {"integer": [2, 6], "linked": ["certify.max_inputs"]},
    }
    asked = recipe(
        method={"name": "input-noise", "sigma": 0.1}, model="small-cnn", tune={"space": space}
    )
    check_space(asked, "r.yaml")
    width = draw_values(asked.tune, lambda: 0.99)["model.options.width"]
    found = [
        apply_values(asked, {"method.sigma": each, "model.options.width": width}, "")
        for each in (0.1, 0.2, 0.4)
    ]
    assert [each.certify.sigma for each in found] == [0.5, 0.25, 0.125]
    priced = {each.training.batch_size for each in settings_of_recipe(asked, "r.yaml")}
    assert [each.training.batch_size for each in found] == sorted(priced) == [50, 100, 200]
    assert found[0].model.options == {"width": 6} and found[0].certify.max_inputs == 6
    assert found[0].tune is None
    assert parse_recipe(yaml.safe_load(asked.to_yaml()), "again").tune == asked.tune


@pytest.mark.parametrize(
    ("field", "domain", "key"),
    [
        ("privacy.epsilon", {"choice": [1, 2]}, "privacy.epsilon"),
        ("privacy.delta", {"choice": [1e-5]}, "privacy.delta"),
        ("privacy.run_key", {"choice": ["00" * 32]}, "privacy.run_key"),
        ("data.max_train", {"integer": [10, 20]}, "data.max_train"),
        ("certify.alpha", {"choice": [0.1]}, "certify.alpha"),
        ("method.radius", {"uniform": [1, 2]}, "method.radius"),
        ("nothing.at.all", {"uniform": [1, 2]}, "nothing"),
        ("training.batch_size", {"uniform": [100, 200.5]}, "training.batch_size"),
        ("certify.sigma", {"choice": [1], "linked": ["training.learning_rate"]},
         "training.learning_rate"),
    ],
)  # fmt: skip
def test_what_cannot_be_searched(recipe, field, domain, key):
    asked = recipe(tune={"space": {field: domain}})
    with pytest.raises(UserError, match=re.escape(key)):
        check_space(asked, "r.yaml")


def test_noise_is_not_searched_when_epsilon_fixes_it(recipe):
    asked = recipe(
        privacy={"epsilon": 3.0, "noise_multiplier": None},
        tune={"space": {"privacy.noise_multiplier": {"uniform": [1, 2]}}},
    )
    with pytest.raises(UserError, match=r"privacy\.noise_multiplier"):
        check_space(asked, "r.yaml")


@pytest.mark.parametrize("name", ["geometric", "poisson"])
@pytest.mark.parametrize("what", [{"searcher": "optuna"}, {"asha": {"rungs": 2}}])
def test_adaptive_searchers_are_refused_under_the_selection_laws(recipe, name, what):
    with pytest.raises(UserError, match="num_trials"):
        recipe(tune={"num_trials": {"name": name, "mean": 3.0}, **what})
    fixed = {"name": "fixed", "runs": 4, "mean": None}
    assert recipe(tune={"num_trials": fixed, **what}).tune.num_trials.runs == 4


SECTIONS = {
    "privacy": {"noise_multiplier": 4.0, "delta": 1e-4, "batch_cap": 400},
    "certify": {"sigma": 0.25, "n": 100, "max_inputs": 5, "alpha": 0.01},
}


@pytest.mark.parametrize(
    ("section", "changed", "leaf"),
    [
        ("privacy", {"delta": 1e-2}, "privacy.delta"),
        ("privacy", {"adjacency": "replace-one"}, "privacy.adjacency"),
        ("privacy", {"budget": "elsewhere"}, "privacy.budget"),
        ("privacy", {"epsilon": 9.0, "noise_multiplier": None}, "privacy.epsilon"),
        ("privacy", {"batch_cap": None}, "privacy.batch_cap"),  # left out: back to its default
        ("certify", {"alpha": 0.2}, "certify.alpha"),
        ("certify", None, "certify.alpha"),
    ],
)
def test_a_section_changes_nothing_that_its_fields_could_not(recipe, section, changed, leaf):
    """Nor does one that is named beside another field."""
    value = None
    if changed is not None:
        value = {k: v for k, v in (SECTIONS[section] | changed).items() if v is not None}
    spaces = [{section: {"choice": [SECTIONS[section], value]}}]
    if value is not None:
        spaces.append({"model.options": {"choice": [value], "linked": [section]}})
    for space in spaces:
        with pytest.raises(UserError, match=rf"makes {re.escape(leaf)} "):
            check_space(recipe(**SECTIONS, tune={"space": space}), "r.yaml")
