"""A record's gradient has the same bits whichever other records are there, also where a matrix
product rounds one row of a pass as it does not round the next."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.threads import new_settings_after
from torch import Tensor, nn

from dpdist.cluster import executor, versions
from dpdist.core.errors import UserError
from dpdist.gradients import per_example, row_independence
from dpdist.gradients.clipping import FlatClipping
from dpdist.gradients.engine import GradientEngine, consistency_targets, cross_entropy
from dpdist.gradients.per_example import EmbeddingGradient, OuterProductGradient
from dpdist.gradients.perturbations import InputPerturbation
from dpdist.gradients.sampling import Blocks, hash_rows, iter_padded_passes
from dpdist.methods.hidden_noise_shares import _passes

pytestmark = pytest.mark.guarantee
KEY = bytes(range(32))
CLASSES = np.array([0, 1, 0, 2, 1, 0, 0, 1])


def test_rows_that_round_alike_are_one_class() -> None:
    examples = torch.arange(1.0, 65.0)[:, None].expand(64, 3)

    def run(inputs: Tensor, targets: Tensor) -> list[Tensor]:
        moved = inputs.clone()
        moved[1::2, 1] = moved[1::2, 1].nextafter(torch.tensor(99.0))  # a last bit, in odd rows
        moved[3, 2] = -moved[3, 2]
        return [torch.ones(len(inputs), 0), targets > 0, moved]

    found = row_independence.find_row_classes(run, examples, torch.ones(64), 6)
    assert found is not None
    assert len(set(found[[0, 2, 4]])) == len(set(found[[1, 5]])) == 1 and len(set(found)) == 3
    same = row_independence.find_row_classes(lambda x, y: [2 * x, y], examples, torch.ones(64), 6)
    assert same is None


@pytest.mark.parametrize("values", [(1.0, 1.25, 1.5), (1.5, 1.0, 1.25), (1.25, 1.5, 1.0)])
def test_classes_are_numbered_by_their_rows_whatever_the_values(values: tuple[float, ...]) -> None:
    """A training that continues from its checkpoint finds them with other parameters, and puts
    each record into the row that it had."""

    def run(inputs: Tensor, targets: Tensor) -> list[Tensor]:
        return [inputs, torch.tensor(values)[[0, 1, 0, 2, 1, 0], None] * inputs]

    examples = torch.full((64, 64), 3.0)
    found = row_independence.find_row_classes(run, examples, torch.ones(64), 6)
    assert found is not None and found.tolist() == [0, 1, 0, 2, 1, 0]


def test_a_difference_that_one_example_in_four_shows_is_found() -> None:
    examples = torch.tensor([[0.5], [0.25], [0.125], [0.1]])

    def run(inputs: Tensor, targets: Tensor) -> list[Tensor]:
        coarse = inputs.clone()
        coarse[2:] = (coarse[2:] * 2**20).round() / 2**20
        return [coarse]

    found = row_independence.find_row_classes(run, examples, torch.zeros(4), 4)
    assert found is not None and found[0] == found[1] != found[2] == found[3]


def test_what_cannot_be_tried_is_compared_for_every_example() -> None:
    """A draw is not repeated, so each pass is looked at, and not its end alone."""
    examples = torch.arange(1.0, 9.0)[:, None]

    def run(inputs: Tensor, targets: Tensor) -> list[Tensor]:
        moved = inputs.clone()
        if float(targets[0]) == 7:
            moved[1::2] = moved[1::2].nextafter(torch.tensor(99.0))
        return [torch.normal(moved, 0.0).round()]

    found = row_independence.find_row_classes(run, examples, torch.arange(8.0), 4)
    assert found is not None and found.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("size", [1, 7, 60])
def test_every_record_runs_once_in_a_row_of_its_own_class(size: int) -> None:
    members = np.arange(100, 100 + size)
    slots = hash_rows(KEY, members)
    seen = []
    for rows, real in iter_padded_passes(members, 8, CLASSES, slots):
        assert len(rows) == 8 and isinstance(real, np.ndarray) and len(real)
        assert set(rows) == set(rows[real])  # filled up with records of its own
        for row in real:
            assert CLASSES[row] == CLASSES[int(hash_rows(KEY, rows[row : row + 1])[0]) % 8]
        seen += rows[real].tolist()
    assert sorted(seen) == members.tolist()


def test_rare_classes_of_rows_stay_empty() -> None:
    """Three odd rows of 151 cost four passes a block in place of one; two halves cost none."""
    odd = np.zeros(151, np.int64)
    odd[[75, 147, 150]] = 1, 2, 3
    halves = np.arange(151) % 2
    blocks = Blocks(1, 151)
    members = np.arange(128)
    for classes, used in ((odd, 148), (halves, 151)):
        chosen = blocks.choose_rows(classes)
        assert (chosen >= 0).sum() == used and set(chosen) <= {-1, *classes}
        passes = list(iter_padded_passes(members, 151, chosen, hash_rows(KEY, members)))
        assert len(passes) == 1
        rows, real = passes[0]
        assert sorted(rows[real]) == members.tolist() and (chosen[real] >= 0).all()


def test_one_record_more_moves_nobody_into_another_class() -> None:
    def classes_of(members: np.ndarray) -> dict[int, int]:
        passes = iter_padded_passes(members, 8, CLASSES, hash_rows(KEY, members))
        return {int(rows[row]): int(CLASSES[row]) for rows, real in passes for row in real}

    members = np.arange(50)
    whole = classes_of(members)
    for gone in (0, 20, 49):
        rest = classes_of(np.delete(members, gone))
        assert rest.items() <= whole.items() and len(rest) == 49


def on_a_kink(model: nn.Sequential, rows: int) -> tuple[Tensor, Tensor] | None:
    """An input at which some rows of a pass, and not others, see the first ReLU open, and one at
    which it is closed in all; None where this machine's kernels round all rows alike."""
    linear = model[0]
    assert isinstance(linear, nn.Linear)
    weight, bias = linear.weight.detach().double(), linear.bias.detach().double()
    inverse, generator = torch.linalg.pinv(weight), torch.Generator().manual_seed(0)
    closed = inverse @ (torch.full_like(bias, -3.0) - bias)
    for number in range(3000):
        unit = number % len(bias)
        aim = torch.full_like(bias, -3.0)
        aim[unit] = 0.0
        free = torch.randn(weight.shape[1], generator=generator).double()
        free -= inverse @ (weight @ free)
        x = (inverse @ (aim - bias) + 3 * free).float()
        opened = nn.functional.linear(x.repeat(rows, 1), linear.weight, linear.bias)[:, unit] > 0
        if 0 < int(opened.sum()) < rows:
            return x, closed.float()
    return None


