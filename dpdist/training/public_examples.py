"""Examples that hold nothing private: what a model is tried on before it sees a record.

Whoever watches a run learns whether it was refused, in how many rows its passes are cut and what
its card says, so these questions are put to test records and to examples invented from them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpdist import data
from dpdist.base.independence import weakest
from dpdist.data.text import following
from dpdist.gradients.blocks import Blocks
from dpdist.gradients.engine import GradientEngine
from dpdist.gradients.perturbations import Draws
from dpdist.gradients.screening import EXAMPLES
from dpdist.gradients.task import Task
from dpdist.privacy.plan import PrivacyPlan

_KEY = bytes(32)


def examples(source: data.Source, count: int = EXAMPLES) -> tuple[Tensor, Tensor]:
    """Return inputs (count, ...) and labels: the first test records, then invented ones.

    Of an invented input each number is that of a test record at the same place, so it is in the
    declared range; the last few are far outside it, where a model may do something else. Tokens are
    any of the vocabulary. Labels are any of the classes, or the tokens that follow. The same ones
    each time.
    """
    test = data.load(source, "test")
    known = min(len(test), (count + 1) // 2)
    inputs, labels = test.batch(slice(0, known)), test.targets(slice(0, known))
    generator = torch.Generator().manual_seed(0)
    shape = (count - known, *test.input_shape)
    if source.columns.text is None:
        chosen = torch.randint(known, shape, generator=generator)
        more = inputs.gather(0, chosen)
        more[-(count // 4) :] = 10 * more[-(count // 4) :] + 3
    else:
        more = torch.randint(source.columns.text.vocabulary, shape, generator=generator)
    more = more.to(inputs)
    if test.following:
        other = torch.from_numpy(following(more.numpy()))
    else:
        other = torch.randint(test.classes, (len(more),), generator=generator)
    return torch.cat([inputs, more]), torch.cat([labels, other.to(labels)])


def _of_task(engine: GradientEngine, task: Task, source: data.Source) -> tuple[Tensor, Tensor]:
    """Examples with the targets of the task. Nothing is drawn for them: keys are for records."""
    device = engine.parameters[0].device
    inputs, labels = (each.to(device) for each in examples(source))
    draws, augmentation = engine.draws, engine.augmentation
    engine.draws, engine.augmentation = Draws(), None
    try:
        targets = task.targets(engine, inputs, labels, _KEY, torch.arange(len(inputs)))
    finally:
        engine.draws, engine.augmentation = draws, augmentation
    return inputs, targets


def screen(engine: GradientEngine, task: Task, source: data.Source) -> None:
    """Screen the engine's model on public and invented examples (`GradientEngine.screen`)."""
    engine.screen(*_of_task(engine, task, source))


def independence(
    engine: GradientEngine, task: Task, source: data.Source, plan: PrivacyPlan, largest: int
) -> str:
    """Return how records are kept apart in every pass that the plan executes, one of INDEPENDENCE.

    largest: records of the largest shard, from which passes get their rows.
    """
    loops = [phase.loop for phase in plan.phases]
    steps = {(loop.sample_rate, loop.batch_cap) for loop in loops if loop is not None}
    most = engine.micro_batch or EXAMPLES
    sizes = {Blocks.for_batches(largest, *step).rows(most) for step in steps}
    inputs, targets = _of_task(engine, task, source)
    rows = [torch.arange(size, device=inputs.device) % len(inputs) for size in sorted(sizes)]
    return weakest(engine.kept_apart(inputs[some], targets[some]) for some in rows)
