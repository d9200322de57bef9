"""Write the folder release/ of a run, or its adapter. No other module writes to release/."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpdist import models
from dpdist.core.errors import UserError
from dpdist.core.files import atomic_folder, read_bytes, read_json, write_atomic, write_json
from dpdist.core.script_errors import warn
from dpdist.core.version import __version__
from dpdist.privacy.card import PRIVACY_CARD, PRIVACY_CARD_TEXT, card_markdown, no_epsilon
from dpdist.randomness.noise_location import find_noise_location
from dpdist.release.answers import check_text_column
from dpdist.release.description import (
    FORMAT,
    PER_CERTIFICATION_FIELDS,
    ReleasedText,
    certified_accuracy_record,
    parse_description,
    text_column,
)
from dpdist.release.files import (
    ADAPTER_WEIGHTS,
    BASE,
    CHECKSUMS,
    DESCRIPTION,
    MODEL_CARD,
    SETTINGS,
    SIGNATURE,
    WEIGHTS,
    compute_checksums,
    is_release_file,
    sign_checksums,
    table_name,
)
from dpdist.release.model_card import model_card
from dpdist.release.tables import check_table
from dpdist.reports.results import RunResults, load_results
from dpdist.runs.folder import RunFolder, open_run
from dpdist.training.records import data_source

if TYPE_CHECKING:
    from torch import nn

    from dpdist.models import ModelSpec


def write_release(
    folder: RunFolder | str | Path,
    *,
    not_private: bool = False,
    license: str | None = None,
    key: Path | None = None,
    factory: str | None = None,
) -> list[Path]:
    """Write the publishable files of a run into its folder release/, and replace the old one.

    Args:
        folder: the run's folder, or its name under runs/.
        not_private: release a run without a finite guarantee, or with a fixed key; its card then
            states this.
        license: an SPDX identifier for the model.
        key: an Ed25519 private key (PEM) that signs the release.
        factory: "package.module:function" of (input_shape, classes) that builds the module of a
            script's run without a factory; it is imported, and must build the module that was
            trained.

    Returns:
        A list of `Path`: all files in release/, such as the model, the card and release.json.

    Raises:
        UserError: training is not finished, canaries were trained on, the run's models must never
            be published, the model is not the one that was trained or cannot be loaded, the factory
            builds a different one, release/ contains something else, or the run is not private and
            `not_private` is not given. The folder is then unchanged.

    Example:
        After `dpdist.run` made runs/small:

        >>> import dpdist
        >>> files = dpdist.write_release(dpdist.load_results("small").folder)
        >>> "runs/small/release/privacy_card.md" in [file.as_posix() for file in files]
        True
    """
    if not isinstance(folder, RunFolder):
        folder = open_run(str(folder), Path("runs"))
    _refuse_foreign_files(folder.release_folder)
    facts = load_results(folder)
    _require_releasable(facts)
    card = facts.privacy_card()
    if not card["private"] and not not_private:
        reason = "its run key is fixed" if facts.has_fixed_key else "its proved epsilon is infinite"
        raise UserError(
            f"{folder.path}: this run is not private ({no_epsilon(card) or reason}); to release "
            "it, with a card that states this, add --not-private"
        )
    with atomic_folder(folder.release_folder, replace=True) as aside:
        aside.mkdir()
        for name in ("model.safetensors", "model.json"):
            write_atomic(aside / name, read_bytes(folder.model_folder / name))
        for number, table in enumerate(facts.tables, 1):
            write_atomic(aside / table_name(number), read_bytes(table.path))
        model = _load_copied_model(facts, aside, factory)
        spec, digest = models.read_spec(aside), models.model_hash(aside)
        if digest != facts.training_summary["model"]:
            card["extra"] |= {"model": spec.name, "model hash": digest}
        for table in facts.tables:
            check_table(table, digest, model, spec)
        _write_tokenizer(facts, spec, aside)
        about = _release_record(facts, model, aside, license)
        adapter = models.Adapter.of(model)
        if adapter is not None and adapter.outside is None:  # only the adapter was trained
            name = _base_name(facts, adapter)
            about["base"] = _write_adapter_files(adapter, model, name, aside)
        _write_card(card, aside)
        write_json(aside / DESCRIPTION, about)
        page = model_card(parse_description(about, DESCRIPTION), card, spec)
        write_atomic(aside / MODEL_CARD, page)
        sums = compute_checksums(aside)
        write_atomic(aside / CHECKSUMS, sums)
        if key is not None:
            write_atomic(aside / SIGNATURE, sign_checksums(key, sums.encode()))
    return sorted(folder.release_folder.iterdir())


def _write_card(card: dict[str, Any], folder: Path) -> None:
    write_json(folder / PRIVACY_CARD, card)
    write_atomic(folder / PRIVACY_CARD_TEXT, card_markdown(card))


_TEST_DATA_FIELDS = {"name", "targets", "classes", "names", "labels", "test", "columns"}


def _release_record(
    facts: RunResults, model: nn.Module, copied_model: Path, license: str | None
) -> dict[str, Any]:
    """Return the content of release.json."""
    recipe, evaluation = facts.recipe, facts.evaluation
    certificate = None
    if recipe.certify is not None:  # the settings, without the choice of inputs and noise
        kept = type(recipe.certify).model_fields.keys() - PER_CERTIFICATION_FIELDS
        certificate = recipe.certify.model_dump(mode="json", include=set(kept))
    tested = None
    if evaluation is not None and facts.accuracy is not None:
        tested = {name: evaluation[name] for name in ("data", "inputs", "accuracy")}
        if facts.next_token_count is not None:
            names = ("perplexity", "next_tokens", "base_perplexity")
            tested |= {name: evaluation[name] for name in names if name in evaluation}
    data = recipe.data.model_dump(mode="json", include=_TEST_DATA_FIELDS)
    text: dict[str, Any] = {}
    outputs: dict[str, Any] = {"classes": recipe.data.class_names}
    if (record := _text_record(facts)) is not None:
        text = {"text": record}
        if record["predict"] == "next":  # a script's data do not know the number of tokens
            tokens = models.read_spec(copied_model).classes
            data, outputs = {**data, "classes": tokens}, {"classes": [], "vocabulary": tokens}
    raw = {} if recipe.by_script is None else {"raw_inputs": True}
    pictures: dict[str, Any] = {}
    if recipe.method.capabilities.picture_preparation:
        imported = read_json(facts.folder.imported, {"data": dict})
        pictures = {"pictures": {"resize": imported["data"]["resize"]}}
    return {
        "format": FORMAT,
        "dpdist": __version__,
        "name": recipe.name,
        "method": recipe.method.name,
        "model": models.model_hash(copied_model),
        "tokens": bool(text),
        **outputs,
        "noise": find_noise_location(model).describe(),
        "certificate": certificate,
        "data": data,
        "tested": tested,
        "measured": {
            name: f"{value} on {facts.evaluation_scope})" for name, value in facts.measures.items()
        },
        "certified": [certified_accuracy_record(table) for table in facts.tables],
        "license": license,
        **text,
        **pictures,
        **raw,
    }


def _text_record(facts: RunResults) -> dict[str, Any] | None:
    """Return the tokenizer's settings for release.json; None if there are none."""
    text = facts.recipe.data.text
    if text is None:
        script = _script_documents(facts)
        if script is None:
            return None
        record = {"length": script["length"], "tokens": "tokenizer", "words": None}
        flags = {"settings": True, "chat": script["chat"], "bos_eos": script.get("bos_eos")}
        predict = "next"
    else:
        column = data_source(facts.recipe).columns.text
        assert column is not None
        tokens = "bytes" if text.words is None else "words"
        tokens = tokens if text.tokenizer is None else "tokenizer"
        record = {"length": text.length, "tokens": tokens, "words": text.words}
        has_settings = column.settings is not None
        chat = has_settings and column.shows_chats
        flags = {"settings": has_settings, "chat": chat, "bos_eos": text.bos_eos}
        predict = text.predict
    return {**record, "predict": predict, **{name: True for name, on in flags.items() if on}}


