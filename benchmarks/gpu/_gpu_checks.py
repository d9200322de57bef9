"""Is what a device computes right? Each check returns what it measured, or raises `CheckFailed`.

The oracle of the engine is autograd, one record at a time on the same device. float64 holds the
formulas, float32 what a run computes. Thresholds are the contracts of the functions that are
checked, or rounding, and stand beside them.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _networks import vit_tiny
from torch import Tensor, nn

from dpdist.certification import inference
from dpdist.certification.inference import REDUCED_PRECISION_FORMS, ExecutedClassifier, Philox
from dpdist.certification.noise import NOISES, Gaussian
from dpdist.certification.worker import InputNoiseCounter
from dpdist.gradients import layer_rules, noise, per_example
from dpdist.gradients.clipping import AutomaticClipping, FlatClipping, NoClipping, PerLayerClipping
from dpdist.gradients.engine import GradientEngine, cross_entropy
from dpdist.gradients.perturbations import CropAndFlip, InputPerturbation, ParameterPerturbation
from dpdist.gradients.sampling import Blocks, poisson_sample
from dpdist.models.zoo import tf_cnn
from dpdist.randomness import device_generators, keys
from dpdist.randomness.keys import StreamKeys, derive_key, stream_words

KEY, CPU, CLASSES = bytes(range(32)), torch.device("cpu"), 3
# Relative to the sum of the records' norms: sums of some thousand terms, in any order.
CLOSE = {torch.float32: 1e-4, torch.float64: 1e-11}
# A norm by Gram matrices has a floor of 2^-42 T^2 (`per_example._CANCELLATION_FLOOR`), T <= 64.
GRAM_CLOSE = 1e-8
SOURCE = StreamKeys("gpu", "1", "model", "data", "gaussian", 0.5)


class CheckFailed(Exception):
    """Something was computed otherwise than its contract says."""


def require(holds: bool, told: str) -> None:
    if not holds:
        raise CheckFailed(told)


# --- networks, one for each rule --------------------------------------------------------------


class Scale(nn.Module):
    """A layer without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Last(nn.Module):
    """Return a recurrent layer's output at the last position."""

    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.recurrent = recurrent

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(x)[0][:, -1]


class Mean(nn.Module):
    """The mean over positions."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1, -2).mean(1)


# Of a smoke test, also on a device whose operations are Python.
QUICK = ("Linear", "Tied", "Conv2d", "GroupNorm", "LSTM", "a layer without a rule")


class Narrow(nn.Module):
    """The mean over the pixels."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


