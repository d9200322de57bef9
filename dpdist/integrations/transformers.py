"""Private training by the Trainer of Hugging Face's `transformers`, whose step is dpdist's own.

`PrivateTrainer` takes a model, a data set, a collator, arguments and callbacks as the Trainer does
and hands them to `dpdist.PrivateTraining`. No line of the Trainer's own training loop is run: its
sampler, its loss over a batch, its optimizer step, its checkpoints and its log of losses are
replaced, and an argument that only they would read is refused. Which arguments are read is a list
below, so that what a later version of `transformers` adds is refused until somebody has read it.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import shutil
import tempfile
import time
import warnings
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
from dpdist.data.adapters import (
    IGNORED,
    ItemRecords,
    Options,
    RecordError,
    without_transforms,
)
from dpdist.data.documents import PACKED, begin_again, tokenization_of
from dpdist.data.protocol import Records, count_common
from dpdist.gradients.objective import additive_mask, looks_ahead
from dpdist.integrations import raise_all, refusal, refuse
from dpdist.models import TRAINED_BY, base_digest, base_dtype
from dpdist.privacy.card import PRIVACY_CARD, PRIVACY_CARD_TEXT
from dpdist.privacy.guarantee import Guarantee
from dpdist.private_training import PrivateTraining, StepReport
from dpdist.publishing import write_adapter
from dpdist.release.description import read_base
from dpdist.release.files import BASE, is_release, verify_checksums
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
# Of the Trainer's own loop, loader and checkpoints: without effect here, and named in one notice.
_WITHOUT_EFFECT = {
    "dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_persistent_workers",
    "dataloader_drop_last", "save_steps", "save_strategy", "save_total_limit", "save_only_model",
    "save_on_each_node", "logging_nan_inf_filter", "overwrite_output_dir",
    "restore_callback_states_from_checkpoint", "eval_accumulation_steps",
}  # fmt: skip
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor")
_PLATEAUS = ("reduce_lr_on_plateau", "greedy")
# Arguments that people set, and what to do instead; all others have one line in common.
_MICRO_BATCH = (
    "per_device_train_batch_size is the whole expected batch of a step; split its passes by "
    'training_options={"resources": {"micro_batch": ...}}'
)
_INSTEAD = {
    "auto_find_batch_size": _MICRO_BATCH,
    "gradient_accumulation_steps": _MICRO_BATCH,
    "max_grad_norm": "each record's gradient is clipped, never the batch's; give privacy.clip_norm",
    "label_smoothing_factor": "the Trainer smooths a loss over the batch; give loss=, a function "
    "of module and batch that returns one value a record",
    "fp16": "a scaler that follows overflows would tell of private records; leave it out",
    "report_to": "trackers may log losses and gradients of private records; leave it out, and send "
    "what on_log of a callback of your own receives, which is released values",
}
_UNREAD = "the private step does not read it, and no one has said what it would mean; leave it out"


def _word(value: Any) -> Any:
    """Return a value as the user wrote it: the text of an enumeration's member."""
    return repr(getattr(value, "value", value))


