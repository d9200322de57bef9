"""Attack the inputs of any classifier from Python: `dpdist.attack`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dpdist.attacks.gradient_attacks import PIXELS, Ball, RandomizedClassifier
from dpdist.attacks.gradient_attacks import attack as attack_batch
from dpdist.certification.worker import KeyedGenerator
from dpdist.core.errors import UserError
from dpdist.core.fields import ATTACKS, NORMS, AttackName, Norm
from dpdist.randomness.keys import StreamKeys
from dpdist.randomness.noise_location import InputNoise

_BATCH = 64  # inputs at once; no point depends on it


def attack(
    model: nn.Module,
    inputs: Any,
    labels: Any,
    *,
    size: float,
    norm: Norm = "linf",
    name: AttackName = "pgd",
    sigma: float = 0.0,
    steps: int = 10,
    restarts: int = 1,
    samples: int = 16,
    step_scale: float = 2.5,
    box: tuple[float, float] | None = PIXELS,
    seed: str = "0",
) -> Tensor:
    """Return points near inputs at which an attacker makes a classifier wrong, if it can.

    Guarantee: each point lies within `size` of its input and, if the input does, inside `box`, to
    the last bit. An attack that fails proves nothing; a certificate does.

    Args:
        model: torch module that returns logits (B, classes); it is attacked in the mode and on the
            device that it is in.
        inputs: array or tensor (N, ...), as the model takes them.
        labels: (N,) classes that the attacker leads away from.
        size: largest distance, in input units.
        norm: norm of the distance, "linf" or "l2".
        name: "pgd", "mim", "i-fgsm" or "fgsm".
        sigma: standard deviation of the noise of the smoothed classifier that is attacked; 0 for
            the model itself.
        steps: number of gradient steps.
        restarts: number of starting points of PGD, of which the best result is returned.
        samples: number of noise samples per gradient, if `sigma` > 0.
        step_scale: length of all steps of PGD together, in units of `size`.
        box: least and largest value of an input; None for inputs without limits.
        seed: any text, from which all random numbers follow.

    Returns:
        A float32 tensor (N, ...) on the CPU: for each input, in order, the attacked point.

    Raises:
        UserError: an argument is wrong.

    Source:
        Madry et al. (2018), https://arxiv.org/abs/1706.06083; through noise Athalye et al. (2018),
        https://arxiv.org/abs/1802.00420.

    Example:
        >>> import torch, dpdist
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.eye(2))  # answers the larger coordinate
        >>> points = dpdist.attack(model, [[0.6, 0.4]], [0], size=0.2)
        >>> [round(number, 3) for number in points[0].tolist()], model(points).argmax(1).item()
        ([0.4, 0.6], 1)
    """
    if name not in ATTACKS:
        raise UserError(f"attack: name: must be one of {', '.join(ATTACKS)}, got {name!r}")
    if norm not in NORMS:
        raise UserError(f"attack: norm: must be one of {', '.join(NORMS)}, got {norm!r}")
    for key, value in {"steps": steps, "restarts": restarts, "samples": samples}.items():
        if value < 1:
            raise UserError(f"attack: {key}: must be 1 or more, got {value}")
    if not (size > 0 and sigma >= 0):
        raise UserError(f"attack: must have size > 0 and sigma >= 0, got {size}, {sigma}")
    centers = torch.as_tensor(inputs, dtype=torch.float32)
    classes = torch.as_tensor(labels, dtype=torch.int64)
    if len(centers) != len(classes):
        raise UserError(
            f"attack: labels: must be {len(centers)}, one per input, got {len(classes)}"
        )
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    classifier = RandomizedClassifier(model, InputNoise(sigma) if sigma else None)
    randomness = KeyedGenerator(StreamKeys("dpdist.attack", seed, "", "", "", sigma))
    found = []
    for first in range(0, len(centers), _BATCH):
        some = slice(first, first + _BATCH)
        center = centers[some].to(device)
        sizes = torch.full((len(center),), size, dtype=torch.float64, device=device)
        found.append(
            attack_batch(
                name, classifier, Ball(center, sizes, norm, box), classes[some].to(device),
                range(first, first + len(center)), randomness, steps=steps, samples=samples,
                restarts=restarts, step_scale=step_scale,
            ).cpu()
        )  # fmt: skip
    return torch.cat(found) if found else centers
