"""All that can change a step's floating-point sum, or its noise: what exact replay rests on."""

from __future__ import annotations

import platform

import torch

from dpdist.base.errors import UserError
from dpdist.cluster.packages import code_digest
from dpdist.randomness.keys import key_id
from dpdist.training.job import PACKAGES, TrainJob, read_run_key
from dpdist.training.reducer import Reducer


def _device(device: torch.device) -> str:
    """What kind of device it is."""
    named = device.type == "cuda"
    return f"{device.type}/{torch.cuda.get_device_name(device)}" if named else device.type


def identity_of(job: TrainJob, reducer: Reducer) -> dict[str, str]:
    """Names and values; a change of any starts a new attempt epoch, under keys of its own. Raises
    UserError where workers would make the noise on devices of several kinds."""
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
    }
