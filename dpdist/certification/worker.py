"""Sample a model under noise and count its answers, in one process: the worker of a certification.

A worker has the executed classifier and counts its answers on units of inputs, by votes or by sums
of scores. The sampler of the noise determines the network that is executed after the noise, a batch
on which every worker must give the same answers, and the counter.
"""

from __future__ import annotations

import copy
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

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
    Philox,
    Stream,
    choose_backend,
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

    It is on the device of the logits. Rows that are not finite have no class.
    """
    return torch.bincount(predicted_classes(logits) + 1, minlength=classes + 1)[1:]


class _BlockCounter:
    """Counts answers over canonical blocks of draws, each under the noise of its own key.

    A block has ``batch`` rows; a block counted in part (the last of n draws) is executed whole,
    because the executed batch is fixed. The counts of a block do not depend on other blocks.
    noise_stream: generates the noise, on the device of the classifier. inspector: executes rows of
    counted blocks again.
    """

    def __init__(
        self,
        noise: Noise,
        stream_keys: StreamKeys,
        noise_stream: Stream | None,
        inspector: Reexecution | None,
    ) -> None:
        self._noise, self._units = noise, stream_keys
        self._stream, self._inspect = noise_stream or Aes(), inspector
        self._buffers: dict[int, Tensor] = {}

    def for_purpose(self, purpose: str) -> Self:
        """Return the same counter with separate noise."""
        other = copy.copy(self)
        other._units = replace(self._units, purpose=f"{self._units.purpose}/{purpose}")
        if self._inspect is not None:
            other._inspect = self._inspect.for_purpose(purpose)
        return other

    def _fill_noise(self, key: bytes, rows: int, shape: Sequence[int]) -> Tensor:
        """Return the noise of a key, (rows, *shape), in a buffer that the next call overwrites."""
        if rows not in self._buffers:
            self._buffers[rows] = torch.empty(rows, *shape, device=self._stream.device)
        return self._stream.fill(self._noise, key, self._buffers[rows])


class InputNoiseCounter(_BlockCounter):
    """Counts classes of noisy copies of an input."""

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
        super().__init__(noise, stream_keys, noise_stream, inspector)
        self._classify, self._classes, self._shape = classify, classes, input_shape

    def histogram(
        self, x: Tensor, index: int, stage: str, block: int, rows: int, draws: int
    ) -> np.ndarray:
        """Return the classes of the first ``draws`` of a block's noisy copies: int64 (classes,).

        x: float32 of the input's shape. index: names the input in the noise's key. rows: of the
        whole block.
        """
        noisy = self._fill_noise(self._units.key(index, stage, block), rows, self._shape).add_(x)
        logits = self._classify.logits(noisy)
        if self._inspect is not None:
            self._inspect(index, stage, block, noisy, logits, draws)
        return count_classes(logits[:draws], self._classes).cpu().numpy()


@dataclass(frozen=True)
class BlockScores:
    """Softmax scores under noise, in units of 1 / SCORE_UNIT, rounded down.

    A draw whose logits are not finite has score 0 in every class. sums, squares: of the scores,
    int64 (K,). histogram: of the classes, as `ClassCounter` returns it. draws: their number. bins,
    excess: of the scores if requested, int64 (K, BINS) each (`score_bounds.bin_scores`).
    """

    sums: np.ndarray
    squares: np.ndarray
    histogram: np.ndarray
    draws: int
    bins: np.ndarray | None = None
    excess: np.ndarray | None = None


class HiddenNoiseCounter(_BlockCounter):
    """Sums scores under fresh noise after the first layers (certificates: ``scores``).

    first: the network before the noise. rest: executes the network after it. scale: standard
    deviation of every component, a number or a tensor of the hidden shape (heterogeneous noise; 0
    for components without noise).
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
        super().__init__(Gaussian(1.0), stream_keys, noise_stream, inspector)
        self._first, self._rest = first.eval(), rest
        self._scale = torch.as_tensor(scale, dtype=torch.float32).to(self._stream.device)
        if not bool((self._scale >= 0).all()) or not bool((self._scale > 0).any()):
            raise ValueError("scales must be >= 0, and one of them positive")
        self._hidden: tuple[Tensor, Tensor] | None = None

    def noisy_hidden(
        self, x: Tensor, index: int | None, stage: str, block: int, rows: int
    ) -> Tensor:
        """Return the hidden layer of one input under the noise of one block: (rows, *hidden)."""
        hidden = self._first_output(x)
        noise = self._fill_noise(self._units.key(index, stage, block), rows, hidden.shape)
        return noise.mul_(self._scale).add_(hidden)

    def histogram(
        self, x: Tensor, index: int, stage: str, block: int, rows: int, draws: int
    ) -> np.ndarray:
        """Return the classes of the first ``draws`` of a block's ``rows``: int64 (classes,)."""
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
        """Return the scores of the first ``draws`` of one canonical block's ``rows``.

        x: float32 of the network's input shape. index: names the input in the noise's key. binned:
        whether to bin the scores, or with a leader its leads over each class
        (`score_bounds.lead_scores`). counted: whether scores count, in addition to classes.
        """
        with torch.inference_mode():
            noisy = self.noisy_hidden(x, index, stage, block, rows)
            logits = self._rest(noisy)
            if self._inspect is not None:
                self._inspect(index, stage, block, noisy, logits, draws, scores=counted)
            logits = logits[:draws].double()
            p = (softmax_scores(logits) * SCORE_UNIT).long()
            counted_classes = count_classes(logits, p.shape[1])
            totals = torch.stack([p.sum(0), p.square().sum(0), counted_classes])
            sums, squares, votes = totals.cpu().numpy()
            if not binned:
                return BlockScores(sums, squares, votes, draws)
            scores = p.cpu().numpy()
            if leader is not None:
                scores = score_bounds.lead_scores(scores, leader)
            return BlockScores(sums, squares, votes, draws, *score_bounds.bin_scores(scores))

    def _first_output(self, x: Tensor) -> Tensor:
        """Return the first layer's output, kept for the blocks of one input."""
        if self._hidden is None or self._hidden[0] is not x:
            with torch.inference_mode():
                self._hidden = (x, self._first(x[None])[0])
        return self._hidden[1]


