"""Public evaluation, history, plots and trackers of a script: released values only."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from sklearn.metrics import roc_auc_score
from support.own_loops import begin
from torch import nn

import dpdist
from dpdist.reports import tracking
from dpdist.reports.plots import plot_trials
from dpdist.runs.accounting import PublishedTrial

pytestmark = pytest.mark.filterwarnings("ignore:privacy.run_key")

GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.rand(300, 4, generator=GENERATOR)
LABELS = (INPUTS[:, 0] > 0.5).long()
PUBLIC = (INPUTS[200:], LABELS[200:])


def _training(folder: Path, *, steps: int = 4, **options: Any) -> dpdist.PrivateTraining:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))
    data = INPUTS[:200], LABELS[:200]
    return begin(folder, model, rate=0.1, data=data, batch_size=20, steps=steps, **options)


def test_evaluation_is_of_the_model_and_changes_nothing(tmp_path):
    training, plain = _training(tmp_path / "run"), _training(tmp_path / "plain")
    for _ in training:
        before = copy.deepcopy(training.model.state_dict())
        found = training.evaluate(PUBLIC, metric="auc")
        assert training.model.training
        with torch.no_grad():
            outputs = copy.deepcopy(training.model).eval()(PUBLIC[0])
        expected = roc_auc_score(PUBLIC[1].numpy(), (outputs[:, 1] - outputs[:, 0]).numpy())
        assert found == pytest.approx(expected)
        share = training.evaluate(PUBLIC)
        assert share == pytest.approx(float((outputs.argmax(1) == PUBLIC[1]).double().mean()))

        for name, value in training.model.state_dict().items():
            assert torch.equal(value, before[name])
    plain.run_all()
    for one, other in zip(training.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert training.guarantee.kind == plain.guarantee.kind
    told = training.history
    assert list(told["step"]) == [0, 1, 2, 3]
    assert {"learning_rate", "noisy_norm", "eval_auc", "eval_accuracy"} <= set(told)
    assert not {"loss", "loss_sum", "examples"} & set(told)


def test_numbers_have_errors_and_no_accuracy(tmp_path):
    public = INPUTS[200:], 3 * INPUTS[200:, 0]
    training = begin(
        tmp_path / "run", nn.Linear(4, 1), data=(INPUTS[:200], 3 * INPUTS[:200, 0]), loss="mse"
    )
    with pytest.raises(dpdist.UserError, match='metric: must be "mae", "mse"'):
        training.evaluate(public)
    with torch.no_grad():
        error = training.model(public[0])[:, 0] - public[1]
    assert training.evaluate(public, metric="mae") == pytest.approx(float(error.abs().mean()))
    assert training.evaluate(public, metric="mse") == pytest.approx(float(error.square().mean()))


THIRDS = torch.arange(300) % 3
LABELED = LABELS.float()
_OUTPUTS = {"cross-entropy": (3, THIRDS), "mse": (1, INPUTS[:, 0]), "bce": (1, LABELED)}


@pytest.mark.parametrize(
    ("loss", "metric", "given", "key"),
    [
        ("cross-entropy", "mae", THIRDS, "metric"),
        ("cross-entropy", "mse", THIRDS.float(), "eval_data: targets"),
        ("cross-entropy", "accuracy", THIRDS + 1, "eval_data: targets"),
        ("cross-entropy", "auc", THIRDS.clamp(max=1), "eval_data"),
        ("cross-entropy", "accuracy", LABELED, "eval_data: targets"),
        ("mse", "auc", INPUTS[:, 0], "metric"),
        ("bce", "mae", LABELED, "metric"),
        ("bce", "accuracy", THIRDS, "eval_data: targets"),
        ("bce", "auc", torch.ones(300), "eval_data"),
    ],
)
def test_a_metric_fits_the_targets(tmp_path, loss, metric, given, key):
    outputs, targets = _OUTPUTS[loss]
    data = INPUTS[:200], targets[:200]
    training = begin(tmp_path / "run", nn.Linear(4, outputs), data=data, loss=loss)
    with pytest.raises(dpdist.UserError, match=f"^{key}"):
        training.evaluate((INPUTS[200:], given[200:]), metric=metric)


@pytest.mark.parametrize(
    ("loss", "last", "low"),
    [
        (nn.BCELoss(), nn.Sigmoid(), 0),
        (nn.MSELoss(), nn.Sigmoid(), 0),
        (nn.MSELoss(), nn.Tanh(), -1),
        (nn.BCEWithLogitsLoss(), nn.Identity(), 0),
    ],
)
def test_accuracy_is_that_of_probabilities_or_of_logits(tmp_path, loss, last, low):
    """Probabilities are all positive: their sign would say 1 of each record."""
    inputs = torch.randn(200, 3)
    labels = torch.where(inputs[:, 0] > 0.5, 1, low)
    model = nn.Sequential(nn.Linear(3, 1), last, nn.Flatten(0))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 0.0, 0.0]]))
        model[0].bias.fill_(-0.5)
    data = inputs[:100], labels[:100].float()
    training = begin(tmp_path / "run", model, data=data, loss=loss)
    assert training.evaluate((inputs[100:], labels[100:])) == 1.0


def test_inputs_that_the_model_cannot_take_are_named(tmp_path):
    with pytest.raises(dpdist.UserError, match=r"^eval_data: ") as error:
        _training(tmp_path / "run").evaluate((INPUTS[200:, :3], LABELS[200:]))
    assert "mat1" not in str(error.value)


class _Two(nn.Linear):
    def forward(self, inputs: Any) -> Any:
        return super().forward(inputs), inputs


def _of_first(module: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(module(batch[0])[0], batch[1], reduction="none")


def test_outputs_without_a_score_name_the_model(tmp_path):
    training = _training(tmp_path / "run")
    with torch.no_grad():
        training.model[3].bias[0] = float("nan")
    with pytest.raises(dpdist.UserError, match=r"^model: "):
        training.evaluate(PUBLIC, metric="auc")
    data = INPUTS[:200], LABELS[:200]
    training = begin(tmp_path / "two", _Two(4, 2), data=data, loss=_of_first)
    with pytest.raises(dpdist.UserError, match=r"^model: "):
        training.evaluate(PUBLIC)


def test_curves_of_classes_are_those_of_sklearn(tmp_path):
    data = INPUTS[:200], THIRDS[:200]
    training = begin(tmp_path / "run", nn.Linear(4, 3), data=data)
    with torch.no_grad():
        shares = training.model(INPUTS[200:]).double().softmax(1)
    expected = roc_auc_score(THIRDS[200:].numpy(), shares.numpy(), multi_class="ovr")
    found = training.evaluate((INPUTS[200:], THIRDS[200:]), metric="auc")
    assert found == pytest.approx(expected)
    training = begin(tmp_path / "bce", nn.Linear(4, 1), data=(INPUTS[:200], LABELED[:200]),
                     loss="bce")  # fmt: skip
    with torch.no_grad():
        outputs = training.model(INPUTS[200:])[:, 0]
    expected = roc_auc_score(LABELS[200:].numpy(), outputs.numpy())
    for targets in (LABELED, LABELS, 2 * LABELS - 1):
        found = training.evaluate((INPUTS[200:], targets[200:]), metric="auc")
        assert found == pytest.approx(expected)
    signs = float(((outputs > 0) == (LABELS[200:] == 1)).double().mean())
    assert training.evaluate((INPUTS[200:], 2 * LABELS[200:] - 1)) == pytest.approx(signs)


def test_a_forgotten_mode_says_how_to_set_it(tmp_path):
    training = _training(tmp_path / "run")
    training.model.eval()
    with pytest.raises(dpdist.UserError, match=r"call model.train\(\)"):
        training.step()
    training.model.train()
    training.step()


def test_private_records_are_not_evaluated(tmp_path):
    with pytest.raises(dpdist.UserError, match="50 in common"):
        _training(tmp_path / "run").evaluate((INPUTS[150:], LABELS[150:]))


def test_a_search_s_trials_reach_no_tracker(tmp_path):
    def train(config: Any) -> dpdist.PrivateTraining:
        model = nn.Linear(4, 2)
        return dpdist.PrivateTraining(
            model, torch.optim.SGD(model.parameters(), lr=config["lr"]), config.data,
            loss="cross-entropy", privacy=config.privacy, batch_size=20, steps=2,
            folder=config.folder, trackers=["tensorboard"],
        )  # fmt: skip

    with pytest.raises(dpdist.UserError, match="trackers"):
        dpdist.tune(
            train, {"lr": {"choice": [0.1, 0.2]}}, data=(INPUTS[:200], LABELS[:200]),
            num_trials={"name": "fixed", "runs": 1}, score={"private_eval_data": PUBLIC},
            privacy={"noise_multiplier": 1.0, "delta": 1e-3},
            folder=tmp_path / "search", executor="local",
        )  # fmt: skip


def test_plots_draw_into_the_axes_that_they_get(tmp_path):
    training = _training(tmp_path / "run")
    for _ in training:
        training.evaluate(PUBLIC)
    axes = Figure().subplots()
    assert training.plot("eval_accuracy", "epsilon", ax=axes) is axes
    assert len(axes.lines) == 2 and list(axes.lines[0].get_xdata()) == [1, 2, 3, 4]
    assert list(axes.lines[1].get_ydata())[-1] == pytest.approx(training.plan.guarantee().epsilon)
    model = nn.Linear(4, 2)
    table = dpdist.certify(
        model, (INPUTS[:4].numpy(), LABELS[:4].numpy()), dpdist.Cohen(sigma=0.25, n=100),
        executor="local",
    )  # fmt: skip
    axes = Figure().subplots()
    assert table.plot(ax=axes) is axes
    assert axes.lines[0].get_ydata()[0] == table.certified_accuracy(0.0)
    scores = ((0.0, False), (0.2, True))
    given = {"values": {}, "noise_multiplier": 1.0, "failed": None}
    trials = [PublishedTrial(**given, scores=[score], chosen=chosen) for score, chosen in scores]
    axes = plot_trials(trials, Figure().subplots())
    assert np.allclose(axes.lines[1].get_ydata(), [0.2])


def test_trackers_get_released_values_only(tmp_path, monkeypatch):
    told: list[tuple[str, float, int]] = []

    def opened(*_: Any) -> tuple[Any, Any]:
        return lambda *figure: told.append(figure), lambda: told.append(("closed", 0.0, 0))

    monkeypatch.setattr(tracking, "BACKENDS", {"wandb": ("json", opened)})
    training = _training(tmp_path / "run", trackers=["wandb"])
    for _ in training:
        assert bool(told) == (not training.remaining_steps)
        if training.remaining_steps:
            training.evaluate(PUBLIC)
    names = {name for name, _, _ in told}
    assert names == {
        "training/learning_rate", "training/noisy_norm", "training/eval_accuracy", "closed",
    }  # fmt: skip
    norms = [value for name, value, _ in told if name == "training/noisy_norm"]
    assert norms == list(training.history["noisy_norm"])
