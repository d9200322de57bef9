"""No private record decides whether a training stops or in how many rows its passes are cut.

Pairs of batches that differ in one record; the screen used to look at the records themselves, and
of each pair one was trained and the other refused (or cut into other passes).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import pytest
import torch
from support.networks import Of, mixing_refused
from torch import Tensor, nn

from dpdist.core.errors import UserError
from dpdist.gradients.clipping import FlatClipping
from dpdist.gradients.engine import GradientEngine, cross_entropy
from dpdist.gradients.hooks import OwnLoss
from dpdist.gradients.independence import check_example_independence
from dpdist.gradients.validation import NUM_EXAMPLES, make_synthetic_examples

Batch = tuple[Tensor, Tensor]


def uniform(*shape: int, seed: int = 1) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def far(inputs: Tensor) -> Batch:
    other = inputs.clone()
    other[3] = 1e6
    return other, torch.arange(len(inputs)) % 3


def usual(count: int = 6) -> Batch:
    return uniform(count, 4), torch.arange(count) % 3


def mixing() -> nn.Module:
    """Mixes as soon as one record is far away."""
    return Of(lambda m, x: m.layer(x) * (1 + (x > 1e5).any()), layer=nn.Linear(4, 3))


def counting() -> nn.Module:
    """Counts far records in a buffer."""

    def run(model: nn.Module, x: Tensor) -> Tensor:
        model.seen += (x > 1e5).any()
        return model.layer(x)

    model = Of(run, layer=nn.Linear(4, 3))
    model.register_buffer("seen", torch.zeros(()))
    return model


def parts() -> nn.Module:
    """A second part works only when a record is far away."""

    def run(model: nn.Module, x: Tensor) -> Tensor:
        found = model.first(x)
        if bool((x > 1e5).any()):
            found = found + torch.where((x > 1e5).any(1, keepdim=True), model.second(x), 0.0)
        return found

    return Of(run, first=nn.Linear(4, 3), second=nn.Linear(4, 3))


def outcome(make: Callable[[], nn.Module], batch: Batch) -> int | None:
    """Take ten steps on the batch; return the micro-batch, or None if the model is refused."""
    engine = GradientEngine(seeded(make), cross_entropy, clipping=FlatClipping(1.0))
    try:
        for _ in range(10):
            engine.clipped_sum(*batch)
    except UserError:
        return None
    return engine.micro_batch


@pytest.mark.parametrize("make", [mixing, counting])
def test_both_of_a_neighboring_pair_are_trained_alike(make: Callable[[], nn.Module]) -> None:
    found = outcome(make, usual())
    assert found is not None and found == outcome(make, far(usual()[0]))


def test_both_of_a_neighboring_pair_are_refused_alike() -> None:
    """The second part's parameters have no gradient for public examples, whatever a record does."""
    assert outcome(parts, usual()) is None and outcome(parts, far(usual()[0])) is None


def test_neither_how_many_records_there_are_nor_their_values_matter() -> None:
    """A model that mixes is refused before the first sum, of no record at all too."""

    centered = Of(lambda m, x: x - x.mean(0, keepdim=True))
    network = nn.Sequential(nn.Linear(4, 4), centered, nn.Linear(4, 3))
    inputs, labels = usual()
    for some in (slice(0), slice(1), slice(6)):
        for values in (inputs, torch.full_like(inputs, math.nan)):
            engine = GradientEngine(network, cross_entropy, clipping=FlatClipping(1.0))
            with mixing_refused():
                engine.clipped_sum(values[some], labels[some])


# ---- what is invented


def test_examples_are_invented_from_shapes_alone() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 5))
    inputs, targets = uniform(3, 2, 4), torch.tensor([0, 1, 4])
    found = make_synthetic_examples(model, inputs, targets)
    again = make_synthetic_examples(
        model, torch.full((0, 2, 4), math.nan), torch.zeros(0, dtype=torch.long)
    )
    assert all(torch.equal(*each) for each in zip(found, again, strict=True))
    assert found[0].shape == (NUM_EXAMPLES, 2, 4) and found[0].dtype == torch.float32
    assert float(found[0][:20].max()) < 1 < float(found[0].max())
    assert set(found[1].tolist()) == set(range(5))