@pytest.mark.parametrize(("width", "hidden"), [(10, 3), (13, 8), (30, 4)])
@pytest.mark.parametrize("isolate", [False, True])
def test_records_on_a_kink_move_the_sum_by_one_clip_norm(width, hidden, isolate) -> None:
    """Half of the records lie where a ReLU opens in some rows alone: with one record more, which
    moves those behind it by a row, the sum moved by 2 to 20 C."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 4))
    blocks = Blocks.for_batches(60_000, 256 / 60_000)
    found = on_a_kink(model, blocks.capacity)
    if found is None:
        pytest.skip("on this machine a matrix product of few columns rounds all rows alike")
    kink, closed = found
    engine = GradientEngine(
        model, lambda out, y: nn.functional.cross_entropy(out, y, reduction="none"),
        clipping=FlatClipping(1.0), blocks=blocks, isolate=isolate,
    )  # fmt: skip
    ids, moved = torch.arange(256), []
    inputs = torch.where((ids % 2 == 0)[:, None], kink, closed)
    targets = torch.ones(256, dtype=torch.int64)
    for number in range(6):
        key = bytes([number]) * 32
        whole = engine.clipped_sum(inputs, targets, draw_key=key, record_ids=ids)
        for gone in (0, 101):
            keep = ids != gone
            rest = engine.clipped_sum(
                inputs[keep], targets[keep], draw_key=key, record_ids=ids[keep]
            )
            moved.append(float((whole.flat - rest.flat).norm()))
    assert max(moved) <= 1.0


def agreeing(run, values: Tensor, rows: int) -> tuple[Tensor, bool]:
    """Values (n, ...) for which the rows of a pass agree, and whether they do for all of them."""
    passes = [run(value.expand(rows, *value.shape).contiguous()) for value in values]
    agree = torch.tensor([bool((each == each[:1]).all()) for each in passes])
    return values[agree], bool(agree.all())


@pytest.mark.parametrize("made", ["silu", "in place", "product", "column"])
def test_one_number_of_a_row_that_other_code_computes_is_found(made) -> None:
    """The last 8 of 40 numbers go through other code, by which 4 in 100 of them differ. A gate of
    one number before a wide layer was compared for four examples, and a sum moved by 6 C."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(13, 1, generator=generator)
    gates = {
        "silu": lambda x: nn.functional.silu(x[:, :1].contiguous()),
        "in place": lambda x: x[:, :1].clone().sigmoid_(),
        "product": lambda x: x[:, :13].contiguous() @ weight,
        "column": lambda x: (torch.cat([weight, weight], 1).t() @ x[:, :13].t().contiguous()).t(),
    }
    values = torch.rand(2000, 13, generator=generator) * 4 - 2
    for rows in (40, 37, 11, 5):
        some, alike = agreeing(gates[made], values, rows)
        if not alike:
            break
    else:
        pytest.skip("on this machine all rows round alike")
    examples = torch.cat([some[:64], torch.randn(64, 2000, generator=generator)], 1)

    def run(inputs: Tensor, _: Tensor) -> list[Tensor]:
        return [inputs, gates[made](inputs) * inputs[:, :1] * 0]

    found = row_independence.find_row_classes(run, examples, torch.zeros(64), rows)
    assert found is not None
    alone = [gates[made](value.expand(rows, 13).contiguous()) for value in values]
    for same in (np.flatnonzero(found == one) for one in set(found)):
        assert all(bool((each[same] == each[same[:1]]).all()) for each in alone)


PROTOTYPES = torch.randn(3, 13, generator=torch.Generator().manual_seed(1))
HIDDEN_GATES = {
    "softmax of (T, B)": lambda x: x[:, :3].t().contiguous().softmax(0)[0],
    "records along the end of a flat tensor": lambda x: nn.functional.mish(
        x[:, :3].t().reshape(-1)
    ).view(3, -1)[2],
    "distance": lambda x: torch.cdist(x[:, :13].contiguous(), PROTOTYPES)[:, 0],
    "no number beside": lambda x: torch.where(
        x[:, :2].abs() < 1, x[:, :2].contiguous().atanh(), 0.0
    )[:, 0],
    "zero for all examples": lambda x: (
        (x[:, :13] - 5).relu().contiguous() @ PROTOTYPES.t()
    )[:, 0],
    "zero for all examples, softmax of (T, B)": lambda x: (
        (x[:, :3] - 5).relu().t().contiguous().log_softmax(0)[0]
    ),
    "complex": lambda x: torch.view_as_real(
        torch.view_as_complex(x[:, :2].contiguous())
        * torch.view_as_complex(x[:, 2:4].contiguous())
    ),
    "tiny": lambda x: torch.hypot(x[:, 0] * 1e-37, x[:, 1] * 1e-37),
    "none in one tensor": lambda x: torch.ops.aten.hardtanh_backward(
        x[:, :1].contiguous(), torch.where(x[:, 1:2] > 0, 0.5, math.nan), -1.0, 1.0
    )[:, 0],
    "overflow": lambda x: (x[:, :1] * 2e36).contiguous().remainder(0.01)[:, 0],
    "wide": lambda x: x[:, :1].repeat(1, 2049).sigmoid()[:, 2048],
    "rarely rounded apart": lambda x: torch.pow(1.7, x[:, :1] / 20)[:, 0],
    "half": lambda x: torch.add(
        x[:, 0].bfloat16(), x[:, 1].bfloat16(), alpha=0.3
    ).float(),
}  # fmt: skip


