"""Sample a model under noise and count its answers, in one process: the worker of a certification.

A worker holds the executed classifier and does pieces of inputs. The noise is sampled where the
model is random, by votes or by sums of scores: the location knows the network that is executed
behind the noise, a batch on which every worker must answer alike, and the sampler that counts
under the noise.
"""

from __future__ import annotations

import copy
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from dpdist.certification import inference, operator_norms, score_bounds
from dpdist.certification.certificate import (
    Certificate,
    ClassCounter,
    CombinedNoise,
    NoiseSampler,
    read_combined_noise,
)
from dpdist.certification.inference import (
    CPU,
    STREAMS,
    Aes,
    ClassifierSpec,
    ExecutedClassifier,
    Stream,
    choose_backend,
    default_generator,
    digest_classes,
)
from dpdist.certification.noise import Gaussian, Noise
from dpdist.certification.reexecution import Reexecution, RowChoice
from dpdist.certification.score_bounds import SCORE_UNIT, Sensitivity
from dpdist.certification.subject import require_logits
from dpdist.core.errors import UserError, with_page
from dpdist.core.optional_imports import array_to_tensor
from dpdist.models import (
    SplitModel,
    find_batch_dependence,
    fresh_copy,
    predicted_classes,
    require_split,
    softmax_scores,
)
from dpdist.models.factory_code import FactoryCode
from dpdist.randomness import keys
from dpdist.randomness.keys import ESTIMATE, AesWords, StreamKeys, new_run_key
from dpdist.randomness.noise_location import (
    HiddenNoise,
    NoiseLocation,
    NoiseSplit,
    NoNoise,
    find_noise_location,
)

# --- samplers and counters --------------------------------------------------------------------


def count_classes(logits: Tensor, classes: int) -> Tensor:
    """Return the number of rows of logits (B, classes) of each class: int64 (classes,).

    It lies on the device of the logits. Rows that are not finite have no class.
    """
    return torch.bincount(predicted_classes(logits) + 1, minlength=classes + 1)[1:]


class InputNoiseCounter:
    """Counts classes over canonical blocks of noisy copies of an input.

    A block has ``batch`` rows; a block counted in part (the last of n draws) is executed whole,
    because the executed batch is fixed. Which blocks are asked for, and in what order, changes
    nothing in their counts. noise_stream: makes the noise, on the device of the classifier; of a
    block its counts alone come back from there. inspector: sees each block that was counted.
    """

    def __init__(
        self,
        classify: ExecutedClassifier,
        noise: Noise,
        stream_keys: StreamKeys,
        classes: int,
        input_shape: tuple[int, ...],
        *,
        noise_stream: Stream | None = None,
        inspector: Reexecution | None = None,
    ) -> None:
        self._classify, self._inspect = classify, inspector
        self._noise, self._stream = noise, noise_stream or Aes()
        self._units = stream_keys
        self._classes = classes
        self._shape = input_shape
        self._buffers: dict[int, Tensor] = {}

    def for_purpose(self, purpose: str) -> Self:
        """Return the same counter with noise of its own."""
        return _for_purpose(self, purpose)

    def histogram(
        self, x: Tensor, index: int, stage: str, block: int, rows: int, draws: int
    ) -> np.ndarray:
        """int64 (classes,): classes of the first ``draws`` of the block's ``rows`` noisy copies.

        x: float32 of the input's shape, in [0, 1]. index names the input in the noise's key.
        """
        noisy = self._noisy(x, self._units.key(index, stage, block), rows)
        logits = self._classify.logits(noisy)
        if self._inspect is not None:
            self._inspect(index, stage, block, noisy, logits, draws)
        return count_classes(logits[:draws], self._classes).cpu().numpy()

    def _noisy(self, x: Tensor, key: bytes, rows: int) -> Tensor:
        if rows not in self._buffers:
            self._buffers[rows] = torch.empty(rows, *self._shape, device=self._stream.device)
        return self._stream.fill(self._noise, key, self._buffers[rows]).add_(x)


