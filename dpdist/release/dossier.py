"""The dossier of a release: what it holds, under the headings of two European regulations.

They are the points of Annex IV of Regulation (EU) 2024/1689 (technical documentation of a high-risk
AI system) and of Article 35(7) of Regulation (EU) 2016/679 (data-protection impact assessment).

It is a function of release.json, the privacy card and the shape of the inputs, and of nothing
else: so it says nothing that the release does not, and `verify` makes it again and compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dpdist.privacy.card import PRIVACY_CARD, no_epsilon
from dpdist.privacy.guarantee import format_delta, format_epsilon
from dpdist.release.bundle import (
    ARCHITECTURE,
    CHECKSUMS,
    DESCRIPTION,
    MODEL_CARD,
    SIGNATURE,
    WEIGHTS,
    ReleaseDescription,
)
from dpdist.release.model_card import limits, privacy_section, robustness_section

if TYPE_CHECKING:
    from dpdist.models import ModelSpec

NOT_HELD = "Not held by this run: to be written by the provider."
_Point = tuple[str, str | Sequence[str]]  # the regulation's point; what the release holds of it


def dossier(description: ReleaseDescription, card: Mapping[str, Any], spec: ModelSpec) -> str:
    """Return the dossier of a release as Markdown.

    Guarantee: it is made of the release's own files alone, so that it reveals nothing that they do
    not. A point of which they hold nothing, or a part, says `NOT_HELD`.

    Args:
        description: the content of release.json.
        card: the content of privacy_card.json.
        spec: the content of model.json.

    Source:
        Annex IV of Regulation (EU) 2024/1689; Article 35(7) of Regulation (EU) 2016/679.
    """
    sections = [
        f"# Dossier of {description.name}",
        f"Made of `{DESCRIPTION}`, `{ARCHITECTURE}` and the privacy card of this release, by "
        f"dpdist {description.dpdist}. It is neither legal advice nor a statement of conformity.",
        "## Annex IV of Regulation (EU) 2024/1689: technical documentation",
    ]
    for number, (heading, points) in enumerate(_annex_iv(description, card, spec), 1):
        sections += [f"### {number}. {heading}", *map(_written, points)]
    sections.append("## Article 35(7) of Regulation (EU) 2016/679: impact assessment")
    for letter, (heading, held) in zip("abcd", _impact(card), strict=True):
        sections += [f"### ({letter}) {heading}", _written(("", held))]
    return "\n\n".join(sections) + "\n"


def _written(point: _Point) -> str:
    """Return a point as a paragraph, which ends with what is left to the provider."""
    name, held = point
    parts = [held] if isinstance(held, str) else list(held)
    return "\n\n".join([*([f"**{name}.**"] if name else []), *filter(None, parts)])


def _annex_iv(
    about: ReleaseDescription, card: Mapping[str, Any], spec: ModelSpec
) -> Iterator[tuple[str, list[_Point]]]:
    """Yield the headings of Annex IV and their points, in its order."""
    size = " x ".join(map(str, spec.input_shape))
    inputs = f"Inputs: {size} {'tokens' if about.tokens else 'numbers'}."
    yield (
        "General description of the AI system",
        [
            ("(a) Intended purpose, provider, version", [
                f"Name {about.name}, model `{about.model}`. Purpose, provider and earlier "
                "versions:", NOT_HELD]),
            ("(b) Interaction with other hardware and software", NOT_HELD),
            ("(c) Versions of relevant software", [
                f"dpdist {about.dpdist}, {card['library']}. Requirements of updates:", NOT_HELD]),
            ("(d) Forms in which it is placed on the market", [
                f"Files: `{WEIGHTS}` and `{ARCHITECTURE}` beside their cards. How they are placed "
                "on the market:", NOT_HELD]),
            ("(e) Hardware on which it is intended to run", NOT_HELD),
            ("(f) Illustrations of a product of which it is a component", NOT_HELD),
            ("(g) User interface for the deployer", [
                f"The commands and the Python calls in `{MODEL_CARD}`. Any other:", NOT_HELD]),
            ("(h) Instructions for use", [f"`{MODEL_CARD}`. For the intended purpose:", NOT_HELD]),
        ],
    )  # fmt: skip
    yield (
        "Detailed description of the elements and of the process of development",
        [
            ("(a) Methods and steps of the development, pre-trained parts", [
                f"Method {about.method}.", *_ledger(card), _pretrained(card),
                "Other steps and tools:", NOT_HELD]),
            ("(b) Design specifications, key choices and assumptions", [
                *_lines("The privacy guarantee holds if:", card["assumptions"]),
                "Rationale, classification choices and trade-offs:", NOT_HELD]),
            ("(c) Architecture and computational resources", [
                f"{spec.name}, in full in `{ARCHITECTURE}`. {inputs} Outputs: "
                f"{len(about.classes):,}, named in `{DESCRIPTION}`. Resources of the development:",
                NOT_HELD]),
            ("(d) Data requirements: training data, their origin and preparation", [
                _training_data(card), "Origin, selection, labelling and cleaning:", NOT_HELD]),
            ("(e) Human oversight measures (Article 14)", NOT_HELD),
            ("(f) Pre-determined changes", NOT_HELD),
            ("(g) Validation and testing, metrics, test reports", [
                *_tests(about, card), "Discriminatory impacts, and dated and signed reports:",
                NOT_HELD]),
            ("(h) Cybersecurity measures", [
                f"Nothing of this release is unpickled. `{CHECKSUMS}` has a SHA-256 sum of each "
                f"file; where `{SIGNATURE}` lies beside it, it signs them (Ed25519). Measures in "
                "operation:", NOT_HELD]),
        ],
    )  # fmt: skip
    yield (
        "Monitoring, functioning and control of the AI system",
        [("", [limits(card), inputs, "Accuracy for groups of persons, foreseeable unintended "
               "outcomes, human oversight:", NOT_HELD])],
    )  # fmt: skip
    yield "Appropriateness of the performance metrics", [("", NOT_HELD)]
    yield "Risk management system (Article 9)", [("", NOT_HELD)]
    superseded = (
        f"Releases of superseded attempts of the training, charged: {card['superseded_releases']}."
    )
    yield (
        "Relevant changes made through the lifecycle",
        [("", [superseded, "Changes since:", NOT_HELD])],
    )
    yield "Harmonised standards applied in full or in part", [("", NOT_HELD)]
    yield "Copy of the EU declaration of conformity (Article 47)", [("", NOT_HELD)]
    yield "Post-market monitoring system and plan (Article 72)", [("", NOT_HELD)]


def _impact(card: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield the headings of Article 35(7) and what is held of each, in its order."""
    yield (
        "Systematic description of the processing operations and their purposes",
        [
            _training_data(card),
            *_ledger(card),
            "Purposes, legitimate interest, other operations on the data:",
            NOT_HELD,
        ],
    )
    yield "Necessity and proportionality of the processing operations", [NOT_HELD]
    yield (
        "Risks to the rights and freedoms of data subjects",
        [
            "Of one risk, that the released model gives a single unit of the training data away:",
            privacy_section(card),
            "Its limits stand under point 3 above. All other risks, and how likely and severe they "
            "are:",
            NOT_HELD,
        ],
    )
    unit = "" if no_epsilon(card) else f"Unit of protection: {card['unit']}."
    yield (
        "Measures envisaged to address the risks",
        [
            unit,
            *_lines("Mechanism:", [] if no_epsilon(card) else card["mechanism"]),
            *_lines("It rests on:", card["assumptions"]),
            *_lines("Notes of the privacy card:", card["notes"]),
            f"How to demonstrate it: `dpdist verify` computes epsilon again from the phases of "
            f"`{PRIVACY_CARD}`. Safeguards and security of the processing itself:",
            NOT_HELD,
        ],
    )


