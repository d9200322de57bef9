"""A device without hardware: a backend of torch's (PrivateUse1) on the memory of this process.

For torch its tensors lie elsewhere: an operator that is given one of them and one of the CPU
raises, as on a GPU, `.numpy()` raises, and all that crosses over is counted. So a forgotten
`.to(device)` fails without a GPU. What it cannot show: kernels, speed, and what a GPU rounds.

Every operator comes to `_fallback`, which runs it on the CPU's view of the same memory. The two
views are made of one another through DLPack and `torch.frombuffer`, so that tensors on the device
are ordinary ones to autograd and torch.func, with storages that views share.
"""

from __future__ import annotations

import copy
import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils.dlpack import from_dlpack, to_dlpack

NAME = "simulated"
_EXTENSION = 12  # kDLExtDev of DLPack, which torch takes for PrivateUse1
# A GPU takes indices from the CPU, and brings them over; so it does a number.
_INDEXING = ("aten::index.Tensor", "aten::index_put", "aten::_index_put_impl_")


# The host waits for a number: a value, or how many there are.
_WAITING = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select")


@dataclass
class Crossings:
    """What crossed over: shapes to the device (`up`) and from it (`down`), and how often the host
    waited for a single number (`waits`)."""

    up: list[tuple[int, ...]] = field(default_factory=list)
    down: list[tuple[int, ...]] = field(default_factory=list)
    waits: int = 0


_counting: list[Crossings] = []


@contextmanager
def count_transfers() -> Iterator[Crossings]:
    """What crosses over within it."""
    crossings = Crossings()
    _counting.append(crossings)
    try:
        yield crossings
    finally:
        _counting.remove(crossings)


def simulated_device() -> torch.device:
    """The device."""
    _install()
    return torch.device(NAME, 0)


class _Module(backend_registration._DummyBackendModule):
    """What `torch.get_device_module` finds: the part of `torch.cuda` that is used."""

    free = 1 << 20

    def synchronize(self, device: Any = None) -> None: ...

    def get_device_name(self, device: Any = None) -> str:
        return "Simulated 1"

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return self.free, self.free

    def memory_allocated(self, device: Any = None) -> int:
        return 0

    def max_memory_allocated(self, device: Any = None) -> int:
        return 64 * 1024  # as if a pass over a trial batch took so much

    def reset_peak_memory_stats(self, device: Any = None) -> None: ...


@functools.cache
def _install() -> torch.library.Library:
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    library = torch.library.Library("_", "IMPL")
    library.fallback(_fallback, "PrivateUse1")
    for name, function in (
        ("convolution_overrideable", _convolution),
        ("convolution_backward_overrideable", _convolution_backward),
        ("_thnn_fused_lstm_cell", _lstm),
        ("_thnn_fused_lstm_cell_backward_impl", _lstm_backward),
        ("_thnn_fused_gru_cell", _gru),
        ("_thnn_fused_gru_cell_backward", _gru_backward),
    ):
        torch.library.impl(f"aten::{name}", "PrivateUse1")(function)
    for name in ("native_group_norm", "native_layer_norm"):  # kernels of their own, as on a GPU
        call = getattr(torch.ops.aten, name).default
        torch.library.impl(f"aten::{name}", "PrivateUse1")(functools.partial(_fallback, call))
    original = Tensor.__deepcopy__

    def deepcopy(self: Tensor, memo: dict[int, Any]) -> Tensor:
        if self.device.type != NAME or id(self) in memo:
            return original(self, memo)
        memo[id(self)] = made = self.detach().clone().requires_grad_(self.requires_grad)
        return made

    Tensor.__deepcopy__ = deepcopy  # type: ignore[method-assign]
    assert copy.deepcopy(torch.zeros(1, device=NAME)).device.type == NAME
    return library


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    name = op._schema.name + (f".{op._schema.overload_name}" if op._schema.overload_name else "")
    if name == "aten::_copy_from":
        return _copied(*args)
    back: dict[int, Tensor] = {}

    def host(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, Tensor):
            return value
        if value.device.type != NAME:
            if value.dim() and not name.startswith(_INDEXING):
                raise RuntimeError(f"tensors on {NAME} and on {value.device} meet in {name}")
            if value.dim():
                _note(lambda seen: seen.up.append(tuple(value.shape)))
            return value
        alias = _on_host(value)
        back[id(alias)] = value
        return alias

    device = kwargs.get("device")
    named = {key: _each(host, value) for key, value in kwargs.items()}
    found = op(*_each(host, _numbers_as_tensors(op, args)), **named)
    if name in _WAITING or (name.startswith(_INDEXING) and _masked(args[1])):
        _note(lambda seen: setattr(seen, "waits", seen.waits + 1))
    stays = device is not None and device.type != NAME

    def placed(value: Any) -> Any:
        if not isinstance(value, Tensor) or stays:
            return value
        own = back.get(id(value))
        if own is None:
            return _on_device(value)
        if own.shape != value.shape or own.stride() != value.stride():
            own.data = _on_device(value)  # an `out` that was resized
        return own

    return _each(placed, found)


