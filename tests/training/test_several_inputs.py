"""A model of several inputs is trained, described, released, verified and asked by field."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.local_execution import call
from torch import Tensor, nn
from torch.nn import functional
from training.own_loops import begin

import dpdist
from dpdist.models.signature import Signature
from dpdist.reports.technical_file import technical_file

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


class Fields(Net):
    def forward(self, batch):
        return super().forward(batch["numbers"], batch["categories"])


class Pair(Net):
    def forward(self, pair):
        return super().forward(*pair)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, tokens):
        return self.head(self.table(tokens))


def net(shape, classes):
    return Net()


def fields(shape, classes):
    return Fields()


def pair(shape, classes):
    return Pair()


def tokens(shape, classes):
    return Tokens()
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
    "fields": ((FIELDS, PRICES), "cross-entropy", FIELDS),
    "pair": (((NUMBERS, CATEGORIES), PRICES), "cross-entropy", (NUMBERS, CATEGORIES)),
    "tokens": ((CATEGORIES, PRICES), nn.CrossEntropyLoss(), CATEGORIES),
}


def _train(model: nn.Module, data: Any, loss: Any, **more: Any) -> dpdist.RunFolder:
    return begin("run", model, data=data, loss=loss, **SETTINGS, **more).run_all()


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_it_is_released_and_asked(nets, name, named):
    data, loss, asked = CASES[name]
    factory = f"several_nets:{name}"
    model = getattr(nets, name)((4,), 3)
    run = _train(model, data, loss, **({"factory": factory} if named else {}))
    words = "(1 int64)" if name in ("pair", "tokens") else "categories (1 int64)"
    assert words in technical_file(dpdist.load_results(run))
    dpdist.write_release(run, factory=None if named else factory)
    shutil.move("run/release", "elsewhere")
    release = dpdist.load("elsewhere", trusted_factory=factory)
    assert words in str(release) and words in Path("elsewhere/README.md").read_text()
    answers = release.predict(asked)
    expected = model.eval()(**asked) if name == "net" else model.eval()(asked)
    assert torch.equal(answers, expected) and answers.shape == (COUNT, 3)
    assert call("verify", "elsewhere", "--trust-factory", factory).exit_code == 0


def test_what_it_cannot_answer_names_predict(nets):
    data, loss, _ = CASES["net"]
    run = _train(nets.Net(), data, loss, factory="several_nets:net")
    dpdist.write_release(run)
    release = dpdist.load(run.release_folder, trusted_factory="several_nets:net")
    with pytest.raises(dpdist.UserError, match=r"predict\(\{'categories'"):
        release.answerer()
    Path("image.npy").write_bytes(b"")
    trust = {"run": [], "run/release": ["--trust-factory", "several_nets:net"]}
    for where in ("run", "run/release"):
        done = call("predict", where, "image.npy", *trust[where])
        assert done.exit_code and "predict({'categories'" in str(done.exception or done.output)
    with pytest.raises(dpdist.UserError, match="lacks categories"):
        release.predict({"numbers": NUMBERS})
    with pytest.raises(dpdist.UserError, match=r"inputs\.numbers: must have shape"):
        release.predict({"numbers": NUMBERS[:, :3], "categories": CATEGORIES})


def test_a_call_that_no_release_can_repeat_is_said_before_the_first_step(nets):
    def loss(module: nn.Module, batch: Any) -> Tensor:
        outputs = module(2 * batch["numbers"], batch["categories"])
        return functional.cross_entropy(outputs, batch["price"], reduction="none")

    data = CASES["net"][0]
    with pytest.warns(UserWarning, match="model: "):
        begin("run", nets.Net(), data=data, loss=loss, **SETTINGS)


@pytest.mark.parametrize("loss", ["cross-entropy", lambda module, batch: module(batch[0])])
def test_errors_name_the_call(nets, loss):
    data, _, _ = CASES["net"]
    call = r"module\(batch\['numbers'\], batch\['categories'\]\), batch\['price'\]"
    with pytest.raises(dpdist.UserError, match=call):
        _train(nets.Net(), data, loss)


@pytest.mark.parametrize(
    "said",
    [
        {}, {"fields": {}, "call": {"args": ["x"], "kwargs": {}}},
        {"fields": {"x": {"shape": [2**40], "dtype": "int64"}},
         "call": {"args": ["x"], "kwargs": {}}},
        {"fields": {"x": {"shape": [2], "dtype": "int64"}}, "call": {"args": ["x"], "kwargs": 3}},
        {"fields": {"x": {"shape": [2], "dtype": "load"}}, "call": {"args": ["x"], "kwargs": {}}},
        {"fields": {"x": {"shape": [2], "dtype": "int64"}}, "call": {"args": [["y"]], "kwargs": 3}},
    ],
)  # fmt: skip
def test_a_damaged_signature_is_refused(said):
    with pytest.raises(dpdist.UserError, match="damaged"):
        Signature.parse(said, "model.json")
