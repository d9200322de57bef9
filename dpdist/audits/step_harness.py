"""Run the real code of a training step on an audit's own records, and compare exact replays.

The harness runs the `PrivateStep` of a training: keyed sampling, clipped sums by the engine, the
reducer, noise, rounding and division. It replaces the model by a cheap one with two tensors, the
records, and the network between the workers, which take turns in one process. The replay checks
need no statistics: a step is done twice, and the results are compared to the last bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from dpdist.data.protocol import Records, UserRecords, Users
from dpdist.gradients.clipping import Clipping
from dpdist.gradients.engine import GradientEngine
from dpdist.privacy.ledger import Ledger
from dpdist.privacy.plan import StepPlan
from dpdist.training.collectives import Reducer, Shards
from dpdist.training.private_step import PrivateStep, build_shards

# --- the harness ------------------------------------------------------------------------------


WIDTH = 64  # coordinates: one record's gradient each
_GAIN = 100.0  # in units of the clip; the clip cuts every gradient down


class TwoProbeModel(nn.Module):
    """Two tensors of WIDTH weights. The record e_j has one gradient for weight j of both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 1, bias=False)
        self.second = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.first(inputs) + self.second(inputs)
        return output


@dataclass(frozen=True)
class ProbeRecords(Records):
    """Records with one coordinate each; -1 is a record without gradient.

    coordinates: in order of positions. label: the class of all records.
    """

    coordinates: np.ndarray
    name: str = "probes"
    label: int = 0

    def __len__(self) -> int:
        return len(self.coordinates)

    def batch(self, indices: np.ndarray | slice) -> Tensor:
        return torch.eye(WIDTH + 1)[self.coordinates[indices], :WIDTH]

    def targets(self, indices: np.ndarray | slice) -> Tensor:
        return torch.full((len(self.coordinates[indices]),), self.label, dtype=torch.int64)


def probe_users(coordinates: np.ndarray, max_records: int) -> UserRecords:
    """Return a user for each coordinate, of one record more than count in a step.

    All records of a user have the same gradient, so that whichever count, their clipped sum is
    that of one record.
    """
    each = max_records + 1
    whom = np.repeat(np.arange(len(coordinates)), each)
    return UserRecords(ProbeRecords(np.repeat(coordinates, each)), Users(whom, max_records))


class SequentialReducer(Reducer):
    """Worker 0 of several, whose parts are computed when the network would add them up."""

    def __init__(self, workers: int, other_sums: Callable[[], Sequence[Tensor]]) -> None:
        super().__init__(0, workers, torch.device("cpu"))
        self._others = other_sums

    def zero_rows(self, count: int, size: int) -> Tensor:
        self._buffer = self._buffer.new_empty(0)  # all parts lie there at once
        return super().zero_rows(count, size)

    def all_reduce(self, buffer: Tensor) -> None:
        for rows in self._others():
            buffer += torch.cat([rows.reshape(-1), torch.tensor([1.0, 0.0], dtype=torch.float64)])


class StepHarness:
    """One worker's private step on the audit's own records.

    step_plan: the step that is repeated, each time with the next step's keys. kind: the class of
    the step. max_records: the most records of a user that count in a step, if positions are users;
    None if they are records.
    """

    kind: ClassVar[type[PrivateStep]] = PrivateStep

    def __init__(
        self,
        step_plan: StepPlan,
        clipping: Clipping,
        workers: int,
        key: bytes,
        max_records: int | None = None,
    ) -> None:
        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            return gain * outputs[:, 0]

        gain = _GAIN * step_plan.clip_norm
        self.step_plan, self.workers, self.current_step = step_plan, workers, 0
        engine = GradientEngine(TwoProbeModel(), loss, clipping=clipping, micro_batch=2 * WIDTH)
        reducer = SequentialReducer(workers, self.clipped_sums_of_others)
        self.max_records = max_records
        self.step = self.kind(engine, self.records(np.arange(0)), key, "audit", reducer=reducer)

    def records(self, coordinates: np.ndarray) -> ProbeRecords | UserRecords:
        """Return a position for each coordinate: a record, or a user."""
        if self.max_records is None:
            return ProbeRecords(coordinates, label=self.step_plan.most_sampled_class)
        return probe_users(coordinates, self.max_records)

    def run_step(self, coordinates: np.ndarray, step: int) -> np.ndarray | None:
        """Return the release of a step on these records: (2, WIDTH) in units of the clip, or None.

        The division is undone. None: nothing was released.
        """
        self.step.data, self.current_step = self.records(coordinates), step
        self.step.shards = self.shards_of_rank(0)
        noisy, *_ = self.step.gradient(step, self.step_plan)
        return noisy.numpy().reshape(2, WIDTH) * (
            self.step_plan.expected_batch / self.step_plan.clip_norm
        )

    def shards_of_rank(self, rank: int) -> Shards:
        planned = round(self.step_plan.expected_batch / self.step_plan.sample_rate)
        place = Reducer(rank, self.workers, torch.device("cpu"))
        return build_shards(len(self.step.data), planned, place, False, nominal=False)

    def clipped_sums_of_others(self) -> list[Tensor]:
        """Return the sums that the other workers add."""
        parts = []
        for rank in range(1, self.workers):
            self.step.shards = self.shards_of_rank(rank)
            parts.append(self.step._clipped_sums(self.current_step, self.step_plan)[0])
        return parts


# --- exact replays ----------------------------------------------------------------------------


# Noise is on a grid of 2^-24 of its scale: among 1,024 numbers two are equal by chance with
# probability 1 %, and 8 with probability 1e-20. One key for two releases gives 128 equal numbers.
_COMMON = 8


def reuses_noise(harness: StepHarness) -> bool:
    """Return whether two of the first steps, or of two attempts at them, share noise.

    The difference of two such releases is noise-free. Without records all of a release is noise.
    """
    released = []
    for attempt in ("audit/0", "audit/1"):
        harness.step.attempt = attempt
        released += [harness.run_step(np.arange(0), step) for step in range(4)]
    noise = np.concatenate([seen.ravel() for seen in released if seen is not None])
    return len(noise) - len(np.unique(noise)) >= _COMMON


def forgets_releases(ledger: type[Ledger] = Ledger) -> bool:
    """Return whether a ledger, read again, lacks releases of an attempt that was re-executed."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        with ledger.open(path, "0" * 64) as kept:
            for attempt in ("first", "second"):
                kept.begin_attempt({"attempt": attempt})
                for step in range(5):
                    name = f"{attempt}/{step}".encode()
                    kept.record(step, hashlib.blake2b(name, digest_size=32).hexdigest())
        found = ledger.read(path)
        return found.release_counts != dict.fromkeys(range(5), 2)