def _refused_arguments(args: Any) -> Iterator[UserError]:
    """Yield why arguments are refused: those that are read first, then those that are not."""
    kind = transformers.TrainingArguments
    if type(args) is not kind:
        yield refusal(
            "args", "be a transformers.TrainingArguments", type(args).__name__,
            "arguments of other trainers are not read here",
        )  # fmt: skip
        return
    if args.lr_scheduler_type in _PLATEAUS:
        yield refusal(
            "args.lr_scheduler_type", "follow the number of the step alone",
            _word(args.lr_scheduler_type), "take linear, cosine or constant",
        )  # fmt: skip
    usual = kind(output_dir=args.output_dir)
    if args.optim not in _OPTIMIZERS:
        yield refusal(
            "args.optim", f"be one of {', '.join(_OPTIMIZERS)}", _word(args.optim),
            "or give a torch optimizer by optimizers=(optimizer, None)",
        )  # fmt: skip
    if not (args.bf16 or args.fp16) and getattr(args, "mixed_precision", "no") not in ("no", None):
        yield refusal(
            "args.mixed_precision", "be 'no'", _word(args.mixed_precision), _INSTEAD["fp16"]
        )
    if args.per_device_train_batch_size < 1:
        yield refusal(
            "args.per_device_train_batch_size", "be >= 1", args.per_device_train_batch_size,
            "it is the whole expected batch of a step",
        )  # fmt: skip
    if args.max_steps <= 0 and not float(args.num_train_epochs).is_integer():
        yield refusal(
            "args.num_train_epochs", "be a whole number", args.num_train_epochs, "or give max_steps"
        )
    if args.world_size > 1 or args.n_gpu > 1:
        yield refusal(
            "args.world_size", "be 1, on one device", f"{args.world_size} on {args.n_gpu} devices",
            "take dpdist.PrivateTraining for several workers",
        )  # fmt: skip
    yield from _refused_checkpoints(args)
    for name in (each.name for each in dataclasses.fields(kind)):
        value, default = getattr(args, name), getattr(usual, name)
        taken = name in _READ or name in _WITHOUT_EFFECT
        # The Trainer sets these two itself, beside an argument that is refused or read.
        unset = name == "local_rank" or (name == "report_to" and not value)
        if not taken and value != default and not unset:
            then = _INSTEAD.get(name, _UNREAD)
            yield refusal(f"args.{name}", f"be left at {_word(default)}", _word(value), then)


_NOT_REENTRANT = (
    "have use_reentrant=False", "reentrant checkpoints",
    "the parameters within would learn nothing",
)  # fmt: skip


def _checkpoints(args: Any) -> bool:
    """Return whether activations are computed again; `gradient_` is the older name of it."""
    return bool(getattr(args, "activation_checkpointing", args.gradient_checkpointing))


def _checkpoint_options(args: Any) -> dict[str, Any]:
    older = args.gradient_checkpointing_kwargs
    return dict(getattr(args, "activation_checkpointing_kwargs", older) or {})


def _refused_checkpoints(args: Any) -> Iterator[UserError]:
    """Yield why options of activation checkpoints are refused."""
    given = _checkpoint_options(args) if _checkpoints(args) else {}
    for name in sorted(given.keys() - {"use_reentrant", "every_n_layers"}):
        yield refusal(
            "args.activation_checkpointing_kwargs", "be use_reentrant and every_n_layers",
            repr(name), "leave it out",
        )  # fmt: skip
    if given.get("use_reentrant", False) is not False:
        yield refusal("args.activation_checkpointing_kwargs", *_NOT_REENTRANT)


def _enable_checkpoints(model: nn.Module, args: Any) -> None:
    """Let a model compute its activations again, as the Trainer does, with one kind of passes."""
    options = {"use_reentrant": False, **_checkpoint_options(args)}
    layers = {name: options.pop(name) for name in ("every_n_layers",) if name in options}
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        if enable := getattr(model, f"{name}_enable", None):
            enable(**{f"{name}_kwargs": options}, **layers)
            return
    refuse("args.activation_checkpointing", "be False", True,
           f"a {type(model).__name__} has no such checkpoints")  # fmt: skip


def _tell_ignored(args: Any) -> None:
    """Warn once of arguments that have no effect here."""
    usual = transformers.TrainingArguments(output_dir=args.output_dir)
    given = [n for n in sorted(_WITHOUT_EFFECT) if hasattr(usual, n)
             and getattr(args, n) != getattr(usual, n)]  # fmt: skip
    if given:
        warnings.warn(
            f"args: without effect in a private training: {', '.join(given)} (the plan draws the "
            "records, and the run keeps checkpoints of its own, every "
            "resources.checkpoint_seconds)",
            stacklevel=3,
        )


def _refused_callbacks(callbacks: Sequence[Any] | None) -> Iterator[UserError]:
    """Yield why callbacks of transformers that report are refused."""
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
            yield refusal("callbacks", "be yours", kind.__name__, _INSTEAD["report_to"])


def _refused_model_and_schedule(model: Any, schedule: Any) -> Iterator[UserError]:
    """Yield why reentrant checkpoints, or a schedule that follows losses, are refused."""
    for each in model.modules():
        if getattr(each, "gradient_checkpointing", False) is True:
            run: Any = getattr(each, "_gradient_checkpointing_func", None)
            if getattr(run, "keywords", {}).get("use_reentrant") is not False:
                yield refusal("model.gradient_checkpointing", *_NOT_REENTRANT)
                break
    if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
        yield refusal(
            "optimizers", "follow the number of the step alone", type(schedule).__name__,
            "take another schedule",
        )  # fmt: skip


