"""The trainings of an audit of many runs, as a bulk job on the actor pool."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pyarrow as pa

from dpdist import bulk
from dpdist.audits.target import Target, refuse_planted
from dpdist.base.errors import UserError
from dpdist.base.table_files import Column
from dpdist.bulk.job import Item, Task, Work
from dpdist.sections.audit import ManyRunsAudit

TABLE, KEY = "trainings.parquet", b"dpdist.many-runs"
_CHUNK = 50  # trainings at once
SCHEMA = pa.schema(
    [
        pa.field("trial", pa.int64(), nullable=False),
        pa.field("present", pa.int64(), nullable=False),
        pa.field("score", pa.float64(), nullable=False),
    ]
)
COLUMNS: dict[str, Column] = {"trial": (int, 0), "present": (int, 0), "score": (float, None)}


class Retraining(Work):
    """The trainings and the score of the canary in each; private, as the models are."""

    kind = bulk.Kind("audit of many runs", "auditing many runs", secret=True)
    file, key, schema, columns, order = TABLE, KEY, SCHEMA, COLUMNS, ("trial",)

    def __init__(self, options: ManyRunsAudit, target: Target) -> None:
        """Raises UserError for a recipe that is more than `Trainings` does, or has canaries."""
        from dpdist.audits.vectorised import Trainings
        from dpdist.training.records import source_of, training_data

        refuse_planted(target.recipe, "many runs")
        if target.recipe.privacy.batch_cap is not None:
            raise UserError(
                f"{target.recipe.name}: privacy.batch_cap: what a capped batch promises is of a "
                "fixed number of records, and many runs add one; audit it by canaries in one run"
            )
        self._options, self._target, self.seed = options, target, options.seed
        self._records = training_data(target.recipe, source_of(target.recipe))
        Trainings(target.recipe, target.plan, self._records)  # refuses what it cannot train

    def identity(self) -> dict[str, Any]:
        asked = self._options.model_dump(mode="json", include={"trainings", "copies", "canary"})
        plan = self._target.plan.fingerprint()
        training = self._target.recipe.training.model_dump(mode="json")
        model = self._target.recipe.model.model_dump(mode="json")
        sees = self._options.sees
        about = {"plan": plan, "data": self._records.fingerprint, "training": training}
        return {**about, "model": model, "sees": sees, "settings": asked}

    def begin(self, output: Path) -> dict[str, Any]:
        return {"seed": self._options.seed or secrets.token_hex(32)}

    def open(self, about: dict[str, Any], output: Path) -> Task:
        from dpdist.audits.vectorised import Trainer, TrainerSetup

        options, target = self._options, self._target
        shared = TrainerSetup(
            target.recipe, target.plan, self._records, bytes.fromhex(about["seed"]),
            options.copies, options.every_step,
        )  # fmt: skip
        items: dict[Item, range] = {
            f"trainings {first}": range(first, min(first + _CHUNK, options.trainings))
            for first in range(0, options.trainings, _CHUNK)
        }
        return Task(items, Trainer, shared, silence=3600.0)