def _script_documents(facts: RunResults) -> dict[str, Any] | None:
    """Return the tokenization of a script's documents (`Records.tokenization`), if known."""
    from dpdist.training.script_state import read_module_record

    if facts.recipe.by_script is None:
        return None
    record = read_module_record(facts.folder.checkpoints) or {}
    text: dict[str, Any] | None = record.get("text")
    return text


def _write_tokenizer(facts: RunResults, spec: ModelSpec, aside: Path) -> None:
    """Write the tokenizer of the training. Raises UserError if it is missing.

    It does not depend on private documents: the privacy card states this as an assumption.
    """
    if (record := _text_record(facts)) is None:
        return
    text, column = ReleasedText.model_validate(record), data_source(facts.recipe).columns.text
    if column is None:
        for name, content in (_script_documents(facts) or {})["files"].items():
            write_atomic(aside / name, content)
    else:
        try:
            content = column.token_file
        except UserError as error:
            raise UserError(
                f"{error}; the release needs the tokenizer of this run: restore the file"
            ) from None
        if text.file is not None and content is not None:
            write_atomic(aside / text.file, content)
        if column.settings is not None:
            write_atomic(aside / SETTINGS, column.settings)
    check_text_column(text_column(text, aside), spec, aside)


# --- adapters ---------------------------------------------------------------------------------


