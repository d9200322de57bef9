"""Apply noise to the outputs of modules, and split a network at its noise.

The noises of one draw are packed into one row with the input, so that counting, attacks and
certificates work for noise in several places as for noise in one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from dpdist.core.errors import UserError
from dpdist.models.outputs import device_of

_TINY = 1e-12  # a variance, below which an output is constant
Std = float | Tensor  # one number, or of the shape of one example's output


def _multiplicative(output: Tensor, normals: Tensor, std: Std, floor: float) -> Tensor:
    size = output.abs().clamp_min(floor)
    return output + std * torch.where(output < 0, -size, size) * normals


def _relative(output: Tensor, normals: Tensor, std: Std, floor: float) -> Tensor:
    """Return the output with noise relative to each record's own deviation, never the batch's."""
    own = output.flatten(1).var(1, correction=0).clamp_min(_TINY).sqrt()
    return output + std * own.view(-1, *[1] * (output.dim() - 1)) * normals


# Output h with noise n: h + std n; h + std sgn(h) max(|h|, floor) n, with floor 0 h (1 + std n);
# h + std s n, where s is the standard deviation over one record's h.
MODES: dict[str, Callable[[Tensor, Tensor, Std, float], Tensor]] = {
    "additive": lambda output, normals, std, floor: output + std * normals,
    "multiplicative": _multiplicative,
    "relative": _relative,
}


def perturb_output(
    output: Tensor, normals: Tensor, std: Std, mode: str, floor: float = 0.0
) -> Tensor:
    """Return outputs (B, ...) with noise in one of `MODES`; row b depends on row b only."""
    own = std.to(output) if isinstance(std, Tensor) else std
    return MODES[mode](output, normals, own, floor)


def require_modules(model: nn.Module, names: Sequence[str]) -> None:
    """Raise UserError unless the model has modules of these names."""
    known = {name for name, _ in model.named_modules()}
    for name in names:
        if name not in known:
            raise UserError(f"noise in modules: the model has no module named {name!r}")


@contextmanager
def override_outputs(
    model: nn.Module, overrides: Mapping[str, Callable[[Tensor], Tensor]]
) -> Iterator[None]:
    """Change the outputs of these modules inside the context, before any other hook sees them."""
    with ExitStack() as stack:
        for name, change in overrides.items():
            hook = model.get_submodule(name).register_forward_hook(
                lambda module, inputs, output, change=change: change(output), prepend=True
            )
            stack.callback(hook.remove)
        yield


def output_shapes(
    model: nn.Module, names: Sequence[str], input_shape: Sequence[int]
) -> list[tuple[int, ...]]:
    """Return the shape of one example's output of each module.

    Raises UserError unless each runs once.
    """
    require_modules(model, names)
    shapes: dict[str, list[tuple[int, ...]]] = {name: [] for name in names}

    def watch(name: str) -> Callable[[Tensor], Tensor]:
        def note(output: Tensor) -> Tensor:
            shapes[name].append(tuple(output.shape[1:]))
            return output

        return note

    with override_outputs(model, {name: watch(name) for name in names}), torch.inference_mode():
        model(torch.zeros(1, *input_shape, device=device_of(model)))
    for name, found in shapes.items():
        if len(found) != 1:
            raise UserError(f"module {name!r} ran {len(found)} times in a forward pass, not once")
    return [shapes[name][0] for name in names]


def split_at_module_noise(
    model: nn.Module,
    stds: Mapping[str, Std],
    mode: str,
    floor: float,
    input_std: float,
    input_shape: tuple[int, ...],
) -> tuple[nn.Module, nn.Module, Tensor]:
    """Return a `dpdist.randomness.noise_location.NoiseSplit` whose noise is one row.

    The row holds the noise of the input, then of each module in turn.
    """
    shapes = output_shapes(model, tuple(stds), input_shape)
    device = device_of(model)
    there = {n: std.to(device) if isinstance(std, Tensor) else std for n, std in stds.items()}
    rest = _FlatNoiseNetwork(model, input_shape, there, shapes, mode, floor)
    numbers, room = math.prod(input_shape), sum(math.prod(shape) for shape in shapes)
    std = torch.ones(numbers + room, device=device)
    std[:numbers] = input_std
    return _FlattenWithZeros(room), rest, std


class _FlattenWithZeros(nn.Module):
    """Inputs (B, ...) as rows, with zeros for the modules' normals."""

    def __init__(self, num_zeros: int) -> None:
        super().__init__()
        self.num_zeros = num_zeros

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x.flatten(1), x.new_zeros(len(x), self.num_zeros)], 1)


class _FlatNoiseNetwork(nn.Module):
    """The network as a function of rows that hold an input and the normals of its modules."""

    def __init__(
        self,
        model: nn.Module,
        input_shape: tuple[int, ...],
        stds: Mapping[str, Std],
        shapes: Sequence[tuple[int, ...]],
        mode: str,
        floor: float,
    ) -> None:
        super().__init__()
        self.model, self.stds, self.mode, self.floor = model, dict(stds), mode, floor
        self.shapes = [tuple(input_shape), *shapes]
        self.train(model.training)

    def forward(self, rows: Tensor) -> Tensor:
        sizes = [math.prod(shape) for shape in self.shapes]
        x, *normals = (
            part.reshape(-1, *shape)
            for part, shape in zip(rows.split(sizes, 1), self.shapes, strict=True)
        )

        def noise(own: Tensor, std: Std) -> Callable[[Tensor], Tensor]:
            return lambda output: perturb_output(output, own, std, self.mode, self.floor)

        changes = {
            name: noise(own, std)
            for (name, std), own in zip(self.stds.items(), normals, strict=True)
        }
        with override_outputs(self.model, changes):
            output: Tensor = self.model(x)
            return output
