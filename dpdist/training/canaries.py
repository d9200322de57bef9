"""Canaries of an audited run: positions after the training records, sampled like all others.

Canary j of m has position N + j. The plan counts N + m records, and every position is sampled
alike; whether a canary is in is a secret fair coin, the same in all steps. One that is out joins
steps and adds nothing, which does not affect the sampling of other records: for those that are in,
it is Poisson sampling at the plan's rate (with a batch cap, a blanked record). With rates by class
(data.class_sampling), a canary in the sums joins at the largest rate, and one that is a record at
that of its label.

The canaries are public, and the same in every run; only the coins are secret. Inputs come from the
test split or from records that data.public declares public. Neither contains private records
(`dpdist.training.job.check_records` compares them); canaries are added after that comparison.

If a user is the unit, N counts users, and a canary is a user, whose clipped sum is a gradient of
the clip's norm.
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
from dpdist.privacy.audit_bounds import log_likelihood_ratio
from dpdist.privacy.plan import PrivacyPlan, StepPlan
from dpdist.randomness.keys import derive_key, stream_words
from dpdist.training.collectives import Reducer

SLOT = "canaries"  # of a checkpoint: their scores so far


def draw_coins(run_key: bytes, count: int) -> np.ndarray:
    """Return which canaries of a run are in, bool (count,), by a key for only this purpose."""
    return stream_words(derive_key(run_key, "audit coin"), 0, count) >= np.uint64(2**63)


def _public(purpose: str, count: int) -> np.ndarray:
    """Return public pseudorandom words, uint64 (count,)."""
    return stream_words(derive_key(bytes(32), "canaries", purpose), 0, count)


def canary_coordinates(count: int, size: int) -> np.ndarray:
    """Return the coordinates of gradient canaries in the gradient, int64 (count,), distinct."""
    return np.argsort(_public("places", size), kind="stable")[:count]


def check_canary_coordinates(planted: CanaryAudit, size: int) -> None:
    """Raise UserError unless each canary in the sums has its own coordinate."""
    if planted.inserts_gradients and planted.canaries > size:
        raise UserError(
            f"audit.canaries: must be <= the model's {size:,} trainable parameters, a coordinate "
            f"for each, got {planted.canaries:,}"
        )


def _no_rows(count: int, public: Dataset) -> tuple[Tensor, Tensor]:
    return torch.zeros(0, *public.input_shape), torch.zeros(0, dtype=torch.int64)


def _blank(count: int, public: Dataset) -> tuple[Tensor, Tensor]:
    """Return constant inputs from 0 to 1, with each label in turn."""
    shape = public.input_shape
    shades = torch.linspace(0, 1, count).reshape(-1, *[1] * len(shape)).expand(count, *shape)
    return shades, torch.arange(count) % public.classes


def _mislabeled(count: int, public: Dataset) -> tuple[Tensor, Tensor]:
    """Return public inputs, each with a wrong label. Raises UserError if there are too few."""
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
    """Return inputs of random zeros and ones, each with the first of two labels, 0."""
    shape = (count, *public.input_shape)
    bits = _public("pixels", math.prod(shape)) >> np.uint64(63)
    inputs = torch.from_numpy(bits.astype(np.float32)).view(shape)
    return inputs, torch.zeros(count, dtype=torch.int64)


_ROWS = {"gradient": _no_rows, "blank": _blank, "mislabeled": _mislabeled, "pair": _random}


@dataclass(frozen=True)
class DatasetWithCanaries(Dataset):
    """Training records followed by an audit's canaries.

    len, batch and targets cover both; inputs, labels and hashes only the records. Canaries in the
    sums are positions without an input. public_records: give the canaries their inputs.
    """

    planted: CanaryAudit = field(kw_only=True)
    public_records: Dataset = field(kw_only=True)

    @classmethod
    def from_records(
        cls, records: Dataset, planted: CanaryAudit, public: Dataset
    ) -> DatasetWithCanaries:
        """Return the records with canaries. Raises UserError for too few public records."""
        own = {part.name: getattr(records, part.name) for part in fields(records)}
        found = cls(**own, planted=planted, public_records=public)
        assert found.canary_records
        return found

    @property
    def num_records(self) -> int:
        """Return the number of records, which is the position of the first canary."""
        return len(self.labels)

    def __len__(self) -> int:
        return self.num_records + self.planted.canaries

    @cached_property
    def canary_records(self) -> tuple[Tensor, Tensor]:
        """Return inputs (m, *input_shape) and labels (m,) of canaries that are records, else (0,).

        Raises UserError for too few public records.
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
        """Return the positions of records, and those among the canaries, of ascending indices."""
        chosen, count = np.arange(len(self))[indices], self.num_records
        return chosen[chosen < count], chosen[chosen >= count] - count


