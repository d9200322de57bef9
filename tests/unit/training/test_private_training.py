"""`dpdist.PrivateTraining`: a script's own loop is the run of a recipe, and nothing less."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.local_execution import command, run_without_ray
from support.own_loops import (
    PRIVATE,
    WIDTH,
    Rows,
    begin,
    ended,
    flat,
    left,
    rows,
    run_script,
    shaken,
)
from support.threads import one_thread
from support.training import execute, make, parameters, release_ids
from torch import nn
from torch.optim import lr_scheduler as schedulers

import dpdist
from dpdist import Privacy, PrivateTraining, UserError, models
from dpdist.core.fields import DRAWS_BY_ROW
from dpdist.core.files import read_json
from dpdist.evaluation import load_model
from dpdist.privacy.budget import Charge, read_budgets
from dpdist.privacy.ledger import Ledger, LedgerError
from dpdist.runs.folder import RunFolder
from dpdist.training import job, model_setup
from dpdist.training.monitoring import read_groups
from dpdist.training.records import records_with_canaries


class Net(nn.Module):
    def __init__(self, width: int = 5, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(WIDTH, width), nn.Linear(width, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs).tanh())


def net(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    return Net()


def training(
    folder: Path, model: nn.Module | None = None, optimizer: Any = None, **given: Any
) -> PrivateTraining:
    model = model or Net()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    given.setdefault("resources", {"checkpoint_seconds": 1e-6})
    return begin(folder, model, optimizer, **given)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> torch.Tensor:
    """The parameters of a training that nothing happened to."""
    with one_thread():
        return flat(ended(training(tmp_path_factory.mktemp("whole") / "run")).model)


# --- an ordinary run folder


@pytest.mark.slow
def test_the_folder_is_an_ordinary_run(tmp_path, monkeypatch, capsys):
    factory = f"{__name__}:net"
    t = training(
        tmp_path / "runs" / "own", privacy={"epsilon": 3.0, "delta": 1e-3},
        eval_data=rows(30, 2), factory=factory,
        certify={"sigma": 0.25, "n": 50, "n0": 10, "max_inputs": 3},
    )  # fmt: skip
    t.run_all()
    facts = dpdist.load_results(t.run)
    assert facts.guarantee.epsilon <= 3.0 and facts.guarantee.kind == "proved"
    assert facts.evaluation is not None and facts.evaluation["inputs"] == 30

    run_without_ray(monkeypatch)
    runs = ("--runs", str(tmp_path / "runs"))
    for words in (
        ("report", "own", *runs),
        ("certify", "own", *runs),
        ("audit", "own", *runs, "--set", "audit.releases=300"),
        ("release", "own", *runs),
        ("verify", str(t.run.release_folder), "--trust-factory", factory),
    ):
        done = command(monkeypatch, capsys, tmp_path, *words)
        assert done.code == 0, (words, done.out + done.err)
    assert t.run.report_file.exists() and list(t.run.certificates.glob("*/certificates.parquet"))
    for kind in ("canaries", "many-runs", "membership", "poison"):  # no command trains it again
        done = command(monkeypatch, capsys, tmp_path, "audit", "own", *runs, "--kind", kind)
        assert done.code == 2 and "--kind" in done.err


def test_a_model_of_double_precision_trains(tmp_path):
    inputs, labels = rows()
    t = training(tmp_path / "own", Net().double(), data=(inputs.double(), labels))
    before = flat(t.model)
    t.run_all()
    assert t.guarantee.kind != "claimed" and not torch.equal(before, flat(t.model))


def test_columns_of_a_table_are_inputs_in_their_order(tmp_path, monkeypatch, capsys):
    t = training(tmp_path / "own", factory=f"{__name__}:net")
    run, inputs = t.run_all(), rows()[0][:3]
    lines = [",".join(map(str, [*row.tolist(), 1])) for row in inputs]
    (tmp_path / "new.csv").write_text("\n".join(["z,y,x,c,b,a,label", *lines]))
    done = command(monkeypatch, capsys, tmp_path, "predict", run.path, "new.csv", "--json")
    assert done.code == 0, done.err
    shares = [json.loads(line)["probabilities"]["1"] for line in done.out.splitlines()]
    assert shares == pytest.approx(t.model.eval()(inputs).softmax(1)[:, 1].tolist(), abs=1e-5)


MINE = """
import torch
from torch import nn

