"""Faults in the private search."""

from __future__ import annotations

from mutants.fault import Fault, group

WIRING = "tuning/test_search_wiring"

FAULTS: list[Fault] = [
    *group(
        "tuning/trial.py", WIRING,
        ('derive_key(trial.key, "run key").hex()', '"ab" * 32',
         "every trial's run key is a constant"),
        ('derive_key(key, "fixed").hex() if fixed else None',
         'search_recipe.privacy.run_key if fixed else None', "trials share the recipe's fixed key"),
        ('derive_key(trial.key, "rung", rung)', 'derive_key(trial.key, "rung")',
         "the same score noise at every rung"),
        ('derive_key(trial.key, "rung", rung)', 'derive_key(bytes(32), "rung", rung)',
         "the same score noise in every trial"),
        ("            noise=noise,\n", "            noise=None,\n", "private scores carry no noise"),
        ('update={"hold_out": held_out_fraction(search_recipe)}', 'update={"hold_out": 0.0}',
         "trials train on held-out records"),
        ('"noise_multiplier": settings["noise_multiplier"]', '"noise_multiplier": 1.0',
         "trials execute another noise than was accounted"),
        ('write_atomic(own.fixed_key_marker,', 'str(own.fixed_key_marker.name +', "a fixed key is not marked"),
        ("    if state[\"done\"]:\n        return\n", "    if False:\n        return\n",
         "a failed trial is tried again"),
    ),
    *group(
        "tuning/trial.py", "tuning/test_search",
        ("if read_verified_ledger(job.folder).ledger.num_superseded:", "if False:",
         "a trial that did not replay exactly counts"),
    ),
    *group(
        "tuning/scoring.py", f"{WIRING} tuning/test_scoring",
        ('derive_key(key, "score", "noise"), noise)', 'derive_key(key, "score", "noise"), noise / 2)',
         "half the score's noise"),
        ("if noise is not None:\n        total = add_noise", "if noise is None:\n        total = add_noise",
         "noise on public scores only"),
        ("np.clip(values / sum(weights.values()), 0.0, 1.0)", "values", "a record counts more than one"),
        ("rows = 1 if noise is not None else _PUBLIC_BATCH", "rows = _PUBLIC_BATCH",
         "private records are scored in company"),
    ),
    *group(
        "tuning/scoring.py", f"{WIRING}::test_certified_scores_use_draws_of_their_own",
        ('derive_key(key, "score", "draws").hex()', '"0"',
         "the same smoothing noise at every rung and trial"),
    ),
    *group(
        "tuning/manifest.py", f"{WIRING} tuning/test_manifest",
        ('derive_key(key, "search", "trial", number)', 'derive_key(key, "search", "trial")',
         "all trials have one key"),
        ('derive_key(key, "search", "values", number)', 'derive_key(key, "search", "values")',
         "all trials have the same values"),
        ('derive_key(key, "search", "tie", number)', 'derive_key(key, "search", "trial", number)',
         "the tie's label is the trial's key"),
        ("    if folder.manifest.exists():\n        return\n", "",
         "a continued search draws its trials again"),
        ("return max(done,", "return min(done,", "the worst trial wins"),
        ("(scores[trial.number], trial.tie_breaker)", "(scores[trial.number], trial.number)",
         "the last of equals wins"),
        ("    folder.manifest.chmod(0o600)\n", "", "others can read the manifest"),
        ("    make_private_folder(folder.path)\n", "", "others can enter the search's folder"),
    ),
    *group(
        "dpdist/reports/facts.py", "tuning/test_search",
        ("        if _parse_trials(published, tune, folder.trials) != trials:", "        if False:",
         "trials are shown as anybody wrote them"),
    ),
    *group(
        "tuning/search.py", "tuning/test_search",
        ('"chosen": trial.number == winner', '"chosen": bool(scores)', "every trial with a score was chosen"),
    ),
    *group(
        "tuning/search.py", f"{WIRING} tuning/test_search",
        ('for n, s in states.items() if s["failed"] is None', "for n, s in states.items() if s[\"scores\"]",
         "a failed trial can win"),
        ('["scores"][-1] for n', '["scores"][0] for n', "the first rung decides"),
        ("source, target = self.folder.trial_folder(winner)", "source, target = self.folder.trial_folder(0)",
         "another trial than the winner is promoted"),
        ('"data.json", "fixed-key"', '"data.json"', "the winner's fixed key is not marked"),
        ("                (target.private / name).chmod(0o600)\n", "",
         "the promoted key is readable by all"),
        ('if self.tune.law.name == "fixed":\n            self._publish_trials()', "self._publish_trials()",
         "trials of a secret number are shown"),
        ('trained.pop("seconds", None)', "pass", "how long a search's training took is told"),
        ('self.cost.trial_limit.check(plan, f"{where}: tune.space")', "pass",
         "a trial may execute what was not accounted"),
    ),
    *group(
        "dpdist/privacy/phases.py", f"{WIRING}::test_each_score_carries_the_noise_that_was_paid_for "
        "tuning/test_cost::test_a_fixed_number_of_runs_is_composed",
        ("steps=self.steps * runs", "steps=self.steps",
         "a fixed number of trainings is charged once"),
        ("count=self.count * runs", "count=self.count",
         "a fixed number of scores is charged once"),
    ),
    *group(
        "tuning/space.py", f"{WIRING}::test_each_score_carries_the_noise_that_was_paid_for "
        "tuning/test_cost::test_a_fixed_number_of_runs_is_composed",
        ("tune.scoring_phases(noise)", "tune.scoring_phases(2 * noise)",
         "a score is charged with less than its noise"),
    ),
    *group(
        "dpdist/config/search.py", f"{WIRING}::test_each_score_carries_the_noise_that_was_paid_for "
        "tuning/test_cost::test_a_fixed_number_of_runs_is_composed",
        ("GaussianReleases(noise, self.scores_per_trial)", "GaussianReleases(noise, 1)",
         "one rung's score is charged"),
    ),
    *group(
        "dpdist/reports/facts.py", "tuning/test_search_edits",
        ('        wrong.append("plan")', "        pass", "the plan of a search is believed"),
        ("law=tune.law.full_description", 'law=record["law"]', "the law of a search is believed"),
        ("if not fits or (asked is not None and score_noise != asked):", "if not fits:",
         "scores need not have the noise that was asked for"),
    ),
    *group(
        "dpdist/runs/folder.py", "tuning/test_search_edits",
        ("if (\n"
         "            recorded_digest is not None\n"
         "            and self._search_digest.get(SEARCH_IDENTITY) != recorded_digest\n"
         "        ):", "if False:",
         "a search that was exchanged is believed"),
    ),
    *group(
        "tuning/space.py", "tuning/test_cost::test_a_plain_base_covers_only_what_can_be_made_from_it",
        ("all(one.uses_only_profile for one in base.phases) and ", "",
         "profiles cover where Renyi's bound may be the price"),
        ("own.pld is None or profile_exceeds(own.pld, ceiling.pld, margin)", "own.pld is None",
         "every trial is covered where a profile is the price"),
    ),
    *group(
        "tuning/space.py", "tuning/test_cost::test_the_rounding_of_a_trial_s_own_loss_counts",
        ("margin = max(0.0, own.rounding - ceiling.rounding)", "margin = 0.0",
         "a trial's own rounding is forgotten"),
    ),
    *group(
        "dpdist/privacy/calibration.py",
        "tuning/test_cost::test_training_and_search_together_meet_the_target",
        ("return (RepeatAndSelect(tuple(phases), law.mean, law.shape),)",
         "return (RepeatAndSelect(tuple(phases), 1.0, law.shape),)", "one trial is charged"),
    ),
    *group(
        "tuning/space.py", "tuning/test_cost::test_the_bound_lies_above_every_setting",
        ('steps = box["training.steps"][1]', 'steps = box["training.steps"][0]',
         "the shortest training bounds all"),
        ('noise = box["privacy.noise_multiplier"][0]', 'noise = box["privacy.noise_multiplier"][1]',
         "the largest noise bounds all"),
        ("rate = min(1.0, large / self.record_counts.training_records(low))", "rate = min(1.0, small / self.record_counts.training_records(low))",
         "the smallest batch bounds all"),
    ),
    *group(
        "tuning/space.py", "tuning/test_cost::test_the_worst_split_is_what_a_search_over_splits_costs "
        "tuning/test_cost::test_with_a_target_the_steps_of_each_split_have_noise_of_their_own "
        "tuning/test_cost::test_splits_that_cannot_be_priced_are_refused",
        ("for m in self._methods]", "for m in [self.recipe.method]]", "one split is charged"),
        ("bool(self._methods_of_other_cost) or", "", "all splits are taken to cost the same"),
        ("self._recipe_plan(trial, self._training_records, _MAX_NOISE_MULTIPLIER)", "self._recipe_plan(self.recipe, self._training_records, _MAX_NOISE_MULTIPLIER)",
         "a split that nothing covers is searched"),
    ),
    *group(
        "tuning/search.py", "tuning/test_search::test_noise_splits_are_searched_and_each_is_paid_for",
        ("noise = self.plan_trial(values)[0].privacy.noise_multiplier",
         "noise = self.plan_trial(values)[1].step(0).noise_multiplier",
         "the first release's noise is taken for the whole's"),
    ),
    *group(
        "tuning/space.py", "tuning/test_splits::test_all_candidates_cost_the_same",
        ("        if not self.varies_cost:\n            return self.noise_multiplier\n",
         "        return self.noise_multiplier\n",
         "a candidate split keeps the noise of the recipe's own"),
        ("low, high = (low, middle) if fits(middle) else (middle, high)", "low = middle",
         "a candidate split gets more noise than its price asks for"),
    ),
    *group(
        "dpdist/config/search.py", "tuning/test_space tuning/test_splits::test_a_split_of_the_noise_that_certifies_keeps_its_sum",
        ("return self.also[field][self.choice.index(value)]", "return self.also[field][0]",
         "every value of a split brings what goes with the first"),
        ("if any(value in self.choice[:place] for place, value in enumerate(self.choice)):", "if False:",
         "one value of a split stands for two"),
    ),
    *group(
        "tuning/search.py", "tuning/test_splits::test_noise_in_the_model_certifies_beyond_the_input_s",
        ("    if trial.method.capabilities.has_prediction_noise:\n        return  #", "    if True:\n        return  #",
         "radii that no draws reach are searched for"),
    ),
    *group(
        "tuning/space.py", "tuning/test_cost::test_entries_that_cost_only_together_are_found",
        ("in itertools.product(*lists.values()):", "in list(zip(*lists.values()))[:1]:",
         "one combination of entries is priced"),
    ),
    *group(
        "tuning/space.py", "tuning/test_limits",
        ("while not fits(high, coarser=1):  #", "while False and not fits(high, coarser=1):  #",
         "a trial's noise is checked on the coarse grid only"),
        ("if (trial.delta, trial.neighbours) != (base.delta, base.neighbours):",
         "if trial.delta != base.delta:", "a trial under another relation passes the limit"),
        ("if own.pld is None or profile_exceeds(own.pld, ceiling.pld, margin):",
         "if own.pld is not None and profile_exceeds(own.pld, ceiling.pld, margin):",
         "a trial without privacy passes the limit"),
    ),
    *group(
        "tuning/scoring.py", "tuning/test_score_parts",
        ("np.clip(radii, 0.0, settings.radius_cap)", "np.maximum(radii, 0.0)",
         "the average radius of a record is not capped"),
        ('derive_key(key, "score", "draws").hex()', 'derive_key(key, "score", "noise").hex()',
         "the draws of a score are keyed as its noise"),
    ),
    *group(
        "tuning/trial.py", "tuning/test_trials_once",
        ('        if rung <= len(state["scores"]):\n            continue\n', "",
         "rungs that were scored are scored anew after a crash"),
        ('                    "budget": None,\n', "", "a trial names the budget of its search"),
    ),
]  # fmt: skip
