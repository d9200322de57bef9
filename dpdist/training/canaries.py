"""Canaries of an audited run: positions behind the training records, sampled like all others.

Canary j of m has position N + j. The plan counts N + m records, and every position is sampled
alike; whether a canary is in is a secret fair coin, the same in all steps. One that is out joins
steps and adds nothing, which no other record's sampling notices: of those that are in, it is
Poisson sampling at the plan's rate (and where the batch is capped, it is a record blanked out).
Where rates follow from classes (data.class_sampling), a canary in the sums joins at the largest of
them, and one that is a record at that of its label.

The canaries themselves are public, and the same for everybody; only the coins are secret. Inputs
come from the test split or from records that data.public declares public. Neither holds private
records (`dpdist.training.job.check_records` compares them); canaries join behind that comparison.

Where a user is the unit, everything above is said of users: N counts users, and a
canary is a user, whose clipped sum is a gradient of the clip's norm.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpdist.config.sections import CanaryAudit
from dpdist.core.errors import UserError
from dpdist.data import Dataset, UserDataset
from dpdist.privacy.plan import PrivacyPlan, StepPlan
from dpdist.randomness.keys import derive_key, stream_words
from dpdist.training.collectives import Reducer

SLOT = "canaries"  # of a checkpoint: their scores so far


def draw_coins(run_key: bytes, count: int) -> np.ndarray:
    """Which canaries of a run are in: bool (count,). The key of the coins serves nothing else."""
    return stream_words(derive_key(run_key, "audit coin"), 0, count) >= np.uint64(2**63)


def _public(purpose: str, count: int) -> np.ndarray:
    """Words that everybody may know: uint64 (count,)."""
    return stream_words(derive_key(bytes(32), "canaries", purpose), 0, count)


def canary_coordinates(count: int, size: int) -> np.ndarray:
    """The coordinates of gradient canaries among those of the gradient: int64 (count,), all
    different."""
    return np.argsort(_public("places", size), kind="stable")[:count]


def check_canary_coordinates(planted: CanaryAudit, size: int) -> None:
    """Raise UserError where canaries in the sums find no coordinates of their own."""
    if planted.inserts_gradients and planted.canaries > size:
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


def _mislabeled(count: int, public: Dataset) -> tuple[Tensor, Tensor]:
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


_ROWS = {"gradient": _no_rows, "blank": _blank, "mislabeled": _mislabeled, "pair": _random}


@dataclass(frozen=True)
class DatasetWithCanaries(Dataset):
    """Training records and an audit's canaries behind them: len, batch and targets know both;
    inputs, labels and hashes are the records' alone. public_records: where canaries take inputs
    from.

    Canaries in the sums are positions without an input.
    """

    planted: CanaryAudit = field(kw_only=True)
    public_records: Dataset = field(kw_only=True)

    @classmethod
    def from_records(
        cls, records: Dataset, planted: CanaryAudit, public: Dataset
    ) -> DatasetWithCanaries:
        """Raises UserError where there are too few public records."""
        own = {part.name: getattr(records, part.name) for part in fields(records)}
        found = cls(**own, planted=planted, public_records=public)
        assert found.canary_records
        return found

    @property
    def num_records(self) -> int:
        """How many records there are, and where canaries begin."""
        return len(self.labels)

    def __len__(self) -> int:
        return self.num_records + self.planted.canaries

    @cached_property
    def canary_records(self) -> tuple[Tensor, Tensor]:
        """Return inputs (m, *input_shape) and labels (m,) of canaries that are records.

        Of others there are none. Raises UserError.
        """
        return _ROWS[self.planted.canary](self.planted.canaries, self.public_records)

    @cached_property
    def fingerprint(self) -> str:
        """Return the fingerprint of the records and of the canaries' settings."""
        own = Dataset(**{part.name: getattr(self, part.name) for part in fields(Dataset)})
        digest = hashlib.blake2b(digest_size=16, person=b"dpdist.canaries")
        named = f"{own.fingerprint}/{self.planted.canaries}/{self.planted.canary}"
        digest.update(named.encode())
        for rows in self.canary_records:
            digest.update(rows.numpy().tobytes())
        return digest.hexdigest()

    def batch(self, indices: np.ndarray | slice) -> Tensor:
        own, planted = self._split_indices(indices)
        return torch.cat([super().batch(own), self.canary_records[0][planted]])

    def targets(self, indices: np.ndarray | slice) -> Tensor:
        own, planted = self._split_indices(indices)
        return torch.cat([super().targets(own), self.canary_records[1][planted]])

    def _split_indices(self, indices: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray]:
        """Ascending positions, those of records and those among the canaries."""
        chosen = np.arange(len(self))[indices]
        return chosen[chosen < self.num_records], chosen[
            chosen >= self.num_records
        ] - self.num_records


@dataclass(frozen=True)
class UsersWithCanaries(UserDataset):
    """Users of training records, and behind them an audit's canaries, each a user.

    Canaries in the sums alone: positions without records, whose clipped sum is the clip's norm
    along a coordinate. len counts users and canaries.
    """

    planted: CanaryAudit = field(kw_only=True)

    @classmethod
    def from_users(cls, users: UserDataset, planted: CanaryAudit) -> UsersWithCanaries:
        """Return the users with the canaries behind them."""
        own = {part.name: getattr(users, part.name) for part in fields(UserDataset)}
        return cls(**own, planted=planted)

    @property
    def num_records(self) -> int:
        """Return the number of users, behind which canaries begin."""
        return len(self.users)

    def __len__(self) -> int:
        return self.num_records + self.planted.canaries

    @cached_property
    def fingerprint(self) -> str:
        """Return the fingerprint of the users and of the canaries' settings."""
        own = {part.name: getattr(self, part.name) for part in fields(UserDataset)}
        named = f"{UserDataset(**own).fingerprint}/{self.planted.canaries}/{self.planted.canary}"
        digest = hashlib.blake2b(named.encode(), digest_size=16, person=b"dpdist.canaries")
        return digest.hexdigest()


