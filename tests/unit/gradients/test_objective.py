"""Losses by name and of the user's own, against autograd one record at a time."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
import torch
from support.language_models import one_at_a_time
from support.networks import mixing_refused
from torch import Tensor, nn
from torch.nn import functional

from dpdist.config.training import LOSSES as NAMES
from dpdist.core.errors import UserError
from dpdist.core.fields import KNOWN_LAYERS, SCREENED
from dpdist.gradients import objective
from dpdist.gradients.clipping import AutomaticClipping, FlatClipping
from dpdist.gradients.engine import GradientEngine
from dpdist.gradients.objective import LOSSES, objective_of

B, CLIP = 21, 0.3


def network(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs))


class TwoTowers(nn.Module):
    """A model whose forward is not what its loss calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(20, 5)
        self.left, self.right = nn.Linear(5, 3), nn.Linear(4, 3)

    def scores(self, tokens: Tensor, features: Tensor) -> Tensor:
        return self.left(self.words(tokens).mean(1)) * self.right(features)


def draw(*shape: int, classes: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + (classes or 0))
    if classes is None:
        return torch.randn(shape, generator=generator)
    return torch.randint(classes, shape, generator=generator)


INPUTS = draw(B, 4)
FIELDS = {"tokens": draw(B, 7, classes=20), "x": draw(B, 4), "y": draw(B, classes=3)}


# --- own losses, and the same for one record written by hand ---------------------------------


def own_mse(module, batch):
    inputs, targets = batch
    return (module(inputs).squeeze(1) - targets).square()


def of_fields(module, batch):
    scores = module.scores(batch["tokens"], batch["x"])
    return functional.cross_entropy(scores, batch["y"], reduction="none")


def of_several(module, batch):
    tokens, features, targets = batch
    return functional.cross_entropy(module.scores(tokens, features), targets, reduction="none")


def twice(module, batch):
    """Two forward passes, which a record's own consistency needs."""
    inputs, targets = batch
    first, second = module(inputs), module(inputs * 1.5)
    return functional.cross_entropy(first, targets, reduction="none") + (first - second).abs().sum(
        1
    )


CASES: dict[str, tuple[Any, Any, Any, Tensor, Any]] = {
    # name: model, loss, inputs, targets, and the loss of one record by torch alone
    "cross-entropy": (
        lambda: network(3), "cross-entropy", INPUTS, draw(B, classes=3),
        lambda m, x, y: functional.cross_entropy(m(x), y),
    ),
    "bce": (
        lambda: network(1), "bce", INPUTS, draw(B, classes=2),
        lambda m, x, y: functional.binary_cross_entropy_with_logits(m(x), y[:, None].to(x)),
    ),
    "multi-label-bce": (
        lambda: network(5), "multi-label-bce", INPUTS, draw(B, 5, classes=2),
        lambda m, x, y: functional.binary_cross_entropy_with_logits(m(x), y.to(x)),
    ),
    "mse": (
        lambda: network(1), "mse", INPUTS, 3 * draw(B),
        lambda m, x, y: functional.mse_loss(m(x), y[:, None]),
    ),
    "huber": (
        lambda: network(2), "huber", INPUTS, 3 * draw(B, 2),
        lambda m, x, y: functional.huber_loss(m(x), y),
    ),
    "dict batches": (
        TwoTowers, of_fields, FIELDS, FIELDS["y"],
        lambda m, x, y: functional.cross_entropy(m.scores(x["tokens"], x["x"]), y),
    ),
    "several inputs": (
        TwoTowers, of_several, (FIELDS["tokens"], FIELDS["x"]), FIELDS["y"],
        lambda m, x, y: functional.cross_entropy(m.scores(*x), y),
    ),
    "two passes": (
        lambda: network(3), twice, INPUTS, draw(B, classes=3),
        lambda m, x, y: functional.cross_entropy(m(x), y) + (m(x) - m(1.5 * x)).abs().sum(),
    ),
}  # fmt: skip