class KeyedGenerator:
    """Random numbers that are a pure function of the source, the input and their purpose.

    So an attack or evaluation of an input does not depend on worker, order and other inputs.
    """

    def __init__(self, source: StreamKeys) -> None:
        self._source = source
        self._words = AesWords()

    def normals(
        self, indices: Sequence[int], stage: str, block: int, draws: int, shape: tuple[int, ...]
    ) -> Tensor:
        """Return standard normals, float32 (len(indices) * draws, *shape), input after input."""
        out = np.empty((len(indices), draws * int(np.prod(shape))), dtype=np.float32)
        noise = Gaussian(1.0)
        for row, index in zip(out, indices, strict=True):
            noise.draw(self._fill(index, stage, block, row.size), row)
        return torch.from_numpy(out).view(-1, *shape)

    def uniforms(self, indices: Sequence[int], stage: str, block: int, count: int) -> Tensor:
        """Return uniform numbers on (0, 1), float64 (len(indices), count)."""
        rows = [self._fill(index, stage, block, count)[:count] + 0.5 for index in indices]
        return torch.from_numpy(np.stack(rows) * 2.0**-32 + 0.5)

    def _fill(self, index: int, stage: str, block: int, count: int) -> np.ndarray:
        size = count + count % 2  # Box-Muller takes words in pairs
        return self._words.fill(self._source.key(index, stage, block), size)


# --- sampling at each location of noise -------------------------------------------------------


@dataclass(frozen=True)
class VoteSampler:
    """Votes under noise on the input and the model's own noise, if any.

    noise: on the input. location: of all noise. combined_noise: both noises, if the model's own one
    is after an affine first layer.
    """

    noise: Noise
    location: NoiseLocation = field(default_factory=NoNoise)
    combined_noise: CombinedNoise | None = None

    @property
    def sigma(self) -> float:
        return self.noise.sigma

    @property
    def equivalent_noise(self) -> Noise:
        """Return the input noise that certifies as all of the noise."""
        if self.combined_noise is None:
            return self.noise
        return Gaussian(self.combined_noise.combined_sigma)

    @property
    def identity(self) -> dict[str, Any]:
        return {} if self.combined_noise is None else self.combined_noise.job_record

    def with_pinned(self, job_record: dict[str, Any]) -> VoteSampler:
        """Return the sampler with the stored norm: machines may compute other last bits."""
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
        stream, shape = assignment.stream, assignment.input_shape
        shapes = [(rows, *shape) for rows in (spec.batch, assignment.settings.n0)]
        classify = ExecutedClassifier(cut.after_noise, spec.backend, shapes, stream.device)
        _, batch = self.check_batch(assignment)
        inspector = assignment.build_reexecution(
            cut.after_noise, classify.logits, batch, spec.backend
        )
        counter = InputNoiseCounter(
            classify,
            self.noise,
            assignment.stream_keys,
            assignment.classes,
            shape,
            noise_stream=stream,
            inspector=inspector,
        )
        return counter, classify(batch)


