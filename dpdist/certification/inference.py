"""The executed classifier of a run: graph, number format, batch, noise stream and device.

It is fixed before counting, because a certificate speaks about the function that was sampled. The
fastest inference backend is chosen by a short probe once, must give the same argmax as the original
on a check batch (where rounding does not decide it), is recorded, and is the only one that any
worker executes. A form in another number format ("bf16") is another function: it is used only on
request, and the certificates are its own. Which generator makes the noise is part of the executed
classifier too: a stream fills a tensor with a noise, as a pure function of a unit's key and of the
tensor's shape. A device is made repeatable before it counts; no part of this has run on a GPU yet:
it is tested on a simulated device.
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
import platform
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from dpdist.certification.certificate import ClassifierRecord
from dpdist.certification.noise import Noise
from dpdist.core.errors import UserError
from dpdist.models import NO_CLASS, may_hold_script, predicted_classes
from dpdist.randomness import device_generators
from dpdist.randomness.keys import AesWords

# --- the device that counts -------------------------------------------------------------------


GPU = "cuda"  # what Ray calls a GPU, torch calls so: NVIDIA's and AMD's
_TRIAL = 64  # rows of the pass by which memory is measured
_SHARE = 0.5  # of the free memory, for one pass


def require_device(device: torch.device) -> None:
    """Raise UserError unless this process has the device."""
    if device.type == GPU and not torch.get_device_module(device).is_available():
        raise UserError(
            f"Ray gives this worker a GPU, but torch {torch.__version__} does not see it: install "
            "a torch with CUDA there, or set resources.certify_gpus: 0"
        )


def make_deterministic(device: torch.device) -> None:
    """Make a GPU repeatable, for the whole process: deterministic kernels, and float32 that is
    float32 (no TF32). A model whose layers have no such kernels raises when it runs."""
    if device.type != GPU:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def device_name(device: torch.device) -> str:
    """Return the device name stored with the results, since other hardware may round otherwise."""
    if device.type == "cpu":
        return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return str(torch.get_device_module(device).get_device_name(device))


def max_batch_rows(network: nn.Module, row: Tensor, max_rows: int, share: float) -> int:
    """The largest power of two of rows (1, ...), up to `max_rows`, of which a pass takes no more
    than half of the device's free memory, noise included. share: of the device that is its own."""
    module, device = torch.get_device_module(row.device), row.device
    trial = row.repeat(_TRIAL, *[1] * (row.dim() - 1))
    with torch.inference_mode():
        network(trial)
        module.synchronize(device)
        module.reset_peak_memory_stats(device)
        before = module.memory_allocated(device)
        network(trial)
        module.synchronize(device)
    taken = max(0, module.max_memory_allocated(device) - before) / _TRIAL
    free, _ = module.mem_get_info(device)
    each = taken + 3 * row.nbytes  # the noise, and the input with it in two number formats
    rows = max(1, int(_SHARE * share * free / each))
    return max(1, min(max_rows, 1 << (rows.bit_length() - 1)))


# --- noise streams ----------------------------------------------------------------------------


CPU = torch.device("cpu")
# Places of Philox made at a time: those of a CPU stay in its cache. A fixed number, since vector
# instructions may end a piece otherwise than they go through its middle.
_PIECE, _PIECE_ON_CPU = 1 << 22, 1 << 14


class Stream(Protocol):
    """device: where the tensors are that it fills."""

    name: ClassVar[str]

    @property
    def device(self) -> torch.device: ...

    def fill(self, noise: Noise, key: bytes, out: Tensor) -> Tensor:
        """`out`, float32 and contiguous, filled with the noise of the key."""
        ...


class Aes:
    """AES-128 in counter mode, on the CPU; a tensor elsewhere is filled here and brought over."""

    name: ClassVar[str] = "aes"

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device
        self._words = AesWords()

    def fill(self, noise: Noise, key: bytes, out: Tensor) -> Tensor:
        made = out if out.device.type == "cpu" else torch.empty(out.shape)
        size = out.numel() + out.numel() % 2  # Box-Muller takes words in pairs
        noise.draw(self._words.fill(key, size), made.numpy().reshape(-1))
        return out if made is out else out.copy_(made)


