"""The papers' certified accuracy: at attacked copies, beside the clean inputs, and named so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.local_execution import command, run_without_ray

from dpdist.attacks.attacked_copies import DISCLAIMER, AttackedCopies, AttackedCopiesSpec
from dpdist.attacks.gradient_attacks import distance
from dpdist.certification import table_reader
from dpdist.certification.registry import settings_of
from dpdist.core.errors import UserError
from dpdist.evaluation import load_model
from dpdist.reports.results import load_results
from dpdist.training.records import data_source, load_test_records

SETTINGS = {"sigma": 0.25, "n": 200, "n0": 20, "max_inputs": 20, "alpha": 0.01}


@pytest.mark.slow
def test_copies_are_certified_and_never_taken_for_certificates(
    golden, tmp_path, monkeypatch, capsys
):
    folder = golden("digits", tmp_path / "runs")
    recipe = folder.read_recipe()
    run_without_ray(monkeypatch)

    def shown(*more: str) -> str:
        done = command(monkeypatch, capsys, tmp_path, "certify", "x", *more)
        assert done.code == 0, done.err
        return done.out

    shown()
    asked = ("attacked.attack=pgd", "attacked.size=0.3", "attacked.norm=l2")
    out = shown(*(word for each in asked for word in ("--set", each)))
    assert DISCLAIMER in out and out.count("vote (Cohen), gaussian 0.25, l2 >= 0.3") == 2
    (path,) = Path(folder.path / "attacks").glob("certified-pgd-l2-0.3-*/certificates.parquet")
    attacked, (clean,) = table_reader.read(path), load_results(folder).tables
    assert clean.job_record["data"] != attacked.job_record["data"]
    assert attacked.certified_accuracy(1e-9) < clean.certified_accuracy(1e-9)
    for table, of in ((attacked, "attacked"), (clean, "clean")):
        (line,) = [line for line in out.splitlines() if line.startswith(f"  {of.title()}")]
        assert line.endswith(f"{100 * table.certified_accuracy(0.3):.2f} %")
    # What was certified: copies within the size that go from the label, the same every time.
    data, model = load_test_records(recipe, data_source(recipe)), load_model(recipe, folder)
    at, settings = AttackedCopiesSpec(attack="pgd", size=0.3, norm="l2"), settings_of(SETTINGS)
    copies = AttackedCopies(at, data, model, settings)
    assert copies.fingerprint == attacked.job_record["data"]
    rows = np.arange(20)
    inputs, moved = data.batch(rows), copies.batch(rows)
    assert (distance(moved.numpy(), inputs.numpy(), "l2") <= 0.3).all()
    with torch.no_grad():
        loss = [
            torch.nn.functional.cross_entropy(model(x), data.targets(rows), reduction="none")
            for x in (inputs, moved)
        ]
    assert float((loss[1] > loss[0]).double().mean()) > 0.9
    with pytest.raises(UserError, match=r"certify\.noise:"):
        AttackedCopies(at, data, model, settings_of({**SETTINGS, "noise": "laplace"}))
