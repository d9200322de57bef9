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
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.local_execution import command, run_without_ray
from support.threads import one_thread
from support.training import execute, make, parameters, release_ids
from torch import nn
from torch.optim import lr_scheduler as schedulers
from training.own_loops import PRIVATE, WIDTH, Rows, begin, ended, flat, left, rows, run_script

import dpdist
from dpdist import Privacy, PrivateTraining, UserError, models
from dpdist.core.fields import DRAWS_BY_ROW
from dpdist.core.files import read_json
from dpdist.evaluation import load_model
from dpdist.privacy.budget import Charge, read_budgets
from dpdist.privacy.ledger import Ledger, LedgerError
from dpdist.randomness.keys import derive_key, stream_words
from dpdist.reports.technical_file import technical_file
from dpdist.runs.folder import RunFolder
from dpdist.training import checkpoint, job, model_setup
from dpdist.training.monitoring import read_groups
from dpdist.training.records import records_with_canaries


class Net(nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        torch.manual_seed(3)
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


# --- against oracles


CLIPS = {1.0: lambda norm: min(1.0, 1.0 / norm), "automatic": lambda norm: 1.0 / (norm + 0.01)}


def by_hand(
    folder: RunFolder,
    model: nn.Module,
    steps: int,
    clip: Any = 1.0,
    kind: torch.dtype = torch.double,
) -> torch.Tensor:
    """DP-SGD in float64, one record at a time, with the keys of this run: no engine, no loop."""
    inputs, labels = rows()
    inputs = inputs.to(kind).double()
    plan, trained = folder.read_plan(), model.double()
    told = read_json(folder.data_fingerprint, {"train": str})["train"]
    key = derive_key(folder.read_run_key(), "run", plan.fingerprint(), told, "trial", 0)
    weights = list(trained.parameters())
    optimizer = torch.optim.SGD(weights, lr=0.3, momentum=0.5)
    for step in range(steps):
        chosen = stream_words(derive_key(key, "sample", "0/", step), 0, 80)
        total = torch.zeros(sum(p.numel() for p in weights), dtype=torch.float64)
        for i in np.flatnonzero(chosen.astype(float) < 16 / 80 * 2.0**64):
            loss = nn.functional.cross_entropy(trained(inputs[i]), labels[i])
            own = torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights)])
            total += own * CLIPS[clip](float(own.norm()))
        bits = stream_words(derive_key(key, "noise", "0/", step), 0, 2 * (len(total) // 2 + 1))
        uniform, turn = bits.reshape(-1, 2).T
        length = np.sqrt(-2 * np.log(2.0**-64 + uniform.astype(float) * 2.0**-64))
        angle = 2 * np.pi * (turn >> np.uint64(11)).astype(float) * 2.0**-53
        pairs = np.stack([length * np.cos(angle), length * np.sin(angle)], 1).reshape(-1)
        noisy = (total + torch.from_numpy(pairs[: len(total)])) / 16
        for p, g in zip(weights, noisy.split([p.numel() for p in weights]), strict=True):
            p.grad = g.view_as(p)
        optimizer.step()
    return flat(trained)


def test_records_in_bfloat16_train_as_their_numbers_do(tmp_path):
    class Casts(Net):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs.double())

    inputs, labels = rows()
    t = training(tmp_path / "run", Casts().double(), data=(inputs.bfloat16(), labels))
    t.step()
    wanted = by_hand(t.run, Net(), 1, kind=torch.bfloat16)
    torch.testing.assert_close(flat(t.model), wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("clip", CLIPS)
def test_it_is_dp_sgd_worked_out_by_hand(tmp_path, clip):
    inputs, labels = rows()
    model = Net().double()  # whose clip hardly needs room for rounding
    private = {**PRIVATE, "clip_norm": clip}
    t = training(tmp_path / "run", model, data=(inputs.double(), labels), privacy=private)
    reports = []
    while t.remaining_steps:
        reports.append(t.step())
    wanted = by_hand(t.run, Net(), 6, clip)
    torch.testing.assert_close(flat(model), wanted, rtol=1e-6, atol=1e-7)
    assert [report.step for report in reports] == list(range(6))
    assert [report.learning_rate for report in reports] == [0.3] * 6
    assert reports[2].epsilon == t.plan.guarantee(steps=3).epsilon < reports[5].epsilon
    assert reports[5].epsilon == t.guarantee.epsilon == t.plan.guarantee().epsilon


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "optimizer", "exact", "rounding"),
    [
        ({"momentum": 0.0}, lambda p: torch.optim.SGD(p, lr=0.5), True, "standard"),
        ({"momentum": 0.5}, lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5), True, "fixed-row"),
        ({"momentum": 0.0, "optimizer": "adam", "learning_rate": 0.01},
         lambda p: torch.optim.Adam(p, lr=0.01), False, "standard"),
    ],
)  # fmt: skip
def test_a_recipe_with_the_same_key_is_the_same_training(
    tmp_path, recipe, optimizer, exact, rounding
):
    passes = {"micro_batch": 16, "rounding": rounding}
    made, folder = make(
        tmp_path, "recipe", **{f"training__{k}": v for k, v in recipe.items()},
        resources={"checkpoint_seconds": 1e-6, **passes},
    )  # fmt: skip
    prepared = job.prepare(made, folder, "test")
    execute(prepared)

    dataset = records_with_canaries(made, prepared.source)
    object.__setattr__(dataset, "keyed_fingerprint", lambda key: dataset.fingerprint)
    model = model_setup.initial_model(made, model_setup.model_spec(made, dataset))
    t = training(
        tmp_path / "own", model, optimizer(model.parameters()), data=dataset, batch_size=40,
        steps=12, privacy=made.privacy, resources=passes,
    )  # fmt: skip
    t.run_all()
    assert t.plan == folder.read_plan()
    if exact:
        assert release_ids(t.run) == release_ids(folder) and len(release_ids(folder)) == 12
        assert torch.equal(parameters(t.run), parameters(folder))
    else:
        assert release_ids(t.run)[0] == release_ids(folder)[0]
        own, wanted = parameters(t.run), parameters(folder)
        assert float((own - wanted).norm()) <= 1e-6 * float(wanted.norm())


