"""What a run's method makes once, before the first step: tensors, kept in the private folder.

Worker 0 makes them and the others read them, so that all workers and all restarts train under the
same ones. What is read for them, and what that costs, is the method's statement.
"""

from __future__ import annotations

import hashlib

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from dpdist.base.errors import UserError
from dpdist.base.reading import read_bytes
from dpdist.base.storage import write_atomic
from dpdist.methods.base import Fixed, Setup
from dpdist.models import ModelSpec
from dpdist.privacy.ledger import Ledger
from dpdist.randomness.keys import new_run_key
from dpdist.runs.folder import RunFolder
from dpdist.training.building import initial_model
from dpdist.training.job import PUT_BACK, TrainJob, read_run_key
from dpdist.training.records import public_data


def ensure_fixed(job: TrainJob, spec: ModelSpec) -> bool:
    """Make what the method makes once, unless it is there (worker 0). Whether there is any."""
    recipe, path = job.recipe, job.folder.fixed
    if not path.exists():
        fixed = recipe.privacy.run_key is not None
        key = read_run_key(job.folder) if fixed else new_run_key()

        def initial() -> nn.Module:
            return initial_model(recipe, spec)

        setup = Setup(recipe, spec, initial, job.own_records(), public_data(recipe), key)
        tensors = recipe.method.fix(setup)
        if tensors:
            if _taken(job.folder):
                raise UserError(f"{path}: missing, and steps were taken with it; {PUT_BACK}")
            contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
            write_atomic(path, save_tensors(contiguous))
    return path.exists()


def _taken(folder: RunFolder) -> bool:
    """Whether workers have begun steps: these were taken with what is fixed."""
    return folder.ledger.exists() and bool(Ledger.read(folder.ledger).attempts)


def check_same_fixed(folder: RunFolder, ledger: Ledger, now: str) -> None:
    """Raise UserError where the last attempt was made with other tensors. now: their `digest`."""
    before = ledger.attempts[-1]["identity"].get("hidden noise") if ledger.attempts else None
    if before not in (None, now):
        raise UserError(f"{folder.fixed}: is not what this run's steps were taken with; {PUT_BACK}")


def read_fixed(folder: RunFolder) -> dict[str, Tensor]:
    """The tensors by name."""
    try:
        return load_tensors(read_bytes(folder.fixed))
    except (UserError, SafetensorError) as error:
        raise UserError(
            f"{folder.fixed}: cannot be read: {error}; is the storage shared?"
        ) from error


def digest(fixed: Fixed) -> str:
    """Names the tensors: part of what may not change under one attempt."""
    hashed = hashlib.blake2b(digest_size=8)
    for name in sorted(fixed.tensors):
        hashed.update(fixed.tensors[name].numpy().tobytes())
    return hashed.hexdigest()
