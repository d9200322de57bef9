"""The call of a model that does not read one tensor of floats.

A script's loss may give its model several fields of a record, integers, or keyword arguments. The
call is recorded once, on invented examples, and is part of model.json, so that a release builds the
same call from the fields that a user gives. A description may come from third parties, so it is
checked field by field. torch is imported only where a model is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpdist.core.errors import UserError
from dpdist.core.fields import describe_input_fields

if TYPE_CHECKING:
    from torch import Tensor, nn

_FLOATS = ("float64", "float32", "float16", "bfloat16")
_TYPES = (*_FLOATS, "int64", "int32", "int16", "uint8", "int8", "bool")
_MAX_VALUES, _MAX_DEPTH = 2**28, 4  # of one record; of the call


@dataclass(frozen=True)
class Signature:
    """The fields of a record, and the call of the model with them.

    fields: by name, shape without the batch and type of numbers. call: `{"args": [...],
    "kwargs": {...}}`, in which a string names a field; dicts, lists and numbers are values.
    """

    fields: Mapping[str, tuple[tuple[int, ...], str]]
    call: Mapping[str, Any]

    @classmethod
    def parse(cls, said: Mapping[str, Any], context: str) -> Signature:
        """Return the signature of a `to_dict`. Raises UserError if it is damaged."""
        try:
            fields = {
                str(name): (tuple(each["shape"]), each["dtype"])
                for name, each in said["fields"].items()
            }
            sizes = [size for shape, _ in fields.values() for size in shape]
            good = all(type(size) is int and size >= 0 for size in sizes)
            good = good and sum(math.prod(shape) for shape, _ in fields.values()) <= _MAX_VALUES
            good = good and all(kind in _TYPES for _, kind in fields.values())
            good = good and isinstance(said["call"]["args"], list)
            good = good and isinstance(said["call"]["kwargs"], dict)
            found = cls(fields, {"args": said["call"]["args"], "kwargs": said["call"]["kwargs"]})
            used = _names(found.call)
            if good and set(said) == {"fields", "call"} and set(used) == set(fields):
                return found
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            pass
        raise UserError(f"{context}: damaged: signature must have fields and a call with them")

    @property
    def to_dict(self) -> dict[str, Any]:
        """Return the signature as JSON types."""
        fields = {n: {"shape": list(shape), "dtype": t} for n, (shape, t) in self.fields.items()}
        return {"fields": fields, "call": dict(self.call)}

    def __str__(self) -> str:
        """Return the fields in words."""
        return describe_input_fields(self.fields)

    def zeros(self, count: int) -> dict[str, Tensor]:
        """Return records of zeros."""
        import torch

        return {
            name: torch.zeros(count, *shape, dtype=getattr(torch, kind))
            for name, (shape, kind) in self.fields.items()
        }

    def batch(self, given: Any) -> dict[str, Tensor]:
        """Return the fields (B, ...) that a user gives as tensors of the model's types.

        Args:
            given: a dict of arrays by field; a tuple of them, in the order of the fields, or one
                array where there is one field.

        Raises:
            UserError: a field is missing or has a different shape.
        """
        import torch

        named = given
        if isinstance(given, tuple):
            named = {str(place): each for place, each in enumerate(given)}
        elif not isinstance(given, Mapping):
            named = dict.fromkeys(list(self.fields)[:1], given)
        if lacking := [name for name in self.fields if name not in named]:
            raise UserError(f"inputs: must be the fields {self}, lacks {', '.join(lacking)}")
        found = {}
        for name, (shape, kind) in self.fields.items():
            tensor = torch.as_tensor(named[name]).to(getattr(torch, kind))
            if tensor.shape[1:] != shape:
                raise UserError(
                    f"inputs.{name}: must have shape (records, {', '.join(map(str, shape))}), got "
                    f"{tuple(tensor.shape)}"
                )
            found[name] = tensor
        if len({len(each) for each in found.values()}) > 1:
            raise UserError("inputs: must have the same number of records in each field")
        return found

    def outputs(self, module: nn.Module, fields: Mapping[str, Tensor]) -> Any:
        """Return the module's outputs for these fields (B, ...)."""
        args, kwargs = (_filled(self.call[part], fields) for part in ("args", "kwargs"))
        return plain_outputs(module(*args, **kwargs))