# --- an ordinary run folder


@pytest.mark.slow
def test_the_folder_is_an_ordinary_run(tmp_path, monkeypatch, capsys):
    (tmp_path / "nets_of_a_test.py").write_text(
        "from torch import nn\n\n\ndef net(input_shape, classes):\n"
        f"    return nn.Sequential(nn.Linear({WIDTH}, 5), nn.Tanh(), nn.Linear(5, classes))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import nets_of_a_test

    torch.manual_seed(0)
    model = nets_of_a_test.net((WIDTH,), 2)
    t = training(
        tmp_path / "runs" / "own", model, privacy={"epsilon": 3.0, "delta": 1e-3},
        eval_data=rows(30, 2), factory="nets_of_a_test:net",
        certify={"sigma": 0.25, "n": 50, "n0": 10, "max_inputs": 3},
    )  # fmt: skip
    t.run_all()
    facts = dpdist.load_results(t.run)
    assert facts.guarantee.epsilon <= 3.0 and facts.guarantee.kind == "proved"
    assert facts.evaluation is not None and facts.evaluation["inputs"] == 30
    card = facts.privacy_card()
    assert any("custom loop" in note for note in card["notes"])
    assert any("independence of the model: known layers" in note for note in card["notes"])
    assert any("initial weights" in line for line in card["assumptions"])

    run_without_ray(monkeypatch)
    runs = ("--runs", tmp_path / "runs")

    def run(*words: Any) -> Any:
        return command(monkeypatch, capsys, tmp_path, *map(str, words))

    for words_ in (
        ("report", "own", *runs),
        ("certify", "own", *runs),
        ("audit", "own", *runs, "--set", "audit.releases=300"),
        ("release", "own", *runs),
        ("verify", t.run.release_folder, "--trust-factory", "nets_of_a_test:net"),
    ):
        done = run(*words_)
        assert done.code == 0, (words_, done.out + done.err)
    assert t.run.report_file.exists() and list(t.run.certificates.glob("*/certificates.parquet"))
    again = run("run", "--until", "train", t.run.recipe_file, *runs)
    assert again.code == 2 and "script" in again.err and again.err.count("\n") == 1


MINE = """
import torch
from torch import nn

SCALE = 1.0


class Mine(nn.Module):
    turns = 2

    def __init__(self, width=5, slope=0.1):
        super().__init__()
        self.first, self.second = nn.Linear(6, width), nn.Linear(width, 2)
        self.slope = nn.LeakyReLU(slope)

    @property
    def scale(self):
        return SCALE

    def forward(self, inputs):
        return self.second(self.scale * self.slope(self.first(inputs)))
"""
FACTORY = """

def net(input_shape, classes):
    return Mine()
"""
OTHER_FACTORIES = {
    "sizes": ("Mine()", "Mine(7)", "first must be"),
    "settings": ("Mine()", "Mine(5, 0.2)", "slope must be"),
    "forward": ("(self.scale * ", "(1.5 * ", "weights"),
    "module": ("SCALE = 1.0", "SCALE = 1.5", "weights"),
}  # fmt: skip


@pytest.fixture
def of_the_script(tmp_path, monkeypatch) -> PrivateTraining:
    """A run of a module that the script alone has; `nets_later.py` has the same class."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "nets_later.py").write_text(MINE + FACTORY)
    for name in ("nets_later", "nowhere_later"):
        sys.modules.pop(name, None)
    given: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(MINE, "a cell of a notebook", "exec"), given)
    torch.manual_seed(2)
    model = given["Mine"]()
    privacy = {"noise_multiplier": 1.0, "delta": 1e-3}
    return ended(
        training(tmp_path / "own", model, sgd(model), privacy=privacy, eval_data=rows(20, 2))
    )


@pytest.mark.e2e
def test_a_factory_may_be_named_for_the_release(of_the_script, tmp_path, monkeypatch, capsys):
    run = of_the_script.run
    factory = "nets_later:net"
    before = checkpoint.tensors_digest(of_the_script.model.state_dict())
    run_without_ray(monkeypatch)
    done = command(monkeypatch, capsys, tmp_path, "release", str(run.path), "--factory", factory)
    assert done.code == 0, done.err
    with pytest.raises(UserError, match="trusted_factory"):
        dpdist.load(run.release_folder).model  # noqa: B018 - building is what is refused
    release = dpdist.load(run.release_folder, trusted_factory=factory)
    inputs = rows(30, 5)[0]
    torch.testing.assert_close(release.model(inputs), of_the_script.model(inputs))
    assert checkpoint.tensors_digest(release.model.state_dict()) == before
    assert release.card["extra"]["model"] == factory and release.card["private"]
    verify = ("verify", str(run.release_folder), "--trust-factory", factory)
    assert command(monkeypatch, capsys, tmp_path, *verify).code == 0
    code = (
        "import dpdist, torch\n"
        f"release = dpdist.load({str(run.release_folder)!r}, trusted_factory={factory!r})\n"
        "print(release.model(torch.ones(1, 6)).tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )  # which never saw the script
    assert done.stdout == f"{of_the_script.model(torch.ones(1, 6)).tolist()}\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHER_FACTORIES)
def test_a_factory_of_another_module_is_refused(of_the_script, tmp_path, case):
    old, new, said = OTHER_FACTORIES[case]
    (tmp_path / "nets_later.py").write_text((MINE + FACTORY).replace(old, new))
    with pytest.raises(UserError, match=f"^factory: .*{said}"):
        dpdist.write_release(of_the_script.run.path, factory="nets_later:net")
    assert not of_the_script.run.release_folder.exists()


# --- what a loop may do, and what it may not


@pytest.mark.slow
def test_a_change_between_steps_is_on_the_card(tmp_path):
    slow = {"privacy": {"epsilon": 3.0, "delta": 1e-3}, "resources": {"checkpoint_seconds": 1e6}}
    t = training(tmp_path / "own", **slow)
    t.step()
    assert t.guarantee.kind == "proved"
    with torch.no_grad():
        t.model.first.weight.mul_(0.5)
    with pytest.warns(UserWarning, match="private records"):
        t.step()
    assert t.guarantee.kind == "assumed: post-processing"
    t.close()
    t = ended(training(tmp_path / "own", **slow))
    facts = dpdist.load_results(t.run)
    assert t.guarantee.kind == facts.guarantee.kind == "assumed: post-processing"
    assert facts.privacy_card()["guarantee"]["kind"] == "assumed: post-processing"
    assert any("changed parameters" in line for line in facts.privacy_card()["assumptions"])
    lines = t.run.ledger.read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"changed"' not in line]
    assert len(kept) == len(lines) - 1
    t.run.ledger.write_text("".join(kept))
    with pytest.raises((UserError, LedgerError)):  # no edit takes it off the card
        dpdist.load_results(t.run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda o: o.param_groups[0].update(lr=0.017), "optimizer settings"),
        (lambda o: o.param_groups[0].update(weight_decay=0.017), "optimizer settings"),
        (lambda o: o.param_groups[0].update(momentum=0.017), "optimizer settings"),
        (lambda o: next(iter(o.state.values()))["momentum_buffer"].zero_(), "optimizer state"),
        (lambda o: o.state.clear(), "optimizer state"),
    ],
)
def test_the_optimizer_is_watched_too(tmp_path, change, what):
    """A scheduler's own rates are no change."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    scheduler = schedulers.StepLR(optimizer, 1)
    t = training(tmp_path / "own", model, optimizer, state=[scheduler])
    t.step()
    scheduler.step()
    t.step()
    assert t.guarantee.kind == "proved"
    change(optimizer)
    t.run_all()
    assert Ledger.read(t.run.ledger).changes == (what,)


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
    with pytest.raises(UserError, match="step: this"):
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
    with pytest.raises(UserError, match="step: all 6"):
        t.step()
    facts = dpdist.load_results(run)
    card = facts.privacy_card()
    assert card["extra"]["stopped"] == "after 2 of 6 steps; epsilon counts all of them"
    assert ("stopped", "after 2 of 6 steps; epsilon counts all of them") in facts.summary()
    assert card["guarantee"]["epsilon"] == planned.epsilon
    assert "The training was stopped after 2 of 6 steps" in technical_file(facts)
    (budget,) = read_budgets(tmp_path / "budgets")
    assert budget.charges[0].status == "settled"
    assert math.isclose(budget.guarantee(1e-3).epsilon, planned.epsilon, rel_tol=1e-6)
    assert torch.equal(flat(load_model(facts.recipe, run)), weights)
    again = training(run.path, privacy=private, factory=f"{__name__}:net")
    assert (again.remaining_steps, again.steps_taken) == (0, 2)
    assert torch.equal(flat(again.model), weights) and again.finish() == run


@pytest.mark.parametrize("charged", [0, 1, 3, 4])
def test_an_early_end_is_kept_where_a_crash_cut_it(tmp_path, monkeypatch, charged):
    """Before any of the rest is charged, between two of them, and when all are."""
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
    assert set(vars(report)) <= told and report.score is None
    told = training(tmp_path / "told", private_metrics=True).step()
    assert told.private["examples"] > 0 and told.private["loss_sum"] > 0
    assert told.noisy_norm == report.noisy_norm > 0
    assert str(report) == str(told)
    assert "NOT PRIVATE" in str(report) and "NOT PRIVATE" in str(t.guarantee)  # by its fixed key
    keyless = {"privacy": PRIVATE | {"run_key": None}}
    assert "NOT PRIVATE" not in str(training(tmp_path / "drawn", **keyless).step())
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
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.Dropout(0.5), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("model", "optimizer", "options", "key"),
    [
        (Net, lambda m: torch.optim.LBFGS(m.parameters()), {}, "optimizer: .*LBFGS"),
        (Net, lambda m: sgd(m.first), {}, "optimizer: .*second.weight"),
        (lambda: nn.DataParallel(Net()), sgd, {}, "model: .*DataParallel"),
        (normed, sgd, {}, "normalizes over the batch"),
        (lambda: nn.Sequential(Drawing(), nn.Linear(WIDTH, 2)), sgd, {}, "model: .*rand"),
        (Mixing, sgd, {}, "depends on another example"),
        (Net, sgd, {"batch_size": 200}, "training.batch_size"),
        (Net, sgd, {"loss": lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1])}, "one loss"),
        (Net, sgd, {"data": (rows()[0], rows()[1][:, None])}, "loss: "),
        (Net, sgd, {"eval_data": (torch.rand(10, WIDTH), 5 * torch.ones(10).long())}, "eval_data"),
        (Net, sgd, {"eval_data": tuple(each[:1] for each in rows())}, "eval_data: .*got 1"),
        (Net, sgd, {"loss": nn.CrossEntropyLoss(), "data": (rows()[0], 7 * torch.ones(80).long())},
         "data: targets"),
        (Net, sgd, {"factory": "support.foreign:net"}, "factory"),
    ],
)  # fmt: skip
def test_refusals_leave_nothing(tmp_path, model, optimizer, options, key):
    made = model()
    with pytest.raises(UserError, match=key):
        training(tmp_path / "own", made, optimizer(made), **options)
    assert not (tmp_path / "own").exists()


