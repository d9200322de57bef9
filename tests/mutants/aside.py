"""Faults in files that carry a guarantee from the side: what is charged, bounded, archived, served."""

from __future__ import annotations

from mutants.fault import Fault, group

FAULTS: list[Fault] = [
    *group(
        "dpdist/privacy/filter.py",
        "privacy/test_budget",
        ("max(_ORDERS, key=lambda a:", "min(_ORDERS, key=lambda a:", "the worst order is taken"),
        (
            "self.epsilon if spent <= self.share else self.epsilon_of(spent)",
            "self.epsilon",
            "more than the share is stated as the ceiling",
        ),
        (
            "return max((float(curve[at]) for curve in curves), default=0.0)",
            "return min((float(curve[at]) for curve in curves), default=0.0)",
            "the best path of a record is charged",
        ),
        (
            "(math.log(delta) + math.log(order)) / (order - 1)",
            "math.log(delta) / order",
            "the conversion promises too little",
        ),
    ),
    *group(
        "dpdist/privacy/shuffling.py",
        "privacy/test_shuffling",
        (
            "blanked = -np.expm1(norm.logcdf((threshold - 1)",
            "blanked = -np.expm1(norm.logcdf((threshold)",
            "a blanked record pulls nothing",
        ),
        ("others = (steps - 1)", "others = steps", "one batch too many"),
    ),
    *group(
        "dpdist/privacy/subsampled.py",
        "privacy/test_accounting",
        (
            "_pmf(\n        noise_multiplier / 2, min",
            "_pmf(\n        noise_multiplier, min",
            "a displaced record counts as one",
        ),
        (
            "stats.binom.sf(batch_cap - 1, records - 1, sample_rate)",
            "stats.binom.sf(batch_cap + 1, records - 1, sample_rate)",
            "the cap is met more seldom",
        ),
        (
            "p[0] = 1 - deltas[0] + falls[0]",
            "p[0] = 1 - deltas[0] - falls[0]",
            "mass of the lowest loss is lost",
        ),
        (
            "return PrivacyLossDistribution(displaced).compute_mixture(plain, others_fill)",
            "return plain",
            "capped batches cost as the uncapped",
        ),
    ),
    *group(
        "dpdist/privacy/mechanisms.py",
        "privacy/test_mechanisms",
        (
            "m = math.sqrt(queries / threshold_std**2 + 2 * answers / vote_std**2)",
            "m = math.sqrt(queries / threshold_std**2 + answers / vote_std**2)",
            "a moved vote moves one count",
        ),
        (
            "return float(laplace_scale(epsilon, 2 * coefficient_l1_bound))",
            "return float(laplace_scale(epsilon, coefficient_l1_bound))",
            "replace-one counts as remove-one",
        ),
        ("+ 2 * np.log1p(-delta)", "+ 3 * np.log1p(-delta)", "Laplace's delta is worth too much"),
        (
            "return (1 - floor) * shares + floor / weights.size",
            "return shares",
            "no share has a floor",
        ),
        (
            "np.sum(bounds**2 / (r.size * r))",
            "np.sum(bounds**2 / r) / r.size**2",
            "the weighted sensitivity is too small",
        ),
        (
            "if transformed < xi_low:\n        return xi_up",
            "if transformed < xi_low:\n        return xi_low",
            "too little transformed noise is completed to the lower mark",
        ),
    ),
    *group(
        "dpdist/certification/expected_score_bounds.py",
        "certification/test_expected_score_bounds certification/test_scores",
        (
            "alpha = _error(confidence) / len(counts)",
            "alpha = _error(confidence)",
            "counts of all classes share no error",
        ),
        (
            "alpha = _error(confidence) * (2 if paper_faithful else 1)",
            "alpha = _error(confidence) * 2",
            "bounds have twice their error",
        ),
        (
            "float(np.max(np.delete(self.upper, self.label), initial=0.0))",
            "float(np.max(np.delete(self.lower, self.label), initial=0.0))",
            "the runner-up is bounded from below",
        ),
        (
            "variances = spread / (draws - 1)",
            "variances = spread / (2 * draws)",
            "half the variance",
        ),
        (
            "left = bounds.p_a - np.exp(2 * epsilons) * bounds.p_b",
            "left = bounds.p_a - np.exp(epsilons) * bounds.p_b",
            "the condition has one factor too few",
        ),
        ("deltas = left / (1 + np.exp(epsilons))", "deltas = left", "delta is paid once"),
    ),
    *group(
        "dpdist/gradients/blocks.py",
        "gradients/test_blocks",
        (
            'order = np.argsort(hashes, kind="stable")',
            "order = np.arange(len(hashes))",
            "blocks are cut by position",
        ),
        (
            "if last - first <= self.capacity or high - low == 1:",
            "if True:",
            "an overfull block is not halved",
        ),
        (
            "yield np.concatenate([members, filler]), len(members)",
            "yield np.concatenate([members, filler]), rows",
            "filled-up rows count as records",
        ),
    ),
    *group(
        "dpdist/gradients/rules/normalisation.py",
        "gradients/test_clipping_rules",
        (
            "F.group_norm(call.input, module.num_groups, eps=module.eps)",
            "F.group_norm(call.input, module.num_groups)",
            "another epsilon of the group norm",
        ),
        (
            'yield "bias", Dense(signal.reshape(batch, -1, *shape).sum(1))',
            'yield "bias", Dense(signal.reshape(batch, -1, *shape).mean(1))',
            "a mean over positions",
        ),
    ),
    *group(
        "dpdist/gradients/rules/convolution.py",
        "gradients/test_clipping_rules",
        ("step_row * dilation[0],", "step_row,", "dilation of rows is forgotten"),
        (
            'yield "bias", Dense(left.sum(1))',
            'yield "bias", Dense(left.mean(1))',
            "the bias has a mean",
        ),
    ),
    *group(
        "dpdist/gradients/rules/dense.py",
        "gradients/test_clipping_rules",
        ("if module.padding_idx is not None:", "if False:", "the padding's row is trained"),
    ),
    *group(
        "dpdist/training/planning.py",
        "training/test_loop privacy/test_plan wiring/test_nominal_records wiring/test_reported_epsilon",
        (
            "records = privacy.nominal_records or records\n    if batch_size",
            "if batch_size",
            "the true number makes the rate",
        ),
        ("recipe.method.cost(steps),", "(steps,),", "what a method pays besides is forgotten"),
        ("noise_multiplier, rate, cap)", "noise_multiplier, rate, None)", "the plan knows no cap"),
    ),
    *group(
        "dpdist/training/charging.py",
        "privacy/test_budget wiring/test_reported_epsilon",
        (
            "limit = (privacy.budget_ceiling, privacy.budget_delta or privacy.delta)",
            "limit = None",
            "no ceiling is enforced",
        ),
        (
            "if not budgets.settle(recipe.privacy.budget, charge.run, charge.phases):",
            "if False:",
            "a finished run stays as it was reserved",
        ),
    ),
    *group(
        "dpdist/certification/betting_scores.py",
        "certification/test_scores certification/test_tighter_bounds certification/test_rebound",
        (
            "selected, 1 - self.alpha)",
            "selected, 1 - 2 * self.alpha)",
            "one-sided bounds have twice their error",
        ),
        (
            'sound = bool((counts.sum(1) == each["n"]).all() and (sums == each["sums"]).all())',
            "sound = True",
            "histograms of other draws are believed",
        ),
    ),
    *group(
        "dpdist/certification/bank.py",
        "certification/test_bank",
        (
            "self._first(x[None]) - self._zero",
            "self._first(x[None])",
            "the bias of the first layer counts twice",
        ),
        (
            "self._units.key(None, stage, block), rows",
            "self._units.key(None, ESTIMATE, block), rows",
            "selection has the estimate's noise",
        ),
    ),
    *group(
        "dpdist/certification/plausibility.py",
        "certification/test_plausibility",
        (
            "reach[block][:, None] + reach[rows][None, :]",
            "reach[block][:, None]",
            "a contradiction counts one radius",
        ),
        ("distances < 2 * radius", "distances < radius", "the ceiling counts one radius"),
    ),
    *group(
        "dpdist/gradients/consistency.py",
        "methods/test_consistency wiring/test_one_step::test_every_method",
        ("mean = mean[order.argsort()]", "pass", "targets are another record's"),
        ("to(mean) + weight * mean", "to(mean) + mean", "the weight of agreement is one"),
    ),
    *group(
        "dpdist/data/hashes.py",
        "data/test_overlap",
        ("seen + np.float32(0)", "seen", "minus zero makes another record"),
        (
            "(words >> np.uint64(11)) * 2.0**-53",
            "(words >> np.uint64(12)) * 2.0**-53",
            "records lie in the first half",
        ),
    ),
    *group(
        "dpdist/data/overlap.py",
        "data/test_overlap training/test_initial_weights",
        (
            "    if found:\n        some",
            "    if found and found > 1:\n        some",
            "one shared record is nothing",
        ),
        ("both = common(public, test)", "both = None", "public records may be the test's"),
    ),
    *group(
        "dpdist/training/records.py",
        "data/test_overlap training/test_initial_weights wiring/test_nominal_records tuning/test_scoring",
        (
            "return _split(recipe.data, source).part(recipe.data.public, 1.0)",
            "return _split(recipe.data, source).part(recipe.data.public, 0.5)",
            "half of the private records are compared",
        ),
        (
            'check_test(private_data(recipe, source), test, "data.test")',
            "pass",
            "private records may be tested on",
        ),
        (
            "math.ceil(share * 10**digits - 1e-9) / 10**digits",
            "share",
            "the share that is used is exact",
        ),
        (
            "end = section.hold_out + section.fraction * (1 - section.hold_out)",
            "end = 1.0",
            "data.fraction is not executed",
        ),
    ),
    *group(
        "dpdist/runs/archive/layout.py",
        "test_archive test_archive_names",
        (
            "if not hmac.compare_digest(check.encode(), digest_of(manifest).encode()):",
            "if False:",
            "a changed manifest is believed",
        ),
        ("self.step > self.steps", "False", "a permit may end before it begins"),
        ("if keyed != bool(archive_key()):", "if False:", "a manifest without the key is taken"),
    ),
    *group(
        "dpdist/runs/archive/reading.py",
        "test_archive",
        ('if found != (entry["digest"], entry["size"]):', "if False:", "a torn file is taken"),
        (
            "if step not in known:\n                        ledger.record(step, secrets.token_hex(32))\n                        charged += 1",
            "pass",
            "what the lost folder may have released is free",
        ),
        ("target.chmod(0o600)", "pass", "private files of a restored run can be read"),
        (
            'ledger.new_epoch("restored from an archive")',
            "pass",
            "a restored run goes on in the old attempt",
        ),
        ('if rivals != [about["claim"]]:', "if False:", "two may restore at once"),
    ),
    *group(
        "dpdist/runs/archive/writing.py",
        "test_archive",
        (
            "        self._check_claim()\n        kept",
            "        kept",
            "an owner that was replaced goes on",
        ),
        (
            "if self.private and self.store.readable_by_all",
            "if False and self.store.readable_by_all",
            "an open bucket gets the run key",
        ),
        (
            "            if permit is not None:\n                write_json(self.folder.permit, asdict(permit))",
            "            if asked is not None:\n                write_json(self.folder.permit, asdict(asked))",
            "a permit is granted that the archive may not hold",
        ),
    ),
    *group(
        "dpdist/serving/gate.py",
        "test_serving",
        ("if self._waiting >= limits.waiting:", "if False:", "any number of requests may wait"),
        ("if self._tokens < 1:", "if False:", "no rate is kept"),
        (
            "                    if len(read) > most:\n                        raise too_large",
            "                    pass",
            "a body has no end",
        ),
        ("self._waiting -= 1", "pass", "a place is never given back"),
    ),
]
