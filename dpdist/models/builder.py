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
    """Return a new module: float32 inputs (B, *input_shape) in [0, 1] to logits (B, classes).

    With a frozen part it is Sequential(denoiser, classifier), and that part has no gradients.
    Raises UserError if the factory is unknown, fails, or returns no such module.
    """
    if spec.classifier is not None and spec.denoiser is not None:
        raise UserError(
            "model: must have one of a frozen denoiser and a frozen classifier, got both; leave "
            "out one"
        )
    network: nn.Module
    if spec.classifier is not None:
        if spec.mean or spec.std:
            raise UserError(
                "model.mean, model.std: must be left out of a denoiser, which reads [0, 1]; give "
                "them to its classifier"
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
    except Exception as error:  # any error of a user's module
        raise UserError(f"denoiser {spec.name!r} fails: {error_text(error)}") from error
    if shape != tuple(spec.input_shape):
        raise UserError(
            f"denoiser {spec.name!r}: must keep the shape {tuple(spec.input_shape)} of its inputs, "
            f"got {shape}"
        )


class _MemoryLimit(TorchFunctionMode):
    """Raise UserError before a model takes more memory than its file of weights could fill.

    most: bytes of the file, at least one for each parameter.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most, self._made = most, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        if func is torch.empty:  # by which torch allocates parameters
            self._made += func(*args, **{**named, "device": "meta"}).numel()
            if self._made > self._most:
                raise UserError(
                    f"model.options: {self._made:,} parameters, more than {self._most:,} bytes of "
                    "weights can hold"
                )
        return func(*args, **named)


def _factory(name: str) -> Callable[..., Any]:
    """Return the factory as `import_factory`, and record the digest of the imported code."""
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
            f"is part of the model, got {name!r}, which imports it by a computed name"
        )
    record_digests(name, code)
    return factory


def takes_shape(factory: Callable[..., Any], options: Mapping[str, Any]) -> bool:
    """Return whether a factory is called with input shape and number of classes before its options.

    It is called only with its options if it has fewer than two positional parameters, or if the
    first two are optional and the first is not named after a shape, as in most other projects
    (`def resnet(num_classes=10)`), or if an option names the first one.
    """
    parameters = _parameters(factory)
    if parameters is None or any(each.kind == each.VAR_POSITIONAL for each in parameters.values()):
        return True
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    first_two = [each for each in parameters.values() if each.kind in kinds][:2]
    if len(first_two) < 2:
        return False
    first = first_two[0].name
    required = all(each.default is each.empty for each in first_two)
    return "shape" in first or (required and first not in options)


def class_parameter(factory: Callable[..., Any]) -> str | None:
    """Return a factory's keyword for the number of classes, or None."""
    known = _parameters(factory) or {}
    return next((name for name in _CLASS_PARAMETERS if name in known), None)


_CLASS_PARAMETERS = ("num_classes", "n_classes", "classes", "nclasses", "num_labels")


def _parameters(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):  # of a builtin
        return None


def _build_network(spec: ModelSpec) -> nn.Module:
    factory = _factory(spec.name)
    try:
        shaped = spec.name in named_networks() or takes_shape(factory, spec.options)
        shape = (tuple(spec.input_shape), spec.classes) if shaped else ()
        network: nn.Module = factory(*shape, **spec.options)
    except UserError:
        raise
    except Exception as error:  # any error of a user's factory
        reason = f"{type(error).__name__}: {error_text(error)}"
        raise UserError(
            f"model {spec.name!r} cannot be built: {reason}",
            see="" if spec.name in named_networks() else "how-to/certify-any-model.md#by-command",
        ) from error
    if not isinstance(network, nn.Module):
        raise UserError(
            f"model {spec.name!r}: the factory must return a torch module, got "
            f"{type(network).__name__}"
        )
    if spec.following and spec.name not in named_networks():
        network = NextTokenLogits.around(network) or network
    if spec.mean or spec.std:
        network = normalized(network, spec.input_shape, spec.mean or (0.0,), spec.std or (1.0,))
    return network


def normalized(
    network: nn.Module, input_shape: Sequence[int], mean: Sequence[float], std: Sequence[float]
) -> nn.Module:
    """Return a module of (x - mean) / std, then the network.

    mean, std: one constant per channel, or one for all. Raises UserError for other numbers of
    constants, or an std that is not positive.
    """
    constants = []
    for which, values in (("mean", mean), ("std", std)):
        if len(values) not in (1, input_shape[0]):
            raise UserError(
                f"model.{which}: must have 1 or {input_shape[0]} values, got {len(values)}"
            )
        constants.append(torch.tensor(values).reshape(-1, *[1] * (len(input_shape) - 1)))
    if min(std) <= 0:
        raise UserError(f"model.std: must be > 0, got {min(std)}")
    return NormalizedNetwork(network, *constants)


def check_outputs(module: nn.Module, spec: ModelSpec, *, may_draw: bool = False) -> None:
    """Raise UserError unless the module maps (B, *input_shape) to (B, classes).

    A model of next tokens returns (B, T, classes).

    may_draw: whether the forward pass may use random numbers, as in steps that seed them by key
    (`dpdist.gradients.random_passes`); a random output cannot be reproduced.
    """
    signature = Signature.parse(spec.signature, spec.name) if spec.signature else None
    inputs = torch.zeros(2, *spec.input_shape)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        before = torch.get_rng_state()
        try:
            outputs = signature.outputs(module, signature.zeros(2)) if signature else module(inputs)
        except Exception as error:  # any error of a user's module
            reason = f"{type(error).__name__}: {error_text(error)}"
            read = f"of shape {tuple(inputs.shape)}" if signature is None else str(signature)
            raise UserError(f"model {spec.name!r} fails on inputs {read}: {reason}") from error
        drew = not torch.equal(before, torch.get_rng_state())
    shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    wanted = (2, *(spec.input_shape if spec.following else ()), spec.classes)
    if shape != wanted:
        each = "class" if not spec.following else "token, at each position of data.text.length"
        raise UserError(
            f"model {spec.name!r}: must return {wanted} for 2 inputs, one logit for each {each}, "
            f"got {shape}"
        )
    if drew and not may_draw:
        raise UserError(
            f"model {spec.name!r} uses random numbers in its forward pass (dropout?), which only "
            "methods dp-sgd, dplis and input-noise without consistency support; take one of these, "
            "or set its probability to 0",
            see="explanation/gradients.md#random-numbers-in-a-pass",
        )


def initialize(spec: ModelSpec, seed: int) -> nn.Module:
    """Return a new model whose initial weights depend only on `seed`.

    The global generator is restored. Raises UserError if the factory's module builds a model while
    it is imported.
    """
    if getattr(_BUILDING, "name", None) is not None:  # the lock would wait for itself forever
        raise UserError(
            f"a model is built while {_BUILDING.name!r} is imported: put the factory into a "
            "separate file, or the script's lines under if __name__ == '__main__'"
        )
    with _GLOBAL_GENERATOR_LOCK, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _BUILDING.name = spec.name
        try:
            return build_model(spec)
        finally:
            _BUILDING.name = None


def load_weights(module: nn.Module, folder: Path, part: str | None = None) -> None:
    """Copy the weights in `folder` into a module of the same architecture.

    A base's weights are copied into a model with adapters.

    part: DENOISER or CLASSIFIER, if the module is that part of the saved model. Raises UserError if
    they do not fit.
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
    """Write model.safetensors and model.json to `folder`, each atomically."""
    if isinstance(module, ViewAverage):
        module = module.network  # model.json describes the average
    folder.mkdir(parents=True, exist_ok=True)
    # Copies, because tied weights share memory, which safetensors does not support.
    tensors = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in module.state_dict().items()
    }
    write_atomic(folder / "model.safetensors", save_tensors(tensors))
    code = FactoryCode.from_factories(spec.user_factories).modules
    write_json(folder / "model.json", spec.to_dict | ({"code": dict(code)} if code else {}))


def load(folder: Path, *, trusted_factory: str | None = None) -> nn.Module:
    """Return the saved model in eval mode, with its average over views if it has one.

    A model.json may come from third parties, so a factory outside the zoo is imported only if the
    caller names it as trusted. Raises UserError otherwise.
    """
    network, spec = load_network(folder, trusted_factory=trusted_factory), read_spec(folder)
    if not spec.averages_views:
        return network
    return ViewAverage(network, spec.shifts, spec.denoised_shifts, spec.mirrored).eval()


def load_network(folder: Path, *, trusted_factory: str | None = None) -> nn.Module:
    """Return the trained model as `load`, without an average over views."""
    spec = read_spec(folder)
    check_trusted(spec, trusted_factory, folder)
    read_factory_code(folder).check(folder)
    check_views(spec)
    limit: AbstractContextManager[Any] = nullcontext()
    if not (spec.user_factories or is_base_model(Path(folder))):
        limit = _MemoryLimit(check_regular_file(Path(folder) / "model.safetensors").stat().st_size)
    with limit:
        module = build_model(spec)
    load_weights(module, folder)
    return module.eval()
