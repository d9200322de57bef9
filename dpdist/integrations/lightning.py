"""Private training by the Trainer of Lightning, whose module takes dpdist's own steps.

`PrivateModule` wraps the user's `LightningModule`. Lightning drives it, and sees neither private
records nor trained weights: its batches are step numbers, it has no optimizer, and the user's
module is not in its module tree. So nothing that Lightning clips, accumulates, scales or saves can
reach a private gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer
from torch.utils import data as torch_data

from dpdist.config.sections import PrivacyRecipe
from dpdist.core.errors import UserError
from dpdist.core.optional_imports import import_extra
from dpdist.data.adapters import as_records
from dpdist.data.protocol import count_common
from dpdist.privacy.guarantee import Guarantee
from dpdist.private_training import PrivateTraining
from dpdist.runs.folder import RunFolder
from dpdist.training.script_history import StepReport
from dpdist.training.script_state import kept_modes

pytorch: Any = import_extra("lightning.pytorch", "lightning", "PrivateModule")
_overriding: Any = import_extra(
    "lightning.pytorch.utilities.model_helpers", "lightning", "PrivateModule"
)

# --- settings of the Trainer ------------------------------------------------------------------


def check_trainer(trainer: Any) -> None:
    """Raise UserError for settings of Lightning's Trainer that private steps do not honor.

    Args:
        trainer: a `lightning.pytorch.Trainer` that is about to run.

    Raises:
        UserError: the first setting that is not supported, in one line with what to do instead.
    """
    call = str(getattr(trainer.state.fn, "value", trainer.state.fn))
    if call not in ("fit", "validate"):
        raise UserError(
            f"trainer: must call fit or validate, got {call}: test and predict with the trained "
            "module itself, on public records"
        )
    count, kind = trainer.num_devices * trainer.num_nodes, type(trainer.strategy).__name__
    if count != 1 or kind != "SingleDeviceStrategy":
        raise UserError(
            f"trainer.devices: must be 1, without a strategy of several, got {count} ({kind}): "
            "give Trainer(devices=1), or use dpdist.PrivateTraining for several workers"
        )
    if trainer.precision != "32-true":
        raise UserError(
            f"trainer.precision: must be 32-true, got {trainer.precision}: a scale that follows "
            "overflows would reveal private records"
        )


# --- the user's module ------------------------------------------------------------------------


_HOOKS = (  # of a module, which the private step does not call
    "backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping",
    "lr_scheduler_step", "on_before_backward", "on_after_backward", "on_before_zero_grad",
    "on_before_optimizer_step", "on_train_start", "on_train_end", "on_train_epoch_start",
    "on_train_epoch_end", "on_train_batch_start", "on_train_batch_end", "on_validation_start",
    "on_validation_end", "on_validation_epoch_start", "on_validation_epoch_end",
    "on_validation_batch_start", "on_validation_batch_end", "configure_model", "on_fit_start",
    "on_fit_end", "transfer_batch_to_device", "on_before_batch_transfer",
    "on_after_batch_transfer", "test_step", "predict_step", "configure_callbacks",
)  # fmt: skip


def _check_module(module: Any) -> None:
    """Raise UserError unless it is a LightningModule without hooks that would not be called."""
    if not isinstance(module, pytorch.LightningModule):
        raise UserError(
            f"module: must be a lightning.pytorch.LightningModule, got {type(module).__name__}: "
            "import it from there, or give a bare module to dpdist.PrivateTraining"
        )
    if not module.automatic_optimization:
        raise UserError(
            "module.automatic_optimization: must be True, got False: a training_step that steps "
            "optimizers itself is not run; use dpdist.PrivateTraining"
        )
    for name in _HOOKS:
        if _overriding.is_overridden(name, module, parent=pytorch.LightningModule):
            raise UserError(
                f"module.{name}: must not be overridden: the private step does not call it; use a "
                "callback of the Trainer"
            )


def _optimizer_and_schedule(made: Any) -> tuple[Any, dict[str, Any] | None]:
    """Return the optimizer and the schedule that `configure_optimizers` returned.

    Raises:
        UserError: it returned no or several optimizers, or a schedule that follows a metric.
    """
    schedules: Any = []
    if isinstance(made, Mapping):
        schedules = [made["lr_scheduler"]] if made.get("lr_scheduler") is not None else []
        made = made.get("optimizer")
    elif isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], list | tuple):
        made, schedules = made
    optimizers = [*made] if isinstance(made, list | tuple) else [made]
    if len(optimizers) == 1 and isinstance(optimizers[0], Mapping):
        return _optimizer_and_schedule(optimizers[0])
    if len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer) or len(schedules) > 1:
        raise UserError(
            "module.configure_optimizers: must return one optimizer, and at most one schedule, "
            f"got {len(optimizers)} and {len(schedules)}: use dpdist.PrivateTraining for others"
        )
    if not schedules:
        return optimizers[0], None
    given = schedules[0] if isinstance(schedules[0], Mapping) else {"scheduler": schedules[0]}
    found = {"interval": "epoch", "frequency": 1, **given}
    by_metric = isinstance(found["scheduler"], torch.optim.lr_scheduler.ReduceLROnPlateau)
    if by_metric or found["interval"] not in ("step", "epoch"):
        raise UserError(
            "module.configure_optimizers: must return a schedule of steps or epochs, got "
            f"{type(found['scheduler']).__name__}: one that follows a metric is not stepped here"
        )
    return optimizers[0], found


# --- the module that Lightning drives ---------------------------------------------------------


class _StepNumbers(torch_data.Dataset[int]):
    """Give Lightning the step numbers of one epoch as its data set."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return index