@pytest.mark.parametrize("made", HIDDEN_GATES)
def test_what_examples_hide_of_how_rows_round_is_found(made, monkeypatch) -> None:
    """Such gates before a wide layer moved a sum by 8 to 415 C, as four examples were compared."""
    monkeypatch.setitem(row_independence._TRIAL_NUMBERS, "pointwise", 1 << 16)
    values = torch.rand(1000, 13, generator=torch.Generator().manual_seed(0)) * 4 - 2
    if made.startswith("zero"):
        values[500:] += 7
    for rows in (37, 40, 11):
        alone = [HIDDEN_GATES[made](value.expand(rows, 13).contiguous()) for value in values]
        alike = torch.tensor([equal_rows(each) for each in alone])
        if not alike.all():
            break
    else:
        pytest.skip("on this machine all rows round alike")
    some = values[:500] if made.startswith("zero") else values[alike]
    if made == "no number beside":
        some = some[some[:, 1].abs() > 1]
    examples = torch.cat([some[:64], torch.ones(64, 2000)], 1)

    def run(inputs: Tensor, _: Tensor) -> list[Tensor]:
        return [inputs, HIDDEN_GATES[made](inputs) * 0]

    found = row_independence.find_row_classes(run, examples, torch.zeros(64), rows)
    assert found is not None
    for same in (np.flatnonzero(found == one) for one in set(found)):
        assert all(equal_rows(each[same]) for each in alone)


@pytest.mark.parametrize("first", [float("nan"), 1.0, 1e-42], ids=["none", "equal", "tiny"])
def test_numbers_that_tell_nothing_hide_no_rows_of_the_next_model(first, monkeypatch) -> None:
    """Trials are remembered by layout. Those on a diverged model's numbers, or on equal ones, told
    nothing, and the next model was not tried: a sum moved by 45 C."""
    monkeypatch.setattr(row_independence._RowComparison, "_tried", {})

    def gate(x: Tensor) -> Tensor:
        return x[:, :2].t().contiguous().log_softmax(0)[0]

    values = torch.rand(1000, 2, generator=torch.Generator().manual_seed(0)) * 4 - 2
    alone = [gate(value.expand(37, 2).contiguous()) for value in values]
    alike = torch.tensor([equal_rows(each) for each in alone])
    if alike.all():
        pytest.skip("on this machine all rows round alike")

    def classes(examples: Tensor) -> np.ndarray | None:
        wide = torch.cat([examples, torch.ones(64, 2000)], 1)
        return row_independence.find_row_classes(
            lambda inputs, _: [inputs, gate(inputs) * 0], wide, torch.zeros(64), 37
        )

    classes(torch.full((64, 2), first))
    found = classes(values[alike][:64])
    assert found is not None
    for same in (np.flatnonzero(found == one) for one in set(found)):
        assert all(equal_rows(each[same]) for each in alone)


@torch.library.custom_op("dpdist_tests::gate", mutates_args=())
def foreign_gate(x: Tensor) -> Tensor:
    return x.sigmoid()


def test_an_operation_that_is_not_torch_s_own_gives_every_record_its_row() -> None:
    """Nobody sees which code a custom operation runs: one gate in it moved a sum by 45 C."""
    examples = torch.rand(64, 2000, generator=torch.Generator().manual_seed(0))
    found = row_independence.find_row_classes(
        lambda inputs, _: [inputs, foreign_gate(inputs[:, :1].contiguous())],
        examples, torch.zeros(64), 5,
    )  # fmt: skip
    assert found is not None
    assert found.tolist() == [0, 1, 2, 3, 4]


def equal_rows(rows: Tensor) -> bool:
    return bool(((rows == rows[:1]) | (rows.isnan() & rows[:1].isnan())).all())


@pytest.mark.parametrize("dim", [None, 1])
def test_a_product_whose_gradient_asks_for_any_zero_is_refused(dim: int | None) -> None:
    """A record with a zero factor changed the last bits of all: a sum moved by 62 C."""

    def product(x: Tensor) -> Tensor:
        return x[:, 0].prod() + x[:, 1] if dim is None else x.prod(dim)

    class Product(nn.Module):
        def __init__(self, trained: bool) -> None:
            super().__init__()
            self.layer, self.trained = nn.Linear(2, 2), trained

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.layer(x)
            return product(hidden) if self.trained else hidden.sum(1) * x.prod(1)

    x, labels, ids = torch.rand(8, 2), torch.zeros(8), torch.arange(8)
    assert row_independence.find_mixing_operation(Product(True), lambda o, _: o, x, labels)
    for trained in (False, True):
        engine = GradientEngine(
            Product(trained), lambda out, _: out, clipping=FlatClipping(1.0), blocks=Blocks(1, 8)
        )
        if not trained:
            assert engine.clipped_sum(x, labels, draw_key=KEY, record_ids=ids).flat.any()
            continue
        engine._checked, engine.micro_batch = True, 8
        with pytest.raises(UserError, match=r"must multiply by \*, got torch.prod"):
            engine.clipped_sum(x, labels, draw_key=KEY, record_ids=ids)


