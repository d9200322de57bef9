"""The executed classifier of a run: graph, number format, batch, noise stream and device.

It is fixed before counting, because a certificate applies to the function that was sampled. The
fastest inference backend is chosen once by a short probe, must give the same argmax as the original
on a check batch (unless rounding decides it), is recorded, and is the only one that any worker
executes. A backend in a different number format ("bf16") is a different function: it is used only
on request, and the certificates are of that function. The generator of the noise is part of the
executed classifier too: a stream fills a tensor with noise, as a pure function of a unit's key and
of the tensor's shape. A device is made deterministic before it counts. This has not run on a GPU
yet: it is tested on a simulated device.
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


GPU = "cuda"  # torch's name of what Ray calls a GPU: NVIDIA's and AMD's
_TRIAL_ROWS = 64  # of the pass that measures memory
_MEMORY_SHARE = 0.5  # of the free memory, for one pass


def require_device(device: torch.device) -> None:
    """Raise UserError unless this process has the device."""
    if device.type == GPU and not torch.get_device_module(device).is_available():
        raise UserError(
            f"Ray gives this worker a GPU, but torch {torch.__version__} does not see it: install "
            "a torch with CUDA there, or set resources.certify_gpus: 0"
        )


def make_deterministic(device: torch.device) -> None:
    """Make a GPU deterministic for the whole process, and its float32 exact (no TF32).

    A model with a layer that has no deterministic kernel raises an error when it runs.
    """
    if device.type != GPU:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def device_name(device: torch.device) -> str:
    """Return the device name to store with results, since other hardware may round differently."""
    if device.type == "cpu":
        return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return str(torch.get_device_module(device).get_device_name(device))


def max_batch_rows(network: nn.Module, row: Tensor, max_rows: int, share: float) -> int:
    """Return the largest power of two of rows whose pass fits half of the device's free memory.

    row: one input, (1, ...); its noise is included. max_rows: upper limit of the result. share:
    fraction of the device that this process may use.
    """
    module, device = torch.get_device_module(row.device), row.device
    trial = row.repeat(_TRIAL_ROWS, *[1] * (row.dim() - 1))
    with torch.inference_mode():
        network(trial)
        module.synchronize(device)
        module.reset_peak_memory_stats(device)
        before = module.memory_allocated(device)
        network(trial)
        module.synchronize(device)
    taken = max(0, module.max_memory_allocated(device) - before) / _TRIAL_ROWS
    free, _ = module.mem_get_info(device)
    row_bytes = taken + 3 * row.nbytes  # the noise, and the input with it in two number formats
    return max(1, min(max_rows, power_of_two(int(_MEMORY_SHARE * share * free / row_bytes))))


def power_of_two(number: int) -> int:
    """Return the largest power of two up to a number; 1 below 1."""
    return 1 << (max(1, number).bit_length() - 1)


# --- noise streams ----------------------------------------------------------------------------


CPU = torch.device("cpu")
# Philox counters per call: on a CPU as many as stay in its cache. The number is fixed, since vector
# instructions may round the end of a piece differently than its middle.
_PIECE, _PIECE_ON_CPU = 1 << 22, 1 << 14


class Stream(Protocol):
    """A generator of noise. device: of the tensors that it fills."""

    name: ClassVar[str]

    @property
    def device(self) -> torch.device: ...

    def fill(self, noise: Noise, key: bytes, out: Tensor) -> Tensor:
        """Fill `out`, float32 and contiguous, with the noise of a key, and return it."""
        ...


class Aes:
    """AES-128 in counter mode, on the CPU; noise for other devices is copied to them."""

    name: ClassVar[str] = "aes"

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device
        self._words = AesWords()

    def fill(self, noise: Noise, key: bytes, out: Tensor) -> Tensor:
        on_cpu = out if out.device.type == "cpu" else torch.empty(out.shape)
        size = out.numel() + out.numel() % 2  # Box-Muller takes words in pairs
        noise.draw(self._words.fill(key, size), on_cpu.numpy().reshape(-1))
        return out if on_cpu is out else out.copy_(on_cpu)


class Philox:
    """Philox4x32-10, on the device itself."""

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


# --- the executed classifier ------------------------------------------------------------------


Form = Callable[[Tensor], Tensor]
_CPU_ROWS = 500
_MOST_NUMBERS = 2**29  # of a batch that a table states
# The difference of two logits that rounding may cause (backends sum in different orders), relative
# to the larger one of the two classes' largest in a batch; and the fraction of such rows allowed.
_TIE, _MANY = 1e-5, 0.01


@dataclass(frozen=True)
class ClassifierSpec:
    """The executed form of a classifier.

    check: digest of its argmax on the check batch, which is random. notes: rejected backends. rate:
    rows per second on this machine. device: its kind. generator: of the counted noise.
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
        """Return the properties that results depend on: all but the rate.

        CPU and AES are the defaults of device and generator, and omitted.
        """
        pinned = asdict(self)
        del pinned["rate"]
        for name in ("device", "generator"):
            if pinned[name] == getattr(ClassifierSpec, name):
                del pinned[name]
        return pinned

    @classmethod
    def from_pinned(cls, pinned: dict[str, Any], rate: float = 0.0) -> ClassifierSpec:
        """Return the classifier of pinned fields, with its rate on this machine."""
        return cls(**{**pinned, "notes": tuple(pinned["notes"])}, rate=rate)

    def check_memory(self, shape: Sequence[int], context: object) -> None:
        """Raise UserError if a batch of inputs of this shape would not fit the memory."""
        if self.batch * math.prod(shape) > _MOST_NUMBERS:
            raise UserError(
                f"{context}: damaged: batches of {self.batch:,} inputs do not fit the memory"
            )

    def on_cpu(self) -> ClassifierSpec:
        """Return the same form for a CPU, in batches for a CPU's memory."""
        if self.device == CPU.type:
            return self
        batch = min(self.batch, _CPU_ROWS)
        return replace(self, device=CPU.type, generator=Aes.name, batch=batch)

    def for_check_batch(self, model: nn.Module, check_batch: Tensor) -> ClassifierSpec:
        """Return the same form for a different check batch and its device, with noise by AES."""
        device = check_batch.device
        executed = ExecutedClassifier(model, self.backend, [tuple(check_batch.shape)], device)
        return replace(
            self,
            batch=len(check_batch),
            torch_version=torch.__version__,
            machine=device_name(device),
            check=digest_classes(executed(check_batch)),
            notes=(),
            device=device.type,
            generator=Aes.name,
        )


