"""Planted faults, as libraries have shipped them: what the audits say of each.

A fault is the real mechanism with one piece replaced. `make audit-zoo` prints the table.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpdist.audits.mechanism import SCENARIOS, run_scenarios
from dpdist.audits.step_harness import StepHarness, forgets_releases, reuses_noise
from dpdist.core import console
from dpdist.gradients.clipping import make_clipping
from dpdist.gradients.engine import ClippedSum
from dpdist.gradients.noise import add_noise
from dpdist.gradients.sampling import poisson_sample
from dpdist.privacy.ledger import Ledger
from dpdist.privacy.plan import StepPlan
from dpdist.randomness.keys import derive_key
from dpdist.training.collectives import Shards
from dpdist.training.private_step import PrivateStep

ERROR = 1e-6  # of each verdict
RELEASES = 2_000
_WORKERS = 2


@dataclass(frozen=True)
class Fault:
    """description: what is wrong. found_in: where, in whose code. replay: finds it without any
    releases, and says how."""

    name: str
    description: str
    found_in: str
    harness_class: type[StepHarness] = StepHarness
    releases_needed: int = RELEASES
    workers: int = _WORKERS
    clipping: str = "flat"
    clip: float = 1.0
    replay: Callable[[], list[str]] | None = None

    def find(self, scenarios: Sequence[str] = SCENARIOS) -> list[str]:
        """The scenes, of these, or the replays that find it."""
        if self.replay is not None:
            return self.replay()
        return run_scenarios(
            self.build_harness, 1.0, self.releases_needed, ERROR, scenarios=scenarios
        ).rejected_scenarios

    def build_harness(self, step_plan: StepPlan) -> StepHarness:
        """Its pieces of a step."""
        clipping = make_clipping(self.clipping, step_plan.clip_norm * self.clip)
        return self.harness_class(
            step_plan, clipping, self.workers, derive_key(bytes(32), "zoo", repr(step_plan))
        )


class LessNoise(StepHarness):
    class kind(PrivateStep):
        def release(
            self, step: int, rows: Tensor, noise_std: float, flag: bool = False
        ) -> tuple[Tensor, bool]:
            return super().release(step, rows, 0.9 * noise_std, flag)


class MissingShare(StepHarness):
    """Every worker adds its share of the noise, and the last one's is not there."""

    class kind(PrivateStep):
        def release(
            self, step: int, rows: Tensor, noise_std: float, flag: bool = False
        ) -> tuple[Tensor, bool]:
            left = (self.reducer.world_size - 1) / self.reducer.world_size
            return super().release(step, rows, noise_std * math.sqrt(left), flag)


class Counting(PrivateStep):
    """joined: so many records joined since it was set to 0."""

    joined = 0

    def members(self, key: bytes, begin: int, end: int, step_plan: StepPlan) -> np.ndarray:
        chosen = super().members(key, begin, end, step_plan)
        self.joined += len(chosen)
        return chosen


class SkipsEmpty(StepHarness):
    """A step without records is left out, and the next one taken in its place."""

    kind = Counting

    def run_step(self, coordinates: np.ndarray, step: int) -> np.ndarray | None:
        for later in range(8):
            self.step.joined = 0
            found = super().run_step(coordinates, step + later * 1_000_003)
            if self.step.joined:
                return found
        return None


class RealizedDivisor(SkipsEmpty):
    """Divides by the number of records that joined."""

    def run_step(self, coordinates: np.ndarray, step: int) -> np.ndarray | None:
        self.step.joined = 0
        found = StepHarness.run_step(self, coordinates, step)
        joined = max(1, self.step.joined)
        return None if found is None else found * self.step_plan.expected_batch / joined


class DivisorOfRecords(StepHarness):
    """Divides by the rate times the true number of records, rounded down."""

    def run_step(self, coordinates: np.ndarray, step: int) -> np.ndarray | None:
        found = super().run_step(coordinates, step)
        expected = max(1, int(self.step_plan.sample_rate * len(coordinates)))
        return None if found is None else found * self.step_plan.expected_batch / expected


class BatchStatistic(StepHarness):
    """Normalizes inputs by their mean over the batch."""

    def run_step(self, coordinates: np.ndarray, step: int) -> np.ndarray | None:
        real = self.step.engine.clipped_sum

        def centered(inputs: Tensor, targets: Tensor, **more: Any) -> ClippedSum:
            middle = inputs.mean(0) if len(inputs) else 0.0
            return real(inputs - middle, targets, **more)

        self.step.engine.clipped_sum = centered  # type: ignore[method-assign]
        try:
            return super().run_step(coordinates, step)
        finally:
            self.step.engine.clipped_sum = real  # type: ignore[method-assign]


