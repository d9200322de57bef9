"""An option that nothing would use is refused by name, where a new run is asked for."""

from __future__ import annotations

from typing import Any

import pytest

from dpdist.core.errors import UserError
from dpdist.runs.recipe import (
    built_in_recipes,
    load_recipe,
    paper_recipes,
    parse_recipe,
    refuse_unused,
)

PRIVATE = {"noise_multiplier": 1.0, "delta": 1e-4}
OPEN = {"noise_multiplier": 0.0, "delta": 1e-4, "clipping": "none"}
TUNE = {
    "space": {"training.learning_rate": {"choice": [0.1, 0.2]}},
    "num_trials": {"name": "fixed", "runs": 2},
}


def hidden(**more: Any) -> dict[str, Any]:
    return {"method": {"name": "secure-sgd", "redistribution": None, **more}}


def loop(**more: Any) -> dict[str, Any]:
    return {"training": {"batch_size": 50, "steps": 5, "learning_rate": 0.1, **more}}


# The key that is refused: with sections in which nothing uses it, and with others in which it is.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "training.factor": (loop(factor=0.5), loop(factor=0.5, schedule="step", milestones=[0.5])),
    "privacy.clip_norm": (
        {"privacy": OPEN | {"clip_norm": 2.0}}, {"privacy": PRIVATE | {"clip_norm": 2.0}}),
    "privacy.max_records_per_user": (
        {"privacy": PRIVATE | {"max_records_per_user": 3}},
        {
            "privacy": PRIVATE | {"max_records_per_user": 3, "unit": "user"},
            "data": {"name": "own", "root": "/data"} | {"columns": {"user": "patient"}},
        },
    ),
    "privacy.budget_composition": (
        {"privacy": PRIVATE | {"budget": "/budgets", "budget_composition": "non-adaptive"}},
        {"privacy": PRIVATE | {
            "budget": "/budgets", "budget_ceiling": 9.0, "budget_composition": "non-adaptive"}},
    ),
    "tune.score.private_eval_fraction": (
        {"tune": TUNE | {"score": {"public": {"name": "digits"}, "private_eval_fraction": 0.2}}},
        {"tune": TUNE | {"score": {"private_eval_fraction": 0.2}}},
    ),
    "method.norm": (hidden(sigma=0.5, norm="linf"), hidden(norm="linf")),
}  # fmt: skip


def recipe_of(sections: dict[str, Any]) -> Any:
    raw = {"name": "r", "data": {"name": "digits"}, "model": "linear", "privacy": PRIVATE, **loop()}
    return parse_recipe(raw | sections, "r.yaml")


@pytest.mark.parametrize("key", CASES)
def test_an_option_that_nothing_would_use_is_refused(key):
    ignored, used = CASES[key]
    with pytest.raises(UserError) as caught:
        refuse_unused(recipe_of(ignored), "r.yaml")
    assert f"r.yaml: {key}: " in str(caught.value)
    refuse_unused(recipe_of(used), "r.yaml")


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [*built_in_recipes(), *paper_recipes()], ids=lambda path: path.stem
)
def test_recipes_that_come_along_say_nothing_in_vain(path):
    refuse_unused(load_recipe(path), str(path))
