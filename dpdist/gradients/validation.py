"""Refuse models that void the guarantee: layers that mix examples, parameters hooks miss."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from dpdist.core.errors import UserError
from dpdist.gradients.hooks import (
    Inputs,
    Layer,
    Objective,
    device_of,
    each_tensor,
    example_losses,
    find_layers,
    find_shared_arguments,
    rows_of,
    run_pass,
    run_with_values,
    take,
    tensors_of,
)
from dpdist.gradients.per_example import LayerCall, PerExampleGradient

_FEW = 4  # examples whose signals and gradients are compared with autograd's
_SIZES = (2, 3, 5, 9, 17, 33)  # of the company that an example's values are compared in
NUM_EXAMPLES = 33
_MIXES = (
    "depends on another example. Normalise within each example (torch.nn.GroupNorm), never over "
    "the batch"
)
_GROUP = 1 << 20  # parameters differentiated at a time
_RandomStates = tuple[Tensor, Tensor]  # of torch's generators, on the CPU and where the model lies


def normalises_over_batch(module: nn.Module) -> bool:
    """Return whether it is a BatchNorm that does not use stored statistics, as one in evaluation
    mode does."""
    if not isinstance(module, _NormBase) or isinstance(module, _InstanceNorm):
        return False
    return module.training or module.running_mean is None


def refuse_mixing_layers(model: nn.Module) -> None:
    """Raise UserError, naming the layer, for layer types known to mix examples."""
    for name, module in model.named_modules():
        where = f"layer {name or '(the model itself)'} ({type(module).__name__})"
        if normalises_over_batch(module):
            raise UserError(
                f"{where} normalises over the batch, so one record would change every record's "
                "gradient: use torch.nn.GroupNorm instead or, where its statistics are of public "
                "data, call its eval(), also after model.train()",
                see="explanation/gradients.md#what-is-refused",
            )
        if isinstance(module, _InstanceNorm) and module.track_running_stats:
            raise UserError(
                f"{where} keeps running statistics of private data: set track_running_stats=False "
                "or use torch.nn.GroupNorm",
                see="explanation/gradients.md#what-is-refused",
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and (
            module.scale_grad_by_freq or module.max_norm is not None
        ):
            raise UserError(
                f"{where}: scale_grad_by_freq counts tokens over the batch and max_norm rewrites "
                "weights in the forward pass: switch both off"
            )
        _refuse_coupled_experts(where, getattr(module, "config", None))


def _refuse_coupled_experts(where: str, config: object) -> None:
    """Raise UserError for a mixture of experts, as `transformers` configures it, that couples the
    records of a batch."""
    if getattr(config, "output_router_logits", False):
        raise UserError(
            f"{where}: config.output_router_logits must be False, got True: it adds the router's "
            "balance loss, which is computed over the batch, so one record would change every "
            "record's gradient"
        )
    for key in ("expert_capacity", "capacity_factor", "router_capacity_factor"):
        if (value := getattr(config, key, None)) is not None:
            raise UserError(
                f"{where}: config.{key} must be absent or None, got {value}: with a capacity, the "
                "tokens an expert takes depend on the other records of the batch; use a model "
                "whose experts take all of their tokens"
            )


def make_synthetic_examples(
    model: nn.Module, inputs: Inputs, targets: Tensor, count: int = NUM_EXAMPLES
) -> tuple[Inputs, Tensor]:
    """Invent examples of the shapes and types of these, whose values are never looked at.

    Args:
        inputs: (B, ...), B >= 0, or several such tensors. Numbers are invented in [0, 1), for a
            quarter of the examples far away; tokens below the model's vocabulary (its attribute of
            that name, or its smallest embedding).
        targets: (B, ...). Whole numbers are invented below the number of classes, which is the last
            dimension of the model's outputs (dimension 1 where targets have all others).

    Returns:
        Inputs (count, ...) and targets (count, ...), the same ones each time.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = _vocabulary(model)
    several = not isinstance(inputs, Tensor)

    def invent(like: Tensor) -> Tensor:
        shape = (count, *like.shape[1:])
        if not like.is_floating_point() or (tokens is not None and not several):
            # Of several whole numbers some are no tokens: only 0 and 1 fit all of them.
            most = 2 if several else tokens or 2
            return torch.randint(most, shape, generator=generator).to(like)
        found = torch.rand(shape, generator=generator)
        far = count - count // 4
        found[far:] = 10 * found[far:] + 3
        return found.to(like)

    found = each_tensor(invent, inputs)
    shape = (count, *targets.shape[1:])
    if targets.is_floating_point():
        return found, torch.rand(shape, generator=generator).to(targets)
    known = 2 if several or targets.dtype == torch.bool else None
    classes = known or _classes(model, found[:2], targets)
    return found, torch.randint(classes, shape, generator=generator).to(targets)


