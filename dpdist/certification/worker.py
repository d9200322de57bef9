"""The worker of a certification: holds the executed classifier, does pieces of inputs."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpdist.base.errors import UserError
from dpdist.base.tensors import tensor_of
from dpdist.certification import device as devices
from dpdist.certification.certificate import Certificate, SampledPlace
from dpdist.certification.classifier import ClassifierSpec, check_digest, choose, differing_rows
from dpdist.certification.fresh_process import SameProcess, alone_by
from dpdist.certification.reexecution import Reexecution, RowChoice
from dpdist.certification.streams import CPU, STREAMS, Stream, usual
from dpdist.models import fresh_copy, mixing
from dpdist.models.factory_code import FactoryCode
from dpdist.randomness.keys import new_run_key
from dpdist.randomness.units import UnitSource

Progress = Callable[[int, int, float], None]  # units done, units, per second


@dataclass(frozen=True)
class Piece:
    """Units low..high-1 of one input, with the input itself: workers need no data set."""

    index: int
    low: int
    high: int
    x: np.ndarray


@dataclass(frozen=True)
class Assignment:
    """All that workers share; put into the object store once.

    device: where they work; gpus: how much of a GPU each of them has. inputs: how many are counted
    in all; last: the last of them (its index), where more may come. reexecuted: the secret by which
    counted rows are chosen to be executed again (`dpdist.certification.reexecution`); None: none.
    code: with which the model was saved, and each worker must have. apart: whether rows that run
    the model's Python code are executed alone in a process of their own.
    """

    model: nn.Module
    settings: Certificate
    place: SampledPlace
    source: UnitSource
    classes: int
    input_shape: tuple[int, ...]
    check_inputs: np.ndarray
    spec: ClassifierSpec | None = None
    device: str = CPU.type
    gpus: float = 0.0
    inputs: int = 1
    last: int | None = None
    reexecuted: bytes | None = field(default_factory=new_run_key, repr=False)

    def reexecution(
        self, network: nn.Module, execute: Callable[[Tensor], Tensor], others: Tensor,
        spec: ClassifierSpec,
    ) -> Reexecution | None:  # fmt: skip
        """What executes counted rows again: see `Reexecution` for the other arguments."""
        if self.reexecuted is None:
            return None
        settings = self.settings
        blocks = settings.units(spec.batch)  # one: a test that may stop after its first block
        rows = self.inputs * (settings.n0 + min(blocks * spec.batch, settings.n))
        choice = RowChoice(rows, blocks, self.last, self.reexecuted)
        alone = alone_by(spec.form, self.code) if self.apart else SameProcess
        return Reexecution(choice, network, execute, others, spec.form, alone)

    code: FactoryCode = field(default_factory=FactoryCode)
    apart: bool = False

    @property
    def stream(self) -> Stream:
        """A stream of noise on the device, by the generator that is pinned, or asked for."""
        device = torch.device(self.device)
        asked = self.settings.generator if self.spec is None else self.spec.generator
        return STREAMS[asked or usual(device)](device)

    def rows(self, numbers: int) -> int:
        """Of the executed batch, for so many numbers in each."""
        return self.spec.batch if self.spec else self.settings.executed_batch(numbers)

    def placed(self) -> Assignment:
        """With its model on the device. Raises UserError where this process has none, or has other
        code of the model's."""
        self.code.check("this worker")
        device = torch.device(self.device)
        devices.require_device(device)
        devices.settle(device)
        if device == CPU:
            return self
        return replace(self, model=copy.deepcopy(self.model).to(device))

    @property
    def executed(self) -> ClassifierSpec:
        """The executed classifier. Raises ValueError before it is chosen."""
        if self.spec is None:
            raise ValueError("the executed classifier must be chosen before counting")
        return self.spec

    @property
    def units(self) -> int:
        """Into how many units the work on an input is cut."""
        return self.settings.units(self.executed.batch)

    def verdict(self, *partials: dict[str, Any]) -> Any:
        """The certificate of an input, from what was counted in all its units."""
        return self.settings.verdict(partials, self.place)


