"""Faults in what is said of poisoned training records."""

from __future__ import annotations

from mutants.fault import Fault, group

VOTES = "poisoning/test_poisoning"

FAULTS: list[Fault] = [
    *group(
        "dpdist/poisoning/certificates.py",
        "privacy/test_poisoned",
        ("range(group + 1)", "(group,)", "all changes are removals"),
        ("range(group + 1)", "(0,)", "all changes are insertions"),
        ("fewer[changes - group]", "fewer[0]", "changes beyond a group are free"),
        ("self._group_curves(inserted)[1]", "self._group_curves(inserted)[0]", "an insertion counts as a removal"),
        ("self._group_curves(removed)[0]", "self._group_curves(removed)[1]", "a removal counts as an insertion"),
        ("_inverse(self._one, fewer[-1])", "fewer[-1]", "further changes are free"),
        (
            'self._exact = plan.neighbours == "add-or-remove-one"',
            "self._exact = True",
            "a replaced record counts as a removed one",
        ),
        ("    return high\n", "    return low\n", "what is needed is rounded down"),
        ("each.repeat(models)", "each.repeat(1)", "many votes cost one training"),
    ),
    *group(
        "dpdist/poisoning/certificates.py",
        VOTES,
        (
            "votes.counts(slice(select, total))",
            "votes.counts(slice(0, total))",
            "models that choose the class are counted for it",
        ),
        ("clopper_pearson_lower(k, total - select, alpha)", "clopper_pearson_lower(k, total, alpha)", "models count that did not vote"),
        (
            "float(ndtr(radius / (sigma or 1.0)))",
            "float(ndtr(radius))",
            "the noise on the input does not matter",
        ),
        ("rival = counts + (names < answer[:, None])", "rival = counts + 0", "ties are won by both"),
        ("lead // 2", "lead", "a change moves half a vote"),
        ("rival.max(1, initial=0)", "rival.max(1)", "a class without votes cannot win any"),
    ),
    *group(
        "dpdist/poisoning/certificates.py",
        "poisoning/test_bagging",
        ("removed = np.arange(changes + 1)", "removed = np.arange(changes, changes + 1)", "all changes are removals (bagging)"),
        ("removed = np.arange(changes + 1)", "removed = np.arange(1)", "all changes are insertions (bagging)"),
        ("found = 1 - share[left] / _LOG_SUM_UP", "found = 0", "removed records are drawn no more, and nothing lost"),
        ("if self._records - changes < self._size:  #", "if False:  #", "bags are larger than what is left"),
        ("if self._records - changes < self._size:  #", "if self._records - changes <= self._size:  #",
         "nothing is drawn where one bag is left"),
        ("argsort(stream_words(key, 0, records), kind=\"stable\")", "arange(records)", "every bag has the same records"),
    ),
    *group(
        "dpdist/poisoning/job.py",
        VOTES,
        (
            'derive_key(self._shared.key, "voter", number)',
            'derive_key(self._shared.key, "voter", 0)',
            "all models have one key",
        ),
        ('derive_key(key, "bag")', 'b"bag" * 11', "all bags are one"),
        ("members = self._shards == number", "members = self._shards >= 0", "shards are not disjoint"),
        ("place = place.with_input_noise(shared.sigma)", "pass", "votes without noise on their inputs"),
        ('derive_key(key, "votes").hex()', '"00"', "all models vote under one noise"),
    ),
    *group(
        "dpdist/poisoning/evaluation.py",
        VOTES,
        ("private: ClassVar[bool] = True", "private: ClassVar[bool] = False", "votes are published"),
    ),
    *group(
        "dpdist/poisoning/evaluation.py", "poisoning/test_poisoning",
        ("        if recipe.data.drop_test_records:\n", "        if True:\n", "one inserted copy of a test input stops the training"),
        ("            (\n"
         "                recipe.canary_audit is not None,\n"
         "                \"audit.kind: canaries plants records in this training\",\n"
         "            ),\n", "",
         "planted records vote"),
        ('                "seed_given": self.seed is not None,\n', "", "a given seed is not told apart from a secret one"),
        ("            (withheld is not None, withheld),\n", "",
         "models that never leave vote"),
        ('            (recipe.tune is not None, "a private search is no single training"),\n', "",
         "one training of a search votes for all"),
    ),
    *group(
        "dpdist/poisoning/evaluation.py",
        "poisoning/test_poisoning::test_votes_of_a_given_seed_are_told_apart",
        ('                "sigma": self.sigma,\n', "", "votes under another noise go on in one table"),
    ),
    *group(
        "dpdist/poisoning/certificates.py", "privacy/test_poisoned poisoning/test_poisoning",
        ("            worst = max(worst, kept)\n", "            worst = max(0.0, kept) if worst == 0.0 else min(worst, kept)\n",
         "the easiest mix of removed and inserted records"),
    ),
]  # fmt: skip