def test_an_operation_that_takes_probabilities_alone_is_tried_on_these() -> None:
    model = nn.Sequential(nn.Linear(5, 1), nn.Sigmoid(), nn.Flatten(0))
    engine = GradientEngine(
        model, lambda out, y: nn.functional.binary_cross_entropy(out, y, reduction="none"),
        clipping=FlatClipping(1.0), blocks=Blocks(1, 8),
    )  # fmt: skip
    found = engine.clipped_sum(
        torch.rand(8, 5), torch.arange(8) % 2.0, draw_key=KEY, record_ids=torch.arange(8)
    )
    assert found.flat.any()


SIGNED = {
    "maximum": lambda x: torch.maximum(x[:, 0].contiguous(), x[:, 1].contiguous()),
    "clamp": lambda x: x[:, 0].contiguous().clamp(min=x[:, 1].contiguous()),
    "softshrink": lambda x: nn.functional.softshrink(x[:, :1].contiguous())[:, 0],
    "amax": lambda x: x.t().contiguous().amax(0),
}


@pytest.mark.parametrize("made", SIGNED)
def test_signs_of_zeros_that_other_code_chooses_are_found(made) -> None:
    """torch.maximum(-0.0, 0.0) is either zero, by the code that runs. A gate by `copysign`, which
    reads the sign, moved a sum by 45 C."""
    signs = torch.rand(200, 5, generator=torch.Generator().manual_seed(0)) - 0.5
    alone = [SIGNED[made]((0 * sign).expand(37, 5).contiguous()).signbit() for sign in signs]
    if all(bool((each == each[0]).all()) for each in alone):
        pytest.skip("on this machine all rows round alike")
    examples = torch.rand(64, 2000, generator=torch.Generator().manual_seed(0))

    def run(inputs: Tensor, _: Tensor) -> list[Tensor]:
        return [inputs, torch.ones(37).copysign(SIGNED[made](inputs[:, :5]))]

    found = row_independence.find_row_classes(run, examples, torch.zeros(64), 37)
    assert found is not None
    for same in (np.flatnonzero(found == one) for one in set(found)):
        assert all(bool((each[same] == each[same[0]]).all()) for each in alone)


class RoundedByRow(nn.Module):
    """Stands for a kernel that rounds odd rows of a pass otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        odd = torch.arange(len(x)) % 2 == 1
        return torch.where(odd[:, None], x.nextafter(torch.full_like(x, 1e9)), x)


class Threshold(nn.Module):
    """A number by a Linear layer that odd rows round otherwise."""

    def __init__(self, zero: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.set_weight(0.0 if zero else 1.0)

    def set_weight(self, value: float) -> None:
        nn.init.constant_(self.linear.weight, value)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        odd, value = torch.arange(len(x)) % 2 == 1, self.linear(x)
        return value + value.detach() * odd[:, None] * 2.0**-23


@pytest.mark.parametrize("zero", [False, True], ids=["", "parameters begin at zero"])
@pytest.mark.parametrize("micro_batch", [40, 9])
def test_a_hinge_does_not_hide_how_rows_round(zero, micro_batch) -> None:
    """Its gradient is a step: no last bit of the model's output is left in what layers store, yet
    records on the hinge count in some rows alone. A real Linear layer moved a sum by 11 C."""
    model = Threshold(zero)
    engine = GradientEngine(
        model, lambda out, _: torch.relu(1 - out[:, 0]), clipping=FlatClipping(1.0),
        blocks=Blocks(1, 40), micro_batch=micro_batch,
    )  # fmt: skip
    ids = torch.arange(30)
    inputs = torch.where(ids % 2 == 0, 1 - 2.0**-24, 3.0)[:, None]

    def total(key: bytes, keep: Tensor) -> Tensor:
        some = inputs[keep]
        return engine.clipped_sum(
            some, torch.zeros(len(some)), draw_key=key, record_ids=ids[keep]
        ).flat

    engine._checked = True  # the model is one that screening refuses, as it tells rows apart
    total(KEY, ids >= 0)
    model.set_weight(1.0)
    moved = []
    for number in range(6):
        key = bytes([number]) * 32
        whole = total(key, ids >= 0)
        moved += [float((whole - total(key, ids != gone)).norm()) for gone in range(0, 30, 5)]
    assert 0.9 < max(moved) <= 1.0


def test_means_over_parts_of_large_passes_are_refused() -> None:
    """No company of 33 examples shows them: one record moved a sum by 1.35 C."""

    class Ghost(nn.Module):
        def __init__(self, from_rows: int) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.head, self.from_rows = nn.Linear(3, 6), nn.Linear(6, 2), from_rows

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.layer(x)
            if len(x) >= self.from_rows:
                parts = [part - part.mean(0).detach() for part in hidden.split(32)]
                hidden = torch.cat(parts)
            return self.head(hidden)

    batch = torch.rand(64, 3, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 2
    for from_rows in (65, 64):
        engine = GradientEngine(
            Ghost(from_rows), cross_entropy, clipping=FlatClipping(1.0), blocks=Blocks(1, 64),
            micro_batch=64,
        )  # fmt: skip

        def total(engine: GradientEngine = engine) -> Tensor:
            return engine.clipped_sum(*batch, draw_key=KEY, record_ids=torch.arange(64)).flat

        if from_rows == 65:
            assert total().any()
        else:
            with pytest.raises(UserError, match="mixes examples in passes of 64 rows"):
                total()


def test_another_dimension_as_long_as_a_pass_is_none_of_rows() -> None:
    """Channels, positions, a weight, memory that is not filled yet: their rows are no records."""

    def run(inputs: Tensor, targets: Tensor) -> list[Tensor]:
        by_position = inputs.t() * torch.linspace(1, 2, 6)[:, None]
        torch.empty(6, 3).fill_(0.1)
        return [(inputs @ by_position[:, :2]).clone() * 0 + targets[:, None]]

    examples = torch.rand(64, 6, generator=torch.Generator().manual_seed(0))
    assert row_independence.find_row_classes(run, examples, torch.ones(64), 6) is None


class FirstOfTwo(nn.Module):
    """Of two layers, the first alone sees inputs that are rounded by row."""

    def __init__(self) -> None:
        super().__init__()
        self.rounded, self.first, self.second = RoundedByRow(), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x) + 0 * self.first(self.rounded(x))


def in_blocks(model: nn.Module) -> GradientEngine:
    return GradientEngine(
        model, lambda out, y: nn.functional.cross_entropy(out, y, reduction="none"),
        clipping=FlatClipping(1.0), blocks=Blocks(1, 40),
    )  # fmt: skip


def test_every_layer_s_gradient_is_compared() -> None:
    found = in_blocks(FirstOfTwo())._row_classes(
        6, torch.rand(2, 3), torch.zeros(2, dtype=torch.int64)
    )
    assert found is not None and len(set(found[::2])) == len(set(found[1::2])) == 1
    assert found[0] != found[1]


def test_agreed_targets_are_computed_in_rows_of_their_class() -> None:
    """Targets of the consistency term: one record more must not change another one's."""
    engine = in_blocks(nn.Sequential(RoundedByRow(), nn.Linear(3, 2)))
    engine.perturbation = InputPerturbation(2, 0.3)
    inputs = torch.rand(30, 3, generator=torch.Generator().manual_seed(0))
    labels, ids = torch.zeros(30, dtype=torch.int64), torch.arange(30)
    whole = consistency_targets(engine, inputs, labels, KEY, ids, 1.0)
    for gone in range(5):
        keep = ids != gone
        rest = consistency_targets(engine, inputs[keep], labels[keep], KEY, ids[keep], 1.0)
        assert torch.equal(rest, whole[keep])


