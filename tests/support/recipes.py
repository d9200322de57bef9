"""Recipes as data, and as the files that commands read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dpdist.runs.recipe import Recipe


def merge_sections(raw: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return `raw` with `more` merged into its sections, and into what these hold; a new dict."""
    found = dict(raw)
    for key, value in more.items():
        before = found.get(key)
        both = isinstance(value, dict) and isinstance(before, dict)
        found[key] = merge_sections(before, value) if both else value
    return found


def write_recipe(
    folder: Path, raw: Mapping[str, Any] | Recipe, file: str = "r.yaml", **sections: Any
) -> Path:
    """Write a recipe into a folder, which is made where it is not there; return its file.

    sections: fields of the recipe's sections that are to be others.
    """
    if isinstance(raw, Recipe):
        raw = raw.model_dump(mode="json", exclude_none=True)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file
    written = dict(raw)
    for section, values in sections.items():
        before = written.get(section, {})
        both = isinstance(values, dict) and isinstance(before, dict)
        written[section] = {**before, **values} if both else values
    path.write_text(yaml.safe_dump(written))
    return path