def read_classifier_spec(job_record: Mapping[str, Any], context: object) -> ClassifierSpec:
    """Return the executed classifier that a table names.

    Args:
        job_record: the table's record; it need not state the check batch.
        context: first words of error messages.

    Raises:
        UserError: the record has no classifier that could be executed.
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
            if backend in _SPECIALIZED or may_hold_script(model):
                # The graph executor specializes during the first calls; afterwards it is fixed.
                for shape in shapes:
                    for _ in range(_WARM):
                        self._run(torch.zeros(shape, device=device))

    def __call__(self, batch: Tensor) -> Tensor:
        """Return the class of each row, int64 (B,): NO_CLASS if a logit is not finite."""
        return predicted_classes(self.logits(batch))

    def logits(self, batch: Tensor) -> Tensor:
        """Return the logits of a batch: (B, classes)."""
        with torch.inference_mode():
            return self._run(batch)


def choose_backend(
    model: nn.Module,
    check_batch: Tensor,
    requested: str | None = None,
    rows: Sequence[int] = (),
    seconds: float = math.inf,
) -> tuple[ClassifierSpec, ExecutedClassifier]:
    """Return a fast backend that agrees with the model on `check_batch`, on its device.

    requested: the backend to use if it agrees; if not, the original ("eager") is used. rows: other
    batch sizes to check, since a trace may depend on the size it was made at. seconds: time to
    spend on backends that were not requested. One that would take longer is not tested, as the time
    of a first pass over the check batch predicts.
    """
    batch, device = len(check_batch), check_batch.device
    others = (torch.arange(size) % batch for size in dict.fromkeys(rows) if size != batch)
    batches = [check_batch, *(check_batch[other] for other in others)]
    shapes = [tuple(each.shape) for each in batches]
    original = ExecutedClassifier(model, "eager", shapes, device)
    began = time.perf_counter()
    expected = [original.logits(check_batch)]
    answers = {"eager": predicted_classes(expected[0]).cpu()}  # waits for the device
    pass_seconds = time.perf_counter() - began
    all_batches = pass_seconds * sum(map(len, batches)) / batch  # seconds
    candidates, notes = {"eager": original}, list[str]()
    usual = DEFAULT_FORMS if device == CPU else ACCELERATOR_FORMS
    forms = usual if requested is None else (requested,)

    def is_tested(backend: str) -> bool:
        passes = 2 + 2 * _LEAST_ROUNDS * 3 + (_WARM if backend in _SPECIALIZED else 0)
        late = time.perf_counter() - began + passes * all_batches > seconds
        misfit = backend in IMAGE_ONLY_FORMS and check_batch.dim() != 4
        return backend not in candidates and (requested is not None or not (late or misfit))

    if not any(map(is_tested, forms)):
        return _spec("eager", batch, device, answers["eager"], pass_seconds), original
    expected += [original.logits(each) for each in batches[1:]]
    for backend in forms:
        if not is_tested(backend):
            continue
        try:
            built = ExecutedClassifier(model, backend, shapes, device)
            found = [built(each) for each in batches]
            differing, answer = max(map(differing_rows, expected, found)), found[0]
        except Exception as error:  # a backend may fail in any way; the original remains
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
    rounds = min(_ROUNDS, max(_LEAST_ROUNDS, left / (3 * all_batches * len(candidates))))
    times = _time_forms(candidates, check_batch, int(rounds))
    best = requested if requested in candidates else _choose_fastest(times, forms)
    return _spec(best, batch, device, answers[best], times[best], notes), candidates[best]


def _spec(
    backend: str,
    batch: int,
    device: torch.device,
    classes: Tensor,
    seconds: float,
    notes: Sequence[str] = (),
) -> ClassifierSpec:
    """Return the description of a form that answered a batch with these classes in that time."""
    return ClassifierSpec(
        backend,
        batch,
        torch.__version__,
        device_name(device),
        digest_classes(classes),
        batch / seconds,
        tuple(notes),
        device.type,
    )


def differing_rows(logits: Tensor, classes: Tensor) -> int:
    """Return the number of rows whose answer is not the largest of the logits, except ties.

    About one noisy input in a million has two classes so close that the order of a sum decides.
    Raises ValueError for a wrong number of answers.
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
    """Return the digest of the classes on the check batch, which must be equal on all workers."""
    raw = classes.cpu().numpy().astype("<i8").tobytes()
    return hashlib.blake2b(raw, digest_size=8).hexdigest()