@dataclass(frozen=True)
class BlockScores:
    """Softmax scores under noise, in units of 1 / SCORE_UNIT, rounded down. A draw whose logits are
    not finite has score 0 in every class.

    sums, squares: of the scores per class, int64 (K,); histogram: of the classes, as
    `ClassCounter` has it; draws: how many.
    bins, excess: of the scores, int64 (K, BINS) each, where asked for (`betting.binned`).
    """

    sums: np.ndarray
    squares: np.ndarray
    histogram: np.ndarray
    draws: int
    bins: np.ndarray | None = None
    excess: np.ndarray | None = None


class HiddenNoiseCounter:
    """Scores with fresh noise after the first layers (certificates: ``scores``).

    first: the network before the noise. rest: what executes the network behind it. scale: standard
    deviation of every component, a number or a tensor of the hidden shape
    (heterogeneous noise; 0 where there is none). Blocks are canonical, and stream and inspect are,
    as in ``InputNoiseCounter``.
    """

    def __init__(
        self,
        first: nn.Module,
        rest: Callable[[Tensor], Tensor],
        scale: float | Tensor,
        stream_keys: StreamKeys,
        *,
        noise_stream: Stream | None = None,
        inspector: Reexecution | None = None,
    ) -> None:
        self._first, self._rest, self._stream = first.eval(), rest, noise_stream or Aes()
        self._inspect = inspector
        self._scale = torch.as_tensor(scale, dtype=torch.float32).to(self._stream.device)
        if not bool((self._scale >= 0).all()) or not bool((self._scale > 0).any()):
            raise ValueError("scales must be >= 0, and one of them positive")
        self._noise: Noise = Gaussian(1.0)
        self._units = stream_keys
        self._hidden: tuple[Tensor, Tensor] | None = None
        self._buffers: dict[int, Tensor] = {}

    def for_purpose(self, purpose: str) -> Self:
        """Return the same counter with noise of its own."""
        return _for_purpose(self, purpose)

    def noisy_hidden(
        self, x: Tensor, index: int | None, stage: str, block: int, rows: int
    ) -> Tensor:
        """The hidden layer of one input under the noises of one block: (rows, *hidden)."""
        hidden = self._first_output(x)
        if rows not in self._buffers:
            self._buffers[rows] = torch.empty(rows, *hidden.shape, device=hidden.device)
        key = self._units.key(index, stage, block)
        noise = self._stream.fill(self._noise, key, self._buffers[rows])
        return noise.mul_(self._scale).add_(hidden)

    def histogram(
        self, x: Tensor, index: int, stage: str, block: int, rows: int, draws: int
    ) -> np.ndarray:
        """Classes of the first ``draws`` of a block's ``rows``, as ``InputNoiseCounter`` counts
        them."""
        return self.sample_block(x, index, block, rows, draws, stage=stage, counted=False).histogram

    def sample_block(
        self,
        x: Tensor,
        index: int,
        block: int,
        rows: int,
        draws: int,
        binned: bool = False,
        leader: int | None = None,
        stage: str = ESTIMATE,
        counted: bool = True,
    ) -> BlockScores:
        """Scores of the first ``draws`` of one canonical block's ``rows``.

        x: float32 of the network's input shape. index names the input in the noise's key. leader:
        what is binned are its leads over each class (`betting.leads`). counted: whether the scores
        count, not the classes alone.
        """
        with torch.inference_mode():
            noisy = self.noisy_hidden(x, index, stage, block, rows)
            logits = self._rest(noisy)
            if self._inspect is not None:
                self._inspect(index, stage, block, noisy, logits, draws, scores=counted)
            logits = logits[:draws].double()
            p = (softmax_scores(logits) * SCORE_UNIT).long()
            votes = count_classes(logits, p.shape[1])
            found = torch.stack([p.sum(0), p.square().sum(0), votes]).cpu().numpy()
            scores = p.cpu().numpy() if binned else None
            if scores is not None and leader is not None:
                scores = score_bounds.lead_scores(scores, leader)
            bins = () if scores is None else score_bounds.bin_scores(scores)
            return BlockScores(found[0], found[1], found[2], draws, *bins)

    def _first_output(self, x: Tensor) -> Tensor:
        """The first layer's answer, kept for the blocks of one input."""
        if self._hidden is None or self._hidden[0] is not x:
            with torch.inference_mode():
                self._hidden = (x, self._first(x[None])[0])
        return self._hidden[1]


