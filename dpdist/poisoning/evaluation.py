"""The evaluation of poisoning: many models of one recipe vote, and their votes are certified.

Training leaves out records whose input is a test input: a run that refused them instead could be
stopped by inserting one. The votes of private models are private: all of them together cost the
sum of their trainings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dpdist.certification.evaluation import EvaluatedModel, Evaluation
from dpdist.core.errors import UserError
from dpdist.core.fields import Count, HexKey, InputSelection, ModelCount, Positive, Rule
from dpdist.poisoning.certificates import MOST_VOTES, TABLE, Votes, read_votes
from dpdist.privacy.plan import PrivacyPlan
from dpdist.runs.recipe import Recipe, resolve_recipe

if TYPE_CHECKING:
    from dpdist.poisoning.job import VotingJob


class Poisoning(InputSelection, Evaluation):
    """Votes of many models of a recipe on test inputs.

    models: their number. partitions: plain models on disjoint shards of the records, instead of
    private ones on all of them (deep partition aggregation; Levine and Feizi, ICLR 2021). bag:
    plain models, each on this number of records drawn at random (`dpdist.poisoning.certificates`).
    sigma: standard deviation of Gaussian noise on the input of every vote; None: as the models
    answer. seed: of all keys (64 hex digits); None draws a secret one.
    """

    models: ModelCount = 66
    partitions: bool = False
    sigma: Positive | None = None
    seed: HexKey | None = None
    bag: Count | None = None

    name: ClassVar[str] = "poisoning"
    file: ClassVar[str] = TABLE
    private: ClassVar[bool] = True
    needs_trained_model: ClassVar[bool] = False
    progress_unit: ClassVar[str] = "models"

    def rules(self) -> Iterator[Rule]:
        drawn = "must be left out with partitions, which draw nothing at random"
        yield Rule(self.partitions and self.sigma is not None, drawn, "sigma")
        yield Rule(self.partitions and self.bag is not None, drawn, "bag")

    @property
    def folder_name(self) -> str:
        kind = "partitions" if self.partitions else "models"
        if self.bag is not None:
            kind = f"bags-of-{self.bag}"
        noise = "" if self.sigma is None else f"-sigma-{self.sigma:g}"
        share = f"-every-{self.every}" if self.every > 1 else ""
        return f"{self.name}-{kind}-{self.models}{noise}{share}"

    def choose_inputs(self, count: int, name: str) -> range:
        """Return which of `count` test inputs of recipe `name` are voted on.

        Raises UserError for an empty choice, or for more votes than readers accept.
        """
        indices = self.indices(count)
        if not indices:
            raise UserError(f"{name}: no test input is chosen, of {count:,}")
        if self.models * len(indices) > MOST_VOTES:
            raise UserError(
                f"--set models, max_inputs: at most {MOST_VOTES:,} votes are kept, got "
                f"{self.models:,} models on {len(indices):,} inputs; take fewer of either"
            )
        return indices

    def data_recipe(self, recipe: Recipe) -> Recipe:
        """Return the recipe that is trained, which leaves test records out.

        Raises UserError if it cannot.
        """
        if recipe.data.drop_test_records:
            return recipe
        try:
            return resolve_recipe(recipe, changes={"data.drop_test_records": True})
        except UserError as error:
            raise UserError(
                f"{recipe.name}: nothing can be certified: one inserted copy of a test input stops "
                f"its training, which cannot omit such records ({error})",
                see="explanation/poisoning.md#what-stops-a-training",
            ) from None

    def training_plan(self, recipe: Recipe, records: int) -> tuple[Recipe, PrivacyPlan]:
        """Return recipe and plan of every model; with partitions, of one of average size.

        records: their number. Raises UserError for a recipe whose models cannot be trained one by
        one.
        """
        from dpdist.runs.recipe import make_plan, refuse_answers, training_only, without_privacy
        from dpdist.training.ensembles import plan_of_shard, refuse_ensemble

        recipe = self.data_recipe(recipe)
        refuse_ensemble(recipe, "nothing to vote")
        if self.bag is not None and self.bag > records:
            raise UserError(f"--set bag: {recipe.name} has {records:,} records, got {self.bag}")
        if self.partitions or self.bag is not None:
            plain = without_privacy(recipe)
            return plain, plan_of_shard(plain, self.bag or max(1, records // self.models))[1]
        alone = training_only(recipe)
        plan = make_plan(alone, records, recipe.name)
        refuse_answers(plan, recipe.name)
        return alone, plan

    def job_spec(self, subject: EvaluatedModel) -> VotingJob:
        """Return the job. Raises UserError for a recipe whose models cannot vote."""
        from dpdist.poisoning.job import VoterSetup, VotingJob

        records, test = subject.load_training_data(), subject.test_data
        asked = self.data_recipe(subject.recipe)
        recipe, plan = self.training_plan(asked, len(records))
        indices = self.choose_inputs(len(test), recipe.name)
        wanted = {
            "data": records.fingerprint,
            "test": test.fingerprint,
            "plan": plan.fingerprint(),
            "settings": {
                "models": self.models,
                "partitions": self.partitions,
                "sigma": self.sigma,
                "inputs": [indices.start, indices.stop, indices.step],
                "seed_given": self.seed is not None,
                **({} if self.bag is None else {"bag": self.bag}),
                **asked.experiment_settings,
            },
        }
        labels = np.asarray(test.labels)[np.array(indices)]

        setup = VoterSetup(
            recipe, plan, b"", self.models, self.partitions, self.sigma, indices, self.bag
        )
        return VotingJob(wanted, self.seed, setup, labels)

    @classmethod
    def read(cls, path: Path) -> Votes:
        return read_votes(path)

    @classmethod
    def summary_rows(cls, results: Sequence[Any]) -> list[tuple[str, str]]:
        """Return no rows: the results are private."""
        return []