def probe(assignment: Assignment) -> ClassifierSpec:
    """Choose the executed classifier, on the kind of machine that will execute it.

    Raises ValueError when the model does not give finite logits for each class, or when its answer
    to one input depends on what else is in the batch, or where; UserError without the device.
    """
    assignment = _sized(assignment.placed())
    network, batch = assignment.place.check_batch(assignment)
    with torch.inference_mode():
        logits = fresh_copy(network.eval())(batch)  # what it keeps of a batch, no other one knows
    expected = (len(batch), assignment.classes)
    if tuple(logits.shape) != expected:
        raise ValueError(f"it returns {tuple(logits.shape)} for a batch, not {expected}")
    if not bool(torch.isfinite(logits).all()):
        # The argmax of NaN is a constant, which would be certified with the largest radius.
        raise ValueError("its outputs are not finite numbers (did the training diverge?)")
    _, copies = assignment.place.check_batch(assignment, copies=True)
    if found := mixing(network, batch, copies):
        raise ValueError(f"it looks at its batch: {found}; no certificate holds for such a model")
    settings = assignment.settings
    spec, _ = choose(network, batch, settings.form, (settings.n0,))
    spec = replace(spec, generator=assignment.stream.name)
    return _with_bank(assignment, spec, logits) if _banked(assignment) else spec


def _banked(assignment: Assignment) -> bool:
    return getattr(assignment.settings, "noise_bank", False)


def _with_bank(
    assignment: Assignment, spec: ClassifierSpec, logits: torch.Tensor
) -> ClassifierSpec:
    """With the answers of a noise bank, which sums the first layer in another order. Raises
    UserError where more than rounding tells them from the model's."""
    _, answer = assignment.place.sampler(assignment, spec)
    if differing := differing_rows(logits, answer):
        raise UserError(
            f"with a noise bank {differing} of {len(logits)} check inputs get another class than "
            "the model's: certify with noise_bank=False"
        )
    return replace(spec, check=check_digest(answer))


def _sized(assignment: Assignment) -> Assignment:
    """With a batch for a device's memory, such that the last block of draws is about full."""
    settings, device = assignment.settings, torch.device(assignment.device)
    if device == CPU or settings.batch is not None:
        return assignment
    network, batch = assignment.place.check_batch(assignment)
    fit = devices.fitting_rows(
        network.eval(), batch[:1], settings.device_batch, min(1.0, assignment.gpus)
    )
    blocks = -(-settings.n // fit)
    rows = {"batch": -(-settings.n // blocks)}
    return replace(assignment, settings=settings.model_copy(update=rows))


class Worker:
    """Called with a list of pieces; returns a JSON row for each, with the seconds it took."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment, self._settings = assignment, assignment.settings
        self._place = assignment.place
        self._device = torch.device(assignment.device)
        self._sampler, self._batch = sampler_of(assignment), assignment.executed.batch

    def __call__(self, pieces: list[Piece]) -> list[dict[str, Any]]:
        rows = []
        for piece in pieces:
            start = time.perf_counter()
            x = tensor_of(piece.x).to(self._device)
            partial = self._settings.work(
                self._sampler, x, piece.index, piece.low, piece.high, self._batch, self._place
            )
            seconds = round(time.perf_counter() - start, 6)
            rows.append({"index": piece.index, "low": piece.low, "high": piece.high,
                         "partial": partial, "seconds": seconds})  # fmt: skip
        return rows

    def certify(
        self, x: np.ndarray, index: int, progress: Progress = lambda done, units, rate: None
    ) -> Any:
        """The verdict on one input, with the noise of that index."""
        units, began = self._assignment.units, time.monotonic()
        partials = []
        for unit in range(units):
            (row,) = self([Piece(index, unit, unit + 1, x)])
            partials.append(row["partial"])
            progress(unit + 1, units, (unit + 1) / max(time.monotonic() - began, 1e-9))
        return self._assignment.verdict(*partials)

    def label(self, x: torch.Tensor, index: int) -> int:
        """The class alone, -1 where it is undecided."""
        there = x.to(self._device)
        return self._settings.label(self._sampler, there, index, self._batch, self._place)


def sampler_of(assignment: Assignment) -> Any:
    """The sampler on the executed classifier. Raises UserError when it fails the check here."""
    spec, here = assignment.executed, devices.name(torch.device(assignment.device))
    if spec.device != CPU.type and here != spec.machine:
        raise UserError(
            f"this worker counts on {here}, the certification began on {spec.machine}: another "
            "kind of GPU rounds otherwise; use workers of one kind"
        )
    sampler, answer = assignment.place.sampler(assignment.placed(), spec)
    if check_digest(answer) != spec.check:
        raise UserError(
            "this worker computes other classes on the check batch than the model did when the "
            f"certification began ({spec.machine}, torch {spec.torch_version}): use workers of "
            "one kind"
        )
    return sampler