@dataclass(frozen=True)
class UsersWithCanaries(UserDataset):
    """Users of training records followed by an audit's canaries, each a user.

    Only canaries in the sums: positions without records, whose clipped sum is the clip's norm along
    a coordinate. len counts users and canaries.
    """

    planted: CanaryAudit = field(kw_only=True)

    @classmethod
    def from_users(cls, users: UserDataset, planted: CanaryAudit) -> UsersWithCanaries:
        """Return the users followed by the canaries."""
        own = {part.name: getattr(users, part.name) for part in fields(UserDataset)}
        return cls(**own, planted=planted)

    @property
    def num_records(self) -> int:
        """Return the number of users, which is the position of the first canary."""
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
    """Apply an audit to a training; this base class, for a training without audit, does nothing."""

    @property
    def checkpoint_slots(self) -> Mapping[str, Tensor]:
        """Return the canaries' part of a checkpoint."""
        return {}

    def inputs_for(self, members: np.ndarray) -> np.ndarray:
        """Return the members of a step whose gradients are computed."""
        return members

    def labels_for(self, members: np.ndarray, labels: Tensor) -> Tensor:
        """Return the labels (B,) with which members are trained."""
        return labels

    def classes_for(self, members: np.ndarray, data: Any, step_plan: StepPlan) -> np.ndarray:
        """Return the classes (B,) by which members are sampled: their own targets."""
        if not len(members):
            return members
        return self.labels_for(members, data.targets(members)).cpu().numpy()

    def add_to_sums(self, rows: Tensor, members: Sequence[tuple[int, np.ndarray]]) -> None:
        """Add the canaries to this worker's clipped sums (rows, size). members: of each row."""

    def observe(self, noisy: Tensor, step_plan: StepPlan, reducer: Reducer) -> None:
        """Record the adversary's view of a released sum (size,); every worker calls it."""


class RecordCanaries(Canaries):
    """Drop records that are canaries and are out, after they were sampled."""

    def __init__(self, dataset: DatasetWithCanaries, present: np.ndarray) -> None:
        self._is_present = np.concatenate([np.ones(dataset.num_records, bool), present])

    def inputs_for(self, members: np.ndarray) -> np.ndarray:
        present: np.ndarray = members[self._is_present[members]]
        return present


class PairCanaries(Canaries):
    """Train records that are canaries with label 0 if they are in, with label 1 if they are out."""

    def __init__(self, dataset: DatasetWithCanaries, present: np.ndarray) -> None:
        self._has_other_label = np.concatenate([np.zeros(dataset.num_records, bool), ~present])

    def labels_for(self, members: np.ndarray, labels: Tensor) -> Tensor:
        swapped = torch.from_numpy(self._has_other_label[members])
        return torch.where(swapped, 1 - labels, labels)


class GradientCanaries(Canaries):
    """Add canaries whose gradient is the clip norm along a coordinate of its own.

    Under replace-one, one that is out has the opposite gradient. The adversary knows the records
    and which of them joined a step, so it knows their part of the sum: the guarantee covers that.
    It subtracts this part, and adds up the log likelihood ratios of the rest.
    """

    def __init__(
        self,
        dataset: DatasetWithCanaries | UsersWithCanaries,
        present: np.ndarray,
        plan: PrivacyPlan,
        size: int,
    ):
        self._num_records = dataset.num_records
        self._replaces_one = plan.adjacency == "replace-one"
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
        """Return the classes of records; for canaries the class that is sampled most often."""
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
        others, _ = reducer.sum_rows(self._record_sums, False)
        own = noisy[self._coordinates.to(noisy.device)].cpu()
        left = (own - others.cpu()).numpy() / step_plan.clip_norm
        noise, rate = step_plan.noise_multiplier, step_plan.sample_rate
        ratio = log_likelihood_ratio(left, noise, rate)
        if self._replaces_one:
            ratio = ratio - log_likelihood_ratio(-left, noise, rate)
        self._scores += torch.from_numpy(ratio)


def build_canaries(dataset: Dataset, run_key: bytes, plan: PrivacyPlan, size: int) -> Canaries:
    """Return the canaries of a run. size: of its gradient."""
    if not isinstance(dataset, DatasetWithCanaries | UsersWithCanaries):
        return Canaries()
    present = draw_coins(run_key, dataset.planted.canaries)
    if isinstance(dataset, UsersWithCanaries) or dataset.planted.inserts_gradients:
        return GradientCanaries(dataset, present, plan, size)
    if dataset.planted.replaces_record:
        return PairCanaries(dataset, present)
    return RecordCanaries(dataset, present)