def test_tokens_are_invented_below_the_vocabulary() -> None:
    class Words(nn.Module):
        vocabulary = 7

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.one_hot(x.long(), 9).float()

    embedding = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 9))
    for model, dtype in ((Words(), torch.float32), (embedding, torch.int64)):
        inputs, targets = torch.zeros(2, 50, dtype=dtype), torch.zeros(2, 50, dtype=torch.long)
        tokens, following = make_synthetic_examples(model, inputs, targets)
        assert tokens.dtype == dtype and set(tokens.flatten().tolist()) == set(range(7))
        assert following.shape == (NUM_EXAMPLES, 50)
        assert set(following.flatten().tolist()) == set(range(9))


def check(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    engine = GradientEngine(model, cross_entropy, clipping=FlatClipping(1.0))
    check_example_independence(engine._captured, engine._empty_gradients, inputs, targets)


def on_frozen_base(read: str, mixes: bool) -> nn.Module:
    """A trained head on a large frozen layer, which may be read without its module's forward."""

    def run(model: nn.Module, x: Tensor) -> Tensor:
        x, base = model.before(x), model.base
        x = nn.functional.linear(x, base.weight, base.bias) if read == "weight" else base(x)
        return model.head(x - x.detach().mean(0) if mixes else x)

    base = nn.Linear(4, 6).requires_grad_(False)
    return Of(run, before=nn.Linear(4, 4), base=base, head=nn.Linear(6, 3))


@pytest.mark.parametrize("read", ["", "weight"])
def test_a_frozen_base_hides_no_mixing(read: str) -> None:
    check(seeded(lambda: on_frozen_base(read, False)), *usual(9))
    with mixing_refused():
        check(seeded(lambda: on_frozen_base(read, True)), *usual(9))


def test_a_model_without_finite_gradients_is_refused_not_trusted() -> None:
    with pytest.raises(UserError):
        check(Of(lambda m, x: m.layer(x) / 0.0, layer=nn.Linear(4, 3)), *usual())


class Remembering(nn.Module):
    """Adds what it saw in the pass before: one record moves the gradients of the next batch."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.layer, self.where = nn.Linear(4, 2), where
        self.kept = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.last = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.layer(x)
        if self.where == "attribute":
            outputs, self.last = outputs * (1 + self.last), x.detach().mean()
        else:
            with torch.no_grad():
                (self.kept.data if self.where == "data" else self.kept).copy_(x.mean())
        return outputs


@pytest.mark.parametrize("where", ["attribute", "parameter", "data"])
def test_what_a_pass_leaves_behind_is_refused(where: str) -> None:
    with pytest.raises(UserError):
        check(Remembering(where), uniform(NUM_EXAMPLES, 4), torch.arange(NUM_EXAMPLES) % 2)


def test_a_loss_that_remembers_is_refused() -> None:
    seen: list[Tensor] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(outputs.detach().mean().abs())
        return cross_entropy(outputs, targets) * (1 + seen[len(seen) - 2])

    engine = GradientEngine(nn.Linear(4, 2), loss, clipping=FlatClipping(1.0))
    with pytest.raises(UserError):
        engine.validate(uniform(NUM_EXAMPLES, 4), torch.arange(NUM_EXAMPLES) % 2)


def centered(chance: float, always: bool = True) -> nn.Module:
    """Subtracts the batch's mean, unseen by autograd: always, or in training mode alone."""

    def run(model: nn.Module, x: Tensor) -> Tensor:
        hidden = model.drop(model.layer(x))
        mixes = always or model.training
        return model.head(hidden - hidden.detach().mean(0) if mixes else hidden)

    return Of(run, layer=nn.Linear(4, 6), drop=nn.Dropout(chance), head=nn.Linear(6, 2))


def test_a_random_layer_hides_no_mixing() -> None:
    """Nothing was compared where a model drew: one record moved a sum by 3.4 C."""
    batch = uniform(NUM_EXAMPLES, 4), torch.arange(NUM_EXAMPLES) % 2
    for chance in (0.0, 0.5):
        with mixing_refused():
            check(centered(chance), *batch)
    check(nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 2)), *batch)


