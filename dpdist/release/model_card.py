"""The pages of a release: README.md, with the metadata block that model hubs read, and its dossier.

Both are functions of release.json, the privacy card and the shape of the inputs, and of nothing
else: so they tell nothing that these do not, and can be made again and compared. The dossier has
the points of Annex IV of Regulation (EU) 2024/1689 (technical documentation of a high-risk AI
system) and of Article 35(7) of Regulation (EU) 2016/679 (data-protection impact assessment).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import yaml

from dpdist.core.console import format_bound, format_exact, format_percent, format_significant
from dpdist.core.fields import describe_averaging
from dpdist.privacy.card import PRIVACY_CARD, PRIVACY_CARD_TEXT, bounding_guarantee, no_epsilon
from dpdist.privacy.guarantee import format_delta, format_epsilon, left_out, shown_kind
from dpdist.release.bundle import (
    ARCHITECTURE,
    CHECKSUMS,
    DESCRIPTION,
    MODEL_CARD,
    SIGNATURE,
    WEIGHTS,
    CertifiedAccuracy,
    ReleaseDescription,
)

if TYPE_CHECKING:
    from dpdist.models import ModelSpec

# --- the model card ---------------------------------------------------------------------------


_TAGS = ["differential-privacy", "certified-robustness", "safetensors"]


def model_card(description: ReleaseDescription, card: Mapping[str, Any], spec: ModelSpec) -> str:
    """Markdown, behind a block of YAML."""
    size = " x ".join(map(str, spec.input_shape))
    kind = "images (channels, height, width)" if len(spec.input_shape) == 3 else "numbers"
    raw = f"{kind} as they are, whose public ranges `{DESCRIPTION}` names"
    pictures = len(spec.input_shape) == 3 and not description.raw_inputs
    scale = "in [0, 1]" if pictures else "as the training had them"
    scaled = raw if description.data.columns.ranges else f"{kind}, {scale}"
    kind = "tokens" if description.tokens else scaled
    sections = [
        f"---\n{yaml.safe_dump(_metadata(description, card, spec), sort_keys=False)}---",
        f"# {description.name}",
        _origin(description, card, spec),
        _USAGE if description.text is None else _text_usage(description, spec),
        f"Inputs: {size} {kind}"
        + (", or of 8 bits. " if pictures else ". ")
        + _pictures(description, spec)
        + _outputs(description),
        "## Privacy",
        _privacy_section(card),
        *_measured(description),
        "## Limits",
        _limits(description, card),
        "## Licence",
        f"{description.licence} (SPDX)."
        if description.licence
        else "The publisher named none: ask first.",
    ]
    return "\n\n".join(sections) + "\n"


_USAGE = f"""\
```
dpdist verify FOLDER               # sums, and epsilon computed again
dpdist predict FOLDER image.png    # class and certified radius, or ABSTAIN
dpdist certify FOLDER              # the test split, on all CPUs
```

```python
import dpdist

answer = dpdist.load("FOLDER").answerer()
answer(image)                      # an array of the input's shape
```

Nothing here is unpickled. `{WEIGHTS}` and `{ARCHITECTURE}`: weights and network; `{DESCRIPTION}`:
classes, noise, certificate; `{PRIVACY_CARD}`, `{PRIVACY_CARD_TEXT}`: what is proved of privacy; `{CHECKSUMS}`: sums
(`sha256sum -c`)."""  # noqa: E501


_NOTHING_RUN = f"Nothing here is unpickled. `{WEIGHTS}` and `{ARCHITECTURE}`"


def _text_usage(description: ReleaseDescription, spec: ModelSpec) -> str:
    """Return how a text is answered, in place of images and radii."""
    said = "the most probable next tokens" if spec.following else "class and probability"
    trust, trusted, sampled = "", "", ""
    for factory in spec.user_factories[:1]:
        trust, trusted = f" --trust-factory {factory}", f', trusted_factory="{factory}"'
    if spec.following:
        # Given always: not every tokenizer begins a text by itself, where a prompt is required.
        sampled = (
            f"dpdist predict FOLDER prompts.txt --to texts{trust}   # sampled, with the card\n"
        )
    return f"""\
```
dpdist verify FOLDER{trust}                    # sums, and epsilon computed again
dpdist predict FOLDER --text "a text"{trust}   # {said}
{sampled}```

```python
import dpdist

answer = dpdist.load("FOLDER"{trusted}).text_answerer
answer("a text")                        # no certificate: texts have none
```

