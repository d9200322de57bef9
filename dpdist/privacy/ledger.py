"""The ledger: a write-ahead journal of what was really released.

Every release is durable in the file BEFORE its noise is added. Crashes and restarts then cannot
hide a release: an exact replay (same epoch, step and release id) is the same release and is stored
once; anything else is charged again. `dpdist.privacy.journal` says how the file is kept.

An attempt epoch numbers the tries. Everything that can change a floating-point sum (recipe, world
size, micro-batch, device, code version) belongs to an attempt's identity; when it changes, the
epoch goes up, and sampling and noise are drawn afresh under the new epoch. The same noise added to
two different sums would cancel in their difference and reveal data: `record` refuses it.

A plain copy of the folder cannot be told from the original. So every process that goes on draws a
nonce of its own, written here before its first new step: two copies share the noise of the steps
that were announced before they parted, whose sums `record` holds them to, and no other. To go on
with fresh randomness is the same mechanism (adaptive composition): a step that is new costs once,
whoever takes it, and an announced one is replayed under the nonce it was announced under.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dpdist.privacy.guarantee import Guarantee
from dpdist.privacy.journal import Anchor, ChainedJournal, JournalError, OnJournal
from dpdist.privacy.phases import Phase
from dpdist.privacy.plan import PrivacyPlan

if TYPE_CHECKING:
    import dp_accounting as dpa

LedgerError = JournalError
_KIND = "plan"


class ReplayConflict(LedgerError):
    """Same epoch and step, different sum: the same noise would be added to it. Take a new epoch."""


class NoAnswersLeft(LedgerError):
    """All answers that the plan pays for were given, or were begun and lost."""


def new_nonce() -> str:
    """Return a random label for one process, from the operating system's generator."""
    return secrets.token_hex(16)