class EveryRankAllRecords(StepHarness):
    """No sampler shares the records out: every worker takes all of them."""

    def shards_of_rank(self, rank: int) -> Shards:
        records = len(self.step.data)
        return Shards(1, max(1, records), [(0, 0, records)])


class OneSeed(StepHarness):
    """Every worker draws its own sample from the same seed."""

    class kind(PrivateStep):
        def members(self, key: bytes, begin: int, end: int, step_plan: StepPlan) -> np.ndarray:
            return begin + poisson_sample(key, 0, end - begin, step_plan.sample_rate)


class Weighted(StepHarness):
    """A weighted sampler draws a record more often than the rate that is accounted."""

    class kind(PrivateStep):
        def members(self, key: bytes, begin: int, end: int, step_plan: StepPlan) -> np.ndarray:
            return poisson_sample(key, begin, end, min(1.0, 1.9 * step_plan.sample_rate))


class KeyTwice(StepHarness):
    """The noise key forgets the step."""

    class kind(PrivateStep):
        def release(
            self, step: int, rows: Tensor, noise_std: float, flag: bool = False
        ) -> tuple[Tensor, bool]:
            total, flagged = self.reducer.sum_rows(rows, flag)
            noisy = add_noise(total.numpy(), derive_key(self.key, "noise"), noise_std)
            return torch.from_numpy(noisy), flagged


class Forgetful(Ledger):
    """A new attempt begins with an empty count."""

    def _apply(self, record: dict[str, Any]) -> None:
        if record.get("kind") == "attempt":
            self._releases_per_step.clear()
        super()._apply(record)


def _noise(pieces: type[StepHarness]) -> Callable[[], list[str]]:
    fault = Fault("", "", "", pieces)
    step_plan = StepPlan(1.0, 1.0, 64.0, 1.0, None)
    return lambda: ["replay of keys"] if reuses_noise(fault.build_harness(step_plan)) else []


def _ledger(kind: type[Ledger]) -> Callable[[], list[str]]:
    return lambda: ["replay of a restart"] if forgets_releases(kind) else []


SOUND = (
    Fault("none, 1 worker", "the pieces as they are", "here", workers=1),
    Fault("none, 2 workers", "the pieces as they are", "here"),
    Fault("none: keys", "no noise twice, in steps or attempts", "here", replay=_noise(StepHarness)),
    Fault("none: ledger", "re-executed steps are charged", "here", replay=_ledger(Ledger)),
)
FAULTS = (
    Fault("noise x 0.9", "a tenth of the noise is missing", "any", LessNoise,
        releases_needed=20_000),
    Fault("missing share", "one of two workers' noise is missing", "noise in shares", MissingShare),
    Fault("per-tensor clip", "every tensor has the whole clip", "hand-written loops",
          clipping="per-layer", clip=math.sqrt(2)),
    Fault("all records on every rank", "a record counts once per worker",
          "Opacus #444: DPDDP without Poisson sampling", EveryRankAllRecords),
    Fault("empty batches skipped", "a release means that somebody joined",
          "Opacus 1.6, distributed sampler; #522", SkipsEmpty),
    Fault("one seed for all ranks", "another worker's record tells who joined",
          "samplers seeded alike", OneSeed),
    Fault("another sampler", "records join more often than accounted",
          "weighted samplers; reverse of Opacus #813", Weighted),
    Fault("realized divisor", "the size of the noise tells the batch",
          "asked for in Opacus #420 (ASGM)", RealizedDivisor),
    Fault("divisor of N", "the size of the noise tells the number of records",
          "Opacus #571, #819 (FEASGM)", DivisorOfRecords),
    Fault("batch statistic", "a record moves the others' gradients", "BatchNorm", BatchStatistic,
          workers=1),
    Fault("key used twice", "two releases, one noise", "restarts without a nonce",
          replay=_noise(KeyTwice)),
    Fault("forgotten attempt", "releases before a crash cost nothing", "checkpointed accountants",
          replay=_ledger(Forgetful)),
)  # fmt: skip


def main() -> int:
    """Print what is found of every fault, the sound pieces first; return the exit code, 1 when a
    fault is missed or sound pieces are accused."""
    rows, right = [], True
    for fault in (*SOUND, *FAULTS):
        found = fault.find()
        right = right and bool(found) == (fault in FAULTS)
        verdict = f"found: {', '.join(found)}" if found else "nothing found"
        rows.append([fault.name, verdict, f"{fault.description} ({fault.found_in})"])
    print(console.format_columns(["fault", "verdict", "what it is"], rows))
    print(f"each verdict is wrong with probability at most {ERROR:g}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
