"""A small run, finished; commands end where Ray would start."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from hostile import BASE
from support.training import execute, make, prepare

from dpdist import pipeline
from dpdist.attacks import table as attacks
from dpdist.certification import table as tables
from dpdist.cluster import job_folder
from dpdist.core.errors import UserError


@contextlib.contextmanager
def _no_session(*_: Any, **__: Any) -> Iterator[None]:
    raise UserError("would begin")
    yield


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch) -> None:
    monkeypatch.setattr(pipeline, "run_session", _no_session)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder `runs` with a small run, trained, evaluated, certified and attacked on paper."""
    runs = tmp_path_factory.mktemp("fuzz") / "runs"
    recipe, folder = make(
        runs, "x", model={"name": "linear"}, training__steps=2, training__momentum=0,
        training__batch_size=200,
        privacy__budget=str(runs.parent / "budgets"), certify=BASE["certify"],
    )  # fmt: skip
    from dpdist.training.trainer import _budget_charged

    job = prepare(recipe, folder, "x")
    with _budget_charged(job):
        execute(job)
    pipeline.evaluate_stage(recipe, folder)
    row = {
        "label": 1, "prediction": 1, "selected": 1, "k": 90, "n": 100, "n0": 10, "alpha": 0.001,
        "p_lower": 0.8, "radius": 0.3, "norm": "l2", "noise": "gaussian", "sigma": 0.5,
        "mode": "fixed", "cap": 100, "looks": 1, "target": None, "spending": "none",
        "histogram": [5, 90, 5],
    }  # fmt: skip
    about = {"model": "m", "data": "d", "settings": {"radii": [0.1]}, "format": 2}
    for place, first in (("a", 0), ("b", 5)):
        table = tables.build([row | {"index": first + i} for i in range(3)], about)
        tables.write(table, folder.certificates / place / "certificates.parquet")
        (folder.certificates / place / "settings.json").write_text(json.dumps(about))
    attacked = {
        "settings": {"norm": "l2", "sigma": None, "steps": 1, "restarts": 1, "draws": 1, "n": 1,
                     "alpha": 0.1}, "noise": {"kind": "none"}, "model": "m", "dataset": "d",
        "input_shape": [1, 8, 8],
    }  # fmt: skip
    rows = [
        {"attack": attack, "size": size, "index": i, "label": 1, "prediction": 1, "hits": 1, "n": 1}
        for attack, size in (("none", 0.0), ("pgd", 0.5))
        for i in range(3)
    ]
    schema = attacks.SCHEMA
    rows = [{name: row.get(name, 0) for name in schema.names} for row in rows]
    table = job_folder.build_table(rows, schema, attacked, attacks.KEY)
    job_folder.write_table(table, folder.path / "attacks" / "a" / "attacks.parquet")
    (folder.path / "attacks" / "a" / "settings.json").write_text(json.dumps(attacked))
    return runs
