"""State of a script's own objects: kept in checkpoints without pickle, and watched between steps.

A checkpoint contains only tensors. A `state_dict` of an optimizer or a scheduler also has numbers,
lists and dictionaries: these become one JSON text in a tensor of bytes. A script's settings at the
start of its run are kept there, too, since a different value would have no effect later.
"""

from __future__ import annotations

import copy
import json
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dpdist.core.errors import UserError
from dpdist.data.protocol import fields_of
from dpdist.models.signature import Signature, plain_outputs
from dpdist.privacy.ledger import Ledger
from dpdist.training.checkpoint import TrainState, load_latest, save

# --- state_dicts as tensors -------------------------------------------------------------------


def pack(name: str, value: Any) -> dict[str, Tensor]:
    """Return a state_dict as tensors by name: copies of its tensors, and a text with the rest.

    Raises UserError for values that cannot be written without pickle.
    """
    tensors: list[Tensor] = []
    text = json.dumps(_encoded(name, value, tensors), allow_nan=False).encode()
    found = {f"{name}.{place}": tensor for place, tensor in enumerate(tensors)}
    return {**found, f"{name}.json": torch.frombuffer(bytearray(text), dtype=torch.uint8)}


def unpack(name: str, tensors: Mapping[str, Tensor]) -> Any:
    """Invert `pack`. Raises KeyError if the checkpoint has nothing of that name."""
    tree = json.loads(bytes(tensors[f"{name}.json"].tolist()))
    return _decoded(tree, lambda place: tensors[f"{name}.{place}"])


def _encoded(name: str, value: Any, tensors: list[Tensor]) -> Any:
    if value is None or type(value) in (bool, int, str):
        return ["value", value]
    if isinstance(value, np.generic):
        return _encoded(name, value.item(), tensors)
    if isinstance(value, float):
        return ["float", value.hex()]
    if isinstance(value, Tensor):
        tensors.append(value.detach().cpu().clone(memory_format=torch.contiguous_format))
        return ["tensor", len(tensors) - 1]
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        tensors.append(torch.from_numpy(np.array(value)))
        return ["array", len(tensors) - 1]
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [_encoded(name, each, tensors) for each in value]]
    if isinstance(value, Mapping):
        pairs = [[_encoded(name, part, tensors) for part in pair] for pair in value.items()]
        return ["counter" if isinstance(value, Counter) else "dict", pairs]
    raise UserError(
        f"state: {name}.state_dict() contains {type(value).__name__}, which no checkpoint can "
        "keep: it must consist of numbers, texts, lists, dictionaries and tensors"
    )


def _decoded(tree: Any, tensor: Any) -> Any:
    kind, value = tree
    if kind == "value":
        return value
    if kind == "float":
        return float.fromhex(value)
    if kind in ("tensor", "array"):
        found = tensor(value)
        return found if kind == "tensor" else found.numpy()
    if kind in ("list", "tuple"):
        found = [_decoded(each, tensor) for each in value]
        return found if kind == "list" else tuple(found)
    made = {_decoded(key, tensor): _decoded(each, tensor) for key, each in value}
    return Counter(made) if kind == "counter" else made


# --- settings at the start of a run ------------------------------------------------------------


_MOST_CHOSEN = 2**32  # a smaller seed was chosen by the script; torch draws its own up to 2**64
_OF_STEPS = {  # of a scheduler's state_dict: changed by its steps, or by the learning rate
    "base_lrs", "last_epoch", "verbose", "_step_count", "_last_lr", "_is_initial",
    "_get_lr_called_within_step",
}  # fmt: skip
_SHOWN = 3  # differences in one line


def given_settings(model: nn.Module, optimizer: Optimizer, state: Sequence[Any]) -> dict[str, Any]:
    """Return the settings that a script gave to its training, by key, as `pack` can keep them.

    Args:
        model: its torch layers are listed with their settings.
        optimizer: its current settings.
        state: objects of the checkpoint. The settings of a scheduler that took no step yet; of one
            that took steps, the settings of the optimizer that it changes are left out.

    Returns:
        Plain values by key: "optimizer.lr", "state[0].gamma", "model.0", "seed" if the script chose
        one, ...
    """
    free, found = set[str](), dict[str, Any]()
    for place, each in enumerate(state):
        if not isinstance(each, LRScheduler):
            continue
        # An object that was used before, as in a notebook.
        if getattr(each, "last_epoch", 0) > 0:
            free |= _set_by((each,))
            continue
        told = _without_steps(each.state_dict())
        found |= {f"state[{place}].{name.lstrip('_')}": value for name, value in told.items()}
    groups = optimizer.param_groups
    for place, group in enumerate(groups):
        at = "optimizer" if len(groups) == 1 else f"optimizer.param_groups[{place}]"
        plain = {n: v for n, v in group.items() if n != "params" and n not in free}
        found |= {f"{at}.{name}": _number(value) for name, value in plain.items()}
        found[f"{at}.params"] = f"{len(group['params']):,} tensors"
    found |= {f"model.{name}" if name else "model": told for name, told in _layers(model).items()}
    for name, parameter in model.named_parameters():
        found[f"model.{name}"] = "trained" if parameter.requires_grad else "frozen"
    seed = torch.initial_seed()
    return {**found, **({"seed": seed} if seed < _MOST_CHOSEN else {})}


