"""Models that treat each record alone are shown to, by their operations; none that mixes is."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.optional_extras import needs_hf
from torch import Tensor, nn

from dpdist import models
from dpdist.core.fields import BY_STRUCTURE, INDEPENDENCE, ISOLATED, SCREENED, weakest
from dpdist.gradients.clipping import FlatClipping
from dpdist.gradients.engine import GradientEngine, cross_entropy, squared_error
from dpdist.gradients.hooks import Objective
from dpdist.gradients.perturbations import ParameterPerturbation
from dpdist.gradients.row_independence import find_mixing_operation
from dpdist.models import ModelSpec

ROWS = 6


def images(*shape: int) -> Tensor:
    return torch.rand(ROWS, *shape, generator=torch.Generator().manual_seed(0))


def why(model: nn.Module, inputs: Tensor, objective: Objective = cross_entropy) -> str | None:
    targets = inputs if objective is squared_error else torch.arange(len(inputs)) % 3
    if inputs.dim() == 2 and objective is of_tokens:
        targets = inputs.long()
    return find_mixing_operation(model, objective, inputs, targets)


def of_tokens(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets)


# ---- what is shown

ZOO = {
    "linear": (3, 16, 16), "mlp": (3, 16, 16), "tf-cnn": (3, 32, 32), "unet-cnn": (3, 32, 32),
    "hgm-cnn": (1, 28, 28), "pool-cnn": (3, 32, 32), "small-cnn": (1, 12, 12),
    "resnet-gn": (3, 16, 16), "resnet-rp": (3, 16, 16), "patches": (1, 28, 28),
    "scattering": (1, 28, 28),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", ZOO)
def test_the_zoo_s_classifiers_are_alone_by_structure(name: str) -> None:
    model = models.initialise(ModelSpec(name, ZOO[name], 3, mean=(0.4,), std=(0.3,)), 0)
    assert why(model, images(*ZOO[name])) is None


@pytest.mark.parametrize("name", ["conv-autoencoder", "dncnn", "unet"])
def test_its_denoisers_are(name: str) -> None:
    model = models.initialise(ModelSpec(name, (1, 12, 12), 3), 0)
    assert why(model, images(1, 12, 12), squared_error) is None


@pytest.mark.parametrize("name", ["next-word-mlp", "next-word-lstm"])
def test_its_readers_of_text_are(name: str) -> None:
    model = models.initialise(ModelSpec(name, (8,), 20, following=True), 0)
    tokens = torch.randint(0, 20, (ROWS, 8), generator=torch.Generator().manual_seed(0)).float()
    assert why(model, tokens, of_tokens) is None


@pytest.mark.long
@pytest.mark.parametrize("base", ["bert", "roberta", "distilbert", "gpt2", "llama", "qwen2", "vit"])
def test_transformers_with_adapters_are(base: str) -> None:
    needs_hf()
    from models.test_transformer import make, stirred  # type: ignore[import-not-found]

    shape = (1, 8, 8) if base == "vit" else (7,)
    inputs = images(*shape) if base == "vit" else torch.randint(0, 40, (ROWS, 7)).float()
    assert why(stirred(make(base)), inputs) is None


class Recurrent(nn.Module):
    def __init__(self, kind: Any, first: bool, swapped: bool = False, **options: Any) -> None:
        super().__init__()
        self.layer = kind(6, 4, batch_first=first, **options)
        self.last = nn.LazyLinear(3)
        self.first, self.swapped = first, swapped

    def forward(self, x: Tensor) -> Tensor:
        time_first = self.first == self.swapped
        found = self.layer(x.transpose(0, 1) if time_first else x)[0]
        return self.last((found.transpose(0, 1) if time_first else found)[:, -1])


class Attention(nn.Module):
    def __init__(self, first: bool = True, swapped: bool = False) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(6, 2, batch_first=first)
        self.last = nn.Linear(42, 3)
        self.first, self.swapped = first, swapped

    def forward(self, x: Tensor) -> Tensor:
        time_first = self.first == self.swapped
        given = x.transpose(0, 1) if time_first else x
        found = self.layer(given, given, given, need_weights=False)[0]
        return self.last((found.transpose(0, 1) if time_first else found).flatten(1))


class WithToken(nn.Module):
    """A learned token before each record's own, and positions that all records share."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, 6)), nn.Parameter(torch.rand(8, 6))
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        return self.last((found.softmax(2) @ found.transpose(1, 2)).relu().mean(1)[:, :6])


