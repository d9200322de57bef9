"""Models that were saved before modules were merged name their factories by the old modules."""

from __future__ import annotations

import importlib

import pytest

from dpdist.core.errors import UserError
from dpdist.models.spec import _MODULE_ALIASES, import_factory


@pytest.mark.parametrize(
    ("old", "name"),
    [
        ("denoiser:dncnn", "dncnn"),
        ("residual:resnet_gn", "resnet-gn"),
    ],
)
def test_a_factory_is_found_by_the_module_it_was_in(old, name):
    assert import_factory(f"dpdist.models.{old}") is import_factory(name)


def test_old_modules_are_gone_and_the_new_ones_are_there():
    for old, new in _MODULE_ALIASES.items():
        importlib.import_module(f"dpdist.models.{new}")
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"dpdist.models.{old}")


def test_a_module_that_never_was_is_refused():
    with pytest.raises(UserError, match=r"cannot import 'dpdist\.models\.nowhere:dncnn'"):
        import_factory("dpdist.models.nowhere:dncnn")
