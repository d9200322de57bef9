"""Build a module from a model's description, and save and load it as safetensors and JSON."""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dpdist.core.errors import UserError
from dpdist.core.files import (
    check_regular_file,
    error_text,
    read_bytes,
    write_atomic,
    write_json,
)
from dpdist.models.factory_code import (
    FactoryCode,
    is_covered_module,
    record_digests,
    source_digests,
)
from dpdist.models.noise import attach_block_noise, attach_zero_noise, drop_noise
from dpdist.models.outputs import NextTokenLogits, ViewAverage, check_views
from dpdist.models.signature import Signature
from dpdist.models.spec import (
    CLASSIFIER,
    DENOISER,
    ModelSpec,
    check_name,
    check_trusted,
    import_factory,
    is_base_model,
    load_base_weights,
    named_networks,
    read_factory_code,
    read_spec,
)
from dpdist.models.zoo import NormalizedNetwork

_GLOBAL_GENERATOR_LOCK = threading.Lock()
_BUILDING = threading.local()  # the name of the model that this thread makes


def build_model(spec: ModelSpec) -> nn.Module:
    """The freshly initialized module: float32 inputs (B, *input_shape) in [0, 1] to logits (B,
    classes).

    With a frozen part it is Sequential(denoiser, classifier), that part without gradients. Raises
    UserError when the factory is unknown, fails, or does not give such a module.
    """
    if spec.classifier is not None and spec.denoiser is not None:
        raise UserError(
            "model: a frozen denoiser and a frozen classifier: nothing is left to train"
        )
    network: nn.Module
    if spec.classifier is not None:
        if spec.mean or spec.std:
            raise UserError(
                "model.mean, model.std: a denoiser works on [0, 1]; normalization belongs to its "
                "classifier"
            )
        behind = build_model(spec.classifier).requires_grad_(False)
        denoiser = _build_network(spec)
        check_denoiser(denoiser, spec)
        network = _sequence(denoiser, behind)
    elif spec.denoiser is not None:
        before = build_model(spec.denoiser).requires_grad_(False)
        check_denoiser(before, spec.denoiser)
        network = _sequence(before, _build_network(spec))
    else:
        network = _build_network(spec)
    if spec.hidden_noise:
        attach_zero_noise(network, tuple(spec.input_shape))
    if spec.block_noise is not None:
        attach_block_noise(network, spec.block_noise, [0.0] * len(spec.block_noise.modules), 0.0)
    return network


def _sequence(denoiser: nn.Module, classifier: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict({DENOISER: denoiser, CLASSIFIER: classifier}))


def check_denoiser(module: nn.Module, spec: ModelSpec) -> None:
    """Raise UserError unless the module maps (B, *input_shape) to the same shape."""
    try:
        with torch.no_grad():
            shape = tuple(module(torch.zeros(1, *spec.input_shape)).shape[1:])
    except Exception as error:  # whatever a user's module does
        raise UserError(f"denoiser {spec.name!r} fails: {error_text(error)}") from error
    if shape != tuple(spec.input_shape):
        raise UserError(
            f"denoiser {spec.name!r} gives {shape} for inputs of shape {tuple(spec.input_shape)}: "
            "before a classifier it must keep the shape"
        )