class Canaries:
    """The effect of an audit on a training; none for a training that is not audited."""

    @property
    def checkpoint_slots(self) -> Mapping[str, Tensor]:
        """Return the canaries' part of a checkpoint."""
        return {}

    def inputs_for(self, members: np.ndarray) -> np.ndarray:
        """Return those of a step's members whose gradients are computed."""
        return members

    def labels_for(self, members: np.ndarray, labels: Tensor) -> Tensor:
        """Return the labels under which computed members, (B,), are trained."""
        return labels

    def classes_for(self, members: np.ndarray, data: Any, step_plan: StepPlan) -> np.ndarray:
        """Return the classes (B,) by which positions of `data` are sampled: their own targets."""
        if not len(members):
            return members
        return self.labels_for(members, data.targets(members)).cpu().numpy()

    def add_to_sums(self, rows: Tensor, members: Sequence[tuple[int, np.ndarray]]) -> None:
        """Add to this worker's clipped sums (rows, size) what the canaries contribute. members: of
        each of its rows."""

    def observe(self, noisy: Tensor, step_plan: StepPlan, reducer: Reducer) -> None:
        """Record the adversary's view of a released sum (size,); every worker is there."""


class RecordCanaries(Canaries):
    """Canaries that are records: those that are out are dropped once they were sampled."""

    def __init__(self, dataset: DatasetWithCanaries, present: np.ndarray) -> None:
        self._is_present = np.concatenate([np.ones(dataset.num_records, bool), present])

    def inputs_for(self, members: np.ndarray) -> np.ndarray:
        present: np.ndarray = members[self._is_present[members]]
        return present


class PairCanaries(Canaries):
    """Canaries that are records: under label 0, or under label 1 where one is out."""

    def __init__(self, dataset: DatasetWithCanaries, present: np.ndarray) -> None:
        self._has_other_label = np.concatenate([np.zeros(dataset.num_records, bool), ~present])

    def labels_for(self, members: np.ndarray, labels: Tensor) -> Tensor:
        swapped = torch.from_numpy(self._has_other_label[members])
        return torch.where(swapped, 1 - labels, labels)


class GradientCanaries(Canaries):
    """Canaries whose gradient is the clip norm along a coordinate of its own. Under replace-one,
    one that is out has the opposite gradient.

    The adversary knows the records and which of them joined a step, so it knows their part of the
    sum: the guarantee holds against it all the same. It subtracts that part, and adds up the log
    likelihood ratios of what is left.
    """

    def __init__(
        self,
        dataset: DatasetWithCanaries | UsersWithCanaries,
        present: np.ndarray,
        plan: PrivacyPlan,
        size: int,
    ):
        self._num_records, self._replaces_one = (
            dataset.num_records,
            plan.adjacency == "replace-one",
        )
        self._coordinates = torch.from_numpy(canary_coordinates(len(present), size))
        self._signs = torch.from_numpy(np.where(present, 1.0, -1.0 if self._replaces_one else 0.0))
        self._clip = plan.clip_norm
        self._scores = torch.zeros(len(present), dtype=torch.float64)
        self._record_sums = torch.zeros(0, dtype=torch.float64)

    @property
    def checkpoint_slots(self) -> Mapping[str, Tensor]:
        return {SLOT: self._scores}

    def inputs_for(self, members: np.ndarray) -> np.ndarray:
        return members[members < self._num_records]

    def classes_for(self, members: np.ndarray, data: Any, step_plan: StepPlan) -> np.ndarray:
        """Return the classes of the records; of the canaries the one that is sampled most often."""
        found = np.full(len(members), step_plan.most_sampled_class)
        own = members < self._num_records
        found[own] = super().classes_for(members[own], data, step_plan)
        return found

    def add_to_sums(self, rows: Tensor, members: Sequence[tuple[int, np.ndarray]]) -> None:
        where = self._coordinates.to(rows.device)
        self._record_sums = rows[:, where]
        for row, joined in members:
            own = torch.from_numpy(joined[joined >= self._num_records] - self._num_records)
            rows[row, where[own]] += (self._clip * self._signs[own]).to(rows.device)

    def observe(self, noisy: Tensor, step_plan: StepPlan, reducer: Reducer) -> None:
        from dpdist.privacy.audit_bounds import log_likelihood_ratio

        others, _ = reducer.sum_rows(self._record_sums, False)
        own = noisy[self._coordinates.to(noisy.device)].cpu()
        left = (own - others.cpu()).numpy() / step_plan.clip_norm
        noise, rate = step_plan.noise_multiplier, step_plan.sample_rate
        ratio = log_likelihood_ratio(left, noise, rate)
        if self._replaces_one:
            ratio = ratio - log_likelihood_ratio(-left, noise, rate)
        self._scores += torch.from_numpy(ratio)


def build_canaries(dataset: Dataset, run_key: bytes, plan: PrivacyPlan, size: int) -> Canaries:
    """The canaries of a run. size: of its gradient."""
    if not isinstance(dataset, DatasetWithCanaries | UsersWithCanaries):
        return Canaries()
    present = draw_coins(run_key, dataset.planted.canaries)
    if isinstance(dataset, UsersWithCanaries) or dataset.planted.inserts_gradients:
        return GradientCanaries(dataset, present, plan, size)
    if dataset.planted.replaces_record:
        return PairCanaries(dataset, present)
    return RecordCanaries(dataset, present)
