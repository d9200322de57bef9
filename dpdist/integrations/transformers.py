"""Private training by the Trainer of Hugging Face's `transformers`, whose step is dpdist's own.

`PrivateTrainer` takes a model, a data set, a collator, arguments and callbacks as the Trainer does
and hands them to `dpdist.PrivateTraining`. No line of the Trainer's own training loop is run: its
sampler, its loss over a batch, its optimizer step, its checkpoints and its log of losses are
replaced, and an argument that only they would read raises an error. The arguments that are read are
listed below, so that one which a later version of `transformers` adds raises an error until it is
listed.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from dpdist.config.sections import PrivacyRecipe
from dpdist.core.errors import UserError
from dpdist.core.optional_imports import import_extra
from dpdist.core.script_errors import warn
from dpdist.data.array_records import IGNORED, Options
from dpdist.data.documents import PACKED, begin_again, tokenization_of
from dpdist.data.item_records import ItemRecords, RecordError, without_transforms
from dpdist.data.protocol import Records, count_common
from dpdist.gradients.objective import additive_mask, looks_ahead
from dpdist.models import TRAINED_BY, base_digest, base_dtype
from dpdist.privacy.card import PRIVACY_CARD, PRIVACY_CARD_TEXT
from dpdist.privacy.guarantee import Guarantee
from dpdist.private_training import PrivateTraining
from dpdist.publishing import write_adapter
from dpdist.release.description import read_base
from dpdist.release.files import BASE, is_release, verify_checksums
from dpdist.training.script_history import StepReport
from dpdist.training.script_state import kept_modes

with torch.device("cpu"):  # whatever device the importing code has as its default
    transformers: Any = import_extra("transformers", "hf", "PrivateTrainer")
    import_extra("accelerate", "hf", "PrivateTrainer")

# --- arguments of the Trainer -----------------------------------------------------------------


_READ = {
    "output_dir", "per_device_train_batch_size", "num_train_epochs", "max_steps", "learning_rate",
    "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "weight_decay",
    "adam_beta1", "adam_beta2", "adam_epsilon", "logging_strategy", "logging_steps",
    "logging_first_step", "log_level", "disable_tqdm", "eval_strategy", "eval_steps", "eval_delay",
    "eval_on_start", "per_device_eval_batch_size", "prediction_loss_only", "do_eval", "do_train",
    "do_predict", "run_name", "seed", "use_cpu", "dataloader_pin_memory",
    "activation_checkpointing", "activation_checkpointing_kwargs", "gradient_checkpointing",
    "gradient_checkpointing_kwargs", "load_best_model_at_end", "metric_for_best_model",
    "greater_is_better", "bf16",
}  # fmt: skip
# Of the Trainer's own loop, loader and checkpoints: without effect here, which one warning says.
_WITHOUT_EFFECT = {
    "dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_persistent_workers",
    "dataloader_drop_last", "save_steps", "save_strategy", "save_total_limit", "save_only_model",
    "save_on_each_node", "logging_nan_inf_filter", "overwrite_output_dir",
    "restore_callback_states_from_checkpoint", "eval_accumulation_steps",
}  # fmt: skip
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor")
_PLATEAUS = ("reduce_lr_on_plateau", "greedy")
# What to do instead of arguments that are often set; all others share `_UNREAD`.
_MICRO_BATCH = (
    "per_device_train_batch_size is the whole expected batch of a step; split its passes by "
    'training_options={"resources": {"micro_batch": ...}}'
)
_INSTEAD = {
    "auto_find_batch_size": _MICRO_BATCH,
    "gradient_accumulation_steps": _MICRO_BATCH,
    "max_grad_norm": "each record's gradient is clipped, never the batch's; give privacy.clip_norm",
    "label_smoothing_factor": "the Trainer smooths a loss over the batch; give loss=, a function "
    "of module and batch that returns one value per record",
    "fp16": "a scaler that follows overflows would reveal private records; leave it out",
    "report_to": "trackers may log losses and gradients of private records; leave it out, and send "
    "what on_log of a callback of your own receives, which is released values",
}
_UNREAD = "the private step does not read it; leave it out"


def _word(value: Any) -> Any:
    """Return a value as the user wrote it: the text of an enumeration's member."""
    return repr(getattr(value, "value", value))