SCALE = 1.0


class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, inputs):
        return self.second(SCALE * self.first(inputs).tanh())


def net(input_shape, classes):
    return Mine()
"""


def test_a_factory_may_be_named_for_the_release(tmp_path, monkeypatch):
    """Of a module that the script alone has; another one is refused."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "nets_later.py").write_text(MINE)
    (tmp_path / "nets_otherwise.py").write_text(MINE.replace("SCALE = 1.0", "SCALE = 1.5"))
    given: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(MINE, "a cell of a notebook", "exec"), given)
    model = given["Mine"]()
    fresh = {"noise_multiplier": 1.0, "delta": 1e-3}
    run = training(tmp_path / "own", model, sgd(model), privacy=fresh).run_all()
    with pytest.raises(UserError, match="factory: "):
        dpdist.write_release(run, factory="nets_otherwise:net")
    assert not run.release_folder.exists()
    dpdist.write_release(run, factory="nets_later:net")
    with pytest.raises(UserError):
        dpdist.load(run.release_folder).model  # noqa: B018 - building is what is refused
    release = dpdist.load(run.release_folder, trusted_factory="nets_later:net")
    torch.testing.assert_close(release.model(rows()[0]), model.eval()(rows()[0]))
    assert release.card["extra"]["model"] == "nets_later:net" and release.card["private"]


def test_a_release_takes_the_frame_that_a_training_takes(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "nets_of_a_frame.py").write_text(MINE)
    model = importlib.import_module("nets_of_a_frame").Mine()
    inputs, labels = rows()
    frame = pd.DataFrame(inputs.double().numpy(), columns=list("abcdef")).assign(a=1)
    fresh = {"noise_multiplier": 1.0, "delta": 1e-3}
    options = {"data": (frame, labels), "privacy": fresh, "factory": "nets_of_a_frame:net"}
    run = training(tmp_path / "own", model, sgd(model), **options).run_all()
    dpdist.write_release(run)
    release = dpdist.load(run.release_folder, trusted_factory="nets_of_a_frame:net")
    inputs[:, 0] = 1
    torch.testing.assert_close(release.predict(frame), release.predict(inputs))
    for given in (frame.drop(columns="f"), frame.assign(a="zzz"), {"a": [1.0]}, [["zzz"]]):
        with pytest.raises(UserError, match=r"^inputs: ") as error:
            release.predict(given)
        assert "zzz" not in str(error.value)


# --- what a loop may do, and what it may not


def test_a_change_between_steps_is_on_the_card(tmp_path):
    slow = {"privacy": {"epsilon": 3.0, "delta": 1e-3}, "resources": {"checkpoint_seconds": 1e6}}
    t = training(tmp_path / "own", **slow)
    t.step()
    assert t.guarantee.kind == "proved"
    t.model.first.weight.data.mul_(0.5)  # no version counter tells of it
    with pytest.warns(UserWarning) as warned, ExitStack() as library:
        library.callback(t.step)  # as a Trainer of another library calls it
    assert warned[0].filename == __file__
    assert t.guarantee.kind == "assumed: post-processing"
    t.close()
    t = ended(training(tmp_path / "own", **slow))
    facts = dpdist.load_results(t.run)
    assert t.guarantee.kind == facts.guarantee.kind == "assumed: post-processing"
    assert facts.privacy_card()["guarantee"]["kind"] == "assumed: post-processing"
    lines = t.run.ledger.read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"changed"' not in line]
    assert len(kept) == len(lines) - 1
    t.run.ledger.write_text("".join(kept))
    with pytest.raises((UserError, LedgerError)):  # no edit takes it off the card
        dpdist.load_results(t.run)


def test_the_optimizer_is_watched_too(tmp_path):
    t = training(tmp_path / "own")
    t.step()
    next(iter(t.optimizer.state.values()))["momentum_buffer"].zero_()
    t.step()
    t.optimizer.param_groups[0].update(lr=0.017)
    t.run_all()
    assert sorted(Ledger.read(t.run.ledger).changes) == ["optimizer settings", "optimizer state"]


