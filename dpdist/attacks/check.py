"""Certificates against attacks: no other class may be certified inside a certified radius.

Each certified input is attacked within its radius and certified again at the attacked point, with
fresh noise and in the same way. A *contradiction* is another class certified there. One noisy
answer of another class is none, and neither is ABSTAIN: both may happen to a valid certificate.

Certificates are wrong with probability alpha each, so some contradictions are allowed. Let A points
be tried for each input. An input's contradiction needs a wrong first certificate (at most alpha)
or, where the first is right, a wrong one at one of the points (at most alpha each, by noise drawn
after the point was fixed): at most (1 + A) alpha by the union bound, for every input that was
*submitted* to certification. Among the certified ones alone the share of wrong certificates may be
larger, so the count is compared with all of them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dpdist import bulk, models
from dpdist.adversary.balls import distance
from dpdist.adversary.names import NORMS, Norm
from dpdist.attacks import table as tables
from dpdist.attacks.counting import Counters
from dpdist.attacks.job import Attacking, Data
from dpdist.attacks.plausible import Plausibility, plausibility
from dpdist.attacks.reading import VERDICT
from dpdist.attacks.worker import Assignment, Attacker, Block
from dpdist.base.errors import UserError
from dpdist.base.reading import shown
from dpdist.base.storage import write_json
from dpdist.bulk.job import Book, Item, Row
from dpdist.certification import reading
from dpdist.certification.certificate import Certificate, SampledPlace
from dpdist.certification.classifier import stated_form
from dpdist.certification.verdict import ABSTAIN

if TYPE_CHECKING:
    from dpdist.attacks.settings import AttackSettings


@dataclass(frozen=True)
class _Shared:
    """again: how points are certified. place: where the classifier is random then. votes: whether
    the attacked claim speaks of votes of draws, or of their mean scores."""

    assignment: Assignment
    again: Certificate
    place: SampledPlace
    votes: bool


class Checker:
    """Called with a block of certified inputs; returns a JSON row for each attacked point."""

    def __init__(self, shared: _Shared) -> None:
        assignment, again = shared.assignment, shared.again
        self._attacker = Attacker(assignment)
        self._assignment, self._again, self._place = assignment, again, shared.place
        self._votes = shared.votes
        self._counters = Counters(assignment.counted, assignment.source, (again.n0,))

    def __call__(self, block: Block) -> list[Row]:
        certified = torch.from_numpy(self._assignment.targets[block.low : block.high].copy())
        indices = self._assignment.indices[block.low : block.high].tolist()
        points, centres = self._attacker.points(block, certified), self._attacker.centres(block)
        moved = distance(points.numpy(), centres.numpy(), self._assignment.settings.norm)
        counter = self._counters.named(f"certify/{block.attack}")
        rows = []
        for i, (index, target) in enumerate(zip(indices, certified.tolist(), strict=True)):
            verdict = self._again.certify_other(
                counter, points[i], index, target, self._counters.batch, self._place
            )
            verdict = self._again.verdict_on(self._votes, verdict, self._place)
            rows.append(
                {
                    "attack": block.attack,
                    "index": index,
                    "certified": target,
                    "radius": float(block.sizes[i]),
                    "distance": float(moved[i]),
                    "selected": verdict.selected,
                    "prediction": verdict.prediction,
                    "k": verdict.k,
                    "n": verdict.n,
                    "p_lower": verdict.p_lower,
                    "contradiction": verdict.prediction not in (ABSTAIN, target),
                }
            )
        return rows


class Check(Attacking):
    """Attacks on the certificates of a table, each within its radius; and their verdict."""

    file, schema, columns = tables.CHECK_TABLE, tables.CHECK_SCHEMA, tables.CHECK_COLUMNS
    order, purpose, worker = ("attack", "index"), "check certificates", Checker
    verdict: Plausibility  # of the finished job

    def __init__(
        self,
        model_folder: Path,
        dataset: Data,
        certificates: Path,
        settings: AttackSettings,
        claim: str | None = None,
        trusted_factory: str | None = None,
    ) -> None:
        found = reading.read(certificates)
        _refuse_others(found, model_folder, dataset)
        found, rows, self._votes = _claimed(found, claim)
        self._found, self._claim = found, claim
        self._submitted = [rows[i] for i in settings.indices(len(rows))]
        self._certified = [row for row in self._submitted if row["prediction"] != ABSTAIN]
        if not self._certified:
            count = len(self._submitted)
            raise UserError(f"{found.path}: none of the {count} chosen inputs is certified")
        # Our own probe fills in the rest. Attacks count on CPUs.
        like = replace(stated_form(found.about, found.path), notes=(), check="").on_cpu()
        like.check_memory(dataset.batch(slice(0, 1)).shape[1:], found.path)
        norm: Norm = "l2" if found.norm == "l2" else "linf"  # no other passes
        settings = replace(settings, norm=norm, sizes=None, n=found.n)
        if found.attacked_as is None:
            raise UserError(
                f"{found.path}: only Gaussian smoothing can be attacked, not {found.noise}"
            )
        self._again, self._place = found.kind.again(found, norm, like.batch)
        settings = replace(settings, sigma=self._again.sigma)
        self.answers, self.certain = self._again.n0 + self._again.n, self._again.n0
        super().__init__(
            model_folder, dataset, settings, self._column("index"), self._column("prediction"),
            trusted_factory, like, self._votes,
        )  # fmt: skip

    def _column(self, name: str) -> np.ndarray:
        return np.array([row[name] for row in self._certified])

    def identity(self) -> dict[str, Any]:
        about = {
            "certificates": _digest(self._submitted),
            "again": self._again.model_dump(mode="json"),
        }
        if self._votes != self._found.by_votes:
            about[tables.ANSWERS] = tables.VOTES if self._votes else tables.MEAN_SCORES
        return {**super().identity(), **about, "claim": self._claim}

    def blocks(self, rows: list[slice]) -> dict[Item, Block]:
        radii, self._each = self._column("radius"), len(rows)
        return {
            f"{attack} rows {part.start}": Block.of(attack, part, radii)
            for attack in self.assignment.settings.attacks
            for part in rows
        }

    def begin(self, output: Path) -> dict[str, Any]:
        bank = self._found.about["settings"].get("noise_bank")
        about = {tables.SUBMITTED: len(self._submitted), tables.INDEPENDENT: not bank}
        return super().begin(output) | about

    def shared(self) -> _Shared:
        return _Shared(self.assignment, self._again, self._place, self._votes)

    def finish(self, book: Book, output: Path) -> list[Row]:
        by_attack: dict[str, list[list[Row]]] = {}
        for key, some in book.rows.items():
            by_attack.setdefault(str(key).rsplit(" rows ", 1)[0], []).append(some)
        # Of all attacks that the folder has: a weaker one does not take back what one found.
        whole = {name: some for name, some in by_attack.items() if len(some) == self._each}
        rows = [row for some in whole.values() for part in some for row in part]
        found, settings = self._found, self.assignment.settings
        self.verdict = verdict = plausibility(
            len({row["index"] for row in rows if row["contradiction"]}),
            len(self._submitted),
            found.alpha,
            len(whole),
            independent=not found.about["settings"].get("noise_bank"),
        )
        about = {
            **asdict(verdict),
            "plausible": verdict.plausible,
            "alpha": found.alpha,
            "certified": len(self._certified),
            "points": len(rows),
            "same_class": sum(row["selected"] == row["certified"] for row in rows),
            "attacks": sorted(whole),
            "steps": settings.steps,
            "restarts": settings.restarts,
            "sigma": found.sigma,
            "certificates": " ".join(filter(None, (found.name, self._claim))),
        }
        write_json(output / VERDICT, about)
        return rows


def _refuse_others(found: reading.CertificateTable, model_folder: Path, dataset: Data) -> None:
    path, about = found.path, found.about
    if "classifier" not in about or not about.get("settings"):
        raise UserError(f"{path}: does not say what it was computed from")
    if about["model"] != models.model_hash(model_folder):
        raise UserError(f"{path}: certificates of another model than {model_folder}")
    if about["data"] != dataset.fingerprint:
        raise UserError(f"{path}: certificates of other data than {dataset.name}")
    labels = np.asarray(dataset.labels)
    there = {"inputs": len(labels), "classes": dataset.classes, "format": bulk.FORMAT}
    for name, right in there.items():
        if about.get(name, right) != right:
            raise UserError(f"{path}: damaged: {name} must be {right}, got {shown(about[name])}")
    if found.index.max() >= len(labels) or (labels[found.index] != found.label).any():
        raise UserError(f"{path}: damaged: its inputs and labels are not those of {dataset.name}")
    if found.norm not in NORMS:
        raise UserError(
            f"{path}: only L2 and L-infinity certificates can be attacked, these are "
            f"{found.norm.upper()}"
        )


def _claimed(
    found: reading.CertificateTable, claim: str | None
) -> tuple[reading.CertificateTable, list[dict[str, Any]], bool]:
    """Return the table and its rows, with another column's sizes and classes for radius and
    prediction, and whether that column speaks of votes."""
    rows = found.table.to_pylist()
    if claim is None:
        return found, rows, found.by_votes
    certificate, _, norm = claim.rpartition("_")
    sizes = found.sizes_of(certificate, norm)
    claimed = [
        {**row, "radius": size, "prediction": answer}
        for row, size, answer in zip(rows, sizes.size.tolist(), sizes.answer.tolist(), strict=True)
    ]
    return replace(found, norm=norm), claimed, sizes.votes


def _digest(rows: list[dict[str, Any]]) -> str:
    """What of the certificates a check depends on."""
    kept = [[row[name] for name in ("index", "prediction", "radius", "alpha")] for row in rows]
    return hashlib.blake2b(json.dumps(kept).encode(), digest_size=16).hexdigest()
