"""A script's model with its optimizer and its objects, as the loop changes and saves them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpdist import models
from dpdist.core.errors import UserError
from dpdist.core.script_errors import warn
from dpdist.data.protocol import Records
from dpdist.gradients.layer_rules import advance_spectral_norms
from dpdist.models import ModelSpec
from dpdist.models.spec import SCRIPT
from dpdist.privacy.plan import PrivacyPlan, StepPlan
from dpdist.runs.folder import RunFolder
from dpdist.training import checkpoint
from dpdist.training.collectives import Workers
from dpdist.training.monitoring import StepMetrics
from dpdist.training.private_step import PrivateStep
from dpdist.training.script_state import (
    Watch,
    form_of,
    given_settings,
    kept_buffers,
    module_record,
    pack,
    refuse_differences,
    setting_differences,
    settings_of,
    unpack,
)
from dpdist.training.trained_weights import mark_trained

EXAMPLES = 33  # invented, to screen the model with
_PROBED_TOKENS = 4  # of documents whose logits are saved: a vocabulary may be large


class ScriptLearner:
    """Train a script's model by its own optimizer: `dpdist.training.loop.Learner`.

    Args:
        model: the module, in the form in which it is checked.
        optimizer: of its parameters.
        state: further objects with `state_dict` that a checkpoint keeps.
        workers: the processes that train together.
        records: the private ones, which give shapes and types of invented examples.

    Attributes:
        initial: digest of the model before its first step.
        given: the settings that the run started with.
        stopped: the script ended the training before its last step.
        noisy_norm: L2 norm of the last noisy sum.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        state: Sequence[Any],
        workers: Workers,
        records: Records,
    ) -> None:
        self.model, self.optimizer, self.objects = model, optimizer, list(state)
        self._workers, self._records = workers, records
        self._form = form_of(model)
        self.given = given_settings(model, optimizer, self.objects)
        self.initial, self.stopped, self.noisy_norm = "", False, 0.0
        self._first_norm = _norm_of(model)
        self.spec: ModelSpec
        self.plan: PrivacyPlan
        self._watch: Watch

    # --- what must not change

    def check_form(self) -> None:
        """Raise UserError if the model is not the one that was checked."""
        now = form_of(self.model)
        if now == self._form:
            return
        every = sorted(now.keys() | self._form.keys())
        other = [name for name in every if now.get(name, ()) != self._form.get(name, ())]
        modes = [name for name in other if name.endswith(".training") or name == "training"]
        if modes == other:
            raise UserError(
                f"model: must be in the mode in which it was checked, changed: {other[0]}; call "
                "model.train() (or eval(), if it was built so) before step(), or measure by "
                "training.evaluate(...), which switches it back",
                see="how-to/own-loop.md#what-your-loop-may-look-at",
            )
        raise UserError(
            f"model: must stay as it is checked, changed: {', '.join(other[:3])}; set it up before "
            "PrivateTraining(...), or start a new run with began_with=",
            see="how-to/own-loop.md#what-your-loop-may-look-at",
        )

    def watch(self) -> None:
        """Start to watch for changes between steps."""
        self._watch = Watch(self.model, self.optimizer, self.objects)

    def changed(self) -> list[str]:
        """Return what changed since the last step, as descriptions."""
        return self._watch.changed()

    def settings(self) -> dict[str, str]:
        """Return the optimizer's settings for comparison between workers."""
        return {"optimizer settings": repr(settings_of(self.optimizer))}

    def digests(self, name: str) -> dict[str, str]:
        """Return a digest of model and optimizer state for comparison; empty for one worker."""
        if self._workers.count == 1:
            return {}
        optimizer = pack("optimizer", self.optimizer.state_dict())
        return {name: checkpoint.tensors_digest({**self.model.state_dict(), **optimizer})}

    def state_digest(self) -> str:
        """Return a hash of model, optimizer, objects and the layers' plain attributes."""
        form = {name: each for name, each in form_of(self.model).items() if isinstance(each, str)}
        parts = {"model": dict(self.model.state_dict()), "optimizer": self.optimizer.state_dict()}
        parts |= {f"state.{n}": each.state_dict() for n, each in enumerate(self.objects)}
        parts["form"] = dict(sorted(form.items()))
        tensors = [pack(name, value) for name, value in parts.items()]
        return checkpoint.tensors_digest({k: v for each in tensors for k, v in each.items()})

    # --- called by the loop

    def release(
        self, step: PrivateStep, number: int, step_plan: StepPlan, flag: bool
    ) -> tuple[Tensor, StepMetrics, bool]:
        """Return the step's noisy gradient; the model's buffers stay as they were."""
        with kept_buffers(self.model):
            found = step.gradient(number, step_plan, flag)
        self.noisy_norm = float(found[0].norm()) * step_plan.expected_batch
        self._trained = step.engine.parameters
        return found

    def update(self, released: Tensor, number: int) -> None:
        """Let the optimizer take its step from only this gradient (size,)."""
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        trained = self._trained
        if len({(parameter.dtype, parameter.device) for parameter in trained}) == 1:
            released = released.to(trained[0])  # in one transfer
        pieces = released.split([parameter.numel() for parameter in trained])
        for parameter in (*self.model.parameters(), *held):
            parameter.grad = None
        for parameter, piece in zip(trained, pieces, strict=True):
            parameter.grad = piece.view(parameter.shape).to(parameter)
        self.optimizer.step()
        for parameter in trained:
            parameter.grad = None
        advance_spectral_norms(self.model)
        self._watch.remember()

    @property
    def growth(self) -> float:
        """Return the norm of all parameters, relative to that before the training."""
        return _norm_of(self.model) / (self._first_norm or math.inf)

    def not_finite(self, number: int, last: bool) -> str:
        """Return which numbers are not finite after a step, with a verb; "" if all are."""
        finite = all(is_finite(parameter.detach()) for parameter in self._trained)
        return "" if finite else "the parameters are"

    def check_same(self, done: int) -> None:
        """Raise UserError on all workers unless they have the same parameters."""
        self._workers.check_same(self.digests("parameters"))

    def finished(self, whole: bool) -> ModelSpec:
        """Return the model's description."""
        return self.spec

    # --- checkpoints

    def state(self, done: int) -> checkpoint.TrainState:
        """Return the current state; at the end also the description of the module."""
        kept = {
            "initial": self.initial,
            "kept": [type(each).__name__ for each in self.objects],
            "given": self.given,
            **({"stopped": True} if self.stopped else {}),
        }
        slots = {
            **pack("script", kept),
            **pack("model", dict(self.model.state_dict())),
            **pack("optimizer", self.optimizer.state_dict()),
        }
        for place, each in enumerate(self.objects):
            slots |= pack(f"state.{place}", each.state_dict())
        tokenization = self._records.tokenization
        by_name = not self.spec.name.startswith(f"{SCRIPT}:") and tokenization is None
        if (self.stopped or done == self.plan.steps) and not by_name:  # for a factory
            slots |= pack("module", self._module_record())
        return checkpoint.TrainState(done, torch.zeros(0), slots)

    def _module_record(self) -> dict[str, Any]:
        """Return the trained module's description, with its outputs for invented inputs."""
        inputs: Any = self._records.examples(EXAMPLES)[0]
        answering = models.NextTokenLogits.around(self.model)
        if answering is not None:
            inputs = models.NextTokenLogits.rows(inputs, _PROBED_TOKENS)
        text = self._records.tokenization
        return module_record(self.model, inputs, answering, text, self.spec.signature)

    def restore(self, folder: RunFolder, again: bool) -> int:
        """Load the newest checkpoint, and return the number of steps before it.

        again: a different object of this process trained this model in this folder.
        """
        self.initial = checkpoint.tensors_digest(self.model.state_dict())
        state = checkpoint.load_latest(folder.checkpoints)
        if state is None:
            return 0
        found = unpack("script", state.slots)
        if found["kept"] != (given := [type(each).__name__ for each in self.objects]):
            before = ", ".join(found["kept"]) or "none"
            raise UserError(
                f"state: must be what the run was begun with ({before}), got "
                f"{', '.join(given) or 'none'}: give the same objects in the same order"
            )
        self._check_given(found, folder, again)
        mark_trained(self.model, folder.path)  # also where only some weights can be loaded
        self.initial, self.stopped = found["initial"], bool(found.get("stopped"))
        try:
            self.model.load_state_dict(unpack("model", state.slots))
            self.optimizer.load_state_dict(unpack("optimizer", state.slots))
            for place, each in enumerate(self.objects):
                each.load_state_dict(unpack(f"state.{place}", state.slots))
        except (RuntimeError, ValueError, KeyError) as error:
            said = (str(error).splitlines() or [""])[0]
            raise UserError(
                f"{folder.checkpoints}: does not fit these objects ({said}); build them as when "
                "the run was begun"
            ) from error
        return state.step

    def _check_given(self, begun: Mapping[str, Any], folder: RunFolder, again: bool) -> None:
        """Raise UserError for settings that the run did not start with, and would not use.

        Weights that a script draws without a seed differ each time: those of the run are used.
        """
        before, now = dict(begun["given"]), self.given
        if again or begun["initial"] == self.initial:  # the weights do not depend on the seed
            before.pop("seed", None)
        refuse_differences(setting_differences(before, now), folder.path)
        if before.get("seed") is not None and "seed" in now:
            warn(
                "model: has other weights than the run began with, which are not used: those of "
                f"the newest checkpoint in {folder.path} are. For a new run build the model again, "
                "and give another folder"
            )
        self.given = begun["given"]


@torch.no_grad()
def _norm_of(model: nn.Module) -> float:
    numbers = (each for each in model.parameters() if each.is_floating_point())
    wide = ((each, torch.promote_types(each.dtype, torch.float32)) for each in numbers)
    return math.hypot(*(float(each.norm(dtype=dtype)) for each, dtype in wide))


def is_finite(values: Tensor) -> bool:
    """Return whether all values are finite numbers."""
    # A finite sum, which takes one pass, has finite terms; a sum of finite terms may overflow.
    total = values.sum().item()
    return total - total == 0 or bool(values.isfinite().all())