def test_a_step_s_epsilon_counts_what_an_earlier_process_released(tmp_path):
    """Steps that were released and then lost with their process were left out of it."""
    slow = {"privacy": {"epsilon": 3.0, "delta": 1e-3}, "resources": {"checkpoint_seconds": 1e6}}
    t = training(tmp_path / "own", **slow)
    assert t.guarantee.epsilon == 0
    first = [t.step() for _ in range(4)]
    assert first[0].epsilon < first[3].epsilon == t.guarantee.epsilon
    t.close()
    again = training(tmp_path / "own", **slow)  # from the checkpoint before the first step
    reports = [again.step() for _ in range(5)]
    assert len({report.epsilon for report in reports[:4]}) == 1
    assert first[3].epsilon <= reports[0].epsilon < reports[4].epsilon == again.guarantee.epsilon


def test_a_checkpoint_that_is_asked_for_saves_every_step(tmp_path, undisturbed):
    slow = {"resources": {"checkpoint_seconds": 1e6}}
    t = training(tmp_path / "own", **slow)
    t.checkpoint()
    assert not (tmp_path / "own").exists(), "nothing was trained"
    for _ in range(3):
        t.step()
    for _ in range(2):
        t.checkpoint()
    t.close()
    again = training(tmp_path / "own", **slow)
    again.step()
    assert again.remaining_steps == 2
    again.run_all()
    again.checkpoint()
    assert Ledger.read(again.run.ledger).release_counts == dict.fromkeys(range(6), 1)
    assert [group.step for group in read_groups(again.run)] == [0, 3]
    assert len(again.run.metrics.read_text().splitlines()) == 6, "a step was repeated"
    assert torch.equal(flat(again.model), undisturbed)
    with pytest.raises(UserError):
        t.checkpoint()


def test_an_early_end_costs_all_planned_steps(tmp_path):
    """Where a loop stops can depend on its scores; the epsilon of the whole plan covers that."""
    private = {**PRIVATE, "budget": str(tmp_path / "budgets")}
    t = training(tmp_path / "runs/ended", privacy=private, factory=f"{__name__}:net")
    for _ in range(2):
        t.step()
    weights, planned = flat(t.model), t.plan.guarantee()
    run = t.finish()
    assert (t.remaining_steps, t.steps_taken, t.guarantee) == (0, 2, planned)
    ledger = dpdist.load_results(run).ledger
    assert ledger.release_counts == dict.fromkeys(range(6), 1)
    assert t.finish() == run and Ledger.read(run.ledger).anchor == ledger.anchor
    with pytest.raises(UserError):
        t.step()
    facts = dpdist.load_results(run)
    card = facts.privacy_card()
    assert "stopped" in card["extra"] and "stopped" in dict(facts.summary())
    assert card["guarantee"]["epsilon"] == planned.epsilon
    (budget,) = read_budgets(tmp_path / "budgets")
    assert budget.charges[0].status == "settled"
    assert math.isclose(budget.guarantee(1e-3).epsilon, planned.epsilon, rel_tol=1e-6)
    assert torch.equal(flat(load_model(facts.recipe, run)), weights)
    again = training(run.path, privacy=private, factory=f"{__name__}:net")
    assert (again.remaining_steps, again.steps_taken) == (0, 2)
    assert torch.equal(flat(again.model), weights) and again.finish() == run


@pytest.mark.parametrize("charged", [1, 4])
def test_an_early_end_is_kept_where_a_crash_cut_it(tmp_path, monkeypatch, charged):
    """Between two charges of the rest, and when all are made."""
    t, real, seen = training(tmp_path / "run"), Ledger.record, []
    t.step(), t.step()

    def record(ledger: Ledger, step: int, release: str) -> Any:
        if len(seen) == charged:
            raise KeyboardInterrupt
        seen.append(step)
        return real(ledger, step, release)

    monkeypatch.setattr(Ledger, "record", record)
    if charged == 4:
        monkeypatch.setattr(models, "save", lambda *_: record(None, 0, ""))
    with pytest.raises(KeyboardInterrupt):
        t.finish()
    t.close()
    monkeypatch.undo()
    assert seen == list(range(2, 2 + charged))
    again = training(tmp_path / "run")
    assert again.remaining_steps == 0 and again.guarantee == again.plan.guarantee()
    assert dpdist.load_results(again.run).training_summary["steps_taken"] == 2


@pytest.mark.parametrize("then", ["finish", "checkpoint"])
def test_a_change_before_an_early_end_or_a_checkpoint_is_on_the_card(tmp_path, then):
    t = training(tmp_path / "run", resources={"checkpoint_seconds": 1e6})
    t.step()
    with torch.no_grad():
        t.model.first.weight.mul_(0.5)
    kept = flat(t.model)
    getattr(t, then)()
    t.close()
    again = training(tmp_path / "run", resources={"checkpoint_seconds": 1e6})
    assert again.guarantee.kind == "assumed: post-processing"
    assert torch.equal(flat(again.model), kept)