_Counter = TypeVar("_Counter", bound="InputNoiseCounter | HiddenNoiseCounter")


def _for_purpose(counter: _Counter, purpose: str) -> _Counter:
    other = copy.copy(counter)
    other._units = replace(counter._units, purpose=f"{counter._units.purpose}/{purpose}")
    if counter._inspect is not None:
        other._inspect = counter._inspect.for_purpose(purpose)
    return other


class KeyedGenerator:
    """Random numbers that are a pure function of the source, the input and what they are for.

    So an input is attacked or evaluated alike whoever does it, in whatever order and company.
    """

    def __init__(self, source: StreamKeys) -> None:
        self._source = source
        self._words = AesWords()

    def normals(
        self, indices: Sequence[int], stage: str, block: int, draws: int, shape: tuple[int, ...]
    ) -> Tensor:
        """Standard normals, float32 (len(indices) * draws, *shape); row by row of one input."""
        out = np.empty((len(indices), draws * int(np.prod(shape))), dtype=np.float32)
        noise = Gaussian(1.0)
        for row, index in zip(out, indices, strict=True):
            noise.draw(self._fill(index, stage, block, row.size), row)
        return torch.from_numpy(out).view(-1, *shape)

    def uniforms(self, indices: Sequence[int], stage: str, block: int, count: int) -> Tensor:
        """Uniform on (0, 1), float64 (len(indices), count)."""
        rows = [self._fill(index, stage, block, count)[:count] + 0.5 for index in indices]
        return torch.from_numpy(np.stack(rows) * 2.0**-32 + 0.5)

    def _fill(self, index: int, stage: str, block: int, count: int) -> np.ndarray:
        size = count + count % 2  # Box-Muller takes words in pairs
        return self._words.fill(self._source.key(index, stage, block), size)


# --- sampling at each location of noise -------------------------------------------------------


@dataclass(frozen=True)
class VoteSampler:
    """Votes under noise on the input, and under what noise the model has behind it.

    location: the place, in addition to the distribution that ``noise`` has on the input.
    combined_noise: what noise behind an affine first layer certifies with it."""

    noise: Noise
    location: NoiseLocation = field(default_factory=NoNoise)
    combined_noise: CombinedNoise | None = None

    @property
    def sigma(self) -> float:
        return self.noise.sigma

    @property
    def equivalent_noise(self) -> Noise:
        """The noise on the input that all of it is worth."""
        return (
            self.noise
            if self.combined_noise is None
            else Gaussian(self.combined_noise.combined_sigma)
        )

    @property
    def identity(self) -> dict[str, Any]:
        return {} if self.combined_noise is None else self.combined_noise.job_record

    def with_pinned(self, job_record: dict[str, Any]) -> VoteSampler:
        """A norm may differ in its last bits elsewhere: the one stored at the beginning is used."""
        return replace(self, combined_noise=read_combined_noise(job_record, self.sigma))

    def check_batch(
        self, assignment: Assignment, *, copies: bool = False
    ) -> tuple[nn.Module, Tensor]:
        cut = self.location.split(assignment.model, assignment.input_shape)
        if cut.before_noise is not None:
            return _hidden_noise_check_batch(cut, assignment, copies)
        stream = assignment.stream
        rows = assignment.batch_rows(int(np.prod(assignment.input_shape)))
        inputs = array_to_tensor(assignment.check_inputs).to(stream.device)
        unit = assignment.stream_keys.key(None, keys.CHECK, 0)
        noise = torch.empty(rows, *assignment.input_shape, device=stream.device)
        stream.fill(self.noise, unit, noise)
        return cut.after_noise, noise + inputs[_check_input_indices(rows, inputs, copies)]

    def build_counter(
        self, assignment: Assignment, spec: ClassifierSpec
    ) -> tuple[ClassCounter, Tensor]:
        cut = self.location.split(assignment.model, assignment.input_shape)
        if cut.before_noise is not None:
            return _build_hidden_noise_counter(cut, assignment, spec)
        source, classes, stream = assignment.stream_keys, assignment.classes, assignment.stream
        shapes = [(rows, *assignment.input_shape) for rows in (spec.batch, assignment.settings.n0)]
        classify = ExecutedClassifier(cut.after_noise, spec.backend, shapes, stream.device)
        batch = self.check_batch(assignment)[1]
        sampler = InputNoiseCounter(
            classify, self.noise, source, classes, assignment.input_shape,
            noise_stream=stream, inspector=assignment.build_reexecution(cut.after_noise,
                classify.logits, batch, spec.backend),
        )  # fmt: skip
        return sampler, classify(batch)