def _refused_arguments(args: Any) -> Iterator[UserError]:
    """Yield an error for each argument that is not supported, first those that are read."""
    kind = transformers.TrainingArguments
    if type(args) is not kind:
        yield UserError(f"args: must be a {kind.__name__}, got {type(args).__name__}")
        return
    if args.lr_scheduler_type in _PLATEAUS:
        yield UserError(
            "args.lr_scheduler_type: must depend only on the step number, got "
            f"{_word(args.lr_scheduler_type)}: use linear, cosine or constant"
        )
    usual = kind(output_dir=args.output_dir)
    if args.optim not in _OPTIMIZERS:
        yield UserError(
            f"args.optim: must be one of {', '.join(_OPTIMIZERS)}, got {_word(args.optim)}: or "
            "give a torch optimizer by optimizers=(optimizer, None)"
        )
    if not (args.bf16 or args.fp16) and getattr(args, "mixed_precision", "no") not in ("no", None):
        yield UserError(
            f"args.mixed_precision: must be 'no', got {_word(args.mixed_precision)}: "
            f"{_INSTEAD['fp16']}"
        )
    if args.per_device_train_batch_size < 1:
        yield UserError(
            "args.per_device_train_batch_size: must be >= 1, got "
            f"{args.per_device_train_batch_size}: it is the whole expected batch of a step"
        )
    if args.max_steps <= 0 and not float(args.num_train_epochs).is_integer():
        yield UserError(
            f"args.num_train_epochs: must be a whole number, got {args.num_train_epochs}: or give "
            "max_steps"
        )
    if args.world_size > 1 or args.n_gpu > 1:
        yield UserError(
            f"args.world_size: must be 1, on one device, got {args.world_size} on {args.n_gpu} "
            "devices: use dpdist.PrivateTraining for several workers"
        )
    yield from _refused_checkpoints(args)
    for name in (each.name for each in dataclasses.fields(kind)):
        value, default = getattr(args, name), getattr(usual, name)
        taken = name in _READ or name in _WITHOUT_EFFECT
        # The Trainer sets these two itself.
        unset = name == "local_rank" or (name == "report_to" and not value)
        if not taken and value != default and not unset:
            then = _INSTEAD.get(name, _UNREAD)
            yield UserError(
                f"args.{name}: must be left at {_word(default)}, got {_word(value)}: {then}"
            )


_NOT_REENTRANT = (
    "must have use_reentrant=False, got reentrant checkpoints: the parameters within would learn "
    "nothing"
)


def _checkpoints(args: Any) -> bool:
    """Return whether activations are recomputed; `gradient_checkpointing` is the older name."""
    return bool(getattr(args, "activation_checkpointing", args.gradient_checkpointing))


def _checkpoint_options(args: Any) -> dict[str, Any]:
    older = args.gradient_checkpointing_kwargs
    return dict(getattr(args, "activation_checkpointing_kwargs", older) or {})


def _refused_checkpoints(args: Any) -> Iterator[UserError]:
    """Yield an error for each option of activation checkpoints that is not supported."""
    given = _checkpoint_options(args) if _checkpoints(args) else {}
    for name in sorted(given.keys() - {"use_reentrant", "every_n_layers"}):
        yield UserError(
            "args.activation_checkpointing_kwargs: must be use_reentrant and every_n_layers, got "
            f"{name!r}: leave it out"
        )
    if given.get("use_reentrant", False) is not False:
        yield UserError(f"args.activation_checkpointing_kwargs: {_NOT_REENTRANT}")


def _enable_checkpoints(model: nn.Module, args: Any) -> None:
    """Let a model recompute its activations, as the Trainer does, without reentrant passes."""
    options = {"use_reentrant": False, **_checkpoint_options(args)}
    layers = {name: options.pop(name) for name in ("every_n_layers",) if name in options}
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        if enable := getattr(model, f"{name}_enable", None):
            enable(**{f"{name}_kwargs": options}, **layers)
            return
    raise UserError(
        f"args.activation_checkpointing: must be False, got True: a {type(model).__name__} has no "
        "such checkpoints"
    )


def _tell_ignored(args: Any) -> None:
    """Warn once about arguments that have no effect here."""
    usual = transformers.TrainingArguments(output_dir=args.output_dir)
    known = sorted(name for name in _WITHOUT_EFFECT if hasattr(usual, name))
    given = [name for name in known if getattr(args, name) != getattr(usual, name)]
    if given:
        warn(
            f"args: without effect in a private training: {', '.join(given)} (the plan samples the "
            "records, and the run writes its own checkpoints, every resources.checkpoint_seconds)"
        )


def _refused_callbacks(callbacks: Sequence[Any] | None) -> Iterator[UserError]:
    """Yield an error for each callback of transformers that reports."""
    usual = {
        "TrainerCallback", "ExportableState", "DefaultFlowCallback", "ProgressCallback",
        "PrinterCallback", "NotebookProgressCallback", "EarlyStoppingCallback",
    }  # fmt: skip
    for each in callbacks or ():
        kind = each if isinstance(each, type) else type(each)
        if any(
            parent.__module__.partition(".")[0] == "transformers" and parent.__name__ not in usual
            for parent in kind.__mro__
        ):
            yield UserError(
                f"callbacks: must be yours, got {kind.__name__}: {_INSTEAD['report_to']}"
            )