def test_a_scheduler_that_no_checkpoint_keeps_is_on_the_card(tmp_path):
    model = Net()
    optimizer = sgd(model)
    scheduler = schedulers.StepLR(optimizer, 2)
    t = training(tmp_path / "own", model, optimizer)
    for report in t:
        scheduler.step()
        assert (t.guarantee.kind == "proved") == (report.step < 2)
    assert Ledger.read(t.run.ledger).changes == ("optimizer settings",)


class Told(schedulers.LRScheduler):
    """A rate that follows what it is told, and says nothing of it in its arguments."""

    def __init__(self, optimizer: torch.optim.Optimizer, told: list[float]) -> None:
        self.told = told
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [0.1 if len(self.told) < 2 else 0.05 for _ in self.base_lrs]


def test_a_criterion_object_trains_and_must_stay_the_same(tmp_path):
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]), label_smoothing=0.1)
    left(training(tmp_path / "own", loss=criterion), 1)
    with pytest.raises(UserError, match="loss"):
        training(tmp_path / "own", loss=nn.CrossEntropyLoss(label_smoothing=0.1)).step()
    training(tmp_path / "own", loss=criterion).run_all()
    plain = [training(tmp_path / str(n), m := Net(), loss=loss).run_all() and flat(m)
             for n, loss in enumerate(("cross-entropy", nn.CrossEntropyLoss()))]  # fmt: skip
    assert torch.allclose(*plain)


