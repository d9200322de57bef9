"""Canaries of an audited run: positions behind the training records, sampled like all others.

Canary j of m has position N + j. The plan counts N + m records, and every position is sampled
alike; whether a canary is in is a secret fair coin, the same in all steps. One that is out joins
steps and adds nothing, which no other record's sampling notices: of those that are in, it is
Poisson sampling at the plan's rate (and where the batch is capped, it is a record blanked out).

The canaries themselves are public, and the same for everybody; only the coins are secret. Inputs
come from the test split or from records that data.public declares public. Neither holds private
records (`dpdist.training.job.check_records` compares them); canaries join behind that comparison.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from dpdist.config.sections import CanaryAudit
from dpdist.core.errors import UserError
from dpdist.data import Dataset
from dpdist.privacy.plan import PrivacyPlan, StepPlan
from dpdist.randomness.keys import derive_key, words
from dpdist.training.collectives import Reducer

SLOT = "canaries"  # of a checkpoint: their scores so far


def coins(run_key: bytes, count: int) -> np.ndarray:
    """Which canaries of a run are in: bool (count,). The key of the coins serves nothing else."""
    return words(derive_key(run_key, "audit coin"), 0, count) >= np.uint64(2**63)


def _public(purpose: str, count: int) -> np.ndarray:
    """Words that everybody may know: uint64 (count,)."""
    return words(derive_key(bytes(32), "canaries", purpose), 0, count)


def places(count: int, size: int) -> np.ndarray:
    """The coordinates of gradient canaries among those of the gradient: int64 (count,), all
    different."""
    return np.argsort(_public("places", size), kind="stable")[:count]


def check_places(planted: CanaryAudit, size: int) -> None:
    """Raise UserError where canaries in the sums find no coordinates of their own."""
    if planted.in_sums and planted.canaries > size:
        raise UserError(
            f"audit.canaries: must be <= the model's {size:,} trainable parameters, a coordinate "
            f"for each, got {planted.canaries:,}"
        )


def _no_rows(count: int, public: Dataset) -> tuple[Tensor, Tensor]:
    return torch.zeros(0, *public.input_shape), torch.zeros(0, dtype=torch.int64)


def _blank(count: int, public: Dataset) -> tuple[Tensor, Tensor]:
    """Constant inputs from 0 to 1, under each label in turn."""
    shape = public.input_shape
    shades = torch.linspace(0, 1, count).reshape(-1, *[1] * len(shape)).expand(count, *shape)
    return shades, torch.arange(count) % public.classes


def _mislabelled(count: int, public: Dataset) -> tuple[Tensor, Tensor]:
    """Public inputs, each under a wrong label. Raises UserError where there are too few."""
    if count > len(public):
        raise UserError(
            f"audit.canaries: must be <= the {len(public):,} public records of {public.name}, got "
            f"{count:,}"
        )
    chosen = np.argsort(_public("inputs", len(public)), kind="stable")[:count]
    wrong = 1 + _public("labels", count) % np.uint64(max(1, public.classes - 1))
    labels = public.targets(chosen) + torch.from_numpy(wrong.astype(np.int64))
    return public.batch(chosen), labels % public.classes


def _random(count: int, public: Dataset) -> tuple[Tensor, Tensor]:
    """Inputs of random zeros and ones, each under the first of two labels, 0."""
    shape = (count, *public.input_shape)
    bits = _public("pixels", math.prod(shape)) >> np.uint64(63)
    inputs = torch.from_numpy(bits.astype(np.float32)).view(shape)
    return inputs, torch.zeros(count, dtype=torch.int64)


_ROWS = {"gradient": _no_rows, "blank": _blank, "mislabelled": _mislabelled, "pair": _random}


def rows_of(planted: CanaryAudit, public: Dataset) -> tuple[Tensor, Tensor]:
    """Inputs (m, *input_shape) and labels (m,) of canaries that are records; else none of either.
    Raises UserError."""
    return _ROWS[planted.canary](planted.canaries, public)


@dataclass(frozen=True)
class WithCanaries(Dataset):
    """Training records and an audit's canaries behind them: len, batch and targets know both;
    inputs, labels and hashes are the records' alone. public: where canaries take inputs from.

    Canaries in the sums are positions without an input.
    """

    planted: CanaryAudit = field(kw_only=True)
    public: Dataset = field(kw_only=True)

    @classmethod
    def of(cls, records: Dataset, planted: CanaryAudit, public: Dataset) -> WithCanaries:
        """Raises UserError where there are too few public records."""
        own = {part.name: getattr(records, part.name) for part in fields(records)}
        found = cls(**own, planted=planted, public=public)
        assert found.planted_rows
        return found

    @property
    def own(self) -> int:
        """How many records there are, and where canaries begin."""
        return len(self.labels)

    def __len__(self) -> int:
        return self.own + self.planted.canaries

    @cached_property
    def planted_rows(self) -> tuple[Tensor, Tensor]:
        """Of `rows_of`."""
        return rows_of(self.planted, self.public)

    @cached_property
    def fingerprint(self) -> str:
        """Of the records and of what the canaries are."""
        own = Dataset(**{part.name: getattr(self, part.name) for part in fields(Dataset)})
        digest = hashlib.blake2b(digest_size=16, person=b"dpdist.canaries")
        named = f"{own.fingerprint}/{self.planted.canaries}/{self.planted.canary}"
        digest.update(named.encode())
        for rows in self.planted_rows:
            digest.update(rows.numpy().tobytes())
        return digest.hexdigest()

    def batch(self, indices: np.ndarray | slice) -> Tensor:
        own, planted = self._sides(indices)
        return torch.cat([super().batch(own), self.planted_rows[0][planted]])

    def targets(self, indices: np.ndarray | slice) -> Tensor:
        own, planted = self._sides(indices)
        return torch.cat([super().targets(own), self.planted_rows[1][planted]])

    def _sides(self, indices: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray]:
        """Ascending positions, those of records and those among the canaries."""
        chosen = np.arange(len(self))[indices]
        return chosen[chosen < self.own], chosen[chosen >= self.own] - self.own


class Canaries:
    """What an audit does to a training. Of one that is not audited: nothing."""

    @property
    def slots(self) -> Mapping[str, Tensor]:
        """What a checkpoint keeps of it."""
        return {}

    def fed(self, members: np.ndarray) -> np.ndarray:
        """Of a step's members, those whose gradients are computed."""
        return members

    def labelled(self, members: np.ndarray, labels: Tensor) -> Tensor:
        """Of members that are computed, (B,), the labels that they are trained under."""
        return labels

    def join(self, rows: Tensor, members: Sequence[tuple[int, np.ndarray]]) -> None:
        """Add to this worker's clipped sums (rows, size) what the canaries contribute. members: of
        each of its rows."""

    def watch(self, noisy: Tensor, todo: StepPlan, reducer: Reducer) -> None:
        """What the adversary makes of a released sum (size,); every worker is there."""