def _refused_model_and_schedule(model: Any, schedule: Any) -> Iterator[UserError]:
    """Yield errors for reentrant checkpoints and for a schedule that follows losses."""
    for each in model.modules():
        if getattr(each, "gradient_checkpointing", False) is True:
            run: Any = getattr(each, "_gradient_checkpointing_func", None)
            if getattr(run, "keywords", {}).get("use_reentrant") is not False:
                yield UserError(f"model.gradient_checkpointing: {_NOT_REENTRANT}")
                break
    if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
        yield UserError(
            f"optimizers: must depend only on the step number, got {type(schedule).__name__}: use "
            "a different schedule"
        )


# --- records and losses -----------------------------------------------------------------------


_TASKS = {  # of a model's loss type: what a record's labels belong to
    "ForCausalLM": "next tokens",
    "ForMaskedLM": "tokens",
    "ForTokenClassification": "tokens",
    "ForSequenceClassification": "record",
    "ForImageClassification": "record",
}
_TOKEN_FIELDS = ("input_ids", "attention_mask", "token_type_ids")
_FIELDS = (*_TOKEN_FIELDS, "pixel_values", "labels")


class ModelLoss:
    """Compute the loss of each record from the logits of a model of `transformers`.

    Guarantee: one value per record, which depends only on its own fields. If a record has many
    labeled tokens it is the mean over those, so that neither other records' lengths nor padding
    count. A causal model gets no mask: records are padded at their end, where none of their tokens
    looks. A different model gets a mask of four dimensions, so that the kernel depends only on
    shapes.

    Args:
        model: the model, whose class determines the task.

    Raises:
        UserError: its class has no known loss per record.
    """

    # The mean is that of `language_model_loss`, but its kernel is that of transformers' own loss:
    # the two round differently.

    def __init__(self, model: nn.Module) -> None:
        base: Any = model
        if hasattr(model, "get_base_model"):
            base = base.get_base_model()
        kind = str(getattr(base, "loss_type", None))
        if type(base).__name__.endswith("LMHeadModel"):  # GPT-2's, which has no such word
            kind = "ForCausalLM"
        config: Any = getattr(base, "config", None)
        if kind not in _TASKS or getattr(config, "is_encoder_decoder", False):
            raise UserError(
                f"model: must be a class that ends in {', '.join(_TASKS)}, got "
                f"{type(base).__name__}: or give loss=, a function of module and batch that "
                "returns one value per record"
            )
        if getattr(config, "output_router_logits", False):
            raise UserError(
                "model.config.output_router_logits: must be False, got True: a loss that balances "
                "routers mixes the records of a batch"
            )
        self.task = _TASKS[kind]
        self.problem = getattr(config, "problem_type", None)
        if kind == "ForCausalLM" and looks_ahead(base):
            raise UserError(
                f"model: must not see the tokens that follow, got {type(base).__name__}: it would "
                "be trained to repeat them; load it with config.is_decoder=True"
            )
        # Some models (MPT, XGLM) do not state it; causal ones build their masks themselves.
        known = [getattr(each, "is_causal", None) for each in base.modules()]
        self.causal = kind == "ForCausalLM" or True in known
        self.says_tokens = kind in ("ForCausalLM", "ForMaskedLM")
        self.numbers_positions = _trains_positions(base)

    def __call__(self, module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the losses (B,) of a batch of fields (B, ...)."""
        inputs = {n: each for n, each in batch.items() if n not in ("labels", "attention_mask")}
        mask = batch.get("attention_mask")
        if mask is not None and not self.causal:
            dtype: Any = getattr(module, "dtype", torch.float32)
            inputs["attention_mask"] = additive_mask(mask != 0, dtype)
        labels = batch["labels"]
        if self.numbers_positions:
            count, length = batch["input_ids"].shape
            places = torch.arange(length, device=batch["input_ids"].device)
            inputs["position_ids"] = places.expand(count, -1)
        logits = module(**inputs).logits.float()
        if self.task == "record":
            return self._of_record(logits, labels)
        if self.task == "next tokens":
            logits, labels = logits[:, :-1], labels[:, 1:]
        each = functional.cross_entropy(
            logits.transpose(1, 2), labels.long(), reduction="none", ignore_index=IGNORED
        )
        counted = (labels != IGNORED).sum(1).clamp(min=1)
        return each.sum(1) / counted

    def _of_record(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the losses (B,) of logits (B, C) and one label or row of labels per record."""
        several = labels.dim() > 1 and labels.shape[1] > 1
        if self.problem == "regression" or (self.problem is None and logits.shape[1] == 1):
            errors = functional.mse_loss(
                logits.view(labels.shape), labels.float(), reduction="none"
            )
            return errors.view(len(labels), -1).mean(1)
        if self.problem == "multi_label_classification" or several:
            wanted = labels.to(logits.dtype)
            found = functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
            return found.mean(1)
        return functional.cross_entropy(logits, labels.long().view(-1), reduction="none")


def _trains_positions(model: nn.Module) -> bool:
    """Return whether positions are looked up in a trained table, whose rows need the batch first.

    A table with a row for padding numbers its positions by the tokens, batch first already.
    """
    return "position_ids" in inspect.signature(model.forward).parameters and any(
        isinstance(each, nn.Embedding)
        and name.endswith(("position_embeddings", "wpe"))
        and each.weight.requires_grad
        and each.padding_idx is None
        for name, each in model.named_modules()
    )


class _RecordFields:
    """Collate one record to the fields that the private step reads, without its padding.

    collate: the Trainer's data collator. classes: labels are below it, or `IGNORED`; None if they
    are numbers. causal: no mask is kept. labeled: the loss reads labels.
    """

    def __init__(
        self, collate: Callable[[list[Any]], Any], vocabulary: int | None, classes: int | None,
        *, causal: bool, labeled: bool,
    ) -> None:  # fmt: skip
        self._collate, self._vocabulary, self._classes = collate, vocabulary, classes
        self._causal, self._labeled = causal, labeled

    def __call__(self, items: list[Any]) -> dict[str, Tensor]:
        renamed = [
            {("labels" if name in ("label", "label_ids") else name): v for name, v in each.items()
             if name in (*_FIELDS, "label", "label_ids") and v is not None}
            for each in items
        ]  # fmt: skip
        if any(map(_is_packed, items)):
            raise RecordError(*PACKED)
        if self._vocabulary is not None and not all(len(r.get("input_ids", ())) for r in renamed):
            raise RecordError(
                "must have at least one token in input_ids, has none",
                "tokenize the texts first, and drop empty ones",
            )
        made = dict(self._collate(renamed))
        if _is_packed({name: np.asarray(each)[0] for name, each in made.items() if name in _PACKS}):
            raise RecordError(*PACKED)
        found = {name: torch.as_tensor(made[name]) for name in _FIELDS if name in made}
        if "input_ids" in found:
            found = self._without_padding(found)
            _check_below(found["input_ids"], self._vocabulary, ignored=False)
        if self._labeled and "labels" not in found:
            raise RecordError(
                "must have labels, has none",
                "add them, or give data_collator=transformers.DataCollatorForLanguageModeling("
                "tokenizer, mlm=False)",
            )
        if "labels" in found and not found["labels"].is_floating_point():
            _check_below(found["labels"], self._classes, ignored=True)
        return found

    def _without_padding(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the fields of one record (1, length) without the positions its mask hides."""
        length = found["input_ids"].shape[1]
        mask = found.pop("attention_mask", torch.ones(1, length, dtype=torch.int64))
        seen = mask[0] != 0
        for name, each in found.items():
            if name in (*_TOKEN_FIELDS, "labels") and each.shape[1:] == (length,):
                found[name] = each[:, seen]
        if not self._causal:
            found["attention_mask"] = mask[:, seen]
        return found


def _check_below(values: Tensor, most: int | None, *, ignored: bool) -> None:
    """Raise RecordError for whole numbers beyond 0..most-1."""
    known = (values >= 0) | ((values == IGNORED) & ignored)
    if most is not None and not bool((known & (values < most)).all()):
        raise RecordError(
            f"must have tokens and labels below {most:,}, those of the model, has others",
            "use the tokenizer and the labels that the model was built for",
        )


_PACKS = ("position_ids", "attention_mask")


def _is_packed(record: Mapping[str, Any]) -> bool:
    """Return whether a row contains several documents, so that positions start again."""
    if len(np.atleast_1d(record.get("seq_lengths", 0))) > 1:  # as trl packs them
        return True
    places, mask = record.get("position_ids"), record.get("attention_mask")
    return places is not None and begin_again(
        torch.as_tensor(places)[None], None if mask is None else torch.as_tensor(mask)[None]
    )


_REPLACED = (
    "the Trainer's sampler and batches: a record joins each step with the plan's rate, drawn under "
    "the run key"
)
PUBLIC_EVALUATION = (
    "the Trainer's eval_dataset is public: no private record, and nothing made of one, is in it"
)


class _InputsAlone(Records):
    """Recognize records by their inputs without labels, and by their items."""

    def __init__(self, records: Records) -> None:
        self.name, self._records = records.name, records

    def __len__(self) -> int:
        return len(self._records)

    def batch(self, indices: np.ndarray | slice) -> Any:
        found = self._records.batch(indices)
        if not isinstance(found, dict):
            return found
        return {name: each for name, each in found.items() if name != "labels"}

    def targets(self, indices: np.ndarray | slice) -> Tensor:
        return self._records.targets(indices)

    def input_macs(self, key: bytes) -> Iterator[tuple[bytes, ...]]:
        both = zip(super().input_macs(key), self._records.input_macs(key), strict=True)
        return ((*inputs, *items) for inputs, items in both)


# --- adapters ---------------------------------------------------------------------------------


save_adapter = write_adapter


def load_adapter(base: Any, folder: str | Path) -> Any:
    """Load an adapter on the base that it was trained in.

    Guarantee: the base has the digest that the folder states, so the answers are those of the model
    that was released. Files of a release are checked against their checksums first.

    Args:
        base: of `transformers`, without adapters; it is changed in place, as `peft` does it.
        folder: written by `save_adapter`, or a release with an adapter.

    Returns:
        The `peft.PeftModel`, in evaluation mode.

    Raises:
        UserError: the folder contains no adapter, or the base is a different one.
    """
    where = Path(folder)
    if is_release(where):
        verify_checksums(where)
    if not (where / BASE).is_file():
        raise UserError(
            f"folder: must contain an adapter and its {BASE}, got {where}: `dpdist release` and "
            "save_adapter write such folders"
        )
    wanted, found = read_base(where), base_digest(base)
    if found != wanted.digest:
        kind = base_dtype(base)
        hint = "" if kind == (wanted.dtype or kind) else f", in {wanted.dtype} and not {kind}"
        raise UserError(
            f"base: must be {wanted.name} with digest {wanted.digest}, got one with {found}: load "
            f"the weights that the adapter was trained in{hint}"
        )
    peft = import_extra("peft", "hf", "load_adapter")
    adapted = peft.PeftModel.from_pretrained(base, str(where)).eval()
    for module in adapted.modules():  # so that `dpdist.preferences` refuses it as a reference
        setattr(module, TRAINED_BY, str(where))
    return adapted


# --- the trainer ------------------------------------------------------------------------------


_TRAINER: Any = transformers.Trainer
# A subclass must not override these: the private step does not call them.
_OVERRIDES = ("compute_loss", "training_step", "train")


def _refused_options(trainer: type, dataset: Any) -> Iterator[UserError]:
    """Yield errors for missing records and for methods that a subclass must not override."""
    if dataset is None:
        yield UserError(
            "train_dataset: must be the private records, got None: give a map-style data set"
        )
    for name in _OVERRIDES:
        if getattr(trainer, name) is not getattr(PrivateTrainer, name):
            yield UserError(
                f"{trainer.__name__}.{name}: must not be overridden: the private step does not "
                "call it; give loss= or callbacks"
            )


class PrivateTrainer(_TRAINER):  # type: ignore[misc]
    """Train a model of `transformers` privately, by the Trainer's arguments and callbacks.

    Guarantee: the run is (epsilon, delta)-differentially private as `training.guarantee` states,
    for everything that was released so far. A step is `dpdist.PrivateTraining.step`: a keyed
    Poisson sample, every record's gradient clipped, the sum on record before its noise is drawn.
    Only released values are logged: step, learning rate, the noisy sum's norm, epsilon and noisy
    scores, never a loss. `args.output_dir` is the run's folder; the same script continues it.

    Args:
        model: of `transformers`, or a `peft` model of one, in the mode in which it is trained.
        args: `transformers.TrainingArguments`. `per_device_train_batch_size` is the expected batch;
            arguments that the private step does not read raise an error.
        train_dataset: the PRIVATE records: a map-style data set of dicts of fields, as the Trainer
            takes it, or what `dpdist.as_records` returns.
        privacy: a `dpdist.Privacy`, or its fields as a dict.
        unit: name of the field of train_dataset that names a record's user, such as "customer_id";
            with privacy unit: user and max_records_per_user, whole users are protected.
        max_length: public number of tokens of a record; shorter ones are padded, longer ones cut.
            Required if a record is tokens.
        loss: a function of module and batch that returns one value per record; None: the loss of
            the model's class, as the mean over a record's own tokens (`ModelLoss`).
        eval_dataset: PUBLIC records for `evaluate`; requires `public_eval`.
        public_eval: declare that eval_dataset, and what `evaluate` and `predict` are called with,
            is public, which the card lists as an assumption. A record that is also in train_dataset
            raises an error.
        data_collator, compute_metrics, callbacks, optimizers: as the Trainer takes them; a
            collator gets one record at a time.
        processing_class: the tokenizer of the records' tokens. `dpdist release` writes it,
            with its chat template, for `generate` and `predict`.
        training_options: further options of `PrivateTraining`: resources, factory, vmap,
            certify, reproducible, class_sampling, class_counts, importance_weights.

    Attributes:
        training: the `dpdist.PrivateTraining`, with `score(...)`, `guarantee` and `run`.

    Raises:
        UserError: one line for each wrong argument, with its rule and what to do; nothing was
            released.
        TypeError: an argument is not listed here.

    Source:
        Abadi et al., CCS 2016 (DP-SGD).

    Example:
        >>> import tempfile, torch, transformers
        >>> from dpdist.integrations.transformers import PrivateTrainer
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16)
        >>> texts = [{"input_ids": [n % 20, 1, 2], "labels": [n % 20, 1, 2]} for n in range(100)]
        >>> trainer = PrivateTrainer(
        ...     transformers.LlamaForCausalLM(config),
        ...     transformers.TrainingArguments(
        ...         tempfile.mkdtemp() + "/run", per_device_train_batch_size=10, max_steps=2,
        ...         disable_tqdm=True, use_cpu=True),
        ...     train_dataset=texts, max_length=4,
        ...     privacy={"noise_multiplier": 1.0, "delta": 1e-3})
        >>> done = trainer.train()
        >>> done.global_step, done.metrics["epsilon"] == trainer.training.guarantee.epsilon
        (2, True)
    """

    control: Any

    def __init__(
        self,
        model: nn.Module,
        args: Any,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        privacy: PrivacyRecipe | Mapping[str, Any],
        max_length: int | None = None,
        unit: str | None = None,
        loss: Callable[[nn.Module, Any], Tensor] | None = None,
        public_eval: bool = False,
        compute_metrics: Any = None,
        preprocess_logits_for_metrics: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        training_options: Mapping[str, Any] | None = None,
    ) -> None:
        errors = [
            *_refused_model_and_schedule(model, optimizers[1]),
            *_refused_options(type(self), train_dataset),
            *_refused_callbacks(callbacks),
            *_refused_arguments(args),
        ]
        if errors:
            raise UserError("\n".join(map(str, errors)))
        _tell_ignored(args)
        if _checkpoints(args):
            _enable_checkpoints(model, args)
        self._public_eval, self._max_length = public_eval, max_length
        self._best: dict[str, Tensor] | None = None  # weights of the best public evaluation
        self._apart: list[Any] = []  # public data sets without private records
        if eval_dataset is not None:
            self._check_declared("eval_dataset")
        super().__init__(
            model, args, data_collator, train_dataset, eval_dataset, processing_class,
            compute_metrics=compute_metrics, callbacks=None if callbacks is None else [*callbacks],
            optimizers=optimizers, preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )  # fmt: skip
        self._loss = loss or ModelLoss(model)
        # Without rates, labels stay among the fields: a run is continued with the same records.
        target = "labels" if (training_options or {}).get("class_sampling") else None
        self._records = self._records_of(train_dataset, "train_dataset", target, unit)
        if public_eval:
            self._records.assumed = (*self._records.assumed, PUBLIC_EVALUATION)
        if self._records.tokenization is None:
            self._records.tokenization = tokenization_of(processing_class, self._records)
        self.training = self._private_training(privacy, training_options or {})
        if eval_dataset is not None:
            self._check_apart(eval_dataset, "eval_dataset")

    # --- what goes into the private training

    def _records_of(
        self, dataset: Any, name: str, target: str | None = None, unit: str | None = None
    ) -> Records:
        """Return the records of a data set, each collated separately. Raises UserError."""
        if isinstance(dataset, Records):
            return dataset
        embedding = getattr(self.model, "get_input_embeddings", lambda: None)()
        vocabulary = getattr(embedding, "num_embeddings", None)
        tokens = not isinstance(self._loss, ModelLoss) or self._loss.task != "record"
        config: Any = getattr(self.model, "config", None)
        classes = getattr(config, "num_labels", None)
        if isinstance(self._loss, ModelLoss) and self._loss.says_tokens:
            classes = vocabulary
        elif not isinstance(self._loss, ModelLoss):
            classes = None
        if vocabulary is not None and self._max_length is None:
            raise UserError(
                "max_length: must be the public number of tokens of a record, got None: shorter "
                "ones are padded, longer ones cut"
            )
        padding = getattr(self.processing_class, "pad_token_id", None)
        if padding is None:
            padding = getattr(config, "pad_token_id", None)
        fields = [*_TOKEN_FIELDS, *(["labels"] if tokens else [])]
        options = Options(
            name,
            target=target,
            unit=unit,
            pad_to=None if self._max_length is None else dict.fromkeys(fields, self._max_length),
            pad_value=padding if isinstance(padding, int) else 0,
            ranges={
                "input_ids": vocabulary or 2, "labels": classes or 2, "attention_mask": 2,
                "token_type_ids": getattr(config, "type_vocab_size", 2),
            },
        )  # fmt: skip
        collator = self.data_collator
        pads = isinstance(collator, transformers.DataCollatorWithPadding)
        if pads and getattr(collator.tokenizer, "pad_token", None) is None:  # one record needs none
            collator = transformers.default_data_collator
        collate = _RecordFields(
            collator, vocabulary, classes, causal=getattr(self._loss, "causal", False),
            labeled=isinstance(self._loss, ModelLoss) and name == "train_dataset",
        )  # fmt: skip
        found = ItemRecords(
            dataset, options, collate=collate, plain=without_transforms(dataset),
            replaced=(_REPLACED,),
        )  # fmt: skip
        found.unit_name = unit or ""
        return found

    def _private_training(
        self, privacy: PrivacyRecipe | Mapping[str, Any], options: Mapping[str, Any]
    ) -> PrivateTraining:
        """Return the private training of this model by the Trainer's optimizer and schedule."""
        args, batch = self.args, self.args.per_device_train_batch_size
        epochs = int(args.num_train_epochs)
        steps = args.max_steps if args.max_steps > 0 else epochs * len(self._records) // batch
        self.create_optimizer_and_scheduler(num_training_steps=max(1, steps))
        return PrivateTraining(
            self.model, self.optimizer, self._records, loss=self._loss, privacy=privacy,
            batch_size=batch, steps=max(1, steps), folder=args.output_dir,
            state=[self.lr_scheduler], **{"autocast": bool(args.bf16), **options},
        )  # fmt: skip

    # --- public records

    def _check_declared(self, name: str) -> None:
        """Raise UserError unless the records of an evaluation are declared public."""
        if not self._public_eval:
            raise UserError(
                f"{name}: must be public records, declared by public_eval=True: metrics of "
                "private records would be logged without noise; use "
                "trainer.training.score(...) for held-out private records"
            )

    def _check_apart(self, dataset: Any, name: str) -> None:
        """Raise UserError if a private record is among public ones."""
        parts = dataset if isinstance(dataset, dict) else {"": dataset}
        for key, each in parts.items():
            at = f"{name}[{key!r}]" if key else name
            if any(each is known for known in self._apart):
                continue
            public = _InputsAlone(self._records_of(each, at))
            if common := count_common(public, _InputsAlone(self._records)):
                raise UserError(
                    f"{at}: must share no record with train_dataset, got {common:,} in common: "
                    "metrics on private records would be logged without noise"
                )
            self._apart.append(each)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return the model's metrics on PUBLIC records, as the Trainer does.

        Raises:
            UserError: they are not declared public, or one of them is in train_dataset.
        """
        self._check_declared("eval_dataset")
        given = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(given, str):  # names a part of the trainer's own data sets
            given = self.eval_dataset[given]
        self._check_apart(given, "eval_dataset")
        with kept_modes(self.model):
            found: dict[str, float] = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        return found

    def predict(
        self, test_dataset: Any, ignore_keys: Any = None, metric_key_prefix: str = "test"
    ) -> Any:
        """Return the model's predictions for PUBLIC records, as the Trainer does.

        Raises:
            UserError: they are not declared public, or one of them is in train_dataset.
        """
        self._check_declared("test_dataset")
        self._check_apart(test_dataset, "test_dataset")
        with kept_modes(self.model):
            return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    # --- the loop

    @property
    def guarantee(self) -> Guarantee:
        """Return the guarantee of everything that was released so far."""
        return self.training.guarantee

    def train(
        self,
        resume_from_checkpoint: Any = None,
        trial: Any = None,
        ignore_keys_for_eval: Any = None,
    ) -> Any:
        """Take the remaining private steps, with the callbacks' events around them.

        Args:
            resume_from_checkpoint: None or True; the run continues from its own newest checkpoint.
            trial: None.
            ignore_keys_for_eval: as the Trainer takes it.

        Returns:
            `transformers.trainer_utils.TrainOutput`: the number of steps, None instead of a
            training loss, which would be private, and metrics: epsilon and delta of everything
            released, train_runtime, and steps and expected records per second.

        Raises:
            UserError: a checkpoint is given, a trial of a search, or as `PrivateTraining.step`.
        """
        if resume_from_checkpoint not in (None, True, False):
            raise UserError(
                f"resume_from_checkpoint: must be left out, got {resume_from_checkpoint!r}: "
                "the run in args.output_dir continues from its own checkpoints"
            )
        if trial is not None:
            raise UserError("trial: must be None: a search costs privacy; use dpdist.tune")
        self._begin()
        began, first = time.time(), self._done
        if self.args.eval_on_start and self.training.remaining_steps:
            self._evaluate(None, ignore_keys_for_eval)
        self._control("on_train_begin")
        with self.training.finishing_later():
            while self.training.remaining_steps and not self.control.should_training_stop:
                self._one_step(ignore_keys_for_eval)
            if self._best is not None:
                self.training.put_back(self._best)
        stops = any(
            isinstance(each, transformers.EarlyStoppingCallback)
            for each in self.callback_handler.callbacks
        )
        if self._done and (stops or not self.training.remaining_steps):
            self.training.finish()
        self._control("on_train_end")
        self.is_in_train = False
        guarantee, steps = self.training.guarantee, self._done - first
        found = {"epsilon": guarantee.epsilon, "delta": guarantee.delta}
        expected = steps * self.args.per_device_train_batch_size
        found |= transformers.trainer_utils.speed_metrics("train", began, expected, steps)
        output = transformers.trainer_utils.TrainOutput
        return output(self.state.global_step, None, found)

    def _begin(self) -> None:
        """Set the state that callbacks read, from public numbers of the plan."""
        plan, handler = self.training.plan, self.callback_handler
        rate = self.args.per_device_train_batch_size / len(self.training.records)
        self._per_epoch = max(1, round(1 / rate))
        self.is_in_train = True
        self.state.max_steps, self.state.global_step = plan.steps, self._done
        self.state.num_train_epochs = -(-plan.steps // self._per_epoch)
        self.state.epoch = self._done / self._per_epoch
        self.state.compute_steps(self.args, plan.steps)
        handler.model, handler.optimizer = self.model, self.optimizer
        handler.lr_scheduler, handler.train_dataloader = self.lr_scheduler, None

    @property
    def _done(self) -> int:
        return self.training.steps_taken

    def _control(self, event: str) -> None:
        """Tell the callbacks of an event."""
        handler = getattr(self.callback_handler, event)
        self.control = handler(self.args, self.state, self.control)

    def _one_step(self, ignore_keys: Any) -> None:
        """Take one private step, and tell the callbacks what it released."""
        if self._done % self._per_epoch == 0:
            self._control("on_epoch_begin")
        self._control("on_step_begin")
        report = self.training.step()
        self.lr_scheduler.step()
        self.state.global_step = report.step + 1
        self.state.epoch = self.state.global_step / self._per_epoch
        self._control("on_step_end")
        self._tell(report, ignore_keys)
        if self.state.global_step % self._per_epoch == 0 or not self.training.remaining_steps:
            self._control("on_epoch_end")
            self._tell(report, ignore_keys)

    def _tell(self, report: StepReport, ignore_keys: Any) -> None:
        """Log released values and evaluate public records, if the callbacks ask for it."""
        if self.control.should_log and self._globalstep_last_logged < self.state.global_step:
            self._globalstep_last_logged = self.state.global_step
            names = ("learning_rate", "noisy_norm", "epsilon", "score")
            told = {name: getattr(report, name) for name in names}
            self.log({name: value for name, value in told.items() if value is not None})
        if self.control.should_evaluate:
            metrics = self._evaluate(None, ignore_keys)
            if self._determine_best_metric(metrics, None) and self.args.load_best_model_at_end:
                self.state.best_global_step = self.state.global_step
                trained = self.training.model.named_parameters()
                self._best = {n: p.detach().clone() for n, p in trained if p.requires_grad}
        self.control.should_save = False

    _globalstep_last_logged = 0

    def add_callback(self, callback: Any) -> None:
        """Add a callback of your own. Raises UserError for those that report or choose."""
        for error in _refused_callbacks([callback]):
            raise error
        super().add_callback(callback)

    def save_merged(self, folder: str | Path, *, not_private: bool = False) -> Path:
        """Write the whole model with its adapter merged into the base, and the privacy card.

        Guarantee: the adapter is the one that the run released, as in `save_adapter`.
        `from_pretrained` of the base's class loads the folder.

        Args:
            folder: a new folder.
            not_private: as in `save_adapter`.

        Returns:
            The folder.

        Raises:
            UserError: the folder exists, or as `save_adapter`.
        """
        target = Path(folder)
        if target.exists():
            raise UserError(f"folder: must be new, got {target}: name a different one")
        with tempfile.TemporaryDirectory() as place:
            adapter = self.save_adapter(Path(place) / "adapter", not_private=not_private)
            merged: Any = copy.deepcopy(self.model).merge_and_unload()
            merged.save_pretrained(str(target))
            for name in (PRIVACY_CARD, PRIVACY_CARD_TEXT):
                shutil.copy(adapter / name, target / name)
        if hasattr(self.processing_class, "save_pretrained"):
            self.processing_class.save_pretrained(str(target))
        return target

    def save_adapter(
        self, folder: str | Path, *, base_name: str | None = None, not_private: bool = False
    ) -> Path:
        """Write the trained adapter with its card, as `peft` loads it (`save_adapter`)."""
        run = self.training.run
        return save_adapter(self.model, run, folder, base_name=base_name, not_private=not_private)
