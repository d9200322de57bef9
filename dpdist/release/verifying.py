"""Whether a release holds: its files, its signature, its model, and what its cards state.

What this cannot tell: whether the model was trained as the card says, and whether accuracies are
true. That is the publisher's word; a signature says whose word it is.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from dpdist import __version__
from dpdist.base.errors import UserError
from dpdist.base.reading import read_text, shown
from dpdist.privacy.accounting import library_version
from dpdist.privacy.card import card_markdown, recomputed
from dpdist.privacy.guarantee import format_epsilon
from dpdist.release.files import (
    CARD,
    CARD_TEXT,
    PAGE,
    SIGNATURE,
    SUMMED,
    ReleaseError,
)
from dpdist.release.page import model_card
from dpdist.release.reading import Release, load, same_json


def verify(
    folder: Path, *, trusted_factory: str | None = None, signer: Path | None = None
) -> list[tuple[str, str]]:
    """What was found to hold: name and value. signer: the public key that must have signed it.

    Raises ReleaseError, in one line, for the first thing that does not hold; UserError where there
    is no release, no such key, or a factory that nobody trusted.
    """
    release = load(folder, trusted_factory=trusted_factory, signer=signer)
    rows = [("files", f"{len(SUMMED)}, each with its SHA-256 sum")]
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
    rows.append(("pages", _check_pages(release)))
    return rows


def _check_card(release: Release) -> str:
    """Hold the card against its phases. Texts are compared where this version wrote them."""
    where = release.path / CARD
    try:
        again = recomputed(release.card, release.plan)
    except UserError as error:
        raise ReleaseError(f"{where}: {error}") from None
    stated = _in_this_library(release.card)
    if not _is_ours(release):
        stated, again = _numbers(stated), _numbers(again)
    again = json.loads(json.dumps(again))
    if stated.keys() != again.keys():
        other = ", ".join(sorted(stated.keys() ^ again.keys()))
        raise ReleaseError(f"{where}: has not the entries of a card ({other})")
    for name, value in again.items():
        if not same_json(stated[name], value):
            raise ReleaseError(
                f"{where}: {name} does not follow from the phases that it names: it says "
                f"{shown(stated[name])}, computed again {shown(value)}"
            )
    guarantee = again["guarantee"]
    if not release.card["private"]:
        return "none: not private, as the card says"
    words = f"{format_epsilon(guarantee['epsilon'])} at delta {guarantee['delta']:g}"
    if release.card["data_set"] is not None:
        words += "; that of all runs on the data set is as stated"
    return words


def _is_ours(release: Release) -> bool:
    return release.about.dpdist == __version__


def _in_this_library(card: dict[str, Any]) -> dict[str, Any]:
    """The card as the accounting library of this machine would be named in it."""
    if not re.fullmatch(r"dp-accounting [\w.+-]{1,30}", card["library"]):
        raise ReleaseError(f"the card names {shown(card['library'])}, no library that is known")
    return json.loads(json.dumps(card).replace(card["library"], library_version()))


def _numbers(card: dict[str, Any]) -> dict[str, Any]:
    """What other versions may word differently is left out."""
    numbers = ("private", "epsilon_at_delta", "neighbours", "records", "clip_norm")
    group = card["group"] and {
        "size": card["group"]["size"], "guarantee": _proved(card["group"]["guarantee"])
    }  # fmt: skip
    found = {"guarantee": _proved(card["guarantee"]), "group": group}
    return found | {name: card[name] for name in numbers}


def _proved(guarantee: dict[str, Any]) -> dict[str, Any]:
    return {name: guarantee[name] for name in ("epsilon", "delta", "neighbours")}


def _check_pages(release: Release) -> str:
    """The pages are made of what was checked, and say nothing else."""
    if not _is_ours(release):
        return f"not compared: dpdist {release.about.dpdist} wrote them, this is {__version__}"
    pages = {
        PAGE: model_card(release.about, release.card, release.spec),
        CARD_TEXT: card_markdown(release.card),
    }
    for name, text in pages.items():
        if read_text(release.path / name) != text:
            raise ReleaseError(f"{release.path / name}: does not say what the files beside it say")
    return f"{PAGE} and {CARD_TEXT} say what the other files say"
