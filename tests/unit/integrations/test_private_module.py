"""`PrivateModule`: Lightning drives dpdist's own steps, and touches neither records nor weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support import language_models as lm
from support.optional_extras import needs_hf, needs_lightning
from support.own_loops import PRIVATE, WIDTH, begin, flat, rows
from support.training import release_ids

import dpdist
from dpdist import UserError
from dpdist.core.optional_imports import import_extra

needs_lightning()
integration = import_extra("dpdist.integrations.lightning", "lightning", "tests")
pl = import_extra("lightning.pytorch", "lightning", "tests")
tuner = import_extra("lightning.pytorch.tuner", "lightning", "tests")
PrivateModule = integration.PrivateModule

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def kept_environment():
    """Lightning says ranks in the environment, where others then look for a process group."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


class Net(pl.LightningModule):
    """A user's module, whose own training step nobody may run."""

    def __init__(self, schedule: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = torch.nn.Linear(WIDTH, 5), torch.nn.Linear(5, 2)
        self.schedule = schedule

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs).tanh())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise AssertionError("a gradient of a batch of private records")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert not self.training
        self.log("val_loss", torch.nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.5)
        if self.schedule is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": self.schedule}}  # fmt: skip


def loader(records: Any, size: int = 10) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*records), batch_size=size)


def module(folder: Path, net: Any = None, **given: Any) -> Any:
    options = {
        "data": rows(), "loss": "cross-entropy", "privacy": PRIVATE, "batch_size": 16,
        "steps": 6, "folder": folder, **given,
    }  # fmt: skip
    return PrivateModule(net or Net(), options.pop("data"), **options)


def trainer(**given: Any) -> Any:
    options = {
        "devices": 1, "accelerator": "cpu", "enable_checkpointing": False, "logger": False,
        "enable_progress_bar": False, "enable_model_summary": False, **given,
    }  # fmt: skip
    return pl.Trainer(**options)


def own_loop(folder: Path, every: int = 0, **given: Any) -> Any:
    """The own loop: a schedule that is stepped after so many steps."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) if every else None
    state = [] if schedule is None else [schedule]
    training = begin(folder, model, optimizer, state=state, **given)
    while training.remaining_steps:
        report = training.step()
        if schedule is not None and (report.step + 1) % every == 0:
            schedule.step()
    return training


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "every"), [("step", 1), ("epoch", 5)])
def test_it_releases_the_bits_of_the_own_loop(tmp_path, schedule, every):
    private = module(tmp_path / "run", Net(schedule))
    trainer().fit(private)
    wanted = own_loop(tmp_path / "own", every)
    assert release_ids(private.private.run) == release_ids(wanted.run)
    assert len(release_ids(wanted.run)) == 6
    assert torch.equal(flat(private.module), flat(wanted.model))
    assert private.guarantee == wanted.guarantee and private.guarantee.kind == "proved"


def test_lightning_sees_neither_records_nor_weights(tmp_path):
    seen = []

    class Spy(pl.Callback):
        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, i: int
        ) -> Any:
            seen.append((outputs, batch.tolist(), trainer.optimizers, list(module.parameters())))

    private = module(tmp_path / "run")
    trainer(callbacks=[Spy()]).fit(private)
    assert [each[1] for each in seen] == [[0], [1], [2], [3], [4], [0]]  # of epochs of 5 steps
    assert all(not outputs and not found for outputs, _, _, found in seen)
    held = [optimizer for *_, optimizers, _ in seen for optimizer in optimizers]
    assert all(not group["params"] for each in held for group in each.param_groups)
    assert private.state_dict() == {}


@pytest.mark.slow
def test_a_fit_goes_on_where_another_ended(tmp_path):
    resources = {"checkpoint_seconds": 1e-6}
    begun = module(tmp_path / "run", resources=resources)
    trainer(max_epochs=1).fit(begun)
    assert begun.private.remaining_steps == 1 and begun.guarantee.epsilon > 0
    begun.private.close()
    ended = module(tmp_path / "run", resources=resources)
    trainer().fit(ended)
    wanted = own_loop(tmp_path / "own")
    assert release_ids(ended.private.run) == release_ids(wanted.run)
    assert torch.equal(flat(ended.module), flat(wanted.model))


class Language(pl.LightningModule):
    """A user's module around a model of transformers with adapters, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = lm.with_lora(lm.make("llama", vocab_size=262))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.3)