@dataclass(frozen=True)
class ScoreSampler:
    """Sums of scores under the model's own noise behind its first layer. sigma: sigma_r;
    sensitivity: of that layer."""

    sigma: float
    sensitivity: Sensitivity

    @classmethod
    def from_model(cls, model: nn.Module, input_shape: tuple[int, ...]) -> Self:
        """Return the place of a model with such noise. Raises UserError for another model."""
        noise = find_noise_location(model).as_first_layer_noise()
        return cls(noise.rms_std, first_layer_sensitivity(require_split(model), noise, input_shape))

    @property
    def identity(self) -> dict[str, Any]:
        return {"sensitivity": asdict(self.sensitivity)}

    def with_pinned(self, job_record: dict[str, Any]) -> ScoreSampler:
        """Norms may differ in their last bits elsewhere: those stored at the beginning are used."""
        return replace(self, sensitivity=Sensitivity(**job_record["sensitivity"]))

    def check_batch(
        self, assignment: Assignment, *, copies: bool = False
    ) -> tuple[nn.Module, Tensor]:
        return _hidden_noise_check_batch(self._cut(assignment), assignment, copies)

    def build_counter(
        self, assignment: Assignment, spec: ClassifierSpec
    ) -> tuple[ClassCounter, Tensor]:
        return _build_hidden_noise_counter(self._cut(assignment), assignment, spec)

    def _cut(self, assignment: Assignment) -> NoiseSplit:
        return find_noise_location(assignment.model).split(assignment.model, assignment.input_shape)


def _check_input_indices(rows: int, inputs: Tensor, copies: bool) -> Tensor:
    """Return the number of the input in each row of a check batch."""
    return torch.arange(rows) % (1 if copies else len(inputs))


def _hidden_noise_check_batch(
    cut: NoiseSplit, assignment: Assignment, copies: bool = False
) -> tuple[nn.Module, Tensor]:
    """`check_batch` of a place with a network before its noise."""
    assert cut.before_noise is not None
    stream = assignment.stream
    inputs = array_to_tensor(assignment.check_inputs).to(stream.device)
    sampler = HiddenNoiseCounter(
        cut.before_noise, cut.after_noise, cut.std, assignment.stream_keys, noise_stream=stream
    )
    with torch.inference_mode():
        at_zero = cut.before_noise(torch.zeros_like(inputs[:1]))
        rows = assignment.batch_rows(at_zero.numel())
        quiet = cut.before_noise(inputs[_check_input_indices(rows, inputs, copies)])
        noise = sampler.noisy_hidden(torch.zeros_like(inputs[0]), None, keys.CHECK, 0, rows)
        return cut.after_noise, quiet + (noise - at_zero)