def test_a_run_that_goes_on_draws_what_it_would_have_drawn(tmp_path):
    """Dropout follows from the run's key and the step, whatever the script's generator did."""

    def network() -> nn.Module:
        torch.manual_seed(4)
        return dropping()

    whole = ended(training(tmp_path / "whole", model := network()))
    killed = training(tmp_path / "killed", network())
    for _ in range(3):
        torch.rand(7)
        killed.step()
    killed.close()
    training(tmp_path / "killed", again := network()).run_all()
    assert torch.equal(flat(model), flat(again))
    card = dpdist.load_results(whole.run).privacy_card()
    assert DRAWS_BY_ROW in card["assumptions"]
    plain = training(tmp_path / "plain").run_all()
    assert DRAWS_BY_ROW not in dpdist.load_results(plain).privacy_card()["assumptions"]


@pytest.mark.parametrize(
    ("make", "proved"),
    [
        (lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step), True),
        (lambda o: schedulers.OneCycleLR(o, 0.5, total_steps=9), True),
        (lambda o: schedulers.ChainedScheduler(
            [schedulers.ConstantLR(o, 0.1, 2), schedulers.ExponentialLR(o, 0.9)]), True),
        (lambda o: schedulers.SequentialLR(
            o, [schedulers.ConstantLR(o, 0.1, 2), schedulers.ExponentialLR(o, 0.9)], [3]), True),
        (lambda o: Told(o, []), False),
    ],
)  # fmt: skip
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

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.how = nn.Linear(WIDTH, 2), how
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        large = (inputs > 1e3).any().float()
        if large and self.how == "late":
            self.register_buffer("late", inputs.detach().mean(0))
        elif large and self.how == "replaced":
            self.seen = self.seen + large
        elif large:
            self.seen += large
        return self.layer(inputs)


