"""Which test inputs a report shows as images, and whether it may.

Training records never are: images come from the named test split alone, by the index of a
certificate of the same data. Test images of a user's own data may be sensitive all the same, so
they are shown only where somebody said so; those of built-in data are public.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dpdist.base.reading import NoSuchFile, read_json
from dpdist.base.storage import write_json
from dpdist.certification.certificate import CertificateTable
from dpdist.certification.verdict import ABSTAIN
from dpdist.runs.folder import RunFolder

UNASKED = "test images of your own data may be sensitive; dpdist report RUN --images shows them"
_EACH = 8  # images in a row of the page


class Images(Protocol):
    """The test split as pictures. fingerprint: of its inputs and labels, in order."""

    @property
    def fingerprint(self) -> str: ...

    def png(self, index: int) -> bytes:
        """A small picture of one input."""


@dataclass(frozen=True)
class Shown:
    """One input: its picture, the name of its class, and what became of it."""

    index: int
    label: str
    answer: str
    radius: float
    png: bytes


def allowed(folder: RunFolder, asked: bool | None, built_in: bool) -> bool:
    """Whether this run's report shows test images: as asked now, or when it was asked last; never
    asked, only those of built-in data. What is asked is kept beside the report."""
    kept = folder.report.parent / "shown.json"
    if asked is not None:
        write_json(kept, {"test_images": asked})
        return asked
    try:
        return bool(read_json(kept, {"test_images": bool})["test_images"])
    except NoSuchFile:
        return built_in


def picked(
    tables: Sequence[CertificateTable], images: Images, names: Sequence[str]
) -> list[tuple[str, list[Shown]]]:
    """Title and inputs of each row of images: from the first table that is of this data. names: of
    the classes."""
    table = next((t for t in tables if t.about.get("data") == images.fingerprint), None)
    if table is None:
        return []
    right = np.flatnonzero(table.certified() > 0)
    rising = right[np.argsort(table.radius[right], kind="stable")]
    wrong = np.flatnonzero(~table.correct & (table.prediction != ABSTAIN))
    firm = wrong[np.argsort(-table.radius[wrong], kind="stable")]
    rows = [
        ("Right, and most easily changed", rising[:_EACH]),
        ("Right, and hardest to change", rising[::-1][:_EACH]),
        ("Wrong, the surest first", firm[:_EACH]),
        ("Not answered", np.flatnonzero(table.prediction == ABSTAIN)[:_EACH]),
    ]
    return [(title, [_shown(table, int(row), images, names) for row in found])
            for title, found in rows]  # fmt: skip


def _shown(table: CertificateTable, row: int, images: Images, names: Sequence[str]) -> Shown:
    index, label, answer = (
        int(column[row]) for column in (table.index, table.label, table.prediction)
    )

    def name(number: int) -> str:
        return names[number] if number < len(names) else str(number)

    said = "no answer" if answer == ABSTAIN else f"answer {name(answer)}"
    return Shown(index, name(label), said, float(table.radius[row]), images.png(index))
