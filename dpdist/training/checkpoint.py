"""Training state on disk: parameters, optimizer and average, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save_file
from torch import Tensor

from dpdist.core.errors import UserError
from dpdist.core.files import (
    atomic_replacement,
    error_text,
    make_private_folder,
    read_bytes,
    read_json,
    write_atomic,
)
from dpdist.privacy.ledger import Anchor
from dpdist.runs.folder import complete_checkpoints

CHECKPOINTS_KEPT = 2


@dataclass
class TrainState:
    """Hold everything that a step changes.

    parameters: (size,). slots: optimizer tensors and the average, by name.
    """

    step: int
    parameters: Tensor
    slots: dict[str, Tensor]


def save(folder: Path, state: TrainState, anchor: Anchor) -> None:
    """Write the state as `step-NNNNNNNN` and drop all but the newest two.

    anchor: the ledger's anchor; it covers every release that the state depends on.
    """
    make_private_folder(folder)
    target = folder / _name(state.step)
    tensors = {
        "flat": state.parameters.cpu(),
        **{f"slot.{k}": v.cpu() for k, v in state.slots.items()},
    }
    _write(target / "state.safetensors", tensors)
    done = {"step": state.step, "ledger": anchor.to_dict()}
    write_atomic(target / "done.json", json.dumps(done, allow_nan=False))
    kept = set(complete_checkpoints(folder)[-CHECKPOINTS_KEPT:])
    for old in folder.glob("step-*"):
        if old not in kept:  # superseded, or left half-written by a crash
            shutil.rmtree(old, ignore_errors=True)


def newest_step(folder: Path) -> int:
    """Return the number of steps before the newest complete state; 0 without one."""
    complete = complete_checkpoints(folder)
    return int(read_json(complete[-1] / "done.json", {"step": int})["step"]) if complete else 0


def load_latest(folder: Path) -> TrainState | None:
    """Return the newest complete state, or None. Raises UserError for a damaged one."""
    complete = complete_checkpoints(folder)
    if not complete:
        return None
    done = read_json(complete[-1] / "done.json", {"step": int})
    if complete[-1].name != _name(done["step"]):
        raise UserError(f"{complete[-1]}: damaged: its done.json is that of step {done['step']}")
    tensors = _tensors(complete[-1] / "state.safetensors")
    slots = {k.removeprefix("slot."): v for k, v in tensors.items() if k.startswith("slot.")}
    return TrainState(done["step"], tensors["flat"], slots)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file. Raises UserError unless it is as it was written."""
    raw = read_bytes(path)
    cure = f"move {path.parent} away, and the run repeats its steps from the checkpoint before it"
    try:
        tensors = load_tensors(raw)
    except SafetensorError as error:
        raise UserError(f"{path}: damaged: {error_text(error)}; {cure}") from error
    about = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")]).get("__metadata__", {})
    if about.get(_DIGEST_KEY) != tensors_digest(tensors):
        raise UserError(f"{path}: damaged: its numbers are not those that were written; {cure}")
    return tensors


_DIGEST_KEY = "blake2b"


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file with a digest, so that no wrong number is trained on unnoticed.

    It is written from the tensors' own memory: a copy would be a training's peak of memory.
    """
    with atomic_replacement(path) as aside:
        try:
            save_file(tensors, aside, {_DIGEST_KEY: tensors_digest(tensors)})
        except SafetensorError as error:
            if (number := re.search(r"(?:os error |code: )(\d+)", str(error))) is None:
                raise
            code = int(number[1])  # so that a full disk is recognized
            raise OSError(code, os.strerror(code)) from error


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of tensors, of their names, types and shapes (hex)."""
    hashed = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        hashed.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()
