"""What a model draws in a pass: keyed, each row's own, the same again, and never shared unseen."""

import random

import numpy as np
import pytest
import torch
from support.one_by_one import one_by_one
from torch import Tensor, nn

from dpdist.core.errors import UserError
from dpdist.gradients.clipping import FlatClipping
from dpdist.gradients.engine import GradientEngine, UserMembers, cross_entropy
from dpdist.gradients.hooks import OwnLoss
from dpdist.gradients.perturbations import InputPerturbation, ParameterPerturbation
from dpdist.gradients.random_passes import keyed_draws, states_of_key
from dpdist.gradients.sampling import Blocks
from dpdist.randomness.keys import derive_key, stream_words

KEY, CPU = derive_key(bytes(32), "a test"), torch.device("cpu")


class _Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, 3, dropout=0.4, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class _Encoder(nn.Module):
    """torch's own layer, which drops a tenth by default, inside attention too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = (
            nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
            nn.Linear(4, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


class _Depth(nn.Module):
    """A block with a parameter of its own, and stochastic depth by row, as ConvNeXt's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.head = (
            nn.Linear(4, 4),
            nn.Parameter(torch.ones(4)),
            nn.Linear(4, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.empty([len(x), 1], dtype=x.dtype).bernoulli_(0.5).div_(0.5)
        return self.head(x + kept * self.scale * self.layer(x))


class _Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.depth = _Depth()

    def forward(self, x: Tensor) -> Tensor:
        return self.depth(x)


def _noisy_loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    mean, spread = module(inputs)[:, :1], module(inputs)[:, 1:2]
    return (mean + spread * torch.randn_like(mean) - labels[:, None]).square().sum(1)


def _dropping(chance: float = 0.5) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(chance), nn.Linear(6, 3))


RANDOM = {
    "dropout": (_dropping, (4,), cross_entropy),
    "lstm": (_Lstm, (3, 4), cross_entropy),
    "attention": (_Encoder, (3, 4), cross_entropy),
    "depth": (_Inside, (4,), cross_entropy),
    "loss": (lambda: nn.Linear(4, 2), (4,), OwnLoss(_noisy_loss)),
}


def _engine(model: nn.Module, objective=cross_entropy, clip=0.3, blocks=None, **settings):
    rounding = settings.pop("rounding", "standard")
    engine = GradientEngine(
        model, objective, clipping=FlatClipping(clip), blocks=blocks or Blocks(1, 16), **settings
    )
    engine.rounding = rounding
    return engine


