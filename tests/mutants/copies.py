"""Faults in what keeps two copies of a run folder apart, in their noise and in their budget, and in
what holds plan and recipe together."""

from __future__ import annotations

from mutants.fault import Fault, group

COPIES = "training/test_copies"
LINEAGE = "privacy/test_lineage"
NOISY = (
    "methods/test_noisy_records::test_copies_of_a_run_noise_another_release_of_the_records_afresh"
)
VOTES = "methods/test_pate::test_copies_of_a_run_draw_other_votes_afresh"
SCORES = "tuning/test_search_wiring::test_a_score_s_key_depends_on_all_that_is_scored"

FAULTS: list[Fault] = [
    *group(
        "dpdist/privacy/ledger.py", COPIES,
        ("            self._nonce = new_nonce()\n",
         "            self._nonce = self._nonces[-1] if self._nonces else new_nonce()\n",
         "copies: a process that goes on takes the nonce of the last"),
        ("            self._release_nonces[key] = self._nonces[-1]\n",
         "            self._release_nonces[key] = self._attempts[-1][\"nonce\"]\n",
         "copies: a step is replayed under the attempt's first nonce"),
        ("        self.announce_process()\n        self._append({\"kind\": \"release\"",
         "        self._append({\"kind\": \"release\"",
         "copies: a nonce is not on record before its first step"),
    ),
    *group(
        "dpdist/privacy/ledger.py",
        "training/test_loop::test_two_copies_of_a_run_never_share_noise",
        ("if epoch == self._epoch\n"
         "        }", "}", "copies: steps of an earlier attempt are replayed"),
    ),
    *group(
        "dpdist/training/private_step.py", COPIES,
        ("        return next(replayed, self.attempt)\n", "        return self.attempt\n",
         "copies: an announced step is drawn afresh"),
        ("        return next(replayed, self.attempt)\n", "        return next(replayed, (self.announced or [(0, 0, self.attempt)])[-1][2])\n",
         "copies: new steps go on under the nonce of announced ones"),
        ("self.attempt_of(step)}/{step}\"", "self.attempt}/{step}\"",
         "copies: a replayed sum has another id"),
    ),
    *group(
        "dpdist/training/worker.py", COPIES,
        ("        first, end, label = reducer.all_gather_text(said)[0]", '        first, end, label = reducer.all_gather_text(said or "0 0 -")[-1]',
         "copies: workers do not take worker 0's list of replayed steps"),
    ),
    *group(
        "dpdist/training/worker.py", COPIES,
        ("        \"recipe\": recipe_digest(job.recipe),\n", "",
         "copies: an attempt does not depend on the recipe"),
    ),
    *group(
        "dpdist/reports/facts.py", "training/test_released",
        ("    _check_identities(folder, ledger)\n", "", "a report tells of an exchanged recipe"),
    ),
    *group(
        "dpdist/runs/folder.py", "training/test_released",
        ("for key in trained.differing_keys(now)", "for key in ()",
         "a run says another recipe than its training's"),
    ),
    *group(
        "dpdist/training/worker.py", NOISY,
        ("            if (\n"
         "                shaped\n"
         "                and job.recipe.method.capabilities.steps_are_post_processing\n"
         "                and job.replacement_records is None\n"
         "            ):", "            if False:",
         "copies: records are noised again by another recipe"),
        ("*([label] if label else []))", "*[])", "copies: all copies noise the records alike"),
    ),
    *group(
        "dpdist/training/ensembles.py", VOTES,
        ("_source_id(private_source + recipe_digest(job.recipe).encode())", "_source_id(private_source)",
         "copies: votes by another recipe have the noise of the first"),
        ("about_id, *labels)", "about_id, *labels[1:])", "copies: all copies draw the votes alike"),
    ),
    *group(
        "dpdist/training/ensembles.py", "methods/test_private_prediction",
        ("                    self._charge_budget(ledger)\n", "                    pass\n",
         "copies: answers of a copy are free"),
    ),
    *group(
        "tuning/trial.py", SCORES,
        ("models.model_hash(job.folder.model_folder),", "",
         "copies: two models are scored with one noise"),
        ("search_recipe.model_dump(mode=\"json\", exclude={\"resources\"}),", "",
         "copies: scores of two objectives have one noise"),
    ),
    *group(
        "dpdist/privacy/budget.py", LINEAGE,
        ("    return tuple(map(max, one, other))\n", "    return other\n",
         "copies: what a copy knew less of is forgotten"),
        ("for nonce in [*recorded.made, *(n for n in self.made if n not in recorded.made)]",
         "for nonce in self.made", "copies: the last to settle replaces the other"),
        ("return replace(self, made=made, open=kept | dict(self.open))",
         "return replace(self, made=made)", "copies: another copy that is under way is forgotten"),
        ("place != self.place and Path(place).exists()", "False",
         "copies: a copy ends what the original has reserved"),
        ("place != self.place and Path(place).exists()", "place != self.place",
         "copies: a moved folder is taken for a copy"),
        ("if self.alone and len(", "if False and len(", "copies: searches with one secret add up"),
    ),
    *group(
        "dpdist/privacy/budget.py", LINEAGE,
        ("        budget.append_charge(charge.merge(budget.find_charge(charge.run)))\n\n\ndef _check_built_on",
         "        budget.append_charge(charge)\n\n\ndef _check_built_on", "copies: a reservation replaces the other"),
        ("                    budget.append_charge(made.merge(charge))\n",
         "                    budget.append_charge(made)\n", "copies: a settled charge replaces the other"),
        ("            if whole.lineage.alone:", "            if False:",
         "copies: a search is begun beside its copy"),
        ("        whole = charge.merge(budget.find_charge(charge.run))\n        if whole",
         "        whole = charge\n        if whole", "copies: a ceiling looks at one copy alone"),
    ),
    *group(
        "dpdist/privacy/ledger.py", LINEAGE,
        ("found[nonce][place] += plan.phases[place].num_units is not None", "pass",
         "copies: steps are nobody's"),
        ("done[place] -= (releases - 1)", "done[place] -= 0 * (releases - 1)",
         "copies: steps that were taken again leave fewer to take"),
    ),
    *group(
        "dpdist/training/job.py", COPIES,
        ("        mine = ledger.announce_process()\n", "        mine = None\n",
         "copies: a process is charged under the nonce of the last"),
    ),
    *group(
        "dpdist/runs/folder.py", COPIES,
        ("        self._check_unchanged(\"recipe\", self.recipe_file, recipe)\n", "",
         "an edited recipe.yaml is believed"),
        ("        recipe.check_plan(self.read_recipe(), plan, self.start_noise_multiplier, str(self.plan))\n", "",
         "a plan is executed by another recipe"),
    ),
    *group(
        "dpdist/runs/folder.py", "tuning/test_search::test_another_recipe_or_data_is_not_continued",
        ("        self._check_unchanged(\"asked\", self.search_recipe_file, asked)\n", "",
         "an edited search.yaml is believed"),
    ),
    *group(
        "tuning/search.py", "tuning/test_search::test_another_recipe_or_data_is_not_continued",
        ("[name for name in terms if begun[name] != terms[name]]",
         "[name for name in (\"data\", \"plan\") if begun[name] != terms[name]]",
         "edited terms of a search are believed"),
    ),
    *group(
        "dpdist/training/job.py", COPIES,
        ("        _check_target(recipe, plan, folder)\n", "", "a plan may cost more than its target"),
    ),
    *group(
        "dpdist/privacy/phases.py", "privacy/test_budget",
        ("    if refused:\n", "    if False:\n", "a budget states a relation that a phase refuses"),
    ),
    *group(
        "dpdist/privacy/profiles.py", "privacy/test_best_of::test_a_loss_that_is_always_infinite_is_priced",
        ("isinstance(pmf, pld_pmf.SparsePLDPmf) and not pmf._loss_probs", "False",
         "a loss that is always infinite has no price"),
    ),
    *group(
        "dpdist/methods/hidden_noise_shares.py",
        "methods/test_hidden_noise::test_one_record_moves_the_whole_paid_sum_by_no_more_than_its_noise_is_for",
        ("    for some, real in blocks.iter_passes(key, members, rows, classes, own_rows):\n        yield dataset.batch(members[some]), dataset.targets(members[some]), real",
         "    for some in np.split(members, range(rows, len(members), rows)):\n        yield dataset.batch(some), dataset.targets(some), slice(None)",
         "passes of a paid sum are as large as their records"),
        ("part = powers(inputs, labels)[real].sum(0)", "part = powers(inputs, labels).sum(0)",
         "rows that fill a pass count"),
    ),
    *group(
        "dpdist/methods/functional_sums.py",
        "methods/test_functional::test_a_declared_number_leaves_room_for_many_more",
        ("        check_record_limit(worker.job.recipe, len(worker.step.data))\n", "",
         "more records are summed than there is room for"),
        ("records, scales, most)", "records, scales)",
         "a declared number is the room for rounding"),
    ),
    *group(
        "tuning/scoring.py",
        "tuning/test_scoring::test_a_published_score_says_nothing_of_how_many_records_there_are",
        ("return round(score * records / step) * step / planned_records", "return score",
         "published scores give away the number of held-out records"),
    ),
]  # fmt: skip
