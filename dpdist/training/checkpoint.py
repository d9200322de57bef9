"""Training state on disk: parameters, optimizer and average, as safetensors, whole or not at
all."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from dpdist.base.errors import UserError
from dpdist.base.reading import read_bytes, read_json, reason
from dpdist.base.storage import private_folder, write_atomic
from dpdist.privacy.journal import Anchor
from dpdist.runs.folder import complete_checkpoints

KEEP = 2


@dataclass
class TrainState:
    """Everything a step changes. flat: parameters (size,). slots: optimizer tensors and the
    average."""

    step: int
    flat: Tensor
    slots: dict[str, Tensor]


def save(folder: Path, state: TrainState, released: Anchor) -> None:
    """Write the state as `step-NNNNNNNN` and drop all but the newest two.

    released: the ledger's anchor; it names every release that the state was made of.
    """
    private_folder(folder)
    target = folder / f"step-{state.step:08d}"
    tensors = {"flat": state.flat.cpu(), **{f"slot.{k}": v.cpu() for k, v in state.slots.items()}}
    write_atomic(target / "state.safetensors", save_tensors(tensors))
    done = {"step": state.step, "ledger": released.to_dict()}
    write_atomic(target / "done.json", json.dumps(done, allow_nan=False))
    kept = set(complete_checkpoints(folder)[-KEEP:])
    for old in folder.glob("step-*"):
        if old not in kept:  # superseded, or left half-written by a crash
            shutil.rmtree(old, ignore_errors=True)


def latest(folder: Path) -> TrainState | None:
    """The newest complete state, or None."""
    complete = complete_checkpoints(folder)
    if not complete:
        return None
    step = read_json(complete[-1] / "done.json", {"step": int})["step"]
    path = complete[-1] / "state.safetensors"
    try:
        tensors = load_tensors(read_bytes(path))
        tensors["flat"]
    except (SafetensorError, KeyError) as error:
        raise UserError(f"{path}: damaged: {reason(error)}") from error
    slots = {k.removeprefix("slot."): v for k, v in tensors.items() if k.startswith("slot.")}
    return TrainState(step, tensors["flat"], slots)


def digest(tensor: Tensor) -> Tensor:
    """A 64-bit fingerprint of a float tensor's bits, as int64 (1,): compared across workers."""
    bits = tensor.detach().cpu().contiguous().view(torch.int32).to(torch.int64)
    weights = torch.arange(1, len(bits) + 1, dtype=torch.int64)
    return (bits * (2 * weights + 1)).sum().reshape(1)