def _vocabulary(model: nn.Module) -> int | None:
    """How many tokens it knows; None where its inputs are no tokens."""
    known = [
        found for module in model.modules()
        if isinstance(found := getattr(module, "vocabulary", None), int)
    ]  # fmt: skip
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    return min(known or tables, default=None)


def _classes(model: nn.Module, inputs: Tensor, targets: Tensor) -> int:
    try:
        with torch.no_grad():
            outputs = model(inputs)
    except Exception:  # a model that a loss of the user's calls in a way of its own
        return 2
    shape = outputs.shape if isinstance(outputs, Tensor) and outputs.dim() > 1 else (0, 2)
    last = targets.shape[1:] in (shape[1:-1], ())
    return max(1, shape[-1 if last else 1])


def check_example_independence(
    model: nn.Module,
    objective: Objective,
    make_gradients: Callable[[], list[PerExampleGradient]],
    inputs: Inputs,
    targets: Tensor,
) -> None:
    """Check on examples that they do not mix and that no parameter's gradient is missed.

    That a run stops is seen, so the examples are public or invented: no private record has a say.
    What a model does for special values alone is beyond them.

    1. The gradient of the first example's loss with respect to every layer's output must be zero on
       the rows of all other examples.
    2. The unclipped sum by book-keeping must equal autograd's own gradient.
    3. An example's loss and gradient must be the same alone and in any company, of 2 to 33
       examples: mixing that autograd does not see (detached values) is seen here.

    All in a float64 copy of the model, where rounding is far below what is looked for; in the
    model's own precision when the copy does not run. Differences are held against the sizes of the
    single examples' gradients, which do not cancel, and against what a change of the parameters in
    their last digits does, which is large where a tie is decided by rounding.

    Args:
        make_gradients: makes empty ones, one per parameter.
        inputs, targets: (B, ...), public or invented, two at least with finite gradients.

    Raises:
        UserError: the check failed, or too few gradients are finite.
    """
    _refuse_recurrent_layers(model)
    some = slice(NUM_EXAMPLES)
    own = _ModelCheck(model, objective, make_gradients, take(inputs, some), targets[some], False)
    widened = each_tensor(_to_float64, own.inputs), _to_float64(own.targets)
    frozen = _frozen_linear_weights(model)
    # What the first copy refuses, or cannot run, is left to one whose every number is float64.
    for shared in (frozen, {}) if frozen else ({},):
        try:
            wide = _float64_copy(model, shared)
            restore = partial(_restore_values, wide, model)
            _ModelCheck(wide, objective, make_gradients, *widened, restore=restore).run()
        except UserError:
            if not shared:
                raise
        except Exception:  # a model with constants of its own precision, or that cannot be copied
            continue
        else:
            return
    try:
        own.run()
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a user's module does
        said = " ".join(" ".join([str(error)[:300], *getattr(error, "__notes__", ())]).split())
        raise UserError(
            f"the model cannot be run or differentiated: {type(error).__name__}: {said}"
            f"{_cure(model, error)}"
        ) from error


def _cure(model: nn.Module, error: Exception) -> str:
    """Return how to mend what torch says without its cause; "" where that is not known."""
    if isinstance(error, IndexError):
        return (
            "; it ran on invented examples: their numbers lie in [0, 1), a quarter of them in "
            "[3, 13), and whole numbers are 0 or 1. Declare public ranges, as in "
            "dpdist.as_records(data, ranges={'inputs': (0, 2)}), or clamp what indexes a table"
        )
    if "nested" in str(error).lower() and any(
        getattr(module, "enable_nested_tensor", False) for module in model.modules()
    ):
        return "; make the TransformerEncoder with enable_nested_tensor=False"
    return _suspected_layout(model)


def _suspected_layout(model: nn.Module) -> str:
    """Return the first layer that takes positions before records, with the way to turn them."""
    for name, module in model.named_modules():
        if getattr(module, "batch_first", True) is False:
            return (
                f"; {name or 'the top'} ({type(module).__name__}) takes positions before records: "
                "where its inputs are (B, T, ...), set batch_first=True"
            )
    return ""


