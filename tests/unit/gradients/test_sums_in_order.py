"""An equal pass gives equal bits: threads add up by index in one order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.threads import new_settings_after
from torch import Tensor, nn

from dpdist.cluster import executor, versions
from dpdist.gradients import per_example
from dpdist.gradients.clipping import FlatClipping
from dpdist.gradients.engine import GradientEngine, cross_entropy
from dpdist.gradients.objective import consistency_targets
from dpdist.gradients.per_example import EmbeddingGradient
from dpdist.gradients.perturbations import InputPerturbation
from dpdist.gradients.sampling import Blocks

KEY = bytes(range(32))


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_neighbors_padding_does_not_move_where_threads_part(two_threads) -> None:
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


@pytest.mark.parametrize("vmap", [False, True])
def test_threads_add_up_gradients_by_index_in_one_order(vmap, two_threads) -> None:
    """An equal pass had other bits, with fixed rows too: a sum moved by 326 C."""
    x = torch.zeros(64, 2050)
    x[:, :3], x[:, 1025], x[:, 1026] = torch.tensor([1.0, 1.0, 1e9]), 3.0, -1e9
    engine = GradientEngine(
        ByPlaces(), lambda out, _: out[:, 0], clipping=FlatClipping(1.0), blocks=Blocks(1, 64),
        vmap=vmap,
    )  # fmt: skip
    engine.rounding, ids = "fixed-row", torch.arange(64)
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
def test_a_job_beside_a_pass_leaves_the_order_of_sums_alone(strict, job_ends_first) -> None:
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


def test_agreed_targets_are_made_in_the_passes_of_gradients() -> None:
    """Targets of the consistency term come in the records' order, whatever the blocks."""
    inputs = torch.rand(30, 3, generator=torch.Generator().manual_seed(0))
    labels, ids, seen = torch.arange(30) % 2, torch.arange(30), list[int]()
    engine = GradientEngine(
        nn.Linear(3, 2), cross_entropy, clipping=FlatClipping(1.0), blocks=Blocks(1, 40),
        micro_batch=5, perturbation=InputPerturbation(2, 0.3),
    )  # fmt: skip
    engine.prepare(inputs, labels)
    whole = consistency_targets(engine, inputs, labels, KEY, ids, 1.0)
    engine.model.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    rest = consistency_targets(engine, inputs[3:], labels[3:], KEY, ids[3:], 1.0)
    assert max(seen) == min(27, engine.rows_per_pass(Blocks(1, 40)))
    assert torch.allclose(rest, whole[3:], rtol=0, atol=1e-6)