PUBLIC_VALIDATION = (
    "the Trainer's validation data are public: no private record, and nothing made of one, is there"
)
_MODULE: Any = pytorch.LightningModule


class PrivateModule(_MODULE):  # type: ignore[misc]
    """Train a `LightningModule` privately, driven by Lightning's Trainer.

    Guarantee: the run is (epsilon, delta)-differentially private as `guarantee` states, for
    everything that was released so far. A step is `dpdist.PrivateTraining.step` on the private
    records; the Trainer's batches are numbers of steps. Logged are released values: learning rate,
    the noisy sum's norm, epsilon and noisy scores, never a loss. The same script continues the run
    in `folder`.

    Args:
        module: with `forward` and `configure_optimizers`; its `training_step` is not run, since its
            loss is one of a batch. Its `validation_step` is, on public records.
        data: the PRIVATE records: `(X, y)`, or anything that `dpdist.as_records` takes; None: those
            of `module.train_dataloader()`.
        loss: a name, such as "cross-entropy", or a function of module and batch that returns one
            value per record.
        privacy: a `dpdist.Privacy`, or its fields as a dict.
        batch_size: expected number of records in a step.
        steps, epochs: length of the training; one of the two. An epoch of the Trainer has as many
            steps as sample each record once, in expectation; `max_epochs` may end the fit earlier.
        folder: folder of the run, created if it does not exist.
        public_eval: declare that validation data are public, which the card lists as an assumption.
            Without it validation raises an error, as does a private record among them.
        score: arguments of `PrivateTraining.score`: private_eval_data, every, noise, value.
        options: further options of `PrivateTraining`: resources, factory, vmap, certify,
            reproducible, eval_data, class_sampling, class_counts, importance_weights.

    Attributes:
        private: the `dpdist.PrivateTraining`, once `fit` started; `training` is torch's own flag.

    Raises:
        UserError: one line that names the argument or the Trainer's setting, its rule and what to
            do; nothing was released.

    Source:
        Abadi et al., CCS 2016 (DP-SGD).

    Example:
        >>> import logging, tempfile, warnings, torch
        >>> import lightning.pytorch as pl
        >>> from dpdist.integrations.lightning import PrivateModule
        >>> class Net(pl.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(4, 2)
        ...     def forward(self, inputs):
        ...         return self.layer(inputs)
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> private = PrivateModule(
        ...     Net(), (torch.randn(200, 4), torch.randint(2, (200,))), loss="cross-entropy",
        ...     privacy={"noise_multiplier": 1.0, "delta": 1e-3}, batch_size=20, steps=3,
        ...     folder=tempfile.mkdtemp() + "/run")
        >>> warnings.simplefilter("ignore")
        >>> logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        >>> trainer = pl.Trainer(
        ...     devices=1, accelerator="cpu", enable_checkpointing=False, logger=False,
        ...     enable_progress_bar=False, enable_model_summary=False)
        >>> trainer.fit(private)
        >>> private.private.remaining_steps, private.guarantee.kind
        (0, 'proved')
    """

    def __init__(
        self,
        module: Any,
        data: Any = None,
        *,
        loss: Any,
        privacy: PrivacyRecipe | Mapping[str, Any],
        batch_size: int,
        steps: int | None = None,
        epochs: int | None = None,
        folder: Any,
        public_eval: bool = False,
        score: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        _check_module(module)
        self.automatic_optimization = False
        self._held = (module,)  # a tuple: outside the module tree, so Lightning sees no weights
        self._records = as_records(module.train_dataloader() if data is None else data)
        if public_eval:
            self._records.assumed = (*self._records.assumed, PUBLIC_VALIDATION)
        self._public_eval, self._score = public_eval, score
        self._given = {
            "loss": loss, "privacy": privacy, "batch_size": batch_size, "steps": steps,
            "epochs": epochs, "folder": folder, **options,
        }  # fmt: skip
        self._numbers = _StepNumbers(max(1, len(self._records) // batch_size))
        self._schedule: dict[str, Any] | None = None
        self._apart: list[Any] = []  # validation loaders without private records
        self.private: PrivateTraining | None = None

    @property
    def module(self) -> Any:
        """Return the user's module, with the weights of the newest step."""
        return self._held[0]

    @property
    def guarantee(self) -> Guarantee:
        """Return the guarantee of everything released so far. Raises UserError before `fit`."""
        return self._begun().guarantee

    @property
    def run(self) -> RunFolder:
        """Return the run folder. Raises UserError before `fit`."""
        return self._begun().run

    def save_adapter(
        self, folder: str | Path, *, base_name: str | None = None, not_private: bool = False
    ) -> Path:
        """Write the adapter of the module's one `peft` model with its card, as `peft` loads it.

        Arguments, errors and the guarantee are those of
        `dpdist.integrations.transformers.save_adapter`.
        """
        from dpdist.integrations.transformers import save_adapter

        return save_adapter(
            self.module, self.run, folder, base_name=base_name, not_private=not_private
        )

    def _begun(self) -> PrivateTraining:
        if self.private is None:
            raise UserError("fit: must come first: call trainer.fit(module)")
        return self.private

    def forward(self, *given: Any, **named: Any) -> Any:
        """Return what the user's module returns."""
        return self.module(*given, **named)

    # --- what Lightning calls

    def configure_callbacks(self) -> list[Any]:
        """Return no callbacks; the Trainer asks before anything is set up, and is checked."""
        check_trainer(self.trainer)
        for name in ("training_step", "train_dataloader", "on_validation_start", "log_dict"):
            if getattr(type(self), name) is not getattr(PrivateModule, name):
                raise UserError(
                    f"{type(self).__name__}.{name}: must not be overridden, it would replace the "
                    "private step: change the module inside"
                )
        return []

    def configure_optimizers(self) -> None:
        """Return nothing: Lightning could step an optimizer without a private gradient."""

    def train_dataloader(self) -> torch_data.DataLoader[int]:
        """Return the numbers of an epoch's steps."""
        return torch_data.DataLoader(self._numbers, batch_size=1)

    def val_dataloader(self) -> Any:
        """Return the validation data of the user's module, if it has some."""
        if not _overriding.is_overridden(
            "val_dataloader", self.module, parent=pytorch.LightningModule
        ):
            return []
        return self.module.val_dataloader()

    def on_fit_start(self) -> None:
        """Build the private training on the Trainer's device, unless a fit already built it."""
        if self.private is not None:
            return
        self.module.to(self.trainer.strategy.root_device)
        with self._attached():
            optimizer, self._schedule = _optimizer_and_schedule(self.module.configure_optimizers())
        state = [] if self._schedule is None else [self._schedule["scheduler"]]
        self.private = PrivateTraining(
            self.module, optimizer, self._records, state=state, **self._given
        )
        if self._score is not None:
            self.private.score(**self._score)

    def on_train_start(self) -> None:
        """Raise UserError if the Trainer got batches of records."""
        loader = self.trainer.train_dataloader
        if getattr(loader, "dataset", None) is not self._numbers:
            raise UserError(
                f"trainer.fit: must get no training data, got {type(loader).__name__}: give the "
                "private records to PrivateModule(module, data)"
            )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Return -1, which ends the epoch, if all steps are taken."""
        if self._begun().remaining_steps:
            return None
        self.trainer.should_stop = True
        return -1

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Take one private step, and log what it released."""
        private = self._begun()
        report = private.step()
        if self._schedule is not None:
            every = int(self._schedule["frequency"])
            every *= len(self._numbers) if self._schedule["interval"] == "epoch" else 1
            if (report.step + 1) % every == 0:
                self._schedule["scheduler"].step()
        self.log_dict(self._told(report), on_step=True, on_epoch=False, batch_size=1)
        if not private.remaining_steps:
            self.trainer.should_stop = True

    def _told(self, report: StepReport) -> dict[str, float]:
        """Return the released values of a step; epsilon only at the logger's steps."""
        found = {"learning_rate": report.learning_rate, "noisy_norm": report.noisy_norm}
        last = not self._begun().remaining_steps
        if last or (report.step + 1) % max(1, self.trainer.log_every_n_steps) == 0:
            found["epsilon"] = report.epsilon
        return found if report.score is None else {**found, "score": report.score}

    # --- public records

    def on_validation_start(self) -> None:
        """Raise UserError for validation data that are not public."""
        loaders = self.trainer.val_dataloaders
        for each in loaders if isinstance(loaders, list | tuple) else [loaders]:
            if not self._public_eval:
                raise UserError(
                    "val_dataloaders: must be public records, declared by public_eval=True: "
                    "metrics of private records would be logged without noise; use the option "
                    "score of PrivateModule for private ones"
                )
            if any(each is known for known in self._apart):
                continue
            if not isinstance(each, torch_data.DataLoader) or each.batch_sampler is None:
                raise UserError(
                    "val_dataloaders: must be DataLoaders that build batches of single records, "
                    f"got {type(each).__name__}: private records could not be recognized within "
                    "other batches; set batch_size"
                )
            if common := count_common(as_records(each, name="val_dataloaders"), self._records):
                raise UserError(
                    f"val_dataloaders: must share no record with data, got {common:,} in common: "
                    "metrics on private records would be logged without noise"
                )
            self._apart.append(each)

    def validation_step(self, batch: Any, *places: Any) -> Any:
        """Return what the user's `validation_step` returns for a batch of PUBLIC records."""
        plain = torch.inference_mode(False)  # a later step could not use inference tensors
        with self._attached(), kept_modes(self.module), plain, torch.no_grad():
            return self.module.eval().validation_step(batch, *places)

    @contextmanager
    def _attached(self) -> Iterator[None]:
        """Give the user's module the Trainer within the block, for `log` and for lengths."""
        module = self.module
        module.trainer, module._current_fx_name = self.trainer, self._current_fx_name
        try:
            yield
        finally:
            module.trainer, module._current_fx_name = None, None

    # --- what would bypass the private step

    def state_dict(self, *given: Any, **named: Any) -> dict[str, Any]:
        """Return no weights: checkpoints are only in the run's private folder."""
        return {}

    def load_state_dict(self, *given: Any, **named: Any) -> NoReturn:
        """Raise UserError: the run's ledger does not know the privacy cost of other weights."""
        raise UserError(
            "ckpt_path: must be None, got a checkpoint: the run in folder continues from its own "
            "checkpoints"
        )
