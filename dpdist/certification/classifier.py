"""The one executed classifier of a run: graph, number format and batch, fixed before counting.

A certificate speaks about the function that was sampled. So the fastest inference form is chosen by
a short probe once, must give the same argmax as the original on a check batch, is recorded, and is
the only one that any worker executes.
"""

from __future__ import annotations

import copy
import hashlib
import math
import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

Form = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ClassifierSpec:
    """What is executed. check: digest of its argmax on the check batch; notes: refused forms."""

    form: str
    batch: int
    torch_version: str
    machine: str
    check: str
    rate: float
    notes: tuple[str, ...] = ()

    @property
    def pinned(self) -> dict[str, Any]:
        """What results depend on: all but the rate, a measured time that is different each time."""
        pinned = asdict(self)
        del pinned["rate"]
        return pinned

    @classmethod
    def of(cls, pinned: dict[str, Any], rate: float = 0.0) -> ClassifierSpec:
        """What was pinned, with the rate at which it works here."""
        return cls(**{**pinned, "notes": tuple(pinned["notes"])}, rate=rate)


class ExecutedClassifier:
    """Argmax of the model's logits, always on batches of the declared shapes."""

    def __init__(self, model: nn.Module, form: str, shapes: list[tuple[int, ...]]) -> None:
        quiet_threads()
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # trace and freeze announce their deprecation
            self._run = FORMS[form](model, torch.zeros(shapes[0]))
            for shape in shapes:
                # The graph executor specialises during the first calls; afterwards it is fixed.
                for _ in range(3):
                    self._run(torch.zeros(shape))

    def __call__(self, batch: Tensor) -> Tensor:
        """Class of each row, int64 (B,)."""
        return self.logits(batch).argmax(1)

    def logits(self, batch: Tensor) -> Tensor:
        """(B, classes)."""
        with torch.inference_mode():
            return self._run(batch)


def choose(
    model: nn.Module, check_batch: Tensor, forms: tuple[str, ...] = ()
) -> tuple[ClassifierSpec, ExecutedClassifier]:
    """A fast form that builds here and agrees with the original model on ``check_batch``.

    forms: the candidates, the preferred one first; the original ("eager") always is one.
    """
    batch = len(check_batch)
    original = ExecutedClassifier(model, "eager", [tuple(check_batch.shape)])
    expected = original(check_batch)
    candidates = {"eager": original}
    notes = []
    for form in forms or DEFAULT_FORMS:
        if form in candidates:
            continue
        try:
            built = ExecutedClassifier(model, form, [tuple(check_batch.shape)])
            answer = built(check_batch)
        except Exception as error:  # a form may fail in any way; the original remains
            notes.append(f"{form}: cannot be built ({type(error).__name__})")
            continue
        differing = int((answer != expected).sum())
        if differing:
            notes.append(f"{form}: argmax differs on {differing} of {batch} check inputs")
        else:
            candidates[form] = built
    times = _seconds(candidates, check_batch)
    best = _preferred(times, forms or DEFAULT_FORMS)
    spec = ClassifierSpec(
        best,
        batch,
        torch.__version__,
        f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        check_digest(expected),
        batch / times[best],
        tuple(notes),
    )
    return spec, candidates[best]


def check_digest(classes: Tensor) -> str:
    """Digest of the classes on the check batch: equal on every worker, or the run stops."""
    return hashlib.blake2b(classes.numpy().astype("<i8").tobytes(), digest_size=8).hexdigest()


def quiet_threads() -> None:
    """One thread: workers do not compete, and sums do not depend on how many CPUs there are."""
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


def _eager(model: nn.Module, example: Tensor) -> Form:
    return _frozen_copy(model)


def _channels_last(model: nn.Module, example: Tensor) -> Form:
    if example.dim() != 4:
        raise ValueError("channels-last needs images")
    module = _frozen_copy(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return lambda batch: module(batch.contiguous(memory_format=torch.channels_last))


def _frozen(model: nn.Module, example: Tensor) -> Form:
    traced = torch.jit.trace(_frozen_copy(model), example)
    return torch.jit.optimize_for_inference(torch.jit.freeze(traced))


def _compiled(model: nn.Module, example: Tensor) -> Form:
    return torch.compile(_frozen_copy(model), dynamic=False)


FORMS: dict[str, Callable[[nn.Module, Tensor], Form]] = {
    "eager": _eager,
    "channels-last": _channels_last,
    "frozen": _frozen,
    "compiled": _compiled,
}
# Compilation needs a C++ compiler and up to a minute per process, and was slower than freezing on
# the models tried: it is there for the asking.
DEFAULT_FORMS = ("frozen", "channels-last", "eager")


# Between forms that are about as fast the choice, and with it the table, must not be luck.
_CLEARLY_FASTER = 1.5
_WORTH_SECONDS = 1e-3


def _preferred(times: dict[str, float], order: tuple[str, ...]) -> str:
    """The first form in ``order`` that works, unless another one is clearly faster."""
    first = next(form for form in (*order, "eager") if form in times)
    fastest = min(times, key=lambda form: times[form])
    slower = times[first] > _CLEARLY_FASTER * times[fastest]
    return fastest if slower and times[first] - times[fastest] > _WORTH_SECONDS else first


def _frozen_copy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).eval().requires_grad_(False)


def _seconds(forms: dict[str, ExecutedClassifier], batch: Tensor) -> dict[str, float]:
    """Seconds per batch of each form: the best of interleaved rounds, which load disturbs least.
    One without a rival is timed once."""
    times = dict.fromkeys(forms, math.inf)
    for _ in range(5 if len(forms) > 1 else 1):
        for form, classifier in forms.items():
            classifier(batch)
            start = time.perf_counter()
            classifier(batch)
            classifier(batch)
            times[form] = min(times[form], (time.perf_counter() - start) / 2)
    return times
