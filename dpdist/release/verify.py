"""Verify a release: its files, its signature, its model, and the statements of its cards.

`PUBLISHERS_WORD` lists the statements that this cannot verify; a signature tells whose word they
are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpdist.core.errors import UserError
from dpdist.core.files import numbers_in, read_text, same_json, shown, without_words
from dpdist.core.version import __version__
from dpdist.privacy.accounting import library_version
from dpdist.privacy.card import card_markdown, recomputed
from dpdist.privacy.guarantee import format_delta, format_epsilon
from dpdist.release.bundle import (
    CARD,
    CARD_TEXT,
    DESCRIPTION,
    PAGE,
    SIGNATURE,
    Release,
    ReleaseError,
    certified_of,
    load,
    of_release,
    table_name,
    tables_in,
)
from dpdist.release.model_card import model_card
from dpdist.release.tables import Data, check_table, count_again, read_table

_SUGGESTED = "a suggestion: the reader chooses how to certify"
_DRAWN = "until --redraw counts inputs again"
_SHOWN = "which radii are shown, each computed from the counts"
_DATA = "where the reader finds test data: --redraw loads them and compares"
_OF_OTHERS = "of other runs and of faults, which the publisher's ledger holds"
_FREE = "texts and assumptions that no phase implies"
PUBLISHERS_WORD: dict[str, dict[str, str]] = {
    DESCRIPTION: {
        **dict.fromkeys(
            (
                "certificate", "certificate.alpha", "certificate.n", "certificate.n0",
                "certificate.noise_bank", "certificate.radii", "certificate.radii.*",
                "certificate.sigma",
            ),
            _SUGGESTED,
        ),
        **dict.fromkeys(
            ("data.columns.group", "data.columns.image", "data.columns.label", "data.test"), _DATA
        ),
        "licence": "a decision",
        "name": "a name",
        **dict.fromkeys(
            ("tested", "tested.accuracy", "tested.data"),
            "clean accuracy, which no file holds the answers of",
        ),
    },
    CARD: {
        **dict.fromkeys(("assumptions", "extra.model", "notes", "notes.*", "unit"), _FREE),
        **dict.fromkeys(("plan", "superseded_releases"), _OF_OTHERS),
    },
    "model.json": {},
    table_name(1): {
        **dict.fromkeys(
            (
                "about.classifier.batch", "about.classifier.check", "about.data", "about.inputs",
                "about.seed", "about.settings.batch", "about.settings.noise_bank", "histogram",
                "label",
            ),
            _DRAWN,
        ),
        **dict.fromkeys(("about.settings.radii", "about.settings.radii.*"), _SHOWN),
        **dict.fromkeys(
            ("about.classifier.machine", "about.classifier.torch_version"), "where it was counted"
        ),
    },
}  # fmt: skip
"""By file: fields of which a single edit passes (pages and sums made again), and why."""


_WORD = "how the model was trained, clean accuracy, names, notes, licence"


def verify(
    folder: Path,
    *,
    trusted_factory: str | None = None,
    signer: Path | None = None,
    redraw: int = 0,
    data: Callable[[Release], Data] | None = None,
) -> list[tuple[str, str]]:
    """Return what was found to hold: name and value.

    Args:
        folder: of the release.
        trusted_factory: "package.module:factory" that may be imported to build the model.
        signer: the public key that must have signed it.
        redraw: how many inputs of each table of certificates to count again; 0: none.
        data: brings the test data that a release names; needed to count again.

    Raises:
        ReleaseError: in one line, the first thing that does not hold.
        UserError: there is no release, no such key, a factory that nobody trusted, or no data.
    """
    release = load(folder, trusted_factory=trusted_factory, signer=signer)
    rows = [("files", f"{len(release.sums)}, each with its SHA-256 sum")]
    if signer is not None:
        rows.append(("signature", f"of the key of {signer}"))
    elif (release.path / SIGNATURE).exists():
        rows.append(("signature", "there, not checked: --signer names the public key"))
    else:
        rows.append(("signature", "none: nobody vouches for what is stated"))
    parameters = sum(value.numel() for value in release.model.parameters())
    rows.append(
        ("model", f"{release.spec.name}, {parameters:,} parameters; its noise is as described")
    )
    rows.append(("epsilon, computed again", _check_card(release)))
    rows += _check_tables(release, redraw, data)
    rows.append(("pages", _check_pages(release)))
    rows.append(("the publisher's word", _WORD if redraw else f"{_WORD}, the counts"))
    return rows


def _check_tables(
    release: Release, inputs: int, data: Callable[[Release], Data] | None
) -> list[tuple[str, str]]:
    """Compute certified accuracy again from the tables; count some inputs again where asked to."""
    if not release.about.certified:
        return []
    found = []
    for name, stated in zip(tables_in(release.sums), release.about.certified, strict=True):
        with of_release():
            table = read_table(release.path / name)
            check_table(table, release.about.model, release.model, release.spec)
        for key, value in certified_of(table).items():
            said = getattr(stated, key)
            if not same_json(json.loads(json.dumps(said)), value):
                raise ReleaseError(
                    f"{release.path / DESCRIPTION}: certified {table.title}: {key} does not follow "
                    f"from {name}: it says {shown(said)}, computed again {shown(value)}"
                )
        found.append(table)
    if len({(table.about["data"], table.about["inputs"]) for table in found}) > 1:
        raise ReleaseError(f"{release.path}: its tables of certificates are of several data sets")
    tables = f"{len(found)} tables" if len(found) > 1 else "1 table"
    rows = [("certified accuracy, computed again", f"from the counts of every input, {tables}")]
    if not inputs:
        return [*rows, ("counts", "not re-drawn: --redraw K counts K inputs of each table again")]
    if data is None:
        raise ValueError("counting again needs data")
    dataset, again, rounded = data(release), 0, 0
    for table in found:
        done, differing = count_again(table, release.model, release.spec, dataset, inputs)
        again, rounded = again + done, rounded + differing
    words = f"re-drawn for {again:,} inputs of {dataset.name}, chosen now: as stated"
    if rounded:
        words += f", but for rounding on another machine in {rounded:,}"
    return [*rows, ("counts", words)]


def _check_card(release: Release) -> str:
    """Hold the card against its phases. Of another version's texts the numbers are compared."""
    where = release.path / CARD
    try:
        again = recomputed(release.card, release.plan)
    except UserError as error:
        raise ReleaseError(f"{where}: {error}") from None
    stated = _in_this_library(release.card)
    again = json.loads(json.dumps(again))
    if stated.keys() != again.keys():
        other = ", ".join(sorted(stated.keys() ^ again.keys()))
        raise ReleaseError(f"{where}: has not the entries of a card ({other}){_hint(release)}")
    for name, value in again.items():
        said = stated[name]
        if not _is_ours(release):
            said, value = without_words(said), without_words(value)
        if not same_json(said, value):
            raise ReleaseError(
                f"{where}: {name} does not follow from the phases that it names: it says "
                f"{shown(stated[name])}, computed again {shown(again[name])}{_hint(release)}"
            )
    guarantee = again["guarantee"]
    if (why := release.no_epsilon) is not None:
        return f"none: {why}"
    if not release.card["private"]:
        return "none: not private, as the card says"
    words = f"{format_epsilon(guarantee['epsilon'])} at delta {format_delta(guarantee['delta'])}"
    if release.card["data_set"] is not None:
        words += "; that of all runs on the data set is as stated"
    return words


