"""The private gradient engine: sums of clipped per-example gradients at nearly ordinary cost.

One backward pass ("book-keeping", Bu et al. 2023): hooks keep every trainable layer's inputs,
autograd gives gradients of the outputs only; norms and clipped sums follow from both, layer by
layer. A `TrainingObjective` names the loss, the part of the model that is trained, and the targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from dpdist.core.errors import UserError
from dpdist.core.fields import KNOWN_LAYERS, PADDING, PER_EXAMPLE, SCREENED
from dpdist.core.memory import raise_malloc_thresholds, return_freed_memory
from dpdist.core.script_errors import warn
from dpdist.gradients.captured_model import CapturedModel
from dpdist.gradients.clipping import (
    Clipping,
    max_run_length,
    rounding_slack,
    sum_slack,
)
from dpdist.gradients.criterion import CriterionLoss
from dpdist.gradients.hooks import (
    Inputs,
    Losses,
    Objective,
    OwnLoss,
    collector,
    device_of,
    each_tensor,
    rows_of,
    take,
)
from dpdist.gradients.independence import (
    SYNTHETIC_KEY,
    check_example_independence,
    has_known_layers,
    largest_move,
)
from dpdist.gradients.passes import Rounding, labeled_passes, rows_per_pass
from dpdist.gradients.per_example import (
    DenseGradient,
    PerExampleGradient,
    rounds_factors,
    sums_in_order,
)
from dpdist.gradients.perturbations import CropAndFlip, ParameterPerturbation, Perturbation
from dpdist.gradients.random_passes import (
    Draws,
    DrawsOfRows,
    keyed_draws,
    mixes_draws,
    pass_key,
    preserve_random_state,
)
from dpdist.gradients.sampling import Blocks
from dpdist.gradients.validation import (
    NUM_EXAMPLES,
    refuse_complex_parameters,
    refuse_mixing_layers,
)
from dpdist.randomness.noisy_modules import override_outputs, require_modules

# --- the engine -------------------------------------------------------------------------------


_PERTURBED_CACHE_BYTES = 64 << 20  # beyond it, parameters are perturbed again for each micro-batch


@dataclass(frozen=True)
class ClippedSum:
    """The sum of one step over its batch. Everything except the noised `flat` is PRIVATE.

    flat: float64 (size,), sum of clipped gradients, in the order of `engine.parameters`. examples:
    batch size. nonfinite: number of examples whose gradient was NaN or Inf and counted as zero.
    loss_sum: sum of the finite losses (mean over augmentations). details: other measurements of a
    method.
    """

    flat: Tensor
    examples: int
    nonfinite: int
    loss_sum: float
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class UserMembers:
    """The records that examples consist of, where an example is a user.

    ids: (B, K) int64, distinct for distinct records; they key a record's random numbers. weights:
    (B, K), 1 for a record of the user and 0 for an empty place, which repeats one of its records.
    """

    ids: Tensor
    weights: Tensor

    def rows(self, rows: Tensor) -> UserMembers:
        """Return the members of these examples."""
        return UserMembers(self.ids[rows], self.weights[rows])


class GradientEngine:
    """An engine that sums clipped per-example gradients of `objective(model(inputs), targets)`.

    Guarantee: one example adds at most `sensitivity` to `clipped_sum`. With `blocks`, record ids
    and a draw key, records run in keyed blocks, and one record changes the executed sum by at most
    `sensitivity`, rounding included. This assumes that a record's clipped gradient changes by at
    most `dpdist.gradients.clipping.assumed_move` when the record moves to a different row. Without
    blocks, passes are cut by position, and the rounding of the sum comes on top. The bound is valid
    for batches of up to 2^19 records, 2^13 if the model is float64. The sum itself is private until
    noise is added: `clipped_sum` returns it as a `ClippedSum`.

    Args:
        model: takes (B, ...) inputs and treats examples independently. BatchNorm is not supported
            unless it stays in evaluation mode, with statistics of public data; `validate` detects
            other mixing, before the first sum and without reading a record. Its parameters are only
            read.
        objective: function that returns per-example losses (B,) from outputs and targets, or from
            the model and a batch (`dpdist.gradients.hooks.OwnLoss`); or a criterion object, such as
            `torch.nn.CrossEntropyLoss()`.
        clipping: `FlatClipping`, `PerLayerClipping` or `AutomaticClipping`.
        perturbation: K perturbed passes whose gradients are averaged before the clip; None is plain
            DP-SGD. It may be replaced between steps.
        micro_batch: examples per physical pass at most; None chooses it from the model's sizes for
            invented inputs, never from a record or load.
        blocks: how records are put into keyed blocks. They may be replaced between steps.
        vmap: whether every example runs through the model separately (torch.func), so that no model
            can mix examples; memory is micro-batch x parameters, and noise in a hidden layer is not
            supported.

    Attributes:
        records_per_example: K if an example is a user of up to K records: their gradients are
            summed, and the sum is clipped once. Set it before the first sum.
        rounding: layout of the passes (`dpdist.gradients.passes`): `standard`, in which a different
            record may move a record's row, or `fixed-row`. Set it before the first sum.
        shard: number of the sum among the sums of a step with one draw key, such as a worker's
            first record: no two passes of a step draw from one state (`random_passes`).
        draws: the random numbers that the model and its loss use in a pass, as detected.
        parameters: list of the trainable parameters, in the model's order.
        size: int, the total number of scalars in `parameters`.
        layers: list of the names of the layers, in the order of per-layer clip norms.
        fallback_layers: list of the names of the layers without a rule, which run by torch.func.
            `validate` and `prepare` add a module around a layer that hooks cannot follow, with a
            warning.
        sensitivity: float, the largest L2 norm that one example can add to the sum.

    Raises:
        UserError: the model mixes examples, or has nothing to train.

    Source: Bu et al., "Differentially Private Optimization on Large Model at Small Cost" (2023),
    for clipping by book-keeping.

    Example:
        >>> import dpdist, torch
        >>> model = torch.nn.Linear(4, 3)
        >>> def loss(outputs, targets):
        ...     return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
        >>> engine = dpdist.GradientEngine(model, loss, clipping=dpdist.FlatClipping(0.1))
        >>> found = engine.clipped_sum(torch.ones(8, 4), torch.zeros(8, dtype=torch.int64))
        >>> found.flat.shape, bool(found.flat.norm() <= 8 * engine.sensitivity)
        (torch.Size([15]), True)
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective | nn.Module,
        *,
        clipping: Clipping,
        perturbation: Perturbation | None = None,
        micro_batch: int | None = None,
        blocks: Blocks | None = None,
        vmap: bool = False,
    ) -> None:
        if micro_batch is not None and micro_batch < 1:
            raise UserError(f"micro_batch must be at least 1, got {micro_batch}")
        self._refuse_layers(model)
        raise_malloc_thresholds()
        if isinstance(objective, nn.Module):
            objective = OwnLoss(CriterionLoss(objective))
        self.model, self._captured = model, CapturedModel(model, objective)
        self._modes = self._captured.modes  # in which the model was checked
        self.clipping, self.micro_batch = clipping, micro_batch
        self.blocks, self.vmap = blocks, vmap
        if not self._captured.trained:
            raise UserError("the model has no trainable parameters")
        refuse_complex_parameters(self._captured.trained)
        self.parameters: list[nn.Parameter] = list(self._captured.trained.values())
        self._sizes = [parameter.numel() for parameter in self.parameters]
        self.size = sum(self._sizes)
        self._name_layers()
        self.perturbation = perturbation or Perturbation()
        self.augmentation: CropAndFlip | None = None  # of the inputs of every draw
        self.records_per_example = 1
        self.rounding: Rounding = "standard"
        self.shard, self.draws = 0, Draws()
        kinds = {type(module) for module in model.modules()}
        # torch's InstanceNorm gives a single record in that format a wrong gradient.
        self._captured.channels_last = (
            self.parameters[0].device.type == "cpu"
            and any(issubclass(kind, nn.Conv2d) for kind in kinds)
            and not any(issubclass(kind, _InstanceNorm) for kind in kinds)
        )
        self._checked = vmap  # examples cannot mix then

    _refuse_layers = staticmethod(refuse_mixing_layers)  # replaced where records may mix

    def _name_layers(self) -> None:
        self.layers = self._captured.clip_layers
        self.fallback_layers = [layer.name for layer in self._captured.layers if layer.fallback]
        self.clipping.check(self.layers)

    def _settle_layouts(self, inputs: Inputs, targets: Tensor) -> None:
        """Find the least rows of a pass. Run the smallest module around a layer that hooks cannot
        follow by torch.func, with a warning; the checks that follow report other failures."""
        self._captured.find_fewest_rows(inputs, targets)
        while (names := self._captured.run_lost_layer_alone(inputs, targets)) is not None:
            around, lost = names
            self._name_layers()
            self.perturbation = self._perturbation  # raises an error for noise within it
            warn(
                f"{around}: runs by torch.func for each record, because hooks cannot follow "
                f"{lost} in it; this is slower and needs memory for the rows of a pass times its "
                "parameters"
            )

    @property
    def objective(self) -> Objective:
        """Return the loss, which may be replaced before the first sum."""
        return self._captured.objective

    @objective.setter
    def objective(self, objective: Objective) -> None:
        self._captured.objective = objective

    @property
    def written_buffers(self) -> dict[str, Tensor]:
        """Return the model's buffers that passes write to, a dict from name to tensor.

        It is empty for this class.
        """
        return {}

    @property
    def perturbation(self) -> Perturbation:
        """Return the random noise of the next steps before the clip, a `Perturbation`.

        `count` (int, K) is the number of perturbed passes whose gradients are averaged, or added if
        `aggregate` is "sum". By default it is 1, without noise: plain DP-SGD. You may assign a
        different `Perturbation` between steps.
        """
        return self._perturbation

    @perturbation.setter
    def perturbation(self, perturbation: Perturbation) -> None:
        require_modules(self.model, perturbation.hidden_modules)
        if self.vmap and perturbation.hidden_modules:
            raise UserError("model.vmap: noise in a hidden layer needs the batch in one pass")
        for name in self.fallback_layers:
            # torch.func runs such a layer again for each record, and its noise with it.
            within = f"{name}." if name else ""
            if inside := [m for m in perturbation.hidden_modules if f"{m}.".startswith(within)]:
                raise UserError(f"noise on the output of {inside[0]}: layer {name} has no rule")
        self._perturbation = perturbation

    @property
    def precision(self) -> torch.dtype:
        """Return the precision for which the clip bounds rounding, a `torch.dtype`.

        It is torch.float64 if all trained parameters have it, else torch.float32.
        """
        exact = all(parameter.dtype == torch.float64 for parameter in self.parameters)
        return torch.float64 if exact else torch.float32

    @property
    def independence(self) -> str:
        """Return why the engine takes records to be independent in a pass, a str.

        It is "per-example" (each record runs alone), "known layers" (the model has only layer types
        that treat records alone) or "screened" (examples had the same gradient alone and among
        others, which is no proof).
        """
        if self.vmap or self.perturbation.per_example:
            return PER_EXAMPLE
        return KNOWN_LAYERS if has_known_layers(self.model, self.objective) else SCREENED

    @property
    def sensitivity(self) -> float:
        """Return the largest L2 norm that one example can add to `clipped_sum`, a float."""
        return self.clipping.sensitivity

    def clipped_sum(
        self,
        inputs: Inputs,
        targets: Tensor,
        *,
        draw_key: bytes = b"",
        record_ids: Tensor | None = None,
        out: Tensor | None = None,
        members: UserMembers | None = None,
    ) -> ClippedSum:
        """Return the sum over the batch of clipped per-example gradients: PRIVATE without noise.

        Args:
            inputs: (B, ...), B >= 0; a tuple or dict of such tensors for your own loss.
            targets: (B, ...).
            draw_key: 32 bytes, new for every step; required with random numbers or blocks.
            record_ids: (B,), distinct non-negative ids that key per-example draws and blocks.
            out: float64 (size,) of zeros, in which the sum is computed; None for a new tensor.
            members: a `UserMembers` if examples are users. Inputs and targets are then (B, K, ...)
                with K `records_per_example`, and an example's gradient is the sum over its records.

        Returns:
            A `ClippedSum`: `flat` (float64 (size,), in the order of `parameters`), `examples` (int,
            B), `nonfinite` (int, gradients that were NaN or infinite and count as zero) and
            `loss_sum` (float, over finite losses).

        Raises:
            UserError: sizes disagree, an id occurs twice, or the model mixes examples.
        """
        batch = rows_of(inputs)
        if (1 if members is None else members.weights.shape[1]) != self.records_per_example:
            raise UserError(f"the engine clips sums over {self.records_per_example} records")
        if len(targets) != batch or (record_ids is not None and len(record_ids) != batch):
            raise UserError(f"{batch} inputs, but {len(targets)} targets or other record ids")
        if record_ids is not None and len(record_ids.unique()) < batch:
            raise UserError(
                "record_ids: must be distinct, got one twice: random numbers of a record are keyed "
                "by its id; number the records of the data set"
            )
        like = (inputs, targets) if members is None else _records_at(0, inputs, targets)
        self._check_kind(*like)
        flat = self.parameters[0].new_zeros(self.size, dtype=torch.float64) if out is None else out
        pieces = zip(flat.split(self._sizes), self.parameters, strict=True)
        views = [piece.view(parameter.shape) for piece, parameter in pieces]
        blocked = self.blocks if draw_key and record_ids is not None else None
        self._check_draws_by_row(blocked is not None)
        run = max_run_length(blocked.capacity + 1 if blocked else batch, self.sensitivity)
        if rounds_factors(device_of(inputs)):  # products in float64 do not
            run = 1
        nonfinite, sums = 0, []
        perturbed: dict[int, dict[str, Tensor]] = {}

        for label, rows, real in self._labeled_passes(batch, draw_key, record_ids):
            ids = None if record_ids is None else record_ids[rows]
            own = None if members is None else members.rows(rows)
            gradients, losses = self._per_example_gradients(
                take(inputs, rows), targets[rows], draw_key, ids, perturbed, own, label
            )
            nonfinite += self._add_clipped(gradients, real, views, run)
            losses = losses[real]
            sums.append(losses.where(losses.isfinite(), 0.0).sum())
        loss_sum = sum(torch.stack(sums).tolist(), 0.0) if sums else 0.0  # one transfer
        return ClippedSum(flat, batch, nonfinite, loss_sum)

    def rows_per_pass(self, blocks: Blocks) -> int:
        """Return how many examples one physical pass over these blocks has, an int.

        Args:
            blocks: a `Blocks` with `count` and `capacity` (ints): how many keyed blocks there are,
                and the most records of one.
        """
        return rows_per_pass(blocks, self.micro_batch or blocks.capacity, self.rounding)

    def iter_passes(
        self, batch: int, draw_key: bytes, record_ids: Tensor | None
    ) -> Iterator[tuple[Tensor, slice | Tensor]]:
        """Yield the physical passes over a batch, each with the examples in it.

        Args:
            batch: number of examples, B.
            draw_key: 32 bytes of the step; it keys the blocks.
            record_ids: (B,), distinct ids of the records; None cuts passes by position.

        Yields:
            A pair for each pass. First its rows, an int64 tensor of positions in the batch. Second
            which of these rows count, a slice or an int64 tensor of places among them; the other
            rows repeat one that counts.
        """
        for _, rows, real in self._labeled_passes(batch, draw_key, record_ids):
            yield rows, real

    def _labeled_passes(
        self, batch: int, draw_key: bytes, record_ids: Tensor | None
    ) -> Iterator[tuple[tuple[str | int, ...], Tensor, slice | Tensor]]:
        """Yield the label that keys a pass's random numbers, its rows, and the rows that count."""
        fewest = self._captured.fewest_rows
        planned: Iterable[tuple[tuple[str | int, ...], np.ndarray, slice | np.ndarray]]
        if self.blocks is None or record_ids is None or not draw_key:
            step = self.micro_batch or max(1, batch)
            parts = (np.arange(batch)[at : at + step] for at in range(0, batch, step))
            planned = (
                (("pass", "by position", number), part, slice(len(part)))
                for number, part in enumerate(parts)
            )
        else:
            size, ids = self.rows_per_pass(self.blocks), np.asarray(record_ids.cpu())
            planned = labeled_passes(self.blocks, draw_key, ids, size, self.rounding)
        for label, members, real in planned:
            rows = torch.from_numpy(members)
            if len(rows) < fewest:
                yield label, rows.repeat(fewest), slice(1)
            else:
                yield label, rows, real if isinstance(real, slice) else torch.from_numpy(real)

    def _drawing(
        self, draw_key: bytes, label: tuple[str | int, ...]
    ) -> AbstractContextManager[None]:
        """Key the model's random numbers in the block by the label of a pass
        (`dpdist.gradients.random_passes`)."""
        if not self.draws.any:
            return nullcontext()
        if not draw_key:
            raise UserError(
                "draw_key: must be 32 secret bytes, new for each step, for a model or loss that "
                "uses random numbers (dropout), got no key"
            )
        of_shard = ("shard", self.shard) if label[0] == "pass" else ()
        return keyed_draws(pass_key(draw_key, *of_shard, *label), self.parameters[0].device)

    def _check_draws_by_row(self, blocked: bool) -> None:
        """Raise UserError if rows of a pass share random numbers that the layout takes as own."""
        alone = self.micro_batch == 1 or self.vmap or self.perturbation.per_example
        if self.draws.shared and not (alone or (blocked and self.rounding == "fixed-row")):
            raise UserError(
                f"model: must draw random numbers for each record, got {self.draws.shared[0]} for "
                "all rows of a pass, so that one more record could change all of them: set "
                "resources.rounding: fixed-row or resources.micro_batch: 1, or draw with a "
                "dimension of the batch",
                see="explanation/gradients.md#random-numbers-in-a-pass",
            )

    def _add_clipped(
        self,
        gradients: list[PerExampleGradient],
        real: slice | Tensor,
        views: list[Tensor],
        run: int,
    ) -> int:
        """Add the clipped gradients of a pass's `real` rows to the sum; return the number of those
        that were not finite."""
        table = self._captured.squared_norms(gradients, self.perturbation.gradient_weight)
        if table is None:
            return 0
        keep, rows = real, table.shape[1]
        table = table[:, keep]
        finite = table.sum(0).isfinite()
        bad = int((~finite).sum())
        if bad:  # removed, not multiplied by zero: 0 * Inf is NaN
            table = table[:, finite]
            keep = torch.zeros(rows, dtype=torch.bool, device=table.device)
            keep[real] = finite
        for gradient in gradients:
            gradient.select(keep)
        factors = self._factors(table)
        for row, gradient, view in zip(self._captured.clip_rows, gradients, views, strict=True):
            gradient.add_weighted_sum(factors[row], view, run)
        return bad

    def _factors(self, table: Tensor) -> Tensor:
        """Return the factors (layers, B) of gradients with these finite squared norms."""
        # The clip is lowered by the slack, so that rounding stays within the sensitivity.
        slack = rounding_slack(self.precision)
        if self.blocks is not None:
            slack += sum_slack(self.precision)
        factors = self.clipping.factors(table, slack)
        return (factors * self.perturbation.gradient_weight).expand(len(self.layers), -1)

    def _empty_gradients(self) -> list[PerExampleGradient]:
        return self._captured.empty_gradients(self.perturbation.count * self.records_per_example)

    def _per_example_gradients(
        self,
        inputs: Inputs,
        targets: Tensor,
        draw_key: bytes,
        record_ids: Tensor | None,
        perturbed: dict[int, dict[str, Tensor]],
        members: UserMembers | None = None,
        label: tuple[str | int, ...] = ("pass",),
    ) -> tuple[list[PerExampleGradient], Tensor]:
        """Return gradients by parameter, summed over draws and over a user's records, and losses.

        Gradients have the weights of draws, not yet `gradient_weight`; losses (B,) are means.
        label: of the pass, which keys its random numbers.
        """
        gradients = self._empty_gradients()
        if members is None:
            seen = self._captured.laid_out(inputs)
            total = self._add_draws(
                seen, targets, draw_key, record_ids, perturbed, gradients, None, label
            )
            return gradients, total / self.perturbation.count
        total = torch.zeros(rows_of(inputs), dtype=torch.float64, device=device_of(inputs))
        for place in range(self.records_per_example):
            record, wanted = _records_at(place, inputs, targets)
            weights = members.weights[:, place]
            losses = self._add_draws(
                self._captured.laid_out(record), wanted, draw_key, members.ids[:, place], perturbed,
                gradients, weights, (*label, "place", place),
            )  # fmt: skip
            total += losses * weights
        return gradients, total / (self.perturbation.count * members.weights.sum(1))

    def _add_draws(
        self,
        inputs: Inputs,
        targets: Tensor,
        draw_key: bytes,
        record_ids: Tensor | None,
        perturbed: dict[int, dict[str, Tensor]],
        gradients: list[PerExampleGradient],
        weights: Tensor | None,
        label: tuple[str | int, ...],
    ) -> Tensor:
        """Add the gradients of one record of each example under every draw; return losses (B,).

        weights: (B,), weight of the record in its example; None for 1. Losses are summed.
        """
        draws = self.perturbation
        total = torch.zeros(rows_of(inputs), dtype=torch.float64, device=device_of(inputs))
        for draw in range(draws.count):
            part = None if draws.draw_weights is None else draws.draw_weights[draw]
            share = part if weights is None else weights * (1.0 if part is None else part)
            with self._drawing(draw_key, (*label, "draw", draw)):
                losses = self._losses_of_draw(
                    inputs, targets, draw_key, record_ids, draw, perturbed, gradients, share
                )
            total += losses.double() * (1.0 if part is None else part * draws.count)
        return total

    def _losses_of_draw(
        self,
        inputs: Inputs,
        targets: Tensor,
        draw_key: bytes,
        record_ids: Tensor | None,
        draw: int,
        perturbed: dict[int, dict[str, Tensor]],
        gradients: list[PerExampleGradient],
        share: Tensor | float | None,
    ) -> Tensor:
        """Add the gradients of one draw; return the losses (B,)."""
        draws, captured, own_values = self.perturbation, self._captured, False
        seen = self.perturb_inputs(inputs, record_ids, draw_key, draw)
        if self.vmap or draws.per_example:
            if isinstance(draws, ParameterPerturbation) and draws.per_example:
                if record_ids is None:
                    raise UserError(
                        "per-example draws need record_ids: a record's noise is keyed by its id"
                    )
                own_values = True
                values = draws.perturb_parameters_per_example(
                    captured.values(), record_ids, draw_key, draw
                )
            else:
                values = draws.perturb_parameters(captured.values(), draw_key, draw)
            grads, losses = captured.run_each(
                seen, targets, values, share, own_values=own_values, draws=self.draws.any
            )
            for name, gradient in zip(captured.trained, gradients, strict=True):
                gradient.add(DenseGradient(grads[name]))
            return losses
        if draw in perturbed:
            values = perturbed[draw]
        else:
            values = draws.perturb_parameters(captured.values(), draw_key, draw)
            if draws.count * self.size * 4 <= _PERTURBED_CACHE_BYTES:
                perturbed[draw] = values
        with override_outputs(self.model, hidden_noise(draws, record_ids, draw_key, draw)):
            return captured.run(seen, targets, values, collector(gradients), share)

    def perturb_inputs(
        self, inputs: Inputs, record_ids: Tensor | None, draw_key: bytes, draw: int
    ) -> Inputs:
        """Return the inputs (B, ...) of one of K perturbed passes: augmented, then with noise.

        Args:
            inputs: (B, ...), a tensor or a tuple or dict of tensors.
            record_ids: (B,), ids that key per-example draws; None without such draws.
            draw_key: 32 bytes of the step.
            draw: number of the pass, 0 <= draw < K.

        Returns:
            Inputs of the same form and shape.

        Raises:
            UserError: augmentation needs record ids, and none are given.
        """
        if self.augmentation is not None:
            if record_ids is None:
                raise UserError("augmentation needs record_ids: it is drawn for each record")
            inputs = self.augmentation(inputs, record_ids, draw_key, draw)
        with sums_in_order(device_of(inputs)):  # adversarial draws differentiate the model
            return self.perturbation.perturb_inputs(inputs, record_ids, draw_key, draw)

    def outputs(self, inputs: Tensor) -> Tensor:
        """Return the model's outputs for a batch, a tensor (B, ...).

        Args:
            inputs: a tensor (B, ...), as the model takes it.

        Raises:
            UserError: the model uses random numbers, such as dropout.
        """
        if self.draws.any:
            raise UserError(
                "model: must not use random numbers for targets that it computes itself "
                "(consistency), got dropout or a similar layer: set its probability to 0"
            )
        with sums_in_order(inputs.device):
            found: Tensor = self.model(inputs)
            return found

    def validate(self, inputs: Inputs, targets: Tensor) -> None:
        """Check that the model does not mix examples, and choose the micro-batch. Returns nothing.

        Use examples that contain nothing private, since an observer learns the result. An engine
        that was not validated invents examples of the shapes and types of its first batch.
        torch's random state does not change.

        Args:
            inputs: about 33 examples (B, ...), public or invented, of the declared range and
                vocabulary.
            targets: (B, ...), as the objective takes them.

        Raises:
            UserError: the model mixes examples, a parameter cannot be followed, or fewer than two
                examples have a finite gradient.
        """
        with preserve_random_state(device_of(inputs)):
            if not self._checked:
                self._settle_layouts(inputs, targets)
                check_example_independence(self._captured, self._empty_gradients, inputs, targets)
                return_freed_memory()
        self.prepare(inputs, targets)

    def prepare(self, inputs: Inputs, targets: Tensor) -> None:
        """Choose the micro-batch for a model that was checked elsewhere. Returns nothing.

        The model was checked by `validate` of this engine or in a different process; this method
        does not check that examples are independent.

        Args:
            inputs: (B, ...), B >= 2, public or invented.
            targets: (B, ...), as the objective takes them.

        Raises:
            UserError: examples of this shape do not run.
        """

        def losses_of_rows(number: int, rows: list[int]) -> Tensor:
            label, ids = ("pass", "tried", number), torch.tensor(rows)
            return self._per_example_gradients(
                take(inputs, rows), targets[rows], SYNTHETIC_KEY, ids, {}, None, label
            )[1]

        captured = self._captured
        if isinstance(captured.objective, OwnLoss):
            captured.screened = inputs, targets
        self._checked, self._modes = True, captured.modes
        with preserve_random_state(device_of(inputs)):
            if not self.vmap:
                self._settle_layouts(inputs, targets)
                captured.known_shapes.clear()
                captured.prepare_for(inputs, targets)
            draws = captured.find_draws(inputs, targets)
            if draws is None:
                raise UserError(
                    "the model must run on two and on three copies of an example, got an error for "
                    "each: fix it, or give validate() examples that it accepts"
                )
            self.draws = draws
            captured.check_channels_last(inputs, targets)
            if self.micro_batch is None:
                each = self.vmap or self.perturbation.per_example
                self.micro_batch = captured.choose_rows(
                    inputs, targets, self._empty_gradients(), each=each
                )
            if draws.any and not (draws.shared or self.vmap) and mixes_draws(losses_of_rows):
                self.draws = replace(draws, shared=("numbers that are put in relation",))
        self._check_draws_by_row(True)

    def measure_moves(self, inputs: Inputs, targets: Tensor, blocks: Blocks) -> float:
        """Return the largest change of a clipped gradient when a record moves, a float.

        A record moves by a row, and to a pass of a different length, with its random numbers.
        Nothing is released.

        Args:
            inputs: (B, ...), B >= 2, public or invented.
            targets: (B, ...), as the objective takes them.
            blocks: blocks of the steps, which determine the length of passes.

        Returns:
            The L2 norm of the change, in units of the sensitivity; 0 if no bit changed.
        """

        def run(rows: list[int]) -> tuple[list[PerExampleGradient], Tensor]:
            some, labels = take(inputs, rows), targets[rows]
            count, ids, members = self.records_per_example, torch.tensor(rows), None
            if count > 1:
                device = device_of(inputs)
                members = UserMembers(
                    torch.stack([ids] * count, 1), torch.ones(len(rows), count, device=device)
                )
                some = each_tensor(lambda each: torch.stack([each] * count, 1), some)
                labels = torch.stack([labels] * count, 1)
            gradients, _ = self._per_example_gradients(
                some, labels, SYNTHETIC_KEY, ids, {}, members, ("pass", *rows)
            )
            table = self._captured.squared_norms(gradients, self.perturbation.gradient_weight)
            if table is None:
                table = torch.zeros(len(self.layers), len(rows), dtype=torch.float64)
            return gradients, self._factors(table)[self._captured.clip_rows]

        moved = DrawsOfRows(run) if self.draws.any else run
        with preserve_random_state(device_of(inputs)):
            found = largest_move(moved, len(targets), self.rows_per_pass(blocks))
        return found / self.sensitivity

    def _check_kind(self, inputs: Inputs, targets: Tensor) -> None:
        """Check the model before its first sum and after its layers change their mode; find shared
        arguments for each new shape of a record.

        A model that normalizes over the batch only in training mode, such as BatchNorm, passes in
        evaluation mode.
        """
        modes = self._captured.modes
        if modes != self._modes:
            self._refuse_layers(self.model)
            self._modes, self._checked = modes, self.vmap
        if not (self._checked and self.micro_batch):
            self.validate(*self._captured.invented(inputs, targets, NUM_EXAMPLES))
        if not self.vmap:
            self._captured.prepare_for(inputs, targets, invented=False)


