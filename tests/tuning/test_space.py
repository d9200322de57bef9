"""The searched space: what may be searched, how values are drawn and put into a recipe."""

from __future__ import annotations

import math

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


def test_ends_belong_to_a_domain():
    top = 1 - 2.0**-53
    assert domain_value(Domain(integer=(1, 3)), top) == 3
    assert domain_value(Domain(choice=(1, 2)), top) == 2
    assert domain_value(Domain(log_uniform=(0.1, 0.3)), 0.0) == pytest.approx(0.1, rel=1e-12)
    assert 0.1 <= domain_value(Domain(log_uniform=(0.1, 0.3)), top) <= 0.3


def test_values_arrive_in_every_field_named(recipe):
    asked = recipe(
        method={"name": "input-noise", "sigma": 0.1},
        model={"name": "small-cnn", "options": {"width": 4}},
        tune={
            "space": {
                "certify.sigma": {"choice": [0.12, 0.5], "linked": ["method.sigma"]},
                "model.options.width": {"integer": [2, 6]},
            }
        },
    )
    check_space(asked, "r.yaml")
    values = draw_values(asked.tune, lambda: 0.99)
    chosen = apply_values(asked, values, "r.yaml")
    assert chosen.certify.sigma == chosen.method.sigma == 0.5
    assert chosen.model.options == {"width": 6}
    assert chosen.tune is None and asked.certify.sigma == 0.25


def test_fields_that_only_go_together_are_set_together(recipe):
    """Each value of the list brings its own values of other fields, in the list's order."""
    space = {
        "method.sigma": {
            "choice": [0.1, 0.2, 0.4],
            "linked": {"certify.sigma": [0.5, 0.25, 0.125], "training.batch_size": [50, 100, 200]},
        }
    }
    asked = recipe(method={"name": "input-noise", "sigma": 0.1}, tune={"space": space})
    check_space(asked, "r.yaml")
    found = [apply_values(asked, {"method.sigma": each}, "") for each in (0.1, 0.2, 0.4)]
    assert [each.certify.sigma for each in found] == [0.5, 0.25, 0.125]
    batches = [each.training.batch_size for each in found]
    assert batches == [50, 100, 200]
    priced = [each.training.batch_size for each in settings_of_recipe(asked, "r.yaml")]
    assert priced == batches
    assert parse_recipe(yaml.safe_load(asked.to_yaml()), "again").tune == asked.tune
    assert "with certify.sigma 0.5, 0.25, 0.125" in asked.tune.space["method.sigma"].description
    with pytest.raises(UserError, match=r"must be one of 0\.1, 0\.2, 0\.4.*got 0\.3"):
        apply_values(asked, {"method.sigma": 0.3}, "r.yaml")


def test_whole_methods_can_be_compared(recipe):
    methods = [{"name": "dp-sgd"}, {"name": "dplis", "radius": 5}]
    asked = recipe(tune={"space": {"method": {"choice": methods}}})
    check_space(asked, "r.yaml")
    assert apply_values(
        asked, {"method": methods[1], "training.learning_rate": 1}, ""
    ).method.augmentations


@pytest.mark.parametrize(
    ("field", "domain", "message"),
    [
        ("privacy.epsilon", {"choice": [1, 2]}, "guarantee of training and search together"),
        ("privacy.delta", {"choice": [1e-5]}, "a term of the guarantee"),
        ("privacy.run_key", {"choice": ["00" * 32]}, "a term of the guarantee"),
        ("data.max_train", {"integer": [10, 20]}, "the same records"),
        ("resources.workers", {"integer": [1, 2]}, "changes nothing"),
        ("certify.alpha", {"choice": [0.1]}, "error of a certificate"),
        ("training.learning_rat", {"uniform": [1, 2]}, "no such field"),
        ("method.radius", {"uniform": [1, 2]}, "no such field"),
        ("nothing.at.all", {"uniform": [1, 2]}, "no nothing section"),
        ("training.batch_size", {"uniform": [100, 200.5]}, "training.batch_size"),
        ("training.momentum", {"uniform": [0, 2]}, "training.momentum: must be < 1, got 2"),
        ("certify.sigma", {"choice": [1], "linked": ["training.learning_rate"]}, "set twice"),
    ],
)
def test_what_cannot_be_searched(recipe, field, domain, message):
    asked = recipe(tune={"space": {field: domain}})
    with pytest.raises(UserError, match=r"r\.yaml: ") as error:
        check_space(asked, "r.yaml")
    assert message in str(error.value)


