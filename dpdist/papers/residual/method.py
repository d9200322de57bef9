"""Residual perturbation: noise after every residual block and on the input (Strategies I and II).

The noise is drawn in training and at every prediction. It is a regularizer and earns no privacy
here: the label enters a gradient without any noise, so that one released step gives it away
however large the noise is (`tests/unit/methods/test_residual.py`). Proved is the guarantee of
DP-SGD, inside whose clip the noise stands; without DP-SGD nothing is proved, and the paper's claim
is shown with its assumptions measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dpdist.config.sections import BaseRecipe
from dpdist.core.console import format_percent
from dpdist.core.fields import Positive, PositiveOrZero, Rule
from dpdist.methods.base import (
    Capabilities,
    DrawCount,
    Execution,
    Method,
    MethodState,
    WorkerInputs,
)
from dpdist.privacy.plan import PrivacyPlan, StepPlan

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from dpdist.gradients.clipping import Clipping
    from dpdist.gradients.engine import GradientEngine
    from dpdist.gradients.perturbations import ModulePerturbation
    from dpdist.models import ModelSpec
    from dpdist.privacy.claims import Claim
    from dpdist.privacy.guarantee import Guarantee
    from dpdist.randomness.noise_location import ModuleNoise

_ASSUMPTIONS_FILE = "assumptions.json"  # in the run's private folder
_IMAGES, _PASSES = 16, 16  # by which the means of blocks are measured
_BATCH = 1000


class ResidualPerturbation(Method):
    """Noise after every residual block and on the input, in training and at every prediction.

    For models with residual blocks (resnet-rp, resnet-gn).

    Attributes:
        strategy: additive, h + gamma n (Strategy I), or multiplicative, h + gamma sgn(h) max(|h|,
            eta0) n (Strategy II).
        gamma: Scale of each block's noise.
        pi: Standard deviation of the input's noise, in input units (default: gamma / 2).
        eta0: The least |h| of Strategy II; the form of the experiments has 0.
        noise_mode: relative multiplies additive noise by the standard deviation of the record's own
            h, as the code of EnResNet does; the theorem is of absolute noise.
        augmentations: Noises for each record and step, averaged before the clip.
        input_norm: The bound R of the input's norm that the paper's claim assumes (input units). It
            is measured; nothing is clipped to it.
        residual_norm: The bound G of a residual's norm that the paper's claim assumes. It is
            measured; nothing is clipped to it.
    """

    name: Literal["residual"] = "residual"
    display_name: ClassVar[str] = "residual perturbation"
    strategy: Literal["additive", "multiplicative"] = "additive"
    gamma: Positive
    pi: PositiveOrZero | None = None
    eta0: PositiveOrZero = 0.0
    noise_mode: Literal["absolute", "relative"] = "absolute"
    augmentations: DrawCount = 1
    input_norm: Positive = 30.0
    residual_norm: Positive = 30.0

    def rules(self) -> Iterator[Rule]:
        """Yield the rules between the options."""
        additive = self.strategy == "additive"
        relative = self.noise_mode == "relative"
        yield Rule(not additive and relative, "noise_mode relative belongs to strategy: additive")
        yield Rule(additive and self.eta0, "eta0 belongs to strategy: multiplicative")

    @property
    def input_noise_std(self) -> float:
        """Return pi, in input units."""
        return self.gamma / 2 if self.pi is None else self.pi

    # --- said in the recipe, the plan and the report

    def check(self, recipe: BaseRecipe) -> None:
        """Raise ValueError for a certificate without sigma, and for BatchNorm with privacy."""
        super().check(recipe)
        if recipe.model.options.get("norm") == "batch":
            _check_whole_batches(recipe)
        if recipe.certify is not None and recipe.certify.sigma is None:
            raise ValueError(
                "certify.sigma is required: the noise on the input is what certifies; "
                f"{self.input_noise_std:g} is that of training (method.pi)"
            )

    @property
    def capabilities(self) -> Capabilities:
        """Return that there is noise at every prediction, and passes of several records."""
        return Capabilities(has_prediction_noise=True, needs_batched_passes=True)

    def claim(self, plan: PrivacyPlan, proved: Guarantee) -> Claim | None:
        """Return Theorem 1's claim of a training without DP-SGD; no figure without a formula."""
        from dpdist.papers.residual.claims import residual_claim
        from dpdist.privacy.claims import Claim

        if not _steps_have_no_noise(plan):
            return None
        passes = plan.steps * plan.step(0).sample_rate
        setting = f"pi {self.input_noise_std:g}, gamma {self.gamma:g}, {passes:.4g} passes"
        if self.strategy == "multiplicative":
            return Claim(
                "Residual II", setting, None, None, proved, "not sound",
                "Theorem 2 is of one prediction of a secret model, at most; the model that is "
                "trained is not private, and predictions compose",
            )  # fmt: skip
        reason = "labels enter gradients without noise; the means of blocks have no bound"
        claimed = None
        if self.noise_mode == "relative":
            reason = f"the theorem is of absolute noise; {reason}"
        elif self.input_noise_std:
            norms = (self.input_norm, self.residual_norm)
            setting += f", R {norms[0]:g}, G {norms[1]:g}"
            claimed = residual_claim(self.input_noise_std, self.gamma, *norms, passes, plan.delta)
        return Claim("Residual I", setting, None, claimed, proved, "not sound", reason)

    def reported_values(self, private_folder: Path) -> list[tuple[str, str]]:
        """Return the measured assumptions of the claim, where it has any."""
        from dpdist.core.files import read_json

        path = private_folder / _ASSUMPTIONS_FILE
        if not path.exists():
            return []
        numbers = {"within": int, "images": int, "before": float, "after": float}
        found = read_json(path, numbers)
        share = format_percent(found["within"] / max(1, found["images"]), 1)
        return [
            (
                "assumed by the claim, measured on test images",
                f"norm <= {self.input_norm:g}: {share} % of {found['images']:,}; largest mean "
                f"norm of a block's output: {found['before']:.4g} before training, "
                f"{found['after']:.4g} after (assumed: <= {self.residual_norm:g})",
            )
        ]

    def execution(self) -> Execution[Any]:
        """Return the training with noise after blocks."""
        return ResidualExecution(self)