{_adapter_usage(description)}{_NOTHING_RUN}: weights and network; `{DESCRIPTION}`:
classes and tokens; `{PRIVACY_CARD}`, `{PRIVACY_CARD_TEXT}`: what is proved of privacy;
`{CHECKSUMS}`: sums (`sha256sum -c`)."""


def _adapter_usage(description: ReleaseDescription) -> str:
    """Return how the adapter is loaded on its base; nothing of a release without one."""
    if (base := description.base) is None:
        return ""
    kind = "" if base.dtype is None else f', dtype="{base.dtype}"'
    return f"""\
The adapter alone, on its base {base.name} (digest of its weights {base.digest}):

```python
from dpdist.integrations.transformers import load_adapter
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("BASE"{kind})
model = load_adapter(base, "FOLDER")    # refuses another base
```

Without dpdist and that check, `peft.PeftModel.from_pretrained(base, "FOLDER")` loads it.

"""


def _pictures(description: ReleaseDescription, spec: ModelSpec) -> str:
    """Say how `predict` brings pictures to the input, if it does."""
    if description.pictures is None:
        return ""
    said = description.pictures.describe(tuple(spec.input_shape))
    return f"{said[0].upper()}{said[1:]}. "


def _outputs(description: ReleaseDescription) -> str:
    """Say what the model tells apart, and what makes the tokens of texts."""
    text = description.text
    if text is None:
        return f"Classes: {_format_classes(description.classes)}."
    made = "bytes, none of a file" if text.file is None else f"by `{text.file}`"
    if text.words is not None:
        made += f", {text.words:,} words"
    if text.chat:
        made += "; conversations are shown by the chat template in `tokenizer_config.json`"
    if text.predict == "next":
        return f"Tokens: {made}. It tells {description.outputs:,} next tokens."
    return f"Tokens: {made}. Classes: {_format_classes(description.classes)}."


_LIMITS = """\
* The privacy guarantee is about single training records, under the assumptions of the privacy card.
  It says nothing of the test data, and nothing of what is true of people whether or not they were
  in the training data.
* A radius is certified of the smoothed classifier, with noise that is drawn afresh for each answer
  and told nobody; the bare network has none. It holds at the one input, in the one norm.
* Accuracies are the publisher's measurements on the test data named, and hold for inputs like
  those. How errors are spread over groups of people was not measured.
* Meant for inputs of the kind it was trained on; for decisions about people only after one's own
  tests."""


_TEXT_LIMITS = """\
* The privacy guarantee is about single training records, each a document, under the assumptions of
  the privacy card. It says nothing of the test data, of prompts, or of public weights that the
  training began with. What many documents say, the model may say.
* No robustness is certified: texts have no radius.
* Figures are the publisher's measurements on the test data named, and hold for texts like those.
* Answers may be false or harmful. For decisions about people only after one's own tests."""


def _limits(description: ReleaseDescription, card: Mapping[str, Any]) -> str:
    """Say what the statements of a release do not cover."""
    text = _TEXT_LIMITS if description.text is not None else _LIMITS
    if "group" in card["guarantee"]:
        return text.replace("single training records", "whole groups of training records", 1)
    return text


def _measured(description: ReleaseDescription) -> list[str]:
    """Return the section of what was measured and certified; of texts there are no certificates."""
    if description.text is None:
        return ["## Robustness", _robustness_section(description)]
    said = "Nothing was measured on test data."
    if (tested := description.tested) is not None:
        said = _clean_accuracy_sentence(description)
        if tested.next_tokens is not None:
            said = (
                f"On {tested.next_tokens:,} next tokens of {tested.inputs:,} public test documents "
                f"({tested.data}): {format_percent(tested.accuracy)} % are the most probable one."
            )
        if tested.perplexity is not None:
            said += f" Perplexity {format_significant(tested.perplexity, 4)}."
        if tested.base_perplexity is not None:
            base = format_significant(tested.base_perplexity, 4, round_down=True)
            said += f" That of the public base alone is {base}."
    return ["## Measured", said]


def _origin(about: ReleaseDescription, card: Mapping[str, Any], spec: ModelSpec) -> str:
    """Say in a sentence or two which model this is, who trained it, and how private it is."""
    if no_epsilon(card) is not None:
        return (
            f"A {_model_kind(spec)} tested on {about.data.name}, published with dpdist "
            f"{about.dpdist}. {_privacy_sentence(card)}"
        )
    return (
        f"A {_model_kind(spec)} of {about.data.name}, trained by method {about.method} with dpdist "
        f"{about.dpdist}. {_privacy_sentence(card)}"
    )