@dataclass(frozen=True)
class ScoreSampler:
    """Sums of scores under the model's own noise after its first layer.

    sigma: sigma_r. sensitivity: norms of that layer.
    """

    sigma: float
    sensitivity: Sensitivity

    @classmethod
    def from_model(cls, model: nn.Module, input_shape: tuple[int, ...]) -> Self:
        """Return the sampler of a model with such noise. Raises UserError for other models."""
        noise = find_noise_location(model).as_first_layer_noise()
        return cls(noise.rms_std, first_layer_sensitivity(require_split(model), noise, input_shape))

    @property
    def identity(self) -> dict[str, Any]:
        return {"sensitivity": asdict(self.sensitivity)}

    def with_pinned(self, job_record: dict[str, Any]) -> ScoreSampler:
        """Return the sampler with the stored norms: machines may compute other last bits."""
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
    """Return the index of the check input in each row of a check batch."""
    return torch.arange(rows) % (1 if copies else len(inputs))


def _hidden_noise_check_batch(
    cut: NoiseSplit, assignment: Assignment, copies: bool = False
) -> tuple[nn.Module, Tensor]:
    """Return `check_batch` of noise with a network before it."""
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
    """Return `build_counter` of noise with a network before it."""
    assert cut.before_noise is not None
    network, batch = _hidden_noise_check_batch(cut, assignment)
    shapes = [(rows, *batch.shape[1:]) for rows in (spec.batch, assignment.settings.n0)]
    stream = assignment.stream
    executed = ExecutedClassifier(network, spec.backend, shapes, stream.device)
    counter = HiddenNoiseCounter(
        cut.before_noise,
        executed.logits,
        cut.std,
        assignment.stream_keys,
        noise_stream=stream,
        inspector=assignment.build_reexecution(network, executed.logits, batch, spec.backend),
    )
    return counter, executed(batch)


def combined_noise_of_model(
    location: NoiseLocation, model: nn.Module, input_shape: tuple[int, ...], sigma: float
) -> CombinedNoise | None:
    """Return the two noises that certify a model: input noise of sigma, and its own.

    None if its own noise is not after an affine first layer, and only input noise certifies.
    """
    noise = location.first_affine_noise(model, input_shape)
    if noise is None:
        return None
    layer = require_split(model).affine_layer(input_shape)
    norm = operator_norms.l2_to_l2(layer, input_shape, noise.relative_variances)
    return CombinedNoise(sigma, noise.rms_std, norm)


def first_layer_sensitivity(
    split: SplitModel, noise: HiddenNoise, input_shape: tuple[int, ...]
) -> Sensitivity:
    """Return the sensitivity of the actual first layer, normalization included.

    Raises UserError for a component without noise.
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

    device: where they work. gpus: fraction or number of GPUs of each worker. inputs: number of
    counted inputs; last: index of the last of them if more may follow. reexecution_key: the secret
    by which counted rows are chosen for re-execution (`dpdist.certification.reexecution`); None:
    no row is. least_draws: the fewest draws of an input, if not by a certificate. code: the model's
    code, which each worker must have.
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
    code: FactoryCode = field(default_factory=FactoryCode)

    def build_reexecution(
        self,
        network: nn.Module,
        execute: Callable[[Tensor], Tensor],
        other_inputs: Tensor,
        backend: str,
    ) -> Reexecution | None:
        """Return the re-execution of counted rows; for the arguments see `Reexecution`."""
        if self.reexecution_key is None:
            return None
        settings, batch = self.settings, self.spec.batch if self.spec else 1
        blocks = settings.num_units(batch)  # 1: a test that may stop after its first block
        draws = settings.n0 + min(blocks * batch, settings.n)
        if self.least_draws is not None:
            draws, blocks = self.least_draws, -(-self.least_draws // batch)
        choice = RowChoice(self.inputs * draws, blocks, self.last, self.reexecution_key)
        return Reexecution(choice, network, execute, other_inputs, backend)

    @property
    def stream(self) -> Stream:
        """Return a noise stream on the device, by the pinned or requested generator."""
        device = torch.device(self.device)
        asked = self.settings.generator if self.spec is None else self.spec.generator
        return STREAMS[asked or (Aes if device == CPU else Philox).name](device)

    def batch_rows(self, input_size: int) -> int:
        """Return the rows of the executed batch, for inputs of `input_size` numbers."""
        return self.spec.batch if self.spec else self.settings.executed_batch_size(input_size)

    def on_device(self) -> Assignment:
        """Return the assignment with its model on the device.

        Raises UserError if this process lacks the device or has different code of the model.
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
        """Return the executed classifier. Raises ValueError before it is chosen."""
        if self.spec is None:
            raise ValueError("the executed classifier must be chosen before counting")
        return self.spec

    @property
    def num_units(self) -> int:
        """Return the number of units into which the work on an input is split."""
        return self.settings.num_units(self.executed_spec.batch)

    def decide(self, *partials: dict[str, Any]) -> Any:
        """Return the certificate of an input, from the counts of all its units."""
        return self.settings.decide(partials, self.sampler)