class Tied(nn.Module):
    """A table of tokens that is the output layer too, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)
        self.twice = nn.Linear(6, 6)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        found = torch.tanh(self.twice(torch.tanh(self.twice(self.table(tokens)))))
        return self.head(found).mean(1)


def _head(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(CLASSES))


def _recurrent(kind: type[nn.RNNBase], **options: Any) -> nn.Module:
    layer = kind(5, 6, batch_first=True, **options)
    return nn.Sequential(Last(layer), nn.LazyLinear(CLASSES))


IMAGES, SERIES, TOKENS = (4, 8, 8), (7, 5), ()
Case = tuple[Callable[[], nn.Module], tuple[int, ...]]
CASES: dict[str, Case] = {
    "Linear": (lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), Mean(), nn.Linear(6, 3)), SERIES),
    "Linear, no position": (lambda: _head(nn.Flatten(), nn.Linear(35, 6), nn.Tanh()), SERIES),
    "Embedding": (lambda: _head(nn.Embedding(9, 4, padding_idx=0)), TOKENS),
    "Tied": (Tied, TOKENS),
    "Conv1d": (lambda: _head(nn.Conv1d(7, 4, 2, stride=2, padding=1)), SERIES),
    "Conv2d": (lambda: _head(nn.Conv2d(4, 6, 3, padding=1), nn.ReLU()), IMAGES),
    "Conv2d, stride": (lambda: _head(nn.Conv2d(4, 6, 3, stride=2, dilation=2)), IMAGES),
    "Conv2d, groups": (lambda: _head(nn.Conv2d(4, 6, 3, groups=2)), IMAGES),
    "Conv2d, depthwise": (lambda: _head(nn.Conv2d(4, 8, 3, groups=4)), IMAGES),
    "Conv2d, reflected": (
        lambda: _head(nn.Conv2d(4, 2, 3, padding=1, padding_mode="reflect")), IMAGES,
    ),
    "Conv2d, wide": (lambda: _head(nn.Conv2d(4, 64, 3, padding="same"), Narrow()), IMAGES),
    "ConvTranspose2d": (lambda: _head(nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1)), IMAGES),
    "GroupNorm": (lambda: _head(nn.GroupNorm(2, 4), nn.Tanh()), IMAGES),
    "LayerNorm": (lambda: _head(nn.LayerNorm((8, 8)), nn.Tanh()), IMAGES),
    "InstanceNorm1d": (lambda: _head(nn.InstanceNorm1d(7, affine=True), nn.Tanh()), SERIES),
    "InstanceNorm2d": (lambda: _head(nn.InstanceNorm2d(4, affine=True), nn.Tanh()), IMAGES),
    "InstanceNorm3d": (
        lambda: _head(nn.Unflatten(2, (2, 4)), nn.InstanceNorm3d(4, affine=True), nn.Tanh()),
        IMAGES,
    ),
    "RNN": (lambda: _recurrent(nn.RNN), SERIES),
    "GRU": (lambda: _recurrent(nn.GRU, num_layers=2), SERIES),
    "LSTM": (lambda: _recurrent(nn.LSTM, bidirectional=True), SERIES),
    "a layer without a rule": (lambda: _head(Scale(), nn.Tanh()), IMAGES),
    "ViT": (lambda: vit_tiny(quick=True), (3, 32, 32)),
}  # fmt: skip


def cases(quick: bool) -> dict[str, Case]:
    """Return the cases, with GPT-2's layer where its library is installed and time is no matter."""
    if quick:
        return CASES
    try:
        from transformers.pytorch_utils import Conv1D
    except Exception:
        return CASES

    def gpt2_layer() -> nn.Module:
        return nn.Sequential(Conv1D(6, 5), nn.Tanh(), Mean(), nn.Linear(6, CLASSES))

    return {**CASES, "Conv1D": (gpt2_layer, SERIES)}


def uncovered_rules(quick: bool) -> list[str]:
    """Return the layers that have a rule and no case of their own: none, or a case is missing."""
    if quick and (library := sys.modules.get("transformers.pytorch_utils")):
        known = [kind for kind in layer_rules._known_rules() if kind is not library.Conv1D]
    else:
        known = list(layer_rules._known_rules())
    first = {name.partition(",")[0] for name in cases(quick)}
    return [kind.__name__ for kind in known if kind.__name__ not in first]


