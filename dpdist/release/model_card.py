"""The model card of a release: README.md, with the metadata block that model hubs read.

It is a function of release.json, the privacy card and the shape of the inputs, and of nothing else:
so it tells nothing that these do not, and can be made again and compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from shlex import quote
from typing import TYPE_CHECKING, Any

import yaml

from dpdist.core.console import (
    format_bound,
    format_exact,
    format_markdown_table,
    format_significant,
)
from dpdist.core.fields import describe_averaging
from dpdist.models.signature import Signature
from dpdist.privacy.card import PRIVACY_CARD, PRIVACY_CARD_TEXT, bounding_guarantee, no_epsilon
from dpdist.release.description import ReleaseDescription, release_rows
from dpdist.release.files import ARCHITECTURE, CHECKSUMS, DESCRIPTION, WEIGHTS

if TYPE_CHECKING:
    from dpdist.models import ModelSpec

# --- the model card ---------------------------------------------------------------------------


_TAGS = ["differential-privacy", "certified-robustness", "safetensors"]


def model_card(description: ReleaseDescription, card: Mapping[str, Any], spec: ModelSpec) -> str:
    """Markdown, behind a block of YAML."""
    size = " x ".join(map(str, spec.input_shape))
    kind = "images (channels, height, width)" if len(spec.input_shape) == 3 else "numbers"
    rules = description.data.columns.feature_rules
    raw = f"{kind}, made of raw rows as the list below and `{DESCRIPTION}` say"
    pictures = len(spec.input_shape) == 3 and not description.raw_inputs
    scale = "in [0, 1]" if pictures else "as the training had them"
    scaled = raw if rules else f"{kind}, {scale}"
    kind = "tokens" if description.tokens else scaled
    sections = [
        f"---\n{yaml.safe_dump(_metadata(description, card, spec), sort_keys=False)}---",
        f"# {description.name}",
        _origin(description, card, spec),
        format_markdown_table(release_rows(description, card)),
        _usage(description, spec),
        _inputs(description, spec, size, kind, pictures) + _outputs(description),
        *(
            ["\n".join(f"* `{name}`: {rule.describe()}" for name, rule in rules.items())]
            * bool(rules)
        ),
        "## Privacy",
        _privacy_section(card),
        "## Limits",
        _limits(description, card),
        "## License",
        f"{description.license} (SPDX)."
        if description.license
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


def _usage(description: ReleaseDescription, spec: ModelSpec) -> str:
    """Return how the model is asked."""
    if spec.signature:
        return _fields_usage(spec)
    return _USAGE if description.text is None else _text_usage(description, spec)


def _fields_usage(spec: ModelSpec) -> str:
    """Return how a model of several fields is asked."""
    fields = Signature.parse(spec.signature, spec.name).fields
    trust = "".join(f', trusted_factory="{name}"' for name in spec.user_factories[:1])
    return f"""\
```python
import dpdist

release = dpdist.load("FOLDER"{trust})
release.predict({{{", ".join(f'"{name}": ...' for name in fields)}}})  # no certificate
```

{_NOTHING_RUN}: weights and network, and the fields that it reads; `{DESCRIPTION}`: classes;
`{PRIVACY_CARD}`, `{PRIVACY_CARD_TEXT}`: what is proved of privacy;
`{CHECKSUMS}`: sums (`sha256sum -c`)."""


def _inputs(
    description: ReleaseDescription, spec: ModelSpec, size: str, kind: str, pictures: bool
) -> str:
    """Say what the model reads."""
    if spec.signature:
        return f"Inputs: {Signature.parse(spec.signature, spec.name)}, as the training had them. "
    more = ", or of 8 bits. " if pictures else ". "
    return f"Inputs: {size} {kind}{more}{_pictures(description, spec)}"


def _text_usage(description: ReleaseDescription, spec: ModelSpec) -> str:
    """Return how a text is answered, in place of images and radii."""
    said = "the most probable next tokens" if spec.following else "class and probability"
    trust, trusted, sampled = "", "", ""
    for factory in spec.user_factories[:1]:
        trust, trusted = f" --trust-factory {quote(factory)}", f", trusted_factory={factory!r}"
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
    return f"""\
The adapter alone, on its base {base.name} (digest of its weights {base.digest}):

```python
from dpdist.integrations.transformers import load_adapter
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("BASE", dtype="{base.dtype}")
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
    if "user" in card["guarantee"]:
        return text.replace("single training records", "users", 1)
    return text


def _origin(about: ReleaseDescription, card: Mapping[str, Any], spec: ModelSpec) -> str:
    """Say in a sentence or two which model this is, who trained it, and how private it is."""
    if no_epsilon(card) is not None:
        return (
            f"A {_model_kind(spec)} tested on {about.data.name}, published with dpdist "
            f"{about.dpdist}."
        )
    return (
        f"A {_model_kind(spec)} of {about.data.name}, trained by method {about.method} with dpdist "
        f"{about.dpdist}."
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
    if description.license is not None:
        found["license"] = description.license.lower()
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


def _privacy_section(card: Mapping[str, Any]) -> str:
    """Return what is proved of one record, and what it means, in Markdown."""
    guarantee = card["guarantee"]
    if (why := no_epsilon(card)) is not None:
        return f"None is known: {why}. It may give single training records away."
    if not card["private"]:
        return f"None: the run key was fixed, or nothing is proved. See `{PRIVACY_CARD_TEXT}`."
    unit = "user" if "user" in guarantee else "record"
    epsilon = float(bounding_guarantee(card)["epsilon"])
    lines = [
        f"Neighboring data sets: {card['relation']}.",
        f"Whatever test is made on the model: if it calls a {unit} that was not trained on one "
        f"that was with probability p, it finds one that was with probability at most e^epsilon p "
        f"+ delta (e^epsilon = {format_significant(math.exp(min(epsilon, 700)), 3)}).",
        f"`{PRIVACY_CARD_TEXT}` has the mechanism, epsilon at other deltas, and what must hold.",
    ]
    return "\n\n".join(lines)


def _format_classes(classes: tuple[str, ...]) -> str:
    if len(classes) <= 20:
        return ", ".join(classes)
    return f"{', '.join(classes[:10])}, ... ({len(classes)} in all, in `{DESCRIPTION}`)"