# The most time of the probe, its checks included: seconds, or that fraction of the job.
_PROBE_SECONDS, _PROBE_SHARE = 2.0, 0.05
_FLOPS = 2**31  # of a pass of a large network on a CPU: about a tenth of a second
# Rows of a batch of a large network: fewer make every pass slower, more make the checks longer.
_LEAST_BATCH, _MOST_LEAST_BATCH = 2, 16
# Rows that the checks of a batch pass through the network, for each of its rows; float64 counts
# double.
_CHECKED_ROWS = 54
# The most work of checks that exceed that fraction: about two minutes on a CPU. For larger
# networks, rows are assumed to depend on one another, and each is executed alone.
_CHECK_FLOPS = 2**41


def probe(assignment: Assignment) -> ClassifierSpec:
    """Return the executed classifier, chosen on the kind of machine that will execute it.

    Raises ValueError if the model does not return finite logits for each class, or if its answer to
    an input depends on the rest of the batch or on its row; UserError without the device.
    """
    began, asked = time.perf_counter(), assignment.settings.batch
    assignment = _with_batch_size(assignment.on_device())
    alone = asked is None and assignment.settings.batch == 1
    network, batch = assignment.sampler.check_batch(assignment)
    require_logits(network, batch, assignment.classes)
    _, copies = assignment.sampler.check_batch(assignment, copies=True)
    if found := find_batch_dependence(network, batch, copies, alone=alone):
        raise ValueError(
            with_page(
                f"it looks at its batch: {found}; no certificate is valid for such a model",
                see="explanation/certificates.md#a-model-that-looks-at-its-batch",
            )
        )
    settings = assignment.settings
    timed, start = fresh_copy(network), time.perf_counter()
    with torch.inference_mode():
        timed(batch).argmax(1).cpu()
    pass_seconds = time.perf_counter() - start
    job_seconds = pass_seconds * assignment.inputs * settings.num_units(len(batch))
    budget = max(_PROBE_SECONDS, _PROBE_SHARE * job_seconds) - (time.perf_counter() - began)
    spec, _ = choose_backend(network, batch, settings.backend, (settings.n0,), budget)
    return replace(spec, generator=assignment.stream.name)