def setting_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return each difference as "KEY: must be X as when the run began, got Y".

    Keys of only one side are left out: a different version of torch may have more settings.
    """
    return [
        f"{key}: must be {value} as when the run began, got {now[key]}"
        for key, value in before.items()
        if key in now and now[key] != value
    ]


def refuse_differences(differences: Sequence[str], folder: Path) -> None:
    """Raise UserError, in one line, for differences from the settings at the start of a run.

    differences: from `setting_differences`. folder: of the run.
    """
    if not differences:
        return
    more = len(differences) - _SHOWN
    said = [*differences[:_SHOWN], *([f"and {more:,} more"] if more > 0 else [])]
    raise UserError(
        f"{'; '.join(said)}; give it as it was then; for a new run, build the model again and give "
        f"another folder than {folder}",
        see="how-to/own-loop.md#after-a-crash",
    )


def _layers(model: nn.Module) -> dict[str, str]:
    """Return the class of each module, by name; for torch's own with their settings."""
    return {
        name: f"{type(module).__name__}({module.extra_repr()})"
        if type(module).__module__.startswith("torch.nn.modules.")
        else type(module).__name__
        for name, module in model.named_modules()
    }


def _without_steps(value: Any) -> Any:
    """Return the settings of a scheduler, and of those in it, without what its steps change."""
    if isinstance(value, dict):
        return {n: _without_steps(each) for n, each in value.items() if n not in _OF_STEPS}
    if isinstance(value, list):
        return [_without_steps(each) for each in value]
    return value.tolist() if isinstance(value, Tensor | np.ndarray) else value


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) and value.numel() == 1 else value


def _set_by(schedulers: Sequence[LRScheduler]) -> set[str]:
    """Return the names of the optimizer's settings that these schedulers change."""
    inner = [each for whole in schedulers for each in getattr(whole, "_schedulers", ())]
    cycles = any(getattr(each, "cycle_momentum", False) for each in (*schedulers, *inner))
    return {"lr", "momentum", "betas"} if cycles else {"lr"}


# --- what changed outside of a step -----------------------------------------------------------