def _records(shape: tuple[int, ...], count: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.arange(count)
    return torch.randn(count, *shape, generator=generator), ids % 3, 5 * ids + 1


def _sum(engine: GradientEngine, records: tuple[Tensor, Tensor, Tensor], keep=None, key=KEY):
    inputs, targets, ids = (each if keep is None else each[keep] for each in records)
    return engine.clipped_sum(inputs, targets, draw_key=key, record_ids=ids).flat


@pytest.mark.parametrize("kind", RANDOM)
@pytest.mark.parametrize("rounding", ["standard", "fixed-row"])
def test_the_sum_is_that_of_one_by_one_gradients_with_the_same_draws(kind, rounding):
    make, shape, objective = RANDOM[kind]
    torch.manual_seed(0)
    model, records = make(), _records(shape)
    engine = _engine(model, objective, rounding=rounding, micro_batch=5)
    before = torch.get_rng_state()
    found = _sum(engine, records)
    assert torch.equal(before, torch.get_rng_state())
    expected = one_by_one(engine, *records, KEY)
    assert (found - expected).norm() <= 0.005 * expected.norm()  # the slack of the clip
    assert (found - expected * float(found @ expected / expected.square().sum())).norm() <= (
        1e-3 * expected.norm()
    )


@pytest.mark.parametrize(
    "perturbation",
    [InputPerturbation(3, 0.4), ParameterPerturbation(3, 0.2)],
    ids=["input", "dplis"],
)
def test_each_noisy_copy_draws_its_own_numbers(perturbation):
    """Of dropout under DPlis' and input noise: the average over copies with masks of their own."""
    torch.manual_seed(0)
    engine = _engine(_dropping(), micro_batch=5, perturbation=perturbation)
    found, expected = _sum(engine, _records((4,))), one_by_one(engine, *_records((4,)), KEY)
    assert (found - expected).norm() <= 0.005 * expected.norm()


@pytest.mark.parametrize("kind", RANDOM)
def test_equal_steps_draw_equally_and_others_do_not(kind):
    make, shape, objective = RANDOM[kind]
    torch.manual_seed(0)
    engine, records = _engine(make(), objective, micro_batch=5), _records(shape)
    once = _sum(engine, records)
    torch.manual_seed(77)
    assert torch.equal(once, _sum(engine, records))
    assert not torch.equal(once, _sum(engine, records, key=derive_key(KEY, "the next step")))
    engine.shard = 40
    assert not torch.equal(once, _sum(engine, records))


@pytest.mark.parametrize("settings", [{}, {"micro_batch": 1}, {"vmap": True}])
def test_two_records_draw_different_numbers(settings):
    """Two copies of a record: each has a mask of its own, in one pass as in two."""
    torch.manual_seed(0)
    engine = _engine(_dropping(), clip=1e3, **settings)
    inputs, targets, _ = (each[:1].expand(2, *each.shape[1:]) for each in _records((4,)))
    both = _sum(engine, (inputs, targets, torch.tensor([3, 4])))
    alone = [_sum(engine, (inputs[:1], targets[:1], torch.tensor([i]))) for i in (3, 4)]
    assert not torch.allclose(both / 2, alone[0], rtol=1e-2)
    if settings.get("micro_batch") == 1:  # a record's own state
        assert torch.allclose(both, alone[0] + alone[1])


def test_one_record_leaves_the_draws_of_other_blocks():
    torch.manual_seed(0)
    blocks, records = Blocks(4, 16), _records((4,), 40)
    engine = _engine(_dropping(), blocks=blocks, micro_batch=4)
    split = [block for _, block in blocks.labeled(KEY, records[2].numpy())]
    assert len(split) == 4
    whole = torch.arange(40)
    without = whole[whole != int(split[1][0])]
    own = torch.from_numpy(split[1])
    change = _sum(engine, records) - _sum(engine, records, without)
    alone = _sum(engine, records, own) - _sum(engine, records, own[1:])
    assert torch.allclose(change, alone, atol=1e-9)


# ---- draws that rows share


class _Scaled(nn.Module):
    """One number for the whole pass."""

    def __init__(self, draw) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(4, 3), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.draw(len(x))


SHARED = {
    "one number": lambda rows: torch.rand(()),
    "depth of a batch": lambda rows: 1 + torch.empty([1, 1]).bernoulli_(0.5),
    "stratified": lambda rows: ((torch.arange(rows) + torch.rand(1)) / rows)[:, None],
    "mirrored": lambda rows: torch.rand(rows // 2 + 1).repeat(2)[:rows, None],
    "scaled by the mean": lambda rows: (lambda own: own / own.mean())(torch.rand(rows, 1)),
    "permuted": lambda rows: (1 + torch.randperm(rows)[:, None]) / rows,
}


@pytest.mark.parametrize("kind", SHARED)
def test_draws_that_rows_share_need_rows_that_stay(kind):
    torch.manual_seed(0)
    records = _records((4,))
    with pytest.raises(UserError, match=r"fixed-row.*micro_batch: 1"):
        _sum(_engine(_Scaled(SHARED[kind])), records)
    for settings in ({"rounding": "fixed-row", "micro_batch": 5}, {"micro_batch": 1}):
        engine = _engine(_Scaled(SHARED[kind]), **settings)
        whole = _sum(engine, records)
        assert whole.any() and torch.equal(whole, _sum(engine, records))
        for record in range(12):
            rest = torch.arange(12) != record
            assert (whole - _sum(engine, records, rest)).norm() <= engine.sensitivity


def test_other_generators_than_torchs_are_refused():
    for draw, name in ((lambda rows: random.random(), "Python"), (np.random.rand, "numpy")):
        model = _Scaled(lambda rows, draw=draw: torch.as_tensor(draw(rows)).float().reshape(-1, 1))
        with pytest.raises(UserError, match=name):
            _sum(_engine(model), _records((4,)))


def test_a_model_that_draws_needs_a_key():
    with pytest.raises(UserError, match="draw_key"):
        _engine(_dropping()).clipped_sum(*_records((4,))[:2])


# ---- states


def test_all_bits_of_the_generator_come_from_the_key():
    """numpy's generator of the same name gives the numbers of the same 624 words."""
    words = stream_words(KEY, 0, 312).view("<u4")
    known = np.random.MT19937()
    known.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": 624}}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with keyed_draws(KEY, CPU):
        found = torch.empty(2000, dtype=torch.int64).random_(0, 2**20)
    assert torch.equal(torch.rand(3), expected)  # it went on where it was
    assert found.tolist() == (known.random_raw(2000) % 2**20).tolist()
    assert not torch.equal(states_of_key(KEY, CPU)[0], states_of_key(bytes(32), CPU)[0])


def test_a_gpus_seed_and_offset_come_from_the_key():
    raw = states_of_key(KEY, torch.device("cuda"))[1].numpy().view("<u8")
    other = states_of_key(bytes(32), torch.device("cuda"))[1].numpy().view("<u8")
    assert len(raw) == 2 and raw[1] % 4 == 0 and (raw != other).all()


# ---- with all else


def test_groups_and_moves_draw_by_row():
    torch.manual_seed(0)
    engine = _engine(_dropping())
    engine.records_per_example = 2
    inputs, targets, ids = _records((4,))
    members = UserMembers(ids.reshape(6, 2), torch.ones(6, 2))
    given = inputs.reshape(6, 2, 4), targets.reshape(6, 2)
    found = [
        engine.clipped_sum(*given, draw_key=KEY, record_ids=torch.arange(6), members=members).flat
        for _ in range(2)
    ]
    assert torch.equal(*found) and found[0].any()


@pytest.mark.parametrize("kind", RANDOM)
def test_what_is_drawn_moves_with_its_row_when_rounding_is_measured(kind):
    make, shape, objective = RANDOM[kind]
    torch.manual_seed(0)
    engine = _engine(make(), objective, clip=1e-3, micro_batch=5)
    inputs, targets, _ = _records(shape)
    engine.prepare(inputs, targets)
    assert engine.measure_moves(inputs, targets, engine.blocks) < 2.0**-18


def test_a_shared_draw_would_move_a_sum_by_more_than_the_clip():
    """What the refusal prevents, left out here: one record more cuts a block in two, and 13 equal
    records are switched on or off by other draws."""
    torch.manual_seed(0)
    draw = _Scaled(lambda rows: 0.01 + 10.0 * torch.empty(()).bernoulli_(0.5))
    engine, moved = _engine(draw, blocks=Blocks(1, 12)), []
    engine._check_draws_by_row = lambda blocked: None
    records = torch.ones(13, 4), torch.zeros(13, dtype=torch.int64), torch.arange(13)
    for step in range(8):
        key = derive_key(KEY, "step", step)
        rest = torch.arange(1, 13)
        change = _sum(engine, records, key=key) - _sum(engine, records, rest, key)
        moved.append(float(change.norm()))
    assert max(moved) > 4 * engine.sensitivity