# What a subclass may not change, since the private step would not call it, or must not.
_OVERRIDES = ("compute_loss", "training_step", "train")


# --- records and losses -----------------------------------------------------------------------


_TASKS = {  # the loss of a class of transformers: what a record's targets speak of
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

    Guarantee: one value a record, which depends on its own fields alone. Where a record has many
    labeled tokens it is the mean over those, so that neither other records' lengths nor padding
    count. A causal model gets no mask: records are filled up behind their end, where none of their
    tokens looks. Another model gets one of four dimensions, so that which kernel runs depends on
    shapes alone.

    Args:
        model: the model, whose class says the task.

    Raises:
        UserError: no loss a record is known for its class.
    """

    # The mean is `language_model_loss`'s. Its kernel is another, the one of transformers' own loss:
    # the two round differently, and runs that were begun by either go on with their bits.

    def __init__(self, model: nn.Module) -> None:
        base: Any = model
        if hasattr(model, "get_base_model"):
            base = base.get_base_model()
        kind = str(getattr(base, "loss_type", None))
        if type(base).__name__.endswith("LMHeadModel"):  # GPT-2's, which has no such word
            kind = "ForCausalLM"
        config: Any = getattr(base, "config", None)
        if kind not in _TASKS or getattr(config, "is_encoder_decoder", False):
            refuse(
                "model", f"be a class that ends in {', '.join(_TASKS)}", type(base).__name__,
                "or give loss=, a function of module and batch that returns one value a record",
            )  # fmt: skip
        if getattr(config, "output_router_logits", False):
            refuse(
                "model.config.output_router_logits", "be False", True,
                "a loss that balances routers mixes the records of a batch",
            )  # fmt: skip
        self.task = _TASKS[kind]
        self.problem = getattr(config, "problem_type", None)
        if kind == "ForCausalLM" and looks_ahead(base):
            refuse(
                "model", "not see the tokens that follow", type(base).__name__,
                "it would be trained to repeat them; load it with config.is_decoder=True",
            )  # fmt: skip
        # Some models (MPT, XGLM) say nothing of their masks, which causal ones make themselves.
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
        """Return the losses (B,) of logits (B, C) and one label or one row of labels a record."""
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
    tables = [
        each for name, each in model.named_modules()
        if isinstance(each, nn.Embedding) and name.endswith(("position_embeddings", "wpe"))
    ]  # fmt: skip
    takes = "position_ids" in inspect.signature(model.forward).parameters
    return takes and any(t.weight.requires_grad and t.padding_idx is None for t in tables)


class _RecordFields:
    """Collate one record to the fields that the private step reads, without its padding.

    collate: the Trainer's data collator. classes: labels are below it, or `IGNORED`; None where
    they are numbers. causal: no mask is kept. labeled: the loss reads labels.
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
                "must have input_ids with a token at least, has none",
                "cut texts into tokens first, and drop what is empty",
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
        """Return the fields of one record (1, length) without the places that its mask hides."""
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
            "take the tokenizer and the labels that the model was made for",
        )


_PACKS = ("position_ids", "attention_mask")


def _is_packed(record: Mapping[str, Any]) -> bool:
    """Return whether a row holds several documents, whose positions begin again."""
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
    """Recognize records by their inputs, whatever their labels, and by their items."""

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
    """Load an adapter on the base that it was trained in, and on no other one.

    Guarantee: the base has the digest that the folder states, so the answers are those of the model
    that was released. Files of a release are held against their sums first.

    Args:
        base: of `transformers`, without adapters; it is changed in place, as `peft` does it.
        folder: written by `save_adapter`, or a release that holds an adapter.

    Returns:
        The `peft.PeftModel`, in evaluation mode.

    Raises:
        UserError: the folder holds no adapter, or the base is another one.
    """
    where = Path(folder)
    if is_release(where):
        verify_checksums(where)
    if not (where / BASE).is_file():
        refuse(
            "folder", f"hold an adapter and its {BASE}", where,
            "`dpdist release` and save_adapter write such folders",
        )  # fmt: skip
    wanted, found = read_base(where), base_digest(base)
    if found != wanted.digest:
        kind = base_dtype(base)
        hint = "" if kind == (wanted.dtype or kind) else f", in {wanted.dtype} and not {kind}"
        refuse(
            "base", f"be {wanted.name} with digest {wanted.digest}", f"one with {found}",
            f"load the weights that the adapter was trained in{hint}",
        )  # fmt: skip
    peft = import_extra("peft", "hf", "load_adapter")
    adapted = peft.PeftModel.from_pretrained(base, str(where)).eval()
    for module in adapted.modules():  # `dpdist.preferences` takes none of them as a reference
        setattr(module, TRAINED_BY, str(where))
    return adapted


