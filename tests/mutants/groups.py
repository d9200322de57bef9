"""Faults where a group of records is the unit of privacy."""

from __future__ import annotations

from mutants.fault import Fault, group

ENGINE = "gradients/test_groups"
UNIT = "training/test_group_unit"

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
            '        for key, given in (("audit", self.audit), ("tune", self.tune)):',
            "        for key, given in ():",
            "a search scores single records of groups",
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
            "if both := np.intersect1d(train.group_hashes, test.group_hashes).size:",
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
            "        if type(value) not in (int, str):",
            "        if value is None:",
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
            "an audit of records is held against groups",
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
        "dpdist/training/private_score.py",
        "training/test_private_score",
        (
            "total += sum(values) // len(values)",
            "total += sum(values)",
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
]
