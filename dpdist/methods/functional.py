"""The functional mechanism in a sound form: the coefficients of a quadratic objective, each sum of
them released once with Gaussian noise; what AdLM and DPAL want, and do not prove.

The last layer of a model is fitted; what is before it stays as it began: public features. A few
sums are released in a whole training, whatever the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from dpdist.base.fields import Number, Positive, PositiveOrZero
from dpdist.methods.base import DrawCount, Fixed, Method
from dpdist.privacy.phases import Phase
from dpdist.privacy.plan import PrivacyPlan, StepPlan
from dpdist.privacy.releases import GaussianSteps
from dpdist.sections.recipe import Sections

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dpdist.gradients.perturbations import Draws
    from dpdist.methods.functional_sums import Pass, Sums

CENTRE, CURVATURE = "centre", "curvature"  # the tensors that a checkpoint keeps beside the head
PASS = 128  # records of a pass; `dpdist.methods.functional_sums.slack` rests on it
_EXAMPLES = 32  # test inputs that the model is tried on

_Between = Annotated[float, Number, Field(gt=0, lt=1)]


class Functional(Method):
    """The last layer of a model, fitted to coefficients of its loss, each released once.

    Features f are what the last layer reads; all before it stays at its initial weights, which must
    be public. Released are, with every record in each:

    1. the sum of f, clipped to norm `clip`: its mean is the centre m;
    2. the sums A of h h' and B of h y', the coefficients of the second-order Taylor expansion of
       the sigmoid cross-entropy at 0; h is f - m clipped to norm `radius`, in units of it, beside
       the constant `constant`, of norm at most 1. Of a record at the centre h is that constant.
       The head minimises the noisy expansion plus a ridge of `ridge` times the noise of A;
    3. in `rounds` rounds, the sum of h (y - p)', the linear coefficients of the softmax
       cross-entropy expanded at the head so far; y - p is clipped to norm `residual`. The head
       moves by `step` times what minimises that with A's curvature.

    What each costs is a part of mu^2 = 1 / noise_multiplier^2: `centre` the first, `refine` all
    rounds together, the second the rest. labels: which part of a record's squared norm B may have.
    sigma: records are seen in `draws` noisy copies, as a certificate's are.
    """

    name: Literal["functional"] = "functional"
    clip: Positive = 1.0
    radius: Positive = 0.4
    constant: _Between = 0.15
    ridge: Positive = 0.2
    rounds: Annotated[int, Number, Field(ge=0, le=1000)] = 8
    residual: Positive = 0.1
    step: Positive = 3.0
    centre: _Between = 0.05
    refine: _Between = 0.7
    labels: _Between = 0.5
    sigma: PositiveOrZero = 0.0
    draws: DrawCount = 1

    @model_validator(mode="after")
    def _something_left(self) -> Functional:
        if self.centre + self.refine >= 1:
            raise ValueError("centre and refine are parts of one budget: their sum must be < 1")
        return self

    # --- said in the recipe, the plan and the report

    def check(self, recipe: Sections) -> None:
        super().check(recipe)
        privacy, planted = recipe.privacy, recipe.planted
        if privacy.clipping != "flat" or privacy.clip_norm != 1 or privacy.batch_cap is not None:
            raise ValueError(
                "method functional bounds what it sums by itself: leave out privacy.clipping, "
                "clip_norm and batch_cap"
            )
        if recipe.training.ema is not None or recipe.training.augmented:
            raise ValueError(
                "method functional takes no steps: leave out training.ema, crop and flip"
            )
        if recipe.model.classifier is not None:
            raise ValueError("method functional fits the last layer, which is frozen here")
        if planted is not None and planted.in_sums:
            raise ValueError(
                "method functional sums no gradients: audit.canary must be mislabelled or blank"
            )

    @property
    def together(self) -> bool:
        return True

    @property
    def stepwise(self) -> bool:
        return False

    def cost(self, steps: GaussianSteps) -> tuple[Phase, ...]:
        """Sums over all records, whose mu^2 add up to that of the noise multiplier."""
        parts = [(1, self.centre), (1, 1 - self.centre - (self.refine if self.rounds else 0))]
        if self.rounds:
            parts.append((self.rounds, self.refine))
        noise = steps.noise_multiplier
        return tuple(GaussianSteps(n, noise * math.sqrt(n / part), 1.0) for n, part in parts)

    def words(self, plan: PrivacyPlan) -> str:
        noises = dict.fromkeys(f"{plan.step(t).noise_multiplier:.4g}" for t in range(plan.steps))
        return f"{plan.steps} sums over all records, noise multipliers {', '.join(noises)}"

    def assumed(self, recipe: Sections) -> list[str]:
        return ["the model's weights before its last layer were made without the private records"]

    # --- done in training

    def slots(self, model: nn.Module) -> dict[str, Tensor]:
        import torch

        from dpdist.models import last_linear

        size = last_linear(model).in_features
        return {
            CENTRE: torch.zeros(size, dtype=torch.float64),
            CURVATURE: torch.zeros(size + 1, size + 1, dtype=torch.float64),
        }

    def constraint(self, model: nn.Module) -> Any:
        """None; a model without a last linear layer is refused."""
        from dpdist.models import last_linear

        last_linear(model)
        return lambda: None

    def perturbation(self, step: StepPlan, learning_rate: float, fixed: Fixed) -> Draws:
        from dpdist.gradients.perturbations import Draws, InputDraws

        return InputDraws(self.draws, self.sigma) if self.sigma else Draws()

    def learn(self, worker: Any) -> None:
        """A checkpoint after each release; worker 0 solves for the head."""
        import torch

        from dpdist import data
        from dpdist.methods.functional_sums import Sums
        from dpdist.models import last_linear

        plan, reducer = worker.job.plan, worker.reducer
        centre, curvature = worker.slots[CENTRE], worker.slots[CURVATURE]
        head = last_linear(worker.model)
        example = data.load(worker.job.source, "test").batch(slice(0, _EXAMPLES))
        sums = Sums(self, worker.model, example.to(reducer.device), plan.records)
        for step in range(worker.start, worker.last):
            todo = plan.step(step)
            weights = sums.weights(head.weight.data, head.bias.data, centre)
            noisy, _ = worker.release(step, self._rows(worker, sums, step, weights), todo.noise_std)
            released = torch.from_numpy(noisy).to(centre)
            if step == 0:
                centre.copy_(sums.centre(released))
            elif reducer.rank == 0:  # another machine's solution may end in other bits
                if step == 1:
                    weights, matrix = sums.fitted(released, todo.noise_multiplier)
                    curvature.copy_(matrix)
                else:
                    weights = sums.refined(released, weights, curvature)
                weight, bias = sums.head(weights, centre)
                head.weight.data.copy_(weight)
                head.bias.data.copy_(bias)
            _from_first(reducer, worker.flat)
            worker.divergence.check(worker.flat, step, step + 1 == worker.last)
            worker.save(step + 1)

    def _rows(self, worker: Any, sums: Sums, step: int, weights: Tensor) -> Tensor:
        """This worker's part of a sum: float64 (rows, size), PRIVATE."""
        import torch

        from dpdist.randomness.keys import derive_key

        todo, device = worker.job.plan.step(step), worker.reducer.device
        draws = self.perturbation(todo, 1.0, worker.fixed)
        key = derive_key(worker.key, "draw", worker.attempt, step)

        def passes(members: np.ndarray) -> Iterator[Pass]:
            for start in range(0, len(members), PASS):
                rows = members[start : start + PASS]
                inputs = worker.dataset.batch(rows).to(device)
                targets = worker.dataset.targets(rows).to(device)
                place = None if self.sigma else int(rows[0])
                for draw in range(draws.count):
                    noisy = draws.inputs(inputs, torch.from_numpy(rows), key, draw)
                    yield sums.features(noisy, place), targets, 1 / draws.count

        found = []
        for row, begin, end in worker.shards.mine:
            members = passes(worker.canaries.fed(np.arange(begin, end)))
            found.append((row, self._sum(sums, step, members, worker.slots[CENTRE], weights)))
        rows = found[0][1].new_zeros(worker.shards.rows, len(found[0][1]))
        for row, total in found:
            rows[row] = total
        return rows

    def _sum(
        self, sums: Sums, step: int, passes: Iterator[Pass], centre: Tensor, weights: Tensor
    ) -> Tensor:
        if step == 0:
            return sums.of_features(passes, centre)
        if step == 1:
            return sums.of_coefficients(passes, centre)
        return sums.of_residuals(passes, centre, weights)


def _from_first(reducer: Any, tensor: Tensor) -> None:
    """Worker 0's values, on all."""
    buffer = tensor.double() if reducer.rank == 0 else tensor.new_zeros(tensor.shape).double()
    reducer.all_sum(buffer)
    tensor.copy_(buffer)