def test_noise_is_not_searched_when_epsilon_fixes_it(recipe):
    asked = recipe(
        privacy={"epsilon": 3.0, "noise_multiplier": None},
        tune={"space": {"privacy.noise_multiplier": {"uniform": [1, 2]}}},
    )
    with pytest.raises(UserError, match=r"give privacy\.noise_multiplier instead"):
        check_space(asked, "r.yaml")


@pytest.mark.parametrize(
    "num_trials", [{"name": "geometric", "mean": 3.0}, {"name": "poisson", "mean": 2}]
)
@pytest.mark.parametrize("what", [{"searcher": "optuna"}, {"asha": {"rungs": 2}}])
def test_adaptive_searchers_are_refused_under_the_selection_laws(recipe, num_trials, what):
    with pytest.raises(UserError, match="num_trials"):
        recipe(tune={"num_trials": num_trials, **what})
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
        ("privacy", {"run_key": "00" * 32}, "privacy.run_key"),
        ("privacy", {"adjacency": "replace-one"}, "privacy.adjacency"),
        ("privacy", {"batch_cap": 500}, "privacy.batch_cap"),
        ("privacy", {"budget": "elsewhere"}, "privacy.budget"),
        ("privacy", {"allow_large_delta": True}, "privacy.allow_large_delta"),
        ("privacy", {"epsilon": 9.0, "noise_multiplier": None}, "privacy.epsilon"),
        ("privacy", {"batch_cap": None}, "privacy.batch_cap"),  # left out: back to its default
        ("certify", {"alpha": 0.2}, "certify.alpha"),
        ("certify", {"alpha": None}, "certify.alpha"),
        ("certify", None, "certify.alpha"),
    ],
)
def test_a_section_changes_nothing_that_its_fields_could_not(recipe, section, changed, leaf):
    value = None
    if changed is not None:
        value = {k: v for k, v in (SECTIONS[section] | changed).items() if v is not None}
    choice = {"choice": [SECTIONS[section], value]}
    asked = recipe(**SECTIONS, tune={"space": {section: choice}})
    with pytest.raises(
        UserError, match=rf"^r\.yaml: tune\.space\.{section}: makes {leaf} "
    ) as error:
        check_space(asked, "r.yaml")
    assert "cannot be searched" in str(error.value)


def test_nor_does_a_section_named_beside_another_field(recipe):
    other = SECTIONS["privacy"] | {"delta": 1e-2}
    domain = {"choice": [other], "linked": ["privacy"]}
    asked = recipe(**SECTIONS, tune={"space": {"model.options": domain}})
    with pytest.raises(UserError, match=r"makes privacy\.delta 0\.01, the recipe says 0\.0001"):
        check_space(asked, "r.yaml")


def test_sections_that_keep_what_is_fixed_can_be_compared(recipe):
    finer = SECTIONS["privacy"] | {"clip_norm": 0.5, "noise_multiplier": 5.0}
    asked = recipe(
        **SECTIONS, tune={"space": {"privacy": {"choice": [SECTIONS["privacy"], finer]}}}
    )
    check_space(asked, "r.yaml")
    (first, second) = settings_of_recipe(asked, "r.yaml")
    assert first.privacy.noise_multiplier == 4.0
    assert second.privacy.noise_multiplier == 5.0