class Ledger(OnJournal):
    """What was released under one plan. Use `open` to write, `read` to look at it."""

    def __init__(self, journal: ChainedJournal) -> None:
        self.path = journal.path
        self.plan_fingerprint: str = journal.header["plan"]
        self._journal = journal
        self._epoch: int | None = None
        self._identity: dict[str, str] = {}
        self._attempts: list[dict[str, Any]] = []
        self._nonces: list[str] = []  # of the processes that wrote here, the last one in force
        self._nonce: str | None = None  # of this process
        self._releases: dict[tuple[int, int], str] = {}
        self._drawn: dict[tuple[int, int], str] = {}
        self._per_step: Counter[int] = Counter()
        self._asked: list[tuple[str, str]] = []  # question and nonce
        self._answers: dict[str, list[float]] = {}
        for record in journal.records:
            self._apply(record)

    # --- opening

    @classmethod
    def open(cls, path: str | Path, plan_fingerprint: str, *, nonce: str | None = None) -> Ledger:
        """Create the ledger of a plan, or load it and append to it.

        nonce: of this process, where it had the ledger open before. Holds an exclusive lock until
        `close`. Raises LedgerError if the file is corrupt, was written under another plan, or stays
        locked by another process for 15 seconds.
        """
        journal = ChainedJournal.open(path, _KIND, {"plan": plan_fingerprint})
        found = journal.header["plan"]
        if found != plan_fingerprint:
            journal.close()
            raise LedgerError(
                f"{path} belongs to plan {found[:12]}..., not to "
                f"{plan_fingerprint[:12]}...: another plan needs another run folder"
            )
        ledger = cls(journal)
        ledger._nonce = nonce
        return ledger

    @classmethod
    def read(cls, path: str | Path) -> Ledger:
        """Load a ledger without locking it; it cannot be written. Raises LedgerError, OSError."""
        return cls(ChainedJournal.read(path, _KIND))

    # --- writing

    def _apply(self, record: dict[str, Any]) -> None:
        kind = record.get("kind")
        if kind == "attempt":
            self._epoch = record["epoch"]
            self._identity = record["identity"]
            self._attempts.append(record)
            self._nonces.append(record["nonce"])
        elif kind == "process":
            self._nonces.append(record["nonce"])
        elif kind == "release":
            key = record["epoch"], record["step"]
            self._releases[key] = record["id"]
            self._drawn[key] = self._nonces[-1]
            self._per_step[record["step"]] += 1
        elif kind == "asked":
            self._asked.append((record["id"], self._nonces[-1] if self._nonces else ""))
        elif kind == "answered":
            self._answers[record["id"]] = record["values"]
        else:
            raise LedgerError(f"{self.path} holds an unknown kind of record: {kind!r}")

    def _append(self, record: dict[str, Any]) -> None:
        self._journal.append(record)
        self._apply(record)

    def begin_attempt(self, identity: dict[str, str]) -> int:
        """The attempt epoch for a start or restart with this identity.

        Same identity as the last attempt: same epoch, steps may be replayed exactly. Otherwise the
        next epoch, recorded durably. Identity: all that can change the floating-point sum.
        """
        identity = {str(key): str(value) for key, value in identity.items()}
        if self._epoch is None or identity != self._identity:
            self._new_attempt(identity, "start" if self._epoch is None else "identity changed")
        assert self._epoch is not None
        return self._epoch

    def new_epoch(self, reason: str) -> int:
        """Force the next epoch, e.g. after a ReplayConflict. LedgerError before any attempt."""
        if self._epoch is None:
            raise LedgerError("begin_attempt comes before new_epoch")
        self._new_attempt(self._identity, reason)
        return self._epoch

    def _new_attempt(self, identity: dict[str, str], reason: str) -> None:
        epoch = 0 if self._epoch is None else self._epoch + 1
        record = {"kind": "attempt", "epoch": epoch, "identity": identity, "reason": reason}
        self._nonce = None  # one of its own for each
        self._append({**record, "nonce": self.nonce})

    @property
    def nonce(self) -> str:
        """The random label of this process, in the keys of all that it releases anew."""
        if self._nonce is None:
            self._nonce = new_nonce()
        return self._nonce

    def announce_process(self) -> str:
        """Return `nonce`, durably on record: what is recorded from now on is drawn under it."""
        if self.nonce not in self._nonces[-1:]:
            self._append({"kind": "process", "nonce": self.nonce})
        return self.nonce

    def announced(self, first: int) -> list[tuple[int, int, str]]:
        """Return the steps from `first` on that the current attempt has announced.

        Such a step may have been seen: it is replayed under the nonce it was announced under, and
        only its own sum gets that noise. Returns (first step, end, nonce) of each run of steps.
        """
        found: list[tuple[int, int, str]] = []
        drawn = {step: n for (epoch, step), n in self._drawn.items() if epoch == self._epoch}
        for step in sorted(step for step in drawn if step >= first):
            nonce = drawn[step]
            if found and found[-1][1:] == (step, nonce):
                found[-1] = (found[-1][0], step + 1, nonce)
            else:
                found.append((step, step + 1, nonce))
        return found

    def record(self, step: int, release_id: str) -> Literal["new", "replay"]:
        """Announce the release of `step` (from 0) in the current epoch; durable when this returns,
        behind the nonce of the process that takes a new step.

        release_id: hex, at least 64 digits, a hash of key id, epoch, step, world size and the bytes
        of the pre-noise sum. Returns "replay" if exactly this release is on record already.
        Raises ReplayConflict, and records nothing, if another sum is on record for this epoch and
        step; LedgerError if it cannot be made durable; ValueError for a malformed argument.
        """
        if self._epoch is None:
            raise LedgerError("begin_attempt comes before record")
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step must be a whole number >= 0, got {step!r}")
        _check_id(release_id)
        known = self._releases.get((self._epoch, step))
        if known == release_id:
            return "replay"
        if known is not None:
            raise ReplayConflict(
                f"step {step} of epoch {self._epoch} was already announced with a different sum; "
                "adding the same noise to this one would reveal their difference"
            )
        self.announce_process()
        self._append({"kind": "release", "epoch": self._epoch, "step": step, "id": release_id})
        return "new"

    def ask(self, question: str, plan: PrivacyPlan) -> int:
        """Count an answer before its noise is drawn: its number, from 0; durable when this returns,
        and counted whatever happens next. question: as an id in `record`.

        Raises NoAnswersLeft, and counts nothing, beyond those that the plan pays for; LedgerError
        if it cannot be made durable.
        """
        _check_id(question)
        if self.asked >= plan.answers:
            raise NoAnswersLeft(f"all {plan.answers:,} answers that epsilon pays for were given")
        self.announce_process()
        self._append({"kind": "asked", "id": question})
        return self.asked - 1

    def keep(self, question: str, values: Sequence[float]) -> None:
        """Keep an answer that was counted, with its noise: to give it again costs nothing."""
        self._append({"kind": "answered", "id": question, "values": list(values)})

    # --- reading

    @property
    def asked(self) -> int:
        """Answers that were counted."""
        return len(self._asked)

    def answer(self, question: str) -> list[float] | None:
        """The answer that was given to this question, or None."""
        return self._answers.get(question)

    def asked_under(self, question: str) -> str | None:
        """The nonce under which an answer to this question was counted first, kept or lost; None
        where none was."""
        return next((nonce for asked, nonce in self._asked if asked == question), None)

    @property
    def answers(self) -> tuple[list[float], ...]:
        """Those that were kept."""
        return tuple(self._answers.values())

    @property
    def anchor(self) -> Anchor:
        """Names everything on record now: kept with what is made of these releases."""
        return self._journal.anchor

    def reaches(self, anchor: Anchor) -> bool:
        """Whether everything on record when `anchor` was taken still is."""
        return self._journal.reaches(anchor)

    @property
    def epoch(self) -> int | None:
        """The current attempt epoch; None before the first attempt."""
        return self._epoch

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """Every attempt: epoch, identity, reason."""
        return [dict(attempt) for attempt in self._attempts]

    @property
    def releases(self) -> dict[int, int]:
        """step -> number of distinct releases (one per epoch in which it was announced)."""
        return dict(self._per_step)

    def steps_of(self, epoch: int) -> set[int]:
        """The steps that were released in one attempt epoch."""
        return {step for of, step in self._releases if of == epoch}

    def repeats(self, step: int, identity: dict[str, str] | None = None) -> int:
        """Steps on record, from `step` on, that are charged again when an attempt of that identity
        (default: the current one) takes them; an exact replay is not."""
        later = {done for done in self._per_step if done >= step}
        if self._epoch is None or identity not in (None, self._identity):
            return len(later)
        return len(later - self.steps_of(self._epoch))

    @property
    def processes(self) -> tuple[str, ...]:
        """The nonces of all processes that wrote here, in order, each once."""
        return tuple(dict.fromkeys(self._nonces))

    def made(self, plan: PrivacyPlan) -> dict[str, tuple[int, ...]]:
        """Return what each process released first, by its nonce: how many units (`Phase.units`) of
        each of the plan's phases.

        What is charged at once is 1 for the process under whose nonce it was drawn: votes when they
        were counted, all else in the first attempt. Steps that are free behind it are not counted.
        """
        found = {nonce: [0] * len(plan.phases) for nonce in self.processes}
        for (_, step), nonce in self._drawn.items():
            place = plan.place_of(step)
            found[nonce][place] += plan.phases[place].units is not None
        for place, phase in enumerate(plan.phases):
            if phase.pays_for:
                drawn = [nonce for _, nonce in self._asked if nonce in found]
            else:
                drawn = [attempt["nonce"] for attempt in self._attempts]
            if phase.units is None:
                for nonce in drawn[:1]:
                    found[nonce][place] = 1
            elif phase.pays_for:
                for nonce in drawn:
                    found[nonce][place] += 1
        return {nonce: tuple(counts) for nonce, counts in found.items()}

    def left(self, plan: PrivacyPlan) -> tuple[int, ...]:
        """Return how many units of each of the plan's phases nobody has released yet."""
        done = [sum(counts) for counts in zip(*self.made(plan).values(), strict=True)]
        done = done or [0] * len(plan.phases)
        for step, releases in self._per_step.items():
            place = plan.place_of(step)
            done[place] -= (releases - 1) * (plan.phases[place].units is not None)
        planned = (1 if phase.units is None else phase.units for phase in plan.phases)
        return tuple(units - gone for units, gone in zip(planned, done, strict=True))

    @property
    def superseded(self) -> int:
        """Releases charged beyond the first of each step."""
        return sum(self._per_step.values()) - len(self._per_step)

    def phases(self, plan: PrivacyPlan) -> tuple[Phase, ...]:
        """What was released, as phases: the plan's with their real counts.

        Raises LedgerError if the ledger was written under another plan.
        """
        if plan.fingerprint() != self.plan_fingerprint:
            raise LedgerError(f"{self.path} was not written under this plan")
        counts = [0 for _ in plan.counts()]
        for step, releases in self._per_step.items():
            counts[plan.phase_of(step)] += releases
        return plan.with_counts(counts)

    def event(self, plan: PrivacyPlan) -> dpa.DpEvent:
        """The dp_accounting event of everything on record (the worst path, with parallel parts)."""
        return plan.worst_of(plan.alternatives(self.phases(plan)))

    def guarantee(self, plan: PrivacyPlan, delta: float | None = None) -> Guarantee:
        """What is proved for everything on record, superseded attempts included.

        Each distinct (epoch, step) is one release with that step's parameters; equal to
        plan.guarantee(steps=n) after n undisturbed steps.
        """
        return plan.guarantee_of(plan.alternatives(self.phases(plan)), delta)


def _check_id(release_id: str) -> None:
    try:
        valid = len(bytes.fromhex(release_id)) >= 32
    except (ValueError, TypeError):
        valid = False
    if not valid:
        raise ValueError("a release id is at least 32 bytes in hex")
