"""Each `dpdist` command that pages of papers and benchmarks print is one that its parser takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from markdown_it import MarkdownIt
from typer.core import TyperGroup

from dpdist.attacks.settings import AttackSettings
from dpdist.cli import audit
from dpdist.cli.main import app
from dpdist.cli.options import changes_by_section
from dpdist.core.errors import UserError
from dpdist.runs.recipe import (
    Recipe,
    built_in_recipes,
    find_recipe,
    load_recipe,
    paper_recipes,
    parse_changes,
    parse_section,
)

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted((ROOT / "papers").rglob("*.md")), *sorted((ROOT / "benchmarks").rglob("*.md"))]
RECIPES = {path.stem for path in (*built_in_recipes(), *paper_recipes())}
# Runs that a page names itself, and files that a page writes down.
RUNS = {"mnist-noise-only", "mnist-small", "begun"}
PLACEHOLDERS = {"RUN", "RECIPE", "nothing"}
SECTIONS = {  # of --set
    "certify": ("certify", "attacked", "resources", "data"), "predict": ("certify", "sampling"),
}  # fmt: skip
UsageError = typer.BadParameter.__base__  # typer may bring a click of its own
BEGINNING = re.compile(r"dpdist( |$)")


def commands(text: str) -> Iterator[str]:
    """Yield the commands of a Markdown text, one line each, from its code.

    Comments, `[` `]` around an option that may be left out, and `...` at the end are left out; what
    a shell would substitute is a key's digits. `;` parts two commands.
    """
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        pieces = [each.content for each in token.children or () if each.type == "code_inline"]
        if token.type in ("fence", "code_block"):
            pieces = token.content.replace("\\\n", " ").splitlines()
        for piece in pieces:
            line = re.sub(r"\$\([^)]*\)", "0123456789abcdef" * 4, " ".join(piece.split()))
            line = re.sub(r"\[(--[^\]]*)\]", r"\1", line).partition(" #")[0].removesuffix(" ...")
            if BEGINNING.match(line):
                parts = (part.strip() for part in line.split(";"))
                yield from filter(BEGINNING.match, parts)


PRINTED = {
    path.relative_to(ROOT).as_posix(): sorted(set(commands(path.read_text()))) for path in PAGES
}


command_line = cache(lambda: typer.main.get_command(app))
recipe_named = cache(lambda name, *changes: load_recipe(find_recipe(name), parse_changes(changes)))


def parsed(words: list[str]) -> tuple[str, dict[str, Any]]:
    """Return a `dpdist` command's name and what click parsed; nothing where the page only names it.

    Raises UsageError for an option or argument that the command does not take.
    """
    command, name, words = command_line(), "dpdist", list(words)
    while isinstance(command, TyperGroup) and words:
        if any(words[0] in option.opts for option in command.params):
            return name, {}
        name = words.pop(0)
        found = command.get_command(typer.Context(command), name)
        if found is None:
            raise UsageError(f"no command {name}")
        command = found
    return name, dict(command.make_context(name, words).params) if words else {}


def recipe_with(name: str, assignments: Iterable[str] | None) -> Recipe:
    """Return the recipe, changed; of a placeholder any."""
    found = "digits" if name in PLACEHOLDERS else name
    return recipe_named(found, *(assignments or ()))


def check_dpdist(words: list[str]) -> None:
    """Hold a `dpdist` command against its parser, its recipe, and what reads its values."""
    name, given = parsed(words)
    recipe = given.get("recipe")
    if recipe is not None and recipe.endswith(".yaml"):
        return  # a page's own file
    if recipe is not None:
        key = next(key for key in ("changed", "assignments", "changes") if key in given)
        recipe_with(recipe, given[key])
    run = given.get("name" if name == "audit" else "run")
    for each in given.get("names") or ([run] if run else []):
        if each not in RECIPES | RUNS | PLACEHOLDERS:
            raise UserError(f"{each}: no recipe, and no run that a page names")
    if name == "attack" and given:
        sections = changes_by_section(given["changes"], {"attack": None, "data": ("root",)})
        own = {"certificates", "claim"}
        asked = {key: each for key, each in sections["attack"].items() if key not in own}
        parse_section(AttackSettings, asked, "attack")
    if name in ("certify", "predict") and given:
        changes_by_section(given["changes"], dict.fromkeys(SECTIONS[name]))
    if name == "audit" and given.get("kind") == "membership":
        own = [each for each in given["changes"] or () if each.startswith("membership.")]
        keys = changes_by_section(own, {"membership": None})["membership"]
        parse_section(audit.MembershipKeys, keys, "membership")


@pytest.mark.slow
@pytest.mark.parametrize("page", PRINTED)
def test_every_command_that_is_printed_is_one_that_its_parser_takes(page):
    wrong = []
    for line in PRINTED[page]:
        try:
            check_dpdist(shlex.split(line)[1:])
        except (UsageError, UserError, KeyError) as error:
            wrong.append(f"{line}: {type(error).__name__}: {error}")
    assert wrong == [], "\n".join(wrong)