def _with_batch_size(assignment: Assignment) -> Assignment:
    """Return the assignment with a batch size for its device, unless one was requested.

    On a GPU it fits the memory, and the last block of draws is about full.
    """
    settings, device = assignment.settings, torch.device(assignment.device)
    if settings.batch is not None:
        return assignment
    if device == CPU:
        return _with_short_passes(assignment)
    network, batch = assignment.sampler.check_batch(assignment)
    fit = inference.max_batch_rows(
        network.eval(), batch[:1], settings.max_device_batch, min(1.0, assignment.gpus)
    )
    blocks = -(-settings.n // fit)
    rows = {"batch": -(-settings.n // blocks)}
    return replace(assignment, settings=settings.model_copy(update=rows))


def _with_short_passes(assignment: Assignment) -> Assignment:
    """Return the assignment with a batch whose pass takes at most `_FLOPS`.

    So checks and probe of a large network do not take minutes. If one input takes more than that,
    the batch is so small that the checks need a twentieth of one input's draws, but at least two
    inputs, which are necessary to detect a network that looks at its batch. If two inputs exceed
    that twentieth, and the checks `_CHECK_FLOPS`, the checks are omitted: each input is executed in
    a batch of one. The batch depends only on network and draws, not on the speed of this machine,
    so that it is the same wherever parts of a certification are counted.
    """
    from torch.utils.flop_counter import FlopCounterMode

    settings = assignment.settings
    network, rows = assignment.sampler.check_batch(assignment)
    try:
        with FlopCounterMode(display=False) as counter, torch.inference_mode():
            fresh_copy(network.eval())(rows[:1])
        flops = counter.get_total_flops()
    except Exception:  # the checks report what is wrong with the model
        return assignment
    fit = _FLOPS // max(1, flops)
    if fit >= len(rows) // 4:  # a usual pass is short enough
        return assignment
    checked = int(_PROBE_SHARE * (settings.n0 + settings.n) / _CHECKED_ROWS)
    least = min(_MOST_LEAST_BATCH, max(_LEAST_BATCH, inference.power_of_two(checked)))
    batch = max(least, inference.power_of_two(fit))
    if checked < _LEAST_BATCH and _CHECKED_ROWS * batch * flops > _CHECK_FLOPS:
        batch = 1
    return replace(
        assignment, settings=settings.model_copy(update={"batch": min(batch, len(rows))})
    )


class Worker:
    """Called with a list of units; returns a JSON row for each, with the seconds it took."""

    def __init__(self, assignment: Assignment, counter: Any = None) -> None:
        """counter: of the executed classifier; by default one that passed the check here."""
        self._assignment, self._settings = assignment, assignment.settings
        self._device = torch.device(assignment.device)
        self._counter = counter or build_checked_counter(assignment)
        self._batch = assignment.executed_spec.batch

    def __call__(self, units: list[InputWorkUnit]) -> list[dict[str, Any]]:
        rows = []
        for unit in units:
            start = time.perf_counter()
            partial = self._settings.sample(
                self._counter,
                array_to_tensor(unit.x).to(self._device),
                unit.index,
                unit.low,
                unit.high,
                self._batch,
                self._assignment.sampler,
            )
            rows.append(
                {
                    "index": unit.index,
                    "low": unit.low,
                    "high": unit.high,
                    "partial": partial,
                    "seconds": round(time.perf_counter() - start, 6),
                }
            )
        return rows

    def certify(
        self, x: np.ndarray, index: int, progress: Progress = lambda done, units, rate: None
    ) -> Any:
        """Return the verdict on one input, with the noise of that index."""
        units, began = self._assignment.num_units, time.monotonic()
        partials = []
        for unit in range(units):
            (row,) = self([InputWorkUnit(index, unit, unit + 1, x)])
            partials.append(row["partial"])
            progress(unit + 1, units, (unit + 1) / max(time.monotonic() - began, 1e-9))
        return self._assignment.decide(*partials)

    def predict(self, x: torch.Tensor, index: int) -> int:
        """Return the class of one input, with the noise of that index; -1 if it is undecided."""
        x = x.to(self._device)
        return self._settings.predict(
            self._counter, x, index, self._batch, self._assignment.sampler
        )


def build_checked_counter(assignment: Assignment) -> Any:
    """Return the counter on the executed classifier. Raises UserError if it fails the check."""
    spec, here = assignment.executed_spec, inference.device_name(torch.device(assignment.device))
    page = "explanation/certificates.md#of-which-classifier-it-speaks"
    if spec.device != CPU.type and here != spec.machine:
        raise UserError(
            f"this worker counts on {here}, the certification started on {spec.machine}: a "
            "different kind of GPU rounds differently; use workers of one kind",
            see=page,
        )
    counter, answer = assignment.sampler.build_counter(assignment.on_device(), spec)
    if digest_classes(answer) != spec.check:
        raise UserError(
            "this worker computes different classes on the check batch than the model did when the "
            f"certification started ({spec.machine}, torch {spec.torch_version}): use workers of "
            "one kind",
            see=page,
        )
    return counter


# --- answers to clean inputs ------------------------------------------------------------------


CLEAN_DRAWS = 16  # samples of a model's own noise


@dataclass(frozen=True)
class CleanBatch:
    """Inputs that are answered without smoothing noise. first: position of the first one."""

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
    """Return log of the mean softmax over ``draws`` noise samples of each input: (B, classes).

    A draw whose logits are not finite has score 0 in every class; if all draws of an input are such
    its scores are NaN. The noise of input b is keyed by first_index + b, whatever the batch is.
    seed: None draws a secret one. Raises ValueError for a model without its own noise.
    """
    location = find_noise_location(model)
    shape = location.normals_shape(model, tuple(inputs.shape[1:]))
    if shape is None:
        raise ValueError("the model has no noise of its own")
    names = range(first_index, first_index + len(inputs))
    source = StreamKeys("evaluate", seed or secrets.token_hex(16), "", "", "gaussian", 1.0)
    randomness, total = KeyedGenerator(source), torch.zeros(())
    with torch.inference_mode():
        for draw in range(draws):
            normals = randomness.normals(names, ESTIMATE, draw, 1, shape).to(inputs.device)
            total = total + softmax_scores(location.logits(model, inputs, normals).double())
        none = total.sum(1, keepdim=True) == 0
        # The log score of a class that is never answered is finite too.
        least = torch.finfo(torch.float64).tiny
        return (total / draws).clamp_min(least).log().masked_fill(none, torch.nan)
