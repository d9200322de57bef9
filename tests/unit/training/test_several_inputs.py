"""A model of several inputs is trained, described, released, verified and asked by field."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.local_execution import call
from support.own_loops import begin
from torch import Tensor, nn
from torch.nn import functional

import dpdist

COUNT = 120
NUMBERS = torch.rand(COUNT, 4, generator=torch.Generator().manual_seed(0))
CATEGORIES = torch.arange(COUNT) % 2
PRICES = torch.arange(COUNT) % 3
SETTINGS: dict[str, Any] = {
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-3}, "batch_size": 20, "steps": 2,
}  # fmt: skip
MODULE = '''
import torch
from torch import nn


class Net(nn.Module):
    """Numbers and categories."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(5, 4), nn.Linear(8, 3)

    def forward(self, numbers, categories):
        return self.head(torch.cat([numbers, self.table(categories)], 1))


class Pair(Net):
    def forward(self, pair):
        return super().forward(*pair)



def net(shape, classes):
    return Net()



def pair(shape, classes):
    return Pair()
'''


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "several_nets.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    import several_nets  # type: ignore[import-not-found]

    return several_nets


def _by_name(module: nn.Module, batch: Any) -> Tensor:
    outputs = module(numbers=batch["numbers"], categories=batch["categories"])
    return functional.cross_entropy(outputs, batch["price"], reduction="none")


FIELDS = {"numbers": NUMBERS, "categories": CATEGORIES}
CASES: dict[str, tuple[Any, Any, Any]] = {  # factory: data, loss, what is asked
    "net": (dpdist.as_records({**FIELDS, "price": PRICES}, target="price"), _by_name, FIELDS),
    "pair": (((NUMBERS, CATEGORIES), PRICES), "cross-entropy", (NUMBERS, CATEGORIES)),
}


def _train(model: nn.Module, data: Any, loss: Any, **more: Any) -> dpdist.RunFolder:
    return begin("run", model, data=data, loss=loss, **SETTINGS, **more).run_all()


@pytest.mark.parametrize(("name", "named"), [("net", True), ("pair", False)])
def test_it_is_released_and_asked(nets, name, named):
    data, loss, asked = CASES[name]
    factory = f"several_nets:{name}"
    model = getattr(nets, name)((4,), 3)
    run = _train(model, data, loss, **({"factory": factory} if named else {}))
    dpdist.write_release(run, factory=None if named else factory)
    shutil.move("run/release", "elsewhere")
    release = dpdist.load("elsewhere", trusted_factory=factory)
    answers = release.predict(asked)
    expected = model.eval()(**asked) if name == "net" else model.eval()(asked)
    assert torch.equal(answers, expected) and answers.shape == (COUNT, 3)
    assert call("verify", "elsewhere", "--trust-factory", factory).exit_code == 0


def test_a_score_calls_it_as_its_loss_does(nets):
    kept, rest = slice(0, COUNT // 2), slice(COUNT // 2, None)
    data, held = (((NUMBERS[some], CATEGORIES[some]), PRICES[some]) for some in (kept, rest))
    t = begin("run", nets.net((4,), 3), data=data, loss=nn.CrossEntropyLoss(), **SETTINGS)
    t.score(held, every=1, noise=1.0, value=dpdist.brier_score())
    assert t.step().score is not None


def test_public_records_are_evaluated_and_not_stored(nets):
    kept, rest = slice(0, COUNT // 2), slice(COUNT // 2, None)
    some, others = (
        {**{name: each[part] for name, each in FIELDS.items()}, "price": PRICES[part]}
        for part in (kept, rest)
    )
    items = [{name: each[n] for name, each in others.items()} for n in range(COUNT // 2)]
    given = {"data": dpdist.as_records(some, target="price"), "loss": _by_name, **SETTINGS}
    t = begin("run", nets.Net(), **given)
    with pytest.raises(dpdist.UserError, match=r"^eval_data: .*as_records\(data, target="):
        t.evaluate(items)
    public = dpdist.as_records(items, target="price")
    assert t.evaluate(public) == t.evaluate(dpdist.as_records(others, target="price"))
    with pytest.raises(dpdist.UserError, match=r"^eval_data: .*training\.evaluate"):
        begin("other", nets.Net(), eval_data=public, **given)


def test_what_it_cannot_answer_names_predict(nets):
    data, loss, _ = CASES["net"]
    run = _train(nets.Net(), data, loss, factory="several_nets:net")
    dpdist.write_release(run)
    release = dpdist.load(run.release_folder, trusted_factory="several_nets:net")
    with pytest.raises(dpdist.UserError):
        release.answerer()
    with pytest.raises(dpdist.UserError, match="categories"):
        release.predict({"numbers": NUMBERS})
    with pytest.raises(dpdist.UserError, match=r"inputs\.numbers"):
        release.predict({"numbers": NUMBERS[:, :3], "categories": CATEGORIES})
    with pytest.raises(dpdist.UserError, match=r"^inputs: "):
        release.predict({"numbers": NUMBERS, "categories": CATEGORIES + 9})
