"""Screen a model for records that influence each other, and measure the rounding of rows.

Three terms name the reason why records are taken as independent (`dpdist.core.fields`).
`per-example`: each runs separately through `torch.func`. `known layers`: the model is one of the
package, or has only layer types that treat each record separately. `screened`: examples without
private data had the same loss and gradient alone and among others, which proves nothing about other
values.

The screening detects honest mistakes, such as a mean over the batch. It runs in the model's own
precision, for small models in a float64 copy, which shows weaker influences.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from dpdist.core.errors import UserError
from dpdist.gradients.captured_model import CapturedModel
from dpdist.gradients.hooks import (
    Inputs,
    Objective,
    OwnLoss,
    collector,
    device_of,
    drawing_as_in_passes,
    each_tensor,
    example_losses,
    take,
)
from dpdist.gradients.per_example import PerExampleGradient
from dpdist.gradients.random_passes import States, random_states, restore_states
from dpdist.gradients.validation import (
    describe_layout,
    normalizes_over_batch,
    refuse_failing_model,
    refuse_recurrent_layers,
)

SYNTHETIC_KEY = b"for invented examples alone".ljust(32)  # of their random numbers

# --- known layers -----------------------------------------------------------------------------


# Each treats the entries of the first dimension separately, whatever their shape.
_KNOWN_LAYERS = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d,
    nn.Embedding, nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm1d, nn.InstanceNorm2d,
    nn.BatchNorm1d, nn.BatchNorm2d,  # in evaluation mode only
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid,
    nn.Softplus, nn.Hardswish, nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.ZeroPad2d, nn.Flatten, nn.Dropout, nn.Identity,
    nn.Sequential,
)  # fmt: skip
_PACKAGE = f"{__name__.partition('.')[0]}."


def has_known_layers(model: nn.Module, objective: Objective) -> bool:
    """Return whether loss and modules are the package's, or modules of a known, unchanged type."""
    loss = objective.function if isinstance(objective, OwnLoss) else objective
    loss = loss.func if isinstance(loss, partial) else loss
    ours = str(getattr(loss, "__module__", "")).startswith(_PACKAGE)
    return ours and all(map(_is_known, model.modules()))


def _is_known(module: nn.Module) -> bool:
    changed = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    if changed or normalizes_over_batch(module):
        return False
    if isinstance(module, nn.Flatten) and module.start_dim < 1:
        return False
    return type(module) in _KNOWN_LAYERS or type(module).__module__.startswith(_PACKAGE)


# --- screening --------------------------------------------------------------------------------


_FEW = 4  # examples whose signals and gradients are compared with autograd's
_TOGETHER = 11  # examples of a pass, small enough for large models
_SMALL = 1 << 20  # parameters of a model that is copied to float64
_GROUP = 1 << 20  # parameters differentiated at a time
_EXACT, _OWN = (1e-7, 1e-10, 1e-12), (1e-2, 1e-4, 1e-6)  # two tolerances, change of last digits
_MIXES = (
    "depends on another example. Normalize within each example (torch.nn.GroupNorm), never over "
    "the batch"
)


def check_example_independence(
    captured: CapturedModel,
    make_gradients: Callable[[], list[PerExampleGradient]],
    inputs: Inputs,
    targets: Tensor,
) -> None:
    """Check with examples that a model does not mix them and that no gradient is missed.

    An observer sees that a run stops, so the examples are public or invented. A model that mixes
    records only for special values passes.

    1. An example's loss and gradient must be the same alone and among others.
    2. The unclipped sum by book-keeping must equal autograd's own gradient.
    3. A forward pass must write to no buffer and no parameter.

    Args:
        captured: in the mode in which it is trained. If its passes have two rows at least, an
            example is compared with a pass of its copies.
        make_gradients: returns empty gradients, one per parameter.
        inputs: (B, ...), public or invented, at least two with finite gradients.
        targets: (B, ...), as the objective takes them.

    Raises:
        UserError: the check failed, or too few gradients are finite.
    """
    model = captured.model
    refuse_recurrent_layers(model)
    wide = _float64_copy(model)
    if wide is not None:
        widened = each_tensor(_to_float64, inputs), _to_float64(targets)
        try:
            return _Screening(captured.twin(wide), make_gradients, *widened, _EXACT).run()
        except UserError:
            raise
        except Exception:  # for example constants in a different precision
            pass
    try:
        _Screening(captured.twin(model), make_gradients, inputs, targets, _OWN).run()
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # any error of a user's module
        refuse_failing_model(model, error)


