"""One private step: sample, clip, sum, announce, add noise, divide.

A training takes it once for each step of its plan, an audit on its own records, and a custom loop
as often as its plan says. It knows neither a recipe nor a run folder. `StepData` states what it
needs of the data; sampling rate, clip and noise are those of the given `StepPlan`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dpdist.config.training import CANONICAL_SHARDS
from dpdist.core.errors import UserError
from dpdist.gradients import noise
from dpdist.gradients.clipping import max_batch
from dpdist.gradients.engine import GradientEngine, TrainingObjective, UserMembers
from dpdist.gradients.hooks import each_tensor
from dpdist.gradients.noise import add_noise
from dpdist.gradients.sampling import Blocks, poisson_sample, worker_range
from dpdist.privacy.ledger import Ledger, ReplayConflict
from dpdist.privacy.plan import StepPlan
from dpdist.randomness.keys import derive_key, key_id, stream_words
from dpdist.training.canaries import Canaries
from dpdist.training.collectives import Reducer, Shards, release_id
from dpdist.training.monitoring import StepMetrics


class StepData(Protocol):
    """Give a step its records, by position."""

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray) -> Any:
        """Return the inputs of the records at `indices`, (B, ...).

        They are a tensor, or a tuple or dict of such tensors.
        """

    def targets(self, indices: np.ndarray) -> Tensor:
        """Return their targets, (B, ...).

        Data may also have `for_step(key)` (`dpdist.Records`), which returns them as this step sees
        them. Data whose positions are users also have `members(indices)`
        (`dpdist.data.protocol.UserRecords`), and (B, K, ...) instead of (B, ...).
        """


class PrivateStep:
    """Release noisy, clipped sums of per-example gradients, one for each step.

    Guarantee: `gradient(step, step_plan)` releases the sum over a Poisson sample of rate
    `step_plan.sample_rate` (with rates by class, the largest of them). One record, or one user if
    the data's positions are users, counts for at most the engine's sensitivity. The sum gets
    Gaussian noise of standard deviation `step_plan.noise_std` from a key that no other step has. So
    each call costs what `PrivacyPlan` accounts for that step, if `check_clip` accepts the engine.
    If there is a ledger, it records the release durably before its holder adds the noise; other
    workers add the same noise and write nothing. A second call for one step, on the same data and
    with the same key, is the same release and costs nothing. A different sum, such as that of a
    changed model, raises an error, since it would get the same noise. Without a ledger, this object
    knows only its own releases.

    Each argument is an attribute of the same name.

    Args:
        engine: clips and adds up gradients. Its parameters are read, never written.
        data: the records, all that the plan counts.
        key: 32 secret bytes of this run; anyone who knows them can subtract the noise.
        attempt: label that is in the keys of all steps; use a new one whenever a sum may differ.
        task: turns labels into targets; default: the labels themselves.
        reducer: adds up over the workers; default: only this process.
        shards: the records of this worker; default: all of them.
        noise_on_device: whether noise is drawn on the device of the sum instead of on the CPU.
        ledger: every release is announced there first. Only worker 0 may have one.
        permit: function of a step's number that returns once the step may be announced.
        announcing: function that is called on every worker with a function that announces the step;
            it returns on all workers once that is done.
        canaries: values that an audit adds to the sums.
        announced: attempts whose steps are replayed, as (first step, end, label).

    Example:
        >>> import torch
        >>> from dpdist import FlatClipping, GradientEngine, PrivacyPlan, PrivateStep
        >>> from dpdist.gradients.engine import cross_entropy
        >>> class Rows:
        ...     inputs, labels = torch.randn(100, 4), torch.zeros(100, dtype=torch.int64)
        ...     def __len__(self): return len(self.labels)
        ...     def batch(self, indices): return self.inputs[indices]
        ...     def targets(self, indices): return self.labels[indices]
        >>> plan = PrivacyPlan.dp_sgd(
        ...     records=100, batch_size=20, noise_multiplier=1.0, steps=3, delta=1e-3
        ... )
        >>> model = torch.nn.Linear(4, 2)
        >>> engine = GradientEngine(model, cross_entropy, clipping=FlatClipping(1.0))
        >>> step = PrivateStep(engine, Rows(), key=bytes(32))
        >>> step.check_clip(plan.clip_norm)
        >>> gradient, private, _ = step.gradient(0, plan.step(0))
        >>> gradient.shape
        torch.Size([10])
    """

    def __init__(
        self,
        engine: GradientEngine,
        data: StepData,
        key: bytes,
        attempt: str = "",
        *,
        task: TrainingObjective | None = None,
        reducer: Reducer | None = None,
        shards: Shards | None = None,
        noise_on_device: bool = False,
        ledger: Ledger | None = None,
        permit: Callable[[int], None] = lambda step: None,
        announcing: Callable[[Callable[[], None]], None] = lambda announce: announce(),
        canaries: Canaries | None = None,
        announced: Sequence[tuple[int, int, str]] = (),
    ) -> None:
        if reducer is None:
            reducer = Reducer(0, 1, engine.parameters[0].device)
        if shards is None:
            shards = build_shards(len(data), len(data), reducer, False, nominal=False)
        self.engine, self.data, self.key, self.attempt = engine, data, key, attempt
        # Without a ledger: the id of each released sum, by the label that keys its noise.
        self._released: dict[str, str] = {}
        if hasattr(data, "users"):  # positions are users: one clip for each
            engine.records_per_example = data.users.max_records
        self.task, self.reducer, self.shards = task or TrainingObjective(), reducer, shards
        self.noise_on_device = noise_on_device
        self.ledger, self.permit, self.announcing = ledger, permit, announcing
        self.canaries, self.announced = canaries or Canaries(), announced

    def check_clip(self, clip_norm: float) -> None:
        """Raise UserError if one record may move a sum by more than `clip_norm`. Returns nothing.

        Args:
            clip_norm: the plan's bound, an L2 norm in the unit of the gradients.
        """
        check_clip(self.engine, clip_norm)

    def attempt_of(self, step: int) -> str:
        """Return the label, a str, that the keys of a step contain.

        Args:
            step: number of the step.

        Returns:
            For a replayed step the label in `announced`, for a new step this object's `attempt`.
        """
        replayed = (label for first, end, label in self.announced if first <= step < end)
        return next(replayed, self.attempt)

    def draw_key(self, step: int, *labels: str | int) -> bytes:
        """Return the secret key of a step's random draws for records, 32 bytes.

        Args:
            step: number of the step.
            labels: further labels; different labels give different keys.
        """
        return derive_key(self.key, "draw", self.attempt_of(step), step, *labels)

    def gradient(
        self, step: int, step_plan: StepPlan, flag: bool = False
    ) -> tuple[Tensor, StepMetrics, bool]:
        """Return the noisy gradient of a step, with private metrics and a flag.

        Args:
            step: number of the step; it is in all its keys.
            step_plan: rate, clip and noise; `PrivacyPlan.step(step)`.
            flag: a bool for the other workers to see.

        Returns:
            A tuple of three. First the gradient, float64 (size,): the noisy sum divided by the
            expected batch size; the next step overwrites it. Second a `StepMetrics` of this
            worker's records, PRIVATE: `examples` (int), `nonfinite` (int, those without a finite
            gradient) and `loss_sum` (float). Third a bool: True if any worker passed `flag=True`.
        """
        rows, seen = self._clipped_sums(step, step_plan)
        noisy, flagged = self.release(step, rows, step_plan.noise_std, flag)
        self.canaries.observe(noisy, step_plan, self.reducer)
        # Not by a number, whose reciprocal a GPU multiplies by: the same bits on every device.
        return noisy.div_(noisy.new_full((1,), step_plan.expected_batch)), seen, flagged

    def _clipped_sums(self, step: int, step_plan: StepPlan) -> tuple[Tensor, StepMetrics]:
        """Compute this worker's part of the step: PRIVATE.

        Returns:
            Sums, float64 (rows, size), and counts of their records.
        """
        engine, device = self.engine, self.reducer.device
        data = self._data_of(step)
        engine.blocks = Blocks.for_batches(
            self.shards.largest_shard, step_plan.mean_rate, step_plan.batch_cap
        )
        sample_key = derive_key(self.key, "sample", self.attempt_of(step), step)
        draw_key = self.draw_key(step)
        rows = self.reducer.zero_rows(self.shards.num_rows, engine.size)
        seen, joined = StepMetrics(), []
        for row, begin, end in self.shards.local_shards:
            members = self._members_of_shard(sample_key, row, begin, end, step_plan)
            joined.append((row, members))
            engine.shard = row if self.shards.num_rows > 1 else self.reducer.rank
            members = self.canaries.inputs_for(members)
            inputs = each_tensor(lambda each: each.to(device), data.batch(members))
            labels = self.canaries.labels_for(members, data.targets(members)).to(device)
            ids, own = torch.from_numpy(members), _user_members(data, members, device)
            targets = self.task.target_function(engine, inputs, labels, draw_key, ids)
            clipped = engine.clipped_sum(
                inputs, targets, draw_key=draw_key, record_ids=ids, out=rows[row], members=own
            )
            seen.examples += clipped.examples
            seen.nonfinite += clipped.nonfinite
            seen.loss_sum += clipped.loss_sum
            seen.details = clipped.details
        self.canaries.add_to_sums(rows, joined)
        return rows, seen

    def _data_of(self, step: int) -> StepData:
        """Return the data as the step sees them, with random transforms under keys of the step."""
        if not hasattr(self.data, "for_step"):
            return self.data
        key = derive_key(self.key, "data", self.attempt_of(step), step)
        seen: StepData = self.data.for_step(key)
        return seen

    def _members_of_shard(
        self, key: bytes, row: int, begin: int, end: int, step_plan: StepPlan
    ) -> np.ndarray:
        """Sample the records of one shard: of a range, or those that the key hashes into it."""
        count = self.shards.hashed
        if not count:
            return self.members(key, begin, end, step_plan)
        own = row if self.shards.num_rows > 1 else self.reducer.rank
        drawn = self.members(key, 0, len(self.data), step_plan)
        words = stream_words(derive_key(key, "shards"), 0, len(self.data))[drawn]
        return np.asarray(drawn[words % np.uint64(count) == own])

    def members(self, key: bytes, begin: int, end: int, step_plan: StepPlan) -> np.ndarray:
        """Return the positions of the records that join a step, by Poisson sampling.

        Args:
            key: 32 secret bytes of the step's sample.
            begin: first position that may join.
            end: one after the last position that may join.
            step_plan: sampling rates and batch cap. If rates depend on a record's class, the class
                is the record's own target, before random transforms.

        Returns:
            An int64 array (B,) of sorted positions in [begin, end). They are positions of users if
            the data's positions are users. B is random, and may be 0.
        """
        return poisson_sample(
            key, begin, end, step_plan.sample_rate,
            batch_cap=step_plan.batch_cap, records=len(self.data),
            class_rates=step_plan.rates_by_class,
            classes_of=lambda chosen: self.canaries.classes_for(chosen, self.data, step_plan),
        )  # fmt: skip

    def release(
        self, step: int, rows: Tensor, noise_std: float, flag: bool = False
    ) -> tuple[Tensor, bool]:
        """Return the sum of all workers' rows with Gaussian noise, and a flag.

        The ledger's entry is durable before worker 0 draws its noise. A method that computes its
        own sums calls this instead of `gradient`.

        Args:
            step: number of the step.
            rows: float64 (rows, size), bounded as in the plan; it is overwritten.
            noise_std: standard deviation of the noise on each number of the sum.
            flag: a bool for the other workers to see.

        Returns:
            A pair: the noisy sum, float64 (size,); and a bool, True if any worker passed
            `flag=True`.
        """
        total, flagged = self.reducer.sum_rows(rows, flag)
        summed = total.cpu().numpy()
        label = f"{key_id(self.key)}/{self.attempt_of(step)}/{step}"

        def announce() -> None:
            found = release_id(label, summed)
            if self.ledger is not None:
                self.permit(step)
                _announce(self.ledger, step, found)
            elif self._released.setdefault(label, found) != found:
                raise ReplayConflict(
                    f"step {step}: must be the sum that was released before, got another one, "
                    "which would have the same noise; make a PrivateStep with a new `attempt`"
                )

        self.announcing(announce)
        noise_key = derive_key(self.key, "noise", self.attempt_of(step), step)
        if self.noise_on_device:
            return noise.add_device_noise(total, noise_key, noise_std), flagged
        noisy = add_noise(summed, noise_key, noise_std, 0, summed)
        return torch.from_numpy(noisy), flagged


def _user_members(data: StepData, indices: np.ndarray, device: torch.device) -> UserMembers | None:
    """Return the records of these positions; None if a position is one record."""
    if not hasattr(data, "members"):
        return None
    ids, present = data.members(indices)
    return UserMembers(torch.from_numpy(ids), torch.from_numpy(present).float().to(device))


def _announce(ledger: Ledger, step: int, release: str) -> None:
    """Put the release on record, durably, before its noise is added.

    The id covers the bits of the sum: an exact replay is one entry, and the same noise is never
    added to two different sums.
    """
    try:
        ledger.record(step, release)
    except ReplayConflict:
        ledger.new_epoch(f"step {step} could not be replayed exactly")
        raise


def charge_rest(ledger: Ledger, steps: int) -> None:
    """Charge the steps of a plan that were never released.

    A training that ends early, for unknown reasons, has the privacy cost of the whole plan.
    """
    released = ledger.release_counts
    for step in range(steps):
        if step not in released:
            ledger.record(step, hashlib.sha256(f"step {step} was not taken".encode()).hexdigest())


def check_clip(engine: GradientEngine, clip_norm: float, batch: float = 0.0) -> None:
    """Raise UserError if one record may move an executed sum by more than `clip_norm`.

    batch: largest expected number of records in a step, for which the slack for rounding has a
    limit (`dpdist.gradients.clipping.sum_slack`), with room for ten standard deviations.
    """
    if engine.clipping.sensitivity > clip_norm * (1 + 1e-9):
        raise UserError("the clipping's sensitivity exceeds the plan's clip norm")
    if batch + 10 * math.sqrt(batch) > (limit := max_batch(engine.precision)):
        raise UserError(
            f"training.batch_size: must be expected to stay below {limit:,} in {engine.precision}, "
            f"got {batch:,.0f}: the clip has room for the rounding of that many; take more steps"
        )


def build_shards(
    records: int, planned: int, reducer: Reducer, reproducible: bool, *, nominal: bool
) -> Shards:
    """Cut the records into shards at the plan's number of records.

    nominal: that number was declared, and differs from the real one. The last range takes the
    records beyond it, and a step hashes its records into shards. So if a record is left out, and
    those after it move up by one position, the others keep their shards and blocks: the words by
    which a position joins, and its shard, are independent of all other positions' and equal in
    distribution (so are blocks, as far as their hash is random), and each record is paired with
    the words of the position it had (a coupling). One keyed block changes, as at a fixed number of
    records, and none if the record does not join (`dpdist.gradients.clipping.sum_slack`). Ranges
    would move a record at each border.
    """
    count = CANONICAL_SHARDS if reproducible else reducer.world_size
    hashed = count if nominal and count > 1 else 0

    def bounds(shard: int) -> tuple[int, int]:
        begin, end = worker_range(planned, shard, count)
        return min(begin, records), records if shard == count - 1 else min(end, records)

    largest = -(-planned // count)
    if not reproducible:
        return Shards(1, largest, [(0, *bounds(reducer.rank))], hashed)
    rows = range(*worker_range(count, reducer.rank, reducer.world_size))
    return Shards(count, largest, [(row, *bounds(row)) for row in rows], hashed)
