"""All that can change a step's floating-point sum, or its noise: what exact replay rests on.

It is made of what the process executes, never of what a file says, and kept in the ledger: whatever
was edited in a run folder or a copy of it, another sum begins a new attempt, under keys of its own.
"""

from __future__ import annotations

import hashlib
import json
import platform
from typing import Any

import torch

from dpdist.base.errors import UserError
from dpdist.cluster.packages import code_digest
from dpdist.models.factory_code import digests
from dpdist.randomness.keys import key_id
from dpdist.runs.recipe import Recipe
from dpdist.training.job import PACKAGES, TrainJob, read_run_key
from dpdist.training.reducer import Reducer


def _device(device: torch.device) -> str:
    """What kind of device it is."""
    named = device.type == "cuda"
    return f"{device.type}/{torch.cuda.get_device_name(device)}" if named else device.type


def recipe_digest(recipe: Recipe) -> str:
    """Return a digest of all in a recipe that its sums depend on, and of a user's own code in it:
    the modules of the model's factory and of the method's class, as `factory_code` covers them."""
    named = (name for name in (recipe.model.name, recipe.method.name) if ":" in name)
    return _digest([recipe.of_model, {name: digests(name) for name in named}])


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _environment() -> str:
    """Return a digest of how torch was built, and of how it computes in this process."""
    settings = [
        torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark,
        torch.backends.cudnn.allow_tf32, torch.backends.mkldnn.enabled,
    ]  # fmt: skip
    return _digest([torch.__config__.show(), *settings])


def identity_of(job: TrainJob, reducer: Reducer, records: str, initial: str) -> dict[str, str]:
    """Return what a sum depends on, by name: a change of any starts a new attempt epoch, under keys
    of its own.

    records: fingerprint of the records. initial: digest of the model before its first step, public
    weights and frozen parts included. Raises UserError where workers would make the noise on
    devices of several kinds.
    """
    resources, kind = job.recipe.resources, _device(reducer.device)
    machine = f"{platform.machine()}/{torch.backends.cpu.get_cpu_capability()}/{kind}"
    machines = reducer.gather(machine)
    if resources.noise == "device" and len(kinds := set(reducer.gather(kind))) > 1:
        raise UserError(
            f"resources.noise: must be host with workers on {' and '.join(sorted(kinds))}: two "
            "kinds of device may make noise that differs in its last bits"
        )
    return {
        "key": key_id(read_run_key(job.folder)),
        **({"noise": "device"} if resources.noise == "device" else {}),
        # With canonical shards the sum does not depend on the number of workers.
        "world_size": "any" if job.recipe.training.reproducible else str(reducer.world_size),
        "micro_batch": str(resources.micro_batch),
        "threads": str(torch.get_num_threads()),
        "machines": ",".join(sorted(set(machines))),
        "code": code_digest(PACKAGES),
        "environment": _environment(),
        "recipe": recipe_digest(job.recipe),
        "data": records,
        "model": initial,
    }