def one(inputs: Any, row: int) -> Any:
    """Return one record's inputs in float64, as a batch of one."""
    if isinstance(inputs, dict):
        return {name: one(each, row) for name, each in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(one(each, row) for each in inputs)
    some = inputs[row : row + 1]
    return some.double() if some.is_floating_point() else some


@pytest.mark.parametrize(
    ("case", "vmap"), [*((case, False) for case in CASES), ("dict batches", True), ("mse", True)]
)
def test_each_loss_is_clipped_record_by_record(case, vmap):
    """As by autograd alone, in float64, one record at a time."""
    make, loss, inputs, targets, alone = CASES[case]
    engine = GradientEngine(make(), objective_of(loss), clipping=FlatClipping(CLIP), vmap=vmap)
    found, model = engine.clipped_sum(inputs, targets), make().double()

    def loss_of(row: int) -> Tensor:
        return alone(model, one(inputs, row), one(targets, row))

    expected = one_at_a_time(model, loss_of, B, CLIP)
    losses = sum(float(loss_of(row).detach()) for row in range(B))
    assert float((found.flat - expected).norm()) <= 2e-5 * B * CLIP  # the clip leaves room
    assert abs(found.loss_sum - losses) <= 1e-4 * (1 + abs(losses)) and found.examples == B
    assert float(expected.norm()) > 0.1 * CLIP  # something is learned


def test_a_loss_from_elsewhere_is_screened():
    for given, word in ((own_mse, SCREENED), ("mse", KNOWN_LAYERS)):
        engine = GradientEngine(
            nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)), objective_of(given),
            clipping=FlatClipping(1.0),
        )  # fmt: skip
        assert engine.independence == word
    hooked = nn.Sequential(nn.Linear(3, 1))
    hooked[0].register_forward_hook(lambda module, given, output: output - output.mean(0))
    for model in (hooked, nn.Sequential(nn.Flatten(0), nn.Linear(3, 1))):
        engine = GradientEngine(model, objective_of("mse"), clipping=FlatClipping(1.0))
        assert engine.independence == SCREENED


def test_recipes_and_the_engine_know_the_same_losses():
    assert tuple(LOSSES) == NAMES
    assert doctest.testmod(objective).attempted and not doctest.testmod(objective).failed


# --- what is refused --------------------------------------------------------------------------


def centered_unseen(module, batch):
    """The batch's mean without its gradient: autograd sees no mixing."""
    outputs = module(batch[0]).squeeze(1)
    return (outputs - outputs.detach().mean() - batch[1]).square()


def contrastive(module, batch):
    outputs = module(batch[0])
    return functional.cross_entropy(
        outputs @ outputs.T, torch.arange(len(outputs)), reduction="none"
    )


def normalized_targets(module, batch):
    inputs, targets = batch
    return own_mse(module, (inputs, targets - targets.mean()))


def shuffled(module, batch):
    """Losses in another order: each record gets another one's gradient."""
    return own_mse(module, batch).flip(0)


MIXING = {
    loss.__name__: loss for loss in (centered_unseen, contrastive, normalized_targets, shuffled)
}


@pytest.mark.parametrize("name", MIXING)
def test_losses_over_the_batch_are_refused(name):
    engine = GradientEngine(network(1), objective_of(MIXING[name]), clipping=FlatClipping(1.0))
    with mixing_refused():
        engine.clipped_sum(INPUTS, draw(B))


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, b: own_mse(m, b).mean(),
        lambda m, b: m(b[0]),
        lambda m, b: 1.0,
        lambda m, b: own_mse(m, b)[1:],
    ],
)
def test_a_mean_over_the_batch_is_refused_by_its_shape(loss):
    engine = GradientEngine(network(1), objective_of(loss), clipping=FlatClipping(1.0))
    with pytest.raises(UserError):
        engine.clipped_sum(INPUTS, draw(B))


@pytest.mark.parametrize("name", ["bce", "mse", "huber"])
def test_named_losses_refuse_shapes_that_torch_would_broadcast(name):
    for given in ((draw(B, 3), draw(B)), (draw(B), draw(B, 1))):
        with pytest.raises(UserError):
            LOSSES[name](*given)


def test_cross_entropy_of_tokens_counts_no_label_below_0():
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 4, 5), torch.tensor([[1, 2, 3, -100], [4, -1, -100, -100]])
    own = [functional.cross_entropy(logits[0, :3], targets[0, :3]),
           functional.cross_entropy(logits[1, :1], targets[1, :1])]  # fmt: skip
    torch.testing.assert_close(LOSSES["cross-entropy"](logits, targets), torch.stack(own))


# --- criterion objects: torch's own value for a batch of one, class weights kept as factors