class _Within(TorchFunctionMode):
    """Raise UserError before a model takes more memory than its file of weights could fill.

    most: bytes of the file, of which each number takes one at least.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most, self._made = most, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        if func is torch.empty:  # which torch makes parameters of
            self._made += func(*args, **{**named, "device": "meta"}).numel()
            if self._made > self._most:
                raise UserError(
                    f"model.options: {self._made:,} parameters, more than {self._most:,} bytes of "
                    "weights can hold"
                )
        return func(*args, **named)


def _factory(name: str) -> Callable[..., Any]:
    """`import_factory`, and its code as it is when it is imported. Raises UserError."""
    if name in named_networks():
        return import_factory(name)
    check_name(name)
    code = source_digests(name)
    factory = import_factory(name)
    code = code or source_digests(name)
    home = getattr(factory, "__module__", None)
    if code and home and home not in code and is_covered_module(name, home):
        raise UserError(
            f"model.name: must name the module that defines the factory, {home}, so that its code "
            f"belongs to the model; got {name!r}, which imports it by a name that is computed"
        )
    record_digests(name, code)
    return factory


def takes_shape(factory: Callable[..., Any], options: Mapping[str, Any]) -> bool:
    """Return whether a factory is called with input shape and number of classes before its options.

    It is, unless its signature says otherwise: a factory whose first two parameters are optional,
    or are not there, and of which the first does not speak of a shape, is called with the options
    alone, as one is whose first parameter an option names. So are most that were written for other
    projects, such as `def resnet(num_classes=10)`.
    """
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):  # of a builtin
        return True
    positional = [
        each
        for each in parameters
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    if any(each.kind == each.VAR_POSITIONAL for each in parameters):
        return True
    first_two = positional[:2]
    if len(first_two) < 2:
        return False
    first = first_two[0].name
    required = all(each.default is each.empty for each in first_two)
    return "shape" in first or (required and first not in options)


def class_parameter(factory: Callable[..., Any]) -> str | None:
    """Return the keyword by which a factory takes the number of classes; None where it has none."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return None
    return next((name for name in _CLASS_PARAMETERS if name in parameters), None)


_CLASS_PARAMETERS = ("num_classes", "n_classes", "classes", "nclasses", "num_labels")


def _build_network(spec: ModelSpec) -> nn.Module:
    factory = _factory(spec.name)
    try:
        shaped = spec.name in named_networks() or takes_shape(factory, spec.options)
        shape = (tuple(spec.input_shape), spec.classes) if shaped else ()
        network: nn.Module = factory(*shape, **spec.options)
    except UserError:
        raise
    except Exception as error:  # whatever a user's factory does
        reason = f"{type(error).__name__}: {error_text(error)}"
        raise UserError(
            f"model {spec.name!r} cannot be built: {reason}",
            see="" if spec.name in named_networks() else "how-to/certify-any-model.md#by-command",
        ) from error
    if not isinstance(network, nn.Module):
        raise UserError(
            f"model {spec.name!r}: the factory returned {type(network).__name__}, no Module"
        )
    if spec.following and spec.name not in named_networks():
        network = NextTokenLogits.around(network) or network
    if spec.mean or spec.std:
        network = normalized(network, spec.input_shape, spec.mean or (0.0,), spec.std or (1.0,))
    return network


def normalized(
    network: nn.Module, input_shape: Sequence[int], mean: Sequence[float], std: Sequence[float]
) -> nn.Module:
    """Return (x - mean) / std, then the network; one constant per channel, or one for all.

    Raises UserError for another number of constants, or an std that is not positive.
    """
    constants = []
    for which, values in (("mean", mean), ("std", std)):
        if len(values) not in (1, input_shape[0]):
            raise UserError(f"model.{which}: give 1 or {input_shape[0]} values, got {len(values)}")
        constants.append(torch.tensor(values).reshape(-1, *[1] * (len(input_shape) - 1)))
    if min(std) <= 0:
        raise UserError(f"model.std: must be > 0, got {min(std)}")
    return NormalizedNetwork(network, *constants)


def check_outputs(module: nn.Module, spec: ModelSpec, *, may_draw: bool = False) -> None:
    """Raise UserError unless the module maps (B, *input_shape) to (B, classes), or (B, T, classes)
    where it says what follows, without drawing.

    may_draw: whether it may draw, as in steps whose draws are keyed
    (`dpdist.gradients.random_passes`); an answer that draws cannot be given again.
    """
    signature = Signature.parse(spec.signature, spec.name) if spec.signature else None
    inputs = torch.zeros(2, *spec.input_shape)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        before = torch.get_rng_state()
        try:
            outputs = signature.outputs(module, signature.zeros(2)) if signature else module(inputs)
        except Exception as error:  # whatever a user's module does
            reason = f"{type(error).__name__}: {error_text(error)}"
            read = f"of shape {tuple(inputs.shape)}" if signature is None else str(signature)
            raise UserError(f"model {spec.name!r} fails on inputs {read}: {reason}") from error
        drew = not torch.equal(before, torch.get_rng_state())
    shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    wanted = (2, *(spec.input_shape if spec.following else ()), spec.classes)
    if shape != wanted:
        each = "class" if not spec.following else "token, at each position of data.text.length"
        raise UserError(
            f"model {spec.name!r} gives {shape} for 2 inputs, must be {wanted}: one logit for each "
            f"{each}"
        )
    if drew and not may_draw:
        raise UserError(
            f"model {spec.name!r} draws random numbers in its forward pass (dropout?), which only "
            "methods dp-sgd, dplis and input-noise without consistency key by record: take one of "
            "these, or set its probability to 0",
            see="explanation/gradients.md#random-numbers-in-a-pass",
        )