def _build_hidden_noise_counter(
    cut: NoiseSplit, assignment: Assignment, spec: ClassifierSpec
) -> tuple[ClassCounter, Tensor]:
    """`sampler` of a place with a network before its noise."""
    assert cut.before_noise is not None
    network, batch = _hidden_noise_check_batch(cut, assignment)
    shapes = [(rows, *batch.shape[1:]) for rows in (spec.batch, assignment.settings.n0)]
    stream = assignment.stream
    executed = ExecutedClassifier(network, spec.backend, shapes, stream.device)
    sampler = HiddenNoiseCounter(
        cut.before_noise, executed.logits, cut.std, assignment.stream_keys, noise_stream=stream,
        inspector=assignment.build_reexecution(network, executed.logits, batch, spec.backend),
    )  # fmt: skip
    return sampler, executed(batch)


def combined_noise_of_model(
    location: NoiseLocation, model: nn.Module, input_shape: tuple[int, ...], sigma: float
) -> CombinedNoise | None:
    """Return the quadrature of a model with noise at ``location``, input noise sigma included.

    None where the input noise is all that certifies its inputs.
    """
    noise = location.first_affine_noise(model, input_shape)
    if noise is None:
        return None
    layer = require_split(model).affine_layer(input_shape)
    return CombinedNoise(
        sigma, noise.rms_std, operator_norms.l2_to_l2(layer, input_shape, noise.relative_variances)
    )


def first_layer_sensitivity(
    split: SplitModel, noise: HiddenNoise, input_shape: tuple[int, ...]
) -> Sensitivity:
    """Return the sensitivity of the actual first layer, normalization included.

    Raises UserError without noise.
    """
    if not bool((noise.std > 0).all()) or not bool(noise.std.isfinite().all()):
        raise UserError("every hidden component needs noise: some deviations are not positive")
    layer, shares = split.affine_layer(input_shape), noise.relative_variances
    l2 = operator_norms.l2_to_l2(layer, input_shape, shares)
    linf = operator_norms.linf_to_l2(layer, input_shape, shares, l2=l2)
    printed = operator_norms.hgm_linf_to_l2_as_printed(
        layer, input_shape, shares, feature_map=0 if shares.dim() > 1 else None
    )
    return Sensitivity(l2, linf, printed)


# --- the worker -------------------------------------------------------------------------------


Progress = Callable[[int, int, float], None]  # units done, units, per second


@dataclass(frozen=True)
class InputWorkUnit:
    """Units low..high-1 of one input, with the input itself: workers need no data set."""

    index: int
    low: int
    high: int
    x: np.ndarray