_ADAPTER_PAGE = """# Adapter of {base}

Trained by dpdist {version} from private records; {card} states the guarantee. Load it on base
{base}, whose weights must have the digest in {file}:
`dpdist.integrations.transformers.load_adapter(base, folder)` raises an error for other weights.
`peft.PeftModel.from_pretrained(base, folder)` loads it without that check.

The card is about the adapter, and not about the training data of the base.
"""


def write_adapter(
    model: Any, run: RunFolder | str | Path, folder: str | Path, *,
    base_name: str | None = None, not_private: bool = False,
) -> Path:  # fmt: skip
    """Write the adapter that a run trained, with its card, in the format of `peft`.

    Guarantee: the adapter's tensors are those that the run released, so its card applies to them.
    No other weights and no paths of this machine are written.

    Args:
        model: the `peft` model that was trained, with one adapter, or the module around it; None
            loads the model of a recipe's run from its folder.
        run: its finished run, given as the run's folder or its name under runs/.
        folder: a new folder, or one with the same content: adapter_config.json,
            adapter_model.safetensors, the privacy card, base.json with the base's name and digest,
            and a page.
        base_name: public name of the base; by default the name that `peft` stored, without a path.
        not_private: write it although the run has no finite epsilon or a fixed key; the card then
            states this.

    Returns:
        The folder.

    Raises:
        UserError: the run is not finished or not private, the model is not the one that it trained,
            weights outside of the adapter were trained, or the folder holds something else.
    """
    target = Path(folder)
    facts = load_results(run)
    _require_releasable(facts)
    if model is None:
        _require_trained(facts, facts.folder.model_folder)
        model = models.load(facts.folder.model_folder, trusted_factory=facts.recipe.model.name)
    card = facts.privacy_card()
    adapter = models.Adapter.of(model)
    if adapter is None:
        raise UserError(
            f"model: must be a peft model with one adapter, got {type(model).__name__}; release "
            "other models with `dpdist release`"
        )
    if not card["private"] and not not_private:
        raise UserError(
            "run: must be private, got a fixed key or an infinite epsilon; train without run_key "
            "and with noise, or set not_private=True, which the card then states"
        )
    _check_released(model, adapter, facts.folder)

    def write(aside: Path) -> None:
        base = _write_adapter_files(adapter, model, base_name or _base_name(facts, adapter), aside)
        _write_card(card, aside)
        page = _ADAPTER_PAGE.format(
            base=base["name"], version=__version__, card=PRIVACY_CARD_TEXT, file=BASE
        )
        write_atomic(aside / MODEL_CARD, page)

    if target.exists():  # a script that runs again writes the same
        with tempfile.TemporaryDirectory() as again:
            write(Path(again))
            if _contents(Path(again)) != _contents(target):
                raise UserError(
                    f"folder: must be new, got {target}, which has different content; choose a "
                    "different folder"
                )
        warn(f"{target}: has the same content; nothing was written")
        return target
    with atomic_folder(target) as aside:
        aside.mkdir()
        write(aside)
    return target


def _contents(folder: Path) -> dict[str, bytes | None]:
    """Return the content of a folder's files by name; None for an entry that is not a file."""
    found = folder.iterdir() if folder.is_dir() else ()
    return {path.name: path.read_bytes() if path.is_file() else None for path in found}


def _base_name(facts: RunResults, adapter: models.Adapter) -> str:
    """Return the public name of an adapter's base, without a path."""
    if (initial := facts.recipe.model.initial) is not None:
        return initial.folder.name
    if facts.recipe.by_script is None:
        return "random weights"
    name = str(adapter.config.base_model_name_or_path or "unnamed")
    return Path(name).name if Path(name).exists() or Path(name).is_absolute() else name


def _write_adapter_files(
    adapter: models.Adapter, model: nn.Module, name: str, folder: Path
) -> dict[str, str]:
    """Write an adapter in the format of `peft`, and base.json; return the content of the latter."""
    from safetensors.torch import save

    adapter.config.base_model_name_or_path = name
    for key, value in vars(adapter.config).items():
        if isinstance(value, set):  # whose order differs between processes
            setattr(adapter.config, key, sorted(value))
    adapter.config.save_pretrained(str(folder))
    write_atomic(folder / ADAPTER_WEIGHTS, save(adapter.tensors, {"format": "pt"}))
    base = {"name": name, "digest": models.base_digest(model), "dtype": models.base_dtype(model)}
    write_json(folder / BASE, base)
    return base


