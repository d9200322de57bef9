"""Faults where a group of records is the unit of privacy."""

from __future__ import annotations

from mutants.fault import Fault, group

ENGINE = "gradients/test_groups"
UNIT = "training/test_group_unit"
SEARCH = "tuning/test_group_search"
AUDITED = "audits/test_groups_audited"

FAULTS: list[Fault] = [
    *group(
        "dpdist/data/protocol.py",
        ENGINE,
        (
            "own = own[np.sort(smallest[: self.max_records])]",
            "own = own[: self.max_records]",
            "the first records of a group are taken",
        ),
        (
            '            if len(own) > self.max_records:\n                label = struct.pack("<q", group)',
            '            if len(own) > self.max_records:\n                label = struct.pack("<q", 0)',
            "all groups draw alike",
        ),
        (
            "present[row, : len(own)] = own[0], True",
            "present[row] = own[0], True",
            "empty places of a group count",
        ),
        (
            "return GroupedRecords(self.records.for_step(key), self.groups, key)",
            "return GroupedRecords(self.records.for_step(key), self.groups, bytes(32))",
            "a group's records are the same in every step",
        ),
        (
            "return GroupedRecords(self.records.for_step(key), self.groups, key)",
            "return GroupedRecords(self.records, self.groups, key)",
            "random transforms of grouped records are not keyed by the step",
        ),
        (
            "        mac.update(np.ascontiguousarray(self.groups.codes).tobytes())\n",
            "",
            "a fingerprint does not know the groups",
        ),
        (
            "if last is None or not np.array_equal(last[0], indices):",
            "if last is None:",
            "the groups that were asked for last stand for all others",
        ),
        (
            "self._drawn = np.array(indices), self.groups",
            "self._drawn = np.asarray(indices), self.groups",
            "groups that a caller exchanges are not drawn anew",
        ),
        (
            "        return len(self._starts) - 1",
            "        return len(self.codes)",
            "records are counted and sampled in place of groups",
        ),
    ),
    *group(
        "dpdist/gradients/engine.py",
        ENGINE,
        (
            "            weights = members.weights[:, place]",
            "            weights = 0 * members.weights[:, place] + 1",
            "what fills a group up is added",
        ),
        (
            "gradients, total / (self.perturbation.count * members.weights.sum(1))",
            "gradients, total / self.perturbation.count",
            "a group's private loss is a sum",
        ),
        (
            "draw_key, members.ids[:, place], perturbed,",
            "draw_key, record_ids, perturbed,",
            "all records of a group have the same noise",
        ),
        (
            "(1 if members is None else members.weights.shape[1]) != self.records_per_example",
            "False",
            "groups of any size are added up",
        ),
        (
            "return value if weight is None else weight * value, value.detach()",
            "return value, value.detach()",
            "isolated records that fill a group up are added",
        ),
    ),
    *group(
        "dpdist/privacy/plan.py",
        UNIT,
        (
            '        return record if self.group is None else record | {"group": asdict(self.group)}',
            "        return record",
            "a plan on disk forgets its unit",
        ),
        (
            "            None if self.group is None else self.group.description,\n",
            "            None,\n",
            "a guarantee for groups is stated for records",
        ),
        (
            "            self.nominal or capped or self.neighbours",
            "            self.neighbours",
            "groups are declared or capped",
        ),
        (
            "    if plan.group is not None:\n        raise",
            "    if False:\n        raise",
            "a guarantee for groups of groups is computed as if they were records",
        ),
    ),
    *group(
        "dpdist/privacy/guarantee.py",
        UNIT,
        (
            '        if self.group is not None:\n            return f"zero-out of',
            '        if False:\n            return f"zero-out of',
            "the relation of groups is that of records",
        ),
    ),
    *group(
        "dpdist/runs/recipe.py",
        UNIT,
        (
            "        recipe.group_unit,\n    )",
            "        None,\n    )",
            "a recipe's plan is for records",
        ),
        (
            "        if not self.method.capabilities.supports_groups:",
            "        if False:",
            "every method takes groups",
        ),
        (
            "        if self.audit is not None and not self.audit.audits_groups:\n",
            "        if False:\n",
            "an audit's canaries are records among groups",
        ),
    ),
    *group(
        "dpdist/config/sections.py",
        UNIT,
        (
            "                self.budget is not None,\n",
            "                False,\n",
            "groups are charged to a budget of records",
        ),
        (
            '(self.neighbours != "add-or-remove-one", "be add',
            '(False, "be add',
            "groups are replaced at the price of removal",
        ),
    ),
    *group(
        "dpdist/data/dataset.py",
        UNIT,
        (
            "hash_positions(self._stored_groups if self.by_group else hashes)",
            "hash_positions(hashes)",
            "one group lies in training and among public records",
        ),
        (
            'if unknown := int((records.group_hashes == b"").sum()):',
            "if unknown := 0:",
            "all nameless records are one group",
        ),
        (
            "if both := np.intersect1d(private.group_hashes, others.group_hashes).size:",
            "if both := 0:",
            "scores on private groups are published",
        ),
        (
            "        digest.update(np.ascontiguousarray(self.groups.codes).tobytes())\n        return digest.hexdigest()\n\n    def __len__",
            "        return digest.hexdigest()\n\n    def __len__",
            "records that change their group are the same records",
        ),
    ),
    *group(
        "dpdist/data/parquet.py",
        UNIT,
        ("        if len(self._are_texts) > 1:", "        if False:", "7 and '7' are two persons"),
    ),
    *group(
        "dpdist/data/record_hashes.py",
        UNIT,
        (
            "        if type(value) not in (int, str) or names_nobody(value):",
            "        if names_nobody(value):",
            "numbers that round name groups",
        ),
    ),
    *group(
        "dpdist/training/records.py",
        UNIT,
        (
            "    count = split.num_groups if split.by_group else len(split)",
            "    count = len(split)",
            "one person's records move the share of all others",
        ),
        (
            "    return split if recipe.group_unit is None else replace(split, by_group=True)",
            "    return split",
            "parts are made of records",
        ),
    ),
    *group(
        "dpdist/audits/target.py",
        UNIT,
        (
            "    if recipe.group_unit is not None:\n",
            "    if False:\n",
            "shadow models of records are held against groups",
        ),
    ),
    *group(
        "dpdist/audits/registry.py",
        f"{UNIT}::test_audits_and_votes_of_single_records_are_refused",
        (
            "    if not options.audits_groups:\n",
            "    if False:\n",
            "an audit of records is held against groups",
        ),
    ),
    *group(
        "dpdist/config/sections.py",
        f"{UNIT}::test_what_is_not_made_for_groups_is_refused_in_one_line",
        (
            "        return self.inserts_gradients\n\n    @property\n    def folder_name",
            "        return True\n\n    @property\n    def folder_name",
            "records are planted among groups as canaries",
        ),
    ),
    *group(
        "dpdist/training/canaries.py",
        f"{AUDITED}::test_canary_groups_lie_behind_the_groups_and_are_counted "
        f"{AUDITED}::test_a_canary_group_that_is_in_adds_one_clip_along_its_coordinate",
        (
            "        return len(self.groups)\n",
            "        return len(self.labels)\n",
            "canary groups lie behind as many groups as there are records",
        ),
        (
            '        return self.num_records + self.planted.canaries\n\n    @cached_property\n    def fingerprint(self) -> str:\n        """Return the fingerprint of the groups',
            '        return self.num_records\n\n    @cached_property\n    def fingerprint(self) -> str:\n        """Return the fingerprint of the groups',
            "canary groups are not counted",
        ),
    ),
    *group(
        "dpdist/audits/mechanism.py",
        f"{AUDITED}::test_a_recipe_s_mechanism_is_held_against_what_is_proved_of_groups",
        (
            "members = None if plan.group is None else min(plan.group.max_records, _MOST_MEMBERS)",
            "members = None",
            "the mechanism of groups is audited with single records",
        ),
    ),
    *group(
        "dpdist/audits/step_harness.py",
        AUDITED,
        (
            "        return probe_groups(coordinates, self.max_records)",
            "        return ProbeRecords(coordinates)",
            "the canaries of a group's audit are single records",
        ),
        (
            "    each = max_records + 1\n",
            "    each = 1\n",
            "a canary group is one record",
        ),
    ),
    *group(
        "dpdist/private_training.py",
        UNIT,
        (
            "    if units == list(range(len(units))):",
            "    if False:",
            "records of nobody are protected as groups",
        ),
        (
            "    if common := len(units & set(said)):",
            "    if common := 0:",
            "a script publishes scores on private groups",
        ),
        ("        check_units_apart(public, private)\n", "", "a script holds private groups out"),
        (
            "        private = private.records\n",
            "",
            "private records are not found among held-out ones",
        ),
    ),
    *group(
        "dpdist/data/protocol.py",
        "training/test_private_score",
        (
            "    return sum(units) // len(units)",
            "    return sum(units)",
            "a group adds a value for each of its records",
        ),
    ),
    *group(
        "dpdist/private_training.py",
        "training/test_private_score",
        (
            "    if common := len(units[0] & units[1]):\n",
            "    if common := 0:\n",
            "a group pays for steps and scores",
        ),
        (
            "    if len({isinstance(unit, str) for both in units for unit in both}) > 1:\n",
            "    if False:\n",
            "a group of another kind of name is on both sides",
        ),
    ),
    *group(
        "tuning/space.py",
        f"{SEARCH}::test_whole_groups_are_held_out_and_everything_is_counted_from_them "
        f"{SEARCH}::test_a_trial_for_single_records_is_not_covered",
        (
            "            group=self.recipe.group_unit,\n",
            "",
            "a search over groups is stated for records",
        ),
        (
            "        if trial.group != base.group:\n",
            "        if False:\n",
            "a trial for records passes the limit of groups",
        ),
    ),
    *group(
        "tuning/trial.py",
        f"{SEARCH}::test_whole_groups_are_held_out_and_everything_is_counted_from_them "
        f"{SEARCH}::test_each_score_of_a_search_counts_groups_and_carries_the_noise_paid_for",
        (
            "        return by_unit(search_recipe, held_out)",
            "        return held_out",
            "a trial's score counts a group's records",
        ),
    ),
    *group(
        "dpdist/data/protocol.py",
        f"{SEARCH}::test_a_whole_group_moves_a_score_by_one_at_most "
        f"{SEARCH}::test_a_score_is_the_mean_of_means_with_the_noise_of_one_group",
        (
            "        means = [mean_units(values[self.records_of(group)]) for group in range(len(self))]",
            "        means = [mean_units([value]) for value in values]",
            "a group adds a number for each of its records to a trial's score",
        ),
        (
            "mean_units(values[self.records_of(group)])",
            "mean_units(values[self.records_of(group)][:1])",
            "one record of a group is scored",
        ),
    ),
    *group(
        "tuning/search.py",
        f"{SEARCH}::test_a_search_goes_on_with_the_groups_it_was_begun_with "
        f"{SEARCH}::test_public_records_to_score_on_have_no_private_group",
        (
            "    everything = by_unit(recipe, private_records(recipe, data_source(recipe)))",
            "    everything = private_records(recipe, data_source(recipe))",
            "a continued search does not know whose its records are",
        ),
        (
            '        refuse_common_groups(private, records, f"{context}: tune.score.public")\n',
            "",
            "a search scores on private groups as if they were public",
        ),
    ),
    *group(
        "tuning/search.py",
        f"{SEARCH}::test_a_search_becomes_a_run_that_states_its_groups",
        (
            '            units = f"{count:,} {self.cost.plan.counted}"',
            '            units = f"{count:,} records"',
            "a preview counts groups as records",
        ),
        (
            '"scored_on": self.tune.score.describe_records(self.cost.plan.counted)',
            '"scored_on": self.tune.score.describe_records("records")',
            "the record of a search says records for groups",
        ),
    ),
    *group(
        "dpdist/reports/facts.py",
        f"{SEARCH}::test_a_search_becomes_a_run_that_states_its_groups",
        (
            "scored_on=tune.score.describe_records(plan.counted)",
            'scored_on=tune.score.describe_records("records")',
            "a report says that records were scored in place of groups",
        ),
    ),
]