def use_single_thread() -> None:
    """Use one thread, so that workers do not compete and sums do not depend on the CPU count."""
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
# Backends whose answers may differ from those of the model in float32, and the rounding of a logit.
REDUCED_PRECISION_FORMS = {"bf16": 2.0**-5}
# Compilation needs a C++ compiler and up to a minute per process, and was slower than freezing on
# the tested models: it is used only on request.
DEFAULT_FORMS = ("frozen", "channels-last", "eager")
ACCELERATOR_FORMS = ("eager", "channels-last")  # on devices other than CPUs
_SPECIALIZED, _WARM = ("frozen", "compiled"), 3  # backends whose first calls differ; their number


# If backends are about equally fast, the choice, and so the table, must not depend on chance.
_CLEARLY_FASTER = 1.5
_WORTH_SECONDS = 1e-3


def _choose_fastest(times: dict[str, float], order: tuple[str, ...]) -> str:
    """Return the first working backend in ``order``, unless a different one is clearly faster."""
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
    """Return the seconds per batch of each backend, the best of interleaved rounds.

    If there is only one backend, it is timed once.
    """
    times = dict.fromkeys(forms, math.inf)
    for _ in range(rounds if len(forms) > 1 else 1):
        for backend, classifier in forms.items():
            classifier(batch).cpu()  # waits for the device
            start = time.perf_counter()
            classifier(batch)
            classifier(batch).cpu()
            times[backend] = min(times[backend], (time.perf_counter() - start) / 2)
    return times
