"""Faults in the trainers of other libraries that take private steps."""

from __future__ import annotations

from mutants.fault import Fault, group

FAULTS: list[Fault] = [
    *group(
        "dpdist/integrations/transformers.py",
        "integrations/test_private_trainer",
        (
            '        self._not_private("_inner_training_loop")\n',
            "        super()._inner_training_loop(*given, **named)\n",
            "the Trainer's own loop and optimizer step, which clip no record, can be reached",
        ),
        (
            "        if name not in _READ and value != default",
            "        if name in _INSTEAD and value != default",
            "an argument of the Trainer that nobody has read passes",
        ),
        (
            "        if self._records.tokenization is None:\n",
            "        if True:\n",
            "documents are released with another tokenizer than the one that made them",
        ),
        (
            "    if args.lr_scheduler_type in _PLATEAUS:\n",
            "    if False:\n",
            "a schedule follows losses",
        ),
        (
            "            if common := count_common(self._inputs_of(each, at), self._private_inputs):\n",
            "            if common := 0:\n",
            "private records are evaluated and the metric is logged",
        ),
        (
            '        self.causal = kind == "ForCausalLM" or True in known\n',
            "        self.causal = True in known\n",
            "a model learns to repeat the token that it should foresee",
        ),
        (
            '        self._check_apart(given, "eval_dataset")\n',
            "        if given is not self.eval_dataset:\n"
            '            self._check_apart(given, "eval_dataset")\n',
            "an eval_dataset that a script put into the trainer later is not looked at",
        ),
        (
            '        return {name: each for name, each in found.items() if name != "labels"}\n',
            "        return found\n",
            "a private record with another label is evaluated",
        ),
        (
            '        self._check_declared("eval_dataset")\n        given',
            "        given",
            "records that nobody called public are evaluated",
        ),
        (
            "            self._records.assumed = (*self._records.assumed, PUBLIC_EVALUATION)\n",
            "            pass\n",
            "the card does not say that an evaluation was assumed to be public",
        ),
        (
            "        return each.sum(1) / counted\n",
            "        return each.sum(1) / counted.sum()\n",
            "a record's loss is divided by the tokens of others",
        ),
        (
            "        if any(map(_is_packed, items)):\n",
            "        if False:\n",
            "a row of several documents is protected as one document",
        ),
        (
            '.get("use_reentrant") is not False:\n',
            '.get("use_reentrant") is None:\n',
            "layers within reentrant checkpoints learn nothing",
        ),
        (
            "                found[name] = each[:, seen]\n",
            "                found[name] = each\n",
            "padding of the user's own counts as text",
        ),
        (
            "state=[self.lr_scheduler, ScheduleArguments(args)]",
            "state=[self.lr_scheduler]",
            "a run goes on with another schedule",
        ),
        (
            '        return output(self.state.global_step, float("nan"), found)\n',
            "        return output(self.state.global_step, 0.0, found)\n",
            "a training loss is told that nobody released",
        ),
    ),
    *group(
        "dpdist/models/weights.py",
        "integrations/test_private_module",
        (
            "        trained = ((n, p) for n, p in model.named_parameters() if",
            "        trained = ((n, p) for n, p in holder.named_parameters() if",
            "a card speaks of an adapter beside which other layers were trained",
        ),
    ),
    *group(
        "dpdist/integrations/lightning.py",
        "integrations/test_private_module",
        (
            "        self._held = (module,)  # in no tree of modules: Lightning finds no weights to touch\n",
            "        self._held = torch.nn.ModuleList([module])\n",
            "Lightning holds the weights, and saves or moves them",
        ),
        (
            '        if getattr(loader, "dataset", None) is not self._numbers:\n',
            "        if loader is None:\n",
            "Lightning reads batches of private records",
        ),
        (
            "            if not self._public_eval:\n",
            "            if False:\n",
            "records that nobody called public are validated",
        ),
        (
            "            if common := count_common(",
            "            if common := 0 * count_common(",
            "private records are validated and the metric is logged",
        ),
        (
            "            if not isinstance(each, torch_data.DataLoader) or each.batch_sampler is None:\n",
            "            if False:\n",
            "private records are validated in batches of the data set's own",
        ),
        (
            "        check_trainer(self.trainer, public_eval=self._public_eval)\n",
            "",
            "finders, checkpoints, scalers and clips of the Trainer's pass",
        ),
        (
            "    if foreign - _CALLBACKS:\n",
            "    if False:\n",
            "a callback of Lightning that nobody has read passes",
        ),
        (
            "        if type(each).__name__ not in _LOGGERS:\n",
            "        if False:\n",
            "a logger that may watch gradients passes",
        ),
        (
            "        with self._attached(), kept_modes(self.module), plain, torch.no_grad():\n",
            "        with self._attached(), plain, torch.no_grad():\n",
            "a step after a validation runs in another mode",
        ),
        (
            "            every *= len(self._numbers) if",
            "            every *= 1 if",
            "a schedule of epochs is stepped after each step",
        ),
    ),
    *group(
        "dpdist/models/weights.py",
        "integrations/test_private_trainer",
        (
            "        if _TRAINED_COPIES not in parts and not any(",
            "        if not any(",
            "a base is told apart from itself beside a trained copy of its head",
        ),
        (
            "if p.data_ptr() not in places), None)",
            "if False), None)",
            "an adapter lacks weights that were trained",
        ),
    ),
    *group(
        "dpdist/publishing.py",
        "integrations/test_private_trainer::test_an_adapter_that_is_there_already_is_not_refused",
        (
            "            if _contents(Path(again)) != _contents(target):\n",
            "            if False:\n",
            "an adapter of another run is taken for this one",
        ),
    ),
    *group(
        "dpdist/publishing.py",
        "integrations/test_private_trainer",
        (
            "        if name not in now or not torch.equal(now[name].detach().cpu(), tensor):\n",
            "        if name not in now:\n",
            "a card is laid beside weights that the run did not release",
        ),
    ),
    *group(
        "dpdist/integrations/transformers.py",
        "models/test_language_models",
        (
            "    if found != wanted.digest:\n",
            "    if False:\n",
            "an adapter is loaded on another base",
        ),
    ),
    *group(
        "dpdist/release/model_card.py",
        "test_text_answers",
        (
            "        if tested.perplexity is not None:\n            said",
            "        if False:\n            said",
            "the page of a text release leaves the perplexity out",
        ),
    ),
    *group(
        "dpdist/training/job.py",
        "models/test_language_models",
        (
            "        empty += int((targets < 0).all(1).sum())\n",
            "        empty += 0\n",
            "documents whose answers are cut away are not told",
        ),
    ),
    *group(
        "dpdist/release/generation.py",
        "test_text_answers",
        (
            '        private="" if release.card["private"] else _NOT_PRIVATE,\n',
            '        private="",\n',
            "texts of a model that is not private do not say so",
        ),
        (
            '            scores[list(decoder.never)] = float("-inf")\n',
            "",
            "unknown words stand in texts",
        ),
        (
            "    if folder.resolve().is_relative_to(release.path.resolve()):\n",
            "    if False:\n",
            "texts within a release make it unreadable",
        ),
        (
            "    shares = ((scores - scores.max()) / temperature).softmax(-1)",
            "    shares = scores.softmax(-1)",
            "the temperature is not used",
        ),
        (
            "        write_json(aside / PRIVACY_CARD, release.card)\n",
            '        write_json(aside / PRIVACY_CARD, {**release.card, "private": True})\n',
            "the card beside the texts is another than the release's",
        ),
    ),
]