def _model_kind(spec: ModelSpec) -> str:
    if spec.following:
        return "predictor of the next token"
    found = describe_averaging("classifier", spec.shifts, spec.mirrored)
    return f"{found}," if spec.averages_views else found


def _metadata(
    description: ReleaseDescription, card: Mapping[str, Any], spec: ModelSpec
) -> dict[str, Any]:
    kind = "image-classification" if len(spec.input_shape) == 3 else "tabular-classification"
    if description.tokens:
        kind = "text-generation" if spec.following else "text-classification"
    tags = _TAGS if no_epsilon(card) is None else _TAGS[1:]
    if description.text is not None:
        tags = [tag for tag in tags if tag != "certified-robustness"]
    found: dict[str, Any] = {"library_name": "dpdist", "pipeline_tag": kind, "tags": tags}
    if description.licence is not None:
        found["license"] = description.licence.lower()
    if description.tested is None:
        return found
    metrics = [_metric("accuracy", "clean accuracy", description.tested.accuracy)]
    if description.tested.perplexity is not None:
        shown = float(format_significant(description.tested.perplexity, 6))
        metrics.append({"type": "perplexity", "name": "perplexity", "value": shown})
    for table in description.certified:
        metrics += [
            _metric(
                "certified-accuracy",
                f"{table.title}, {table.norm} radius {format_exact(radius)}",
                share,
            )
            for radius, share in zip(table.radii, table.accuracy, strict=True)
        ]
    result = {
        "task": {"type": kind},
        "dataset": {"type": description.data.name, "name": description.tested.data},
        "metrics": metrics,
    }
    return found | {"model-index": [{"name": description.name, "results": [result]}]}


def _metric(kind: str, name: str, share: float) -> dict[str, Any]:
    return {"type": kind, "name": name, "value": float(format_bound(share, 6))}


def _privacy_sentence(card: Mapping[str, Any]) -> str:
    guarantee = card["guarantee"]
    if (why := no_epsilon(card)) is not None:
        return f"**{why[0].upper()}{why[1:]}.**"
    if not card["private"]:
        return "**It is NOT private**; the privacy card says why."
    unit = "whole group of training records" if "group" in guarantee else "training record"
    bound = bounding_guarantee(card)
    said = ", with all else that was released of these records"
    if bound is guarantee:
        said = left_out(card["assumptions"])
    return (
        f"What it reveals of one {unit} is bounded by epsilon "
        f"{format_epsilon(bound['epsilon'])} at delta {format_delta(bound['delta'])}, "
        f"{card['relation']}, {shown_kind(guarantee['kind'])}{said}."
    )


def _privacy_section(card: Mapping[str, Any]) -> str:
    """Return what is proved of one record, and what it means, in Markdown."""
    guarantee = card["guarantee"]
    if (why := no_epsilon(card)) is not None:
        return f"None is known: {why}. It may give single training records away."
    if not card["private"]:
        return f"None: the run key was fixed, or nothing is proved. See `{PRIVACY_CARD_TEXT}`."
    unit = "group" if "group" in guarantee else "record"
    epsilon = float(bounding_guarantee(card)["epsilon"])
    lines = [
        f"({format_epsilon(guarantee['epsilon'])}, {format_delta(guarantee['delta'])})"
        f"-differential privacy, {shown_kind(guarantee['kind'])} by {card['accountant']}; "
        f"neighbours: {card['relation']}{left_out(card['assumptions'])}.",
        f"Whatever test is made on the model: if it calls a {unit} that was not trained on one "
        f"that was with probability p, it finds one that was with probability at most e^epsilon p "
        f"+ delta (e^epsilon = {format_significant(math.exp(min(epsilon, 700)), 3)}).",
        f"`{PRIVACY_CARD_TEXT}` has the mechanism, epsilon at other deltas, and what must hold.",
    ]
    return "\n\n".join(lines)


def _robustness_section(description: ReleaseDescription) -> str:
    """Return accuracies, and certified accuracies by radius, in Markdown."""
    if description.certificate is None and not description.certified:
        noise = "Released without certificate settings; `--sigma` chooses the noise."
        return (
            noise
            if description.tested is None
            else f"{noise} {_clean_accuracy_sentence(description)}"
        )
    parts = [] if description.tested is None else [_clean_accuracy_sentence(description)]
    if description.certificate is not None:
        parts.append(f"Meant to be certified as: {description.certificate.folder_name}.")
    if description.certified:
        parts.append("Share of inputs that are right and certified at the radius at least:")
    parts += [_certified_accuracy_table(table) for table in description.certified]
    return "\n\n".join(parts)