class WholeBatch(Method):
    """Ordinary gradients of whole batches, BatchNorm included: the baseline WITHOUT privacy.

    Nothing is proved about training records: each one changes the others' gradients.
    """

    name: Literal["whole-batch"] = "whole-batch"
    display_name: ClassVar[str] = "whole batches, no privacy"

    @property
    def capabilities(self) -> Capabilities:
        """Return that passes are of several records."""
        return Capabilities(needs_batched_passes=True)

    def check(self, recipe: BaseRecipe) -> None:
        """Raise ValueError for a recipe with privacy, or with parts of a batch."""
        super().check(recipe)
        _check_whole_batches(recipe)

    def execution(self) -> Execution[Any]:
        """Return the training by whole batches."""
        return WholeBatchExecution(self)


def _check_whole_batches(recipe: BaseRecipe) -> None:
    rules = {
        "privacy.noise_multiplier: must be 0": recipe.privacy.noise_multiplier != 0,
        "privacy.clipping: must be none": recipe.privacy.clipping != "none",
        "resources.workers: must be 1": recipe.resources.max_workers > 1,
        "training.reproducible: must be false": recipe.training.reproducible,
        "audit: must be left out": recipe.audit is not None,
    }
    if broken := [rule for rule, is_broken in rules.items() if is_broken]:
        raise ValueError(f"{broken[0]}, for BatchNorm sees whole batches and mixes their records")


class WholeBatchExecution(Execution[WholeBatch]):
    """Steps by whole batches."""

    def engine(self, model: nn.Module, clipping: Clipping, **how: Any) -> GradientEngine:
        """Return the engine of whole batches; for a model without BatchNorm the usual one."""
        return _whole_batch_engine(self, model, clipping) or super().engine(model, clipping, **how)


def _whole_batch_engine(
    execution: Execution[Any], model: nn.Module, clipping: Clipping
) -> GradientEngine | None:
    """Return the engine of an unclipped model with BatchNorm; None for others."""
    from dpdist.gradients.clipping import NoClipping
    from dpdist.papers.residual.whole_batch import WholeBatchEngine, mixes_records

    if not (isinstance(clipping, NoClipping) and mixes_records(model)):
        return None
    task = execution.task()
    return WholeBatchEngine(task.trained_module(model), task.loss_function, clipping=clipping)