def _float64_copy(model: nn.Module) -> nn.Module | None:
    if sum(parameter.numel() for parameter in model.parameters()) > _SMALL:
        return None
    try:
        return copy.deepcopy(model).double()
    except Exception:  # any error of a user's objects
        return None


def _to_float64(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


class _Screening:
    """The checks of one model on a few examples, in one precision."""

    def __init__(
        self,
        captured: CapturedModel,
        make_gradients: Callable[[], list[PerExampleGradient]],
        inputs: Inputs,
        targets: Tensor,
        tolerances: tuple[float, float, float],
    ) -> None:
        self.captured, self.make_gradients = captured, make_gradients
        self.inputs, self.targets, self.device = inputs, targets, device_of(inputs)
        self.values = captured.values()
        self.tolerance, self.absolute_tolerance, self.last_digits = tolerances
        self.exact = tolerances is _EXACT

    def run(self) -> None:
        before = _marks(self.captured.model)
        self.captured.find_shared_arguments(self.inputs, self.targets)
        drawn = self.captured.find_draws(self.inputs, self.targets)
        among = torch.cat([self._sizes(rows) for rows in self._companies()])
        finite = among.isfinite().all(1).nonzero().flatten().tolist()
        if len(finite) < 2:
            raise UserError(
                "the model cannot be checked: fewer than two public or invented examples have a "
                "finite loss and gradient; fix it, or run each record separately (model.vmap)"
            )
        self._check_nothing_is_remembered(finite[0])
        few = finite[:_FEW]
        self._check_no_gradient_is_missed(take(self.inputs, few), self.targets[few])
        if drawn is not None and drawn.any:
            self._compare_with_copies(finite)
        else:
            for row in finite:
                self._compare(self._sizes([row])[0], among[row], [row], 0)
        for name, mark in _marks(self.captured.model).items():
            if mark != before.get(name):
                raise UserError(
                    f"{name} changed in a forward pass, which would store statistics of private "
                    "data without noise: let forward write to no buffer or parameter"
                )

    def _companies(self) -> Iterator[list[int]]:
        """Yield the examples of each pass: at least two; of small models, all of them."""
        count = len(self.targets)
        parts = 1 if self.exact else max(1, round(count / _TOGETHER))
        for part in range(parts):
            yield list(range(count * part // parts, count * (part + 1) // parts))

    # --- alone and among others

    def _sizes(self, rows: list[int], values: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return each example's loss and gradient norms: float64 (rows, 2 + parameters).

        The first norm is that of the whole gradient, the others those of its parameters' parts.
        """
        count = len(rows)
        if count < self.captured.fewest_rows:
            rows = rows * self.captured.fewest_rows
        losses, gradients = self._gradients(take(self.inputs, rows), self.targets[rows], values)
        squares = torch.stack(self._squares(gradients, len(rows)))
        found = torch.cat([losses.double()[None], squares.sum(0)[None].sqrt(), squares.sqrt()])
        return found[:, :count].T

    def _gradients(
        self, inputs: Inputs, targets: Tensor, values: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, list[PerExampleGradient]]:
        gradients, own = self.make_gradients(), self.values if values is None else values
        return self.captured.run(inputs, targets, own, collector(gradients)), gradients

    def _squares(self, gradients: list[PerExampleGradient], count: int) -> list[Tensor]:
        """Return the squared norms of the examples' gradients by parameter: float64 (B,)."""
        zero = torch.zeros(count, dtype=torch.float64, device=self.device)
        found = [gradient.squared_norms() for gradient in gradients]
        return [zero if each is None else each.double() for each in found]

    def _check_nothing_is_remembered(self, row: int) -> None:
        states = random_states(self.device)
        first = self._sizes([row])[0]
        restore_states(states, self.device)
        again = self._sizes([row])[0]
        if bool(((again - first).abs() > self._allowed(first)).any()):
            raise UserError(
                "the model or loss gives one example a different loss or gradient when it runs "
                "again: it stores earlier examples or uses its own random generator; let it depend "
                "on its arguments only"
            )

    def _compare_with_copies(self, finite: list[int]) -> None:
        """Compare two examples among others with the same examples among their copies.

        The random numbers of a layer depend on the number of rows.
        """
        states, count = random_states(self.device), len(self.targets)
        for row in finite[:2]:
            place = min(count, _TOGETHER) // 2
            company = [(row + step - place) % count for step in range(min(count, _TOGETHER))]
            restore_states(states, self.device)
            copies = self._sizes([row] * len(company))[place]
            restore_states(states, self.device)
            among = self._sizes(company)[place]
            self._compare(copies, among, [row] * len(company), place, states)

    def _compare(
        self,
        alone: Tensor,
        among: Tensor,
        rows: list[int],
        place: int,
        states: States | None = None,
    ) -> None:
        """Raise UserError if an example's sizes differ among others.

        Differences are compared with the size of its gradient and with the effect of a change of
        the parameters in their last digits, which is large if rounding decides a tie. rows, place:
        the pass that computed `alone`. states: states of the generators before it.
        """
        allowed, difference = self._allowed(alone), (among - alone).abs()
        if bool((difference <= allowed).all()):
            return
        if states is not None:
            restore_states(states, self.device)
        moved = (self._sizes(rows, self._changed_last_digits())[place] - alone).abs()
        if bool((difference <= allowed + 4 * moved.nan_to_num(0.0, 0.0, 0.0)).all()):
            return
        raise UserError(
            f"the model mixes examples: among others, one example's loss or gradient {_MIXES}"
            f"{describe_layout(self.captured.model)}",
            see="explanation/gradients.md#what-is-refused",
        )

    def _allowed(self, alone: Tensor) -> Tensor:
        """Return the tolerance for an example's sizes."""
        allowed = self.tolerance * (alone.abs() + alone[1])
        allowed[0] = self.tolerance * (1 + float(alone[0].abs()))
        # Below it both precisions run out of digits.
        return allowed + torch.finfo(torch.float32).tiny

    def _changed_last_digits(self) -> dict[str, Tensor]:
        found = {}
        for name, value in self.values.items():
            places = torch.arange(value.numel(), dtype=value.dtype, device=value.device)
            found[name] = value * places.cos_().mul_(self.last_digits).add_(1).view_as(value)
        return found

    # --- comparison with autograd

    def _check_no_gradient_is_missed(self, inputs: Inputs, targets: Tensor) -> None:
        """Compare the unclipped sum with autograd's gradient.

        A difference is compared with the sum of the examples' norms, which does not cancel, and
        with the whole gradient: for a parameter without effect (a bias before a normalization) both
        have only rounding.
        """
        states = random_states(self.device)
        _, gradients = self._gradients(inputs, targets)
        restore_states(states, self.device)
        captured = self.captured
        with torch.enable_grad(), drawing_as_in_passes(captured.layers, inputs):
            losses = example_losses(captured.model, captured.objective, {}, inputs, targets)
            total_loss = losses.sum()
        norms = [float(s.sqrt().sum()) for s in self._squares(gradients, len(targets))]
        whole, largest = math.hypot(*norms), 0.0
        ones = torch.ones(len(targets), dtype=torch.float64, device=self.device)
        named = list(captured.trained.items())
        for group in _groups([parameter.numel() for _, parameter in named]):
            expected = _autograd(total_loss, [named[slot][1] for slot in group])
            for slot, grad in zip(group, expected, strict=True):
                if grad is None:
                    raise UserError(
                        f"the loss does not depend on parameter {named[slot][0]}, which would only "
                        "receive noise: freeze it (requires_grad_(False)) or use it"
                    )
                largest = max(largest, float(grad.abs().max()))
                size = max(norms[slot], float(grad.norm()))
                followed = gradients[slot].squared_norms() is not None
                if followed:
                    gradients[slot].add_weighted_sum(ones, grad.neg_(), 1)
                allowed = max(max(self.tolerance, 1e-4) * size, self.absolute_tolerance * whole)
                if not (followed and float(grad.norm()) <= allowed):
                    raise UserError(
                        f"the gradient of parameter {named[slot][0]} cannot be computed for each "
                        "example: it is used outside the forward of the module that owns it, or a "
                        "random layer draws differently in each pass"
                    )
        if not largest:
            raise UserError(
                "model: must learn from an example, but the gradient of every trained parameter is "
                "zero for all checked examples, so it would only receive noise: check whether its "
                "adapters are switched off or scaled by 0"
            )


def _marks(model: nn.Module) -> dict[str, str]:
    """Return the norm of each buffer and parameter, which a write changes."""
    return {
        f"{kind} {name}": float(value.detach().double().norm()).hex()
        for kind, named in (
            ("buffer", model.named_buffers()),
            ("parameter", model.named_parameters()),
        )
        for name, value in named
    }


def _groups(sizes: list[int]) -> Iterator[list[int]]:
    """Yield parameters to differentiate together, so that no second full gradient is in memory."""
    group: list[int] = []
    for slot, size in enumerate(sizes):
        if group and sum(sizes[member] for member in group) + size > _GROUP:
            yield group
            group = []
        group.append(slot)
    yield group


def _autograd(loss: Tensor, parameters: list[nn.Parameter]) -> Sequence[Tensor | None]:
    """Return dense gradients in float64 that may be overwritten.

    Several may share memory, so they are copied.
    """
    if not loss.requires_grad:
        return [None] * len(parameters)
    found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    dense = [each.to_dense() if each is not None and each.is_sparse else each for each in found]
    alone = len(dense) == 1
    return [
        each if each is None else (each if alone else each.clone()).double().contiguous()
        for each in dense
    ]


# --- rounding ---------------------------------------------------------------------------------


# From numbers of examples to their gradients and factors of the clip (parameters, B).
RunClipped = Callable[[list[int]], tuple[list[PerExampleGradient], Tensor]]


def largest_move(run: RunClipped, count: int, rows: int) -> float:
    """Return the largest change of an example's clipped gradient when it moves, an L2 norm.

    It moves by a row, and by a row into a pass that is one example shorter.

    Args:
        run: computes a pass.
        count: number of examples.
        rows: of a pass.
    """
    largest = 0.0
    for start in range(0, count, max(2, rows)):
        here = list(range(start, min(count, start + max(2, rows))))
        before = run(here)
        used = [each.squared_norms() is not None for each in before[0]]  # the same for every order
        for order in ([here[-1], *here[:-1]], here[1:]):
            after = run(order)
            for place, example in enumerate(order):
                change = _change(before, example - start, after, place, used)
                largest = max(largest, change if math.isfinite(change) else 0.0)
    return largest


def _change(
    before: tuple[list[PerExampleGradient], Tensor],
    place: int,
    after: tuple[list[PerExampleGradient], Tensor],
    moved_to: int,
    used: Sequence[bool],
) -> float:
    squared = 0.0
    for slot, (one, other) in enumerate(zip(before[0], after[0], strict=True)):
        if used[slot]:
            first = before[1][slot, place] * one.of_example(place)
            second = after[1][slot, moved_to] * other.of_example(moved_to)
            squared += float(first.sub_(second).square_().sum())
    return math.sqrt(squared)