class _Focal(nn.Module):
    """A criterion of somebody's own."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = functional.cross_entropy(outputs, targets, reduction="none")
        losses = (1 - (-losses).exp()) ** 2 * losses
        return losses if self.reduction == "none" else losses.mean()


_CLASSES, _NUMBERS, _YES = draw(B, classes=3), draw(B, 3), draw(B, 3, classes=2)
_WEIGHT = torch.tensor([0.2, 1.0, 3.0])
CRITERIA = {
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), _CLASSES),
    "soft": (nn.CrossEntropyLoss(), _NUMBERS.softmax(1)),
    "sum": (nn.CrossEntropyLoss(reduction="sum", label_smoothing=0.2), _CLASSES),
    "pos_weight": (nn.BCEWithLogitsLoss(pos_weight=_WEIGHT), _YES),
    "mse summed": (nn.MSELoss(reduction="sum"), _NUMBERS),
    "huber": (nn.HuberLoss(delta=0.3), _NUMBERS),
    "poisson": (nn.PoissonNLLLoss(), _YES),
    "divergence": (nn.KLDivLoss(reduction="batchmean", log_target=True), _NUMBERS.log_softmax(1)),
    "soft margin": (nn.MultiLabelSoftMarginLoss(), _YES),
    "own": (_Focal(), _CLASSES),
}


@pytest.mark.parametrize("kind", CRITERIA)
def test_a_criterion_gives_each_record_what_it_gives_a_batch_of_one(kind):
    criterion, targets = CRITERIA[kind]
    model = network(3)
    engine = GradientEngine(model, criterion, clipping=FlatClipping(CLIP), micro_batch=8)
    if kind in ("pos_weight", "poisson", "soft margin"):
        targets = targets.float()
    expected = one_at_a_time(
        model, lambda row: criterion(model(INPUTS[row : row + 1]), targets[row : row + 1]), B, CLIP
    )
    found = engine.clipped_sum(INPUTS, targets).flat
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert engine.independence == (SCREENED if kind == "own" else KNOWN_LAYERS)


def test_class_weights_are_factors_of_a_records_loss():
    outputs = draw(B, 3)
    loss = objective_of(nn.CrossEntropyLoss(weight=_WEIGHT, ignore_index=1)).function
    plain = functional.cross_entropy(outputs, _CLASSES, reduction="none")
    expected = torch.where(_CLASSES == 1, 0.0, _WEIGHT[_CLASSES] * plain)
    torch.testing.assert_close(loss(nn.Identity(), (outputs, _CLASSES)), expected)


@pytest.mark.parametrize("vmap", [False, True])
@pytest.mark.parametrize("clipping", [FlatClipping(CLIP), AutomaticClipping(1.0)])
def test_a_record_of_the_ignored_class_adds_nothing(vmap, clipping):
    criterion = nn.CrossEntropyLoss(weight=_WEIGHT, ignore_index=255, label_smoothing=0.1)
    engine = GradientEngine(network(3), criterion, clipping=clipping, vmap=vmap)
    kept = torch.arange(B) % 3 > 0
    found = engine.clipped_sum(INPUTS, torch.where(kept, _CLASSES, 255)).flat
    expected = engine.clipped_sum(INPUTS[kept], _CLASSES[kept]).flat
    torch.testing.assert_close(found, expected)
    alone = engine.clipped_sum(INPUTS[~kept], torch.full_like(_CLASSES, 255)[~kept])
    assert not alone.flat.any()


def test_a_criterion_takes_the_mean_over_a_records_own_tokens():
    outputs, targets = draw(2, 4, 5), torch.tensor([[1, 2, 3, -100], [4, -100, -100, -100]])
    own = [functional.cross_entropy(outputs[0, :3], targets[0, :3]),
           functional.cross_entropy(outputs[1, :1], targets[1, :1])]  # fmt: skip
    loss = objective_of(nn.CrossEntropyLoss()).function
    for given in (outputs, outputs.transpose(1, 2)):
        torch.testing.assert_close(loss(nn.Identity(), (given, targets)), torch.stack(own))
    with pytest.raises(UserError, match=r"^loss:"):
        loss(nn.Identity(), (draw(2, 4, 4), targets.clamp(0, 3)))


def test_a_criterion_of_several_outputs_and_inputs():
    mean, spread, wanted = draw(B, 1), draw(B, 1).square() + 0.1, draw(B)
    loss = objective_of(nn.GaussianNLLLoss()).function
    expected = [
        nn.GaussianNLLLoss()(mean[row], wanted[row : row + 1], spread[row]) for row in range(B)
    ]
    found = loss(lambda a, b: (a, b), (mean, spread, wanted))
    torch.testing.assert_close(found, torch.stack(expected))
    named = loss(lambda a, b: (a, b), {"a": mean, "b": spread, "targets": wanted})
    assert torch.equal(named, found)


def test_a_criterion_refuses_shapes_that_torch_would_broadcast():
    for criterion in (nn.MSELoss(), nn.BCEWithLogitsLoss(), nn.L1Loss()):
        loss = objective_of(criterion).function
        assert loss(nn.Identity(), (draw(B, 1), draw(B))).shape == (B,)
        with pytest.raises(UserError):
            loss(nn.Identity(), (draw(B, 3), draw(B)))