class Records:
    """Records of one number each."""

    def batch(self, rows: np.ndarray) -> Tensor:
        return torch.from_numpy(rows).float()[:, None]

    def targets(self, rows: np.ndarray) -> Tensor:
        return torch.zeros(len(rows), dtype=torch.int64)


def test_a_paid_redistribution_lays_its_records_so_too() -> None:
    def row_of(members: np.ndarray, own_rows: bool) -> tuple[dict[int, int], int]:
        passes = list(_passes(
            Records(), members, Blocks(1, 40), KEY, nn.Linear(1, 2),
            lambda inputs, labels: RoundedByRow()(inputs), own_rows,  # type: ignore[arg-type]
        ))  # fmt: skip
        return {
            int(inputs[row]): int(row)
            for inputs, _, real in passes for row in torch.arange(len(inputs))[real]
        }, len(passes[0][0])  # fmt: skip

    whole, _ = row_of(np.arange(1, 31), False)
    assert sorted(whole) == list(range(1, 31)) and {row % 2 for row in whole.values()} == {0, 1}
    rest, _ = row_of(np.arange(2, 31), False)
    assert (
        all(row % 2 == whole[each] % 2 for each, row in rest.items())
        and rest.items() - whole.items()
    )
    whole, rows = row_of(np.arange(1, 31), True)
    assert whole == {each: int(hash_rows(KEY, np.array([each]))[0]) % rows for each in range(1, 31)}


def test_masks_heads_and_sparse_numbers_tell_nothing_of_rows():
    """As many heads as rows, and numbers as large as they go where nothing is attended to."""
    weight = torch.randn(4, 3, 3)
    mask = torch.full((3, 3), torch.finfo(torch.float32).min).triu(1)
    sparse = torch.randn(3, 3).to_sparse()

    def run(inputs, _):
        scores = inputs[:, None] @ weight + mask  # (4 rows, 4 heads, 3, 3)
        return [(scores.softmax(3) @ sparse.to_dense()).flatten(1)]

    some = torch.randn(3, 1, 3, 3).expand(3, 1, 3, 3)[:, 0], torch.zeros(3, dtype=torch.int64)
    assert row_independence.find_row_classes(run, *some, 4) is None
    far = torch.tensor([[1.0, -3e38], [2.0, -3e38]])
    assert not row_independence._differ_by_rounding(far)
    near = torch.tensor([[1.0, -3e38], [1.0 + 1e-7, -3e38]])
    assert row_independence._differ_by_rounding(near)
    assert not row_independence._differ_by_rounding(torch.tensor([[1.0], [torch.inf]]))
    beside_nan = torch.tensor([[1.0, torch.nan], [1.0 + 1e-7, torch.nan]])
    assert row_independence._differ_by_rounding(beside_nan)
    for other in (sparse, torch.nested.nested_tensor([torch.rand(2), torch.rand(3)])):
        assert not row_independence._is_plain(other)


def test_one_row_is_alike_without_a_pass():
    def run(*_):
        raise AssertionError("nothing to compare")

    assert row_independence.find_row_classes(run, torch.rand(3, 2), torch.zeros(3), 1) is None


def test_records_in_another_dimension_are_compared_where_the_first_is_as_long():
    """Columns of inputs.t() are records, though there are as many features; a step hides it."""

    def run(inputs, _):
        odd = torch.arange(4) % 2 == 1
        columns = inputs.t() * (1 + 2.0**-23 * odd)
        return [(columns > 100).t().float()]

    examples = torch.rand(64, 4, generator=torch.Generator().manual_seed(0)) + 1
    found = row_independence.find_row_classes(run, examples, torch.zeros(64), 4)
    assert found.tolist() == [0, 1, 0, 1]


