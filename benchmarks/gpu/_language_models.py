"""Steps of a causal language model on invented documents: ours, ordinary, and Opacus'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dpdist.gradients.clipping import FlatClipping
from dpdist.gradients.engine import GradientEngine
from dpdist.gradients.hooks import OwnLoss
from dpdist.gradients.objective import language_model_loss
from dpdist.gradients.sampling import Blocks

DOCUMENTS = 60_000  # of which a batch is a Poisson sample of its expected size


def documents(model: Any, batch: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(model.config.vocab_size, (batch, length))
    return {"input_ids": ids, "labels": ids.clone()}


def private_step(model: nn.Module, fields: dict[str, Tensor]) -> Callable[[], None]:
    """Clip and add up by documents, as a run does it: in keyed blocks, and passes of one shape.

    Noise and update are another 10 ms.
    """
    rows = len(fields["labels"])
    engine = GradientEngine(
        model, OwnLoss(language_model_loss), clipping=FlatClipping(1.0),
        blocks=Blocks.for_batches(DOCUMENTS, rows / DOCUMENTS),
    )  # fmt: skip
    few = {name: each[:2].repeat(17, 1)[:33, :16] for name, each in fields.items()}
    engine.validate(few, torch.zeros(33, dtype=torch.int64))
    targets, ids = torch.zeros(rows, dtype=torch.int64), torch.arange(rows)
    engine.micro_batch = None  # chosen by documents as long as these, as a run does
    engine.validate({name: each[:2] for name, each in fields.items()}, targets[:2])

    def step() -> None:
        engine.clipped_sum(fields, targets, draw_key=bytes(32), record_ids=ids)

    return step


def ordinary_step(model: nn.Module, fields: dict[str, Tensor]) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        language_model_loss(model, fields).mean().backward()

    return step


def opacus_step(model: nn.Module, fields: dict[str, Tensor]) -> Callable[[], None]:
    """Per-example gradients by Opacus' hooks, clipped and added up."""
    from opacus import GradSampleModule

    wrapped = GradSampleModule(model)
    trained: list[Any] = [p for p in model.parameters() if p.requires_grad]

    def step() -> None:
        language_model_loss(wrapped._module, fields).sum().backward()
        squares = sum(p.grad_sample.flatten(1).square().sum(1) for p in trained)
        factors = (1.0 / squares.sqrt()).clamp(max=1.0)
        for parameter in trained:
            parameter.grad = torch.einsum("b,b...->...", factors, parameter.grad_sample)
            parameter.grad_sample = None

    return step
