"""The audit pointed at Opacus: one process, one step, its own engine, sampler and divisor.

Each row is two neighboring data sets; a step with this noise promises Gaussian DP of mu at most
1 / noise, whatever its sampling rate. The promise is broken at 1 - 1e-6, or nothing is found.

    pip install -e '.[bench]'; python benchmarks/quality/audit_opacus.py [--releases 300] [--quick]
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _common import parse_arguments
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpdist.audits.mechanism import AuditedStep, audit_step
from dpdist.privacy import audit_bounds

WIDTH = 64
NOISE = 1.0
ERROR = 1e-6


def step(coordinates: list[int], key: int, batch: int) -> np.ndarray:
    """One step on these records: the released gradient times the batch size that was asked for, in
    units of the clip."""
    torch.manual_seed(key)
    inputs = torch.eye(WIDTH)[coordinates]
    data = TensorDataset(inputs, torch.zeros(len(coordinates)))
    model = nn.Linear(WIDTH, 1, bias=False)
    loader = DataLoader(data, batch_size=batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=NOISE,
        max_grad_norm=1.0,
    )  # fmt: skip
    images, _ = next(iter(loader))
    optimizer.zero_grad()
    (100.0 * model(images)).mean().backward()
    optimizer.step()
    (weight,) = model.parameters()
    return weight.grad.detach().numpy().ravel() * batch


def influence(seen: np.ndarray) -> np.ndarray:
    """The canary's coordinate, the other's, and the size of the noise where there is nothing."""
    return np.array([seen[1], seen[0], np.log(np.mean(seen[2:] ** 2)) / 2])


def rows() -> dict[str, Callable[[bool, int], np.ndarray]]:
    """What is released with the canary and without."""
    return {
        "noise and clip: 30 records, one more": lambda present, key: step(
            [0] * 30 + [1] * present, key, 30 + present
        ),
        "divisor of N: two records, one more (#571, #819)": lambda present, key: step(
            [0, 0] + [1] * present, key, 2
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--releases", type=int, default=300)
    releases = parse_arguments(parser, {}).releases
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print("| scene | releases with / without | mu at least | promised | verdict | seconds |")
    print("|---|---|---|---|---|---|")
    for name, release in rows().items():
        began = time.perf_counter()
        promised = 1 / NOISE  # of a whole batch; sampling promises less
        scene = AuditedStep(release, influence, audit_bounds.gaussian_tradeoff(promised))
        found = audit_step(scene, releases, ERROR)
        verdict = "BROKEN" if found.rejected else "nothing found"
        print(
            f"| {name} | {releases} / {releases} | {found.counts.mu():.2f} | {promised:g} | "
            f"{verdict} | {time.perf_counter() - began:.0f} |"
        )


if __name__ == "__main__":
    main()