class ResidualExecution(Execution[ResidualPerturbation]):
    """Steps with noise after blocks, and the measurement of the claim's assumptions."""

    def engine(self, model: nn.Module, clipping: Clipping, **how: Any) -> GradientEngine:
        """Return the usual engine; for BatchNorm, without privacy, that of whole batches."""
        return _whole_batch_engine(self, model, clipping) or super().engine(model, clipping, **how)

    def noise_location(self, model: nn.Module) -> ModuleNoise:
        """Return the place where a model is random.

        Raises UserError for one without residual blocks.
        """
        from dpdist.core.errors import UserError
        from dpdist.models import residual_blocks
        from dpdist.randomness.noise_location import ModuleNoise

        blocks = residual_blocks(model)
        if not blocks:
            raise UserError(
                "method residual puts noise after residual blocks, and the model has none: take "
                "resnet-rp or resnet-gn"
            )
        method = self.method
        mode = "relative" if method.noise_mode == "relative" else method.strategy
        stds = dict.fromkeys(blocks, method.gamma)
        return ModuleNoise(stds, mode, method.input_noise_std, method.eta0)

    def project_parameters(self, model: nn.Module) -> Callable[[], None]:
        """Constrain nothing. Raises UserError for a model without residual blocks."""
        self.noise_location(model)
        return lambda: None

    def perturbation(
        self, step: StepPlan, learning_rate: float, state: MethodState
    ) -> ModulePerturbation:
        """Return draws of the noise after blocks and on the input."""
        from dpdist.gradients.perturbations import ModulePerturbation

        return ModulePerturbation(self.method.augmentations, self.noise_location(state.model))

    def finalize(self, spec: ModelSpec, state: MethodState) -> ModelSpec:
        """Leave the noise in the model; return its spec with it."""
        from dpdist.models import BlockNoise

        place = self.noise_location(state.model)
        place.attach(state.model)
        return replace(spec, block_noise=BlockNoise(tuple(place.stds), place.mode, place.floor))

    def measure(self, given: WorkerInputs, stage: str) -> None:
        """Measure the assumptions of the claim before and after the steps, on worker 0.

        It does so on test images: how many private inputs are within the norm is their secret.
        """
        from dpdist.core.files import read_json, write_json
        from dpdist.randomness.keys import derive_key

        path = given.private_folder / _ASSUMPTIONS_FILE
        left_out = given.rank or not _steps_have_no_noise(given.plan)
        if left_out or (stage == "after" and not path.exists()):
            return
        test = given.public_test()
        images = test.batch(slice(0, _IMAGES)).to(given.parameters[0].device)
        key = derive_key(given.state.key, "residual", stage)
        found: dict[str, Any] = {"images": len(test), "within": 0}
        if stage == "after":
            found = read_json(path)
        else:
            for start in range(0, len(test), _BATCH):
                norms = test.batch(slice(start, start + _BATCH)).flatten(1).norm(dim=1)
                found["within"] += int((norms <= self.method.input_norm).sum())
        found[stage] = largest_mean_norm(given.model, self.noise_location(given.model), images, key)
        write_json(path, found)


def _steps_have_no_noise(plan: PrivacyPlan) -> bool:
    """Return whether there are steps without DP-SGD's noise."""
    return plan.steps > 0 and plan.step(0).noise_multiplier == 0


def largest_mean_norm(
    model: nn.Module, location: ModuleNoise, inputs: Tensor, key: bytes, passes: int = _PASSES
) -> float:
    """Return the largest norm of a block's mean output over noisy passes of inputs (B, ...).

    The square of each norm is the product of the means of two halves of the passes, which removes
    the noise of a mean. A block's own noise, of mean 0, is not included. passes: even.
    """
    import torch

    from dpdist.gradients.perturbations import ModulePerturbation
    from dpdist.randomness.noisy_modules import override_outputs

    augmentations, ids = ModulePerturbation(passes, location), torch.arange(len(inputs))
    halves: tuple[dict[int, Tensor], dict[int, Tensor]] = ({}, {})

    def watched(module: int, draw: int) -> Callable[[Tensor], Tensor]:
        def see(output: Tensor) -> Tensor:
            total, rows = halves[draw % 2], output.double().flatten(1)
            total[module] = total[module] + rows if module in total else rows
            return augmentations.perturb_output(output, ids, key, draw, module)

        return see

    with torch.no_grad():
        for draw in range(passes):
            names = enumerate(augmentations.hidden_modules)
            with override_outputs(model, {name: watched(module, draw) for module, name in names}):
                model(augmentations.perturb_inputs(inputs, ids, key, draw))
    squares = [(halves[0][m] * halves[1][m]).sum(1).max() for m in halves[0]]
    return math.sqrt(max(0.0, *map(float, squares))) / (passes / 2)
