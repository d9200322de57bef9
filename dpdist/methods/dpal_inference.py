"""DPAL's predictions and its certified accuracy, as published: for comparison, nothing of it holds.

A prediction is a product of two passes, one with fresh noise on the input, one with fresh noise on
the code, each a part 1 / psi of the training's noise and centred on it (its Appendix L). Sizes are
Laplace sizes of PixelDP for each pass, added up (Proposition 1, Equations 11 to 15).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dpdist.adversary.ascents import pgd
from dpdist.adversary.balls import Ball
from dpdist.adversary.randomised import RandomisedClassifier, loss_gradient
from dpdist.base.reading import read_json
from dpdist.base.rounding import exact, percent
from dpdist.base.storage import write_json
from dpdist.methods.dpal_steps import check_network, laplace, taylor_errors
from dpdist.models import predicted_classes
from dpdist.randomness.keys import derive_key

if TYPE_CHECKING:
    from dpdist.methods.dpal import DPAL
    from dpdist.models import DPALNetwork

_FILE = "dpal.json"  # in the run's private folder
_CONFIDENCE = 0.95


def mean_scores(
    network: DPALNetwork, inputs: Tensor, key: bytes, method: DPAL, scale: float
) -> Tensor:
    """Mean products of the two passes' scores over the draws: float64 (B, classes). inputs: in
    [-1, 1]. scale: of the training's noise on inputs."""
    centre = inputs + network.input_noise
    total = torch.zeros(len(inputs), network.head.out_features, dtype=torch.float64)
    with torch.no_grad():
        for draw in range(method.draws):
            own = derive_key(key, "dpal/draw", draw)
            code = network.code(centre)
            first = laplace(own, "input", centre.shape, scale / method.psi).to(centre)
            second = laplace(own, "code", code.shape, 2 * scale / method.psi).to(centre)
            passes = (network.answer(centre + first), network.answer(centre, second))
            products = torch.stack([z.double().softmax(1) for z in passes]).prod(0)
            total += products.cpu()
    return total / method.draws


def robustness_budget(scores: Tensor, draws: int) -> Tensor:
    """The largest epsilon_r with E_lb[k] > e^(2 epsilon_r) max E_ub[i] (Equation 14), by Hoeffding
    bounds; 0 where there is none: float64 (B,)."""
    classes = scores.shape[1]
    off = math.sqrt(math.log(2 * classes / (1 - _CONFIDENCE)) / (2 * draws))
    best = scores.topk(2, dim=1).values
    low, high = (best[:, 0] - off).clamp(min=0.0), (best[:, 1] + off).clamp(max=1.0)
    return ((low / high).clamp(min=1.0).log() / 2).nan_to_num(0.0)


def printed_sizes(
    budget: Tensor, size: float, scale: float, inputs: int, hidden: int, norm: float
) -> tuple[Tensor, Tensor]:
    """kappa and phi at these epsilon_r (Equations 11 to 13): Delta_x = size * inputs, Delta_h =
    hidden * norm, and the noises' scales."""
    return scale * budget / (size * inputs), 2 * scale * budget / (hidden * norm)


def measure(method: DPAL, worker: Any) -> None:
    """Predict test images and their attacked copies, and write down what the paper counts."""
    from dpdist import data

    network, plan = check_network(method, worker.model), worker.job.plan
    test = data.load(worker.job.source, "test")
    count = min(method.images, len(test))
    inputs = 2 * test.batch(slice(0, count)).to(network.input_noise) - 1
    labels = test.targets(slice(0, count)).to(inputs.device)
    scale, key = method.noise_scale(plan.step(0).expected_batch), worker.fixed.key
    first, second = (error.sum() / count for error in _errors(network, inputs))
    found: dict[str, Any] = {
        "images": count, "psi": method.psi, "draws": method.draws,
        "reconstruction_error": float(first), "output_error": float(second), "attacked": [],
    }  # fmt: skip
    for size in (0.0, *method.sizes):
        seen = inputs if size == 0 else _attacked(network, inputs, labels, 2 * size, method.steps)
        scores = mean_scores(network, seen, derive_key(key, "measured", str(size)), method, scale)
        right = predicted_classes(scores) == labels.cpu()
        if size == 0:
            found["right"] = float(right.double().mean())
            continue
        kappa, phi = printed_sizes(
            robustness_budget(scores, method.draws), 2 * size, scale, inputs[0].numel(),
            network.hidden_noise[0].numel(), method.weight_norm,
        )  # fmt: skip
        harmonic = kappa * phi / (kappa + phi).clamp(min=1e-300)
        counted = {"printed": kappa + phi >= 2 * size, "harmonic": harmonic >= 2 * size}
        shares = {name: float((right & held).double().mean()) for name, held in counted.items()}
        found["attacked"].append({"size": size, "right": float(right.double().mean()), **shares})
    write_json(worker.job.folder.private / _FILE, found)


def _errors(network: DPALNetwork, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """What the two expansions leave out, of each number of a reconstruction and of each logit."""
    with torch.no_grad():
        code = network.code(inputs + network.input_noise)
        said, z = network.decoded(code), network.head(network.last(code))
    return taylor_errors(said)[0], taylor_errors(z)[1]


def _attacked(
    network: DPALNetwork, inputs: Tensor, labels: Tensor, size: float, steps: int
) -> Tensor:
    """By PGD on the network with the training's noise and no other, as the papers' code attacks."""
    classifier = RandomisedClassifier(network)
    sizes = torch.full((len(inputs),), size).double().to(inputs.device)
    ball = Ball(inputs, sizes, "linf", (-1.0, 1.0))
    return pgd(
        lambda point, step: loss_gradient(classifier, point, labels, None),
        ball, inputs, steps, 2.5 * ball.size / steps,
    )  # fmt: skip


def lines(private: Path) -> list[tuple[str, str]]:
    """What `measure` found, for summary and report."""
    path = private / _FILE
    if not path.exists():
        return []
    found = read_json(path, {"images": int, "right": float, "attacked": list, "psi": float})
    about = f"of {found['images']:,} test images, psi {found['psi']:g}"
    rows = [("the paper's predictions", f"{percent(found['right'], 1)} % right {about}")]
    for at in found["attacked"]:
        right, printed, harmonic = (percent(at[n], 1) for n in ("right", "printed", "harmonic"))
        rows.append(
            (
                f"as the paper measures it, PGD linf {exact(at['size'])}",
                f"{right} % right; {printed} % right and 'certified' by kappa + phi "
                f"({harmonic} % by the harmonic rule); no certificate: neither rule holds for "
                "noise around a fixed centre",
            )
        )
    return rows
