"""Render the model card of a release: README.md, with the metadata block that model hubs read.

It depends only on release.json, the privacy card and the model's description, so `dpdist verify`
can render it again and compare.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.resources import files
from shlex import quote
from typing import TYPE_CHECKING, Any

import jinja2
import yaml

from dpdist.core.console import (
    format_bound,
    format_exact,
    format_markdown_table,
    format_significant,
)
from dpdist.core.fields import describe_averaging
from dpdist.models.signature import Signature
from dpdist.privacy.card import bounding_guarantee, no_epsilon
from dpdist.release.description import ReleaseDescription, release_rows
from dpdist.release.files import DESCRIPTION

if TYPE_CHECKING:
    from dpdist.models import ModelSpec


_TAGS = ["differential-privacy", "certified-robustness", "safetensors"]


def model_card(description: ReleaseDescription, card: Mapping[str, Any], spec: ModelSpec) -> str:
    """Return the model card, Markdown with a block of YAML at its top."""
    template = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    ).from_string((files("dpdist.release") / "model-card.md").read_text())
    images = len(spec.input_shape) == 3
    signature = Signature.parse(spec.signature, spec.name) if spec.signature else None
    factory = next(iter(spec.user_factories), None)
    fitted = description.pictures and description.pictures.describe(tuple(spec.input_shape))
    epsilon = float(bounding_guarantee(card)["epsilon"])
    return template.render(
        metadata=yaml.safe_dump(_metadata(description, card, spec), sort_keys=False),
        about=description,
        card=card,
        spec=spec,
        kind=_model_kind(spec, description.data.targets),
        unknown=no_epsilon(card),
        rows=format_markdown_table(release_rows(description, card)),
        signature=signature,
        fields=signature and ", ".join(f'"{name}": ...' for name in signature.fields),
        factory=factory,
        quoted_factory=factory and quote(factory),
        size=" x ".join(map(str, spec.input_shape)),
        images=images,
        table=bool(description.data.columns.features),
        pictures=images and not description.raw_inputs,
        rules=description.data.columns.feature_rules,
        fitted=fitted,
        classes=_format_classes(description.classes),
        unit="user" if "user" in card["guarantee"] else "record",
        factor=format_significant(math.exp(min(epsilon, 700)), 3),
    )


def _model_kind(spec: ModelSpec, targets: str) -> str:
    if spec.following:
        return "predictor of the next token"
    name = "predictor of numbers" if targets == "number" else "classifier"
    kind = describe_averaging(name, spec.shifts, spec.mirrored)
    return f"{kind}," if spec.averages_views else kind


def _metadata(
    description: ReleaseDescription, card: Mapping[str, Any], spec: ModelSpec
) -> dict[str, Any]:
    of_rows = "regression" if description.data.targets == "number" else "classification"
    kind = "image-classification" if len(spec.input_shape) == 3 else f"tabular-{of_rows}"
    if description.tokens:
        kind = "text-generation" if spec.following else "text-classification"
    tags = _TAGS if no_epsilon(card) is None else _TAGS[1:]
    if description.text is not None or not description.is_certifiable:
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


def _format_classes(classes: tuple[str, ...]) -> str:
    if len(classes) <= 20:
        return ", ".join(classes)
    return f"{', '.join(classes[:10])}, ... ({len(classes)} in total, in `{DESCRIPTION}`)"