def _clean_accuracy_sentence(description: ReleaseDescription) -> str:
    tested = description.tested
    assert tested is not None
    return (
        f"Accuracy {format_percent(tested.accuracy)} % of {tested.inputs:,} inputs ({tested.data})."
    )


def _certified_accuracy_table(table: CertifiedAccuracy) -> str:
    head = (
        f"{table.title}: {table.inputs:,} inputs, at most {table.draws:,} draws, alpha "
        f"{table.alpha:g} each"
    )
    rows = [
        f"| {format_exact(radius)} | {format_percent(share)} % |"
        for radius, share in zip(table.radii, table.accuracy, strict=True)
    ]
    rows += ["", f"{table.measured}."]
    rows += [] if table.population is None else ["", f"{table.population}."]
    return "\n".join([head, "", f"| {table.norm} radius | certified |", "|---|---|", *rows])


def _format_classes(classes: tuple[str, ...]) -> str:
    if len(classes) <= 20:
        return ", ".join(classes)
    return f"{', '.join(classes[:10])}, ... ({len(classes)} in all, in `{DESCRIPTION}`)"


# --- the dossier ------------------------------------------------------------------------------


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
    yield "General description of the AI system", _general_points(about, card)
    yield (
        "Detailed description of the elements and of the process of development",
        _development_points(about, card, spec, inputs),
    )
    yield (
        "Monitoring, functioning and control of the AI system",
        [("", [_limits(about, card), inputs, "Accuracy for groups of persons, foreseeable "
               "unintended outcomes, human oversight:", NOT_HELD])],
    )  # fmt: skip
    yield "Appropriateness of the performance metrics", [("", NOT_HELD)]
    yield "Risk management system (Article 9)", [("", NOT_HELD)]
    superseded = (
        f"Releases of superseded attempts of the training, charged: {card['superseded_releases']}."
    )
    stopped = card.get("extra", {}).get("stopped")
    early = [f"The training was stopped {stopped}."] if stopped else []
    yield (
        "Relevant changes made through the lifecycle",
        [("", [superseded, *early, "Changes since:", NOT_HELD])],
    )
    yield "Harmonised standards applied in full or in part", [("", NOT_HELD)]
    yield "Copy of the EU declaration of conformity (Article 47)", [("", NOT_HELD)]
    yield "Post-market monitoring system and plan (Article 72)", [("", NOT_HELD)]


def _general_points(about: ReleaseDescription, card: Mapping[str, Any]) -> list[_Point]:
    """Return point 1 of Annex IV."""
    return [
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
    ]  # fmt: skip


def _development_points(
    about: ReleaseDescription, card: Mapping[str, Any], spec: ModelSpec, inputs: str
) -> list[_Point]:
    """Return point 2 of Annex IV."""
    told = f"{about.outputs:,}, named in `{DESCRIPTION}`"
    if about.vocabulary is not None:
        told = f"{about.vocabulary:,} next tokens"
    return [
        ("(a) Methods and steps of the development, pre-trained parts", [
            f"Method {about.method}.", *_ledger(card), _pretrained(card),
            "Other steps and tools:", NOT_HELD]),
        ("(b) Design specifications, key choices and assumptions", [
            *_lines("The privacy guarantee holds if:", card["assumptions"]),
            "Rationale, classification choices and trade-offs:", NOT_HELD]),
        ("(c) Architecture and computational resources", [
            f"{spec.name}, in full in `{ARCHITECTURE}`. {inputs} Outputs: {told}. Resources of "
            "the development:", NOT_HELD]),
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
    ]  # fmt: skip


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
            _privacy_section(card),
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
    rows.append(f"kind: {shown_kind(card['guarantee']['kind'])}")
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
    measured = _robustness_section(about) if about.vocabulary is None else _measured(about)[1]
    return [
        "No measurement is held." if nothing else measured,
        *(_lines("Audits:", audits) or ["No audit is held."]),
    ]


def _lines(title: str, lines: Sequence[str]) -> list[str]:
    """Return a list under its title; nothing for an empty one."""
    return [title, "\n".join(f"* {line}" for line in lines)] if lines else []