def _check_released(model: nn.Module, adapter: models.Adapter, run: RunFolder) -> None:
    """Raise UserError unless the run trained only the adapter, and released these weights."""
    import torch
    from safetensors.torch import load_file

    if adapter.outside is not None:
        raise UserError(
            f"model: must train only its adapter, got {adapter.outside}; release models whose base "
            "or head was trained with `dpdist release`"
        )
    file = run.model_folder / WEIGHTS
    if not run.training_summary.exists() or not file.exists():
        raise UserError(f"run: must be finished, got {run.path}; take the remaining steps")
    now = model.state_dict()
    for name, tensor in load_file(file).items():
        if name not in now or not torch.equal(now[name].detach().cpu(), tensor):
            raise UserError(
                f"model: must be the one that the run trained, got a different {name}; load the "
                "run's weights, or train again"
            )


def _refuse_foreign_files(release: Path) -> None:
    """Raise UserError for files in release/ that `dpdist release` does not write.

    Everything in the folder is published.
    """
    if release.is_symlink() or (release.exists() and not release.is_dir()):
        raise UserError(f"{release}: must be a folder that `dpdist release` wrote; remove it")
    entries = sorted(release.iterdir()) if release.exists() else []
    foreign = [
        p.name for p in entries if not is_release_file(p.name) or p.is_symlink() or p.is_dir()
    ]
    if foreign:
        raise UserError(
            f"{release}: contains {', '.join(map(repr, foreign))}, which `dpdist release` did not "
            "write; everything in release/ is published: move it away"
        )


def _load_copied_model(facts: RunResults, copied_model: Path, factory: str | None) -> nn.Module:
    """Return the checked copy of the model; a given factory is stored in its description.

    Raises UserError unless it is the trained model, can be loaded, and has finite outputs.
    """
    import torch

    where = facts.folder.model_folder
    _require_trained(facts, copied_model)
    own = facts.recipe.model.name
    if factory is None and not own.startswith(f"{models.SCRIPT}:") and _script_documents(facts):
        _rebuild(facts, copied_model, own)
    elif factory is not None:
        _name_factory(facts, copied_model, factory)
    try:
        trusted = own if factory is None else factory
        module = models.load(copied_model, trusted_factory=trusted)
        models.check_outputs(module, models.read_spec(copied_model))
    except UserError as error:
        text = str(error).replace(str(copied_model), str(where))
        raise UserError(f"{where}: cannot be released: {text}") from error
    for name, tensor in module.state_dict().items():
        if not bool(torch.isfinite(tensor).all()):
            raise UserError(f"{where}: {name}: must be finite; train again")
    return module


def _require_releasable(facts: RunResults) -> None:
    """Raise UserError for an audited run, and for a method whose models must not be published."""
    if facts.canary_notice is not None:
        raise UserError(f"{facts.folder.path}: an audited run is {facts.canary_notice}")
    if (reason := facts.recipe.method.capabilities.not_releasable_reason) is not None:
        raise UserError(f"{facts.folder.path}: {reason}")


def _require_trained(facts: RunResults, folder: Path) -> None:
    """Raise UserError unless a folder contains the model that the run trained."""
    if models.model_hash(folder) != facts.training_summary["model"]:
        raise UserError(
            f"{facts.folder.model_folder}: must be the model that this run trained, which the "
            "guarantee is about; restore the trained model"
        )


def _name_factory(facts: RunResults, copied_model: Path, factory: str) -> None:
    """Store a factory in the copied model of a script's run.

    Raises UserError if it builds a different module, or the run needs no factory.
    """
    spec = models.read_spec(copied_model)
    if facts.recipe.by_script is None or not spec.name.startswith(f"{models.SCRIPT}:"):
        raise UserError(
            f"factory: must be left out, since {spec.name} builds this run's model, got {factory}"
        )
    if facts.tables:
        raise UserError(
            f"factory: must be left out for a run with certificates, got {factory}; those in "
            f"{facts.folder.certificates} are about the script's own module: move them away, and "
            "certify the release"
        )
    _rebuild(facts, copied_model, factory)


def _rebuild(facts: RunResults, copied_model: Path, factory: str) -> None:
    """Build the copied model with a factory, check that it is the same, and save it."""
    from dpdist.training.script_state import check_built_again, read_module_record

    spec = models.read_spec(copied_model)
    built = replace(spec, name=factory, options={})
    record = read_module_record(facts.folder.checkpoints) or {}
    if record.get("following"):
        if record.get("text") is None:
            raise UserError(
                f"{facts.folder.path}: a release needs the tokenizer of its documents: build them "
                "with dpdist.documents(rows, tokenizer, length=...), give PrivateTrainer its "
                "processing_class=tokenizer, or write only the adapter with "
                "dpdist.integrations.transformers.save_adapter"
            )
        built = replace(built, classes=int(record["outputs"].shape[2]), following=True)
    module = models.initialize(built, 0)
    inner = module.network if isinstance(module, models.NextTokenLogits) else module
    check_built_again(
        inner,
        copied_model / WEIGHTS,
        facts.folder.checkpoints,
        factory,
        answering=module,
        signature=spec.signature,
    )
    models.save(module, built, copied_model)