class RecordCanaries(Canaries):
    """Canaries that are records: those that are out are dropped once they were sampled."""

    def __init__(self, dataset: WithCanaries, present: np.ndarray) -> None:
        self._present = np.concatenate([np.ones(dataset.own, bool), present])

    def fed(self, members: np.ndarray) -> np.ndarray:
        present: np.ndarray = members[self._present[members]]
        return present


class PairCanaries(Canaries):
    """Canaries that are records: under label 0, or under label 1 where one is out."""

    def __init__(self, dataset: WithCanaries, present: np.ndarray) -> None:
        self._other = np.concatenate([np.zeros(dataset.own, bool), ~present])

    def labelled(self, members: np.ndarray, labels: Tensor) -> Tensor:
        swapped = torch.from_numpy(self._other[members])
        return torch.where(swapped, 1 - labels, labels)


class GradientCanaries(Canaries):
    """Canaries whose gradient is the clip norm along a coordinate of its own. Under replace-one,
    one that is out has the opposite gradient.

    The adversary knows the records and which of them joined a step, so it knows their part of the
    sum: the guarantee holds against it all the same. It subtracts that part, and adds up the log
    likelihood ratios of what is left.
    """

    def __init__(self, dataset: WithCanaries, present: np.ndarray, plan: PrivacyPlan, size: int):
        self._first, self._both = dataset.own, plan.neighbours == "replace-one"
        self._places = torch.from_numpy(places(len(present), size))
        self._signs = torch.from_numpy(np.where(present, 1.0, -1.0 if self._both else 0.0))
        self._clip = plan.clip_norm
        self._scores = torch.zeros(len(present), dtype=torch.float64)
        self._others = torch.zeros(0, dtype=torch.float64)

    @property
    def slots(self) -> Mapping[str, Tensor]:
        return {SLOT: self._scores}

    def fed(self, members: np.ndarray) -> np.ndarray:
        return members[members < self._first]

    def join(self, rows: Tensor, members: Sequence[tuple[int, np.ndarray]]) -> None:
        where = self._places.to(rows.device)
        self._others = rows[:, where]
        for row, joined in members:
            own = torch.from_numpy(joined[joined >= self._first] - self._first)
            rows[row, where[own]] += (self._clip * self._signs[own]).to(rows.device)

    def watch(self, noisy: Tensor, todo: StepPlan, reducer: Reducer) -> None:
        from dpdist.privacy.audit_bounds import log_likelihood_ratio

        others, _ = reducer.sum(self._others, False)
        own = noisy[self._places.to(noisy.device)].cpu()
        left = (own - others.cpu()).numpy() / todo.clip_norm
        noise, rate = todo.noise_multiplier, todo.sample_rate
        ratio = log_likelihood_ratio(left, noise, rate)
        if self._both:
            ratio = ratio - log_likelihood_ratio(-left, noise, rate)
        self._scores += torch.from_numpy(ratio)


def plant(dataset: Dataset, run_key: bytes, plan: PrivacyPlan, size: int) -> Canaries:
    """The canaries of a run. size: of its gradient."""
    if not isinstance(dataset, WithCanaries):
        return Canaries()
    present = coins(run_key, dataset.planted.canaries)
    if dataset.planted.in_sums:
        return GradientCanaries(dataset, present, plan, size)
    if dataset.planted.replaces:
        return PairCanaries(dataset, present)
    return RecordCanaries(dataset, present)