@pytest.mark.parametrize("how", ["replaced", "added", "late"])
def test_what_a_pass_leaves_in_buffers_is_discarded(tmp_path, how):
    inputs, labels = rows()
    model = Counting(how)
    t = ended(training(tmp_path / "own", model, sgd(model), data=(inputs * 1e4, labels)))
    assert float(model.seen) == 0 and Ledger.read(t.run.ledger).changes == ()
    assert "late" not in model.state_dict()


@pytest.mark.parametrize("label", [7, -1])
@pytest.mark.parametrize("items", [False, True])
def test_a_class_without_an_output_is_refused_at_the_start(tmp_path, label, items):
    """In a step torch's error would hold the record's label, and the run would stop by it."""
    inputs, labels = rows()
    labels[5] = label
    data = [(x, int(y)) for x, y in zip(inputs, labels, strict=True)] if items else (inputs, labels)
    with pytest.raises(UserError, match="data: targets") as error:
        training(tmp_path / "own", data=data)
    assert str(label) not in str(error.value) and not (tmp_path / "own").exists()


class Scans(Rows):
    """Four records of each person, whose number comes as a tensor."""

    def __init__(self, units: Any) -> None:
        super().__init__(rows())
        self.units = units

    def unit_id(self, index: int) -> Any:
        return self.units[index]


def test_units_are_equal_by_value(tmp_path):
    """Each tensor is another object: four records of a person would pass for four persons."""
    persons = torch.arange(80) // 4
    for units in (persons, persons.numpy(), persons.tolist()):
        with pytest.raises(UserError, match=r"privacy\.unit: must be user"):
            training(tmp_path / "own", data=Scans(units))
    for units in (persons[:, None], *([nobody] * 80 for nobody in (None, float("nan"), " "))):
        with pytest.raises(UserError, match="unit_id"):
            training(tmp_path / "own", data=Scans(units))
    assert not (tmp_path / "own").exists()


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
    (lambda m: m[1].__dict__.update(function=torch.sigmoid), "1.function"),
    (lambda m: m[1]._buffers.update(offset=torch.zeros(1)), "1.offset"),
    (lambda m: m[1].register_buffer("kept", torch.zeros(3)), "1.kept"),
    (lambda m: setattr(m[2].weight, "data", m[2].weight.data.double()), "2.weight"),
    (lambda m: m[2].weight.requires_grad_(False), "2.weight"),
    (lambda m: m[3].weight.requires_grad_(), "3.weight"),
    (lambda m: m[1].eval(), "1.training"),
    (lambda m: m.append(nn.Identity()), "4"),
    (lambda m: m.__setitem__(2, nn.Linear(4, 2)), "2.weight"),
    (lambda m: setattr(m[1], "forward", lambda x: x - x.mean(0)), "1.forward"),
    (lambda m: m[0].register_forward_hook(lambda _m, _i, out: out - out.mean(0)),
     "0.forward_hooks"),
    (lambda m: m[0].register_forward_pre_hook(lambda *_: None), "0.forward_pre_hooks"),
    (lambda m: m[0].register_full_backward_hook(lambda *_: None), "0.backward_hooks"),
    (lambda m: m.double(), "0.bias"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "change", "what"), [(0, *CHANGES[5]), *((2, *each) for each in CHANGES)]
)
def test_another_model_than_the_checked_one_takes_no_step(tmp_path, steps, change, what):
    model = scaled()
    t = training(tmp_path / "own", model, sgd(model))
    for _ in range(steps):
        t.step()
    change(model)
    with pytest.raises(UserError, match=f"model: .*{re.escape(what)}"):
        t.step()
    t.close()
    assert t.run.path.exists() == (steps > 0)
    assert not steps or Ledger.read(t.run.ledger).release_counts == dict.fromkeys(range(steps), 1)


