"""The bulk job that makes a bank: one chunk of work is one shadow training."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors

from dpdist import bulk
from dpdist.audits.bank import COLUMNS, KEY, SCHEMA, TABLE, table_of
from dpdist.base.errors import UserError
from dpdist.base.reading import read_bytes
from dpdist.base.storage import private_folder, write_atomic
from dpdist.bulk.job import Item, Partial, Piece, Row, Task, Work

if TYPE_CHECKING:
    from dpdist.audits.shadow import ShadowSetup

SCORES = "scores.safetensors"
_SLOW = 50.0  # records per second that an honest worker trains on


class Bank(Work):
    """Shadow models of one recipe. identity: see `dpdist.audits.membership`."""

    kind = bulk.Kind("bank of shadow models", "training shadow models")
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
        return _Trainings(self._share(about["seed"]), output / "models")

    def build(self, rows: list[Row], about: Mapping[str, Any]) -> pa.Table:
        ordered = sorted(rows, key=lambda row: row["model"])
        tables = [table_of(row["model"], row["scores"]) for row in ordered]
        whole = pa.concat_tables(tables) if tables else SCHEMA.empty_table()
        return whole.replace_schema_metadata(bulk.metadata(about, KEY))


class _Trainings(Task):
    """One item is one model; its files are kept in a folder, their digest in the journal."""

    def __init__(self, shared: ShadowSetup, folder: Path) -> None:
        from dpdist.audits.shadow import ShadowTrainer

        plan = shared.plans[0]
        examples = plan.steps * plan.step(0).expected_batch if plan.steps else 0.0
        numbers: dict[Item, int] = {f"model {n}": n for n in range(shared.game.models)}
        self._numbers = numbers
        super().__init__(numbers, ShadowTrainer, shared, silence=max(600.0, 10 * examples / _SLOW))
        self._folder = folder

    def entries(self, name: str, answer: Mapping[str, bytes]) -> Iterable[dict[str, Any]]:
        place = self._place(name)
        for file, content in answer.items():
            write_atomic(place / file, content)
        return [{"key": name, "digest": _digest(answer[SCORES])}]

    def read(self, entry: dict[str, Any]) -> tuple[Piece, Partial]:
        raw = read_bytes(self._place(entry["key"]) / SCORES)
        if _digest(raw) != entry["digest"]:
            raise UserError(
                f"{self._place(entry['key'])}: damaged: not the model that the journal knows; "
                "remove the bank's folder"
            )
        try:
            return Piece(entry["key"], 0, 1), load_tensors(raw)
        except SafetensorError as error:
            raise UserError(f"{self._place(entry['key'])}: damaged: {error}") from error

    def rows(self, item: Item, partial: Partial) -> list[Row]:
        return [{"model": self._numbers[item], "scores": partial}]

    def _place(self, name: Item) -> Path:
        return self._folder / f"{self._numbers[name]:04d}"


def _digest(raw: bytes) -> str:
    return hashlib.blake2b(raw, digest_size=16).hexdigest()
