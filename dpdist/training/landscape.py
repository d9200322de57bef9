"""How flat the minimum is in which a run ended, on its test inputs."""

from __future__ import annotations

from typing import Any

from torch import nn

from dpdist.base.storage import json_number, write_json
from dpdist.gradients.sharpness import loss_picture, sharpness
from dpdist.gradients.task import cross_entropy
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe
from dpdist.training.records import evaluation_data, source_of


def landscape(
    recipe: Recipe, folder: RunFolder, model: nn.Module, inputs: int, iterations: int
) -> dict[str, Any]:
    """Sharpness (DPlis Table 9) and loss picture on the first test inputs, in landscape.json."""
    box = 0.0045  # DPlis, PoPETs 2021
    dataset = evaluation_data(recipe, source_of(recipe)).first(inputs)
    batch, targets = dataset.batch(slice(None)), dataset.targets(slice(None))
    sharp = sharpness(model, cross_entropy, batch, targets, epsilon=box, iterations=iterations)
    picture = loss_picture(model, cross_entropy, batch, targets, key=bytes(32))
    measured = {
        "data": dataset.name,
        "inputs": len(dataset),
        "box": box,
        "sharpness": json_number(sharp.value),
        "loss": json_number(sharp.loss),
        "worst_loss": json_number(sharp.worst_loss),
        "iterations": sharp.iterations,
        "alphas": list(picture.alphas),
        "losses": [json_number(value) for value in picture.losses],
        "accuracies": list(picture.accuracies),
    }
    write_json(folder.path / "landscape.json", measured)
    return measured