def _records_at(place: int, inputs: Inputs, targets: Tensor) -> tuple[Inputs, Tensor]:
    """Return inputs and targets (B, ...) of one record of each user, from (B, K, ...).

    They are copies: `PerExampleGradient` compares inputs by their memory.
    """
    record = each_tensor(lambda each: each[:, place].contiguous(), inputs)
    return record, targets[:, place].contiguous()


def hidden_noise(
    perturbation: Perturbation, record_ids: Tensor | None, draw_key: bytes, draw: int
) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the change of each noised module's output in this draw, by the module's name."""
    change = partial(
        perturbation.perturb_output, record_ids=record_ids, draw_key=draw_key, draw=draw
    )
    modules = enumerate(perturbation.hidden_modules)
    return {name: partial(change, module=place) for place, name in modules}


# --- the objective ----------------------------------------------------------------------------


# (engine, inputs, labels, draw key, record ids) to targets; row b depends on record b, key, model.
TargetFunction = Callable[[GradientEngine, Tensor, Tensor, bytes, Tensor], Tensor]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy (B,) of logits (B, classes) and labels (B,).

    For logits (B, T, classes) and labels (B, T) it is the mean over an example's labels >= 0.
    """
    if targets.dim() == 1:
        return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
    losses = torch.nn.functional.cross_entropy(
        outputs.transpose(1, 2), targets.clamp(min=PADDING), reduction="none", ignore_index=PADDING
    )
    return losses.sum(1) / (targets >= 0).sum(1).clamp(min=1)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the squared L2 distance (B,) of outputs and targets, both (B, ...)."""
    return (outputs - targets).square().flatten(1).sum(1)


def label_targets(
    engine: GradientEngine, inputs: Tensor, labels: Tensor, draw_key: bytes, record_ids: Tensor
) -> Tensor:
    """Return the targets of a classifier: the labels."""
    return labels


def input_targets(
    engine: GradientEngine, inputs: Tensor, labels: Tensor, draw_key: bytes, record_ids: Tensor
) -> Tensor:
    """Return the targets of a denoiser: the clean inputs."""
    return inputs


@dataclass(frozen=True)
class TrainingObjective:
    """A learning task: per-example losses (B,) of (outputs, targets).

    module_name: the submodule that is trained and whose outputs count; None for the whole model.
    target_function: computes the targets; row b depends on record b, the key and the model.
    """

    loss_function: Losses = cross_entropy
    module_name: str | None = None
    target_function: TargetFunction = label_targets

    def trained_module(self, model: nn.Module) -> nn.Module:
        """Return the part of `model` to train."""
        return model if self.module_name is None else model.get_submodule(self.module_name)