def _each(function: Callable[[Any], Any], value: Any) -> Any:
    """The function of a value, or of each in a list or tuple."""
    if isinstance(value, list | tuple):
        return type(value)([_each(function, part) for part in value])
    return function(value)


def _numbers_as_tensors(op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """torch hands numbers over as they are, also where an operator takes a tensor."""
    wide = any(isinstance(value, Tensor) and value.is_floating_point() for value in args)
    return tuple(
        torch.tensor(value, dtype=torch.float64 if wide and isinstance(value, float) else None)
        if isinstance(value, bool | int | float) and "Tensor" in str(argument.type)
        else value
        for value, argument in zip(args, op._schema.arguments, strict=False)
    )


def _masked(indices: Any) -> bool:
    return any(index is not None and index.dtype == torch.bool for index in indices)


def _copied(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Between the two, and within the device."""
    ends = source.device.type, target.device.type
    if ends != (NAME, NAME):
        _note(lambda seen: (seen.down if ends[0] == NAME else seen.up).append(tuple(source.shape)))
    _on_host(target).copy_(_on_host(source))
    return target


def _convolution(*args: Any) -> Tensor:
    return _fallback(torch.ops.aten.convolution.default, *args)


def _convolution_backward(
    signal: Tensor, inputs: Tensor, weight: Tensor, *settings: Any
) -> tuple[Tensor | None, ...]:
    *geometry, wanted = settings
    bias = [signal.shape[1]]
    call = torch.ops.aten.convolution_backward.default
    return _fallback(call, signal, inputs, weight, bias, *geometry, wanted)


def _lstm(ih: Tensor, hh: Tensor, cx: Tensor, *bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Devices other than CPUs have cells of one kernel; these are of the device's own operators."""
    i, f, g, o = sum((ih, hh, *filter(lambda b: b is not None, bias))).chunk(4, 1)  # type: ignore[union-attr]
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def _lstm_backward(
    hy: Tensor | None, cy_signal: Tensor | None, cx: Tensor, cy: Tensor, kept: Tensor, bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    i, f, g, o = kept.chunk(4, 1)
    wide = cy.tanh()
    out = torch.zeros_like(cy) if hy is None else hy
    cell = out * o * (1 - wide * wide) + (0 if cy_signal is None else cy_signal)
    parts = (
        cell * g * i * (1 - i), cell * cx * f * (1 - f), cell * i * (1 - g * g),
        out * wide * o * (1 - o),
    )  # fmt: skip
    gates = torch.cat(parts, 1)
    return gates, cell * f, gates.sum(0)


def _gru(ih: Tensor, hh: Tensor, hx: Tensor, *bias: Tensor) -> tuple[Tensor, Tensor]:
    if bias and bias[0] is not None:
        ih, hh = ih + bias[0], hh + bias[1]
    (r, z, n), (hr, hz, hn) = ih.chunk(3, 1), hh.chunk(3, 1)
    r, z = (r + hr).sigmoid(), (z + hz).sigmoid()
    n = (n + r * hn).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, hn], 1)


def _gru_backward(signal: Tensor, kept: Tensor, bias: bool) -> tuple[Tensor, ...]:
    r, z, n, hx, hn = kept.chunk(5, 1)
    new = signal * (1 - z) * (1 - n * n)
    reset, update = new * hn * r * (1 - r), signal * (hx - n) * z * (1 - z)
    ih, hh = torch.cat([reset, update, new], 1), torch.cat([reset, update, new * r], 1)
    return ih, hh, signal * z, ih.sum(0), hh.sum(0)


def _note(change: Any) -> None:
    for crossings in _counting:
        change(crossings)


def _on_device(tensor: Tensor) -> Tensor:
    """The device's view of a CPU tensor's memory."""
    capsule = to_dlpack(tensor.detach())
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    # DLManagedTensor begins with the data's address; the device's type and number follow, and 24
    # bytes on the address of the strides, of which DLPack changes those of dimensions of size 1.
    start = pointer(capsule, b"dltensor")
    ctypes.c_int32.from_address(start + 8).value = _EXTENSION
    if tensor.dim():
        strides = ctypes.c_void_p.from_address(start + 32).value
        (ctypes.c_int64 * tensor.dim()).from_address(strides)[:] = tensor.stride()
    with torch.inference_mode(False):  # else a view of a parameter would be another kind of tensor
        return from_dlpack(capsule)


def _on_host(tensor: Tensor) -> Tensor:
    """The CPU's view of a device tensor's memory."""
    if tensor.device.type != NAME:
        return tensor
    shape, strides = tensor.shape, tensor.stride()
    if not tensor.numel():
        return torch.empty_strided(shape, strides, dtype=tensor.dtype)
    reach = 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * (reach * tensor.element_size())).from_address(tensor.data_ptr())
    memory.owner = tensor  # which lives as long as somebody looks at its memory
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(shape, strides)