# --- the trainer ------------------------------------------------------------------------------


_TRAINER: Any = transformers.Trainer
_NOT_TAKEN = {
    "model_init": "models that are made anew are trials of a search, which costs privacy; take "
    "dpdist.tune",
    "compute_loss_func": "it is divided by num_items_in_batch of other records; give loss=, a "
    "function of module and batch that returns one value a record",
    "optimizer_cls_and_kwargs": "give optimizers=(optimizer, scheduler)",
}


def _refused_options(trainer: type, others: Mapping[str, Any], dataset: Any) -> Iterator[UserError]:
    """Yield why a trainer's own overrides, unknown arguments or missing records are refused."""
    if dataset is None:
        yield refusal("train_dataset", "be the private records", None, "give a map-style data set")
    for name in _OVERRIDES:
        if getattr(trainer, name) is not getattr(PrivateTrainer, name):
            yield refusal(f"{trainer.__name__}.{name}", "be left out", "one of its own",
                          "the private step does not call it; give loss= or callbacks")  # fmt: skip
    for name in others:
        then = _NOT_TAKEN.get(name, "it is not read here")
        yield refusal(name, "be left out", "a value", then)


class PrivateTrainer(_TRAINER):  # type: ignore[misc]
    """Train a model of `transformers` privately, by the Trainer's arguments and callbacks.

    Guarantee: the run is (epsilon, delta)-differentially private as `training.guarantee` states,
    for everything that was released so far. A step is `dpdist.PrivateTraining.step`: a keyed
    Poisson sample, every record's gradient clipped, the sum on record before its noise is drawn.
    What is logged are released values: step, learning rate, the noisy sum's norm, epsilon and paid
    scores, never a loss. `args.output_dir` is the run's folder; the same script continues it.

    Args:
        model: of `transformers`, or a `peft` model of one, in the mode in which it is trained.
        args: `transformers.TrainingArguments`. `per_device_train_batch_size` is the expected batch;
            arguments that the private step does not read are refused.
        train_dataset: the PRIVATE records: a map-style data set of dicts of fields, as the Trainer
            takes it, or what `dpdist.as_records` returns.
        privacy: a `dpdist.Privacy`, or its fields as a dict.
        unit: name of the field of train_dataset that says whose a record is, such as
            "customer_id"; with privacy unit: user and max_records_per_user, whole units are
            protected.
        max_length: public number of tokens of a record; shorter ones are filled up, longer ones
            cut. Needed where a record is tokens.
        loss: a function of module and batch that returns one value a record; None: the loss of the
            model's class, as the mean over a record's own tokens (`ModelLoss`).
        eval_dataset: PUBLIC records for `evaluate`; with `public_eval` alone.
        public_eval: say that eval_dataset, and what `evaluate` and `predict` are called with, is
            public, which the card repeats as an assumption. A record that is in train_dataset too
            is refused.
        data_collator, compute_metrics, callbacks, optimizers: as the Trainer takes them; a
            collator gets one record at a time.
        processing_class: the tokenizer that made the records' tokens. `dpdist release` writes it,
            with its chat template, for `generate` and `predict`.
        training_options: further options of `PrivateTraining`: resources, factory, vmap,
            certify, reproducible, class_sampling, class_counts, importance_weights.

    Attributes:
        training: the `dpdist.PrivateTraining`, with `score(...)`, `guarantee` and `run`.

    Raises:
        UserError: one line for each wrong argument, with its rule and what to do; nothing was
            released.

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
        **others: Any,
    ) -> None:
        raise_all(
            [
                *_refused_model_and_schedule(model, optimizers[1]),
                *_refused_options(type(self), others, train_dataset),
                *_refused_callbacks(callbacks),
                *_refused_arguments(args),
            ]
        )
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
        # Runs without rates keep the records that they were begun with: labels among the fields.
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
        """Return the records of a data set, each collated alone. Raises UserError."""
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
            refuse(
                "max_length", "be the public number of tokens of a record", None,
                "shorter ones are filled up, longer ones cut",
            )  # fmt: skip
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
        """Raise UserError where nobody said that the records of an evaluation are public."""
        if not self._public_eval:
            refuse(
                name, "be public records, said by public_eval=True", "no such word",
                "metrics of private records would be logged without noise; take "
                "trainer.training.score(...) for held-out private records",
            )  # fmt: skip

    def _check_apart(self, dataset: Any, name: str) -> None:
        """Raise UserError where a private record is among public ones."""
        parts = dataset if isinstance(dataset, dict) else {"": dataset}
        for key, each in parts.items():
            at = f"{name}[{key!r}]" if key else name
            if any(each is known for known in self._apart):
                continue
            public = _InputsAlone(self._records_of(each, at))
            if common := count_common(public, _InputsAlone(self._records)):
                refuse(
                    at, "share no record with train_dataset", f"{common:,} in common",
                    "metrics on private records would be logged without noise",
                )  # fmt: skip
            self._apart.append(each)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Measure the model on PUBLIC records, as the Trainer does; its mode stays as it was.

        Raises:
            UserError: nobody said that they are public, or one of them is in train_dataset.
        """
        self._check_declared("eval_dataset")
        given = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(given, str):  # names a part of the trainer's own, which a script may replace
            given = self.eval_dataset[given]
        self._check_apart(given, "eval_dataset")
        with kept_modes(self.model):
            found: dict[str, float] = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        return found

    def predict(
        self, test_dataset: Any, ignore_keys: Any = None, metric_key_prefix: str = "test"
    ) -> Any:
        """Answer PUBLIC records, as the Trainer does; its mode stays as it was.

        Raises:
            UserError: nobody said that they are public, or one of them is in train_dataset.
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
        """Take the private steps that are left, with the callbacks' events around them.

        Args:
            resume_from_checkpoint: None or True; the run continues from its own newest checkpoint.
            trial: None.
            ignore_keys_for_eval: as the Trainer takes it.

        Returns:
            `transformers.trainer_utils.TrainOutput`: the number of steps, None in place of a
            training loss, which would be private, and metrics: epsilon and delta of all that was
            released, train_runtime, and steps and expected records per second.

        Raises:
            UserError: a checkpoint of another trainer, a trial of a search, or as
                `PrivateTraining.step`.
        """
        if resume_from_checkpoint not in (None, True, False):
            refuse(
                "resume_from_checkpoint", "be left out", repr(resume_from_checkpoint),
                "the run in args.output_dir continues from its own checkpoints",
            )  # fmt: skip
        if trial is not None:
            refuse("trial", "be None", "a trial", _NOT_TAKEN["model_init"])
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
        """Set the state that callbacks read: public numbers of the plan alone."""
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
        """Log released values and evaluate public records, where the callbacks ask for it."""
        if self.control.should_log and self._globalstep_last_logged < self.state.global_step:
            self._globalstep_last_logged = self.state.global_step
            told = {"learning_rate": report.learning_rate, "noisy_norm": report.noisy_norm,
                    "epsilon": report.epsilon}  # fmt: skip
            self.log(told if report.score is None else {**told, "score": report.score})
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
        raise_all(_refused_callbacks([callback]))
        super().add_callback(callback)

    def save_merged(self, folder: str | Path, *, not_private: bool = False) -> Path:
        """Write the whole model with its adapter merged into the base, and the privacy card.

        Guarantee: the adapter is the one that the run released, as in `save_adapter`. The folder is
        what `from_pretrained` of the base's class loads.

        Args:
            folder: a new folder.
            not_private: as in `save_adapter`.

        Returns:
            The folder.

        Raises:
            UserError: the folder is there, or as `save_adapter`.
        """
        target = Path(folder)
        if target.exists():
            refuse("folder", "be new", target, "name another one")
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
