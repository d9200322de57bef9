"""Write the folder release/ of a run: the files that are safe to publish, and nothing else.

No other module writes there.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpdist import models
from dpdist.core.errors import UserError
from dpdist.core.files import built_aside, read_bytes, write_atomic, write_json
from dpdist.core.version import __version__
from dpdist.privacy.card import card_markdown
from dpdist.privacy.phases import NOT_TRAINED_HERE
from dpdist.randomness.noise_location import place_of
from dpdist.release.bundle import (
    CARD,
    CARD_TEXT,
    DESCRIPTION,
    FORMAT,
    OF_ONE_CERTIFICATION,
    PAGE,
    SIGNATURE,
    SUMS,
    certified_of,
    description_of,
    is_released,
    signature,
    sums_of,
    table_name,
)
from dpdist.release.model_card import model_card
from dpdist.release.tables import check_table
from dpdist.reports.facts import Facts, read_facts
from dpdist.runs.folder import RunFolder

if TYPE_CHECKING:
    from torch import nn


def write_release(
    folder: RunFolder,
    *,
    not_private: bool = False,
    licence: str | None = None,
    key: Path | None = None,
) -> list[Path]:
    """Write what may be published of a run into its folder release/, anew and whole.

    Args:
        folder: the run.
        not_private: release a run without a finite guarantee, or with a fixed key; its card then
            says so.
        licence: an SPDX identifier for the model.
        key: an Ed25519 private key (PEM) that signs the release.

    Returns:
        The files, which are all that release/ holds.

    Raises:
        UserError: training never finished, canaries were trained on, the run's models never leave,
            the model is not the one that was trained or cannot be loaded, release/ holds something
            else, or the run is not private and `not_private` is not given. The folder is then left
            as it was.

    Example:
        After `dpdist.run` made runs/small:

        >>> import dpdist
        >>> files = dpdist.write_release(dpdist.read_facts("small").folder)
        >>> "runs/small/release/privacy_card.md" in [file.as_posix() for file in files]
        True
    """
    _refuse_foreign(folder.release)
    facts = read_facts(folder)
    if facts.audited_run is not None:
        raise UserError(f"{folder.path}: an audited run is {facts.audited_run}")
    if facts.recipe.method.withheld is not None:
        raise UserError(f"{folder.path}: {facts.recipe.method.withheld}")
    described = facts.card()
    if not described["private"] and not not_private:
        reason = "its run key is fixed" if facts.fixed_key else "its proved epsilon is infinite"
        reason = NOT_TRAINED_HERE if facts.plan.trained_elsewhere else reason
        raise UserError(
            f"{folder.path}: this run is not private ({reason}); to release it all the same, "
            "labelled as such, add --not-private"
        )
    with built_aside(folder.release, replace=True) as aside:
        aside.mkdir()
        for name in ("model.safetensors", "model.json"):
            write_atomic(aside / name, read_bytes(folder.model / name))
        for number, table in enumerate(facts.tables, 1):
            write_atomic(aside / table_name(number), read_bytes(table.path))
        model = _checked_model(facts, aside)
        for table in facts.tables:
            check_table(table, models.model_hash(aside), model, models.read_spec(aside))
        about = _described(facts, model, aside, licence)
        write_json(aside / CARD, described)
        write_atomic(aside / CARD_TEXT, card_markdown(described))
        write_json(aside / DESCRIPTION, about)
        page = model_card(description_of(about, DESCRIPTION), described, models.read_spec(aside))
        write_atomic(aside / PAGE, page)
        sums = sums_of(aside)
        write_atomic(aside / SUMS, sums)
        if key is not None:
            write_atomic(aside / SIGNATURE, signature(key, sums.encode()))
    return sorted(folder.release.iterdir())


def _described(facts: Facts, model: nn.Module, copied: Path, licence: str | None) -> dict[str, Any]:
    """Return the content of release.json."""
    recipe, evaluation = facts.recipe, facts.evaluation
    certificate = None
    if recipe.certify is not None:  # how to certify, and nothing of what was certified
        kept = type(recipe.certify).model_fields.keys() - OF_ONE_CERTIFICATION
        certificate = recipe.certify.model_dump(mode="json", include=set(kept))
    tested = None
    if evaluation is not None and facts.accuracy is not None:
        tested = {name: evaluation[name] for name in ("data", "inputs", "accuracy")}
    kind = set() if recipe.data.targets == "class" else {"targets"}
    return {
        "format": FORMAT,
        "dpdist": __version__,
        "name": recipe.name,
        "method": recipe.method.name,
        "model": models.model_hash(copied),
        "tokens": recipe.data.text is not None,
        "classes": recipe.data.class_names,
        "noise": place_of(model).describe(),
        "certificate": certificate,
        "data": recipe.data.model_dump(mode="json", include=_OF_TEST_DATA | kind),
        "tested": tested,
        "certified": [certified_of(table) for table in facts.tables],
        "licence": licence,
    }


_OF_TEST_DATA = {"name", "classes", "names", "labels", "test", "columns"}


def _refuse_foreign(release: Path) -> None:
    """Raise UserError for anything in release/ that is not ours: the folder is published whole."""
    if release.is_symlink() or (release.exists() and not release.is_dir()):
        raise UserError(f"{release}: must be a folder that `dpdist release` makes; remove it")
    found = sorted(release.iterdir()) if release.exists() else []
    foreign = [p.name for p in found if not is_released(p.name) or p.is_symlink() or p.is_dir()]
    if foreign:
        raise UserError(
            f"{release}: holds {', '.join(map(repr, foreign))}, which `dpdist release` did not "
            "write; all of release/ is published: move it away"
        )


def _checked_model(facts: Facts, copied: Path) -> nn.Module:
    """Return the copied model, checked.

    Raises UserError unless it is the trained one, loads as its users will load it, and answers
    with finite numbers.
    """
    import torch

    where = facts.folder.model
    if models.model_hash(copied) != facts.trained["model"]:
        raise UserError(
            f"{where}: is not the model that this run trained, and its guarantee does not speak of "
            "it; put the trained model back"
        )
    try:
        module = models.load(copied, trusted_factory=facts.recipe.model.name)
        models.check_outputs(module, models.read_spec(copied))
    except UserError as error:
        said = str(error).replace(str(copied), str(where))
        raise UserError(f"{where}: cannot be released: {said}") from error
    bad = [k for k, v in module.state_dict().items() if not bool(torch.isfinite(v).all())]
    if bad:
        raise UserError(f"{where}: {bad[0]} holds numbers that are not finite; train again")
    return module
