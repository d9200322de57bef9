"""Write the folder release/ of a run, or its adapter: what is safe to publish, and nothing else.

No other module writes there.
"""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpdist import models
from dpdist.core.errors import UserError
from dpdist.core.files import atomic_folder, read_bytes, read_json, write_atomic, write_json
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
    """Write what may be published of a run into its folder release/, and replace the old one.

    Args:
        folder: the run's folder, or its name under runs/.
        not_private: release a run without a finite guarantee, or with a fixed key; its card then
            states it.
        license: an SPDX identifier for the model.
        key: an Ed25519 private key (PEM) that signs the release.
        factory: "package.module:function" of (input_shape, classes) that builds the module of a
            script's run that named none; it is imported, and must build the module that was
            trained.

    Returns:
        A list of `Path`: all files in release/, such as the model, the card and release.json.

    Raises:
        UserError: training never finished, canaries were trained on, the run's models must never be
            published, the model is not the one that was trained or cannot be loaded, the factory
            builds a different one, release/ contains something else, or the run is not private and
            `not_private` is not given. The folder is then left as it was.

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
    described = facts.privacy_card()
    if not described["private"] and not not_private:
        reason = "its run key is fixed" if facts.has_fixed_key else "its proved epsilon is infinite"
        reason = no_epsilon(described) or reason
        raise UserError(
            f"{folder.path}: this run is not private ({reason}); to release it all the same, "
            "labeled as such, add --not-private"
        )
    with atomic_folder(folder.release_folder, replace=True) as aside:
        aside.mkdir()
        for name in ("model.safetensors", "model.json"):
            write_atomic(aside / name, read_bytes(folder.model_folder / name))
        for number, table in enumerate(facts.tables, 1):
            write_atomic(aside / table_name(number), read_bytes(table.path))
        model = _load_copied_model(facts, aside, factory)
        if (made := models.model_hash(aside)) != facts.training_summary["model"]:
            described["extra"] |= {"model": models.read_spec(aside).name, "model hash": made}
        for table in facts.tables:
            check_table(table, models.model_hash(aside), model, models.read_spec(aside))
        _write_tokenizer(facts, models.read_spec(aside), aside)
        about = _release_record(facts, model, aside, license)
        if (base := _write_released_adapter(facts, model, aside)) is not None:
            about["base"] = base
        _write_pages(aside, about, described)
        sums = compute_checksums(aside)
        write_atomic(aside / CHECKSUMS, sums)
        if key is not None:
            write_atomic(aside / SIGNATURE, sign_checksums(key, sums.encode()))
    return sorted(folder.release_folder.iterdir())


def _write_pages(aside: Path, about: dict[str, Any], described: dict[str, Any]) -> None:
    """Write release.json, the privacy card, and the pages that are made of them."""
    write_json(aside / PRIVACY_CARD, described)
    write_atomic(aside / PRIVACY_CARD_TEXT, card_markdown(described))
    write_json(aside / DESCRIPTION, about)
    read = parse_description(about, DESCRIPTION), described, models.read_spec(aside)
    write_atomic(aside / MODEL_CARD, model_card(*read))


def _release_record(
    facts: RunResults, model: nn.Module, copied_model: Path, license: str | None
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
        if facts.next_token_count is not None:
            names = ("perplexity", "next_tokens", "base_perplexity")
            tested |= {name: evaluation[name] for name in names if name in evaluation}
    data = recipe.data.model_dump(mode="json", include=_TEST_DATA_FIELDS)
    text: dict[str, Any] = {}
    told: dict[str, Any] = {"classes": recipe.data.class_names}
    if (record := _text_record(facts)) is not None:
        text = {"text": record}
        if record["predict"] == "next":  # a script's data know no number of tokens
            tokens = models.read_spec(copied_model).classes
            data, told = {**data, "classes": tokens}, {"classes": [], "vocabulary": tokens}
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
        **told,
        "noise": find_noise_location(model).describe(),
        "certificate": certificate,
        "data": data,
        "tested": tested,
        "certified": [certified_accuracy_record(table) for table in facts.tables],
        "license": license,
        **text,
        **pictures,
        **raw,
    }


def _text_record(facts: RunResults) -> dict[str, Any] | None:
    """Return how tokens are made, for release.json: no path, as the file lies in the release.

    None where inputs are no texts, or nobody knows how their tokens are made.
    """
    text = facts.recipe.data.text
    if text is None:
        made = _script_documents(facts)
        return None if made is None else {
            "length": made["length"], "tokens": "tokenizer", "words": None, "predict": "next",
            "settings": True, **({"chat": True} if made["chat"] else {}),
            **({"bos_eos": True} if made.get("bos_eos") else {}),
        }  # fmt: skip
    tokens = "bytes" if text.words is None else "words"
    tokens = tokens if text.tokenizer is None else "tokenizer"
    found: dict[str, Any] = {
        "length": text.length, "tokens": tokens, "words": text.words, "predict": text.predict,
    }  # fmt: skip
    column = data_source(facts.recipe).columns.text
    assert column is not None
    if column.settings is not None:
        found |= {"settings": True} | ({"chat": True} if column.shows_chats else {})
    return found | ({"bos_eos": True} if text.bos_eos else {})


def _script_documents(facts: RunResults) -> dict[str, Any] | None:
    """Return how the tokens of a script's documents are made (`Records.tokenization`), if known."""
    from dpdist.training.script_state import read_module_record

    if facts.recipe.by_script is None:
        return None
    record = read_module_record(facts.folder.checkpoints) or {}
    made: dict[str, Any] | None = record.get("text")
    return made