class Philox:
    """Philox4x32-10, on the device itself: no number crosses over."""

    name: ClassVar[str] = "philox"

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device
        device_generators.check_philox(device)
        self._piece = _PIECE_ON_CPU if device.type == "cpu" else _PIECE

    def fill(self, noise: Noise, key: bytes, out: Tensor) -> Tensor:
        flat = out.view(-1)
        for start in range(0, len(flat), 4 * self._piece):
            part = flat[start : start + 4 * self._piece]
            size = -(-len(part) // 4)
            words = device_generators.philox_words(key, start // 4, size, self.device)
            made = torch.cat([*noise.words_to_noise(*words[:2]), *noise.words_to_noise(*words[2:])])
            part.copy_(made[: len(part)])
        return out


STREAMS: dict[str, type[Aes] | type[Philox]] = {kind.name: kind for kind in (Aes, Philox)}


def default_generator(device: torch.device) -> str:
    """The generator where none is asked for: AES on CPUs, as ever, Philox where there is no AES."""
    return Aes.name if device.type == "cpu" else Philox.name


# --- the executed classifier ------------------------------------------------------------------


Form = Callable[[Tensor], Tensor]
_CPU_ROWS = 500
_MOST_NUMBERS = 2**29  # of a batch that a table names
# What the order of two logits may owe to rounding (FORMS sum in other orders), of the larger one of
# the two classes' largest in a batch; and the share of a batch that may be so close.
_TIE, _MANY = 1e-5, 0.01


@dataclass(frozen=True)
class ClassifierSpec:
    """The executed form of a classifier.

    check: digest of its argmax on the check batch; notes: refused forms. Both are of that
    batch, which is random; all else is of the function, the rate of the machine. device: its
    kind; generator: of the noise that is counted.
    """

    backend: str
    batch: int
    torch_version: str
    machine: str
    check: str
    rate: float
    notes: tuple[str, ...] = ()
    device: str = CPU.type
    generator: str = Aes.name

    @property
    def pinned_fields(self) -> dict[str, Any]:
        """Return the properties that results depend on: all but the rate, which varies.

        Where device and generator are not stated, they are CPU and AES.
        """
        pinned = asdict(self)
        del pinned["rate"]
        for name in ("device", "generator"):
            if pinned[name] == getattr(ClassifierSpec, name):
                del pinned[name]
        return pinned

    @classmethod
    def from_pinned(cls, pinned: dict[str, Any], rate: float = 0.0) -> ClassifierSpec:
        """Return the pinned backend, with the rate at which it works here."""
        return cls(**{**pinned, "notes": tuple(pinned["notes"])}, rate=rate)

    def check_memory(self, shape: Sequence[int], context: object) -> None:
        """Raise UserError for batches of inputs of this shape that fit no memory."""
        if self.batch * math.prod(shape) > _MOST_NUMBERS:
            raise UserError(f"{context}: damaged: batches of {self.batch:,} inputs fit no memory")

    def on_cpu(self) -> ClassifierSpec:
        """Return the form that a CPU executes in its place, in batches for a CPU's memory."""
        if self.device == CPU.type:
            return self
        batch = min(self.batch, _CPU_ROWS)
        return replace(self, device=CPU.type, generator=Aes.name, batch=batch)

    def for_check_batch(self, model: nn.Module, check_batch: Tensor) -> ClassifierSpec:
        """The same form where another check batch lies, with noise by AES."""
        device = check_batch.device
        executed = ExecutedClassifier(model, self.backend, [tuple(check_batch.shape)], device)
        return ClassifierSpec(
            self.backend,
            len(check_batch),
            torch.__version__,
            device_name(device),
            digest_classes(executed(check_batch)),
            self.rate,
            device=device.type,
        )


def read_classifier_spec(job_record: Mapping[str, Any], context: object) -> ClassifierSpec:
    """Return the executed classifier that a table names.

    Args:
        job_record: what the table says of itself; of the check batch it may say nothing.
        context: begins a complaint.

    Raises:
        UserError: it names none that could be executed.
    """
    record = ClassifierRecord.parse(job_record.get("classifier", {}), f"{context}: classifier")
    return ClassifierSpec.from_pinned(record.model_dump())


class ExecutedClassifier:
    """Classes by the model's logits, always on batches of the declared shapes on the device."""

    def __init__(
        self,
        model: nn.Module,
        backend: str,
        shapes: list[tuple[int, ...]],
        device: torch.device = CPU,
    ) -> None:
        use_single_thread()
        make_deterministic(device)
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # trace and freeze announce their deprecation
            self._run = FORMS[backend](model, torch.zeros(shapes[0], device=device))
            for shape in shapes if backend in _SPECIALIZED or may_hold_script(model) else ():
                # The graph executor specializes during the first calls; afterwards it is fixed.
                for _ in range(_WARM):
                    self._run(torch.zeros(shape, device=device))

    def __call__(self, batch: Tensor) -> Tensor:
        """Return the class of each row, int64 (B,): NO_CLASS where a logit is not finite."""
        return predicted_classes(self.logits(batch))

    def logits(self, batch: Tensor) -> Tensor:
        """(B, classes)."""
        with torch.inference_mode():
            return self._run(batch)


def choose_backend(
    model: nn.Module,
    check_batch: Tensor,
    requested: str | None = None,
    rows: Sequence[int] = (),
    seconds: float = math.inf,
) -> tuple[ClassifierSpec, ExecutedClassifier]:
    """Return a fast form that agrees with the model on `check_batch`, and on as many other rows.

    requested: the form to take if it does; if not, the original ("eager") is taken. It is executed
    where the batch lies. rows: the other batch sizes; a trace may hold the one that it was made at.
    seconds: to be spent on forms that nobody asked for; one that would take more is not tried. The
    time of a pass over the check batch says how long the others would take, before they are made:
    where no form fits, that one pass is all.
    """
    batch, device = len(check_batch), check_batch.device
    others = (torch.arange(size) % batch for size in dict.fromkeys(rows) if size != batch)
    batches = [check_batch, *(check_batch[other] for other in others)]
    shapes = [tuple(each.shape) for each in batches]
    original = ExecutedClassifier(model, "eager", shapes, device)
    began = time.perf_counter()
    logits, each_pass = _timed_logits(original, check_batch)
    every, answers = [logits], {"eager": predicted_classes(logits)}
    one = each_pass * sum(map(len, batches)) / batch  # of all batches
    candidates, notes = {"eager": original}, list[str]()
    forms = (requested,) if requested is not None else _usual_forms(device)

    def is_tried(backend: str) -> bool:
        passes = 2 + 2 * _LEAST_ROUNDS * 3 + (_WARM if backend in _SPECIALIZED else 0)
        late = time.perf_counter() - began + passes * one > seconds
        misfit = backend in IMAGE_ONLY_FORMS and check_batch.dim() != 4
        return backend not in candidates and (requested is not None or not (late or misfit))

    if not any(map(is_tried, forms)):
        return _spec("eager", batch, device, answers["eager"], each_pass), original
    every += [original.logits(each) for each in batches[1:]]
    for backend in forms:
        if not is_tried(backend):
            continue
        try:
            built = ExecutedClassifier(model, backend, shapes, device)
            said = [built(each) for each in batches]
            differing, answer = max(map(differing_rows, every, said)), said[0]
        except Exception as error:  # a form may fail in any way; the original remains
            notes.append(f"{backend}: cannot be built ({type(error).__name__})")
            continue
        if differing:
            notes.append(f"{backend}: argmax differs on {differing} of {batch} check inputs")
        if backend in REDUCED_PRECISION_FORMS:
            candidates = {}
        elif differing:
            continue
        candidates[backend], answers[backend] = built, answer
    left = seconds - (time.perf_counter() - began)
    rounds = min(_ROUNDS, max(_LEAST_ROUNDS, left / (3 * one * len(candidates))))
    times = _time_forms(candidates, check_batch, int(rounds))
    best = requested if requested in candidates else _choose_fastest(times, forms)
    return _spec(best, batch, device, answers[best], times[best], notes), candidates[best]


def _usual_forms(device: torch.device) -> tuple[str, ...]:
    return DEFAULT_FORMS if device == CPU else ACCELERATOR_FORMS


def _timed_logits(classifier: ExecutedClassifier, batch: Tensor) -> tuple[Tensor, float]:
    """Return the logits of a batch, and the seconds of that pass."""
    began = time.perf_counter()
    logits = classifier.logits(batch)
    predicted_classes(logits).cpu()  # a device has answered only then
    return logits, time.perf_counter() - began


def _spec(
    backend: str, batch: int, device: torch.device, classes: Tensor, seconds: float,
    notes: Sequence[str] = (),
) -> ClassifierSpec:  # fmt: skip
    """Return the description of a form that answered a batch with these classes in that time."""
    return ClassifierSpec(
        backend, batch, torch.__version__, device_name(device), digest_classes(classes),
        batch / seconds, tuple(notes), device.type,
    )  # fmt: skip


def differing_rows(logits: Tensor, classes: Tensor) -> int:
    """Return the number of rows whose answer is not the largest of the logits, ties aside.

    About one noisy input in a million has two classes so close that the order of a sum decides.
    Raises ValueError for an answer to other rows.
    """
    own = predicted_classes(logits)
    if classes.shape != own.shape:
        raise ValueError(f"answers to {tuple(classes.shape)} rows instead of {tuple(own.shape)}")
    rows = (classes != own).nonzero()[:, 0]
    first, other = own[rows], classes[rows]
    sizes = logits.abs().amax(0)
    tied = _TIE * torch.maximum(sizes[first], sizes[other])
    near = logits[rows, first] - logits[rows, other] <= tied
    beyond = int((~near | (first == NO_CLASS) | (other == NO_CLASS)).sum())
    return len(rows) if beyond or len(rows) > max(1, _MANY * len(logits)) else 0


def digest_classes(classes: Tensor) -> str:
    """Digest of the classes on the check batch: equal on every worker, or the run stops."""
    raw = classes.cpu().numpy().astype("<i8").tobytes()
    return hashlib.blake2b(raw, digest_size=8).hexdigest()


def use_single_thread() -> None:
    """One thread: workers do not compete, and sums do not depend on how many CPUs there are."""
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


def _eager(model: nn.Module, example: Tensor) -> Form:
    return _eval_copy(model).to(example.device)


def _channels_last(model: nn.Module, example: Tensor) -> Form:
    if example.dim() != 4:
        raise ValueError("channels-last needs images")
    module = _eval_copy(model).to(example.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return lambda batch: module(batch.contiguous(memory_format=torch.channels_last))


def _frozen(model: nn.Module, example: Tensor) -> Form:
    traced = torch.jit.trace(_eval_copy(model).to(example.device), example)
    return torch.jit.optimize_for_inference(torch.jit.freeze(traced))


def _compiled(model: nn.Module, example: Tensor) -> Form:
    return torch.compile(_eval_copy(model).to(example.device), dynamic=False)


def _bf16(model: nn.Module, example: Tensor) -> Form:
    layout = torch.channels_last if example.dim() == 4 else torch.contiguous_format
    module = _eval_copy(model).to(example.device, torch.bfloat16, memory_format=layout)  # type: ignore[call-overload]
    return lambda batch: module(batch.bfloat16().contiguous(memory_format=layout)).float()


IMAGE_ONLY_FORMS = ("channels-last",)
FORMS: dict[str, Callable[[nn.Module, Tensor], Form]] = {
    "eager": _eager,
    "channels-last": _channels_last,
    "frozen": _frozen,
    "compiled": _compiled,
    "bf16": _bf16,
}
# What need not say what the model in float32 says; and how much of a logit rounding may be there.
REDUCED_PRECISION_FORMS = {"bf16": 2.0**-5}
# Compilation needs a C++ compiler and up to a minute per process, and was slower than freezing on
# the models tried: it is there for the asking.
DEFAULT_FORMS = ("frozen", "channels-last", "eager")
ACCELERATOR_FORMS = ("eager", "channels-last")  # elsewhere than on CPUs
_SPECIALIZED, _WARM = ("frozen", "compiled"), 3  # forms whose first calls differ, and how many


# Between forms that are about as fast the choice, and with it the table, must not be luck.
_CLEARLY_FASTER = 1.5
_WORTH_SECONDS = 1e-3


def _choose_fastest(times: dict[str, float], order: tuple[str, ...]) -> str:
    """The first form in ``order`` that works, unless another one is clearly faster."""
    first = next(backend for backend in (*order, "eager") if backend in times)
    fastest = min(times, key=lambda backend: times[backend])
    slower = times[first] > _CLEARLY_FASTER * times[fastest]
    return fastest if slower and times[first] - times[fastest] > _WORTH_SECONDS else first


def _eval_copy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).eval().requires_grad_(False)


_ROUNDS, _LEAST_ROUNDS = 5, 1  # of timing


def _time_forms(
    forms: dict[str, ExecutedClassifier], batch: Tensor, rounds: int = _ROUNDS
) -> dict[str, float]:
    """Seconds per batch of each backend: the best of interleaved rounds, which load disturbs least.
    One without a rival is timed once."""
    times = dict.fromkeys(forms, math.inf)
    for _ in range(rounds if len(forms) > 1 else 1):
        for backend, classifier in forms.items():
            classifier(batch).cpu()  # a device has answered only then
            start = time.perf_counter()
            classifier(batch)
            classifier(batch).cpu()
            times[backend] = min(times[backend], (time.perf_counter() - start) / 2)
    return times