class Written(nn.Module):
    """Fills a tensor of its own, a row for each record."""

    def forward(self, x: Tensor) -> Tensor:
        found = torch.zeros(len(x), 3)
        found += x.flatten(1)[:, :3]
        return found.relu_()


def sequences() -> Tensor:
    return images(7, 6)


ALONE: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "rnn": lambda: (Recurrent(nn.RNN, True), sequences()),
    "lstm": lambda: (Recurrent(nn.LSTM, False, num_layers=2, bidirectional=True), sequences()),
    "gru": lambda: (Recurrent(nn.GRU, False), sequences()),
    "attention": lambda: (Attention(), sequences()),
    "token": lambda: (WithToken(), sequences()),
    "encoder": lambda: (nn.Sequential(
        nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), nn.Flatten(), nn.Linear(42, 3)
    ), sequences()),
    "instance norm": lambda: (nn.Sequential(
        nn.Conv1d(7, 4, 3), nn.InstanceNorm1d(4, affine=True), nn.Flatten(), nn.Linear(16, 3)
    ), sequences()),
    "pools": lambda: (nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.PReLU(), nn.AvgPool2d(2), nn.AdaptiveMaxPool2d(3), nn.Flatten(),
        nn.LayerNorm(36), nn.GELU(), nn.Linear(36, 3)
    ), images(1, 12, 12)),
    "written": lambda: (nn.Sequential(nn.Linear(6, 6), Written()), images(6)),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", ALONE)
