"""Models that were saved before modules were merged name their factories by the old modules."""

from __future__ import annotations

import importlib

import pytest

from dpdist.core.errors import UserError
from dpdist.models.spec import _MOVED, factory_of


@pytest.mark.parametrize(
    ("old", "name"),
    [
        ("denoiser:dncnn", "dncnn"),
        ("residual:resnet_gn", "resnet-gn"),
        ("dpal:dpal_cnn", "dpal-cnn"),
    ],
)
def test_a_factory_is_found_by_the_module_it_was_in(old, name):
    assert factory_of(f"dpdist.models.{old}") is factory_of(name)


def test_old_modules_are_gone_and_the_new_ones_are_there():
    for old, new in _MOVED.items():
        importlib.import_module(f"dpdist.models.{new}")
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"dpdist.models.{old}")


def test_a_module_that_never_was_is_refused():
    with pytest.raises(UserError, match=r"cannot import 'dpdist\.models\.nowhere:dncnn'"):
        factory_of("dpdist.models.nowhere:dncnn")
