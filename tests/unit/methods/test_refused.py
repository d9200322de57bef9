"""A recipe whose settings do not fit its method raises an error that names the key."""

from __future__ import annotations

from typing import Any

import pytest
import test_noisy_records
import test_pate
import test_private_prediction

from dpdist.core.errors import UserError
from dpdist.runs.recipe import parse_recipe

BASE: dict[str, Any] = {
    "name": "x",
    "data": {"name": "digits"},
    "model": "linear",
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-4},
    "training": {"batch_size": 1, "steps": 1, "learning_rate": 1.0},
}
FUNCTIONAL = BASE | {
    "method": {"name": "functional", "rounds": 2},
    "model": {"name": "scattering", "options": {"widths": [1.0], "stride": 1, "cosines": 3}},
}
AGREED = {"name": "input-noise", "sigma": 0.25, "augmentations": 2, "consistency": 5}
METHODS: dict[str, dict[str, Any]] = {
    "pate": test_pate.RAW,
    "private-prediction": test_private_prediction.RAW,
    "noisy-records": test_noisy_records.RAW,
    "functional": FUNCTIONAL,
    "consistency": BASE | {"method": AGREED},
    "dp-sgd": BASE | {"method": "dp-sgd"},
}
ARCHIVED = {"archive": "s3://a/b", "archive_private": True}
# The method, the section, what is changed in it, and the key that must be named.
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("pate", "method", {"answers": 30}, "answers"),
    ("pate", "method", {"threshold": 0.0}, "threshold and screening"),
    ("pate", "method", {"screening": 1e-310}, "screening"),
    ("pate", "data", {"public": 0.0}, "data.public"),
    ("pate", "data", {"max_train": 60}, "data.max_train"),
    ("pate", "privacy", {"nominal_records": None, "batch_cap": 60}, "privacy.batch"),
    ("pate", "audit", {"kind": "canaries"}, "audit"),
    ("pate", "resources", ARCHIVED, "votes"),
    ("private-prediction", "data", {"max_train": 100}, "data.max_train"),
    ("private-prediction", "privacy", {"clip_norm": 2.0}, "privacy"),
    ("private-prediction", "certify", {"sigma": 0.5}, "certify"),
    ("private-prediction", "audit", {"kind": "mechanism"}, "audit"),
    ("private-prediction", "resources", ARCHIVED, "resources"),
    ("private-prediction", "method", {"evaluate": 7}, "evaluate"),
    ("noisy-records", "privacy", {"adjacency": "add-or-remove-one"}, "replace-one"),
    ("noisy-records", "audit", {"kind": "canaries"}, "audit"),
    ("noisy-records", "data", {"public": 0.1}, "data.public"),
    ("noisy-records", "data", {"labels": [3, 5]}, "data.labels"),
    ("dp-sgd", "privacy", {"clipping": "none"}, "clipping"),
    ("functional", "privacy", {"clip_norm": 2.0}, "privacy.clipping"),
    ("functional", "privacy", {"batch_cap": 50}, "batch_cap"),
    ("functional", "audit", {"kind": "canaries"}, "audit"),
    ("functional", "method", {"center": 1.0}, "method.center"),
    ("functional", "method", {"refine": 0.95}, "method"),
    ("consistency", "method", {"augmentations": 1}, "augmentations"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "section", "given", "key"), REFUSED)
def test_what_does_not_go_with_a_method_is_refused(
    name: str, section: str, given: dict[str, Any], key: str
) -> None:
    raw = METHODS[name]
    parse_recipe(raw, "test")
    with pytest.raises(UserError) as refused:
        parse_recipe(raw | {section: raw.get(section, {}) | given}, "test")
    assert key in str(refused.value)