def test_a_changed_class_or_a_hook_of_all_modules_is_noticed(tmp_path, monkeypatch):
    model = scaled()
    t = training(tmp_path / "own", model, sgd(model), steps=5)
    t.step()
    t.step()
    with monkeypatch.context() as patched:
        patched.setattr(Scaled, "forward", lambda self, inputs: inputs - inputs.mean(0))
        with pytest.raises(UserError, match="changed: 1;"):
            t.step()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(UserError, match="forward_hooks of all modules"):
            t.step()
    finally:
        handle.remove()
    t.step()
    t.close()


def test_what_was_put_back_is_no_change(tmp_path):
    model = scaled()
    t = training(tmp_path / "own", model, sgd(model), steps=5)
    t.step()
    t.step()
    model.eval()
    handle = model[0].register_forward_hook(lambda *_: None)
    handle.remove()
    model.train()
    t.step()
    assert t.guarantee.kind == "proved"
    model[0].weight.data.mul_(1.01)  # no version counter tells of it
    t.step()
    assert t.guarantee.kind == "assumed: post-processing"
    t.close()


@pytest.mark.slow
def test_an_interrupted_step_continues_from_the_newest_checkpoint(
    tmp_path, monkeypatch, undisturbed
):
    t = training(tmp_path / "own")
    t.step()

    class Stopped(BaseException):
        """As Ctrl-C does."""

    def stop(*_: Any, **__: Any) -> None:
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(t.optimizer, "step", stop)
        with pytest.raises(Stopped):
            t.step()
    with pytest.raises(UserError, match="checkpoint: "):
        t.checkpoint()
    assert t.step().step == 1  # the interrupted one, from the checkpoint before it
    again = training(tmp_path / "own")
    again.step()
    with pytest.raises(UserError, match="step: this"):
        t.step()  # the newer object took the run over
    again.run_all()
    assert torch.equal(flat(again.model), undisturbed)
    assert Ledger.read(again.run.ledger).release_counts == dict.fromkeys(range(6), 1)


class Sloped(Net):
    def __init__(self, slope: float = 0.1, seed: int = 3) -> None:
        super().__init__()
        self.slope = nn.LeakyReLU(slope)
        torch.manual_seed(seed)
        self.first = nn.Linear(WIDTH, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.slope(self.first(inputs)))


def begun_or_not(
    folder: Path, steps: int = 0, *, lr: float = 0.3, momentum: float = 0.5, gamma: float = 0.5,
    slope: float = 0.1, seed: int = 3, adam: bool = False, frozen: bool = False, **given: Any,
) -> PrivateTraining:  # fmt: skip
    """Run the same script, whose settings are the arguments, for so many steps."""
    model = Sloped(slope, seed)
    model.first.bias.requires_grad_(not frozen)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr, momentum)
    if adam:
        optimizer = torch.optim.Adam(model.parameters(), lr)
    scheduler = schedulers.StepLR(optimizer, 1, gamma)
    t = training(folder, model, optimizer, state=[scheduler], **given)
    for _ in range(steps):
        t.step()
        scheduler.step()
    t.close()
    return t


OTHERS = [
    ({"lr": 0.1}, r"optimizer\.lr: must be 0\.3 .*got 0\.1;"),
    ({"momentum": 0.9}, r"optimizer\.momentum: "),
    ({"adam": True}, r"script\.optimizer"),
    ({"gamma": 0.9}, r"state\[0\]\.gamma: "),
    ({"slope": 0.2}, r"model\.slope: "),
    ({"seed": 4}, "seed: must be 3 .*got 4;"),
    ({"frozen": True}, r"model\.first\.bias: "),
    ({"privacy": {**PRIVATE, "clip_norm": 2.0}}, r"privacy\.clip_norm"),
]


@pytest.mark.slow
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


def test_a_notebook_s_objects_go_on_after_their_steps(tmp_path):
    """The same model, optimizer and scheduler, used before, and another seed since."""
    model = Net()
    optimizer = sgd(model)
    state = [schedulers.StepLR(optimizer, 1, 0.5)]
    t = training(tmp_path / "own", model, optimizer, state=state)
    for _ in range(3):
        t.step()
        state[0].step()
    torch.manual_seed(17)
    again = training(tmp_path / "own", model, optimizer, state=state)
    assert 0 < again.remaining_steps < 6
    again.run_all()
    assert t.run.training_summary.exists()


