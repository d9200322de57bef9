"""A model and its loss, as the gradient engine runs them: with given parameters, calls captured.

`run` takes a batch through the model by hooks (`dpdist.gradients.hooks`), `run_each` every example
by torch.func. How a model must be run depends on its code and on shapes, never on a record: on
public or invented examples this module finds the arguments that examples share, the layers that
hooks cannot follow, the random numbers of a pass, and the memory format.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpdist.core.errors import UserError
from dpdist.gradients.hooks import (
    WHOLE,
    Inputs,
    Layer,
    LayerCallback,
    LayoutError,
    Objective,
    captured_calls,
    collector,
    device_of,
    each_tensor,
    example_losses,
    find_layers,
    is_watched,
    rows_of,
    run_with_values,
    take,
    tensors_of,
    watched_calls,
)
from dpdist.gradients.layer_rules import DrawsByExample, RecurrentByExample, embedding
from dpdist.gradients.per_example import LayerCall, PerExampleGradient, sums_in_order
from dpdist.gradients.random_passes import Draws, find_draws, preserve_random_state
from dpdist.gradients.validation import (
    NUM_EXAMPLES,
    errors_of_isolated_models,
    make_synthetic_examples,
)

# --- the model --------------------------------------------------------------------------------


# Bytes of a physical pass: constant, so that a replayed step gives the same bits.
_PASS_BYTES = 1 << 30


class CapturedModel:
    """A model, its loss, and the layers whose calls are captured.

    Args:
        model: its parameters are only read.
        objective: gives the losses of examples.
        alone: names of modules that run as a whole by torch.func, for each example, since hooks
            cannot follow a layer in them.

    Attributes:
        trained: the trained parameters by name, in the model's order.
        layers: to capture, in the model's order.
        clip_layers: names of those with which parameters are clipped.
        channels_last: whether it runs in the memory format in which convolutions are fast.
        fewest_rows: least rows of a pass: 2 if the model needs two, as with `squeeze`.
        screened: inputs and targets without private records, which the loss accepts, or None.
        known_shapes: what calls share and the lengths of outputs, by layer, for records of a shape.
    """

    def __init__(self, model: nn.Module, objective: Objective, alone: Collection[str] = ()) -> None:
        self.model, self.objective, self.alone = model, objective, list(alone)
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.channels_last, self.fewest_rows = False, 1
        self.screened: tuple[Inputs, Tensor] | None = None
        self.known_shapes: dict[str, list[Any]] = {}
        self._find_layers()

    def _find_layers(self) -> None:
        """Find the layers to capture, and with which of them each parameter is clipped."""
        self.layers = find_layers(self.model, self.alone)
        # A parameter is clipped with the first layer that uses it.
        owner: dict[int, str] = {}
        self.reused: set[int] = set()
        for layer in self.layers:
            for slot in layer.parameter_indices.values():
                if owner.setdefault(slot, layer.name) != layer.name:
                    self.reused.add(slot)
        self.clip_layers = [layer.name for layer in self.layers if layer.name in owner.values()]
        self.clip_rows = [self.clip_layers.index(owner[slot]) for slot in range(len(self.trained))]

    def twin(self, model: nn.Module) -> CapturedModel:
        """Return the same for this model, which is like this one or a copy; in no format."""
        found = CapturedModel(model, self.objective, self.alone)
        found.fewest_rows = self.fewest_rows
        return found

    @property
    def modes(self) -> list[bool]:
        """Return for each module whether it is in training mode."""
        return [module.training for module in self.model.modules()]

    # --- parameters, inputs and gradients

    def values(self) -> dict[str, Tensor]:
        """Return the trained parameters by name, detached and in the format of the convolutions."""
        values = {name: parameter.detach() for name, parameter in self.trained.items()}
        if self.channels_last:
            for name, value in values.items():
                if value.dim() == 4:
                    values[name] = value.to(memory_format=torch.channels_last)
        return values

    def laid_out(self, inputs: Inputs) -> Inputs:
        """Return inputs in the memory format in which the model's convolutions are fast."""

        def lay_out(tensor: Tensor) -> Tensor:
            if self.channels_last and tensor.dim() == 4:
                return tensor.to(memory_format=torch.channels_last)
            return tensor.contiguous()

        return each_tensor(lay_out, inputs)

    def empty_gradients(self, draws: int) -> list[PerExampleGradient]:
        """Return gradients to add to, one per trained parameter. draws: passes of an example."""
        return [
            PerExampleGradient(p.shape, draws=draws, shared=slot in self.reused)
            for slot, p in enumerate(self.trained.values())
        ]

    def squared_norms(
        self, gradients: Sequence[PerExampleGradient], weight: float
    ) -> Tensor | None:
        """Return squared norms of weighted gradients (clip_layers, B); None without gradients."""
        squared: dict[int, Tensor] = {}
        for row, gradient in zip(self.clip_rows, gradients, strict=True):
            norms = gradient.squared_norms()
            if norms is not None:
                squared[row] = squared[row] + norms if row in squared else norms
        if not squared:
            return None
        zero = torch.zeros_like(next(iter(squared.values())))
        table = torch.stack([squared.get(row, zero) for row in range(len(self.clip_layers))])
        return table * weight**2

    # --- passes

    def run(
        self,
        inputs: Inputs,
        targets: Tensor,
        values: Mapping[str, Tensor],
        on_call: LayerCallback,
        weights: Tensor | float | None = None,
    ) -> Tensor:
        """Run the model on one micro-batch and return the losses (B,), detached.

        on_call: receives every layer call with its output gradients. values: the trained parameters
        by name, detached. weights: weights of the losses in the sum that is differentiated, (B,) or
        one for all (default 1).

        Raises UserError if the objective does not return one loss per example or a layer does not
        keep the examples apart.
        """
        everything = {name: p.detach() for name, p in self.model.named_parameters()} | dict(values)

        def forward_and_backward() -> Tensor:
            seen = each_tensor(Tensor.detach, inputs)
            losses = example_losses(self.model, self.objective, everything, seen, targets)
            if losses.requires_grad:
                (losses if weights is None else losses * weights).sum().backward()
            return losses

        with captured_calls(self.layers, inputs, everything, on_call):
            losses: Tensor = run_with_values(self.model, everything, forward_and_backward)
        return losses.detach()

    def run_each(
        self,
        inputs: Inputs,
        targets: Tensor,
        values: Mapping[str, Tensor],
        weights: Tensor | float | None = None,
        *,
        own_values: bool,
        draws: bool,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Run each example by torch.func; return gradients by name (B, ...) and losses (B,).

        values, weights: as in `run`; values are (B, ...) if each example has its own. draws:
        whether model or loss use random numbers.
        """
        frozen = {
            name: p.detach() for name, p in self.model.named_parameters() if name not in values
        }

        def loss(
            own: dict[str, Tensor],
            example: Inputs,
            target: Tensor,
            weight: Tensor | float | None,
            zero: Tensor | None,
        ) -> tuple[Tensor, Tensor]:
            alone, everything = take(example, None), {**own, **frozen}
            drawing = nullcontext() if zero is None else DrawsByExample(zero)
            with drawing, RecurrentByExample():
                losses = example_losses(self.model, self.objective, everything, alone, target[None])
                value = losses[0]
            return value if weight is None else weight * value, value.detach()

        each = 0 if isinstance(weights, Tensor) else None
        zeros = torch.zeros(len(targets), device=targets.device) if draws else None
        per_example = torch.func.vmap(
            torch.func.grad(loss, has_aux=True),
            in_dims=(0 if own_values else None, 0, 0, each, 0 if draws else None),
            randomness="different" if draws else "error",
        )
        with errors_of_isolated_models(), sums_in_order(device_of(inputs)):
            found: tuple[dict[str, Tensor], Tensor] = per_example(
                values, inputs, targets, weights, zeros
            )
        return found

    def choose_rows(
        self,
        inputs: Inputs,
        targets: Tensor,
        gradients: Sequence[PerExampleGradient],
        *,
        each: bool,
    ) -> int:
        """Return the rows of a pass, by the bytes that one over two of these examples keeps alive.

        gradients: empty ones. each: whether passes are those of `run_each`.
        """
        sizes = [parameter.numel() for parameter in self.trained.values()]
        if each:
            example = 16 * sum(sizes) + 64 * sum(one[0].numel() for one in tensors_of(inputs))
            return max(1, _PASS_BYTES // example)
        probe, pair = 2, slice(2)
        kept = 0

        def count(tensor: Tensor) -> Tensor:
            nonlocal kept
            if tensor.shape[:1] == (probe,):
                kept += tensor.numel() * tensor.element_size()
            return tensor

        collect = collector(gradients)

        def watch(layer: Layer, call: LayerCall) -> None:
            nonlocal kept
            if layer.fallback:  # torch.func does not run under saved-tensor hooks
                kept += probe * 8 * sum(sizes[slot] for slot in layer.parameter_indices.values())
            else:
                collect(layer, call)

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            self.run(take(inputs, pair), targets[pair], self.values(), watch)
        kept += sum(gradient.nbytes() for gradient in gradients)
        return max(1, _PASS_BYTES * probe // max(1, 2 * kept))

    # --- how the model must be run

    def invented(self, inputs: Inputs, targets: Tensor, count: int) -> tuple[Inputs, Tensor]:
        """Return `count` examples of the shapes and types of these, without private records.

        They are screened ones if there are any, since a custom loss may not accept others.
        """
        if self.screened is not None:
            known, wanted = self.screened
            alike = [t.shape[1:] for t in tensors_of(known)] == [
                t.shape[1:] for t in tensors_of(inputs)
            ]
            if alike and rows_of(known) >= min(count, NUM_EXAMPLES):
                some = slice(count)
                return take(known, some), wanted[some]
        with preserve_random_state(device_of(inputs)):
            return make_synthetic_examples(self.model, inputs, targets, count)

    def find_fewest_rows(self, inputs: Inputs, targets: Tensor) -> None:
        """Let a pass of one record repeat it if the model needs two rows, as with `squeeze`."""

        def runs(rows: int) -> bool:
            with sums_in_order(device_of(inputs)):
                try:
                    self._losses(take(inputs, slice(rows)), targets[:rows])
                except Exception:  # any error of a user's module
                    return False
            return True

        self.fewest_rows = 2 if not runs(1) and runs(2) else 1

    def check_channels_last(self, inputs: Inputs, targets: Tensor) -> None:
        """Leave the format if the model does not run in it; `view` of dimensions may not."""
        if self.channels_last:
            try:
                self._losses(self.laid_out(take(inputs, slice(2))), targets[:2])
            except RuntimeError:
                self.channels_last = False

    def _losses(self, inputs: Inputs, targets: Tensor) -> Tensor:
        with torch.no_grad():
            return example_losses(self.model, self.objective, self.values(), inputs, targets)

    def run_lost_layer_alone(self, inputs: Inputs, targets: Tensor) -> tuple[str, str] | None:
        """Let the smallest module around a layer that hooks cannot follow run by torch.func.

        Returns:
            The names of both; None if there is none, or if the model fails otherwise.
        """
        if WHOLE in self.alone:
            return None
        few = take(inputs, slice(2)), targets[:2]
        self.find_shared_arguments(*few)
        self.find_draws(*few)
        try:
            self.run(*few, self.values(), lambda layer, call: None)
            return None
        except LayoutError as error:
            lost = error.layer
        except Exception:  # any error of a user's module
            return None
        if lost == WHOLE:
            return None
        self.alone.append(around := lost.rpartition(".")[0] or WHOLE)
        self._find_layers()
        return around, lost

    def prepare_for(self, inputs: Inputs, targets: Tensor, *, invented: bool = True) -> None:
        """Find the arguments that calls of layers share for records of this shape, once per shape.

        invented: whether the examples contain nothing private; if not, only their shapes and types
        are read. Raises UserError if examples of this shape do not run.
        """
        shapes = [tuple(each.shape[1:]) for each in (*tensors_of(inputs), targets)]
        found = self.known_shapes.get(str(shapes))
        if found is None:
            some = (inputs, targets) if invented else self.invented(inputs, targets, 1)
            if not self.find_shared_arguments(*some):
                raise UserError(
                    "the model must run on two and on three copies of an example, got an error "
                    f"for inputs and targets of shapes {shapes}: give validate() such examples"
                )
            found = [(layer.shared, layer.lengths) for layer in self.layers]
            self.known_shapes[str(shapes)] = found
        for layer, (shared, lengths) in zip(self.layers, found, strict=True):
            layer.shared, layer.lengths = shared, lengths

    def find_shared_arguments(self, inputs: Inputs, targets: Tensor) -> bool:
        """Find the arguments of layers that belong to no example, and the lengths of outputs.

        Such arguments are a mask (T, T) or positions (T,); lengths are those of layers that treat
        positions separately. Passes of two and of three rows of a copy of the model tell them from
        records. The layers keep the results. Positions that are looked up once are shared if the
        losses are the same when every example has a copy; a model that adds a dimension before them
        does not accept copies.

        The examples are public or invented, and the first one is repeated. Return whether such
        passes run; if not, only lengths could decide.
        """
        if not any(map(is_watched, self.layers)):
            return True
        for layer in self.layers:
            layer.shared, layer.lengths = {}, {}
        device = device_of(inputs)

        def run(rows: int) -> tuple[list[Layer], Tensor]:
            some, labels = take(inputs, [0] * rows), targets[[0] * rows]
            # All passes use the same random numbers, and the caller's generator does not change.
            with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
                copied = _copy_of(self.model)
                twins = find_layers(copied, self.alone)
                with watched_calls(self.layers, twins, some):
                    losses = example_losses(copied, self.objective, {}, some, labels)
            return twins, losses

        try:
            (two, losses), (three, _) = run(2), run(3)
        except Exception:  # any error of a user's module; an executed pass reports it
            return False
        for layer, short, long in zip(self.layers, two, three, strict=True):
            layer.lengths = {
                call: (size, beginnings & long.lengths[call][1])
                for call, (size, beginnings) in short.lengths.items()
                if call in long.lengths
            }
            layer.shared = {
                key: {
                    place: shape
                    for place, shape in shapes.items()
                    if long.shared.get(key, {}).get(place) == shape
                    and (layer.fallback or len(shape) == 1)
                }
                for key, shapes in short.shared.items()
            }
        tables = [
            each for each in self.layers if each.rule is embedding and any(each.shared.values())
        ]
        if tables and not _same_losses(losses, lambda: run(2)[1]):
            for layer in tables:
                layer.shared = {}
        return True

    def find_draws(self, inputs: Inputs, targets: Tensor) -> Draws | None:
        """Find what a pass draws, and which layers draw in a call that runs again.

        A copy of the model runs passes of two and of three rows, of the first public or invented
        example that runs. The generators move. The layers keep the result. Return what is drawn;
        None if no such pass runs. Raises UserError if numbers come from a different generator than
        torch's global ones.
        """
        copied = _copy_of(self.model)
        twins = [layer for layer in find_layers(copied, self.alone) if layer.runs_again]

        def run(example: int, rows: int, inside: list[str]) -> None:
            with ExitStack() as hooks:
                for twin in twins:
                    name, module = twin.name, twin.module
                    before = module.register_forward_pre_hook(lambda *_, n=name: inside.append(n))
                    hooks.enter_context(before)
                    after = module.register_forward_hook(lambda *_: inside.pop() and None)
                    hooks.enter_context(after)
                some = take(inputs, [example] * rows), targets[[example] * rows]
                example_losses(copied, self.objective, {}, *some)

        for example in range(len(targets)):
            try:
                found = find_draws(partial(run, example), device_of(inputs))
                break
            except (UserError, torch.OutOfMemoryError):
                raise
            except Exception:  # any error of a user's module, as with non-finite numbers
                continue
        else:
            return None
        for layer in self.layers:
            layer.draws = layer.alone or layer.name in found.inside
        return found


def _copy_of(model: nn.Module) -> nn.Module:
    """Return a copy with the same parameters; the model itself if it has none, as with a lock."""
    try:
        return copy.deepcopy(model, {id(each): each for each in model.parameters()})
    except Exception:  # any error of a user's objects
        return model


def _same_losses(losses: Tensor, run: Callable[[], Tensor]) -> bool:
    try:
        return torch.allclose(losses, run(), rtol=1e-3, atol=1e-6, equal_nan=True)
    except Exception:  # for example shapes that do not fit
        return False