def _write_tokenizer(facts: RunResults, spec: ModelSpec, aside: Path) -> None:
    """Write what makes the tokens, as it was trained with. Raises UserError where it is not there.

    It was made of no private document: the privacy card says so under its assumptions.
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
                f"{error}; the release needs what made the tokens of this run: put it back"
            ) from None
        if text.file is not None and content is not None:
            write_atomic(aside / text.file, content)
        if column.settings is not None:
            write_atomic(aside / SETTINGS, column.settings)
    check_text_column(text_column(text, aside), spec, aside)


# --- adapters ---------------------------------------------------------------------------------


_ADAPTER_PAGE = """# Adapter of {base}

Trained by dpdist {version} from private records; what is proved stands in {card}. Load it on base
{base}, whose weights must have the digest that {file} states:
`dpdist.integrations.transformers.load_adapter(base, folder)` refuses others.
`peft.PeftModel.from_pretrained(base, folder)` loads it without that check.

The card speaks of the adapter. It says nothing of what the base was trained on.
"""


def write_adapter(
    model: Any, run: RunFolder | str | Path, folder: str | Path, *,
    base_name: str | None = None, not_private: bool = False,
) -> Path:  # fmt: skip
    """Write the adapter that a run trained, with its card, as `peft` loads it.

    Guarantee: the adapter's tensors are those that the run released, so its card speaks of them. No
    other weight is written, and no path of this machine.

    Args:
        model: the `peft` model that was trained, with one adapter, or the module around it; None:
            the model of a recipe's run, as its folder holds it.
        run: its run, which is finished, or the run's folder or name under runs/.
        folder: a new folder, or one that holds the same already: adapter_config.json and
            adapter_model.safetensors, the privacy card, base.json with the base's name and digest,
            and a page.
        base_name: public name of the base; default: the one that `peft` noted, without a path.
        not_private: write it although the run has no finite epsilon or a fixed key; the card then
            says so.

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
            f"model: must be a peft model with one adapter, got {type(model).__name__}: `dpdist "
            "release` writes other models"
        )
    if not card["private"] and not not_private:
        raise UserError(
            "run: must be private, got a fixed key or an infinite epsilon: train without run_key "
            "and with noise, or give not_private=True, which the card says"
        )
    _check_released(model, adapter, facts.folder)

    def write(aside: Path) -> None:
        base = _write_adapter_files(adapter, model, base_name or _base_name(facts, adapter), aside)
        write_json(aside / PRIVACY_CARD, card)
        write_atomic(aside / PRIVACY_CARD_TEXT, card_markdown(card))
        page = _ADAPTER_PAGE.format(
            base=base["name"], version=__version__, card=PRIVACY_CARD_TEXT, file=BASE
        )
        write_atomic(aside / MODEL_CARD, page)

    if target.exists():  # a script that is run again writes the same
        with tempfile.TemporaryDirectory() as again:
            write(Path(again))
            if _contents(Path(again)) != _contents(target):
                raise UserError(
                    f"folder: must be new, got {target}, which holds something else: name another "
                    "one"
                )
        warnings.warn(f"{target}: already there, the same; nothing was written", stacklevel=2)
        return target
    with atomic_folder(target) as aside:
        aside.mkdir()
        write(aside)
    return target


