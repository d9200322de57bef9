"""The bulk job that makes votes: one chunk of work is one training, and what it says."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors

from dpdist import bulk
from dpdist.base.errors import UserError
from dpdist.base.storage import private_folder
from dpdist.bulk.job import Row, Task, Work
from dpdist.poisoning.votes import COLUMNS, FILE, KEY, NONE, SCHEMA, TABLE
from dpdist.training.many import ManyTrainings

if TYPE_CHECKING:
    from dpdist.poisoning.models import VoterSetup


class Voting(Work):
    """Of one recipe. wanted: see `dpdist.poisoning.voting`."""

    kind = bulk.Kind("set of votes", "training voters", secret=True)
    file, key, schema, columns, order = TABLE, KEY, SCHEMA, COLUMNS, ("model", "index")

    def __init__(
        self,
        wanted: dict[str, Any],
        seed: str | None,
        share: Callable[[str], VoterSetup],
        labels: np.ndarray,
    ) -> None:
        """share: what workers share, given the seed."""
        self._wanted, self.seed, self._share = wanted, seed, share
        self._labels = labels

    def identity(self) -> dict[str, Any]:
        return self._wanted

    def begin(self, output: Path) -> dict[str, Any]:
        private_folder(output)  # wherever it was asked for
        indices = np.arange(*self._wanted["settings"]["inputs"])
        labels = bulk.label_digest(indices, self._labels)
        return {"seed": self.seed or secrets.token_hex(32), bulk.LABELS: labels}

    def open(self, about: dict[str, Any], output: Path) -> Task:
        return _Voters(self._share(about["seed"]), output / "models", self._labels)


class _Voters(ManyTrainings):
    witness = FILE

    def __init__(self, shared: VoterSetup, folder: Path, labels: np.ndarray) -> None:
        from dpdist.poisoning.models import Voter

        plan = shared.plan
        examples = plan.steps * plan.step(0).expected_batch if plan.steps else 0.0
        super().__init__(shared.models, Voter, shared, folder, examples)
        self._indices, self._labels = list(shared.indices), labels

    def found(self, raw: bytes, place: Path) -> dict[str, Any]:
        try:
            votes = load_tensors(raw)["votes"]
        except (SafetensorError, KeyError) as error:
            raise UserError(f"{place}: damaged: {error}") from error
        if votes.shape != (len(self._indices),) or votes.dtype != np.int64 or votes.min() < NONE:
            raise UserError(f"{place}: damaged: not one vote on each input")
        return {"votes": votes}

    def rows(self, item: Any, partial: Any) -> list[Row]:
        (whole,) = super().rows(item, partial)
        each = zip(self._indices, self._labels.tolist(), whole["votes"].tolist(), strict=True)
        return [
            {"model": whole["model"], "index": index, "label": label, "vote": vote}
            for index, label, vote in each
        ]