def test_layers_that_treat_each_record_alone_are_known(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = ALONE[name]()
    model(inputs)  # lazy layers
    assert why(model, inputs) is None


# ---- what is not


class Of(nn.Module):
    """A function of the batch between two layers."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.change, self.last = nn.Linear(6, 6), change, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.change(self.first(x)))


class _MixingBackward(torch.autograd.Function):
    """Its values are each record's own, its gradients are not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] + grads[0].mean(0)


def hooked(x: Tensor) -> Tensor:
    found = x.clone()
    found.register_hook(lambda grad: grad * grad.abs().max())
    return found


def caught(x: Tensor) -> Tensor:
    try:
        large = bool((x > 1e9).any())
    except Exception:
        large = False
    return x + x.roll(1, 0) if large else x


def into_buffer(x: Tensor) -> Tensor:
    found = torch.zeros(len(x), 6)
    found[:, :3] = x[:1, :3]
    return x + found


def through_view(x: Tensor) -> Tensor:
    """Writes records into memory that a tensor of no record shares."""
    with torch.no_grad():  # else autograd lays the view onto its memory anew
        memory = torch.zeros(len(x), 6)
        other = memory.view(6, len(x)).t()
        memory += x.detach()
    return x + other


def replaced(x: Tensor) -> Tensor:
    found = x.clone()
    found.data = x.t()
    return found


def printed(x: Tensor) -> Tensor:
    return x + x.roll(1, 0) if "77." in f"a log line: {x.detach()}" else x


def logged(x: Tensor) -> Tensor:
    """Its text is made where no mode of torch is in force."""
    text = torch._tensor_str._str(x.detach() * 1)
    return x + x.roll(1, 0) if "77." in text else x


def without_modes(read: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():  # type: ignore[attr-defined]
            read(x.detach())
        return x

    return change


def array_first(give: Callable[[np.ndarray[Any, Any]], Tensor]) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        array = np.zeros(tuple(x.shape), np.float32)
        give(array).copy_(x.detach())
        return x + x.roll(1, 0) if array.max() > 50 else x

    return change


def tensor_first(show: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """Its memory is shown while it holds no record."""

    def change(x: Tensor) -> Tensor:
        memory = torch.zeros(x.shape)
        shown = show(memory)
        memory.copy_(x.detach())
        return x + x.roll(1, 0) if shown is None else x

    return change


def unseen_exchange(memory: Tensor) -> Any:
    with torch._C.DisableTorchFunction():  # type: ignore[attr-defined]
        return np.from_dlpack(memory)


def caught_error(act: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        try:
            act(x.detach())
        except (IndexError, RuntimeError):
            return x + x.roll(1, 0)
        return x

    return change


def suppressed_error(x: Tensor) -> Tensor:
    found = None
    with contextlib.suppress(IndexError):
        found = F.embedding(x.detach().abs().long(), torch.zeros(5, 2))
    return x + x.roll(1, 0) if found is None else x


def raised_again(x: Tensor) -> Tensor:
    found = None
    with contextlib.suppress(IndexError):
        try:
            found = F.embedding(x.detach().abs().long(), torch.zeros(5, 2))
        finally:
            torch.zeros(1)
    return x + x.roll(1, 0) if found is None else x


class Numbered:
    """Iterating by number ends at an IndexError."""

    def __init__(self, x: Tensor) -> None:
        self.x = x.detach()

    def __getitem__(self, number: int) -> Tensor:
        return F.embedding(self.x.abs().long() + number, torch.zeros(500, 2))


def ended(x: Tensor) -> Tensor:
    for _, _ in zip(range(2), Numbered(x), strict=False):
        pass
    return x


def in_a_thread(x: Tensor) -> Tensor:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(bool(x.detach().max() > 50)))
    thread.start()
    thread.join()
    return x + x.roll(1, 0) if found[0] else x


def exchanged_unseen(x: Tensor) -> Tensor:
    found = x.clone()
    with torch._C.DisableTorchFunction():  # type: ignore[attr-defined]
        found.data = x.detach().roll(1, 1).contiguous()
    return found


def onto_memory(x: Tensor) -> Tensor:
    """A tensor of no record is laid onto the memory of records."""
    found = torch.zeros(0)
    with torch._C.DisableTorchFunction():  # type: ignore[attr-defined]
        found.set_(x.detach().untyped_storage(), 0, (6, len(x)))  # type: ignore[call-overload]
    return x + found.t()


def beyond(x: Tensor) -> Tensor:
    """Reads what was written behind the end of a tensor of no record."""
    memory = torch.zeros(2 * len(x), 6)
    one, other = memory[: len(x)].detach(), memory[len(x) :].detach()
    del memory
    other.copy_(x.detach())
    del other
    return x + one.as_strided((6,), (1,), 6 * len(x))


MIXES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x - x.mean(0),
    "detached mean": lambda x: x - x.detach().mean(0),
    "mean of all": lambda x: x - x.mean(),
    "softmax": lambda x: x.softmax(0),
    "largest": lambda x: x / x.abs().max(),
    "norm": lambda x: F.normalize(x, dim=0),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "layer norm": lambda x: F.layer_norm(x.t(), (ROWS,)).t(),
    "group norm": lambda x: F.group_norm(x[None], 2)[0],
    "next": lambda x: x + x.roll(1, 0),
    "backwards": lambda x: x + x.flip(0),
    "first": lambda x: x + x[:1],
    "first by a list": lambda x: x + x[[0] * len(x)],
    "by position": lambda x: x * torch.linspace(1, 1.01, len(x))[:, None],
    "sorted": lambda x: x.sort(0)[0],
    "summed up": lambda x: x.cumsum(0),
    "gram": lambda x: (x @ x.t()).softmax(1) @ x,
    "gram by einsum": lambda x: torch.einsum("bi,ci->bc", x, x)[:, :6],
    "transposed": lambda x: x.t().reshape(len(x), 6),
    "reshaped": lambda x: x.reshape(2, -1).flip(0).reshape(len(x), 6),
    "reshaped and summed": lambda x: x.reshape(3, -1, 6).mean(1, keepdim=True).repeat(1, 2, 1)
    .reshape(len(x), 6),
    "unfolded": lambda x: x.unfold(0, 2, 1).sum(2)[[0, 1, 2, 3, 4, 4]],
    "convolved": lambda x: F.conv1d(x, torch.ones(ROWS, ROWS, 1)),
    "pooled": lambda x: F.max_pool2d(x[None], (3, 1), 1, (1, 0))[0],
    "padded": lambda x: F.pad(x, (0, 0, 1, 0))[:-1],
    "shuffled": lambda x: x[torch.randperm(len(x))],
    "random": lambda x: x + torch.rand_like(x),
    "dropout": lambda x: F.dropout(x, 0.5),
    "masked": lambda x: x * (x > 0).all(),
    "branch": lambda x: x + x.roll(1, 0) if (x > 1e9).any() else x,
    "caught branch": caught,
    "numbers to Python": lambda x: x + float(x.sum()),
    "list": lambda x: x + max(map(max, x.tolist())),
    "array": lambda x: x + float(x.detach().numpy().max()),
    "another array": lambda x: x + torch.from_numpy(__import__("numpy").asarray(x.detach())).max(),
    "counted": lambda x: x + torch.bincount((x > 0).sum(1), minlength=9)[(x > 0).sum(1)][:, None],
    "nonzero": lambda x: x + len((x > 0).nonzero()),
    "gathered": lambda x: x.gather(0, torch.zeros(len(x), 6, dtype=torch.long)),
    "of the first row": lambda x: x + x.gather(1, torch.zeros(1, 6, dtype=torch.long)),
    "scattered": lambda x: torch.zeros(len(x), 6).scatter_add(
        0, torch.ones(len(x), 6, dtype=torch.long), x
    ),
    "backward alone": lambda x: _MixingBackward.apply(x),
    "hooked": hooked,
    "buffer": into_buffer,
    "view": through_view,
    "data": replaced,
    "size": lambda x: x * (1 + 1 / len(x)) - x.sum(0) * 0,
    "in place": lambda x: x.clone().sub_(x.mean(0)),
    "put": lambda x: x.clone().index_put_((torch.tensor([0]),), x[1:2]),
    "printed": printed,
    "logged": logged,
    "array without modes": without_modes(lambda x: x.numpy()),
    "list without modes": without_modes(lambda x: x.tolist()),
    "address without modes": without_modes(lambda x: x.data_ptr()),
    "exchange without modes": without_modes(torch.utils.dlpack.to_dlpack),
    "storage without modes": without_modes(lambda x: x.untyped_storage()),
    "array first": array_first(torch.as_tensor),
    "shared array first": array_first(torch.from_numpy),
    "array as it is first": array_first(torch.asarray),
    "buffer first": array_first(
        lambda array: torch.frombuffer(memoryview(array).cast("B"), dtype=torch.float32)
        .view(array.shape)
    ),
    "address first": tensor_first(lambda memory: memory.data_ptr()),
    "exchange first": tensor_first(np.from_dlpack),
    "exchange first, without modes": tensor_first(unseen_exchange),
    "list by C": lambda x: x + max(map(max, *map(Tensor.tolist, [x]))),
    "view's array first": tensor_first(lambda memory: memory.view(-1).numpy()),
    "caught look-up": caught_error(lambda x: F.embedding(x.abs().long(), torch.zeros(50, 2))),
    "caught gather": caught_error(lambda x: x.gather(1, x[:, :1].abs().long())),
    "caught division": caught_error(lambda x: torch.ones(len(x), 6).long() // (x.long() - 77)),
    "suppressed look-up": suppressed_error,
    "raised again": raised_again,
    "ended by a look-up": ended,
    "in a thread": in_a_thread,
    "data unseen": exchanged_unseen,
    "onto memory": onto_memory,
    "beyond": beyond,
    "resized": lambda x: x + torch.zeros(0).resize_(len(x), 6),
    "where": lambda x: torch.stack(torch.where((x > 0).all(1) | True)).t() + x,
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", MIXES)
def test_what_mixes_is_not_shown_to_be_alone(name: str) -> None:
    assert why(Of(MIXES[name]), images(6)) is not None


class Swapped(nn.Module):
    """As many positions as records, and a layer that takes the one for the other."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.layer, self.last, self.twice = Scaled(), nn.Linear(6, 3), twice

    def forward(self, x: Tensor) -> Tensor:
        if self.twice:  # all records in an argument beside the layer's own
            return self.last(self.layer(x[:, 0], x.repeat(2, 1, 1)[:, 0]))
        return self.last(self.layer(x.transpose(0, 1), None).transpose(0, 1).mean(1))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor, others: Tensor | None) -> Tensor:
        return x * self.scale


@pytest.mark.parametrize("twice", [False, True])
def test_a_layer_that_reads_records_elsewhere_is_not(twice: bool) -> None:
    """Its operations keep records apart; the rule of its gradients would take others for them."""
    assert "record i is not in row i of what layer" in str(why(Swapped(twice), images(6, 6)))


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("first", [True, False])
def test_a_recurrent_layer_that_runs_over_the_records_is_not(kind: Any, first: bool) -> None:
    torch.manual_seed(0)
    model, inputs = Recurrent(kind, first, swapped=True), torch.rand(6, 6, 6)
    model(inputs)
    assert why(model, inputs) is not None


@pytest.mark.parametrize("first", [True, False])
def test_attention_over_the_records_is_not(first: bool) -> None:
    assert why(Attention(first, swapped=True), torch.rand(7, 7, 6)) is not None


class Remembering(nn.Module):
    """What is kept of one batch is used in the next."""

    def __init__(self, what: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.what = nn.Linear(6, 3), what
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x)
        before, self.kept = self.kept, self.what(found.detach())
        return found if before is None else found + before


@pytest.mark.parametrize("what", [lambda x: x, lambda x: x[:, :1], lambda x: x.softmax(1)])
def test_what_is_kept_from_an_earlier_batch_is_not(what: Callable[[Tensor], Tensor]) -> None:
    assert "earlier pass" in str(why(Remembering(what), images(6)))


class Bank(nn.Module):
    """Keep records by the size of their batch, for a pass of another size to read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.kept: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x)
        for size, other in self.kept.items():
            found = found if size == len(x) else found * other.max()
        self.kept[len(x)] = x.detach().clone()
        return found


def test_what_is_kept_for_a_pass_of_another_shape_is_not() -> None:
    assert "left in the model" in str(why(Bank(), images(6)))


@pytest.mark.parametrize("many", [False, True])
def test_what_clears_up_after_an_error_is_alone(many: bool) -> None:
    """A look-up among tokens is accepted where its error goes on to stop the run."""

    def cleared(x: Tensor) -> Tensor:
        done = []
        try:
            return x + F.embedding(x.detach().abs().long(), torch.zeros(9, 2)).sum(2)
        finally:
            for each in range(2) if many else ():
                done.append(each)

    assert why(Of(cleared), images(6)) is None
    assert why(Of(lambda x: x * (1 + torch.zeros(6).numpy().max())), images(6)) is None


def test_a_profiler_of_the_caller_goes_on() -> None:
    seen: list[str] = []

    def hook(frame: Any, event: str, arg: Any) -> None:
        seen.append(event)

    before = sys.getprofile()
    sys.setprofile(hook)
    try:
        why(Of(lambda x: x), images(6))
        assert sys.getprofile() is hook
    finally:
        sys.setprofile(before)


class Stored(nn.Module):
    """Keeps records in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("last", torch.zeros(ROWS, 6))

    def forward(self, x: Tensor) -> Tensor:
        self.last.copy_(x.detach())
        return self.layer(x)


def test_what_writes_to_a_buffer_is_not() -> None:
    assert "tensor of the model" in str(why(Stored(), images(6)))


def test_a_parameter_for_each_row_is_not() -> None:
    """It is the same for all records at first, and by the row as soon as it is trained."""

    class ByRow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows, self.layer = nn.Parameter(torch.zeros(ROWS, 6)), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x + self.rows[: len(x)])

    assert "row to row" in str(why(ByRow(), images(6)))


def test_an_operation_from_elsewhere_is_not() -> None:
    @torch.library.custom_op("dpdist_tests::own", mutates_args=())
    def own(x: Tensor) -> Tensor:
        return x.clone()

    assert "not on the list" in str(why(Of(lambda x: x + own(x.detach())), images(6)))


def test_an_objective_that_mixes_is_not() -> None:
    def centred(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = cross_entropy(outputs, targets)
        return losses - losses.detach().mean()

    assert why(Of(lambda x: x), images(6), centred) is not None


def test_mixing_begins_at_a_size_and_is_seen_at_that_size() -> None:
    """The executed shape is what counts; smaller ones say nothing about it."""
    model = Of(lambda x: x if len(x) < 9 else x - x.mean(0))
    assert why(model, torch.rand(8, 6)) is None
    assert why(model, torch.rand(9, 6)) is not None


def test_the_trace_leaves_no_trace() -> None:
    model = Of(lambda x: x + torch.rand_like(x))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    why(model, images(6))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


# ---- what an engine says


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        (lambda x: x, {}, BY_STRUCTURE),
        (lambda x: x.cos().acos(), {}, BY_STRUCTURE),
        (lambda x: x * (x > 9).any(1, keepdim=True) + x, {}, BY_STRUCTURE),
        (lambda x: x - x.mean(0), {}, SCREENED),
        (lambda x: x - x.mean(0), {"isolate": True}, ISOLATED),
        (lambda x: x, {"perturbation": ParameterPerturbation(2, 0.1, per_example=True)}, ISOLATED),
    ],
)
def test_an_engine_says_how_records_are_kept_apart(
    change: Callable[[Tensor], Tensor], options: dict[str, Any], said: str
) -> None:
    engine = GradientEngine(Of(change), cross_entropy, clipping=FlatClipping(1.0), **options)
    assert engine.classify_independence(images(6), torch.arange(ROWS) % 3) == said


def test_the_weakest_counts() -> None:
    assert weakest([]) == weakest(["of an old run", ISOLATED]) == SCREENED
    assert weakest([ISOLATED, BY_STRUCTURE, ISOLATED]) == BY_STRUCTURE
    assert weakest([ISOLATED]) == ISOLATED and weakest(INDEPENDENCE) == SCREENED