def test_a_change_after_the_last_step_is_on_the_card_or_not_in_the_run(tmp_path):
    t = training(tmp_path / "open")
    with t.finishing_later():
        t.run_all()
    t.model.first.weight.data.mul_(0.5)
    assert dpdist.load_results(t.finish()).guarantee.kind == "assumed: post-processing"
    for t in ended(training(tmp_path / "closed")), training(tmp_path / "closed"):
        t.model.double()
        assert t.guarantee.kind == "proved"
        t.model.first.weight.data.mul_(0.5)
        with pytest.warns(UserWarning, match="after the last step"):
            assert t.guarantee.kind == "proved"


@pytest.mark.parametrize(("scale", "kind"), [(1.0, "proved"), (0.5, "assumed: post-processing")])
def test_weights_that_are_put_back_hide_no_change(tmp_path, scale, kind):
    t = training(tmp_path / "run")
    t.step()
    kept = {"second.bias": t.model.second.bias.detach().clone()}
    t.step()
    with torch.no_grad():
        t.model.first.weight.mul_(scale)
    t.put_back(kept)
    t.step()
    assert t.guarantee.kind == kind


@pytest.mark.parametrize(("rate", "flip"), [(0.3, 0), (1e4, 0), (0.3, 1)])
def test_a_result_without_content_is_warned_of(tmp_path, rate, flip):
    model, (inputs, labels) = Net(), rows(200, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    public = {"eval_data": (inputs, 1 - labels)} if flip else {}
    with warnings.catch_warnings(record=True) as told:
        training(tmp_path / "own", model, optimizer, **public).run_all()
    texts = " ".join(str(each.message) for each in told)
    assert ("learning rate" in texts, "commonest class" in texts) == (rate > 1, flip == 1)


def test_only_the_gradient_that_was_released_is_read(tmp_path, undisturbed):
    t = training(tmp_path / "own")
    while t.remaining_steps:
        nn.functional.cross_entropy(t.model(rows()[0]), rows()[1]).backward()
        t.step()
        assert all(p.grad is None for p in t.model.parameters())
    assert torch.equal(flat(t.model), undisturbed)


def test_a_step_tells_released_values_alone(tmp_path):
    t = training(tmp_path / "own")
    report = t.step()
    assert report.private is None
    told = {"step", "learning_rate", "noisy_norm", "private", "score", "_so_far"}
    assert set(vars(report)) <= told
    told = training(tmp_path / "told", private_metrics=True).step()
    assert told.private["examples"] > 0 and told.private["loss_sum"] > 0
    assert told.noisy_norm == report.noisy_norm > 0
    assert str(report) == str(told)
    t.close()
    line = json.loads(t.run.metrics.read_text().splitlines()[0])
    assert line["examples"] == told.private["examples"]


class Mixing(nn.Module):
    """Looks at its batch, so that its records are not apart."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs - inputs.mean(0))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


class Drawing(nn.Module):
    """Draws one number for the whole pass."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * torch.rand(())


def dropping() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.Dropout(0.5), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("model", "optimizer", "options", "key"),
    [
        (Net, lambda m: torch.optim.LBFGS(m.parameters()), {}, "optimizer"),
        (Net, lambda m: sgd(m.first), {}, "optimizer"),
        (normed, sgd, {}, "normalizes over the batch"),
        (lambda: nn.Sequential(Drawing(), nn.Linear(WIDTH, 2)), sgd, {}, "model: .*rand"),
        (Mixing, sgd, {}, "depends on another example"),
        (Net, sgd, {"batch_size": 200}, "training.batch_size"),
        (Net, sgd, {"loss": lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1])}, "one loss"),
        (Net, sgd, {"eval_data": tuple(each[:1] for each in rows())}, "eval_data"),
        (Net, sgd, {"factory": "support.foreign:net"}, "factory"),
    ],
)
def test_refusals_leave_nothing(tmp_path, model, optimizer, options, key):
    made = model()
    with pytest.raises(UserError, match=key):
        training(tmp_path / "own", made, optimizer(made), **options)
    assert not (tmp_path / "own").exists()