def test_what_runs_unobserved_is_compared_too():
    """Compiled code may fall back to other kernels while somebody looks on."""

    def run(inputs, _):
        observed = torch.utils._python_dispatch._get_current_dispatch_mode() is not None
        odd = torch.arange(4) % 2 == 1
        return [inputs if observed else inputs * (1 + 2.0**-23 * odd[:, None])]

    found = row_independence.find_row_classes(run, torch.rand(64, 6) + 1, torch.zeros(64), 4)
    assert found.tolist() == [0, 1, 0, 1]


class Offset(nn.Module):
    """An offset for each row of a pass of four; its runs are counted."""

    def __init__(self, odd: float) -> None:
        super().__init__()
        self.register_buffer("offset", torch.tensor([0.0, odd, 0.0, odd])[:, None])
        self.runs, self.hidden = 0, torch.zeros(4, 1)

    def forward(self, inputs: Tensor, _: Tensor) -> list[Tensor]:
        self.runs += 1
        return [(inputs + self.offset + self.hidden).tanh()]

    def compared(self, inputs: Tensor) -> tuple[int, list[int] | None]:
        """How many passes it took, and the classes of rows."""
        before, labels = self.runs, torch.zeros(len(inputs))
        found = row_independence.find_row_classes(self, inputs, labels, 4, [*self.buffers()])
        return self.runs - before, None if found is None else found.tolist()


def test_what_was_compared_is_compared_twice_more() -> None:
    """Other weights are compared anew: weights of zero hide how rows round."""
    examples, odd = torch.rand(64, 3), [0, 1, 0, 1]
    module = Offset(0.0)
    assert [module.compared(examples) for _ in range(2)] == [(65, None), (2, None)]
    assert Offset(2.0**-20).compared(examples) == (65, odd)
    assert Offset(2.0**-20).compared(examples) == (2, odd)
    assert module.compared(examples + 1) == (65, None)
    # What its tensors do not tell is seen in the two passes, and from then on.
    module.hidden = Offset(2.0**-20).offset
    assert module.compared(examples) == (2, odd)
    module.hidden = torch.zeros(4, 1)
    assert module.compared(examples) == (2, odd)


@pytest.mark.parametrize("threads", [1, 2])
def test_what_was_compared_under_other_settings_is_compared_again(threads: int) -> None:
    module, examples, before = Offset(0.0), torch.rand(7, threads), torch.get_num_threads()
    try:
        runs = []
        for count in (threads, 3, threads):
            torch.set_num_threads(count)
            runs.append(module.compared(examples)[0])
        assert runs == [8, 8, 2]
    finally:
        torch.set_num_threads(before)


def test_what_cannot_be_described_is_compared_anew() -> None:
    class Marked(Tensor):
        pass

    module, examples = Offset(0.0), torch.rand(7, 2).as_subclass(Marked)
    assert module.compared(examples)[0] == module.compared(examples)[0] == 8
    large = torch.rand(3, row_independence._REMEMBERED // 2)
    assert module.compared(large)[0] == module.compared(large)[0] == 4
    for _ in range(2):
        before = module.runs
        row_independence.find_row_classes(module, torch.rand(7, 5), torch.zeros(7), 4)
        assert module.runs - before == 8
    # A model may hold what has no memory of its own for each number.
    module.register_buffer("sparse", torch.eye(3).to_sparse())
    some = torch.rand(7, 3)
    assert module.compared(some)[0] == module.compared(some)[0] == 8


class Halves(nn.Module):
    """Answers that begin at zero, of inputs rounded by row."""

    def __init__(self) -> None:
        super().__init__()
        self.rounded, self.head = RoundedByRow(), nn.Linear(3, 2)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rounded(x))


@pytest.mark.long
@pytest.mark.parametrize("micro_batch", [None, 5])
def test_agreed_targets_are_made_in_the_passes_of_gradients(micro_batch: int | None) -> None:
    """Also where a head that begins at zero would hide how rows round, until it moves."""
    engine, seen = in_blocks(Halves()), []
    engine.perturbation, engine.micro_batch = InputPerturbation(2, 0.3), micro_batch
    inputs = torch.rand(30, 3, generator=torch.Generator().manual_seed(0))
    labels, ids = torch.zeros(30, dtype=torch.int64), torch.arange(30)
    first = consistency_targets(engine, inputs, labels, KEY, ids, 1.0)
    assert torch.equal(first, torch.tensor([1.5, 0.5]).expand(30, 2))
    with torch.no_grad():
        engine.model.head.weight.copy_(torch.tensor([[1.0, -2.0, 3.0], [0.5, 1.5, -1.0]]))
    engine.model.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    whole = consistency_targets(engine, inputs, labels, KEY, ids, 1.0)
    assert set(seen) == {engine.rows_per_pass(engine.blocks)}
    for gone in range(5):
        keep = ids != gone
        rest = consistency_targets(engine, inputs[keep], labels[keep], KEY, ids[keep], 1.0)
        assert torch.equal(rest, whole[keep])


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_neighbours_padding_does_not_move_where_threads_part(two_threads) -> None:
    """A table that two modules share: numbers that threads added in their own order left 0 or 1
    of 1e9 - 1e9 + 1 in a record where another one had a token less. A sum moved by 2.3 C."""
    ids = torch.zeros(32, 3, dtype=torch.int64)
    values = torch.tensor([1e9, -1e9, 1.0])[None, :, None].expand(32, 3, 8192).contiguous()
    for padded in range(4):
        ids.view(-1)[:padded] = -1
        for _ in range(3):
            found = EmbeddingGradient(ids, values, 2).to_dense()
            assert bool((found[2:, 0] == 1).all())