def _ledger(card: Mapping[str, Any]) -> list[str]:
    """Return what the ledger of the run says was released, and what it costs."""
    if (why := no_epsilon(card)) is not None:
        return [f"No ledger: {why}."]
    rows = [
        f"delta {format_delta(row['delta'])}: epsilon {format_epsilon(row['epsilon'])}"
        for row in card["epsilon_at_delta"]
    ]
    total = card["data_set"]
    all_runs = "not stated by the card"
    if total is not None:
        all_runs = (
            f"epsilon {format_epsilon(total['epsilon'])} at delta {format_delta(total['delta'])}"
        )
    false = "" if card["private"] else "This run is NOT private; the figures describe a mechanism."
    return [
        false,
        *_lines("Released, as the ledger of the run counts it:", card["mechanism"]),
        *_lines(f"It costs, {card['relation']}:", rows),
        f"All runs on the data set: {all_runs}.",
    ]


def _training_data(card: Mapping[str, Any]) -> str:
    """Return the name of the training data, and their number where the card states it."""
    said = f"Training data: {card.get('extra', {}).get('training data', 'not named')}"
    if card["records"] is None:
        return f"{said}; the number of records is not released."
    counted = "groups" if "group" in card["guarantee"] else "records"
    return f"{said}, {card['records']:,} {counted} ({card['records_are']})."


def _pretrained(card: Mapping[str, Any]) -> str:
    """Return what is said of parts that were trained before, from the card's further facts."""
    extra = card.get("extra", {})
    said = [f"{key}: {value}" for key, value in extra.items() if "trained on" in key]
    said += [f"frozen: {extra['frozen']}"] if "frozen" in extra else []
    return "; ".join(said) + "." if said else "Pre-trained parts: none is named."


def _tests(about: ReleaseDescription, card: Mapping[str, Any]) -> list[str]:
    """Return accuracies, certificates and audits."""
    audits = [line for line in card["notes"] if line.startswith("Audited")]
    nothing = about.tested is None and not about.certified
    return [
        "No measurement is held." if nothing else robustness_section(about),
        *(_lines("Audits:", audits) or ["No audit is held."]),
    ]


def _lines(title: str, lines: Sequence[str]) -> list[str]:
    """Return a list under its title; nothing for an empty one."""
    return [title, "\n".join(f"* {line}" for line in lines)] if lines else []