class Told(schedulers.LRScheduler):
    """A rate that follows what it is told, and says nothing of it in its arguments."""

    def __init__(self, optimizer: torch.optim.Optimizer, told: list[float]) -> None:
        self.told = told
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [0.1 if len(self.told) < 2 else 0.05 for _ in self.base_lrs]


def test_a_run_that_goes_on_draws_what_it_would_have_drawn(tmp_path):
    """Dropout follows from the run's key and the step, whatever the script's generator did."""
    whole = ended(training(tmp_path / "whole", model := dropping()))
    killed = training(tmp_path / "killed", dropping())
    for _ in range(3):
        torch.rand(7)
        killed.step()
    killed.close()
    training(tmp_path / "killed", again := dropping()).run_all()
    assert torch.equal(flat(model), flat(again))
    assert DRAWS_BY_ROW in dpdist.load_results(whole.run).privacy_card()["assumptions"]


@pytest.mark.parametrize(
    ("make", "proved"),
    [
        (lambda o: schedulers.OneCycleLR(o, 0.5, total_steps=9), True),
        (lambda o: Told(o, []), False),
    ],
)
def test_a_rate_is_a_function_of_its_steps_or_on_the_card(tmp_path, make, proved):
    """Replayed on a copy, which sees nothing of the training; after a restart, too."""
    for steps in (2, 6):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = make(optimizer)
        t = training(tmp_path / "own", model, optimizer, state=[scheduler])
        while t.remaining_steps and t.steps_taken < steps:
            report = t.step()
            if isinstance(scheduler, Told):
                scheduler.told.append(report.noisy_norm)
            scheduler.step()
        t.checkpoint()
        t.close()
    kind = Ledger.read(t.run.ledger).changes
    assert kind == (() if proved else ("optimizer settings",))