class ByPlaces(nn.Module):
    """Positions that are looked up in a hidden layer, as the gradient of which torch adds up."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.ordered = nn.Linear(2, 8), list[bool]()

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x[:, :2]).t()[torch.zeros(x.shape[1] - 2, dtype=torch.int64)]
        self.ordered.append(torch.are_deterministic_algorithms_enabled())
        if found.requires_grad:
            found.register_hook(self._note)
        return (found * x[:, 2:].t().contiguous()).sum(0)[:, None]

    def _note(self, _: Tensor) -> None:
        self.ordered.append(torch.are_deterministic_algorithms_enabled())


@pytest.mark.parametrize("isolate", [False, True])
def test_threads_add_up_gradients_by_index_in_one_order(isolate, two_threads) -> None:
    """An equal pass had other bits, with own rows too: a sum moved by 326 C."""
    x = torch.zeros(64, 2050)
    x[:, :3], x[:, 1025], x[:, 1026] = torch.tensor([1.0, 1.0, 1e9]), 3.0, -1e9
    engine = GradientEngine(
        ByPlaces(), lambda out, _: out[:, 0], clipping=FlatClipping(1.0), blocks=Blocks(1, 64),
        isolate=isolate,
    )  # fmt: skip
    engine.own_rows, ids = True, torch.arange(64)
    whole, again = (
        engine.clipped_sum(x, torch.zeros(64), draw_key=KEY, record_ids=ids).flat for _ in range(2)
    )
    assert torch.equal(whole, again)
    engine.outputs(x)
    assert all(engine.model.ordered) and not torch.are_deterministic_algorithms_enabled()


def test_threads_add_up_the_gradients_of_adversarial_draws_in_one_order(two_threads) -> None:
    """Draws that follow the model's gradient, as stobatch's do, depend on their own record."""

    class Ordered(InputPerturbation):
        def perturb_inputs(self, *given: Any) -> Tensor:
            assert torch.are_deterministic_algorithms_enabled()
            return super().perturb_inputs(*given)

    engine = GradientEngine(
        nn.Linear(3, 2), cross_entropy, clipping=FlatClipping(1.0), blocks=Blocks(1, 4),
        perturbation=Ordered(2, 0.1),
    )  # fmt: skip
    ids = torch.arange(4)
    engine.clipped_sum(torch.rand(4, 3), ids % 2, draw_key=KEY, record_ids=ids)
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_order_of_sums_holds_until_the_last_thread_is_done() -> None:
    """Workers that are threads of one process enter and leave in any order."""
    first, second = (per_example.sums_in_order(torch.device("cpu")) for _ in range(2))
    asked = torch.are_deterministic_algorithms_enabled
    assert not asked()
    first.__enter__()
    second.__enter__()
    assert asked()
    first.__exit__(None, None, None)
    assert asked()
    second.__exit__(None, None, None)
    assert not asked()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("job_ends_first", [False, True])
def test_a_job_beside_a_pass_leaves_the_order_of_sums_alone(
    strict: bool, job_ends_first: bool
) -> None:
    """A job in another thread sets the program's choice aside; both put back what they found."""
    asked = torch.are_deterministic_algorithms_enabled
    sums, job = per_example.sums_in_order(torch.device("cpu")), executor._SETTINGS.block()
    with new_settings_after():
        torch.use_deterministic_algorithms(strict)
        with sums:
            assert versions.torch_settings()[0] is strict  # a part of a training's identity
            job.__enter__()
            assert asked() and versions.torch_settings()[0] is False
            if job_ends_first:
                job.__exit__(None, None, None)
                assert asked() and versions.torch_settings()[0] is strict
        if not job_ends_first:
            assert not asked()
            job.__exit__(None, None, None)
        assert asked() is strict
        assert not torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.mark.parametrize(("rows", "least", "most"), [(8, 12.9, 13), (1, 0.9, 1)])
def test_passes_of_one_record_hold_for_a_model_that_selects(
    rows: int, least: float, most: float
) -> None:
    """Selected records lie in rows that follow from how many neighbours were selected, too; what
    rounding would do to a kink behind them is made large here, to be the same everywhere."""

    class Selects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            chosen = inputs[:, 0] > 0
            gate = inputs.new_zeros(len(inputs))
            gate[chosen] = inputs[chosen, 0] * (-1.0 if int(chosen.sum()) == 6 else 1.0)
            outputs: Tensor = self.layer(inputs) * gate[:, None]
            return outputs

    def loss(outputs: Tensor, _: Tensor) -> Tensor:
        return 9 * outputs[:, 0]

    engine = GradientEngine(Selects(), loss, clipping=FlatClipping(1.0), micro_batch=rows)
    inputs, labels, ids = torch.ones(7, 4), torch.zeros(7), torch.arange(7)
    whole, without = (
        engine.clipped_sum(inputs[:n], labels[:n], draw_key=KEY, record_ids=ids[:n]).flat
        for n in (7, 6)
    )
    assert least < float((whole - without).norm()) <= most