class Watch:
    """Detect changes of parameters, buffers and the optimizer between two steps.

    Values are compared: a write through `.data` increases no version counter.

    Args:
        model: its tensors are watched.
        optimizer: its state and settings are watched.
        state: objects of the checkpoint, among them schedulers of this optimizer. Settings by these
            are not a change if a copy without access to the training sets the same after as many
            steps.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, state: Sequence[Any]) -> None:
        self._model, self._optimizer = model, optimizer
        self._schedules = _Schedules(optimizer, state)
        self._kept: dict[str, Any] = {}
        self.remember()

    @torch.no_grad()
    def remember(self) -> None:
        """Save the present state as the one after the last step."""
        kept = {}
        for name, value in self._now():
            old = self._kept.get(name)
            if not isinstance(value, Tensor):
                kept[name] = value
            elif isinstance(old, Tensor) and (old.shape, old.dtype) == (value.shape, value.dtype):
                kept[name] = old.copy_(value)  # in its memory
            else:
                kept[name] = value.clone()
        self._kept = kept
        self._schedules.remember()

    @torch.no_grad()
    def changed(self) -> list[str]:
        """Return descriptions of the differences since then."""
        kept, now = self._kept, dict(self._now())
        names = kept.keys() ^ now.keys()
        names |= {name for name in kept.keys() & now.keys() if not _equal(kept[name], now[name])}
        found = {name.partition("/")[0] for name in names}
        if not self._schedules.explain(settings_of(self._optimizer)):
            found.add("optimizer settings")
        return sorted(found)

    def _now(self) -> Iterable[tuple[str, Any]]:
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            yield f"parameters/{name}", tensor
        held = (each for group in self._optimizer.param_groups for each in group["params"])
        for place, parameter in enumerate(held):
            for name, value in self._optimizer.state.get(parameter, {}).items():
                yield f"optimizer state/{place}.{name}", value


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return both and one.shape == other.shape and torch.equal(one, other.to(one))
    return bool(one == other)


def settings_of(optimizer: Any) -> list[dict[str, Any]]:
    """Return an optimizer's settings as plain values, by group."""
    return [
        {name: _number(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


class _Schedules:
    """Replay an optimizer's schedulers on copies, with a stand-in that has only its settings."""

    def __init__(self, optimizer: Optimizer, state: Sequence[Any]) -> None:
        self._optimizer = optimizer
        schedulers = (each for each in state if isinstance(each, LRScheduler))
        self._given = [each for each in schedulers if each.optimizer is optimizer]
        self._copies: list[LRScheduler] = []
        self._stand_in = types.SimpleNamespace(param_groups=[], step=_counted, _opt_called=True)
        self._follows = False  # whether the copies took as many steps as the schedulers

    def remember(self) -> None:
        """Copy the settings after the last step."""
        groups = [
            {name: copy.deepcopy(each) for name, each in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]
        self._stand_in.param_groups[:] = [{"params": [], **group} for group in groups]
        if not self._follows:
            with suppress(Exception):  # it cannot be copied: its rates are not explained
                memo = {id(self._optimizer): self._stand_in}
                self._copies = copy.deepcopy(self._given, memo)
        self._follows = len(self._copies) == len(self._given)

    def explain(self, settings: list[dict[str, Any]]) -> bool:
        """Return whether settings follow from the schedulers' step numbers."""
        try:
            for scheduler, copied in zip(self._given, self._copies, strict=True):
                for _ in range(_epoch(scheduler) - _epoch(copied)):
                    copied.step()
        except Exception:  # it needs more than its step number
            self._follows = False
        same = settings_of(self._stand_in) == settings
        self._follows = self._follows and same
        return same


def _epoch(scheduler: Any) -> int:
    """Return the number of a scheduler's steps; for a chain, that of its first one."""
    if hasattr(scheduler, "last_epoch"):
        return int(scheduler.last_epoch)
    return _epoch(scheduler._schedulers[0])


def _counted() -> None:
    """Stand in for an optimizer's step."""


vars(_counted)["_wrapped_by_lr_sched"] = True  # else a scheduler warns


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers after the block: what a forward pass writes there is private."""
    before = [
        (own, [(name, each, None if each is None else each.clone()) for name, each in own.items()])
        for own in (module._buffers for module in model.modules())
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for owner, kept in before:
                owner.clear()  # also removes those that the pass registered
                for name, buffer, value in kept:
                    owner[name] = buffer if value is None or buffer is None else buffer.copy_(value)


@contextmanager
def kept_modes(model: nn.Module) -> Iterator[None]:
    """Restore the mode of each module of a model after the block."""
    before = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode within the block."""
    with kept_modes(model):
        model.eval()
        yield


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (bool, int, float, str, type(None))


def outputs_of(model: nn.Module, batch: Any, signature: Mapping[str, Any]) -> Any:
    """Return a model's outputs for a batch of records.

    signature: how it is called with several fields (`ModelSpec.signature`); empty: with the batch.
    """
    if not signature:
        return plain_outputs(model(batch))
    return Signature.parse(signature, "model").outputs(model, fields_of(batch))


def form_of(model: nn.Module) -> dict[str, Any]:
    """Return everything that a forward pass depends on, by name, except the values of tensors.

    These are layers, their functions, hooks, modes and plain attributes (a dropout's probability),
    and which tensors are trained. Checks on invented examples are valid as long as none of it
    changes. Attributes whose names begin with an underscore are left out.
    """
    found: dict[str, Any] = {
        f"{name[1:]} of all modules": tuple(getattr(nn.modules.module, f"_global{name}").values())
        for name in _HOOKS
    }
    for name, module in model.named_modules():
        at, kind = f"{name}." if name else "", type(module)
        found[name or "the top"] = kind, kind.forward, kind.__call__
        found[f"{at}training"] = module.training
        for hooks in _HOOKS:
            found[f"{at}{hooks[1:]}"] = tuple(getattr(module, hooks).values())
        for key, value in vars(module).items():
            if key.startswith("_") or key == "training":
                continue
            if callable(value) or isinstance(value, _PLAIN):
                found[f"{at}{key}"] = repr(value) if isinstance(value, _PLAIN) else value
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            found[f"{at}{key}"] = None
            if tensor is not None:
                learned = tensor.requires_grad and id(tensor)
                found[f"{at}{key}"] = tensor.shape, tensor.dtype, tensor.device, learned
    return found


# --- a trained module, built again ------------------------------------------------------------


_PROBED = 3  # invented inputs whose outputs are saved
_CLOSE = 1e-4  # tolerance for outputs on a different machine, relative to the largest


def module_record(
    model: nn.Module,
    inputs: Any,
    answering: nn.Module | None = None,
    text: Any = None,
    signature: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the description by which a factory's module is recognized, for `pack`.

    Args:
        model: as it was trained.
        inputs: (B, ...) invented inputs.
        answering: the module that answers them; default: the model.
        text: the tokenizer of its documents (`Records.tokenization`).
        signature: how the model is called with several inputs (`dpdist.models.signature`).

    Returns:
        Classes and settings of its layers, and its outputs in evaluation mode for some of the
        inputs; None if it fails on them.
    """
    found: dict[str, Any] = {"layers": _layers(model)}
    if answering is not None:
        found |= {"following": True, "text": text}
    rows: Any = None
    if signature:
        rows = {name: each[-_PROBED:].cpu() for name, each in fields_of(inputs).items()}
    elif isinstance(inputs, Tensor):
        rows = inputs[-_PROBED:].float().cpu()
    if rows is not None:
        copied = copy.deepcopy(answering or model).cpu()
        found |= {"inputs": rows, "outputs": _outputs(copied, rows, signature)}
    return found


def read_module_record(checkpoints: Path) -> dict[str, Any] | None:
    """Return the `module_record` of a run; None if its checkpoints have none."""
    state = load_latest(checkpoints)
    if state is None or "module.json" not in state.slots:
        return None
    record: dict[str, Any] = unpack("module", state.slots)
    return record


def keep_module_record(source: Path, target: Path, ledger: Ledger) -> None:
    """Copy only the `module_record` of a folder of checkpoints, if it has one."""
    state = load_latest(source)
    if state is None or "module.json" not in state.slots:
        return
    slots = {name: each for name, each in state.slots.items() if name.startswith("module.")}
    save(target, TrainState(state.step, torch.zeros(0), slots), ledger.anchor)


def check_built_again(
    model: nn.Module,
    file: Path,
    checkpoints: Path,
    factory: str,
    answering: nn.Module | None = None,
    signature: Mapping[str, Any] | None = None,
) -> None:
    """Load a script's trained weights into a factory's module, and check that it is the same.

    Args:
        model: built by the factory.
        file: the run's weights, in safetensors.
        checkpoints: of the run; the last one has the `module_record`.
        factory: name of the factory, for error messages.
        answering: the module that answers rows of inputs by the model; default: the model.
        signature: how it is called with several inputs.

    Raises:
        UserError: tensors, layers or outputs differ from those of the run.
    """
    wanted, weights = read_module_record(checkpoints), load_file(file)
    if wanted is None:
        raise UserError(
            f"factory: must be given by the script of this run, got {factory}: {checkpoints} does "
            "not describe its module"
        )
    before, now = _told(wanted["layers"], weights), _told(_layers(model), model.state_dict())
    for name in (*before, *now):
        if before.get(name) != now.get(name):
            wanted_here, got = before.get(name, "left out"), now.get(name, "nothing of that name")
            raise _another_module(factory, f"{name} must be {wanted_here}, got {got}")
    model.load_state_dict(dict(weights))
    outputs = wanted.get("outputs")
    if outputs is None:
        raise UserError(
            "factory: must build a module that is called once, with fields of a record, and "
            "returns a tensor, or a causal model of transformers"
        )
    found = _outputs(answering or model, wanted["inputs"], signature)
    atol = _CLOSE * max(1.0, float(outputs.abs().max()))
    same = found is not None and found.shape == outputs.shape
    if found is None or not same or not torch.allclose(found, outputs, rtol=_CLOSE, atol=atol):
        raise _another_module(factory, "with the trained weights it answers differently")


def _told(layers: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return descriptions of layers and tensors, by name."""
    found = {name or "the top": told for name, told in layers.items()}
    return found | {name: f"{tuple(t.shape)} {t.dtype}" for name, t in tensors.items()}


def _another_module(factory: str, why: str) -> UserError:
    return UserError(
        f"factory: must build the module that was trained, got another from {factory}: {why}; let "
        "it return that class, with the same arguments",
        see="how-to/releases.md#a-model-of-a-script",
    )


@torch.no_grad()
def _outputs(model: nn.Module, inputs: Any, signature: Mapping[str, Any] | None) -> Tensor | None:
    """Return a module's outputs in evaluation mode; None if they are not a tensor of numbers."""
    try:
        with torch.random.fork_rng(devices=[]):
            if signature:
                found = Signature.parse(signature, "the model").outputs(model.eval(), inputs)
            else:
                found = model.eval()(inputs)
    except Exception:  # it needs other inputs: a release could not call it either
        return None
    return found.float() if isinstance(found, Tensor) else None
