"""Nobody asks a certificate which kind it is: the source is read for it."""

from __future__ import annotations

import pytest

from dpdist.certification.certificate import Certificate
from dpdist.certification.cohen import Cohen
from dpdist.certification.expected_scores import BettingScores, ExpectedScores
from dpdist.certification.registry import CERTIFICATES, settings_of
from dpdist.certification.sequential import Anytime, TargetRadius, TargetScores
from dpdist.certification.variants import HoeffdingVotes, TwoClass
from dpdist.core.errors import UserError

OPTIONS = {"mode": "fixed", "noise": "gaussian", "bound": "hoeffding",
           "norm": "l2", "one_sided": False}  # fmt: skip
SECTIONS = {
    Cohen: {"sigma": 0.5},
    TargetRadius: {"sigma": 0.5, "mode": "target-radius", "radii": [0.1]},
    Anytime: {"sigma": 0.5, "mode": "anytime"},
    TwoClass: {"sigma": 0.5, "mode": "two-class"},
    HoeffdingVotes: {"sigma": 0.5, "bound": "hoeffding"},
    TargetScores: {"mode": "target-scores", "radii": [0.1]},
    BettingScores: {"bound": "betting"},
    ExpectedScores: {},
}


@pytest.mark.parametrize("kind", CERTIFICATES)
def test_no_option_of_another_certificate_is_ignored(kind: type[Certificate]) -> None:
    """Not even one that says what is the default of that other certificate."""
    section = SECTIONS[kind]
    assert type(settings_of(section)) is kind and set(SECTIONS) == set(CERTIFICATES)
    named = {name for other in CERTIFICATES for name in other.model_fields} - {"sigma"}
    assert named == {*OPTIONS, *Certificate.model_fields}
    for name, value in OPTIONS.items():
        if name in section:
            continue
        asked = section | {name: value}
        if kind is Cohen and name == "bound":
            assert type(settings_of(asked)) is HoeffdingVotes
            continue
        if kind is HoeffdingVotes and name == "mode":
            assert settings_of(asked) == settings_of(section)
            continue
        if name in kind.model_fields:
            assert getattr(settings_of(asked), name) == value
            continue
        usual = settings_of(section)
        for settings in (lambda: settings_of(asked), lambda: settings_of({name: value}, usual)):  # noqa: B023
            with pytest.raises(UserError, match=r"^certify\."):
                settings()


def test_the_recipe_gives_what_the_command_line_does_not() -> None:
    assert settings_of({"sigma": 0.5, "n": None, "radii": None}) == settings_of({"sigma": 0.5})
    scores = settings_of({"n": 50, "n0": 7, "norm": "l2"})
    assert settings_of({"n": 60, "norm": "linf"}, scores) == settings_of(
        {"n": 60, "n0": 7, "norm": "linf"}
    )
    # its defaults are nobody's wish, where another kind is asked for; what it chose is one
    assert settings_of({"sigma": 0.5}, scores) == settings_of({"sigma": 0.5, "n": 50, "n0": 7})
    with pytest.raises(UserError, match=r"certify\.norm:"):
        settings_of({"sigma": 0.5}, settings_of({"norm": "linf"}))