def test_a_model_in_another_mode_is_checked_again() -> None:
    """Checked in evaluation mode and trained in the other one, one record moved a sum by 1.16 C."""
    model, batch = centered(0.0, always=False), (uniform(5, 4), torch.arange(5) % 2)
    engine = GradientEngine(model.eval(), cross_entropy, clipping=FlatClipping(1.0))
    assert engine.clipped_sum(*batch).flat.any()
    model.train()
    for _ in range(2):
        with mixing_refused():
            engine.clipped_sum(*batch)
    model.eval()
    assert engine.clipped_sum(*batch).flat.any()
    later = GradientEngine(model.train(), cross_entropy, clipping=FlatClipping(1.0))
    model.eval()
    later.validate(uniform(NUM_EXAMPLES, 4), torch.arange(NUM_EXAMPLES) % 2)
    model.train()
    with mixing_refused():
        later.clipped_sum(*batch)


def test_a_model_runs_in_one_pass_at_a_time() -> None:
    """Hooks of two passes at once, of two threads, gave each the other's records, silently."""
    model, batch = nn.Linear(4, 2), (uniform(5, 4), torch.arange(5) % 2)
    inner = GradientEngine(model, cross_entropy, clipping=FlatClipping(1.0))
    inner.clipped_sum(*batch)
    meanwhile: list[GradientEngine] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        for engine in meanwhile:
            engine.clipped_sum(*batch)
        return cross_entropy(outputs, targets)

    outer = GradientEngine(model, loss, clipping=FlatClipping(1.0))
    outer.clipped_sum(*batch)
    meanwhile.append(inner)
    with pytest.raises(UserError):
        outer.clipped_sum(*batch)
    meanwhile.clear()
    assert torch.equal(outer.clipped_sum(*batch).flat, inner.clipped_sum(*batch).flat)


def test_a_model_that_views_its_pictures_as_rows_is_trained() -> None:
    """`view` refuses memory in channels-last format, which convolutions are faster in."""

    conv, head, found = nn.Conv2d(1, 3, 3), nn.Linear(3 * 4 * 4, 2), []
    for rows in (Of(lambda m, x: x.view(-1, 48)), nn.Flatten()):
        model = nn.Sequential(conv, rows, head)
        engine = GradientEngine(model, cross_entropy, clipping=FlatClipping(1.0))
        found.append(engine.clipped_sum(uniform(6, 1, 6, 6), torch.arange(6) % 2).flat)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


class OnSelectedTokens(nn.Module):
    """Its head runs where there is a label, or on everything where all are there."""

    def __init__(self, branch: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branch, self.table = branch, nn.Embedding(9, 4)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 9)

    def losses(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden, chosen = self.body(self.table(tokens)), labels >= 0
        if self.branch and bool(chosen.all()):
            each = cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())
            return each.view(tokens.shape).sum(1)
        each = cross_entropy(self.head(hidden[chosen]), labels[chosen])
        return each.new_zeros(tokens.shape).index_put((chosen,), each).sum(1)


@pytest.mark.parametrize(("branch", "lock"), [(False, False), (True, False), (False, True)])
def test_as_many_selected_tokens_as_records_are_not_taken_for_these(branch, lock) -> None:
    """Each record's loss is its own, yet row i was taken for record i: one record moved a sum by
    1.5 C. In invented examples every token has a label, so screening sees none of it. Nor did
    passes of other lengths run where a model holds what cannot be copied."""
    model = OnSelectedTokens(branch)
    if lock:
        model.lock = threading.Lock()
    loss = OwnLoss(lambda module, batch: module.losses(*batch))
    engine = GradientEngine(model, loss, clipping=FlatClipping(1.0))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(9, (8, 2), generator=generator)
    labels = tokens.clone()
    assert engine.clipped_sum(tokens, labels).flat.any()
    labels[:4] = -1
    with pytest.raises(UserError):
        engine.clipped_sum(tokens, labels)
