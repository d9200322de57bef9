"""`PrivateModule`: Lightning drives dpdist's own steps, and touches neither records nor weights."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.optional_extras import needs_hf, needs_lightning
from support.training import release_ids
from training.own_loops import PRIVATE, WIDTH, begin, flat, rows

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
@pytest.mark.parametrize(("schedule", "every"), [(None, 0), ("step", 1), ("epoch", 5)])
def test_it_releases_the_bits_of_the_own_loop(tmp_path, schedule, every):
    private = module(tmp_path / "run", Net(schedule))
    trainer().fit(private)
    wanted = own_loop(tmp_path / "own", every)
    assert release_ids(private.private.run) == release_ids(wanted.run)
    assert len(release_ids(wanted.run)) == 6
    assert torch.equal(flat(private.module), flat(wanted.model))
    assert private.guarantee == wanted.guarantee and private.guarantee.kind == "proved"


@pytest.mark.slow
def test_records_of_a_class_join_at_its_rate_as_in_the_own_loop(tmp_path):
    ones = int(rows()[1].sum())
    given = {"class_sampling": {0: 1, 1: 2}, "class_counts": {0: 80 - ones, 1: ones},
             "importance_weights": True}  # fmt: skip
    private = module(tmp_path / "run", **given)
    trainer().fit(private)
    wanted, equal = own_loop(tmp_path / "own", **given), own_loop(tmp_path / "equal")
    assert release_ids(private.private.run) == release_ids(wanted.run) != release_ids(equal.run)
    assert torch.equal(flat(private.module), flat(wanted.model))
    assert private.guarantee == wanted.guarantee and private.guarantee.kind == "proved"
    assert private.guarantee.epsilon > equal.guarantee.epsilon


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


def test_what_is_logged_was_released(tmp_path):
    logger = pl.loggers.CSVLogger(tmp_path / "logs")
    private = module(tmp_path / "run")
    trainer(logger=logger, log_every_n_steps=2).fit(private)
    (file,) = (tmp_path / "logs").rglob("metrics.csv")
    lines = list(csv.DictReader(file.open()))
    assert lines[0].keys() == {"epoch", "step", "learning_rate", "noisy_norm", "epsilon"}
    plan = private.private.plan
    assert [int(row["step"]) for row in lines] == [1, 3, 5]
    assert [float(row["epsilon"]) for row in lines] == pytest.approx(
        [plan.guarantee(steps=steps).epsilon for steps in (2, 4, 6)], rel=1e-6
    )
    assert {path.name for path in (tmp_path / "run").iterdir()} <= {
        "run.json", "recipe.yaml", "private", "README.txt"
    }  # fmt: skip


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

    def __init__(self, other: bool = False) -> None:
        super().__init__()
        transformers = import_extra("transformers", "hf", "tests")
        peft = import_extra("peft", "hf", "tests")
        torch.manual_seed(3)
        config = transformers.LlamaConfig(
            vocab_size=24, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
        )  # fmt: skip
        lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        self.lm = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)
        if other:
            self.other = torch.nn.Linear(2, 2)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.3)


def documents() -> Any:
    tokens = torch.randint(24, (80, 7), generator=torch.Generator().manual_seed(1))
    fields = [{"input_ids": row, "labels": row, "author": i % 9} for i, row in enumerate(tokens)]
    return dpdist.as_records(
        fields, inputs=["input_ids", "labels"], unit="author",
        ranges={"input_ids": 24, "labels": 24},
    )  # fmt: skip


@pytest.mark.slow
def test_an_adapter_is_saved_from_a_module_around_its_model(tmp_path):
    needs_hf()
    privacy = {**PRIVATE, "unit": "user", "max_records_per_user": 2}
    given = {"loss": dpdist.language_model_loss, "privacy": privacy, "batch_size": 4}
    private = module(tmp_path / "run", Language(), data=documents(), **given)
    trainer().fit(private)
    assert private.run is private.private.run
    folder = private.save_adapter(tmp_path / "adapter", base_name="tiny", not_private=True)
    hf = import_extra("dpdist.integrations.transformers", "hf", "tests")
    with pytest.raises(UserError, match=r"must train only its adapter, got other\.weight"):
        hf.save_adapter(Language(other=True), private.run, tmp_path / "other", not_private=True)
    peft = import_extra("peft", "hf", "tests")
    loaded = peft.PeftModel.from_pretrained(Language().lm.get_base_model(), folder).eval()
    ids = torch.arange(7)[None]
    with torch.no_grad():
        trained = private.module.lm.eval()(input_ids=ids).logits
        assert torch.equal(loaded(input_ids=ids).logits, trained)
        assert not torch.equal(Language().lm.eval()(input_ids=ids).logits, trained)
        private.module.lm.base_model.model.model.layers[0].self_attn.q_proj.lora_B[
            "default"
        ].weight += 1
    with pytest.raises(UserError, match="model: must be the one that the run trained"):
        private.save_adapter(tmp_path / "other", not_private=True)
    card = dpdist.load_results(private.run).privacy_card()
    assert card["unit"] == (
        "a user (all documents of one value of author, of which at most 2 count in a step)"
    )


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
    with pytest.raises(UserError, match="val_dataloaders: must be public records, said by"):
        trainer().fit(module(tmp_path / "a"), val_dataloaders=loader(rows(20, seed=9)))
    inputs, labels = rows(20)
    with pytest.raises(UserError, match="must share no record with data, got 20 in common"):
        trainer().fit(
            module(tmp_path / "b", public_eval=True), val_dataloaders=loader((inputs, 1 - labels))
        )
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_batches_in_which_private_records_would_hide_are_not_validated(tmp_path):
    inputs, labels = rows(20)
    batches = [(inputs[:10], labels[:10]), (inputs[10:], labels[10:])]
    unbatched = torch.utils.data.DataLoader(batches, batch_size=None)
    for number, each in enumerate((unbatched, batches, {"a": loader(rows(20, seed=9))})):
        with pytest.raises(UserError, match="val_dataloaders: must be DataLoaders that make"):
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


class SWA(pl.callbacks.StochasticWeightAveraging):
    pass


@pytest.mark.parametrize(
    "given",
    [
        {"accumulate_grad_batches": 2}, {"gradient_clip_val": 1.0}, {"enable_checkpointing": True},
        {"callbacks": [SWA(0.1)]},
    ],
    ids=lambda given: next(iter(given)),
)  # fmt: skip
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

    class Manual(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    class Several(Net):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.1)] * 2

    class Plateau(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)]

    for net, said in ((Hooked(), r"module\.on_after_backward: must be left out"),
                      (Manual(), r"module\.automatic_optimization: must be True"),
                      (torch.nn.Linear(6, 2), "module: must be a lightning")):  # fmt: skip
        with pytest.raises(UserError, match=said):
            module(tmp_path / "run", net)
    for net, said in ((Several(), "return one optimizer"), (Plateau(), "a schedule of steps")):
        with pytest.raises(UserError, match=rf"module\.configure_optimizers: must .*{said}"):
            trainer().fit(module(tmp_path / "run", net))


def test_a_subclass_cannot_put_a_step_of_its_own_aside(tmp_path):
    class Own(PrivateModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise AssertionError

    own = Own(Net(), rows(), loss="cross-entropy", privacy=PRIVATE, batch_size=16, steps=6,
              folder=tmp_path / "run")  # fmt: skip
    with pytest.raises(UserError, match=r"Own\.training_step: must be left out"):
        trainer().fit(own)
