"""The device that counts: how it is made repeatable, what it is called, how much it takes at once.

Nothing here has run on a GPU yet: it is tested on a simulated device.
"""

from __future__ import annotations

import os
import platform

import torch
from torch import Tensor, nn

from dpdist.base.errors import UserError

GPU = "cuda"  # what Ray calls a GPU, torch calls so: NVIDIA's and AMD's
_TRIAL = 64  # rows of the pass by which memory is measured
_SHARE = 0.5  # of the free memory, for one pass


def require_device(device: torch.device) -> None:
    """Raise UserError unless this process has the device."""
    if device.type == GPU and not torch.get_device_module(device).is_available():
        raise UserError(
            f"Ray gives this worker a GPU, but torch {torch.__version__} does not see it: install "
            "a torch with CUDA there, or set resources.certify_gpus: 0"
        )


def settle(device: torch.device) -> None:
    """Make a GPU repeatable, for the whole process: deterministic kernels, and float32 that is
    float32 (no TF32). A model whose layers have no such kernels raises when it runs."""
    if device.type != GPU:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def name(device: torch.device) -> str:
    """What it is, as it is pinned: other hardware may round otherwise."""
    if device.type == "cpu":
        return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return str(torch.get_device_module(device).get_device_name(device))


def fitting_rows(network: nn.Module, row: Tensor, most: int, share: float) -> int:
    """The largest power of two of rows (1, ...), up to `most`, of which a pass takes no more than
    half of the device's free memory, noise included. share: of the device that is its own."""
    module, device = torch.get_device_module(row.device), row.device
    trial = row.repeat(_TRIAL, *[1] * (row.dim() - 1))
    with torch.inference_mode():
        network(trial)
        module.synchronize(device)
        module.reset_peak_memory_stats(device)
        before = module.memory_allocated(device)
        network(trial)
        module.synchronize(device)
    taken = max(0, module.max_memory_allocated(device) - before) / _TRIAL
    free, _ = module.mem_get_info(device)
    each = taken + 3 * row.nbytes  # the noise, and the input with it in two number formats
    rows = max(1, int(_SHARE * share * free / each))
    return max(1, min(most, 1 << (rows.bit_length() - 1)))