def _is_ours(release: Release) -> bool:
    return release.about.dpdist == __version__


def _hint(release: Release) -> str:
    """Return how to check the words of a release that another version wrote."""
    version = release.about.dpdist
    if _is_ours(release):
        return ""
    return f"; dpdist {version} wrote it, this is {__version__}: verify it with dpdist {version}"


def _in_this_library(card: dict[str, Any]) -> dict[str, Any]:
    """The card as the accounting library of this machine would be named in it."""
    if not re.fullmatch(r"dp-accounting [\w.+-]{1,30}", card["library"]):
        raise ReleaseError(f"the card names {shown(card['library'])}, no library that is known")
    result: dict[str, Any] = json.loads(
        json.dumps(card).replace(card["library"], library_version())
    )
    return result


def _check_pages(release: Release) -> str:
    """Check that the pages say what the other files say: word for word, and where another version
    worded them, by the same numbers in the same order."""
    pages = {
        PAGE: model_card(release.about, release.card, release.spec),
        CARD_TEXT: card_markdown(release.card),
    }
    for name, text in pages.items():
        stated = read_text(release.path / name)
        same = stated == text if _is_ours(release) else numbers_in(stated) == numbers_in(text)
        if not same:
            raise ReleaseError(
                f"{release.path / name}: does not say what the files beside it say{_hint(release)}"
            )
    if _is_ours(release):
        return f"{PAGE} and {CARD_TEXT} say what the other files say"
    return (
        f"{PAGE} and {CARD_TEXT} name the numbers of the other files; the words are those of "
        f"dpdist {release.about.dpdist}, this is {__version__}"
    )