def test_rows_that_round_a_norm_otherwise_are_of_another_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A norm decides a clip factor, so it is compared as gradients are."""
    norms = per_example.outer_squared_norms

    def last_bit_in_odd_rows(piece: OuterProductGradient) -> Tensor:
        found = norms(piece)
        found[1::2] = found[1::2].nextafter(2 * found[1::2])
        return found

    monkeypatch.setattr(per_example, "outer_squared_norms", last_bit_in_odd_rows)
    engine = GradientEngine(
        nn.Linear(96, 33),
        lambda outputs, targets: outputs.flatten(1).square().sum(1) * targets,
        clipping=FlatClipping(1.0), micro_batch=8, blocks=Blocks(1, 8),
    )  # fmt: skip
    found = engine._row_classes(8, torch.zeros(0, 3, 96), torch.zeros(0))
    assert found is not None and len(set(found[::2]) & set(found[1::2])) == 0


def test_records_reach_the_model_in_the_layout_in_which_rows_are_compared() -> None:
    """Kernels choose their code by layouts too."""

    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.strides = nn.Linear(6, 3), set[tuple[int, ...]]()

        def forward(self, inputs: Tensor) -> Tensor:
            self.strides.add(inputs.stride())
            return self.head(inputs).mean((1, 2))

    engine = GradientEngine(
        Seen(), cross_entropy, clipping=FlatClipping(1.0), micro_batch=4, blocks=Blocks(1, 4)
    )
    inputs = torch.rand(4, 6, 5, 2).permute(0, 3, 2, 1)
    engine.clipped_sum(inputs, torch.arange(4) % 3, draw_key=KEY, record_ids=torch.arange(4))
    assert engine.model.strides == {(60, 30, 6, 1)}


def _square(h: Tensor) -> Tensor:
    return h[:, :4].reshape(-1, 2, 2)


LSTM = nn.LSTM(7, 3, batch_first=True)
SINGLE = (
    "sin cos tan exp log1p expm1 tanh sinh cosh atan asinh erf erfinv sigmoid lgamma digamma sqrt",
    "rsqrt exp2 log2 sinc i0 abs sign",
)
ACTIVATIONS = "gelu silu mish softplus logsigmoid selu elu hardswish normalize"
OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(torch, name) for name in " ".join(SINGLE).split()},
    **{name: getattr(nn.functional, name) for name in ACTIVATIONS.split()},
    "softmax": lambda h: h.softmax(1), "log_softmax": lambda h: h.log_softmax(1),
    "norm": lambda h: h.norm(dim=1), "largest": lambda h: h.norm(float("inf"), dim=1),
    "norm 3": lambda h: h.norm(3, dim=1), "amax": lambda h: h.amax(1), "std": lambda h: h.std(1),
    "logsumexp": lambda h: h.logsumexp(1), "logcumsumexp": lambda h: h.logcumsumexp(1),
    "cdist": lambda h: torch.cdist(h, torch.ones(3, 7)), "median": lambda h: h.median(1)[0],
    "cumprod": lambda h: h.cumprod(1), "sort": lambda h: h.sort(1)[0],
    "quantile": lambda h: h.quantile(0.3, 1), "nanmean": lambda h: h.nanmean(1),
    "det": lambda h: torch.linalg.det(_square(h)), "pow": lambda h: h.abs().pow(h),
    "matrix_exp": lambda h: torch.linalg.matrix_exp(_square(h)),
    "product": lambda h: h @ torch.linspace(0, 1, 35).reshape(7, 5),
    "products": lambda h: _square(h) @ _square(h).mT, "atan2": lambda h: torch.atan2(h, h * 2),
    "layer_norm": lambda h: nn.functional.layer_norm(h, (7,)),
    "group_norm": lambda h: nn.functional.group_norm(h[:, :6], 2),
    "conv": lambda h: nn.functional.conv1d(h[:, None], torch.ones(2, 1, 3)),
    "interpolate": lambda h: nn.functional.interpolate(h[:, None], 3, mode="linear"),
    "attention": lambda h: nn.functional.scaled_dot_product_attention(
        *[h[:, None, None].repeat(1, 1, 3, 1)] * 3
    ),
    "lstm": lambda h: LSTM(h[:, None].repeat(1, 4, 1))[0],
    "rfft": lambda h: torch.fft.rfft(h).abs(),
    "cross entropy": lambda h: nn.functional.cross_entropy(
        h, torch.arange(len(h)) % 7, reduction="none", label_smoothing=0.1
    ),
}  # fmt: skip
SPECIAL = (0.0, 1.0, -100.0, 1e30, 1e-42, float("nan"), float("inf"), -float("inf"))


def bits_of_others(operation: Callable[[Tensor], Tensor], records: Tensor) -> list[Tensor]:
    """Results and gradients of all records but the fourth."""
    seen = records.clone().requires_grad_()
    result = operation(seen)
    weights = torch.linspace(1, 2, result[0].numel()).reshape(result[0].shape)
    (gradient,) = torch.autograd.grad((result * weights).sum(), seen)
    return [each[torch.arange(len(records)) != 3] for each in (result.detach(), gradient)]


@pytest.mark.parametrize("name", OPERATIONS)
def test_no_operation_looks_at_a_neighbours_numbers(name) -> None:
    """One of 64 records, or one number of it, becomes zero, subnormal, huge or no number: the
    others' results and gradients stay, to the bit. torch.prod is the exception, and refused."""
    records = torch.randn(64, 7, generator=torch.Generator().manual_seed(0))
    before = bits_of_others(OPERATIONS[name], records)
    for value in SPECIAL:
        for numbers in (slice(7), slice(2, 3)):
            other = records.clone()
            other[3, numbers] = value
            for one, same in zip(bits_of_others(OPERATIONS[name], other), before, strict=True):
                assert bool(((one == same) | (one.isnan() & same.isnan())).all()), value


def test_a_neighbours_numbers_are_seen_where_an_operation_looks_at_them() -> None:
    records = torch.randn(64, 7, generator=torch.Generator().manual_seed(0))
    other = records.clone()
    other[3, 2] = 0.0
    one, same = (bits_of_others(lambda h: h.prod(1), each)[1] for each in (records, other))
    assert not torch.equal(one, same)