@dataclass(frozen=True)
class Assignment:
    """All that workers share; put into the object store once.

    device: where they work; gpus: how much of a GPU each of them has. inputs: how many are counted
    in all; last: the last of them (its index), where more may come. reexecution_key: the secret by
    which counted rows are chosen to be executed again (`dpdist.certification.reexecution`); None:
    none. least_draws: of each input, where that follows from no certificate. code: with which the
    model was saved, and each worker must have.
    """

    model: nn.Module
    settings: Certificate
    sampler: NoiseSampler
    stream_keys: StreamKeys
    classes: int
    input_shape: tuple[int, ...]
    check_inputs: np.ndarray
    spec: ClassifierSpec | None = None
    device: str = CPU.type
    gpus: float = 0.0
    inputs: int = 1
    last: int | None = None
    reexecution_key: bytes | None = field(default_factory=new_run_key, repr=False)

    least_draws: int | None = None

    def build_reexecution(
        self, network: nn.Module, execute: Callable[[Tensor], Tensor], other_inputs: Tensor,
        backend: str,
    ) -> Reexecution | None:  # fmt: skip
        """Return the executor of counted rows again: see `Reexecution` for the other arguments."""
        if self.reexecution_key is None:
            return None
        settings, batch = self.settings, self.spec.batch if self.spec else 1
        blocks = settings.num_units(batch)  # one: a test that may stop after its first block
        draws = settings.n0 + min(blocks * batch, settings.n)
        if self.least_draws is not None:
            draws, blocks = self.least_draws, -(-self.least_draws // batch)
        choice = RowChoice(self.inputs * draws, blocks, self.last, self.reexecution_key)
        return Reexecution(choice, network, execute, other_inputs, backend)

    code: FactoryCode = field(default_factory=FactoryCode)

    @property
    def stream(self) -> Stream:
        """A stream of noise on the device, by the generator that is pinned, or asked for."""
        device = torch.device(self.device)
        asked = self.settings.generator if self.spec is None else self.spec.generator
        return STREAMS[asked or default_generator(device)](device)

    def batch_rows(self, input_size: int) -> int:
        """Return the rows of the executed batch, for so many numbers in each."""
        return self.spec.batch if self.spec else self.settings.executed_batch_size(input_size)

    def on_device(self) -> Assignment:
        """Return the assignment with its model on the device.

        Raises UserError where this process has none, or has other code of the model's.
        """
        self.code.check("this worker")
        device = torch.device(self.device)
        inference.require_device(device)
        inference.make_deterministic(device)
        if device == CPU:
            return self
        return replace(self, model=copy.deepcopy(self.model).to(device))

    @property
    def executed_spec(self) -> ClassifierSpec:
        """The executed classifier. Raises ValueError before it is chosen."""
        if self.spec is None:
            raise ValueError("the executed classifier must be chosen before counting")
        return self.spec

    @property
    def num_units(self) -> int:
        """Return the number of units into which the work on an input is cut."""
        return self.settings.num_units(self.executed_spec.batch)

    def decide(self, *partials: dict[str, Any]) -> Any:
        """The certificate of an input, from what was counted in all its units."""
        return self.settings.decide(partials, self.sampler)


# What the probe may cost, its checks included: so many seconds, or that share of the job.
_PROBE_SECONDS, _PROBE_SHARE = 2.0, 0.05
_FLOPS = 2**31  # of a pass of a large network on a CPU: a tenth of a second or so
# Rows of a batch of a large network: fewer make every pass slower, more make the checks longer.
_LEAST_BATCH, _MOST_LEAST_BATCH = 2, 16
# Rows that the checks of a batch go through, for each of its rows; those in float64 count double.
_CHECKED_ROWS = 54
# Most work of the checks where they are more than that share: two minutes or so on a CPU. Beyond
# it, rows are taken to depend on one another, and each is executed alone.
_CHECK_FLOPS = 2**41


def probe(assignment: Assignment) -> ClassifierSpec:
    """Choose the executed classifier, on the kind of machine that will execute it.

    Raises ValueError when the model does not give finite logits for each class, or when its answer
    to one input depends on what else is in the batch, or where; UserError without the device.
    """
    began, chosen = time.perf_counter(), assignment.settings.batch
    assignment = _with_batch_size(assignment.on_device())
    alone = chosen is None and assignment.settings.batch == 1
    network, batch = assignment.sampler.check_batch(assignment)
    require_logits(network, batch, assignment.classes)
    _, copies = assignment.sampler.check_batch(assignment, copies=True)
    if found := find_batch_dependence(network, batch, copies, alone=alone):
        raise ValueError(
            with_page(
                f"it looks at its batch: {found}; no certificate holds for such a model",
                see="explanation/certificates.md#a-model-that-looks-at-its-batch",
            )
        )
    settings = assignment.settings
    timed, one = fresh_copy(network), time.perf_counter()
    with torch.inference_mode():
        timed(batch).argmax(1).cpu()
    one = time.perf_counter() - one
    job = one * assignment.inputs * settings.num_units(len(batch))
    budget = max(_PROBE_SECONDS, _PROBE_SHARE * job) - (time.perf_counter() - began)
    spec, _ = choose_backend(network, batch, settings.backend, (settings.n0,), budget)
    return replace(spec, generator=assignment.stream.name)


def _with_batch_size(assignment: Assignment) -> Assignment:
    """Return the assignment with a batch for a device's memory.

    The last block of draws is about full.
    """
    settings, device = assignment.settings, torch.device(assignment.device)
    if settings.batch is not None:
        return assignment
    if device == CPU:
        return _of_short_passes(assignment)
    network, batch = assignment.sampler.check_batch(assignment)
    fit = inference.max_batch_rows(
        network.eval(), batch[:1], settings.max_device_batch, min(1.0, assignment.gpus)
    )
    blocks = -(-settings.n // fit)
    rows = {"batch": -(-settings.n // blocks)}
    return replace(assignment, settings=settings.model_copy(update=rows))


def _power_of_two(number: int) -> int:
    """Return the largest power of two up to a number; 1 below 1."""
    return 1 << (max(1, number).bit_length() - 1)


def _of_short_passes(assignment: Assignment) -> Assignment:
    """With a batch whose pass takes no more than `_FLOPS`, so that the passes of a large network,
    which checks and probe take, do not take minutes.

    Where one input takes more than that, the batch is so small that the checks go through a
    twentieth of one input's draws, and never below two inputs, by which a network that looks at its
    batch is told. Where two inputs are more than that twentieth, and the checks more than
    `_CHECK_FLOPS`, they are left out: each input is executed alone, in a batch of one, so that
    there is no other one to look at. It follows from network and draws alone, not from how fast
    this machine is: shares of a certification that are counted elsewhere have the same.
    """
    from torch.utils.flop_counter import FlopCounterMode

    settings = assignment.settings
    network, rows = assignment.sampler.check_batch(assignment)
    try:
        with FlopCounterMode(display=False) as counter, torch.inference_mode():
            fresh_copy(network.eval())(rows[:1])
        flops = counter.get_total_flops()
    except Exception:  # what is wrong with the model, the checks say
        return assignment
    fit = _FLOPS // max(1, flops)
    if fit >= len(rows) // 4:  # a usual pass is short enough
        return assignment
    checked = int(_PROBE_SHARE * (settings.n0 + settings.n) / _CHECKED_ROWS)
    least = min(_MOST_LEAST_BATCH, max(_LEAST_BATCH, _power_of_two(checked)))
    batch = max(least, _power_of_two(fit))
    if checked < _LEAST_BATCH and _CHECKED_ROWS * batch * flops > _CHECK_FLOPS:
        batch = 1
    return replace(
        assignment, settings=settings.model_copy(update={"batch": min(batch, len(rows))})
    )


class Worker:
    """Called with a list of pieces; returns a JSON row for each, with the seconds it took."""

    def __init__(self, assignment: Assignment, counter: Any = None) -> None:
        """counter: of the executed classifier; by default one that passed the check here."""
        self._assignment, self._settings = assignment, assignment.settings
        self._noise_sampler = assignment.sampler
        self._device = torch.device(assignment.device)
        self._counter = counter or build_checked_counter(assignment)
        self._batch = assignment.executed_spec.batch

    def __call__(self, pieces: list[InputWorkUnit]) -> list[dict[str, Any]]:
        rows = []
        for piece in pieces:
            start = time.perf_counter()
            x = array_to_tensor(piece.x).to(self._device)
            partial = self._settings.sample(
                self._counter,
                x,
                piece.index,
                piece.low,
                piece.high,
                self._batch,
                self._noise_sampler,
            )
            seconds = round(time.perf_counter() - start, 6)
            rows.append({"index": piece.index, "low": piece.low, "high": piece.high,
                         "partial": partial, "seconds": seconds})  # fmt: skip
        return rows

    def certify(
        self, x: np.ndarray, index: int, progress: Progress = lambda done, units, rate: None
    ) -> Any:
        """The verdict on one input, with the noise of that index."""
        units, began = self._assignment.num_units, time.monotonic()
        partials = []
        for unit in range(units):
            (row,) = self([InputWorkUnit(index, unit, unit + 1, x)])
            partials.append(row["partial"])
            progress(unit + 1, units, (unit + 1) / max(time.monotonic() - began, 1e-9))
        return self._assignment.decide(*partials)

    def predict(self, x: torch.Tensor, index: int) -> int:
        """The class alone, -1 where it is undecided."""
        there = x.to(self._device)
        return self._settings.predict(self._counter, there, index, self._batch, self._noise_sampler)


def build_checked_counter(assignment: Assignment) -> Any:
    """The sampler on the executed classifier. Raises UserError when it fails the check here."""
    spec, here = assignment.executed_spec, inference.device_name(torch.device(assignment.device))
    if spec.device != CPU.type and here != spec.machine:
        raise UserError(
            f"this worker counts on {here}, the certification began on {spec.machine}: another "
            "kind of GPU rounds otherwise; use workers of one kind",
            see="explanation/certificates.md#of-which-classifier-it-speaks",
        )
    sampler, answer = assignment.sampler.build_counter(assignment.on_device(), spec)
    if digest_classes(answer) != spec.check:
        raise UserError(
            "this worker computes other classes on the check batch than the model did when the "
            f"certification began ({spec.machine}, torch {spec.torch_version}): use workers of "
            "one kind",
            see="explanation/certificates.md#of-which-classifier-it-speaks",
        )
    return sampler


# --- answers to clean inputs ------------------------------------------------------------------


CLEAN_DRAWS = 16  # of a model's own noise


@dataclass(frozen=True)
class CleanBatch:
    """Inputs that are answered without smoothing noise. first: the place of the first one."""

    first: int
    inputs: np.ndarray


class CleanWorker:
    """Called with a batch; returns the class of each input without smoothing noise.

    A model with noise of its own answers by its mean scores.
    """

    def __init__(self, assignment: Assignment) -> None:
        inference.use_single_thread()
        assignment = assignment.on_device()
        self._model, self._device = fresh_copy(assignment.model.eval()), assignment.device
        self._random = find_noise_location(assignment.model).is_random
        self._seed = assignment.stream_keys.seed

    def __call__(self, batch: CleanBatch) -> list[int]:
        inputs = array_to_tensor(batch.inputs).to(self._device)
        with torch.inference_mode():
            if self._random:
                answers = expected_log_scores(
                    self._model, inputs, CLEAN_DRAWS, self._seed, batch.first
                )
            else:
                answers = self._model(inputs)
        return list(predicted_classes(answers).tolist())


def expected_log_scores(
    model: nn.Module, inputs: Tensor, draws: int, seed: str | None = None, first_index: int = 0
) -> Tensor:
    """log of the mean softmax over ``draws`` noises, each fresh for every input: (B, classes).

    A draw whose logits are not finite has score 0 in every class; an input of which all are such
    has no scores: NaN.

    The noise of input b is keyed by its name first + b, wherever it stands in a batch. seed: None
    draws a secret one. Raises ValueError for a model without noise of its own.
    """
    place = find_noise_location(model)
    shape = place.normals_shape(model, tuple(inputs.shape[1:]))
    if shape is None:
        raise ValueError("the model has no noise of its own")
    names = range(first_index, first_index + len(inputs))
    source = StreamKeys("evaluate", seed or secrets.token_hex(16), "", "", "gaussian", 1.0)
    randomness, total = KeyedGenerator(source), torch.zeros(())
    with torch.inference_mode():
        for draw in range(draws):
            normals = randomness.normals(names, ESTIMATE, draw, 1, shape).to(inputs.device)
            total = total + softmax_scores(place.logits(model, inputs, normals).double())
        none = total.sum(1, keepdim=True) == 0
        # A class that is never said has a finite log score too: others have no more than a number.
        least = torch.finfo(torch.float64).tiny
        return (total / draws).clamp_min(least).log().masked_fill(none, torch.nan)