def built(case: Case, count: int, dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a network on the CPU, inputs and targets."""
    torch.manual_seed(0)
    make, shape = case
    inputs = torch.rand(count, *shape, dtype=dtype) if shape else torch.randint(0, 9, (count, 5))
    model = make().to(dtype)
    with torch.no_grad():
        model(inputs)  # lazy layers
    return model, inputs, torch.arange(count) % CLASSES


# --- the engine against autograd --------------------------------------------------------------


def autograd_gradients(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return each record's gradient by autograd: float64 (B, parameters), on the CPU."""
    trained = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for row in range(len(inputs)):
        loss = nn.functional.cross_entropy(model(inputs[row : row + 1]), targets[row : row + 1])
        found = torch.autograd.grad(loss, trained)
        rows.append(torch.cat([each.detach().flatten().cpu().double() for each in found]))
    return torch.stack(rows)


def engine_of(model: nn.Module, clipping: Any, **options: Any) -> GradientEngine:
    """Return an engine that takes the networks of this file for checked, as tests hold them to be.

    The self-check itself has a check of its own.
    """
    made = GradientEngine(model, cross_entropy, clipping=clipping, micro_batch=8, **options)
    made._checked = True
    return made


def against_autograd(case: Case, device: torch.device, dtype: torch.dtype, count: int,
                     close: Mapping[torch.dtype, float]) -> float:  # fmt: skip
    """Compare sums with autograd's: as they are, and clipped at the median norm.

    Args:
        close: how far a sum may be off, by number format.

    Returns:
        The largest difference, in units of what it may be.

    Raises:
        CheckFailed: a sum is off, or a record alone adds more than the clip norm.
    """
    model, inputs, targets = built(case, count, dtype)
    model, inputs, targets = model.to(device), inputs.to(device), targets.to(device)
    gradients = autograd_gradients(model, inputs, targets)
    norms = gradients.norm(dim=1)
    clip = float(norms.median())
    factors = (clip / norms).clamp(max=1.0)
    worst = 0.0
    for clipping, wanted in (
        (NoClipping(), gradients.sum(0)),
        (FlatClipping(clip), (factors[:, None] * gradients).sum(0)),
    ):
        found = engine_of(model, clipping).clipped_sum(inputs, targets)
        require(found.flat.device.type == device.type, f"the sum lies on {found.flat.device}")
        off = float((found.flat.cpu() - wanted).norm() / norms.sum()) / close[dtype]
        require(off <= 1, f"{clipping}: off by {off:.2g} times what rounding explains")
        worst = max(worst, off)
    engine = engine_of(model, FlatClipping(clip))
    for row in range(count):
        some = slice(row, row + 1)
        alone = float(engine.clipped_sum(inputs[some], targets[some]).flat.cpu().norm())
        require(alone <= clip, f"record {row} adds {alone / clip:.9f} times the clip norm")
    return worst


def check_rules(device: torch.device, quick: bool) -> dict[str, Any]:
    """Check every layer rule against autograd, in float32 and float64, and each record alone."""
    missing = uncovered_rules(quick)
    require(not missing, f"rules without a case: {', '.join(missing)}")
    return _each_case(device, quick, cases(quick))


def check_forms(device: torch.device, quick: bool) -> dict[str, Any]:
    """Check both forms of a norm where the engine would choose one: kept gradients, Gram matrices.

    The choice is by shape, so that each form is forced upon layers of every kind that has both.
    """
    both = ("Linear", "Conv1d", "Conv2d", "Conv2d, wide", "Conv2d, stride", "LSTM", "Tied", "ViT")
    chosen = {name: case for name, case in CASES.items() if name in both}
    found = {}
    for backend, kept in (("kept gradients", True), ("Gram matrices", False)):
        with mock.patch.object(per_example, "materializing_is_cheaper", lambda *_, k=kept: k):
            close = CLOSE if kept else CLOSE | {torch.float64: GRAM_CLOSE}
            found[backend] = _each_case(device, quick, chosen, close)["off"]
    return {"off": found}


def _each_case(device: torch.device, quick: bool, chosen: Mapping[str, Case],
               close: Mapping[torch.dtype, float] = CLOSE) -> dict[str, Any]:  # fmt: skip
    found, wrong = {}, []
    for name, case in chosen.items():
        if quick and name not in QUICK:
            continue
        for dtype in [torch.float32] if quick else CLOSE:
            title = f"{name}, {str(dtype)[6:]}"
            try:
                off = against_autograd(case, device, dtype, 2 if quick else 12, close)
                found[title] = round(off, 4)
            except CheckFailed as failed:
                wrong.append(f"{title}: {failed}")
    require(not wrong, "; ".join(wrong))
    return {"off": found}


WAYS: dict[str, dict[str, Any]] = {
    "per layer": {"clipping": PerLayerClipping(0.5)},
    "automatic": {"clipping": AutomaticClipping(0.5)},
    "keyed blocks": {"blocks": Blocks(2, 8)},
    "each record alone": {"vmap": True},
    "draws of parameters": {"perturbation": ParameterPerturbation(2, 0.1, input_std=0.1)},
    "draws for each record": {"perturbation": ParameterPerturbation(2, 0.1, per_example=True)},
    "draws of inputs": {"perturbation": InputPerturbation(3, 0.1)},
    "cropped and mirrored": {"augmentation": CropAndFlip(1, True)},
}


def check_ways(device: torch.device, quick: bool) -> dict[str, Any]:
    """Compare sums of every way of clipping and drawing with the CPU's, from the same key."""
    found, wrong = {}, []
    for name, options in WAYS.items():
        model, inputs, targets = built(CASES["Conv2d"], 12, torch.float32)
        own, sums = dict(options), []
        augmentation = own.pop("augmentation", None)
        for place in (CPU, device):
            there = copy.deepcopy(model).to(place)
            engine = engine_of(there, **{"clipping": FlatClipping(0.5), **own})
            engine.augmentation = augmentation
            made = engine.clipped_sum(
                inputs.to(place), targets.to(place), draw_key=KEY, record_ids=torch.arange(12) * 3
            )
            require(not made.nonfinite, f"{name}: a gradient is not finite")
            sums.append(made.flat.cpu())
        off = float((sums[0] - sums[1]).norm() / sums[0].norm()) / CLOSE[torch.float32]
        found[name] = round(off, 4)
        if not off <= 1:
            wrong.append(f"{name}: off by {off:.2g} times what rounding explains")
    require(not wrong, "; ".join(wrong))
    return {"off": found}


def check_validation(device: torch.device, quick: bool) -> dict[str, Any]:
    """Let the engine look at invented records: it refuses a network that mixes them alone."""

    class Mixing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - 0.1 * x.mean(0)

    said = {}
    for name, extra, refused in (("Conv2d", [], False), ("mixing", [Mixing()], True)):
        model, inputs, targets = built(CASES["Conv2d"], 12, torch.float32)
        engine = GradientEngine(
            nn.Sequential(*extra, model).to(device), cross_entropy, clipping=FlatClipping(1.0),
            micro_batch=8,
        )  # fmt: skip
        try:
            engine.clipped_sum(inputs.to(device), targets.to(device))
            error = None
        except Exception as refusal:
            error = f"{type(refusal).__name__}: {str(refusal).splitlines()[0][:100]}"
        require((error is not None) == refused, f"{name}: {error or 'was not refused'}")
        said[name] = error or "passed"
    return said


# --- generators and noise ---------------------------------------------------------------------


def check_generators(device: torch.device, quick: bool) -> dict[str, Any]:
    """Compare ChaCha20's and Philox's words with published vectors and the CPU's, bit by bit."""
    device_generators.check_chacha20(device)
    device_generators.check_philox(device)
    count = 64 if quick else 1 << 20
    compared = 0
    for first in (0, 1, 2**31 - 9, 2**32 - count):  # a signed counter, and the stream's end
        blocks = device_generators.ChaChaBlocks(count, device).fill(KEY, first)
        words = blocks.T.contiguous().cpu().numpy().view("<u8").reshape(-1)
        want = stream_words(KEY, 8 * first, 8 * count)
        require(np.array_equal(words, want), f"ChaCha20: other words from block {first} on")
        compared += 8 * count
        there = device_generators.philox_words(KEY, first, count, device)
        for own, here in zip(
            there, device_generators.philox_words(KEY, first, count, CPU), strict=True
        ):
            require(torch.equal(own.cpu(), here), f"Philox: other words from place {first} on")
    return {"words of 64 bits compared": compared}


def check_noise(device: torch.device, quick: bool) -> dict[str, Any]:
    """Hold a device's noise to its contract, `dpdist.gradients.noise`: the CPU's to 2^-45.

    A noisy sum is then the same rounding of the same number, or its neighbor on the grid.
    """
    noise.check_device_noise(device)
    count = 1000 if quick else 4_000_000
    total, found = torch.linspace(-2, 2, count, dtype=torch.float64), {}
    for std in (1e-9, 0.3, 1.0, 7e5):
        whole = noise.add_noise(total.numpy(), KEY, std)
        for low, high in ((0, count), (count // 3, count // 3 + 1), (count // 3 + 1, count)):
            mine = total[low:high].to(device, copy=True)
            made = noise.add_device_noise(mine, KEY, std, low).cpu().numpy()
            apart = np.abs(made - whole[low:high]) / 2.0 ** noise.grid_exponent(std)
            require(float(apart.max()) <= 1, f"std {std}: {apart.max():.3g} steps of the grid off")
            share = float((apart > 0).mean())
            # Neighbors differ where 2^-45 and 2^-52 |sum| / std reach a middle of the grid 2^-24.
            require(share <= 1e-4 + 2.0**-28 * 2 / std, f"std {std}: {share:.2%} of other numbers")
            if (low, high) == (0, count):
                found[f"std {std:g}"] = int((apart > 0).sum())
    return {"entries": count, "not the CPU's bits": found}


# --- certification ----------------------------------------------------------------------------


def check_certificates(device: torch.device, quick: bool) -> dict[str, Any]:
    """Compare counts under Philox's noise with the CPU's: other classes only at near ties.

    Laws are compared number by number: words are equal, logarithm and cosine round.
    """
    rows = 100 if quick else 10_000
    found: dict[str, Any] = {}
    for name, kind in NOISES.items():
        made = [Philox(d).fill(kind(0.5), KEY, torch.empty(rows, 50, device=d)).cpu()
                for d in (CPU, device)]  # fmt: skip
        off = float((made[0] - made[1]).abs().max()) / 0.5
        require(off <= 1e-4, f"{name}: noise is off by {off:.2g} of its deviation")
        found[f"{name}, off"] = off
    torch.manual_seed(0)
    model, x, batch = tf_cnn((1, 28, 28), 10).eval(), torch.rand(1, 28, 28), 50 if quick else 1000
    counts, logits = [], []
    for place in (CPU, device):
        there = copy.deepcopy(model).to(place)
        classify = ExecutedClassifier(there, "eager", [(batch, 1, 28, 28)], place)
        counter = InputNoiseCounter(
            classify, Gaussian(0.5), SOURCE, 10, (1, 28, 28), noise_stream=Philox(place)
        )
        where = range(2 if quick else 20)
        counts.append(sum(
            counter.histogram(x.to(place), 7, keys.ESTIMATE, block, batch, batch)
            for block in where
        ))  # fmt: skip
        noisy = Philox(place).fill(Gaussian(0.5), KEY, torch.empty(batch, 1, 28, 28, device=place))
        logits.append(classify.logits(noisy.add_(x.to(place))).cpu())
    other = logits[0].argmax(1) != logits[1].argmax(1)
    top = logits[0].topk(2).values
    ties = top[:, 0] - top[:, 1] <= 1e-3 * logits[0].abs().amax(1)
    require(not bool((other & ~ties).any()), "a class differs where logits are far apart")
    moved = int(np.abs(counts[0] - counts[1]).sum()) // 2
    draws = int(counts[0].sum())
    most = max(2, int(5e-3 * draws))  # near ties of that width are no more, and few of them turn
    require(moved <= most, f"{moved} of {draws} draws have another class")
    return found | {"draws": draws, "other classes": moved}


def check_bf16(device: torch.device, quick: bool) -> dict[str, Any]:
    """Hold bfloat16 to bounds: products, a certificate's form, the clip over a frozen base."""
    found: dict[str, Any] = {}
    inference.make_deterministic(device)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    generator, size = torch.Generator().manual_seed(0), 64 if quick else 4096
    a, b = (torch.randn(256, size, generator=generator).bfloat16() for _ in range(2))
    got = (a.to(device) @ b.to(device).t()).cpu().double()
    exact, sizes = a.double() @ b.double().t(), a.double().abs() @ b.double().abs().t()
    # Inputs are exact; sums are of float32, in any order; the result is rounded to 8 bits.
    bound = 2.0**-8 * exact.abs() + size * 2.0**-24 / (1 - size * 2.0**-24) * sizes
    found["products, of their bound"] = round(float(((got - exact).abs() / bound).max()), 3)
    require(bool(((got - exact).abs() <= bound).all()), "bf16 products are not summed in float32")
    torch.manual_seed(0)
    model, rows = tf_cnn((1, 28, 28), 10).eval().to(device), torch.rand(200, 1, 28, 28)
    shapes, there = [(200, 1, 28, 28)], rows.to(device)
    plain, short = (
        ExecutedClassifier(copy.deepcopy(model), backend, shapes, device).logits(there).cpu()
        for backend in ("eager", "bf16")
    )
    off = float((plain - short).abs().max() / plain.abs().max())
    found["logits, off"] = off
    allowed = REDUCED_PRECISION_FORMS["bf16"]
    require(off <= allowed, f"logits of the form bf16 are off by {off:.3g} (at most {allowed:.3g})")
    base = FrozenBase().to(device)
    inputs, targets = torch.rand(12, 6, device=device), (torch.arange(12) % CLASSES).to(device)
    gradients = autograd_gradients(base, inputs, targets)
    clip = float(gradients.norm(dim=1).median())
    engine = engine_of(base, FlatClipping(clip))
    for row in range(len(inputs)):
        some = slice(row, row + 1)
        made = engine.clipped_sum(inputs[some], targets[some]).flat.cpu()
        require(float(made.norm()) <= clip, f"bf16 base: record {row} adds more than the clip norm")
        want = gradients[row] * min(1.0, clip / float(gradients[row].norm()))
        away = float((made - want).norm() / want.norm())
        require(away <= CLOSE[torch.float32], f"bf16 base: record {row} is off by {away:.2g}")
    return found


class FrozenBase(nn.Module):
    """A frozen layer in bfloat16 below a head that is trained in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 16).bfloat16().requires_grad_(False)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.base(x.bfloat16())).float())


# --- a training -------------------------------------------------------------------------------


def trained(device: torch.device, steps: int, where: str) -> tuple[Tensor, list[int]]:
    """Take private steps as a run does: keyed samples, blocks, noise on the grid, an update.

    Args:
        where: noise is drawn, "host" or "device".

    Returns:
        The parameters (CPU, float64) and the sizes of the batches.
    """
    torch.manual_seed(0)
    records, rate, clip, std = 512, 1 / 16, 0.5, 0.3
    labels = torch.arange(records) % CLASSES
    inputs = torch.rand(records, 1, 28, 28) + labels[:, None, None, None]
    model = tf_cnn((1, 28, 28), CLASSES).to(device)
    engine = GradientEngine(
        model, cross_entropy, clipping=FlatClipping(clip), micro_batch=64,
        blocks=Blocks.for_batches(records, rate),
    )  # fmt: skip
    engine._checked = True
    sizes = []
    for step in range(steps):
        key = derive_key(KEY, "step", step)
        ids = torch.from_numpy(poisson_sample(derive_key(key, "sample"), 0, records, rate))
        sizes.append(len(ids))
        found = engine.clipped_sum(
            inputs[ids].to(device), labels[ids].to(device), draw_key=key, record_ids=ids
        ).flat
        own = derive_key(key, "noise")
        if where == "device":
            noisy = noise.add_device_noise(found, own, std * clip)
        else:
            noisy = torch.from_numpy(noise.add_noise(found.cpu().numpy(), own, std * clip))
            noisy = noisy.to(device)
        with torch.no_grad():
            pieces = noisy.split([p.numel() for p in engine.parameters])
            for parameter, piece in zip(engine.parameters, pieces, strict=True):
                parameter.sub_(0.1 / (records * rate) * piece.view_as(parameter).float())
    flat = torch.cat([p.detach().flatten().cpu().double() for p in engine.parameters])
    return flat, sizes


def check_steps(device: torch.device, quick: bool) -> dict[str, Any]:
    """Take 50 steps with equal samples on the CPU and the device, with noise of either.

    The runs part by float32's rounding, which 50 steps may multiply; 10^-3 is far below what
    another noise or another sample does, which is measured beside it.
    """
    steps = 3 if quick else 50
    here, sizes = trained(CPU, steps, "host")
    found: dict[str, Any] = {"batches": [min(sizes), max(sizes)]}
    for where in ("host", "device"):
        there, its = trained(device, steps, where)
        require(its == sizes, "other batches were drawn")
        off = float((there - here).norm() / here.norm())
        found[f"parameters, noise of the {where}: off"] = off
        require(off <= 1e-3, f"noise of the {where}: parameters are off by {off:.2g}")
    with mock.patch(f"{__name__}.KEY", bytes(32)):
        found["parameters, another key: off"] = other = float(
            (trained(CPU, steps, "host")[0] - here).norm() / here.norm()
        )
    require(other > 1e-2, f"another key is off by {other:.2g} only: the check sees nothing")
    return found


CHECKS: dict[str, Callable[[torch.device, bool], dict[str, Any]]] = {
    "rules": check_rules,
    "forms": check_forms,
    "ways": check_ways,
    "validation": check_validation,
    "generators": check_generators,
    "noise": check_noise,
    "certificates": check_certificates,
    "bf16": check_bf16,
    "steps": check_steps,
}
