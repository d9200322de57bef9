"""Faults in teachers on disjoint shards, in answers that are paid for, and in records noised once."""

from __future__ import annotations

from mutants.fault import Fault, group

ANSWERS = "methods/test_private_prediction"
NOISY = "methods/test_noisy_records"

FAULTS: list[Fault] = [
    *group(
        "dpdist/training/teachers.py",
        "training/test_teachers",
        ("digest_size=16, key=key, person", "digest_size=16, person", "anybody knows the shards"),
        (
            "raw[start : start + size], digest_size",
            'b"%d" % start, digest_size',
            "a record's shard follows from its place",
        ),
        (
            "batch = min(recipe.training.batch_size, records)",
            "batch = recipe.training.batch_size",
            "a shard smaller than a batch stops the run",
        ),
        (
            "        if not members.any():\n            return self._as_it_began()\n",
            "",
            "an empty shard stops the run",
        ),
        (
            "        except Diverged:\n",
            "        except ZeroDivisionError:\n",
            "a shard on which training diverges stops the run",
        ),
        (
            "if file_digest(read_bytes(place / _WEIGHTS)) != digest:",
            "if False:",
            "another teacher answers",
        ),
    ),
    *group(
        "dpdist/training/many.py",
        "training/test_teachers",
        (
            "own.method.train(_Here(job))",
            "own.method.train(_Here(replace(job, members=None)))",
            "every teacher is trained on all records",
        ),
    ),
    *group(
        "dpdist/training/answering.py",
        ANSWERS,
        ("if new > self.left:", "if False:", "more questions than answers spend what is left"),
        (
            "        number = ledger.ask(question, self._plan)\n",
            "        number = 0\n",
            "answers are not counted",
        ),
        (
            "            return known\n",
            "            pass\n",
            "to ask again averages the noise away",
        ),
    ),
    *group(
        "dpdist/privacy/ledger.py",
        ANSWERS,
        (
            "if self.asked >= plan.answers:",
            "if self.asked > plan.answers:",
            "one answer more is given",
        ),
        (
            '        self._append({"kind": "asked", "id": question})\n',
            '        self._apply({"kind": "asked", "id": question})\n',
            "an answer is counted in memory only",
        ),
    ),
    *group(
        "dpdist/runs/released.py",
        ANSWERS,
        (
            "if ledger.asked > plan.answers:",
            "if False:",
            "answers that nobody paid for are believed",
        ),
    ),
    *group(
        "dpdist/methods/private_prediction.py",
        ANSWERS,
        (
            "phase.noise_multiplier * 2 * self.logit_bound / teachers",
            "phase.noise_multiplier * self.logit_bound / teachers",
            "half the noise",
        ),
        (
            "np.minimum(largest, bound / np.maximum(norms, 1e-300))",
            "largest",
            "a teacher may say anything",
        ),
        (
            "known = np.where(finite, scores, 0.0)",
            "known = scores",
            "a teacher that fails spoils all",
        ),
        (
            "(GaussianAnswers(steps.noise_multiplier, self.queries),)",
            "(GaussianAnswers(steps.noise_multiplier, 1),)",
            "one answer is charged",
        ),
    ),
    *group(
        "dpdist/evaluation.py",
        ANSWERS,
        (
            "    if recipe.method.withheld is not None:\n        raise",
            "    if False:\n        raise",
            "a model that must not leave is used",
        ),
    ),
    *group(
        "dpdist/commands/releasing.py",
        ANSWERS,
        (
            'raise UserError(f"{folder.path}: {facts.recipe.method.withheld}")',
            "pass",
            "a model that must not leave is released",
        ),
    ),
    *group(
        "dpdist/methods/noisy_records.py",
        NOISY,
        (
            'derive_key(self._key, "input", place)',
            'derive_key(self._key, "input")',
            "all records have one noise",
        ),
        ("np.minimum(1.0, self.norm / np.maximum(norms, 1e-300))", "1.0", "inputs are not clipped"),
        (
            "kept = 1 / (1 + others * math.exp(-self.label_epsilon))",
            "kept = 1 / (1 + math.exp(-self.label_epsilon))",
            "labels are kept too often",
        ),
    ),
    *group(
        "dpdist/privacy/releases.py",
        NOISY,
        (
            "2 / (math.exp(self.label_epsilon) + 1)",
            "4 / (math.exp(self.label_epsilon) + 3)",
            "labels cost less than they may tell",
        ),
        (
            'taken again."""\n        return (self,)\n',
            'taken again."""\n        return (self,) * bool(steps)\n',
            "records cost nothing before the first step",
        ),
    ),
    *group(
        "dpdist/training/loop.py",
        NOISY,
        (
            'self.dataset = self.method.seen(self.dataset, plan, derive_key(self.key, "records"))',
            'self.method.seen(self.dataset, plan, derive_key(self.key, "records"))',
            "the steps see the records",
        ),
    ),
]