def _contents(folder: Path) -> dict[str, bytes | None]:
    """Return what the files of a folder hold, by name; None of what is no file."""
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
    """Write what peft loads, and base.json; return the content of the latter."""
    from safetensors.torch import save

    adapter.config.base_model_name_or_path = name
    for key, value in vars(adapter.config).items():
        if isinstance(value, set):  # whose order is another one in each process
            setattr(adapter.config, key, sorted(value))
    adapter.config.save_pretrained(str(folder))
    write_atomic(folder / ADAPTER_WEIGHTS, save(adapter.tensors, {"format": "pt"}))
    base = {"name": name, "digest": models.base_digest(model), "dtype": models.base_dtype(model)}
    write_json(folder / BASE, base)
    return base


def _write_released_adapter(
    facts: RunResults, model: nn.Module, aside: Path
) -> dict[str, str] | None:
    """Write the adapter of a released model where nothing else was trained."""
    adapter = models.Adapter.of(model)
    if adapter is None or adapter.outside is not None:
        return None
    return _write_adapter_files(adapter, model, _base_name(facts, adapter), aside)


def _check_released(model: nn.Module, adapter: models.Adapter, run: RunFolder) -> None:
    """Raise UserError unless all that a run trained is in the adapter, as the run released it."""
    import torch
    from safetensors.torch import load_file

    if adapter.outside is not None:
        raise UserError(
            f"model: must train its adapter alone, got {adapter.outside}: `dpdist release` writes "
            "models whose base or head was trained"
        )
    file = run.model_folder / WEIGHTS
    if not run.training_summary.exists() or not file.exists():
        raise UserError(f"run: must be finished, got {run.path}: take the steps that are left")
    now = model.state_dict()
    for name, tensor in load_file(file).items():
        if name not in now or not torch.equal(now[name].detach().cpu(), tensor):
            raise UserError(
                f"model: must be the one that the run trained, got another {name}: the card speaks "
                "of the run's own weights: load them, or train again"
            )


_TEST_DATA_FIELDS = {"name", "targets", "classes", "names", "labels", "test", "columns"}


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


def _load_copied_model(facts: RunResults, copied_model: Path, factory: str | None) -> nn.Module:
    """Return the copied model, checked; its description then names the factory, if one is given.

    Raises UserError unless it is the trained one, loads as its users will load it, and answers
    with finite numbers.
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
        said = str(error).replace(str(copied_model), str(where))
        raise UserError(f"{where}: cannot be released: {said}") from error
    bad = [k for k, v in module.state_dict().items() if not bool(torch.isfinite(v).all())]
    if bad:
        raise UserError(f"{where}: {bad[0]} holds numbers that are not finite; train again")
    return module


def _require_releasable(facts: RunResults) -> None:
    """Raise UserError for an audited run, and for a method whose models never leave."""
    if facts.canary_notice is not None:
        raise UserError(f"{facts.folder.path}: an audited run is {facts.canary_notice}")
    if (reason := facts.recipe.method.capabilities.not_releasable_reason) is not None:
        raise UserError(f"{facts.folder.path}: {reason}")


def _require_trained(facts: RunResults, folder: Path) -> None:
    """Raise UserError unless a folder holds the model that the run trained."""
    if models.model_hash(folder) != facts.training_summary["model"]:
        raise UserError(
            f"{facts.folder.model_folder}: is not the model that this run trained, and its "
            "guarantee does not speak of it; put the trained model back"
        )


def _name_factory(facts: RunResults, copied_model: Path, factory: str) -> None:
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
    _rebuild(facts, copied_model, factory)


def _rebuild(facts: RunResults, copied_model: Path, factory: str) -> None:
    """Let a factory build the copied model anew, check that it does, and save it as it answers."""
    from dpdist.training.script_state import check_built_again, read_module_record

    spec = models.read_spec(copied_model)
    built = replace(spec, name=factory, options={})
    record = read_module_record(facts.folder.checkpoints) or {}
    if record.get("following"):
        if record.get("text") is None:
            raise UserError(
                f"{facts.folder.path}: its documents must have come with their tokenizer, to be "
                "asked for texts: make them by dpdist.documents(rows, tokenizer, length=...), give "
                "PrivateTrainer its processing_class=tokenizer, or write the adapter alone by "
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
