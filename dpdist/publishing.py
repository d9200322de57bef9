"""Write the folder release/ of a run: the files that are safe to publish, and nothing else.

No other module writes there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpdist import models
from dpdist.core.errors import UserError
from dpdist.core.files import atomic_folder, read_bytes, read_json, write_atomic, write_json
from dpdist.core.version import __version__
from dpdist.privacy.card import PRIVACY_CARD, PRIVACY_CARD_TEXT, card_markdown, no_epsilon
from dpdist.randomness.noise_location import find_noise_location
from dpdist.release.bundle import (
    CHECKSUMS,
    DESCRIPTION,
    DOSSIER,
    FORMAT,
    MODEL_CARD,
    PER_CERTIFICATION_FIELDS,
    SIGNATURE,
    TEXT_FORMAT,
    WEIGHTS,
    ReleasedText,
    certified_accuracy_record,
    check_text_column,
    compute_checksums,
    is_release_file,
    parse_description,
    sign_checksums,
    table_name,
    text_column,
)
from dpdist.release.model_card import dossier as dossier_page
from dpdist.release.model_card import model_card
from dpdist.release.tables import check_table
from dpdist.reports.facts import Facts, read_facts
from dpdist.runs.folder import RunFolder, open_run
from dpdist.training.records import data_source

if TYPE_CHECKING:
    from torch import nn

    from dpdist.models import ModelSpec


def write_release(
    folder: RunFolder | str | Path,
    *,
    not_private: bool = False,
    licence: str | None = None,
    key: Path | None = None,
    factory: str | None = None,
    dossier: bool = False,
) -> list[Path]:
    """Write what may be published of a run into its folder release/, anew and whole.

    Args:
        folder: the run's folder, or its name under runs/.
        not_private: release a run without a finite guarantee, or with a fixed key; its card then
            says so.
        licence: an SPDX identifier for the model.
        key: an Ed25519 private key (PEM) that signs the release.
        factory: "package.module:function" of (input_shape, classes) that builds the module of a
            script's run that named none; it is imported, and must build the module that was
            trained.
        dossier: also write dossier.md: what the release holds under the headings of Annex IV of the
            EU's AI Act and of a data-protection impact assessment.

    Returns:
        A list of `Path`: all files in release/.

    Raises:
        UserError: training never finished, canaries were trained on, the run's models never leave,
            the model is not the one that was trained or cannot be loaded, the factory builds
            another one, release/ holds something else, or the run is not private and `not_private`
            is not given. The folder is then left as it was.

    Example:
        After `dpdist.run` made runs/small:

        >>> import dpdist
        >>> files = dpdist.write_release(dpdist.read_facts("small").folder)
        >>> "runs/small/release/privacy_card.md" in [file.as_posix() for file in files]
        True
    """
    if not isinstance(folder, RunFolder):
        folder = open_run(str(folder), Path("runs"))
    _refuse_foreign_files(folder.release_folder)
    facts = read_facts(folder)
    if facts.canary_notice is not None:
        raise UserError(f"{folder.path}: an audited run is {facts.canary_notice}")
    if facts.recipe.method.capabilities.not_releasable_reason is not None:
        raise UserError(f"{folder.path}: {facts.recipe.method.capabilities.not_releasable_reason}")
    described = facts.privacy_card()
    if not described["private"] and not not_private:
        reason = "its run key is fixed" if facts.has_fixed_key else "its proved epsilon is infinite"
        reason = no_epsilon(described) or reason
        raise UserError(
            f"{folder.path}: this run is not private ({reason}); to release it all the same, "
            "labelled as such, add --not-private"
        )
    with atomic_folder(folder.release_folder, replace=True) as aside:
        aside.mkdir()
        for name in ("model.safetensors", "model.json"):
            write_atomic(aside / name, read_bytes(folder.model_folder / name))
        for number, table in enumerate(facts.tables, 1):
            write_atomic(aside / table_name(number), read_bytes(table.path))
        model = _load_copied_model(facts, aside, factory)
        if factory is not None:
            described["extra"] |= {"model": factory, "model hash": models.model_hash(aside)}
        for table in facts.tables:
            check_table(table, models.model_hash(aside), model, models.read_spec(aside))
        if facts.recipe.data.text is not None:
            _write_tokenizer(facts, models.read_spec(aside), aside)
        about = _release_record(facts, model, aside, licence)
        _write_pages(aside, about, described, dossier)
        sums = compute_checksums(aside)
        write_atomic(aside / CHECKSUMS, sums)
        if key is not None:
            write_atomic(aside / SIGNATURE, sign_checksums(key, sums.encode()))
    return sorted(folder.release_folder.iterdir())


def _write_pages(
    aside: Path, about: dict[str, Any], described: dict[str, Any], dossier: bool
) -> None:
    """Write release.json, the privacy card, and the pages that are made of them."""
    write_json(aside / PRIVACY_CARD, described)
    write_atomic(aside / PRIVACY_CARD_TEXT, card_markdown(described))
    write_json(aside / DESCRIPTION, about)
    read = parse_description(about, DESCRIPTION), described, models.read_spec(aside)
    write_atomic(aside / MODEL_CARD, model_card(*read))
    if dossier:
        write_atomic(aside / DOSSIER, dossier_page(*read))


def _release_record(
    facts: Facts, model: nn.Module, copied_model: Path, licence: str | None
) -> dict[str, Any]:
    """Return the content of release.json."""
    recipe, evaluation = facts.recipe, facts.evaluation
    certificate = None
    if recipe.certify is not None:  # how to certify, and nothing of what was certified
        kept = type(recipe.certify).model_fields.keys() - PER_CERTIFICATION_FIELDS
        certificate = recipe.certify.model_dump(mode="json", include=set(kept))
    tested = None
    if evaluation is not None and facts.accuracy is not None:
        tested = {name: evaluation[name] for name in ("data", "inputs", "accuracy")}
    kind = set() if recipe.data.targets == "class" else {"targets"}
    text = {} if recipe.data.text is None else {"text": _text_record(facts)}
    raw = {} if recipe.by_script is None else {"raw_inputs": True}
    pictures: dict[str, Any] = {}
    if recipe.method.capabilities.picture_preparation:
        imported = read_json(facts.folder.imported, {"data": dict})
        pictures = {"pictures": {"resize": imported["data"]["resize"]}}
    return {
        "format": TEXT_FORMAT if text else FORMAT,
        "dpdist": __version__,
        "name": recipe.name,
        "method": recipe.method.name,
        "model": models.model_hash(copied_model),
        "tokens": recipe.data.text is not None,
        "classes": recipe.data.class_names,
        "noise": find_noise_location(model).describe(),
        "certificate": certificate,
        "data": recipe.data.model_dump(mode="json", include=_TEST_DATA_FIELDS | kind),
        "tested": tested,
        "certified": [certified_accuracy_record(table) for table in facts.tables],
        "licence": licence,
        **text,
        **pictures,
        **raw,
    }


def _text_record(facts: Facts) -> dict[str, Any]:
    """Return how tokens are made, for release.json: no path, as the file lies in the release."""
    text = facts.recipe.data.text
    assert text is not None
    tokens = "bytes" if text.words is None else "words"
    tokens = tokens if text.tokenizer is None else "tokenizer"
    return {
        "length": text.length, "tokens": tokens, "words": text.words, "predict": text.predict,
    }  # fmt: skip


def _write_tokenizer(facts: Facts, spec: ModelSpec, aside: Path) -> None:
    """Copy what makes the tokens, as it was trained with. Raises UserError where it is not there.

    It was made of no private document: the privacy card says so under its assumptions.
    """
    column = data_source(facts.recipe).columns.text
    assert column is not None
    text = ReleasedText.model_validate(_text_record(facts))
    try:
        content = column.token_file
    except UserError as error:
        raise UserError(
            f"{error}; the release needs what made the tokens of this run: put it back"
        ) from None
    if text.file is not None and content is not None:
        write_atomic(aside / text.file, content)
    check_text_column(text_column(text, aside), spec, aside)


_TEST_DATA_FIELDS = {"name", "classes", "names", "labels", "test", "columns"}


def _refuse_foreign_files(release: Path) -> None:
    """Raise UserError for anything in release/ that is not ours: the folder is published whole."""
    if release.is_symlink() or (release.exists() and not release.is_dir()):
        raise UserError(f"{release}: must be a folder that `dpdist release` makes; remove it")
    found = sorted(release.iterdir()) if release.exists() else []
    foreign = [p.name for p in found if not is_release_file(p.name) or p.is_symlink() or p.is_dir()]
    if foreign:
        raise UserError(
            f"{release}: holds {', '.join(map(repr, foreign))}, which `dpdist release` did not "
            "write; all of release/ is published: move it away"
        )


def _load_copied_model(facts: Facts, copied_model: Path, factory: str | None) -> nn.Module:
    """Return the copied model, checked; its description then names the factory, if one is given.

    Raises UserError unless it is the trained one, loads as its users will load it, and answers
    with finite numbers.
    """
    import torch

    where = facts.folder.model_folder
    if models.model_hash(copied_model) != facts.training_summary["model"]:
        raise UserError(
            f"{where}: is not the model that this run trained, and its guarantee does not speak of "
            "it; put the trained model back"
        )
    if factory is not None:
        _name_factory(facts, copied_model, factory)
    try:
        trusted = facts.recipe.model.name if factory is None else factory
        module = models.load(copied_model, trusted_factory=trusted)
        models.check_outputs(module, models.read_spec(copied_model))
    except UserError as error:
        said = str(error).replace(str(copied_model), str(where))
        raise UserError(f"{where}: cannot be released: {said}") from error
    bad = [k for k, v in module.state_dict().items() if not bool(torch.isfinite(v).all())]
    if bad:
        raise UserError(f"{where}: {bad[0]} holds numbers that are not finite; train again")
    return module


def _name_factory(facts: Facts, copied_model: Path, factory: str) -> None:
    """Let a factory build the copied model of a script's run from here on.

    Raises UserError where it builds another module, or the run needs none.
    """
    spec = models.read_spec(copied_model)
    if facts.recipe.by_script is None or not spec.name.startswith(f"{models.SCRIPT}:"):
        raise UserError(
            f"factory: must be left out for this run, whose model {spec.name} builds, got {factory}"
        )
    if facts.tables:
        raise UserError(
            f"factory: must be given to a run without certificates, got {factory}; those in "
            f"{facts.folder.certificates} are of the script's own module: move them away, and "
            "certify the release"
        )
    from dpdist.training.script_state import check_built_again

    built = replace(spec, name=factory, options={})
    module = models.initialise(built, 0)
    check_built_again(module, copied_model / WEIGHTS, facts.folder.checkpoints, factory)
    models.save(module, built, copied_model)