class Counting(nn.Module):
    """Keeps something where its inputs are large: what no invented example shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if (inputs > 1e3).any():
            self.seen += 1
            self.register_buffer("late", inputs.detach().mean(0))
        return self.layer(inputs)


def test_what_a_pass_leaves_in_buffers_is_discarded(tmp_path):
    inputs, labels = rows()
    model = Counting()
    t = ended(training(tmp_path / "own", model, sgd(model), data=(inputs * 1e4, labels)))
    assert float(model.seen) == 0 and Ledger.read(t.run.ledger).changes == ()
    assert "late" not in model.state_dict()


@pytest.mark.parametrize("label", [7, -1])
def test_a_class_without_an_output_is_refused_at_the_start(tmp_path, label):
    """In a step torch's error would hold the record's label, and the run would stop by it."""
    inputs, labels = rows()
    labels[5] = label
    with pytest.raises(UserError, match="data: targets") as error:
        training(tmp_path / "own", data=(inputs, labels))
    assert str(label) not in str(error.value) and not (tmp_path / "own").exists()


@pytest.mark.parametrize("ignored", [255, -100])
@pytest.mark.parametrize("items", [False, True])
def test_a_criterion_s_ignored_class_is_no_error(tmp_path, ignored, items):
    inputs, labels = rows()
    labels[::3] = ignored
    given = {"loss": nn.CrossEntropyLoss(ignore_index=ignored)}

    def data() -> Any:
        return [*zip(inputs, labels, strict=True)] if items else (inputs, labels)

    t = ended(training(tmp_path / "own", data=data(), **given))
    assert all(bool(each.isfinite().all()) for each in t.model.parameters())
    labels[1] = 7 if ignored > 0 else -1  # beside the largest or the least
    with pytest.raises(UserError, match="data: targets"):
        training(tmp_path / "other", data=data(), **given)


class Scaled(nn.Module):
    """A layer with a plain attribute, a function among them, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.function = 1, torch.tanh
        self.register_buffer("offset", torch.zeros(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.function(self.scale * inputs + self.offset)


def scaled() -> nn.Sequential:
    torch.manual_seed(3)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    return nn.Sequential(nn.Linear(WIDTH, 4), Scaled(), nn.Linear(4, 2), frozen)


CHANGES = [
    (lambda m: m[1].__dict__.update(scale=True), "1.scale"),  # 1 == True
    (lambda m: m[1]._buffers.update(offset=torch.zeros(1)), "1.offset"),
    (lambda m: m[2].weight.requires_grad_(False), "2.weight"),
    (lambda m: m[1].eval(), "1.training"),
    (lambda m: m.__setitem__(2, nn.Linear(4, 2)), "2.weight"),
    (lambda m: setattr(m[1], "forward", lambda x: x - x.mean(0)), "1.forward"),
    (lambda m: m[0].register_forward_hook(lambda _m, _i, out: out - out.mean(0)),
     "0.forward_hooks"),
    (lambda m: m.double(), "0.bias"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "what"), CHANGES)
def test_another_model_than_the_checked_one_takes_no_step(tmp_path, change, what):
    model = scaled()
    t = training(tmp_path / "own", model, sgd(model))
    t.step()
    change(model)
    with pytest.raises(UserError, match=f"model: .*{re.escape(what)}"):
        t.step()
    t.close()
    assert Ledger.read(t.run.ledger).release_counts == {0: 1}


def begun_or_not(
    folder: Path, steps: int = 0, *, lr: float = 0.3, gamma: float = 0.5, seed: int = 3,
    **given: Any,
) -> PrivateTraining:  # fmt: skip
    """Run the same script, whose settings are the arguments, for so many steps."""
    model = Net(seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.5)
    scheduler = schedulers.StepLR(optimizer, 1, gamma)
    t = training(folder, model, optimizer, state=[scheduler], **given)
    for _ in range(steps):
        t.step()
        scheduler.step()
    t.close()
    return t


OTHERS = [
    ({"lr": 0.1}, r"optimizer\.lr: "),
    ({"gamma": 0.9}, r"state\[0\]\.gamma: "),
    ({"seed": 4}, "seed: "),
    ({"privacy": {**PRIVATE, "clip_norm": 2.0}}, r"privacy\.clip_norm"),
]


@pytest.mark.parametrize(
    ("steps", "other", "key"), [(2, *each) for each in OTHERS] + [(6, *OTHERS[0])]
)
def test_another_setting_on_a_run_that_began_is_refused(tmp_path, steps, other, key):
    """Also on one that is done: it would be handed back as if the setting had been used."""
    begun_or_not(tmp_path / "own", steps)
    before = sorted((each, each.stat().st_mtime_ns) for each in tmp_path.rglob("*"))
    with pytest.raises(UserError, match=key):
        begun_or_not(tmp_path / "own", 1, **other)
    assert before == sorted((each, each.stat().st_mtime_ns) for each in tmp_path.rglob("*"))
    # The script of then goes on, from the checkpoint that the last step began with.
    assert begun_or_not(tmp_path / "own").remaining_steps == {2: 5, 6: 0}[steps]


def test_the_run_holds_the_settings_of_its_beginning(tmp_path):
    """A rate that the schedule reached is another one; and a third start still knows the first."""
    assert begun_or_not(tmp_path / "own", 2).optimizer.param_groups[0]["lr"] == 0.075
    begun_or_not(tmp_path / "own", 1)
    with pytest.raises(UserError, match=r"optimizer\.lr: "):
        begun_or_not(tmp_path / "own", lr=0.075)
    with pytest.raises(UserError, match=r"model\.options\.structure"):
        training(tmp_path / "own", Net(7))


def test_a_run_that_ended_before_it_said_so_is_finished(tmp_path):
    t = ended(training(tmp_path / "own"))
    t.run.training_summary.unlink()
    again = training(tmp_path / "own")
    assert again.remaining_steps == 0 and t.run.training_summary.exists()
    assert dpdist.load_results(again.run).ledger.release_counts == dict.fromkeys(range(6), 1)
    assert torch.equal(flat(again.model), flat(t.model))


def test_the_fingerprint_is_keyed(tmp_path):
    """Who holds private/data.json alone cannot test a guess of the records."""
    found = []
    for name, key in (("one", "1" * 64), ("same", "1" * 64), ("other", "2" * 64)):
        t = left(training(tmp_path / name, privacy={**PRIVATE, "run_key": key}), 1)
        found.append(read_json(t.run.data_fingerprint)["train"])
    assert found[0] == found[1] != found[2]


# --- a budget over several runs


def budgeted(tmp: Path, **given: Any) -> dict[str, Any]:
    """Return privacy of about epsilon 1.2 a run, under a ceiling that holds two of them."""
    noise = {"noise_multiplier": 1.5, "delta": 1e-3}
    return {**noise, "budget": tmp / "budget", "budget_ceiling": 2.2, "budget_delta": 1e-3, **given}


def charges(tmp: Path) -> list[Charge]:
    (budget,) = read_budgets(tmp / "budget")
    return budget.charges


def test_a_run_over_the_budget_is_refused_before_a_step(tmp_path):
    """By the records, not by their order, their labels or the kind of array."""
    inputs, labels = rows()
    private = budgeted(tmp_path)
    one = ended(training(tmp_path / "one", privacy=private))
    (charge,) = charges(tmp_path)
    assert charge.status == "settled" and charge.phases == one.plan.phases
    assert dpdist.load_results(one.run).data_set_guarantee.epsilon == 2.2
    other = (inputs.flip(0).numpy(), 1 - labels.flip(0).numpy())
    training(tmp_path / "two", data=other, privacy=private).run_all()
    with pytest.raises(UserError, match=r"privacy\.budget"):
        training(tmp_path / "three", data=other, privacy=private)
    assert not (tmp_path / "three").exists() and len(charges(tmp_path)) == 2
    training(tmp_path / "others", data=rows(seed=2), privacy=private).step()  # of other records
    assert len(read_budgets(tmp_path / "budget")) == 2


def test_a_recipe_s_run_and_a_script_s_share_a_budget(tmp_path):
    """A recipe knows records by hashes of what a model sees, and so does a script's run."""
    private = budgeted(tmp_path, budget=str(tmp_path / "budget"), budget_ceiling=8.0)
    made, folder = make(tmp_path, "recipe", privacy=private, training__steps=2)
    dpdist.train(job.prepare(made, folder, "a test"))
    dataset = records_with_canaries(made, job.data_source(made))
    rows = np.arange(len(dataset))
    data = dataset.batch(rows), dataset.targets(rows)
    model = nn.Sequential(nn.Flatten(), nn.Linear(data[0][0].numel(), 10))
    training(tmp_path / "own", model, sgd(model), data=data, privacy=private, steps=2).run_all()
    (budget,) = read_budgets(tmp_path / "budget")
    assert len(budget.charges) == 2 and len(budget.known) == len(set(dataset.hashes.tolist()))


def test_a_run_that_was_cut_stays_charged_and_goes_on(tmp_path):
    private = budgeted(tmp_path)
    t = training(tmp_path / "own", privacy=private)
    t.step()
    (charge,) = charges(tmp_path)
    assert charge.status == "reserved" and charge.phases == t.plan.phases
    t.close()
    training(tmp_path / "second", privacy=private).run_all()
    with pytest.raises(UserError, match=r"privacy\.budget"):
        training(tmp_path / "third", privacy=private)
    training(tmp_path / "own", privacy=private).run_all()
    assert [each.status for each in charges(tmp_path)] == ["settled", "settled"]


def test_a_budget_knows_records_by_what_they_are_before_their_transforms(tmp_path):
    """Half of the second run's records are the first one's."""
    given = {"privacy": budgeted(tmp_path, budget_ceiling=1.8), "batch_size": 8}
    training(tmp_path / "one", data=shaken(start=0, count=40), **given).run_all()
    with pytest.raises(UserError, match=r"privacy\.budget"):
        training(tmp_path / "two", data=shaken(start=20, count=40), **given)


# --- crashes


@pytest.mark.e2e
def test_after_a_kill_the_same_script_ends_at_the_same_bits(tmp_path):
    """Also where it builds other initial weights than before, and whatever was not yet saved."""
    whole, own = tmp_path / "whole", tmp_path / "own"
    done = run_script(whole)
    assert done.returncode == 0, done.stderr
    assert run_script(own, kill=(4, 0), seconds=1e6).returncode == -signal.SIGKILL
    assert run_script(own, kill=(9, 0), seed=None).returncode == -signal.SIGKILL
    done = run_script(own, seed=None)
    assert done.returncode == 0, done.stderr
    said = [each.with_suffix(".0").read_text() for each in (whole, own)]
    assert said[0] == said[1] and said[0].endswith(" 12")
    one, other = (RunFolder(tmp_path / name) for name in ("whole", "own"))
    assert torch.equal(parameters(one), parameters(other))
    assert release_ids(one) == release_ids(other)
    assert Ledger.read(other.ledger).release_counts == dict.fromkeys(range(12), 1)


def test_changed_code_of_the_script_begins_a_new_attempt(tmp_path, monkeypatch):
    text = (
        "from torch.nn.functional import cross_entropy\n\n\ndef loss(module, batch):  # {}\n"
        "    return cross_entropy(module(batch[0]), batch[1], reduction='none')\n"
    )
    place = tmp_path / "loss_of_a_test.py"
    place.write_text(text.format("one"))
    monkeypatch.syspath_prepend(str(tmp_path))
    import loss_of_a_test

    slow = {"resources": {"checkpoint_seconds": 1e6}}
    for words_, epochs, releases in (("one", 1, {0: 1}), ("one", 1, {0: 1}), ("two", 2, {0: 2})):
        place.write_text(text.format(words_))
        importlib.reload(loss_of_a_test)
        t = training(tmp_path / "own", loss=loss_of_a_test.loss, **slow)
        t.step()
        t.close()
        ledger = Ledger.read(t.run.ledger)
        assert (ledger.epoch or 0) + 1 == epochs and ledger.release_counts == releases


def test_a_replay_with_another_sum_never_gets_the_announced_noise(tmp_path):
    """Transforms that draw from `os.urandom`: a new attempt, and both are charged."""
    slow = {"resources": {"checkpoint_seconds": 1e6}, "data": shaken()}
    t = left(training(tmp_path / "own", **slow), 3)  # before any checkpoint but the first
    before = release_ids(t.run)
    again = ended(training(tmp_path / "own", **slow))
    found = Ledger.read(again.run.ledger)
    assert found.release_counts == {0: 2, 1: 2, 2: 2, 3: 1, 4: 1, 5: 1}
    assert len(set(release_ids(again.run))) == 9 and release_ids(again.run)[:3] == before
    assert again.guarantee.epsilon > again.plan.guarantee().epsilon


# --- the pieces


def test_fit_is_the_same_training(tmp_path):
    model = Net()
    run = dpdist.fit(
        model, rows(), optimizer="adam", learning_rate=0.01, privacy=Privacy(**PRIVATE),
        batch_size=16, epochs=2, folder=tmp_path / "fit",
    )  # fmt: skip
    own = Net()
    other = training(
        tmp_path / "own", own, torch.optim.Adam(own.parameters(), lr=0.01), steps=None, epochs=2
    )
    other.run_all()
    assert isinstance(run, RunFolder) and torch.equal(flat(model), flat(own))
    assert release_ids(run) == release_ids(other.run) and len(release_ids(run)) == 10


class Scans(Rows):
    """Records of persons, whose numbers come as tensors."""

    def __init__(self, units: Any) -> None:
        super().__init__(rows())
        self.units = units

    def unit_id(self, index: int) -> Any:
        return self.units[index]


def test_units_are_equal_by_value(tmp_path):
    """Each tensor is another object: four records of a person would pass for four persons."""
    persons = torch.arange(80) // 4
    for units, key in ((persons, r"privacy\.unit"), ([float("nan")] * 80, "unit_id")):
        with pytest.raises(UserError, match=key):
            training(tmp_path / "own", data=Scans(units))


@pytest.mark.e2e
def test_the_page_runs_as_it_is_printed(tmp_path):
    page = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "own-loop.md"
    script, nets = re.findall(r"(?s)```python\n(.*?)```", page.read_text())
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "nets.py").write_text(nets)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["9", "19", "29", "39"]
    assert last == str(dpdist.load_results(tmp_path / "runs" / "mine").guarantee) and "-DP" in last


def test_a_recipe_with_the_same_key_is_the_same_training(tmp_path):
    """Whose steps tests/wiring works out by hand."""
    passes = {"micro_batch": 16}
    made, folder = make(tmp_path, "recipe", training__momentum=0.5, resources=passes)
    prepared = job.prepare(made, folder, "test")
    execute(prepared)

    dataset = records_with_canaries(made, prepared.source)
    object.__setattr__(dataset, "keyed_fingerprint", lambda key: dataset.fingerprint)
    model = model_setup.initial_model(made, model_setup.model_spec(made, dataset))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    t = training(
        tmp_path / "own", model, optimizer, data=dataset, batch_size=40, steps=12,
        privacy=made.privacy, resources=passes,
    )  # fmt: skip
    t.run_all()
    assert t.plan == folder.read_plan()
    assert release_ids(t.run) == release_ids(folder) and len(release_ids(folder)) == 12
    assert torch.equal(parameters(t.run), parameters(folder))