def test_weights_without_a_seed_are_those_of_the_run(tmp_path):
    """A script that seeds nothing goes on; where the seed is the same, other weights are told."""
    torch.seed()
    t = left(training(tmp_path / "own", nn.Linear(WIDTH, 2), steps=4), 2)
    torch.seed()
    again = training(tmp_path / "own", nn.Linear(WIDTH, 2), steps=4)
    assert again.remaining_steps == 3
    again.close()
    seeded = tmp_path / "seeded"
    torch.manual_seed(5)
    t = left(training(seeded, nn.Linear(WIDTH, 2), steps=4), 1)
    del t
    with pytest.warns(UserWarning, match="model: "):
        training(seeded, nn.Linear(WIDTH, 2), steps=4).close()


def test_a_run_that_ended_before_it_said_so_is_finished(tmp_path):
    t = ended(training(tmp_path / "own"))
    t.run.training_summary.unlink()
    again = training(tmp_path / "own")
    assert again.remaining_steps == 0 and t.run.training_summary.exists()
    assert dpdist.load_results(again.run).ledger.release_counts == dict.fromkeys(range(6), 1)
    assert torch.equal(flat(again.model), flat(t.model))


def test_other_state_is_not_continued(tmp_path):
    model = Net()
    optimizer = sgd(model)
    state = [schedulers.StepLR(optimizer, 1)]
    left(training(tmp_path / "own", model, optimizer, state=state), 1)
    other = Net()
    with pytest.raises(UserError, match="StepLR"):
        training(tmp_path / "own", other, sgd(other))


def test_other_records_are_not_continued(tmp_path):
    left(training(tmp_path / "own"), 1)
    inputs, labels = rows()
    inputs[7, 2] += 1e-3
    with pytest.raises(UserError, match="has changed since this run"):
        training(tmp_path / "own", data=(inputs, labels))


def test_a_damaged_checkpoint_can_be_moved_away(tmp_path, undisturbed):
    """As its refusal says: the steps since the one before it are replayed, and charged once."""
    t = left(training(tmp_path / "own"), 4)
    newest = max(t.run.checkpoints.glob("step-*"))
    raw = bytearray((newest / "state.safetensors").read_bytes())
    raw[-3] ^= 1
    (newest / "state.safetensors").write_bytes(raw)
    with pytest.raises(UserError, match=f"move {newest} away"):
        training(tmp_path / "own")
    newest.rename(tmp_path / "aside")
    again = ended(training(tmp_path / "own"))
    assert torch.equal(flat(again.model), undisturbed)
    assert dpdist.load_results(again.run).ledger.release_counts == dict.fromkeys(range(6), 1)


def test_the_fingerprint_is_keyed(tmp_path):
    """Who holds private/data.json alone cannot test a guess of the records."""
    found = []
    for name, key in (("one", "1" * 64), ("same", "1" * 64), ("other", "2" * 64)):
        t = training(tmp_path / name, privacy={**PRIVATE, "run_key": key})
        t.step()
        t.close()
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


@pytest.mark.slow
def test_a_run_over_the_budget_is_refused_before_a_step(tmp_path):
    """By the records, not by their order, their labels or the kind of array."""
    inputs, labels = rows()
    private = budgeted(tmp_path)
    one = ended(training(tmp_path / "one", privacy=private))
    (charge,) = charges(tmp_path)
    assert charge.status == "settled" and charge.phases == one.plan.phases
    assert dpdist.load_results(one.run).data_set_guarantee.epsilon == 2.2
    other = (inputs.flip(0).numpy(), 1 - labels.flip(0).numpy())
    for number, refused in enumerate([False, True]):
        folder = tmp_path / f"more-{number}"
        if refused:
            with pytest.raises(UserError, match=r"^PrivateTraining: privacy\.budget"):
                training(folder, data=other, privacy=private)
            assert not folder.exists() and len(charges(tmp_path)) == 2
        else:
            training(folder, data=other, privacy=private).run_all()
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


@pytest.mark.slow
def test_a_run_that_was_cut_stays_charged_and_goes_on(tmp_path):
    private = budgeted(tmp_path)
    t = training(tmp_path / "own", privacy=private)
    t.step()
    (charge,) = charges(tmp_path)
    assert (
        charge.status == "reserved" and charge.phases == t.plan.phases
    )  # also if it is killed now
    t.close()
    training(tmp_path / "second", privacy=private).run_all()
    with pytest.raises(UserError, match=r"privacy\.budget"):
        training(tmp_path / "third", privacy=private)
    training(tmp_path / "own", privacy=private).run_all()
    assert [each.status for each in charges(tmp_path)] == ["settled", "settled"]


def test_a_second_start_may_take_the_room_first(tmp_path):
    """A run that fitted when it was made is refused at its first step; nothing is released."""
    private = budgeted(tmp_path)
    training(tmp_path / "one", privacy=private).run_all()
    late, soon = (training(tmp_path / name, privacy=private) for name in ("late", "soon"))
    soon.run_all()
    with pytest.raises(UserError, match=r"privacy\.budget"):
        late.step()
    assert Ledger.read(late.run.ledger).release_counts == {}
    assert len(charges(tmp_path)) == 2