def initialize(spec: ModelSpec, seed: int) -> nn.Module:
    """`build_model` with initial weights that depend only on `seed`; the global generator is left
    alone. Raises UserError where the factory's own module comes here while it is imported."""
    if getattr(_BUILDING, "name", None) is not None:  # the lock would wait for itself, for ever
        raise UserError(
            f"a model is made while {_BUILDING.name!r} is imported: put the factory into a file of "
            "its own, or the script's lines behind if __name__ == '__main__'"
        )
    with _GLOBAL_GENERATOR_LOCK, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _BUILDING.name = spec.name
        try:
            return build_model(spec)
        finally:
            _BUILDING.name = None


def load_weights(module: nn.Module, folder: Path, part: str | None = None) -> None:
    """Copy the weights saved in `folder` into a module of the same shape (public pre-training), or
    those of a base into a model with adapters (`spec.py`).

    part: DENOISER or CLASSIFIER, when the module is that part of the saved model. Raises UserError
    when they do not fit.
    """
    if is_base_model(Path(folder)):
        load_base_weights(module, Path(folder))
        return
    path = Path(folder) / "model.safetensors"
    try:
        tensors = load_tensors(read_bytes(path))
        drop_noise(tensors, module)
        if part is not None:
            begin = f"{part}."
            tensors = {n.removeprefix(begin): v for n, v in tensors.items() if n.startswith(begin)}
        module.load_state_dict(tensors)
    except (RuntimeError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(f"{path}: does not fit the model: {error_text(error)}") from error


def save(module: nn.Module, spec: ModelSpec, folder: Path) -> None:
    """Write model.safetensors and model.json into `folder`, each whole or not at all."""
    if isinstance(module, ViewAverage):
        module = module.network  # the description says that it is averaged
    folder.mkdir(parents=True, exist_ok=True)
    # Copies, because tied weights share their memory, which safetensors refuses.
    tensors = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in module.state_dict().items()
    }
    write_atomic(folder / "model.safetensors", save_tensors(tensors))
    code = FactoryCode.from_factories(spec.user_factories).modules
    write_json(folder / "model.json", spec.to_dict | ({"code": dict(code)} if code else {}))


def load(folder: Path, *, trusted_factory: str | None = None) -> nn.Module:
    """The saved model in eval mode, with its average over views where it has one.

    A model.json may come from somebody else, so a factory outside the zoo is imported only when the
    caller names that same factory (from the own recipe) as trusted. Raises UserError otherwise.
    """
    network, spec = load_network(folder, trusted_factory=trusted_factory), read_spec(folder)
    if not spec.averages_views:
        return network
    return ViewAverage(network, spec.shifts, spec.denoised_shifts, spec.mirrored).eval()


def load_network(folder: Path, *, trusted_factory: str | None = None) -> nn.Module:
    """As `load`, without the average: what was trained, not what answers."""
    spec = read_spec(folder)
    check_trusted(spec, trusted_factory, folder)
    read_factory_code(folder).check(folder)
    check_views(spec)
    limit: AbstractContextManager[Any] = nullcontext()
    if not (spec.user_factories or is_base_model(Path(folder))):
        limit = _Within(check_regular_file(Path(folder) / "model.safetensors").stat().st_size)
    with limit:
        module = build_model(spec)
    load_weights(module, folder)
    return module.eval()
