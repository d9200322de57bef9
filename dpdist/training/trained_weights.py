"""Recognize weights that earlier runs trained, wherever a model got them from.

A module that dpdist trained has a mark, which deep copies keep. A state dict has none, so each run
keeps a digest of every tensor that it trained. Weights that were changed, or come from a folder
that is not next to the new run, are not recognized: the card assumes that there are none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dpdist.core.errors import UserError
from dpdist.core.files import read_json, write_json
from dpdist.models import TRAINED_BY
from dpdist.release.files import WEIGHTS, is_release
from dpdist.runs.folder import RunFolder

_TENSORS = "trained-tensors.json"  # in the folder of a run's model


def trained_digests(model: nn.Module) -> list[str]:
    """Return a digest of each tensor that a training changes, of its type, shape and values.

    A tensor of equal numbers is left out: a different network may start with the same.
    """
    found = set()
    for tensor in (each.detach() for each in model.parameters() if each.requires_grad):
        if tensor.numel() and bool((tensor != tensor.flatten()[0]).any()):
            found.add(_digest(tensor))
    return sorted(found)


def _digest(tensor: Tensor) -> str:
    plain = tensor.detach().cpu().contiguous()
    told = f"{plain.dtype} {tuple(plain.shape)} ".encode()
    raw = plain.flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(told + raw, digest_size=16, person=b"dpdist.trained").hexdigest()


def write_trained(model: nn.Module, folder: Path) -> None:
    """Write the digests of a trained model's tensors into the folder of a run's model."""
    write_json(folder / _TENSORS, {"tensors": trained_digests(model)})


def mark_trained(model: nn.Module, run: Path) -> None:
    """Mark a model, and its parts with trained parameters, as trained by this run."""
    for module in model.modules():
        if any(parameter.requires_grad for parameter in module.parameters()):
            vars(module)[TRAINED_BY] = str(run.resolve())


def trained_by(model: nn.Module) -> list[str]:
    """Return the runs and releases by which a model's modules are marked as trained."""
    found = (vars(module).get(TRAINED_BY) for module in model.modules())
    places = [str(each) for each in found if each]
    loaded = Path(str(getattr(model, "name_or_path", "") or "nowhere")).resolve()
    for folder in (loaded, *loaded.parents):
        if RunFolder(folder).ledger.exists() or is_release(folder):
            places.append(str(folder))
    return list(dict.fromkeys(places))


def origins(
    model: nn.Module,
    run: RunFolder,
    others: Iterable[Path],
    live: dict[Path, nn.Module],
    named: Iterable[Path],
) -> list[set[Path]]:
    """Return, for each part of a model that runs are known to have trained, which runs may have.

    Args:
        model: of a run that is about to start.
        run: its folder; the runs next to it are searched, and those next to its search.
        others: folders of further runs, which this process trained.
        live: models that this process trains now, by their runs' folders.
        named: folders that the script names; tensors of a release of these are left out.
    """
    found = [{Path(place)} for place in trained_by(model)]
    around = [each.path.resolve().parent for each in (run, run.parent_run) if each is not None]
    beside = [
        file.parents[2] for folder in around for file in folder.glob(f"*/{_MODEL}/{_TENSORS}")
    ]
    known: dict[str, set[Path]] = {}
    for place in {*beside, *(each.resolve() for each in others)}:
        file = place / _MODEL / _TENSORS
        tensors = read_json(file, {"tensors": list})["tensors"] if file.exists() else []
        for digest in tensors:
            known.setdefault(str(digest), set()).add(place)
    for place, other in live.items():
        for digest in () if other is model else trained_digests(other):
            known.setdefault(digest, set()).add(place)
    if known:
        held = (each for each in model.state_dict().values() if isinstance(each, Tensor))
        digests = {_digest(each) for each in held}
        for file in (place / WEIGHTS for place in named):
            if file.exists():
                digests -= {_digest(each) for each in load_file(file).values()}
        found += [known[digest] for digest in sorted(digests & known.keys())]
    return found


_MODEL = RunFolder(Path()).model_folder


def check_first_weights(
    model: nn.Module,
    run: RunFolder,
    live: dict[Path, nn.Module | None],
    named: Iterable[str],
    pairs: bool,
) -> None:
    """Raise UserError for weights from a run that the new run's card would not name.

    Args:
        model: of a run that is about to start.
        run: its folder.
        live: models that this process trained or trains, by their runs' folders; None if only the
            folder is left.
        named: the folders that the script names with began_with.
        pairs: the records are pairs of answers, whose reference must be public.
    """
    here = run.path.resolve()
    others = {path: each for path, each in live.items() if each is not None and path != here}
    known = {here, *(() if pairs else map(Path, named))}
    for places in origins(model, run, live, others, known):
        around = {each for place in places for each in (place, *place.parents)}
        if known & around:
            continue
        if pairs:
            raise UserError(
                "model: must begin with public weights for pairs, got what "
                f"{min(places)} trained: its epsilon is not composed with that of this run; load "
                "the public base"
            )
        raise UserError(
            "model: must hold no weights that another run trained, unless it is named, got some of "
            f"{min(places)}: give began_with={str(min(places))!r}, and the guarantee covers both, "
            "or build the model from public weights",
            see="how-to/own-loop.md#stages",
        )