@pytest.mark.slow
def test_an_adapter_is_saved_from_a_module_around_its_model(tmp_path):
    needs_hf()
    texts = [{"text": f"text {n}"} for n in range(80)]
    data = dpdist.documents(texts, lm.chat_tokenizer(None), length=8)
    private = module(tmp_path / "run", Language(), data=data, loss=dpdist.language_model_loss)
    trainer().fit(private)
    folder = private.save_adapter(tmp_path / "adapter", base_name="tiny", not_private=True)
    loaded = lm.peft().PeftModel.from_pretrained(lm.make("llama", vocab_size=262), folder).eval()
    ids = torch.arange(7)[None]
    with torch.no_grad():
        trained = private.module.lm.eval()(input_ids=ids).logits
        assert torch.equal(loaded(input_ids=ids).logits, trained)
        assert not torch.equal(Language().lm.eval()(input_ids=ids).logits, trained)


# --- public records


def test_public_records_are_validated_between_steps(tmp_path):
    public = rows(20, seed=9)
    private = module(tmp_path / "run", public_eval=True)
    logger = pl.loggers.CSVLogger(tmp_path / "logs")
    driver = trainer(val_check_interval=2, logger=logger, log_every_n_steps=1)
    driver.fit(private, val_dataloaders=loader(public))
    outputs = private.module.eval()(public[0])
    wanted = float(torch.nn.functional.cross_entropy(outputs, public[1]))
    found = driver.validate(private, loader(public), verbose=False)
    assert found[0]["val_loss"] == pytest.approx(wanted, rel=1e-5)
    assert private.guarantee.kind == "proved"
    assumed = " ".join(dpdist.load_results(private.private.run).privacy_card()["assumptions"])
    assert "validation data are public" in assumed
    assert torch.equal(flat(private.module), flat(own_loop(tmp_path / "own").model))


def test_private_records_are_not_validated(tmp_path):
    with pytest.raises(UserError):
        trainer().fit(module(tmp_path / "a"), val_dataloaders=loader(rows(20, seed=9)))
    inputs, labels = rows(20)
    with pytest.raises(UserError):
        trainer().fit(
            module(tmp_path / "b", public_eval=True), val_dataloaders=loader((inputs, 1 - labels))
        )
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_batches_in_which_private_records_would_hide_are_not_validated(tmp_path):
    inputs, labels = rows(20)
    batches = [(inputs[:10], labels[:10]), (inputs[10:], labels[10:])]
    unbatched = torch.utils.data.DataLoader(batches, batch_size=None)
    for number, each in enumerate((unbatched, batches, {"a": loader(rows(20, seed=9))})):
        with pytest.raises(UserError):
            trainer().fit(module(tmp_path / str(number), public_eval=True), val_dataloaders=each)


def test_scores_are_paid_for_and_may_stop_the_fit(tmp_path):
    held = rows(40, seed=9)
    private = module(tmp_path / "run", score={"private_eval_data": held, "every": 2, "noise": 5.0})
    stop = pl.callbacks.EarlyStopping(
        "score", patience=1, mode="max", check_on_train_epoch_end=True
    )
    driver = trainer(callbacks=[stop])
    driver.fit(private)
    assert "score" in driver.callback_metrics


# --- what is refused


@pytest.mark.parametrize(
    "given",
    [
        {"accumulate_grad_batches": 2},
        {"callbacks": [pl.callbacks.StochasticWeightAveraging(0.1)]},
    ],
    ids=lambda given: next(iter(given)),
)
def test_what_lightning_does_to_gradients_and_weights_reaches_no_step(tmp_path, monkeypatch, given):
    """It refuses what it cannot do, or does it to the module around: to nothing."""
    monkeypatch.chdir(tmp_path)
    plain, private = module(tmp_path / "plain"), module(tmp_path / "run")
    trainer().fit(plain)
    try:
        trainer(**given).fit(private)
    except pl.utilities.exceptions.MisconfigurationException:
        assert not (tmp_path / "run").exists()
        return
    for one, other in zip(plain.module.parameters(), private.module.parameters(), strict=True):
        assert torch.equal(one, other)


def test_modules_with_hooks_of_their_own_are_refused(tmp_path):
    class Hooked(Net):
        def on_after_backward(self) -> None: ...

    class Plateau(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)]

    with pytest.raises(UserError):
        module(tmp_path / "run", Hooked())
    with pytest.raises(UserError):
        trainer().fit(module(tmp_path / "run", Plateau()))