def _refuse_recurrent_layers(model: nn.Module) -> None:
    """Raise UserError for trained recurrent layers that are not replayed, whose states torch.func
    cannot cut into examples."""
    for layer in find_layers(model):
        module, kind = layer.module, type(layer.module)
        own = kind.forward not in (nn.RNN.forward, nn.LSTM.forward, nn.GRU.forward)
        if isinstance(module, nn.RNNBase) and layer.fallback and not own:
            inside = "proj_size" if module.proj_size else "dropout"
            then = "Linear" if module.proj_size else "Dropout"
            raise UserError(
                f"layer {layer.name} ({kind.__name__}): {inside} must be 0, got "
                f"{getattr(module, inside)}: use one recurrent layer after another with "
                f"torch.nn.{then} between them"
            )


class _WidenedLinear(torch.autograd.Function):
    """Multiply with a frozen weight in float64, keeping no float64 copy for the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return nn.functional.linear(inputs, weight.double(), bias)

    @staticmethod
    def backward(ctx: Any, *signals: Any) -> Any:
        (weight,) = ctx.saved_tensors
        return signals[0] @ weight.double(), None, None


def _frozen_linear_weights(model: nn.Module) -> dict[int, nn.Parameter]:
    """Return the weights, by identity, that frozen Linear layers alone hold, most of a base model.

    None where torch.func runs a layer, which needs rules for `_WidenedLinear`.
    """
    if any(layer.fallback for layer in find_layers(model)):
        return {}
    found: dict[int, nn.Parameter] = {}
    others: set[int] = set()
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        alone = type(module) is nn.Linear and "forward" not in vars(module)
        if alone and not any(parameter.requires_grad for parameter in own.values()):
            weight = own.pop("weight", None)
            if weight is not None:
                found[id(weight)] = weight
        others.update(map(id, own.values()))
    return {key: weight for key, weight in found.items() if key not in others}


def _float64_copy(model: nn.Module, shared: Mapping[int, nn.Parameter]) -> nn.Module:
    """Return a copy of the model in float64 whose zero weights are perturbed.

    Args:
        shared: weights of Linear layers, by identity, that the copy reads where they are and widens
            one by one: a float64 copy of a large frozen base would be twice as large as itself.
    """
    wide = copy.deepcopy(model, dict(shared))
    held = []
    for module in wide.modules():
        if id(module._parameters.get("weight")) in shared:
            held.append((module, module._parameters.pop("weight")))
    with torch.no_grad():
        wide.double()
        for module, weight in held:
            module._parameters["weight"] = weight
            module.forward = partial(_widened_forward, module)
        _perturb_zero_weights(wide)
    return wide


def _restore_values(wide: nn.Module, model: nn.Module) -> None:
    """Give the trained parameters of a float64 copy the values that it began with."""
    originals = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in wide.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(originals[name])
        _perturb_zero_weights(wide)


def _widened_forward(module: nn.Module, input: Tensor) -> Tensor:
    found: Tensor = _WidenedLinear.apply(input, module.weight, module.bias)  # type: ignore[no-untyped-call]
    return found


class _ModelCheck:
    """The checks of one model on a few examples, in one precision.

    restore: gives the trained parameters their values again; where it is there they are written to.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        make_gradients: Callable[[], list[PerExampleGradient]],
        inputs: Inputs,
        targets: Tensor,
        exact: bool = True,
        restore: Callable[[], None] | None = None,
    ) -> None:
        self.model, self.objective, self.make_gradients = model, objective, make_gradients
        self.inputs, self.targets, self.device = inputs, targets, device_of(inputs)
        self.layers, self.restore = find_layers(model), restore
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.values = {name: parameter.detach() for name, parameter in self.parameters.items()}
        self.tolerance, self.absolute_tolerance, self.relative_perturbation = (1e-7, 1e-10,
            1e-12) if exact else (
            1e-2, 1e-4, 1e-6
        )  # fmt: skip

    def run(self) -> None:
        state = _random_state(self.device)
        find_shared_arguments(self.model, self.layers, self.objective, self.inputs, self.targets)
        self._order_finite_first()
        few, before = slice(_FEW), _marks(self.model)
        _restore(state, self.device)
        self._check_gradients_do_not_cross_examples(take(self.inputs, few), self.targets[few])
        _restore(state, self.device)
        self._check_no_gradient_is_missed(take(self.inputs, few), self.targets[few], state)
        self._nothing_is_written(before)
        self._check_batch_size_invariance()
        self._nothing_is_written(before)  # of other examples than the last time

    def _order_finite_first(self) -> None:
        """Put the examples whose loss and gradient are finite before the others."""
        finite = torch.cat([self._are_finite(rows) for rows in self._rows_of_few()])
        self.num_finite = int(finite.sum())
        if self.num_finite < 2:
            raise UserError(
                "the model cannot be checked: fewer than two public or invented examples have a "
                "finite loss and gradient; mend it, or run each record through it alone "
                "(model.isolate)"
            )
        order = finite.int().argsort(descending=True, stable=True)
        self.inputs, self.targets = take(self.inputs, order), self.targets[order]

    def _rows_of_few(self) -> list[slice]:
        """Return the examples in parts: gradients of all of them at once may be larger than the
        model."""
        return [slice(start, start + _FEW) for start in range(0, len(self.targets), _FEW)]

    def _are_finite(self, rows: slice) -> Tensor:
        losses, gradients = self._gradients(take(self.inputs, rows), self.targets[rows])
        sizes = [losses.double(), *(self._squares(gradients, len(losses)))]
        return torch.stack([each.isfinite() for each in sizes]).all(0)

    def _squares(self, gradients: list[PerExampleGradient], count: int) -> list[Tensor]:
        """Squared norms of each example's gradient by parameter: float64 (B,)."""
        zero = torch.zeros(count, dtype=torch.float64, device=self.device)
        found = [gradient.squared_norms() for gradient in gradients]
        return [zero if each is None else each.double() for each in found]

    def _gradients(
        self,
        inputs: Inputs,
        targets: Tensor,
        values: Mapping[str, Tensor] | None = None,
        place: int | None = None,
    ) -> tuple[Tensor, list[PerExampleGradient]]:
        """Losses (B,) and gradients by parameter: of all examples, or of that at `place`."""
        gradients = self.make_gradients()

        def collect(layer: Layer, call: LayerCall) -> None:
            for local, contribution in layer.rule(call):
                own = contribution if place is None else contribution.only(place)
                gradients[layer.parameter_indices[local]].add(own)

        own = self.values if values is None else values
        losses = run_pass(
            self.model, self.layers, self.objective, inputs, targets, own, collect
        )  # fmt: skip
        return losses, gradients

    def _check_gradients_do_not_cross_examples(self, inputs: Inputs, targets: Tensor) -> None:
        mixed: list[str] = []
        first_only = torch.zeros(rows_of(inputs), device=self.device)
        first_only[0] = 1

        def watch(layer: Layer, call: LayerCall) -> None:
            dimension = 0
            if isinstance(layer.module, nn.RNNBase) and not layer.module.batch_first:
                dimension = 1
            for signal in call.output_gradients[:1]:
                if _is_nonzero(signal.movedim(dimension, 0)[1:]):
                    mixed.append(layer.name)

        run_pass(
            self.model, self.layers, self.objective, inputs, targets, self.values, watch,
            weights=first_only,
        )  # fmt: skip
        if mixed or _loss_depends_on_other_inputs(
            self.model, self.objective, self.values, inputs, targets
        ):
            where = f"at or after layer {mixed[0]}" if mixed else "before the first trained layer"
            raise UserError(
                f"the model mixes examples {where}: one example's loss {_MIXES}"
                f"{_suspected_layout(self.model)}",
                see="explanation/gradients.md#what-is-refused",
            )

    def _check_no_gradient_is_missed(self, inputs: Inputs, targets: Tensor, state: Tensor) -> None:
        """Compared with the sum of the examples' norms, which does not cancel, and with that of the
        whole gradient: of a parameter without effect (a bias before a normalisation) both ways
        leave rounding only."""
        _, gradients = self._gradients(inputs, targets)
        _restore(state, self.device)
        with torch.enable_grad():
            total_loss = example_losses(self.model, self.objective, {}, inputs, targets).sum()
        norms = [float(s.sqrt().sum()) for s in self._squares(gradients, len(targets))]
        whole, largest = math.hypot(*norms), 0.0
        named = list(self.parameters.items())
        for group in _groups([parameter.numel() for parameter in self.parameters.values()]):
            expected = _autograd(total_loss, [named[slot][1] for slot in group])
            for slot, grad in zip(group, expected, strict=True):
                if grad is None:
                    raise UserError(
                        f"the loss does not depend on parameter {named[slot][0]}: it would get "
                        "noise and learn nothing; freeze it (requires_grad_(False)) or use it"
                    )
                largest = max(largest, float(grad.abs().max()))
                size = max(norms[slot], float(grad.norm()))
                _add_sum(gradients[slot], grad.neg_(), slice(None), len(targets))
                difference = float(grad.norm())
                allowed = max(max(self.tolerance, 1e-4) * size, self.absolute_tolerance * whole)
                if not difference <= allowed:
                    raise UserError(
                        f"the gradient of parameter {named[slot][0]} cannot be followed example by "
                        "example: it is used outside the forward of the module that owns it, or a "
                        "random layer draws differently in each pass"
                    )
        if not largest:
            raise UserError(
                "model: must learn from an example, but the gradient of every trained parameter is "
                "zero for all checked ones: are its adapters switched off or scaled by 0? It would "
                "get noise and learn nothing"
            )

    def _nothing_is_written(self, before: dict[str, str]) -> None:
        """Raise UserError where a forward pass left something in a buffer or a parameter."""
        for name, mark in _marks(self.model).items():
            if mark != before.get(name):
                raise UserError(
                    f"{name} changed in a forward pass: statistics of private data would be stored "
                    "without noise"
                )

    def _check_batch_size_invariance(self) -> None:
        """The first example in company of all sizes, a few others in the largest one."""
        for first in range(min(_FEW, self.num_finite)):
            states = torch.get_rng_state(), _random_state(self.device)
            alone = self._sketch([first], 0)
            after = torch.get_rng_state(), _random_state(self.device)
            drawn = None if all(map(torch.equal, states, after)) else states  # a random layer
            again = self._sketch([first], 0, states=drawn)
            if not bool(((again - alone).abs() <= self._allowed(alone)).all()):
                raise UserError(
                    "the model or loss gives one example another loss or gradient when it runs "
                    "again: it remembers earlier examples, or draws from a generator of its own; "
                    "let it depend on its arguments alone"
                )
            self._compare(first, alone, _SIZES if first == 0 else _SIZES[-1:], drawn)

    def _compare(
        self, first: int, alone: Tensor, sizes: Sequence[int], drawn: _RandomStates | None
    ) -> None:
        """Raise UserError where an example's sketch is another one in company than alone.

        drawn: of a model with random layers, where its passes begin to draw. Its draws depend on
        the number of rows, so that an example is held against itself among copies of itself.
        """
        with self._changed_last_digits() as values:
            moved = (self._sketch([first], 0, values, drawn) - alone).abs()
        others = [row for row in range(len(self.targets)) if row != first]
        for size in sizes:
            place = size // 2
            if drawn is not None:
                alone = self._sketch([first] * size, place, states=drawn)
                with self._changed_last_digits() as values:
                    moved = (self._sketch([first] * size, place, values, drawn) - alone).abs()
            allowed = self._allowed(alone) + 4 * moved.nan_to_num(0.0, 0.0, 0.0)
            rows = [others[(size + place) % len(others)] for place in range(size)]
            rows[place] = first
            found = self._sketch(rows, place, states=drawn)
            if bool((~((found - alone).abs() <= allowed)).any()):
                raise UserError(
                    "the model mixes examples without autograd's knowledge: among "
                    f"{size} examples, one example's loss or gradient {_MIXES}",
                    see="explanation/gradients.md#what-is-refused",
                )

    def _allowed(self, alone: Tensor) -> Tensor:
        """Return how far rounding may move a sketch."""
        allowed = self.tolerance * (alone.abs() + alone[1])
        allowed[0] = self.tolerance * (1 + float(alone[0].abs()))
        # Below it both precisions run out of digits.
        return allowed + torch.finfo(torch.float32).tiny

    @contextmanager
    def _changed_last_digits(self) -> Iterator[dict[str, Tensor]]:
        """The parameters, changed in their last digits: a second copy only where they are not a
        copy themselves."""
        found = {}
        for name, value in self.values.items():
            places = torch.arange(value.numel(), dtype=value.dtype, device=value.device)
            factors = places.cos_().mul_(self.relative_perturbation).add_(1).view_as(value)
            found[name] = factors.mul_(value) if self.restore is None else value.mul_(factors)
        yield found
        if self.restore is not None:
            self.restore()

    def _sketch(
        self,
        rows: list[int],
        place: int,
        values: Mapping[str, Tensor] | None = None,
        states: _RandomStates | None = None,
    ) -> Tensor:
        """Loss, norm of the gradient and, by parameter, its norm and one projection: of the example
        at `place` among these rows. states: of torch's generators, which it is drawn from."""
        if states is not None:
            torch.set_rng_state(states[0])
            _restore(states[1], self.device)
        inputs, targets = take(self.inputs, rows), self.targets[rows]
        losses, gradients = self._gradients(inputs, targets, values, place)
        found = []
        for gradient, parameter in zip(gradients, self.parameters.values(), strict=True):
            one = torch.zeros(parameter.shape, dtype=torch.float64, device=parameter.device)
            _add_sum(gradient, one, slice(None), 1)
            found += [one.norm(), _projected(one.flatten())]
        each = torch.stack(found)
        return torch.cat([losses[place].double().view(1), each[::2].norm().view(1), each])


