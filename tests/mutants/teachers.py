"""Faults in teachers on disjoint shards, in answers and votes that are paid for, and in records
noised once."""

from __future__ import annotations

from mutants.fault import Fault, group

ANSWERS = "methods/test_private_prediction"
NOISY = "methods/test_noisy_records"
VOTES = "methods/test_pate"
SPREAD = "methods/test_pate_spreading"

FAULTS: list[Fault] = [
    *group(
        "dpdist/training/ensembles.py",
        "training/test_teachers",
        ("digest_size=16, key=key, person", "digest_size=16, person", "anybody knows the shards"),
        (
            "raw[start : start + size], digest_size",
            'b"%d" % start, digest_size',
            "a record's shard follows from its place",
        ),
        (
            "members = self._shards == number",
            "members = self._shards <= number",
            "a record is in several teachers",
        ),
        (
            "batch = min(recipe.training.batch_size, records)",
            "batch = recipe.training.batch_size",
            "a shard smaller than a batch stops the run",
        ),
        (
            "        if not members.any():\n            return self._initial_model_files()\n",
            "",
            "an empty shard stops the run",
        ),
        (
            "        except TrainingDiverged:\n",
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
        "dpdist/training/ensembles.py",
        "training/test_teachers",
        (
            "own.method.execution().train(_InProcessDriver(job))",
            "own.method.execution().train(_InProcessDriver(replace(job, member_mask=None)))",
            "every teacher is trained on all records",
        ),
    ),
    *group(
        "dpdist/training/ensembles.py",
        ANSWERS,
        (
            "if new > self.answers_left:",
            "if False:",
            "more questions than answers spend what is left",
        ),
        (
            "        number = ledger.record_query(question, self._plan)\n",
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
            "if self.num_queries >= plan.num_queries:",
            "if self.num_queries > plan.num_queries:",
            "one answer more is given",
        ),
        (
            '        self._append({"kind": "asked", "id": query_id})\n',
            '        self._apply({"kind": "asked", "id": query_id})\n',
            "an answer is counted in memory only",
        ),
    ),
    *group(
        "dpdist/runs/folder.py",
        ANSWERS,
        (
            "if ledger.num_queries > plan.num_queries:",
            "if False:",
            "answers that nobody paid for are believed",
        ),
    ),
    *group(
        "dpdist/methods/private_prediction.py",
        f"{ANSWERS}::test_what_does_not_go_with_it_is_refused",
        (
            '            "audit": recipe.audit is not None,\n',
            "",
            "models that never leave are audited",
        ),
    ),
    *group(
        "dpdist/methods/private_prediction.py",
        f"{ANSWERS}::test_its_settings_are_not_searched_for",
        (
            '            "tune": recipe.tune is not None,\n',
            "",
            "answers that epsilon pays for are searched with",
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
            "np.minimum(largest, bound * (1 - 1e-9) / np.maximum(norms, 1e-300))",
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
            "    if recipe.method.capabilities.not_releasable_reason is not None:\n        raise",
            "    if False:\n        raise",
            "a model that must not leave is used",
        ),
    ),
    *group(
        "dpdist/publishing.py",
        ANSWERS,
        (
            'raise UserError(f"{facts.folder.path}: {reason}")',
            "pass",
            "a model that must not leave is released",
        ),
    ),
    *group(
        "dpdist/training/job.py",
        VOTES,
        (
            "if named.used_for_training:",
            "if False:",
            "a student is scored on inputs that it was taught",
        ),
    ),
    *group(
        "dpdist/methods/pate.py",
        VOTES,
        (
            'noisy = add_noise(most, derive_key(key, "threshold"), paid.screen_noise)',
            "noisy = most",
            "thresholds have no noise",
        ),
        (
            'counts = add_noise(votes[asked], derive_key(key, "answer"), paid.vote_noise)',
            "counts = votes[asked]",
            "votes have no noise",
        ),
        (
            'derive_key(key, "answer"), paid.vote_noise)',
            'derive_key(key, "threshold"), paid.vote_noise)',
            "thresholds and answers have one noise",
        ),
        (
            'derive_key(key, "answer"), paid.vote_noise)',
            'derive_key(key, "answer"), paid.vote_noise / 2)',
            "votes have half the noise",
        ),
        (
            "model.pretrained_part not in (None, student.pretrained_part)",
            "model.pretrained_part not in (None, model.pretrained_part)",
            "teachers begin with weights that nobody held against the records",
        ),
        ("asked = passed[: paid.answers]", "asked = passed", "the cap on answers is ignored"),
        (
            "noisy >= self.method.threshold",
            "noisy >= 0 * self.method.threshold",
            "every input passes",
        ),
        (
            "        if not isinstance(records, LabelledQueries):\n            raise",
            "        if False:\n            raise",
            "the student may be trained on the records",
        ),
        (
            "choices = predicted_classes(torch.from_numpy(scores)).numpy() + 1",
            "choices = predicted_classes(torch.from_numpy(np.concatenate([scores] * 2))).numpy() + 1",
            "a teacher has two votes",
        ),
        (
            "told = run.release_once(\n            votes.tobytes(), lambda key",
            "told = run.release_once(b'votes', lambda key",
            "other votes are taken for those that were released",
        ),
        (
            "job.plan.records,\n            )",
            "len(job.records_without_canaries()),\n            )",
            "the student tells how many records there are",
        ),
    ),
    *group(
        "dpdist/methods/pate.py",
        SPREAD,
        (
            "spread(asked, labels[answered], own.classes)",
            "public.targets(slice(0, len(public))).numpy()",
            "a student learns from labels that nobody released",
        ),
        (
            "spread(asked, labels[answered], own.classes)",
            "spread(asked, votes[asked].argmax(axis=1), own.classes)",
            "votes without noise spread",
        ),
        (
            "asked = np.flatnonzero(answered)",
            "asked = np.arange(answered.sum())",
            "answers are taken for those of other inputs",
        ),
    ),
    *group(
        "dpdist/methods/pate.py",
        SPREAD,
        ("- alpha * graph", "- graph", "how far labels spread is not what the recipe says"),
        (
            "(one_way + one_way.T) / 2",
            "one_way",
            "ties go one way only",
        ),
        (
            "np.where(scores.max(axis=1) > 0, scores.argmax(axis=1), -1)",
            "scores.argmax(axis=1)",
            "what no label reaches gets the first class",
        ),
    ),
    *group(
        "dpdist/privacy/phases.py",
        f"privacy/test_votes {VOTES}",
        (
            "math.sqrt(2 * self.answers / (1 - self.screening))",
            "math.sqrt(self.answers / (1 - self.screening))",
            "a vote that moves changes one count",
        ),
        (
            "math.sqrt(2 * self.answers / (1 - self.screening))",
            "math.sqrt(2 * self.answers)",
            "thresholds are not paid for",
        ),
        (
            "self.noise_multiplier * math.sqrt(self.queries / self.screening)",
            "self.noise_multiplier * math.sqrt(self.answers / self.screening)",
            "only what passes pays for its threshold",
        ),
        (
            "        return isinstance(other, NoisyVotes) and self.noise_multiplier >= other.noise_multiplier",
            "        return isinstance(other, NoisyVotes) and self.answers <= other.answers",
            "fewer answers may have less noise",
        ),
    ),
    *group(
        "dpdist/privacy/phases.py",
        f"privacy/test_votes {VOTES}",
        (
            "        return (self,)\n",
            "        return (self,) * bool(steps)\n",
            "votes cost nothing before the first step",
        ),
    ),
    *group(
        "dpdist/training/ensembles.py",
        VOTES,
        (
            "                ledger.record_query(question, plan)\n",
            "                pass\n",
            "votes are not counted before their noise",
        ),
        (
            "        if nonce is None:\n",
            "        if True:\n",
            "a crash spends the votes",
        ),
        (
            '"released", plan.fingerprint(), about_id, *labels)',
            '"released", plan.fingerprint())',
            "other votes have the noise of the first",
        ),
        (
            '"released", plan.fingerprint(), about_id, *labels)',
            '"released", about_id)',
            "votes under another plan have the noise of the first",
        ),
    ),
    *group(
        "dpdist/training/worker.py",
        VOTES,
        (
            "records = job.records()",
            "records = job.records_without_canaries()",
            "a student is given the records",
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
        (
            "np.minimum(1.0, self.norm * (1 - 1e-9) / np.maximum(norms, 1e-300))",
            "1.0",
            "inputs are not clipped",
        ),
        (
            "kept = 1 / (1 + others * math.exp(-self.label_epsilon))",
            "kept = 1 / (1 + math.exp(-self.label_epsilon))",
            "labels are kept too often",
        ),
    ),
    *group(
        "dpdist/privacy/phases.py",
        NOISY,
        (
            "2 / (math.exp(self.label_epsilon) + 1)",
            "4 / (math.exp(self.label_epsilon) + 3)",
            "labels cost less than they may tell",
        ),
        (
            "        return (self,)\n",
            "        return (self,) * bool(steps)\n",
            "records cost nothing before the first step",
        ),
    ),
    *group(
        "dpdist/training/worker.py",
        NOISY,
        (
            "seen = execution.transform_records(records, plan, attempt.records_key(job, reducer, key))",
            "seen = records",
            "the steps see the records",
        ),
    ),
]
