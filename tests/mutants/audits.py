"""Faults in the arithmetic of audits, membership inference, and audits of many runs and of one."""

from __future__ import annotations

from mutants.fault import Fault, group

MANY = "audits/test_many_runs"
ONE = "audits/test_canaries"
DPAL = "methods/test_dpal"

FAULTS: list[Fault] = [
    *group(
        "dpdist/privacy/audit_bounds.py", "privacy/test_audit_bounds",
        ("half = self.alpha / 2", "half = self.alpha", "two bounds spend alpha twice"),
        ("len(np.unique(self.run_ids)) != len(self.run_ids)", "False", "canaries of one run are pooled"),
        ("return float(check_alpha(alpha)) / audits", "return float(check_alpha(alpha))",
         "several audits do not share alpha"),
        ("values + 2 * self.canaries * lost", "values + 2 * self.guesses * lost",
         "delta counts for the guesses only"),
        ("return scores[:first], scores[first:]", "return scores[:first], scores",
         "the threshold's own runs count"),
        ("np.maximum(h, curve(r))", "h", "the curve bounds nothing"),
    ),
    *group(
        "dpdist/privacy/audit_bounds.py", "privacy/test_trade_off",
        ("np.max([one.profile_at(steps) for one in losses], axis=0)", "losses[0].profile_at(steps)",
         "the curve is one direction's"),
        ("        for _ in range(group_size):\n", "        for _ in range(1):\n", "a group is a record"),
    ),
    *group(
        "dpdist/privacy/card.py", "audits/test_audited",
        ("if said != found.verdict:", "if False:", "a file may state what its numbers do not"),
        ("not self.exploratory and (self.curve_rejected", "(self.curve_rejected",
         "an exploratory audit accuses"),
    ),
    *group(
        "dpdist/audits/target.py", MANY,
        ("(PrivateAuditResult if options.result_is_private else AuditResult)(options)",
         "AuditResult(options)", "counts of a thousand models are published"),
    ),
    *group(
        "dpdist/audits/target.py", "audits/test_audit_command",
        ("claim.neighbours != self.proved.neighbours", "False",
         "a claim of other data sets is refuted"),
        ("if claim.delta <= self.plan.delta else None", "",
         "a claim at a larger delta is refuted"),
    ),
    *group(
        "dpdist/audits/step_harness.py", "audits/test_replay",
        ("_COMMON = 8", "_COMMON = 1", "two equal numbers accuse"),
    ),
    *group(
        "dpdist/runs/folder.py", ONE,
        ("if self.canary_settings.exists():", "if False:", "canaries are written out of a run"),
    ),
    *group(
        "dpdist/runs/folder.py", "audits/test_audit_command::test_what_stays_private_is_not_written_among_public_files",
        ("if parent == self.path.resolve() or _is_run_folder(parent):",
         "if parent == self.path.resolve():", "private results lie in another run's public part"),
    ),
    *group(
        "dpdist/audits/step_harness.py", "audits/test_zoo",
        ("for rank in range(1, self.workers):", "for rank in range(1, 1):",
         "the other workers are not driven"),
    ),
    *group(
        "dpdist/audits/membership_statistics.py", "audits/test_membership_scores",
        ("    np.put_along_axis(values, y, -np.inf, 1)\n", "",
         "the label's own logit is among the others"),
        ("others = (np.arange(len(phi)) != target)[:, None]",
         "others = (np.arange(len(phi)) >= 0)[:, None]",
         "the target is among its own references"),
        ("side=\"right\") / len(ratio_z)", "side=\"left\") / len(phi)",
         "the share of the population is of the models"),
    ),
    *group(
        "dpdist/audits/membership_statistics.py", "audits/test_roc",
        ("math.floor(false_positives * len(self.others) + 1e-9)",
         "math.ceil(false_positives * len(self.others) + 1)",
         "more false positives than asked for"),
        ("variance = sum(x.var(ddof=1) / len(x) if len(x) > 1",
         "variance = sum(x.var(ddof=1) / len(x) ** 2 if len(x) > 1",
         "the interval of the AUC is too narrow"),
    ),
    *group(
        "dpdist/audits/membership_statistics.py", "audits/test_roc",
        ("plan_tradeoff(replace(plan, neighbours=game))", "plan_tradeoff(plan)",
         "a replacement has the ceiling of an addition"),
        ("if true.low > float(self.max_true_positive_rates(false.high))", "if true.value > float(self.max_true_positive_rates(false.value))",
         "a point above the ceiling by chance is told"),
    ),
    *group(
        "dpdist/audits/membership_statistics.py", "audits/test_membership_scores",
        ("stream_words(derive_key(key, \"coins\", model), 0, records)",
         "stream_words(derive_key(key, \"coins\"), 0, records)",
         "all models share their coins"),
    ),
    *group(
        "dpdist/audits/trainings.py",
        "audits/test_membership::test_noise_of_its_own_is_scored_by_one_pass_and_by_many",
        ("several = noisy or shared.recipes[0].method.capabilities.has_prediction_noise", "several = noisy",
         "a plain shadow answers less often than the target"),
    ),
    *group(
        "dpdist/audits/membership.py", "audits/test_membership",
        ("    private: ClassVar[bool] = True\n", "    private: ClassVar[bool] = False\n",
         "who was in a model may be published"),
        ("**recipe.experiment_settings,", "",
         "a bank of another recipe is continued"),
    ),
    *group(
        "dpdist/audits/trainings.py", MANY,
        ("weights = ((factors * finite)[0] * real)", "weights = (factors * finite)[0]",
         "padding counts as records"),
        ("noise_key = derive_key(key, \"noise\", attempt, step)",
         "noise_key = derive_key(key, \"sample\", attempt, step)",
         "other noise than the loop's"),
        ("sums[:, coordinate] - known", "sums[:, coordinate]",
         "what records add is taken for the canary's"),
    ),
    *group(
        "dpdist/training/canaries.py", ONE,
        ("= members[self._is_present[members]]", "= members",
         "records that are canaries train the model whatever their coins say"),
        ('derive_key(run_key, "audit coin")', "run_key", "the coins are drawn from the run key itself"),
        ("np.where(present, 1.0, -1.0 if self._replaces_one else 0.0)", "np.ones(len(present))",
         "every canary in the sums is in"),
        ("np.where(present, 1.0, -1.0 if self._replaces_one else 0.0)", "np.where(present, 1.0, 0.0)",
         "under replace-one a canary is left out"),
        ("rows[row, where[own]] += (self._clip", "rows[row, where[own]] += (2 * self._clip",
         "a canary adds twice the clip"),
        ("        return {SLOT: self._scores}\n", "        return {}\n", "scores are lost with a restart"),
        ("(own - others.cpu()).numpy()", "own.numpy()",
         "the adversary forgets the records that it knows"),
        ("digest.update(named.encode())", "return own.fingerprint",
         "the data's fingerprint does not name the canaries"),
    ),
    *group(
        "dpdist/training/canaries.py", f"{DPAL}::test_a_pair_is_one_record_under_one_of_two_labels",
        ("swapped = torch.from_numpy(self._has_other_label[members])",
         "swapped = torch.from_numpy(self._has_other_label[members] & False)", "every pair has its first label"),
    ),
    *group(
        "dpdist/config/sections.py", f"{DPAL}::test_a_pair_is_one_record_under_one_of_two_labels",
        ('self.canary == "pair" and recipe.privacy.neighbours != "replace-one"', "False",
         "a record that was replaced is told as one that was added"),
    ),
    *group(
        "dpdist/cli/audit.py", f"{DPAL}::test_one_run_refutes_its_epsilon",
        ("if found.verdict != CONSISTENT:", "if found.exceeds_proved:", "a refuted claim ends as if it held"),
    ),
    *group(
        "dpdist/methods/dpal_training.py", f"{DPAL}::test_one_noise_for_all_steps_and_attempts",
        ("laplace(key, \"chi_2\", network.hidden_noise.shape, 2 * scale)",
         "laplace(key, \"chi_2\", network.hidden_noise.shape, 0.0)", "the code has no noise"),
    ),
    *group(
        "dpdist/training/private_step.py", ONE,
        ("        self.canaries.observe(noisy, step_plan, self.reducer)\n", "",
         "nobody watches the steps"),
        ("            members = self.canaries.inputs_for(members)\n", "",
         "canaries are taken for records"),
    ),
    *group(
        "dpdist/training/worker.py", ONE,
        ("return {**self.optimizer.slots, **self.slots, **self.step.canaries.checkpoint_slots}", "return dict(self.optimizer.slots)",
         "a checkpoint forgets the scores"),
    ),
    *group(
        "dpdist/audits/canaries.py", ONE,
        ("name not in _LATER and getattr", "name == NOISE_SCALE_ASSUMPTION and getattr",
         "guesses are chosen after the training"),
    ),
    *group(
        "dpdist/privacy/audit_bounds.py", ONE,
        ("        low, high = (low, middle) if rejects(middle)", "        low, high = (low, middle) if not rejects(middle)",
         "the bisection goes the wrong way"),
    ),
    *group(
        "dpdist/privacy/audit_bounds.py", MANY,
        ("group_tradeoff(curve, copies)", "curve", "many copies of a canary count as one record"),
    ),
    *group(
        "dpdist/publishing.py", ONE,
        ("    if facts.canary_notice is not None:", "    if not facts.recipe:", "an audited run is released"),
    ),
]  # fmt: skip