@contextmanager
def naming_inputs(key: str) -> Iterator[None]:
    """Raise UserError with the key if the model fails on the inputs that a user gives.

    The text of the model's own error is left out, as it may quote a record.
    """
    import torch

    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UserError(
            f"{key}: must be inputs that the model takes, it raised {type(error).__name__} on "
            "them; give the fields, shapes and types of the training, and only categories that the "
            "model has"
        ) from None


def plain_outputs(outputs: Any) -> Any:
    """Return the logits of outputs of `transformers`; other outputs as they are."""
    return getattr(outputs, "logits", outputs)


def record_call(
    model: nn.Module, run: Callable[[], Any], fields: Mapping[str, Tensor]
) -> tuple[Signature, Any] | None:
    """Return how `run` calls a model with these fields, and the model's outputs.

    None unless it calls the model once, with whole fields and Python numbers.
    """
    calls: list[tuple[Any, Any, Any]] = []
    hook = model.register_forward_hook(
        lambda module, args, kwargs, outputs: calls.append((args, kwargs, outputs)),
        with_kwargs=True,
    )
    try:
        run()
    except Exception:  # the checks of the loss report it
        return None
    finally:
        hook.remove()
    if len(calls) != 1:
        return None
    args, kwargs, outputs = calls[0]
    used: dict[str, tuple[tuple[int, ...], str]] = {}
    try:
        call = {"args": _told(list(args), fields, used), "kwargs": _told(kwargs, fields, used)}
    except LookupError:
        return None
    return _read_alone(model, Signature(used, call), fields), plain_outputs(outputs)


def _read_alone(model: nn.Module, found: Signature, fields: Mapping[str, Tensor]) -> Signature:
    """Return the signature without fields of a dict that change no output, such as targets."""
    import torch

    def outputs(signature: Signature) -> Any:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            return signature.outputs(model, fields)

    for place, part in enumerate(found.call["args"]):
        for name in part if isinstance(part, Mapping) else ():
            args = list(found.call["args"])
            args[place] = {key: each for key, each in args[place].items() if key != name}
            call = {**found.call, "args": args}
            left = {key: found.fields[key] for key in dict.fromkeys(_names(call))}
            fewer = Signature(left, call)
            try:
                before, after = outputs(found), outputs(fewer)
            except Exception:  # the model needs this field
                continue
            if left and isinstance(before, torch.Tensor) and torch.equal(before, after):
                found = fewer
    return found


def _told(part: Any, fields: Mapping[str, Any], used: dict[str, Any]) -> Any:
    """Return a part of a call with names instead of tensors, and add these fields to `used`."""
    if isinstance(part, Mapping) and all(isinstance(key, str) for key in part):
        return {key: _told(each, fields, used) for key, each in part.items()}
    if type(part) in (list, tuple):
        return [_told(each, fields, used) for each in part]
    if isinstance(part, bool | int | float | None):
        return part
    for name, tensor in fields.items():
        if part is tensor:
            used[name] = tuple(tensor.shape[1:]), str(tensor.dtype).removeprefix("torch.")
            return name
    raise LookupError(part)


def _filled(part: Any, fields: Mapping[str, Tensor]) -> Any:
    if isinstance(part, str):
        return fields[part]
    if isinstance(part, Mapping):
        return {key: _filled(each, fields) for key, each in part.items()}
    if not isinstance(part, list):
        return part
    return tuple(_filled(each, fields) for each in part)


def _names(part: Any, depth: int = 0) -> list[str]:
    """Return the names of fields in a call. Raises ValueError for values of other types."""
    if isinstance(part, str):
        return [part]
    if isinstance(part, bool | int | float | None):
        return []
    if depth > _MAX_DEPTH or not isinstance(part, Mapping | list):
        raise ValueError(part)
    inner = part.values() if isinstance(part, Mapping) else part
    return [name for each in inner for name in _names(each, depth + 1)]
