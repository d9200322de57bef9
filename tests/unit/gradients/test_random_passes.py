"""What a model draws in a pass: keyed, each row's own, the same again, and never shared unseen."""

import random

import numpy as np
import pytest
import torch
from support.networks import Of
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


def _encoder() -> nn.Module:
    """torch's own layer, which drops a tenth by default, inside attention too."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    return Of(lambda m, x: m.head(m.layer(x).mean(1)), layer=layer, head=nn.Linear(4, 3))


def _noisy_loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    mean, spread = module(inputs)[:, :1], module(inputs)[:, 1:2]
    return (mean + spread * torch.randn_like(mean) - labels[:, None]).square().sum(1)


def _dropping(chance: float = 0.5) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(chance), nn.Linear(6, 3))


RANDOM = {
    "attention": (_encoder, (3, 4), cross_entropy),
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


def test_two_records_of_a_user_draw_different_numbers():
    torch.manual_seed(0)
    engine = _engine(_dropping(), clip=1e3)
    engine.records_per_example = 2
    inputs, targets, _ = (torch.stack([each[:1]] * 2, 1) for each in _records((4,)))
    sums = [
        engine.clipped_sum(
            inputs, targets, draw_key=KEY, record_ids=torch.tensor([7]),
            members=UserMembers(torch.tensor([[3, 4]]), torch.tensor([weights])),
        ).flat
        for weights in ([1.0, 1.0], [1.0, 0.0])
    ]  # fmt: skip
    assert not torch.allclose(sums[0] / 2, sums[1], rtol=1e-2)


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


def _scaled(draw) -> nn.Module:
    return Of(lambda m, x: m.layer(x) * draw(len(x)), layer=nn.Linear(4, 3))


SHARED = {
    "one number": lambda rows: torch.rand(()),
    "permuted": lambda rows: (1 + torch.randperm(rows)[:, None]) / rows,
    "stratified": lambda rows: ((torch.arange(rows) + torch.rand(1)) / rows)[:, None],
    "scaled by the mean": lambda rows: (lambda own: own / own.mean())(torch.rand(rows, 1)),
}


@pytest.mark.parametrize("kind", SHARED)
def test_draws_that_rows_share_need_rows_that_stay(kind):
    torch.manual_seed(0)
    records = _records((4,))
    with pytest.raises(UserError):
        _sum(_engine(_scaled(SHARED[kind])), records)
    for settings in ({"rounding": "fixed-row", "micro_batch": 5}, {"micro_batch": 1}):
        engine = _engine(_scaled(SHARED[kind]), **settings)
        whole = _sum(engine, records)
        assert whole.any() and torch.equal(whole, _sum(engine, records))
        for record in range(0, 12, 3):
            rest = torch.arange(12) != record
            assert (whole - _sum(engine, records, rest)).norm() <= engine.sensitivity


def test_other_generators_than_torchs_are_refused():
    for draw in (lambda rows: random.random(), np.random.rand):
        model = _scaled(lambda rows, draw=draw: torch.as_tensor(draw(rows)).float().reshape(-1, 1))
        with pytest.raises(UserError):
            _sum(_engine(model), _records((4,)))


def test_a_model_that_draws_needs_a_key():
    with pytest.raises(UserError):
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
