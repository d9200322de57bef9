"""Verify a release: its files, its signature, its model, and the statements of its cards."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from dpdist.certification.subject import NamedDatasetLike
from dpdist.core.errors import UserError
from dpdist.core.files import json_equal, quoted, read_text
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

# A release cannot prove these; a signature only shows who states them.
_UNVERIFIABLE_SUMMARY = "how the model was trained, clean accuracy, names, notes, license"


def verify_release(
    folder: Path,
    *,
    trusted_factory: str | None = None,
    signer: Path | None = None,
    num_redrawn_inputs: int = 0,
    load_data: Callable[[Release], NamedDatasetLike] | None = None,
) -> list[tuple[str, str]]:
    """Return name and result of each check of a release.

    Args:
        folder: the release.
        trusted_factory: "package.module:factory" that may be imported to build the model.
        signer: the public key that must have signed it.
        num_redrawn_inputs: the number of inputs of each table whose counts are sampled again.
        load_data: loads the test data that a release names; required if inputs are sampled again.

    Raises:
        ReleaseError: a check failed; one line about the first one.
        UserError: there is no release, key or data, or the factory is not trusted.
    """
    release = load(folder, trusted_factory=trusted_factory, signer=signer)
    if (version := release.description.dpdist) != __version__:
        raise ReleaseError(
            f"{release.path}: was written by dpdist {version}, this is {__version__}: verify it "
            f"with dpdist {version}"
        )
    rows = [("files", f"{len(release.checksums)}, each with its SHA-256 checksum")]
    signature = "missing: the publisher cannot be confirmed"
    if signer is not None:
        signature = f"by the key {signer}"
    elif (release.path / SIGNATURE).exists():
        signature = "not checked: name the public key with --signer"
    rows.append(("signature", signature))
    parameters = sum(value.numel() for value in release.model.parameters())
    rows.append(
        ("model", f"{release.spec.name}, {parameters:,} parameters; its noise is as described")
    )
    if release.description.text is not None:
        _ = release.text_answerer  # raises an error if the tokens are not those of the model
        file = release.description.text.file or "not needed: tokens are bytes"
        rows.append(("tokenizer", f"{file}; the model reads its tokens"))
    if release.description.base is not None:
        rows.append(("adapter", check_adapter(release)))
    rows.append(("epsilon, recomputed", _check_card(release)))
    rows += _check_tables(release, num_redrawn_inputs, load_data)
    rows.append(("pages", _check_pages(release)))
    counts = "" if num_redrawn_inputs else ", the counts"
    rows.append(("not verifiable", f"{_UNVERIFIABLE_SUMMARY}{counts}"))
    return rows


def _check_tables(
    release: Release,
    num_redrawn_inputs: int,
    load_data: Callable[[Release], NamedDatasetLike] | None,
) -> list[tuple[str, str]]:
    """Recompute certified accuracy from the tables; sample counts of some inputs again."""
    if not release.description.certified:
        return []
    tables, rows = [], []
    for name, stated in zip(
        list_table_names(release.checksums), release.description.certified, strict=True
    ):
        with as_release_errors():
            table = read_table(release.path / name)
            check_table(table, release.description.model, release.model, release.spec)
        record = certified_accuracy_record(table)
        for key, value in record.items():
            if not json_equal(json.loads(json.dumps(getattr(stated, key))), value):
                raise ReleaseError(
                    f"{release.path / DESCRIPTION}: certified {table.title}: {key}: must follow "
                    f"from {name}: {quoted(value)}, got {quoted(getattr(stated, key))}"
                )
        tables.append(table)
        title, _, bounds = record["population"].partition(": ")
        which = f", {table.title}" if len(release.description.certified) > 1 else ""
        rows.append((title + which, bounds))
    if len({(table.job_record["data"], table.job_record["inputs"]) for table in tables}) > 1:
        raise ReleaseError(f"{release.path}: its tables must be about the same data set")
    count = f"{len(tables)} tables" if len(tables) > 1 else "1 table"
    rows.insert(0, ("certified accuracy, recomputed", f"from the counts of every input, {count}"))
    if not num_redrawn_inputs:
        return [*rows, ("counts", "not sampled again: use --redraw K for K inputs of each table")]
    if load_data is None:
        raise ValueError("load_data: must be given to sample counts again")
    dataset, again, rounded = load_data(release), 0, 0
    for table in tables:
        done, differing = redraw_counts(table, release.subject, dataset, num_redrawn_inputs)
        again, rounded = again + done, rounded + differing
    words = f"sampled again for {again:,} random inputs of {dataset.name}: as stated"
    if rounded:
        words += f", except for rounding on a different machine in {rounded:,}"
    return [*rows, ("counts", words)]


def _check_card(release: Release) -> str:
    """Check the card against its phases; return its epsilon, or why it has none."""
    where = release.path / PRIVACY_CARD
    try:
        again = recompute_card(release.card, release.plan)
    except UserError as error:
        raise ReleaseError(f"{where}: {error}") from None
    library = release.card["library"]
    if not re.fullmatch(r"dp-accounting [\w.+-]{1,30}", library):
        raise ReleaseError(
            f"{where}: library: must be dp-accounting VERSION, got {quoted(library)}"
        )
    # The verifier's version of the library may differ from the publisher's.
    stated = json.loads(json.dumps(release.card).replace(library, library_version()))
    again = json.loads(json.dumps(again))
    if stated.keys() != again.keys():
        other = ", ".join(sorted(stated.keys() ^ again.keys()))
        raise ReleaseError(f"{where}: must have the entries of a card, differs in {other}")
    for name, value in again.items():
        if not json_equal(stated[name], value):
            raise ReleaseError(
                f"{where}: {name}: must follow from the phases on the card: {quoted(value)}, got "
                f"{quoted(stated[name])}",
                see="how-to/releases.md#what-verify-holds-against-what",
            )
    guarantee = again["guarantee"]
    if (why := release.no_epsilon) is not None:
        return f"unknown: {why}"
    if not release.card["private"]:
        return "none: not private, as the card states"
    words = f"{format_epsilon(guarantee['epsilon'])} at delta {format_delta(guarantee['delta'])}"
    words += f", {shown_kind(guarantee['kind'])}{left_out(release.card['assumptions'])}"
    if (total := release.card["data_set"]) is not None:
        least = release.plan.guarantee(delta=total["delta"]).epsilon
        if not float(total["epsilon"]) >= least * (1 - RELATIVE_TOLERANCE):
            raise ReleaseError(
                f"{where}: data_set: must be >= epsilon {format_epsilon(least)} at delta "
                f"{format_delta(total['delta'])}, that of this run, got "
                f"{format_epsilon(total['epsilon'])}"
            )
        words += "; that of all runs on the data set is as stated"
    return words


def _check_pages(release: Release) -> str:
    """Check that the pages are exactly those of the other files."""
    pages = {
        MODEL_CARD: model_card(release.description, release.card, release.spec),
        PRIVACY_CARD_TEXT: card_markdown(release.card),
    }
    for name, text in pages.items():
        if read_text(release.path / name) != text:
            raise ReleaseError(f"{release.path / name}: must match the other files of the release")
    return f"{' and '.join(pages)} match the other files"
