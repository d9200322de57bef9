"""The functional mechanism in a sound form: a quadratic objective, its coefficients released once.

Each sum of coefficients is released with Gaussian noise: the aim of AdLM and DPAL, which they do
not prove. The last layer of a model is fitted; the layers before it stay as they began: public
features. A few sums are released in a whole training, whatever the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from dpdist.config.sections import BaseRecipe
from dpdist.core.fields import (
    Count,
    FilePath,
    OptionCondition,
    Positive,
    PositiveFraction,
    PositiveOrZero,
    RejectBool,
    Section,
    Text,
)
from dpdist.methods.base import (
    DrawCount,
    Method,
    MethodSetup,
    MethodState,
    PublicRecords,
    check_record_limit,
    record_limit_assumptions,
)
from dpdist.privacy.phases import GaussianSteps, Phase
from dpdist.privacy.plan import PrivacyPlan, StepPlan

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dpdist.gradients.perturbations import Perturbation
    from dpdist.methods.functional_sums import CoefficientSums, CopyPass, FeaturePass

CENTRE, CURVATURE = "centre", "curvature"  # the tensors that a checkpoint keeps beside the head
SCALES = "scales"  # the tensor that is made once, of public records
PASS = 128  # records of a pass; `dpdist.methods.functional_sums.rounding_slack` rests on it
_EXAMPLES = 32  # test inputs that the model is tried on

_OpenUnitInterval = Annotated[float, RejectBool, Field(gt=0, lt=1)]


class Adversarial(Section):
    """Rounds see each record, and an adversarial copy of it, at shares 1 and xi of 1 + xi.

    The copy is within `size` in L-infinity (input units), away from the record's own label, at the
    head so far, by `steps` steps.
    """

    size: Positive = 0.1
    steps: Annotated[int, RejectBool, Field(ge=1, le=100)] = 1
    xi: Positive = 1.0


class Relevance(Section):
    """Less noise for features that matter more (the idea of AdLM), judged by public records.

    A direction's components are multiplied by the square roots of shares r, of mean 1, before they
    are clipped, so that component j has 1 / r_j of the noise variance. r_j is the mean of
    |f_j dL/df_j|^beta over records of the public data set `data` (under `root`, with `classes`
    classes), for a head fitted to them, and at least `floor`.
    """

    data: Text = "digits"
    root: FilePath | None = None
    classes: Annotated[int, RejectBool, Field(ge=1, le=100_000)] = 10
    beta: Positive = 1.0
    floor: PositiveFraction = 0.1
    max_records: Count = 2000


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

    With an `encoder`, of model patches, a sum before them: of the mean over a record's patches p of
    p p', each of norm at most 1. Its leading eigenvectors are the filters: principal components in
    place of the auto-encoder of DPAL, whose loss has no minimum.

    What each costs is a part of mu^2 = 1 / noise_multiplier^2: `encoder` that of the encoder,
    `centre` the first, `refine` all rounds together, the second the rest. labels: which part of a
    record's squared norm B may have. sigma: records are seen in `draws` noisy copies, as a
    certificate's are; noise: "fresh" for each sum, or each record's "own", a public function of it,
    so that sums have the same features. adversarial: what rounds see besides. relevance: how noise
    is shared out among features.
    """

    conditions = (
        OptionCondition(
            ("residual", "step", "refine"), "with rounds > 0", lambda it: it.rounds > 0
        ),
        OptionCondition(("noise", "draws"), "with sigma > 0", lambda it: it.sigma > 0),
    )

    recipe_conditions = (
        OptionCondition(
            (
                "training.optimizer", "training.schedule", "training.milestones",
                "training.momentum", "training.weight_decay",
            ),
            "to steps along gradients; method functional fits a head to sums",
        ),
    )  # fmt: skip

    name: Literal["functional"] = "functional"
    display_name: ClassVar[str] = "functional mechanism"
    clip: Positive = 1.0
    radius: Positive = 0.4
    constant: _OpenUnitInterval = 0.15
    ridge: Positive = 0.2
    rounds: Annotated[int, RejectBool, Field(ge=0, le=1000)] = 8
    residual: Positive = 0.1
    step: Positive = 3.0
    centre: _OpenUnitInterval = 0.05
    refine: _OpenUnitInterval = 0.7
    labels: _OpenUnitInterval = 0.5
    sigma: PositiveOrZero = 0.0
    noise: Literal["fresh", "own"] = "fresh"
    draws: DrawCount = 1
    encoder: Annotated[float, RejectBool, Field(ge=0, lt=1)] = 0.0
    adversarial: Adversarial | None = None
    relevance: Relevance | None = None

    @model_validator(mode="after")
    def _check_budget_split(self) -> Functional:
        if self.encoder + self.centre + self.refine >= 1:
            raise ValueError(
                "centre, refine and encoder are parts of one budget: their sum must be < 1"
            )
        if self.adversarial is not None and not self.rounds:
            raise ValueError("adversarial is of the rounds: rounds must be > 0")
        return self

    # --- said in the recipe, the plan and the report

    def check(self, recipe: BaseRecipe) -> None:
        super().check(recipe)
        privacy, planted = recipe.privacy, recipe.canary_audit
        if privacy.clipping != "flat" or privacy.clip_norm != 1 or privacy.batch_cap is not None:
            raise ValueError(
                "method functional bounds what it sums by itself: leave out privacy.clipping, "
                "clip_norm and batch_cap"
            )
        if recipe.training.ema is not None or recipe.training.has_augmentation:
            raise ValueError(
                "method functional takes no steps: leave out training.ema, crop and flip"
            )
        if recipe.model.classifier is not None:
            raise ValueError("method functional fits the last layer, which is frozen here")
        if planted is not None and planted.inserts_gradients:
            raise ValueError(
                "method functional sums no gradients: audit.canary must be mislabelled or blank"
            )

    @property
    def public_records(self) -> PublicRecords | None:
        named = self.relevance
        if named is None:
            return None
        return PublicRecords("method.relevance.data", named.data, named.classes, named.root)

    @property
    def needs_batched_passes(self) -> bool:
        return True

    @property
    def takes_gradient_steps(self) -> bool:
        return False

    def cost(self, steps: GaussianSteps) -> tuple[Phase, ...]:
        """Sums over all records, whose mu^2 add up to that of the noise multiplier."""
        rest = 1 - self.centre - (self.refine if self.rounds else 0) - self.encoder
        parts = [(1, self.centre), (1, rest)]
        if self.rounds:
            parts.append((self.rounds, self.refine))
        if self.encoder:
            parts.insert(0, (1, self.encoder))
        noise = steps.noise_multiplier
        return tuple(GaussianSteps(n, noise * math.sqrt(n / part), 1.0) for n, part in parts)

    def describe(self, plan: PrivacyPlan) -> str:
        noises = dict.fromkeys(f"{plan.step(t).noise_multiplier:.4g}" for t in range(plan.steps))
        return f"{plan.steps} sums over all records, noise multipliers {', '.join(noises)}"

    def assumptions(self, recipe: BaseRecipe) -> list[str]:
        public = self.public_records
        return [
            "the model's weights before its last layer were made without the private records"
            + (", or are what the encoder's sum paid for" if self.encoder else ""),
            *record_limit_assumptions(recipe),
            *([] if public is None else public.assumptions(recipe)),
        ]

    # --- done in training

    def prepare_state(self, setup: MethodSetup) -> dict[str, Tensor]:
        if self.relevance is None:
            return {}
        from dpdist.methods.functional_sums import feature_scales

        return {SCALES: feature_scales(self, self.relevance, setup)}

    def placeholder_state(
        self, model: nn.Module, input_shape: tuple[int, ...]
    ) -> dict[str, Tensor]:
        """The same scale for every feature."""
        import torch

        from dpdist.models import last_linear

        if self.relevance is None:
            return {}
        return {SCALES: torch.ones(last_linear(model).in_features, dtype=torch.float64)}

    def extra_checkpoint_state(self, model: nn.Module) -> dict[str, Tensor]:
        import torch

        from dpdist.models import last_linear

        size = last_linear(model).in_features
        return {
            CENTRE: torch.zeros(size, dtype=torch.float64),
            CURVATURE: torch.zeros(size + 1, size + 1, dtype=torch.float64),
        }

    @property
    def supports_frozen_denoiser(self) -> bool:
        return not self.encoder  # learned from records, not from what a denoiser shows

    def project_parameters(self, model: nn.Module) -> Any:
        """None; a model without a last linear layer, or the encoder asked for, is refused."""
        from dpdist.models import last_linear, patch_features_of

        last_linear(model)
        if self.encoder:
            patch_features_of(model)
        return lambda: None

    def perturbation(
        self, step: StepPlan, learning_rate: float, state: MethodState
    ) -> Perturbation:
        from dpdist.gradients.perturbations import InputPerturbation, Perturbation

        return InputPerturbation(self.draws, self.sigma) if self.sigma else Perturbation()

    def learn(self, worker: Any) -> None:
        """A checkpoint after each release; worker 0 makes what follows from it."""
        from dpdist.models import last_linear

        plan, reducer = worker.job.plan, worker.step.reducer
        check_record_limit(worker.job.recipe, len(worker.step.data))
        centre, curvature = worker.slots[CENTRE], worker.slots[CURVATURE]
        head, sums = last_linear(worker.model), None
        for step in range(worker.start, worker.last):
            step_plan, stage = plan.step(step), self._stage(step)
            if stage >= 0 and sums is None:
                sums = self._build_sums(worker)
            rows = self._local_sums(worker, sums, step)
            noisy, _ = worker.step.release(step, rows, step_plan.noise_std)
            released = noisy.to(centre)
            if stage == 0:
                assert sums is not None
                centre.copy_(sums.mean_features(released))
            elif reducer.rank == 0:  # another machine's solution may end in other bits
                if sums is None:
                    self._fit_encoder(worker.model, released)
                elif stage == 1:
                    weights, matrix = sums.fit_weights(released, step_plan.noise_multiplier)
                    curvature.copy_(matrix)
                else:
                    weights = sums.weights_from_head(head.weight.data, head.bias.data, centre)
                    weights = sums.refine_weights(released, weights, curvature)
                if sums is not None:
                    weight, bias = sums.head_from_weights(weights, centre)
                    head.weight.data.copy_(weight)
                    head.bias.data.copy_(bias)
            _broadcast_from_first(reducer, worker.flat)
            worker.divergence.check(worker.flat, step, step + 1 == worker.last)
            worker.save(step + 1)

    def _stage(self, step: int) -> int:
        """0: features, 1: coefficients, then rounds; before them, -1: of the encoder."""
        return step - (1 if self.encoder else 0)

    def _build_sums(self, worker: Any) -> CoefficientSums:
        from dpdist import data
        from dpdist.methods.functional_sums import CoefficientSums

        example = data.load(worker.job.source, "test").batch(slice(0, _EXAMPLES))
        scales, records = worker.fixed.tensors.get(SCALES), worker.job.plan.records
        most = check_record_limit(worker.job.recipe, records)
        example = example.to(worker.step.reducer.device)
        sums = CoefficientSums(self, worker.model, example, records, scales, most)
        # whose filters no two trainings share
        if worker.job.shared_cache is not None and not self.encoder:
            sums.feature_cache = worker.job.shared_cache
        return sums

    def _fit_encoder(self, model: nn.Module, released: Tensor) -> None:
        from dpdist.methods.functional_sums import unpack_symmetric
        from dpdist.models import patch_features_of

        patches = patch_features_of(model)
        patches.fit_filters(unpack_symmetric(released, patches.encoder.weight[0].numel()))

    def _local_sums(self, worker: Any, sums: CoefficientSums | None, step: int) -> Tensor:
        """This worker's part of a sum: float64 (rows, size), PRIVATE. sums: None for that of the
        encoder."""
        found = []
        for row, begin, end in worker.step.shards.local_shards:
            members = worker.step.canaries.inputs_for(np.arange(begin, end))
            copies = self._noisy_copies(worker, step, members)
            found.append((row, self._sum(worker, sums, self._stage(step), copies)))
        rows = found[0][1].new_zeros(worker.step.shards.num_rows, len(found[0][1]))
        for row, total in found:
            rows[row] = total
        return rows

    def _noisy_copies(self, worker: Any, step: int, members: np.ndarray) -> Iterator[CopyPass]:
        """The records in passes, each in its noisy copies."""
        from dpdist.randomness.keys import derive_key

        step_plan, fresh = worker.job.plan.step(step), self.sigma > 0 and self.noise == "fresh"
        draws = self.perturbation(step_plan, 1.0, worker.fixed)
        key = derive_key(worker.step.key, "draw", worker.step.attempt_of(step), step)
        for start in range(0, len(members), PASS):
            rows = members[start : start + PASS]
            targets = worker.step.canaries.labels_for(rows, worker.step.data.targets(rows))
            for draw in range(draws.count):
                noisy = partial(self._noisy_copy, worker, draws, key, rows, draw)
                place = None if fresh else (int(rows[0]), draw)
                yield noisy, targets.to(worker.step.reducer.device), 1 / draws.count, place

    def _noisy_copy(
        self, worker: Any, draws: Perturbation, key: bytes, rows: np.ndarray, draw: int
    ) -> Tensor:
        """A noisy copy of these records."""
        import torch

        from dpdist.data.record_hashes import hash_inputs
        from dpdist.randomness.keys import derive_key

        inputs, names = worker.step.data.batch(rows), rows
        if self.noise == "own":  # a function of the record, which everybody may know
            key = derive_key(bytes(32), "functional", "noise")
            hashes = np.frombuffer(hash_inputs(inputs.numpy()).tobytes(), dtype="<u8")
            names = (hashes[::2] >> np.uint64(1)).astype(np.int64)
        return draws.perturb_inputs(
            inputs.to(worker.step.reducer.device), torch.from_numpy(names), key, draw
        )

    def _sum(
        self, worker: Any, sums: CoefficientSums | None, stage: int, copies: Iterator[CopyPass]
    ) -> Tensor:
        from dpdist.methods.functional_sums import sum_moments
        from dpdist.models import last_linear, patch_features_of

        centre, head = worker.slots[CENTRE], last_linear(worker.model)
        if sums is None:
            most = check_record_limit(worker.job.recipe, worker.job.plan.records)
            return sum_moments(patch_features_of(worker.model), copies, most)
        weights = sums.weights_from_head(head.weight.data, head.bias.data, centre)
        passes = self._passes(sums, stage, copies, sums.head_from_weights(weights, centre))
        if stage == 0:
            return sums.sum_features(passes, centre)
        if stage == 1:
            return sums.sum_coefficients(passes, centre)
        return sums.sum_residuals(passes, centre, weights)

    def _passes(
        self,
        sums: CoefficientSums,
        stage: int,
        copies: Iterator[CopyPass],
        head: tuple[Tensor, Tensor],
    ) -> Iterator[FeaturePass]:
        """What is summed of the copies; in rounds, of adversarial ones too."""
        asked = self.adversarial if stage > 1 else None
        own = 1.0 if asked is None else 1 / (1 + asked.xi)
        for noisy, targets, weight, place in copies:
            yield sums.cached_features(noisy, place), targets, weight * own
            if asked is not None:
                moved = sums.adversarial_copies(noisy(), targets, *head)
                yield sums.features(moved), targets, weight * (1 - own)


def _broadcast_from_first(reducer: Any, tensor: Tensor) -> None:
    """Worker 0's values, on all."""
    buffer = tensor.double() if reducer.rank == 0 else tensor.new_zeros(tensor.shape).double()
    reducer.all_reduce(buffer)
    tensor.copy_(buffer)