def loss_of_two(module: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(module(*batch[:2]), batch[2], reduction="none")


@pytest.mark.parametrize("kind", ["several inputs", "items before their transforms"])
def test_records_of_every_kind_are_known_to_a_budget(tmp_path, kind):
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 2)

        def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            return self.layer(first + second)

    class Items(torch.utils.data.Dataset[Any]):
        def __init__(self, start: int) -> None:
            self.start = start

        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            item = rows()[0][self.start + index]
            return item + torch.randn(WIDTH), int(item.sum() > WIDTH / 2)

    private = budgeted(tmp_path, budget_ceiling=1.8)

    def train(start: int) -> None:
        """On records of which half are those that the other start has."""
        inputs, labels = (each[start : start + 40] for each in rows())
        model: nn.Module = nn.Linear(WIDTH, 2)
        data: Any = dpdist.as_records(Items(start), before_transform=inputs.__getitem__)
        own: dict[str, Any] = {}
        if kind == "several inputs":
            model, data, own = Two(), ((inputs, inputs), labels), {"loss": loss_of_two}
        told = {"data": data, "privacy": private, "batch_size": 8, **own}
        training(tmp_path / str(start), model, sgd(model), **told).run_all()

    train(0)
    with pytest.raises(UserError, match=r"privacy\.budget"):
        train(20)


# --- crashes


@pytest.mark.e2e
@pytest.mark.parametrize("seconds", [1e-6, pytest.param(1e6, marks=pytest.mark.nightly)])
def test_after_a_kill_the_same_script_ends_at_the_same_bits(tmp_path, seconds):
    """Also where it builds other initial weights than before, and whatever was not yet saved."""
    whole, own = tmp_path / "whole", tmp_path / "own"
    done = run_script(whole)
    assert done.returncode == 0, done.stderr
    assert run_script(own, kill=(4, 0), seconds=seconds).returncode == -signal.SIGKILL
    other = run_script(own, kill=(9, 0), seconds=seconds, seed=7)
    assert other.returncode == 1
    assert "seed: must be 0 as when the run began, got 7" in other.stderr
    killed = run_script(own, kill=(9, 0), seconds=seconds, seed=None)
    assert killed.returncode == -signal.SIGKILL
    done = run_script(own, seconds=seconds, seed=None)
    assert done.returncode == 0, done.stderr
    said = [each.with_suffix(".0").read_text() for each in (whole, own)]
    assert said[0] == said[1] and said[0].endswith(" 12")
    one, other = (RunFolder(tmp_path / name) for name in ("whole", "own"))
    assert torch.equal(parameters(one), parameters(other))
    assert release_ids(one) == release_ids(other)
    assert Ledger.read(other.ledger).release_counts == dict.fromkeys(range(12), 1)


@pytest.mark.e2e
def test_without_a_fixed_key_the_ledger_is_complete(tmp_path):
    given = {"key": None, "seconds": 1e6}
    assert run_script(tmp_path / "own", kill=(5, 0), **given).returncode == -signal.SIGKILL
    assert run_script(tmp_path / "own", **given).returncode == 0
    facts = dpdist.load_results(RunFolder(tmp_path / "own"))
    assert facts.ledger.release_counts == dict.fromkeys(range(12), 1)
    assert facts.guarantee == facts.plan.guarantee()
    assert facts.privacy_card()["private"] is True


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
    inputs, labels = rows()

    class Items(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 80

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            shake = int.from_bytes(os.urandom(4), "little") / 2**32
            return inputs[index] * (0.5 + shake), int(labels[index])

    data = dpdist.as_records(
        Items(), target=None, before_transform=lambda index: (inputs[index], int(labels[index]))
    )
    slow = {"resources": {"checkpoint_seconds": 1e6}, "data": data}
    t = training(tmp_path / "own", **slow)
    for _ in range(3):
        t.step()
    t.close()  # as a crash does, before any checkpoint but the first
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
    with pytest.raises(UserError, match="optimizer: "):
        dpdist.fit(
            Net(), rows(), optimizer="lion", learning_rate=0.1, privacy=Privacy(**PRIVATE),
            batch_size=16, steps=1, folder=tmp_path / "x",
        )  # fmt: skip


@pytest.mark.e2e
def test_the_page_runs_as_it_is_printed(tmp_path):
    page = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "own-loop.md"
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


def test_a_fixed_run_key_is_warned_of(tmp_path):
    with pytest.warns(UserWarning, match="NOT PRIVATE.*leave it out") as found:
        training(tmp_path / "own", privacy={"epsilon": 3.0, "delta": 1e-3, "run_key": "ab" * 32})
    assert found[0].filename == begin.__code__.co_filename