def _add_sum(gradient: PerExampleGradient, out: Tensor, keep: slice, count: int) -> None:
    """Add the sum over the kept examples of a parameter's gradients to `out`: float64, of its
    shape."""
    if gradient.squared_norms() is not None:
        gradient.select(keep)
        weights = torch.ones(count, dtype=torch.float64, device=out.device)
        gradient.add_weighted_sum(weights, out, 1)


def _projected(one: Tensor) -> Tensor:
    """A projection of a vector (n,), made in pieces: a large one's angles need no memory."""
    total = one.new_zeros(())
    for start in range(0, len(one), _GROUP):
        part = one[start : start + _GROUP]
        angle = torch.arange(start, start + len(part), device=one.device, dtype=one.dtype)
        total += part @ angle.cos_()
    return total / max(1.0, math.sqrt(len(one)))


def _marks(model: nn.Module) -> dict[str, str]:
    """Return a number in full for each buffer and parameter, which a write to it changes."""
    return {
        f"{kind} {name}": float(_projected(value.detach().double().flatten())).hex()
        for kind, named in (
            ("buffer", model.named_buffers()),
            ("parameter", model.named_parameters()),
        )
        for name, value in named
    }


def _perturb_zero_weights(model: nn.Module) -> None:
    """Give what begins at zero other values: the zero factor of a product (an adapter's second one)
    would hide whether the first one's gradient is followed."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.copy_(without_zeros(parameter))


def without_zeros(parameter: Tensor) -> Tensor:
    """Return a parameter's values, or others that are not zero where all of them are."""
    if parameter.any():
        return parameter.detach()
    places = torch.arange(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
    return 0.1 * places.cos().view_as(parameter)


def _to_float64(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _groups(sizes: list[int]) -> Iterator[list[int]]:
    """Parameters to differentiate together: the check never holds a second full gradient."""
    group: list[int] = []
    for slot, size in enumerate(sizes):
        if group and sum(sizes[member] for member in group) + size > _GROUP:
            yield group
            group = []
        group.append(slot)
    yield group


def _loss_depends_on_other_inputs(
    model: nn.Module,
    objective: Objective,
    values: Mapping[str, Tensor],
    inputs: Inputs,
    targets: Tensor,
) -> bool:
    """Whether the first loss depends on the other examples' (floating-point) inputs."""

    def leaf(tensor: Tensor) -> Tensor:
        copied = tensor.detach().clone()
        return copied.requires_grad_() if copied.is_floating_point() else copied

    seen = each_tensor(leaf, inputs)
    floating = [each for each in tensors_of(seen) if each.requires_grad]
    if not floating:
        return False

    def differentiate() -> Sequence[Tensor | None]:
        losses = example_losses(model, objective, values, seen, targets)
        if not losses.requires_grad:
            return ()
        return torch.autograd.grad(losses[0], floating, allow_unused=True)

    with torch.enable_grad():
        found = run_with_values(model, values, differentiate)
    return any(grad is not None and _is_nonzero(grad[1:]) for grad in found)


def _is_nonzero(others: Tensor) -> bool:
    """Whether a gradient is not zero; NaN, which 0 * Inf makes, says nothing."""
    return bool(torch.any(others.isfinite() & (others != 0)))


def _autograd(loss: Tensor, parameters: list[nn.Parameter]) -> Sequence[Tensor | None]:
    """Dense gradients in float64, to be written over: copies where there are several, which may lie
    in the same memory."""
    if not loss.requires_grad:
        return [None] * len(parameters)
    found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    dense = [each.to_dense() if each is not None and each.is_sparse else each for each in found]
    alone = len(dense) == 1
    return [
        each if each is None else (each if alone else each.clone()).double().contiguous()
        for each in dense
    ]


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _restore(state: Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
