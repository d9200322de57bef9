"""The examples of docs/how-to/extending.md: each is a file that works as it is printed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from support.certificates import certify
from support.extension_examples import EXAMPLES
from support.local_execution import command, run_without_ray
from support.settings import sets

import dpdist
from dpdist import data
from dpdist.attacks import gradient_attacks, table
from dpdist.attacks.gradient_attacks import Ball
from dpdist.certification import registry, table_reader
from dpdist.certification.cohen import Cohen
from dpdist.core import fields
from dpdist.training.records import data_source


@pytest.fixture
def beside(tmp_path, monkeypatch) -> Path:
    """A working directory with the examples, in which Python finds them."""
    for name, text in EXAMPLES.items():
        (tmp_path / name).write_text(text)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in EXAMPLES:
        sys.modules.pop(name.removesuffix(".py"), None)


@pytest.mark.slow
def test_a_certificate(golden, beside, monkeypatch):
    monkeypatch.setattr(registry, "BY_MODE", dict(registry.BY_MODE))
    from chernoff import Chernoff

    folder = golden("digits", beside / "runs")
    recipe = folder.read_recipe()
    run_without_ray(monkeypatch)
    test = data.load(data_source(recipe), "test")
    tables = {}
    for kind in (Chernoff, Cohen):
        settings = kind(sigma=0.1, n=400, n0=20, max_inputs=30, seed="5a")
        certify(folder.model_folder, test, settings, beside / kind.__name__)
        tables[kind] = table_reader.read(beside / kind.__name__ / "certificates.parquet")
    mine, exact = (tables[kind].table.to_pandas() for kind in (Chernoff, Cohen))
    assert (mine["k"] == exact["k"]).all()
    assert (mine["p_lower"] < exact["p_lower"]).all()  # the exact bound is the better one
    assert tables[Chernoff].mode == "chernoff" and (mine["radius"] > 0).any()


def test_a_registered_kind_writes_and_reads_its_own_table(monkeypatch, tmp_path):
    monkeypatch.setattr(registry, "BY_MODE", dict(registry.BY_MODE))

    class Halved(Cohen):
        mode: Literal["halved"] = "halved"

        def decide(self, partials, sampler):
            verdict = super().decide(partials, sampler)
            return replace(verdict, radius=verdict.radius / 2)

        @classmethod
        def recompute_columns(cls, table, alpha):
            columns = super().recompute_columns(table, alpha)
            return columns | {"radius": columns["radius"] / 2}

    registry.register(Halved)

    model, inputs = torch.nn.Linear(3, 3), (torch.eye(3), torch.arange(3))
    found, whole = (
        dpdist.certify(model, inputs, kind(sigma=0.01, n=200, n0=20, seed="5a"))
        for kind in (Halved, Cohen)
    )
    assert found.certificate_class is Halved
    assert (found.radius == whole.radius / 2).all() and found.radius.max() > 0


@pytest.mark.slow
def test_an_attack(golden, beside, monkeypatch, capsys):
    golden("digits", beside / "runs")
    # gone again afterwards
    monkeypatch.setitem(gradient_attacks.ATTACKS_FROM_CENTER, "settling", None)
    import settling  # noqa: F401

    every = (*fields.ATTACKS, "settling")
    for module in (fields, gradient_attacks, table):
        monkeypatch.setattr(module, "ATTACKS", every)
    run_without_ray(monkeypatch)
    asked = sets("attack", "attacks=[settling]", "sizes=[0.1]", "max_inputs=20", "steps=4")
    done = command(monkeypatch, capsys, beside, "attack", "x", *asked)
    assert done.code == 0, done.out + done.err
    assert "settling" in done.out
    center = torch.full((2, 1, 8, 8), 0.5)
    ball = Ball(center, torch.full((2,), 0.1, dtype=torch.float64), "l2")
    moved = gradient_attacks.ATTACKS_FROM_CENTER["settling"](
        lambda point, step: torch.ones(2, 1, 8, 8), ball, 3
    )
    assert torch.allclose((moved - center).flatten(1).norm(dim=1), ball.size.float(), rtol=0.2)
