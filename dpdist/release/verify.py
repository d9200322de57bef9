"""Verify a release: its files, its signature, its model, and the statements of its cards."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpdist.certification.subject import NamedDatasetLike
from dpdist.core.errors import UserError
from dpdist.core.files import (
    json_equal,
    quoted,
    read_text,
)
from dpdist.core.version import __version__
from dpdist.privacy.accounting import library_version
from dpdist.privacy.card import (
    PRIVACY_CARD,
    PRIVACY_CARD_TEXT,
    RELATIVE_TOLERANCE,
    card_markdown,
    recompute_card,
)
from dpdist.privacy.guarantee import format_delta, format_epsilon, left_out, shown_kind
from dpdist.release.bundle import Release, as_release_errors, check_adapter, load
from dpdist.release.description import certified_accuracy_record
from dpdist.release.files import (
    DESCRIPTION,
    MODEL_CARD,
    SIGNATURE,
    ReleaseError,
    list_table_names,
)
from dpdist.release.model_card import model_card
from dpdist.release.tables import check_table, read_table, redraw_counts

# What no check of a release can tell; a signature tells whose word it is.
_UNVERIFIABLE_SUMMARY = "how the model was trained, clean accuracy, names, notes, license"


def verify_release(
    folder: Path,
    *,
    trusted_factory: str | None = None,
    signer: Path | None = None,
    num_redrawn_inputs: int = 0,
    load_data: Callable[[Release], NamedDatasetLike] | None = None,
) -> list[tuple[str, str]]:
    """Return what was found to hold: name and value.

    Args:
        folder: of the release.
        trusted_factory: "package.module:factory" that may be imported to build the model.
        signer: the public key that must have signed it.
        num_redrawn_inputs: how many inputs of each table of certificates to count again; 0: none.
        load_data: brings the test data that a release names; needed to count again.

    Raises:
        ReleaseError: in one line, the first thing that does not hold.
        UserError: there is no release, no such key, a factory that nobody trusted, or no data.
    """
    release = load(folder, trusted_factory=trusted_factory, signer=signer)
    if (version := release.description.dpdist) != __version__:
        raise ReleaseError(
            f"{release.path}: dpdist {version} wrote it, this is {__version__}: verify it with "
            f"dpdist {version}"
        )
    rows = [("files", f"{len(release.checksums)}, each with its SHA-256 sum")]
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
    if release.description.text is not None:
        _ = release.text_answerer  # raises where the tokens are not those of the model
        made = release.description.text.file or "none: tokens are bytes"
        rows.append(("tokenizer", f"{made}; the model reads its tokens"))
    if release.description.base is not None:
        rows.append(("adapter", check_adapter(release)))
    rows.append(("epsilon, computed again", _check_card(release)))
    rows += _check_tables(release, num_redrawn_inputs, load_data)
    rows.append(("pages", _check_pages(release)))
    rows.append(
        (
            "the publisher's word",
            _UNVERIFIABLE_SUMMARY if num_redrawn_inputs else f"{_UNVERIFIABLE_SUMMARY}, the counts",
        )
    )
    return rows


def _check_tables(
    release: Release,
    num_redrawn_inputs: int,
    load_data: Callable[[Release], NamedDatasetLike] | None,
) -> list[tuple[str, str]]:
    """Compute certified accuracy again from the tables; count some inputs again where asked to."""
    if not release.description.certified:
        return []
    found, population = [], []
    for name, stated in zip(
        list_table_names(release.checksums), release.description.certified, strict=True
    ):
        with as_release_errors():
            table = read_table(release.path / name)
            check_table(table, release.description.model, release.model, release.spec)
        record = certified_accuracy_record(table)
        for key, value in record.items():
            said = getattr(stated, key)
            if not json_equal(json.loads(json.dumps(said)), value):
                raise ReleaseError(
                    f"{release.path / DESCRIPTION}: certified {table.title}: {key} does not follow "
                    f"from {name}: it says {quoted(said)}, computed again {quoted(value)}"
                )
        found.append(table)
        word, _, share = record["population"].partition(": ")
        population.append((word, share))
    if len({(table.job_record["data"], table.job_record["inputs"]) for table in found}) > 1:
        raise ReleaseError(f"{release.path}: its tables of certificates are of several data sets")
    tables = f"{len(found)} tables" if len(found) > 1 else "1 table"
    rows = [("certified accuracy, computed again", f"from the counts of every input, {tables}")]
    rows += population
    if not num_redrawn_inputs:
        return [*rows, ("counts", "not re-drawn: --redraw K counts K inputs of each table again")]
    if load_data is None:
        raise ValueError("counting again needs data")
    dataset, again, rounded = load_data(release), 0, 0
    for table in found:
        done, differing = redraw_counts(table, release.subject, dataset, num_redrawn_inputs)
        again, rounded = again + done, rounded + differing
    words = f"re-drawn for {again:,} inputs of {dataset.name}, chosen now: as stated"
    if rounded:
        words += f", but for rounding on another machine in {rounded:,}"
    return [*rows, ("counts", words)]


def _check_card(release: Release) -> str:
    """Hold the card against its phases."""
    where = release.path / PRIVACY_CARD
    try:
        again = recompute_card(release.card, release.plan)
    except UserError as error:
        raise ReleaseError(f"{where}: {error}") from None
    stated = _with_local_library_version(release.card)
    again = json.loads(json.dumps(again))
    if stated.keys() != again.keys():
        other = ", ".join(sorted(stated.keys() ^ again.keys()))
        raise ReleaseError(f"{where}: has not the entries of a card ({other})")
    for name, value in again.items():
        said = stated[name]
        if not json_equal(said, value):
            raise ReleaseError(
                f"{where}: {name} does not follow from the phases that it names: it says "
                f"{quoted(stated[name])}, computed again "
                f"{quoted(again[name])}",
                see="how-to/releases.md#what-verify-holds-against-what",
            )
    guarantee = again["guarantee"]
    if (why := release.no_epsilon) is not None:
        return f"none: {why}"
    if not release.card["private"]:
        return "none: not private, as the card says"
    words = f"{format_epsilon(guarantee['epsilon'])} at delta {format_delta(guarantee['delta'])}"
    words += f", {shown_kind(guarantee['kind'])}{left_out(release.card['assumptions'])}"
    if (total := release.card["data_set"]) is not None:
        least = release.plan.guarantee(delta=total["delta"]).epsilon
        if not float(total["epsilon"]) >= least * (1 - RELATIVE_TOLERANCE):
            raise ReleaseError(
                f"{where}: data_set: all runs on the data set, this one included, cannot cost less "
                f"than this one, epsilon {format_epsilon(least)} at delta "
                f"{format_delta(total['delta'])}"
            )
        words += "; that of all runs on the data set is as stated"
    return words


def _with_local_library_version(card: dict[str, Any]) -> dict[str, Any]:
    """The card as the accounting library of this machine would be named in it."""
    if not re.fullmatch(r"dp-accounting [\w.+-]{1,30}", card["library"]):
        raise ReleaseError(f"the card names {quoted(card['library'])}, no library that is known")
    result: dict[str, Any] = json.loads(
        json.dumps(card).replace(card["library"], library_version())
    )
    return result


def _check_pages(release: Release) -> str:
    """Check that the pages say what the other files say, word for word."""
    pages = {
        MODEL_CARD: model_card(release.description, release.card, release.spec),
        PRIVACY_CARD_TEXT: card_markdown(release.card),
    }
    for name, text in pages.items():
        if read_text(release.path / name) != text:
            raise ReleaseError(f"{release.path / name}: does not say what the files beside it say")
    return f"{' and '.join(pages)} say what the other files say"
