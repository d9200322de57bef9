"""The bulk job that makes a bank: one chunk of work is one shadow training."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors

from dpdist import bulk
from dpdist.audits.bank import COLUMNS, KEY, SCHEMA, TABLE, table_of
from dpdist.base.errors import UserError
from dpdist.base.storage import private_folder
from dpdist.bulk.job import Row, Task, Work
from dpdist.training.many import ManyTrainings

if TYPE_CHECKING:
    from dpdist.audits.shadow import ShadowSetup

SCORES = "scores.safetensors"


class Bank(Work):
    """Shadow models of one recipe. identity: see `dpdist.audits.membership`."""

    kind = bulk.Kind("bank of shadow models", "training shadow models", secret=True)
    file, key, schema, columns = TABLE, KEY, SCHEMA, COLUMNS

    def __init__(
        self, wanted: dict[str, Any], seed: str | None, share: Callable[[str], ShadowSetup]
    ) -> None:
        """share: what workers share, given the bank's seed."""
        self._wanted, self.seed, self._share = wanted, seed, share

    def identity(self) -> dict[str, Any]:
        return self._wanted

    def begin(self, output: Path) -> dict[str, Any]:
        private_folder(output)  # wherever it was asked for
        return {"seed": self.seed or secrets.token_hex(32)}

    def open(self, about: dict[str, Any], output: Path) -> Task:
        return _Shadows(self._share(about["seed"]), output / "models")

    def build(self, rows: list[Row], about: Mapping[str, Any]) -> pa.Table:
        ordered = sorted(rows, key=lambda row: row["model"])
        tables = [table_of(row["model"], row["scores"]) for row in ordered]
        whole = pa.concat_tables(tables) if tables else SCHEMA.empty_table()
        return whole.replace_schema_metadata(bulk.metadata(about, KEY))


class _Shadows(ManyTrainings):
    """Shadow models, each with its scores."""

    witness = SCORES

    def __init__(self, shared: ShadowSetup, folder: Path) -> None:
        from dpdist.audits.shadow import ShadowTrainer

        plan = shared.plans[0]
        examples = plan.steps * plan.step(0).expected_batch if plan.steps else 0.0
        super().__init__(shared.game.models, ShadowTrainer, shared, folder, examples)

    def found(self, raw: bytes, place: Path) -> dict[str, Any]:
        try:
            return {"scores": load_tensors(raw)}
        except SafetensorError as error:
            raise UserError(f"{place}: damaged: {error}") from error
